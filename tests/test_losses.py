"""losses.py and variants/: each loss, advantage and correction is the paper's, token by token
against reference.py or by exact enumeration, and finite far from pi_old."""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
import flags
import grpo
import losses
import reference_losses
from batch import Batch, Completion, Sample
from data import Prompt, Row
from rewards import Score
from tools import score as score_tool

F64, nan = torch.float64, math.nan
DRAWS = torch.linspace(0, 1, 21, dtype=F64)  # of the first tokens
ROWS, LENGTHS = 6, (7, 1, 3, 5, 4, 0)  # completions of `ragged`, and their tokens
WIDE = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
TIGHT = {"clip_low": 0.05, "clip_high": 0.08, "dual_clip": None}
BOUNDS = {
    **dict.fromkeys("cispo reinforce sapo dppo ipo opsm geometric clip_cov".split(), TIGHT),
    "clip": TIGHT | {"dual_clip": 1.02}, "gspo": TIGHT | {"clip_low": 0.01, "clip_high": 0.02},
    "gmpo": TIGHT | {"clip_low": 0.1, "clip_high": 0.15}}


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def close(x, y, atol=1e-14):
    return torch.allclose(x, y, rtol=0, atol=atol)


def gradient(y, x):
    return torch.autograd.grad(y, x, retain_graph=True)[0]


def variant(name: str) -> str:
    return f"variants/{name}.py:{name}"


def loss(name: str, logp, old, A, row, engine=None, **bounds):
    """Of a name, with the bounds above."""
    function = flags.own("loss", name if name in losses.LOSSES else variant(name)).function
    return function(logp, old, A, row, n_rows=ROWS,
                    engine_logprobs=old if engine is None else engine,
                    draws=lambda: DRAWS[:len(row)], **BOUNDS[name] | bounds)


def advantages(name: str, rewards, group, scored=None, eps=1e-6):
    scored = ~rewards.isnan() if scored is None else torch.as_tensor(scored)
    if name in flags.NAMES["advantage"]:
        return losses.group_advantages(rewards, group, kind=name, eps=eps, scored=scored)
    row = torch.arange(len(rewards))  # a token of each
    return flags.own("advantage", variant(name)).function(
        rewards, group, scored=scored, eps=eps, parts={"only": (1.0, rewards)}, trained=scored,
        row=row, turn=0 * row, turn_rewards=torch.zeros(len(row), dtype=F64))


# ---- exact enumeration: V = 3, length 2
# theta (4, 3): row 0 has the logits of the first token, row 1 + a of the second after token a.
# All nine outcomes are listed, so an expectation is a sum.

OUTCOMES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
TWO = torch.full((9,), 2)  # their lengths
REWARDS = tensor(1.0, 0.0, -0.5, 2.0, 0.0, 0.3, 1.0, 1.0, -2.0)  # with ties: (9,)


def policy(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, dtype=F64, generator=generator, requires_grad=True)


def all_logprobs(theta):
    a, b = OUTCOMES.T
    return torch.stack([theta[0].log_softmax(-1)[a], theta[1:].log_softmax(-1)[a, b]], 1)  # (9, 2)


def probs(logprobs):
    return logprobs.sum(1).exp()  # (9,)


def reinforce(logprobs, advantages):
    return losses.reinforce_loss(logprobs, logprobs.detach(), advantages, None)[0]


def true_gradient(theta, outcome_values):
    """d/dtheta of sum_o p_o * value_o, by differentiating p itself."""
    return gradient(probs(all_logprobs(theta)) @ outcome_values, theta)


def expected_group_gradient(theta, rewards, G, kind):
    """The expectation over all 9^G groups of the gradient of 1/G sum_i A_i log p_i."""
    index = torch.tensor(list(itertools.product(range(9), repeat=G)))  # (9^G, G)
    logprobs = all_logprobs(theta)
    chance = probs(logprobs).detach()[index].prod(1)  # (9^G,)
    A = advantages(kind, rewards[index.flatten()], G)
    rows = logprobs[index.flatten()]  # (9^G * G, 2)
    loss = reinforce(rows, A[:, None])
    return gradient(-(loss.sum(1) * chance.repeat_interleave(G)).sum() / G, theta)


@pytest.mark.parametrize("kind", ["rloo", "dr_grpo", "reinforce++-baseline"])
def test_rloo_is_unbiased_and_a_mean_baseline_shrinks_the_gradient(kind):
    theta, G = policy(1), 3
    factor = 1 if kind == "rloo" else (G - 1) / G
    got = expected_group_gradient(theta, REWARDS, G, kind)
    assert close(got, factor * true_gradient(theta, REWARDS))


def kl(p_theta, q_theta, hold=None):
    """KL(p || q) of sequences; of the tokens where `hold` samples the prefixes."""
    p, q = all_logprobs(p_theta), all_logprobs(q_theta)
    if hold is None:
        return probs(p) @ (p - q).sum(1)
    P, Q = p_theta.log_softmax(-1), q_theta.log_softmax(-1)  # (4, 3): next token, for every prefix
    reach = torch.cat([torch.ones(1, dtype=F64), hold[0].softmax(-1)]).detach()  # (4,)
    return reach @ (P.exp() * (P - Q)).sum(1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_loss_gradients(kind):
    """k1 has none, k2 has KL(pi || ref)'s, k3 has KL(ref || pi)'s."""
    theta, ref = policy(6), policy(7)
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(ref).detach()
    weights = probs(logprobs).detach()  # "KL as a loss" does not differentiate the sampling
    estimate = losses.kl_estimate(logprobs, ref_logprobs, kind=kind).sum(1)
    hold = theta.detach()
    true = {"k1": 0 * theta.sum(), "k2": kl(theta, ref, hold), "k3": kl(ref, theta, hold)}[kind]
    assert close(gradient(weights @ estimate, theta), gradient(true, theta))


def test_k3_times_the_ratio_has_the_gradient_of_kl_with_samples_of_another_policy():
    """All outcomes of π_old are listed. At each prefix the expectation is KL(π‖ref) and so is its
    gradient; k3 alone has neither."""
    theta, old, ref = policy(0), policy(10).detach(), policy(20).detach()
    logprobs, old_logprobs, ref_logprobs = map(all_logprobs, (theta, old, ref))

    def estimate(kind):
        each = losses.kl_estimate(logprobs, ref_logprobs, kind=kind, old=old_logprobs)
        return probs(old_logprobs) @ each.sum(1)

    true = kl(theta, ref, hold=old)
    assert close(estimate("k3_ratio"), true, 1e-13)
    assert close(gradient(estimate("k3_ratio"), theta), gradient(true, theta), 1e-13)
    assert not close(gradient(estimate("k3"), theta), gradient(true, theta), 0.01)
    for new, was, of_ref in itertools.product([-1.0, -501.0], repeat=3):
        logp = torch.tensor([new], requires_grad=True)
        got = losses.kl_estimate(logp, torch.tensor([of_ref]), kind="k3_ratio",
                                 old=torch.tensor([was]))
        assert got.isfinite().all() and gradient(got.sum(), logp).isfinite().all()


def test_k1_in_the_reward_is_exact():
    """With token_rewards and rewards_to_go the gradient is that of E[R] - coef * KL(pi || ref)."""
    theta, ref, coef = policy(8), policy(9), 0.3
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(ref).detach()
    rewards = losses.token_rewards(REWARDS, logprobs.detach().flatten(), ref_logprobs.flatten(),
                                   TWO, kl_coef=coef)  # (18,)
    loss = reinforce(logprobs, losses.rewards_to_go(rewards, TWO).view(9, 2))
    got = -gradient(probs(logprobs).detach() @ loss.sum(1), theta)
    assert close(got, gradient(probs(logprobs) @ REWARDS - coef * kl(theta, ref), theta))


# ---- rewards, advantages


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 7), max_size=5), st.floats(0, 1), st.floats(0, 1),
    st.integers(0, 999))
def test_gae_is_the_double_sum(lengths, gamma, lam, seed):
    """Of completions one after another, some without a token. A state's value is where its token
    is; the score is at the last token."""
    rng, args = np.random.default_rng(seed), SimpleNamespace(gamma=gamma, lam=lam)
    rewards, values, logp, ref = torch.tensor(rng.normal(size=(4, sum(lengths))))
    scores, lengths = torch.tensor(rng.normal(size=len(lengths))), torch.tensor(lengths).long()
    got, returns = losses.gae(rewards, values, lengths, gamma=gamma, lam=lam)
    with_score = losses.token_rewards(scores, logp, ref, lengths, kl_coef=0.1)
    ends = lengths.cumsum(0).tolist()
    for end, n, score in zip(ends, lengths.tolist(), scores.tolist(), strict=True):
        mine = slice(end - n, end)
        R, V = rewards[mine].tolist(), values[mine].tolist()
        assert got[mine].tolist() == pytest.approx(reference_losses.gae(args, R, V), abs=1e-12)
        step = SimpleNamespace(ref=[ref[mine].tolist()], kl=lambda i, mine=mine: (
            logp[mine] - ref[mine]).tolist())
        right = reference_losses.token_rewards(step, 0, score, 0.1) if n else []
        assert with_score[mine].tolist() == pytest.approx(right, abs=1e-12)
    assert close(returns, got + values)
    plain = losses.token_rewards(scores, logp, None, lengths, kl_coef=0.1)
    assert close(plain.sum(), scores[lengths > 0].sum(), 1e-12)
    assert int((plain != 0).sum()) == int((lengths > 0).sum())


def decided(rewards) -> dict[str, float]:
    """What each that asks whether rewards differ makes of groups of 3. 0: no. nan: not scored."""
    known = rewards[~rewards.isnan()]
    found = {name: advantages(name, rewards, 3, eps=0.0) for name in (
        "grpo", "dr_grpo", "rloo", "reinforce++-baseline", "lite_ppo", "gdpo", "turn_credit")}
    found["maxrl"] = advantages("maxrl", rewards * float(known.sum().sign()), 3)
    samples = []
    for value in rewards.tolist():
        done = Completion(np.array([1], np.int32), np.zeros(1, np.float32), False)
        score = Score(None if value != value else value, {"only": value}, None)
        samples.append(Sample(Prompt(0, Row(0, "", [1], "", {}, "")), done, "", score))
    _, logged = grpo.tokens_in_loss(grpo.Args(group=3), Batch(samples))
    found["log"] = 1 - logged["batch/groups_equal"]
    logged = evaluate.named("", samples, evaluate.EvalArgs(eval_samples=3))
    found["eval"] = 1 - logged["groups_equal"]
    found["tool"] = score_tool.do_differ(known.tolist())
    found["whiten"] = losses.whiten(rewards, ~rewards.isnan())
    return {name: float(torch.as_tensor(x).double().abs().max()) for name, x in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_rewards_that_differ_by_rounding_alone_are_equal_to_all_that_ask(seed):
    """Parts are added up in other orders; some sums are below 0, some are 0, one is not scored."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=6) * rng.choice([1, 1000])
    parts = np.append(parts, -parts) if seed % 3 == 0 else parts
    rewards = tensor(*[sum(rng.permutation(parts).tolist()) for _ in range(30)])
    rewards[rng.integers(30)] = nan
    assert len(set(rewards.tolist())) > 2
    assert not any(decided(rewards).values())
    rewards[rewards.isnan().logical_not().nonzero()[0]] += 1e-4
    assert all(decided(rewards).values())
    exact = torch.tensor([1.0, 0, 1, 0, 0, 0], dtype=F64)
    right, noise = advantages("pass_at_k", exact, 6), tensor(*[0.1 + 0.2 - 0.3] * 6)
    assert right.any() and close(advantages("pass_at_k", exact - noise, 6), right)
    assert evaluate.passes(Score(1.0, {"only": 0.7 + 0.2 + 0.1}, None), 1.0)


def test_whitening_is_the_formula_and_zero_where_all_are_equal():
    for n in (6, 1, 0):
        got = losses.whiten(torch.full((6,), 0.1), torch.arange(6) < n)
        assert got.tolist() == [0] * 6 and got.dtype == F64
    x, among = tensor(1.0, 2.0, nan, 4.0), torch.tensor([True, True, False, True])
    row, white = reference_losses.whiten([[1.0, 2.0], [4.0]])
    assert losses.whiten(x, among)[among].tolist() == pytest.approx([*row, *white], abs=1e-14)
    assert losses.whiten(x, among)[2] == 0


# ---- losses, corrections, weights: token by token


def ragged(seed: int, per_token: bool = False):
    """Six completions, one without a token: logp with gradient, old, engine, A, row: (n,)."""
    rng, row = np.random.default_rng(seed), torch.arange(ROWS).repeat_interleave(
        torch.tensor(LENGTHS))
    old = -rng.exponential(size=len(row))
    logp, engine = old + 0.4 * rng.normal(size=(2, len(row)))
    A = torch.tensor(rng.normal(size=len(row) if per_token else ROWS))
    A = A if per_token else A[row]
    logp, old, engine = map(torch.tensor, (logp, old, engine))
    return logp.requires_grad_(), old, engine, torch.where(row == 3, 0, A), row


def one_by_one(name: str, logp, old, engine, A, row):
    """By reference.py: the sum of the token losses, the ratios, what is cut, what is dropped."""
    total, ratios, cuts, dropped = 0.0, [], [], []
    args = SimpleNamespace(**BOUNDS[name])
    for i in range(ROWS):
        each, olds, engines = (x[row == i].tolist() for x in (A, old, engine))
        logps = list(logp[row == i])
        log_ratios = [(new - was, a) for new, was, a in zip(logps, olds, each, strict=True)]
        for new, was, a in zip(logps, olds, each, strict=True):
            one, ratio, cut = reference_losses.token_loss(args, name, new, was, a, log_ratios)
            dropped.append(reference_losses.dropped(
                name, a, [x.detach() for x in logps], olds, engines))
            if name == "clip_cov":
                t = len(dropped) - 1
                dropped[-1] = reference_losses.cov_cut(
                    variant(name), a, logp[row == i].tolist(), t - sum(LENGTHS[:i]),
                    float(DRAWS[t]))
            total = total + (1 + 0.1 * i) * (0.0 * one if dropped[-1] else one)  # a row's weight
            ratios.append(float(ratio.detach()))
            cuts.append(float(cut))
    return total, ratios, cuts, dropped


def act_more(monkeypatch, name: str, **constants):
    """Other constants in a file of variants/: its own leave out everything, or nothing."""
    for constant, value in constants.items():
        own = flags.own("loss", variant(name)).function
        monkeypatch.setitem(own.__globals__, constant, value)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_loss_is_the_formula_and_its_gradient(name, monkeypatch):
    act_more(monkeypatch, "geometric", LOW=0.8)
    act_more(monkeypatch, "opsm", DELTA=0.02)
    monkeypatch.setattr(reference_losses, "GEOMETRIC", (0.8, 1.001))
    monkeypatch.setattr(reference_losses, "OPSM_DELTA", 0.02)
    act_more(monkeypatch, "clip_cov", LOW=0.1, RATE=0.7)
    monkeypatch.setitem(reference_losses.CLIP_COV, variant("clip_cov"), (0.1, 5.0, 0.7))
    for seed, per_token in itertools.product(range(3), (False, True)):
        logp, old, engine, A, row = ragged(seed, per_token)
        found, metrics = loss(name, logp, old, A, row, engine)
        weights = 1 + 0.1 * row.double()
        total, ratios, cuts, dropped = one_by_one(name, logp, old, engine, A, row)
        assert abs(float(((weights * found).sum() - total).detach())) < 1e-12
        assert close(gradient((weights * found).sum(), logp), gradient(total, logp), 1e-12)
        assert metrics["ratio"].tolist() == pytest.approx(ratios, abs=1e-12)
        assert metrics["clip_frac"].tolist() == cuts
        assert any(cuts) != (name in ("sapo", "reinforce"))
        log_r = (logp - old).detach()
        assert close(metrics["approx_kl"], log_r.exp() - 1 - log_r)
        if name in ("opsm", "geometric", "clip_cov"):
            metric = metrics[{"opsm": "opsm_cut", "clip_cov": "cov_cut"}.get(name, "engine_cut")]
            assert metric.tolist() == dropped and 0 < sum(dropped) < len(dropped)
        assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("name", ["clip", "gspo"])
@pytest.mark.parametrize("log_ratio", [79.0, 89.0, 500.0])
def test_a_ratio_that_overflows(name, log_ratio):
    """exp(89) is inf in float32: a clipped token's gradient was 0 * inf = nan."""
    def far(log_ratio, advantage, **options):
        logp = torch.tensor([log_ratio - 1.0], requires_grad=True)
        loss, metrics = losses.LOSSES[name](logp, torch.tensor([-1.0]), torch.tensor([advantage]),
                                            torch.tensor([0]), n_rows=1, **WIDE | options)
        return float(loss.detach()), float(gradient(loss, logp)), float(metrics["clip_frac"])

    assert far(log_ratio, -2.0, dual_clip=3.0) == pytest.approx((6, 0, 1))
    large = 2 * math.exp(min(log_ratio, 80))  # no bound acts: it must not become a silent 0
    assert far(log_ratio, -2.0) == pytest.approx((large, large, 0), rel=1e-5)
    for x, A, expected in (  # far up, and far down
            (log_ratio, 2.0, (-1.28 * 2, 0, 1)), (-log_ratio, 2.0, (0, 0, 0)),
            (-log_ratio, -2.0, (1.6, 0, 1))):
        assert far(x, A) == far(x, A, dual_clip=3.0) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["truncate", "mask", "sequence_truncate", "sequence_mask",
                                  "sequence_mean"])
def test_a_correction_is_the_formula_and_finite(kind):
    high = 1.05 if kind == "sequence_mean" else 1.4
    args = SimpleNamespace(engine_correction=kind, correction_low=0.6, correction_high=high)
    _, old, engine, _, row = ragged(0)
    options = dict(kind=kind, low=0.6, high=high)
    got, found = losses.engine_correction(old, engine, row, n_rows=ROWS, **options)
    for i in range(ROWS):
        weights, ratios = reference_losses.engine_correction(
            args, old[row == i].tolist(), engine[row == i].tolist())
        assert got[row == i].tolist() == pytest.approx(weights, abs=1e-12)
        assert found["engine_ratio"][row == i].tolist() == pytest.approx(ratios, abs=1e-12)
    assert 0 < found["engine_cut"].sum() < len(row)
    engine, options = torch.tensor([-501.0, -501.0]), dict(kind=kind, low=0.5, high=2.0)
    for far in (500.0, -500.0):
        got, _ = losses.engine_correction(
            engine + far, engine, torch.zeros(2, dtype=torch.long), n_rows=1, **options)
        top = 2.0 if kind.endswith(("truncate", "mean")) and far > 0 else 0.0
        assert got.dtype == torch.float32 and got.tolist() == [top, top]


def test_a_mean_of_a_row_is_of_its_own_tokens():
    row = torch.tensor([0, 0, 2, 2, 2, 3])
    x = tensor(1, 3, 2, 5, 8, 7).requires_grad_()
    assert losses.row_sum(x, row, 5).tolist() == [4, 4, 15, 15, 15, 7]
    assert losses.row_mean(x, row, 5).tolist() == [2, 2, 5, 5, 5, 7]
    slope = gradient((losses.row_mean(x, row, 5) * tensor(1, 0, 0, 3, 0, 0)).sum(), x)
    assert slope.tolist() == [0.5, 0.5, 1, 1, 1, 0]
    assert losses.row_mean(x[:0], row[:0], 0).tolist() == []  # a rank without a row


def test_value_loss_is_pessimistic():
    values, old = tensor(1.0, 1.0, 0.1, 1.0).requires_grad_(), tensor(*[0.0] * 4)
    returns = tensor(2.0, 0.2, 2.0, -1.0)
    for clip, first, slope in ((0.2, 1.8, 0), (None, 1, -1)):
        loss, cut = losses.value_loss(values, old, returns, clip=clip)
        assert (2 * loss).tolist() == pytest.approx([first**2, 0.8**2, 1.9**2, 2**2])
        assert cut.tolist() == [clip is not None, 0, 0, 0]
        assert gradient(loss.sum(), values).tolist() == pytest.approx([slope, 0.8, -1.9, 2])
    # V_old + (V - V_old) is not V in floating point.
    one = (torch.full((1,), x) for x in (-1.9, -0.7, 0.0))
    assert losses.value_loss(*one, clip=100.0)[1] == 0


def test_token_weights():
    """A row without loss is in no denominator, and no token at all is no nan."""
    lengths, prompts = torch.tensor([4, 0, 6, 5, 0, 0]), torch.tensor([7, 7, 7, 8, 9, 9])
    expected = {"token": [1 / 15, 1 / 15, 1 / 15], "sequence": [1 / 12, 1 / 18, 1 / 15],
                "constant": [1 / 60] * 3, "prompt": [1 / 20, 1 / 20, 1 / 10]}
    for aggregation, right in expected.items():
        options = dict(max_tokens=20, prompts=prompts)
        got = losses.token_weights(lengths, aggregation, **options)
        assert got[lengths > 0].tolist() == pytest.approx(right, abs=1e-16)
        assert not got[lengths == 0].any() and got.dtype == F64
        assert not losses.token_weights(0 * lengths, aggregation, **options).any()
    alone = losses.token_weights(lengths, "prompt", max_tokens=9)
    assert torch.equal(alone, losses.token_weights(lengths, "sequence", max_tokens=9))
