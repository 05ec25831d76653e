"""docs/learn/which_grpo.md has what bench/which.py prints, and its recipes give the updates of
other systems, by their released code (slow: it downloads their wheels). bench/which.json is of
tests/reference_losses.py, which test_losses.py and test_reference.py hold ours to."""
import json
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

import grpo
import plan
from bench import which

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/learn/which_grpo.md").read_text()
DATA = json.loads((ROOT / "bench/which.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore:cov")  # ART's correlation of one number


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
