"""Rewards: verifiers by hand, signatures, hostile rewards and completions, coroutines, the judge and
the reward model of examples/, real rows (not here)."""
import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, nullcontext
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForSequenceClassification

import data
import ranks
import rewards
from dist import SettingsError
from examples import countdown, gsm8k, kk, tiny
from rewards import Item, RewardArgs, Score, Scorer
from scoring import signatures, verifiers, worker
from trainer.batch import Completion, Sample

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("REAL_ROWS", "real_rows")).resolve()
F = "def f(completion, answer):\n    "


def item(completion, answer="", prompt="", tokens=1, truncated=False, **row):
    return Item(prompt, completion, answer, row, tokens, truncated)


def as_items(texts):
    return [item(x) if isinstance(x, str) else x for x in texts]


def score(specs, items, group=1, workers=2, timeout=10.0, retries=0):
    """The scores of one batch in a fresh pool."""
    with closing(Scorer(specs, RewardArgs(workers, timeout, retries))) as scorer:
        scorer.wait()
        return scorer.score(as_items(items), group if scorer.groups else 1)


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
    """Write a reward file; give the name of its function f."""
    monkeypatch.chdir(tmp_path)

    def write(code, name="own.py"):
        (tmp_path / name).write_text("import asyncio, os, sys, time\n" + code)
        return name + ":f"
    return write


# ---- the verifiers, by hand

KK = "(1) Zoey is a knight\n(2) Ben is a knave"


def tagged(said):
    return f"<think>x</think><answer>{said}</answer>"


@pytest.mark.parametrize("function, cases", [
    (gsm8k.gsm8k, [
        ("#### 18", 18, 1), ("#### $1,234.50", "#### 1234.5", 1), ("18.", "18", 1),
        ("#### 17\n\nNext question: 18", "#### 18", 0), ("#### 18 apples of 20", "18", 1),
        (r"\boxed{\text{\$18}} of 20", "18", 1), ("first 18, then 20", "18", 0), ("", "18", 0),
        ("#### none, but 18", "18", 1), ("10-5", "5", 1), ("-$5", "-5", 1), ("1,2345", "2345", 1)]),
    (verifiers.math_reward, [
        (r"\boxed{\frac{14}{3}}", r"\frac{14}{3}", 1), ("It is $14/3$.", r"\frac{14}{3}", 1),
        (r"\boxed{72}", "48+24=72\n#### 72", 1), (r"\boxed{71}", "#### 72", 0), ("?", "72", 0)]),
    (kk.kk, [
        (tagged(KK), {"solution_text_format": KK}, 3),
        (tagged("ben IS a Knave. Zoey is a knight").replace("<a", " <a") + " bye", KK, 3),
        (tagged("Zoey is a knave, Ben is a knave"), KK, -0.5),
        *((tagged(said), KK, -1) for said in (
            "", "Zoey is a knight, Zoey is a knave",
            "Zoey is a knight, Ben is a knave or a knight")),
        *((wrong, KK, -3) for wrong in (
            KK, "<think>" + tagged(KK), tagged(KK) + f"<answer>{KK}</answer>",
            f"<answer>{KK}</answer><think>x</think>", f"x</think><answer>{KK}</answer>"))])])
def test_verifiers(function, cases):
    for completion, answer, expected in cases:
        assert function(completion, answer) == expected, completion
        if function is kk.kk:
            assert kk.kk01(completion, answer) == (expected == 3)
            assert verifiers.format_tags(completion) == (expected != -3)


@pytest.mark.parametrize("begin, prompt, expected", [
    ("", "...assistant\n<think>", 3), ("<think>", "...assistant\n<think>\n", 3),
    ("y<think>", "...assistant\n<think>", -3)])
def test_a_prompt_that_opens_the_thinking(begin, prompt, expected):
    completion = f"{begin}x</think><answer>{KK}</answer>"
    assert kk.kk(completion, KK, prompt=prompt) == expected


def test_countdown():
    right = ["(25 - 5) * 4 / 2", "-(5 - 25) * 4 / 2"]
    wrong = ["25 + 5 + 4 + 2", "40", "(25 - 5) * 4 / 2 + 5 - 5", "(25 - 5) * 4 / 2 = 40", "",
             "(25-5)*4//2", "5/(4-4)*25*2", "((25-5)*4/2", "²", "25-5*4**2", "(٢5-5)*4/2"]
    for text in right + wrong:
        for completion in (f"I try\n{text}", f"<answer>1</answer> no: <answer>{text}</answer> ok"):
            for row in ({"nums": [25, 5, 4, 2]}, {"numbers": [2, 4, 5, 25]}):
                assert countdown.countdown(completion, target=40, **row) == (text in right), text
    # Exact: floats would give 23.99999999999999.
    assert countdown.countdown("(8 / (3 - 8 / 3))", nums=[3, 3, 8, 8], target=24) == 1


def pairs_of(e):
    pair = st.tuples(e, st.sampled_from("+-*/"), e)
    return pair.map("({0[0]}{0[1]}{0[2]})".format) | pair.map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), pairs_of, max_leaves=12))
def test_arithmetic_agrees_with_python(text):
    """The oracle is Python's own grammar over Fractions."""
    if len(text) > 300:
        return
    try:
        expected = eval(re.sub(r"(\d+)", r"F(\1)", text), {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            countdown.arithmetic(text)
        return
    value, numbers = countdown.arithmetic(text)
    assert value == expected and numbers == [int(n) for n in re.findall(r"\d+", text)]


@pytest.mark.skipif(not DATA.is_dir(), reason="REAL_ROWS names no folder of rows")
def test_real_rows_score_their_own_solutions():
    """gsm8k, and math500: what math-verify says in a plain main thread. (Its timers need it:
    elsewhere, each score was silently 0.)"""
    from math_verify import parse, verify
    gsm, rows = ([json.loads(line) for line in open(DATA / f"{name}/test.jsonl")]
                 for name in ("gsm8k", "math500"))
    answers = [row["answer"] for row in gsm]
    assert {*totals(score(["gsm8k"], [item(text, text) for text in answers]))} == {1.0}
    assert {*totals(score(["gsm8k"], [item(text + "1", text) for text in answers]))} == {0.0}
    golds = [row["answer"] for row in rows]
    pairs = [(row["solution"] if i % 3 else f"I think the answer is ${golds[i - 1]}$", golds[i])
             for i, row in enumerate(rows)]
    plain = [float(verify(parse(rf"\boxed{{{gold}}}"), parse(text))) for text, gold in pairs]
    scores = score(["math"], [item(*pair) for pair in pairs], timeout=30)
    assert totals(scores) == plain and 300 < sum(plain) < 400


# ---- settings

@pytest.mark.parametrize("specs, sentence", [
    (["maths", "nope:2"], "(?s)maths.*no such reward.*nope"), (["math", "math:2"], "twice"),
    ([], "empty"), (["nowhere.py:f"], "no such file"), (["own.py:missing"], "own.py has no missing"),
    (["own.py:std"], "reward/std is"), (["own.py:batch"], r"it has \['data_sources'"),
    (["own.py:f", "exit.py:g"], "ended with code 7"), (["says.py:f"], r"GB\): set KEY first$")])
def test_mistakes_are_found_before_anything_starts(own, specs, sentence):
    own(F + "return 1\ndef batch(data_sources): return 1\n")
    own("os._exit(7)\n", "exit.py"), own("sys.exit('set KEY first')\n", "says.py")
    with pytest.raises(SettingsError, match=sentence):
        rewards.check(specs)


@pytest.mark.parametrize("kind, spec", [("tools", "own.py:f:2"), ("reply", "gone.py:f")])
def test_a_mistake_names_its_own_flag(own, kind, spec):
    """`--tools nope` spoke of a reward."""
    own(F + "return 1")
    with pytest.raises(SettingsError) as error:
        rewards.parse([spec], kind)
    assert f"--{kind} {spec}" in str(error.value) and "reward" not in str(error.value)


@pytest.mark.parametrize("spec, heavy", [
    ("own.py:f", {"torch", "transformers", "math_verify", "sympy", "numpy", "reasoning_gym"}),
    ("math", {"torch", "transformers"})])
def test_a_worker_loads_no_torch(own, spec, heavy):
    """In another folder than the project's. What a reward does not need is not loaded either."""
    own("def f(completion): return None")
    path, _, name = spec.rpartition(":")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scoring import worker\n"
            f"from scoring.signatures import Part\n"
            f"worker.load('reward', [Part({name!r}, 1, {path or None!r})])\n"
            f"print({heavy} & set(sys.modules))")
    assert subprocess.check_output([sys.executable, "-c", code]) == b"set()\n"


@pytest.mark.parametrize("spec, answer, sentence", [
    ("exact", None, "--reward exact needs 'answer'; 1 of 2 rows have none .first: row 4 of rows"),
    ("own.py:f", 3, "needs 'trainer_state'"), ("own.py:h", None, None)])
def test_rows_that_lack_what_a_reward_needs_are_refused(own, spec, answer, sentence):
    own("def f(completions, trainer_state): pass\ndef h(completion, answer): pass")
    rows = [data.Row(i, "q", [1], a, {}, "rows") for i, a in ((3, 5), (4, answer))]
    if not sentence:
        return rewards.check_rows(rewards.check([spec]), rows)
    with pytest.raises(SettingsError, match=sentence):
        rewards.check_rows(rewards.check([spec]), rows)


# ---- signatures

SIGNATURES = """
import torch
def ours(completion, answer, **row):
    return len(completion) + 10 * row["level"] + 100 * row["tokens"]
def few(completion, level): return None if level == 7 else level
def verl(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth and data_source == "here" and extra_info["i"] == 1
    return {"score": float(right), "acc": 1}
class Verl:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": len(solution_str)}
waiting_verl = Verl()
def plain_trl(prompts, completions, answer, **columns):
    return torch.tensor([float(c[-1]["content"] == a) for c, a in zip(completions, answer)])
async def trl(completions, prompts, level, **columns):
    await asyncio.sleep(0)
    assert prompts == [[{"role": "user", "content": "q"}]] * 2 and level == [2, 2]
    assert columns.keys() >= {"answer", "completion_ids", "tokens", "truncated"}
    return [len(message["content"]) for (message,) in completions]
client = []
async def alone(completion):   # a client that lives longer than one call
    client.append(asyncio.get_running_loop())
    return client[0] is client[-1] and not client[0].is_closed()
"""


def test_rewards_of_others_unchanged(own):
    own(SIGNATURES)
    row = dict(level=2, data_source="here", extra_info={"i": 1}, reward_model={"ground_truth": "b"},
               prompt=[{"role": "user", "content": "q"}])
    items = [Item("<q>", text, "b", row, 1, False) for text in ("a", "b", "bb", "b")]
    names = ["ours", "few", "verl", "waiting_verl", "plain_trl", "trl", "alone"]
    specs = [f"own.py:{name}" for name in names]
    assert rewards.check(specs) == [["few", "level"], ["trl", "level"]]
    assert parts(score(specs, items, 2, workers=1)) == [
        (121, 2, 0, 1, 0, 1, 1), (121, 2, 1, 1, 1, 1, 1), (122, 2, 0, 2, 0, 2, 1),
        (121, 2, 1, 1, 1, 1, 1)]


def test_a_score_is_a_weighted_sum_and_none_is_unscorable_without_a_failure(own):
    own(SIGNATURES)
    specs = ["exact:2", "short:0.1", "format", "own.py:few:-0.5"]
    rows = [item(" yes\n", "yes", tokens=2000, level=1), item("no", "yes", tokens=10, level=7)]
    assert score(specs, rows) == [
        Score(2 - 0.2 - 0.5, {"exact": 1.0, "short": -2.0, "format": 0.0, "few": 1.0}, None),
        Score(None, {"exact": 0.0, "short": -0.01, "format": 0.0, "few": None}, None)]


@pytest.mark.parametrize("fault, kind", [
    ("raise ValueError('no')", "exception"), ("time.sleep(1e9)", "timeout"),
    ("return [1.0]", "exception")])
def test_a_failure_of_a_group_reward_costs_the_group(own, fault, kind):
    spec = own(f"def f(prompts, completions, **columns):\n    if 'bad' in completions: {fault}\n"
               "    return [1.0] * len(completions)")
    scores = score([spec], ["a", "b", "c", "bad", "e", "f"], group=2, timeout=1.5)
    assert totals(scores) == [1, 1, None, None, 1, 1] and lost(scores) == {kind: 2}


@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_group_has_the_time_of_all_its_completions(own, define):
    """Three completions of at most a second each, in one call of 1.6 s."""
    spec = own(f"{define} f(completions, **columns):\n    time.sleep(1.6)\n    return [1.0] * 3")
    assert totals(score([spec], ["a", "b", "c"], group=3, timeout=1.0)) == [1, 1, 1]


# ---- hostile rewards

HOSTILE = {   # how a completion is lost: what the reward does
    "exception": ["return float('nan')", "return '1.0'", r"raise RuntimeError('\ud800')"],
    "exception, death or timeout": ["return 9**9**9**9"],
    "timeout": ["time.sleep(1e9)"],
    "death": ["os._exit(3)", "sys.exit(0)", "os.kill(os.getpid(), 11)", "os.closerange(3, 99)",
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
    with closing(Scorer([spec], RewardArgs(1, 2.0))) as scorer:
        assert totals(scorer.score([item("stop")])) == [1]
        time.sleep(0.5)
        scored, texts = [], as_items(["1" * 30_000_000, "x"])
        thread = threading.Thread(target=lambda: scored.extend(scorer.score(texts)), daemon=True)
        thread.start()
        thread.join(20)
        assert totals(scored) == [None, 1]


def gone(pid):
    """Within a minute."""
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
    """Closed, late, or crashed."""
    spec = own("import subprocess\n" + F + "pid = os.fork()\n    if not pid: time.sleep(1e9)\n"
               "    shell = subprocess.Popen(['sleep', '99'])\n"
               "    print(pid, shell.pid, os.getpid(), file=open('pids', 'w'), flush=True)\n"
               f"    {end}\n    return 1")
    with closing(Scorer([spec], RewardArgs(1, 2.0))) as scorer:
        scorer.score([item("x")])
    pids = Path("pids").read_text().split()
    assert len(pids) == 3 and all(map(gone, pids))


def test_workers_die_with_the_trainer(own, tmp_path):
    """Killed while they hang."""
    spec = own(F + "open(f'pid{os.getpid()}', 'w'), time.sleep(1e9)")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from rewards import *
Scorer([{spec!r}], RewardArgs(reward_timeout=300)).score([Item("", "x", "", {{}}, 1, False)] * 4)
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
    spec = own(F + "print('no space', completion[:9])\n    return float(completion)")
    with closing(Scorer([spec], RewardArgs())) as scorer:
        for size in (300, 0, 1):
            assert totals(scorer.score(as_items(map(str, range(size))))) == list(range(size))
        one, = scorer.score([item("x")])
        assert lost([one]) == {"exception": 1} and "ValueError" in one.error
        big = "1" + " " * 3_000_000   # larger than any pipe's buffer
        assert totals(scorer.score([item(big)] * 3)) == [1.0] * 3
    assert "no space 299\n" in capfd.readouterr().out


# ---- a batch

def scored_on(world, specs, groups, group):
    """(text and score of each sample, how often this rank decoded)"""
    decoded, tokenizer = [], tiny.make_tokenizer()

    def decode(ids, **options):
        decoded.append(len(ids))
        return tokenizer.decode(ids, **options)
    samples = []
    for i in range(groups * group):
        row = data.Row(i, "q", [1], "12" if i % 2 else "3", {}, "")
        ids = np.array([*tokenizer("12")["input_ids"], tokenizer.eos_token_id], np.int32)
        samples.append(Sample(data.Prompt(i, row), Completion(ids, np.zeros(len(ids)), False)))
    with closing(Scorer(specs, RewardArgs(1))) as scorer:
        scorer.wait()
        rewards.score_samples(SimpleNamespace(
            scorer=scorer, world=world, engine=SimpleNamespace(
                tokenizer=SimpleNamespace(decode=decode)),
            log=SimpleNamespace(time=lambda name: nullcontext(), say=print)), samples, group)
    return [(s.text, s.score.total) for s in samples], len(decoded)


def all_scored_on(world, cases):
    return [scored_on(world, *case) for case in cases]


def test_only_the_rank_that_scores_a_text_decodes_it(own, tmp_path):
    """With two whole groups, a rank of three has nothing to score."""
    own("def f(completions, **columns): return [float(len(completions))] * len(completions)")
    found = ranks.results(3, all_scored_on, [
        (["exact"], 5, 2), ([f"{tmp_path}/own.py:f"], 2, 2)])
    for case, counts, values in (0, [4, 3, 3], [0.0, 1.0] * 5), (1, [2, 2, 0], [2.0] * 4):
        assert [theirs[case][1] for theirs in found] == counts
        assert all(theirs[case][0] == [("12", total) for total in values] for theirs in found)


def test_a_batch_that_fails_as_a_whole_stops():
    """After eight calls in a row. Fewer are an accident: one row of an evaluation ended the run."""
    fine, one, bad = Score(0.0, {}, None), Score(None, {}, None), Score(None, {}, "ZeroDivision")
    said, scorer = [], SimpleNamespace(kind="reward", unscored=0, warned=False)

    def report(scores, calls):
        rewards.report(scorer, SimpleNamespace(say=said.append), scores, calls)
    report([bad] * 4 + [fine], 8)   # one is enough
    for _ in range(7):
        report([one], 1)
    report([fine], 1)
    report([one], 7)
    with pytest.raises(SettingsError, match="1 completions has .*\nevery reward returned None"):
        report([one], 1)
    assert len(said) == 1 and "ZeroDivision" in said[0]   # printed once


# ---- hostile completions

def test_reasoning_gym_never_evaluates_an_answer(tmp_path):
    """Nine of its scorers ran `__import__('os')`."""
    gym = pytest.importorskip("reasoning_gym")
    tasks = """countdown puzzle24 simple_integration intermediate_integration n_queens
        polynomial_multiplication string_insertion spiral_matrix binary_matrix bitwise_arithmetic
        knights_knaves chain_sum prime_factorization""".split()
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


# ---- rewards that wait

MEETING = """
open = most = 0
async def f(completion):
    global open, most
    open += 1
    most = max(most, open)
    while most < int(completion):
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    open -= 1
    return most
"""


@pytest.mark.parametrize("n, workers, together", [(70, 1, 64), (70, 2, 6)])
def test_the_coroutines_of_a_worker_run_together(own, n, workers, together):
    """Each waits until as many run at once as may, or as are left: fewer would wait for ever."""
    texts = [str(min(together, n - i // 64 * 64)) for i in range(n)]
    scores = score([own(MEETING)], texts, workers=workers, timeout=60.0)
    assert all(int(text) <= s.total <= 64 for text, s in zip(texts, scores, strict=True))


BAD = {"time.sleep(1e9)": "no answer within", "os._exit(3)": "the worker ended with code 3",
       "raise KeyError('gone')": "KeyError: 'gone'", "return float('nan')": "finite number",
       "await refuse()": "no answer within"}


def test_a_coroutine_that_hangs_or_dies_costs_its_completion_only(own):
    faults = "".join(f"    if completion == {code!r}:\n        {code}\n" for code in BAD)
    spec = own("async def refuse():  # to be cancelled\n    while True:\n        try:\n"
               "            await asyncio.sleep(1e9)\n        except asyncio.CancelledError:\n"
               "            pass\nasync def f(completion):\n    await asyncio.sleep(0)\n" + faults
               + "    return float(completion)")
    texts = [text for i, code in enumerate(BAD) for text in (str(i), code)] + ["99"]
    scores = score([spec, "short"], texts, timeout=2.0)
    assert totals(scores[::2]) == [i - 0.001 for i in [*range(len(BAD)), 99]]
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

    monkeypatch.setattr(worker.asyncio, "sleep", sleep)
    reward = signatures.Reward("ours", f, ["completion"], [], True)
    for needed, value, waited in ("0", 1, []), ("3", 4, [1, 2, 4]), ("9", None, [1, 2, 4]):
        pauses.clear(), tries.clear()
        call = worker.Call([item(needed)], [reward])
        asyncio.run(worker.score_waiting([reward], [call], 0.2, 3))
        assert (call.values, pauses, call.retries) == ([[value]], waited, len(waited))
        assert bool(call.error) == (value is None)
    assert "the server is away" in call.error


def test_groups_and_plain_rewards_beside_coroutines(own):
    own("async def f(completions, **columns): return [len(completions)] * len(completions)\n"
        "def g(completion): return int(completion)\n"
        "async def h(completion):\n    if completion == '3': raise ValueError\n    return 5")
    scores = score(["own.py:f", "own.py:g", "own.py:h:2"], ["1", "2", "3", "4"], 2)
    assert parts(scores) == [(2, 1, 5), (2, 2, 5), (2, 3, None), (2, 4, 5)]
    assert totals(scores) == [13, 14, None, 16]


# ---- examples/judge.py, examples/reward_model.py

GRADES = json.dumps({"correct": 10, "complete": 5, "brief": 0})


class Server(BaseHTTPRequestHandler):
    """Grades as a completion says: away (once 503), odd, or the grades."""
    away, asked = True, []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][0]["content"]
        Server.asked.append((self.path, self.headers["Authorization"], body["model"], said))
        if "away" in said.partition("<answer>")[2] and Server.away:
            Server.away = False
            return self.send_error(503)
        text = "I would say: good" if "odd" in said.partition("<answer>")[2] else GRADES
        answer = json.dumps({"choices": [{"message": {"content": text}}], "usage": {
            "prompt_tokens": 100, "completion_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_the_judge_behind_a_server(monkeypatch, capfd):
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        for name, value in dict(JUDGE_URL=url, JUDGE_MODEL="m", JUDGE_KEY="k",
                                NO_PROXY="127.0.0.1").items():
            monkeypatch.setenv(name, value)
        texts = [item(text, prompt="What is 6 x 7?") for text in ("42", "away", "odd")]
        scores = score([f"{ROOT}/examples/judge.py:judge"], texts, workers=1, retries=1,
                       timeout=60.0)
        server.shutdown()
    assert [(s.total, s.retries) for s in scores] == [(0.5, 0), (0.5, 1), (None, 1)]
    assert "no grade from 0 to 10 for correct, complete, brief" in scores[2].error
    assert "4 calls, 400 tokens read, 36 written" in capfd.readouterr().out
    assert {asked[:3] for asked in Server.asked} == {("/v1/chat/completions", "Bearer k", "m")}
    judge, said = importlib.import_module("examples.judge"), Server.asked[0][3]
    assert "What is 6 x 7?" in said and all(text in said for text in judge.RUBRIC.values())
    assert judge.grade(f"So {{x}}:\n```json\n{GRADES}\n```") == 0.5
    for other in "11", "9.5", '"10"', "null":
        with pytest.raises(ValueError, match="the judge gave no grade"):
            judge.grade(GRADES.replace("10", other))


@pytest.mark.parametrize("reward, missing", [
    ("judge.py:judge", "JUDGE_URL and JUDGE_MODEL"), ("reward_model.py:score", "REWARD_MODEL")])
def test_what_an_example_needs_is_said_before_the_run(monkeypatch, reward, missing):
    for name in "JUDGE_URL", "JUDGE_MODEL", "REWARD_MODEL":
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError, match=missing) as error:
        rewards.check([f"{ROOT}/examples/{reward}"])
    assert "Traceback" not in str(error.value)


def test_the_reward_model_is_the_classifiers_logit(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))

    def logit(question, completion):
        text = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                f"{completion}<|im_end|>\n")
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits)

    pairs = [("6 x 7", "42"), ("6 x 7", ""), ("7 x 6", "42")]
    scores = score([f"{ROOT}/examples/reward_model.py:score"],
                   [item(text, prompt=asked, question="6 x 7") if asked == "6 x 7"
                    else item(text, prompt=asked) for asked, text in pairs], workers=1, timeout=60)
    expected = [logit(*pair) for pair in pairs]
    assert totals(scores) == pytest.approx(expected, abs=1e-5), scores[0].error
    assert len({*expected}) == 3
