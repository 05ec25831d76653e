"""What an `async def` reward is handed is its own: no other completion, reward or try sees what it
does with it."""
from contextlib import closing

import pytest

import fakes
from parts.judges.pool import JudgePool
from test_doors import DEEDS, SPOIL
from worker import ITEM

VALUE = "len(turns) + sum(nums) + sum(deep['a'])"
FORMS = {
    "f": "async def f(completion, answer, turns, nums, deep, **row):\n"
         f"    value = {VALUE}\n    given = [answer, turns, nums, deep, row]\n    DEED\n"
         "    await asyncio.sleep(0.01)\n    FAIL\n    return value\n",
    "g": "async def g(completions, turns, nums, deep, trainer_state, **columns):\n"
         f"    values = [{VALUE} for turns, nums, deep in zip(turns, nums, deep)]\n"
         "    given = [completions, turns, nums, deep, trainer_state, columns]\n    DEED\n"
         "    await asyncio.sleep(0.01)\n    FAIL\n    return values\n",
    "h": "def h(completion, nums, deep, answer, **row): return sum(nums) + sum(deep['a'])\n"}
ONCE = "tried.append(1)\n    if len(tried) <= 2: raise ConnectionError('busy')"


@pytest.mark.parametrize("fail", ["", ONCE], ids=["", "and fails at first"])
@pytest.mark.parametrize("deed", DEEDS)
def test_what_an_async_reward_does_with_what_it_gets_is_its_own_affair(
        tmp_path, monkeypatch, deed, fail):
    """In both forms, beside another reward, for many completions at once, and in a second try."""
    monkeypatch.chdir(tmp_path)
    code = "".join(FORMS.values()).replace("DEED", DEEDS[deed].format("given"))
    (tmp_path / "own.py").write_text(f"import asyncio\ntried = []\n{SPOIL}"
                                     + code.replace("FAIL", fail or "pass"))
    row = {"nums": [1, 2], "deep": {"a": [3, 4]}}
    items = [ITEM | dict(completion="x", answer=["a", "b"], tokens=1, columns=row,
                         turns=[{"role": "assistant", "content": "x"}]) for _ in range(4)]
    for size, names, right in (1, "fh", (11, 10)), (2, "gfh", (11, 11, 10)):
        args = fakes.args(reward_workers=1, reward_timeout=20.0, reward_retries=2)
        with closing(JudgePool([f"own.py:{name}" for name in names], args)) as pool:
            pool.wait()
            found = pool.ask(items, size)
        assert [tuple(values.values())[:-1] for values in found] == [right] * 4, found[0]
