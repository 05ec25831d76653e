"""The formulas of grpo.py and ppo.py, each a short pure function of tensors.

Shapes   N completions of the global batch in request order; `group` consecutive rows share a prompt.
         Token tensors are (B, T), right-padded; position 0 is the first completion token.
         mask (B, T) bool says which tokens bear loss; a completion that is out of the loss has a row of False.
Losses   come back per token, (B, T), never averaged. The caller takes `token_weights` over the whole global minibatch,
         before any split, and sums:   loss = sum_it weight_it * token_loss_it.
         Ranks and micro-batches then add up to the whole; a mean of micro-batch means would not.
Padding  is selected out by torch.where as it comes in, and may hold anything. Multiplying by the mask keeps it
         (0 * nan = nan), and a torch.where on the way out only keeps it out of the value, not out of the gradient.
dtype    Losses keep the dtype of their first argument. Rewards, advantages, returns and weights are float64.

Notation: logp = logprobs, r_t = exp(logp_t - old_t) = pi / pi_old, A the advantage, sg = stop gradient, |o| = masked length.
"""

import torch

# ---------------------------------------------------------------------------------------------------- selection, means
def select(mask, *tensors):
    """Each tensor broadcast to mask (B, T), in the first one's dtype, with 0 where the mask is False."""
    return [torch.where(mask, x.to(tensors[0].dtype), 0) for x in tensors]


def masked_mean(values, mask):
    """The mean of values (B, T) over the mask: a scalar, and 0 where there is no token at all."""
    return values[mask].mean() if mask.any() else values.new_zeros(())


# ----------------------------------------------------------------------------------------------- rewards of a completion
def overlong_penalty(lengths, max_tokens, buffer):
    """DAPO's soft overlong punishment, added to the reward.          https://arxiv.org/abs/2503.14476, section 3.4

        0                        L <= Lmax - Lc
        ((Lmax - Lc) - L) / Lc   Lmax - Lc < L <= Lmax         lengths L (N,), max_tokens Lmax, buffer Lc, in tokens
        -1                       L > Lmax                      -> (N,) float64
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"the overlong buffer is {buffer} tokens; it must be in 1..max_tokens = {max_tokens}")
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


def _groups(rewards, group, scored):
    """rewards (N,) -> R (P, G) float64 with 0 where unscored, scored (P, G), n scored (P, 1), all equal (P, 1)."""
    if group < 1 or len(rewards) % group:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group}")
    scored = torch.ones_like(rewards, dtype=torch.bool) if scored is None else scored
    R, S = rewards.double().view(-1, group), scored.view(-1, group)
    # Equal is max == min, not std == 0: rounding gives equal rewards a tiny std, and (R - mean) / std is then noise.
    equal = torch.where(S, R, -torch.inf).amax(1, keepdim=True) <= torch.where(S, R, torch.inf).amin(1, keepdim=True)
    return torch.where(S, R, 0), S, S.sum(1, keepdim=True), equal


def keep_groups(rewards, group, scored=None):
    """DAPO's dynamic sampling: keep the prompts whose scored rewards differ. rewards (N,) -> (N / group,) bool.

    With 0/1 rewards this is 0 < number correct < G.                  https://arxiv.org/abs/2503.14476, section 3.2
    Hand it the raw rewards: a length penalty or a KL term would make every group differ. One scored: not kept.
    """
    *_, equal = _groups(rewards, group, scored)
    return ~equal.squeeze(1)


def group_advantages(rewards, group, *, kind, eps=1e-6, scored=None):
    """Completion-level advantages over the G completions of each prompt. rewards (N,) -> (N,) float64.

        grpo                    (R - mean) / (std + eps)    ddof 1 (n - 1)         https://arxiv.org/abs/2402.03300
        dr_grpo                 R - mean                                           https://arxiv.org/abs/2503.20783
        rloo                    R_i - mean of the others                           https://arxiv.org/abs/2402.14740
        reinforce++             R: no baseline here, whitened over tokens later    https://arxiv.org/abs/2501.03262
        reinforce++-baseline    R - mean, whitened over tokens later               the same

    Of these baselines only rloo's is unbiased: R - mean holds R_i itself, which gives (G - 1) / G of the gradient, and dividing
    by std reweights prompts by difficulty. ddof 1 as in verl, TRL and OpenRLHF; eps 1e-6 is verl's (TRL's is 1e-4).

    Completions not scored (N,) bool are in no mean or std, and have advantage 0. Except for "reinforce++", so has a
    group with fewer than two scored (there is no baseline: the scripts refuse a group of one) or with equal rewards.
    """
    R, S, n, equal = _groups(rewards, group, scored)                # (P, G), (P, G), (P, 1), (P, 1)
    total, others = R.sum(1, keepdim=True), (n - 1).clamp(min=1)    # (P, 1)
    mean = total / n.clamp(min=1)
    if kind == "grpo":
        std = (torch.where(S, R - mean, 0).square().sum(1, keepdim=True) / others).sqrt()
        A = (R - mean) / (std + eps)
    elif kind in ("dr_grpo", "reinforce++-baseline"):
        A = R - mean
    elif kind == "rloo":
        A = R - (total - R) / others
    elif kind == "reinforce++":
        A, equal = R, torch.zeros_like(equal)
    else:
        raise ValueError(f"unknown advantage {kind!r}: grpo, dr_grpo, rloo, reinforce++ or reinforce++-baseline")
    return torch.where(S & ~equal, A, 0).view(-1)


# ------------------------------------------------------------------------------------------------ rewards of the tokens
def token_rewards(scores, logprobs, ref_logprobs, mask, *, kl_coef=0.0):
    """The reward of each token: a KL penalty everywhere and the score at the end.    https://arxiv.org/abs/1909.08593

        R_t = [t is the last masked token] * score - kl_coef * (logp_t - ref_t)

    scores (B,); logprobs (B, T) of the policy that sampled (old); ref_logprobs (B, T), or None for no penalty;
    mask (B, T) -> (B, T) float64. The penalty is k1, whose policy gradient is exactly that of KL(pi || ref).
    The score sits on the last valid token, as in verl and OpenRLHF (TRL's PPO puts it one later, which changes GAE).
    """
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))     # (B, T) True once in each row that has a token
    rewards = torch.where(last, scores.double()[:, None], 0)
    if ref_logprobs is not None:
        rewards = rewards - kl_coef * torch.where(mask, logprobs.double() - ref_logprobs.double(), 0)
    return rewards


def gae(rewards, values, mask, *, gamma, lam):
    """Generalized advantage estimation. (B, T) -> advantages, returns (B, T) float64.  https://arxiv.org/abs/1506.02438

        delta_t = R_t + gamma * V_{t+1} - V_t       A_t = sum_{l>=0} (gamma * lam)^l * delta_{t+l}       returns = A + V

    values[:, t] is V of the state that token t was sampled in (the prompt and the tokens before t). After the last masked
    token the episode is over: V = 0. A masked-out token inside a row is no step: V and A are carried across it.
    The returns are the critic's targets, so they are taken before any whitening of the advantages.
    """
    rewards, values = select(mask, rewards.double(), values)
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = rewards.new_zeros(2, len(rewards))             # (B,), (B,)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages, = select(mask, advantages)
    return advantages, advantages + values


def rewards_to_go(rewards, mask, gamma=1.0):
    """A_t = sum_{i>=t} gamma^(i-t) * R_i, (B, T) float64: GAE with lam 1 and no critic. REINFORCE++'s advantage with

        R_t = [t is last] * R - kl_coef * k1_t,       then whitened over tokens        https://arxiv.org/abs/2501.03262
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def whiten(values, mask, *, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) over all the masked tokens of values (B, T) -> (B, T) float64, 0 outside the mask.

    var is unbiased (ddof 1), as in verl and TRL. Equal values are exactly 0. shift_mean=False adds the mean back.
    Give it the global batch, once: the mean of a rank or of a minibatch is another number.
    """
    x = values.double()[mask]                                       # (tokens,)
    white = torch.zeros_like(x)
    if len(x) and x.max() > x.min():
        white = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()
    if len(x) and not shift_mean:
        white = white + x.mean()
    return torch.zeros_like(values, dtype=torch.float64).masked_scatter(mask, white)


# ------------------------------------------------------------------------------------------------------ policy losses
#
# One call shape, so that a script picks by name:
#
#   (logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip) -> token_loss (B, T), metrics
#
# logprobs (B, T) carries the gradient; old_logprobs (B, T) does not (with one update per rollout it is logprobs.detach(), so
# r = 1: nothing is clipped, the clipped losses sum to about -mean(A), near 0, and their gradient is still REINFORCE's).
# advantages (B, T) or (B, 1). metrics, each (B, T) and detached, to be averaged with the loss's own weights:
#
#   ratio        r_t, or GSPO's s
#   clip_frac    1 where the bounds cut: no gradient left (clip, GSPO), a weight held at its bound (CISPO)
#   approx_kl    (r_t - 1) - log r_t, an estimate of KL(pi_old || pi)               http://joschu.net/blog/kl-approx.html


def _metrics(log_ratio, ratio, cut):
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return {"ratio": ratio, "clip_frac": cut.to(ratio.dtype), "approx_kl": log_ratio.exp() - 1 - log_ratio}


def _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip):
    """min(r A, clip(r, 1 - low, 1 + high) A), and where it has no gradient: both (B, T)."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate, cut = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual_clip is not None:       # where A < 0: max(min(r A, clip(r) A), c A), c > 1     https://arxiv.org/abs/1912.09729
        floor = dual_clip * advantages
        below = (advantages < 0) & (surrogate < floor)
        surrogate, cut = torch.where(below, floor, surrogate), cut | below
    return surrogate, cut


def clip_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None):
    """PPO's clipped surrogate, also GRPO's and DAPO's.                             https://arxiv.org/abs/1707.06347

        -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

    PPO and GRPO use 0.2 and 0.2, DAPO ("clip higher", https://arxiv.org/abs/2503.14476) 0.2 and 0.28.
    dual_clip c, off by default as in the paper (verl's default is 3), bounds the loss by -c A where A < 0.
    """
    logprobs, old_logprobs, advantages = select(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs                                         # (B, T)
    ratio = log_ratio.exp()
    surrogate, cut = _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
    return -surrogate, _metrics(log_ratio, ratio, cut)


def gspo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None):
    """GSPO: one ratio a sequence, the geometric mean of its tokens'.               https://arxiv.org/abs/2507.18071

        s = exp(1/|o| * sum_t log r_t)        s_t = sg[s] * exp(logp_t - sg[logp_t])        (GSPO-token: s_t = s in value)
        -min(s_t A, clip(s_t, 1 - low, 1 + high) A)

    s moves far less than r: the paper clips at 3e-4 and 4e-4, not 0.2. Every token carries the sequence's whole loss and
    its own share |o| * ds/dlogp_t of the gradient, so that aggregation
        sequence    gives the paper's loss and gradient exactly: the mean over sequences of -min(s A, clip(s) A);
        token       weighs each sequence's by |o| / (mean |o|): long completions count for more;
        constant    weighs each sequence's by |o| / max_tokens.
    """
    logprobs, old_logprobs, advantages = select(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs                                         # (B, T)
    length = mask.sum(1, keepdim=True).clamp(min=1)                             # (B, 1)
    sequence_ratio = (log_ratio.sum(1, keepdim=True) / length).exp().detach()   # (B, 1)
    ratio = sequence_ratio * (logprobs - logprobs.detach()).exp()               # (B, T)
    surrogate, cut = _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)
    return -surrogate, _metrics(log_ratio, ratio, cut)


def cispo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, dual_clip=None):
    """CISPO: REINFORCE with a clipped importance weight; no token loses its gradient.   https://arxiv.org/abs/2506.13585

        -sg[clip(r_t, 1 - low, 1 + high)] * A_t * logp_t

    The bounds are 1 - low and 1 + high, as in the paper and in verl; TRL's epsilon_high is the maximum itself (its 5 is
    clip_high 4 here). The paper leaves the weight unbounded below: clip_low 1. dual_clip has nothing to act on.
    """
    logprobs, old_logprobs, advantages = select(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs                                         # (B, T)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight * advantages * logprobs, _metrics(log_ratio, ratio, mask & (weight != ratio))


def reinforce_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=None, clip_high=None, dual_clip=None):
    """REINFORCE: -A_t * logp_t, on-policy only: no ratio corrects a second update.   https://doi.org/10.1007/BF00992696

    old_logprobs serve the metrics; the clip options have nothing to act on.
    """
    logprobs, old_logprobs, advantages = select(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs                                         # (B, T)
    return -advantages * logprobs, _metrics(log_ratio, log_ratio.exp(), torch.zeros_like(mask))


# --------------------------------------------------------------------------------------------------- critic, reference
def value_loss(values, old_values, returns, mask, *, clip=None):
    """PPO's critic loss and a 0/1 clip_frac, both (B, T).
    https://github.com/openai/baselines/blob/master/baselines/ppo2/model.py

        0.5 * max((V - R)^2, (V_clip - R)^2)        V_clip = V_old + clip(V - V_old, -clip, clip)
    """
    values, old_values, returns = select(mask, values, old_values, returns)
    error = (values - returns).square()                                         # (B, T)
    if clip is None:
        return 0.5 * error, torch.zeros_like(error.detach())
    clipped_error = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).to(error.dtype)


def kl_estimate(logprobs, ref_logprobs, mask, *, kind):
    """KL(pi || ref) from samples of pi, per token, (B, T).                     http://joschu.net/blog/kl-approx.html

        d = logp - ref          k1 = d          k2 = d^2 / 2          k3 = exp(-d) - 1 + d

    As a number  k1 and k3 have expectation KL(pi || ref), and k3 >= 0; k2 is biased (right to second order).
    As a loss    the expected gradient is that of the estimator, not of the KL it estimates. At each prefix:
                     k1: 0, so it only adds noise       k2: that of KL(pi || ref)       k3: that of KL(ref || pi)
                 k3 is GRPO's choice. None of them counts that an early token leads to later prefixes; k1 in the reward
                 does (`token_rewards`): its policy gradient is exact. All this holds for samples of pi itself, on policy.
    """
    logprobs, ref_logprobs = select(mask, logprobs, ref_logprobs)
    d = logprobs - ref_logprobs                                                 # (B, T)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return (-d).exp() - 1 + d
    raise ValueError(f"unknown KL estimate {kind!r}: k1, k2 or k3")


def adaptive_kl(coef, kl, *, target, horizon, n):
    """The next KL coefficient, moved once a rollout of n completions.              https://arxiv.org/abs/1909.08593

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)

    kl and target share a unit: OpenAI's target 6 is nats a sequence, verl's 0.1 nats a token.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon)


def engine_correction(old_logprobs, engine_logprobs, mask, *, kind, low=0.5, high=2.0):
    """Weights for the policy loss that correct for sampling with the engine. -> weights, metrics, (B, T), detached.

        w_t = exp(old_t - engine_t) = pi_trainer / pi_engine, both from before the update
        none        1, and the metrics still measure the gap
        truncate    min(w_t, high)                      TIS, high 2            https://fengyao.notion.site/off-policy-rl
        mask        w_t if low <= w_t <= high else 0    IcePop, 0.5 and 5      https://arxiv.org/abs/2510.18855

    One weight a token. It multiplies the token's loss and leaves the denominator alone. 0 outside the mask.
    metrics: engine_ratio w_t, engine_cut 1 where w_t was truncated or masked.
    """
    old_logprobs, engine_logprobs = select(mask, old_logprobs.detach(), engine_logprobs.detach())
    ratio = (old_logprobs - engine_logprobs).exp()                              # (B, T)
    if kind == "none":
        weights = torch.ones_like(ratio)
    elif kind == "truncate":
        weights = ratio.clamp(max=high)
    elif kind == "mask":
        weights = torch.where((low <= ratio) & (ratio <= high), ratio, 0)
    else:
        raise ValueError(f"unknown engine correction {kind!r}: none, truncate or mask")
    cut = mask & (weights != ratio) & (kind != "none")
    return torch.where(mask, weights, 0), {"engine_ratio": ratio, "engine_cut": cut.to(ratio.dtype)}


# --------------------------------------------------------------------------------------------------------- aggregation
def token_weights(mask, aggregation, *, max_tokens=None):
    """What each token's loss counts for: mask (B, T) of one global minibatch -> (B, T) float64, 0 outside the mask.

        token       1 / (all masked tokens)               DAPO                       https://arxiv.org/abs/2503.14476
        sequence    1 / (|o_i| * sequences)               GRPO, GSPO                 https://arxiv.org/abs/2402.03300
        constant    1 / (max_tokens * sequences)          Dr. GRPO                   https://arxiv.org/abs/2503.20783

    A sequence counts if it has a masked token: one that is unscored or filtered (a row of False) is in no denominator,
    one whose advantage is 0 is. No masked token anywhere: all weights 0.
    """
    lengths = mask.sum(1, keepdim=True).double()                                # (B, 1)
    sequences = (lengths > 0).sum()
    if aggregation == "token":
        denominator = lengths.sum().expand_as(lengths)
    elif aggregation == "sequence":
        denominator = lengths * sequences
    elif aggregation == "constant":
        if not max_tokens:
            raise ValueError(f"aggregation 'constant' divides by max_tokens, which is {max_tokens}")
        denominator = (max_tokens * sequences).double().expand_as(lengths)
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}: token, sequence or constant")
    return torch.where(mask, 1 / denominator, 0)
