"""What a row holds is asked, read by its reward, or named in the plan: no column is left out
without a word."""
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import data
import fakes
import inputs
from errors import SettingsError
from tables import table
from test_rows import TOKENIZER

LONG = "Once upon a time there was a king. " * 5
SHAPES = {  # of public data sets: the rest of the row, and what of it belongs to the question
    "mmlu": ({"choices": ["a", "b"], "subject": "law"}, "choices"),
    "arc": ({"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "id": "x1"}, "choices"),
    "hotpotqa": ({"context": {"title": ["t"], "sentences": [["s", "t"]]}, "level": "easy"},
                 "context"),
    "boolq": ({"passage": LONG}, "passage"),
    "short": ({"passage": "It is red."}, "passage"),
    "winogrande": ({"option1": "the cat", "option2": "the dog"}, "option1 option2"),
    "medqa": ({"options": {"A": "x", "B": "y"}, "meta_info": "step1"}, "options"),
    "tabular": ({"table": [["a", "b"], ["c", "d"]]}, "table"),
    "t0": ({"answer_choices": ["yes", "no"]}, "answer_choices"),
    "two": ({"prompt": "Be brief.", "problem": "What is it, and why?" * 9}, "question problem"),
    "unknown": ({"lore": LONG}, "lore"),
    "nli": ({"premise": "A man eats.", "hypothesis": "He is full."}, "premise hypothesis"),
    "math": ({"solution": LONG, "level": "Level 5", "type": "Algebra", "explanation": LONG}, ""),
    "numina": ({"solution": LONG, "messages": [{"role": "user", "content": "Which?"}]}, ""),
    "verl": ({"extra_info": {"split": "train", "question": LONG}, "ability": "math"}, ""),
    "said": ({"topic": "Which?", "text": "Which? "}, "")}


def said(tmp_path, rows: list[dict], reads=("completion", "answer", "row"), **flags) -> str:
    """Returns what the plan says of the rows. reads: the parameters of the reward."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = fakes.args(data=str(path), **flags)
    read, warnings = data.load(str(path), TOKENIZER, args.data_args)[0], {}
    inputs.what_is_unread(args, read, [*reads], warnings)
    return "\n".join([inputs.what_is_read(read), *warnings])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_of_the_question_that_nothing_reads_is_named(tmp_path, shape):
    more, parts = SHAPES[shape]
    row, parts = {"question": "Which?"}, parts.split()
    rows = [row | {"answer": "a"}, row | more]
    random.Random(3).shuffle(rows)
    text = said(tmp_path, rows)
    assert ("--prompt_template" in text) == bool(parts), text
    assert not parts or f"nothing reads {', '.join(parts)} of row " in text, text
    assert "nothing reads" not in said(tmp_path, rows, ["completion", *parts])
    filled = "{prompt}" + "".join(f"{{{name}}}" for name in parts)
    rows = [dict.fromkeys(parts) | row for row in rows]
    assert "nothing reads" not in said(tmp_path, rows, prompt_template=filled)


def test_a_function_that_takes_all_columns_reads_those_that_its_file_names(tmp_path):
    rows = [{"question": "Which?", "answer": "a", "choices": ["a", "b"]}]
    for code, names in (("row['choices']", False), ("len(row)", True)):
        (tmp_path / "own.py").write_text(f"def f(completion, **row): return 1.0 * bool({code})")
        text = said(tmp_path, rows, reward=("exact", f"{tmp_path}/own.py:f:0.5"))
        assert ("nothing reads choices" in text) == names, text
    found = inputs.read_files(fakes.args(data=f"{tmp_path}/rows.jsonl", reward=("exact",)), 1)
    assert "nothing reads choices" in " ".join(found.warnings)


def test_a_system_message_of_a_column_is_said(tmp_path):
    row = {"question": "Which?", "answer": "a"}
    for name in "system", "system_prompt":
        assert f"system message from {name}" in said(tmp_path, [row | {name: "Be brief."}])
        assert "system message" not in said(tmp_path, [row | {name: None}])
        assert "system message" not in said(tmp_path, [row | {name: "Be brief."}], system="No.")


TWICE = """
rows.csv | a,question,a | column a
rows.csv | question,"x y","x y" | column x y
rows.jsonl | {"question": "q", "question": "r"} | question
rows.json | [{"question": "q", "deep": [{"k": 1, "k": 2}]}] | k
"""


def test_two_columns_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrow = pa.Table.from_arrays([pa.array(["q"])] * 3, ["question", "b", "b"])
    pyarrow.parquet.write_table(arrow, "rows.parquet")
    for name, text, word in [*table(TWICE), ("rows.parquet", None, "column b")]:
        if text:
            Path(name).write_text(f"{text}\n1,2,3\n" if name.endswith("csv") else text)
        with pytest.raises(SettingsError, match=f"{name} .*{word.split()[-1]}.*twice"):
            inputs.read_files(fakes.args(data=name), 1)


def test_a_folder_called_as_rows_that_are_made_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "tiny", "reasoning_gym":
        Path(name).mkdir()
    assert len(inputs.read_files(fakes.args(), 1).rows) > 100
    with pytest.raises(SettingsError, match="./tiny is no file"):
        inputs.read_files(fakes.args(data="./tiny"), 1)
