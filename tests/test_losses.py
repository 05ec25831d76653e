"""losses.py and variants/: gradients by exact enumeration, rewards that differ by rounding,
extremes, refusals. Each loss, advantage and correction is the paper's: test_update.py."""
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
import fakes
import flags
import grpo
import losses
import plan
import reference_losses
from batch import Batch
from errors import SettingsError
from learning import sample
from log import Meter, sample_metrics
from reference_settings import literal
from tools import score as score_tool

F64, nan = torch.float64, math.nan
TIGHT = {"clip_low": 0.05, "clip_high": 0.08, "dual_clip": None}
FILES = "sapo gmpo dppo ipo opsm geometric clip_cov".split()


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def close(x, y, atol=1e-14):
    return torch.allclose(x, y, rtol=0, atol=atol)


def gradient(y, x):
    return torch.autograd.grad(y, x, retain_graph=True)[0]


def variant(name: str) -> str:
    return f"variants/{name}.py:{name}"


def loss(name: str, logp, old, A, row, **bounds):
    """A built-in loss, or one of variants/."""
    function = flags.chosen("loss", variant(name) if name in FILES else name).function
    return function(logp, old, A, row, n_rows=1, engine_logprobs=old,
                    draws=lambda: torch.zeros(len(row), dtype=F64), **TIGHT | bounds)


def advantages(name: str, rewards, group, eps=1e-6):
    """Of each completion (N,), by a built-in name or one of variants/; nan is not scored."""
    scored, row = ~rewards.isnan(), torch.arange(len(rewards))  # a token of each
    if name in flags.NAMES["advantage"]:
        return losses.group_advantages(rewards, group, kind=name, eps=eps, scored=scored)
    return flags.chosen("advantage", variant(name)).function(
        rewards, group, scored=scored, eps=eps, trained=scored, row=row, batch=batch_of(rewards),
        parts={"exact": (1.0, rewards)})


def batch_of(rewards) -> Batch:
    """A token each; nan is not scored."""
    return Batch([sample([1], np.ones(1), None if value != value else value)
                  for value in rewards.tolist()])


# ---- exact enumeration: V = 3, length 2
# theta (4, 3): row 0 has the logits of the first token, row 1 + a of the second after token a.
# All nine outcomes are listed, so an expectation is a sum.

OUTCOMES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
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


def expected_group_gradient(theta, rewards, G, kind):
    """The expectation over all 9^G groups of the gradient of 1/G sum_i A_i log p_i."""
    index = torch.tensor(list(itertools.product(range(9), repeat=G)))  # (9^G, G)
    logprobs = all_logprobs(theta)
    chance = probs(logprobs).detach()[index].prod(1)  # (9^G,)
    A = advantages(kind, rewards[index.flatten()], G)
    each = reinforce(logprobs[index.flatten()], A[:, None])  # (9^G * G, 2)
    return gradient(-(each.sum(1) * chance.repeat_interleave(G)).sum() / G, theta)


@pytest.mark.parametrize("kind", ["rloo", "dr_grpo", "reinforce++-baseline"])
def test_rloo_is_unbiased_and_a_mean_baseline_shrinks_the_gradient(kind):
    """The expected gradient is that of E[R], but for the factor (G - 1) / G of a mean baseline."""
    theta, G = policy(1), 3
    true = gradient(probs(all_logprobs(theta)) @ REWARDS, theta)
    factor = 1 if kind == "rloo" else (G - 1) / G
    assert close(expected_group_gradient(theta, REWARDS, G, kind), factor * true)


@pytest.mark.parametrize("G", [2, 3])
def test_maxrl_is_the_gradient_of_the_likelihoods_expansion(G):
    """Of Σ_k 1/k · pass@k, k < G: the first terms of log p. A is 0 where no completion succeeds, so
    one term less than in the paper's theorem 2. https://arxiv.org/abs/2602.02710"""
    theta, won = policy(3), tensor(1, 0, 0, 0, 1, 0, 0, 0, 0)
    p = probs(all_logprobs(theta)) @ won
    objective = sum((1 - (1 - p) ** k) / k for k in range(1, G))
    assert close(expected_group_gradient(theta, won, G, "maxrl"), gradient(objective, theta), 1e-13)
    with pytest.raises(SettingsError, match=r"at least 0 \(got -0.5\).*Would work: --advantage"):
        advantages("maxrl", tensor(1, -0.5), 2)


def kl(p_theta, q_theta, hold):
    """KL(p || q) of the tokens where `hold` samples the tokens before them."""
    P, Q = p_theta.log_softmax(-1), q_theta.log_softmax(-1)  # (4, 3): next token, for every prefix
    reach = torch.cat([torch.ones(1, dtype=F64), hold[0].softmax(-1)]).detach()  # (4,)
    return reach @ (P.exp() * (P - Q)).sum(1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_ratio"])
def test_kl_loss_gradients(kind):
    """k1 has none, k2 has KL(pi || ref)'s, k3 has KL(ref || pi)'s. k3_ratio has KL(pi || ref)'s
    with samples of another policy, and its expectation is that KL."""
    theta, ref = policy(6), policy(7).detach()
    old = (policy(10) if kind == "k3_ratio" else theta).detach()
    estimate = losses.kl_estimate(all_logprobs(theta), all_logprobs(ref), kind=kind,
                                  old=all_logprobs(old)).sum(1)
    found = probs(all_logprobs(old)) @ estimate  # it does not differentiate the sampling
    forward = kl(theta, ref, old)
    true = {"k1": 0 * forward, "k3": kl(ref, theta, old)}.get(kind, forward)
    assert close(gradient(found, theta), gradient(true, theta), 1e-13)
    assert kind != "k3_ratio" or close(found, forward, 1e-13)


def test_k1_in_the_reward_is_exact():
    """With token_rewards and rewards_to_go the gradient is that of E[R] - coef * KL(pi || ref)."""
    theta, coef, two = policy(8), 0.3, torch.full((9,), 2)
    logprobs, ref_logprobs = all_logprobs(theta), all_logprobs(policy(9)).detach()
    rewards = losses.token_rewards(REWARDS, logprobs.detach().flatten(), ref_logprobs.flatten(),
                                   two, kl_coef=coef)  # (18,)
    each = reinforce(logprobs, losses.rewards_to_go(rewards, two).view(9, 2))
    got = -gradient(probs(logprobs).detach() @ each.sum(1), theta)
    total = REWARDS - coef * (logprobs - ref_logprobs).sum(1)
    assert close(got, gradient(probs(logprobs) @ total, theta))


def test_minus_the_log_prob_of_the_sampled_tokens_has_the_entropy_as_its_expectation():
    """Each id is there as often as it is likely, so a mean over the samples is an expectation. A
    reply after it is no step."""
    samples = [sample([1], np.array([a, 7]), 1.0, np.array([math.log(p), 0]), False,
                      np.array([True, False]))
               for a, p in enumerate((1/2, 1/4, 1/4)) for _ in range(int(4 * p))]
    found = sample_metrics(samples, 1.0)
    assert found["rollout/tokens"] == 4
    assert found["policy/entropy"] == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("n, correct", [(4, 1), (5, 3), (5, 0)])
def test_pass_at_k_is_unbiased(n, correct):
    """It is the share of all k-subsets with a correct one."""
    for k in range(1, n + 1):
        subsets = [min(s) < correct for s in itertools.combinations(range(n), k)]
        assert evaluate.pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))


# ---- rewards and advantages at their edges


def decided(rewards) -> dict[str, float]:
    """What each that asks whether rewards differ makes of groups of 3. 0: no. nan: not scored."""
    known, batch = rewards[~rewards.isnan()], batch_of(rewards)
    found = {name: advantages(name, rewards, 3, eps=0.0) for name in (
        "grpo", "dr_grpo", "rloo", "reinforce++-baseline", "lite_ppo", "gdpo")}
    found["maxrl"] = advantages("maxrl", rewards * float(known.sum().sign()), 3)
    _, logged = grpo.tokens_in_loss(grpo.Args(group=3), batch)
    found["log"] = 1 - logged["batch/groups_equal"]
    logged = evaluate.named("", batch.samples, evaluate.EvalArgs(eval_samples=3))
    found["eval"] = 1 - logged["groups_equal"]
    found["tool"] = score_tool.do_differ(known.tolist())
    found["whiten"] = losses.whiten(rewards, ~rewards.isnan())
    return {name: float(torch.as_tensor(x).double().abs().max()) for name, x in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_rewards_that_differ_by_rounding_alone_are_equal_to_all_that_ask(seed):
    """Parts are added up in other orders; some sums are below 0, some are 0, one is not scored. To
    no one are they equal when one of them differs by 1e-4."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=6) * rng.choice([1, 1000])
    parts = np.append(parts, -parts) if seed % 3 == 0 else parts
    rewards = tensor(*[sum(rng.permutation(parts).tolist()) for _ in range(30)])
    rewards[rng.integers(1, 30)] = nan
    assert len(set(rewards.tolist())) > 2 and not any(decided(rewards).values())
    rewards[0] += 1e-4
    assert all(decided(rewards).values())
    exact = tensor(1.0, 0, 1, 0, 0, 0)
    right, noise = advantages("pass_at_k", exact, 6), tensor(*[0.1 + 0.2 - 0.3] * 6)
    assert right.any() and close(advantages("pass_at_k", exact - noise, 6), right)
    assert evaluate.passes(replace(fakes.sample(1.0), rewards={"only": 0.7 + 0.2 + 0.1}), 1.0)


def test_a_completion_without_a_token_changes_nothing():
    """In weights, in rewards of tokens and in their sums; completions come in any order of lengths.
    The KL coefficient adapts as the paper says."""
    lengths = torch.tensor([2, 0, 3, 0, 1])
    for aggregation in "token", "sequence", "constant", "prompt":
        for some in lengths, 0 * lengths:
            weights = losses.token_weights(some, aggregation, max_tokens=20)
            assert torch.equal(weights > 0, some > 0)
    rewards = losses.token_rewards(tensor(1, 2, 3, 4, 5), None, None, lengths, kl_coef=0.1)
    assert rewards.tolist() == [0, 1, 0, 0, 3, 5]
    assert losses.rewards_to_go(rewards, lengths).tolist() == [1, 1, 3, 3, 3, 5]
    for kl in 0.0, 0.11, 9.0:
        args = SimpleNamespace(kl_target=0.1, kl_horizon=20)
        assert losses.adaptive_kl(0.3, kl, target=0.1, horizon=20, n=8) == pytest.approx(
            reference_losses.adaptive_kl(args, 0.3, kl, 8))


# ---- extremes of losses and corrections


@pytest.mark.parametrize("name", [*losses.LOSSES, *FILES])
def test_far_from_pi_old_a_loss_and_its_gradient_are_finite(name):
    """In float32, where exp(89) is inf. Of π and of π_old one is tiny; also beside a near token."""
    for far, A in itertools.product((500.0, -500.0, 80.0), (1.5, -1.5)):
        old = torch.tensor([-501.0 if far > 0 else -1.0, -1.0])
        logp = (old + torch.tensor([far, 0.1])).requires_grad_()
        found, metrics = loss(name, logp, old, torch.tensor([A, A]), torch.tensor([0, 0]))
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert gradient(found.sum(), logp).isfinite().all()
        assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("name", ["clip", "gspo"])
@pytest.mark.parametrize("far", [79.0, 89.0, 500.0])
def test_a_ratio_that_overflows_keeps_its_gradient_where_no_bound_acts(name, far):
    """It must not become a silent 0."""
    for A, bound, loss_and_slope in (-2.0, None, 2 * math.exp(min(far, 80))), (-2.0, 3.0, 6), (
            2.0, None, -1.28 * 2):
        logp = torch.tensor([far - 1.0], requires_grad=True)
        found, metrics = loss(name, logp, torch.tensor([-1.0]), torch.tensor([A]),
                              torch.tensor([0]), clip_high=0.28, dual_clip=bound)
        cut = float(metrics["clip_frac"])
        assert float(found.detach()) == pytest.approx(loss_and_slope, rel=1e-5)
        assert float(gradient(found, logp)) == pytest.approx((1 - cut) * loss_and_slope, rel=1e-5)
        assert cut == (loss_and_slope < 7)


def test_corrections_and_kl_terms_are_finite():
    """In float32, far from π_old, from the engine and from the starting model."""
    for new, old, ref in itertools.product([-1.0, -501.0], repeat=3):
        logp, row = torch.tensor([new, new], requires_grad=True), torch.tensor([0, 0])
        old, ref = torch.tensor([old, old]), torch.tensor([ref, ref])
        kl = losses.kl_estimate(logp, ref, kind="k3_ratio", old=old)
        assert kl.isfinite().all() and gradient(kl.sum(), logp).isfinite().all()
        for kind in ("truncate", "mask", "sequence_truncate", "sequence_mask", "sequence_mean"):
            factors, _ = losses.engine_correction(old, ref, row, n_rows=1, kind=kind, low=0.5,
                                                  high=2.0)
            assert factors.dtype == torch.float32 and factors.isfinite().all()


# ---- a loss or an advantage of a file

MINE = """
def good(logp, old, A, row, **others):
    return -A * logp, {}

def refuses(args):
    if args.epochs > 1:
        return "is for one epoch."
"""


REFUSED = """
advantage=variants/maxrl.py:maxrl overlong_buffer=4 | needs rewards of at least 0, and --overlong_b
advantage=variants/gdpo.py:gdpo kl_reward_coef=4 | normalizes each reward of --reward, and --kl_rew
loss=variants/gmpo.py:gmpo engine_correction=truncate | has one ratio for a completion, and --engin
loss=variants/gmpo.py:gmpo advantage=reinforce++ kl_reward_coef=0.1 | has an advantage for each tok
loss=variants/geometric.py:geometric engine_correction=mask | does not combine with --engine_correc
loss=cispo dual_clip=3.0 | --dual_clip has no effect
loss=reinforce dual_clip=3.0 | --dual_clip has no effect
loss=variants/sapo.py:sapo dual_clip=3.0 | --dual_clip has no effect
loss=variants/gmpo.py:gmpo dual_clip=3.0 | --dual_clip has no effect
loss=variants/dppo.py:dppo dual_clip=3.0 | --dual_clip has no effect
loss=variants/ipo.py:ipo dual_clip=3.0 | --dual_clip has no effect
loss=mine.py | Would work: clip, gspo, cispo, reinforce, or a function of a file
loss=mine.py:bad | needs a function bad(logp, old, A, row, *, n_rows, engine
advantage=mine.py:good | needs a function good(rewards, group, *, scored, eps
loss=mine.py:good epochs=2 | mine.py:good is for one epoch. Would work: --loss clip
advantage=rloo group=1 | compares the completions of a prompt, so --group must be at least 2
advantage=variants/gdpo.py:gdpo group=1 | compares the completions of a prompt, so --group must
advantage=variants/lite_ppo.py:lite_ppo group=1 | compares the completions of a prompt
advantage=variants/maxrl.py:maxrl group=1 | compares the completions of a prompt, so --group must
loss=torn.py:f | torn.py cannot be loaded: SyntaxError
advantage=ends.py:f | ends.py cannot be loaded: SystemExit: 0
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_makes_no_sense_is_one_sentence_with_a_way_out(line, tmp_path, monkeypatch):
    """Before anything loads."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "torn.py").write_text("def f(:\n")
    (tmp_path / "ends.py").write_text("exit(0)")
    monkeypatch.chdir(tmp_path)
    flags.chosen.cache_clear()
    words, sentence = line.split(" | ")
    settings = dict(word.split("=") for word in words.split())
    found, = plan.problems(replace(grpo.Args(), lr=1e-6, **{
        name: literal(value) for name, value in settings.items()}), 1)
    assert sentence in found


@pytest.mark.parametrize("metrics", [{"loss/policy": torch.tensor(1.0)},
                                     {"loss/policy": torch.ones(3), "kept": torch.ones(2)}])
def test_a_loss_of_another_shape_ends_the_first_step(metrics):
    """A mean over the micro-batch would depend on how rows are cut."""
    meter = Meter(SimpleNamespace(device="cpu"))
    with pytest.raises(SettingsError, match=r"must have a number for each of 3 tokens; its shape"):
        meter.add(torch.ones(3), metrics)


@pytest.mark.parametrize("least, trained", [("", 3), ("LEAST = 2", 0)])
def test_an_advantage_of_a_file_says_whether_it_compares(least, trained, tmp_path):
    """One with a fixed baseline needs no group."""
    (tmp_path / "mine.py").write_text(f"{least}\ndef fixed(rewards, group, **_): return rewards")
    args = replace(grpo.Args(), lr=1e-6, group=1, advantage=f"{tmp_path}/mine.py:fixed")
    assert bool(plan.problems(args, 1)) == bool(least)
    _, metrics = grpo.tokens_in_loss(args, batch_of(tensor(1, 2, 3)))
    assert metrics["batch/trained"] == trained == 3 - metrics["batch/dropped_no_baseline"]
