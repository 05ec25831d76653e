"""Made-up samples, a random model of two layers, and the shipped `grpo.learn`: for layout tests."""
import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

import data
import grpo
import model
import rewards
from batch import Batch, Completion, Sample
from settings import changed
from tools import float64

VOCAB, GROUP, PROMPT, COMPLETION = 64, 4, 8, 24
LONGEST = PROMPT + COMPLETION
SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.15,
             bos_token_id=None, eos_token_id=None)


@dataclass(frozen=True)
class Case:
    """One setting, and the samples it learns from (equal `samples` and `prompts`: equal ones)."""
    prompts: int
    args: tuple[tuple[str, object], ...] = ()
    samples: str = "mixed"
    tied: bool = True
    dtype: str = "float64"
    steps: int = 1
    shard_size: int = 0

    @property
    def source(self) -> str:
        """The folder of its model."""
        return "tied" if self.tied else "untied"

    def prepare(self, samples: list[Sample]) -> None:
        """What a part's tests put into them."""

    @property
    def options(self) -> dict:
        return dict(self.args)


@dataclass
class Outcome:
    """What one rank saw of a case. Tensors are its own shards; `whole` joins those of all ranks."""
    gradients: list[list[torch.Tensor]] = field(default_factory=list)  # [step][parameter]
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)
    micros: list[tuple] = field(default_factory=list)  # (phase, budget, [(rows, tokens) …])


def whole(shards: list[list[torch.Tensor]]) -> torch.Tensor:
    """[rank][parameter] → one flat vector: FSDP2 shards the first dimension, in rank order."""
    return torch.cat([torch.cat(parts).flatten() for parts in zip(*shards, strict=True)]).double()


def make_models(world, folder: str) -> None:
    """Random models of 2 layers in float64: FOLDER/tied and FOLDER/untied, of Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    for tied in (True, False):
        torch.manual_seed(1 + tied)
        lm = Qwen2ForCausalLM(Qwen2Config(
            **SIZES, intermediate_size=48, tie_word_embeddings=tied))
        lm.double().save_pretrained(f"{folder}/{'tied' if tied else 'untied'}")


def fabricate(kind: str, prompts: int, group: int = GROUP, seed: int = 0) -> list[Sample]:
    """`prompts` groups of samples of very different lengths, some cut at the limit.

    kind: "mixed" has groups of equal rewards, unscored completions and episodes of several turns
    too, "plain" none, "unscored" nothing else; in "equal" all have one reward; in "long" all are
    LONGEST.
    """
    rng, samples = random.Random(f"{kind} {prompts} {seed}"), []
    for p in range(prompts):
        length = PROMPT if kind == "long" or p == 0 else rng.randint(1, PROMPT)
        row = data.Row(p, "q", [rng.randrange(VOCAB) for _ in range(length)], "a", {}, "made up")
        for g in range(group):
            longest = kind == "long" or (p, g) == (0, 1)
            length = COMPLETION if longest else min(COMPLETION, 1 + int(rng.expovariate(1 / 5)))
            reward = round(rng.random(), 2)
            if kind == "mixed":
                if p % 4 == 1:
                    reward = 0.5  # a group without any difference
                if p % 4 == 2 and g > 0 or (p, g) == (0, 3):
                    reward = None  # a group with one scored; one unscored
            elif kind in ("unscored", "equal"):
                reward = None if kind == "unscored" else 1.0
            ids = np.array([rng.randrange(VOCAB) for _ in range(length)], np.int32)
            logprobs = np.array([-4.2 + 0.3 * rng.gauss(0, 1) for _ in range(length)], np.float32)
            sampled = np.ones(length, bool)
            if kind == "mixed" and g % 2:  # replies: ids that nobody sampled
                holes = np.random.default_rng(len(samples)).random(max(0, length - 2)) < 0.5
                sampled[1:-1] = holes
            samples.append(Sample(
                data.Prompt(p, row), Completion(ids, logprobs * sampled, longest, sampled), "t",
                rewards.Score(reward, {"exact": reward}, None)))
    return samples


def arguments(script=grpo, **options):
    """Args of a script for a model that takes LONGEST tokens, with these flags.

    The budgets are so large that all fits in one micro-batch.
    """
    args = script.Args(group=GROUP, max_tokens=COMPLETION, update_tokens=1 << 20,
                       score_tokens=1 << 20, lr=1e-3)
    return changed(args, **{"max_prompt_tokens": PROMPT} | options)


def sample(prompt: data.Row | list[int], completion: np.ndarray) -> Sample:
    """Of a row, or of one with these ids, with log-probs of 0."""
    row = data.Row(0, "", prompt, None, {}, "") if isinstance(prompt, list) else prompt
    return Sample(data.Prompt(0, row), Completion(
        completion.astype(np.int32), np.zeros(len(completion), np.float32), False), "",
        rewards.Score(0.0, {}, None))


class Spy(model.Policy):
    """The shipped policy, which keeps the gradient of each optimizer step."""

    def step(self, lr):
        self.gradients.append([p.grad.to_local().clone() for p in self.parameters.values()])
        return super().step(lr)

    def shards(self) -> list[torch.Tensor]:
        self.module.reshard()  # after a forward without backward, the root is whole
        return [p.detach().to_local().clone() for p in self.module.parameters()]


def reset(module, folder: str, noise: float = 0.0) -> None:
    """The folder's weights into the sharded module; with noise a model nearby, on any ranks."""
    module.reshard()
    for name, p in module.named_parameters():
        if folder not in WEIGHTS:
            lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            WEIGHTS[folder] = lm.state_dict()
        generator = torch.Generator().manual_seed(len(name))
        short = name.removeprefix("lm.")
        if short not in WEIGHTS[folder]:  # what a part adds; no zeros: every gradient counts
            WEIGHTS[folder][short] = torch.randn(p.shape, generator=generator).double() / 10
        full = WEIGHTS[folder][short]
        noises = torch.randn(full.shape, generator=generator, dtype=torch.float64)
        full = (full * (1 + noise * noises)).to(p.dtype)
        with torch.no_grad():
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))


WEIGHTS: dict[str, dict[str, torch.Tensor]] = {}


def learn_all(world, folder: str, cases: list[Case]) -> list[Outcome]:
    """One `Outcome` a case, in order, in one process group."""
    built, outcomes, real_micros = {}, [], Batch.micros
    for case in cases:
        source = f"{folder}/{case.source}"
        args = arguments(**case.options, dtype=case.dtype, shard_size=case.shard_size)
        outcome = Outcome()

        def load(module, args):
            return model.Policy(module("reference", 0.05), world, args)

        def module(kind: str, noise: float, case=case, source=source, args=args):
            key = kind, case.source, case.dtype, case.shard_size, (
                str(args.parts), args.model_args.checkpointing)
            if key not in built:
                adapted = model.kinds(args, model.config_of(source)).logprob_model
                plain = kind == "reference"
                built[key] = float64.build(model.LogprobModel if plain else adapted, source, world,
                                           args)
            reset(built[key], source, noise)
            return built[key]

        reference = None
        base = model.kinds(args, model.config_of(source)).policy
        policy = type("Spied", (Spy, base), {})(module("policy", 0.0), world, args)
        policy.gradients = outcome.gradients
        if args.needs_reference:
            reference = policy.reference(partial(load, module, args))

        def micros(self, world, rows, budget, phase, outcome=outcome):
            made = real_micros(self, world, rows, budget, phase)
            sizes = [(tuple(m.rows), m.tokens) for m in made]
            outcome.micros.append((phase, budget, sizes))
            return made

        outcome.before = policy.shards()
        Batch.micros = micros
        try:
            for step in range(case.steps):
                samples = [] if case.samples == "none" else fabricate(
                    case.samples, case.prompts, args.group, seed=step)
                case.prepare(samples)
                outcome.metrics.append(grpo.learn(args, world, policy, samples, lr=args.lr,
                                                  reference=reference))
        finally:
            Batch.micros = real_micros
        outcome.after = policy.shards()
        outcomes.append(outcome)
    return outcomes


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖; ‖a‖ where b is 0."""
    return float((a - b).norm() / b.norm()) if b.norm() > 0 else float(a.norm())


def begin_with(tokenizer, token: str) -> None:
    """From now on it puts `token` before each text, unless add_special_tokens is False."""
    ids = [(token, tokenizer.convert_tokens_to_ids(token))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=ids)
