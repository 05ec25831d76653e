"""tools/plot.py: the curves of one or several runs in a picture, and a table.

    python tools/plot.py RUN [RUN ...]     writes runs/plot.png

RUN is runs/NAME, or a folder of such folders, as in results/. Runs whose args.json differ in the
seed and the name only are one group. A group alone has a curve for each seed. Beside others it has
its mean, and a band from the lowest to the highest.
"""
import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dist import SettingsError
from keeping.files import read
from keeping.log import read_metrics

PANELS = "eval/pass@1", "policy/entropy", "rollout/length_mean"
UNITS = {"eval/pass@1": "share of rows", "policy/entropy": "nats", "rollout/length_mean": "tokens"}


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it."""
    if (folder / "metrics.jsonl").exists():
        return [folder]
    return [path.parent for path in sorted(folder.glob("*/metrics.jsonl"))]


def find(folders) -> list[list[Path]]:
    """The runs in `folders`, in groups that differ in the seed and the name only."""
    groups, seen = {}, Counter()  # a seed that comes twice is of another version, or a repetition
    for folder in folders:
        for run in runs_in(Path(folder)):
            args = read(run / "args.json")
            same = json.dumps([(k, v) for k, v in sorted(args.items())
                               if k not in ("seed", "name", "versions")])
            groups.setdefault((same, seen[same, args["seed"]]), []).append(run)
            seen[same, args["seed"]] += 1
    return [*groups.values()]


def series(run: Path, name: str) -> dict[int, float]:
    """A metric by steps done. null counts as not there."""
    rows = read_metrics(run / "metrics.jsonl")
    return {row["step"]: row[name] for row in rows if row.get(name) is not None}


def mean(values: list[float]) -> float:
    """nan of none."""
    return float(np.mean(values)) if values else float("nan")


def ends(run: Path, reward: str = "reward/mean") -> dict[str, float]:
    """The ends of a run's curves: nan for what it has not."""
    rewards, scores = [*series(run, reward).values()], [*series(run, "eval/pass@1").values()]
    return {"reward, first 3 steps": mean(rewards[:3]), "last 10": mean(rewards[-10:]),
            "pass@1 before": mean(scores[:1]), "after": mean(scores[1:][-1:]),
            "steps": len(rewards)}


def cell(values: list[float], digits: int = 3) -> str:
    """mean (lowest to highest) over the seeds."""
    if np.isnan(values).any():
        return ""
    low, middle, high = (
        f"{x:.{digits}f}" for x in (min(values), np.mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def titles(groups: list[list[Path]]) -> list[str]:
    """A name for each group: the folder of its runs, or what their names begin with; without the
    folders that all groups are in."""
    names = []
    for runs in groups:
        shared = os.path.commonprefix([str(run.resolve()) for run in runs])
        if len(runs) > 1:  # results/kk/seed_, or runs/kk-
            shared = re.sub("(seed)?[-_./]*$", "", shared)
        names.append(shared.strip("/").split("/"))
    while min(map(len, names)) > 1 and len({name[0] for name in names}) == 1:
        names = [name[1:] for name in names]
    return ["/".join(name) + (f", {len(runs)} seeds" if len(runs) > 1 else "")
            for name, runs in zip(names, groups, strict=True)]


def table(groups: list[list[Path]]) -> str:
    lines = []
    for name, runs in zip(titles(groups), groups, strict=True):
        lines.append(name)
        found = [ends(run) for run in runs]
        for key in found[0]:
            text = cell([one[key] for one in found], 0 if key == "steps" else 3)
            if text:
                lines.append(f"  {key:22}{text}")
    return "\n".join(lines)


def draw(groups: list[list[Path]], path, rewards: tuple[str, ...] = ("reward/mean",)):
    """A panel for each metric that all runs have, `rewards` first. path: or a file."""
    from matplotlib.figure import Figure
    runs = [run for group in groups for run in group]
    panels = [name for name in (*rewards, *PANELS) if all(series(run, name) for run in runs)]
    if not panels:
        raise SettingsError(f"{', '.join(map(str, runs))}: no metric has a number in all of them; "
                            f"a run without a step has no curve.")
    if len(groups) == 1:
        labels = [f"seed {read(run / 'args.json')['seed']}" for run in runs]
        groups = [[run] for run in runs]
    else:
        labels = titles(groups)
    figure = Figure(figsize=(4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=True):
        for i, (label, group) in enumerate(zip(labels, groups, strict=True)):
            curve(axis, [series(run, name) for run in group], f"C{i}", label)
        axis.set(title=name, xlabel="step", ylabel=UNITS.get(name, "mean of a step"))
        low, high = axis.get_ylim()
        if name in (*rewards, "eval/pass@1") and -0.2 < low and high < 1.2:
            axis.set_ylim(-0.03, 1.03)  # shares have one scale in all pictures
    if len(labels) > 1:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(5, len(labels)))
    figure.savefig(path)


def curve(axis, runs: list[dict[int, float]], color: str, label: str):
    """The mean of the runs' values by step, and from the lowest to the highest."""
    steps = sorted(set.intersection(*map(set, runs)))
    values = np.array([[run[step] for step in steps] for run in runs])  # (S, steps)
    low, middle, high = values.min(0), values.mean(0), values.max(0)
    if len(steps) > 2:
        axis.plot(steps, middle, color=color, label=label)
        axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    else:  # a line between two points would be invented
        axis.plot(steps, middle, "o", color=color, label=label)
        axis.vlines(steps, low, high, color=color)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--out", default="runs/plot.png", type=Path, help="the picture's file")
    args = parser.parse_args()
    try:
        groups = find(args.runs)
        if not groups:
            names = ", ".join(map(str, args.runs))
            raise SettingsError(f"no metrics.jsonl in {names} or one folder below.")
        print(table(groups))
        draw(groups, args.out)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    except (OSError, ValueError) as error:  # ValueError: a name that ends in no kind of picture
        sys.exit(f"error: {args.out} cannot be written as a picture ({error}).")
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
