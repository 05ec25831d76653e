"""tools/hostile.py: small random models, and samples that are easy to learn from in a wrong way."""
import random
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

import data
from preflight.inputs import is_tiny
from rewards import Score, parse
from trainer import weights
from trainer.batch import Completion, Sample

VOCAB, PROMPT, LONGEST = 64, 8, 24  # ids; tokens of the longest prompt, of the longest completion
KINDS = ("plain", "equal rewards", "replies", "replies, one unscored", "one scored", "one token",
         "replies")  # of groups, in turn


def fabricate(args, seed: int) -> list[Sample]:
    """Two groups of each kind, or one where groups are larger than 1. In all kinds lengths differ.
    The first completion is truncated. Prompts repeat side by side (2, 3) and apart (0, 5)."""
    rng, samples, prompts, group = random.Random(seed), [], [], args.group
    names = [part.name for part in parse(list(args.reward))] if args.reward else []
    for p in range(len(KINDS) if group > 1 else 2 * len(KINDS)):
        length = PROMPT if p == 0 else rng.randint(1, PROMPT)
        prompts.append([rng.randrange(VOCAB) for _ in range(length)])
        if p in (3, 5):
            prompts[p] = prompts[{3: 2, 5: 0}[p]]
        row = data.Row(p, "", prompts[p], None, {}, "")
        for g in range(group):
            kind = KINDS[p % len(KINDS)]
            completion = complete(kind, rng, longest=p == g == 0)
            total = reward(kind, rng, g, group)
            score = Score(total, dict.fromkeys(names, total), None)
            samples.append(Sample(data.Prompt(p, row), completion, "", score))
    return samples


def complete(kind: str, rng: random.Random, longest: bool) -> Completion:
    """A completion of a kind of group. In replies many tokens inside are not sampled."""
    length = min(LONGEST, 1 + int(rng.expovariate(1 / 5)))
    if kind == "one token":
        length = 1
    if longest:
        length = LONGEST
    sampled = np.ones(length, bool)
    if kind.startswith("replies"):
        sampled[1:-1] = [rng.random() < 0.5 for _ in sampled[1:-1]]
    ids = np.array([rng.randrange(VOCAB) for _ in sampled], np.int32)
    logprobs = np.array([rng.gauss(-4.2, 0.3) for _ in sampled], np.float32)
    return Completion(ids, logprobs * sampled, length == LONGEST, sampled)


def reward(kind: str, rng: random.Random, g: int, group: int) -> float | None:
    """Of completion g of a group of this kind. None: it could not be scored."""
    if kind == "equal rewards":
        return 0.5
    if kind == "one scored" and g > 0 or kind.endswith("one unscored") and g == group - 1:
        return None
    return rng.random()


def without_loss(sample: Sample, args) -> Sample:
    """Unscored. What is learned without a reward has no token to learn."""
    done = sample.completion
    if not args.needs_reward:
        return replace(sample, completion=replace(done, sampled=np.zeros(len(done.ids), bool)))
    return replace(sample, score=rescored(sample.score, None))


def rescored(score: Score, total: float | None) -> Score:
    return Score(total, dict.fromkeys(score.parts, total), None)


def altered(samples: list[Sample], seed: int) -> list[Sample]:
    """With other tokens and higher rewards. Lengths stay, and rewards that are equal stay equal."""
    rng, others, found = random.Random(seed), {}, []
    for sample in samples:
        old, total = sample.completion, sample.score.total
        ids = np.array([rng.randrange(VOCAB) for _ in old.ids], np.int32)
        if total is not None:
            total = others.setdefault(total, rng.random() + 2)
        found.append(replace(sample, completion=replace(old, ids=ids),
                             score=rescored(sample.score, total)))
    return found


def make_models(name: str, folder: str) -> None:
    """Random models of the family of --model: FOLDER/model, and FOLDER/reference near it."""
    config = AutoConfig.for_model("qwen2", tie_word_embeddings=True)
    if not is_tiny(name):
        config = weights.config_of(name)
    shrink(config)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for place, noise in (("model", 0.1), ("reference", 0.01)):  # norms and biases move too
        with torch.no_grad():
            for p in lm.parameters():
                p += noise * torch.randn_like(p)
        lm.save_pretrained(f"{folder}/{place}")


def shrink(config) -> None:
    """Two layers and small sizes; what makes the family stays."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", heads) < heads
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:  # one entry a layer: keep two kinds
            kinds = list(dict.fromkeys(value))
            setattr(config, key, [kinds[0], kinds[-1]])
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1 if shared else 2, head_dim=32,
                 sliding_window=16)
    for key, value in sizes.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
