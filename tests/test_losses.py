"""losses.py against exact enumeration, against straight numpy, and against each pitfall that someone fell into."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import losses

F64 = torch.float64
POLICY_LOSSES = {name: getattr(losses, f"{name}_loss") for name in ("clip", "gspo", "cispo", "reinforce")}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def lengths_to_mask(lengths, T=None):
    lengths = torch.as_tensor(lengths)
    return torch.arange(T or int(lengths.max()))[None, :] < lengths[:, None]


# ----------------------------------------------------------------------------------- exact enumeration: V = 3, length 2
# theta (4, 3): row 0 is the first token's logits, row 1 + a the second token's after first token a. All nine outcomes are
# listed, so an expectation is a sum and an expected gradient has no sampling error.

OUTCOMES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
FULL = torch.ones(9, 2, dtype=torch.bool)
REWARDS = tensor(1.0, 0.0, -0.5, 2.0, 0.0, 0.3, 1.0, 1.0, -2.0)  # with ties: (9,)


def policy(seed, scale=1.0):
    return (torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def enumerate_logprobs(theta):
    a, b = OUTCOMES.T
    return torch.stack([theta[0].log_softmax(-1)[a], theta[1:].log_softmax(-1)[a, b]], 1)  # (9, 2)


def probs(logprobs):
    return logprobs.sum(1).exp()  # (9,)


def true_gradient(theta, outcome_values):
    """d/dtheta of sum_o p_o * value_o, by differentiating p itself."""
    return torch.autograd.grad(probs(enumerate_logprobs(theta)) @ outcome_values, theta)[0]


def expected_group_gradient(theta, rewards, G, kind):
    """The expectation over all 9^G groups of the gradient of 1/G sum_i A_i log p_i."""
    index = torch.tensor(list(itertools.product(range(9), repeat=G)))  # (9^G, G)
    logprobs = enumerate_logprobs(theta)
    chance = probs(logprobs).detach()[index].prod(1)  # (9^G,)
    advantages = losses.group_advantages(rewards[index.flatten()], G, kind=kind)
    rows = logprobs[index.flatten()]  # (9^G * G, 2)
    loss, _ = losses.reinforce_loss(rows, rows.detach(), advantages[:, None], torch.ones_like(rows, dtype=torch.bool))
    return torch.autograd.grad(-(loss.sum(1) * chance.repeat_interleave(G)).sum() / G, theta)[0]


@pytest.mark.parametrize("G", [2, 3])
def test_rloo_is_unbiased(G):
    theta = policy(0)
    assert torch.allclose(expected_group_gradient(theta, REWARDS, G, "rloo"), true_gradient(theta, REWARDS), rtol=0, atol=1e-14)


@pytest.mark.parametrize("G", [2, 3])
@pytest.mark.parametrize("kind", ["dr_grpo", "reinforce++-baseline"])
def test_mean_baseline_shrinks_the_gradient(G, kind):
    theta = policy(1)
    expected = (G - 1) / G * true_gradient(theta, REWARDS)
    assert torch.allclose(expected_group_gradient(theta, REWARDS, G, kind), expected, rtol=0, atol=1e-14)


def test_reinforce_plus_plus_has_no_group_baseline():
    theta = policy(2)
    got = expected_group_gradient(theta, REWARDS, 1, "reinforce++")
    assert torch.allclose(got, true_gradient(theta, REWARDS), rtol=0, atol=1e-14)


def test_std_reweights_prompts():
    """Of two prompts of different difficulty, GRPO scales each one's true gradient by a different factor; RLOO by 1.

    (With 0/1 rewards and G of 2 or 3 every mixed group has the same std, so it takes G = 4 to see it.)
    """
    theta, factors = policy(3), {"grpo": [], "rloo": []}
    for rewards in (tensor(1, 0, 0, 0, 0, 0, 0, 0, 0), tensor(1, 1, 1, 1, 0, 0, 0, 0, 0)):  # hard, even
        for kind, found in factors.items():
            got, true = expected_group_gradient(theta, rewards, 4, kind), true_gradient(theta, rewards)
            found.append(float(got.norm() / true.norm()))
            assert torch.allclose(got, found[-1] * true, rtol=0, atol=1e-12)  # right direction within one prompt, always
    assert factors["rloo"] == pytest.approx([1, 1]) and abs(factors["grpo"][0] - factors["grpo"][1]) > 0.02


def kl(p_theta, q_theta, hold=None):
    """KL(p || q) over whole sequences. With `hold`, prefixes are drawn from hold and only the token KLs are differentiated."""
    p, q = enumerate_logprobs(p_theta), enumerate_logprobs(q_theta)
    if hold is None:
        return probs(p) @ (p - q).sum(1)
    P, Q = p_theta.log_softmax(-1), q_theta.log_softmax(-1)  # (4, 3): every prefix's next-token distribution
    reach = torch.cat([torch.ones(1, dtype=F64), hold[0].softmax(-1)]).detach()  # (4,): empty prefix, then each first token
    return reach @ (P.exp() * (P - Q)).sum(1)


def test_kl_expectations():
    theta, ref = policy(4).detach(), policy(5).detach()
    logprobs, ref_logprobs = enumerate_logprobs(theta), enumerate_logprobs(ref)
    estimates = {kind: losses.kl_estimate(logprobs, ref_logprobs, FULL, kind=kind).sum(1) for kind in ("k1", "k2", "k3")}
    expectation = {kind: float(probs(logprobs) @ estimate) for kind, estimate in estimates.items()}
    assert expectation["k1"] == pytest.approx(float(kl(theta, ref)), abs=1e-14)
    assert expectation["k3"] == pytest.approx(float(kl(theta, ref)), abs=1e-14)
    assert abs(expectation["k2"] - float(kl(theta, ref))) > 0.01  # biased ...
    near = theta + 1e-3 * ref  # ... but right to second order
    k2 = losses.kl_estimate(enumerate_logprobs(near), logprobs, FULL, kind="k2").sum(1)
    assert float(probs(enumerate_logprobs(near)) @ k2) == pytest.approx(float(kl(near, theta)), rel=2e-3)
    assert losses.kl_estimate(logprobs, ref_logprobs, FULL, kind="k3").min() >= 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_kl_loss_gradients(kind, unit):
    """k1 has none, k2 has KL(pi || ref)'s, k3 has KL(ref || pi)'s: exactly for whole sequences, at each prefix for tokens."""
    theta, ref = policy(6), policy(7)
    logprobs, ref_logprobs, mask = enumerate_logprobs(theta), enumerate_logprobs(ref).detach(), FULL
    if unit == "sequence":
        logprobs, ref_logprobs, mask = logprobs.sum(1, keepdim=True), ref_logprobs.sum(1, keepdim=True), FULL[:, :1]
    weights = probs(logprobs).detach()  # the sampling is not differentiated: this is what "KL as a loss" does
    got = torch.autograd.grad(weights @ losses.kl_estimate(logprobs, ref_logprobs, mask, kind=kind).sum(1), theta)[0]
    hold = theta.detach() if unit == "token" else None
    true = {"k1": lambda: 0 * theta.sum(), "k2": lambda: kl(theta, ref, hold), "k3": lambda: kl(ref, theta, hold)}[kind]()
    assert torch.allclose(got, torch.autograd.grad(true, theta)[0], rtol=0, atol=1e-14)


def test_k1_in_the_reward_is_exact():
    """Through token_rewards and rewards_to_go the gradient is that of E[R] - coef * KL(pi || ref), the path's part included."""
    theta, ref, coef = policy(8), policy(9), 0.3
    logprobs, ref_logprobs = enumerate_logprobs(theta), enumerate_logprobs(ref).detach()
    rewards = losses.token_rewards(REWARDS, logprobs.detach(), ref_logprobs, FULL, kl_coef=coef)
    loss, _ = losses.reinforce_loss(logprobs, logprobs.detach(), losses.rewards_to_go(rewards, FULL), FULL)
    got = -torch.autograd.grad(probs(logprobs).detach() @ loss.sum(1), theta, retain_graph=True)[0]
    true = torch.autograd.grad(probs(logprobs) @ REWARDS - coef * kl(theta, ref), theta)[0]
    assert torch.allclose(got, true, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------------------------- GAE, on-policy losses


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 999))
def test_gae_is_the_double_sum(lengths, gamma, lam, seed):
    """Over ragged rows; a state's value sits at the position of the token sampled in it, and V = 0 after the last token."""
    rng, mask = np.random.default_rng(seed), lengths_to_mask(lengths, 7)
    rewards, values = rng.normal(size=(2, len(lengths), 7))
    rewards[~mask.numpy()] = values[~mask.numpy()] = np.nan
    advantages, returns = losses.gae(torch.tensor(rewards), torch.tensor(values), mask, gamma=gamma, lam=lam)
    expected = np.zeros_like(rewards)
    for i, n in enumerate(lengths):
        for t in range(n):
            for u in range(t, n):
                following = values[i, u + 1] if u + 1 < n else 0.0
                expected[i, t] += (gamma * lam) ** (u - t) * (rewards[i, u] + gamma * following - values[i, u])
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=0, atol=1e-12)


def test_gae_carries_across_a_hole():
    """A token that is not the policy's (a tool's output) inside a row is no step: the same numbers as without it."""
    holed, short = torch.tensor([[True, False, True, True]]), torch.ones(1, 3, dtype=torch.bool)
    r, v = tensor([0.5, 9.0, -1.0, 2.0]), tensor([0.1, 9.0, 0.7, -0.3])
    with_hole = losses.gae(r, v, holed, gamma=0.9, lam=0.8)
    without = losses.gae(r[holed][None], v[holed][None], short, gamma=0.9, lam=0.8)
    for x, y in zip(with_hole, without):
        assert torch.equal(x[holed], y[0]) and not x[~holed].any()


def random_batch(seed, rows=6, T=7, spread=0.5):
    g = torch.Generator().manual_seed(seed)
    mask = lengths_to_mask(torch.randint(1, T + 1, (rows,), generator=g), T)
    logprobs, noise, ref = -torch.rand(3, rows, T, dtype=F64, generator=g) * 2
    advantages = torch.randn(rows, 1, dtype=F64, generator=g)
    return logprobs.requires_grad_(), logprobs.detach() + spread * (noise + 1), ref, advantages, mask


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_on_policy_every_loss_has_reinforces_gradient(name, aggregation):
    """One update per rollout: r = 1, clipping is inert, and the value of a clipped loss says nothing (it is -mean A)."""
    logprobs, _, _, advantages, mask = random_batch(10)
    weights = losses.token_weights(mask, aggregation, max_tokens=7)
    loss, metrics = POLICY_LOSSES[name](logprobs, logprobs.detach(), advantages, mask, clip_low=3e-4, clip_high=3e-4)
    got = torch.autograd.grad((weights * loss).sum(), logprobs)[0]
    assert torch.allclose(got, torch.where(mask, -weights * advantages, 0), rtol=0, atol=1e-15)
    assert not metrics["clip_frac"].any() and torch.equal(metrics["ratio"][mask], torch.ones_like(metrics["ratio"][mask]))
    if name in ("clip", "gspo"):
        assert torch.allclose(loss, torch.where(mask, -advantages, 0), rtol=0, atol=1e-15)


# -------------------------------------------------------------------------------------------------------- the pitfalls


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("G", [3, 7, 8])
def test_equal_rewards_are_exactly_zero(dtype, G):
    """Eight rewards of 0.1 in float32 have a std of 1e-9 and not 0: with eps 1e-9 their |A| was up to 0.83."""
    rewards = torch.full((G,), 0.1, dtype=dtype)
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce++-baseline"):
        assert not losses.group_advantages(rewards, G, kind=kind, eps=0.0).any()
    assert losses.keep_groups(rewards, G).tolist() == [False]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce++-baseline"])
def test_group_of_one_has_no_gradient(kind):
    """verl gave the raw reward in one function and 0 in another; OpenRLHF divided by zero. Here: no baseline, no advantage."""
    assert losses.group_advantages(tensor(3.0, -1.0), 1, kind=kind).tolist() == [0, 0]
    one_scored = torch.tensor([True, False, False])
    assert losses.group_advantages(tensor(3.0, 1.0, math.nan), 3, kind=kind, scored=one_scored).tolist() == [0, 0, 0]
    none_scored = torch.zeros(3, dtype=torch.bool)
    assert losses.group_advantages(tensor(3.0, 1.0, math.nan), 3, kind=kind, scored=none_scored).tolist() == [0, 0, 0]


def test_reinforce_plus_plus_keeps_the_raw_reward():
    scored = torch.tensor([True, True, False])
    assert losses.group_advantages(tensor(3.0, 3.0, math.nan), 3, kind="reinforce++", scored=scored).tolist() == [3, 3, 0]


def test_std_has_ddof_1_and_eps_is_added_to_it():
    R = np.array([0.0, 1.0, 5.0, 2.0])
    got = losses.group_advantages(torch.tensor(R), 4, kind="grpo", eps=0.5)
    np.testing.assert_allclose(got, (R - R.mean()) / (R.std(ddof=1) + 0.5), rtol=1e-15)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce++-baseline"])
def test_unscored_completions_are_outside_the_baseline(kind):
    rewards, scored = tensor(1.0, math.nan, 4.0, 2.0), torch.tensor([True, False, True, True])
    got = losses.group_advantages(rewards, 4, kind=kind, scored=scored)
    assert got[1] == 0 and torch.equal(got[scored], losses.group_advantages(rewards[scored], 3, kind=kind))


def test_group_must_divide_the_batch():
    with pytest.raises(ValueError, match="7 rewards do not divide into groups of 4"):
        losses.group_advantages(torch.zeros(7), 4, kind="grpo")


@pytest.mark.parametrize("call", [
    lambda: losses.group_advantages(torch.zeros(2), 2, kind="gpro"),
    lambda: losses.kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), FULL[:1, :1], kind="k4"),
    lambda: losses.engine_correction(torch.zeros(1, 1), torch.zeros(1, 1), FULL[:1, :1], kind="tis"),
    lambda: losses.token_weights(FULL[:1, :1], "mean"),
    lambda: losses.token_weights(FULL[:1, :1], "constant"),
    lambda: losses.overlong_penalty(torch.zeros(1), 10, 0),
])
def test_a_wrong_name_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_keep_groups():
    nan = math.nan
    rewards = tensor(1, 0, 1, 1, 0, 1, nan, 1, 5, nan)
    scored = torch.tensor([True] * 5 + [False] + [False, True] + [True, False])
    assert losses.keep_groups(rewards, 2, scored).tolist() == [True, False, False, False, False]
    scored = torch.tensor([True, True, False] * 2)
    assert losses.keep_groups(tensor(1, 0, nan, 1, 1, nan), 3, scored).tolist() == [True, False]


def test_soft_overlong_penalty():
    got = losses.overlong_penalty(torch.tensor([1, 80, 85, 90, 100, 120]), 100, 20)
    assert got.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1]) and got.dtype == F64


def test_whitening():
    """Over masked tokens only, ddof 1, masked again afterwards: before that the padding came out as -mean / std."""
    values, mask = tensor([1.0, 2.0, math.nan], [7.0, math.inf, -math.inf]), lengths_to_mask([2, 1], 3)
    x = np.array([1.0, 2.0, 7.0])
    expected = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    got = losses.whiten(values, mask)
    np.testing.assert_allclose(got[mask], expected, rtol=1e-14)
    assert not got[~mask].any() and got.dtype == losses.whiten(values.float(), mask).dtype == F64
    np.testing.assert_allclose(losses.whiten(values, mask, shift_mean=False)[mask], expected + x.mean(), rtol=1e-14)


def test_whitening_zero_variance_is_zero():
    for mask in (torch.ones(2, 3, dtype=torch.bool), lengths_to_mask([1, 0], 3), torch.zeros(2, 3, dtype=torch.bool)):
        assert losses.whiten(torch.full((2, 3), 0.1, dtype=F64), mask).tolist() == [[0] * 3] * 2


def test_the_score_sits_on_the_last_valid_token():
    """TRL's PPO puts it one later, and GAE differs. A row without tokens gets none."""
    mask, kl_logprobs = lengths_to_mask([1, 3, 0], 3), tensor([-1, -9, math.nan], [-1, -2, -3], [math.nan] * 3)
    got = losses.token_rewards(tensor(5, 6, math.nan), kl_logprobs, kl_logprobs - 1, mask, kl_coef=0.5)
    assert got.tolist() == [[4.5, 0, 0], [-0.5, -0.5, 5.5], [0, 0, 0]]
    assert losses.token_rewards(tensor(5, 6, 7), None, None, mask).tolist() == [[5, 0, 0], [0, 0, 6], [0, 0, 0]]


def test_rewards_to_go():
    mask = lengths_to_mask([3, 2], 3)
    got = losses.rewards_to_go(tensor([1, 2, 4], [8, 16, math.nan]), mask, gamma=0.5)
    assert got.tolist() == [[3, 4, 4], [16, 16, 0]]
    assert losses.rewards_to_go(tensor([1, 2, 4], [8, 16, math.nan]), mask).tolist() == [[7, 6, 4], [24, 16, 0]]


def one_token(name, log_ratio, advantage, **options):
    logprobs = tensor([log_ratio - 1.0]).requires_grad_()
    loss, metrics = POLICY_LOSSES[name](logprobs, tensor([-1.0]), tensor([advantage]), FULL[:1, :1], **options)
    return float(loss.detach()), float(torch.autograd.grad(loss.sum(), logprobs)[0]), float(metrics["clip_frac"])


def test_clip_low_and_high():
    r = math.exp
    assert one_token("clip", 0.3, 2.0, **WIDE) == pytest.approx((-1.28 * 2, 0, 1))  # too far up, A > 0: cut
    assert one_token("clip", 0.3, -2.0, **WIDE) == pytest.approx((2 * r(0.3), 2 * r(0.3), 0))  # too far up, A < 0: pulled back
    assert one_token("clip", -0.3, -2.0, **WIDE) == pytest.approx((0.8 * 2, 0, 1))
    assert one_token("clip", -0.3, 2.0, **WIDE) == pytest.approx((-2 * r(-0.3), -2 * r(-0.3), 0))
    assert one_token("clip", 0.24, 2.0, **WIDE)[2] == 0 and one_token("clip", 0.24, 2.0, clip_low=0.2, clip_high=0.2)[2] == 1


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_dual_clip_is_off_by_default(name):
    """verl has it on at 3; the PPO paper does not have it."""
    assert one_token(name, 2.0, -1.5, **WIDE) == pytest.approx((1.5 * math.exp(2), 1.5 * math.exp(2), 0))
    assert one_token(name, 2.0, -1.5, **WIDE, dual_clip=3.0) == pytest.approx((4.5, 0, 1))
    assert one_token(name, 2.0, 1.5, **WIDE, dual_clip=3.0) == one_token(name, 2.0, 1.5, **WIDE)


def test_cispo_bounds_are_1_minus_low_and_1_plus_high():
    """As in verl. TRL's epsilon_high is the maximum itself: under that reading 0.28 would shrink every gradient to 0.28."""
    assert one_token("cispo", 0.0, 2.0, **WIDE) == pytest.approx((2, -2, 0))
    assert one_token("cispo", 1.0, 2.0, **WIDE) == pytest.approx((0, -1.28 * 2, 1), abs=1e-15)  # clipped, and still learns
    assert one_token("cispo", -1.0, -2.0, **WIDE) == pytest.approx((-2 * 0.8 * 2, 0.8 * 2, 1))
    assert one_token("cispo", -1.0, -2.0, clip_low=1.0, clip_high=4.0)[1] == pytest.approx(2 * math.exp(-1))  # no lower bound


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_metrics(name):
    """Detached; approx_kl is that of the token ratios whatever the loss; GSPO's ratio is its sequence's."""
    logprobs, old, _, advantages, mask = random_batch(12)
    _, metrics = POLICY_LOSSES[name](logprobs, old, advantages, mask, **WIDE)
    log_ratio = (logprobs - old).detach()
    r = log_ratio.exp()
    assert torch.allclose(metrics["approx_kl"][mask], (r - 1 - log_ratio)[mask]) and not metrics["approx_kl"].requires_grad
    if name == "gspo":
        r = torch.stack([x[m].mean().exp().expand(7) for x, m in zip(log_ratio, mask)])
    assert torch.allclose(metrics["ratio"][mask], r[mask]) and not metrics["ratio"].requires_grad


def test_value_loss_is_pessimistic():
    mask = torch.ones(1, 4, dtype=torch.bool)
    values, old, returns = tensor([1.0, 1.0, 0.1, 1.0]).requires_grad_(), tensor([0.0] * 4), tensor([2.0, 0.2, 2.0, -1.0])
    loss, cut = losses.value_loss(values, old, returns, mask, clip=0.2)
    assert loss[0].tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 0.8**2, 0.5 * 1.9**2, 0.5 * 2**2])
    assert cut.tolist() == [[1, 0, 0, 0]]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [pytest.approx([0, 0.8, -1.9, 2.0])]
    loss, cut = losses.value_loss(values, old, returns, mask)
    assert loss[0].tolist() == pytest.approx([0.5, 0.5 * 0.8**2, 0.5 * 1.9**2, 2]) and not cut.any()


def test_engine_correction():
    old, engine = tensor([3.0, 1.0, 0.4, math.nan]).log(), tensor([1.0, 1.0, 1.0, math.nan]).log()
    old.requires_grad_()
    mask = lengths_to_mask([3], 4)
    for kind, weights, cut in [
        ("none", [1, 1, 1, 0], [0, 0, 0, 0]),
        ("truncate", [2, 1, 0.4, 0], [1, 0, 0, 0]),
        ("mask", [0, 1, 0, 0], [1, 0, 1, 0]),
    ]:
        got, metrics = losses.engine_correction(old, engine, mask, kind=kind, low=0.5, high=2.0)
        assert got[0].tolist() == pytest.approx(weights) and metrics["engine_cut"][0].tolist() == cut and not got.requires_grad
        assert metrics["engine_ratio"][0, :3].tolist() == pytest.approx([3, 1, 0.4])
    got, _ = losses.engine_correction(old, engine, mask, kind="mask", low=0.3, high=3.5)
    assert got[0].tolist() == pytest.approx([3, 1, 0.4, 0])  # inside the bounds the ratio itself, not 1


def test_token_weights():
    """A row of False (unscored, filtered) is in no denominator, and no token at all is no NaN."""
    mask = lengths_to_mask([1, 3, 0], 4)
    assert losses.token_weights(mask, "token")[mask].tolist() == [1 / 4] * 4
    assert losses.token_weights(mask, "sequence")[mask].tolist() == [1 / 2] + [1 / 6] * 3
    assert losses.token_weights(mask, "constant", max_tokens=5)[mask].tolist() == [1 / 10] * 4
    for aggregation in ("token", "sequence", "constant"):
        weights = losses.token_weights(mask, aggregation, max_tokens=5)
        assert not weights[~mask].any() and weights.dtype == F64
        assert not losses.token_weights(torch.zeros_like(mask), aggregation, max_tokens=5).any()


def test_adaptive_kl():
    assert losses.adaptive_kl(0.2, 9.0, target=6.0, horizon=100, n=10) == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert losses.adaptive_kl(0.2, 6.6, target=6.0, horizon=100, n=10) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert losses.adaptive_kl(0.2, 0.0, target=6.0, horizon=100, n=10) == pytest.approx(0.2 * (1 - 0.2 * 0.1))


def test_masked_mean():
    mask = lengths_to_mask([1, 2], 3)
    assert losses.masked_mean(tensor([1, math.nan, math.nan], [2, 6, math.inf]), mask) == 3
    assert losses.masked_mean(tensor([math.nan]), torch.zeros(1, 1, dtype=torch.bool)) == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_padding_never_leaks(garbage, dtype):
    """Whatever lies in the padding, values, metrics and gradients are the same, and zero there. (0 * nan is nan.)"""

    def everything(pad):
        logprobs, old, ref, advantages, mask = random_batch(11)
        leaf, old, ref, advantages = (torch.where(mask, x.detach(), pad).to(dtype).requires_grad_(x is logprobs)
                                      for x in (logprobs, old, ref, advantages))
        scores = tensor(*range(6))
        out = []
        for loss in POLICY_LOSSES.values():
            token_loss, metrics = loss(leaf, old, advantages, mask, **WIDE, dual_clip=3.0)
            out += [token_loss, metrics["clip_frac"], metrics["approx_kl"], torch.where(mask, metrics["ratio"], 0)]
            assert token_loss.dtype == dtype
        out += [losses.kl_estimate(leaf, ref, mask, kind=k) for k in ("k1", "k2", "k3")]
        out += losses.value_loss(leaf, old, ref.double(), mask, clip=0.2)
        out += [(losses.token_weights(mask, "token") * x).to(dtype) for x in out if x.requires_grad]
        kinds = ("none", "truncate", "mask")
        out += [losses.engine_correction(old, ref, mask, kind=k)[0] for k in kinds]
        out += [losses.engine_correction(old, ref, mask, kind=k)[1]["engine_cut"] for k in kinds]
        rewards = losses.token_rewards(scores, old, ref, mask, kl_coef=0.1)
        out += [rewards, *losses.gae(old, ref, mask, gamma=0.9, lam=0.9), losses.rewards_to_go(old, mask)]
        out += [losses.whiten(old, mask)]
        gradient = torch.autograd.grad(sum(x.sum() for x in out if x.requires_grad), leaf)[0]
        assert not any(x[~mask].any() for x in [*out, gradient])
        return [*out, gradient, losses.masked_mean(old, mask)]

    for clean, dirty in zip(everything(0.0), everything(garbage), strict=True):
        assert torch.equal(clean, dirty) and dirty.isfinite().all()


# ---------------------------------------------------- each recipe against straight numpy, which imports nothing from losses

RECIPES = {
    "grpo": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), aggregation="sequence", kl_loss=("k3", 0.04)),
    "grpo with k1": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), aggregation="sequence", kl_loss=("k1", 0.04)),
    "grpo with k2": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), aggregation="sequence", kl_loss=("k2", 0.04)),
    "dr_grpo": dict(advantage="dr_grpo", loss="clip", clip=(0.2, 0.2), aggregation="constant"),
    "dapo": dict(advantage="grpo", loss="clip", clip=(0.2, 0.28), aggregation="token", overlong=True),
    "gspo": dict(advantage="grpo", loss="gspo", clip=(3e-4, 4e-4), aggregation="sequence", spread=2e-3),
    "cispo": dict(advantage="grpo", loss="cispo", clip=(1.0, 0.28), aggregation="token"),
    "rloo": dict(advantage="rloo", loss="reinforce", clip=(None, None), aggregation="token", kl_reward=0.05),
    "reinforce++": dict(advantage="reinforce++", loss="clip", clip=(0.2, 0.2), aggregation="token", kl_reward=0.05, tokens=True),
    "reinforce++-baseline": dict(advantage="reinforce++-baseline", loss="clip", clip=(0.2, 0.2), aggregation="token", tokens=True,
                                 kl_loss=("k2", 0.05)),
    "dual clip": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), dual=1.5, aggregation="token"),
    "tis": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), aggregation="token", engine="truncate"),
    "icepop": dict(advantage="grpo", loss="clip", clip=(0.2, 0.2), aggregation="token", engine="mask"),
    "ppo": dict(advantage="gae", loss="clip", clip=(0.2, 0.2), aggregation="token", kl_reward=0.05, value_clip=0.2),
    "ppo, no value clip": dict(advantage="gae", loss="clip", clip=(0.2, 0.2), aggregation="sequence", value_clip=None),
}
GROUP, PROMPTS, T, MAX_TOKENS = 4, 5, 9, 12
LOW, HIGH = 0.8, 1.3  # of the engine correction
GAMMA, LAM, EPS = 0.97, 0.9, 1e-6


def ragged(seed, spread=0.4):
    """A global batch as plain numpy. Row 5 could not be scored, row 9 is out of the loss, group 3's rewards are equal."""
    rng, N = np.random.default_rng(seed), GROUP * PROMPTS
    b = {name: -rng.exponential(size=(N, T)) for name in ("old", "ref")}
    b["logprobs"], b["engine"] = (b["old"] + spread * rng.normal(size=(N, T)) for _ in range(2))
    b["old_values"] = rng.normal(size=(N, T))
    b["values"] = b["old_values"] + 0.4 * rng.normal(size=(N, T))
    b["lengths"], b["rewards"] = rng.integers(1, T + 1, size=N), rng.normal(size=N)
    b["rewards"][3 * GROUP : 4 * GROUP] = 0.1
    b["scored"], b["in_loss"] = np.arange(N) != 5, (np.arange(N) != 5) & (np.arange(N) != 9)
    b["rewards"][5] = np.nan
    for i in range(N):
        for name in ("old", "ref", "logprobs", "engine", "old_values", "values"):
            b[name][i, b["lengths"][i] :] = np.nan
    return b


def numpy_recipe(b, advantage, loss, clip, aggregation, kl_loss=None, kl_reward=0.0, tokens=False, dual=None, engine=None,
                 overlong=False, value_clip="absent", spread=None):
    """Loss and analytic gradients by loops over sequences and tokens: (policy loss, d/dlogprobs, value loss, d/dvalues)."""
    N, L = len(b["rewards"]), b["lengths"]
    R = [float(r) for r in b["rewards"]]
    if overlong:  # Lmax 9, Lc 4
        R = [r + (0 if n <= 5 else (5 - n) / 4 if n <= 9 else -1) for r, n in zip(R, L)]
    k1 = [[b["old"][i, t] - b["ref"][i, t] for t in range(L[i])] for i in range(N)]
    if kl_reward and advantage == "rloo":
        R = [r - kl_reward * sum(k) for r, k in zip(R, k1)]
    # advantages, one list of tokens a row
    A = [[0.0] * n for n in L]
    members = [i for i in range(N) if b["in_loss"][i]]
    if advantage in ("gae", "reinforce++", "reinforce++-baseline"):
        returns = [[0.0] * n for n in L]
        for i in members:
            peers = [R[j] for j in range(i // GROUP * GROUP, i // GROUP * GROUP + GROUP) if b["scored"][j]]
            score = R[i] - (sum(peers) / len(peers) if advantage.endswith("baseline") and min(peers) < max(peers) else 0)
            if advantage.endswith("baseline") and min(peers) == max(peers):
                score = 0.0
            r = [(score if t == L[i] - 1 else 0.0) - kl_reward * k1[i][t] for t in range(L[i])]
            V = list(b["old_values"][i, : L[i]]) + [0.0] if advantage == "gae" else [0.0] * (L[i] + 1)
            gamma, lam = (GAMMA, LAM) if advantage == "gae" else (1.0, 1.0)
            for t in range(L[i]):
                A[i][t] = sum((gamma * lam) ** (u - t) * (r[u] + gamma * V[u + 1] - V[u]) for u in range(t, L[i]))
                returns[i][t] = A[i][t] + V[t]
        pool = np.array([a for i in members for a in A[i]])
        mean, std = pool.mean(), math.sqrt(((pool - pool.mean()) ** 2).sum() / (len(pool) - 1) + 1e-8)
        for i in members:
            A[i] = [(a - mean) / std for a in A[i]]
    else:
        for i in members:
            peers = [j for j in range(i // GROUP * GROUP, i // GROUP * GROUP + GROUP) if b["scored"][j]]
            rs = [R[j] for j in peers]
            mean = sum(rs) / len(rs)
            if advantage == "grpo":
                a = (R[i] - mean) / (math.sqrt(sum((r - mean) ** 2 for r in rs) / (len(rs) - 1)) + EPS)
            elif advantage == "rloo":
                a = R[i] - sum(R[j] for j in peers if j != i) / (len(peers) - 1)
            else:
                a = R[i] - mean
            A[i] = [0.0 if min(rs) == max(rs) else a] * L[i]
    # losses
    total = sum(L[i] for i in members)
    value = policy = 0.0
    grad, value_grad = np.zeros((N, T)), np.zeros((N, T))
    for i in members:
        d = [b["logprobs"][i, t] - b["old"][i, t] for t in range(L[i])]
        s = math.exp(sum(d) / L[i])
        for t in range(L[i]):
            w = {"token": 1 / total, "sequence": 1 / L[i] / len(members), "constant": 1 / MAX_TOKENS / len(members)}[aggregation]
            c = 1.0
            if engine is not None:
                c = math.exp(b["old"][i, t] - b["engine"][i, t])
                c = min(c, HIGH) if engine == "truncate" else c if LOW <= c <= HIGH else 0.0
            a, lp = A[i][t], b["logprobs"][i, t]
            r = s if loss == "gspo" else math.exp(d[t])
            if loss in ("clip", "gspo"):
                bounded = min(max(r, 1 - clip[0]), 1 + clip[1])
                objective, slope = (r * a, r * a) if r * a <= bounded * a else (bounded * a, 0.0)
                if dual is not None and a < 0 and objective < dual * a:
                    objective, slope = dual * a, 0.0
            elif loss == "cispo":
                slope = min(max(r, 1 - clip[0]), 1 + clip[1]) * a
                objective = slope * lp
            else:
                objective, slope = a * lp, a
            policy -= w * c * objective
            grad[i, t] -= w * c * slope  # GSPO: ds/dlogp_t = s / |o|, summed over |o| tokens of weight w
            if kl_loss:
                kind, coef = kl_loss
                e = lp - b["ref"][i, t]
                k, dk = {"k1": (e, 1), "k2": (e * e / 2, e), "k3": (math.exp(-e) - 1 + e, 1 - math.exp(-e))}[kind]
                policy, grad[i, t] = policy + w * coef * k, grad[i, t] + w * coef * dk
            if value_clip != "absent":
                v, vo, target = b["values"][i, t], b["old_values"][i, t], returns[i][t]
                near = v if value_clip is None else vo + min(max(v - vo, -value_clip), value_clip)
                plain = (v - target) ** 2 >= (near - target) ** 2
                value += w * 0.5 * ((v if plain else near) - target) ** 2
                value_grad[i, t] = w * (v - target) if plain or abs(v - vo) < value_clip else 0.0
    return policy, grad, value, value_grad


def torch_recipe(b, advantage, loss, clip, aggregation, kl_loss=None, kl_reward=0.0, tokens=False, dual=None, engine=None,
                 overlong=False, value_clip="absent", spread=None, micro_batches=None):
    """The same through losses.py, as the scripts do it: advantages and weights on the global batch, then micro-batches."""
    x = {name: torch.tensor(value) for name, value in b.items()}
    mask = lengths_to_mask(x["lengths"], T) & x["in_loss"][:, None]
    logprobs, values, R = x["logprobs"].requires_grad_(), x["values"].requires_grad_(), x["rewards"]
    if overlong:
        R = R + losses.overlong_penalty(x["lengths"], 9, 4)
    if kl_reward and advantage == "rloo":
        k1 = losses.kl_estimate(x["old"], x["ref"], lengths_to_mask(x["lengths"], T), kind="k1")
        R = R - kl_reward * k1.sum(1)
    returns = torch.zeros_like(values)
    ref = x["ref"] if kl_reward else None
    if advantage == "gae":
        rewards = losses.token_rewards(R, x["old"], ref, mask, kl_coef=kl_reward)
        advantages, returns = losses.gae(rewards, x["old_values"], mask, gamma=GAMMA, lam=LAM)
        advantages = losses.whiten(advantages, mask)
    else:
        advantages = losses.group_advantages(R, GROUP, kind=advantage, eps=EPS, scored=x["scored"])
        if tokens:
            rewards = losses.token_rewards(advantages, x["old"], ref, mask, kl_coef=kl_reward)
            advantages = losses.whiten(losses.rewards_to_go(rewards, mask), mask)
        else:
            advantages = advantages[:, None]
    weights = losses.token_weights(mask, aggregation, max_tokens=MAX_TOKENS)
    policy = value = torch.zeros((), dtype=F64)
    for rows in micro_batches or [list(range(len(R)))]:
        width = max(1, int(mask[rows].sum(1).max()))  # a micro-batch is only as wide as its longest row

        def cut(name):
            return x[name][rows, :width]

        m, w, lp = mask[rows, :width], weights[rows, :width], logprobs[rows, :width]
        options = {"clip_low": clip[0], "clip_high": clip[1], "dual_clip": dual}
        token_loss, _ = POLICY_LOSSES[loss](lp, cut("old"), advantages[rows, :width], m, **options)
        if engine is not None:
            token_loss = token_loss * losses.engine_correction(cut("old"), cut("engine"), m, kind=engine, low=LOW, high=HIGH)[0]
        if kl_loss:
            token_loss = token_loss + kl_loss[1] * losses.kl_estimate(lp, cut("ref"), m, kind=kl_loss[0])
        policy = policy + (w * token_loss).sum()
        if value_clip != "absent":
            value_loss, _ = losses.value_loss(values[rows, :width], cut("old_values"), returns[rows, :width], m, clip=value_clip)
            value = value + (w * value_loss).sum()
    gradients = torch.autograd.grad(policy + value, [logprobs, values], allow_unused=True, materialize_grads=True)
    return policy.item(), gradients[0].numpy(), value.item(), gradients[1].numpy()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_equals_numpy(name, seed):
    recipe = RECIPES[name]
    b = ragged(seed, recipe.get("spread", 0.4))
    for got, expected in zip(torch_recipe(b, **recipe), numpy_recipe(b, **recipe), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    assert np.abs(numpy_recipe(b, **recipe)[1]).max() > 1e-4  # and not because there is nothing to compare


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", RECIPES)
def test_any_split_into_micro_batches_is_the_whole(name, data):
    """A mean of micro-batch means was the commonest bug of all. Any partition of the rows, in any order, is the same update."""
    recipe = RECIPES[name]
    b = ragged(data.draw(st.integers(0, 99)), recipe.get("spread", 0.4))
    rows = data.draw(st.permutations(range(GROUP * PROMPTS)))
    ends = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1), max_size=6)))
    micro_batches = [list(rows[i:j]) for i, j in zip([0, *ends], [*ends, len(rows)])]
    for got, expected in zip(torch_recipe(b, **recipe, micro_batches=micro_batches), torch_recipe(b, **recipe), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)
