"""examples/tools.py, with vLLM's own parsers. What is put in is the chat template's own text, id
for id; a bad call is answered; only the functions of the file are called.

The templates are short forms of the families' own ones: their headers, ends, calls and answers.
What the model writes is written here by hand, in the format that the family was trained on.
"""
import json
import runpy
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

import data
import fakes
import texts
from errors import SettingsError
from parts.turns import turns
from parts.turns.replies import Move, messages
from parts.turns.turns import said
from templates import tokenizer_of
from tracked import ROOT
from worker import load_file

FILE = ROOT / "examples/tools.py"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
PLAIN = "{{ m.content }}"
CALLS = "{% for c in m.tool_calls %}"
JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


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
# Qwen3: thoughts of a turn stay after the last question only.
LAST = ("{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}")
QWEN3 = ("<|im_start|>assistant\n{{ m.content if loop.index0 > ns.last else "
         "m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n")
LLAMA = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" + PLAIN + "<|eot_id|>"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOOL = "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"


def hermes(*calls):
    return "\n".join("<tool_call>\n" + json.dumps({"name": "calculator", "arguments": call})
                     + "\n</tool_call>" for call in calls)


def parameters(call):
    return json.dumps({"name": "calculator", "parameters": call})


FAMILIES = {  # name: (parser, control tokens; the last ends a turn; template; calls as written)
    "qwen2.5": ("hermes", "<|im_start|> <|im_end|>", template(
        SYSTEM, CHATML, CHATML, QWEN_CALLS, GROUP, "<|im_start|>assistant\n"), hermes),
    "qwen3": ("hermes", "<|im_start|> <|im_end|>", LAST + template(
        SYSTEM, CHATML, QWEN3, QWEN_CALLS, GROUP, "<|im_start|>assistant\n"),
        lambda *calls: "<think>\nhm\n</think>\n\n" + hermes(*calls)),
    "llama 3.1": ("llama3_json", "<|begin_of_text|> <|start_header_id|> <|end_header_id|> "
                  "<|python_tag|> <|eot_id|>", template(
        "<|begin_of_text|>" + TOOLS, LLAMA, LLAMA, HEADER + CALLS
        + JSON.replace("arguments\":", "parameters\":") + "{% endfor %}<|eot_id|>", LLAMA_TOOL,
        HEADER), lambda *calls: "; ".join(map(parameters, calls)))}
TWO = {"expression": "12 * (3 + 4)"}, {"expression": "-7/2"}


def example(folder, monkeypatch, name, parser=None):
    """The file as a worker loads it for this family, and the family's tokenizer."""
    usual, controls, text, _ = FAMILIES[name]
    tokenizer = tokenizer_of(controls, text)
    tokenizer.save_pretrained(folder)
    monkeypatch.setenv("TOOL_MODEL", str(folder))
    monkeypatch.setenv("TOOL_PARSER", parser or usual)
    return load_file(FILE), tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_is_the_templates_own_text(tmp_path, monkeypatch, name):
    """Two calls in a turn are answered by one group of messages; the words of the next turn end the
    episode."""
    tools, tokenizer = example(tmp_path, monkeypatch, name)
    bridge = turns.Bridge(tokenizer, [tokenizer.eos_token_id], 10**6, None)
    prompt = data.make_row(0, {"prompt": "Do it.", "tools": tools.SCHEMAS}, "", tokenizer,
                           texts.marks_of(tokenizer), data.DataArgs()).prompt_ids
    assert json.dumps(tools.SCHEMAS[0]) in tokenizer.decode(prompt)
    chat = [said(FAMILIES[name][3](*TWO))]
    answers = messages(tools.answer(chat))
    assert [(m["role"], m["content"]) for m in answers] == [("tool", "84"), ("tool", "-3.5")]
    assert [m["tool_call_id"] for m in answers] == ["000100000", "000100001"]
    sampled = tokenizer(chat[0]["content"] + tokenizer.eos_token, add_special_tokens=False)
    put_in = bridge.ids(tokenizer.eos_token_id, answers)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Do it."}, *chat, *answers], tools=tools.SCHEMAS,
        tokenize=False, add_generation_prompt=True)
    assert prompt + sampled["input_ids"] + put_in == tokenizer(
        whole, add_special_tokens=False)["input_ids"]
    assert tools.answer([*chat, *answers, said("So it is 84.")]) is None


def test_thoughts_that_a_template_keeps_for_tools_alone(monkeypatch):
    """Qwen3 keeps a turn as it was where a tool answers it, and rewrites it where a user does."""
    monkeypatch.setattr(turns, "ReplyPool", lambda *given: SimpleNamespace(
        wait=lambda: None, close=lambda: None, needs=[], methods=[]))
    args = fakes.args(reply="r.py:f", reward=())
    tokenizer = tokenizer_of(*FAMILIES["qwen3"][1:3])
    rows = [data.Row(0, "q", [5], "a", columns, "") for columns in ({}, {"tools": [{}]})]
    assert turns.check(args, tokenizer, [0], 10**6, rows)
    with pytest.raises(SettingsError, match="role user the chat template rewrites"):
        turns.check(args, tokenizer, [0], 10**6, rows[:1])


def test_a_parser_of_another_family_is_refused_when_it_is_loaded(tmp_path, monkeypatch):
    """Else no call is ever found, and each episode has one turn."""
    with pytest.raises(SystemExit, match="TOOL_PARSER pythonic does not read a call as the chat "
                                         "template of TOOL_MODEL .* writes it: '<tool_call>"):
        example(tmp_path, monkeypatch, "qwen2.5", "pythonic")


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield example(tmp_path_factory.mktemp("tools"), patch, "qwen2.5")[0]


@pytest.mark.parametrize("text, start", [
    ("12 * (3 + 4)", "84"), ("-7/2", "-3.5"),
    ("1/0", "error: ZeroDivisionError: division by zero"),
    *((text, "error: ValueError: only numbers, + - * / and parentheses are known") for text in (
        "2**9**9**9", "__import__('os').getcwd()")),
    ("9*" * 5000 + "9", "error: ValueError: an expression has at most 200 characters"),
    *((text, "error: ") for text in ("(" * 199, "", 3))])
def test_the_calculator_computes_arithmetic_and_nothing_else(tools, text, start):
    message, = tools.answer([said(hermes({"expression": text}))])
    assert message["content"].startswith(start) and len(message["content"]) < 520


def test_calls_that_go_wrong_are_answered_and_none_ends_the_episode(tools):
    for name, given, start in (
            ("answer", {"turns": 1}, "error: there is no tool 'answer', only calculator"),
            ("os.getcwd", {}, "error: there is no tool 'os.getcwd'"),
            ("calculator", {}, "error: TypeError: calculator() missing 1 required"),
            ("calculator", {"x": 1}, "error: TypeError: calculator() got an unexpected keyword"),
            ("calculator", [1], "error: TypeError: "), ("calculator", "1+1", "error: TypeError: ")):
        text = json.dumps({"name": name, "arguments": given})
        message, = tools.answer([said(f"<tool_call>{text}</tool_call>")])
        assert message["content"].startswith(start), message
    for text in "84", "<tool_call>{oops</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>":
        assert tools.answer([said(text)]) is None


def test_rows_get_the_schemas(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    monkeypatch.setattr(sys, "argv", ["tools.py", str(tmp_path / "rows.jsonl")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(FILE), run_name="__main__")
    row = json.loads(capsys.readouterr().out)
    assert row["question"] == "1+1?" and [t["function"]["name"] for t in row["tools"]] == [
        "calculator"]


@pytest.mark.slow
def test_a_worker_answers_calls(tmp_path, monkeypatch):
    """vLLM is imported within the limits of a worker, and before its first reply."""
    example(tmp_path, monkeypatch, "qwen2.5")
    args = fakes.args(reward_workers=1, reward_timeout=3.0)
    with closing(turns.ReplyPool([f"{FILE}:answer"], args)) as pool:
        pool.wait()
        found, = pool.ask([Move({}, 0, [said(hermes(TWO[0]))], [])], homes=[0])
    assert found.values[0][0]["content"] == "84", found.error
