"""The formulas, as pure functions of tensors.

N completions of the global batch in request order; `group` neighbours share a prompt.
Token tensors are (B, T), right-padded, and begin with the completion.
mask (B, T) bool: the tokens that bear loss. A completion without loss is a row of False.
Losses are per token, (B, T): loss = sum_it weight_it * token_loss_it. `token_weights` is taken over
the global minibatch, before any split, so ranks and micro-batches add up.
Padding may be nan: torch.where removes it from the inputs. On a result, nan stays in the gradient.
A loss keeps its first argument's dtype. Rewards, advantages, returns, weights are float64.

r_t = exp(logp_t - old_t) = pi / pi_old, A = advantage, sg = stop gradient, |o| = masked length.
"""
from dataclasses import dataclass
from typing import Literal

import torch

from dist import SettingsError


@dataclass
class ClipArgs:
    """The loss of a token."""
    clip_low: float = 0.2
    """ε below: ratios under 1 - ε are clipped."""
    clip_high: float = 0.2
    """ε above: ratios over 1 + ε are clipped (DAPO: 0.28)."""
    dual_clip: float | None = None
    """c > 1: loss at most -c·A where A < 0 (https://arxiv.org/abs/1912.09729)."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """token: mean over the global minibatch's tokens (DAPO). sequence: mean of each completion's
    mean (GRPO). constant: mean of each completion's sum / --max_tokens (Dr. GRPO). prompt: mean of
    the mean over each prompt's tokens (ScaleRL)."""
    engine_correction: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask",
                               "geometric"] = "none"
    """Weight tokens by π_trainer/π_engine. truncate: at most high (TIS). mask: 0 outside [low,
    high] (IcePop). sequence_: a completion's ratio. geometric: 1 or 0, by its geometric mean."""
    correction_low: float = 0.5
    """Lower bound; truncate has none."""
    correction_high: float = 2.0
    """Upper bound."""
    opsm_delta: float | None = None
    """No policy loss where A < 0 and a completion's mean log π_engine - log π is larger."""

    @property
    def has_factors(self) -> bool:
        """Call loss_factors?"""
        return self.engine_correction != "none" or self.opsm_delta is not None


@dataclass
class LossArgs(ClipArgs):
    """loss and reward penalties"""
    entropy_coef: float = 0.0
    """Bonus for the sampling distribution's entropy."""
    kl_reward_coef: float = 0.0
    """β of the KL to the starting model in the reward. 0: none."""
    overlong_buffer: int = 0
    """DAPO: minus up to 1 over this many tokens before --max_tokens. 0: none."""


def select(mask, *tensors):
    """All in the first one's dtype, 0 outside the mask."""
    return [torch.where(mask, x.to(tensors[0].dtype), 0) for x in tensors]


def masked_mean(values, mask):
    """0 if it is empty."""
    return values[mask].mean() if mask.any() else values.new_zeros(())


def row_mean(values, mask):
    """(B, T), 0 outside the mask -> the mean of each row's masked tokens, (B, 1)."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


# ---- rewards and advantages of a completion


def overlong_penalty(lengths, max_tokens, buffer):
    """DAPO's soft overlong punishment.    https://arxiv.org/abs/2503.14476, section 3.4

        ((Lmax - Lc) - L) / Lc, between -1 and 0        Lmax = max_tokens, Lc = buffer
    """
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


# Advantages over the G completions of a prompt:
#
#   grpo                   (R - mean) / (std + eps), ddof 1     https://arxiv.org/abs/2402.03300
#   dr_grpo                R - mean                             https://arxiv.org/abs/2503.20783
#   rloo                   R_i - mean of the others             https://arxiv.org/abs/2402.14740
#   reinforce++-baseline   R - mean, whitened over tokens later https://arxiv.org/abs/2501.03262
#   lite_ppo               (R - mean) / (std of all groups + eps)  https://arxiv.org/abs/2508.08221
#   maxrl                  (R - mean) / mean, R >= 0            https://arxiv.org/abs/2602.02710
#
# rloo is unbiased. R - mean holds R_i itself: (G - 1) / G of it. Dividing by std reweights prompts
# by difficulty. An unscored completion is in no mean or std. The advantage is 0 for it, and in a
# group with fewer than two scored or with equal rewards.


def _groups(rewards, group, scored):
    """R (P, G), 0 where unscored; scored (P, G); are a prompt's rewards equal (P, 1)."""
    R, S = rewards.double().view(-1, group), scored.view(-1, group)
    # Not std == 0: rounding gives equal rewards a tiny std.
    highest = torch.where(S, R, -torch.inf).amax(1, keepdim=True)
    return torch.where(S, R, 0), S, highest <= torch.where(S, R, torch.inf).amin(1, keepdim=True)


def keep_groups(rewards, group, scored):
    """(N,) raw rewards -> (P,): do a prompt's differ? (A penalty makes all differ.)
    https://arxiv.org/abs/2503.14476, 3.2"""
    return ~_groups(rewards, group, scored)[2].squeeze(1)


def group_advantages(rewards, group, *, kind, eps, scored):
    """(N,) -> (N,)"""
    R, S, equal = _groups(rewards, group, scored)  # (P, G), (P, G), (P, 1)
    n, total = S.sum(1, keepdim=True), R.sum(1, keepdim=True)
    A, others = R - total / n.clamp(min=1), (n - 1).clamp(min=1)
    if kind == "grpo":
        std = (torch.where(S, A, 0).square().sum(1, keepdim=True) / others).sqrt()
        A = A / (std + eps)
    elif kind == "rloo":
        A = R - (total - R) / others
    elif kind == "lite_ppo":
        A = A / (batch_std(R, S) + eps)
    elif kind == "maxrl":
        if (R < 0).any():  # a negative mean would turn all signs
            raise SettingsError(f"--advantage maxrl needs rewards of at least 0 (got {R.min():g}). "
                                f"Would work: --advantage dr_grpo.")
        A = A * n / total  # nan where all are 0: equal
    elif kind not in ("dr_grpo", "reinforce++-baseline"):
        raise ValueError(f"There is no advantage {kind!r}.")
    return torch.where(S & ~equal, A, 0).view(-1)


def batch_std(rewards, scored):
    """Std of the global batch's scored rewards, ddof 1.    TRL: scale_rewards="batch"."""
    x = rewards[scored]
    return ((x - x.mean()).square().sum() / max(1, len(x) - 1)).sqrt()


# ---- rewards of the tokens


def token_rewards(scores, logprobs, ref_logprobs, mask, *, kl_coef):
    """A KL penalty on each token, the score at the end.    https://arxiv.org/abs/1909.08593

        R_t = [t is the last masked token] * score - kl_coef * (logp_t - ref_t)

    scores (B,), old logprobs, ref_logprobs (B, T) or None: no penalty -> (B, T).
    The penalty is k1, whose policy gradient is that of KL(pi || ref).
    """
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    rewards = torch.where(last, scores.double()[:, None], 0)
    if ref_logprobs is not None:
        logp, ref = select(mask, logprobs.double(), ref_logprobs)
        rewards = rewards - kl_coef * (logp - ref)
    return rewards


def gae(rewards, values, mask, *, gamma, lam):
    """Generalized advantage estimation. (B, T) -> advantages, returns (B, T).

        delta_t = R_t + gamma * V_{t+1} - V_t             https://arxiv.org/abs/1506.02438
        A_t = sum_{l>=0} (gamma * lam)^l * delta_{t+l}    returns = A + V

    values[:, t] is V of the prompt and the tokens before t. A masked-out token inside a row is no
    step: V and A are carried across it.
    """
    rewards, values = select(mask, rewards.double(), values)
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = rewards.new_zeros(2, len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages, = select(mask, advantages)
    return advantages, advantages + values


def rewards_to_go(rewards, mask):
    """A_t = sum_{i>=t} R_i, for REINFORCE++."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)[0]


def whiten(values, mask):
    """(x - mean) / sqrt(var + 1e-8) over the global batch's masked tokens, ddof 1; 0 elsewhere,
    and exactly 0 for equal values."""
    x = values.double()[mask]
    white = torch.zeros_like(x)
    if len(x) and x.max() > x.min():
        white = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()
    return torch.zeros_like(values, dtype=torch.float64).masked_scatter(mask, white)


# ---- policy losses
#
# All take logprobs (B, T) with gradient, old_logprobs (B, T), advantages (B, T) or (B, 1) and the
# bounds clip_low, clip_high, dual_clip, and return token_loss, metrics. With one update per rollout
# old_logprobs is logprobs.detach(): r = 1, and the gradient is REINFORCE's. Metrics, (B, T), are
# averaged with the loss's weights:
#
#   ratio        r_t, or GSPO's s
#   clip_frac    1 where a bound acts
#   approx_kl    (r_t - 1) - log r_t: KL(pi_old || pi)   http://joschu.net/blog/kl-approx.html


def _metrics(log_ratio, ratio, cut):
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {"ratio": ratio, "clip_frac": cut.to(ratio.dtype),
            "approx_kl": log_ratio.exp() - 1 - log_ratio}


def _clipped(log_ratio, log_r, A, *, clip_low, clip_high, dual_clip):
    """-min(r A, clip(r, 1 - low, 1 + high) A), and at most -c A where A < 0 (dual_clip c)."""
    # exp(89) is inf in float32, and 0 * inf, a clipped token's gradient, is nan. So r stops at
    # exp(80). Its gradient does not: the step's norm is inf, so it is not applied.
    r = log_r.detach().clamp(max=80).exp() * (log_r - log_r.detach()).exp()
    bounded = torch.where(A < 0, r.clamp(1 - clip_low, dual_clip), r.clamp(max=1 + clip_high))
    return -bounded * A, _metrics(log_ratio, log_r.exp(), (bounded != r) & (A != 0))


def clip_loss(logprobs, old_logprobs, advantages, mask, **bounds):
    """-min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)     PPO: https://arxiv.org/abs/1707.06347"""
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    return _clipped(logp - old, logp - old, A, **bounds)


def gspo_loss(logprobs, old_logprobs, advantages, mask, **bounds):
    """GSPO-token: one ratio a sequence, the geometric mean of its tokens'.

        s = exp(1/|o| * sum_t log r_t)            https://arxiv.org/abs/2507.18071
        s_t = sg[s] * exp(logp_t - sg[logp_t])    (in value s)
        -min(s_t A, clip(s_t, 1 - low, 1 + high) A)

    The paper clips at 3e-4 and 4e-4, with aggregation sequence; others weigh a sequence by |o|.
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    log_s = row_mean(logp - old, mask).detach()  # (B, 1)
    return _clipped(logp - old, log_s + (logp - logp.detach()), A, **bounds)


def cispo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip):
    """CISPO: REINFORCE with a clipped importance weight; no token loses its gradient.

        -sg[clip(r_t, 1 - low, 1 + high)] * A_t * logp_t    https://arxiv.org/abs/2506.13585

    The paper has no lower bound: clip_low 1. TRL's epsilon_high 5 is clip_high 4.
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    ratio = (logp - old).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight * A * logp, _metrics(logp - old, ratio, mask & (weight != ratio))


def reinforce_loss(logprobs, old_logprobs, advantages, mask, **bounds):
    """-A_t * logp_t. No ratio corrects a second update.  https://doi.org/10.1007/BF00992696"""
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    return -A * logp, _metrics(logp - old, (logp - old).exp(), torch.zeros_like(mask))


def _ratio(logp, old):
    """exp(logp - old), at most exp(20) as in verl: finite."""
    return (logp - old).clamp(max=20).exp()


def sapo_loss(logprobs, old_logprobs, advantages, mask, *, taus):
    """SAPO: a smooth gate, no bounds.     https://arxiv.org/abs/2511.20347, TRL, verl

        -A_t * 4 / tau * sigmoid(tau * (r_t - 1))    taus: tau where A > 0, and elsewhere
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    r, tau = _ratio(logp, old), torch.full_like(A, taus[1]).masked_fill(A > 0, taus[0])
    gate = 4 / tau * torch.sigmoid(tau * (r - 1))
    return -A * gate, _metrics(logp - old, r, torch.zeros_like(mask))


def gmpo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, **unused):
    """GMPO: -s * A_t.    https://arxiv.org/abs/2507.20673 (bounds 0.4, by sequence), TRL, verl

        s = exp(1/|o| * sum_t clip(log r_t))    at most high where A > 0, else at least -low
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    log_r = (logp - old).clamp(max=20)
    clipped = torch.where(A > 0, log_r.clamp(max=clip_high), log_r.clamp(min=-clip_low))
    s = row_mean(clipped, mask).exp().expand(mask.shape)
    return -s * A, _metrics(logp - old, s, (clipped != log_r) & (A != 0))


def dppo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, **unused):
    """DPPO, binary total variation.       https://arxiv.org/abs/2602.04879, verl's dppo_tv

        -sg[min(r_t, 20)] * A_t * logp_t
        0 where A_t > 0 and pi - pi_old > high, or A_t < 0 and pi - pi_old < -low
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    moved, r = logp.exp() - old.exp(), _ratio(logp, old).detach()
    drop = ((A > 0) & (moved > clip_high)) | ((A < 0) & (moved < -clip_low))
    loss = torch.where(drop, 0, -r.clamp(max=20) * A * logp)
    return loss, _metrics(logp - old, r, drop)


def ipo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, log_ratio_coef):
    """IPO: both bounds for any A.   https://github.com/PrimeIntellect-ai/prime-rl/pull/3418

        -r_t * A_t, 0 where pi - pi_old is outside [-low, high]; plus coef * (log r_t)^2
    """
    logp, old, A = select(mask, logprobs, old_logprobs, advantages)
    moved, r = logp.exp() - old.exp(), _ratio(logp, old)
    drop = (moved > clip_high) | (moved < -clip_low)
    loss = torch.where(drop, 0, -r * A) + log_ratio_coef * (logp - old).square()
    return loss, _metrics(logp - old, r, drop)


# ---- critic, reference


def value_loss(values, old_values, returns, mask, *, clip):
    """PPO's critic loss and clip_frac.    https://github.com/openai/baselines, ppo2/model.py

        0.5 * max((V - R)^2, (V_clip - R)^2)    V_clip = clip(V, V_old - clip, V_old + clip)
    """
    V, V_old, R = select(mask, values, old_values, returns)
    # V_old + (V - V_old).clamp(-clip, clip) would round where V is inside.
    V_clip = V if clip is None else V.clamp(V_old - clip, V_old + clip)
    error, clipped_error = (V - R).square(), (V_clip - R).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).to(error.dtype)


def kl_estimate(logprobs, ref_logprobs, mask, *, kind, old_logprobs=None):
    """KL(pi || ref) from samples of pi, per token, (B, T).    http://joschu.net/blog/kl-approx.html

        d = logp - ref          k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d
        k3_ratio = r * k3, for samples of pi_old    DeepSeek-V3.2: https://arxiv.org/abs/2512.02556

    As a number: k1 and k3 have expectation KL(pi || ref), k3 >= 0; k2 is right to second order.
    As a loss, the expected gradient at each prefix is, for k1: 0, only noise; k2: that of
    KL(pi || ref), as for k3_ratio; k3 (GRPO): that of KL(ref || pi). Only k1 in the reward
    (`token_rewards`) counts that a token changes the later prefixes: its gradient is exact.
    """
    logp, ref = select(mask, logprobs, ref_logprobs)
    d = logp - ref
    if kind == "k3_ratio":  # r * exp(-d) is exp(ref - old): no 0 * inf
        _, old = select(mask, logp, old_logprobs)
        return _ratio(ref, old) + _ratio(logp, old) * (d - 1)
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[kind]


def adaptive_kl(coef, kl, *, target, horizon, n):
    """The coefficient after a rollout of n completions.    https://arxiv.org/abs/1909.08593

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)

    OpenAI's target of 6 is per sequence, verl's 0.1 per token.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


# ---- factors of the token losses


def loss_factors(args: LossArgs, logprobs, old_logprobs, engine_logprobs, advantages, mask):
    """Their product by the flags, and metrics, (B, T)."""
    factors, found = 1, {}
    if args.engine_correction != "none":
        factors, found = engine_correction(
            old_logprobs, engine_logprobs, mask, kind=args.engine_correction,
            low=args.correction_low, high=args.correction_high)
    if args.opsm_delta is not None:
        keep = opsm_keep(logprobs, engine_logprobs, advantages, mask, delta=args.opsm_delta)
        factors, found = factors * keep, found | {"opsm_cut": mask & ~keep}
    return factors, found


def engine_correction(old_logprobs, engine_logprobs, mask, *, kind, low, high):
    """Factors that correct for sampling with the engine, detached.

        w_t = exp(old_t - engine_t) = pi_trainer / pi_engine, from before the update
        truncate    min(w_t, high): TIS, 2    https://fengyao.notion.site/off-policy-rl
        mask        w_t in [low, high], else 0: IcePop, 0.5 and 5   https://arxiv.org/abs/2510.18855
        sequence_*  the product of a completion's w_t: verl truncates at 2, TRL masks above 3
        geometric   1 if their geometric mean is in [low, high], else 0: verl's seq_mean_k1
    """
    old, engine = select(mask, old_logprobs.detach(), engine_logprobs.detach())
    log_ratio = old - engine
    if kind in ("sequence_truncate", "sequence_mask"):
        log_ratio = log_ratio.sum(1, keepdim=True).expand(mask.shape)
    elif kind == "geometric":
        log_ratio = row_mean(log_ratio, mask).expand(mask.shape)
    ratio = log_ratio.exp()
    inside = (low <= ratio) & (ratio <= high)
    weights, cut = {
        "truncate": (ratio.clamp(max=high), ratio > high),
        "mask": (torch.where(inside, ratio, 0), ~inside),
        "geometric": (inside.to(ratio.dtype), ~inside)}[kind.removeprefix("sequence_")]
    return torch.where(mask, weights, 0), {
        "engine_ratio": ratio, "engine_cut": (mask & cut).to(ratio.dtype)}


def opsm_keep(logprobs, engine_logprobs, advantages, mask, *, delta):
    """A_t >= 0 or 1/|o| * sum_t (engine_t - logp_t) <= delta.      arXiv:2512.02556, TRL"""
    logp, engine, A = select(mask, logprobs.detach(), engine_logprobs, advantages)
    return (A >= 0) | (row_mean(engine - logp, mask) <= delta)


# ---- aggregation: the weight of a token's loss
#
#   token       1 / (all masked tokens)         DAPO
#   sequence    1 / (|o_i| * sequences)         GRPO, GSPO
#   constant    1 / (max_tokens * sequences)    Dr. GRPO
#   prompt      1 / (its prompt's tokens * prompts)   ScaleRL, arXiv:2510.13786
#
# A completion without loss is in no denominator; one of advantage 0 is.


def token_weights(lengths, aggregation, *, max_tokens, prompts=None):
    """|o_i| (B,) of a global minibatch, 0 where nothing bears loss -> the weight of a completion's
    tokens, (B,). prompts (B,): numbers; None: all differ."""
    lengths = lengths.double()
    n = (lengths > 0).sum().double()
    prompts = torch.arange(len(lengths)) if prompts is None else prompts
    sums = prompts.bincount(lengths)  # of each prompt's tokens
    denominators = {"token": lengths.sum(), "sequence": lengths * n, "constant": max_tokens * n,
                    "prompt": sums[prompts] * (sums > 0).sum()}
    return torch.where(lengths > 0, 1 / denominators[aggregation], 0)
