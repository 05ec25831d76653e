"""Prompts with a picture (examples/squares.py), beside TRL: a random model, 64 completions of about
64 tokens. All weights are trained. Two minutes.

    python bench/trl_vision.py --steps 12

TRL has no engine here, so it has no gap to one; ours is printed. Timing: beside_trl.py.
"""
import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from transformers.utils.logging import disable_progress_bar

import data
from bench import beside_trl as trl
from examples import squares


def vision(steps: int, threads: int) -> None:
    folder, path = trl.RUNS / "squares", trl.RUNS / "trl-prompts.jsonl"
    squares.main(folder)
    model, most, completions = str(folder / "model"), 64, 64
    texts = [json.loads(line) for line in open(folder / "train.jsonl")]
    drawn = [texts[p.row] for p in data.Stream(range(len(texts)), 0).next(steps * 8)]
    path.write_text("".join(json.dumps({
        "prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"],
        "image": str(folder / row["image"])}) + "\n" for row in drawn))
    same = ("--model", model, "--lr", 1e-9, "--seed", 0, "--steps", steps, "--group", trl.GROUP,
            "--max_tokens", most)
    base = trl.ours("trl-vision-ours", threads, *same, "--batch", completions // trl.GROUP,
                    "--data", folder / "train.jsonl", "--max_prompt_tokens", 64, "--train_vision",
                    "--reward", "bench/trl_side.py:letters")
    other = trl.theirs("trl-vision-theirs", threads, *same, "--prompts", path, "--completions",
                       completions, "--micro", 32, "--warmup", 0, "--reward", "letters_of_chats",
                       "--pictures")
    print("\n| with pictures | s/step, median (range) | length | gap |\n|---|---|---|---|")
    for name, ran in ("grpo.py", base), ("TRL, no checkpointing", other):
        counted = ran.steps[trl.SKIPPED:]
        seconds = np.array([step["time/step"] for step in counted])
        length = np.mean([step["rollout/length_mean"] for step in counted])
        gap = max(step.get("rollout/logprob_gap_max", math.nan) for step in counted)
        print(f"| {name} | {np.median(seconds):.2f} ({seconds.min():.2f}–{seconds.max():.2f}) | "
              f"{length:.1f} | {gap:.0e} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="with the first two, left out")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    trl.set_up()
    trl.RUNS.mkdir(exist_ok=True)
    disable_progress_bar()
    vision(a.steps, a.threads)
