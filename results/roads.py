"""Four roads from one small base to a policy, with seeds, and their comparison.

    python results/roads.py --model runs/smollm2 --seeds 3     an hour of two cores for each seed
    python results/roads.py --steps 3 --rows 40 --seeds 1      a few steps of each, to try it
    python results/roads.py --table                            the table of what is there

The task is a short word, reversed letter by letter: a base fails it. The roads:

    grpo          GRPO from the base: the control. Without a first success there is nothing to learn
    sft           supervised training on right answers, a few
    sft-grpo      GRPO from the sft policy
    distill       the sft-grpo policy as the teacher of the base

A run that is finished is not run again, and one that was killed goes on: start it again.
"""
import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np

from log import finished_steps, is_evaluation, read_metrics

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT = "Write these letters in reverse order, with spaces between them: {}"
ROADS = {  # name: (script, steps of the full run, its model, its teacher, its flags)
    "grpo": ("grpo", 40, "base", None, "--batch 8 --group 8 --lr 2e-5 --reward exact"),
    "sft": ("sft", 40, "base", None, "--batch 8 --lr 2e-5 --reward exact"),
    "sft-grpo": ("grpo", 40, "sft", None, "--batch 8 --group 8 --lr 2e-5 --reward exact"),
    "distill": ("distill", 40, "base", "sft-grpo",
                "--batch 8 --group 8 --lr 2e-5 --reward exact")}
COMMON = ("--max_prompt_tokens 96 --max_tokens 24 --update_tokens 1024 --score_tokens 2048 "
          "--eval_every 10 --save_every 10 --keep 1 --warmup_steps 3").split()


def make_rows(folder: Path, n: int) -> None:
    """train.jsonl and test.jsonl, of different words of 3 to 5 letters."""
    rng, words = random.Random(0), {}
    while len(words) < 2 * n:
        letters = rng.sample(LETTERS, rng.choice([3, 4, 5]))
        words[" ".join(letters)] = " ".join(reversed(letters))
    rows = [{"question": PROMPT.format(word), "answer": answer} for word, answer in words.items()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:n]), ("test", rows[n:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def name_of(road: str, seed: int, tag: str) -> str:
    return f"roads{tag}-{road}-{seed}"


def run(road: str, seed: int, args) -> None:
    script, steps, start, teacher, flags = ROADS[road]
    steps, name = args.steps or steps, name_of(road, seed, args.tag)
    if finished_steps(Path("runs", name)) >= steps:
        return
    model = args.model if start == "base" else f"runs/{name_of(start, seed, args.tag)}/model"
    command = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node", "2", f"{script}.py",
               "--model", model, "--data", "runs/roads/train.jsonl",
               "--eval_data", "runs/roads/test.jsonl", "--steps", str(steps), "--seed", str(seed),
               "--name", name, *COMMON, *flags.split()]
    if teacher:
        command += ["--teacher", f"runs/{name_of(teacher, seed, args.tag)}/model"]
    print(*command, flush=True)
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def measured(name: str) -> dict | None:
    """What a finished run cost and reached."""
    folder = Path("runs", name)
    if not finished_steps(folder):
        return None
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if not is_evaluation(row)]
    scores = [row for row in rows if is_evaluation(row)]
    return {"before": scores[0]["eval/pass@1"], "after": scores[-1]["eval/pass@1"],
            "low": scores[-1]["eval/pass@1_low"], "high": scores[-1]["eval/pass@1_high"],
            "sampled": sum(row.get("rollout/tokens", 0) for row in steps),
            "seconds": sum(row["time/step"] for row in steps)}


def table(args) -> None:
    """Of each road the seeds that are finished; the costs are its own, without its start's."""
    print("| road | seeds | pass@1 before | after, each seed (95 % over rows) | tokens sampled | "
          "seconds |\n|---|---|---|---|---|---|")
    for road in ROADS:
        found = [measured(name_of(road, seed, args.tag)) for seed in range(args.seeds)]
        found = [one for one in found if one]
        if not found:
            continue
        after = ", ".join(f"{f['after']:.3f} ({f['low']:.3f} to {f['high']:.3f})" for f in found)
        before, sampled, seconds = (np.mean([f[key] for f in found])
                                    for key in ("before", "sampled", "seconds"))
        print(f"| {road} | {len(found)} | {before:.3f} | {after} | {sampled:,.0f} | "
              f"{seconds:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every road; not given: those of ROADS")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tag", default="", help="a part of the runs' names: --tag=-try")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        make_rows(Path("runs/roads"), args.rows)
        for seed in range(args.seeds):
            for road in ROADS:
                run(road, seed, args)
    table(args)


if __name__ == "__main__":
    main()
