"""bench/loss_table.py: what bench/loss_table.md says comes from the runs."""
import json
import shutil

import numpy as np
import pytest

import losses
from bench import loss_table
from preflight import loss_flags, rules
from test_docs import parsed
from tools.compare import paired_t


def numbers(rewards: list[float], seconds: float = 2.0) -> dict:
    n = len(rewards)
    return {"flags": "", "held_out": rewards[-1], "reward": rewards, "tokens": [100] * n,
            "seconds": [seconds] * n, "clip_frac": [0.0] * n}


def runs(final: float, noise: float) -> dict:
    """Three seeds that grow from 0 to `final` in 20 steps."""
    return {str(seed): numbers([min(final, (step + seed) / 20 * final) + noise * seed
                                for step in range(1, 31)]) for seed in range(3)}


def test_the_target_is_a_mean_of_three_steps():
    assert loss_table.reached(numbers([0.0, 1.0, 0.9, 0.8, 0.9, 0.99, 0.9, 1.0])) == 4
    assert loss_table.reached(numbers([1.0, 1.0])) is None
    assert loss_table.reached(numbers([0.9, 0.0] * 9)) is None


def test_a_table_compares_pairs_with_the_first_method():
    methods = {"clip": runs(0.95, 0.0), "sapo": runs(0.9, 0.001), "gmpo": runs(0.95, 0.0)}
    _, _, first, worse, equal = loss_table.table(methods)
    pairs = [np.mean(methods["sapo"][s]["reward"]) - np.mean(methods["clip"][s]["reward"])
             for s in "012"]
    low, high = paired_t(pairs)
    assert f"| {np.mean(pairs):+.3f}: {low:+.3f} to {high:+.3f} | worse |" in worse
    assert "| +0.000: +0.000 to +0.000 | no difference seen |" in equal
    assert "| 1,900 (1,800 to 2,000) |" in first and first.endswith("|  |  |")
    assert "one seed does not tell" in loss_table.table(
        {"clip": {"0": numbers([0.5] * 20)}, "sapo": {"0": numbers([0.6] * 20)}})[-1]
    assert "| 0 of 1 reached it |" in loss_table.table({"clip": {"0": numbers([0.5] * 20)}})[-1]


@pytest.mark.parametrize("part, name", [(part, name) for part, methods in
                                        loss_table.METHODS.items() for name in methods])
def test_every_method_passes_the_checks(part, name):
    args = parsed(f"grpo.py {loss_table.JOB} {loss_table.METHODS[part][name]}")
    assert not rules.problems(args, 2)
    given = args.advantage if part == "on" else args.loss
    assert given in (name, f"variants/{name}.py:{name}")


def test_every_advantage_and_every_loss_with_a_ratio_is_there():
    files = {path.stem for path in (loss_table.ROOT / "variants").glob("[a-z]*.py")}
    there = {*loss_table.METHODS["on"], *loss_table.METHODS["off"]}
    filters = {"opsm", "geometric"}  # clip's loss, with some completions left out
    built_in = {*losses.LOSSES, *loss_flags.NAMES["advantage"]}
    assert there == {*built_in, *files} - filters - {"reinforce"}


def test_the_page_is_what_the_script_writes(tmp_path, monkeypatch):
    """With the numbers that are there, and with some."""
    page = shutil.copy(loss_table.PAGE, tmp_path / "losses.md")
    monkeypatch.setattr(loss_table, "PAGE", tmp_path / "losses.md")
    monkeypatch.setattr(loss_table, "PICTURE", tmp_path / "losses.svg")
    before = page.read_text()
    loss_table.page()
    assert page.read_text() == before
    if loss_table.FILE.exists():
        assert (tmp_path / "losses.svg").read_text() == (
            loss_table.ROOT / "docs/pictures/losses.svg").read_text()
    monkeypatch.setattr(loss_table, "FILE", tmp_path / "numbers.json")
    for seed in (1, 0):
        loss_table.keep("off", "clip", seed, runs(0.95, 0.0)[str(seed)])
        loss_table.keep("off", "dppo", seed, runs(0.9, 0.01)[str(seed)])
    assert [*json.loads(loss_table.FILE.read_text())["off"]["clip"]] == ["0", "1"]
    loss_table.page()
    assert "| dppo | 2 |" in page.read_text()
    assert "against clip" in (tmp_path / "losses.svg").read_text()
