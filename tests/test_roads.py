"""results/roads.py: the page of the roads is what the runs say."""
import json

import numpy as np

from bench import teacher_tokens
from results import roads
from tools.compare import paired_t


def rows(final: float, tokens: int) -> list[dict]:
    """metrics.jsonl of 4 steps, with an evaluation before, in the middle and at the end."""
    found = []
    for step in range(5):
        if step:
            found.append({"step": step, "rollout/tokens": tokens, "time/step": 2.0})
        if step % 2 == 0:
            score = final * step / 4
            found.append({"step": step, "eval/rows": 100, "eval/pass@1": score,
                          "eval/pass@1_low": score - 0.1, "eval/pass@1_high": score + 0.1})
    return found


def kept() -> dict:
    finals = {"grpo": (0.0, 0.01), "sft": (0.5, 0.6), "sft-grpo": (0.8, 0.9), "distill": (0.7, 0.9)}
    return {"machine": "2 cores", "roads": {
        road: {str(seed): roads.measured(rows(final, 0 if road == "sft" else 100))
               for seed, final in enumerate(each)} for road, each in finals.items()}}


def test_an_evaluation_counts_what_was_spent_before_it():
    found = roads.measured(rows(0.5, 100))
    assert [(p["step"], p["tokens"], p["seconds"], p["pass"]) for p in found["points"]] == [
        (0, 0, 0.0, 0.0), (2, 200, 4.0, 0.25), (4, 400, 8.0, 0.5)]
    assert (found["tokens"], found["seconds"]) == (400, 8.0)


def test_a_road_is_compared_with_the_control_and_counts_the_roads_before_it():
    text = roads.page(kept())
    low, high = paired_t([0.7 - 0.0, 0.9 - 0.01])
    line = next(line for line in text.splitlines() if line.startswith("| distill | 2"))
    assert f"| {np.mean([0.7, 0.89]):+.3f} ({low:+.3f} to {high:+.3f}) |" in line
    assert line.endswith("| 0.60 to 0.80, 0.80 to 1.00 | 400 | 800 | 8 | 24 |")
    assert "| sft-grpo | 2 | 200 | 4 | 0.425 (0.400 to 0.450) |" in text
    assert roads.BEFORE.keys() == roads.ROADS.keys() and "2 cores" in text


def test_the_pages_are_what_the_committed_numbers_say():
    for module in (roads, teacher_tokens):
        assert module.FILE.exists() == module.PAGE.exists()
        if module.FILE.exists():
            assert module.PAGE.read_text() == module.page(json.loads(module.FILE.read_text()))


def test_tokens_until_an_accuracy():
    points = [{"tokens": tokens, "pass": score} for tokens, score in (
        (0, 0.1), (100, 0.7), (200, 0.97), (300, 0.99))]
    assert teacher_tokens.until(points, 0.97) == 200 and teacher_tokens.until(points, 1.0) is None
    student = [{"tokens": 10 * n, "pass": score} for n, score in enumerate((0.1, 0.5, 0.98))]
    seeds = {str(seed): {"grpo": points, "sampled": student, "exact": points}
             for seed in range(2)}
    text = teacher_tokens.page({"machine": "2 cores", "seeds": seeds})
    assert "| 0 | sampled | 0.990 | 200 | 20 | 0.100 |" in text
    assert "| 1 | exact | 0.990 | 200 | 200 | 1.000 |" in text
    assert "sampled: 2 of 2" in text and "exact: 0 of 2" in text
