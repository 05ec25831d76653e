"""A reward cannot hang a run: hostile rewards and completions cost their completion alone, and
mistakes of --reward are found before anything starts. Built-in rewards: test_numbers.py."""
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
import torch

import fakes
import flags
import ranks
import rewards
from answers import answers_of
from data import Row, from_arrow
from errors import SettingsError
from examples import reasoning_gym_tasks
from messages import answer_of
from rewards import Pool
from tables import table
from worker import RewardSpec

ROOT = Path(__file__).resolve().parent.parent
KK = "(1) Zoey is a knight\n(2) Ben is a knave"
F = "def f(completion, answer):\n    "


class Scored(NamedTuple):
    reward: float | None
    rewards: dict
    error: str | None


def item(completion, answer="", prompt="", tokens=1, truncated=False, **row):
    """What a worker gets of a completion."""
    return rewards.item_of(fakes.sample(text=completion, answer=answer)) | dict(
        prompt=prompt, tokens=tokens, truncated=truncated, columns=row)


def pool(specs, workers=2, timeout=10.0, loading=1.0):
    """Returns a pool of workers, which is closed at the end of a `with`."""
    made = Pool(specs, fakes.args(reward_workers=workers, reward_timeout=timeout))
    made.progress["global_step"], made.loading = 7, loading
    return closing(made)


def score(specs, items, group=1, **options):
    """Returns what a batch got in a fresh pool. items: or texts."""
    items = [item(x) if isinstance(x, str) else x for x in items]
    with pool(specs, **options) as scorer:
        scorer.wait()
        return ask(scorer, items, group if scorer.groups else 1)


def ask(scorer, items, size=1):
    return [Scored(*rewards.weighted_sum(scorer.specs, found)) for found in scorer.ask(items, size)]


def totals(scores):
    return [s.reward for s in scores]


def parts(scores):
    return [tuple(s.rewards.values()) for s in scores]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of rewards into the current folder, whose name has what begins a weight."""
    (tmp_path / "me@lab:1").mkdir()
    monkeypatch.chdir(tmp_path / "me@lab:1")

    def write(code, name="own.py"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text("import asyncio, os, sys, time\n" + code)
        return name + ":f"
    return write


# ---- the flag

FILES = {"own.py": F + "return 1\ndef batch(sources): return 1\n"
                   "def compute_score(data_source, solution_str, ground_truth): return 1\n",
         "exit.py": "os._exit(7)", "says.py": "sys.exit('set KEY first')", "end.py": "exit()",
         **dict.fromkeys(["math.py", "v1.2.py"], F + "return 1")}
MISTAKES = r"""
maths nope:2 math math:2 own.py:std gone.py:f
    | (?s)maths: no such reward.*nope.*reward/math is another.*reward/std is.*no such file
own.py:missing | own.py has no missing
own.py:batch | it has \['sources'
own.py:compute_score | For a function of verl or EasyR1 see examples/adapters.py
exit.py:f | ended with code 7
says.py:f | GB\): set KEY first$
end.py:f | (?s)GB\): Traceback .*SystemExit
math.py:f | by its name: `import math` finds .*another name for the file
v1.2.py:f | `import v1.2` finds nothing
exact:x | finite number
exact:inf | finite number
exact:nan | finite number
exact:1e999 | finite number
exact:1:2 | finite number
"""


@pytest.mark.parametrize("specs, sentence", [*table(MISTAKES), ("", "empty")])
def test_mistakes_are_found_before_anything_starts(own, specs, sentence):
    """A name, a weight, a file or a function that cannot be a reward is named."""
    for name, code in FILES.items():
        own(code, name)
    with pytest.raises(SettingsError, match=sentence):
        rewards.check(specs.split(), fakes.args())


@pytest.mark.parametrize("number", "1. .5 1e-1 -0.5 +2 1E3 0 1_0 5.e+0".split())
def test_a_weight_is_any_finite_number_and_a_file_stands_here_or_in_the_project(own, number):
    spec = own(F + "return 1")
    assert rewards.parse([f"exact:{number}", f"{spec}:{number}", "examples/coin.py:coin"]) == [
        RewardSpec("exact", float(number), None), RewardSpec("f", float(number), "own.py"),
        RewardSpec("coin", 1, f"{ROOT}/examples/coin.py")]


def test_a_worker_loads_no_torch_nor_what_its_reward_does_not_need(own):
    """In another folder than the project's."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker\n"
            f"from worker import RewardSpec\nfor name in 'kk', 'math':\n"
            f"    worker.load([RewardSpec(name, 1, None)])\n"
            f"    print({{'torch', 'transformers', 'sympy', 'numpy'}} & set(sys.modules))")
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")
    assert found[0] == "set()" and "tor" not in found[1] and "transf" not in found[1]


# ---- the rows

READ = json.loads("""
    ["12", "-7/2", 12, -3, 12345678901234567, 12.5, 1e22, ["13", "12"], ["1,234"], [3, 4],
     [0.1, -2.5]]""") + [Decimal("12.50"), [Decimal("1.5")]]
REFUSED = json.loads("""
    ["", " ", null, true, [true], [], [null], ["1", ""], [["1"]], {"text": ["1"]}, [{"text": "1"}],
     Infinity, [NaN]]""") + [b"12", [b"12"], date(2026, 1, 2), timedelta(3)]


def row_with(answer) -> Row:
    """Returns a row with this answer, as Arrow has it."""
    columns, = from_arrow(pa.table({"answer": [answer]}))
    return Row(4, "q", [1], answer_of(columns)[1], columns, "rows")


def test_saying_the_answer_gets_1_or_the_row_is_refused():
    """Each form of an answer, or each of a list, is paid by all built-in rewards, or refused."""
    names = ["exact", "gsm8k", "math"]
    needs = rewards.check([*names, "kk01"], fakes.args()).needs
    rows = [*map(row_with, READ)]
    rewards.check_rows(needs, rows, {})
    for row in map(row_with, REFUSED):
        with pytest.raises(SettingsError, match="exact needs 'answer': row 5 of rows") as error:
            rewards.check_rows(needs, [row], {})
        assert repr(str(row.answer)) in str(error.value)
    right = [item(str(said), row.answer) for row in rows for said in answers_of(row.answer)]
    wrong = [item("no 99 of them", row.answer) for row in rows]
    assert parts(score(names, right + wrong, timeout=60.0)) == (
        [(1, 1, 1)] * len(right) + [(0, 0, 0)] * len(wrong))


# ---- what a function is called with, and what it returns

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


ROW = json.loads("""{"level": 2, "data_source": "here", "extra_info": {"i": 1},
                    "prompt": [{"role": "user", "content": "q"}]}""")
PAID = json.loads("""[
    [121, 3, 0, 1, 0, 1, 1],
    [121, 3, 1, 1, 1, 2, 2],
    [122, 5, 0, 2, 0, 1, 1],
    [121, 3, 1, 1, 1, 2, 2]]""")


def test_rewards_of_ours_and_of_others(own):
    """A function gets what its parameters name: in our form, in TRL's, and by adapters in verl's
    and EasyR1's. A parameter that is none of these is a column, which each row must have."""
    own(SIGNATURES)
    specs = [f"own.py:{name}" for name in "ours few plain_trl trl verl easyr1 easyr1_alone".split()]
    found = rewards.check(specs, fakes.args())
    assert not found.waits and not found.silent and found.needs == [
        ["ours", "answer", False], ["few", "level", True], ["plain_trl", "answer", False],
        ["trl", "level", True], ["verl", "answer", False], ["easyr1", "answer", False],
        ["easyr1_alone", "answer", False]]
    with pytest.raises(SettingsError, match="few needs 'level': row 5 of rows has none"):
        rewards.check_rows(found.needs, [row_with({"any": "thing"})], {})
    items = [item(text, "b", "<q>") | {"columns": ROW} for text in ("a", "b", "bb", "b")]
    items[2]["turns"] = [{"role": "assistant", "content": "bb"}, *ROW["prompt"] * 2]  # of --reply
    assert [*map(list, parts(score(specs, items, 2, workers=1)))] == PAID


SUMS = """
[1, 2, -2] | 20.7 | null
[1, null, 0] | 0.5 | null
[null, 2, null] | 20 | null
[null, null, null] | null | "every reward returned None: none applies to the row"
[1, "two returned None", null] | null | "two returned None"
["one failed", 2, "three too"] | null | "one failed"
"""


def test_a_score_is_a_weighted_sum_of_what_applies(own):
    """None of ours, here a text, leaves the completion without a reward. TRL's None is "not
    applicable", as in its nansum over weights."""
    weighted = [RewardSpec(*one, None) for one in (("one", 0.5), ("two", 10), ("three", -0.1))]
    for values, *right in table(SUMS):
        found = dict(zip(("one", "two", "three"), json.loads(values), strict=True))
        reward, _, error = rewards.weighted_sum(weighted, found)
        assert [reward, error] == [*map(json.loads, right)], values
    trl = own("def f(completions, **columns): return [None]")
    one = score(["exact:2", trl, "short:0.1", "format"], [item(" yes\n", "yes", tokens=2000)])
    assert totals(one) == [1.8] and parts(one) == [(1, None, -2, 0)]


RETURNED = """
(1, 2) | [1, 2] | None
numpy.array([[1.0], [2.0]]) | [1, 2] | None
[numpy.bool_(True), numpy.float32(2)] | [1, 2] | None
torch.tensor([1, 2], dtype=torch.bfloat16) | [1, 2] | None
iter([fractions.Fraction(1), decimal.Decimal(2)]) | [1, 2] | None
[1] | [null, null] | must be a list of numbers: 1 values for 2
1.0 | [null, null] | must be a list of numbers: 1 values for 2
[1, 'x'] | [1, null] | got 'x', a str
[1, 1j] | [1, null] | complex
[1, 10**400] | [1, null] | OverflowError
[1, float('inf')] | [1, null] | finite number
"""


def test_what_a_function_of_trl_may_return(own):
    """Any list of numbers; what is none costs its completion, and a list of another length all."""
    spec = own("import decimal, fractions, numpy, torch\n"
               "def f(completions, **_): return eval(completions[0])")
    cases = table(RETURNED)
    scores = score([spec], [code for code, *_ in cases for _ in range(2)], 2, timeout=60.0)
    for (code, right, words), one, other in zip(cases, scores[::2], scores[1::2], strict=True):
        assert [one.reward, other.reward] == json.loads(right), code
        assert words in str(other.error), code


# ---- a file, its folder and its processes

NEIGHBOURS = {
    "one/mine.py": "import utils, data\nfrom answers import last_boxed\n"
                   "def f(completion):\n    import rewards, utils as late\n"
                   "    assert late is utils\n    return utils.N + data.N + rewards.N",
    "one/utils.py": "N = 1", "one/data.py": "N = 10", "one/rewards.py": "N = 100",
    "one/examples/__init__.py": "", "one/examples/helper.py": "",
    "two/loss.py": "import losses, five\ndef g(completion): return 7\n"
                   "def own(logp, *given, **_): return 0 * logp + five.N * len(losses.LOSSES), {}",
    "two/five.py": "N = 5"}


def test_what_lies_beside_a_reward_or_a_loss_is_its_own_and_hides_nothing(own):
    """A reward's file imports its neighbours; built-in rewards and the trainer import theirs."""
    for name, code in NEIGHBOURS.items():
        own(code, name)
    for specs, right in ((["one/mine.py:f", "two/loss.py:g", "gsm8k"], (111, 7, 1)),
                         (["gsm8k", "one/mine.py:f"], (1, 111))):
        assert parts(score(specs, [item("5", "5")])) == [right]
    loss, _ = flags.chosen("loss", f"{Path.cwd()}/two/loss.py:own").function(torch.ones(1), 2, 3, 4)
    assert loss.item() == 5 * len(sys.modules["losses"].LOSSES)


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
    """Also where they are started anew and import the reward's file by its name."""
    own(POOLS, "my rewards/mine.py")
    specs = [f"my rewards/mine.py:{name}" for name in "fg"]
    items = [item(how) for how in ("fork", "spawn", "forkserver") for _ in range(2)]
    assert parts(score(specs, items, 2, workers=1, timeout=60.0)) == [(6, 0), (6, 2)] * 3


def gone(pid) -> bool:
    """Whether a process ends within a minute."""
    for _ in range(1200):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


FORKS = """
import subprocess
def f(completion):
    pid = os.fork()
    if not pid: time.sleep(1e9)
    shell = subprocess.Popen(['sleep', '99'])
    print(pid, shell.pid, os.getpid(), file=open('pids' + str(len(completion)), 'w'), flush=True)
    exec(completion)
    return 1
"""


def test_what_a_reward_forks_dies_with_its_worker(own):
    """After a job that is late or ends the worker, and at the end of the run."""
    ends = ["", "time.sleep(1e9)", "os._exit(3)"]
    assert totals(score([own(FORKS)], ends, timeout=2.0)) == [1, None, None]
    for end in ends:
        pids = Path(f"pids{len(end)}").read_text().split()
        assert len(pids) == 3 and all(map(gone, pids))


def test_workers_die_with_the_trainer(own):
    """Also one that is within a job, where the trainer is killed."""
    spec = own(F + "open(f'pid{os.getpid()}', 'w'), time.sleep(1e9)")
    parent = subprocess.Popen([sys.executable, "-c", f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import test_rewards
test_rewards.score([{spec!r}], ["x"] * 4, timeout=300)
"""])
    while len(found := [*Path().glob("pid*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(gone(path.name[3:]) for path in found)


def test_a_worker_ends_in_silence_when_the_trainer_does(capfd):
    """Its traceback, an EOFError, once followed the run's own error. Inside a message."""
    worker = rewards.Worker("worker", (rewards.parse(["exact"]),), 60)
    assert worker.receive(60)
    worker.socket.sendall(pickle.dumps("a message")[:9])
    worker.socket.shutdown(socket.SHUT_WR)
    assert worker.process.wait(60) == 0 and capfd.readouterr().err == ""


WRITES = """
def one(completion, notes, **row):
    notes.append(completion)
    return len(notes)
two = one
def group(prompts, completions, notes, **columns):
    for text, those in zip(completions, notes):
        those.append(text)
    return [len(those) for those in notes]
"""


def test_what_a_reward_writes_into_its_row_no_other_sees(own):
    """Neither the next reward, nor another completion of the same row."""
    own(WRITES, "writes.py")
    specs = [f"writes.py:{name}" for name in ("one", "two", "group")]
    assert parts(score(specs, [item("a", notes=[])] * 8, group=4)) == [(1.0, 1.0, 1.0)] * 8


# ---- hostile rewards

def test_a_group_is_one_job_with_the_time_of_all_and_fails_as_a_whole(own):
    """Three completions of at most a second each, in one job of 1.6 s."""
    spec = own("def f(completions, **columns):\n"
               "    if 'late' in completions: time.sleep(1e9)\n"
               "    if 'bad' in completions: return [1.0]\n"
               "    time.sleep(1.6)\n    return [1.0] * 3")
    words = ["a", "b", "c", "d", "bad", "e", "late", "f", "g"]
    scores = score([spec], words, 3, timeout=1.0)
    assert totals(scores) == [1] * 3 + [None] * 6
    assert all("1 values for 3" in s.error for s in scores[3:6])
    assert all(s.error.startswith("no answer within") for s in scores[6:])


HOSTILE = r"""
return float('nan') | ValueError
raise RuntimeError('\ud800') | Traceback
return 9**9**9**9 | Traceback|the worker|no answer within
time.sleep(1e9) | no answer within
sys.exit(0) | the worker ended
os.kill(os.getpid(), 11) | the worker ended
os.closerange(3, 99) | the worker ended
while True: hoard.append(bytearray(1 << 26)) | it used more than 0.4 GB of memory
time.sleep(1e9) if os.fork() == 0 else os._exit(0) | the worker ended
os.killpg(0, 9) | the worker ended
os.fork() | fine
return True | fine
print('\ud800') | fine
os.close(1), os.close(2) | fine
"""


def test_hostile_rewards_cost_their_completion_only(own, monkeypatch):
    """Who holds too much memory is replaced: the next completion needs 64 MB."""
    monkeypatch.setattr(rewards, "MEMORY_GB", 0.4)
    hostile = table(HOSTILE)
    spec = own(f"hoard = []\n{F}pass\n" + "".join(
        f"    if completion == {code!r}:\n        {code}\n" for code, _ in hostile)
        + "    return len(bytearray(1 << 26)) >> 26")
    cases = sum(([case, ("x", "fine"), ("y", "fine")] for case in hostile), [])
    scores = score([spec], [code for code, _ in cases], timeout=4.0)
    for (code, why), one in zip(cases, scores, strict=True):
        assert one.reward == (1.0 if why == "fine" else None), code
        assert (one.error or "fine").startswith(tuple(why.split("|"))), code
        json.dumps(one.error, ensure_ascii=False).encode()  # any file can hold it


def test_a_worker_that_stopped_reading_costs_a_completion(own):
    """It stops between jobs, and the next completion is larger than any pipe."""
    spec = own("import threading\n" + F + "if completion == 'stop':\n"
               "        threading.Timer(0.2, os.kill, (os.getpid(), 19)).start()\n    return 1")
    with pool([spec], workers=1, timeout=2.0) as scorer:
        assert totals(ask(scorer, [item("stop")])) == [1]
        time.sleep(0.5)
        scored = []
        thread = threading.Thread(daemon=True, target=lambda: scored.extend(
            ask(scorer, [item("1" * 30_000_000), item("x")])))
        thread.start()
        thread.join(20)
        assert totals(scored) == [None, 1]


def test_a_worker_that_stops_starting_ends_the_batch(own):
    """Each completion is lost to the reason; none waits for a worker."""
    start = "if os.path.exists('started'): raise SystemExit\nopen('started', 'w')\n"
    scores = score([own(start + F + "os._exit(1)")], ["x"] * 20, workers=1)
    assert totals(scores) == [None] * 20
    assert all(s.error.startswith(("the worker ended", "--reward cannot load")) for s in scores)


# ---- a batch

def test_scores_are_in_order_and_what_a_reward_prints_goes_where_the_trainers_does(own, capfd):
    """Of many completions, and of larger ones than a pipe's buffer."""
    spec = own(F + "print(f'no space {completion[:9]}\\n', end='')\n    return float(completion)")
    scores = score([spec], [*map(str, range(300)), *["1" + " " * 3_000_000] * 3])
    assert totals(scores) == [*range(300), 1, 1, 1]
    assert "no space 299\n" in capfd.readouterr().out


def scored(world, spec):
    """Returns the text and score of each sample of two groups, and how often this rank decoded."""
    decoded, samples = [], [fakes.sample(i=i) for i in range(4)]
    with pool([spec]) as scorer:
        scorer.wait()
        scorer.decode = lambda ids: decoded.append(ids) or "12"
        rewards.score_samples(scorer, world, fakes.Log(), samples, 2)
    return [(s.text, s.reward) for s in samples], len(decoded)


def test_only_the_rank_that_scores_a_text_decodes_it(own):
    """With two whole groups, a rank of three has nothing to score. All have texts and scores."""
    own("def f(completions, **columns): return [len(completions)] * len(completions)")
    found = ranks.results(3, scored, f"{Path.cwd()}/own.py:f")
    assert found == [([("12", 2)] * 4, count) for count in (2, 2, 0)]


def test_a_batch_that_fails_as_a_whole_stops():
    """After eight jobs in a row. Fewer are an accident: one row of an evaluation ended the run."""
    log, scorer, none = fakes.Log(), Pool([], fakes.args()), ["f returned None"]
    for errors, jobs in [(["ZeroDivision"] * 4 + [None], 8), (none, 7), ([None], 1), (none, 7)]:
        rewards.report(scorer, log, errors, jobs)
    with pytest.raises(SettingsError, match="1 completions has .*\nf returned None"):
        rewards.report(scorer, log, none, 1)
    assert len(log.said) == 1 and "ZeroDivision" in log.said[0]  # printed once


# ---- hostile completions

def test_reasoning_gym_scores_right_answers_alone_and_evaluates_none(tmp_path):
    """Its puzzles are scored by its own scorers, some by their metadata. A row that lost its answer
    and a task whose scorer pays any text have no score."""
    gym = pytest.importorskip("reasoning_gym")
    tasks = """simple_integration n_queens polynomial_multiplication string_insertion countdown
        spiral_matrix bitwise_arithmetic chain_sum gcd graph_color game_of_life_halting""".split()
    *rows, halting = [gym.create_dataset(task, size=1, seed=3)[0] for task in tasks]
    code = f"__import__('pathlib').Path('{tmp_path}/executed').touch()"
    hostile = [code, f"sin({code})", f'sin("{code}")', f"[{code}]", f"(lambda: {code})()", "{}"]
    possible = json.dumps(rows[-1]["metadata"]["possible_answer"])
    right = [item(f"<answer>{row['answer'] or possible}</answer>", **row) for row in rows]
    wrong = [item(text, **row) for row in rows for text in hostile]
    lost = [item("3", **rows[-2] | {"answer": None}), item("zzz", **halting)]
    *scores, answerless, any_text = score(["reasoning_gym"], right + wrong + lost)
    assert totals(scores[:len(rows)]) == [1] * len(rows)
    assert max(totals(scores[len(rows):])) < 0.1 and not list(tmp_path.iterdir())
    assert "have an answer, and the row has none" in answerless.error
    assert reasoning_gym_tasks.ANY in any_text.error


TOUCH = "__import__('os').system('touch executed')"
BOMBS = [rf"\boxed{{{text}}}" for text in ("9^{9^{9}}", "9^{" * 200 + "9" + "}" * 200, "\0", TOUCH)]
BOMBS += [*(f"<answer>{text}</answer>" for text in ("(" * 100_000, "9" * 299, TOUCH)), TOUCH,
          "The answer is 9**9**9**9", "(" * 100_000, "\ud800", "9" * 1_000_000,
          "<think></think><answer>" + " is a knight" * 50_000 + "</answer>"]  # has good tags


@pytest.mark.parametrize("spec", ["gsm8k", "math", "countdown", "kk"])
def test_hostile_completions_never_run(own, spec):
    """They are wrong, or cost themselves: no worker dies, and nothing is executed."""
    items = [item(text, KK if spec == "kk" else "72", nums=[9, 8], target=72)
             for text in [*BOMBS, "#### 72"]]
    *scores, last = score([spec], items, timeout=2.0 if spec == "math" else 30.0)
    assert last.reward is not None and not list(Path().iterdir())
    for one, text in zip(scores, BOMBS, strict=True):
        assert one.reward is not None and one.reward <= 0 or spec == "math", text[:40]
        assert "the worker ended" not in (one.error or "")
