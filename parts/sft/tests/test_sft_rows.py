"""Rows of which something is learned: each form is read as OpenAI, TRL and transformers say, or
refused. The other forms, and what is right: test_rows.py."""
from functools import partial

import pytest

import data
import inputs
import test_rows
from data import DataArgs
from parts.sft import targets
from test_rows import (
    ELSEWHERE,
    PLAIN,
    TOKENIZER,
    call,
    make_tokenizer,
    of,
    pair,
    refusal,
    said,
    schema,
    store,
    template,
    user,
)


def learned(spec: str, tokenizer=TOKENIZER, **flags) -> list[data.Row]:
    ends = [tokenizer.eos_token_id]
    return data.load(spec, tokenizer, DataArgs(4096, **flags), eos_ids=ends,
                     make=partial(targets.make_row, eos_ids=ends))[0]


def texts(row: data.Row) -> tuple[str, str, str]:
    """The prompt, all that follows, and what of it is learned."""
    ids, marks = row.target
    kept = [i for i, mark in zip(ids, marks, strict=True) if mark]
    return row.prompt, TOKENIZER.decode(ids), TOKENIZER.decode(kept)


def test_a_null_that_somebody_wrote_stays(tmp_path):
    chat = [user(), said(None, tool_calls=[call({"city": None}, id=None)], name=None)]
    right = said("", tool_calls=[call({"city": None})])
    row = of(learned, {"messages": chat}, tmp_path)
    assert texts(row)[2] == template([user(), right], False)[len(row.prompt):].rstrip()
    import datasets
    place = tmp_path / "kept.parquet"  # its arguments are JSON, which has no nulls of other rows
    datasets.Dataset.from_list(
        [{"messages": [user(), said("", tool_calls=[call(arguments)])]}
         for arguments in ({"city": None}, {"city": 1}, {"city": "x"})],
        on_mixed_types="use_json").to_parquet(place)
    assert texts(learned(str(place))[0])[2] == texts(row)[2]


# ---- keys and columns with a meaning


def test_schemas_need_a_place(tmp_path):
    stored = {"prompt": "q", "answer": "a", "tools": [schema("f")]}
    assert "no place for tools" in refusal(learned, stored, tmp_path, tokenizer=PLAIN)


def test_switches_of_the_template_are_those_of_the_row(tmp_path):
    row = {"prompt": "q", "answer": "a", "chat_template_kwargs": {"effort": "low"}}
    made, whole = of(learned, row, tmp_path), template([user(), said("a")], False, effort="low")
    assert made.prompt + texts(made)[1] == whole.rstrip()


@pytest.mark.parametrize("tokenizer", [TOKENIZER, make_tokenizer(None)])
def test_a_turn_of_weight_0_is_not_learned(tmp_path, tokenizer):
    """Before the first turn that is learned it is prompt; after the last one it is left out."""
    chat = [user(), said("one", weight=0), user(), said("yes", weight=1), user(),
            said("no", weight=False), user(), said("si"), user(), said("never", weight=0)]
    row = of(learned, {"messages": chat}, tmp_path, tokenizer=tokenizer)
    prompt, after, kept = texts(row)
    end = tokenizer.eos_token
    assert kept == f"yes{end}si{end}" and "one" in prompt
    assert after.startswith("yes") and "no" in after and after.endswith(f"si{end}")


def test_calls_without_arguments_and_without_a_place(tmp_path):
    for nothing in "", None:
        row = of(learned, {"messages": [user(), said("", tool_calls=[call(nothing)])]}, tmp_path)
        assert '"arguments": {}}' in texts(row)[2]
    for wrong in call("[1]"), call("{"), {"function": "f"}, {"id": "1"}, "f", {"name": "f"}:
        assert "message 1 of messages: its tool_calls cannot be used" in refusal(
            learned, {"messages": [user(), said("", tool_calls=[wrong])]}, tmp_path)
    calls = {"messages": [user(), said("", tool_calls=[call({})])]}
    assert "no place for tool_calls" in refusal(learned, calls, tmp_path, tokenizer=PLAIN)


@pytest.mark.parametrize("name", [
    name for name, (*_, chat) in ELSEWHERE.items() if chat[-1]["role"] == "assistant"])
def test_forms_of_other_systems_are_refused_and_converted(tmp_path, name):
    row, chat = test_rows.converted(tmp_path, name, learned)
    assert row.prompt + texts(row)[1] == template(chat, False).rstrip("\n")
    assert "no" not in texts(row)[2] and row.answer in (None, "5")


@pytest.mark.parametrize("row, words", [
    ({"question": "q", "answer": 5}, "the answer must be text or a list of"),
    ({"messages": "q"}, "the messages must be a list of"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "this one has prompt, chosen, rej"),
    ({"messages": [user(), said(weight=0)]}, "weight is not 0"),
    ({"messages": [user(), said(weight=0.5)]}, "message 1 of messages: its weight cannot"),
    ({"messages": [user(), said(weight="1")]}, "message 1 of messages: its weight cannot"),
    *(({"messages": [user(), said(**{key: value})]}, f"no place for {key}")
      for key, value in (("mask", 0), ("loss_scale", 0.3), ("train_detail", [1]))),
    *(({"prompt": "q", "completion": "a", key: value}, f"its {key} is {value}")
      for key, value in (("label", False), ("weight", 0), ("loss_weight", 0.5),
                         ("labels", [-100, 1])))])
def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path, row, words):
    assert words in refusal(learned, row, tmp_path)


def test_thoughts_need_a_place(tmp_path):
    row = {"messages": [user(), said(reasoning_content="hm")]}
    assert texts(of(learned, row, tmp_path))[2] == "<think>hm</think>A<|im_end|>"
    assert "no place for reasoning_content" in refusal(learned, row, tmp_path, tokenizer=PLAIN)


def test_a_run_says_what_is_learned(tmp_path):
    row = {"problem": "q", "solution": r"s \boxed{7}", "answer": "7"}
    chat = {"messages": [user(), said()]}
    found = learned(store(tmp_path, "jsonl", [row, row, chat]))
    assert inputs.what_is_read(found) == (
        "2 rows: prompt from problem, learned from solution; 1 row: prompt from messages, learned "
        "from messages")
    assert texts(learned(store(tmp_path, "jsonl", [row]))[0])[2].startswith("s ")


@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_formats_of_the_field_in_every_store(tmp_path, n):
    for name, kind, spec, _, chats, options in test_rows.stored_formats(tmp_path, n):
        if name == "alpaca" or chats[0][-1]["role"] != "assistant":
            continue
        for i, (row, chat, more) in enumerate(zip(learned(spec), chats, options, strict=True)):
            first = chat.index(user(pair(i)[0])) + 1
            assert row.prompt == template(chat[:first], **more), (name, kind)
            whole = row.prompt + texts(row)[1]
            assert whole == template(chat, False, **more).rstrip("\n"), (name, kind)
