"""How many of 100 changes that do nothing does a rule keep? A simulation, in seconds.

    python results/keep_rule.py

A change's number on a seed is 1 + a normal deviate times SPREAD, whatever the change, and smaller
is better. A rule compares each change with the best one kept so far. It keeps by one seed, by the
mean of five, by a 95 % interval of the difference over five seeds (Welch's t), or by that and once
more on five fresh seeds of both.
"""
import argparse

import numpy as np
from scipy import stats

CHANGES, SEEDS, SPREAD, TIMES = 100, 5, 0.072, 2000  # TIMES: of the simulation


def better(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the 95 % interval of b - a is below 0."""
    return stats.ttest_ind(b, a, equal_var=False).confidence_interval().high < 0


def kept(rng, rule: str) -> tuple[int, float]:
    """The changes that a rule keeps of CHANGES, and by how much the last one seems better."""
    def measured(n: int) -> np.ndarray:
        """Returns n seeds' numbers."""
        return 1 + SPREAD * rng.standard_normal(n)

    first = best = measured(1 if rule == "one seed" else SEEDS)
    count = 0
    for _ in range(CHANGES):
        new = measured(len(best))
        keep = new.mean() < best.mean()
        if rule in ("95 %", "95 %, again"):
            keep = keep and better(best, new)
        if rule == "95 %, again" and keep:
            keep = better(measured(SEEDS), measured(SEEDS))
        if keep:
            best, count = new, count + 1
    return count, 1 - best.mean() / first.mean()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.replace("%", "%%"),
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    for rule, times in ("one seed", TIMES), ("five seeds", TIMES), ("95 %", 400), (
            "95 %, again", 400):
        found = np.array([kept(rng, rule) for _ in range(times)])
        count, gain = found.mean(0)
        error = found[:, 0].std() / times ** 0.5
        print(f"{rule:<12} keeps {count:.2f} (± {2 * error:.2f}) of {CHANGES}, "
              f"which seem {100 * gain:.0f} % better")


if __name__ == "__main__":
    main()
