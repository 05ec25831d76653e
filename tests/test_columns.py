"""A column is what its name says, and there is one of a name."""
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import fakes
import preflight
from errors import SettingsError
from tables import table

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
            preflight.read_files(fakes.args(data=name), 1)


def test_a_folder_called_as_rows_that_are_made_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "tiny", "reasoning_gym":
        Path(name).mkdir()
    assert len(preflight.read_files(fakes.args(), 1).rows) > 100
    with pytest.raises(SettingsError, match="./tiny is not a file"):
        preflight.read_files(fakes.args(data="./tiny"), 1)
