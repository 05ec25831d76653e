"""Made-up samples, random models of two layers, and flags for them."""
import random
from dataclasses import replace

import numpy as np
import torch

import data
import grpo
from batch import Sample
from tools import float64

VOCAB, GROUP, PROMPT, COMPLETION = 64, 4, 8, 24
LONGEST = PROMPT + COMPLETION
SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.15,
             bos_token_id=None, eos_token_id=None)


def make_models(world, folder: str) -> None:
    """A random Qwen2 of 2 layers in float64, with a tied head: FOLDER/tied."""
    float64.make(f"{folder}/tied", VOCAB)


def fabricate(kind: str, prompts: int, group: int = GROUP, seed: int = 0) -> list[Sample]:
    """Groups that a mistake may confuse, in request order; lengths are very different, some are cut
    at the limit, one is LONGEST.

    kind: in "plain" all have a reward. In "mixed" 0 and 5 have one prompt, 3 and 4 too; the rewards
    of 1 are equal but for rounding, 2 has one scored completion, and 5 none in its first half;
    every second completion has replies: ids that nobody sampled. "binary" is the same with rewards
    0 and 1. In "equal" all have one reward, in "unscored" none has one; in "long" all are LONGEST.
    """
    rng, samples, prompt_ids = random.Random(f"{kind} {prompts} {seed}"), [], []
    special = kind in ("mixed", "binary")
    for p in range(prompts):
        length = PROMPT if kind == "long" or p == 0 else rng.randint(1, PROMPT)
        prompt_ids.append([rng.randrange(VOCAB) for _ in range(length)])
        twin = {4: 3, 5: 0}.get(p, p) if special else p
        row = data.Row(p, "q", prompt_ids[twin], "a", {}, "made up")
        for g in range(group):
            longest = kind == "long" or (p, g) == (0, min(1, group - 1)) or special and p % 4 == 3
            length = COMPLETION if longest else min(COMPLETION, 1 + int(rng.expovariate(1 / 5)))
            reward = round(rng.random(), 2)
            if kind == "equal" or special and p == 1:
                reward = 0.3 if g % 2 else 0.1 + 0.2
            if kind == "binary":
                reward = float(reward > 0.75)
            if kind == "unscored" or special and (
                    p == 2 and g > 0 or p == 5 and g < group // 2 or group == 1 and p % 5 == 4):
                reward = None
            ids = np.array([rng.randrange(VOCAB) for _ in range(length)])
            logprobs = np.array([-4.2 + 0.3 * rng.gauss(0, 1) for _ in range(length)])
            sampled = np.ones(length, bool)
            if special and len(samples) % 2:
                holes = np.random.default_rng(len(samples)).random(max(0, length - 2)) < 0.5
                sampled[1:-1] = holes
            samples.append(sample(row, ids, reward, logprobs * sampled, longest, sampled))
    return samples


def arguments(script=grpo, **options):
    """Args of a script for a model that takes LONGEST tokens, with these flags.

    The budgets are so large that all fits in one micro-batch.
    """
    args = script.Args(group=GROUP, max_tokens=COMPLETION, update_tokens=1 << 20,
                       logprob_tokens=1 << 20, lr=1e-3)
    return replace(args, **{"max_prompt_tokens": PROMPT} | options)


def sample(prompt: data.Row | list[int], ids: np.ndarray, reward: float | None = 0.0,
           logprobs: np.ndarray | float = 0.0, truncated: bool = False,
           sampled: np.ndarray | None = None) -> Sample:
    """A completion of a row, or of one with these ids. "short" is a second reward."""
    row = data.Row(0, "", prompt, None, {}, "") if isinstance(prompt, list) else prompt
    short = None if reward is None else round(len(ids) * reward, 2) % 1
    return Sample(data.Prompt(row.index, row), ids.astype(np.int32),
                  (np.zeros(len(ids)) + logprobs).astype(np.float32), truncated, sampled, "t",
                  reward, {"exact": reward, "short": short})


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖; ‖a‖ where b is 0."""
    return float((a - b).norm() / b.norm()) if b.norm() > 0 else float(a.norm())
