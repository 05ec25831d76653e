"""collect.py: finished runs of one command, a seed each → a job's file. On the runs' machine:

    python results/collect.py runs/kk-0 runs/kk-1 --command "./run.sh kk" > results/kk.json
    python results/table.py        the tables of README.md, from the files
"""
import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import SettingsError
from files import finished_steps, is_evaluation, read, read_metrics

KEPT = "step|reward/(?!std).*|eval/(.*/)?pass@1|eval/rows|policy/entropy|rollout/length_mean"
LARGEST = "grad/norm", "rollout/logprob_gap_max", "memory/peak_gb"


def machine() -> str:
    model = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {model[1] if model else 'unknown'}, {gigabytes:.0f} GiB"


def short(value):
    """4 digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def columns(rows: list[dict]) -> dict[str, list]:
    """Of each metric one number a row; null where the row has none."""
    names = dict.fromkeys(name for row in rows for name in row if re.fullmatch(KEPT, name))
    return {name: [short(row.get(name)) for row in rows] for name in names}


def ends_of(rows: list[dict]) -> dict:
    """Of metrics whose curve nobody reads, one number a run."""
    times = [row["time/step"] for row in rows if row.get("time/step") is not None]
    largest = {name: [row[name] for row in rows if row.get(name) is not None] for name in LARGEST}
    return {"median": {"time/step": round(median(times), 4) if times else None},
            "largest": {name: short(max(found)) for name, found in largest.items() if found}}


def job_of(folders: list[Path], command: str, note: str) -> dict:
    seeds, first = {}, None
    for folder in folders:
        args, rows = read(folder / "args.json"), read_metrics(folder / "metrics.jsonl")
        seed, versions, *_ = (args.pop(name, None)
                              for name in ("seed", "versions", "name", "began"))
        first = first or args
        if not finished_steps(folder) or args != first or str(seed) in seeds:
            raise SettingsError(f"{folder} has not finished, or its flags are not those of "
                                f"{folders[0]} with another --seed.")
        began, ended = ((folder / file).stat().st_mtime for file in ("plan.txt", "done.json"))
        seeds[str(seed)] = {
            "commit": versions.pop("commit"), "seconds": round(ended - began), **ends_of(rows),
            "steps": columns([row for row in rows if not is_evaluation(row)]),
            "evaluations": columns([row for row in rows if is_evaluation(row)])}
    return {"command": command, "note": note, "machine": machine(),
            "date": time.strftime("%Y-%m-%d", time.gmtime(ended)), "versions": versions} | {
            key: first.get(key) for key in ("reward", "target_reward", "target_eval")} | {
            "seeds": seeds}


def as_text(job: dict) -> str:
    """A line for each list of numbers."""
    return json.dumps(job, separators=(",", ":")).replace('],"', '],\n"') + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--command", required=True)
    parser.add_argument("--note", default="", help="for the table: loaded")
    asked = parser.parse_args()
    try:
        print(as_text(job_of(asked.runs, asked.command, asked.note)), end="")
    except SettingsError as error:
        sys.exit(f"error: {error}")
