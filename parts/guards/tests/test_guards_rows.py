"""What a run says of its rows: the columns that are read, and those in both sets."""
from dataclasses import replace

import pytest

import fakes
from parts.guards import rows as guard
from tables import table
from test_rows import filled, load, row_of, store

READ = r"""
[{"problem": "q", "answer": "7"}, {"problem": "q", "answer": "proof"},
     {"problem": "q", "answer": "proof"}, {"problem": "q", "answer": 9}] | 4 rows: prompt from
     problem, answer from answer; answers without a digit: 'proof' 2 times
[{"problem": "q", "answer": "7"}, {"problem": "q", "answer": "tac"},
     {"problem": "q", "answer": "tac"}] | 3 rows: prompt from problem, answer from answer
[{"prompt": "q"}, {"prompt": "q", "answer": null}, {"prompt": "q", "answer": " "},
     {"problem": "q", "solution": "s \\boxed{7}"}] | 3 rows: prompt from prompt, no answer; 1 row:
     prompt from problem, answer from the last box of solution
[{"problem": "q", "answer": "7"}] | 1 row: prompt from --prompt_template, answer from answer
    | {"prompt_template": "{problem}!"}
"""


@pytest.mark.parametrize("cells", table(READ))
def test_a_run_says_which_columns_it_reads_and_which_answers_are_no_number(tmp_path, cells):
    """Data sets write "proof" where there is no answer, and a solution beside it. If most answers
    are words, a word is an answer."""
    rows, words, *flags = cells
    made, _ = load(store(tmp_path, "jsonl", filled(rows)), **filled(*flags or ["{}"]))
    assert guard.what_is_read(made) == words


def test_rows_of_the_evaluation_that_are_trained_on_are_counted():
    """By all that training depends on: another answer makes another row."""
    rows = fakes.rows(5)
    changed = replace(rows[0], answer="9")
    moved = [replace(row, index=row.index + 9) for row in rows[3:]]
    for held_out, words in ([*moved, changed], ["2 of the 3 rows of --eval_data are rows of --data"]
                            ), ([changed], []), ([], []):
        guard.what_is_shared(rows, held_out, warnings := {})
        assert [one[:len(word)] for one, word in zip(warnings, words, strict=True)] == words


def test_a_system_message_of_a_column_is_said(tmp_path):
    def said(row: dict, **flags) -> str:
        return guard.what_is_read([row_of({"question": "Which?"} | row, tmp_path, **flags)])
    for name in "system", "system_prompt":
        assert f"system message from {name}" in said({name: "Be brief."})
        assert "system message" not in said({name: None})
        assert "system message" not in said({name: "Be brief."}, system="No.")
