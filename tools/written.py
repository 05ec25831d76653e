"""tools/written.py: a step as tests/reference.py writes it, from the papers, for prove.py.

The reference has no batch, and nothing of losses.py: one completion at a time, one token at a time.
Here it learns with the shipped models, so all that may differ is what `learn` and the shipped step
make of them.
"""
import sys

import numpy as np
import torch

from batch import Batch, MicroBatch, Sample
from tools import uphill
from worker import ROOT

sys.path.append(str(ROOT / "tests"))
import reference as papers

# What the reference has, of the flags that choose a formula.
KNOWN = {
    "loss": "clip gspo cispo reinforce",
    "advantage": "dr_grpo grpo rloo reinforce++ reinforce++-baseline",
    "kl_estimator": "k1 k2 k3 k3_ratio",
    "aggregation": "token sequence constant prompt",
    "engine_correction": "none truncate mask sequence_truncate sequence_mask sequence_mean"}


def why_not(args) -> str:
    """Why a script's step is not written there. "": it is."""
    if why := uphill.why_not(args):
        return why
    if own := uphill.own_flags(args):
        return f"it has --{', --'.join(own)}"
    unknown = [f"--{flag} {vars(args)[flag]}" for flag, names in KNOWN.items()
               if flag in vars(args) and vars(args)[flag] not in names.split()]
    return f"tests/reference.py has no {', '.join(unknown)}" if unknown else ""


def plainly(sample: Sample) -> papers.Completion:
    """The same for the reference. Its rewards are exact: it has no equality up to rounding."""
    reward, *parts = (x if x is None else round(x, 9) for x in (
        sample.reward, *sample.rewards.values()))
    return papers.Completion(
        sample.prompt.row.prompt_ids, sample.ids.tolist(), sample.sampled.tolist(),
        sample.logprobs[sample.sampled].tolist(), sample.truncated,
        reward, dict(zip(sample.rewards, parts, strict=True)),
        [turn["paid"] for turn in sample.turns],
        np.random.default_rng([sample.prompt.position, *sample.ids.tolist()]).random(
            sample.tokens).tolist())


class Plain:
    """A shipped policy or critic with the methods of reference.Model that compute."""

    def __init__(self, args, one, micros: dict):
        """micros: {id of a completion: it alone as a micro-batch}."""
        self.args, self.one, self.micros = args, one, micros

    def logprobs(self, completion):
        return self.one.logprobs(self.micros[id(completion)], self.args.temperature, True)

    def values(self, completion):
        return self.one.values(self.micros[id(completion)])


class Learner(Plain):
    """One that learns, with the reference's clipping and AdamW in the place of its own."""
    step = papers.Model.step

    def __init__(self, args, one, micros: dict):
        super().__init__(args, one, micros)
        self.trained, self.gradients = one.parameters, []
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), betas=args.betas, weight_decay=args.weight_decay)


def learn(args, world, models, samples, *, lr, reference=None, critic_lr=0.0, kl_coef=0.0):
    """`learn` of grpo.py, or with a critic of ppo.py."""
    batch, completions = Batch(samples), [*map(plainly, samples)]
    micros = {id(one): MicroBatch(batch, [i], world.device) for i, one in enumerate(completions)}
    before = reference and Plain(args, reference, micros)
    if not args.needs_critic:
        return papers.grpo(args, Learner(args, models, micros), before, completions, lr)
    policy, critic = (Learner(args, one, micros) for one in models)
    return papers.ppo(args, policy, critic, before, completions, lr, critic_lr, kl_coef)
