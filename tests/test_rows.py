"""Every shape of row: what is stored becomes a prompt, or is refused in one sentence.

The right text of a prompt is what transformers' apply_chat_template gives for messages that are
written by hand. Rows that are answered already are learned by parts: here they are refused.
"""
import json
import os
import re
import subprocess
import sys
from functools import reduce
from itertools import permutations, product
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
import fakes
from data import DataArgs, Row, Stream
from errors import SettingsError
from examples import convert, countdown, tiny
from messages import answer_of, message_of
from tables import table

TEMPLATES = {
    "whole": (
        "{% if effort %}Effort: {{ effort }}{% endif %}"
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
        "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
        "<think></think>{% endif %}{% endif %}"),
    "plain": tiny.CHATML, "none": None, "comment": tiny.CHATML + "{# train on what bing says #}",
    "ends": "{{ messages[0]['content'] }}<|im_end|>",
    "no system": "{{ raise_exception('System role refused') }}",
    "hears users": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
                   "{% endfor %}",
    # Mistral's raises an error where an answer of a tool follows no call, or a role is unknown.
    "strict": "{% for m in messages %}{% if m.role == 'tool' and not "
              "messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
              "{% if m.role not in ['user', 'assistant', 'tool', 'ipython'] %}"
              "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}"
              "{{ m.tool_calls }}{% endfor %}"}
STORES = ("jsonl", "json", "parquet", "csv")
QA = {"question": "q", "answer": "a"}


def make_tokenizer(template="whole"):
    """Returns tiny's tokenizer with one of TEMPLATES."""
    made = tiny.make_tokenizer()
    made.chat_template = TEMPLATES[template]
    return made


TOKENIZER = make_tokenizer()


def store(folder: Path, kind: str, rows: list[dict]) -> str:
    """Writes the rows in one of STORES → the value of --data. A .csv has texts and JSON texts."""
    import datasets
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        datasets.Dataset.from_list([*map(in_cells, rows)]).to_csv(path)
    else:
        try:
            made = datasets.Dataset.from_list(rows)
        except ValueError:  # a content is a text here and a list there: Arrow's extension for JSON
            made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        made.to_parquet(path)
    return str(path)


def in_cells(row: dict) -> dict:
    """Returns a row as a .csv has it: texts, or JSON texts; an empty cell is null."""
    return {key: (value if isinstance(value, str) else json.dumps(value)) or None
            for key, value in row.items()}


def load(spec: str, tokenizer="whole", limit=4096, **flags) -> tuple[list[Row], str]:
    """Returns the rows of a run and the line of their number. tokenizer: a name of TEMPLATES."""
    return data.load(spec, make_tokenizer(tokenizer), DataArgs(limit, **flags))


def row_of(stored: dict, folder: Path, **flags) -> Row:
    """Returns the row of a run that is made of this stored one."""
    return load(store(folder, "jsonl", [stored]), **flags)[0][0]


def template(messages, **options) -> str:
    """Returns what transformers makes of the messages."""
    return TOKENIZER.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options)


def sentence(call, *args, **options) -> str:
    """Returns the message of a mistake, which has to be one line."""
    with pytest.raises(SettingsError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(stored: dict, folder: Path, **flags) -> str:
    """Returns the sentence for a row that is refused, behind the row's number."""
    found, number, words = sentence(row_of, stored, folder, **flags).partition("row 1: ")
    assert number, found
    return words


# ---- rows in JSON, in which a word in capitals stands for a value

def pair(i: int) -> tuple[str, str]:
    """Returns a question, and an answer that a reader which guesses types would change."""
    answers = ["007", "1e5", "2026-01-31", "NA", "true", "é \n", "[1]", 'x, "y"', "null", "{}"]
    return f"What is {i} and {i}? é\n", answers[i % 10]


CAPITALS = re.compile(r"\b[A-Z]+\b")
WORDS = dict(table(r"""
USER | {"role": "user", "content": Q}
PARTS | {"role": "user", "content": [
     {"type": "text", "text": HALF}, {"type": "text", "text": REST}]}
SAID | {"role": "assistant", "content": A}
CALLS | {"role": "assistant", "content": "", "tool_calls": [
     {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]}
CALLSASTEXT | {"role": "assistant", "content": null, "tool_calls": [
     {"type": "function", "function": {"name": "f", "arguments": TEXTARGUMENTS}}]}
ARGUMENTS | {KEY: VALUE}
TOOL | {"role": "tool", "content": "3"}
TOOLS | [{"type": "function", "function": {"name": "f", "parameters": {
     "type": "object", "properties": {KEY: {"type": "t"}}}}}]
SYSTEM | {"role": "system", "content": "be brief"}
HUMAN | {"from": "human", "value": Q}
GPT | {"from": "gpt", "value": A}
"""))


def filled(text: str, q="q", a="A", i=0):
    """Returns the value of a JSON text. TEXTX is X as a JSON text. i: of it the calls and schemas
    have different keys, which a table adds to all rows."""
    values = dict(Q=q, A=a, HALF=q[:4], REST=q[4:], I=i, KEY=f"k{i % 3}",
                  VALUE=(i, {"h": i}, "x")[i % 3])

    def value(word: str) -> str:
        if word.startswith("TEXT"):
            return json.dumps(fill(word.removeprefix("TEXT")))
        return fill(WORDS[word]) if word in WORDS else json.dumps(values[word])

    def fill(text: str) -> str:
        return CAPITALS.sub(lambda found: value(found[0]), text)
    return json.loads(fill(text))


# ---- the sweep: the formats of the field, each in each store

FORMATS = """
trl, standard | {"prompt": Q, "answer": A, "tools": []} | [USER] | A
trl, conversational | {"prompt": [USER], "solution": A} | [USER] | A
messages | {"messages": [USER, CALLS, TOOL], "tools": TOOLS} | [USER, CALLS, TOOL] | null
openai | {"messages": [PARTS, CALLSASTEXT, TOOL], "tools": TEXTTOOLS} | [USER, CALLS, TOOL] | null
sharegpt | {"conversations": [HUMAN], "answer": A} | [USER] | A
sharegpt with a system | {"system": "be brief", "conversations": [HUMAN]} | [SYSTEM, USER] | null
verl | {"prompt": [SYSTEM, USER], "reward_model": {"style": "rule", "ground_truth": A},
     "answer": "not it", "data_source": "s", "extra_info": {KEY: I}} | [SYSTEM, USER] | A
a tool's answer | {"prompt": [USER, CALLS, TOOL], "tools": TOOLS} | [USER, CALLS, TOOL] | null
easyr1 | {"problem": Q, "answer": A, "images": []} | [USER] | A
question and answer | {"question": Q, "answer": A} | [USER] | A
"""


@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, row, messages, answer", table(FORMATS))
def test_a_format_of_the_field_in_every_store(tmp_path, name, row, messages, answer, n):
    """It has transformers' text of its messages, that text's ids, the stored answer and columns: no
    store changes a type."""
    stored, chats, answers = ([filled(cell, *pair(i), i) for i in range(n)]
                              for cell in (row, messages, answer))
    for kind in STORES if name not in ("verl", "easyr1") else STORES[:-1]:  # a .csv has texts alone
        rows, _ = load(store(tmp_path, kind, stored))
        assert [row.answer for row in rows] == answers
        assert [row.index for row in rows] == [*range(n)]
        for i, (row, chat, one) in enumerate(zip(rows, chats, stored, strict=True)):
            options = {"tools": filled("TOOLS", i=i)} if one.get("tools") else {}
            assert row.prompt == template(chat, **options), kind
            assert row.prompt_ids == TOKENIZER(row.prompt)["input_ids"]
            assert row.columns == (in_cells(one) if kind == "csv" else one), kind
            assert row.source == one.get("data_source", f"{tmp_path.name}/rows")


# ---- one row: understood, or refused

UNDERSTOOD = r"""
{"prompt": [USER, {"role": "assistant", "content": "see: <think>"}]} | null
    | "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nsee: <think>"
{"prompt": "<|im_start|>user\nfinished <think>"} | null | "<|im_start|>user\nfinished <think>"
{"problem": "q", "solution": "so \\boxed{1}, or rather $\\boxed{\\frac{1}{2}}$."}
    | "\\frac{1}{2}" | [USER]
{"problem": "q", "solution": "so \\boxed{1}", "answer": null} | "1" | [USER]
{"problem": "q", "solution": "no box"} | "no box" | [USER]
{"problem": "q", "ground_truth": [1, 2]} | [1, 2] | [USER]
{"problem": "q", "answer": NaN} | null | [USER]
{"question": "is {answer} a {level}?", "answer": "42", "level": 3} | "42"
    | [{"role": "user", "content": "is {answer} a {level}? (3) \\boxed{} \\boxed{answer} {}"}]
    | {"prompt_template": "{question} ({level}) \\boxed{} \\boxed{answer} {}"}
{"question": "q", "answer": "a", "level": 3} | "a"
    | [{"role": "user", "content": "q \\frac{1}{level} {\"json\": 1} { answer } {question.x}"}]
    | {"prompt_template": "{prompt} \\frac{1}{level} {\"json\": 1} { answer } {question.x}"}
{"prompt": [USER]} | null | [{"role": "user", "content": "think.\\nq"}]
    | {"prompt_template": "think.\\n{question}"}
{"nums": [1, 2], "target": 3} | 3 | [{"role": "user", "content": "make 3 of [1, 2]."}]
    | {"prompt_template": "make {target} of {nums}."}
{"prompt": "q"} | null | [SYSTEM, USER] | {"system": "be brief"}
{"prompt": [{"role": "system", "content": "old"}, USER]} | null | [SYSTEM, USER]
    | {"system": "be brief"}
{"prompt": "q"} | null | "be brief\n\nq" | {"tokenizer": "none", "system": "be brief"}
{"prompt": "q", "chat_template_kwargs": {"enable_thinking": false}} | null
    | "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think></think>"
{"prompt": [{"role": "developer", "content": "d"}, {"role": "function", "content": "e"}, USER]}
    | null | [{"role": "developer", "content": "d"}, {"role": "function", "content": "e"}, USER]
{"instruction": "q", "input": "x", "output": "a"} | null | [{"role": "user", "content": "q x"}]
    | {"prompt_template": "{instruction} {input}"}
{"instruction": "q", "input": null, "output": "a"} | null | [{"role": "user", "content": "q "}]
    | {"prompt_template": "{instruction} {input}"}
{"prompt": [USER, CALLS, TOOL, {"role": "ipython", "content": "2"}, USER]} | null
    | "[user]q[assistant][{'type': 'function', 'function': {'name': 'f', 'arguments':
     {'k0': 0}}}][tool]3[ipython]2[user]q"
    | {"tokenizer": "strict"}
"""


@pytest.mark.parametrize("cells", table(UNDERSTOOD))
def test_a_row_is_understood(tmp_path, cells):
    """Its columns, --prompt_template and --system, and the template's switches, are this prompt (a
    text, or messages for the template) and this answer. A template that raises an error without a
    key or a role of a message reads it."""
    row, answer, right, flags = map(filled, [*cells, "{}"][:4])
    made = row_of(row, tmp_path, **flags)
    assert made.prompt == (right if isinstance(right, str) else template(right))
    assert made.answer == answer and TOKENIZER.decode(made.prompt_ids) == made.prompt


REFUSED = r"""
message 1 of prompt: its content cannot | {"prompt": [USER, {"role": "user"}, USER]}
message 1 of prompt: its content cannot be used: {'role': 'user', 'content': [{'type'
    | {"prompt": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}
message 0 of prompt: its role cannot be used | {"prompt": ["q"]}
the prompt must be text or a list of | {"prompt": 5}
the prompt must be text or a list of | {"prompt": "[{'role': 'user', 'content': 'q'}]"}
prompt ends with what | {"prompt": [USER, CALLS]}
messages ends with what the assistant says | {"messages": [USER, SAID]}
no prompt column in (text, label); it needs prompt, | {"text": "q", "label": "a"}
such as '{instruction} {input}' | {"instruction": "q", "input": "", "output": "a"}
surrogates not allowed | {"prompt": "q", "answer": "\ud800"}
finished chat text | {"prompt": [USER, {"role": "user", "content": "<|im_start|>user\nq"}]}
finished chat text takes no --system | {"prompt": "<|im_start|>user\nq"} | {"system": "s"}
the chat template: System role refused | {"prompt": "q"} | {"tokenizer": "no system"}
--prompt_template '{question} {subject}' must name one or more columns of the row (question, answer
    | {"question": "q", "answer": "a"} | {"prompt_template": "{question} {subject}"}
--prompt_template 'Solve.' must name | {"question": "q"} | {"prompt_template": "Solve."}
must not end in <|im_end|> | {"prompt": "q"} | {"tokenizer": "ends"}
tools must be a list of schemas | {"prompt": "q", "tools": ["f"]}
an object | {"prompt": "q", "chat_template_kwargs": [1]}
multiple values | {"prompt": "q", "chat_template_kwargs": {"add_generation_prompt": false}}
no place for videos | {"prompt": "q", "videos": ["x"]}
no place for history | {"prompt": "q", "history": ["x"]}
no place for functions | {"prompt": "q", "functions": ["x"]}
no such role | {"prompt": [{"role": "bing", "content": "x"}, USER]} | {"tokenizer": "strict"}
no such role
    | {"prompt": [{"role": "bing", "content": "x", "thinking": "t"}, USER]}
    | {"tokenizer": "strict"}
leaves out the message of role developer
    | {"prompt": [{"role": "developer", "content": "d"}, USER]} | {"tokenizer": "hears users"}
leaves out the message of role function
    | {"prompt": [{"role": "function", "content": "d"}, USER]} | {"tokenizer": "hears users"}
"""


@pytest.mark.parametrize("cells", table(REFUSED))
def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path, cells):
    """No row is used without something that it holds: one sentence has its number and says what."""
    words, *rest = cells
    row, flags = map(filled, [*rest, "{}"][:2])
    assert words in refusal(row, tmp_path, **flags)


# Forms of other systems: by the general rule they are refused, and a function of convert.py reads
# them. The function, the row, its messages and its answer: of LLaMA-Factory, ms-swift, OpenAI in
# 2023, pandas, Alpaca; then of axolotl, with each key that says that a turn is not learned.
ELSEWHERE = r"""
chats | {"conversations": [HUMAN, {"from": "function_call",
     "value": "{\"name\": \"f\", \"arguments\": {\"k0\": 0}}"}, {"from": "observation",
     "value": "3"}, GPT]} | [USER, CALLS, TOOL, SAID] | null
chats | {"messages": [USER, {"role": "tool_call",
     "content": "[{\"name\": \"f\", \"arguments\": {\"k0\": 0}}]"}, {"role": "tool_response",
     "content": "3"}, {"role": "assistant", "content": A, "loss": true}]}
    | [USER, CALLS, TOOL, SAID] | null
chats | {"messages": [USER, {"role": "assistant", "content": null,
     "function_call": {"name": "f", "arguments": ARGUMENTS}}, TOOL, SAID]}
    | [USER, CALLS, TOOL, SAID] | null
pandas | {"prompt": "[{'role': 'user', 'content': 'q'}]",
     "reward_model": "{'ground_truth': '5'}", "extra_info": "{'n': 1}"} | [USER] | "5"
alpaca | {"instruction": "q", "input": "x", "output": A, "history": [["one", "two"]]}
    | [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
     {"role": "user", "content": "q\nx"}, SAID] | null
""" + "".join(f"""chats
    | {{"messages": [USER, {{"role": "assistant", "content": "no", "{key}": false}}, USER, SAID]}}
    | [USER, {{"role": "assistant", "content": "no", "weight": 0}}, USER, SAID] | null
""" for key in convert.WEIGHTS)


@pytest.mark.parametrize("form, row, messages, answer", table(ELSEWHERE))
def test_a_form_of_another_system_is_refused_and_converted(tmp_path, form, row, messages, answer):
    """Roles, calls, turns that are not learned and pandas' texts of objects become messages of
    OpenAI's form."""
    assert refusal(filled(row), tmp_path)
    made = getattr(convert, form)(filled(row))
    assert [message_of(m) for m in made.get("messages") or made["prompt"]] == filled(messages)
    assert answer_of(made)[1] == filled(answer)


# ---- what a run says of its rows

COUNTED = r"""
[{"prompt": "a"}, {"prompt": "a longer one"}, {"prompt": "  \n"}, {"prompt": "a"}, {"prompt": ""},
     {"prompt": "b"}, {"prompt": null}, {"prompt": [{"role": "user", "content": " "}]},
     {"prompt": []}, {"prompt": "a"}] | {"limit": 12} | 4 of 10 prompts kept, 9 to 9 tokens; left
     out: 1 longer than 12 tokens, 5 empty
[{"prompt": ""}, {"prompt": "q"}] | {"prompt_template": "solve: {question}"} | 1 of 2 prompts kept
[{"text": ""}, {"text": "q"}] | {"prompt_template": "{text}"} | 1 of 2 prompts kept
[{"prompt": "aaaaa"}, {"prompt": "aaaaaaa"}] | {"limit": 13} | 1 of 2 prompts kept
[{"prompt": [{"role": "system", "content": "s"}]}, {"prompt": "q"}] | {"tokenizer": "hears users"}
     | row 1: the chat template writes nothing for it
[{"prompt": "aaaaa"}, {"prompt": "aaaaaaa"}] | {"limit": 12} | no prompt is left; the shortest has
     more than 12 tokens: --max_prompt_tokens 13 keeps it, 15 keeps all.
[{"prompt": " "}] | {} | all 1 prompts are empty
[{"prompt": "q"}, {"text": "q"}] | {} | rows.jsonl, row 2: no prompt column
"""


@pytest.mark.parametrize("rows, flags, words", table(COUNTED))
def test_long_and_empty_prompts_are_left_out_and_counted(tmp_path, rows, flags, words):
    """A row that asks nothing, also behind a template's own words, is no prompt; as long as the
    limit is allowed; a run without any prompt is refused with the limits that would work."""
    spec = store(tmp_path, "jsonl", filled(rows))
    if "prompts kept" in words:
        assert words in load(spec, **filled(flags))[1]
    else:
        assert words in sentence(load, spec, **filled(flags))


# ---- files, names and functions

LONG, TWO = "x" * 200_000, [{"a": 1}, {"a": 2}]
FILES = [  # name, content, rows or words
    ("a.json", '\n[{"a": 1},\n{"a": 2}]', TWO), ("a.json", '{\n "a": 1\n}\n{"a":\n2}', TWO),
    ("a.jsonl", '\ufeff{"a": "one\u2028line\x85 "}\r\n\r\n', [{"a": "one\u2028line\x85 "}]),
    ("a.jsonl", '{"a": "1", "b": "2026-01-31"}\n{"a": 1.0, "c": {}}',
     [{"a": "1", "b": "2026-01-31"}, {"a": 1.0, "c": {}}]),
    ("a.csv", f'\ufeffa,b\r\n"x, ""y""\r\nz",007\r\n\r\nNA,\r\n{LONG},1\n',
     [{"a": 'x, "y"\r\nz', "b": "007"}, {"a": "NA", "b": None}, {"a": LONG, "b": "1"}]),
    ("a.jsonl", '{"a": 1}\n\n{"a": 1\n{"a": 2}\n', "Expecting ',' delimiter: line 4 column 1"),
    ("a.jsonl", '{"a": 1}\nnull\n', "row 2 is not a JSON object"),
    ("a.parquet", "PAR1 no table", "cannot be loaded: ArrowInvalid: "),
    ("a.csv", "a,b\n1,2\n\n1,2,3\n", "line 4 does not fit the first line"),
    ("a.csv", 'a\n1\n"open', "cannot be loaded: Error: unexpected end of data"),
    ("a.jsonl.gz", "", "or does not end in .jsonl, .json, .parquet, .csv."),
    ("pipe.csv", None, "is not a file on this machine"),  # it would be read for ever
    ("a.csv", "a,b\n", "has no rows")]


@pytest.mark.parametrize("name, content, what", FILES)
def test_a_file_is_read_as_it_is_written_or_its_mistake_is_named(
        tmp_path, name, content, what):
    """No type is guessed; a sentence has the file and the place in it. The folder's name has what
    begins a split."""
    (path := tmp_path / "me@lab: x@train" / name).parent.mkdir()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content.encode())
    if isinstance(what, list):
        assert str(data.read(str(path))) == str((what, "me@lab: x@train/a"))
        assert "is not a file" in sentence(data.read, f"{path}@train.csv")
    else:
        message = sentence(data.read, str(path))
        assert message.startswith(str(path)) and what in message and len(message) < 600


def test_a_map_of_an_arrow_table_is_a_list_of_pairs():
    """As pyarrow has it: it is no struct with keys of other rows."""
    pairs = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))
    assert data.from_arrow(pa.table({"map": pairs})) == [{"map": [("k", 1)]}]


def test_a_hub_name_says_what_to_load(monkeypatch):
    """name[:config][@split], of the split train if it names none."""
    import datasets
    calls = []

    def load_dataset(*name, split):  # the cache of the library
        calls.append([*name, split])
        return datasets.Dataset.from_list([QA])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for end in ("", "@test", ":main@train[:2]"):
        assert data.read("openai/gsm8k" + end) == ([QA], "openai/gsm8k")
    assert [rest for _, *rest in calls] == [[None, "train"], [None, "test"], ["main", "train[:2]"]]


def test_importing_does_nothing_and_offline_is_one_sentence(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE at import."""
    command = ("import sys, data\n"
               "print({'datasets', 'reasoning_gym', 'transformers', 'pyarrow'} & {*sys.modules})\n"
               "try: data.read('gsm8k_main')\n"
               "except data.SettingsError as error: print(error)")
    output = subprocess.check_output(
        [sys.executable, "-c", command], cwd=tmp_path, text=True, env=os.environ | {
            "PYTHONPATH": str(data.ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": f"{tmp_path}/hf"})
    assert output.startswith("set()\ngsm8k_main cannot be loaded: ") and output.count("\n") == 2
    assert "Hub (OfflineModeIsEnabled)" in output


def test_a_folder_is_refused_with_the_function_that_reads_it(tmp_path):
    """The function of the sentence reads what save_to_disk wrote."""
    import datasets
    datasets.Dataset.from_list([QA]).save_to_disk(tmp_path / "saved")
    message = sentence(data.read, f"{tmp_path}/saved")
    code = message.partition("`")[2].rpartition("`")[0].replace("FOLDER", f"{tmp_path}/saved")
    (tmp_path / "mine.py").write_text(f"import datasets\n{code}\n")
    assert data.read(f"{tmp_path}/mine.py:rows") == ([QA], "mine.py:rows")


OWN = """
def drawn(seed): yield {"prompt": seed}
def listed(seed): return list(drawn(seed))
def empty(seed): return []
def texts(seed): return [{"prompt": "a"}, "b"]
def broken(seed): return [{}[seed]]
def without(): return [{"prompt": "a"}]
def ends(seed): exit(seed - 7)
ended = exit
"""


@pytest.mark.parametrize("name, words", [
    ("empty", "must be a function of .* gave none"), ("gone", "must be .* has no gone"),
    ("broken", "raised KeyError in line 6 of .*own.py: 7"),
    ("ends", "raised SystemExit in line 8 of .*own.py: 0"), ("ended", "must be .*(7)"),
    ("texts", "must be .*row 2 is 'b', which is not a dict"),
    ("without", "must be .* takes 0 positional arguments but 1")])
def test_a_function_of_a_seed_gives_the_rows_or_a_sentence_names_it(tmp_path, name, words):
    """It returns or yields dicts, in the place of a file; --data FILE.py:NAME."""
    (tmp_path / "own.py").write_text(OWN)
    for good in "drawn", "listed":
        assert data.read(f"{tmp_path}/own.py:{good}", 7) == ([{"prompt": 7}], f"own.py:{good}")
    message = sentence(data.read, spec := f"{tmp_path}/own.py:{name}", 7)
    assert re.match(f"{spec} {words}", message), message
    assert "there is no file nowhere.py here or in" in sentence(data.read, "nowhere.py:rows")


# ---- rows that are generated

def test_tiny_rows():
    """Of the seed, the task and the split: the test split has no question of the train split."""
    rows, name = data.read("tiny:sort@train", seed=5)
    assert data.read("tiny", seed=5) == (rows, "tiny") and name == "tiny/sort"
    train, other, test = ({row["question"] for row in data.read(spec, seed)[0]}
                          for spec, seed in (("tiny", 5), ("tiny", 6), ("tiny@test", 5)))
    assert len(train) == len(test) == 1000 and train != other and not test & (train | other)
    message = sentence(data.read, "tiny:srt")
    assert "no such rows: tiny:srt@train; tiny has sort, " in message and "train and" in message


def test_reasoning_gym_rows_are_those_of_the_seed_and_the_split_alone(monkeypatch):
    """ransom_note iterates over sets of strings; list_functions uses the global generator. Puzzle i
    is made from seed + i: the library's seeds 1 and 2 would share all puzzles but one. Of
    game_of_life_halting any text that is not empty would be right."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    notes, train, test = (data.read(f"reasoning_gym:{spec}", 1)[0] for spec in (
        "ransom_note", "list_functions", "list_functions@test"))
    found = [crc32(repr(rows[:40]).encode()) for rows in (notes, train)]
    assert found == [1851662582, 1094492425]  # of 0.1.25
    assert len({row["question"] for row in train + test}) > 1900
    for task, words in (("spell_backwrd", "cannot be generated: "), (
            "game_of_life_halting", "cannot be learned: the library's scorer gives full")):
        assert f"{task} {words}" in sentence(data.read, f"reasoning_gym:{task}")


def test_countdowns_rows_can_be_solved():
    """Some expression of a row's numbers reaches its target, by a search over all."""
    for row in countdown.rows(0, 8):
        tried = (reduce("({0}{1[0]}{1[1]})".format, zip(signs, nums[1:], strict=True), nums[0])
                 for nums in permutations(row["nums"])
                 for signs in product("+-*/", repeat=len(nums) - 1))
        assert any(countdown.countdown(text, **row) for text in tried)
    assert [*countdown.rows(0, 9)] == [*countdown.rows(0, 9)] != [*countdown.rows(1, 9)]


# ---- order

@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(-2**70, 2**70),
       stop=st.integers(0, 999))
def test_an_epoch_is_every_row_once_from_any_place(n, batch, seed, stop):
    """Each of three epochs is a permutation of the rows in steps of a batch, with a rest; no
    position stands twice; a Stream that is resumed from its state goes on with the same prompts."""
    stream, states, steps = Stream(fakes.rows(n), seed), [], []
    for _ in range(3 * -(-n // batch)):
        states.append(stream.state_dict())
        steps.append(stream.next(batch))
    prompts = sum(steps, [])
    assert [prompt.position for prompt in prompts] == [*range(3 * n)] and stream.epoch == 3
    for start in 0, n, 2 * n:
        assert {prompt.row.index for prompt in prompts[start:start + n]} == {*range(n)}
    assert {len(step) for step in steps} <= {batch, n % batch or batch}
    resumed, place = Stream(fakes.rows(n), seed), stop % len(steps)
    resumed.load_state_dict(states[place])
    assert all(resumed.next(batch) == step for step in steps[place:])


def test_epochs_and_seeds_have_their_own_order_and_it_is_this_one():
    """A change would make every unfinished run resume into other data."""
    streams = [Stream(fakes.rows(8), seed) for seed in (0, 1)]
    orders = [[p.row.index for p in stream.next(8)] for stream in streams for _ in range(5)]
    assert len({*map(tuple, orders)}) == 10 and orders[5] == [5, 0, 1, 4, 2, 6, 3, 7]
