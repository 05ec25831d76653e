"""Four orders of the data, five seeds each, on rows whose difficulty spreads: sort 3 to 9 digits.

    python results/curricula.py            20 runs, half an hour of two cores; writes curricula.md
    python results/curricula.py --page     the page again, from the runs that are there

The tiny model has seen six digits only. There are few rows, so the run learns their pass rates:
200, drawn six times. A finished run is not run again.
"""
import argparse
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from files import finished_steps, is_evaluation, read  # noqa: E402

SEEDS, STEPS, DIGITS = range(5), 40, range(3, 10)
ORDERS = {"as it is": None, **{name: f"parts/order/{name}.py:{name}" for name in (
    "unsolved", "learnability", "easy_first")}}
FLAGS = (f"--model tiny --data results/curricula.py:rows --eval_data results/curricula.py:held_out "
         f"--batch 32 --group 8 --steps {STEPS} --max_tokens 16 --max_prompt_tokens 64 "
         "--warmup_steps 10 --eval_every 10 --save_every 0 --samples_every 1000 --no-report "
         "--no-export").split()


def rows(seed: int, n: int = 200, first: str = "train") -> list[dict]:
    """Rows to sort, with their number of digits as the difficulty. Each seed has others."""
    rng, found = random.Random(f"{first} {seed}"), []
    for i in range(n):
        digits = rng.sample("0123456789", k=DIGITS[i % len(DIGITS)])
        found.append({"question": "Sort " + "".join(digits), "answer": "".join(sorted(digits)),
                      "difficulty": len(digits)})
    return found


def held_out(seed: int) -> list[dict]:
    """Rows to evaluate on: 700, the same for all runs."""
    return rows(0, 700, "held out")


def name_of(order: str, seed: int) -> str:
    return f"curricula-{order.replace(' ', '-')}-{seed}"


def run(order: str, seed: int) -> None:
    """One run, on one rank."""
    folder = ROOT / "runs" / name_of(order, seed)
    if finished_steps(folder) >= STEPS:
        return
    given = ["--order", ORDERS[order]] if ORDERS[order] else []
    subprocess.run([sys.executable, "grpo.py", *FLAGS, *given, "--seed", str(seed), "--name",
                    folder.name], cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})


def numbers(order: str) -> np.ndarray:
    """Held-out pass@1 after half of the steps and after all, and the sampled tokens: (seeds, 3)."""
    found = []
    for seed in SEEDS:
        metrics = read(ROOT / "runs" / name_of(order, seed) / "metrics.jsonl")
        passed = {row["step"]: row["eval/pass@1"] for row in metrics if is_evaluation(row)}
        tokens = sum(row.get("rollout/tokens", 0) for row in metrics)
        found.append((passed[STEPS // 2], passed[STEPS], tokens))
    return np.array(found)


def interval(values: np.ndarray) -> str:
    """The mean and its 95 % interval over seeds, by Student's t."""
    error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{values.mean():+.3f} ({values.mean() - error:+.3f} to {values.mean() + error:+.3f})"


def page() -> str:
    """The page."""
    plain, lines = numbers("as it is"), []
    for order in ORDERS:
        found = numbers(order)
        half, last, tokens = found.mean(0)
        less = "" if order == "as it is" else interval((found - plain)[:, 1])
        at_half = "" if order == "as it is" else interval((found - plain)[:, 0])
        lines.append(f"| {order} | {half:.3f} | {at_half} | {last:.3f} | {less} | {tokens:,.0f} |")
    table = "\n".join(lines)
    return f"""# Four orders of the data

`python results/curricula.py` <!-- walk: long: 20 runs --> sorts 3 to 9 digits with the tiny model,
which has seen six only: 200 rows, {STEPS} steps, seeds 0 to 4. Held-out pass@1 on 700 rows; the
differences to the order as it is are paired by seed, with 95 % intervals by Student's t.

| order | after {STEPS // 2} steps | difference | after {STEPS} | difference | tokens |
|---|---|---|---|---|---|
{table}

An interval that contains 0 shows no gain. With six intervals, at least one misses 0 by chance in
about a quarter of such tables (1 − 0.95⁶).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    if not parser.parse_args().page:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, [one for one in ORDERS for _ in SEEDS], [*SEEDS] * len(ORDERS)))
    (ROOT / "results/curricula.md").write_text(page())


if __name__ == "__main__":
    main()
