"""table.py: the tables of results/README.md, from the files beside it.

    python results/table.py      writes those of the page, and prints them with every control
"""
import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402

from files import read  # noqa: E402
from tools import plot  # noqa: E402

BEGIN = "<!-- the tables: written by results/table.py -->\n"
HEAD = ("| result | command | reward, first 3 steps | last 10 | held-out before | after "
        "| passed its grade | seconds | of a step | GiB |\n" + "|---" * 10 + "|\n")


def jobs(controls: bool = False) -> dict[str, dict]:
    """What collect.py made, by name: a file a job, and in slow.json the controls at a tenth of the
    rate, of which it has the first 3 steps and the last 10. controls: those too."""
    found = {path.stem: read(path) for path in HERE.glob("*.json")}
    found |= found.pop("slow")
    return {name: found[name] for name in sorted(found) if "seeds" in found[name] and (
        controls or not re.search("-(coin|sharpen)(-slow)?$", name))}


def task_reward(job: dict) -> str:
    """The metric of its first reward: a control has the task's there, with weight 0."""
    name = re.sub(":[0-9.]+$", "", job["reward"][0])
    return "reward/" + name.rpartition(":")[2]  # FILE.py:NAME:WEIGHT


def passed(job: dict, ends: list[dict]) -> str:
    """How many of its runs reached --target_reward and --target_eval."""
    targets = {("reward, first 3 steps", "last 10"): job["target_reward"],
               ("pass@1 before", "after"): job["target_eval"]}
    limits = [(*names, *target) for names, target in targets.items() if target]
    if not limits:
        return "no grade"
    reached = [all(one[before] <= low and one[after] >= high
                   for before, after, low, high in limits) for one in ends]
    return f"{sum(reached)} of {len(ends)}"


def table(controls: bool = False) -> str:
    """A row a job: the mean over its seeds, the lowest and the highest."""
    lines = []
    for name, job in jobs(controls).items():
        runs = plot.seeds_of(job, HERE / name)
        ends = [plot.ends(run, task_reward(job)) for run in runs]
        cells = [plot.cell([one[key] for one in ends]) for key in (
            "reward, first 3 steps", "last 10", "pass@1 before", "after")]
        steps = [seed["median"]["time/step"] for seed in job["seeds"].values()]
        most = max(seed["largest"]["memory/peak_gb"] for seed in job["seeds"].values())
        note = f" ({job['note']})" if job["note"] else ""
        command = f"`{job['command']}` <!-- walk: long: it grades itself -->{note}"
        cells = [link(name), command, *cells, passed(job, ends),
                 plot.cell([seed["seconds"] for seed in job["seeds"].values()], 0),
                 plot.cell(steps, 2), f"{most:.2f}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def link(name: str) -> str:
    """To the job's file."""
    return f"[{name}]({'slow' if name.endswith('-slow') else name}.json)"


def by_kind(controls: bool = False) -> str:
    """Held-out accuracy of each data source, before → after, of the jobs with several sources."""
    lines = []
    for name, job in jobs(controls).items():
        runs = plot.seeds_of(job, HERE / name)
        kinds = [key for key in runs[0].metrics if re.fullmatch("eval/.*/pass@1", key)]
        if len(kinds) < 2:
            continue
        if not lines:
            head = " | ".join(kind.split("/")[1] for kind in kinds)
            lines = [f"\n| held-out | {head} |\n|---{'|---' * len(kinds)}|\n"]
        curves = [[[*run.metrics[kind].values()] for run in runs] for kind in kinds]
        cells = [f"{np.mean([c[0] for c in kind]):.2f} → {np.mean([c[-1] for c in kind]):.2f}"
                 for kind in curves]
        lines.append(f"| {link(name)} | {' | '.join(cells)} |\n")
    return "".join(lines)


def steps_to(run: plot.Run, reward: float, name: str) -> int | None:
    """Steps until the mean of the metric over five steps in a row is at least this. None: never."""
    found = [*run.metrics[name].values()]
    return next((i for i in range(5, len(found) + 1) if np.mean(found[i - 5:i]) >= reward), None)


def credit() -> str:
    """How soon the game of doors has the same reward, with turn credit and with one number."""
    if "doors" not in jobs():
        return ""
    cells = []
    for name in ("doors", "doors-grpo", "doors-coin"):
        steps = [steps_to(run, 0.8, "reward/turns")
                 for run in plot.runs_of_job(HERE / f"{name}.json")]
        cells.append("never" if None in steps else plot.cell(steps, 0))
    return ("\n| steps to a mean reward of 0.8 in five steps | turn credit | one number an episode "
            f"| a random reward |\n{'|---' * 4}|\n| [doors](doors.json) | {' | '.join(cells)} |\n")


def tables(controls: bool = False) -> str:
    """All tables."""
    return table(controls) + by_kind(controls) + credit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    page = HERE / "README.md"
    text, mark, _ = page.read_text().partition(BEGIN)
    page.write_text(text + mark + tables())
    print(tables(controls=True), end="")
