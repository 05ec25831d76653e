"""losses.py and variants/: gradients by exact enumeration, rewards that differ by rounding, and
extremes. Each loss, advantage and correction is the paper's: test_reference.py."""
import itertools
import math

import numpy as np
import pytest
import torch

import evaluate
import flags
import grpo
import losses
from batch import Batch, Completion, Sample
from data import Prompt, Row
from log import sample_metrics
from rewards import Score
from tools import score as score_tool

F64, nan = torch.float64, math.nan
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


def loss(name: str, logp, old, A, row, **bounds):
    function = flags.own("loss", name if name in losses.LOSSES else variant(name)).function
    return function(logp, old, A, row, n_rows=1, engine_logprobs=old,
                    draws=lambda: torch.zeros(len(row), dtype=F64), **BOUNDS[name] | bounds)


def advantages(name: str, rewards, group, scored=None, eps=1e-6):
    scored = ~rewards.isnan() if scored is None else torch.as_tensor(scored)
    if name in flags.NAMES["advantage"]:
        return losses.group_advantages(rewards, group, kind=name, eps=eps, scored=scored)
    return of_file(variant(name), rewards, group, scored, eps, batch_of(rewards))


def of_file(file: str, rewards, group, scored, eps, batch, reward: str = "only"):
    """The advantages of a file's function. reward: the name of the one reward."""
    row = torch.arange(len(rewards))  # a token of each
    return flags.own("advantage", file).function(
        rewards, group, scored=scored, eps=eps, trained=scored, row=row, batch=batch,
        parts={reward: (1.0, rewards)})


def batch_of(rewards) -> Batch:
    """A token each."""
    def sample(value: float) -> Sample:
        done = Completion(np.array([1], np.int32), np.zeros(1, np.float32), False)
        score = Score(None if value != value else value, {"only": value}, None)
        return Sample(Prompt(0, Row(0, "", [1], "", {}, "")), done, "", score)
    return Batch([sample(value) for value in rewards.tolist()])


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


def test_a_completion_without_a_token_changes_nothing():
    """Completions one after another, in any order of lengths. Their formulas: test_reference.py."""
    rng, lengths = np.random.default_rng(0), torch.tensor([2, 0, 3, 1, 0, 5])
    rewards, values = torch.tensor(rng.normal(size=(2, 11)))
    got, returns = losses.gae(rewards, values, lengths, gamma=0.9, lam=0.7)
    alone = [losses.gae(*two, torch.tensor([len(two[0])]), gamma=0.9, lam=0.7)[0]
             for two in zip(*(x.split(lengths.tolist()) for x in (rewards, values)), strict=True)]
    assert close(got, torch.cat(alone)) and close(returns, got + values)
    plain = losses.token_rewards(tensor(1, 2, 3, 4, 5, 6), rewards, None, lengths, kl_coef=0.1)
    assert plain.tolist() == [0, 1, 0, 0, 3, 4, 0, 0, 0, 0, 6]


def decided(rewards) -> dict[str, float]:
    """What each that asks whether rewards differ makes of groups of 3. 0: no. nan: not scored."""
    known = rewards[~rewards.isnan()]
    found = {name: advantages(name, rewards, 3, eps=0.0) for name in (
        "grpo", "dr_grpo", "rloo", "reinforce++-baseline", "lite_ppo", "gdpo")}
    found["maxrl"] = advantages("maxrl", rewards * float(known.sum().sign()), 3)
    batch = batch_of(rewards)
    samples = batch.samples
    _, logged = grpo.tokens_in_loss(grpo.Args(group=3), batch)
    found["log"] = 1 - logged["batch/groups_equal"]
    logged = evaluate.named("", samples, evaluate.EvalArgs(eval_samples=3))
    found["eval"] = 1 - logged["groups_equal"]
    found["tool"] = score_tool.do_differ(known.tolist())
    found["whiten"] = losses.whiten(rewards, ~rewards.isnan())
    return {name: float(torch.as_tensor(x).double().abs().max()) for name, x in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_rewards_that_differ_by_rounding_alone_are_equal_to_all_that_ask(seed):
    rewards = nearly_equal(seed)
    assert not any(decided(rewards).values())
    make_one_differ(rewards)
    assert all(decided(rewards).values())
    exact = torch.tensor([1.0, 0, 1, 0, 0, 0], dtype=F64)
    right, noise = advantages("pass_at_k", exact, 6), tensor(*[0.1 + 0.2 - 0.3] * 6)
    assert right.any() and close(advantages("pass_at_k", exact - noise, 6), right)
    assert evaluate.passes(Score(1.0, {"only": 0.7 + 0.2 + 0.1}, None), 1.0)


def nearly_equal(seed: int):
    """Parts are added up in other orders; some sums are below 0, some are 0, one is not scored."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=6) * rng.choice([1, 1000])
    parts = np.append(parts, -parts) if seed % 3 == 0 else parts
    rewards = tensor(*[sum(rng.permutation(parts).tolist()) for _ in range(30)])
    rewards[rng.integers(30)] = nan
    assert len(set(rewards.tolist())) > 2
    return rewards


def make_one_differ(rewards) -> None:
    rewards[rewards.isnan().logical_not().nonzero()[0]] += 1e-4


def test_whitening_is_zero_where_all_are_equal_and_outside():
    for n in (6, 1, 0):
        got = losses.whiten(torch.full((6,), 0.1), torch.arange(6) < n)
        assert got.tolist() == [0] * 6 and got.dtype == F64
    x, among = tensor(1.0, 2.0, nan, 4.0), torch.tensor([True, True, False, True])
    assert losses.whiten(x, among)[2] == 0 and losses.whiten(x, among)[among].isfinite().all()


# ---- extremes of losses, corrections, weights


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
def test_a_correction_is_finite(kind):
    engine, options = torch.tensor([-501.0, -501.0]), dict(kind=kind, low=0.5, high=2.0)
    for far in (500.0, -500.0):
        got, _ = losses.engine_correction(
            engine + far, engine, torch.zeros(2, dtype=torch.long), n_rows=1, **options)
        top = 2.0 if kind.endswith(("truncate", "mean")) and far > 0 else 0.0
        assert got.dtype == torch.float32 and got.tolist() == [top, top]


def test_values_inside_the_bound_are_not_cut_by_rounding():
    one = (torch.full((1,), x) for x in (-1.9, -0.7, 0.0))  # V_old + (V - V_old) is not V
    assert losses.value_loss(*one, clip=100.0)[1] == 0


def test_no_token_at_all_has_no_weight():
    lengths, prompts = torch.tensor([4, 0, 6, 5]), torch.tensor([7, 7, 7, 8])
    for aggregation in ("token", "sequence", "constant", "prompt"):
        assert not losses.token_weights(
            0 * lengths, aggregation, max_tokens=20, prompts=prompts).any()
    alone = losses.token_weights(lengths, "prompt", max_tokens=9)
    assert torch.equal(alone, losses.token_weights(lengths, "sequence", max_tokens=9))


@pytest.mark.parametrize("kind", ["dr_grpo", "grpo", "rloo"])
def test_a_lone_reward_has_no_advantage(kind):
    found = losses.group_advantages(torch.tensor([3.0, 7.0]), 2, kind=kind, eps=0.0,
                                    scored=torch.tensor([True, False]))
    assert found.tolist() == [0, 0]


# ---- metrics of a step


def test_minus_the_log_prob_of_the_sampled_tokens_has_the_entropy_as_its_expectation():
    """Ids 0, 1, 2 and at most two tokens; id 2 ends. Every completion is there as often as it is
    likely, so means over the samples are expectations. A reply in between is no step."""
    first, second = (0.5, 0.25, 0.25), {0: (0.25, 0.25, 0.5), 1: (0.5, 0.5, 0.0)}
    each = [((2,), (first[2],))] + [
        ((a, b), (first[a], second[a][b])) for a in (0, 1) for b in range(3) if second[a][b]]
    samples = []
    for ids, chances in each:
        logprobs = np.log(np.array([*chances[:1], 1.0, *chances[1:]]))  # 0 of the reply
        sampled = np.array([True, False, *(True for _ in chances[1:])])
        one = Completion(np.array([ids[0], 7, *ids[1:]], np.int32), logprobs.astype(np.float32),
                         False, sampled)
        row = Prompt(0, Row(0, "", [1], None, {}, ""))
        samples += round(32 * math.prod(chances)) * [Sample(row, one, "", Score(1.0, {}, None))]
    assert len(samples) == 32

    def entropy(p):
        return -sum(x * math.log(x) for x in p if x)

    # The entropy at each token of a completion, and the tokens: expectations over completions.
    total = entropy(first) + sum(first[a] * entropy(second[a]) for a in (0, 1))
    tokens = 1 + first[0] + first[1]
    found = sample_metrics(samples, 1.0)
    assert found["rollout/tokens"] == 32 * tokens
    assert found["policy/entropy"] == pytest.approx(total / tokens, rel=1e-6)
