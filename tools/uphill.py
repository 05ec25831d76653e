"""tools/uphill.py: the expected gradient of a whole step, on a policy small enough to enumerate.

The policy is a table of logits: π(token | token before it, position). Each of its probabilities is
1/2 or 1/4, so a batch that holds each completion as often as its probability says is the whole
distribution of a rollout, and so is one that holds each group. On such a batch the gradient of one
call of `learn` is its expectation. It is compared with

* what the flags state, assembled here: advantages, weights, loss, KL and entropy terms, at the
  weights of each update, with π_old from before the first one. Formulas are those of the flags, so
  this sees what `learn` makes of them, and not what is wrong in them;
* the finite difference of the stated objective, at the first update. Whatever the loss, its ratios
  are 1 there, so it is Σ weight A π/π_old. This sees a loss that is not one of its advantages;
* the finite difference of the expected reward: it must rise along the first step. This sees an
  advantage that pays the wrong completions.

Both finite differences are those of the reward's step, without other terms, and, where rewards are
equal, of these terms' step. Completions have one token or two, and some are cut. In two of three
prompts a reply of 1 or 3 tokens, which nobody sampled, stands between the two.
"""
import itertools
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import data
import flags
import grpo
import losses
import model
import ppo
from batch import Batch, MicroBatch, Sample
from rewards import parse

CPU = torch.device("cpu")
TOKENS, END, IDS, POSITIONS = 3, 2, 8, 8  # tokens that are sampled, one of them ends; table's sizes
PROMPTS, REPLY = ([3], [4, 5], [6]), 7  # ids; the first one's completions have no replies
SHARES = 2, 1, 1  # quarters: of the three tokens, turned by the state
TERMS = "kl_loss_coef", "entropy_coef", "kl_reward_coef"  # what may act beside the reward
STEP, CLOSE = 1e-4, 1e-6  # of finite differences: their step, and their error
# The least cosine of a sound step with a finite difference: of other terms, whose estimates depend
# on the lengths of completions; of the expected reward, which some advantages weigh by prompt.
ALIKE, RISES = 0.9, 0.3


# ---- the policy and its rollouts

class Table(nn.Module):
    """Logits (ids, positions, tokens) in the place of a model. Without tokens: values."""
    lm = None

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, inputs, source, targets=None, temperature=1.0, entropy=False, formula=None):
        """As model.LogprobModel.forward, or without targets as model.ValueModel.forward."""
        found = self.table[inputs["input_ids"][0, source], inputs["position_ids"][0, source]]
        if targets is None:
            return found + 0.0
        return (formula or model.token_logprobs)(
            found, lambda x: x, targets, temperature, 1 << 30, entropy)

    def reshard(self):
        """FSDP's."""


def logits_of(temperature: float) -> torch.Tensor:
    """The table of the first policy: at this temperature its probabilities are 1/2, 1/4, 1/4."""
    turn = (torch.arange(IDS).view(-1, 1) + torch.arange(POSITIONS)).unsqueeze(-1)
    shares = torch.tensor(SHARES, dtype=torch.float64)[(turn + torch.arange(TOKENS)) % TOKENS]
    return temperature * (shares / sum(SHARES)).log()


def share_of(token: int, before: int, position: int) -> int:
    """The quarters of a token's probability."""
    return SHARES[(before + position + token) % TOKENS]


def rollouts(p: int, longest: int) -> list[tuple]:
    """All completions of a prompt, as often as their probability times 4**longest: (ids, sampled,
    the quarters of each token's probability, 0 where not sampled). longest: 1 or 2 tokens."""
    found, n = [], len(PROMPTS[p])
    for first in range(TOKENS):
        count = share_of(first, PROMPTS[p][-1], n - 1)
        if first == END or longest == 1:
            found += [((first,), (True,), (count,))] * count * 4**(longest - 1)
            continue
        reply = (REPLY,) * (0 if p == 0 else 1 + 2 * first)
        for second in range(TOKENS):
            before = reply[-1] if reply else first
            share, gap = share_of(second, before, n + len(reply)), [0] * len(reply)
            one = ((first, *reply, second), (True, *map(bool, gap), True), (count, *gap, share))
            found += [one] * (count * share)
    return found


def every_group(args, pay: str, longest: int, gap: float = 0.0) -> list[Sample]:
    """Each group of each prompt, as often as its probability says. pay: rewards are in (0, 1], or
    "binary", or all "equal". gap: how far the engine's log-probs are off, at most. longest: as in
    rollouts; with 1 there is one prompt."""
    samples, rng = [], random.Random(0)
    paid, gaps = defaultdict(rng.random), defaultdict(lambda: rng.uniform(-gap, gap))
    for p, prompt in enumerate(PROMPTS[:1 if longest == 1 else None]):
        row = data.Row(p, "", prompt, None, {}, "")
        for group in itertools.product(rollouts(p, longest), repeat=args.group):
            for ids, sampled, shares in group:
                reward = {"binary": float(paid[p, ids] > 0.5), "equal": 0.5}.get(pay, paid[p, ids])
                logprobs = [np.log(share / 4) + gaps[p, ids, t] if share else 0.0
                            for t, share in enumerate(shares)]
                parts = defaultdict(lambda reward=reward: reward)  # each of --reward
                samples.append(Sample(
                    data.Prompt(p, row), np.array(ids, np.int32), np.array(logprobs, np.float32),
                    ids[-1] != END, np.array(sampled), "", reward, parts))
    return samples


def shrunk(args, terms: bool, group: int = 2, updates: int = 3):
    """The settings of such a rollout, in some updates of all of it. terms=False: nothing acts
    beside the reward. group: the largest that is tried."""
    off = {name: 0.0 for name in TERMS if not terms and name in vars(args)}
    heat = 0.7 if args.temperature == 1 else args.temperature  # at 1 its lack would not show
    return replace(args, group=min(args.group, group), minibatches=1, epochs=updates, lr=0.03,
                   temperature=heat, max_tokens=6, overlong_buffer=min(args.overlong_buffer, 3),
                   **off)


def plain_flags(args) -> set[str]:
    """The flags of the shipped script that a file is like: grpo.py, or with a critic ppo.py."""
    return {*vars((grpo.Args if not args.needs_critic else ppo.Args)(lr=1.0))}


def own_flags(args) -> list[str]:
    """The flags of a copy that its original lacks: what they state is not known here."""
    return sorted(vars(args).keys() - plain_flags(args))


def why_not(args) -> str:
    """Why the step of a script cannot be judged. "": it can."""
    if not args.needs_reward:
        return "it has no rewards"
    lacks = sorted(plain_flags(args) - vars(args).keys())
    return f"it lacks --{', --'.join(lacks)}" if lacks else ""


# ---- what the flags state

def advantages_of(args, batch: Batch, R, loss_tokens, old, ref):
    """The advantages (M,) of rewards R (N,), by the flags."""
    among = batch.per_token(loss_tokens > 0)
    beta = args.kl_reward_coef
    if args.advantage == "reinforce++":
        paid = losses.token_rewards(R, old, ref if beta else None, batch.tokens, kl_coef=beta)
        return losses.whiten(losses.rewards_to_go(paid, batch.tokens), among)
    if beta:
        R = R - beta * batch.sum_tokens(old - ref)
    if args.advantage not in flags.NAMES["advantage"]:
        one = flags.chosen("advantage", args.advantage)
        row = batch.per_token(torch.arange(len(R)))
        parts = {spec.name: (spec.weight, batch.reward_values(spec.name))
                 for spec in parse(list(args.reward))}
        A = one.function(
            R, args.group, scored=batch.scored, eps=args.advantage_eps,
            parts=parts, trained=loss_tokens > 0,
            row=row, lengths=batch.tokens, old_logprobs=old, batch=batch,
            engine_logprobs=batch.engine_logprobs).double()
        return A if one.per == "token" else batch.per_token(A)
    A = batch.per_token(losses.group_advantages(R, args.group, kind=args.advantage,
                                                eps=args.advantage_eps, scored=batch.scored))
    return losses.whiten(A, among) if args.advantage == "reinforce++-baseline" else A


class Stated:
    """What the flags state of a batch of all rollouts: tensors of its M tokens, in order."""

    def __init__(self, args, samples: list[Sample], tables: dict[str, torch.Tensor]):
        """tables: those of the policy before the update, of a reference model, and of how far a
        critic's values are off."""
        self.args, self.tables, self.batch = args, tables, Batch(samples)
        self.paid = self.batch.rewards  # (N,)
        if args.overlong_buffer:
            self.paid = self.paid + losses.overlong_penalty(
                self.batch.all_tokens, args.max_tokens, args.overlong_buffer)
        batch, cut = self.batch, self.batch.truncated & getattr(args, "overlong_filter", False)
        self.loss_tokens = batch.tokens * ~cut  # (N,)
        self.micro = MicroBatch(batch, [*range(len(samples))], CPU)
        ids, places = (self.micro.inputs[name][0, self.micro.source]
                       for name in ("input_ids", "position_ids"))
        self.state = ids * POSITIONS + places  # (M,)
        self.weights = batch.per_token(losses.token_weights(
            self.loss_tokens, args.aggregation, max_tokens=args.max_tokens,
            prompts=torch.arange(len(samples)) // args.group))  # (M,)
        self.old = self.logp(tables["policy"])
        self.ref = self.logp(tables["reference"]) if args.needs_reference else None
        if not args.needs_critic:
            self.A = advantages_of(args, batch, self.paid, self.loss_tokens, self.old, self.ref)
        else:
            each = losses.token_rewards(self.paid, self.old, self.ref, batch.tokens,
                                        kl_coef=args.kl_reward_coef)  # (M,)
            _, later = losses.gae(each, 0 * each, batch.tokens, gamma=args.gamma, lam=1.0)
            count = self.state.bincount(minlength=IDS * POSITIONS).clamp(min=1)
            right = self.state.bincount(later, IDS * POSITIONS) / count  # V of each state
            self.tables = tables | {"critic": tables["critic"] + right.view(IDS, POSITIONS)}
            self.values = self.tables["critic"].flatten()[self.state]
            A, self.returns = losses.gae(each, self.values, batch.tokens, gamma=args.gamma,
                                         lam=args.lam)
            self.A = losses.whiten(A, torch.ones_like(A, dtype=torch.bool))

    def logps(self, table):
        """log π of all tokens, (M, tokens)."""
        return (table.flatten(0, 1)[self.state] / self.args.temperature).log_softmax(-1)

    def logp(self, table):
        return self.logps(table).gather(-1, self.micro.targets.unsqueeze(-1)).squeeze(-1)

    def factors(self):
        """The engine correction's, (M,)."""
        if self.args.engine_correction == "none":
            return 1.0
        return losses.engine_correction(
            self.old, self.batch.engine_logprobs, self.micro.row_of_token,
            n_rows=len(self.micro.rows), **self.args.correction)[0]

    def gradient(self, table) -> torch.Tensor:
        """That of an update at this table of the policy."""
        args, micro, table = self.args, self.micro, table.clone().requires_grad_()
        logp = self.logp(table)
        chosen = losses.clip_loss  # ppo.py has no other
        if not args.needs_critic:
            chosen = flags.chosen("loss", args.loss).function
        loss, _ = chosen(logp, self.old, self.A, micro.row_of_token, n_rows=len(micro.rows),
                         engine_logprobs=self.batch.engine_logprobs, draws=micro.draws,
                         **args.bounds)
        loss = loss * self.factors()
        if getattr(args, "kl_loss_coef", 0):
            loss = loss + args.kl_loss_coef * losses.kl_estimate(
                logp, self.ref, kind=args.kl_estimator, old=self.old)
        if args.entropy_coef:
            logps = self.logps(table)
            loss = loss + args.entropy_coef * (logps.exp() * logps).sum(-1)
        return torch.autograd.grad((self.weights * loss).sum(), table)[0]

    def critic_gradient(self, table) -> torch.Tensor:
        table = table.clone().requires_grad_()
        V = table.flatten()[self.state]
        loss, _ = losses.value_loss(V, self.values, self.returns, clip=self.args.value_clip)
        return torch.autograd.grad((self.weights * loss).sum(), table)[0]

    def objective(self, table) -> torch.Tensor:
        """What rises with a step from the policy's first table: Σ w A π/π_old over all rollouts,
        less β times the KL divergence (that of --kl_estimator) and plus the entropy bonus, both
        exact at the rollouts' states."""
        args, logps = self.args, self.logps(table)
        found = self.A * self.factors() * (self.logp(table) - self.old).exp()
        if beta := getattr(args, "kl_loss_coef", 0):
            ref = self.logps(self.tables["reference"])
            if args.kl_estimator == "k3":
                found = found - beta * (ref.exp() * (ref - logps)).sum(-1)
            elif args.kl_estimator != "k1":
                found = found - beta * (logps.exp() * (logps - ref)).sum(-1)
        if args.entropy_coef:
            found = found - args.entropy_coef * (logps.exp() * logps).sum(-1)
        return (self.weights * found).sum()

    def reward(self, table) -> torch.Tensor:
        """The expected reward, less the KL divergence of completions of --kl_reward_coef. At the
        policy's first table each completion stands as often as it is probable."""
        logp, paid = self.logp(table), self.paid
        if self.args.kl_reward_coef:
            paid = paid - self.args.kl_reward_coef * self.batch_sum(logp - self.ref)
        return (self.batch_sum(logp - self.old).exp() * paid).mean()

    def batch_sum(self, x):
        """Batch.sum_tokens, fast: (M,) → (N,)."""
        return x.new_zeros(len(self.batch.samples)).index_add(0, self.micro.row_of_token, x)

    def slope(self, function) -> torch.Tensor:
        """The gradient of a function of the policy's table, by central differences."""
        at, found = self.tables["policy"], torch.zeros_like(self.tables["policy"])
        for state, token in itertools.product(self.state.unique().tolist(), range(TOKENS)):
            step = torch.zeros_like(at)
            step.view(-1, TOKENS)[state, token] = STEP
            found.view(-1, TOKENS)[state, token] = (
                function(at + step) - function(at - step)) / (2 * STEP)
        return found


# ---- a step of the file's `learn`

def tables_of(args, off: float = 0.0) -> dict[str, torch.Tensor]:
    """The first tables of the policy, of a reference model, and of how far a critic is off."""
    generator = torch.Generator().manual_seed(0)
    found = {"policy": logits_of(args.temperature)}
    if args.needs_critic:
        found["critic"] = off * torch.randn(
            IDS, POSITIONS, generator=generator, dtype=torch.float64)
    if args.needs_reference:
        found["reference"] = found["policy"] + 0.5 * torch.randn(
            IDS, POSITIONS, TOKENS, generator=generator, dtype=torch.float64)
    return found


def learned(args, file, world, samples: list[Sample], tables: dict) -> dict[str, list]:
    """One call of `learn` → {policy or critic: the table and its gradient at each update}."""
    made, seen = {}, {name: [] for name in tables}
    for name, table in tables.items():
        kind = model.Critic if name == "critic" else model.Policy
        one = made[name] = kind(Table(table.clone()), world, args)
        one.optimizer.register_step_pre_hook(
            lambda *_, p=one.module.table, kept=seen[name]: kept.append(
                (p.detach().clone(), p.grad.clone())))
    learner, options = made["policy"], {}
    if args.needs_critic:
        learner = made["policy"], made["critic"]
        options = {"critic_lr": args.lr, "kl_coef": args.kl_reward_coef}
    if args.needs_reference:
        options["reference"] = made["reference"]
    file.learn(args, world, learner, samples, lr=args.lr, **options)
    return seen


def cosine(a, b) -> float:
    """0 if one is 0."""
    return float((a * b).sum() / (a.norm() * b.norm())) if a.any() and b.any() else 0.0


def outcomes(args, file, world, binary: bool) -> tuple[dict, dict]:
    """Gradients and figures of the file's `learn`, and what they should be: {what: tensor}."""
    pay, sizes = "binary" * binary, (2, 2)
    some = shrunk(args, False)
    if not Stated(some, every_group(some, pay, 2), tables_of(some)).A.any():
        sizes = 5, 1  # it needs larger groups: shorter completions then
    pairs = [trial("reward", args, file, world, pay, *sizes),
             trial("all terms", args, file, world, pay, *sizes),
             trial("one update", args, file, world, pay, *sizes)]
    if any(vars(args).get(name) for name in TERMS):
        pairs.append(trial("other terms", args, file, world, "equal", *sizes))
    return tuple({what: x for pair in pairs for what, x in pair[side].items()} for side in (0, 1))


def trial(acts: str, args, file, world, pay: str, group: int, longest: int) -> tuple[dict, dict]:
    """The same of one call of `learn`. acts: "reward", "all terms" of the flags, the same in "one
    update", or, where rewards are equal, "other terms". With "all terms" the engine and a critic
    are a little off. A finite difference that is as it should be is 1."""
    own, whole = own_flags(args), acts in ("all terms", "one update")
    args = shrunk(args, acts != "reward", group, updates=1 if acts == "one update" else 3)
    samples = every_group(args, pay, longest, 0.02 * whole)
    stated = Stated(args, samples, tables_of(args, 0.1 * whole))
    seen = learned(args, file, world, samples, stated.tables)
    slope, found, wanted, checks = stated.slope(stated.objective), {}, {}, {}
    if slope.norm() < CLOSE:  # that of k1 as a loss is 0, and a rounding error is no gradient
        return {}, {}
    rights = {} if own else {"policy": stated.gradient}
    if whole and not own:  # elsewhere the critic is right, and has no gradient
        rights["critic"] = stated.critic_gradient
    for name, gradient in rights.items():
        for k, (table, ours) in enumerate(seen.get(name, ()), 1):
            found[f"gradient of update {k} ({acts}, {name})"] = ours
            wanted[f"gradient of update {k} ({acts}, {name})"] = gradient(table)
    step = -seen["policy"][0][1]
    if acts == "reward" and not own:
        checks["slope of the objective"] = (step - slope).norm() <= CLOSE * slope.norm()
    if acts == "other terms" and not own:
        checks["slope of the objective"] = cosine(step, slope) > ALIKE
    if acts == "reward" or acts == "other terms" and args.kl_reward_coef:
        checks["rise of the expected reward"] = cosine(step, stated.slope(stated.reward)) > RISES
    found[f"number of updates ({acts})"] = torch.tensor([1.0 * len(seen["policy"])])
    wanted[f"number of updates ({acts})"] = torch.tensor([1.0 * args.minibatches * args.epochs])
    for what, good in checks.items():
        found[f"{what} ({acts})"] = torch.ones(1) if good else torch.zeros(1)
        wanted[f"{what} ({acts})"] = torch.ones(1)
    return found, wanted
