"""Rewards: settings, signatures, hostile rewards and completions, a batch on some ranks."""
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, nullcontext, suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import data
import fakes
import flags
import ranks
import rewards
import texts
from batch import Completion, Sample
from errors import SettingsError
from examples import tiny
from rewards import Item, Pool, Score, scores_of
from verifiers import answers_of
from worker import Part, Reward

ROOT = Path(__file__).resolve().parent.parent
KK = "(1) Zoey is a knight\n(2) Ben is a knave"
F = "def f(completion, answer):\n    "


def item(completion, answer="", prompt="", tokens=1, truncated=False, **row):
    return Item(prompt, completion, answer, row, tokens, truncated)


def score(specs, items, group=1, workers=2, timeout=10.0, make=Pool):
    """The scores of one batch in a fresh pool. items: or texts."""
    items = [item(x) if isinstance(x, str) else x for x in items]
    args = fakes.args(reward_workers=workers, reward_timeout=timeout)
    with closing(make(specs, args)) as pool:
        pool.wait()
        pool.progress["global_step"] = 7
        return scores_of(pool, items, group if pool.groups else 1)


def totals(scores):
    return [s.total for s in scores]


def parts(scores):
    return [tuple(s.parts.values()) for s in scores]


def lost(scores):
    """How many completions were lost to what."""
    kinds = {"no answer within": "timeout", "the worker ": "death", "--reward cannot load": "death"}
    return Counter(next((kind for text, kind in kinds.items() if s.error.startswith(text)),
                        "exception") for s in scores if s.error)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(code, name="own.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("import asyncio, os, sys, time\n" + code)
        return name + ":f"
    return write


# ---- settings

FILES = {"own.py": F + "return 1\ndef batch(sources): return 1\n"
                   "def compute_score(data_source, solution_str, ground_truth): return 1\n",
         "exit.py": "os._exit(7)", "says.py": "sys.exit('set KEY first')",
         **dict.fromkeys(["math.py", "v1.2.py", "a/one.py"], F + "return 1"),
         "a/same.py": "", "b/same.py": "", "b/two.py": "def g(completion): return 1"}


@pytest.mark.parametrize("specs, sentence", [
    (["maths", "nope:2", "math", "math:2", "own.py:std", "gone.py:f"],
     "(?s)maths: no such reward.*nope.*reward/math is another.*reward/std is.*no such file"),
    ([], "empty"), (["own.py:missing"], "own.py has no missing"),
    (["own.py:batch"], r"it has \['sources'"), (["exit.py:f"], "ended with code 7"),
    (["own.py:compute_score"], "For a function of verl or EasyR1 see examples/adapters.py"),
    (["says.py:f"], r"GB\): set KEY first$"),
    (["math.py:f"], "by its name: `import math` finds .*another name for the file"),
    (["v1.2.py:f"], "`import v1.2` finds nothing")])
def test_mistakes_are_found_before_anything_starts(own, specs, sentence):
    for name, code in FILES.items():
        own(code, name)
    with pytest.raises(SettingsError, match=sentence):
        rewards.check(specs, fakes.args())


def test_the_words_of_a_reward(own):
    own(F + "return 1")
    for number in "1. .5 1e-1 -0.5 +2 1E3 0 1_0 5.e+0".split():
        for spec in f"exact:{number}", f"own.py:f:{number}":
            assert rewards.parse([spec])[0].weight == float(number)
    assert rewards.parse(["own.py:f", "examples/coin.py:coin"]) == [  # here or there
        Part("f", 1, "own.py"), Part("coin", 1, f"{rewards.ROOT}/examples/coin.py")]
    for number in "x 1,5 inf nan 1e999 - 1:2".split():
        with pytest.raises(SettingsError, match="finite number") as error:
            rewards.parse([f"exact:{number}"])
        assert "no such reward" not in str(error.value)


def test_a_worker_loads_no_torch_nor_what_its_reward_does_not_need(own):
    """In another folder than the project's."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker\n"
            f"from worker import Part\nfor name in 'kk', 'math':\n"
            f"    worker.load([Part(name, 1, None)])\n"
            f"    print({{'torch', 'transformers', 'sympy', 'numpy'}} & set(sys.modules))")
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")
    assert found[0] == "set()" and "tor" not in found[1] and "transf" not in found[1]


# ---- the answers of rows

# All that JSON and Arrow have.
READ = ["12", "-7/2", 12, -3, 10**30, 12.5, 1e22, Decimal("12.50"), ["13", "12"], ["1,234"],
        [3, 4, 5], [0.1, -2.5], [Decimal("1.5")]]
REFUSED = ["", " ", None, True, [True], [], [None], ["1", ""], [["1"]], {"text": ["1"]},
           [{"text": "1"}], b"12", [b"12"], date(2026, 1, 2), datetime(2026, 1, 2), timedelta(3),
           float("inf"), [float("nan")]]


def rows_with(answer, folder):
    """Read from each kind of file that has a place for this answer."""
    made = []
    with suppress(OverflowError):
        table = pa.table({"prompt": ["q"], "answer": [answer]})
        parquet.write_table(table, folder / "rows.parquet")
        made.append("rows.parquet")
    with suppress(TypeError):
        (folder / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": answer}))
        made.append("rows.jsonl")
    assert made
    return [data.load(f"{folder}/{name}", tiny.make_tokenizer(), data.DataArgs())[0][0]
            for name in made]


def test_saying_the_answer_gets_1_or_the_row_is_refused(tmp_path):
    items, names = [], ["exact", "gsm8k", "math"]
    needs, _ = rewards.check([*names, "kk01"], fakes.args())
    for answer in READ:
        for row in rows_with(answer, tmp_path):
            rewards.check_rows(needs, [row])
            items += [item(str(said), row.answer) for said in answers_of(row.answer)]
            items.append(item("no 99 of them", row.answer))
    for answer in REFUSED:
        for row in rows_with(answer, tmp_path):
            with pytest.raises(SettingsError, match="exact needs 'answer': row 1 of") as error:
                rewards.check_rows(needs, [row])
            assert repr(str(row.answer)) in str(error.value)
    expected = [(0, 0, 0) if one.completion[:2] == "no" else (1, 1, 1) for one in items]
    assert parts(score(names, items, timeout=60.0)) == expected
    said = f"<think></think><answer>{KK}</answer>"
    scores = score(["kk", "countdown"], [
        item(said, ["x is a knave", KK], nums=[1], target=9),
        item("4 * 3", KK, nums=[3, 4], target=[7, "12"])])
    assert parts(scores) == [(3, 0), (-3, 1)]


def test_rows_without_a_column_that_a_reward_needs_are_refused(own):
    own("def f(completions, hint): pass\ndef h(completion, answer): pass")
    rows = [data.Row(4, "q", [1], {"any": "thing"}, {}, "rows")]
    rewards.check_rows(rewards.check(["own.py:h"], fakes.args())[0], rows)
    with pytest.raises(SettingsError, match="f needs 'hint': row 5 of rows has none"):
        rewards.check_rows(rewards.check(["own.py:f"], fakes.args())[0], rows)


# ---- signatures

SIGNATURES = """
import numpy
def ours(completion, answer, **row):
    return len(completion) + 10 * row["level"] + 100 * row["tokens"]
def few(turns, level): return level + len(turns)
def plain_trl(prompts, completions, answer, **columns):
    return numpy.array([float(c[-1]["content"] == a) for c, a in zip(completions, answer)])
def trl(completions, prompts, level, **columns):
    assert prompts == [[{"role": "user", "content": "q"}]] * 2 and level == [2, 2]
    assert columns.keys() >= {"answer", "completion_ids", "tokens", "truncated"}
    columns["log_extra"]("text", completions), columns["log_metric"]("mean", 1.0)
    assert columns["trainer_state"].global_step == 7
    return [len(turns[0]["content"]) for turns in completions]
def score_of_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "here" and extra_info["i"] == 1
    return {"score": float(solution_str == ground_truth), "acc": 1}
def check(one):
    assert one.keys() == {"response", "response_length", "ground_truth"}
    return {"overall": float(one["response"] == one["ground_truth"]) + one["response_length"]}
def score_of_easyr1(reward_inputs: list, format_weight=0.1):
    return [check(one) for one in reward_inputs]
from examples import adapters
verl, easyr1 = adapters.verl(score_of_verl), adapters.easyr1(score_of_easyr1)
easyr1_alone = adapters.easyr1_alone(check)
"""


def test_rewards_of_ours_and_of_others(own):
    own(SIGNATURES)
    row = dict(level=2, data_source="here", extra_info={"i": 1},
               prompt=[{"role": "user", "content": "q"}])
    items = [Item("<q>", text, "b", row, 1, False) for text in ("a", "b", "bb", "b")]
    episode = [{"role": "assistant", "content": "bb"}, *row["prompt"], row["prompt"][0]]
    items[2] = items[2]._replace(turns=episode)  # of a --reply
    names = ["ours", "few", "plain_trl", "trl", "verl", "easyr1", "easyr1_alone"]
    specs = [f"own.py:{name}" for name in names]
    assert rewards.check(specs, fakes.args()) == ([["few", "level"], ["trl", "level"]], [])
    assert parts(score(specs, items, 2, workers=1)) == [
        (121, 3, 0, 1, 0, 1, 1), (121, 3, 1, 1, 1, 2, 2), (122, 5, 0, 2, 0, 1, 1),
        (121, 3, 1, 1, 1, 2, 2)]


def test_a_score_is_a_weighted_sum_of_what_applies(own):
    """None of ours leaves the completion without a score; TRL's is "not applicable", as in its
    nansum over weights. Two tasks, each None on the other's rows."""
    own("def one(completions, task, **_): return [1.0 if t == 'one' else None for t in task]\n"
        "def two(completions, task, **_): return [2.0 if t == 'two' else None for t in task]\n"
        "def ours(completion, task): return None if task == 'none' else 0")
    items = [item("3", task=task) for task in ("one", "two", "three", "none")]
    found = score(["own.py:one:0.5", "own.py:two:10", "own.py:ours"], items, group=2)
    assert totals(found) == [0.5, 20.0, 0.0, None] and found[3].error == "ours returned None"
    assert parts(found) == [(1, None, 0), (None, 2, 0), (None, None, 0), (None, None, None)]
    assert score(["own.py:one", "own.py:two"], items, 2)[2].error.startswith("every")
    yes = item(" yes\n", "yes", tokens=2000)
    assert score(["exact:2", "short:0.1", "format"], [yes]) == [
        Score(2 - 0.2, {"exact": 1.0, "short": -2.0, "format": 0.0}, None)]


def test_what_a_function_of_trl_may_return():
    reward, two = Reward(None, None, groups=True), [item("a"), item("b")]
    for result in [(1, 2), np.array([1.0, 2.0]), torch.tensor([1, 2], dtype=torch.bfloat16),
                   np.array([[1.0], [2.0]]), [True, np.float32(2)], iter([1, 2]),
                   [Fraction(1), Decimal(2)], [np.bool_(True), torch.tensor(2)]]:
        assert reward.values(result, two) == [1, 2]
    for result, text in [([1], "1 values for 2"), (1.0, "must be a list of numbers")]:
        with pytest.raises((TypeError, ValueError), match=text):
            reward.values(result, two)
    for value, text in {"x": "got 'x', a str", 1j: "complex", 10**400: "OverflowError",
                        float("inf"): "finite number", (1, 2): "a tuple"}.items():
        one, other = reward.values([1, value], two)
        assert one == 1 and text in other, value


# ---- a file and its folder

NEIGHBOURS = {
    "one/mine.py": "import utils, data\nfrom verifiers import last_boxed\n"
                   "def f(completion):\n    import rewards, utils as late\n"
                   "    assert late is utils\n    return utils.N + data.N + rewards.N",
    "one/utils.py": "N = 1", "one/data.py": "N = 10", "one/rewards.py": "N = 100",
    "one/examples/__init__.py": "", "one/examples/helper.py": "",
    "two/loss.py": "import losses, five\ndef g(completion): return 7\n"
                   "def own(logp, *given, **_): return 0 * logp + five.N * len(losses.LOSSES), {}",
    "two/five.py": "N = 5"}


def test_what_lies_beside_a_reward_or_a_loss_is_its_own_and_hides_nothing(own):
    for name, code in NEIGHBOURS.items():
        own(code, name)
    for specs, expected in ((["one/mine.py:f", "two/loss.py:g", "gsm8k"], (111, 7, 1)),
                            (["gsm8k", "one/mine.py:f"], (1, 111))):
        assert parts(score(specs, [item("5", "5")])) == [expected]
    loss, _ = flags.own("loss", "two/loss.py:own").function(1, 2, 3, 4)
    assert loss == 5 * len(sys.modules["losses"].LOSSES)


POOLS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
class Task:
    def __init__(self, n): self.n = n
def double(task): return 2 * task.n
def f(completion):
    with multiprocessing.get_context(completion).Pool(2) as pool:
        return sum(pool.map(double, [Task(1), Task(2)]))
def g(completions, **_):
    with ProcessPoolExecutor(1, multiprocessing.get_context(completions[0])) as pool:
        return [*pool.map(double, map(Task, range(len(completions))))]
"""


def test_a_reward_may_have_processes_of_its_own(own):
    own(POOLS, "my rewards/mine.py")
    specs = [f"my rewards/mine.py:{name}" for name in "fg"]
    items = [item(how) for how in ("fork", "spawn", "forkserver") for _ in range(2)]
    assert parts(score(specs, items, 2, workers=1, timeout=60.0)) == [(6, 0), (6, 2)] * 3


def test_a_worker_ends_in_silence_when_the_trainer_does():
    """Its traceback, an EOFError, once followed the run's own error. Inside a message."""
    message, (ours, theirs) = pickle.dumps(
        (2**32, rewards.parse(["exact"]))), socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import worker; worker.work({theirs.fileno()})"], cwd=ROOT,
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    ours.sendall(message + message[:20])
    assert b"\n" in ours.recv(1 << 16)
    ours.shutdown(socket.SHUT_WR)
    assert process.communicate(timeout=60) == (None, "") and process.returncode == 0


def group_of(own, define, make):
    """Three completions of at most a second each, in one call of 1.6 s."""
    spec = own(f"{define} f(completions, **columns):\n"
               "    if 'late' in completions: time.sleep(1e9)\n"
               "    if 'bad' in completions: return [1.0]\n"
               "    time.sleep(1.6)\n    return [1.0] * 3")
    texts = ["a", "b", "c", "d", "bad", "e", "late", "f", "g"]
    scores = score([spec], texts, 3, timeout=1.0, make=make)
    assert totals(scores) == [1] * 3 + [None] * 6 and lost(scores) == {"exception": 3, "timeout": 3}


def test_a_group_is_one_call_with_the_time_of_all_and_fails_as_a_whole(own):
    group_of(own, "def", Pool)


# ---- hostile rewards

HOSTILE = {   # how a completion is lost: what the reward does
    "exception": ["return float('nan')", r"raise RuntimeError('\ud800')"],
    "exception, death or timeout": ["return 9**9**9**9"],
    "timeout": ["time.sleep(1e9)"],
    "death": ["sys.exit(0)", "os.kill(os.getpid(), 11)", "os.closerange(3, 99)",
              "while True: hoard.append(bytearray(1 << 26))",
              "time.sleep(1e9) if os.fork() == 0 else os._exit(0)", "os.killpg(0, 9)"],
    "": ["os.fork()", "return True", r"print('\ud800')", "os.close(1), os.close(2)"]}


def test_hostile_rewards_cost_their_completion_only(own, monkeypatch):
    """Who holds too much memory is replaced: the next completion needs 64 MB."""
    monkeypatch.setattr(rewards, "MEMORY_GB", 0.4)
    kinds = {code: kind for kind, codes in HOSTILE.items() for code in codes}
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in kinds)
    spec = own(f"hoard = []\n{F}pass\n{faults}    return len(bytearray(1 << 26)) >> 26")
    texts = [text for code in kinds for text in (code, "fine", "fine")]
    scores = score([spec], texts, timeout=4.0)
    for text, one in zip(texts, scores, strict=True):
        how, kind = "".join(lost([one])), kinds.get(text, "")
        assert how in kind and bool(how) == bool(kind), (text, one)
        assert one.total == (None if how else 1.0), text
    json.dumps([s.error for s in scores], ensure_ascii=False).encode()   # any file can hold it


def test_a_worker_that_stopped_reading_costs_a_completion(own):
    """It stops between calls, and the next completion is larger than any pipe."""
    spec = own("import threading\n" + F + "if completion == 'stop':\n"
               "        threading.Timer(0.2, os.kill, (os.getpid(), 19)).start()\n    return 1")
    with closing(Pool([spec], fakes.args(reward_workers=1, reward_timeout=2.0))) as pool:
        assert totals(scores_of(pool, [item("stop")])) == [1]
        time.sleep(0.5)
        scored, texts = [], [item("1" * 30_000_000), item("x")]
        thread = threading.Thread(target=lambda: scored.extend(scores_of(pool, texts)), daemon=True)
        thread.start()
        thread.join(20)
        assert totals(scored) == [None, 1]


def gone(pid):
    for _ in range(1200):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", ["", "time.sleep(1e9)", "os._exit(3)"])
def test_what_a_reward_forks_dies_with_its_worker(own, end):
    spec = own("import subprocess\n" + F + "pid = os.fork()\n    if not pid: time.sleep(1e9)\n"
               "    shell = subprocess.Popen(['sleep', '99'])\n"
               "    print(pid, shell.pid, os.getpid(), file=open('pids', 'w'), flush=True)\n"
               f"    {end}\n    return 1")
    with closing(Pool([spec], fakes.args(reward_workers=1, reward_timeout=2.0))) as pool:
        scores_of(pool, [item("x")])
    pids = Path("pids").read_text().split()
    assert len(pids) == 3 and all(map(gone, pids))


def test_workers_die_with_the_trainer(own, tmp_path):
    spec = own(F + "open(f'pid{os.getpid()}', 'w'), time.sleep(1e9)")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from rewards import *
import grpo
Pool([{spec!r}], changed(grpo.Args(), reward_timeout=300)).ask(
    [Item("", "x", "", {{}}, 1, False)] * 4)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while len(found := [*tmp_path.glob("pid*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(gone(path.name[3:]) for path in found)


def test_a_worker_that_stops_starting_ends_the_batch(own):
    start = "if os.path.exists('started'): raise SystemExit\nopen('started', 'w')\n"
    scores = score([own(start + F + "os._exit(1)")], ["x"] * 20, workers=1)
    assert totals(scores) == [None] * 20 and lost(scores) == {"death": 20}


def test_scores_are_in_order_and_what_a_reward_prints_goes_where_the_trainers_does(own, capfd):
    spec = own(F + "print(f'no space {completion[:9]}\\n', end='')\n    return float(completion)")
    with closing(Pool([spec], fakes.args())) as pool:
        for size in (300, 0, 1):
            texts = [item(str(i)) for i in range(size)]
            assert totals(scores_of(pool, texts)) == list(range(size))
        one, = scores_of(pool, [item("x")])
        assert lost([one]) == {"exception": 1} and "ValueError" in one.error
        big = "1" + " " * 3_000_000   # larger than any pipe's buffer
        assert totals(scores_of(pool, [item(big)] * 3)) == [1.0] * 3
    assert "no space 299\n" in capfd.readouterr().out


# ---- a batch

def scored(world, spec):
    """(text and score of each sample, how often this rank decoded)"""
    decoded, tokenizer = [], tiny.make_tokenizer()
    ids = np.array([*tokenizer("12")["input_ids"], tokenizer.eos_token_id], np.int32)
    reads = texts.reader(tokenizer, [tokenizer.eos_token_id])
    samples = [Sample(data.Prompt(i, data.Row(i, "q", [1], "3", {}, "")),
                      Completion(ids, np.zeros(len(ids)), False)) for i in range(4)]
    with closing(Pool([spec], fakes.args(reward_workers=1))) as pool:
        pool.wait()
        rewards.score_samples(SimpleNamespace(
            scorer=pool, world=world, engine=SimpleNamespace(
                text=lambda ids: decoded.append(1) or reads(ids)),
            log=SimpleNamespace(time=lambda name: nullcontext(), say=print)), samples, 2)
    return [(s.text, s.score.total) for s in samples], len(decoded)


def test_only_the_rank_that_scores_a_text_decodes_it(own, tmp_path):
    """With two whole groups, a rank of three has nothing to score."""
    own("def f(completions, **columns): return [float(len(completions))] * len(completions)")
    found = ranks.results(3, scored, f"{tmp_path}/own.py:f")
    assert found == [([("12", 2.0)] * 4, count) for count in (2, 2, 0)]


def test_a_batch_that_fails_as_a_whole_stops():
    """After eight calls in a row. Fewer are an accident: one row of an evaluation ended the run."""
    said, scorer = [], SimpleNamespace(flag="reward", unanswered=0, warned=False)

    def report(errors, calls):
        rewards.report(scorer, SimpleNamespace(say=said.append), errors, calls)
    report(["ZeroDivision"] * 4 + [None], 8)  # one is enough
    for _ in range(7):
        report(["f returned None"], 1)
    report([None], 1)
    report(["f returned None"], 7)
    with pytest.raises(SettingsError, match="1 completions has .*\nf returned None"):
        report(["f returned None"], 1)
    assert len(said) == 1 and "ZeroDivision" in said[0]  # printed once


# ---- hostile completions

def test_reasoning_gym_never_evaluates_an_answer(tmp_path):
    gym = pytest.importorskip("reasoning_gym")
    tasks = """countdown simple_integration n_queens polynomial_multiplication string_insertion
        spiral_matrix bitwise_arithmetic chain_sum""".split()
    entries = {task: gym.create_dataset(task, size=1, seed=3)[0] for task in tasks}
    code = f"__import__('pathlib').Path('{tmp_path}/executed').touch()"
    hostile = [code, f"sin({code})", f'sin("{code}")', f"[{code}]", f"(lambda: {code})()"]
    texts = [(task, f"so <answer>{entries[task]['answer']}</answer>") for task in tasks]
    texts += [(task, text) for task in tasks for text in hostile]
    scores = score(["reasoning_gym"], [item(text, **entries[task]) for task, text in texts])
    assert totals(scores[:len(tasks)]) == [1.0] * len(tasks)
    assert max(totals(scores[len(tasks):])) < 0.1 and not lost(scores)
    assert not list(tmp_path.iterdir())


TOUCH = "__import__('os').system('touch executed')"
BOMBS = [rf"\boxed{{{text}}}" for text in ("9^{9^{9}}", "9^{" * 200 + "9" + "}" * 200, "\0", TOUCH)]
BOMBS += [*(f"<answer>{text}</answer>" for text in ("(" * 100_000, "9" * 299, TOUCH)), TOUCH,
          "The answer is 9**9**9**9", "(" * 100_000, "\ud800", "9" * 1_000_000]


@pytest.mark.parametrize("spec", ["gsm8k", "math", "countdown", "kk"])
def test_hostile_completions_never_run(spec, tmp_path, monkeypatch):
    answer = KK if spec == "kk" else "72"
    monkeypatch.chdir(tmp_path)
    items = [item(text, answer, nums=[9, 9], target=72) for text in BOMBS]
    slow = "<think></think><answer>" + " is a knight" * 50_000 + "</answer>"   # has good tags
    items += [item(text, answer, nums=[9, 8], target=72) for text in (slow, "#### 72")]
    scores = score([spec], items, timeout=2.0 if spec == "math" else 30.0)
    assert scores[-1].total is not None and not lost(scores)["death"]
    for text, total in zip(BOMBS, totals(scores), strict=False):
        assert spec == "math" if total is None else total <= 0, text[:40]
    assert not list(tmp_path.iterdir())
