"""compare.py: two sets of runs, A and B. B - A with a 95 % interval, and a sentence.

    python tools/compare.py [--reward kk01] results/kk-coin.json -- runs/kk-0 runs/kk-1 runs/kk-2

    python tools/compare.py A ... -- B ... --again A ... -- B ...     keep B? (results/speedrun.md)

Compared are the reward of the last 10 steps that all runs have, the last pass@1 that all have, and
the rows of their last evaluations. The interval (Student's t) over seeds tells what other seeds
would give; equal seeds are paired. Over rows it tells what other rows would give.
"""
import argparse
import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import SettingsError, command
from tools import plot, samples


def report(title: str, a: dict, b: dict, of: str, least: int) -> str:
    """a, b: a number for each seed or row. An interval needs `least` of them on each side."""
    ours, theirs = [*a.values()], [*b.values()]
    mean_a, mean_b = np.mean(ours), np.mean(theirs)
    text = f"{title}\n  A {mean_a:.3f}   B {mean_b:.3f}   B - A {mean_b - mean_a:+.3f}"
    sentence = "These runs do not tell."
    if min(len(a), len(b)) < least:
        return f"{text} (an interval needs {least} {of} a side)\n  {sentence}"
    if a.keys() == b.keys():
        how, test = f"paired, {len(a)}", stats.ttest_rel([b[key] for key in a], ours)
    else:
        how, test = f"Welch, {len(a)} and {len(b)}", stats.ttest_ind(theirs, ours, equal_var=False)
    low, high = test.confidence_interval()
    if low > 0:
        sentence = f"B is better by {low:.3f} to {high:.3f}."
    elif high < 0:
        sentence = f"A is better by {-high:.3f} to {-low:.3f}."
    if of == "rows":
        sentence += " That is of these models: those of other seeds may differ otherwise."
    return f"{text}, 95 %: {low:+.3f} to {high:+.3f} ({how} {of})\n  {sentence}"


def read(side: str, paths: list[str]) -> dict[int, plot.Run]:
    """The runs of a side, by seed."""
    runs = [run for path in paths for run in plot.runs_in(Path(path))]
    seeds = [run.args["seed"] for run in runs]
    if not runs or len({*seeds}) < len(seeds):
        raise SettingsError(f"set {side} has the seeds {seeds}; give one run of each seed.")
    return dict(zip(seeds, runs, strict=True))


def compare(sides: list[dict[int, plot.Run]], reward: str) -> list[str]:
    """What these runs tell, for each number that all have."""
    runs, texts = [run for side in sides for run in side.values()], []
    for name, last in (reward, 10), ("eval/pass@1", 1):
        steps = sorted(set.intersection(*(set(run.metrics.get(name, ())) for run in runs)))[-last:]
        if steps and steps[-1] > 0:  # 0: not trained yet
            means = [{seed: np.mean([run.metrics[name][step] for step in steps])
                      for seed, run in side.items()} for side in sides]
            texts.append(report(f"{name}, steps {steps[0]} to {steps[-1]}", *means, "seeds", 2))
        elif last > 1:
            texts.append(f"no {name} in all runs")
    found = [[samples.passed(run) for run in side.values()] for side in sides]
    rows = set.intersection(*(set(one) for side in found for one in side))
    if rows:
        means = [{row: np.mean([one[row] for one in side]) for row in rows} for side in found]
        texts.append(report("pass@1, rows of the last evaluation", *means, "rows", 20))
    if texts == [f"no {reward} in all runs"]:
        raise SettingsError(f"these runs share no step with {reward}, and no evaluation.")
    return texts


def keep(words: list[str]) -> None:
    """Compares twice, with other seeds of both sides the second time, and says whether to keep B:
    if the first interval over seeds is above 0 in both. --again stands between the two."""
    cut = words.index("--again")
    options = words[:2] if words[0] == "--reward" else []
    tried, seeds = (words[:cut], [*options, *words[cut + 1:]]), []
    for number, one in enumerate(tried, 1):
        print(f"comparison {number}")
        sides, name = sides_of(one)
        seeds.append({seed for side in sides for seed in side})
        found = compare(sides, name)
        print("\n".join(found))
        better = [text for text in found if "seeds)" in text][:1]
        if not (better and "B is better" in better[0]):
            print(f"Do not keep B: comparison {number} does not show that it is better.")
            return
    if seeds[0] & seeds[1]:
        raise SettingsError(f"the second comparison has the seeds {sorted(seeds[0] & seeds[1])} of "
                            "the first. Would work: fresh seeds of both sides.")
    print("Keep B: it is better in both comparisons.")


def sides_of(words: list[str]) -> tuple[list[dict[int, plot.Run]], str]:
    """Returns the runs of the two sides, by seed, and the metric of --reward."""
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("--reward", default="mean", help="reward/NAME of metrics.jsonl")
    parser.add_argument("a", nargs="+", metavar="A ... -- B")
    cut = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:cut])
    sides = [read("A", asked.a), read("B", words[cut + 1:])]
    return sides, f"reward/{asked.reward}"


def main(words: list[str]) -> None:
    if "--again" in words:
        keep(words)
    else:
        print("\n".join(compare(*sides_of(words))))


if __name__ == "__main__":
    command(main, sys.argv[1:])
