"""The page of a real run, as test_script.py makes one, of two turns."""
import numpy as np
import pytest

import test_script
from test_report import unpacked
from test_script import read

place = test_script.place


REPLY = """
def again(answer, turns, **row):
    return "again"
"""


@pytest.fixture(scope="module")
def run(place) -> dict:
    """Of two turns: what a reply puts in was not sampled."""
    pytest.importorskip("parts.turns.turns", reason="it has the turns")
    flags = "--max_turns 2 --reply mine.py:again".split()
    return test_script.made(place, test_script.MINE + REPLY, *flags)


def test_the_numbers_of_the_tokens_are_in_the_page(run):
    """Those of samples/, of each sampled token; their number is that of metrics.jsonl."""
    metrics = {row["step"]: row for row in run["rows"] if "eval/rows" not in row}
    head, blocks = unpacked(run["folder"] / "report.html")
    assert head["runs"][0]["done"] and head["runs"][0]["curves"]["step"] == [*range(14)]
    pairs = [(info, block) for info, block in zip(head["blocks"], blocks, strict=True)
             if info["kind"] == "step"]
    assert [(info["step"], info["lacks"]) for info, _ in pairs] == [(n, "") for n in metrics]
    for info, block in pairs:
        samples = read(run["folder"] / f"samples/step_{info['step']:05d}.jsonl")
        found = {name: np.concatenate([s[name] for s in samples]) for name in (
            "sampled", "engine_logprobs", "advantages")}
        bears = np.concatenate([[s["advantage"] is not None] * len(s["sampled"]) for s in samples])
        assert block["tokens"]["bears"] == (bears & found["sampled"].astype(bool)).tolist()
        assert found["sampled"].sum() == metrics[info["step"]]["rollout/tokens"] < len(bears)
        for name, theirs in ("logprob", "engine_logprobs"), ("advantage", "advantages"):
            page, right = block["tokens"]["numbers"][name], found[theirs]
            assert not right[found["sampled"] == 0].any() and right.any()
            assert np.abs(np.array(page["values"]) * page["unit"] - right).max() <= page["unit"]
        for sample in samples:  # dr_grpo: a completion's tokens share an advantage
            of_sampled = {a for a, mine in zip(sample["advantages"], sample["sampled"],
                                               strict=True) if mine}
            assert len(of_sampled) == 1
