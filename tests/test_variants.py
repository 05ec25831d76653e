"""The losses, advantages, factors and weights that the field has used since 2025.

Token by token against reference.py, against exact enumeration, and far away from pi_old. What TRL
and verl make of the same numbers is in test_peers.py.
"""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
import losses
import reference_losses as reference
from dist import SettingsError
from preflight import plan, rules
from test_losses import (
    F64,
    FULL,
    all_logprobs,
    close,
    expected_group_gradient,
    gradient,
    group_advantages,
    kl,
    policy,
    probs,
    tensor,
    true_gradient,
)

BOUNDS = {"sapo": {"taus": (1.0, 1.5)}, "gmpo": {"clip_low": 0.1, "clip_high": 0.15},
          "dppo": {"clip_low": 0.05, "clip_high": 0.08},
          "ipo": {"clip_low": 0.05, "clip_high": 0.08, "log_ratio_coef": 0.3}}
NAMES = list(BOUNDS)
nan = math.nan


def flags(name: str, **more) -> SimpleNamespace:
    """Those of reference.py."""
    bounds = dict(BOUNDS[name])
    found = {"clip_low": 0.2, "clip_high": 0.2, "sapo_taus": bounds.pop("taus", (1.0, 1.0)),
             "log_ratio_coef": 0.0, "dual_clip": None}
    return SimpleNamespace(**found | bounds | more)


def ragged(seed: int, dtype=F64, per_token: bool = False):
    """Rows with gaps inside, one without a token. Where there is no number, it is nan."""
    rng, mask = np.random.default_rng(seed), np.zeros((6, 9), bool)
    for row, length in enumerate((9, 1, 4, 7, 6)):
        mask[row, :length] = rng.random(length) < 0.7
        mask[row, 0] = True
    old = -rng.exponential(size=mask.shape)
    logprobs, engine = old + 0.4 * rng.normal(size=(2, *mask.shape))
    A = rng.normal(size=mask.shape if per_token else (6, 1))
    A[3] = 0.0
    for x in (logprobs, old, engine, A):
        if x.shape == mask.shape:
            x[~mask] = nan
    found = [torch.tensor(x, dtype=dtype) for x in (logprobs, old, engine, A)]
    return found[0].requires_grad_(), *found[1:], torch.tensor(mask)


def one_by_one(name: str, logprobs, old, A, mask):
    """The sum of the token losses, the ratios and what is cut: reference.py."""
    total, ratios, cuts = 0.0, [], []
    for i, row in enumerate(mask.tolist()):
        tokens = [t for t, mine in enumerate(row) if mine]
        each = A.expand(mask.shape)[i].tolist()
        log_ratios = [(logprobs[i, t] - float(old[i, t]), each[t]) for t in tokens]
        for t in tokens:
            loss, ratio, cut = reference.token_loss(
                flags(name), name, logprobs[i, t], float(old[i, t]), each[t], log_ratios)
            total = total + (1 + 0.1 * i) * loss  # a weight of each row
            ratios.append(float(ratio.detach()))
            cuts.append(float(cut))
    return total, ratios, cuts


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_the_formula_and_its_gradient(name, seed, per_token):
    logprobs, old, _, A, mask = ragged(seed, per_token=per_token)
    loss, metrics = grpo.LOSSES[name](logprobs, old, A, mask, **BOUNDS[name])
    weights = (1 + 0.1 * torch.arange(6, dtype=F64))[:, None]
    total, ratios, cuts = one_by_one(name, logprobs, old, A, mask)
    assert abs(float(((weights * loss).sum() - total).detach())) < 1e-12
    assert close(gradient((weights * loss).sum(), logprobs), gradient(total, logprobs), 1e-12)
    assert metrics["ratio"][mask].tolist() == pytest.approx(ratios, abs=1e-12)
    assert metrics["clip_frac"][mask].tolist() == cuts
    assert any(cuts) != (name == "sapo")
    assert not loss[~mask].any() and not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_a_loss_has_reinforces_gradient(name):
    logprobs, _, _, A, mask = ragged(1)
    loss, metrics = grpo.LOSSES[name](logprobs, logprobs.detach(), A, mask, **BOUNDS[name])
    assert close(gradient(loss.sum(), logprobs), torch.where(mask, -A, 0))
    assert not metrics["clip_frac"].any()


@pytest.mark.parametrize("A", [1.5, -1.5])
@pytest.mark.parametrize("far", [500.0, -500.0, 80.0, 21.0])
@pytest.mark.parametrize("name", grpo.LOSSES)
def test_far_from_pi_old_a_loss_and_its_gradient_are_finite(name, far, A):
    """In float32, where exp(500) is inf. Of π and of π_old one is tiny; also beside a near token.
    """
    old = torch.tensor([[-501.0 if far > 0 else -1.0, -1.0]])
    logprobs = (old + torch.tensor([[far, 0.1]])).requires_grad_()
    bounds = BOUNDS.get(name, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None})
    loss, _ = grpo.LOSSES[name](logprobs, old, torch.tensor([[A]]), FULL[:1], **bounds)
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert gradient(loss.sum(), logprobs).isfinite().all()


def test_sapo_fades_and_has_a_slope_of_1_at_pi_old():
    """A smooth gate: the gradient is A at r = 1 for any tau, and falls on both sides."""
    log_r = torch.linspace(-2, 2, 41, dtype=F64)[None].requires_grad_()
    for A, tau in ((1.0, 1.0), (-1.0, 1.5)):
        loss, _ = losses.sapo_loss(log_r, log_r.detach() * 0, tensor([A]), log_r > -9,
                                   taus=(1.0, 1.5))
        slope = -gradient(loss.sum(), log_r) / log_r.exp() / A  # of the gate, in r
        r = log_r.detach().exp()
        assert torch.allclose(slope, 1 / torch.cosh(tau * (r - 1) / 2).square())
        assert float(slope[0, 20].detach()) == 1


# ---- k3 times the ratio


@pytest.mark.parametrize("seed", range(3))
def test_k3_times_the_ratio_has_the_gradient_of_kl_with_samples_of_another_policy(seed):
    """All outcomes of π_old are listed. At each prefix the expectation is KL(π‖ref) and so is its
    gradient; k3 alone has neither."""
    theta, old, ref = policy(seed), policy(seed + 10).detach(), policy(seed + 20).detach()
    logprobs, old_logprobs, ref_logprobs = map(all_logprobs, (theta, old, ref))

    def estimate(kind):
        each = losses.kl_estimate(logprobs, ref_logprobs, FULL, kind=kind,
                                  old_logprobs=old_logprobs)
        return probs(old_logprobs) @ each.sum(1)

    true = kl(theta, ref, hold=old)
    assert close(estimate("k3_ratio"), true, 1e-13)
    assert close(gradient(estimate("k3_ratio"), theta), gradient(true, theta), 1e-13)
    assert abs(float((estimate("k3") - true).detach())) > 0.01
    assert not close(gradient(estimate("k3"), theta), gradient(true, theta), 0.01)


@pytest.mark.parametrize("new, old, ref", [*itertools.product([-1.0, -501.0], repeat=3)])
def test_k3_times_the_ratio_is_finite(new, old, ref):
    logp = torch.tensor([[new]], requires_grad=True)
    got = losses.kl_estimate(logp, torch.tensor([[ref]]), FULL[:1, :1], kind="k3_ratio",
                             old_logprobs=torch.tensor([[old]]))
    assert got.isfinite().all() and gradient(got.sum(), logp).isfinite().all()


# ---- factors


KINDS = ["truncate", "mask", "sequence_truncate", "sequence_mask", "geometric"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_is_the_formula(kind, seed):
    _, old, engine, _, mask = ragged(seed)
    got, found = losses.engine_correction(old, engine, mask, kind=kind, low=0.9, high=1.1)
    args = SimpleNamespace(engine_correction=kind, correction_low=0.9, correction_high=1.1)
    for i, row in enumerate(mask):
        if row.any():
            weights, ratios = reference.engine_correction(
                args, old[i][row].tolist(), engine[i][row].tolist())
            assert got[i][row].tolist() == pytest.approx(weights, abs=1e-12)
            assert found["engine_ratio"][i][row].tolist() == pytest.approx(ratios, abs=1e-12)
    assert not got[~mask].any() and not found["engine_cut"][~mask].any()
    assert 0 < found["engine_cut"].sum() < mask.sum()


@pytest.mark.parametrize("far", [500.0, -500.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_far_from_the_engine_is_finite(kind, far):
    engine = torch.tensor([[-501.0, -501.0]])
    got, _ = losses.engine_correction(engine + far, engine, FULL[:1], kind=kind, low=0.5, high=2.0)
    top = 2.0 if kind.endswith("truncate") and far > 0 else 0.0
    assert got.dtype == torch.float32 and got.tolist() == [[top, top]]


@pytest.mark.parametrize("delta", [0.0, 0.1, 1e9])
def test_a_completion_that_the_policy_left_has_no_loss_where_its_advantage_is_negative(delta):
    logprobs, _, engine, A, mask = ragged(2)
    keep = losses.opsm_keep(logprobs, engine, A, mask, delta=delta)
    for i, row in enumerate(mask):
        left = (engine - logprobs)[i][row].mean() > delta if row.any() else False
        assert keep[i][row].tolist() == [not (left and A[i, 0] < 0)] * int(row.sum())
    assert keep.all() == (delta == 1e9)
    far = losses.opsm_keep(torch.tensor([[-501.0]]), torch.tensor([[-1.0]]), torch.tensor([[-1.0]]),
                           FULL[:1, :1], delta=1.0)
    assert far.tolist() == [[False]]


# ---- advantages and weights


@pytest.mark.parametrize("G", [2, 3, 4])
def test_maxrl_is_the_gradient_of_the_likelihoods_expansion(G):
    """Of Σ_k 1/k · pass@k, k < G: the first terms of log p. A is 0 where no completion succeeds, so
    one term less than in the paper's theorem 2, which has no baseline.

    The expectation over all groups is exact. https://arxiv.org/abs/2602.02710
    """
    theta, won = policy(3), tensor(1, 0, 0, 0, 1, 0, 0, 0, 0)
    got = expected_group_gradient(theta, won, G, "maxrl")
    p = probs(all_logprobs(theta)) @ won
    objective = sum((1 - (1 - p) ** k) / k for k in range(1, G))
    assert close(got, gradient(objective, theta), 1e-13)
    assert G == 2 or not close(got, (G - 1) / G * true_gradient(theta, won), 0.01)


def test_maxrl_refuses_a_negative_reward():
    assert group_advantages(tensor(1, 0, 0, 0), 4, "maxrl").tolist() == [3, -1, -1, -1]
    assert group_advantages(tensor(0, 0, 0, 0), 2, "maxrl").tolist() == [0, 0, 0, 0]
    assert group_advantages(tensor(2, nan, 0, nan), 4, "maxrl").tolist() == [1, 0, -1, 0]
    with pytest.raises(SettingsError, match=r"at least 0 \(got -0.5\).*Would work: --advantage"):
        group_advantages(tensor(1, -0.5), 2, "maxrl")


def test_lite_ppo_divides_by_the_std_of_the_batch():
    rewards = tensor(1.0, 0.0, 0.5, 0.5, nan, 2.0, 3.0, nan)
    scored = [1.0, 0.0, 0.5, 0.5, 2.0, 3.0]
    scale = np.std(scored, ddof=1) + 0.1
    got = group_advantages(rewards, 2, "lite_ppo", eps=0.1)
    assert got.tolist() == pytest.approx([0.5 / scale, -0.5 / scale, 0, 0, 0, 0, 0, 0])
    for few in (tensor(1.0, nan), tensor(nan, nan), tensor(3.0, 3.0)):
        assert group_advantages(few, 2, "lite_ppo", eps=0.0).tolist() == [0, 0]


def test_a_prompts_mean_counts_each_prompt_once():
    """A completion without loss is in no denominator; a minibatch may cut a group."""
    lengths, prompts = torch.tensor([4, 0, 6, 5, 0, 0]), torch.tensor([7, 7, 7, 8, 9, 9])
    got = losses.token_weights(lengths, "prompt", max_tokens=99, prompts=prompts)
    assert got.tolist() == [1 / 20, 0, 1 / 20, 1 / 10, 0, 0] and got.dtype == F64
    alone = losses.token_weights(lengths, "prompt", max_tokens=99)
    assert torch.equal(alone, losses.token_weights(lengths, "sequence", max_tokens=99))


# ---- what is refused before anything loads


@pytest.mark.parametrize("words, settings", [
    ("maxrl needs rewards of at least 0, and --overlong_buffer subtracts",
     {"advantage": "maxrl", "overlong_buffer": 4}),
    ("maxrl needs rewards of at least 0, and --kl_reward_coef subtracts",
     {"advantage": "maxrl", "kl_reward_coef": 0.1}),
    ("gdpo normalizes each reward of --reward, and --kl_reward_coef is none of them",
     {"advantage": "gdpo", "kl_reward_coef": 0.1}),
    ("gmpo has one ratio for a completion, and --engine_correction truncate has one for each token",
     {"loss": "gmpo", "engine_correction": "truncate"}),
    ("--sapo_taus needs --loss sapo", {"sapo_taus": (1.0, 2.0)}),
    ("--sapo_taus must be two numbers above 0", {"loss": "sapo", "sapo_taus": (0.0, 2.0)}),
    ("--log_ratio_coef needs --loss ipo", {"log_ratio_coef": 0.1}),
    ("--opsm_delta must be at least 0", {"opsm_delta": -1.0}),
    ("--dual_clip bounds a clipped loss, and --loss dppo has none",
     {"loss": "dppo", "dual_clip": 3.0}),
    ("--group must be at least 2", {"advantage": "maxrl", "group": 1}),
    ("--correction_low must be at most 0.3",
     {"engine_correction": "sequence_mask", "correction_high": 0.3}),
])
def test_what_makes_no_sense_is_one_sentence_with_a_way_out(words, settings):
    args = plan.changed(grpo.Args(), lr=1e-6, **settings)
    found = [str(rule) for rule in rules.problems(args, 1)]
    assert len(found) == 1 and words in found[0] and "Would work: " in found[0]
