"""compare.py: two sets of runs, A and B. The difference B - A with a 95 % interval, and a sentence.

    python tools/compare.py runs/a-0 runs/a-1 runs/a-2 -- runs/b-0 runs/b-1 runs/b-2
    python tools/compare.py --reward kk01 results/kk-coin -- results/kk

A run is runs/NAME. A folder of runs stands for all of them. What all runs have is compared:

1. The sampled reward: of each run, the mean over the last 10 steps that all have.
2. pass@1 of the last evaluation: of each run, one number.
3. pass@1 of each row of that evaluation (samples/eval_*.jsonl).

1 and 2 are about the methods: what other seeds would give, on the same rows. The interval is
Student's t over runs, so it needs two a side; three are few. Equal seeds have equal prompts: where
A and B have the same seeds, the runs are paired. Otherwise it is Welch's t.

3 is about these trained models: what other rows of the same kind would give. The rows are paired,
and resampled 2,000 times (percentile bootstrap). It knows nothing about other seeds.
"""
import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dist import SettingsError
from keeping import files
from keeping.log import read_metrics

LEAST_ROWS = 20   # for a bootstrap
# 95 % of Student's t lies within ± this, for 1, 2, … 12 degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179]


class Run(NamedTuple):
    seed: int
    rewards: dict[int, float]   # by step
    score: float | None   # pass@1 of the last evaluation
    rows: dict[str, float]   # by prompt: how often it passed in the last evaluation


# ---- intervals: (low, high)

def t_quantile(freedom: float) -> float:
    """Rounded down: fewer degrees of freedom make a wider interval."""
    return STUDENT[min(max(int(freedom), 1), len(STUDENT)) - 1]


def paired_t(differences):
    """Of the mean of n >= 2 differences."""
    n, mean = len(differences), np.mean(differences)
    half = t_quantile(n - 1) * np.std(differences, ddof=1) / np.sqrt(n)
    return mean - half, mean + half


def welch_t(a, b):
    """Of mean(b) - mean(a), at least 2 of each.   https://doi.org/10.1093/biomet/34.1-2.28"""
    in_a, in_b = np.var(a, ddof=1) / len(a), np.var(b, ddof=1) / len(b)
    spread = in_a**2 / (len(a) - 1) + in_b**2 / (len(b) - 1)
    freedom = (in_a + in_b)**2 / spread if spread else 1
    mean, half = np.mean(b) - np.mean(a), t_quantile(freedom) * np.sqrt(in_a + in_b)
    return mean - half, mean + half


def bootstrap(differences, draws: int = 2000):
    """Of the mean of many differences. The same draws in each call."""
    rng = np.random.default_rng(0)
    means = [rng.choice(differences, len(differences)).mean() for _ in range(draws)]
    return np.quantile(means, [0.025, 0.975])


# ---- runs

def read(folder: Path, reward: str) -> Run:
    args, metrics = files.read(folder / "args.json"), read_metrics(folder / "metrics.jsonl")
    last = sorted(folder.glob("samples/eval_*.jsonl"))[-1:]
    samples = [row for file in last for row in files.read(file)]
    seed, least = args["seed"], args["eval_pass"]
    name, score, passed = f"reward/{reward}", None, {}
    rewards = {row["step"]: row[name] for row in metrics if row.get(name) is not None}
    for row in metrics:   # the last evaluation stays
        score = row.get("eval/pass@1", score)
    for sample in samples:
        first = next(iter(sample["rewards"].values()))   # None: unscored
        right = first is not None and first >= least
        passed.setdefault(sample["prompt"], []).append(right)
    return Run(seed, rewards, score, {row: np.mean(right) for row, right in passed.items()})


def read_all(side: str, folders: list[str], reward: str) -> list[Run]:
    runs = []
    for folder in map(Path, folders):
        inside = [path.parent for path in sorted(folder.glob("*/metrics.jsonl"))]
        if (folder / "metrics.jsonl").exists():
            inside = [folder]
        if not inside:
            raise SettingsError(f"{folder} is not a run and has none: there is no metrics.jsonl.")
        runs += [read(run, reward) for run in inside]
    seeds = [run.seed for run in runs]
    if len({*seeds}) < len(seeds):
        raise SettingsError(f"{side} has a seed twice ({seeds}); give one run of each seed.")
    return runs


# ---- comparisons

def report(title: str, a, b, interval, how: str) -> str:
    """a, b: the values of each side. interval: None if there are too few; `how` tells why."""
    difference, sentence = f"{np.mean(b) - np.mean(a):+.3f}", "These runs do not tell."
    if interval is not None:
        low, high = interval
        difference += f", 95 %: {low:+.3f} to {high:+.3f}"
        if low > 0:
            sentence = f"B is better by {low:.3f} to {high:.3f}."
        elif high < 0:
            sentence = f"A is better by {-high:.3f} to {-low:.3f}."
    return (f"{title}\n  A {np.mean(a):.3f}   B {np.mean(b):.3f}   B - A {difference} ({how})\n"
            f"  {sentence}")


def over_runs(title: str, a: dict[int, float], b: dict[int, float]) -> str:
    """A number for each run, by seed."""
    sides = [*a.values()], [*b.values()]
    if min(len(a), len(b)) < 2:
        return report(title, *sides, None, "an interval needs two seeds or more of each")
    if {*a} == {*b}:
        interval = paired_t([b[seed] - a[seed] for seed in a])
        return report(title, *sides, interval, f"paired t, {len(a)} seeds")
    return report(title, *sides, welch_t(*sides), f"Welch's t, {len(a)} and {len(b)} runs")


def compare(a: list[Run], b: list[Run], reward: str) -> list[str]:
    """The comparisons that these runs allow."""
    texts = []
    if steps := sorted(set.intersection(*({*run.rewards} for run in a + b)))[-10:]:
        means = [{run.seed: np.mean([run.rewards[step] for step in steps]) for run in side}
                 for side in (a, b)]
        texts.append(over_runs(f"reward/{reward}, steps {steps[0]} to {steps[-1]}", *means))
    if None not in [run.score for run in a + b]:
        scores = [{run.seed: run.score for run in side} for side in (a, b)]
        texts.append(over_runs("pass@1, last evaluation", *scores))
    if rows := sorted(set.intersection(*({*run.rows} for run in a + b))):
        ours, theirs = ([np.mean([run.rows[row] for run in side]) for row in rows]
                        for side in (a, b))
        interval, how = None, f"an interval needs {LEAST_ROWS} rows"
        if len(rows) >= LEAST_ROWS:
            interval, how = bootstrap(np.subtract(theirs, ours)), "paired, rows resampled"
        title = f"pass@1, last evaluation: these models on the {len(rows):,} rows that all have"
        texts.append(report(title, ours, theirs, interval, how))
    return texts


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        usage="python tools/compare.py [--reward NAME] A [A ...] -- B [B ...]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", default="mean", help="compare reward/NAME of metrics.jsonl")
    parser.add_argument("a", nargs="+", metavar="A")
    cut = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:cut])
    try:
        if not words[cut + 1:]:
            raise SettingsError("there is no set B; would work: tools/compare.py A ... -- B ...")
        a = read_all("A", asked.a, asked.reward)
        b = read_all("B", words[cut + 1:], asked.reward)
        texts = compare(a, b, asked.reward)
        if not texts:
            raise SettingsError(f"the runs share no step with reward/{asked.reward}, and no row.")
    except SettingsError as error:
        sys.exit(f"error: {error}")
    print("\n".join(texts))


if __name__ == "__main__":
    main(sys.argv[1:])
