"""Several turns: ids are only appended, a token is sampled or put in, a bad reply costs its episode
alone, and an environment keeps its state. Episodes are played again here by hand, without ranks and
workers; a real run has the real engine."""
import itertools
import json
import random
import subprocess
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data
import fakes
import families
import ranks
from batch import Sample
from errors import SettingsError
from examples import tiny
from fakes import World
from families import ROOT
from parts.turns import plug, turns
from parts.turns.replies import Move, messages
from shapes import shape_of
from tables import table
from templates import ROLE, SAID, template, tokenizer_of, with_traits

TOKENIZER, USER = tiny.make_tokenizer(), {"role": "user", "content": "z"}
TOOLS = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]


def ids_of(text: str, tokenizer=TOKENIZER) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- what stands between two turns

TRIMMED = "{{ m['content'] | trim }}"
FAMILIES = {  # name: (control tokens, of which the last one ends a turn; the template)
    "llama": ("<s> <|h|> <|/h|> <|eot|>", template(
        *[f"<|h|>{ROLE}<|/h|>\n\n{TRIMMED}<|eot|>"] * 2, "<|h|>assistant<|/h|>\n\n", "<s>")),
    "mistral": ("<s> [INST] [/INST] </s>", template(
        f"[INST] {SAID} [/INST]", f" {SAID}</s>", "", "<s>")),
    "glm": ("[gMASK] <|assistant|> <|tool|> <|user|>", template(
        f"<|{ROLE}|>\n{SAID}", f"<|assistant|>\n{SAID}", "<|assistant|>\n", "[gMASK]"))}
FAMILIES |= dict.fromkeys(itertools.product((False, True), repeat=4))  # ChatML: with_traits


def sentencepiece(text: str):
    """A tokenizer that puts a space before the first word of a text alone, with this template."""
    letters = ["<unk>", *map(chr, range(33, 127)), "\n", "▁"]
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=text)
    made.add_special_tokens({"additional_special_tokens": ["<s>", "[INST]", "[/INST]"]})
    return made


@pytest.mark.parametrize("system", [None, "S"])
@pytest.mark.parametrize("name", [*FAMILIES, "sentencepiece"])
def test_what_stands_between_two_turns_is_what_the_template_writes_there(name, system):
    """The sampled ids and those put in are the ids of the whole chat, as transformers renders it:
    after an end token, which is not doubled, and after a --stop string. A template that drops
    thoughts is refused; one that begins a turn with <think> is not."""
    opens, drops, *_ = name if isinstance(name, tuple) else (False, False)
    tokenizer = with_traits(*name) if isinstance(name, tuple) else sentencepiece(
        FAMILIES["mistral"][1]) if name == "sentencepiece" else tokenizer_of(*FAMILIES[name])
    bridge = turns.Bridge(tokenizer, [tokenizer.eos_token_id], 10**6, system)
    chat = [{"role": "system", "content": "S"}] * bool(system) + [USER]
    start = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    chat.append(turns.said("<think>\n" * opens + "QX"))
    for more in ([USER], TOOLS):
        if drops:
            with pytest.raises(SettingsError, match="rewrites the model's turn '<think>"):
                bridge.ids(-1, more)
            continue
        text = tokenizer.apply_chat_template([*chat, *more], tokenize=False,
                                             add_generation_prompt=True)
        assert text.startswith(start)
        whole, cut = ids_of(text, tokenizer), len(ids_of(text.partition("QX")[0] + "QX", tokenizer))
        assert bridge.ids(whole[cut - 1], more) == whole[cut:]
        if whole[cut] == tokenizer.eos_token_id:
            assert bridge.ids(whole[cut], more) == whole[cut + 1:]
    assert bridge.read(ids_of("QX", tokenizer) + [tokenizer.eos_token_id]).strip() == "QX"
    tokenizer.chat_template = None
    assert tokenizer.decode(bridge.ids(-1, [USER])) == "\n\nz\n\n"


STRICT = ("{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
          "{% elif m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>{% else %}"
          "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}")
FORGETS = tiny.CHATML.replace("% for", "% set messages = messages[-2:] %}{% for", 1)


@pytest.mark.parametrize("text, vocab, message, words", [
    (STRICT, 320, TOOLS[0], "takes no messages of the roles user, assistant, tool .*only user"),
    (FORGETS, 320, USER, "before a message of role user the chat template rewrites"),
    (tiny.CHATML, 50, USER, r"has an id of \d+; the model has 50")])
def test_what_cannot_be_put_in_is_refused_with_the_reason(text, vocab, message, words):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = text
    with pytest.raises(SettingsError, match=words):
        turns.Bridge(tokenizer, [0, 2], vocab, None).ids(2, [message])


# ---- episodes, with an engine of random ids

OWN = """
import os, random, time
def reply(row, turns):
    n = sum(turn["role"] == "assistant" for turn in turns)
    return None if n == 3 or not row["kind"] else eval(row["kind"]) if n == 2 else f"go {n}"
class Dice:
    def __init__(self, row, seed):
        self.row, self.dice, self.rolls = row, random.Random(seed), []
        self.note("made")
    def note(self, what):
        with open(os.path.join(self.row["answer"], what), "a") as file:
            file.write(".")
    def reply(self, turns):
        assert sum(turn["role"] == "assistant" for turn in turns) == len(self.rolls) + 1
        self.rolls.append(self.dice.randrange(1000))
        if len(self.rolls) == 3 or not self.row["kind"]:
            return None
        return eval(self.row["kind"]) if len(self.rolls) == 2 else str(self.rolls[-1])
    def reward(self):
        return eval(self.row["worth"])
    def close(self):
        self.note("closed")
"""
BAD = ["time.sleep(1e6)", "os._exit(3)", "{}['gone']", "7", "[]", "'x' * 1000001",
       "'a<|im_end|>b'"]
KINDS = ["'go'", "", str([m | {"id": 3} for m in TOOLS]), "'z' * 999", *BAD,
         *(f"'1' * {n}" for n in range(12, 36))]  # a reply of so many tokens
ROOM, TOTAL = 60, "sum(self.rolls) / 1000"


def complete(samples: list[Sample]) -> None:
    """Random ids for a seed and a prompt; some turns are without an end token."""
    for s in samples:
        rng = np.random.default_rng([s.seed, *s.prompt.row.prompt_ids, *s.ids])
        room = ROOM - len(s.ids)
        ids = rng.integers(3, tiny.VOCAB, int(rng.integers(1, 6))).astype(np.int32)
        ids[-1] = ids[-1] if rng.random() < 0.3 else 2
        s.append(ids[:room], -rng.random(len(ids))[:room], len(ids) > room)


def play(world, spec: str, cases: list, flags: dict | None = None):
    """Episodes of (kind, worth of an environment) → what each is, and what the run says."""
    args = fakes.args(**dict(reply=spec, max_turns=4, max_tokens=ROOM, reward_workers=2,
                             reward_timeout=2.0, reward=()) | (flags or {}))
    prompts = [data.Prompt(i, data.Row(i, "q", [5, 6, 7 + i], spec.rpartition("/")[0], dict(
        kind=kind, worth=worth), "")) for i, (kind, worth) in enumerate(cases)]
    log, bridge = fakes.Log(), turns.Bridge(TOKENIZER, [0, 2], tiny.VOCAB, None)
    done = [Sample(prompt, seed=10 * i) for i, prompt in enumerate(prompts)]
    complete(done)
    episodes = turns.Episodes(args, bridge, world, log)
    with closing(episodes.workers):
        episodes.play(done, complete, lambda i, turn: 10 * i + turn)
    return [(c.ids.tolist(), c.sampled.tolist(), c.logprobs.tolist(), c.truncated, c.turns)
            for c in done], log.said


def by_hand(i: int, kind: str, worth: str = "", most: int = 4, pays: bool = True):
    """The episode as README.md says it. worth: of an environment, whose turns are paid."""
    tokens, said, before = [], [], 0.0  # (id, whether it was sampled, its log-prob)
    it, dice = SimpleNamespace(rolls=[]), random.Random(10 * i)
    for turn in range(most):
        ids = [token for token, *_ in tokens]
        made = Sample(families.prompt(i, [5, 6, 7 + i]), np.array(ids, np.int32),
                      seed=10 * i + turn)
        complete([made])
        words, cut = made.ids[len(ids):].tolist(), made.truncated
        tokens += [(token, True, logprob) for token, logprob in zip(
            words, made.logprobs[len(ids):].tolist(), strict=True)]
        said.append(turns.said(TOKENIZER.decode([token for token in words if token != 2])))
        if pays and worth:
            said[-1]["paid"] = 0.0
        if cut or (turn == most - 1 and not worth):
            break
        it.rolls.append(dice.randrange(1000))
        if turn == 1 and kind in BAD or "nan" in worth and pays and turn < 2:
            said[-1]["failed"] = True
            break
        over = turn == 2 or not kind
        put = None if over else eval(kind) if turn == 1 else (
            str(it.rolls[-1]) if worth else f"go {turn + 1}")
        total = eval(worth or "None", {"self": it})
        if pays and total is not None:
            said[-1]["paid"], before = said[-1]["paid"] + total - before, total
        if over or turn == most - 1:
            break
        put = [USER | {"content": put}] if isinstance(put, str) else [
            {"role": m["role"], "content": m["content"]} for m in put]
        text = "".join(f"\n<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in put)
        more = ids_of("<|im_end|>" * (words[-1] != 2) + text + "\n<|im_start|>assistant\n")
        cut = len(tokens) + len(more) >= ROOM
        if cut:
            break
        tokens, said = tokens + [(token, False, 0.0) for token in more], said + put
    if worth and "failed" not in said[-1]:
        said[-1]["reward"] = eval(worth, {"self": it})
    return *map(list, zip(*tokens, strict=True)), cut, said


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_episodes_are_those_by_hand_on_any_ranks(own):
    """Ids, what was sampled, the engine's log-probs, messages, what is cut and what failed: replies
    that hang, end their process, raise, are no reply or do not fit. A failure is said once."""
    cases = [(kind, "") for kind in KINDS]
    expected = [by_hand(i, kind) for i, (kind, _) in enumerate(cases)]
    assert [kind for (*_, said), kind in zip(expected, KINDS, strict=True)
            if "failed" in said[-1]] == BAD
    assert 5 < sum(cut for *_, cut, _ in expected) < 25
    for found, said in ranks.results(3, play, f"{own}:reply", cases) + [
            play(World(), f"{own}:reply", cases)]:
        assert found == expected
        assert len(said) == 1 and "because of --reply; rollout/unscored counts" in said[0]
    two, _ = play(World(), f"{own}:reply", [("'go'", "")] * 4, dict(max_turns=2))
    assert two == [by_hand(i, "'go'", most=2) for i in range(4)]


@pytest.mark.parametrize("reward, most", [("turns", 4), ("environment", 4), ("turns", 2)])
def test_an_environment_keeps_its_state_and_pays_its_turns(own, tmp_path, reward, most):
    """A turn is paid what reward() grows by. The object sees the last allowed turn. If its worker
    dies it is made again from the turns so far, and changes nothing."""
    cases = [("'go'", TOTAL), ("'go'", TOTAL), ("{}['gone']", TOTAL), ("'go'", "None"),
             ("'1' * 40", TOTAL), ("'go'", TOTAL), ("", TOTAL), ("'go'", TOTAL)]
    options, pays = dict(reward=(reward,), max_turns=most), reward == "turns"

    def right(cases):
        return [by_hand(i, *case, most=most, pays=pays) for i, case in enumerate(cases)]

    for found, _ in ranks.results(2, play, f"{own}:Dice", cases, options):
        assert found == right(cases)
    made, closed = (len((tmp_path / name).read_text()) for name in ("made", "closed"))
    assert made == len(cases) and closed == made - 1  # each on its rank; what failed is not closed
    cases[4:6] = ("os._exit(3)", TOTAL), ("'go'", "float('nan')" if pays else TOTAL)
    assert play(World(), f"{own}:Dice", cases, options)[0] == right(cases)


def test_replies_that_never_fit_are_said_once(own):
    """--max_tokens of a task of one turn: each episode ends after its first."""
    spec = f"{own}:reply"
    _, said = play(World(), spec, [("'go'", "")] * 6 + [("", "")] * 2, dict(max_tokens=8))
    assert len(said) == 1 and "no reply fits: of " in said[0] and "--max_tokens 8 " in said[0]
    assert not play(World(), spec, [("", "")] * 4)[1] and messages("x" * 10**6)


ASYNC = """import asyncio, os
begun = 0
async def reply(turns, answer):
    global begun
    begun += 1
    if answer == "ends":
        os._exit(1)
    while answer == "all" and begun < 4:  # until all four are asked
        await asyncio.sleep(0.01)
    return str(answer)
"""


@pytest.mark.parametrize("answers", [["all"] * 4, ["a", "ends", "b", "c"]])
def test_one_worker_answers_many_coroutines_at_once_and_each_alone_if_it_ends(tmp_path, answers):
    (tmp_path / "waits.py").write_text(ASYNC)
    args = fakes.args(reward_workers=1, reward_timeout=20.0)
    with closing(turns.ReplyPool([f"{tmp_path}/waits.py:reply"], args)) as pool:
        pool.wait()
        found = pool.ask([Move(row={"prompt": "q", "answer": answer}, turns=[turns.said("a")],
                               completion="a") for answer in answers], homes=[*range(4)])
    for value, answer in zip(found, answers, strict=True):
        assert "the worker ended" in value if answer == "ends" else value[0]["content"] == answer


# ---- the real script

DOORS = "reply=examples/doors.py:Doors reward=('turns',)"
CREDIT = "advantage=parts/turns/turn_credit.py:turn_credit"


def test_a_real_run_is_what_it_says(real_run, own, tmp_path):
    """On two ranks, with the real engine: engine and trainer have the same log-probs of all sampled
    tokens, what turns were paid is their reward, and a failed episode has none."""
    rows = [{"prompt": f"Sort {n}", "answer": str(tmp_path), "kind": kind, "worth": TOTAL}
            for n, kind in enumerate(["'go'", str(TOOLS), "{}['gone']", "'go'"])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    metrics, samples = real_run(
        "grpo.py", f"--reply {own}:Dice --advantage {ROOT}/parts/turns/turn_credit.py:turn_credit "
        "--reward turns --data rows.jsonl --max_turns 3 --batch 4 --group 3 --seed 7 --steps 2 "
        "--max_tokens 160 --max_prompt_tokens 64 --lr 1e-3 --no-export")
    assert max(row["rollout/logprob_gap_max"] for row in metrics) < 1e-4
    for one in samples:
        assert one["reward"] == one["turns"][-1].get("reward")
        assert (one["reward"] is None) == any("failed" in turn for turn in one["turns"])
        assert sum(one["sampled"]) == one["tokens"]
    for row, found in zip(metrics, (samples[:12], samples[12:]), strict=True):
        scored = [one["reward"] for one in found if one["reward"] is not None]
        assert row["rollout/reply_failed"] == 12 - len(scored) > 0
        assert row["reward/turns"] == pytest.approx(np.mean(scored))
        assert row["rollout/turns_mean"] > 2 and row["grad/norm"] > 0


@pytest.mark.slow
def test_the_game_is_learned():
    """It grades itself: wins of at most 0.4 in the first 3 steps, at least 0.9 in the last 10."""
    done = subprocess.run(["./run.sh", "game", "--no-export"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what is refused

@pytest.mark.parametrize("flags, words", table("""
reward=('environment',) | --reward environment or turns needs --reply FILE.py:NAME
reward=('exact','turns:0.5') | --reward environment or turns needs --reply
DOORS reward=('exact',) CREDIT | no --reward counts it: give --reward turns
DOORS dynamic_sampling=True CREDIT | learns from groups of equal rewards too
DOORS loss=variants/gmpo.py:gmpo CREDIT | has an advantage for each token
DOORS loss=gspo CREDIT | fine
DOORS | fine"""))
def test_settings_that_do_not_fit_are_one_sentence(refused, flags, words):
    assert refused("grpo", flags.replace("DOORS", DOORS).replace("CREDIT", CREDIT), words)


def test_a_model_that_sees_takes_no_replies(refused):
    shape = shape_of("tiny")
    shape.kind = "pictures"
    assert refused("grpo", DOORS, "--reply is for models that read text alone", shape)


START = "__init__ = lambda self, row, seed: None"


@pytest.mark.parametrize("code, reward, words", table(r"""
def Own(row): return None | exact | with a parameter turns \(it has \['row'\]
def Own(turns, colour): return None | exact | Own needs 'colour'|reply needs? 'colour'
def Own(turns): return None | turns | --reward turns needs a class with reward
class Own: answer = print | exact | needs a method reply
class Own: reply = sum; reward = property(len) | exact | reply, reward and close of
class Own: reply = asyncio.sleep | exact | must be def, not async
class Own: START; reply = print | environment:2 | needs a class with reward
class Own: reply = print | exact | Own is called with \(row, seed\), and does not take them: too
class Own: START; reply = lambda self: 0 | exact | Own.reply is called with \(self, turns\)
class Own: START; reply = print; close = lambda: 0 | exact | Own.close is called with \(self\)
x = 1 | exact | Own
none | exact | --reply .*no such file"""))
def test_a_reply_that_cannot_be_used_is_refused_before_weights_load(tmp_path, code, reward, words):
    """none: there is no file."""
    if code != "none":
        (tmp_path / "own.py").write_text(f"import asyncio\n{code.replace('START', START)}")
    with pytest.raises(SettingsError, match=words):
        checked(tmp_path, reward)


def test_a_reply_that_can_be_used_needs_one_template_for_all_rows(tmp_path):
    (tmp_path / "own.py").write_text(f"class Own: {START}; reply = print")
    checked(tmp_path, "exact")
    with pytest.raises(SettingsError, match="take no --reply"):
        checked(tmp_path, "exact", chat_template_kwargs={"a": 1})


def checked(folder, reward: str, **columns) -> None:
    """What is checked of Own in own.py before weights load, with a row of these columns."""
    args = fakes.args(reply=f"{folder}/own.py:Own", reward_workers=1, reward=(reward,))
    row = data.Row(0, "q", [5], "a", columns, "")
    plug.check(args, SimpleNamespace(tokenizer=TOKENIZER, ends=[2], rows=[row], eval_rows=[],
                                     shape=SimpleNamespace(vocab=320)))
