"""1 → 2 ranks with the same global batch: seconds a step of grpo.py, phase by phase.

    python bench/scaling.py                    3 million parameters, 64 prompts x 8 completions of 128 tokens
    python bench/scaling.py --ranks 1 2 4      more cores, more ranks: a rank needs one of its own

One thread a rank in both, so that a second rank is a second core. The runs take turns, --times each; a phase's figure is the median over
all steps but the first of every run. The speed-up that two free cores could give is 2.
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


def run(ranks: int, model: str, steps: int) -> list[dict]:
    """The metrics of one run of grpo.py, a row a step, less the first."""
    name = f"bench-scaling-{ranks}"
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "grpo.py", "--name", name, "--model", model,
               "--batch", "64", "--group", "8", "--max_prompt_tokens", "64", "--max_tokens", "128", "--lr", "1e-9", "--no-export",
               "--steps", str(steps), "--samples_every", "1000000"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="3m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if max(options.ranks) > len(os.sched_getaffinity(0)):
        sys.exit(f"skipped: {max(options.ranks)} ranks need as many cores, and this machine has {len(os.sched_getaffinity(0))}")
    model, rows = random_model(options.model), {ranks: [] for ranks in options.ranks}
    for _ in range(options.times):
        for ranks in options.ranks:
            rows[ranks] += run(ranks, model, options.steps)
    base = options.ranks[0]
    print("| ranks | " + " | ".join(f"{phase}, s" for phase in PHASES) + f" | speed-up over {base} |\n" + "|---" * (len(PHASES) + 2) + "|")
    took = {ranks: {phase: [row[f"time/{phase}"] for row in rows[ranks]] for phase in PHASES} for ranks in options.ranks}
    for ranks in options.ranks:
        cells = [f"{statistics.median(took[ranks][p]):.2f} ({min(took[ranks][p]):.2f}–{max(took[ranks][p]):.2f})" for p in PHASES]
        print(f"| {ranks} | " + " | ".join(cells) + f" | {statistics.median(took[base]['step']) / statistics.median(took[ranks]['step']):.2f} |")


if __name__ == "__main__":
    main()
