"""Completions scored per second by two workers, on the real rows' own solutions: python bench/scoring.py [FOLDER WITH THE DATA]"""
import glob
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rewards import Item, Scorer

WORKERS = 2


def jsonl(path):
    return [json.loads(line) for line in open(path)]


def main(data: Path) -> None:
    import pyarrow.parquet
    gsm8k = [Item(r["question"], r["answer"], r["answer"], r, 0, False) for r in jsonl(data / "gsm8k/train.jsonl")]
    math = [Item(r["problem"], r["solution"], r["answer"], r, 0, False) for r in jsonl(data / "math500/test.jsonl")]
    kk = [Item(r["prompt"][0]["content"], f"x</think><answer>{r['solution_text_format']}</answer>", r["reward_model"]["ground_truth"], r, 0, False)
          for path in sorted(glob.glob(str(data / "kk/*.parquet"))) for r in pyarrow.parquet.read_table(path).to_pylist()]
    print(f"{'reward':8} {'rows':>6} {'mean':>6} {'lost':>5} {'seconds':>8} {'per second':>11}   ({WORKERS} workers, best of 3)")
    for name, items in {"gsm8k": gsm8k, "math": math, "kk": kk}.items():
        scorer = Scorer([name], workers=WORKERS, timeout=30)
        scorer.score(items[:WORKERS])
        seconds = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            scores = scorer.score(items)
            seconds = min(seconds, time.perf_counter() - start)
        mean = sum(s.total or 0 for s in scores) / len(scores)
        print(f"{name:8} {len(items):6} {mean:6.2f} {scorer.failures.total():5} {seconds:8.2f} {len(items) / seconds:11,.0f}")
        scorer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent.parent / "shared" / "data")
