"""Several turns: ids are only appended, the mask is what the engine sampled, a bad reply costs its
episode. Most tests have a fake engine; turns_worker.py has the real one."""
import copy
import itertools
import json
import os
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import batch
import data
import dist
import faults
import grpo
import learning
import log
import losses
import model
import ppo
import ranks
import rewards
import rollout
import turns
from batch import Batch, Completion, Sample
from examples import again, calculator, guess, tiny
from plan import SettingsError
from rewards import RewardArgs, Score, Scorer

ROOT = Path(__file__).parent.parent
END, EOT, USER = 2, 0, {"role": "user", "content": "z"}
TOKENIZER = tiny.make_tokenizer()


def with_template(template):
    """The tiny tokenizer with another chat template."""
    other = copy.deepcopy(TOKENIZER)
    other.chat_template = template
    return other


def bridge(template=tiny.CHATML, system=None, vocab=tiny.VOCAB):
    return turns.Bridge(with_template(template), [EOT, END], vocab, system)


# ---- the bridge

def chat(begin, middle, end, trim=False):
    """A template like ChatML: begin + role + middle + content + end."""
    content = "message['content']" + " | trim" * trim
    return ("{% for message in messages %}{{ '" + begin + "' + message['role'] + '" + middle
            + "' + " + content + " + '" + end + "' }}{% endfor %}{% if add_generation_prompt %}"
            "{{ '" + begin + "assistant" + middle + "' }}{% endif %}")


DEFAULT_SYSTEM = ("{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind."
                  "<|im_end|>\n' }}{% endif %}" + tiny.CHATML)
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() "
          "+ ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|im_end|>' "
          "}}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}")
SPEAKER = chat("<|im_end|>", ": ", "")  # a turn ends where the next speaker's token begins
QWEN3 = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
         "'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].strip() }}"
         "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
GROUPS = ("{% for m in messages %}{% if m['role'] == 'tool' %}{% if loop.previtem['role'] != 'tool'"
          " %}{{ '<|im_start|>user' }}{% endif %}{{ '\n<r>' + m['content'] + '</r>' }}{% if "
          "loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% else %}"
          "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_Z = "\n<|im_start|>{}\nz<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template, messages, expected", [
    (tiny.CHATML, [USER], "<|im_end|>" + CHATML_Z.format("user")),
    (tiny.CHATML, [USER | {"role": "tool"}], "<|im_end|>" + CHATML_Z.format("tool")),
    (chat("<|im_start|>", "\n", "<|im_end|>\n", trim=True), [USER | {"content": " z\n"}],
     "<|im_end|>" + CHATML_Z.format("user")),
    (DEFAULT_SYSTEM, [USER], "<|im_end|>" + CHATML_Z.format("user")),   # no second system prompt
    (SPEAKER, [USER], "<|im_end|>user: z<|im_end|>assistant: "),
    (GROUPS, [{"role": "tool", "content": c} for c in "ab"],
     "<|im_end|>\n<|im_start|>user\n<r>a</r>\n<r>b</r><|im_end|>\n<|im_start|>assistant\n"),
    (LLAMA2, [USER], " <|im_end|>[INST] z [/INST]"),
    (None, [USER, USER], "\n\nz\n\nz\n\n")])
def test_the_bridge_is_what_the_template_puts_between_turns(template, messages, expected):
    """A turn's end is appended where it is missing, and never twice."""
    there, encode = bridge(template), lambda text: TOKENIZER(text)["input_ids"]
    whole = encode(expected)
    assert there.text(messages) == expected
    assert there.ids(77, messages) == whole                      # a --stop string ended the turn
    assert there.ids(EOT, messages) == whole                     # another end than the template's
    assert there.ids(END, messages) == (whole[whole.index(END) + 1:] if template else whole)
    if template:                                                 # the whole chat, encoded at once
        assert encode(there.render([], True) + "yes" + expected)[-len(whole):] == whole


def test_an_end_inside_the_reply_is_not_the_turns_end():
    there = bridge()
    ids = there.ids(EOT, [USER | {"content": "<|endoftext|>"}])
    assert ids[0] == END and ids.count(EOT) == 1


@pytest.mark.parametrize("template, role, words", [
    (QWEN3, "user", r"rewrites earlier turns: .*'.*<think>.*' becomes '.*yes.*'"),
    (LLAMA2, "tool", "takes no message of role tool .*only user and assistant"),
    (tiny.CHATML.replace("% for", "% set messages = messages[-2:] %}{% for", 1), "user",
     "rewrites earlier turns: before a message of role user")])
def test_a_template_that_cannot_go_on_is_refused_with_the_reason(template, role, words):
    with pytest.raises(SettingsError, match=words):
        bridge(template).ids(END, [USER | {"role": role}])


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(SettingsError, match=r"has an id of \d+; the model has 50"):
        bridge(vocab=50).ids(END, [USER])


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
    if kind == "memory": bytearray(10**11)
    if kind == "raise": raise KeyError("no such thing")
    return {"junk": 7, "empty": [], "role": [{"content": "z"}], "huge": "x" * 10**7, "long": "z" * 99,
            "tools": [{"role": "tool", "content": c, "id": 3} for c in "ab"]}.get(kind, f"go {n}")
"""
FAILING = ["hang", "exit", "memory", "raise", "junk", "empty", "role", "huge"]
KINDS = ["plain", "never", "tools", "long", *FAILING]
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
        made = Completion(ids[:r.room], -rng.random(len(ids[:r.room])).astype(np.float32),
                          len(ids) > (r.room or ROOM))
        self.asked.setdefault(r.seed // 10, []).append(r)
        self.gave.setdefault(r.seed // 10, []).append(copy.deepcopy(made))
        return made


def play(world, spec, kinds=KINDS, timeout=2.0):
    """Episodes of these kinds → (prompts, completions, the engine, what was printed)."""
    args, said = SimpleNamespace(
        episodes=turns.TurnArgs(spec, 4), max_tokens=ROOM, workers=RewardArgs(2, timeout)), []
    prompts = [data.Prompt(i, data.Row(i, "q", [5, 6, 7 + i], "a", {"kind": kind}, ""))
               for i, kind in enumerate(kinds)]
    engine, seed = FakeEngine(), lambda i, turn=0: 10 * i + turn
    done = engine.complete([rollout.Request(p.row.prompt_ids, seed(i))
                            for i, p in enumerate(prompts)])
    episodes = turns.Episodes(args, bridge(), world, SimpleNamespace(say=said.append))
    with closing(episodes.workers):
        episodes.play(prompts, done, engine.complete, seed)
    return prompts, done, engine, said


ALONE = SimpleNamespace(mine=lambda x: x, gather=lambda x: x, same_phase=lambda *_: None)


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
        for (one, made), two in zip(zip(asked, engine.gave[i], strict=True), asked[1:], strict=False):
            before = one.prompt_ids + made.ids.tolist()
            assert two.prompt_ids[:len(before)] == before
            put_in = TOKENIZER.decode(two.prompt_ids[len(before):])
            ended = "" if made.ids[-1] == END else "<|im_end|>"
            assert re.fullmatch(re.escape(ended) + r"\n<\|im_start\|>(user\ngo \d|tool\na<\|im_end\|>"
                                r"\n<\|im_start\|>tool\nb)<\|im_end\|>\n<\|im_start\|>assistant\n",
                                put_in), put_in
            assert two.room == ROOM - len(two.prompt_ids) + 3
        assert len({r.seed for r in asked}) == len(asked)


def test_a_reply_that_fails_or_does_not_fit_costs_its_episode(played):
    prompts, done, engine, said = played
    kinds = dict(zip(KINDS, done, strict=True))
    assert [kind for kind in KINDS if kinds[kind].failed] == FAILING
    cut = [kind for kind in KINDS if kinds[kind].truncated]
    assert "long" in cut and not {*cut} & {*FAILING}
    roles = lambda kind: [turn["role"] for turn in kinds[kind].turns]
    assert roles("never") == ["assistant"] and roles("plain") == ["assistant", "user"] * 2 + roles(
        "never")
    assert roles("tools")[2:] == ["assistant", "tool", "tool", "assistant"]
    assert {tuple(roles(kind)) for kind in FAILING} == {("assistant", "user", "assistant")}
    assert kinds["tools"].turns[3] == {"role": "tool", "content": "a"}
    assert len(said) == 1 and "has no reply; it is counted (printed once)" in said[0]
    # A failed episode has no reward, whatever its function says.
    samples = [Sample(p, c, "t") for p, c in zip(prompts, done, strict=True)]
    scorer = SimpleNamespace(
        needs_groups=False, kind="reward", first_traceback=None, printed=[], unscored=0,
        score=lambda items, size: [Score(1.0, {"r": 1.0}, None) for _ in items])
    quiet = SimpleNamespace(time=lambda name: closing(SimpleNamespace(close=lambda: 0)))
    batch.score_samples(samples, 1, scorer, ALONE, quiet)
    assert [s.score.total for s in samples] == [None if c.failed else 1.0 for c in done]
    metrics = batch.sample_metrics(samples, 1.0)
    assert metrics["rollout/reply_failed"] == metrics["rollout/unscored"] == len(FAILING)
    assert metrics["rollout/turns_mean"] == np.mean([len(g) for g in engine.gave.values()])
    assert metrics["rollout/tokens"] == sum(len(x.ids) for g in engine.gave.values() for x in g)


def test_replies_that_always_fail_end_the_run(spec):
    with pytest.raises(SettingsError, match="(?s)None of this batch's 9 .* has a reply.*no such thing"):
        play(ALONE, spec, ["raise"] * 9)


def texts(world, spec):
    return [(c.ids.tolist(), c.turns, c.failed) for c in play(world, spec)[1]]


def test_every_rank_has_the_same_episodes(spec, played):
    alone = [(c.ids.tolist(), c.turns, c.failed) for c in played[1]]
    for theirs in ranks.results(3, texts, spec):
        assert theirs == alone


# ---- what is trained on

class Bigram:
    """A policy whose logits see only the token before: what else changes is no condition."""
    packs, take = False, 0

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        make = lambda: torch.randn(learning.VOCAB, 8, generator=generator, dtype=torch.float64)
        self.embedding, self.head = (torch.nn.Parameter(make()) for _ in range(2))

    def hidden(self, micro):
        found = torch.nn.functional.embedding(micro.inputs["input_ids"], self.embedding)
        return found.flatten(0, 1).index_select(0, micro.source)

    def logprobs(self, micro, temperature, entropy="none"):
        out = model.token_logprobs(self.hidden(micro), lambda h: h @ self.head.T, micro.targets,
                                   temperature, 1000, entropy)
        return tuple(map(micro.spread, out))

    def values(self, micro):
        return micro.spread(self.hidden(micro).sum(-1))

    def backward(self, loss):
        loss.backward()

    def step(self, lr):
        self.gradient = torch.cat([p.grad.flatten() for p in (self.embedding, self.head)
                                   if p.grad is not None])
        self.embedding.grad = self.head.grad = None
        return float(self.gradient.norm())


def learnt(script, samples, **options):
    """Metrics and gradients of one shipped `learn`."""
    world = dist.World(0, 1, 0, 1, torch.device("cpu"), None, 1.0)
    for name in ("sum", "max"):
        setattr(world, name, lambda tensor: tensor)
    world.same_phase, policy, critic = lambda *_: None, Bigram(), Bigram()
    args = learning.arguments(script, minibatches=1, **options)
    if script is grpo:
        metrics = grpo.learn(args, world, policy, samples, lr=1.0, reference=Bigram())
        return metrics, policy.gradient
    metrics = ppo.learn(args, world, (policy, critic), samples, lr=1.0, critic_lr=1.0,
                        kl_coef=0.1, reference=Bigram())
    return metrics, torch.cat([policy.gradient, critic.gradient])


@pytest.mark.parametrize("script, options", [
    (grpo, dict(kl_loss_coef=0.1, entropy_coef=0.1)),
    (grpo, dict(kl_reward_coef=0.1, advantage="reinforce++", engine_correction="mask")),
    (grpo, dict(loss="gspo", aggregation="sequence", epochs=2)),
    (ppo, dict(kl_reward_coef=0.1, engine_correction="truncate", aggregation="constant"))])
def test_what_the_environment_said_is_a_condition_and_never_a_target(script, options):
    """Other ids in the replies: loss and gradient are equal to the bit, unless the last one before
    a sampled token changes, which this model sees."""
    samples = learning.fabricate("mixed", 7)
    holes = [(s.completion, t) for s in samples
             for t in np.flatnonzero(~s.completion.sampled).tolist()]
    inner = [(c, t) for c, t in holes if not c.sampled[t + 1]]
    assert len(inner) > 10
    was = learnt(script, samples, **options)
    for changed, same in (inner, True), ([(c, t) for c, t in holes if c.sampled[t + 1]], False):
        for c, t in changed:
            c.ids[t] = (c.ids[t] + 1) % learning.VOCAB
        now = learnt(script, samples, **options)
        assert (was[0] == now[0]) == torch.equal(was[1], now[1]) == same


def test_only_sampled_tokens_are_targets():
    samples = learning.fabricate("mixed", 7)
    for packs in (False, True):
        there = Batch(samples, packs)
        micro = batch.Micro(there, list(range(len(samples))), torch.device("cpu"))
        expected = [x for s in samples for x in s.completion.ids[s.completion.sampled].tolist()]
        assert micro.targets.tolist() == expected and len(micro.source) == len(expected)
        before = [(p + c)[len(p) + t - 1] for s in samples
                  for p, c in [(s.prompt.row.prompt_ids, s.completion.ids.tolist())]
                  for t in np.flatnonzero(s.completion.sampled)]
        assert micro.inputs["input_ids"].flatten()[micro.source].tolist() == before
        assert there.sampled.sum() == len(expected) < there.lengths.sum()
