"""speedrun.py: seconds of training until the default job passes .95 on held-out rows, five seeds.

    python results/speedrun.py                        grpo.py as it is
    python results/speedrun.py my_grpo.py --lr 1e-3   your copy of it, and flags
    python results/speedrun.py my_grpo.py --again     five fresh seeds

results/speedrun.md has the rule and the table.
"""
import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from files import is_evaluation, read  # noqa: E402

SEEDS, STEPS, GOAL = range(5), 35, 0.95
USUAL = "--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16".split()  # as ./run.sh; free
FIXED = (f"--model tiny --data tiny --eval_data tiny@test --eval_every 1 --steps {STEPS} "
         "--save_every 0 --samples_every 1000 --no-report --no-export").split()


def run(script: str, flags: list[str], seed: int) -> list[dict]:
    """The rows of metrics.jsonl of one run, on two ranks."""
    name = f"speedrun-{Path(script).stem}-{seed}"
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    subprocess.run(
        [f"{os.path.dirname(sys.executable)}/torchrun", "--local_addr", "127.0.0.1",
         "--nproc_per_node", "2", script, *USUAL, *flags, *FIXED, "--seed", str(seed), "--name",
         name], cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    return read(ROOT / "runs" / name / "metrics.jsonl")


def reached(rows: list[dict]) -> tuple[float, int, int]:
    """(seconds, steps, sampled tokens) of training before the first evaluation that passes. inf:
    none does."""
    seconds = tokens = 0
    for row in rows:
        if is_evaluation(row) and row["eval/pass@1"] >= GOAL:
            return seconds, row["step"], tokens
        seconds += row.get("time/step", 0.0)
        tokens += row.get("rollout/tokens", 0)
    return float("inf"), STEPS, tokens


def text(found: list[tuple[float, int, int]]) -> str:
    """The row of the table: mean seconds, their 95 % interval over seeds, steps and tokens."""
    seconds, steps, tokens = np.array(found).T
    if not np.isfinite(seconds).all():
        return f"{np.isfinite(seconds).sum()} of {len(found)} seeds reach {GOAL}"
    error = stats.sem(seconds) * stats.t.ppf(0.975, len(seconds) - 1)
    return (f"{seconds.mean():.1f} s ({seconds.mean() - error:.1f} to {seconds.mean() + error:.1f})"
            f", {steps.mean():.1f} steps, {tokens.mean():,.0f} tokens")


def main(script: str, flags: list[str], seeds: range):
    found = []
    for seed in seeds:
        found.append(reached(run(script, flags, seed)))
        print(f"seed {seed}: {found[-1][0]:.1f} s, {found[-1][1]} steps", flush=True)
    print(text(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", default="grpo.py", help="your copy of grpo.py")
    parser.add_argument("--again", action="store_true", help="the seeds 5 to 9")
    options, flags = parser.parse_known_args()
    main(options.script, flags, range(5, 10) if options.again else SEEDS)
