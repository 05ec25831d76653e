"""The table of bench/loss_table.md: advantages and losses on one job, with seeds and intervals.

    python bench/loss_table.py run                      # all methods, seeds 0 to 4, one by one
    python bench/loss_table.py run clip sapo --seeds 0  # some of them
    python bench/loss_table.py page                     # write the table and the picture again

The job is that of `./run.sh` with 16 prompts a step instead of 64, on one rank: a tiny model learns
to sort in 60 steps. `on` has one update per rollout, where all losses have the same gradient, so
only advantages are compared. `off` has 4 minibatches x 2 epochs, where the losses differ. Equal
seeds have equal prompts, so a method is compared with the first one of its part by pairs.

A finished run is not run again: its metrics.jsonl is in runs/loss-PART-METHOD-SEED, and what the
page needs of it in bench/loss_table.json. Ctrl-C and the same command go on.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.pictures import draw
from keeping.log import read_metrics
from tools.compare import paired_t

ROOT = Path(__file__).resolve().parent.parent
FILE, PAGE = ROOT / "bench" / "loss_table.json", ROOT / "bench" / "loss_table.md"
PICTURE = ROOT / "docs" / "pictures" / "losses.svg"
TARGET, WINDOW = 0.9, 3  # the first step at which the mean reward of 3 steps is at least this
JOB = ("--batch 16 --warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16 --eval_data tiny@test "
       "--no-export")
OFF = "--minibatches 4 --epochs 2"
METHODS = {
    "on": {"dr_grpo": "",
           **{name: f"--advantage {name}" for name in (
               "grpo", "rloo", "reinforce++", "reinforce++-baseline")},
           **{name: f"--advantage variants/{name}.py:{name}" for name in (
               "lite_ppo", "maxrl", "gdpo")}},
    "off": {
        "clip": OFF,
        "gspo": f"{OFF} --loss gspo --aggregation sequence --clip_low 3e-4 --clip_high 4e-4",
        "cispo": f"{OFF} --loss cispo --clip_low 1 --clip_high 4",
        "sapo": f"{OFF} --loss variants/sapo.py:sapo --aggregation sequence",
        "gmpo": f"{OFF} --loss variants/gmpo.py:gmpo --aggregation sequence --clip_low 0.4 "
                "--clip_high 0.4",
        "dppo": f"{OFF} --loss variants/dppo.py:dppo",
        "ipo": f"{OFF} --loss variants/ipo.py:ipo --clip_low 0.1 --clip_high 0.1"}}


# ---- runs

def train(part: str, name: str, seed: int, steps: int) -> dict:
    """One run, or what it left if it is finished → its numbers, one a step."""
    folder = ROOT / "runs" / f"loss-{part}-{name}-{seed}"
    if not (folder / "done.json").exists():
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        command = ["nice", "-n", "19", python, "grpo.py", *JOB.split(),
                   *METHODS[part][name].split(), "--steps", str(steps), "--seed", str(seed),
                   "--name", folder.name]
        subprocess.run(command, cwd=ROOT, check=True)
    metrics = read_metrics(folder / "metrics.jsonl")
    rows = [row for row in metrics if "reward/mean" in row]
    held_out = [row["eval/pass@1"] for row in metrics if "eval/pass@1" in row]
    if len(rows) != steps:
        raise SystemExit(f"error: {folder} has {len(rows)} steps with a reward, not {steps}. "
                         f"Delete it to run it again.")
    return {"flags": METHODS[part][name], "held_out": held_out[-1],
            "reward": [round(row["reward/mean"], 4) for row in rows],
            "tokens": [row["rollout/tokens"] for row in rows],
            "seconds": [round(row["time/step"], 2) for row in rows],
            "clip_frac": [round(row["policy/clip_frac"], 5) for row in rows]}


def load() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {"on": {}, "off": {}}


def keep(part: str, name: str, seed: int, numbers: dict) -> None:
    """Into the file, in the order of METHODS: one line a run."""
    found, parts = load(), []
    found[part].setdefault(name, {})[str(seed)] = numbers
    for part, methods in METHODS.items():
        lines = [f'  "{name}": {{\n' + ",\n".join(
            f'   "{seed}": {json.dumps(found[part][name][seed])}'
            for seed in sorted(found[part][name])) + "\n  }" for name in methods
            if name in found[part]]
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def run(names: list[str], seeds: list[int], steps: int) -> None:
    """Seed by seed, so that what is there after a while can be compared."""
    for seed in seeds:
        for part, methods in METHODS.items():
            for name in methods:
                done = load()[part].get(name, {})
                if (not names or name in names) and str(seed) not in done:
                    keep(part, name, seed, train(part, name, seed, steps))


# ---- the table

def reached(numbers: dict) -> int | None:
    """The number of steps until the target, or None."""
    for step in range(WINDOW, len(numbers["reward"]) + 1):
        if np.mean(numbers["reward"][step - WINDOW:step]) >= TARGET:
            return step


def spread(values: list[float], digits: int = 3) -> str:
    """"0.981 (0.974 to 0.987)": the mean, the lowest and the highest."""
    shown = [f"{x:,.{digits}f}" for x in (np.mean(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def until(runs: dict, what: str, digits: int) -> str:
    """What was spent until the target, over the runs that reached it."""
    steps = {seed: reached(numbers) for seed, numbers in runs.items()}
    spent = [sum(runs[seed][what][:step]) for seed, step in steps.items() if step]
    if len(spent) == len(runs):
        return spread(spent, digits)
    return f"{len(spent)} of {len(runs)} reached it"


def difference(runs: dict, first: dict) -> tuple[float, tuple[float, float] | None]:
    """Of the mean reward over all steps, by pairs of equal seeds; None: fewer than 2 pairs."""
    both = sorted(runs.keys() & first.keys())
    pairs = [np.mean(runs[seed]["reward"]) - np.mean(first[seed]["reward"]) for seed in both]
    return float(np.mean(pairs)), paired_t(pairs) if len(pairs) > 1 else None


def verdict(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "one seed does not tell"
    low, high = interval
    return "better" if low > 0 else "worse" if high < 0 else "no difference seen"


def table(methods: dict) -> list[str]:
    """One line a method. The first is what the others are compared with."""
    (name, first), *_ = methods.items()
    lines = [f"| | seeds | reward, all steps | last 10 | held-out | tokens to {TARGET} | seconds | "
             f"against {name}, 95 % | |", "|" + "---|" * 9]
    for name, runs in methods.items():
        means = [np.mean(numbers["reward"]) for numbers in runs.values()]
        last = [np.mean(numbers["reward"][-10:]) for numbers in runs.values()]
        held_out = [numbers["held_out"] for numbers in runs.values()]
        against, words = "", ""
        if runs is not first:
            middle, interval = difference(runs, first)
            against, words = f"{middle:+.3f}", verdict(interval)
            if interval:
                against += f": {interval[0]:+.3f} to {interval[1]:+.3f}"
        lines.append(f"| {name} | {len(runs)} | {spread(means)} | {spread(last)} | "
                     f"{spread(held_out)} | {until(runs, 'tokens', 0)} | "
                     f"{until(runs, 'seconds', 0)} | {against} | {words} |")
    return lines


def picture(found: dict) -> str:
    """The differences with their intervals, one line a method."""
    y, parts, scale = 40, [], 1500  # pixels of a difference of 1

    def x(value: float) -> float:
        return min(max(430 + scale * value, 140), 750)

    for part, methods in found.items():
        if not methods:
            continue
        (name, first), *others = methods.items()
        parts.append(draw.text(12, y, f"{part}-policy: mean reward over all steps, against {name}",
                               weight="bold"))
        top, y = y + 10, y + 30
        for name, runs in others:
            middle, interval = difference(runs, first)
            low, high = interval or (middle, middle)
            color = draw.GREY if low <= 0 <= high else draw.DARK[0]
            parts += [draw.text(12, y + 4, name), draw.rule(x(low), y, x(high), y, color),
                      draw.box(x(middle) - 3, y - 3, 6, 6, color, line=color)]
            y += 24
        parts += [draw.rule(x(0), top, x(0), y - 10, dash="3 3"),
                  draw.text(x(0), y + 6, "0", 11, draw.GREY, "middle"),
                  draw.text(x(0.1), y + 6, "+0.1", 11, draw.GREY, "middle"),
                  draw.text(x(-0.1), y + 6, "-0.1", 11, draw.GREY, "middle")]
        y += 44
    return draw.page(y, *parts)


def page() -> None:
    """The lines of bench/loss_table.md between the comments, and the picture."""
    found, text = load(), PAGE.read_text()
    for part, methods in found.items():
        begin, end = f"<!-- {part}: written by bench/loss_table.py -->\n", f"<!-- end of {part} -->"
        before, rest = text.split(begin)
        lines = table(methods) if methods else ["Not measured yet."]
        text = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    PAGE.write_text(text)
    PICTURE.write_text(picture(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=(
        argparse.RawDescriptionHelpFormatter))
    parser.add_argument("what", choices=["run", "page"])
    every = [name for methods in METHODS.values() for name in methods]
    parser.add_argument("names", nargs="*", metavar="METHOD", help=", ".join(every))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    if {*asked.names} - {*every}:
        parser.error(f"there is no {' '.join({*asked.names} - {*every})}; there are {every}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if asked.what == "run":
        run(asked.names, asked.seeds, asked.steps)
    page()


if __name__ == "__main__":
    main()
