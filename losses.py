"""losses.py: advantages, GAE, losses, KL: formulas on tensors. Others are in variants/.

Shapes: the global batch has P prompts with G completions each (`group`), N = P·G completions in
request order, and M sampled tokens. A vector with one number per completion is (N,). A vector with
one number per sampled token is (M,) in the batch and (n,) in a micro-batch, concatenated over
completions, without padding. `row` (n,) has the number of each token's completion: lengths [2, 3]
give row [0, 0, 1, 1, 1]. `n_rows` is the number of completions. `lengths` (N,) are their numbers of
sampled tokens.

Losses are per token, (n,): loss = sum_it weight_it * token_loss_it. `token_weights` is computed
over the global minibatch before any split, so losses and gradients add up over ranks and
micro-batches. Rewards, advantages, returns and weights are float64.

Symbols: i is a completion, t one of its tokens, r_t = exp(logp_t - old_t) = pi / pi_old, A =
advantage, sg = stop gradient, |o| = number of sampled tokens.

The sections follow a step: rewards and advantages of completions, rewards and advantages of tokens,
policy losses, critic and reference losses, the engine correction, and the token weights.
"""
import torch


def row_sum(x, row, n_rows):
    """Returns for each token the sum of x over all tokens of its completion: (n,) -> (n,). n_rows,
    the number of completions, is an argument, because reading it from `row` would sync with a GPU.
    """
    # Not sums[row], whose gradient on a CPU depends on the number of threads.
    return x.new_zeros(n_rows).index_add(0, row, x).index_select(0, row)


def row_mean(x, row, n_rows):
    """Returns for each token the mean of x over all tokens of its completion: (n,) -> (n,)."""
    return row_sum(x, row, n_rows) / row_sum(torch.ones_like(x), row, n_rows)


# ---- rewards and advantages of a completion


def overlong_penalty(lengths, max_tokens, buffer):
    """Returns DAPO's soft overlong punishment, (N,). https://arxiv.org/abs/2503.14476, section 3.4

        ((Lmax - Lc) - L) / Lc, between -1 and 0        Lmax = max_tokens, Lc = buffer

    lengths (N,): here including tokens that an environment inserted between turns, because
    max_tokens counts these too.
    """
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


# Advantages over the G completions of a prompt, by the value of --advantage:
#
#   grpo                   (R - mean) / (std + eps), ddof 1     https://arxiv.org/abs/2402.03300
#   dr_grpo                R - mean                             https://arxiv.org/abs/2503.20783
#   rloo                   R_i - mean of the others             https://arxiv.org/abs/2402.14740
#   reinforce++-baseline   R - mean, whitened over tokens later https://arxiv.org/abs/2501.03262
#
# rloo is unbiased. In R - mean, R_i is part of the mean, so R - mean is (G - 1) / G of rloo.
# Dividing by std reweights prompts by difficulty. An unscored completion is in no mean or std, and
# its advantage is 0. If fewer than two completions of a group are scored, or their rewards are
# equal, all its advantages are 0 (before any whitening).

def equal(x, y):
    """Returns whether rewards are equal up to rounding; x and y are numbers or tensors. .1 + .2 is
    not .3: a sum is off by about 1e-16 of its largest term. That term may be far larger than the
    sum, so the tolerance is 1e-9, relative and absolute.
    """
    return abs(x - y) <= 1e-9 * (1 + abs(x) + abs(y))


def _groups(rewards, group, scored):
    """Reshapes the rewards and scored (N,) by prompt. Returns the rewards (P, G), 0 where unscored;
    scored (P, G); and whether the scored rewards of each prompt are equal, (P, 1). This is True if
    none is scored: then the highest is -inf, the lowest inf, and `equal` holds.
    """
    R, S = rewards.double().view(-1, group), scored.view(-1, group)
    highest = torch.where(S, R, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(S, R, torch.inf).amin(1, keepdim=True)
    return torch.where(S, R, 0), S, equal(highest, lowest)


def keep_groups(rewards, group, scored):
    """Returns for each prompt whether the rewards of its scored completions differ: (N,) -> (P,)
    bool. rewards: before any penalty.

    DAPO's dynamic sampling: https://arxiv.org/abs/2503.14476, section 3.2
    """
    return ~_groups(rewards, group, scored)[2].squeeze(1)


def group_advantages(rewards, group, *, kind, eps, scored):
    """Returns the advantage of each completion relative to its group, (N,). The comment above
    `equal` has the formula of each `kind`.

    rewards (N,), scored (N,) bool. kind: grpo, dr_grpo, rloo or reinforce++-baseline; any other
    raises a ValueError. eps: added to the std of grpo.
    """
    R, S, all_equal = _groups(rewards, group, scored)  # (P, G), (P, G), (P, 1)
    n, total = S.sum(1, keepdim=True), R.sum(1, keepdim=True)  # over the scored completions
    A = R - total / n.clamp(min=1)
    others = (n - 1).clamp(min=1)  # the number of other scored completions
    if kind == "grpo":
        std = (torch.where(S, A, 0).square().sum(1, keepdim=True) / others).sqrt()
        A = A / (std + eps)
    elif kind == "rloo":
        A = R - (total - R) / others
    elif kind not in ("dr_grpo", "reinforce++-baseline"):
        raise ValueError(f"There is no advantage {kind!r}.")
    return torch.where(S & ~all_equal, A, 0).view(-1)


def batch_std(rewards, scored):
    """Returns the standard deviation of the scored rewards of the global batch, ddof 1, for
    functions of --advantage FILE.py:NAME.
    """
    x = rewards[scored]
    return ((x - x.mean()).square().sum() / max(1, len(x) - 1)).sqrt()


# ---- rewards and advantages of the tokens


def token_rewards(scores, logprobs, ref_logprobs, lengths, *, kl_coef):
    """Returns a reward for each token, (M,): a KL penalty, and the score of the completion at its
    last token. https://arxiv.org/abs/1909.08593

        R_t = [t is the last token] * score - kl_coef * (logp_t - ref_t)

    scores, lengths: (N,). logprobs: those of pi_old, (M,). ref_logprobs: (M,), or None for no
    penalty. The policy gradient of this reward lowers KL(pi || ref) of whole completions.
    """
    rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    last = lengths.cumsum(0) - 1  # (N,); meaningless for a completion without tokens
    rewards[last[lengths > 0]] = scores[lengths > 0].double()
    if ref_logprobs is not None:
        rewards = rewards - kl_coef * (logprobs.double() - ref_logprobs.double())
    return rewards


def gae(rewards, values, lengths, *, gamma, lam):
    """Returns the advantages and returns (M,) of generalized advantage estimation.

        delta_t = R_t + gamma * V_{t+1} - V_t             https://arxiv.org/abs/1506.02438
        A_t = sum_{l>=0} (gamma * lam)^l * delta_{t+l}    returns = A + V

    rewards, values: (M,). lengths: (N,). values[t] is V of the prompt and the tokens before t. A
    token that an environment inserted between turns is in none of these vectors: it was not
    sampled, so it is not a step.
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards)
    # The loop goes backward from the last tokens, for all completions at once. The longest
    # completion comes first, so those that still have a token are always first. Lengths [2, 3] give
    # tokens [4, 1], then [3, 0], then [2].
    longest = lengths.argsort(descending=True)
    lengths, last = lengths[longest], (lengths.cumsum(0) - 1)[longest]  # index of the last token
    next_value = next_advantage = rewards.new_zeros(len(lengths))
    for back in range(max(lengths.tolist(), default=0)):
        left = int((lengths > back).sum())  # completions that still have a token
        t = last[:left] - back  # one token of each
        delta = rewards[t] + gamma * next_value[:left] - values[t]
        next_value, next_advantage = values[t], delta + gamma * lam * next_advantage[:left]
        advantages[t] = next_advantage
    return advantages, advantages + values


def rewards_to_go(rewards, lengths):
    """Returns the advantages (M,) of REINFORCE++ before whitening: A_t = sum_{u>=t} R_u over the
    completion's tokens.
    """
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma=1.0, lam=1.0)[0]


def whiten(values, among):
    """Whitens the values (M,) of the global batch selected by `among` (M,) bool: (x - mean) /
    sqrt(var + 1e-8), ddof 1. The result is 0 elsewhere, and exactly 0 if the selected values are
    `equal`.
    """
    x = values.double()[among]
    white = torch.zeros_like(x)
    if len(x) and not equal(x.max(), x.min()):
        white = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()
    return torch.zeros_like(values, dtype=torch.float64).masked_scatter(among, white)


# ---- policy losses
#
# Each is called with logp (n,), which has a gradient, old, A, row (n,), and the keyword arguments
# n_rows, engine_logprobs (n,), clip_low, clip_high, dual_clip, and draws: a function that returns a
# random number for each token, for a loss that needs one. It returns token_loss (n,), metrics. A
# loss names the parameters it uses; **others takes the rest. **bounds of clip_loss and gspo_loss is
# all of the rest, from which _clipped takes the bounds. row and n_rows are for a loss over whole
# completions. With one update per rollout r = 1, and the gradient is REINFORCE's.
# The metrics, (n,) each, are averaged with the loss weights:
#
#   ratio        r_t, or GSPO's s
#   clip_frac    1 where a bound acts
#   approx_kl    (r_t - 1) - log r_t: KL(pi_old || pi)   http://joschu.net/blog/kl-approx.html


def ratio_metrics(log_ratio, ratio, cut):
    """Returns the metrics of a policy loss, (n,) each, without gradient. log_ratio, ratio: (n,).
    cut (n,), bool or 0 and 1: whether a bound acts on the token.
    """
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {"ratio": ratio, "clip_frac": cut.to(ratio.dtype),
            "approx_kl": log_ratio.exp() - 1 - log_ratio}


def _clipped(log_ratio, log_r, A, *, clip_low, clip_high, dual_clip, **others):
    """Returns the token loss and its metrics, (n,) each.

        -min(r A, clip(r, 1 - low, 1 + high) A), and at most -c A where A < 0 (dual_clip c)

    log_ratio: the log of the token's ratio, for approx_kl. log_r: the log of the ratio that is
    clipped, which is the token's (PPO) or its sequence's (GSPO).
    """
    # exp(89) is inf in float32, and the gradient of a clipped token would be 0 * inf = nan. So r is
    # sg[min(r, e^80)] * exp(log_r - sg[log_r]): the second factor is 1, and only it has a gradient.
    # If A < 0 and there is no dual_clip, nothing bounds r from above. A mere clamp would give such
    # a token a zero gradient and hide it. Here its gradient is about exp(80), whose square is inf
    # in the norm in float32, so the optimizer step is skipped.
    r = log_r.detach().clamp(max=80).exp() * (log_r - log_r.detach()).exp()
    # The min: if A < 0, r is at least 1 - low (and at most c); else it is at most 1 + high.
    bounded = torch.where(A < 0, r.clamp(1 - clip_low, dual_clip), r.clamp(max=1 + clip_high))
    return -bounded * A, ratio_metrics(log_ratio, log_r.exp(), (bounded != r) & (A != 0))


def clip_loss(logp, old, A, row, **bounds):
    """Returns PPO's clipped loss and its metrics. https://arxiv.org/abs/1707.06347

        -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
    """
    return _clipped(logp - old, logp - old, A, **bounds)


def gspo_loss(logp, old, A, row, *, n_rows, **bounds):
    """Returns the loss of GSPO-token and its metrics. Each sequence has one ratio, the geometric
    mean of its tokens' ratios.

        s = exp(1/|o| * sum_t log r_t)            https://arxiv.org/abs/2507.18071
        s_t = sg[s] * exp(logp_t - sg[logp_t])    (equal to s in value)
        -min(s_t A, clip(s_t, 1 - low, 1 + high) A)

    The paper clips at 3e-4 and 4e-4, with --aggregation sequence. With --aggregation token, a
    completion's weight is proportional to its length.
    """
    log_s = row_mean(logp - old, row, n_rows).detach()
    return _clipped(logp - old, log_s + (logp - logp.detach()), A, **bounds)


def cispo_loss(logp, old, A, row, *, clip_low, clip_high, **others):
    """Returns the loss of CISPO and its metrics: REINFORCE with a clipped importance weight, so no
    token loses its gradient.

        -sg[clip(r_t, 1 - low, 1 + high)] * A_t * logp_t    https://arxiv.org/abs/2506.13585

    The paper has no lower bound: clip_low 1. TRL's epsilon_high 5 is clip_high 4.
    """
    ratio = (logp - old).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight * A * logp, ratio_metrics(logp - old, ratio, weight != ratio)


def reinforce_loss(logp, old, A, row, **others):
    """Returns the loss of REINFORCE, -A_t * logp_t, and its metrics; only these need `old`. No
    ratio corrects a second update on the same completions. https://doi.org/10.1007/BF00992696
    """
    ratio = (logp - old).exp()
    return -A * logp, ratio_metrics(logp - old, ratio, torch.zeros_like(ratio))


LOSSES = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss, "reinforce": reinforce_loss}


def capped_ratio(logp, old):
    """Returns exp(logp - old), at most exp(20) as in verl, so that it is finite."""
    return (logp - old).clamp(max=20).exp()


# ---- critic, reference


def value_loss(V, V_old, returns, *, clip):
    """Returns PPO's critic loss for each token and whether its bound acts (clip_frac), (n,) each.

        0.5 * max((V - returns)^2, (V_clip - returns)^2)
                                                V_clip = clip(V, V_old - clip, V_old + clip)
                                                https://github.com/openai/baselines, ppo2/model.py

    V, V_old, returns (n,): the values with gradient, those before the update, and the returns.
    clip: None for no bound.
    """
    # V_old + (V - V_old).clamp(-clip, clip) would round V within the bounds.
    V_clip = V if clip is None else V.clamp(V_old - clip, V_old + clip)
    error, clipped_error = (V - returns).square(), (V_clip - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).to(error.dtype)


def kl_estimate(logp, ref, *, kind, old=None):
    """Returns an estimate of KL(pi || ref) for each token, (n,) or (M,), from samples of pi, or for
    k3_ratio of pi_old.

        d = logp - ref          k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d
        k3_ratio = r * k3           DeepSeek-V3.2: https://arxiv.org/abs/2512.02556
        k1, k2, k3: http://joschu.net/blog/kl-approx.html

    logp, ref, old: log-probs. kind: one of these names; only k3_ratio needs `old`.

    As a number: k1 and k3 have expectation KL(pi || ref), k3 >= 0; k2 is right to second order. As
    the loss of a token, with the tokens before it held fixed, the expected gradient is
        k1              0
        k2, k3_ratio    that of KL(pi || ref)
        k3 (GRPO's)     that of KL(ref || pi)
    But a token also affects which tokens come later. k1 in the reward (`token_rewards`) accounts
    for this: its policy gradient is that of the KL of whole completions.
    """
    d = logp - ref
    if kind == "k3_ratio":  # r * k3 = r exp(-d) + r (d - 1), and r exp(-d) = exp(ref - old)
        return capped_ratio(ref, old) + capped_ratio(logp, old) * (d - 1)
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[kind]


def adaptive_kl(coef, kl, *, target, horizon, n):
    """Returns the KL coefficient after a rollout of n completions. https://arxiv.org/abs/1909.08593

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(n / horizon, 1))

    n / horizon is from OpenAI's code; the paper has the constant 0.1 instead. The min keeps the
    result positive. OpenAI's target, 6, is per sequence; verl's 0.1 is per token.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(n / horizon, 1))


# ---- engine correction


def engine_correction(old, engine, row, *, n_rows, kind, low, high):
    """Returns factors (n,), without gradient, that correct the loss for sampling with the engine
    instead of the trainer, and their metrics.

        w_t = exp(old_t - engine_t) = pi_trainer / pi_engine, before the update
        truncate    min(w_t, high)      TIS, high 2: https://fengyao.notion.site/off-policy-rl
        mask        w_t if it is in [low, high], else 0
                    IcePop, .5 and 5: https://arxiv.org/abs/2510.18855
        sequence_truncate, sequence_mask    the same for the product of a completion's w_t
        sequence_mean   min(their geometric mean, high); its noise does not grow with the length
                    https://github.com/NVIDIA-NeMo/RL/pull/2269

    old, engine: log-probs (n,) of the trainer before the update, and of the engine. kind: one of
    these names. low, high: the bounds.
    """
    log_ratio = old.detach() - engine
    if kind.startswith("sequence"):
        log_ratio = (row_mean if kind == "sequence_mean" else row_sum)(log_ratio, row, n_rows)
    ratio = log_ratio.exp()
    if kind.endswith(("truncate", "mean")):
        factors, cut = ratio.clamp(max=high), ratio > high
    else:
        cut = (ratio < low) | (ratio > high)
        factors = torch.where(cut, 0, ratio)
    return factors, {"engine_ratio": ratio, "engine_cut": cut.to(ratio.dtype)}


# ---- aggregation: the weight of a token's loss
#
#   token       1 / (all tokens in the loss)          DAPO's code
#   sequence    1 / (|o_i| * sequences)               GRPO, GSPO
#   constant    1 / (max_tokens * sequences)          Dr. GRPO
#   prompt      1 / (its prompt's tokens * prompts)   DAPO's equation; ScaleRL, arXiv:2510.13786
#
# A completion not in the loss is in no denominator. One with advantage 0 is in them.


def token_weights(loss_tokens, aggregation, *, max_tokens, prompts=None):
    """Returns the weight of each token of a completion, (B,) float64, for the B completions of a
    global minibatch; 0 for a completion not in the loss. loss_tokens (B,): the number of tokens of
    each completion in the loss. prompts (B,): the number of each completion's prompt; None: each
    completion has its own.
    """
    lengths = loss_tokens.double()
    n = (lengths > 0).sum().double()
    prompts = torch.arange(len(lengths)) if prompts is None else prompts
    sums = prompts.bincount(weights=lengths)  # for each prompt, the tokens in the loss
    denominators = {"token": lengths.sum(), "sequence": lengths * n, "constant": max_tokens * n,
                    "prompt": sums[prompts] * (sums > 0).sum()}
    return torch.where(lengths > 0, 1 / denominators[aggregation], 0)
