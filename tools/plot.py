"""tools/plot.py: the curves of one or several runs in a picture, and a table.

    python tools/plot.py RUN [RUN ...]     writes runs/plot.png
    python tools/plot.py --reward kk01 results/kk.json results/kk-coin.json

RUN is runs/NAME, a folder of such folders, or a file of results/. Runs whose args.json differ in
the seed and the name only are one group, and so are the runs of a file. A group alone has a curve
for each seed. Beside others it has its mean, and a band from the lowest to the highest.
"""
import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import SettingsError, command
from files import read, read_metrics

PANELS = "eval/pass@1", "policy/entropy", "rollout/length_mean"
UNITS = {"eval/pass@1": "share of rows", "policy/entropy": "nats", "rollout/length_mean": "tokens"}


class Run(NamedTuple):
    path: Path                             # its folder, or results/JOB/seed_N of a file
    args: dict                             # its flags; of a file: seed, command, reward
    metrics: dict[str, dict[int, float]]   # each one by steps done; null counts as not there


# ---- runs

def run_of(folder: Path) -> Run:
    """The run of a folder."""
    metrics = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        for name, value in row.items():
            if value is not None:
                metrics.setdefault(name, {})[row["step"]] = value
    return Run(folder, read(folder / "args.json"), metrics)


def runs_of_job(file: Path) -> list[Run]:
    """The runs of a file that results/collect.py made, one a seed."""
    job = read(file)
    if not isinstance(job, dict) or "seeds" not in job:
        raise SettingsError(f"{file} is no job's file: it has no seeds. Would work: a run's folder "
                            f"or a file that results/collect.py made.")
    return seeds_of(job, file.with_suffix(""))


def seeds_of(job: dict, path: Path) -> list[Run]:
    """The runs of a job, one a seed."""
    found = []
    for seed, one in job["seeds"].items():
        metrics = {}
        for columns in one["steps"], one["evaluations"]:   # {name: one value a row}
            for name, values in columns.items():
                rows = zip(columns["step"], values, strict=True)
                metrics.setdefault(name, {}).update({k: v for k, v in rows if v is not None})
        args = {"seed": int(seed)} | {key: job[key] for key in ("command", "reward") if key in job}
        found.append(Run(path / f"seed_{seed}", args, metrics))
    return found


def by_number(path: Path) -> list:
    """A key that sorts a-2 before a-10, and eval_99999 before eval_100000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def runs_in(path: Path) -> list[Run]:
    """The run of a folder, the runs in a folder, or those of a file of results/."""
    if path.is_file():
        return runs_of_job(path)
    if (path / "metrics.jsonl").exists():
        return [run_of(path)]
    folders = [file.parent for file in path.glob("*/metrics.jsonl")]
    if not folders:
        raise SettingsError(f"{path} is not a run: it has no metrics.jsonl.")
    return [run_of(folder) for folder in sorted(folders, key=by_number)]


def find(paths) -> list[list[Run]]:
    """The runs in `paths`, in groups that differ in the seed and the name only."""
    groups, seen = {}, Counter()  # a seed that comes twice is of another version, or a repetition
    for path in map(Path, paths):
        for run in runs_in(path):
            flags = [(k, v) for k, v in sorted(run.args.items())
                     if k not in ("seed", "name", "versions")]
            same = str(path) if path.is_file() else json.dumps(flags)
            groups.setdefault((same, seen[same, run.args["seed"]]), []).append(run)
            seen[same, run.args["seed"]] += 1
    return [*groups.values()]


# ---- numbers

def mean(values: list[float]) -> float:
    """nan of none."""
    return float(np.mean(values)) if values else float("nan")


def ends(run: Run, reward: str = "reward/mean") -> dict[str, float]:
    """The ends of a run's curves: nan for what it has not."""
    rewards, scores = ([*run.metrics.get(name, {}).values()] for name in (reward, "eval/pass@1"))
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


def titles(groups: list[list[Run]]) -> list[str]:
    """A name for each group: the folder of its runs, or what their names begin with; without the
    folders that all groups are in."""
    names = []
    for runs in groups:
        shared = os.path.commonprefix([str(run.path.resolve()) for run in runs])
        if len(runs) > 1:  # results/kk/seed_, or runs/kk-
            shared = re.sub("(seed)?[-_./]*$", "", shared)
        names.append(shared.strip("/").split("/"))
    while min(map(len, names)) > 1 and len({name[0] for name in names}) == 1:
        names = [name[1:] for name in names]
    return ["/".join(name) + (f", {len(runs)} seeds" if len(runs) > 1 else "")
            for name, runs in zip(names, groups, strict=True)]


def table(groups: list[list[Run]], reward: str = "reward/mean") -> str:
    lines = []
    for name, runs in zip(titles(groups), groups, strict=True):
        lines.append(name)
        found = [ends(run, reward) for run in runs]
        for key in found[0]:
            text = cell([one[key] for one in found], 0 if key == "steps" else 3)
            if text:
                lines.append(f"  {key:22}{text}")
    return "\n".join(lines)


# ---- pictures

def draw(groups: list[list[Run]], path, rewards: tuple[str, ...] = ("reward/mean",)):
    """A panel for each metric that all runs have, `rewards` first. path: or a file."""
    # matplotlib's import fails if a notebook's kernel has set a backend that is not installed here.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure
    runs = [run for group in groups for run in group]
    panels = [name for name in (*rewards, *PANELS) if all(name in run.metrics for run in runs)]
    if not panels:
        names = ", ".join(str(run.path) for run in runs)
        raise SettingsError(f"{names}: no metric has a number in all of them; "
                            f"a run without a step has no curve.")
    title = titles(groups)[0] if len(groups) == 1 else f"{len(runs)} runs"
    if len(groups) == 1:
        labels = [f"seed {run.args['seed']}" for run in runs]
        groups = [[run] for run in runs]
    else:
        labels = titles(groups)
    figure = Figure(figsize=(4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=True):
        for i, (label, group) in enumerate(zip(labels, groups, strict=True)):
            curve(axis, [run.metrics[name] for run in group], f"C{i}", label)
        axis.set(title=name, xlabel="step", ylabel=UNITS.get(name, "mean of a step"))
        low, high = axis.get_ylim()
        least = 0.1 * max(abs(low), abs(high))  # a narrower axis would make noise a crash
        if high - low < least:
            axis.set_ylim((low + high - least) / 2, (low + high + least) / 2)
        if name in (*rewards, "eval/pass@1") and -0.2 < low and high < 1.2:
            axis.set_ylim(-0.03, 1.03)  # shares have one scale in all pictures
    if len(labels) > 1:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(5, len(labels)))
    figure.suptitle(f"{runs[0].args.get('script', '')} {runs[0].path}" if len(runs) == 1
                    else title)
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
    parser.add_argument("--reward", default="mean", help="show reward/NAME of metrics.jsonl")
    parser.add_argument("--out", default="runs/plot.png", type=Path, help="the picture's file")
    args = parser.parse_args()
    try:
        groups = find(args.runs)
        reward = f"reward/{args.reward}"
        for run in (run for group in groups for run in group):
            if args.reward != "mean" and reward not in run.metrics:
                others = [name[7:] for name in run.metrics if name.startswith("reward/")]
                raise SettingsError(f"--reward {args.reward}: {run.path} has no {reward}. Would "
                                    f"work: --reward {' or '.join(others)}.")
        print(table(groups, reward))
        draw(groups, args.out, (reward,))
    except SettingsError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the table's reader left
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that ends in no kind of picture
        sys.exit(f"error: {args.out} cannot be written as a picture ({error}).")
    print(f"picture: {args.out}")


if __name__ == "__main__":
    command(main)
