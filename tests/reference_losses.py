"""The losses of one token as the papers write them, and their weights. reference.py calls them.

In float64, without a batch: every list is over the sampled tokens of one completion. `args` has the
values of the flags. Log-probs are in nats; those of the policy that learns are tensors.
"""
import math

import torch

# The constants of variants/, from the papers and TRL.
SAPO_TAUS, IPO_COEF, OPSM_DELTA, GEOMETRIC = (1.0, 1.05), 0.001, 0.1, (0.999, 1.001)


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
        dppo        -sg[r] A log π, but 0 where A > 0 and π - π_old > high, or A < 0 and
                    π_old - π > low                             https://arxiv.org/abs/2602.04879
        ipo         -r A, but 0 where π - π_old > high or π_old - π > low, plus c (log r)²
        opsm, geometric: clip's. What they drop is in `dropped`.
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
        return (0.0 * logp if drop else -r.detach() * A * logp), r, drop
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


def engine_correction(args, old: list[float], engine: list[float]) -> tuple[list, list]:
    """Of each token: what its loss is multiplied by, and the ratio π_old / π_engine behind it.

        truncate, mask       the token's ratio, at most high (TIS); 0 outside [low, high] (IcePop,
                             arXiv:2510.18855)
        sequence_…           the same with the product of the completion's ratios
    """
    kind, gaps = args.engine_correction, [a - b for a, b in zip(old, engine, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    if kind.startswith("sequence"):
        ratios = [math.exp(sum(gaps))] * len(gaps)
    inside = [args.correction_low <= ratio <= args.correction_high for ratio in ratios]
    if kind == "none":
        return [1.0] * len(gaps), ratios
    if kind.endswith("truncate"):
        return [min(ratio, args.correction_high) for ratio in ratios], ratios
    return [ratio if keep else 0.0 for ratio, keep in zip(ratios, inside, strict=True)], ratios


def dropped(kind: str, A: float, logps: list, old: list[float], engine: list[float]) -> bool:
    """Whether a token of a completion has no policy loss.

        opsm        A < 0, and the policy has left what the engine sampled, on the mean of log-probs
                                                            https://arxiv.org/abs/2512.02556
        geometric   the geometric mean of π_old / π_engine is outside two bounds
    """
    if kind == "opsm":
        left = mean([b - float(a) for a, b in zip(logps, engine, strict=True)])
        return A < 0 and left > OPSM_DELTA
    ratio = math.exp(mean([a - b for a, b in zip(old, engine, strict=True)]))
    return kind == "geometric" and not GEOMETRIC[0] <= ratio <= GEOMETRIC[1]


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
