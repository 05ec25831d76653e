"""What a function of the user is handed is its own: whatever it does with it, no other call, no
other function and no metric changes. And what it runs into is said, never paid."""

import pytest

import rewards
from life import LOSS, Life
from test_rewards import item, own, parts, score, totals  # noqa: F401

SPOIL = """
import numpy, os, subprocess, sys, time
kept = []
def spoil(x):
    if isinstance(x, dict | list):
        for one in [*(x.values() if isinstance(x, dict) else x)]:
            spoil(one)
        x.clear()
    elif hasattr(x, "detach"):
        x.detach().zero_()
    elif isinstance(x, numpy.ndarray):
        x[...] = 0
    elif hasattr(x, "samples") or hasattr(x, "__dataclass_fields__") or hasattr(x, "global_step"):
        for one in vars(x).values():
            spoil(one)
    elif isinstance(x, tuple):
        for one in x:
            spoil(one)
"""
DEEDS = {  # what a function does once it knows its value
    "writes": "spoil({})",
    "keeps and writes later": "kept.append({}); spoil(kept[:-1])",
    "prints": "print('x' * 100_000, file=sys.stderr); os.write(1, b'bytes')",
    "forks": "os.fork() or os._exit(0)",
    "starts a program": "subprocess.run([sys.executable, '-c', '1'], check=True)",
    "is slow at first": "kept or time.sleep(2.5); kept.append(1)"}


# ---- rewards

@pytest.mark.parametrize("deed", DEEDS)
def test_what_a_reward_does_with_what_it_gets_is_its_own_affair(own, deed):  # noqa: F811
    """In our form and in TRL's, before another reward and before the other completions."""
    own(SPOIL + "def f(completion, answer, turns, nums, deep, **row):\n"
        "    value = len(turns) + sum(nums) + sum(deep['a'])\n    "
        + DEEDS[deed].format("[answer, turns, nums, deep, row]") + "\n    return value\n"
        "def g(completions, turns, nums, deep, trainer_state, **columns):\n"
        "    values = [len(t) + sum(n) + sum(d['a']) for t, n, d in zip(turns, nums, deep)]\n    "
        + DEEDS[deed].format("[completions, turns, nums, deep, trainer_state, columns]")
        + "\n    return values\n"
        "def h(completion, nums, deep, answer, **row): return sum(nums) + sum(deep['a'])\n")
    row = {"nums": [1, 2], "deep": {"a": [3, 4]}}
    items = [item("x", ["a", "b"], **row) for _ in range(4)]
    for size in 1, 2:
        specs = [f"own.py:{name}" for name in ("fh", "gfh")[size - 1]]
        right = (11, 10) if size == 1 else (11, 11, 10)
        assert parts(score(specs, items, size, timeout=1.0, loading=9.0)) == [right] * 4


LIBRARY = {"lib/mylib.py": "N = 1", "lib/data.py": "N = 2", "lib/errors.py": "N = 3",
           "lib/worker.py": "raise SystemExit('hidden')", "lib/answers.py": "raise OSError",
           "lib/rewards.py": "N = 4", "lib/examples/__init__.py": "raise OSError",
           "lib/numpy_like/__init__.py": "N = 5"}


def test_a_reward_finds_the_users_library_and_a_library_hides_nothing(own, tmp_path, monkeypatch):  # noqa: F811
    """PYTHONPATH was lost: the rows' function found it, the reward did not."""
    for name, code in LIBRARY.items():
        own(code, f"../{name}")  # a colon would end a folder of PYTHONPATH
    spec = own("import mylib, data, rewards, numpy_like, subprocess\n"
               "from answers import last_boxed\ndef f(completion):\n"
               "    child = subprocess.run([sys.executable, '-c', 'import mylib; '\n"
               "        'print(mylib.N)'], capture_output=True, text=True)\n"
               "    return mylib.N + data.N + rewards.N + numpy_like.N + 10 * int(child.stdout)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/lib:/nowhere")
    for specs in ([spec, "gsm8k"], ["gsm8k", spec], [spec]):
        found = parts(score(specs, [item("5", "5")]))[0]
        assert sorted(found) == sorted([22, 1][:len(specs)])


LIMITS = """
b'1' * (1 << 30)
numpy.ones(1 << 28).sum()
subprocess.run([sys.executable, '-c', "b'1' * (1 << 30); input()"], check=True)
subprocess.run(['sh', '-c', f'''{sys.executable} -c "b'1' * (1 << 30); input()" '''], check=True)
(lambda pid: os.waitpid(pid, 0))(os.fork() or (b'1' * (1 << 30), os._exit(1)))
"""


@pytest.mark.parametrize("deed", LIMITS.strip().splitlines())
def test_a_limit_that_a_reward_or_its_child_runs_into_is_no_reward(own, monkeypatch, deed):  # noqa: F811
    """Most rewards catch whatever fails, and pay 0: so nothing may fail inside."""
    monkeypatch.setattr(rewards, "MEMORY_GB", 0.5)
    spec = own("import numpy, subprocess\ndef f(completion):\n    try:\n"
               f"        {deed}\n    except Exception:\n        return 0.0\n    return 0.0")
    one, = score([spec], ["x"], timeout=20.0)
    assert one.reward is None and "memory" in one.error, one
    big = own("import subprocess\ndef f(completion):\n"
              "    return subprocess.run([sys.executable, '-c', 'import mmap; '\n"
              "        'mmap.mmap(-1, 1 << 34)']).returncode", "big.py")
    assert totals(score([big], ["x"])) == [0]  # only reserved, as Java and Go do


# ---- losses, advantages and rows: a whole run

ALL = "; ".join(code for deed, code in DEEDS.items()
                if not deed.startswith("writes") and "slow" not in deed)
DOORS = {
    "loss.py": LOSS.format(1).replace("    ratio", "    given = [logp, old, A, row, others]\n"
        "    logp, old, A = logp + 0, old + 0, A + 0\n    DEED\n    ratio"),
    "adv.py": "def own(rewards, group, **others):\n    value = 1 * (rewards - rewards.mean())\n"
              "    given = [rewards, others]\n    DEED\n    return value\n",
    "rew.py": "def mine(completion, answer, **row):\n"
              "    value = 1 * len({*completion} & {*answer})\n"
              "    given = row\n    DEED\n    return value\n"}


@pytest.fixture
def life(tmp_path) -> Life:
    return Life(tmp_path)


@pytest.mark.parametrize("deed", [DEEDS["writes"], ALL])
@pytest.mark.parametrize("door", DOORS)
def test_what_a_function_does_in_a_run_changes_no_number(life, door, deed):
    """Rewards that an advantage sets to 0 were logged as 0."""
    (life.place / door).write_text(SPOIL + DOORS[door].replace("DEED", deed.format("given")))
    assert life.go(steps=2) == 0, life.text
    life.same_as(life.alone(2))


ROWS = """
import json
def same(seed):
    row = {"deep": []}
    for line in open("rows.jsonl"):
        row |= json.loads(line)
        row["deep"].append(row["question"])
        yield row
    row.clear()
"""


def test_rows_may_be_one_dict_that_is_filled_again(life):
    (life.place / "rows.py").write_text(ROWS)
    assert life.go("--data", "rows.py:same", steps=2) == 0, life.text
    life.same_as(life.alone(2))
