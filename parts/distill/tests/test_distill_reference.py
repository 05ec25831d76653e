"""distill.py learns as its formulas say, in the updates of tests/reference.py."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import test_reference
from parts.distill import distill
from parts.distill.teacher import TaughtRow
from reference import (
    Completion,
    Model,
    before_update,
    mean,
    minibatches,
    policy_metrics,
    update_policy,
)
from reference_settings import BOUNDS, PROMPT, SAMPLED, TIGHT, TWICE, VOCAB, Setting, drawn
from test_reference import differences, every_pair, outcomes

folder, right = test_reference.folder, test_reference.right
CHOICES = SAMPLED | {
    "teacher": ("x",), "divergence": ("none", "reverse_kl", "forward_kl", "jsd"),
    "distill_coef": (1.0, 0.3), "reward": (("exact",),), "reward_coef": (0.0, 2.0),
    "head_chunk": (2048, 5)}


def divergence(kind: str, logp, logq):
    """Of π from π_T at each token: log-probs (n, V) of the whole vocabulary → (n,).

        reverse_kl  Σ_v π log (π / π_T)        forward_kl  Σ_v π_T log (π_T / π)
        jsd         half of KL(π ‖ m) + KL(π_T ‖ m), m = (π + π_T) / 2
    """
    p, q = logp.exp(), logq.exp()
    logm = ((p + q) / 2).log()
    return {"reverse_kl": p * (logp - logq), "forward_kl": q * (logq - logp),
            "jsd": (p * (logp - logm) + q * (logq - logm)) / 2}[kind].sum(-1)


def distill_advantages(args, step, teacher: list[list[float]]) -> list[list[float]]:
    """c (log π_T - log π_old) of each token, without --divergence; plus the reward's advantage,
    w (R - mean of the group), where there are two scored ones."""
    found, rewards = [], [c.reward for c in step.completions]
    for i, (reward, old) in enumerate(zip(rewards, step.old, strict=True)):
        A, first = [0.0] * len(old), i - i % args.group
        if args.divergence == "none":
            A = [args.distill_coef * (b - a) for a, b in zip(old, teacher[i], strict=True)]
        group = [R for R in rewards[first:first + args.group] if R is not None]
        if args.reward_coef and reward is not None:
            A = [a + args.reward_coef * (reward - mean(group)) for a in A]
        found.append(A)
    return found


def learned(args, policy: Model, teacher: Model, completions: list[Completion],
            seen: list[Completion], lr: float) -> dict[str, float]:
    """One step of distill.py → metrics. seen: the completions behind the teacher's prompts."""
    step = before_update(policy, teacher, completions, ["trained"] * len(completions))
    with torch.no_grad():
        step.ref = [teacher.logprobs(c)[0].tolist() for c in seen]
        theirs = [teacher.distributions(c) for c in seen]  # (n, V) each

    def beside(i: int) -> list[tuple[dict, float]]:
        """c times the divergence at each token."""
        found = [{"policy/teacher_kl": kl} for kl in step.kl(i)]
        if args.divergence == "none":
            return [(one, 0.0) for one in found]
        apart = divergence(args.divergence, policy.distributions(completions[i]), theirs[i])
        return [(one | {"loss/divergence": x}, args.distill_coef * x)
                for one, x in zip(found, apart, strict=True)]

    step.advantages, terms = distill_advantages(args, step, step.ref), []
    norms = [update_policy(args, policy, step, rows, lr, terms, beside=beside)
             for rows in minibatches(args, step)]
    metrics = policy_metrics(args, step, terms, norms)
    return {name: value for name, value in metrics.items() if "dropped" not in name} | {"lr": lr}


class Taught(Setting):
    """With --teacher_prompt the teacher has another prompt: also where two rows have the same one.
    """
    scripts = {"distill": distill}

    @property
    def teaches(self):
        return "teacher" in self.flags

    @property
    def before(self):
        return "policy" if "lora_rank" in self.flags and not self.teaches else "start"

    def model(self, lm, args, head=None, adapted=True):
        if not adapted or "lora_rank" not in self.flags:
            return super().model(lm, args, head, adapted)
        from parts.lora.tests.lora_reference import Model as Adapted
        return Adapted(lm, args, head)

    def samples(self, step):
        found, rng = super().samples(step), np.random.default_rng(step)
        for i, sample in enumerate(found if "teacher_prompt" in self.flags else ()):
            if i % self.group == 0:
                row = TaughtRow(**vars(sample.prompt.row),
                                teacher_ids=rng.integers(0, VOCAB, PROMPT).tolist())
            sample.prompt = sample.prompt._replace(row=row)
        return found

    def learn(self, args, models, samples, completions, lr, kl_coef):
        policy, _, teacher = models
        seen = [replace(c, prompt=getattr(s.prompt.row, "teacher_ids", c.prompt))
                for s, c in zip(samples, completions, strict=True)]
        return learned(args, policy, teacher, completions, seen, lr)


HINT = "teacher_prompt={question} {answer}"
SETTINGS = [Taught(f"distill {words}") for words in (
    "group=3 steps=2 teacher=x",
    f"group=3 steps=1 teacher=x distill_coef=0.3 temperature=0.7 {TWICE}",
    f"group=3 steps=1 teacher=x divergence=jsd distill_coef=0.5 head_chunk=5 {TWICE}",
    "group=3 steps=1 teacher=x divergence=none temperature=1.5 reward=('exact',) "
    f"reward_coef=2.0 {TIGHT}",
    f"group=1 steps=1 teacher=x dual_clip=1.1 aggregation=sequence {TIGHT}",
    f"group=3 steps=2 divergence=none {HINT}",
    f"group=3 steps=2 divergence=forward_kl head_chunk=7 {HINT}",
    "group=3 steps=2 teacher=x engine_correction=truncate reward=('exact',) reward_coef=2.0 "
    f"{BOUNDS}",
    "group=3 steps=1 teacher=x divergence=reverse_kl temperature=1.5 reward=('exact',) "
    f"reward_coef=2.0 {TIGHT}")]


@pytest.fixture(scope="module")
def shipped(folder):
    return outcomes(folder, dict(enumerate(SETTINGS)))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))


def test_with_adapters_learn_is_the_reference(folder, right):
    """Without a teacher's files the teacher is the policy without its adapters."""
    pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    one = Taught(f"distill group=3 steps=1 divergence=none lora_rank=2 aggregation=prompt {HINT} "
                 f"{TWICE}")
    assert not differences(outcomes(folder, {0: one})[0], right(one, 0))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_pair_of_flags_on_any_ranks(size, folder, right):
    every_pair(drawn("distill", CHOICES, Taught), size, folder, right)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_pair_of_flags_with_adapters(size, folder, right):
    pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    every_pair(drawn("distill", CHOICES | {"lora_rank": (2,)}, Taught), size, folder, right)
