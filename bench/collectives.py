"""What the collectives of the host cost as ranks grow: gloo processes on this machine.

    python bench/collectives.py            1, 2, 4, 8 and 16 ranks: a minute or two

`gather` sends the same completions in total, whatever the number of ranks: ids and log-probs. The
machine has fewer cores than there are ranks, so they wait for a core too: an upper limit.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import results  # noqa: E402

REPEATS = 5


def costs(world, completions: int, tokens: int) -> dict[str, float]:
    """Median seconds of each collective on this rank."""
    import torch

    from trainer.batch import Completion
    mine = [Completion(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), False)
            for _ in world.mine(range(completions))]
    scores = torch.zeros(completions, tokens)

    def gather() -> None:
        assert len(world.gather(mine)) == completions

    def any_rank() -> None:
        world.any_rank(False)

    def same_phase() -> None:
        world.same_phase("bench", 1)

    def add() -> None:
        world.sum(scores)

    found = {}
    for function in (any_rank, same_phase, gather, add):
        seconds = []
        for _ in range(2 + REPEATS):
            world.barrier()
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
        found[function.__name__] = statistics.median(seconds[2:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    a = parser.parse_args()
    print("| ranks | agree | same_phase | gather | sum of (M,) |\n|---|---|---|---|---|")
    for ranks in a.ranks:
        found = results(ranks, costs, a.completions, a.tokens)
        most = {name: 1000 * max(one[name] for one in found) for name in found[0]}
        print(f"| {ranks} | {' | '.join(f'{x:.1f} ms' for x in most.values())} |", flush=True)


if __name__ == "__main__":
    main()
