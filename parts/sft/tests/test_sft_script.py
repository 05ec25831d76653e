"""sft.py as the core's tests try each script: its plan, its flags, its rows, a resume, its loop."""
import checkpoint
import test_claims
import test_loop
import test_newcomer
import test_plan
import test_resume
from fakes import SCRIPTS
from parts.sft import sft
from parts.sft.targets import LearnedRow

# ---- the plan


def test_a_plan_of_an_evaluation_trains_nothing(capsys):
    test_plan.trains_nothing(sft, capsys)


def test_held_out_rows_do_not_depend_on_the_seed():
    test_plan.held_out_rows_stay(sft)


# ---- a resume

def test_what_is_fixed_is_a_flag_or_a_fact():
    flags = test_resume.flags_of(sft.Args).keys() | test_resume.flags_of(SCRIPTS["grpo"].Args)
    assert checkpoint.fixed(sft.Args()) - flags == test_resume.FACTS


def test_another_value_of_a_flag_is_refused_or_said(tmp_path):
    test_resume.other_values(sft, tmp_path)


def test_a_row_with_another_target_is_another_row(tmp_path):
    test_resume.another_row(tmp_path, kind=LearnedRow, target=([4], [True]))


# ---- the loop

def test_a_loop_gives_each_part_what_it_needs(monkeypatch):
    test_loop.four_steps(sft, monkeypatch, group=1)


def test_sigterm_saves_and_ends_after_the_step(monkeypatch):
    test_loop.stopped(sft, monkeypatch)


# ---- rates, ./run.sh sft

def test_a_rate_that_is_not_given_depends_on_the_models_size():
    test_newcomer.rates_of(sft, (3e-4,), (1e-5,))


def test_run_sh_gives_the_job_its_flags(tmp_path):
    test_newcomer.gives(tmp_path, "sft --data=mine.jsonl", "", "--data=mine.jsonl", False)


def test_what_a_rule_says_is_true():
    test_claims.true(sft, 78)
