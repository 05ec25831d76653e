"""examples/tools.py with vLLM's own parser: an episode is the chat template's own text, id for id.
A bad call is answered, and nothing that a model writes is executed but arithmetic."""
import json

import pytest

from families import ROOT
from parts.turns import turns
from parts.turns.replies import messages
from templates import tokenizer_of
from worker import load_file

CHATML = ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
          "<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
          '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
          "</tool_call>{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}"
          "<|im_start|>assistant{{ '\n' }}{% endif %}")


def calls(*given, name="calculator") -> str:
    """What a model of Hermes' format writes."""
    return "".join(f'<tool_call>{json.dumps({"name": name, "arguments": one})}</tool_call>'
                   for one in given)


def test_calls_of_a_turn_are_answered_and_what_goes_wrong_is_an_answer_too(tmp_path, monkeypatch):
    """A turn without a call ends the episode. A parser of another family is refused: else no call
    is ever found."""
    tokenizer = tokenizer_of("<|im_start|> <|im_end|>", CHATML)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TOOL_MODEL", str(tmp_path))
    tools, end = load_file(ROOT / "examples/tools.py"), tokenizer.eos_token_id
    chat = [{"role": "user", "content": "Do it."},
            turns.said(calls({"expression": "12 * (3 + 4)"}, {"expression": "-7/2"}))]
    answers = messages(tools.answer(chat))
    assert [(m["role"], m["content"], m["tool_call_id"]) for m in answers] == [
        ("tool", "84", "000200000"), ("tool", "-3.5", "000200001")]
    one, two = (tokenizer.apply_chat_template(messages, tools=tools.SCHEMAS, return_dict=False,
                                              add_generation_prompt=True)
                for messages in (chat[:1], [*chat, *answers]))
    sampled = tokenizer(chat[1]["content"], add_special_tokens=False)["input_ids"]
    bridge = turns.Bridge(tokenizer, [end], 10**6, None)
    assert one + sampled + [end] + bridge.ids(end, answers) == two
    for name, given, start in (
            ("calculator", {"expression": "1/0"}, "error: ZeroDivisionError: division by zero"),
            *(("calculator", {"expression": text}, "error: ") for text in (
                "2**9**9**9", "__import__('os').getcwd()", "9*" * 5000 + "9", "(" * 199, "", 3)),
            ("os.getcwd", {}, "error: there is no tool 'os.getcwd', only calculator"),
            ("calculator", [1], "error: TypeError: ")):
        message, = tools.answer([turns.said(calls(given, name=name))])
        assert message["content"].startswith(start) and len(message["content"]) < 520
    for text in "84", "<tool_call>{oops</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>":
        assert tools.answer([turns.said(text)]) is None
    monkeypatch.setenv("TOOL_PARSER", "pythonic")
    with pytest.raises(SystemExit, match="TOOL_PARSER pythonic does not read a call as the chat"):
        load_file(ROOT / "examples/tools.py")
