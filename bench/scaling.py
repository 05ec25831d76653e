"""1 → 2 ranks with the same global batch: seconds a step of grpo.py, phase by phase.

    python bench/scaling.py                    3 million parameters, 64 prompts x 8 completions of 128 tokens
    python bench/scaling.py --ranks 2 4        more cores, more ranks: a rank needs one of its own

One thread a rank, so that a second rank is a second core. The runs take turns, --times each; a phase's figure is the median over
all steps but the first of every run. The last line is the machine's own limit: as many runs of one rank at once as there are ranks in the
line before, with nothing in common but memory and clock; twice the work in its time would be a speed-up of 2.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "bench"))

from step import SIZES, random_model

PHASES = ("rollout", "reward", "update", "sync", "step")


def start(name: str, ranks: int, model: str, steps: int) -> subprocess.Popen:
    """grpo.py on this many ranks."""
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "grpo.py", "--name", name, "--model", model,
               "--batch", "64", "--group", "8", "--max_prompt_tokens", "64", "--max_tokens", "128", "--lr", "1e-9", "--no-export",
               "--steps", str(steps), "--samples_every", "1000000"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(ranks: int, copies: int, model: str, steps: int) -> list[dict]:
    """The metrics of so many copies of a run at once, a row a step, less the first."""
    names = [f"bench-scaling-{ranks}-{copy}" for copy in range(copies)]
    rows = []
    for name, process in [(name, start(name, ranks, model, steps)) for name in names]:
        _, trouble = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(process.args)}\nended with status {process.returncode}:\n{trouble[-3000:]}")
        rows += [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()][1:]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if max(options.ranks) > len(os.sched_getaffinity(0)):
        sys.exit(f"skipped: {max(options.ranks)} ranks need as many cores, and this machine has {len(os.sched_getaffinity(0))}")
    model = random_model(options.model)
    settings = [(1, 1)] + [(ranks, 1) for ranks in options.ranks] + [(1, options.ranks[-1])]          # (ranks, copies at once)
    rows: dict = {setting: [] for setting in settings}
    for _ in range(options.times):
        for setting in settings:
            rows[setting] += run(*setting, model, options.steps)
    took = {setting: {phase: [row[f"time/{phase}"] for row in rows[setting]] for phase in PHASES} for setting in settings}
    base = statistics.median(took[settings[0]]["step"])
    print("| ranks | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | speed-up |\n" + "|---" * (len(PHASES) + 2) + "|")
    for (ranks, copies), seconds in took.items():
        cells = [f"{statistics.median(seconds[p]):.2f} ({min(seconds[p]):.2f}–{max(seconds[p]):.2f})" for p in PHASES]
        print(f"| {ranks if copies == 1 else f'{copies} runs of {ranks} at once'} | " + " | ".join(cells)
              + f" | {base * copies / statistics.median(seconds['step']):.2f} |")


if __name__ == "__main__":
    main()
