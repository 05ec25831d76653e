"""Rewards: settings, signatures, hostile rewards and completions, a batch on some ranks."""
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
import ranks
import rewards
from dist import SettingsError
from examples import tiny
from rewards import Item, RewardArgs, Score, Scorer
from trainer.batch import Completion, Sample

ROOT = Path(__file__).resolve().parent.parent
KK = "(1) Zoey is a knight\n(2) Ben is a knave"
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


# ---- settings

@pytest.mark.parametrize("specs, sentence", [
    (["maths", "nope:2", "math", "math:2", "own.py:std", "gone.py:f"],
     "(?s)maths: no such reward.*nope.*math is given twice.*reward/std is.*no such file"),
    ([], "empty"), (["own.py:missing"], "own.py has no missing"),
    (["own.py:batch"], r"it has \['data_sources'"), (["exit.py:g"], "ended with code 7"),
    (["says.py:f"], r"GB\): set KEY first$")])
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


def test_a_worker_loads_no_torch_nor_what_its_reward_does_not_need(own):
    """In another folder than the project's."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scoring import worker\n"
            f"from scoring.signatures import Part\nfor name in 'kk', 'math':\n"
            f"    worker.load('reward', [Part(name, 1, None)])\n"
            f"    print({{'torch', 'transformers', 'sympy', 'numpy'}} & set(sys.modules))")
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")
    assert found[0] == "set()" and "tor" not in found[1] and "transf" not in found[1]


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
import numpy
def ours(completion, answer, **row):
    return len(completion) + 10 * row["level"] + 100 * row["tokens"]
def few(turns, level): return level + len(turns)
def verl(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth and data_source == "here" and extra_info["i"] == 1
    return {"score": float(right), "acc": 1}
class Verl:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": len(solution_str)}
waiting_verl = Verl()
def plain_trl(prompts, completions, answer, **columns):
    return numpy.array([float(c[-1]["content"] == a) for c, a in zip(completions, answer)])
async def trl(completions, prompts, level, **columns):
    await asyncio.sleep(0)
    assert prompts == [[{"role": "user", "content": "q"}]] * 2 and level == [2, 2]
    assert columns.keys() >= {"answer", "completion_ids", "tokens", "truncated"}
    return [len(turns[0]["content"]) for turns in completions]
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
    episode = [{"role": "assistant", "content": "bb"}, *row["prompt"], row["prompt"][0]]
    items[2] = items[2]._replace(turns=episode)  # of a --reply
    names = ["ours", "few", "verl", "waiting_verl", "plain_trl", "trl", "alone"]
    specs = [f"own.py:{name}" for name in names]
    assert rewards.check(specs) == [["few", "level"], ["trl", "level"]]
    assert parts(score(specs, items, 2, workers=1)) == [
        (121, 3, 0, 1, 0, 1, 1), (121, 3, 1, 1, 1, 1, 1), (122, 5, 0, 2, 0, 2, 1),
        (121, 3, 1, 1, 1, 1, 1)]


def test_a_score_is_a_weighted_sum_and_none_is_unscorable_without_a_failure(own):
    own("def few(completion, level): return None if level == 7 else level")
    specs = ["exact:2", "short:0.1", "format", "own.py:few:-0.5"]
    rows = [item(" yes\n", "yes", tokens=2000, level=1), item("no", "yes", tokens=10, level=7)]
    assert score(specs, rows) == [
        Score(2 - 0.2 - 0.5, {"exact": 1.0, "short": -2.0, "format": 0.0, "few": 1.0}, None),
        Score(None, {"exact": 0.0, "short": -0.01, "format": 0.0, "few": None}, None)]


@pytest.mark.parametrize("fault, kind", [
    ("time.sleep(1e9)", "timeout"), ("return [1.0]", "exception")])
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
    spec = own(F + "print(f'no space {completion[:9]}\\n', end='')\n    return float(completion)")
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
    reads = data.reader(tokenizer, [tokenizer.eos_token_id])

    def text(ids):
        decoded.append(len(ids))
        return reads(ids)
    samples = []
    for i in range(groups * group):
        row = data.Row(i, "q", [1], "12" if i % 2 else "3", {}, "")
        ids = np.array([*tokenizer("12")["input_ids"], tokenizer.eos_token_id], np.int32)
        samples.append(Sample(data.Prompt(i, row), Completion(ids, np.zeros(len(ids)), False)))
    with closing(Scorer(specs, RewardArgs(1))) as scorer:
        scorer.wait()
        rewards.score_samples(SimpleNamespace(
            scorer=scorer, world=world, engine=SimpleNamespace(text=text),
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
