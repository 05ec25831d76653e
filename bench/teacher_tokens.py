"""Tokens that a student needs to reach its teacher, against those that GRPO needed for the teacher.

    python bench/teacher_tokens.py             five seeds, two at once: 15 minutes of two cores
    python bench/teacher_tokens.py --page      teacher_tokens.md again, from teacher_tokens.json

For each seed grpo.py trains the tiny model on the job of `./run.sh`. Then two students begin with
the untrained model, and the trained one teaches them: by the sampled token, and by the exact
divergence. "Reached" is the first evaluation whose held-out accuracy is at least the teacher's last
one minus .02. A finished run is not run again, and one that was killed goes on: start it again.
"""
import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from keeping.log import finished_steps, read_metrics
from results.make import machine
from results.roads import measured

HERE = Path(__file__).resolve().parent
FILE, PAGE = HERE / "teacher_tokens.json", HERE / "teacher_tokens.md"
MARGIN, FRACTION = 0.02, 0.2
COMMON = ("--warmup_steps 10 --max_prompt_tokens 64 --max_tokens 16 --reward exact "
          "--eval_data tiny@test --save_every 20 --keep 1").split()
STUDENT = "--batch 8 --group 4 --eval_every 2 --steps 40"
RUNS = {"grpo": ("grpo", "--eval_every 4 --steps 60"), "sampled": ("distill", STUDENT),
        "exact": ("distill", f"{STUDENT} --divergence reverse_kl")}
TEXT = """# Tokens to reach the teacher

`python bench/teacher_tokens.py` makes this page; its head tells what is compared. A student "in a
fifth" needed at most a fifth of the tokens that grpo.py sampled for the same accuracy. The machine:
MACHINE.

"""


def run(kind: str, seed: int) -> list[dict]:
    """One run, or what it left if it is finished → its evaluations."""
    script, flags = RUNS[kind]
    name = f"tokens-{kind}-{seed}"
    command = [sys.executable, f"{script}.py", *COMMON, *flags.split(), "--seed", str(seed),
               "--name", name]
    if kind != "grpo":
        command += ["--teacher", f"runs/tokens-grpo-{seed}/model", "--no-export"]
    if not finished_steps(Path("runs", name)):
        print(*command, flush=True)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return measured(read_metrics(Path("runs", name, "metrics.jsonl")))["points"]


def until(points: list[dict], accuracy: float) -> int | None:
    """The tokens sampled until the first evaluation with this accuracy; None: it is not reached."""
    return next((p["tokens"] for p in points if p["pass"] >= accuracy - 1e-9), None)


def page(kept: dict) -> str:
    lines = ["| seed | student | teacher's accuracy | GRPO's tokens | student's tokens | ratio |",
             "|---" * 6 + "|"]
    reached = {kind: [] for kind in RUNS if kind != "grpo"}
    for seed, runs in kept["seeds"].items():
        last = runs["grpo"][-1]["pass"]
        theirs = until(runs["grpo"], last - MARGIN)
        for kind, each in reached.items():
            mine = until(runs[kind], last - MARGIN)
            each.append(mine is not None and mine <= FRACTION * theirs)
            shown = "not reached | " if mine is None else f"{mine:,} | {mine / theirs:.3f}"
            lines.append(f"| {seed} | {kind} | {last:.3f} | {theirs:,} | {shown} |")
    lines += ["", "In a fifth: " + "; ".join(
        f"{kind}: {sum(each)} of {len(each)}" for kind, each in reached.items()) + "."]
    return TEXT.replace("MACHINE", kept["machine"]) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    kept = {"machine": machine(), "seeds": {}}
    if FILE.exists():
        kept = json.loads(FILE.read_text())
    seeds = range(0 if args.page else args.seeds)
    with ThreadPoolExecutor(2) as two:  # seeds at once, one rank each
        found = two.map(lambda seed: {kind: run(kind, seed) for kind in RUNS}, seeds)
        for seed, runs in zip(seeds, found, strict=True):
            kept["seeds"][str(seed)] = runs
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    print(page(kept))


if __name__ == "__main__":
    main()
