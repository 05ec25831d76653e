"""1 → 2 ranks with the same global batch: seconds per step of grpo.py, phase by phase.

    python bench/scaling.py                3 million parameters, 64 prompts x 8 completions of 128
    python bench/scaling.py --ranks 2 4    more ranks; each needs a core of its own
    python bench/scaling.py --host         instead: the host's part of a large batch (host.py)

Each rank has one thread, so a second rank is a second core. The runs take turns, --times each. The
figure of a phase is the median over all steps but the first of every run. The last line is the
machine's own limit: several runs of one rank at once, as many as the ranks of the line before.
They share only memory and clock. Twice the work in the same time would be a speed-up of 2.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from step import SIZES, random_model

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("rollout", "reward", "update", "sync", "step")
# A random reward, because a random model solves no task, and equal rewards make no update.
FLAGS = """--batch 64 --group 8 --max_prompt_tokens 64 --max_tokens 128 --lr 1e-9 --no-export
           --samples_every 1000000 --reward examples/coin.py:coin""".split()

HOST = ("", "--longest 16384", "--max_tokens 32768")  # flags of host.py


def start(name: str, ranks: int, model: str, steps: int) -> subprocess.Popen:
    """grpo.py on this many ranks."""
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               str(ranks), "grpo.py", "--name", name, "--model", model, "--steps", str(steps)]
    return subprocess.Popen(
        [*command, *FLAGS], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(ranks: int, copies: int, model: str, steps: int) -> list[dict]:
    """Several copies of a run at once → their metrics, one row a step, without the first step."""
    names = [f"bench-scaling-{ranks}-{copy}" for copy in range(copies)]
    rows = []
    for name, process in [(name, start(name, ranks, model, steps)) for name in names]:
        _, errors = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(process.args)}\nended with status {process.returncode}:\n"
                     f"{errors[-3000:]}")
        lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows += [json.loads(line) for line in lines][1:]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    if options.host:
        for case in HOST:
            subprocess.run([sys.executable, ROOT / "bench/host.py", *case.split()], check=True)
        return
    cores = len(os.sched_getaffinity(0))
    if max(options.ranks) > cores:
        sys.exit(f"skipped: {max(options.ranks)} ranks need as many cores, and this machine has "
                 f"{cores}")
    model = random_model(options.model)
    # (ranks, copies at once)
    settings = [(1, 1)] + [(ranks, 1) for ranks in options.ranks] + [(1, options.ranks[-1])]
    rows = {setting: [] for setting in settings}
    for _ in range(options.times):
        for setting in settings:
            rows[setting] += run(*setting, model, options.steps)
    took = {setting: {phase: [row[f"time/{phase}"] for row in rows[setting]] for phase in PHASES}
            for setting in settings}
    base = statistics.median(took[settings[0]]["step"])
    print("| ranks | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | speed-up |\n"
          + "|---" * (len(PHASES) + 2) + "|")
    for (ranks, copies), seconds in took.items():
        cells = [f"{statistics.median(s):.2f} ({min(s):.2f}–{max(s):.2f})"
                 for s in seconds.values()]
        speedup = base * copies / statistics.median(seconds["step"])
        name = ranks if copies == 1 else f"{copies} runs of {ranks} at once"
        print(f"| {name} | " + " | ".join(cells) + f" | {speedup:.2f} |")


if __name__ == "__main__":
    main()
