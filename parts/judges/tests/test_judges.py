"""Rewards that wait: many at once in a worker, each tried again where it fails."""
import asyncio
from contextlib import closing

import pytest

import fakes
import plan
import rewards
import worker
from parts.judges import plug, waiting
from parts.judges.pool import JudgePool
from worker import Item


def item(completion: str, **row) -> Item:
    return Item("", completion, "", row, 1, False)


def score(specs, items, group=1, workers=1, timeout=60.0):
    """The scores of one batch. items: or texts."""
    items = [item(x) if isinstance(x, str) else x for x in items]
    args = fakes.args(reward_workers=workers, reward_timeout=timeout, reward_retries=0)
    with closing(JudgePool(specs, args)) as pool:
        pool.wait()
        pool.loading = 1.0
        return rewards.scores_of(pool, items, group if pool.groups else 1)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of rewards → its name."""
    monkeypatch.chdir(tmp_path)

    def write(code):
        (tmp_path / "own.py").write_text(f"import asyncio, os, time\n{code}")
        return "own.py"
    return write


def test_coroutines_and_others_are_added_up_and_one_loop_stays_open(own):
    """A group of TRL's form is one call, with the time of all; it fails as a whole."""
    own("async def trl(completions, level, **columns):\n    assert level == [2, 2]\n"
        "    if 'bad' in completions: return [1.0]\n    await asyncio.sleep(1.2)\n"
        "    return [len(text) for text in completions]\ndef g(completion): return 3\nclient = []\n"
        "async def alone(completion):   # a client that lives longer than one call\n"
        "    client.append(asyncio.get_running_loop())\n"
        "    return client[0] is client[-1] and not client[0].is_closed()")
    specs, args = [f"own.py:{name}" for name in ("trl", "g", "alone")], fakes.args()
    found = rewards.check(specs, args)
    assert [["trl", "level", True]] == [it for it in found.needs if it[1] != "answer"]
    assert found.waits == ["trl", "alone"]
    assert plug.pool(None, args, found.waits) is JudgePool and plug.pool(None, args, []) is None
    items = [item(text, level=2) for text in ("a", "b", "bb", "b", "bad", "c")]
    found = [tuple(s.parts.values()) for s in score(specs, items, 2, timeout=1.0)]
    assert found == [(1, 3, 1, 0), (1, 3, 1, 0), (2, 3, 1, 0), (1, 3, 1, 0), (None, 3, 1, 0),
                     (None, 3, 1, 0)]  # the last: retries


def test_the_coroutines_of_a_worker_run_together(own):
    """Each waits until as many run at once as may, or as are left: fewer would wait for ever."""
    own("open = most = 0\nasync def f(completion):\n    global open, most\n    open += 1\n"
        "    most = max(most, open)\n    while most < int(completion): await asyncio.sleep(0)\n"
        "    for _ in range(3): await asyncio.sleep(0)\n    open -= 1\n    return most")
    texts = [str(min(64, 70 - i // 64 * 64)) for i in range(70)]
    scores = score(["own.py:f"], texts)
    assert all(int(text) <= s.total <= 64 for text, s in zip(texts, scores, strict=True))


BAD = {"time.sleep(1e9)": "no answer within", "os._exit(3)": "the worker ended with code 3",
       "raise KeyError('gone')": "KeyError: 'gone'", "return float('nan')": "finite number",
       "await refuse()": "no answer within"}


def test_a_coroutine_that_hangs_or_dies_costs_its_completion_only(own):
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in BAD)
    own("async def refuse():  # to be cancelled\n    while True:\n        try:\n"
        "            await asyncio.sleep(1e9)\n        except asyncio.CancelledError:\n"
        "            pass\nasync def f(completion):\n    await asyncio.sleep(0)\n" + faults
        + "    return float(completion)")
    texts = [text for i, code in enumerate(BAD) for text in (str(i), code)] + ["99"]
    scores = score(["own.py:f", "short"], texts, workers=2, timeout=2.0)
    assert [s.total for s in scores[::2]] == [i - 0.001 for i in [*range(len(BAD)), 99]]
    for code, s in zip(BAD, scores[1::2], strict=True):
        assert s.total is None and BAD[code] in s.error, (code, s)


def test_what_raises_or_is_late_is_tried_again_after_pauses_that_double(monkeypatch):
    pauses, tries = [], []

    async def sleep(seconds):
        pauses.append(seconds)

    async def f(completion):
        tries.append(completion)
        if len(tries) == 2:
            await asyncio.get_running_loop().create_future()  # it never comes
        if len(tries) <= int(completion):
            raise ConnectionError("the server is away")
        return len(tries)

    monkeypatch.setattr(waiting.asyncio, "sleep", sleep)
    loaded = waiting.Loaded([worker.Reward(f, ["completion"], False)], 0.2, 3)
    for needed, value, waited in ("0", 1, []), ("3", 4, [1, 2, 4]), ("9", None, [1, 2, 4]):
        pauses.clear(), tries.clear()
        ((values, error, retries),), = waiting.score(loaded, [[item(needed)]])
        assert (values, pauses, retries) == ([value], waited, len(waited))
        assert bool(error) == (value is None)
    assert "the server is away" in error
    assert "--reward_retries must be" in "".join(plan.problems(fakes.args(reward_retries=11), 1))
