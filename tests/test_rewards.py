"""Rewards: verifiers by hand, signatures, hostile rewards and completions, real rows (not here)."""
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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import ranks
import rewards
from dist import SettingsError
from examples import countdown, gsm8k, kk, tiny
from rewards import Item, RewardArgs, Score, Scorer
from scoring import verifiers
from trainer.batch import Completion, Sample

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("REAL_ROWS", "real_rows")).resolve()
F = "def f(completion, answer):\n    "


def item(completion, answer="", prompt="", tokens=1, truncated=False, **row):
    return Item(prompt, completion, answer, row, tokens, truncated)


def as_items(texts):
    return [item(x) if isinstance(x, str) else x for x in texts]


def score(specs, items, group=1, workers=2, timeout=10.0):
    """The scores of one batch in a fresh pool."""
    with closing(Scorer(specs, RewardArgs(workers, timeout))) as scorer:
        scorer.wait()
        return scorer.score(as_items(items), group if scorer.groups else 1)


def totals(scores):
    return [s.total for s in scores]


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
        (tmp_path / name).write_text("import os, sys, time\n" + code)
        return name + ":f"
    return write


# ---- the verifiers, by hand

KK = "(1) Zoey is a knight\n(2) Ben is a knave"


def tagged(said):
    return f"<think>x</think><answer>{said}</answer>"


@pytest.mark.parametrize("function, cases", [
    (gsm8k.gsm8k, [
        ("#### 18", "#### 18", 1), ("#### 18", 18, 1), ("#### 18.0", "18", 1), ("18.", "18", 1),
        ("#### $1,234.50", "#### 1234.5", 1), ("The answer is 1,234 dollars.", "1234", 1),
        ("#### 17\n\nNext question: 18", "#### 18", 0), ("#### 18 apples of 20", "18", 1),
        (r"\boxed{18} of 20", "18", 1), (r"\boxed{\text{\$18}} of 20", "18", 1),
        (r"\boxed{18", "18", 1), ("first 18, then 20", "18", 0), ("", "18", 0),
        ("#### none, but 18", "18", 1), ("#### none\n18", "18", 0), ("#### 18.01", "18", 0),
        ("10-5", "5", 1), ("x = -5", "-5", 1), ("$-5", "-5", 1), ("-$5", "-5", 1),
        (".5", "0.5", 1), ("1,2345", "2345", 1), ("#### 0.30", "0.3", 1)]),
    (verifiers.math_reward, [
        (r"\boxed{\frac{14}{3}}", r"\frac{14}{3}", 1), ("It is $14/3$.", r"\frac{14}{3}", 1),
        (r"\boxed{72}", "48+24=72\n#### 72", 1), (r"\boxed{x+1}", r"hence \boxed{1 + x}", 1),
        (r"\boxed{0.5}", r"\frac12", 1), (r"\boxed{71}", "#### 72", 0), ("no idea", "72", 0)]),
    (kk.kk, [
        (tagged(KK), KK, 3), (tagged(KK), {"solution_text_format": KK}, 3),
        (tagged("ben IS a Knave. Zoey is a knight").replace("<a", " <a") + " bye", KK, 3),
        (tagged("Zoey is a knave, Ben is a knave"), KK, -0.5),
        *((tagged(said), KK, -1) for said in (
            "", "knight knave", "Zoey is a knight", "Zoey is a knight, Zoey is a knave",
            "Zoey is a knight, Ben is a knave or a knight")),
        *((wrong, KK, -3) for wrong in (
            KK, f"<answer>{KK}</answer>", "<think>" + tagged(KK),
            tagged(KK) + f"<answer>{KK}</answer>", f"<answer>{KK}</answer><think>x</think>",
            f"<think>x<answer>{KK}</answer></think>", f"x</think><answer>{KK}</answer>",
            f"<think>x</think><answer>{KK}"))])])
def test_verifiers(function, cases):
    for completion, answer, expected in cases:
        assert function(completion, answer) == expected, completion
        if function is kk.kk:
            assert kk.kk01(completion, answer) == (expected == 3)
            assert verifiers.format_tags(completion) == (expected != -3)


@pytest.mark.parametrize("begin, prompt, expected", [
    ("", "...<|im_start|>assistant\n<think>", 3),
    ("<think>", "...assistant\n<think>\n", 3),   # opened again at once: the same text
    ("y<think>", "...assistant\n<think>", -3), ("", "...assistant\n", -3)])
def test_a_prompt_that_opens_the_thinking(begin, prompt, expected):
    completion = f"{begin}x</think><answer>{KK}</answer>"
    assert kk.kk(completion, KK, prompt=prompt) == expected


RIGHT = ["(25 - 5) * 4 / 2", "(25 - 5) * (4 - 2)", "-(5 - 25) * 4 / 2"]
WRONG = ["25 + 5 + 4 + 2", "40", "(25 - 5) * 4 / 2 + 5 - 5", "(25 - 5) * 2",
         "(25 - 5) * 4 / 2 = 40", "(25-5)*4//2", "5/(4-4)*25*2", "", "25 5", "((25-5)*4/2",
         "(25-5)*4/2)", "²", "25-5*4**2", "__import__('os')", "(٢5-5)*4/2"]


def test_countdown():
    for text in RIGHT + WRONG:
        for completion in (text, f"I try\n{text}", f"<answer>{text}</answer>",
                           f"<answer>1</answer> no: <answer>{text}</answer> ok"):
            for row in ({"nums": [25, 5, 4, 2]}, {"numbers": [2, 4, 5, 25]}):
                assert countdown.countdown(completion, target=40, **row) == (text in RIGHT), text
    # Exact: floats would give 33.0 on some machines, and 23.99999999999999.
    assert countdown.countdown("1 / 3 * 9 * 11", nums=[1, 3, 9, 11], target=33) == 1
    assert countdown.countdown("(8 / (3 - 8 / 3))", nums=[3, 3, 8, 8], target=24) == 1


def pairs_of(e):
    pair = st.tuples(e, st.sampled_from("+-*/"), e)
    return pair.map("({0[0]}{0[1]}{0[2]})".format) | pair.map(" ".join)


@settings(max_examples=200, deadline=None)
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


def test_exact_format_short_and_sums():
    scores = score(["exact:2", "short:0.1", "format"],
                   [item(" yes\n", "yes", tokens=2000), item("no", "yes", tokens=10)])
    assert scores[0] == Score(2.0 - 0.2, {"exact": 1.0, "short": -2.0, "format": 0.0}, None)
    assert scores[1].total == pytest.approx(-0.001)


# ---- real rows

def jsonl(name):
    return [json.loads(line) for line in open(DATA / f"{name}.jsonl")]


@pytest.mark.skipif(not DATA.is_dir(), reason="REAL_ROWS names no folder of rows")
def test_real_rows_score_their_own_solutions():
    """gsm8k, and math500: what math-verify says in a plain main thread. (Its timers need it:
    elsewhere, each score was silently 0.)"""
    from math_verify import parse, verify
    answers = [row["answer"] for name in ("train", "test") for row in jsonl(f"gsm8k/{name}")]
    assert {*totals(score(["gsm8k"], [item(text, text) for text in answers]))} == {1.0}
    golds = [int(text.rpartition("#### ")[2].replace(",", "")) + 1 for text in answers]
    wrong = [item(f"#### {gold:,}", text) for gold, text in zip(golds, answers, strict=True)]
    assert {*totals(score(["gsm8k"], wrong))} == {0.0}
    rows = jsonl("math500/test")
    golds = [row["answer"] for row in rows]
    pairs = [(row["solution"] if i % 3 else f"I think the answer is ${golds[i - 1]}$", golds[i])
             for i, row in enumerate(rows)]
    plain = [float(verify(parse(rf"\boxed{{{gold}}}"), parse(text))) for text, gold in pairs]
    scores = score(["math"], [item(*pair) for pair in pairs], timeout=30)
    assert totals(scores) == plain and 300 < sum(plain) < 400


# ---- settings

@pytest.mark.parametrize("specs, sentence", [
    (["maths", "nope:2"], "(?s)maths.*no such reward.*nope"), (["math:nan"], "finite"),
    (["math", "math:2"], "twice"), ([], "empty"), (["nowhere.py:f"], "no such file"),
    (["own.py"], "FILE.py:FUNCTION"), (["own.py:missing"], "own.py has no missing"),
    (["own.py:std"], "reward/std is"), (["own.py:batch"], r"it has \['data_sources'"),
    (["broken.py:f"], "ZeroDivisionError"), (["exit.py:f"], "ended with code 7"),
    (["says.py:f"], r"GB\): set KEY first$")])
def test_mistakes_are_found_before_anything_starts(own, specs, sentence):
    own("def batch(data_sources): return 1\n")
    own("1 / 0\n", "broken.py"), own("os._exit(7)\n", "exit.py")
    own("sys.exit('set KEY first')\n", "says.py")
    with pytest.raises(SettingsError, match=sentence):
        rewards.check(specs)


def test_weights_and_names(own):
    spec = own(F + "return 1")
    assert rewards.parse(["math:1", "format:0.2", "exact", f"{spec}:-0.5"]) == [
        ("math", 1, None), ("format", 0.2, None), ("exact", 1, None), ("f", -0.5, "own.py")]


@pytest.mark.parametrize("kind, spec", [("tools", "own.py:f:2"), ("reply", "gone.py:f")])
def test_a_mistake_names_its_own_flag(own, kind, spec):
    """`--tools nope` spoke of a reward."""
    own(F + "return 1")
    with pytest.raises(SettingsError) as error:
        rewards.parse([spec], kind)
    assert f"--{kind} {spec}" in str(error.value) and "reward" not in str(error.value)


@pytest.mark.parametrize("spec", ["kk", "countdown", "own.py:f", "math", "reasoning_gym"])
def test_a_worker_loads_no_torch(own, spec):
    """In another folder than the project's. What a reward does not need is not loaded either."""
    own("def f(completion): return None")
    heavy = {"torch", "transformers"}
    if spec not in ("math", "reasoning_gym"):
        heavy |= {"math_verify", "sympy", "numpy", "reasoning_gym"}
    path, _, name = spec.rpartition(":")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scoring import worker\n"
            f"from scoring.signatures import Part\n"
            f"worker.load('reward', [Part({name!r}, 1, {path or None!r})])\n"
            f"print({heavy} & set(sys.modules))")
    assert subprocess.check_output([sys.executable, "-c", code]) == b"set()\n"


@pytest.mark.parametrize("spec, answer, sentence", [
    ("exact", None, "--reward exact needs 'answer'; 1 of 2 rows have none .first: row 4 of rows"),
    ("math", "", "needs 'answer'"), ("reasoning_gym", 3, "needs 'metadata'"),
    ("own.py:f", 3, "needs 'trainer_state'"), ("own.py:g", None, "needs 'level'"),
    ("own.py:h", None, None)])
def test_rows_that_lack_what_a_reward_needs_are_refused(own, spec, answer, sentence):
    own("def f(completions, trainer_state): pass\ndef g(completion, level): pass\n"
        "def h(completion, answer): pass")
    rows = [data.Row(i, "q", [1], a, {"level": 1} if a else {}, "rows")
            for i, a in ((3, 5), (4, answer))]
    if not sentence:
        return rewards.check_rows(rewards.check([spec]), rows)
    with pytest.raises(SettingsError, match=sentence):
        rewards.check_rows(rewards.check([spec]), rows)


# ---- signatures

SIGNATURES = """
import asyncio, torch
def ours(completion, answer, **row):
    return len(completion) + 10 * row["level"] + 100 * row["tokens"]
def few(completion, level): return level
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
def texts(completions, prompts, **columns):
    assert len(set(prompts)) == 1 and columns["answer"] == ["b"] * len(completions)
    return [float(c == max(completions)) for c in completions]
"""


def test_rewards_of_others_unchanged(own):
    own(SIGNATURES)
    row = dict(level=2, data_source="here", extra_info={"i": 1}, reward_model={"ground_truth": "b"},
               prompt=[{"role": "user", "content": "q"}])
    items = [Item("<q>", text, "b", row, 1, False) for text in ("a", "b", "bb", "b")]
    names = ["ours", "few", "verl", "waiting_verl", "plain_trl", "trl", "alone"]
    specs = [f"own.py:{name}" for name in names]
    assert rewards.check(specs) == [["few", "level"], ["trl", "level"]]
    with closing(Scorer(specs, RewardArgs(reward_workers=1))) as scorer:
        scorer.wait()
        assert scorer.groups
        scores = scorer.score(items, 2)
    assert [tuple(s.parts.values()) for s in scores] == [
        (121, 2, 0, 1, 0, 1, 1), (121, 2, 1, 1, 1, 1, 1), (122, 2, 0, 2, 0, 2, 1),
        (121, 2, 1, 1, 1, 1, 1)], scores[0].error
    plain = [i._replace(row={}) for i in items]  # prompts that are texts
    assert totals(score(["own.py:texts"], plain, group=2)) == [0, 1, 1, 0]


def test_none_is_unscorable_and_no_failure(own):
    spec = own(F + "return None if completion == 'x' else 1.5")
    assert score([spec, "exact"], [item("x", "x"), item("y", "y")]) == [
        Score(None, {"f": None, "exact": 1.0}, None), Score(2.5, {"f": 1.5, "exact": 1.0}, None)]


@pytest.mark.parametrize("fault, kind", [
    ("raise ValueError('no')", "exception"), ("os._exit(1)", "death"),
    ("time.sleep(1e9)", "timeout"), ("return [1.0]", "exception")])
def test_a_failure_of_a_group_reward_costs_the_group(own, fault, kind):
    spec = own(f"def f(prompts, completions, **columns):\n    if 'bad' in completions: {fault}\n"
               "    return [1.0] * len(completions)")
    scores = score([spec], ["a", "b", "c", "bad", "e", "f"], group=2, timeout=2.0)
    assert totals(scores) == [1, 1, None, None, 1, 1] and lost(scores) == {kind: 2}


@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_group_has_the_time_of_all_its_completions(own, define):
    """Three completions of at most a second each, in one call of 1.6 s."""
    spec = own(f"{define} f(completions, **columns):\n    time.sleep(1.6)\n    return [1.0] * 3")
    assert totals(score([spec], ["a", "b", "c"], group=3, timeout=1.0)) == [1, 1, 1]


# ---- hostile rewards

HOSTILE = {   # how a completion is lost: what the reward does
    "exception": [
        "raise RuntimeError('on purpose')", "return float('nan')", "return float('inf')",
        "return '1.0'", r"raise RuntimeError('\ud800')"],
    "exception, death or timeout": ["return 9**9**9**9"],
    "timeout": ["time.sleep(1e9)", "os.kill(os.getpid(), 19)", "while True: pass"],
    "death": ["os._exit(3)", "sys.exit(0)", "os.kill(os.getpid(), 11)", "os.closerange(3, 99)",
              "while True: hoard.append(bytearray(1 << 26))",
              "time.sleep(1e9) if os.fork() == 0 else os._exit(0)", "os.killpg(0, 9)"],
    "": ["os.fork()", "if os.fork() == 0: time.sleep(1e9)", "return True",
         r"print('\ud800')", "os.close(1), os.close(2)"]}


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


def running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true, seconds=60):
    deadline = time.time() + seconds
    while time.time() < deadline and not true():
        time.sleep(0.05)
    return true()


def gone(pid):
    return wait_until(lambda: not running(pid))


@pytest.mark.parametrize("end", ["", "time.sleep(1e9)", "os._exit(3)"])
def test_what_a_reward_forks_dies_with_its_worker(own, end):
    """Closed, late, or crashed."""
    spec = own("import subprocess\n" + F + "pid = os.fork()\n    if not pid: time.sleep(1e9)\n"
               "    shell = subprocess.Popen(['sleep', '99'])\n"
               "    print(pid, shell.pid, os.getpid(), file=open('pids', 'w'), flush=True)\n"
               f"    {end}\n    return 1")
    with closing(Scorer([spec], RewardArgs(1, 2.0))) as scorer:
        scorer.score([item("x")])
        pids = [int(pid) for pid in Path("pids").read_text().split()]
        assert len(pids) == 3 and (end or all(map(running, pids)))
    assert all(map(gone, pids))


def test_workers_die_with_the_trainer(own, tmp_path):
    """Killed while they hang."""
    spec = own(F + "open(f'pid{os.getpid()}', 'w'), time.sleep(1e9)")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from rewards import *
Scorer([{spec!r}], RewardArgs()).score([Item("", "x", "", {{}}, 1, False)] * 4)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert all(map(running, pids))
    parent.kill()
    parent.wait()
    assert all(map(gone, pids))


def test_a_worker_that_stops_starting_ends_the_batch(own):
    start = "if os.path.exists('started'): raise SystemExit\nopen('started', 'w')\n"
    scores = score([own(start + F + "os._exit(1)")], ["x"] * 20, workers=1)
    assert totals(scores) == [None] * 20 and lost(scores) == {"death": 20}


def test_order_and_reuse(own):
    with closing(Scorer([own(F + "return float(completion)")], RewardArgs())) as scorer:
        for size in (1000, 0, 3, 1):
            assert totals(scorer.score(as_items(map(str, range(size))))) == list(range(size))
        one, = scorer.score([item("x")])
        assert lost([one]) == {"exception": 1} and "ValueError" in one.error
        big = "1" + " " * 3_000_000   # larger than any pipe's buffer
        assert totals(scorer.score([item(big)] * 5)) == [1.0] * 5


def test_what_a_reward_prints_goes_where_the_trainers_output_goes(own, capfd):
    one, = score([own(F + "print('no space left'), os._exit(3)")], ["x"])
    assert one.error == "the worker ended with code 3\nThe completion: 'x'"
    assert capfd.readouterr().out == "no space left\n"


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
    groups = [f"{tmp_path}/own.py:f"]
    found = ranks.results(3, all_scored_on, [(["exact"], 5, 2), (groups, 5, 2), (groups, 2, 2)])
    shares = [[4, 3, 3], [4, 4, 2], [2, 2, 0]]   # texts of each rank
    expected = [[0.0, 1.0] * 5, [2.0] * 10, [2.0] * 4]
    for case, (counts, values) in enumerate(zip(shares, expected, strict=True)):
        assert [theirs[case][1] for theirs in found] == counts
        for theirs in found:
            assert theirs[case][0] == [("12", total) for total in values]


def report(scores, calls=1, scorer=None):
    """What the log gets."""
    said = []
    scorer = scorer or SimpleNamespace(kind="reward", unscored=0, warned=False)
    rewards.report(scorer, SimpleNamespace(say=said.append), scores, calls)
    return "".join(said)


def test_a_batch_that_fails_as_a_whole_stops(own):
    """After eight calls in a row. Fewer are an accident: one row of an evaluation ended the run."""
    scores = score([own(F + "return 1 / len(completion)")], [""] * 4)
    fine, lost_one = Score(0.0, {}, None), Score(None, {}, None)
    assert "ZeroDivisionError" in report([*scores, fine], 8)   # one is enough
    with pytest.raises(SettingsError, match="(?s)4 completions.*own.py.*ZeroDivisionError"):
        report(scores, 8)
    scorer = SimpleNamespace(kind="reward", unscored=0, warned=False)
    said = [report([lost_one], scorer=scorer) for _ in range(7)]
    assert "every reward returned None" in said[0] and not any(said[1:])  # printed once
    assert not report([fine, fine], scorer=scorer)
    for _ in range(7):
        report([lost_one], scorer=scorer)
    with pytest.raises(SettingsError, match="every reward returned None"):
        report([lost_one], scorer=scorer)


# ---- hostile completions

def test_reasoning_gym_never_evaluates_an_answer(tmp_path):
    """Nine of its scorers ran `__import__('os')`."""
    gym = pytest.importorskip("reasoning_gym")
    tasks = """countdown puzzle24 simple_integration intermediate_integration n_queens
        polynomial_multiplication string_insertion spiral_matrix binary_matrix bitwise_arithmetic
        knights_knaves chain_sum prime_factorization""".split()
    entries = {task: gym.create_dataset(task, size=1, seed=3)[0] for task in tasks}
    code = f"__import__('pathlib').Path('{tmp_path}/executed').touch()"
    hostile = [code, f"sin({code})", f'sin("{code}")', f"[{code}]", f"(lambda: {code})()",
               "().__class__.__base__.__subclasses__()"]
    texts = [(task, f"so <answer>{entries[task]['answer']}</answer>") for task in tasks]
    texts += [(task, text) for task in tasks for text in hostile]
    scores = score(["reasoning_gym"], [item(text, **entries[task]) for task, text in texts])
    assert totals(scores[:len(tasks)]) == [1.0] * len(tasks)
    assert max(totals(scores[len(tasks):])) < 0.1 and not lost(scores)
    assert not list(tmp_path.iterdir())


TOUCH = "__import__('os').system('touch executed')"
BOXED = ["9^{9^{9}}", "((9!)!)!", "9^{" * 200 + "9" + "}" * 200, "(" * 100_000 + ")" * 100_000,
         "\0", "9" * 1_000_000, TOUCH]
BOMBS = [*(rf"\boxed{{{text}}}" for text in BOXED), r"\boxed{" * 100_000, "<answer>" * 100_000,
         *(f"<answer>{text}</answer>" for text in ("(" * 100_000, "9" * 299, TOUCH)),
         "The answer is 9**9**9**9", "(" * 100_000, "\0", "\ud800", "9" * 1_000_000, TOUCH]


@pytest.mark.parametrize("spec", ["gsm8k", "math", "countdown", "kk", "format", "exact"])
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
