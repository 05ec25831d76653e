"""Tools: what is put in is the chat template's own text, id for id; a bad call is answered.

The templates are short forms of the families' own ones: their headers, ends, calls and answers.
What the model writes is written here by hand, in the format that the family was trained on.
"""
import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.tool_parsers import ToolParserManager

import data
import rollout
from chats import toolcalls, turns
from errors import SettingsError
from examples import calculator, tiny
from rewards import RewardArgs, Scorer
from scoring import replies
from test_sft import tokenizer_of
from test_turns import ALONE
from trainer.batch import Completion

OWN = '''
import os, time
def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b
def spell(word: str, times: int = 1) -> list:
    """Spells a word.

    Args:
        word: what to spell
        times: how often
    """
    return list(word) * times if word else ["é"]
def trap(kind: str) -> str:
    """Does what no tool should.

    Args:
        kind: what it does
    """
    if kind == "hang": time.sleep(1e6)
    if kind == "exit": os._exit(3)
    if kind == "raise": raise KeyError("no such thing")
    return {"huge": "x" * 10**7, "set": {1}, "surrogate": "\\ud800"}[kind]
async def waits(kind: str) -> str:
    """Is async.

    Args:
        kind: any
    """
def bare(kind):
    return kind
'''
NAMES = "add", "spell", "trap"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
PLAIN = "{{ m.content }}"
ARGS = "{{ c.function.arguments | tojson }}"
CALLS = "{% for c in m.tool_calls %}"
JSON = '{"name": "{{ c.function.name }}", "arguments": ' + ARGS + "}"


def template(before, user, words, calls, tool, header):
    """After a block Jinja drops a newline."""
    text = before + "{% for m in messages %}" + (
        "{% if m.role == 'tool' %}" + tool + "{% elif m.tool_calls %}" + calls
        + "{% elif m.role == 'assistant' %}" + words + "{% else %}" + user + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}")
    return text.replace("%}\n", "%}{{ '\\n' }}")


CHATML = "<|im_start|>{{ m.role }}\n" + PLAIN + "<|im_end|>\n"
GROUP = ("{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
         + PLAIN + "\n</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}"
         "<|im_end|>\n{% endif %}")
SYSTEM = "<|im_start|>system\n" + TOOLS + "<|im_end|>\n"
QWEN_CALLS = ("<|im_start|>assistant{% if m.content %}\n" + PLAIN + "{% endif %}" + CALLS
              + "\n<tool_call>\n" + JSON + "\n</tool_call>{% endfor %}<|im_end|>\n")
# Thoughts of a turn stay after the last question only.
LAST = ("{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}")
QWEN3_CALLS = (
    "{% set thought = '' %}{% set said = m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = m.content.split('</think>')[-1].lstrip() %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ said }}" + CALLS + "{% if said or not loop.first %}\n{% endif %}<tool_call>\n"
    + JSON + "\n</tool_call>{% endfor %}<|im_end|>\n")
LLAMA = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" + PLAIN + "<|eot_id|>"
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOKENS = ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|> "
                "<|eot_id|>")
LLAMA_TOOL = "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"


def hermes(*calls):
    return "\n".join("<tool_call>\n" + json.dumps({"name": name, "arguments": given})
                     + "\n</tool_call>" for name, given in calls)


def parameters(call):
    name, given = call
    return json.dumps({"name": name, "parameters": given})


FAMILIES = {  # name: (control tokens; the last ends a turn; template; calls as written; parser)
    "qwen2.5": ("<|im_start|> <|im_end|>", template(
        SYSTEM, CHATML, CHATML, QWEN_CALLS, GROUP, "<|im_start|>assistant\n"), hermes, "hermes"),
    "qwen3": ("<|im_start|> <|im_end|>", LAST + template(
        SYSTEM, CHATML, CHATML, QWEN3_CALLS, GROUP, "<|im_start|>assistant\n"),
        lambda *calls: "<think>\nhm\n</think>\n\n" + hermes(*calls), "hermes"),
    "llama 3.1": (LLAMA_TOKENS, template(
        "<|begin_of_text|>" + TOOLS, LLAMA, LLAMA,
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}"
        "{% endif %}" + LLAMA_HEADER + CALLS + JSON.replace("arguments\":", "parameters\":")
        + "{% endfor %}<|eot_id|>", LLAMA_TOOL, LLAMA_HEADER), parameters, "llama3_json")}
TWO = ("add", {"a": 1, "b": 2}), ("spell", {"word": "no", "times": 2})
ONE = ("spell", {"word": "yes"})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def tools():
    made = {}
    exec(OWN, made)
    return replies.Tools({name: made[name] for name in NAMES})


class Inside:
    """Workers in this process."""
    threads = inboxes = [1]
    kind, unscored, warned = "tools", 0, False

    def __init__(self, tools):
        self.tools = tools

    def score(self, items, **unused):
        return [turns.Score(0.0, {"reply": self.tools.answer(item.turns)}, None)
                for item in items]


class Scripted:
    """An engine that writes these texts in episode i, turn by turn."""

    def __init__(self, tokenizer, episodes):
        self.tokenizer, self.episodes = tokenizer, episodes

    def complete(self, requests):
        texts = [self.episodes[r.seed // 10][r.seed % 10] for r in requests]
        found = [self.tokenizer(text + self.tokenizer.eos_token, add_special_tokens=False)
                 for text in texts]
        return [Completion(np.array(made["input_ids"], np.int32),
                           np.zeros(len(made["input_ids"]), np.float32), False) for made in found]


def bridge_of(tools, tokenizer):
    args = SimpleNamespace(data_args=data.DataArgs(), engine_args=rollout.EngineArgs())
    return turns.check_tools(args, tools.schemas, tokenizer, [tokenizer.eos_token_id], 10**6)


def play(bridge, tools, *texts):
    """Episodes in which the model writes these texts → [(a prompt's ids, completion), …]."""
    tokenizer = bridge.tokenizer
    row = data.make_row(0, {"prompt": "Do it."}, "", tokenizer, [], data.DataArgs(),
                        tools.schemas)
    episodes = turns.Episodes.__new__(turns.Episodes)
    episodes.bridge, episodes.world = bridge, ALONE
    episodes.max_turns, episodes.max_tokens, episodes.stateful = 9, 10**6, False
    episodes.workers, episodes.log = Inside(tools), SimpleNamespace(say=print)
    engine, prompts = Scripted(tokenizer, texts), [data.Prompt(i, row) for i in range(len(texts))]

    def seed(i, turn=0):
        return 10 * i + turn

    done = engine.complete([rollout.Request([], seed(i)) for i in range(len(texts))])
    episodes.play(prompts, done, engine.complete, seed)
    return [(row.prompt_ids, c) for c in done]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_put_in_is_the_templates_own_text(tools, name):
    """Two calls in one turn, another one, and the end: the ids of the whole chat, at once. The end
    of a turn is put in where it is missing (a --stop string ended it), and not doubled."""
    controls, text, writes, parser = FAMILIES[name]
    bridge = bridge_of(tools, tokenizer_of(controls, text))
    assert type(bridge.calls.parser) is ToolParserManager.get_tool_parser(parser)
    first = [TWO[0]] if name == "llama 3.1" else [*TWO]  # its template takes one call a turn
    (prompt, done), = play(bridge, tools, [writes(*first), writes(ONE), "so it is"])
    answers = ["3", '["n", "o", "n", "o"]'][:len(first)] + ['["y", "e", "s"]']
    assert [t["content"] for t in done.turns if t["role"] == "tool"] == answers
    assert [(c["function"]["name"], c["function"]["arguments"]) for t in done.turns
            for c in t.get("tool_calls", [])] == [*first, ONE]
    put_in = np.flatnonzero(~done.sampled)
    ids = prompt + done.ids[:put_in[-1] + 1].tolist()
    whole = bridge.tokenizer(bridge.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Do it."}, *done.turns], tools=tools.schemas,
        tokenize=False), add_special_tokens=False)["input_ids"]
    assert len(put_in) > 20 and ids == whole[:len(ids)]
    said = bridge.tokenizer.decode(done.ids[put_in[-1] + 1:], skip_special_tokens=True)
    assert said == done.turns[-1]["content"] == "so it is" and not done.failed
    assert json.dumps(tools.schemas[0]) in bridge.tokenizer.decode(prompt)
    end = bridge.tokenizer.eos_token_id
    answer = toolcalls.message(toolcalls.call("add", {}, "0" * 9), "3")
    ids = bridge.ids(77, [answer])
    assert ids[0] == end and bridge.ids(end, [answer]) == ids[1:]


@pytest.mark.parametrize("parser, text", [
    ("mistral", '[TOOL_CALLS]first[ARGS]{"x": "y"}'),
    ("qwen3_coder", "<tool_call>\n<function=first>\n<parameter=x>\ny\n</parameter>\n</function>\n"
     "</tool_call>"),
    ("granite", '<tool_call>[{"name": "first", "arguments": {"x": "y"}}]'),
    ("phi4_mini_json", 'functools[{"name": "first", "arguments": {"x": "y"}}]'),
    ("pythonic", "[first(x='y')]")])
def test_the_first_parser_that_reads_what_the_template_writes_is_taken(tools, parser, text):
    tokenizer = tokenizer_of("[TOOL_CALLS] [ARGS] <|tool_call|> <|im_end|>", FAMILIES["qwen2.5"][1])
    calls = toolcalls.Calls(tools.schemas, tokenizer, [tokenizer.eos_token_id])
    calls.choose(lambda turn: text)
    assert type(calls.parser) is ToolParserManager.get_tool_parser(parser)


# ---- what is refused before weights load

REWRITES = FAMILIES["qwen2.5"][1].replace(
    "<tool_call>", "{% if messages[-1].role == 'tool' %}-{% endif %}<tool_call>")
OTHER = FAMILIES["qwen2.5"][1].replace("<tool_call>", "CALL ").replace('"name": ', "")
NO_TOOL = FAMILIES["qwen2.5"][1].replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}"
                                         "{{ raise_exception('no tools') }}")


@pytest.mark.parametrize("text, words", [
    (None, "--tools needs a model with a chat template"),
    (tiny.CHATML, "the chat template of the model has no place for tools. Would work: --reply"),
    (OTHER, "none of vLLM's parsers .* reads a call as the chat template writes it: 'CALL "),
    (REWRITES, "rewrites a turn with calls once they are answered"),
    (NO_TOOL, r"--tools: the chat template takes no messages of the roles .*tool \(no tools\)")])
def test_a_template_that_cannot_be_used_is_one_sentence(tools, text, words):
    tokenizer = tokenizer_of("<|im_start|> <|im_end|>", text or "")
    if text is None:
        tokenizer.chat_template = None
    with pytest.raises(SettingsError, match=words):
        bridge_of(tools, tokenizer)


@pytest.mark.parametrize("spec, words", [
    ("own.py:waits", r"--tools needs a function waits \(def, not async def\)"),
    ("own.py:bare", "A tool needs a docstring with a line `NAME: what it is` below `Args:`")])
def test_a_function_that_is_no_tool_is_refused(own, monkeypatch, spec, words):
    monkeypatch.chdir(own.parent)
    with pytest.raises(SettingsError, match=words):
        toolcalls.load((spec,), RewardArgs(1))


# ---- calls that go wrong

def test_calls_that_the_template_cannot_write_end_their_episode(tools):
    """Llama 3.1's takes one a turn."""
    bridge = bridge_of(tools, tokenizer_of(*FAMILIES["llama 3.1"][:2]))
    (_, one), (_, two) = play(bridge, tools, [parameters(ONE), "yes"],
                              ["; ".join(map(parameters, TWO))])
    assert not one.failed and two.failed and len(two.turns[0]["tool_calls"]) == 2


def calls_of(*calls):
    return turns.said("") | {"tool_calls": [toolcalls.call(*one, f"{i:09d}")
                                            for i, one in enumerate(calls)]}


def test_hostile_calls_cost_themselves_only(own):
    """One group of calls in two workers: each bad one is a sentence, the others have results."""
    hostile = "hang", "exit", "raise", "huge", "set", "surrogate"
    turn = calls_of(*(("trap", {"kind": kind}) for kind in hostile), ("nothing", {}),
                    ("add", "{oops"), ("add", {"a": 1}), ("add", {"a": 1, "c": 2}),
                    ("add", {"a": "x", "b": 1}), TWO[0], ("spell", {"word": ""}))
    specs = [f"{own}:{name}" for name in NAMES]
    with closing(Scorer(specs, RewardArgs(2, 3.0), "tools")) as workers:
        workers.wait()
        (score,), plain = (toolcalls.answers(workers, [turn]),
                           toolcalls.answers(workers, [turns.said("3")] * 2))
    found = [m["content"] for m in score.parts["reply"]]
    for text, start in zip(found, [
            "error: no answer within 3 seconds", "error: the worker ended with code 3",
            "error: KeyError: 'no such thing'", "error: the result has 10,000,000 char",
            "error: TypeError: Object of type set is not JSON", "?", "error: there is no tool "
            "'nothing', only add, spell, trap", "error: TypeError: ",
            "error: TypeError: add() missing 1 required", "error: TypeError: add() got an "
            "unexpected keyword argument 'c'", "error: TypeError: ", "3", '["é"]'], strict=True):
        assert text.startswith(start) and len(text) < 600
    assert [m["tool_call_id"] for m in score.parts["reply"]] == [f"{i:09d}" for i in range(13)]
    assert score.total == 0 and [s.parts["reply"] for s in plain] == [None, None]


def test_a_result_may_be_as_long_as_a_reply():
    def times(n: int) -> str:
        """A text.

        Args:
            n: its length.
        """
        return n * "x"

    tools = replies.Tools({"times": times})
    assert tools.result("times", {"n": 10**6}) == "x" * 10**6
    assert tools.result("times", {"n": 10**6 + 1}).startswith("error: the result has 1,000,001 ch")


# ---- the example

@pytest.mark.parametrize("text, start", [
    ("12 * (3 + 4)", "84"), ("-7/2", "-3.5"),
    ("1/0", "error: ZeroDivisionError: division by zero"),
    *((text, "error: ValueError: only numbers, + - * / and parentheses are known") for text in (
        "2**9**9**9", "__import__('os').getcwd()")),
    ("9*" * 5000 + "9", "error: ValueError: an expression has at most 200 characters"),
    *((text, "error: ") for text in ("(" * 199, "", 3))])
def test_the_calculator_computes_arithmetic_and_nothing_else(text, start):
    tools = replies.Tools({"calculator": calculator.calculator})
    found = tools.result("calculator", {"expression": text})
    assert found.startswith(start) and len(found) < 300
