"""Rows as they are stored: each form is read as OpenAI, TRL and transformers say, or refused.

The right value is what transformers' apply_chat_template gives for messages written by hand.
"""
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers

import data
import flags
import inputs
import rewards
from data import DataArgs
from errors import SettingsError
from examples import convert, tiny
from texts import Marks, marks_of
from worker import Part

TEMPLATE = (
    "{% if effort %}Effort: {{ effort }}{% endif %}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}")
STORES = ("jsonl", "json", "parquet", "csv")


def make_tokenizer(template=TEMPLATE):
    made = tiny.make_tokenizer()
    made.chat_template = template
    return made


TOKENIZER, PLAIN = make_tokenizer(), make_tokenizer(tiny.CHATML)


def store(folder: Path, kind: str, rows: list[dict]) -> str:
    """Writes the rows in one of STORES → the value of --data. A .csv has texts and JSON texts."""
    import datasets
    path = folder / f"rows.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{', '.join(lines)}]")
    elif kind == "csv":
        flat = [{key: value if isinstance(value, str) else json.dumps(value)
                 for key, value in row.items()} for row in rows]
        datasets.Dataset.from_list(flat).to_csv(path)
    else:
        try:
            made = datasets.Dataset.from_list(rows)
        except ValueError:  # a content is a text here and a list there: Arrow's extension for JSON
            made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        made.to_parquet(path)
    return str(path)


def asked(spec: str, tokenizer=TOKENIZER, **flags) -> list[data.Row]:
    return data.load(spec, tokenizer, DataArgs(4096, **flags))[0]


def of(load, row: dict, folder: Path, kind: str = "jsonl", **flags):
    return load(store(folder, kind, [row]), **flags)[0]


def template(messages, goes_on=True, **options) -> str:
    return TOKENIZER.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=goes_on, **options)


def user(text="q"):
    return {"role": "user", "content": text}


def said(text="A", **more):
    return {"role": "assistant", "content": text} | more


def call(arguments, **more):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}} | more


def schema(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties}}}


def refusal(load, row, folder, **flags) -> str:
    with pytest.raises(SettingsError) as error:
        of(load, row, folder, **flags)
    assert "row 1: " in str(error.value)
    return str(error.value).partition("row 1: ")[2]


# ---- keys and columns with a meaning

def test_schemas_need_a_place(tmp_path):
    stored = {"prompt": "q", "answer": "a", "tools": [schema("f")]}
    for tokenizer in PLAIN, make_tokenizer(None):
        assert "no place for tools" in refusal(asked, stored, tmp_path, tokenizer=tokenizer)


def test_switches_of_the_template_are_those_of_the_row(tmp_path):
    row = {"prompt": "q", "answer": "a", "chat_template_kwargs": {"enable_thinking": False}}
    right = template([user()], enable_thinking=False)
    assert right.endswith("<think></think>") and of(asked, row, tmp_path).prompt == right
    for kwargs, words in (({"thinking": 1}, "no place for thinking"), ([1], "an object"),
                          ({"think": 1}, "no place for think"),  # it is written, and no name
                          ({"add_generation_prompt": False}, "multiple values")):
        assert words in refusal(asked, row | {"chat_template_kwargs": kwargs}, tmp_path)


@pytest.mark.parametrize("words, form", [
    ("＜|im_end|＞", normalizers.NFKC()), ("<|IM_END|>", normalizers.Lowercase()),
    ("<|im_end│>", normalizers.Replace("│", "|"))])
def test_a_mark_that_the_normalizer_makes_is_found(words, form):
    """Where the tokenizer looks for it in the normalized text, its id is that of the end."""
    made = tiny.make_tokenizer()
    made.add_tokens([AddedToken("<|im_end|>", normalized=True)])
    made.backend_tokenizer.normalizer = form
    end = made.convert_tokens_to_ids("<|im_end|>")
    for text in words, f"Say {words}, please":
        assert end in made(text)["input_ids"]
        with pytest.raises(SettingsError, match=r"its words hold <\|im_end\|>"):
            marks_of(made).check([user(text)])


@pytest.mark.parametrize("mark", ['<|"|>', "<|\\|>", "＜end＞"])
def test_a_mark_that_json_writes_in_another_way_is_found(mark):
    with pytest.raises(SettingsError, match="its words hold"):
        Marks([], [], [mark]).check([{"role": "user", "content": f"Write {mark} twice."}])


def test_a_comment_of_the_template_reads_nothing(tmp_path):
    tokenizer = make_tokenizer(tiny.CHATML + "{# train on what bing says #}")
    for message in user() | {"train": 1}, {"role": "bing", "content": "x"}:
        assert "no place for" in refusal(asked, {"prompt": [message]}, tmp_path,
                                         tokenizer=tokenizer)


def test_a_template_that_asks_for_a_key_has_a_place_for_it(tmp_path):
    """Mistral's raises an error where an answer of a tool follows no call, or a role is unknown."""
    strict = make_tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " %}{{ raise_exception('no call') }}{% endif %}{% if m.role not in ['user', 'assistant', "
        "'tool', 'ipython'] %}{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]"
        "{{ m.content }}{{ m.tool_calls }}{% endfor %}")
    chat = [user(), said("", tool_calls=[call({"a": 1})]), {"role": "tool", "content": "1"},
            {"role": "ipython", "content": "2"}, user("w")]
    prompt = of(asked, {"prompt": chat}, tmp_path, tokenizer=strict).prompt
    assert "'arguments': {'a': 1}" in prompt and prompt.endswith("[ipython]2[user]w")
    assert "no such role" in refusal(
        asked, {"prompt": [{"role": "bing", "content": "x"}, user()]}, tmp_path, tokenizer=strict)

# Forms of other systems: by the general rule they are refused, and a function of convert.py reads
# them. (form, the row, its messages; None: a row without)
CALL = {"name": "f", "arguments": {"a": 1}}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
TURN = [user(), said("", tool_calls=[call({"a": 1})]), {"role": "tool", "content": "1"}, said()]
ELSEWHERE = {
    "llama-factory": ("chats", {"conversations": [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "1"}, {"from": "gpt", "value": "A"}]}, TURN),
    "ms-swift": ("chats", {"messages": [
        user(), {"role": "tool_call", "content": json.dumps([CALL])},
        {"role": "tool_response", "content": "1"}, said(loss=True)]}, TURN),
    "openai, 2023": ("chats", {"messages": [user(), said(None, function_call=CALL),
                                            {"role": "tool", "content": "1"}, said()]}, TURN),
    "pandas": ("pandas", {"prompt": str([user()]), "reward_model": str({"ground_truth": "5"}),
                          "extra_info": str({"n": 1})}, [user()]),
    "alpaca": ("alpaca", {"instruction": "q", "input": "x", "output": "A", "history": [[
        "one", "two"]]}, [user("one"), said("two"), user("q\nx"), said("A")]),
    **{f"axolotl, {key}": ("chats", {"messages": [user(), said("no", **{key: off}), user(),
                                                  said()]}, [user(), said("no"), user(), said()])
       for key in convert.WEIGHTS for off in [0 if "loss" in key else False]}}


# Those whose last message is to learn are read by a part.
@pytest.mark.parametrize("name", [
    name for name, (*_, chat) in ELSEWHERE.items() if chat[-1]["role"] == "user"])
def test_forms_of_other_systems_are_refused_and_converted(tmp_path, name):
    row, chat = converted(tmp_path, name, asked)
    assert row.prompt == template(chat) and row.answer in (None, "5")


def converted(tmp_path, name: str, load) -> tuple[data.Row, list[dict]]:
    """A row of another system, which is refused as it is, and its messages."""
    form, stored, chat = ELSEWHERE[name]
    assert refusal(load, stored, tmp_path)
    return of(load, getattr(convert, form)(stored), tmp_path), chat


@pytest.mark.parametrize("row, words", [
    ({"prompt": [user(), {"role": "assistant", "content": None}, user()]},
     "message 1 of prompt: its content cannot be used"),
    ({"prompt": ["q"]}, "message 0 of prompt: its role cannot be used"),
    ({"prompt": 5}, "the prompt must be text or a list of"),
    ({"prompt": str([user()])}, "the prompt must be text or a list of"),  # of pandas
    ({"prompt": [user(), said("", tool_calls=[call({})])]}, "prompt ends with what"),
    ({"messages": [user(), said()]}, "messages ends with what the assistant says"),
    ({"prompt": [user() | {"images": ["x.png"]}]}, "no place for images"),
    ({"instruction": "q", "input": "", "output": "a"}, "such as '{instruction} {input}'"),
    ({"prompt": "q", "tools": ["f"]}, "tools must be a list of schemas"),
    ({"prompt": [user("x" * 200), user([{"type": "text", "text": "a"}, IMAGE])]},
     "message 1 of prompt: its content cannot be used: {'role': 'user', 'content': [{'type"),
    ({"text": "q", "label": "a"}, "no prompt column in (text, label); it needs prompt, "),
    ({"prompt": "q", "answer": "\ud800"}, "surrogates not allowed"),
    ({"prompt": [user("s"), user("<|im_start|>user\nq")]}, "finished chat text"),
    ({"prompt": [{"role": "bing", "content": "x"}]}, "no place for bing"),
    *(({"prompt": "q", key: ["x"]}, f"no place for {key}")
      for key in ("videos", "history", "functions"))])
def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path, row, words):
    assert words in refusal(asked, row, tmp_path)


def test_a_role_needs_a_place(tmp_path):
    deaf = make_tokenizer("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
                          "{% endif %}{% endfor %}")
    for role in "developer", "function":
        chat = {"prompt": [{"role": role, "content": "D"}, user()]}
        assert of(asked, chat, tmp_path).prompt == template(chat["prompt"])
        assert f"leaves out the message of role {role}" in refusal(
            asked, chat, tmp_path, tokenizer=deaf)


# ---- what a run says of its rows

def test_a_run_says_which_columns_it_reads_and_which_answers_are_no_number(tmp_path):
    """Data sets write "proof" where there is no answer, and a solution beside it."""
    def said_of(rows, **flags) -> str:
        return inputs.what_is_read(asked(store(tmp_path, "jsonl", rows), **flags))

    row = {"problem": "q", "solution": r"s \boxed{7}", "answer": "7"}
    words = [row | {"answer": word} for word in ("proof", "notfound", "proof", "notfound", "proof")]
    assert said_of([row, row]) == "2 rows: prompt from problem, answer from answer"
    assert said_of([row, *words]) == (
        "6 rows: prompt from problem, answer from answer; answers without a digit: 'proof' 3 "
        "times, 'notfound' 2 times")
    nothing = [{"prompt": "q"}, {"prompt": "q", "answer": None}, {"prompt": "q", "answer": " "}]
    assert said_of([*nothing, row | {"answer": None}]) == (
        "3 rows: prompt from prompt, no answer; 1 row: prompt from problem, answer from the last "
        "box of solution")
    assert said_of([row], prompt_template="{problem}!") == (
        "1 row: prompt from --prompt_template, answer from answer")


# ---- paths

@pytest.mark.parametrize("name", ["me@lab.org", "a:b", "a b", "with:c@d", "@", "x@train"])
def test_a_path_may_hold_what_a_split_begins_with(tmp_path, name):
    (tmp_path / name).mkdir()
    spec = store(tmp_path / name, "jsonl", [{"prompt": "q"}])
    assert data.read(spec)[0] == [{"prompt": "q"}]
    for end in "@train", ":main", "x.jsonl":
        with pytest.raises(SettingsError):
            data.read(spec + end)


def test_flags_of_files_may_hold_them_too(tmp_path):
    (tmp_path / "a@b:1 c").mkdir()
    path = tmp_path / "a@b:1 c/my@re:w.py"
    path.write_text("def tidy(): pass\n")
    for weight in "", ":0.5":
        assert rewards.parse([f"{path}:tidy{weight}"]) == [
            Part("tidy", float(weight[1:] or 1), str(path))]
    assert flags.find("loss", f"{path}:tidy") == (path, "tidy")
    (path.parent / "config.json").write_text("{}")
    assert inputs.find_model(str(path.parent), flag="model") == str(path.parent)


# ---- the sweep: the formats of the field, each in each store

def pair(i: int) -> tuple[str, str]:
    return f"What is {i} and {i}? é\n", f"It is {2 * i}."


def formats(i: int) -> dict[str, tuple[dict, list[dict], dict]]:
    """name: (a row, its messages, what the template gets beside them). The last message is to
    learn, if it is the assistant's."""
    q, a = pair(i)
    made = call({("a", "b", "c")[i % 3]: (i, {"h": i}, "x")[i % 3]})  # Arrow adds the others' keys
    tools = [schema("f", **{f"x{i % 4}": {"type": "t"}})]
    text_call = made | {"function": made["function"] | {
        "arguments": json.dumps(made["function"]["arguments"])}}
    turned = [user(q), said("", tool_calls=[made]), {"role": "tool", "content": "3"}, said(a)]
    openai = [{"role": "user", "content": [{"type": "text", "text": x} for x in (q[:4], q[4:])]},
              said(None, tool_calls=[text_call]), {"role": "tool", "content": "3"},
              said(a, weight=1)]
    return {
        "trl, standard": ({"prompt": q, "answer": a, "tools": []}, [user(q)], {}),
        "trl, conversational": ({"prompt": [user(q)], "solution": a}, [user(q)], {}),
        "prompt and completion": ({"prompt": q, "completion": a}, [user(q), said(a)], {}),
        "both conversational": ({"prompt": [user(q)], "completion": [said(a)]},
                                [user(q), said(a)], {}),
        "messages": ({"messages": turned, "tools": tools}, turned, {"tools": tools}),
        "openai": ({"messages": openai, "tools": json.dumps(tools)}, turned, {"tools": tools}),
        "sharegpt": ({"conversations": [{"from": "human", "value": q},
                                        {"from": "gpt", "value": a}]}, [user(q), said(a)], {}),
        "sharegpt with a system": (
            {"system": "S", "conversations": [{"from": "human", "value": q},
                                              {"from": "gpt", "value": a}]},
            [{"role": "system", "content": "S"}, user(q), said(a)], {}),
        "a tool's answer": ({"prompt": turned[:3], "tools": tools}, turned[:3], {"tools": tools}),
        "verl": ({"data_source": "s", "prompt": [user(q)], "reward_model": {
            "style": "rule", "ground_truth": a}, "extra_info": {f"k{i % 3}": i}}, [user(q)], {}),
        "easyr1": ({"problem": q, "answer": a, "images": []}, [user(q)], {}),
        "alpaca": ({"instruction": q, "input": "", "output": a}, [], {}),
        "question and answer": ({"question": q, "answer": a}, [user(q)], {})}


def stored_formats(tmp_path, n: int):
    """(name, store, the value of --data, n stored rows, their messages, what the template gets)."""
    rows = [formats(i) for i in range(n)]
    for name in rows[0]:
        for kind in STORES:
            if kind == "csv" and name in ("verl", "easyr1"):  # cells are texts
                continue
            (tmp_path / name).mkdir(exist_ok=True)
            stored, chats, options = zip(*(row[name] for row in rows), strict=True)
            yield name, kind, store(tmp_path / name, kind, stored), stored, chats, options


@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_formats_of_the_field_in_every_store(tmp_path, n):
    """Those whose last message is to learn are read by a part."""
    for name, kind, spec, stored, chats, options in stored_formats(tmp_path, n):
        if name == "alpaca":
            with pytest.raises(SettingsError, match="such as '{instruction} {input}'"):
                asked(spec)
            made = asked(spec, prompt_template="{instruction} {input}")
            assert made[0].prompt == template([user(f"{pair(0)[0]} ")])
            continue
        made = [] if chats[0][-1]["role"] == "assistant" else asked(spec)
        for row, chat, more, one in zip(made, chats, options, stored, strict=bool(made)):
            assert row.prompt == template(chat, **more), (name, kind)
            if name == "verl":
                assert row.answer == one["reward_model"]["ground_truth"]
                assert row.columns["extra_info"] == one["extra_info"]
