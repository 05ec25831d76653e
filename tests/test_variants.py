"""A loss or an advantage of a file: what is refused before anything loads, and that the file stays
the same. Their formulas are in test_reference.py."""
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import families
import flags
import grpo
import plan
from errors import SettingsError
from log import Meter
from settings import changed
from test_losses import (
    BOUNDS,
    advantages,
    all_logprobs,
    close,
    expected_group_gradient,
    gradient,
    loss,
    policy,
    probs,
    tensor,
    variant,
)

ROOT = Path(__file__).parent.parent
MINE = """
def good(logp, old, A, row, **others):
    return -A * logp, {}

def refuses(args):
    if args.epochs > 1:
        return "is for one epoch."
"""


@pytest.mark.parametrize("words, settings", [
    ("needs rewards of at least 0, and --overlong_buffer subtracts",
     {"advantage": variant("maxrl"), "overlong_buffer": 4}),
    ("normalizes each reward of --reward, and --kl_reward_coef is none of them",
     {"advantage": variant("gdpo"), "kl_reward_coef": 4}),
    ("has one ratio for a completion, and --engine_correction truncate has one for each token",
     {"loss": variant("gmpo"), "engine_correction": "truncate"}),
    ("--advantage reinforce++ has an advantage for each token",
     {"loss": variant("gmpo"), "advantage": "reinforce++", "kl_reward_coef": 0.1}),
    ("does not combine with --engine_correction",
     {"loss": variant("geometric"), "engine_correction": "mask"}),
    *(("--dual_clip does nothing", {"loss": name, "dual_clip": 3.0}) for name in (
        "cispo", "reinforce", *map(variant, ("sapo", "gmpo", "dppo", "ipo")))),
    ("Would work: clip, gspo, cispo, reinforce, or a function of a file", {"loss": "mine.py"}),
    ("needs a function bad(logp, old, A, row, *, n_rows, engine", {
        "loss": "mine.py:bad"}),
    ("needs a function good(rewards, group, *, scored, eps", {"advantage": "mine.py:good"}),
    ("mine.py:good is for one epoch. Would work: --loss clip", {"loss": "mine.py:good",
                                                                "epochs": 2}),
    *((f"--advantage {name} compares the completions of a prompt, so --group must be at least 2",
       {"advantage": name, "group": 1}) for name in ("rloo", *map(variant, (
           "gdpo", "lite_ppo", "maxrl")))),
    ("torn.py cannot be loaded: SyntaxError", {"loss": "torn.py:f"}),
])
def test_what_makes_no_sense_is_one_sentence_with_a_way_out(words, settings, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "torn.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    flags.own.cache_clear()
    found, = plan.problems(changed(grpo.Args(), lr=1e-6, **settings), 1)
    assert words in found


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
    mine = tmp_path / "mine.py"
    mine.write_text(f"{least}\ndef fixed(rewards, group, **_): return rewards - 0.5\n")
    args = changed(grpo.Args(), lr=1e-6, group=1, advantage=f"{mine}:fixed")
    assert bool(plan.problems(args, 1)) == bool(least)
    batch = families.batch_of([[3, 4]] * 3, [[5, 6], [7], [8, 9]])
    for one in batch.samples:
        one.score.parts["exact"] = 0.0
    tokens, metrics = grpo.tokens_in_loss(args, batch)
    assert (metrics["batch/trained"], metrics["batch/dropped_no_baseline"]) == (
        trained, 3 - trained)
    if trained:
        A = grpo.compute_advantages(args, batch, tokens, None, None)
        assert A.tolist() == [-0.5] * 5  # of each token


@pytest.mark.parametrize("name", BOUNDS)
def test_far_from_pi_old_a_loss_and_its_gradient_are_finite(name):
    """In float32, where exp(500) is inf. Of π and of π_old one is tiny; also beside a near token.
    """
    for far, A in itertools.product((500.0, -500.0, 80.0), (1.5, -1.5)):
        old = torch.tensor([-501.0 if far > 0 else -1.0, -1.0])
        logprobs = (old + torch.tensor([far, 0.1])).requires_grad_()
        found, metrics = loss(name, logprobs, old, torch.tensor([A, A]), torch.tensor([0, 0]),
                        dual_clip=None)
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert gradient(found.sum(), logprobs).isfinite().all()
        assert not any(x.requires_grad for x in metrics.values())


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
