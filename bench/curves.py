"""The curves of docs/learn/algorithms.md: five algorithms, three seeds, the tiny task.

    python bench/curves.py                   # all: 15 runs of 35 steps on 2 ranks, about 15 minutes
    python bench/curves.py dapo --seeds 0    # one of them

Each run is `./run.sh` (or `./run.sh ppo`) with the flags in ALGORITHMS. Its reward of each step
goes to bench/curves.json, which docs/pictures/draw.py draws.
"""
import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "bench" / "curves.json"
ALGORITHMS = {
    "grpo": "--advantage grpo --aggregation sequence --kl_loss_coef 0.04",
    "dr_grpo": "--advantage dr_grpo --aggregation constant",
    "dapo": "--advantage grpo --aggregation token --clip_high 0.28 --minibatches 4 "
            "--dynamic_sampling --overlong_buffer 4",
    "gspo": "--advantage grpo --aggregation sequence --loss gspo --clip_low 3e-4 --clip_high 4e-4 "
            "--minibatches 4",
    "ppo": "ppo"}


def run(name: str, seed: int) -> list[dict]:
    """Train → the steps of metrics.jsonl."""
    folder = ROOT / "runs" / f"curve-{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["./run.sh", *ALGORITHMS[name].split(), "--seed", str(seed), "--name",
                    folder.name, "--no-export"], cwd=ROOT)
    if not (folder / "done.json").exists():  # a run that missed its grade has one
        sys.exit(f"error: {folder.name} has not finished")
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return [row for row in rows if "eval/rows" not in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=(
        argparse.RawDescriptionHelpFormatter))
    parser.add_argument("names", nargs="*", default=[*ALGORITHMS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    asked = parser.parse_args()
    for name in asked.names:
        for seed in asked.seeds:
            rows = run(name, seed)
            found = json.loads(FILE.read_text()) if FILE.exists() else {}
            found.setdefault(name, {})[str(seed)] = {
                "flags": ALGORITHMS[name],
                "reward": [round(row["reward/mean"], 4) for row in rows],
                "completions": sum(row["rollout/completions"] for row in rows),
                "updates": sum(row["update/steps"] for row in rows),
                "clip_frac": round(sum(row["policy/clip_frac"] for row in rows) / len(rows), 4)}
            lines = [f' "{n}": {{\n' + ",\n".join(
                f'  "{s}": {json.dumps(found[n][s])}' for s in sorted(found[n])) + "\n }"
                for n in ALGORITHMS if n in found]
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
