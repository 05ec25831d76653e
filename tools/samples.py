"""tools/samples.py: all completions that a run kept, in a pager.

    python tools/samples.py runs/NAME                  in the order of the steps
    python tools/samples.py runs/NAME --sort reward    the worst first
"""
import argparse
import json
import math
import pydoc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from errors import SettingsError, command
from tools.plot import Run

TEXTS = "prompt", "completion", "turns"


def read(run: Path, sort: str) -> list[dict]:
    """The objects of samples/*.jsonl, each with its file. sort: step or reward."""
    rows = []
    for path in sorted(run.glob("samples/*.jsonl"), key=in_order):
        rows += [{"file": path.stem} | row for row in files.read(path)]
    if sort == "reward":
        rows.sort(key=worst_first)
    return rows


def in_order(path: Path) -> tuple[int, str]:
    """step_00001, …, step_00010, eval_00010, …: by steps done; the evaluation comes after them."""
    kind, _, steps = path.stem.partition("_")
    return int(steps), {"step": "a", "eval": "b"}[kind]


def passed(run: Run) -> dict[str, float]:
    """How often each row passed in a run's last evaluation. {}: it has none, as in results/.

    A row is its text, its pictures and its answer: one text may stand before many pictures.
    """
    last = max(run.path.glob("samples/eval_*.jsonl"), key=in_order, default=None)
    found = {}
    for one in files.read(last) if last else []:
        row = json.dumps([one.get(name) for name in ("prompt", "images", "answer")])
        first = next(iter(one["rewards"].values()))  # None: unscored
        found.setdefault(row, []).append(first is not None and first >= run.args["eval_pass"])
    return {row: sum(times) / len(times) for row, times in found.items()}


def worst_first(row: dict) -> float:
    """The unscored ones come before all others."""
    return -math.inf if row["reward"] is None else row["reward"]


def role(turn: dict) -> str:
    """Of a turn, and what it was paid."""
    return turn["role"] + (f", paid {turn['paid']:g}" if turn.get("paid") is not None else "")


def text(row: dict) -> str:
    """A completion: its numbers, its prompt, its turns."""
    numbers = "  ".join(f"{key}: {value}" for key, value in row.items() if key not in TEXTS)
    turns = [f"--- {role(turn)}\n{turn['content']}" for turn in row["turns"]]
    return "\n".join(["-" * 80, numbers, f"--- prompt\n{row['prompt']}", *turns])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sort", choices=("step", "reward"), default="step")
    args = parser.parse_args()
    try:
        rows = read(args.run, args.sort)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    if not rows:
        sys.exit(f"error: no completions in {args.run}/samples/")
    pydoc.pager("\n".join(map(text, rows)))


if __name__ == "__main__":
    command(main)
