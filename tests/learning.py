"""Fabricated samples, a random model of two layers, and one call of the shipped `grpo.learn` on it: what the layout tests share."""
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

import data
import grpo
import model
import plan
import rewards
from batch import Batch, Completion
from run import DTYPES, Sample

VOCAB, GROUP, PROMPT, COMPLETION = 64, 4, 8, 24
LONGEST = PROMPT + COMPLETION
LAYOUT_METRICS = ("batch/pad_frac",)        # the only metrics that may say something about ranks and budgets


@dataclass(frozen=True)
class Case:
    """One setting of the product, and the samples it learns from (the same for all cases with the same `samples` and `prompts`)."""
    prompts: int
    args: tuple[tuple[str, object], ...] = ()
    samples: str = "mixed"
    tied: bool = True
    dtype: str = "float64"
    steps: int = 1
    shard_size: int = 0

    @property
    def options(self) -> dict:
        return dict(self.args)


@dataclass
class Outcome:
    """What one call of learn did: the gradient of every optimizer step, the update and the parameters after it, the metrics."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    metrics: list[dict] = field(default_factory=list)
    micros: list[tuple] = field(default_factory=list)       # (phase, budget, rows and padded tokens of each micro-batch)


def make_models(world, folder: str) -> None:
    """A tied and an untied random Qwen2 of 2 layers, hidden 32, in float64: FOLDER/tied and FOLDER/untied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    for tied in (True, False):
        torch.manual_seed(1 + tied)
        lm = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.15, bos_token_id=None, eos_token_id=None))
        lm.double().save_pretrained(f"{folder}/{'tied' if tied else 'untied'}")


def fabricate(kind: str, prompts: int, group: int = GROUP, seed: int = 0) -> list[Sample]:
    """`prompts` groups of samples of very different lengths, some cut at the limit; kind "mixed": equal rewards and unscored ones too."""
    rng, samples = random.Random(f"{kind} {prompts} {seed}"), []
    for p in range(prompts):
        ids = [rng.randrange(VOCAB) for _ in range(PROMPT if p == 0 else rng.randint(1, PROMPT))]
        row = data.Row(p, "q", ids, "a", {}, "made up")
        for g in range(group):
            length = COMPLETION if (p, g) == (0, 1) else min(COMPLETION, 1 + int(rng.expovariate(1 / 5)))
            reward = rng.choice([0.0, 0.25, 1.0])
            if kind == "mixed":
                if p % 4 == 1:
                    reward = 0.5                        # a group without any difference
                if p % 4 == 2 and g > 0 or (p, g) == (0, 3):
                    reward = None                       # a group with a single scored completion; a lone unscored one
            elif kind == "unscored":
                reward = None
            completion = Completion(np.array([rng.randrange(VOCAB) for _ in range(length)], np.int32),
                                    np.array([-4.2 + 0.3 * rng.gauss(0, 1) for _ in range(length)], np.float32), length == COMPLETION)
            samples.append(Sample(data.Prompt(p, row), completion, "t", rewards.Score(reward, {"exact": reward}, None)))
    return samples


def arguments(**options) -> grpo.Args:
    """Args with these, for a model that takes LONGEST tokens; budgets so large that all fits in one micro-batch."""
    return grpo.Args(**{"group": GROUP, "max_prompt_tokens": PROMPT, "max_tokens": COMPLETION, "update_tokens": 1 << 20,
                        "score_tokens": 1 << 20, "lr": 3e-3} | options)


class Spy(model.Policy):
    """The shipped policy that keeps the whole gradient of each optimizer step, as every rank sees it."""

    def step(self, lr):
        flat = [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).flatten() for p in self.module.parameters()]
        self.gradients.append(torch.cat(flat).double())
        return super().step(lr)

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().full_tensor().flatten() for p in self.module.parameters()]).double()


def learn_all(world, folder: str, cases: list[Case]) -> list[Outcome]:
    """One `Outcome` a case, in order, in one process group."""
    built, outcomes, real_micros = {}, [], Batch.micros
    for case in cases:
        key = case.tied, case.dtype, case.shard_size
        source = f"{folder}/{'tied' if case.tied else 'untied'}"
        make = lambda: model.build(model.Scorer, source, world, compute=DTYPES[case.dtype], shard_size=case.shard_size % (world.size + 1))
        if key not in built:
            built[key] = make(), {}
            built[key][1].update({n: p.detach().full_tensor().clone() for n, p in built[key][0].named_parameters()})
        module, initial = built[key]
        for name, p in module.named_parameters():
            model.put(p, initial[name])
        args, outcome = arguments(**case.options), Outcome()
        optimizer = dict(betas=args.betas, weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm)
        policy = Spy(module, world, **optimizer)
        policy.gradients = outcome.gradients
        reference = None
        if plan.needs_reference(args):                   # not quite the policy, or every KL would be 0
            if ("reference", *key) not in built:
                built["reference", *key] = make()
            reference = model.Policy(built["reference", *key], world, **optimizer)
            for name, p in reference.module.named_parameters():
                generator = torch.Generator().manual_seed(len(name))
                model.put(p, initial[name] * (1 + 0.05 * torch.randn(initial[name].shape, generator=generator, dtype=torch.float64)))

        def micros(self, world, rows, budget, phase, step):
            made = real_micros(self, world, rows, budget, phase, step)
            outcome.micros.append((phase, budget, [(tuple(m.rows), m.ids.numel()) for m in made]))
            return made

        outcome.before = policy.flat()
        Batch.micros = micros
        try:
            for step in range(case.steps):
                samples = [] if case.samples == "none" else fabricate(case.samples, case.prompts, args.group, seed=step)
                outcome.metrics.append(grpo.learn(args, world, policy, reference, samples, step, args.lr, Counter()))
        finally:
            Batch.micros = real_micros
        outcome.after = policy.flat()
        outcomes.append(outcome)
    return outcomes


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖; 0 where both are 0."""
    return float((a - b).norm() / b.norm()) if b.norm() > 0 else float(a.norm())
