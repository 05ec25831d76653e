"""Completions that two workers score per second, on the real rows' own solutions.

    python bench/scoring.py FOLDER

FOLDER has gsm8k/train.jsonl (openai/gsm8k), math500/test.jsonl (HuggingFaceH4/MATH-500) and
kk/*.parquet (the rows of Logic-RL).
"""
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewards import Item, RewardArgs, Scorer

WORKERS = 2


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def knights(folder: Path) -> list[Item]:
    """Knights and knaves: the solution as a model would write it."""
    import pyarrow.parquet
    items = []
    for path in sorted(folder.glob("*.parquet")):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            text = f"x</think><answer>{row['solution_text_format']}</answer>"
            truth = row["reward_model"]["ground_truth"]
            items.append(Item(row["prompt"][0]["content"], text, truth, row, 0, False))
    return items


def main(data: Path) -> None:
    gsm8k = [Item(r["question"], r["answer"], r["answer"], r, 0, False)
             for r in jsonl(data / "gsm8k/train.jsonl")]
    math = [Item(r["problem"], r["solution"], r["answer"], r, 0, False)
            for r in jsonl(data / "math500/test.jsonl")]
    print(f"{'reward':8} {'rows':>6} {'mean':>6} {'lost':>5} {'seconds':>8} {'per second':>11}"
          f"   ({WORKERS} workers, best of 3)")
    for name, items in {"gsm8k": gsm8k, "math": math, "kk": knights(data / "kk")}.items():
        scorer = Scorer([name], RewardArgs(reward_workers=WORKERS, reward_timeout=30))
        scorer.score(items[:WORKERS])                  # both workers have started
        seconds = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            scores = scorer.score(items)
            seconds = min(seconds, time.perf_counter() - start)
        mean = sum(s.total or 0 for s in scores) / len(scores)
        lost = sum(s.total is None for s in scores)
        print(f"{name:8} {len(items):6} {mean:6.2f} {lost:5} {seconds:8.2f} "
              f"{len(items) / seconds:11,.0f}")
        scorer.close()


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(f"error: name the folder of the rows.\n{__doc__}")
    main(Path(sys.argv[1]))
