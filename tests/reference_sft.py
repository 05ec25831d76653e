"""The updates of sft.py and distill.py, written as plainly as reference.py writes the others."""
import math

import torch

from reference import (
    Completion,
    Model,
    Step,
    before_update,
    minibatches,
    policy_metrics,
    weighted_means,
)
from reference_losses import engine_correction, mean, token_loss, token_weight


def sft(args, policy: Model, completions: list[Completion], lr: float) -> dict[str, float]:
    """One step of sft.py → metrics. "sampled" are the tokens that are learned.

    L = -Σ log π(token) / n over the n learned tokens of a minibatch
    """
    fates = ["trained" if any(c.sampled) else "nothing" for c in completions]
    step, terms, norms = Step(completions, fates, [], None, []), [], []
    for rows in minibatches(args, step):
        n = sum(sum(completions[i].sampled) for i in rows)
        for i in rows:
            logps, entropies = policy.logprobs(completions[i])
            (-logps.sum() / n).backward()
            terms += [(1 / n, {"loss/policy": -logp, "policy/entropy": entropy})
                      for logp, entropy in zip(logps, entropies, strict=True)]
        if rows:
            norms.append(policy.step(lr))
    metrics = weighted_means(terms)
    return metrics | {
        "policy/perplexity": math.exp(metrics["loss/policy"]), "grad/norm": mean(norms), "lr": lr,
        "batch/prompts": len(completions), "batch/trained": fates.count("trained"),
        "batch/tokens": sum(len(c.prompt) + len(c.tokens) for c in completions),
        "batch/learned_tokens": sum(sum(c.sampled) for c in completions),
        "update/steps": len(norms), "update/skipped": minibatches(args, step).count([])}


def divergence(kind: str, logp, logq):
    """Of π from π_T at each token: log-probs (n, V) of the whole vocabulary → (n,).

        reverse_kl  Σ_v π log (π / π_T)        forward_kl  Σ_v π_T log (π_T / π)
        jsd         half of KL(π ‖ m) + KL(π_T ‖ m), m = (π + π_T) / 2
    """
    p, q = logp.exp(), logq.exp()
    logm = ((p + q) / 2).log()
    return {"reverse_kl": p * (logp - logq), "forward_kl": q * (logq - logp),
            "jsd": (p * (logp - logm) + q * (logq - logm)) / 2}[kind].sum(-1)


def distill_advantages(args, step: Step, teacher: list[list[float]]) -> list[list[float]]:
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


def distill(args, policy: Model, teacher: Model, completions: list[Completion],
            seen: list[Completion], lr: float) -> dict[str, float]:
    """One step of distill.py → metrics. seen: the completions behind the teacher's prompts."""
    step = before_update(policy, teacher, completions, ["trained"] * len(completions))
    with torch.no_grad():
        step.ref = [teacher.logprobs(c)[0].tolist() for c in seen]
        theirs = [teacher.distributions(c) for c in seen]  # (n, V) each
    step.advantages, terms, norms = distill_advantages(args, step, step.ref), [], []
    for rows in minibatches(args, step):
        for i in rows:
            lengths = {j: len(step.old[j]) for j in rows}
            found = distill_losses(args, policy, step, i, theirs[i])
            weight, total = token_weight(args, i, lengths), 0.0
            for one in found:
                total = total + weight * (
                    one["loss/policy"] + args.distill_coef * one.get("loss/divergence", 0.0))
                terms.append((weight, one))
            if total.requires_grad:  # else a bound cuts every token
                total.backward()
        norms.append(policy.step(lr))
    metrics = {name: value for name, value in policy_metrics(args, step, terms, norms).items()
               if "dropped" not in name}
    return metrics | {"lr": lr}


def distill_losses(args, policy: Model, step: Step, i: int, theirs) -> list[dict]:
    """The losses and metrics of each token of completion i. theirs: log π_T, (n, V)."""
    completion, old = step.completions[i], step.old[i]
    (logps, entropies), A = policy.logprobs(completion), step.advantages[i]
    engine, found = completion.engine_logprobs, []
    corrections, ratios = engine_correction(args, old, engine)
    for t, logp in enumerate(logps):
        loss, ratio, cut = token_loss(args, "clip", logp, old[t], A[t], [])
        log_ratio = logp - old[t]
        one = {"loss/policy": loss * corrections[t],
               "policy/ratio": ratio, "policy/clip_frac": cut, "policy/entropy": entropies[t],
               "policy/approx_kl": log_ratio.exp() - 1 - log_ratio,
               "policy/teacher_kl": old[t] - step.ref[i][t],
               "rollout/logprob_gap_mean": abs(old[t] - engine[t])}
        if args.engine_correction != "none":
            one |= {"policy/engine_ratio": ratios[t],
                    "policy/engine_cut": corrections[t] != ratios[t]}
        found.append(one)
    if args.divergence != "none":
        apart = divergence(args.divergence, policy.distributions(completion), theirs)
        for one, value in zip(found, apart, strict=True):
            one["loss/divergence"] = value
    return found
