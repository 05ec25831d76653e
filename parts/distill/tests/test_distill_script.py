"""distill.py as the core's tests try each script: its plan, its flags, a resume, its loop."""
import pytest

import checkpoint
import data
import test_claims
import test_data
import test_ends
import test_loop
import test_plan
import test_resume
import test_rows
import texts
from data import DataArgs
from examples import tiny
from fakes import SCRIPTS
from parts.distill import distill
from parts.distill.teacher import TaughtRow, add_teacher_prompts
from settings import changed

place, with_date = test_plan.place, test_resume.with_date


# ---- the plan

@pytest.mark.parametrize("words, teacher", [
    ("^--teacher tiny:chess", "tiny:chess"),
    ("^--teacher strange has model_type mamba", "strange"),
    ("^--teacher some/where", "some/where")])
@pytest.mark.parametrize("planning", [True, False])
def test_a_plan_and_a_run_refuse_the_same_before_a_model_is_made(place, words, teacher, planning):
    test_plan.refused(distill, words, planning, model="good", teacher=teacher)


# ---- a resume

def test_what_is_fixed_is_a_flag_or_a_fact():
    flags = test_resume.flags_of(distill.Args).keys() | test_resume.flags_of(SCRIPTS["grpo"].Args)
    assert checkpoint.fixed(distill.Args()) - flags == test_resume.FACTS


def test_another_value_of_a_flag_is_refused_or_said(tmp_path):
    test_resume.other_values(distill, tmp_path)


def test_a_row_with_another_prompt_of_the_teacher_is_another_row(tmp_path):
    test_resume.another_row(tmp_path, kind=TaughtRow, teacher_ids=[7])


def test_the_prompts_of_the_teacher_have_the_date_of_the_run(with_date):
    args = changed(
        distill.Args(), model=with_date, lr=1e-3, max_tokens=9, eval_data="tiny@test",
        max_prompt_tokens=64, teacher_prompt="{question} {answer}", reward=("exact",))
    found = test_resume.dated_files(args)
    assert found.tokenizer.decode(found.rows[0].teacher_ids).startswith(test_resume.DATE)


# ---- the loop

def test_a_loop_gives_each_part_what_it_needs(monkeypatch):
    test_loop.sampled(*test_loop.four_steps(distill, monkeypatch, group=3))


def test_sigterm_saves_and_ends_after_the_step(monkeypatch):
    test_loop.stopped(distill, monkeypatch)


# ---- the teacher's prompts

def test_a_template_that_names_no_column_is_refused_by_its_flag():
    tokenizer = test_data.TOKENIZER
    for template in "{question} {subject}", "Solve it.":
        made = data.make_row(0, test_data.QA, "", tokenizer, texts.marks_of(tokenizer), DataArgs())
        words = f" {template!r} must name one or more columns of the row (question, answer"
        assert "--teacher_prompt" + words in test_data.sentence(
            add_teacher_prompts, [made], tokenizer, DataArgs(), template)


@pytest.mark.parametrize("text", [tiny.CHATML, test_ends.ZERO])
def test_a_finished_prompt_makes_a_finished_one(text):
    tokenizer = test_ends.tags_in(tiny.make_tokenizer())
    tokenizer.chat_template = text
    row = test_ends.row_of({"prompt": "<|im_start|>user\na<|im_end|>\n"}, tokenizer)
    made, = add_teacher_prompts([row], tokenizer, DataArgs(), "{prompt} {prompt}")
    assert made.teacher_ids[:len(row.prompt_ids)] == row.prompt_ids


@pytest.mark.parametrize("seed", test_ends.SWEEP)
def test_of_many_tokenizers_and_templates_each_makes_the_prompt_of_the_row(tmp_path, seed):
    there = test_ends.check(tmp_path, seed)
    taught, = add_teacher_prompts([there.row], there.tokenizer, DataArgs(), "{prompt}")
    assert taught.teacher_ids == there.row.prompt_ids


@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_hint_of_a_tools_answer_is_in_its_message(tmp_path, n):
    for name, kind, spec, _, chats, options in test_rows.stored_formats(tmp_path, n):
        rows = test_rows.asked(spec) if name == "a tool's answer" else []
        for row, chat, more in zip(rows, chats, options, strict=False):
            taught, = add_teacher_prompts(
                [row], test_rows.TOKENIZER, DataArgs(4096), "Think. {question}")
            hint = test_rows.template(
                [*chat[:2], {"role": "tool", "content": "Think. 3"}], **more)
            assert test_rows.TOKENIZER.decode(taught.teacher_ids) == hint, kind


def test_what_a_rule_says_is_true():
    test_claims.true(distill, 81, teacher=[None, "x"], teacher_prompt=[None, "x"])
