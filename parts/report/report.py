"""report.py: runs as one page: flags, curves, evaluations, completions and their tokens.

    python tools/report.py RUN [RUN ...]     writes report.html in the first RUN

RUN is runs/NAME, ended or not, or a folder of those. The page is one file and loads nothing. Runs
that differ in seed and name alone are one curve, with a band from lowest to highest.
report.html beside this file is the page without its data.
"""
import argparse
import base64
import gzip
import importlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from errors import SettingsError, command  # noqa: E402
from files import is_evaluation, read, read_metrics, write_whole  # noqa: E402
from parts.report.healthy import HEALTHY, warnings  # noqa: E402
from tools import plot  # noqa: E402

PAGE = 7_800_000  # bytes at most
POINTS = 2000  # of a curve at most
AT_THE_END = 8_000_000  # bytes of samples/ that a run's end reads: under a second
CUT = 1000  # characters of a text, if there is no room
SICK = "docs/use/troubleshooting.md"
RANGE = re.compile(r"(above|below|between) ([-\d.e]+)(?: and ([-\d.e]+))?")


def packed(data) -> str:
    """JSON, gzip, base64: what is in it cannot end a script."""
    return base64.b64encode(gzip.compress(json.dumps(data).encode(), 6, mtime=0)).decode()


# ---- ranges and flags

def healthy() -> dict[str, dict]:
    """By metric: its healthy range, and what it means and what to try if it is outside."""
    found = {}
    for name, (words, means, advice) in HEALTHY.items():
        kind, first, second = RANGE.match(words).groups()
        low, high = {"above": (first, None), "below": (None, first)}.get(kind, (first, second))
        found[name] = {"low": low and float(low), "high": high and float(high),
                       "words": words, "means": means, "try": advice}
    return found


def in_words(value) -> str:
    """A flag's value, as a person writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, [], ()):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def changed(args: dict) -> list[list[str]]:
    """[flag, value, default] of the flags that have another value than the default."""
    script = Path(args.get("script", "grpo.py"))
    if not (ROOT / script).is_file():  # a copy that is gone
        script = Path("grpo.py")
    module = importlib.import_module(".".join(script.with_suffix("").parts))
    defaults = vars(module.Args())
    found = [(name, in_words(args[name]), in_words(default))
             for name, default in defaults.items() if name in args]
    return [[f"--{name}", value, default] for name, value, default in found if value != default]


# ---- from a run

def curves(run: Path) -> dict[str, list]:
    """Every metric by name, and "step": a list with an item a row, None where it has none."""
    found = {}
    for row in read_metrics(run / "metrics.jsonl"):  # a step and its evaluation are two rows
        if is_evaluation(row):
            row = {k: v for k, v in row.items() if k in ("step", "time/eval") or "eval/" in k}
        found[row["step"]] = found.get(row["step"], {}) | row
    stride = -(-len(found) // POINTS)
    rows = [row for i, row in enumerate(found.values()) if i % stride == 0 or is_evaluation(row)]
    names = dict.fromkeys(["step", *(k for row in rows for k in row)])
    return {name: [row.get(name) for row in rows] for name in names}


def last_rows(run: Path) -> list[dict]:
    """The lines of samples/ of the last evaluation, else of the last step; [] if too many."""
    for pattern in "eval_*.jsonl", "step_*.jsonl":
        if paths := sorted(run.glob(f"samples/{pattern}"), key=plot.by_number):
            return read(paths[-1]) if paths[-1].stat().st_size <= AT_THE_END else []
    return []


def about(run: Path, group: int) -> dict:
    """A run without its completions."""
    plan = run / "plan.txt"
    args, found = read(run / "args.json"), curves(run)
    return {"name": os.path.relpath(run), "group": group, "seed": args.get("seed"),
            "versions": args.get("versions", {}), "flags": changed(args), "curves": found,
            "plan": plan.read_text() if plan.exists() else "",
            "warnings": warnings(found, last_rows(run)),
            "steps": args["steps"], "done": found["step"][-1:] == [args["steps"]]}


def quantized(values) -> dict:
    """As integers, and their unit: a power of ten, a thousandth of the largest or less."""
    unit = 10.0 ** (np.floor(np.log10(max(float(np.abs(values).max()), 1e-9))) - 3)
    return {"unit": unit, "values": np.rint(values / unit).astype(int).tolist()}


def tokens(rows: list[dict], step: int) -> dict | None:
    """The tokens of all rows, one after another, and their numbers; None: there are none.

    step: the number of steps done after this one. logprob: the engine's, in nats. bears: whether a
    token bears loss.
    """
    seen = [row for row in rows if row.get("token_texts")]
    if not seen:
        return None

    def flat(name: str):
        return np.concatenate([np.asarray(row[name], np.float64) for row in seen])

    texts = [text for row in seen for text in row["token_texts"]]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    lengths = [len(row.get("token_texts", ())) for row in rows]
    learns = np.repeat([row["advantage"] is not None for row in seen],
                       [n for n in lengths if n])
    sampled = flat("sampled") > 0
    bears = sampled & learns
    numbers = {"logprob": flat("engine_logprobs"), "advantage": flat("advantages")}
    if "steps" in seen[0]:  # whose policy sampled it, with --carry
        numbers["age"] = step - 1 - flat("steps")
    found = {name: quantized(np.where(sampled, values, 0)) for name, values in numbers.items()}
    return {"vocab": [*vocab], "ids": [vocab[text] for text in texts], "lengths": lengths,
            "sampled": sampled.astype(int).tolist(), "bears": bears.astype(int).tolist(),
            "numbers": found}


def shortened(text, most: int | None):
    """A text of at most so many characters, and how many more there are."""
    if most is None or not isinstance(text, str) or len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters)"


def block(rows: list[dict], with_tokens: bool, most: int | None, step: int = 0) -> str:
    """The completions of a file, packed. most: characters of a text. step: in its name."""
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    index = {prompt: i for i, prompt in enumerate(prompts)}
    kept = []
    for row in rows:
        turns = row.get("turns") or []
        kept.append({
            "p": index[row["prompt"]], "position": row.get("position"),
            "text": shortened(row["completion"], most), "reward": row["reward"],
            "rewards": row.get("rewards"), "advantage": row.get("advantage"),
            "n": row["tokens"], "cut": row["truncated"],
            "answer": shortened(as_text(row.get("answer")), most),
            "turns": [[t["role"], shortened(as_text(t["content"]), most), t.get("paid")]
                      for t in turns] if len(turns) > 1 else None})
    return packed({"prompts": [shortened(text, most) for text in prompts], "rows": kept,
                   "tokens": tokens(rows, step) if with_tokens else None})


def as_text(value) -> str:
    """A text as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def in_order(count: int) -> list[int]:
    """0 … count - 1, the first and the last one first, then those between, evenly."""
    found, stride = [0, count - 1], count
    while stride > 1:
        stride = -(-stride // 2)
        found += range(0, count, stride)
    return [*dict.fromkeys(found)][:count]


def sample_files(runs: list[Path]) -> list[tuple]:
    """(rank, number of the run, kind, step, path), in the order in which they get room."""
    found = []
    for k, run in enumerate(runs):
        for kind, pattern in ("evaluation", "eval_*.jsonl"), ("step", "step_*.jsonl"):
            paths = sorted(run.glob(f"samples/{pattern}"), key=plot.by_number)
            for rank, i in enumerate(in_order(len(paths))):
                found.append((rank, k, kind, int(re.sub(r"\D", "", paths[i].stem)), paths[i]))
    return sorted(found)


def fitting(rows: list[dict], step: int, room: int, later: int) -> tuple[str, str]:
    """The block that fits, and what it lacks. later: bytes that tokens leave to other files."""
    for with_tokens, most, lacks in (True, None, ""), (False, None, "tokens"), (
            False, CUT, "long texts"):
        text = block(rows, with_tokens, most, step)
        if len(text) <= room - (later if with_tokens else 0):
            return text, lacks
    return "", "completions"


def blocks(runs: list[Path], room: int, most_read: int) -> tuple[list[dict], list[str]]:
    """(what each file of samples/ is, its block). As many as there is room for, in bytes of the
    page, and in bytes to read; the others are named, with an empty block."""
    files, found, bare = sample_files(runs), [], 0
    for i, (_, k, kind, step, path) in enumerate(files):
        text, lacks, size = "", "completions", path.stat().st_size
        if size <= most_read:
            most_read -= size
            rows = read(path)
            if i == 0:
                bare = len(block(rows, False, CUT))
            text, lacks = fitting(rows, step, room, bare * (len(files) - i - 1))
            room -= len(text)
        found.append(({"run": k, "kind": kind, "step": step, "lacks": lacks}, text))
    found.sort(key=lambda one: (one[0]["run"], one[0]["kind"], one[0]["step"]))
    return [one for one, _ in found], [text for _, text in found]


def page(folders: list[Path], place: Path, most_read: int = 2**32) -> str:
    """The page of these runs. place: its folder. most_read: bytes of samples/ to read."""
    groups = plot.find(folders)
    runs = [run.path for group in groups for run in group]
    head = {"runs": [about(run.path, g) for g, group in enumerate(groups) for run in group],
            "groups": plot.titles(groups), "healthy": healthy(),
            "docs": os.path.relpath(ROOT / SICK, place.resolve())}
    empty = Path(__file__).with_name("report.html").read_text()
    room = PAGE - len(empty) - len(packed(head)) - 100_000
    head["blocks"], texts = blocks(runs, room, most_read)
    return empty.replace('"DATA"', json.dumps({"head": packed(head), "blocks": texts}))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--out", type=Path, help="the page's file")
    args = parser.parse_args()
    path = args.out or args.runs[0] / "report.html"
    try:
        text = page(args.runs, path.parent)
        write_whole(path, text)
    except (SettingsError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"report: {path} ({len(text) / 1e6:.1f} MB)")


if __name__ == "__main__":
    command(main)
