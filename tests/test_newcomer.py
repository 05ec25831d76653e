"""What a new user meets: unlucky commands."""
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import grpo
from dist import SettingsError
from examples import tiny
from forked import PYTHON
from preflight import inputs, plan

ROOT = Path(__file__).parent.parent
TINY = Path(tiny.ensure(str(ROOT / "runs")))
OWN = """
def ok(turns, **row):
    return None

def text(completion, **row):
    return "1"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with the tiny model and a file of functions."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / TINY.name).symlink_to(TINY)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def args(*flags: str):
    import tyro
    return tyro.cli(grpo.Args, args=flags, use_underscores=True,
                    config=(tyro.conf.OmitArgPrefixes,))


def mistakes(*flags: str) -> str:
    with pytest.raises(SettingsError) as error:
        inputs.read_inputs(args(*flags), 1, 1)
    return str(error.value)


@pytest.mark.parametrize("flags, words", [
    ("--lora_alpha 3 --lora_targets q_proj --lora_sync merged --max_turns 3 --target_eval 0 1 "
     "--eval_samples 3 --reward own.py",
     ["--lora_alpha needs --lora_rank. Would work: no --lora_alpha.",
      "--lora_targets needs --lora_rank", "--lora_sync needs --lora_rank",
      "--max_turns needs --reply or --tools. Would work: --max_turns 8.",
      "--target_eval needs --eval_data", "--eval_samples needs --eval_data",
      "--reward own.py: no such reward.", "A reward is NAME or FILE.py:FUNCTION"]),
    ("--lora_rank 4 --lora_alpha inf --reply own.py:ok:0.5 --reward own.py:missing",
     ["--lora_alpha must be more than 0", "own.py has no missing.",
      "--reply own.py:ok:0.5: it must be FILE.py:FUNCTION; it has no weight."]),
    ("--reply nowhere.py:ok", ["--reply nowhere.py:ok: no such file."])])
def test_a_flag_without_effect_or_sense_is_one_sentence(place, flags, words):
    text = mistakes(*flags.split())
    assert [one for one in words if one not in text] == []


def test_an_empty_stop_has_nothing_that_would_work_but_to_leave_it_out(place):
    assert mistakes("--stop", "").endswith("Would work: no --stop.")


@pytest.mark.parametrize("file, content, words", [
    ("a.csv", b"question,answer\ncaf\xe9,1\n", "a.csv cannot be loaded: UnicodeDecodeError: "),
    ("b.csv", b'question,answer\n"a,1\n', "b.csv cannot be loaded: Error: unexpected end")])
def test_a_file_of_another_encoding_or_cut_is_one_sentence(place, file, content, words):
    (place / file).write_bytes(content)
    assert words in mistakes("--data", file)


def test_a_folder_of_other_files_is_one_sentence(place):
    (place / "junk").mkdir()
    (place / "junk/a.txt").write_text("hi\n")
    words = "junk, row 0 (counted from 0): no prompt column in (text)"
    assert words in mistakes("--eval_data", "junk")


def changed_model(place, **files) -> str:
    """The tiny model with other .json files: a function of each one's old content."""
    folder = place / "changed"
    folder.mkdir()
    for path in TINY.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, change in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return str(folder)


@pytest.mark.parametrize("change", [lambda config: config | {"num_hidden_layers": 5},
                                    lambda config: [1, 2]])
def test_a_config_that_transformers_refuses_is_one_sentence(place, change):
    text = mistakes("--model", changed_model(place, config=change))
    assert "cannot read its config.json" in text and "\n" not in text.split("2. ")[-1]


def test_a_broken_chat_template_is_not_the_rows_fault(place):
    folder = changed_model(place)
    Path(folder, "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert "the chat template: no" in mistakes("--model", folder)


def test_the_plan_counts_the_rows_that_are_there():
    text = plan.Plan(args("--batch", "64"), 1, 1, 0).text()
    assert "1 prompts x 8 completions = 8 completions" in text
    assert "(--batch 64, but --data has only 1)" in text
    assert "but --data" not in plan.Plan(args("--batch", "64"), 1, 64, 0).text()


@pytest.mark.parametrize("flags, status", [("", 0), ("--gpu_gb 0.001", 1)])
def test_the_exit_status_of_a_plan_tells_whether_it_fits(place, capsys, flags, status):
    assert inputs.show_plan(args("--plan", *flags.split())) == status


def test_a_reward_that_returns_text_is_told_the_type(place):
    import rewards
    scorer = rewards.Scorer(["own.py:text"], rewards.RewardArgs(reward_workers=1))
    scorer.wait()
    score, = scorer.score([rewards.Item("", "a", "a", {}, 1, False)])
    scorer.close()
    assert "(got '1', a str)" in score.error


# ---- rows

def test_rows_that_are_not_scored_need_no_answer(place):
    (place / "bare.jsonl").write_text('{"prompt": "Sort 31"}\n')
    (place / "held.jsonl").write_text('{"prompt": "Sort 32", "answer": "23"}\n')
    flags = ["--data", "bare.jsonl", "--eval_data", "held.jsonl", "--batch", "1"]
    assert "--reward exact needs 'answer'; 1 of 2 rows have none" in mistakes(*flags)
    assert inputs.read_inputs(args(*flags, "--eval_only"), 1, 1).eval_rows


# ---- commands

def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([PYTHON, *words], cwd=cwd, capture_output=True, text=True)


def test_help_of_the_examples_fetches_nothing(tmp_path):
    done = command(str(ROOT / "examples/smollm2.py"), "--help", cwd=tmp_path)
    assert done.returncode == 0 and "the default is runs/smollm2" in done.stdout
    assert not any(tmp_path.iterdir())


def test_run_sh_lists_its_jobs_and_refuses_others():
    shown = subprocess.run(["./run.sh", "help"], cwd=ROOT, capture_output=True, text=True)
    for job in "ppo", "kk", "game", "real", "prove", "test", "setup":
        assert f"./run.sh {job}" in shown.stdout
    wrong = subprocess.run(["./run.sh", "hlep"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


@pytest.mark.parametrize("line, ranks, words, graded", [
    ("", "", "grpo.py --warmup_steps 10 --steps 35 --eval_data tiny@test", True),
    ("ppo --lr 1e-5", "1", "ppo.py --steps 35 --lr 1e-5", True),
    ("--steps 3", "3", "grpo.py --steps 35 --steps 3", False),
    ("kk --reward own.py:one", "", "grpo.py --model tiny:kk --reward own.py:one", False),
    ("--reward=own.py:one", "", "grpo.py --reward=own.py:one", False),
    ("--reward_workers 1", "", "grpo.py --reward_workers 1", True)])
def test_run_sh_gives_a_job_its_flags_its_grade_and_ranks(tmp_path, line, ranks, words, graded):
    """A copy of run.sh, whose torchrun prints its command."""
    for name in "run.sh", "requirements.txt":
        shutil.copy(ROOT / name, tmp_path)
    both = (tmp_path / "requirements.txt").read_bytes() + (tmp_path / "run.sh").read_bytes()
    made = tmp_path / ".venv/bin/torchrun"
    made.parent.mkdir(parents=True)
    made.write_text('#!/bin/sh\necho "$@" "bytecode ${PYTHONDONTWRITEBYTECODE-kept}"\n')
    made.chmod(0o755)
    none = tmp_path / "nvidia-smi"  # a machine without a GPU
    none.write_text("#!/bin/sh\nexit 1\n")
    none.chmod(0o755)
    (tmp_path / f".venv/.ready-{hashlib.sha256(both).hexdigest()[:12]}-cpu").touch()
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    env = {**env, "RANKS": ranks} if ranks else {k: v for k, v in env.items() if k != "RANKS"}
    done = subprocess.run(["./run.sh", *line.split()], cwd=tmp_path, env=env, text=True,
                          capture_output=True)
    assert done.stdout.startswith(f"--nproc_per_node {ranks or 2} "), done.stdout + done.stderr
    assert done.stdout.endswith(" bytecode kept\n")
    given = iter(done.stdout.split())
    assert all(word in given for word in words.split())  # in this order
    assert ("--target_reward" in done.stdout, "--target_eval" in done.stdout) == (graded, graded)
