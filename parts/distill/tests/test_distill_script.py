"""distill.py as the core's tests try each script: its plan, its flags, a resume, its loop."""
import pytest

import checkpoint
import test_loop
import test_plan
import test_resume
from fakes import SCRIPTS
from parts.distill import distill
from parts.distill.teacher import TaughtRow
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
