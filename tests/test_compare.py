"""tools/compare.py: its intervals hold what they promise, and its sentences follow from them."""
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from forked import PYTHON
from tools import compare

ROOT = Path(__file__).parent.parent


# ---- intervals: 95 % of 95 % intervals hold the truth

REPEATS = 600
ERROR = 4 * np.sqrt(0.95 * 0.05 / REPEATS)   # four standard errors: 3.6 %


def coverage(interval, truth: float) -> float:
    """How often an interval of new data holds the truth."""
    rng = np.random.default_rng(7)
    found = [interval(rng) for _ in range(REPEATS)]
    return float(np.mean([low <= truth <= high for low, high in found]))


@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
def test_seeds_that_are_paired(seeds):
    def interval(rng):
        a = 0.5 + 0.1 * rng.normal(size=seeds)   # what a seed's prompts do to both
        b = a + 0.03 + 0.02 * rng.normal(size=seeds)
        return compare.paired_t(b - a)
    assert abs(coverage(interval, 0.03) - 0.95) < ERROR


@pytest.mark.parametrize("n, m, wider", [(3, 3, 1), (5, 5, 1), (10, 4, 3), (2, 2, 1)])
def test_runs_that_are_not_paired(n, m, wider):
    """Few runs make the interval too wide, and never too narrow."""
    def interval(rng):
        return compare.welch_t(0.5 + 0.02 * rng.normal(size=n),
                               0.53 + wider * 0.02 * rng.normal(size=m))
    assert 0.95 - ERROR < coverage(interval, 0.03) < 0.999


@pytest.mark.parametrize("rows, a, b", [(100, 0.5, 0.6), (300, 0.1, 0.12)])
def test_rows(rows, a, b):
    """Rows are right or wrong, and a hard one is hard for both."""
    def interval(rng):
        hard = rng.uniform(size=rows)
        shared = rng.uniform(size=rows) < 0.5
        other = np.where(shared, hard, rng.uniform(size=rows))
        return compare.bootstrap((other < b).astype(float) - (hard < a), draws=200)
    assert abs(coverage(interval, b - a) - 0.95) < ERROR + 0.01   # a percentile of 200 draws


def test_a_difference_that_is_not_there_is_seldom_claimed():
    rng = np.random.default_rng(3)
    claims = 0
    for _ in range(REPEATS):
        a, b = (dict(enumerate(rng.normal(0.9, 0.02, 3))) for _ in "AB")
        claims += "better" in compare.over_runs("reward", a, b)
    assert claims / REPEATS < 0.05 + ERROR


def test_t_is_the_published_table():
    """https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm"""
    assert [compare.t_quantile(n) for n in (1, 2, 4, 9)] == [12.706, 4.303, 2.776, 2.262]
    assert compare.t_quantile(2.9) == compare.t_quantile(2) > 2
    assert compare.t_quantile(0.4) == 12.706 and compare.t_quantile(500) > 1.96


# ---- runs

def write(folder: Path, seed: int, rewards: list[float], passes: list | None = None) -> str:
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": seed, "eval_pass": 1.0}))
    rows = [{"step": i, "reward/mean": r, "reward/exact": r / 2}
            for i, r in enumerate(rewards, 1)]
    if passes:
        rows.insert(0, {"step": 0, "eval/pass@1": 0.0})   # before
        score = sum(p == 1 for p in passes) / len(passes)
        rows.append({"step": len(rewards), "eval/pass@1": score})
        lines = [{"prompt": f"p{i}", "rewards": {"exact": p, "coin": 1}}
                 for i, p in enumerate(passes)]
        (folder / "samples/eval_00000.jsonl").write_text("")
        (folder / f"samples/eval_{len(rewards):05d}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def printed(capsys, *words: str) -> str:
    compare.main([str(word) for word in words])
    return capsys.readouterr().out


def test_equal_seeds_are_paired_and_the_last_common_steps_count(tmp_path, capsys):
    for seed in range(3):
        write(tmp_path / f"a/{seed}", seed, [0.0] * 10 + [0.5 + 0.1 * seed] * 10)
        write(tmp_path / f"b/{seed}", seed, [0.0] * 10 + [0.6 + 0.101 * seed] * 10 + [0.0] * 5)
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b")
    assert "reward/mean, steps 11 to 20\n  A 0.600   B 0.701   B - A +0.101" in text
    assert "paired t, 3 seeds" in text and "B is better by 0.099 to 0.103." in text
    # Seeds that differ are not paired, and hide so small a difference.
    text = printed(capsys, tmp_path / "a", "--", tmp_path / "b/0", tmp_path / "b/1")
    assert "Welch's t, 3 and 2 runs" in text and "These runs do not tell." in text
    text = printed(capsys, "--reward", "exact", tmp_path / "b", "--", tmp_path / "a")
    assert "reward/exact" in text and "A is better by 0.049 to 0.052." in text


def test_one_run_a_side_claims_nothing_about_seeds(tmp_path, capsys):
    a = write(tmp_path / "a", 0, [0.1] * 10, [0, None, 0, 1] * 25)
    b = write(tmp_path / "b", 1, [0.9] * 10, [1, 1, 0, 1] * 25)
    runs, scores, rows = re.split("^(?=pass)", printed(capsys, a, "--", b), flags=re.M)
    for part in (runs, scores):
        assert "needs two seeds" in part and part.endswith("These runs do not tell.\n")
    # But the models differ on rows. An unscored one has not passed.
    assert "the 100 rows that all have" in rows and "A 0.250   B 0.750   B - A +0.500" in rows
    assert re.search(r"B is better by 0\.4\d\d to 0\.[56]\d\d\.", rows)
    few = [write(tmp_path / f"few-{s}", s, [0.1], [s] * 5) for s in (0, 1)]
    assert "an interval needs 20 rows" in printed(capsys, few[0], "--", few[1])


def test_mistakes_are_one_sentence(tmp_path):
    a, b = (write(tmp_path / x, 0, [0.5] * 3) for x in "ab")
    for words, sentence in [
            ([a], "no set B"), ([a, "--"], "no set B"), ([a, "--", "x"], "x is not a run"),
            ([a, b, "--", b], r"A has a seed twice \(\[0, 0\]\)"),
            (["--reward", "none", a, "--", b], "share no step with reward/none")]:
        with pytest.raises(SystemExit, match=f"^error: .*{sentence}.*$") as error:
            compare.main([str(word) for word in words])
        assert "\n" not in str(error.value)


def test_it_is_a_command():
    done = subprocess.run([PYTHON, "tools/compare.py", "--help"], cwd=ROOT, text=True,
                          capture_output=True, check=True)
    assert "-- runs/b-0" in done.stdout and "usage: python tools/compare.py" in done.stdout
