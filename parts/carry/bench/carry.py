"""What --carry saves: the engine's decode steps of a trained step.

    python parts/carry/bench/carry.py               lengths that are drawn
    python parts/carry/bench/carry.py --steps 20    quicker: the table of RESULTS.md
    python parts/carry/bench/carry.py --train       grpo.py on knights and knaves, five seeds

The first plays the shipped parts/carry/carry.py with an engine that samples nothing. In a decode
step each completion of an engine grows by one token, so a round takes as many as its longest one
grows.
"""
import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[3]))
from parts.carry.carry import Carry, CarryArgs  # noqa: E402

JOBS = [(1500, 0.8, 8192), (1500, 1.0, 16384), (4000, 1.0, 32768)]  # median, sigma, --max_tokens


class Engine:
    """Draws the length of each completion. Its token ids are this length, so that a completion
    which goes on is known by them."""

    def __init__(self, median: int, sigma: float, limit: int):
        self.median, self.sigma, self.limit = median, sigma, limit
        self.log = SimpleNamespace(time=lambda name: nullcontext(), times={"time/rollout": 1.0})
        self.world = SimpleNamespace(same_phase=lambda name, count: None, step=0)

    def complete(self, samples, temperature) -> None:
        for s in samples:
            begun = len(s.ids)
            if begun:
                length = s.ids[0]
            else:
                rng = np.random.default_rng(s.seed)
                length = max(1, int(rng.lognormal(np.log(self.median), self.sigma)))
            n = min(s.room, length - begun, self.limit - begun)
            s.append(np.full(n, length), np.zeros(n), truncated=begun + n < length)


class Prompts:
    def __init__(self):
        self.position = 0

    def next(self, n: int) -> list:
        first, self.position = self.position, self.position + n
        return [SimpleNamespace(position=first + k, row=SimpleNamespace(prompt_ids=[0]))
                for k in range(n)]


def played(job, carry: int, tokens: int, steps: int, seed: int = 0):
    """64 prompts x 8 → mean decode steps of a trained step; mean and greatest age of completions.
    The first tenth of the steps does not count: in it the flight fills."""
    args = SimpleNamespace(batch=64, group=8, seed=seed, temperature=1.0, max_tokens=job[2],
                           parts=SimpleNamespace(carry=CarryArgs(carry, tokens)))
    prompts, engine, found = Prompts(), Engine(*job), []
    it = Carry(args, prompts)
    for step in range(steps):
        engine.world.step = step
        it.sample(engine, prompts.next(args.batch))
        found.append(engine.metrics)
    found = found[steps // 10:]
    return (np.mean([row["rollout/decode_steps"] for row in found]),
            np.mean([row["carry/age_mean"] for row in found]),
            max(row["carry/age_max"] for row in found))


JOB = ("--model tiny:kk --data tiny:kk --reward kk01 --eval_data tiny:kk@test --steps 40 "
       "--batch 16 --group 4 --lr 1e-4 --warmup_steps 10 --max_prompt_tokens 64 --max_tokens 128 "
       "--engine_correction truncate --no-export --no-report --samples_every 1").split()
SEEDS = range(5)


def trained(carry: int, seed: int) -> dict[str, float]:
    """One run of grpo.py on one rank → its figures. A finished one is not run again."""
    folder = Path("runs", f"carry-{carry}-{seed}")
    clock = folder / "seconds.json"
    if not clock.exists():
        command = [sys.executable, "grpo.py", *JOB, "--carry", str(carry), "--carry_tokens", "16",
                   "--seed", str(seed), "--name", folder.name, "--no-resume"]
        print(*command, flush=True)
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
        after = os.times()
        clock.write_text(json.dumps(after.children_user + after.children_system
                                    - before.children_user - before.children_system))
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    steps = [row for row in rows if "eval/rows" not in row]
    longest = [max(json.loads(line)["tokens"] for line in open(path))
               for path in sorted(folder.glob("samples/step_*.jsonl"))]
    decoded = [row.get("rollout/decode_steps", most)
               for row, most in zip(steps, longest, strict=True)]
    return {"decode steps": np.mean(decoded[4:]), "cpu": json.loads(clock.read_text()),
            "seconds": np.median([row["time/step"] for row in steps[4:]]),
            "rollout": np.median([row["time/rollout"] for row in steps[4:]]),
            "old": np.mean([row.get("carry/old_tokens_frac", 0.0) for row in steps[4:]]),
            "tokens": sum(row["rollout/tokens"] for row in steps),
            "before": rows[0]["eval/pass@1"], "after": rows[-1]["eval/pass@1"]}


def train_table() -> None:
    """Means over the seeds. The last column is the mean difference to C = 0, paired by the seed,
    with its 95 % interval."""
    found: dict[int, list] = {0: [], 1: [], 2: []}
    for seed in SEEDS:  # the three beside each other, so that a slow hour is in all of them
        for carry, runs in found.items():
            runs.append(trained(carry, seed))
    print("| C | decode steps | seconds a step | of it rollout | CPU seconds a run | old tokens | "
          "trained tokens | held-out, before and after | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for carry, runs in found.items():
        mean = {name: np.mean([run[name] for run in runs]) for name in runs[0]}
        gains = [run["after"] - alone["after"]
                 for run, alone in zip(runs, found[0.0], strict=True)]
        low, high = stats.ttest_1samp(gains, 0).confidence_interval()
        print(f"| {carry} | {mean['decode steps']:.1f} | {mean['seconds']:.2f} | "
              f"{mean['rollout']:.2f} | {mean['cpu']:.0f} | {mean['old']:.2f} | "
              f"{mean['tokens']:,.0f} | {mean['before']:.3f} → {mean['after']:.3f} | "
              f"{np.mean(gains):+.3f} ({low:+.3f} to {high:+.3f}) |")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--tokens", type=int, default=256, help="of a round")
    flags.add_argument("--train", action="store_true")
    options = flags.parse_args()
    if options.train:
        train_table()
        return
    print("| median | σ | limit | C | decode steps | gain | age, mean | most |")
    print("|---|---|---|---|---|---|---|---|")
    for job in JOBS:
        alone = None
        for carry in (0, 1, 2):
            tokens = job[2] if carry == 0 else options.tokens  # off: one round
            decoded, mean, most = played(job, carry, tokens, options.steps)
            alone = alone or decoded
            print(f"| {job[0]:,} | {job[1]} | {job[2]:,} | {carry} | {decoded:,.0f} | "
                  f"{alone / decoded:.2f} | {mean:.2f} | {most} |", flush=True)


if __name__ == "__main__":
    main()
