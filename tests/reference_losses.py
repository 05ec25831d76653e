"""Losses of one token, weights and advantages as the papers write them. reference.py calls them.

In float64, without a batch: every list is over the sampled tokens of one completion. `args` has the
values of the flags. Log-probs are in nats; those of the policy that learns are tensors. step: what
is known before the first update, reference.Step.
"""
import math

import torch

# The constants of variants/, from the papers and TRL.
# Of clip_cov LOW, HIGH, RATE; those of tests/often.py act more often.
CLIP_COV = {"variants/clip_cov.py:clip_cov": (1.0, 5.0, 0.01),
            "tests/often.py:clip_cov": (0.05, 0.6, 0.5)}
PASS_AT = 4
SAPO_TAUS, IPO_COEF, OPSM_DELTA = (1.0, 1.05), 0.001, 0.1
GEOMETRIC = 0.7, 1.2  # of tests/often.py


def mean(x: list) -> float:
    return sum(x) / max(1, len(x))


# ---- losses of one token ----

def name_of(spec: str) -> str:
    """sapo of variants/sapo.py:sapo"""
    return spec.rpartition(":")[2]


def token_loss(args, kind: str, logp, old: float, A: float, row: list):
    """→ the loss, the ratio r = π / π_old, and whether a bound acts.

    row: (log r, A) of each token of the completion.

        clip        -min(r A, clip(r, 1 - low, 1 + high) A)     https://arxiv.org/abs/1707.06347
                    and at most -c A where A < 0 (dual_clip c)  https://arxiv.org/abs/1912.09729
        gspo        the same with r = sg[s] π / sg[π], where s is the geometric mean of the
                    completion's ratios                         https://arxiv.org/abs/2507.18071
        cispo       -sg[clip(r, 1 - low, 1 + high)] A log π     https://arxiv.org/abs/2506.13585
        reinforce   -A log π
        sapo        -A 4/τ σ(τ (r - 1))                         https://arxiv.org/abs/2511.20347
        gmpo        -A exp(mean of log r, at most high where A > 0, else at least -low)
                                                                https://arxiv.org/abs/2507.20673
        dppo        -sg[min(r, 20)] A log π, but 0 where A > 0 and π - π_old > high, or A < 0 and
                    π_old - π > low                             https://arxiv.org/abs/2602.04879
        ipo         -r A, but 0 where π - π_old > high or π_old - π > low, plus c (log r)²
        opsm, clip_cov, geometric: clip's. What they drop is in `opsm_cut`, `cov_cut` and
                    `engine_correction`.
    """
    low, high = 1 - args.clip_low, 1 + args.clip_high
    r = (logp - old).exp()
    moved = math.exp(float(logp.detach())) - math.exp(old)
    if kind == "reinforce":
        return -A * logp, r, False
    if kind == "cispo":
        weight = r.detach().clamp(low, high)
        return -weight * A * logp, r, bool(weight != r)
    if kind == "sapo":
        tau = SAPO_TAUS[0] if A > 0 else SAPO_TAUS[1]
        return -A * 4 / tau / (1 + (-tau * (r - 1)).exp()), r, False
    if kind == "gmpo":
        bounded = [x.clamp(max=args.clip_high) if A > 0 else x.clamp(min=-args.clip_low)
                   for x, A in row]
        s, mine = mean(bounded).exp(), float(logp.detach()) - old
        return -s * A, s, (A > 0 and mine > args.clip_high) or (A < 0 and mine < -args.clip_low)
    if kind == "dppo":
        drop = (A > 0 and moved > args.clip_high) or (A < 0 and moved < -args.clip_low)
        return (0.0 * logp if drop else -r.detach().clamp(max=20.0) * A * logp), r, drop
    if kind == "ipo":
        drop = moved > args.clip_high or moved < -args.clip_low
        return (0.0 if drop else -r * A) + IPO_COEF * (logp - old) ** 2, r, drop
    if kind == "gspo":
        r = math.exp(mean([float(x.detach()) for x, _ in row])) * (logp - logp.detach()).exp()
    surrogate = min(r * A, r.clamp(low, high) * A)
    if args.dual_clip is not None and A < 0:
        surrogate = max(surrogate, torch.tensor(args.dual_clip * A, dtype=torch.float64))
    return -surrogate, r, bool(surrogate != r * A)


def kl_loss(kind: str, logp, ref: float, old: float):
    """An estimate of KL(π‖π_ref) from one token.          http://joschu.net/blog/kl-approx.html

    k3_ratio: from a token of π_old.                       https://arxiv.org/abs/2512.02556
    """
    d, r = logp - ref, (logp - old).exp()
    k3 = (-d).exp() - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "k3_ratio": r * k3}[kind]


def value_loss(args, V, V_old: float, R: float):
    """½ max((V - R)², (V_clip - R)²), V_clip = clip(V, V_old - clip, V_old + clip)

    → the loss, and whether the clipping made it larger.  https://github.com/openai/baselines, ppo2
    """
    error = (V - R) ** 2
    if args.value_clip is None:
        return error / 2, False
    clipped_error = (V.clamp(V_old - args.value_clip, V_old + args.value_clip) - R) ** 2
    return max(error, clipped_error) / 2, bool(clipped_error > error)


def engine_correction(args, loss: str, old: list[float], engine: list[float]) -> tuple[list, list]:
    """Of each token: what its loss is multiplied by, and the ratio π_old / π_engine behind it.

        truncate, mask       the token's ratio, at most high (TIS); 0 outside [low, high] (IcePop,
                             arXiv:2510.18855)
        sequence_…           the same with the product of the completion's ratios
        sequence_mean        truncated, with their geometric mean: NeMo-RL #2269
        --loss geometric     1, but 0 where the geometric mean is outside two bounds
    """
    kind, gaps = args.engine_correction, [a - b for a, b in zip(old, engine, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    if kind.startswith("sequence"):
        total = mean(gaps) if kind == "sequence_mean" else sum(gaps)
        ratios = [math.exp(total)] * len(gaps)
    if loss == "geometric":
        ratio = math.exp(mean(gaps))
        inside = float(GEOMETRIC[0] <= ratio <= GEOMETRIC[1])
        return [inside] * len(gaps), [ratio] * len(gaps)
    inside = [args.correction_low <= ratio <= args.correction_high for ratio in ratios]
    if kind == "none":
        return [1.0] * len(gaps), ratios
    if kind in ("truncate", "sequence_truncate", "sequence_mean"):
        return [min(ratio, args.correction_high) for ratio in ratios], ratios
    return [ratio if keep else 0.0 for ratio, keep in zip(ratios, inside, strict=True)], ratios


def opsm_cut(A: float, logps: list, engine: list[float]) -> bool:
    """Whether a completion has no policy loss: A < 0, and the policy has left what the engine
    sampled, on the mean of log-probs.                  https://arxiv.org/abs/2512.02556"""
    left = mean([b - float(a) for a, b in zip(logps, engine, strict=True)])
    return A < 0 and left > OPSM_DELTA


def cov_cut(spec: str, A: float, logps: list, t: int, draw: float) -> bool:
    """Whether token t of a completion was drawn: its covariance is between the bounds. The mean of
    log π is over the completion.                       https://arxiv.org/abs/2505.22617
    """
    low, high, rate = CLIP_COV[spec]
    return low < (float(logps[t]) - mean([float(x) for x in logps])) * A < high and draw < rate


def token_weight(args, i: int, lengths: dict[int, int]) -> float:
    """The weight of each token of completion i, in a minibatch {completion: its length}.

        token       mean over all tokens                        DAPO
        sequence    mean over completions of their means        GRPO
        constant    mean over completions of sum / max_tokens   Dr. GRPO
        prompt      mean over prompts of the mean over the tokens of a prompt's completions  ScaleRL
    """
    if args.aggregation == "token":
        return 1 / sum(lengths.values())
    if args.aggregation == "prompt":
        mine = sum(n for j, n in lengths.items() if j // args.group == i // args.group)
        return 1 / mine / len({j // args.group for j in lengths})
    return 1 / len(lengths) / (lengths[i] if args.aggregation == "sequence" else args.max_tokens)


# ---- rewards and advantages ----

def fates(args, completions: list) -> list[str]:
    """Of each completion of grpo.py: "trained", or the first reason why it is not in the loss."""
    found = []
    for i, completion in enumerate(completions):
        first = i - i % args.group
        scored = [c for c in completions[first:first + args.group] if c.reward is not None]
        if completion.reward is None:
            found.append("unscored")
        elif len(scored) < 2 and args.advantage != "reinforce++":
            found.append("no_baseline")
        else:
            found.append("overlong" if completion.truncated and args.overlong_filter else "trained")
    return found


def penalized(args, completion) -> float | None:
    """The reward, minus up to 1 for a long completion.  DAPO: https://arxiv.org/abs/2503.14476, 3.4

        0 up to L_max - L_cache tokens, then ((L_max - L_cache) - L) / L_cache, at least -1
    """
    if completion.reward is None or not args.overlong_buffer:
        return completion.reward
    free = args.max_tokens - args.overlong_buffer
    penalty = (free - len(completion.tokens)) / args.overlong_buffer
    return completion.reward + min(0.0, max(-1.0, penalty))


def spread(x: list[float]) -> float:
    """The standard deviation, ddof 1."""
    return math.sqrt(sum((value - mean(x)) ** 2 for value in x) / max(1, len(x) - 1))


def group_advantage(args, kind: str, R: float, rewards: list[float], batch: list[float]) -> float:
    """Of one completion, whose reward R is one of its group's. batch: the rewards of all groups.

        grpo                 (R - mean) / (std + eps), ddof 1      https://arxiv.org/abs/2402.03300
        dr_grpo              R - mean                              https://arxiv.org/abs/2503.20783
        rloo                 R - mean of the others                https://arxiv.org/abs/2402.14740
        reinforce++-baseline R - mean, whitened later              https://arxiv.org/abs/2501.03262
        lite_ppo             (R - mean) / (std of the batch + eps) https://arxiv.org/abs/2508.08221
        maxrl                (R - mean) / mean                     https://arxiv.org/abs/2602.02710
    """
    if max(rewards) == min(rewards):
        return 0.0
    if kind == "pass_at_k":
        return pass_at_k(rewards, R)
    if kind == "rloo":
        return R - (sum(rewards) - R) / (len(rewards) - 1)
    scale = {"grpo": spread(rewards) + args.advantage_eps, "maxrl": mean(rewards),
             "lite_ppo": spread(batch) + args.advantage_eps}
    return (R - mean(rewards)) / scale.get(kind, 1.0)


def pass_at_k(rewards: list[float], R: float) -> float:
    """Of a group with these rewards, 0 or 1.            https://arxiv.org/abs/2508.10751

        mean = 1 - C(n_neg, k) / C(n, k)    std = √(mean (1 - mean))
        A_pos = (1 - mean) / std    A_neg = (1 - mean - C(n_neg - 1, k - 1) / C(n - 1, k - 1)) / std
    """
    n, n_neg = len(rewards), rewards.count(0.0)
    k = min(PASS_AT, n)
    average = 1 - math.comb(n_neg, k) / math.comb(n, k)
    if average in (0, 1):
        return 0.0
    lost = 0.0 if R else math.comb(n_neg - 1, k - 1) / math.comb(n - 1, k - 1)
    return (1 - average - lost) / math.sqrt(average * (1 - average))


def gdpo(args, step) -> list[list[float]]:
    """GRPO's advantage for each reward alone, their weighted sum, whitened over the completions.
    https://arxiv.org/abs/2601.05242"""
    total: list[list[float]] = [[0.0] if fate == "trained" else [] for fate in step.fates]
    for spec in args.reward:
        name, _, weight = spec.partition(":")
        for i in step.trained():
            first, parts = i - i % args.group, step.completions[i].parts
            group = [c.parts[name] for c in step.completions[first:first + args.group]
                     if c.reward is not None and c.parts[name] is not None]
            if parts[name] is not None:  # it applies
                total[i][0] += float(weight or 1) * group_advantage(
                    args, "grpo", parts[name], group, [])
    return [A * len(old) for A, old in zip(whiten(total), step.old, strict=True)]


OWN = {}  # {name of an advantage: its function of (args, step, rewards)}, of other tests


def grpo_advantages(args, step) -> list[list[float]]:
    """The advantage of every token. It is empty for a completion that is not in the loss.

    --kl_reward_coef β: a completion's reward loses β Σ_t (log π_old - log π_ref).
    """
    rewards = [penalized(args, completion) for completion in step.completions]
    advantages: list[list[float]] = [[] for _ in rewards]
    if args.advantage == "reinforce++":  # of a token: the sum of the rewards from it on
        for i in step.trained():
            r = token_rewards(step, i, rewards[i], args.kl_reward_coef)
            advantages[i] = [sum(r[t:]) for t in range(len(r))]
        return whiten(advantages)
    if name_of(args.advantage) == "gdpo":
        return gdpo(args, step)
    for i, reward in enumerate(rewards):
        if args.kl_reward_coef and reward is not None:
            rewards[i] = reward - args.kl_reward_coef * sum(step.kl(i))
    if own := OWN.get(name_of(args.advantage)):
        return own(args, step, rewards)
    for i in step.trained():
        first = i - i % args.group
        group = [R for R in rewards[first:first + args.group] if R is not None]
        batch = [R for R in rewards if R is not None]
        A = group_advantage(args, name_of(args.advantage), rewards[i], group, batch)
        advantages[i] = [A] * len(step.old[i])
    return whiten(advantages) if args.advantage == "reinforce++-baseline" else advantages


def token_rewards(step, i: int, reward: float, kl_coef: float) -> list[float]:
    """r_t = -β (log π_old - log π_ref), plus the completion's reward for the last token."""
    rewards = [-kl_coef * kl for kl in step.kl(i)] if kl_coef else [0.0] * len(step.old[i])
    rewards[-1] += reward
    return rewards


def gae(args, rewards: list[float], values: list[float]) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_(t+l), δ_t = r_t + γ V_(t+1) - V_t     https://arxiv.org/abs/1506.02438"""
    n, next_values = len(rewards), [*values[1:], 0.0]
    delta = [rewards[t] + args.gamma * next_values[t] - values[t] for t in range(n)]
    return [sum((args.gamma * args.lam) ** l * delta[t + l] for l in range(n - t))
            for t in range(n)]


def whiten(rows: list[list[float]]) -> list[list[float]]:
    """(x - mean) / √(var + 1e-8), ddof 1, over all tokens of all rows; 0 where all are equal."""
    x = [value for row in rows for value in row]
    if not x or max(x) == min(x):
        return [[0.0 for _ in row] for row in rows]
    center = mean(x)
    variance = sum((value - center) ** 2 for value in x) / (len(x) - 1)
    return [[(value - center) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def adaptive_kl(args, kl_coef: float, kl: float, n: int) -> float:
    """The coefficient after a step of n completions.    https://arxiv.org/abs/1909.08593"""
    return kl_coef * (1 + min(max(kl / args.kl_target - 1, -0.2), 0.2) * n / args.kl_horizon)
