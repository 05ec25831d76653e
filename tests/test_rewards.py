"""Rewards: the verifiers on real rows, hostile rewards and completions, the three signatures. Rows are not in the repository."""
import glob
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import rewards
import verifiers
from plan import SettingsError
from rewards import Item, RewardError, Score, Scorer, raise_if_all_failed

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real rows are not here")


def item(completion, answer="", prompt="", tokens=1, truncated=False, **row):
    return Item(prompt, completion, answer, row, tokens, truncated)


def score(specs, items, group=1, **options):
    """(scores, failures, first traceback) of one batch in a fresh pool."""
    scorer = Scorer(specs, **options)
    try:
        return scorer.score(items, group), scorer.failures, scorer.first_traceback
    finally:
        scorer.close()


def jsonl(path):
    return [json.loads(line) for line in open(path)]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a reward file; give its name."""
    monkeypatch.chdir(tmp_path)

    def write(code, name="own.py"):
        (tmp_path / name).write_text("import os, sys, time\n" + code)
        return name
    return write


# ---------------------------------------------------------------------------------------------------- real rows

@needs_data
def test_every_gsm8k_row_scores_its_own_solution_1_and_a_wrong_number_0():
    rows = jsonl(DATA / "gsm8k/train.jsonl") + jsonl(DATA / "gsm8k/test.jsonl")
    assert len(rows) == 7473 + 1319

    def wrong(row):
        gold = row["answer"].rpartition("#### ")[2]
        return f"#### {int(gold.replace(',', '')) + 1:,}"
    right, failures, _ = score(["gsm8k"], [item(row["answer"], row["answer"]) for row in rows])
    assert {s.total for s in right} == {1.0} and not failures.total()
    assert {s.total for s in score(["gsm8k"], [item(wrong(row), row["answer"]) for row in rows])[0]} == {0.0}


@needs_data
def test_every_knights_and_knaves_row_scores_its_own_solution_3():
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row for path in sorted(glob.glob(str(DATA / "kk/*.parquet"))) for row in parquet.read_table(path).to_pylist()]
    assert len(rows) == 5000

    def of(row, text, opened):
        prompt = row["prompt"][0]["content"]   # ends in <think>: the completion need not open it, and may
        assert prompt.endswith("<think>")
        return item(("" if opened else "<think>") + f"so</think>\n<answer>{text}</answer>", row["reward_model"]["ground_truth"], prompt)
    flip = str.maketrans({"\0": "knave", "\1": "knight"})
    solutions = [row["solution_text_format"] for row in rows]
    flipped = [t.replace("knight", "\0").replace("knave", "\1").translate(flip) for t in solutions]
    for opened in (True, False):
        scores, failures, _ = score(["kk", "kk01"], [of(r, t, opened) for r, t in zip(rows, solutions)])
        assert Counter((s.parts["kk"], s.parts["kk01"]) for s in scores) == {(3.0, 1.0): 5000} and not failures.total()
    assert {s.total for s in score(["kk"], [of(r, t, True) for r, t in zip(rows, flipped)])[0]} == {-0.5}


# Rows of MATH-500 whose answer math-verify 0.9.0 does not verify against itself: none, boxed or between dollars.
MATH500_FAILURES = set()


@needs_data
def test_math500_answers_verify_against_themselves_and_not_against_others():
    rows = jsonl(DATA / "math500/test.jsonl")
    boxed, failures, _ = score(["math"], [item(rf"So it is \boxed{{{r['answer']}}}.", r["answer"]) for r in rows], timeout=30)
    assert {r["unique_id"] for r, s in zip(rows, boxed) if s.total != 1} == MATH500_FAILURES and not failures.total()
    pairs = [(rows[i], rows[i - 1]) for i in range(200)]
    wrong, _, _ = score(["math"], [item(rf"So it is \boxed{{{other['answer']}}}.", row["answer"]) for row, other in pairs], timeout=30)
    equal = [(row["answer"], other["answer"]) for (row, other), s in zip(pairs, wrong) if s.total]
    assert equal == [("x=5", "5"), ("7", "7")]   # math-verify takes an assignment for its value


PLAIN = r"""
import json, sys
from math_verify import parse, verify
for row in map(json.loads, open(sys.argv[1])):
    gold = parse(r"\boxed{" + row["gold"] + "}")
    print(float(verify(gold, parse(row["text"]))))
"""


@needs_data
def test_math_in_the_workers_is_math_in_a_plain_main_thread(tmp_path):
    """math-verify's timers need the main thread's SIGALRM: in threads of other frameworks every score silently became 0."""
    rows = jsonl(DATA / "math500/test.jsonl")
    answers = [r["answer"] for r in rows]
    texts = [rows[i]["solution"] if i % 3 else f"I think the answer is ${answers[i - 1]}$" for i in range(500)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"gold": a, "text": t}) + "\n" for a, t in zip(answers, texts)))
    (tmp_path / "plain.py").write_text(PLAIN)
    plain = subprocess.run([sys.executable, str(tmp_path / "plain.py"), str(tmp_path / "rows.jsonl")], capture_output=True, text=True, check=True)
    ours, failures, _ = score(["math"], [item(t, a) for t, a in zip(texts, answers)], timeout=30)
    assert [s.total for s in ours] == [float(line) for line in plain.stdout.split()]
    assert 300 < sum(s.total for s in ours) < 400 and not failures.total()


# ---------------------------------------------------------------------------------------------------- the verifiers, by hand

@pytest.mark.parametrize("completion, answer, expected", [
    ("#### 18", "#### 18", 1), ("#### 18.0", "18", 1), ("#### $1,234.50", "#### 1234.5", 1), ("The answer is 1,234 dollars.", "1234", 1),
    ("#### 17\n\nNext question: 18", "#### 18", 0), ("#### 18 apples of 20", "18", 1), (r"\boxed{18} of 20", "18", 1),
    (r"\boxed{\text{\$18}} of 20", "18", 1), ("first 18, then 20", "18", 0), ("#### none, but 18", "18", 1), ("#### none\n18", "18", 0),
    ("10-5", "5", 1), ("x = -5", "-5", 1), ("$-5", "-5", 1), ("-$5", "-5", 1), ("", "18", 0), ("18.", "18", 1), (".5", "0.5", 1),
    ("#### 18", 18, 1), ("1,2345", "2345", 1), ("#### 0.30", "0.3", 1), ("#### 18.01", "18", 0), (r"\boxed{18", "18", 1)])
def test_gsm8k(completion, answer, expected):
    assert verifiers.gsm8k(completion, answer) == expected


def test_a_row_without_a_number_is_a_mistake_and_not_a_zero():
    scores, failures, trace = score(["gsm8k"], [item("18", "no number here"), item("18", "18")])
    assert [s.total for s in scores] == [None, 1.0] and failures == {"exception": 1} and "needs a number" in trace


@pytest.mark.parametrize("completion, answer, expected", [
    (r"\boxed{\frac{14}{3}}", r"\frac{14}{3}", 1), ("It is $14/3$.", r"\frac{14}{3}", 1), (r"\boxed{72}", "48+24=72\n#### 72", 1),
    (r"\boxed{x+1}", r"hence \boxed{1 + x}", 1), (r"\boxed{0.5}", r"\frac12", 1), (r"\boxed{71}", "#### 72", 0), ("no idea", "72", 0)])
def test_math(completion, answer, expected):
    assert verifiers.math_reward(completion, answer) == expected


@pytest.mark.parametrize("completion, expected", [
    ("<answer>(25 - 5) * 4 / 2</answer>", 1), ("I try\n(25 - 5) * 4 / 2", 1), ("<answer>1</answer> no: <answer>(25-5)*4/2</answer> ok", 1),
    ("<answer>25 + 5 + 4 + 2</answer>", 0), ("<answer>40</answer>", 0), ("<answer>(25 - 5) * 4 / 2 + 5 - 5</answer>", 0),
    ("<answer>(25 - 5) * (4 - 2)</answer>", 1), ("<answer>(25 - 5) * 2</answer>", 0), ("<answer>(25 - 5) * 4 / 2 = 40</answer>", 0),
    ("<answer>(25-5)*4//2</answer>", 0), ("<answer>5/(4-4)*25*2</answer>", 0), ("<answer></answer>", 0), ("", 0), ("25 5", 0),
    ("<answer>-(5 - 25) * 4 / 2</answer>", 1), ("<answer>((25-5)*4/2</answer>", 0), ("<answer>(25-5)*4/2)</answer>", 0), ("<answer>²</answer>", 0),
    ("<answer>25-5*4**2</answer>", 0), ("<answer>__import__('os')</answer>", 0), ("<answer>(٢5-5)*4/2</answer>", 0)])
def test_countdown(completion, expected):
    assert verifiers.countdown(completion, nums=[25, 5, 4, 2], target=40) == expected
    assert verifiers.countdown(completion, numbers=[2, 4, 5, 25], target=40) == expected


def test_countdown_is_exact():
    assert verifiers.countdown("1 / 3 * 9 * 11", nums=[1, 3, 9, 11], target=33) == 1   # floats: 33.0 here, not everywhere
    assert verifiers.countdown("(8 / (3 - 8 / 3))", nums=[3, 3, 8, 8], target=24) == 1  # floats: 23.99999999999999


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.tuples(e, st.sampled_from("+-*/"), e).map("({0[0]}{0[1]}{0[2]})".format)
                    | st.tuples(e, st.sampled_from("+-*/"), e).map(" ".join), max_leaves=12))
def test_arithmetic_agrees_with_python(text):
    """The oracle is Python's own grammar over Fractions: our parser must give the same value, or fail with it."""
    import re
    exact = re.sub(r"\d+", lambda m: f"F({m[0]})", text)
    if len(text) > 300:
        return
    try:
        expected = eval(exact, {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            verifiers.arithmetic(text)
        return
    value, numbers = verifiers.arithmetic(text)
    assert value == expected and numbers == [int(n) for n in re.findall(r"\d+", text)]


KK = "(1) Zoey is a knight\n(2) Ben is a knave"


@pytest.mark.parametrize("completion, expected", [
    (f"<think>x</think><answer>{KK}</answer>", 3), ("<think>x</think> <answer>ben IS a Knave. Zoey is a knight</answer> bye", 3),
    ("<think>x</think><answer>Zoey is a knave, Ben is a knave</answer>", -0.5), ("<think>x</think><answer>Zoey is a knight</answer>", -1),
    ("<think>x</think><answer>Zoey is a knight, Ben is a knave or a knight</answer>", -1), ("<think>x</think><answer></answer>", -1),
    ("<think>x</think><answer>knight knave</answer>", -1), ("<think>x</think><answer>Zoey is a knight, Zoey is a knave</answer>", -1),
    (KK, -3), (f"<answer>{KK}</answer>", -3), (f"<answer>{KK}</answer><think>x</think>", -3), (f"<think>x<answer>{KK}</answer></think>", -3),
    (f"<think>x</think><answer>{KK}</answer><answer>{KK}</answer>", -3), (f"<think><think>x</think><answer>{KK}</answer>", -3),
    (f"x</think><answer>{KK}</answer>", -3), (f"<think>x</think><answer>{KK}", -3)])
def test_knights_and_knaves(completion, expected):
    assert verifiers.kk(completion, KK) == expected
    assert verifiers.kk(completion, {"solution_text_format": KK}) == expected
    assert verifiers.kk01(completion, KK) == (expected == 3)
    assert verifiers.format_tags(completion) == (expected != -3)


def test_a_prompt_that_opens_the_thinking():
    done = f"x</think><answer>{KK}</answer>"
    assert verifiers.kk(done, KK, prompt="...<|im_start|>assistant\n<think>") == 3
    assert verifiers.kk("<think>" + done, KK, prompt="...assistant\n<think>\n") == 3   # opened again at once: the same text
    assert verifiers.kk("y<think>" + done, KK, prompt="...assistant\n<think>") == -3
    assert verifiers.kk(done, KK, prompt="...assistant\n") == -3


def test_exact_format_short_and_sums():
    scores, _, _ = score(["exact:2", "short:0.1", "format"], [item(" yes\n", "yes", tokens=2000), item("no", "yes", tokens=10)])
    assert scores[0] == Score(2.0 - 0.2, {"exact": 1.0, "short": -2.0, "format": 0.0}, None)
    assert scores[1].total == pytest.approx(-0.001)


# ---------------------------------------------------------------------------------------------------- reasoning-gym

def test_reasoning_gym_scores_with_its_own_scorers_and_never_evaluates_an_answer(tmp_path):
    """Five of its scorers hand the answer to sympy's parse_expr and four to eval: `__import__('os')` in an answer ran."""
    gym = pytest.importorskip("reasoning_gym")
    tasks = ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication", "string_insertion",
             "spiral_matrix", "binary_matrix", "n_queens", "bitwise_arithmetic", "knights_knaves", "chain_sum", "prime_factorization"]
    entries = {task: gym.create_dataset(task, size=1, seed=3)[0] for task in tasks}
    proof = tmp_path / "executed"
    code = f"__import__('pathlib').Path('{proof}').touch()"
    hostile = [code, f"sin({code})", f'sin("{code}")', f"[{code}]", f"(lambda: {code})()", "().__class__.__base__.__subclasses__()"]

    def of(task, text):
        return item(text, reasoning_gym_task=task, reasoning_gym_entry=entries[task])
    right = [of(task, f"so <answer>{entries[task]['answer']}</answer>") for task in tasks]
    wrong = [of(task, text) for task in tasks for text in hostile]
    scores, failures, trace = score(["reasoning_gym"], right + wrong)
    assert [s.total for s in scores[:len(tasks)]] == [1.0] * len(tasks)
    assert max(s.total for s in scores[len(tasks):]) < 0.1 and not failures.total(), trace
    assert not proof.exists()


# ---------------------------------------------------------------------------------------------------- settings

@pytest.mark.parametrize("specs, sentence", [
    (["maths"], "known are math, gsm8k"), (["math:x"], "no file 'math'"), (["math", "math:2"], "twice"), (["math:nan"], "finite"), ([], "empty"),
    (["nowhere.py:f"], "no file 'nowhere.py'"), (["own.py"], "FILE.py:FUNCTION"), (["own.py:missing"], "it has good, odd"),
    (["own.py:odd"], "(text, gold)"), (["own.py:good", "own.py:good:2"], "twice"), (["broken.py:f"], "ZeroDivisionError")])
def test_mistakes_are_found_before_anything_starts(own, specs, sentence):
    own("def good(completion, answer): return 1\ndef odd(text, gold): return 1\n")
    own("1 / 0\n", "broken.py")
    with pytest.raises(SettingsError) as error:
        rewards.check(specs)
    assert sentence in str(error.value)


def test_weights_and_names(own):
    name = own("def good(completion, answer): return 1\n")
    assert rewards.parse(["math:1", "format:0.2", "exact", f"{name}:good", ]) == [
        ("math", 1, None), ("format", 0.2, None), ("exact", 1, None), ("good", 1, name)]
    assert rewards.parse([f"{name}:good:-0.5"]) == [("good", -0.5, name)]
    rewards.check(["gsm8k", f"{name}:good:0.5"])
    with pytest.raises(SettingsError) as error:   # all of them at once
        rewards.parse(["maths", "nope:2"])
    assert "maths" in str(error.value) and "nope" in str(error.value)


def test_importing_does_nothing_and_loads_nothing_heavy():
    code = "import sys, rewards; print([m for m in ('torch', 'math_verify', 'sympy', 'numpy', 'reasoning_gym') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------------- the three signatures

SIGNATURES = """
def ours(completion, answer, **row): return len(completion) + 10 * row["level"] + 100 * row["tokens"]
def few(completion, level): return level
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth and data_source == "here" and extra_info["i"] == 1), "acc": 1}
def best(prompts, completions, level, **columns):
    assert len(set(prompts)) == 1 and isinstance(completions[0], str), "called with one whole group"
    assert columns["answer"] == ["b"] * 3 and level == [2] * 3
    return [float(len(c) == max(map(len, completions))) for c in completions]
"""


def test_three_signatures(own):
    file = own(SIGNATURES)
    row = dict(level=2, data_source="here", extra_info={"i": 1}, reward_model={"ground_truth": "b"}, prompt=[{"role": "user"}])
    items = [Item(f"p{i // 3}", text, "b", row, 1, False) for i, text in enumerate(["a", "b", "ccc", "b", "bb", "a"])]
    scorer = Scorer([f"{file}:{name}" for name in ("ours", "few", "compute_score", "best")])
    try:
        assert scorer.needs_groups
        scores = scorer.score(items, group=3)
    finally:
        scorer.close()
    assert [s.error for s in scores] == [None] * 6
    assert [s.parts["ours"] for s in scores] == [121, 121, 123, 121, 122, 121]
    assert {s.parts["few"] for s in scores} == {2}
    assert [s.parts["compute_score"] for s in scores] == [0, 1, 0, 1, 0, 0]
    assert [s.parts["best"] for s in scores] == [0, 0, 1, 0, 1, 0]
    assert scores[0].total == 123


def test_none_is_unscorable_and_no_failure(own):
    file = own("def some(completion, answer): return None if completion == 'x' else 1.5\n")
    scores, failures, trace = score([f"{file}:some", "exact"], [item("x", "x"), item("y", "y")])
    assert scores == [Score(None, {"some": None, "exact": 1.0}, None), Score(2.5, {"some": 1.5, "exact": 1.0}, None)]
    assert not failures.total() and trace is None


@pytest.mark.parametrize("fault, kind", [("raise ValueError('no')", "exception"), ("os._exit(1)", "death"), ("time.sleep(1e9)", "timeout"),
                                         ("return [1.0, float('nan')]", "exception"), ("return [1.0]", "exception")])
def test_a_failure_of_a_group_reward_costs_the_group(own, fault, kind):
    file = own(f"def g(prompts, completions, **columns):\n    if 'bad' in completions:\n        {fault}\n    return [1.0] * len(completions)\n")
    scores, failures, trace = score([f"{file}:g"], [item(c) for c in ["a", "b", "c", "bad", "e", "f"]], group=2, timeout=0.3)
    assert [s.total for s in scores] == [1, 1, None, None, 1, 1] and failures[kind] == failures.total() == 2 and trace


# ---------------------------------------------------------------------------------------------------- hostile rewards

HOSTILE = """
def reward(completion, answer):
    if completion == "raise": raise RuntimeError("on purpose")
    if completion == "nan": return float("nan")
    if completion == "inf": return float("inf")
    if completion == "string": return "1.0"
    if completion == "sleep": time.sleep(1e9)
    if completion == "spin":
        while True: pass
    if completion == "bigint": return 9**9**9**9
    if completion == "allocate":
        hoard = []
        while True: hoard.append(bytearray(1 << 26))
    if completion == "exit": os._exit(3)
    if completion == "sysexit": sys.exit(0)
    if completion == "segfault": os.kill(os.getpid(), 11)
    if completion == "fork": os.fork()
    if completion == "forksleep" and os.fork() == 0: time.sleep(1e9)
    if completion == "forkexit":
        if os.fork() == 0: time.sleep(1e9)
        os._exit(0)
    if completion == "print": print("x" * 30_000_000)
    if completion == "flood":
        while True: print("x" * 100_000, file=sys.stderr)
    if completion == "surrogate": raise RuntimeError("\\ud800")
    if completion == "garbage":
        for fd in range(3, 20):
            try: os.write(fd, b'{"unit": 0, "parts": [[99.0]]}\\n')
            except OSError: pass
    if completion == "true": return True
    return 1.0
"""
LOST = {"raise": "exception", "nan": "exception", "inf": "exception", "string": "exception", "surrogate": "exception", "allocate": "exception",
        "sleep": "timeout", "spin": "timeout", "bigint": "timeout", "flood": "timeout",
        "exit": "death", "sysexit": "death", "segfault": "death", "forkexit": "death", "garbage": "death"}
HARMLESS = ["fork", "forksleep", "print", "true"]


def test_hostile_rewards_cost_their_completion_and_nothing_else(own):
    file = own(HOSTILE)
    texts = [text for bad in [*LOST, *HARMLESS] for text in (bad, "fine", "fine")]
    start = time.time()
    scores, failures, trace = score([f"{file}:reward"], [item(text) for text in texts], timeout=2.0, memory_gb=0.4)
    assert time.time() - start < 40
    assert [(t, s.total) for t, s in zip(texts, scores)] == [(t, None if t in LOST else 1.0) for t in texts]
    assert failures.total() == len(LOST) and failures["death"] == 5
    assert 3 <= failures["timeout"] <= 5   # "bigint" and "allocate" end by time or by memory, whichever comes first
    assert all(s.error for t, s in zip(texts, scores) if t in LOST) and trace
    json.dumps([s.error for s in scores], ensure_ascii=False).encode()   # any file can hold it


def test_a_killed_worker_takes_its_forks_along(own, tmp_path):
    file = own(f"def f(completion, answer):\n    pid = os.fork()\n    if pid: open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); return 1\n    time.sleep(1e9)\n")
    assert score([f"{file}:f"], [item("x")])[0][0].total == 1
    pid = int((tmp_path / "pid").read_text())
    assert gone(pid)


def gone(pid, seconds=5):
    for _ in range(int(seconds / 0.05)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_workers_die_with_their_parent(own):
    """Even a worker that hangs: a killed trainer must not leave processes behind."""
    file = own("def f(completion, answer): time.sleep(1e9)\n")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from rewards import Item, Scorer
s = Scorer(["{file}:f"]); print([w.process.pid for w in s.workers], flush=True)
s.score([Item("", "x", "", {{}}, 1, False)] * 4)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = json.loads(parent.stdout.readline())
    time.sleep(1)
    assert not any(gone(pid, 0.05) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(gone(pid) for pid in pids)


def test_memory_that_a_reward_keeps_costs_one_completion(own):
    """After a MemoryError the worker is replaced: what filled it may still be held, and every later completion would fail too."""
    file = own("hoard = []\ndef f(completion, answer):\n    while completion == 'bad': hoard.append(bytearray(1 << 24))\n    bytearray(1 << 26)\n    return 1\n")
    scores, failures, _ = score([f"{file}:f"], [item(t) for t in ["a", "bad", *"bcdefg"]], workers=1, memory_gb=0.5)
    assert [s.total for s in scores] == [1, None, 1, 1, 1, 1, 1, 1] and failures == {"exception": 1}


def test_a_worker_that_stops_starting_ends_the_batch_and_not_the_run(own):
    file = own("if os.path.exists('started'): raise SystemExit\nopen('started', 'w')\ndef f(completion, answer): os._exit(1)\n")
    scores, failures, _ = score([f"{file}:f"], [item("x")] * 20, workers=1)
    assert [s.total for s in scores] == [None] * 20 and failures == {"death": 20}


def test_a_batch_that_fails_as_a_whole_stops_with_its_first_traceback(own):
    file = own("def f(completion, answer): return 1 / len(completion)\n")
    scores, _, trace = score([f"{file}:f"], [item("")] * 4)
    with pytest.raises(RewardError, match="(?s)None of this batch's 4 completions.*ZeroDivisionError.*own.py"):
        raise_if_all_failed(scores, trace)
    raise_if_all_failed([*scores, Score(0.0, {}, None)], trace)   # one is enough
    raise_if_all_failed([], None)
    with pytest.raises(RewardError, match="every reward returned None"):
        raise_if_all_failed([Score(None, {"f": None}, None)], None)


def test_order_counters_and_reuse(own):
    file = own("def f(completion, answer): return float(completion)\n")
    scorer = Scorer([f"{file}:f"])
    try:
        for size in (1000, 0, 3, 1):
            scores = scorer.score([item(str(i)) for i in range(size)])
            assert [s.total for s in scores] == list(range(size)) and not scorer.failures.total() and scorer.first_traceback is None
        scorer.score([item("x")])
        assert scorer.failures == {"exception": 1} and "ValueError" in scorer.first_traceback
        scorer.score([item("1")])
        assert not scorer.failures.total() and scorer.first_traceback is None
        big = "1" + " " * 3_000_000   # larger than any pipe's buffer
        assert [s.total for s in scorer.score([item(big)] * 5)] == [1.0] * 5
    finally:
        scorer.close()


# ---------------------------------------------------------------------------------------------------- hostile completions

BOMBS = [r"\boxed{9^{9^{9}}}", "The answer is 9**9**9**9", r"\boxed{((9!)!)!}", r"\boxed{" + "9^{" * 200 + "9" + "}" * 201, "(" * 100_000,
         r"\boxed{" + "(" * 100_000 + ")" * 100_000 + "}", r"\boxed{" * 100_000, "<answer>" * 100_000, "<answer>" + "(" * 100_000 + "</answer>",
         "\0", "\\boxed{\0}", "\ud800", "9" * 1_000_000, r"\boxed{" + "9" * 1_000_000 + "}", "<answer>" + "9" * 299 + "</answer>",
         "__import__('os').system('touch executed')", r"\boxed{__import__('os').system('touch executed')}",
         "<answer>__import__('os').system('touch executed')</answer>", "<think></think><answer>" + " is a knight" * 50_000 + "</answer>"]


@pytest.mark.parametrize("spec, answer", [("gsm8k", "72"), ("math", "72"), ("countdown", ""), ("kk", KK), ("format", ""), ("exact", "72")])
def test_hostile_completions_are_scored_or_given_up_and_never_executed(spec, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scorer = Scorer([spec], timeout=0.9)
    try:
        scores = scorer.score([item(text, answer, nums=[9, 9], target=72) for text in BOMBS] + [item("#### 72", answer, nums=[9, 8], target=72)])
    finally:
        scorer.close()
    assert scores[-1].total is not None
    assert not [text[:40] for text, s in zip(BOMBS[:-1], scores) if (s.total or 0) > 0]   # the last has good tags
    given_up = [text[:40] for text, s in zip(BOMBS, scores) if s.total is None]
    assert scorer.failures["death"] == 0 and (spec == "math" or not given_up), given_up
    assert not list(tmp_path.iterdir())
