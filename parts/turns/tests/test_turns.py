"""Several turns: ids are only appended, the mask is what the engine sampled, a bad reply costs its
episode. Most tests have a fake engine; turns_worker.py has the real one."""
import copy
import itertools
import json
import subprocess
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
import fakes
import families
import log
import ranks
import rollout
import test_loop
import test_prove
import test_resume
import test_rewards
import test_rows
from batch import Sample
from errors import SettingsError
from examples import again, gsm8k, guess, tiny
from learning import begin_with
from parts.turns import plug, turns
from parts.turns.replies import messages
from rewards import Answer, Pool, item_of, score_samples, scores_of
from templates import with_traits
from texts import reader
from tracked import ROOT
from worker import Part

CREDIT = "parts/turns/turn_credit.py:turn_credit"
END, EOT, USER = 2, 0, {"role": "user", "content": "z"}
TOKENIZER = tiny.make_tokenizer()


def with_template(template):
    other = copy.deepcopy(TOKENIZER)
    other.chat_template = template
    begin_with(other, tiny.END_OF_TEXT)  # as Llama's does, where it is not told otherwise
    return other


def bridge(template=tiny.CHATML, vocab=tiny.VOCAB):
    return turns.Bridge(with_template(template), [EOT, END], vocab, None)


# ---- the bridge: what it puts between turns is in test_ends.py

LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() "
          "+ ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|im_end|>' "
          "}}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}")
REWRITES = tiny.CHATML.replace("% for", "% set messages = messages[-2:] %}{% for", 1)


@pytest.mark.parametrize("traits", itertools.product((False, True), repeat=4))
def test_a_turn_is_appended_to_whatever_the_template_begins_it_with(traits):
    """QwQ's template opens with <think> and keeps turns: it was said to rewrite them. Those that
    drop thoughts (R1, Qwen3) do, and the sentence shows it."""
    opens, drops, _, ends = traits
    there = turns.Bridge(with_traits(*traits), [EOT, END], 320, None)
    header = "<|im_start|>assistant\n" + "<think>\n" * opens
    if drops:
        with pytest.raises(SettingsError, match="rewrites the model's turn '<think>.*QX7': it wri"):
            there.text([USER])
    else:
        assert there.text([USER]) == "<|im_end|>" * ends + (
            f"\n<|im_start|>user\nz<|im_end|>\n{header}")


@pytest.mark.parametrize("template, role, vocab, words", [
    (LLAMA2, "tool", 320, "takes no messages of the roles user, assistant, tool .*only user"),
    (REWRITES, "user", 320, "before a message of role user the chat template rewrites"),
    (tiny.CHATML, "user", 50, r"has an id of \d+; the model has 50")])
def test_a_template_that_cannot_go_on_is_refused_with_the_reason(template, role, vocab, words):
    with pytest.raises(SettingsError, match=words):
        bridge(template, vocab).ids(END, [USER | {"role": role}])


# ---- episodes, with an engine of random ids

REPLY = """
import os, time
def reply(row, turns):
    n = sum(turn["role"] == "assistant" for turn in turns)
    kind = row["kind"] if n == 2 else "plain"
    if n == 3 or row["kind"] == "never":
        return None
    if kind == "hang": time.sleep(1e6)
    if kind == "exit": os._exit(3)
    if kind == "raise": raise KeyError("no such thing")
    return {"junk": 7, "long": "z" * 999,
            "tools": [{"role": "tool", "content": c, "id": 3} for c in "ab"]
            }.get(kind, "1" * int(kind) if kind.isdigit() else f"go {n}")
"""
FAILING = ["hang", "exit", "raise", "junk"]
LENGTHS = [str(n) for n in range(12, 36)]  # a reply of so many tokens, or nearly
KINDS = ["plain", "never", "tools", "long", *FAILING, *LENGTHS]
ROOM = 60


class FakeEngine:
    """Random ids for a seed and a prompt; a third of the turns ends without an end token."""

    def __init__(self):
        self.asked, self.gave = {}, {}

    def complete(self, requests):
        return [self.one(r) for r in requests]

    def one(self, r):
        rng = np.random.default_rng([r.seed, *r.prompt_ids])
        ids = rng.integers(3, tiny.VOCAB, int(rng.integers(1, 6))).astype(np.int32)
        ids[-1] = ids[-1] if rng.random() < 0.3 else END
        made = turns.Turns(ids[:r.room], -rng.random(len(ids[:r.room])).astype(np.float32),
                           len(ids) > (r.room or ROOM))
        self.asked.setdefault(r.seed // 10, []).append(r)
        self.gave.setdefault(r.seed // 10, []).append(copy.deepcopy(made))
        return made


def play(world, spec, kinds=KINDS, max_turns=4, timeout=3.0, room=ROOM, answer="a", reward=()):
    """Episodes of these kinds → (prompts, completions, the engine, what was printed)."""
    args = fakes.args(reply=spec, max_turns=max_turns, max_tokens=room, reward_workers=2,
                      reward_timeout=timeout, reward=reward)
    prompts = [data.Prompt(i, data.Row(i, "q", [5, 6, 7 + i], answer, {"kind": kind}, ""))
               for i, kind in enumerate(kinds)]
    engine, said, seed = FakeEngine(), [], lambda i, turn=0: 10 * i + turn
    done = engine.complete([rollout.Request(p.row.prompt_ids, seed(i))
                            for i, p in enumerate(prompts)])
    episodes = turns.Episodes(args, bridge(), world, SimpleNamespace(say=said.append))
    with closing(episodes.workers):
        episodes.play(prompts, done, engine.complete, seed)
    return prompts, done, engine, said


ALONE = SimpleNamespace(mine=lambda x: x, gather=lambda x: x, same_phase=lambda *_: None, step=0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(REPLY)
    return f"{path}:reply"


@pytest.fixture(scope="module")
def played(spec):
    return play(ALONE, spec)


def test_the_mask_is_true_for_exactly_the_ids_of_the_engine(played):
    _, done, engine, _ = played
    for i, c in enumerate(done):
        given = engine.gave[i]
        assert len(c.ids) == len(c.logprobs) == len(c.sampled) <= ROOM
        assert c.ids[c.sampled].tolist() == [x for g in given for x in g.ids.tolist()]
        assert c.logprobs[c.sampled].tolist() == [x for g in given for x in g.logprobs.tolist()]
        assert not c.logprobs[~c.sampled].any() and c.tokens == c.sampled.sum() > 0
        assert (c.ids.dtype, c.logprobs.dtype, c.sampled.dtype) == (np.int32, np.float32, bool)


def test_a_turns_prompt_begins_with_all_ids_before_it(played):
    _, done, engine, _ = played
    assert max(map(len, engine.asked.values())) == 3
    for i, asked in engine.asked.items():
        for one, made, two in zip(asked, engine.gave[i], asked[1:], strict=False):
            before = one.prompt_ids + made.ids.tolist()
            assert two.prompt_ids[:len(before)] == before
            put_in = TOKENIZER.decode(two.prompt_ids[len(before):])
            ended = "" if made.ids[-1] == END else "<|im_end|>"
            start, end = "\n<|im_start|>", "<|im_end|>"
            assert put_in in [f"{ended}{start}{said}{end}{start}assistant\n" for said in (
                "user\ngo 1", "user\ngo 2", f"tool\na{end}{start}tool\nb",
                *(f"user\n{'1' * int(n)}" for n in LENGTHS))]
            assert two.room == ROOM - len(two.prompt_ids) + 3 > 0
        assert len({r.seed for r in asked}) == len(asked)


class Sure(Pool):
    """Its reward is 1."""

    def ask(self, items, size=1):
        return [Answer([1.0], None) for _ in items]


def test_a_reply_that_fails_or_does_not_fit_costs_its_episode(played):
    prompts, done, engine, said = played
    kinds = dict(zip(KINDS, done, strict=True))
    assert [kind for kind in KINDS if kinds[kind].failed] == FAILING
    cut = [kind for kind in KINDS if kinds[kind].truncated]
    assert "long" in cut and not {*cut} & {*FAILING}
    roles = {kind: [turn["role"] for turn in c.turns] for kind, c in kinds.items()}
    assert roles["never"] == ["assistant"]
    assert roles["plain"] == ["assistant", "user", "assistant", "user", "assistant"]
    assert roles["tools"][2:] == ["assistant", "tool", "tool", "assistant"]
    assert {tuple(roles[kind]) for kind in FAILING} == {("assistant", "user", "assistant")}
    assert kinds["tools"].turns[3] == {"role": "tool", "content": "a"}
    assert len(said) == 1 and "because of --reply; it is counted (printed once)" in said[0]
    # A failed episode has no reward, whatever its function says.
    samples = [Sample(p, c) for p, c in zip(prompts, done, strict=True)]
    scorer = object.__new__(type("Scorer", (turns.EpisodePool, Sure), {}))
    vars(scorer).update(groups=False, parts=[Part("r", 1.0, None)], unanswered=0, warned=True,
                        progress={})
    score_samples(SimpleNamespace(
        scorer=scorer, world=ALONE, log=SimpleNamespace(time=lambda name: nullcontext()),
        engine=SimpleNamespace(text=reader(TOKENIZER, [EOT, END]))), samples, 1)
    assert [s.score.total for s in samples] == [None if c.failed else 1.0 for c in done]
    metrics = log.sample_metrics(samples, 1.0)
    assert metrics["rollout/unscored"] == len(FAILING)
    # Nor has it one without --reward, where the others have 0.
    items = [item_of(s, reader(TOKENIZER, [EOT, END])) for s in samples]
    with closing(turns.EpisodePool([], fakes.args())) as pool:
        scores = scores_of(pool, items)
    assert [(s.total, s.error) for s in scores] == [
        (None, "its episode failed") if c.failed else (0.0, None) for c in done]
    assert metrics["rollout/turns_mean"] == np.mean([len(g) for g in engine.gave.values()])
    assert metrics["rollout/tokens"] == sum(len(x.ids) for g in engine.gave.values() for x in g)


def test_replies_that_never_fit_are_told_once(spec):
    """--max_tokens of a task of one turn: each episode ended after its first, without a word."""
    *_, said = play(ALONE, spec, ["plain"] * 6 + ["never"] * 2, room=8)
    assert len(said) == 1 and "no reply fits: of " in said[0] and "--max_tokens 8 " in said[0]
    assert not play(ALONE, spec, ["plain"] * 4)[-1] and not play(ALONE, spec, ["never"] * 4)[-1]


def test_a_turn_that_is_cut_ends_its_episode(played):
    _, done, engine, _ = played
    cuts = [[made.truncated for made in engine.gave[i]] for i in range(len(done))]
    assert not any(any(cut[:-1]) for cut in cuts) and any(cut[-1] for cut in cuts)
    assert all(c.truncated for c, cut in zip(done, cuts, strict=True) if cut[-1])


@pytest.mark.parametrize("n, reply, goes_on, cut", [
    (9, [USER], True, False), (10, [USER], False, True), (10, None, False, False)])
def test_one_token_must_have_room_after_a_reply(n, reply, goes_on, cut):
    """What ends by itself at exactly --max_tokens is whole."""
    old = 4 if reply else n
    c = turns.Turns(np.zeros(old, np.int32), np.zeros(old, np.float32), False)
    it = SimpleNamespace(max_tokens=10)
    assert turns.Episodes.goes_on(it, c, reply, [1] * (n - old)) == goes_on
    assert c.truncated == cut
    assert (len(c.ids), c.tokens, len(c.turns)) == ((n, 4, 1) if goes_on else (old, old, 0))


def test_no_episode_has_more_turns_than_allowed(spec):
    _, done, engine, _ = play(ALONE, spec, ["plain"] * 4, 2)
    assert max(map(len, engine.gave.values())) == 2
    for i, c in enumerate(done):
        said = [turn["content"] for turn in c.turns if turn["role"] == "assistant"]
        assert len(said) == len(engine.gave[i])
        assert not any("<|" in text for text in said)  # no control token goes to an environment


def test_what_is_no_reply_and_the_longest_one():
    assert messages("x" * 10**6) and messages(None) is None
    for bad in [], [{"role": [USER]}], [USER, USER | {"content": "x" * 10**6}]:
        with pytest.raises(TypeError, match="1,000,000 characters at most"):
            messages(bad)


def texts(world, spec):
    """The episodes, and how many turns this rank decoded."""
    kind, count = type(TOKENIZER), []
    decode = kind.decode
    kind.decode = lambda *args, **options: count.append(1) or decode(*args, **options)
    return [(c.ids.tolist(), c.turns, c.failed) for c in play(world, spec)[1]], len(count)


def test_every_rank_has_the_same_episodes_and_decodes_its_share(spec, played):
    alone = [(c.ids.tolist(), c.turns, c.failed) for c in played[1]]
    found = ranks.results(3, texts, spec)
    assert all(theirs == alone for theirs, _ in found)
    counts, rounds = [count for _, count in found], 3
    assert sum(counts) == sum(len(gave) for gave in played[2].gave.values())
    assert max(counts) - min(counts) <= rounds


# ---- examples, and what is refused

def test_the_examples_answer_the_last_words_of_the_model():
    def chat(*said):
        return [turns.said(x) if i % 2 == 0 else USER for i, x in enumerate(said)]

    for last, right in (("", 0), ("So it is\n#### 18", 1)):
        said = [turns.said("9*2?"), {"role": "tool", "content": "18"}, turns.said(last)]
        assert gsm8k.last_turn(said, "#### 18") == right
    for said, expected in ((["8"], "higher"), (["12"], "lower"), (["9"], None), (["x"], "say a"),
                           (["9" * 5000], "say a"), (["1", "", "2", "", "3", "", "4"], None)):
        assert (guess.reply({"answer": "9"}, chat(*said)) or "over").startswith(expected or "over")
    assert [guess.won(chat("1", "", x), "9") for x in (" 9\n", "8", "nine")] == [1, 0, 0]
    row = {"answer": "4 + 5 = 9\n#### 9"}
    assert again.reply(row, chat("so #### 9")) is None
    assert again.reply(row, chat("8", "", "7")) == "That is wrong (try 2). Try again."
    assert [again.right(chat(*said), "9") for said in (
        ["9"], ["8", "", "9"], ["8"] * 9 + ["8"])] == [1, 0.75, 0]


@pytest.mark.parametrize("code, words", [
    ("def reply(row): return None", r"with a parameter turns \(it has \['row'\]"),
    ("def reply(turns, colour): return None", "reply needs 'colour': row 1 of"),
    ("def reply(row, turns): return None", "system, user .*only user")])
def test_a_reply_that_cannot_be_used_is_refused_before_weights_load(tmp_path, code, words):
    (tmp_path / "own.py").write_text(code)
    args = fakes.args(reply=f"{tmp_path}/own.py:reply", reward_workers=1, reward=(),
                      system="Be kind.")
    row = data.Row(0, "q", [5], "a", {}, "")
    with pytest.raises(SettingsError, match=words):
        turns.check(args, with_template(LLAMA2), [END], tiny.VOCAB, [row])


# ---- the real engine

@pytest.fixture(scope="module")
def real(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    ranks.script(Path(__file__).with_name("turns_worker.py"),
                 tiny.ensure(str(ROOT / "runs")), spec, "out", cwd=folder)
    return json.loads((folder / "out").read_text())


def test_real_episodes_are_those_of_the_trainer(real):
    """A wrong id in what was asked, or a log-prob at a wrong place, would be a gap."""
    for s in real["samples"]:
        assert s["failed"] == (s["kind"] in ("raise", "hang") and not s["truncated"]), s["turns"]
    assert real["reply_failed"] == sum(s["failed"] for s in real["samples"]) > 0
    assert real["seeds"] == real["turns"] > len(real["samples"])  # a stream for every turn
    assert {s["kind"] for s in real["samples"] if not s["truncated"]} == {
        "plain", "raise", "tools", "hang"}
    assert real["gap"] <= families.ROUNDINGS * real["rounding"], (real["gap"], real["rounding"])


@pytest.mark.slow
def test_the_game_is_learned():
    """It grades itself: wins of at most 0.4 in the first 3 steps, at least 0.9 in the last 10.
    Greedy wins of at most 0.5 before, at least 0.95 after."""
    done = subprocess.run(["./run.sh", "game", "--no-export"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- with the core's own tests

with_date, own = test_resume.with_date, test_rewards.own


def test_what_stands_between_two_turns_has_the_date_of_the_run(with_date):
    found = test_resume.dated_files(fakes.args(
        model=with_date, max_tokens=9, max_prompt_tokens=64, eval_data="tiny@test",
        reply=str(ROOT / "examples/again.py:reply")))
    there = turns.Bridge(found.tokenizer, found.ends, found.shape.vocab, None)
    assert there.render([], True).startswith(test_resume.DATE)


@pytest.mark.parametrize("spec", ["own.py:f:2", "gone.py:f", "exact"])
def test_a_mistake_names_its_own_flag(own, spec):
    own(test_rewards.F + "return 1")
    with pytest.raises(SettingsError) as error:
        turns.ReplyPool.parse(None, [spec])
    assert f"--reply {spec}" in str(error.value) and "--reward" not in str(error.value)


def test_a_reply_is_put_behind_the_system_message_of_the_run(monkeypatch):
    made = []
    monkeypatch.setattr(turns, "ReplyPool", lambda *given: SimpleNamespace(
        wait=lambda: None, close=lambda: None, needs=[], methods=[]))
    monkeypatch.setattr(turns, "Bridge", lambda *given: made.append(given) or SimpleNamespace(
        ids=lambda last, messages: []))
    turns.check(fakes.args(system="S", reply="r.py:f"), "tokenizer", [4], 9, [])
    assert made == [("tokenizer", [4], 9, "S")]


def test_turn_credit_keeps_the_promises():
    test_prove.keeps("1", f"--advantage {CREDIT} --reward turns --group 4 "
                          "--reply examples/doors.py:Doors")


def test_paid_turns_and_any_flag_of_an_update_work_or_are_refused():
    reply = {"reply": "examples/doors.py:Doors", "reward": ("turns",)}
    settings = [dict([flag]) | more for flag in test_loop.FLAGS for more in (
        reply, reply | {"advantage": CREDIT}) if flag[0] not in more]
    assert test_loop.worked(settings, lambda done: turns.Turns(**vars(done))) > 20


def test_switches_of_the_template_need_one_turn(tmp_path):
    row = {"prompt": "q", "answer": "a", "chat_template_kwargs": {"enable_thinking": False}}
    rows = [test_rows.of(test_rows.asked, row, tmp_path)]
    with pytest.raises(SettingsError, match="chat_template_kwargs take no --reply"):
        plug.check(fakes.args(reply="x.py:f"), None, rows)
