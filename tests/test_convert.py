"""examples/convert.py keeps what it knows: a key that another system's page documents comes out,
or is named in one sentence with the number of its row."""
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from errors import SettingsError
from examples import convert
from messages import chat_of, from_json, message_of

# Each page, and rows with all keys that it documents. A word that begins with v is a value.
# HF: https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md
# SWIFT: https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html
# AXOLOTL: https://docs.axolotl.ai/docs/dataset-formats/conversation.html, inst_tune.html,
#     template_free.html
# OPENAI: https://platform.openai.com/docs/api-reference/fine-tuning (chat, preference)
TOOL, CALL = '{"name": "v1", "parameters": {"v2": "v3"}}', '{"name": "v4", "arguments": {"v5": 6}}'
ROWS = [line.split(" | ") for line in r"""
HF | alpaca | {"instruction": "va", "input": "vb", "output": "vc", "system": "vd", "history":
 [["ve", "vf"], ["vg", "vh"]], "images": ["vi"], "videos": ["vj"], "audios": ["vk"], "kto_tag": 1,
 "chosen": "vl", "rejected": "vm", "tools": "[TOOL]"}
HF | chats | {"text": "va"}
HF | chats | {"conversations": [{"from": "system", "value": "v0"}, {"from": "human", "value": "va"},
 {"from": "function_call", "value": "CALL"}, {"from": "observation", "value": "vb"}, {"from": "gpt",
 "value": "vc"}], "system": "vd", "tools": "[TOOL]", "images": ["ve"], "videos": ["vf"],
 "audios": ["vg"], "kto_tag": 1, "chosen": {"from": "gpt", "value": "vh"}, "rejected":
 {"from": "gpt", "value": "vi"}}
SWIFT | chats | {"messages": [{"role": "system", "content": "va"}, {"role": "user", "content":
 "vb"}, {"role": "tool_call", "content": "CALL"}, {"role": "tool_call", "content": "CALL"},
 {"role": "tool_response", "content": "vc"}, {"role": "assistant", "content": "vd", "loss": 1}],
 "rejected_response": "ve", "rejected_messages": [{"role": "user", "content": "vf"}],
 "label": 1, "images": ["vg"], "videos": ["vh"], "audios": ["vi"], "tools": ["TOOL"], "objects":
 {"ref": ["vj"], "bbox": [[1, 2]]}, "channel": "vk", "margin": 2, "loss_scale": 1, "solution": "vl"}
SWIFT | chats | {"system": "va", "conversation": [{"human": "vb", "assistant": "vc"}, {"user": "vd",
 "bot": "ve"}]}
SWIFT | chats | {"system": "va", "query": "vb", "response": "vc", "history": [["vd", "ve"]],
 "images": "vf", "tools": TOOL}
SWIFT | alpaca | {"system": "va", "query": "vb", "response": "vc", "history": "[['vd', 'v\\'e']]"}
AXOLOTL | chats | {"conversations": [{"from": "human", "value": "va", "train": false}, {"from":
 "assistant", "value": "vb", "train": true}, {"role": "user", "value": "vc"}, {"role": "assistant",
 "content": "vd", "reasoning_content": "ve", "train_detail": [{"begin_offset": 0, "end_offset": 1,
 "train": false}]}], "system": "vf", "tools": [TOOL]}
AXOLOTL | alpaca | {"instruction": "va", "input": "vb", "response": "vc"}
AXOLOTL | chats | {"segments": [{"label": true, "text": "va"}]}
OPENAI | chats | {"messages": [{"role": "developer", "content": "va", "name": "vb"}, {"role":
 "user", "content": [{"type": "text", "text": "vc"}, {"type": "image_url", "image_url": {"url":
 "vd", "detail": "low"}}]}, {"role": "assistant", "content": null, "refusal": null, "tool_calls":
 [{"id": "vf", "type": "function", "function": CALL}]}, {"role": "tool", "tool_call_id": "vf",
 "content": "vg"}, {"role": "assistant", "content": "vh", "weight": 1}], "tools": [{"type":
 "function", "function": TOOL}], "parallel_tool_calls": false}
OPENAI | chats | {"messages": [{"role": "assistant", "content": null, "function_call": CALL},
 {"role": "function", "name": "va", "content": "vb"}], "functions": [TOOL]}
OPENAI | chats | {"input": {"messages": [{"role": "user", "content": "va"}], "tools": [TOOL]},
 "preferred_output": [{"role": "assistant", "content": "vb"}], "non_preferred_output": []}
""".strip().replace("\n ", " ").splitlines()]


def row_of(text: str) -> dict:
    """A row of the table. In quotes a schema or a call is JSON text, as on the pages."""
    for name, value in ("TOOL", TOOL), ("CALL", CALL):
        text = text.replace(f'"[{name}]"', json.dumps(f"[{value}]")).replace(
            f'"{name}"', json.dumps(value)).replace(name, value)
    return json.loads(text)


def values(stored) -> list[str]:
    """The values in a row, also in its JSON texts: words that begin with v, and numbers."""
    stored = from_json(stored)
    if isinstance(stored, dict | list):
        inner = stored.values() if isinstance(stored, dict) else stored
        return [*itertools.chain.from_iterable(map(values, inner))]
    return re.findall(r"\bv\w*", str(stored))


def without(stored, key: str):
    """The row, or a part of it, without a key."""
    if isinstance(stored, list):
        return [without(one, key) for one in stored]
    if not isinstance(stored, dict):
        return stored
    return {name: without(value, key) for name, value in stored.items() if name != key}


def nulled(stored):
    """The row as often as it has keys, each time with another one null."""
    if isinstance(stored, dict | list):
        for key in [*stored] if isinstance(stored, dict) else range(len(stored)):
            for value in [None, *nulled(stored[key])] if isinstance(stored, dict) else nulled(
                    stored[key]):
                copy = stored.copy()
                copy[key] = value
                yield copy


def converted(path: Path, form: str, row: dict) -> tuple[dict, dict]:
    """What comes out, and the row without the keys that are named. {}: the whole row is."""
    while True:
        path.write_text(json.dumps({"query": "q", "response": "r"}) + "\n" + json.dumps(row))
        try:
            return json.loads(convert.converted(str(path), form)[1]), row
        except SettingsError as error:
            assert f"{path}, row 2: " in str(error) and "\n" not in str(error)
            keys = (*convert.NOWHERE, "detail")
            key = next((key for key in keys if f"for its {key}" in str(error)), None)
            if key is None:
                return {}, {}
            row = without(row, key)


@pytest.mark.parametrize("page, form, text", ROWS)
def test_each_documented_key_comes_out_or_is_named(tmp_path, page, form, text):
    """With a value, and with null. What comes out is read, and is written again as it is."""
    row, path = row_of(text), tmp_path / "rows.jsonl"
    for stored in [row, *nulled(row)]:
        made, kept = converted(path, form, stored)
        assert {*values(kept)} <= {*values(made)} and "None" not in json.dumps(made), made
        assert made or stored is not row or "segments" in row  # those are of no form
        if made:
            assert chat_of("messages", made["messages"], None) == made["messages"]
            assert converted(path, "chats", made) == (made, made)


@pytest.mark.parametrize("key", convert.WEIGHTS)
def test_a_turn_is_learned_or_not_as_its_weight_says_or_the_weight_is_named(tmp_path, key):
    """A half is neither; and where all that is marked is learned, so would a user's turn be."""
    path = tmp_path / "rows.jsonl"
    for value, learned in [(True, 1), (False, 0), (None, 1), (1, 1), (0, 0), (1.0, 1), (0.0, 0),
                           ("true", 1), ("False", 0), ("1", 1), ("0", 0), ("0.0", 0),
                           (float("nan"), 1), *((bad, None) for bad in (
                               0.5, 0.9, -1, 2, "0.5", "no", "", [], {}, float("inf")))]:
        for role, name in ("assistant", "gpt"), ("tool_call", "function_call"), ("user", "human"):
            content = CALL if "call" in role else "x"
            says = role == "user" and value in (True, "true", "1") and key in convert.WEIGHTS[4:]
            for stored in {"role": role, "content": content}, {"from": name, "value": content}:
                made, _ = converted(path, "chats", {"messages": [stored | {key: value}]})
                assert (made == {}) == (learned is None or says), (value, stored)
                if made:
                    weight = message_of(made["messages"][0]).get("weight", 1)
                    assert weight == (1 if role == "user" else learned), (value, stored)


TEXTS = [  # of a column that to_csv wrote, what is read
    ("extra", "{'n': 1}", {"n": 1}), ("nums", "[3, 1]", [3, 1]), ("nums", "[3 1]", [3, 1]),
    ("choices", "['a' 'b']", ["a", "b"]), ("answer", "['a', \"b's\"]", ["a", "b's"]),
    ("prompt", "[{'role': 'user', 'content': 'q'}\n {'role': 'user', 'content': '}\\n{'}]",
     [{"role": "user", "content": "q"}, {"role": "user", "content": "}\n{"}]),
    *((name, text, text) for name in ("prompt", "question", "answer") for text in (
        "[3, 1]", "[INST] don't [/INST]", "{1, 2}", "{x | x > 0}", "[", "[]", "[1, 2) \\frac{1}{2}",
        "[0 1] [2 3]", "{'a': f(1)} is a dict", "{1: 2}", "007", "")),
    ("extra", "[INST] no", "[INST] no"), ("extra", "{1, 2}", "{1, 2}"), ("extra", None, None),
    ("prompt", "[{'role': 'user', 'content': array(['q'])}]", ValueError),
    ("extra", "{'n': nan}", ValueError)]


@pytest.mark.parametrize("name, text, right", TEXTS)
def test_pythons_texts_are_read_and_others_stay(name, text, right):
    try:
        assert convert.pandas({name: text})[name] == right
    except ValueError as error:
        assert right is ValueError and f"its {name} " in str(error)


def test_the_command_writes_all_rows_or_none(tmp_path):
    """Bytes of a picture come out as base64, a date as a text."""
    (tmp_path / "own.py").write_text(
        "import datetime\ndef rows(seed):\n    yield {'query': 'q', 'image': b'ab', 'on': "
        "datetime.date(2026, 1, 31)}\ndef bad(seed):\n    yield from rows(seed)\n    yield {'x'"
        ": 1}")
    done = {name: subprocess.run(
        [sys.executable, convert.__file__, "chats", f"own.py:{name}"], cwd=tmp_path, text=True,
        capture_output=True, timeout=100) for name in ("rows", "bad")}
    assert json.loads(done["rows"].stdout) == {
        "image": "YWI=", "on": "2026-01-31", "messages": [{"role": "user", "content": "q"}]}
    assert (done["bad"].returncode, done["bad"].stdout) == (1, "")
    assert done["bad"].stderr.startswith("own.py:bad, row 2: a row needs one of messages, ")
