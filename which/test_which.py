"""which/which.json: our losses, advantages and weights give its numbers, and ranks add up to them.
docs/learn/which_grpo.md: it has what which/which.py prints, and its recipes give the updates of
other systems, by their released code (slow: it downloads their wheels)."""
import json
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

import batch
import flags
import grpo
import losses
import plan
import which

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/learn/which_grpo.md").read_text()
DATA = json.loads((ROOT / "which/which.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore:cov")  # ART's correlation of one number
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "reinforce++-baseline")


def close(got, expected) -> bool:
    got = torch.as_tensor(got, dtype=torch.float64).flatten()
    return torch.allclose(got, torch.tensor(which.flat(expected), dtype=torch.float64).flatten(),
                          rtol=0, atol=1e-12)


def flat(rows) -> torch.Tensor:
    return torch.tensor(which.flat(rows), dtype=torch.float64)


def row_of(lengths) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def parts(lengths: list[int], ranks: int) -> list[list[int]]:
    """The micro-batches of all ranks: as the update cuts rows."""
    sizes = [(i, 1, n + 1) for i, n in enumerate(lengths)]
    cut = [micro for rank in batch.balance(sizes, ranks, 10) for micro in rank]
    assert sorted(row for micro in cut for row in micro) == list(range(len(lengths)))
    assert ranks == 1 or sum(map(bool, cut)) > 1
    return cut


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", DATA["losses"], ids=lambda case: case["name"])
def test_losses_and_their_sums_over_ranks(case, ranks):
    lengths = [len(row) for row in case["logp"]]
    for name in case["loss"]:
        weights = losses.token_weights(torch.tensor(lengths), name, max_tokens=case["max_tokens"],
                                       prompts=torch.arange(len(lengths)) // case["group"])
        logp, total = flat(case["logp"]).requires_grad_(), 0.0
        for rows in parts(lengths, ranks):
            mine = torch.isin(row_of(lengths), torch.tensor(rows))
            row = row_of([lengths[i] for i in sorted(rows)])
            each, _ = losses.LOSSES[case["loss_kind"]](
                logp[mine], flat(case["old"])[mine], flat(case["advantages"])[mine], row,
                n_rows=len(rows), **case["flags"])
            assert close(each.detach(), [case["token_loss"][i] for i in sorted(rows)])
            total = total + (weights[sorted(rows)][row] * each).sum()
        assert close(total.detach(), [[case["loss"][name]]])
        assert close(torch.autograd.grad(total, logp)[0], case["gradient"][name])


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("case", DATA["advantages"], ids=lambda case: case["name"])
def test_advantages(case, kind):
    rewards, group = flat(case["rewards"]), len(case["rewards"][0])
    given = {"scored": torch.ones(len(rewards), dtype=torch.bool), "eps": case["eps"]}
    if kind == "maxrl":
        function = flags.chosen("advantage", "variants/maxrl.py:maxrl").function
        found = function(rewards, group, **given)
    elif kind == "reinforce++":
        found = rewards
    else:
        found = losses.group_advantages(rewards, group, kind=kind, **given)
    if kind.startswith("reinforce++"):
        row = row_of(case["lengths"])
        white = losses.whiten(found[row], torch.ones(len(row), dtype=torch.bool))
        found = white[torch.tensor(case["lengths"]).cumsum(0) - 1]
    assert close(found, [case["advantages"][kind]])


def test_kl_corrections_weights_and_the_entropy_with_a_mask():
    kl, engine, weights, entropy = (DATA[name] for name in (
        "kl", "corrections", "aggregation", "entropy"))
    for kind in ("k1", "k2", "k3", "k3_ratio"):
        logp = flat(kl["logp"]).requires_grad_()
        found = losses.kl_estimate(logp, flat(kl["ref"]), kind=kind, old=flat(kl["old"]))
        assert close(found.detach(), [kl[kind]["value"]])
        assert close(torch.autograd.grad(found.sum(), logp)[0], [kl[kind]["gradient"]])
    lengths = [len(row) for row in engine["old"]]
    for kind, factors in engine["factors"].items():
        found, _ = losses.engine_correction(
            flat(engine["old"]), flat(engine["engine"]), row_of(lengths), n_rows=len(lengths),
            kind=kind, low=engine["low"], high=engine["high"])
        assert close(found, factors)
    for name, expected in weights["weights"].items():
        found = losses.token_weights(
            torch.tensor(weights["lengths"]), name, max_tokens=weights["max_tokens"],
            prompts=torch.arange(4) // weights["group"])
        assert close(found, [expected])
    kept = torch.tensor([sum(row) for row in entropy["mask"]])
    for name, expected in entropy["value"].items():
        w = losses.token_weights(kept, name, max_tokens=entropy["max_tokens"],
                                 prompts=torch.arange(len(kept)) // entropy["group"])
        each = flat(entropy["entropy"])[flat(entropy["mask"]).bool()]
        assert close((w.repeat_interleave(kept) * each).sum(), [[expected]])


@pytest.mark.parametrize("recipe", which.RECIPES, ids=lambda recipe: f"{recipe[0]} {recipe[1]}")
def test_a_recipe_has_flags_that_grpo_takes(recipe):
    args = tyro.cli(grpo.Args, args=["--lr", "1e-6", *recipe[4].split()], use_underscores=True,
                    config=(tyro.conf.OmitArgPrefixes,))
    assert not plan.problems(args, 1)


# ---- by their code


@pytest.fixture(scope="module")
def wheels():
    try:
        which.fetch()
    except subprocess.CalledProcessError:
        pytest.skip(f"pip cannot download {', '.join(which.WHEELS)} into {which.FOLDER}")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_the_vectors_are_the_papers_and_polgrads(wheels):
    made, both = which.vectors()
    assert json.loads(json.dumps(made)) == DATA and both.compared > 800 and both.worst < 1e-12
    assert which.VECTORS.stat().st_size <= 200_000


@pytest.mark.slow
@pytest.mark.parametrize("question", which.QUESTIONS)
def test_the_page_has_what_their_code_gives(wheels, question):
    assert " ".join(which.QUESTIONS[question]().split()) in " ".join(PAGE.split())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", which.RECIPES, ids=lambda recipe: f"{recipe[0]} {recipe[1]}")
def test_a_recipe_gives_their_update_and_needs_each_flag(wheels, recipe):
    *others, text = recipe
    assert all(which.apart(recipe, cut) < 1e-6 for cut in which.CUTS)
    words = text.split()
    for i in range(0, len(words), 2):
        fewer = " ".join(words[:i] + words[i + 2:])
        if words[i + 1] != "dr_grpo":  # the default
            assert which.apart((*others, fewer), which.CUTS[1]) > 1e-6, words[i]
