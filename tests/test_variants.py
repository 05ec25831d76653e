"""The losses, advantages and corrections of losses.py and variants/, token by token against
reference.py, against exact enumeration, and far from pi_old. A file of --loss or --advantage.

What TRL and verl make of the same numbers is in test_peers.py.
"""
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
import losses
import ranks
import reference
import reference_losses
from dist import SettingsError
from keeping import checkpoint
from preflight import loss_flags, plan, rules
from test_losses import (
    F64,
    FULL,
    all_logprobs,
    close,
    expected_group_gradient,
    gradient,
    kl,
    policy,
    probs,
    tensor,
    true_gradient,
)

ROOT = Path(__file__).parent.parent
TIGHT = {"clip_low": 0.05, "clip_high": 0.08, "dual_clip": None}
BOUNDS = {
    **dict.fromkeys("cispo reinforce sapo dppo ipo opsm geometric".split(), TIGHT),
    "clip": TIGHT | {"dual_clip": 1.02}, "gspo": TIGHT | {"clip_low": 0.01, "clip_high": 0.02},
    "gmpo": TIGHT | {"clip_low": 0.1, "clip_high": 0.15}}
CONSTANTS = {"sapo": {"TAU_OTHER": 1.5}, "ipo": {"COEF": 0.3}, "geometric": {"LOW": 0.8},
             "opsm": {"DELTA": 0.02}}
nan = math.nan


def variant(name: str) -> str:
    return f"variants/{name}.py:{name}"


def loss(name: str, logprobs, old, A, mask, engine=None, **bounds):
    """Of a name, with the bounds above."""
    function = loss_flags.loss_of(name if name in losses.LOSSES else variant(name))
    return function(logprobs, old, A, mask, engine_logprobs=old if engine is None else engine,
                    **BOUNDS[name] | bounds)


def advantages(name: str, rewards, group, scored=None, eps=1e-6):
    scored = ~rewards.isnan() if scored is None else scored
    if name in loss_flags.NAMES["advantage"]:
        return losses.group_advantages(rewards, group, kind=name, eps=eps, scored=scored)
    return loss_flags.own("advantage", variant(name)).function(
        rewards, group, scored=scored, eps=eps, parts={}, trained=scored)


@pytest.fixture
def edited(monkeypatch):
    """Constants that act more, in the files and in the reference."""
    for name, values in CONSTANTS.items():
        for constant, value in values.items():
            module = sys.modules[loss_flags.own("loss", variant(name)).function.__module__]
            monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(reference_losses, "SAPO_TAUS", (1.0, 1.5))
    monkeypatch.setattr(reference_losses, "IPO_COEF", 0.3)
    monkeypatch.setattr(reference_losses, "OPSM_DELTA", 0.02)
    monkeypatch.setattr(reference_losses, "GEOMETRIC", (0.8, 1.001))


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


def one_by_one(name: str, logprobs, old, engine, A, mask):
    """By reference.py: the sum of the token losses, the ratios, what is cut, what is dropped."""
    total, ratios, cuts, dropped = 0.0, [], [], []
    args = SimpleNamespace(**BOUNDS[name])
    for i, row in enumerate(mask):
        each, olds, engines = (x.expand(mask.shape)[i][row].tolist() for x in (A, old, engine))
        logps = list(logprobs[i][row])
        log_ratios = [(new - was, a) for new, was, a in zip(logps, olds, each, strict=True)]
        for logp, was, a in zip(logps, olds, each, strict=True):
            one, ratio, cut = reference_losses.token_loss(args, name, logp, was, a, log_ratios)
            dropped.append(reference_losses.dropped(
                name, a, [x.detach() for x in logps], olds, engines))
            total = total + (1 + 0.1 * i) * (0.0 * one if dropped[-1] else one)  # a row's weight
            ratios.append(float(ratio.detach()))
            cuts.append(float(cut))
    return total, ratios, cuts, dropped


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BOUNDS)
def test_a_loss_is_the_formula_and_its_gradient(name, seed, edited):
    for per_token in (False, True):
        logprobs, old, engine, A, mask = ragged(seed, per_token=per_token)
        found, metrics = loss(name, logprobs, old, A, mask, engine)
        weights = (1 + 0.1 * torch.arange(6, dtype=F64))[:, None]
        total, ratios, cuts, dropped = one_by_one(name, logprobs, old, engine, A, mask)
        assert abs(float(((weights * found).sum() - total).detach())) < 1e-12
        assert close(gradient((weights * found).sum(), logprobs), gradient(total, logprobs), 1e-12)
        assert metrics["ratio"][mask].tolist() == pytest.approx(ratios, abs=1e-12)
        assert metrics["clip_frac"][mask].tolist() == cuts
        assert any(cuts) != (name in ("sapo", "reinforce"))
        log_r = (logprobs - old).detach()[mask]
        assert close(metrics["approx_kl"][mask], log_r.exp() - 1 - log_r)
        if name in ("opsm", "geometric"):
            metric = metrics["opsm_cut" if name == "opsm" else "engine_cut"]
            assert metric[mask].tolist() == dropped and 0 < sum(dropped) < len(dropped)
        assert not found[~mask].any() and not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("name", BOUNDS)
def test_on_policy_a_loss_has_reinforces_gradient(name):
    logprobs, _, _, A, mask = ragged(1)
    found, metrics = loss(name, logprobs, logprobs.detach(), A, mask)
    assert close(gradient(found.sum(), logprobs), torch.where(mask, -A, 0))
    assert not metrics["clip_frac"].any() and (metrics["ratio"][mask] == 1).all()


@pytest.mark.parametrize("A", [1.5, -1.5])
@pytest.mark.parametrize("far", [500.0, -500.0, 80.0, 21.0])
@pytest.mark.parametrize("name", BOUNDS)
def test_far_from_pi_old_a_loss_and_its_gradient_are_finite(name, far, A):
    """In float32, where exp(500) is inf. Of π and of π_old one is tiny; also beside a near token.
    """
    old = torch.tensor([[-501.0 if far > 0 else -1.0, -1.0]])
    logprobs = (old + torch.tensor([[far, 0.1]])).requires_grad_()
    found, _ = loss(name, logprobs, old, torch.tensor([[A]]), FULL[:1], dual_clip=None)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert gradient(found.sum(), logprobs).isfinite().all()


def test_sapo_fades_and_has_a_slope_of_1_at_pi_old(edited):
    """A smooth gate: the gradient is A at r = 1 for any tau, and falls on both sides."""
    log_r = torch.linspace(-2, 2, 41, dtype=F64)[None].requires_grad_()
    for A, tau in ((1.0, 1.0), (-1.0, 1.5)):
        found, _ = loss("sapo", log_r, log_r.detach() * 0, tensor([A]), log_r > -9)
        slope = -gradient(found.sum(), log_r) / log_r.exp() / A  # of the gate, in r
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


# ---- corrections, advantages, weights


@pytest.mark.parametrize("kind", ["truncate", "mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_is_the_formula_and_finite(kind):
    args = SimpleNamespace(engine_correction=kind, correction_low=0.9, correction_high=1.1)
    for seed in range(3):
        _, old, engine, _, mask = ragged(seed)
        got, found = losses.engine_correction(old, engine, mask, kind=kind, low=0.9, high=1.1)
        for i, row in enumerate(mask[:5]):
            weights, ratios = reference_losses.engine_correction(
                args, old[i][row].tolist(), engine[i][row].tolist())
            assert got[i][row].tolist() == pytest.approx(weights, abs=1e-12)
            assert found["engine_ratio"][i][row].tolist() == pytest.approx(ratios, abs=1e-12)
        assert not got[~mask].any() and not found["engine_cut"][~mask].any()
        assert 0 < found["engine_cut"].sum() < mask.sum()
    engine = torch.tensor([[-501.0, -501.0]])
    for far in (500.0, -500.0):
        got, _ = losses.engine_correction(
            engine + far, engine, FULL[:1], kind=kind, low=0.5, high=2.0)
        top = 2.0 if kind.endswith("truncate") and far > 0 else 0.0
        assert got.dtype == torch.float32 and got.tolist() == [[top, top]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "lite_ppo", "maxrl"])
def test_an_advantage_is_the_formula(name, seed):
    """Groups of 4: one of equal rewards, one with a single score, some unscored completions."""
    rewards = torch.tensor(np.random.default_rng(seed).random(20))
    rewards[4:8], rewards[9:12], rewards[13] = 0.1, nan, nan
    got = advantages(name, rewards, 4, eps=0.1)
    batch = rewards[~rewards.isnan()].tolist()
    args = SimpleNamespace(advantage_eps=0.1)
    for i, R in enumerate(rewards.tolist()):
        group = [r for r in rewards[i - i % 4:i - i % 4 + 4].tolist() if r == r]
        right = 0.0 if R != R else reference.group_advantage(args, name, R, group, batch)
        assert float(got[i]) == pytest.approx(right, abs=1e-12)
    assert got.dtype == F64 and got.any()


@pytest.mark.parametrize("G", [2, 3, 4])
def test_maxrl_is_the_gradient_of_the_likelihoods_expansion(G, monkeypatch):
    """Of Σ_k 1/k · pass@k, k < G: the first terms of log p. A is 0 where no completion succeeds, so
    one term less than in the paper's theorem 2, which has no baseline.

    The expectation over all groups is exact. https://arxiv.org/abs/2602.02710
    """
    monkeypatch.setattr("test_losses.group_advantages",
                        lambda rewards, group, kind: advantages(kind, rewards, group))
    theta, won = policy(3), tensor(1, 0, 0, 0, 1, 0, 0, 0, 0)
    got = expected_group_gradient(theta, won, G, "maxrl")
    p = probs(all_logprobs(theta)) @ won
    objective = sum((1 - (1 - p) ** k) / k for k in range(1, G))
    assert close(got, gradient(objective, theta), 1e-13)
    assert G == 2 or not close(got, (G - 1) / G * true_gradient(theta, won), 0.01)


def test_maxrl_refuses_a_negative_reward():
    assert advantages("maxrl", tensor(1, 0, 0, 0), 4).tolist() == [3, -1, -1, -1]
    assert advantages("maxrl", tensor(0, 0, 0, 0), 2).tolist() == [0, 0, 0, 0]
    assert advantages("maxrl", tensor(2, nan, 0, nan), 4).tolist() == [1, 0, -1, 0]
    with pytest.raises(SettingsError, match=r"at least 0 \(got -0.5\).*Would work: --advantage"):
        advantages("maxrl", tensor(1, -0.5), 2)


@pytest.mark.parametrize("rewards", [(1.0, nan), (nan, nan), (3.0, 3.0)])
def test_lite_ppo_of_a_batch_without_a_spread_is_0(rewards):
    assert advantages("lite_ppo", tensor(*rewards), 2, eps=0.0).tolist() == [0, 0]


def test_a_prompts_mean_counts_each_prompt_once():
    """A completion without loss is in no denominator; a minibatch may cut a group."""
    lengths, prompts = torch.tensor([4, 0, 6, 5, 0, 0]), torch.tensor([7, 7, 7, 8, 9, 9])
    got = losses.token_weights(lengths, "prompt", max_tokens=99, prompts=prompts)
    assert got.tolist() == [1 / 20, 0, 1 / 20, 1 / 10, 0, 0] and got.dtype == F64
    alone = losses.token_weights(lengths, "prompt", max_tokens=99)
    assert torch.equal(alone, losses.token_weights(lengths, "sequence", max_tokens=99))


# ---- what is refused before anything loads


MINE = """
def good(logprobs, old_logprobs, advantages, mask, **others):
    return -advantages * logprobs, {}

def short(logprobs, mask):
    return logprobs

def refuses(args):
    if args.epochs > 1:
        return "is for one epoch."
"""


@pytest.mark.parametrize("words, settings", [
    *((f"{name} needs rewards of at least 0, and --{flag} subtracts", {
        "advantage": variant(name), flag: 4}) for name in ("maxrl",) for flag in (
        "overlong_buffer", "kl_reward_coef")),
    *((f"normalizes each reward of --reward, and --{flag} is none of them", {
        "advantage": variant("gdpo"), flag: 4}) for flag in ("overlong_buffer", "kl_reward_coef")),
    ("has one ratio for a completion, and --engine_correction truncate has one for each token",
     {"loss": variant("gmpo"), "engine_correction": "truncate"}),
    ("--advantage reinforce++ with --kl_reward_coef has an advantage for each token",
     {"loss": variant("gmpo"), "advantage": "reinforce++", "kl_reward_coef": 0.1}),
    ("does not combine with --engine_correction",
     {"loss": variant("geometric"), "engine_correction": "mask"}),
    *(("--dual_clip", {"loss": name, "dual_clip": 3.0}) for name in (
        "cispo", "reinforce", *map(variant, ("sapo", "gmpo", "dppo", "ipo")))),
    ("--loss reinforce has no ratio", {"loss": "reinforce", "epochs": 2}),
    ("--group must be at least 2", {"advantage": variant("maxrl"), "group": 1}),
    ("--correction_low must be at most 0.3",
     {"engine_correction": "sequence_mask", "correction_high": 0.3}),
    ("there is no such loss. Would work: clip, gspo,", {"loss": "clop"}),
    ("there is no such loss. Would work: --loss variants/sapo.py:sapo.", {"loss": "sapo"}),
    ("Would work: --advantage variants/gdpo.py:gdpo.", {"advantage": "gdpo"}),
    ("there is no file nowhere.py, here or in", {"loss": "nowhere.py:f"}),
    ("does not say which function. Would work: --loss mine.py:NAME", {"loss": "mine.py"}),
    ("needs a function bad(logprobs, old_logprobs, advantages, mask, *, engine", {
        "loss": "mine.py:bad"}),
    ("needs a function short(logprobs,", {"loss": "mine.py:short"}),
    ("needs a function good(rewards, group, *, scored, eps", {"advantage": "mine.py:good"}),
    ("mine.py:good is for one epoch. Would work: --loss clip", {"loss": "mine.py:good",
                                                                "epochs": 2}),
    ("torn.py cannot be loaded: SyntaxError", {"loss": "torn.py:f"}),
])
def test_what_makes_no_sense_is_one_sentence_with_a_way_out(words, settings, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "torn.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    loss_flags.own.cache_clear()
    args = plan.changed(grpo.Args(), lr=1e-6, **settings)
    found = [str(rule) for rule in rules.problems(args, 1)]
    assert len(found) == 1 and words in found[0], found
    assert "Would work: " in found[0] or "needs a function" in found[0]


def test_a_file_is_found_here_or_in_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loss_flags.own.cache_clear()
    assert loss_flags.own("loss", variant("sapo")).function.__code__.co_filename == str(
        ROOT / "variants/sapo.py")
    (tmp_path / "mine.py").write_text(MINE)
    args = plan.changed(grpo.Args(), loss="mine.py:good", advantage=variant("gdpo"))
    assert not rules.problems(plan.changed(args, lr=1e-6), 1)
    assert loss_flags.digests(args).keys() == {"loss_file", "advantage_file"}
    assert loss_flags.digests(grpo.Args()) == {}


def files_of(world, folder: str) -> list[str]:
    """What set_up compares, where each rank has a file of its own."""
    path = Path(folder, f"{world.rank // 2}.py")
    return world.differences(loss_flags.digests(plan.changed(grpo.Args(), loss=f"{path}:good")))


def test_a_file_is_the_same_on_all_ranks_and_in_a_resumed_run(tmp_path):
    (tmp_path / "0.py").write_text(MINE)
    (tmp_path / "1.py").write_text(MINE.replace("-adv", "-2 * adv"))
    assert ranks.results(2, files_of, str(tmp_path))[0] == []
    found, = ranks.results(3, files_of, str(tmp_path))[0]
    assert found.startswith("loss_file is ") and "rank 2; it must be the same" in found
    digests = [loss_flags.digests(plan.changed(grpo.Args(), loss=f"{tmp_path}/{name}.py:good"))
               for name in "01"]
    saved = checkpoint.Saved(tmp_path, {"settings": digests[0]})
    checkpoint.check(saved, digests[0])
    with pytest.raises(SettingsError, match="loss_file was .* and is now"):
        checkpoint.check(saved, digests[1])
