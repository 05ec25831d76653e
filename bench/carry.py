"""The engine's decode steps of a trained step, with and without --carry: lengths that are drawn.

    python bench/carry.py               all rows of the table in bench/RESULTS.md: 4 minutes
    python bench/carry.py --steps 20    quicker, and less exact

It plays the shipped chats/carry.py with an engine that samples nothing. In a decode step each
completion of an engine grows by one token, so a round takes as many as its longest one grows.
"""
import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from chats.carry import Carry, CarryArgs  # noqa: E402
from trainer.batch import Completion  # noqa: E402

JOBS = [(1500, 0.8, 8192), (1500, 1.0, 16384), (4000, 1.0, 32768)]  # median, sigma, --max_tokens


class Engine:
    """Draws the length of each completion. Its token ids are this length, so that a completion
    which goes on is known by them."""

    def __init__(self, median: int, sigma: float, limit: int):
        self.median, self.sigma, self.limit = median, sigma, limit
        self.log = SimpleNamespace(phase=lambda name: nullcontext())
        self.world = SimpleNamespace(same_phase=lambda name, count: None, step=0)

    def complete(self, requests, temperature) -> list[Completion]:
        return [self.grown(request) for request in requests]

    def grown(self, request) -> Completion:
        begun = len(request.prompt_ids) - 1
        if begun:
            length = request.prompt_ids[1]
        else:
            rng = np.random.default_rng(request.seed)
            length = max(1, int(rng.lognormal(np.log(self.median), self.sigma)))
        n = min(request.room, length - begun, self.limit - begun)
        return Completion(np.full(n, length, np.int32), np.zeros(n, np.float32),
                          truncated=begun + n < length)


class Prompts:
    def __init__(self):
        self.position = 0

    def next(self, n: int) -> list:
        first, self.position = self.position, self.position + n
        return [SimpleNamespace(position=first + k, row=SimpleNamespace(prompt_ids=[0]))
                for k in range(n)]


def played(job, carry: float, tokens: int, steps: int, seed: int = 0):
    """64 prompts x 8 → mean decode steps of a trained step; mean and greatest age of completions.
    The first tenth of the steps does not count: in it the flight fills."""
    args = SimpleNamespace(batch=64, group=8, seed=seed, temperature=1.0, max_tokens=job[2],
                           carry_args=CarryArgs(carry, tokens))
    it, found = Carry(args, Prompts(), Engine(*job)), []
    for step in range(steps):
        it.engine.world.step = step
        found.append(it.metrics(it.sample()))
    found = found[steps // 10:]
    return (np.mean([row["rollout/decode_steps"] for row in found]),
            np.mean([row["carry/age_mean"] for row in found]),
            max(row["carry/age_max"] for row in found))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--tokens", type=int, default=512, help="of a round")
    options = flags.parse_args()
    print("| median | σ | limit | C | decode steps | gain | age, mean | most |")
    print("|---|---|---|---|---|---|---|---|")
    for job in JOBS:
        alone = None
        for carry in (0.0, 0.5, 1.0):
            tokens = job[2] if carry == 0 else options.tokens  # off: one round
            decoded, mean, most = played(job, carry, tokens, options.steps)
            alone = alone or decoded
            print(f"| {job[0]:,} | {job[1]} | {job[2]:,} | {carry} | {decoded:,.0f} | "
                  f"{alone / decoded:.2f} | {mean:.2f} | {most} |", flush=True)


if __name__ == "__main__":
    main()
