"""losses.py against exact enumeration, and against bugs of others. Its losses, advantages and
corrections are held against reference.py in test_variants.py, with those of variants/."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses
import reference
from preflight.loss_flags import LossArgs

F64, nan, inf = torch.float64, math.nan, math.inf
WIDE = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
BASELINES = ["grpo", "dr_grpo", "rloo", "reinforce++-baseline"]


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def close(x, y, atol=1e-14):
    return torch.allclose(x, y, rtol=0, atol=atol)


def gradient(y, x):
    return torch.autograd.grad(y, x, retain_graph=True)[0]


def row_mask(lengths, T=None):
    lengths = torch.as_tensor(lengths)
    return torch.arange(T or int(lengths.max()))[None, :] < lengths[:, None]


def token_weights(mask, aggregation, max_tokens):
    """The weight of each token, (B, T)."""
    weights = losses.token_weights(mask.sum(1), aggregation, max_tokens=max_tokens)
    return torch.where(mask, weights.view(-1, 1), 0)


def group_advantages(rewards, group, kind, eps=1e-6, scored=None):
    scored = rewards == rewards if scored is None else torch.as_tensor(scored)
    return losses.group_advantages(rewards, group, kind=kind, eps=eps, scored=scored)


# ---- exact enumeration: V = 3, length 2
# theta (4, 3): row 0 has the logits of the first token, row 1 + a of the second after token a.
# All nine outcomes are listed, so an expectation is a sum.

OUTCOMES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
FULL = torch.ones(9, 2, dtype=torch.bool)
REWARDS = tensor(1.0, 0.0, -0.5, 2.0, 0.0, 0.3, 1.0, 1.0, -2.0)  # with ties: (9,)


def policy(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, dtype=F64, generator=generator, requires_grad=True)


def all_logprobs(theta):
    a, b = OUTCOMES.T
    return torch.stack([theta[0].log_softmax(-1)[a], theta[1:].log_softmax(-1)[a, b]], 1)  # (9, 2)


def probs(logprobs):
    return logprobs.sum(1).exp()  # (9,)


def reinforce(logprobs, advantages, mask):
    return losses.reinforce_loss(logprobs, logprobs.detach(), advantages, mask, **WIDE)[0]


def true_gradient(theta, outcome_values):
    """d/dtheta of sum_o p_o * value_o, by differentiating p itself."""
    return gradient(probs(all_logprobs(theta)) @ outcome_values, theta)


def expected_group_gradient(theta, rewards, G, kind):
    """The expectation over all 9^G groups of the gradient of 1/G sum_i A_i log p_i."""
    index = torch.tensor(list(itertools.product(range(9), repeat=G)))  # (9^G, G)
    logprobs = all_logprobs(theta)
    chance = probs(logprobs).detach()[index].prod(1)  # (9^G,)
    advantages = group_advantages(rewards[index.flatten()], G, kind)
    rows = logprobs[index.flatten()]  # (9^G * G, 2)
    loss = reinforce(rows, advantages[:, None], torch.ones_like(rows, dtype=torch.bool))
    return gradient(-(loss.sum(1) * chance.repeat_interleave(G)).sum() / G, theta)


@pytest.mark.parametrize("kind", ["rloo", "dr_grpo", "reinforce++-baseline"])
@pytest.mark.parametrize("G", [2, 3])
def test_rloo_is_unbiased_and_a_mean_baseline_shrinks_the_gradient(kind, G):
    theta, factor = policy(1), 1 if kind == "rloo" else (G - 1) / G
    got = expected_group_gradient(theta, REWARDS, G, kind)
    assert close(got, factor * true_gradient(theta, REWARDS))


def test_std_reweights_prompts():
    """GRPO scales the gradients of an easy and a hard prompt differently; RLOO by 1.

    With 0/1 rewards and G of 2 or 3 every mixed group has the same std, so G is 4.
    """
    theta, factors = policy(3), {"grpo": [], "rloo": []}
    for rewards in (tensor(1, 0, 0, 0, 0, 0, 0, 0, 0), tensor(1, 1, 1, 1, 0, 0, 0, 0, 0)):
        for kind, found in factors.items():
            got = expected_group_gradient(theta, rewards, 4, kind)
            true = true_gradient(theta, rewards)
            found.append(float(got.norm() / true.norm()))
            assert close(got, found[-1] * true, 1e-12)  # the direction is right
    assert factors["rloo"] == pytest.approx([1, 1])
    assert abs(factors["grpo"][0] - factors["grpo"][1]) > 0.02


def kl(p_theta, q_theta, hold=None):
    """KL(p || q) of sequences; of the tokens where `hold` samples the prefixes."""
    p, q = all_logprobs(p_theta), all_logprobs(q_theta)
    if hold is None:
        return probs(p) @ (p - q).sum(1)
    P, Q = p_theta.log_softmax(-1), q_theta.log_softmax(-1)  # (4, 3): next token, for every prefix
    reach = torch.cat([torch.ones(1, dtype=F64), hold[0].softmax(-1)]).detach()  # (4,)
    return reach @ (P.exp() * (P - Q)).sum(1)


def test_kl_expectations():
    theta, ref = policy(4).detach(), policy(5).detach()
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(ref)
    true = float(kl(theta, ref))

    def estimate(*logprobs, kind):
        return losses.kl_estimate(*logprobs, FULL, kind=kind)

    def mean(logprobs, other, kind):
        return float(
            probs(logprobs) @ estimate(logprobs, other, kind=kind).sum(1))

    for kind in ("k1", "k3"):
        assert mean(logprobs, ref_logprobs, kind) == pytest.approx(true, abs=1e-14)
    assert abs(mean(logprobs, ref_logprobs, "k2") - true) > 0.01  # right to second order only
    near = theta + 1e-3 * ref
    got = mean(all_logprobs(near), logprobs, "k2")
    assert got == pytest.approx(float(kl(near, theta)), rel=2e-3)
    assert estimate(logprobs, ref_logprobs, kind="k3").min() >= 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_kl_loss_gradients(kind, unit):
    """k1 has none, k2 has KL(pi || ref)'s, k3 has KL(ref || pi)'s."""
    theta, ref, mask = policy(6), policy(7), FULL
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(ref).detach()
    if unit == "sequence":
        logprobs, ref_logprobs = (x.sum(1, keepdim=True) for x in (logprobs, ref_logprobs))
        mask = FULL[:, :1]
    weights = probs(logprobs).detach()  # "KL as a loss" does not differentiate the sampling
    estimate = losses.kl_estimate(logprobs, ref_logprobs, mask, kind=kind).sum(1)
    got = gradient(weights @ estimate, theta)
    hold = theta.detach() if unit == "token" else None
    true = {"k1": 0 * theta.sum(), "k2": kl(theta, ref, hold), "k3": kl(ref, theta, hold)}[kind]
    assert close(got, gradient(true, theta))


def test_k1_in_the_reward_is_exact():
    """With token_rewards and rewards_to_go the gradient is that of E[R] - coef * KL(pi || ref)."""
    theta, ref, coef = policy(8), policy(9), 0.3
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(ref).detach()
    rewards = losses.token_rewards(REWARDS, logprobs.detach(), ref_logprobs, FULL, kl_coef=coef)
    loss = reinforce(logprobs, losses.rewards_to_go(rewards, FULL), FULL)
    got = -gradient(probs(logprobs).detach() @ loss.sum(1), theta)
    assert close(got, gradient(probs(logprobs) @ REWARDS - coef * kl(theta, ref), theta))


# ---- GAE, on-policy losses


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1),
    st.integers(0, 999))
def test_gae_is_the_double_sum(lengths, gamma, lam, seed):
    """Over ragged rows. A state's value is where its token is."""
    rng, mask = np.random.default_rng(seed), row_mask(lengths, 7)
    rewards, values = rng.normal(size=(2, len(lengths), 7))
    rewards[~mask.numpy()] = values[~mask.numpy()] = nan
    advantages, returns = losses.gae(
        torch.tensor(rewards), torch.tensor(values), mask, gamma=gamma, lam=lam)
    expected = np.zeros_like(rewards)
    for i, n in enumerate(lengths):
        for t in range(n):
            for u in range(t, n):
                following = values[i, u + 1] if u + 1 < n else 0.0
                delta = rewards[i, u] + gamma * following - values[i, u]
                expected[i, t] += (gamma * lam) ** (u - t) * delta
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8).filter(any), st.integers(0, 999))
def test_gae_and_the_score_carry_across_holes(sampled, seed):
    """A reply inside a row changes no number of the tokens that were sampled: the row without it is
    the double sum above."""
    holed, rng = torch.tensor([sampled]), np.random.default_rng(seed)
    v, logp, ref = torch.tensor(rng.normal(size=(3, 1, len(sampled))))
    v[~holed] = ref[~holed] = nan

    def cut(x):
        return x[holed][None]

    def numbers(v, logp, ref, mask):
        return (
            r := losses.token_rewards(tensor(2.5), logp, ref, mask, kl_coef=0.1),
            *losses.gae(r, v, mask, gamma=0.9, lam=0.8), losses.rewards_to_go(r, mask))

    there, expected = numbers(v, logp, ref, holed), numbers(*map(cut, (v, logp, ref, holed)))
    for x, y in zip(there[1:], expected[1:], strict=True):
        assert torch.equal(x[holed], y[0]) and not x[~holed].any()
    assert torch.equal(there[0][holed], expected[0][0])
    assert close(there[3][holed][0], there[0][holed].sum())


def random_batch(seed, rows=6, T=7):
    g = torch.Generator().manual_seed(seed)
    mask = row_mask(torch.randint(1, T + 1, (rows,), generator=g), T)
    logprobs, noise, ref = -torch.rand(3, rows, T, dtype=F64, generator=g) * 2
    advantages = torch.randn(rows, 1, dtype=F64, generator=g)
    return logprobs.requires_grad_(), logprobs.detach() + 0.5 * (noise + 1), ref, advantages, mask


# ---- rewards, advantages


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("G", [3, 7, 8])
def test_equal_rewards_are_exactly_zero(dtype, G):
    """Eight rewards of 0.1 in float32 have a std of 1e-9."""
    rewards = torch.full((G,), 0.1, dtype=dtype)
    for kind in BASELINES:
        assert not group_advantages(rewards, G, kind, eps=0.0).any()
    assert losses.keep_groups(rewards, G, rewards > 0).tolist() == [False]


@pytest.mark.parametrize("kind", BASELINES)
def test_group_of_one_has_no_gradient(kind):
    """verl gave the raw reward in one function; OpenRLHF divided by zero."""
    assert group_advantages(tensor(3.0, -1.0), 1, kind).tolist() == [0, 0]
    for scored in ([True, False, False], [False] * 3):
        got = group_advantages(tensor(3.0, 1.0, nan), 3, kind, scored=scored)
        assert got.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", BASELINES)
def test_unscored_completions_are_outside_the_baseline(kind):
    rewards, others = tensor(1.0, nan, 4.0, 2.0), [0, 2, 3]
    got = group_advantages(rewards, 4, kind)
    assert got[1] == 0
    assert torch.equal(got[others], group_advantages(rewards[others], 3, kind))


ONE = FULL[:1, :1]
ZERO = torch.zeros(1, 1)


@pytest.mark.parametrize("error, message, call", [
    (RuntimeError, "size 7", lambda: group_advantages(torch.zeros(7), 4, "grpo")),
    (ValueError, "advantage 'gpro'", lambda: group_advantages(torch.zeros(2), 2, "gpro")),
    (KeyError, "k4", lambda: losses.kl_estimate(ZERO, ZERO, ONE, kind="k4")),
    (KeyError, "mean", lambda: losses.token_weights(ZERO[0], "mean", max_tokens=1)),
])
def test_a_wrong_name_or_size_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_keep_groups():
    rewards = tensor(1, 0, 1, 1, 0, 1, nan, 1, 5, nan)
    scored = torch.tensor([True] * 5 + [False] + [False, True] + [True, False])
    assert losses.keep_groups(rewards, 2, scored).tolist() == [True] + [False] * 4
    rewards = tensor(1, 0, nan, 1, 1, nan)
    assert losses.keep_groups(rewards, 3, rewards.isfinite()).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_whitening_is_the_formula_and_zero_where_all_are_equal(dtype):
    for lengths in ([3, 3], [1, 0], [0, 0]):
        got = losses.whiten(torch.full((2, 3), 0.1, dtype=dtype), row_mask(lengths, 3))
        assert got.tolist() == [[0] * 3] * 2 and got.dtype == F64
    x, mask = torch.tensor([[1.0, 2.0, nan], [4.0, nan, nan]], dtype=dtype), row_mask([2, 1], 3)
    row, white = reference.whiten([[1.0, 2.0], [4.0]])
    assert losses.whiten(x, mask)[mask].tolist() == pytest.approx([*row, *white], abs=1e-14)


def test_the_score_is_on_the_last_valid_token():
    """TRL's PPO puts it one later, and GAE differs. A row without tokens gets none."""
    mask = row_mask([1, 3, 0], 3)
    logprobs = tensor([-1, -9, nan], [-1, -2, -3], [nan] * 3)
    got = losses.token_rewards(tensor(5, 6, nan), logprobs, logprobs - 1, mask, kl_coef=0.5)
    assert got.tolist() == [[4.5, 0, 0], [-0.5, -0.5, 5.5], [0, 0, 0]]
    got = losses.token_rewards(tensor(5, 6, 7), None, None, mask, kl_coef=0.5)
    assert got.tolist() == [[5, 0, 0], [0, 0, 6], [0, 0, 0]]


# ---- policy losses, token by token


def one_token(name, log_ratio, advantage, dtype=F64, **options):
    """loss, gradient, clip_frac of one token."""
    logprobs = torch.tensor([[log_ratio - 1.0]], dtype=dtype, requires_grad=True)
    old, A = torch.tensor([[-1.0]], dtype=dtype), tensor([advantage])
    loss, metrics = losses.LOSSES[name](logprobs, old, A, ONE, **WIDE | options)
    return float(loss.detach()), float(gradient(loss, logprobs)), float(metrics["clip_frac"])


UP, NEAR, DOWN = (2 * math.exp(x) for x in (0.3, 0.24, -0.3))
FAR = 1.5 * math.exp(2)


@pytest.mark.parametrize("name, log_ratio, advantage, options, expected", [
    ("clip", 0.3, 2.0, {}, (-1.28 * 2, 0, 1)),  # too far up, A > 0: cut
    ("clip", 0.3, -2.0, {}, (UP, UP, 0)),  # A < 0: it is pulled back
    ("clip", -0.3, -2.0, {}, (0.8 * 2, 0, 1)),
    ("clip", -0.3, 2.0, {}, (-DOWN, -DOWN, 0)),
    ("clip", 0.24, 2.0, {}, (-NEAR, -NEAR, 0)),
    ("clip", 0.24, 2.0, {"clip_high": 0.2}, (-1.2 * 2, 0, 1)),
    ("cispo", 0.0, 2.0, {}, (2, -2, 0)),
    ("cispo", 1.0, 2.0, {}, (0, -1.28 * 2, 1)),  # it still learns
    ("cispo", -1.0, -2.0, {}, (-2 * 0.8 * 2, 0.8 * 2, 1)),
    ("cispo", -1.0, -2.0, {"clip_low": 1.0, "clip_high": 4.0}, (-4 / math.e, 2 / math.e, 0)),
    *((name, 2.0, *case) for name in ("clip", "gspo") for case in (
        (-1.5, {}, (FAR, FAR, 0)), (-1.5, {"dual_clip": 3.0}, (4.5, 0, 1)),
        (1.5, {"dual_clip": 3.0}, (-1.28 * 1.5, 0, 1)))),
])
def test_bounds_are_1_minus_low_and_1_plus_high(name, log_ratio, advantage, options, expected):
    """As in verl. TRL's epsilon_high is the upper bound itself: 0.28 would shrink each gradient."""
    assert one_token(name, log_ratio, advantage, **options) == pytest.approx(expected, abs=1e-15)
    assert LossArgs().dual_clip is None  # as in the PPO paper; verl has it on at 3


@pytest.mark.parametrize("name", ["clip", "gspo"])
@pytest.mark.parametrize("dtype, log_ratio", [
    (torch.float32, 79.0), (torch.float32, 89.0), (torch.float32, 500.0), (F64, 800.0)])
def test_a_ratio_that_overflows(name, dtype, log_ratio):
    """exp(89) is inf in float32: a clipped token's gradient was 0 * inf = nan."""

    def far(x, A, **options):
        return one_token(name, x, A, dtype, **options)

    assert far(log_ratio, -2.0, dual_clip=3.0) == pytest.approx((6, 0, 1))
    assert far(log_ratio, 0.0) == far(log_ratio, 0.0, dual_clip=3.0) == (0, 0, 0)
    large = 2 * math.exp(min(log_ratio, 80))  # no bound acts: it must not become a silent 0
    assert far(log_ratio, -2.0) == pytest.approx((large, large, 0), rel=1e-5)
    for x, A, expected in (  # far up, and far down
            (log_ratio, 2.0, (-1.28 * 2, 0, 1)), (-log_ratio, 2.0, (0, 0, 0)),
            (-log_ratio, -2.0, (1.6, 0, 1))):
        assert far(x, A) == far(x, A, dual_clip=3.0) == pytest.approx(expected)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_metrics_of_a_ratio_that_overflows_are_inf(name):
    logprobs, A = torch.tensor([[99.0], [-200.0]]), torch.ones(2, 1)
    metrics = losses.LOSSES[name](logprobs, torch.zeros(2, 1), A, FULL[:2, :1], **WIDE)[1]
    assert metrics["ratio"].flatten().tolist() == [inf, 0]
    assert metrics["approx_kl"].flatten().tolist() == [inf, 199]


# ---- critic, engine, aggregation


def test_value_loss_is_pessimistic():
    values, old = tensor([1.0, 1.0, 0.1, 1.0]).requires_grad_(), tensor([0.0] * 4)
    returns, mask = tensor([2.0, 0.2, 2.0, -1.0]), row_mask([4])
    for clip, first, slope in ((0.2, 1.8, 0), (None, 1, -1)):
        loss, cut = losses.value_loss(values, old, returns, mask, clip=clip)
        assert (2 * loss[0]).tolist() == pytest.approx([first**2, 0.8**2, 1.9**2, 2**2])
        assert cut.tolist() == [[clip is not None, 0, 0, 0]]
        assert gradient(loss.sum(), values)[0].tolist() == pytest.approx([slope, 0.8, -1.9, 2])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_value_clip_cuts_only_what_is_outside(dtype):
    """V_old + (V - V_old) is not V in floating point."""
    values = torch.linspace(-3, 3, 601, dtype=dtype)[None] - 0.1
    old, returns, mask = values.flip(1) * 0.7, values * 0.3 + 0.2, values < 9
    loss, cut = losses.value_loss(values, old, returns, mask, clip=100.0)
    assert not cut.any()
    assert torch.equal(loss, losses.value_loss(values, old, returns, mask, clip=None)[0])
    one = (torch.full((1, 1), x, dtype=dtype) for x in (-1.9, -0.7, 0.0))
    assert losses.value_loss(*one, ONE, clip=100.0)[1] == 0


@pytest.mark.parametrize("kind, low, high, weights, cut", [
    ("truncate", 0.5, 2.0, [2, 1, 0.4, 0], [1, 0, 0, 0]),
    ("mask", 0.5, 2.0, [0, 1, 0, 0], [1, 0, 1, 0]),
    ("mask", 0.3, 3.5, [3, 1, 0.4, 0], [0, 0, 0, 0]),  # the ratio itself, not 1
])
def test_engine_correction(kind, low, high, weights, cut):
    old = tensor([3.0, 1.0, 0.4, nan]).log().requires_grad_()
    engine, mask = tensor([0.0, 0.0, 0.0, nan]), row_mask([3], 4)
    got, metrics = losses.engine_correction(old, engine, mask, kind=kind, low=low, high=high)
    assert got[0].tolist() == pytest.approx(weights) and not got.requires_grad
    assert metrics["engine_cut"][0].tolist() == cut
    assert metrics["engine_ratio"][0, :3].tolist() == pytest.approx([3, 1, 0.4])


def test_token_weights():
    """A row of False is in no denominator, and no token at all is no nan."""
    mask = row_mask([1, 3, 0], 4)
    expected = {"token": [1 / 4] * 4, "sequence": [1 / 2] + [1 / 6] * 3, "constant": [1 / 10] * 4}
    for aggregation in expected:
        weights = token_weights(mask, aggregation, max_tokens=5)
        assert weights[mask].tolist() == expected[aggregation]
        assert not weights[~mask].any() and weights.dtype == F64
        assert not token_weights(torch.zeros_like(mask), aggregation, max_tokens=5).any()


def test_masked_mean():
    values, mask = tensor([1, nan, nan], [2, 6, inf]), row_mask([1, 2], 3)
    assert losses.masked_mean(values, mask) == 3
    assert losses.masked_mean(tensor([nan]), ~ONE) == 0


@pytest.mark.parametrize("garbage", [nan, inf, -inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_padding_never_leaks(garbage, dtype):
    """Values, metrics and gradients are 0 in the padding and do not depend on it."""
    def everything(pad):
        *inputs, mask = random_batch(11)
        leaf, old, ref, A = (torch.where(mask, x.detach(), pad).to(dtype) for x in inputs)
        leaf.requires_grad_()
        out = []
        for loss in losses.LOSSES.values():
            token_loss, metrics = loss(leaf, old, A, mask, **WIDE | {"dual_clip": 3.0})
            metrics["ratio"] = torch.where(mask, metrics["ratio"], 0)
            out += [token_loss, *metrics.values()]
            assert token_loss.dtype == dtype
        out += [losses.kl_estimate(leaf, ref, mask, kind=kind) for kind in ("k1", "k2", "k3")]
        out += losses.value_loss(leaf, old, ref.double(), mask, clip=0.2)
        weights = token_weights(mask, "token", max_tokens=7)
        out += [(weights * x).to(dtype) for x in out if x.requires_grad]
        for kind in ("truncate", "mask"):
            w, metrics = losses.engine_correction(old, ref, mask, kind=kind, low=0.5, high=2.0)
            out += [w, metrics["engine_cut"]]
        out += [losses.token_rewards(tensor(*range(6)), old, ref, mask, kl_coef=0.1),
                *losses.gae(old, ref, mask, gamma=0.9, lam=0.9), losses.rewards_to_go(old, mask),
                losses.whiten(old, mask)]
        out += torch.autograd.grad(sum(x.sum() for x in out if x.requires_grad), leaf)
        assert not any(x[~mask].any() for x in out)
        return [*out, losses.masked_mean(old, mask)]

    for clean, dirty in zip(everything(0.0), everything(garbage), strict=True):
        assert torch.equal(clean, dirty) and dirty.isfinite().all()
