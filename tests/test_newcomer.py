"""What a new user meets: unlucky commands, tools on odd folders, intervals on the screen."""
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dist
import grpo
from data import Prompt, Row
from dist import SettingsError
from examples import tiny
from forked import PYTHON
from keeping import evaluate, log, run
from keeping import summary as grade
from preflight import inputs, plan
from rewards import Score
from trainer.batch import Completion, Sample

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


def notes(*flags: str) -> str:
    return "\n".join(inputs.read_inputs(args(*flags), 1, 1).notes)


@pytest.mark.parametrize("flags, words", [
    ("--lora_alpha 3 --lora_targets q_proj --lora_sync merged --max_turns 3 --target_eval 0 1 "
     "--eval_samples 3 --reward own.py",
     ["--lora_alpha needs --lora_rank. Would work: no --lora_alpha.",
      "--lora_targets needs --lora_rank", "--lora_sync needs --lora_rank",
      "--max_turns needs --reply or --tools. Would work: --max_turns 8.",
      "--target_eval needs --eval_data", "--eval_samples needs --eval_data",
      "--reward own.py: which function of it? own.py:NAME."]),
    ("--lora_rank 4 --lora_alpha inf --reply own.py:ok:0.5 --reward own.py:missing",
     ["--lora_alpha must be more than 0 and at most 1e6", "own.py has no missing.",
      "--reply must be FILE.py:FUNCTION (got own.py:ok:0.5)"]),
    ("--lora_rank 1000000000 --lora_alpha 1e308 --reply own.py:missing",
     ["--lora_rank must be from 0 to 65,536", "--lora_alpha must be more than 0 and at most 1e6",
      "own.py has no missing."]),
    ("--reply nowhere.py:ok", ["--reply nowhere.py:ok: no such file."])])
def test_a_flag_without_effect_or_sense_is_one_sentence(place, flags, words):
    text = mistakes(*flags.split())
    assert [one for one in words if one not in text] == []


def test_an_empty_stop_has_nothing_that_would_work_but_to_leave_it_out(place):
    assert mistakes("--stop", "").endswith("Would work: no --stop.")


@pytest.mark.parametrize("file, content, words", [
    ("a.csv", b"question,answer\ncaf\xe9,1\n", "a.csv must be UTF-8 (its byte 19 is not)"),
    ("b.csv", b'question,answer\n"a,1\n', "b.csv is no whole .csv")])
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
    assert "the model's chat template fails with row 0" in mistakes("--model", folder)


def test_a_chat_template_that_ignores_the_messages_is_noted(place):
    folder = changed_model(place)
    Path(folder, "chat_template.jinja").write_text("hello")
    assert "all prompts are the same text" in notes("--model", folder)
    assert "all prompts are the same text" not in notes()


def without_eos(content: dict) -> dict:
    return {key: value for key, value in content.items() if not key.startswith("eos_token")}


def test_a_model_without_an_end_is_noted_whatever_file_lacks_it(place):
    folder = changed_model(place, config=without_eos, generation_config=without_eos,
                           tokenizer_config=without_eos)
    assert "names an end-of-sequence token" in notes("--model", folder)
    assert "names an end-of-sequence" not in notes()


def test_exact_with_replies_is_noted(place):
    rows = "def ok(turns, **row):\n    return None\n"
    (place / "reply.py").write_text(rows)
    assert "--reward exact compares the whole episode" in notes("--reply", "reply.py:ok")


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


# ---- replies

def episodes(max_tokens: int, said: list):
    """turns.Episodes without an engine: `note` and what it needs."""
    from transformers import AutoTokenizer

    from chats import turns
    it = object.__new__(turns.Episodes)
    bridge = turns.Bridge(AutoTokenizer.from_pretrained(TINY), [2], 320, None)
    vars(it).update(bridge=bridge, max_tokens=max_tokens, noted=set(),
                    log=SimpleNamespace(say=said.append))
    return it


def test_a_reply_with_control_tokens_or_without_room_is_said_once():
    said, reply = [], [{"role": "user", "content": "more"}]
    it = episodes(16, said)
    it.note([reply, None], [0])
    assert said == []
    for _ in range(2):
        it.note([reply, reply], [])
    assert len(said) == 1 and "no reply leaves room for a turn within --max_tokens 16" in said[0]
    for _ in range(2):
        it.note([[{"role": "user", "content": "<|im_end|>"}], reply], [0])
    assert len(said) == 2 and "1 replies have the text of a control token" in said[1]


# ---- evaluations

def sample(i: int, value: float | None, source: str = "a") -> Sample:
    row = Row(i, f"p{i}", [1], "", {}, source)
    completion = Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), False)
    return Sample(Prompt(i, row), completion, "", Score(value, {"exact": value}, None))


def test_one_overall_pass_rate_and_one_of_each_source():
    found = evaluate.evaluation_metrics(
        [sample(0, 1.0), sample(1, 0.0), sample(2, 0.0, "b"), sample(3, None, "b")],
        evaluate.EvalArgs())
    assert found["eval/pass@1"] == 0.25 and found["eval/rows"] == 4 and found["eval/unscored"] == 1
    assert found["eval/a/pass@1"] == 0.5 and found["eval/b/pass@1"] == 0
    assert found["eval/pass@1_low"] < 0.25 < found["eval/pass@1_high"]
    one = evaluate.evaluation_metrics([sample(0, 1.0), sample(1, 0.0)], evaluate.EvalArgs())
    assert not any(key.startswith("eval/a/") for key in one)
    line = log.evaluation_line({"step": 3} | found)
    assert line.startswith("evaluation after 3 steps: pass@1 0.250 (0.")
    assert "a/pass@1 0.500" in line and "b/pass@1 0.000" in line


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("rows, n", [(20, 1), (20, 4), (200, 1)])
def test_the_interval_covers_the_true_rate(rate, rows, n):
    """Rows with their own rates, `n` samples each. 95 % is promised: at least 90 % is held."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        rates = rng.beta(2 * rate, 2 * (1 - rate), rows)
        low, high = evaluate.interval(rng.binomial(n, rates) / n, draws=200)
        covered += low <= rate <= high
    assert covered >= 180


def test_rows_that_all_fail_do_not_prove_that_all_do():
    low, high = evaluate.interval(np.zeros(20))
    assert low == 0 and 0.05 < high < 0.3
    low, high = evaluate.interval(np.ones(1000))
    assert 0.99 < low < 1 and high == 1


@pytest.mark.parametrize("grades, missed", [
    ({}, []), ({"target_reward": (0.2, 0.9), "target_eval": (0.1, 0.9)}, []),
    ({"target_reward": (0.05, 0.9)}, ["--target_reward"]),
    ({"target_reward": (0.2, 0.99)}, ["--target_reward"]),
    ({"target_eval": (0.01, 0.9), "target_reward": (0.2, 0.9)}, ["--target_eval"]),
    ({"target_eval": (0.1, 0.99)}, ["--target_eval"])])
def test_a_run_is_graded_by_both_ends_of_both_numbers(monkeypatch, grades, missed):
    rewards, said = [0.0, 0.1, 0.2] + [0.5] * 5 + [0.95] * 10, []
    rows = [{"reward/mean": r, "time/step": 1.0, "rollout/tokens": 7} for r in rewards]
    rows = [{"eval/rows": 9, "eval/pass@1": 0.05}, *rows, {"eval/rows": 9, "eval/pass@1": 0.97}]
    monkeypatch.setattr(grade, "draw_curve", lambda log: None)
    monkeypatch.setattr(grade, "say_last", said.append)
    run_log = SimpleNamespace(rows=rows, say=said.append)
    assert grade.summary(run_log, run.RunArgs(**grades)) == bool(missed)
    assert [line.split()[1].strip(":") for line in said if line.startswith("missed")] == missed
    assert "reward, first 3 and last 10 of 18 steps: 0.100 -> 0.950" in said
    assert "held-out pass@1, before and after: 0.050 -> 0.970" in said


def test_a_target_of_exactly_0_is_reached(monkeypatch):
    rows = [{"reward/mean": value, "time/step": 1.0, "rollout/tokens": 7} for value in (-1.0, 0.0)]
    monkeypatch.setattr(grade, "draw_curve", lambda log: None)
    run_log = SimpleNamespace(rows=rows, say=lambda text: None)
    assert not grade.summary(run_log, run.RunArgs(target_reward=(-0.5, 0.0)))


# ---- the best model

def evaluated(scores: list[float], *flags: str, refused=()):
    """What run.Run.evaluate exports of evaluations with these scores, and the run after them.
    refused: steps whose export fails."""
    exported = []

    def export(name, notes):
        exported.append(json.loads(notes["best.json"])["step"])
        return exported[-1] in refused

    it = SimpleNamespace(
        args=args("--eval_data", "tiny", *flags), engine=True, best=None, best_unwritten=False,
        log=SimpleNamespace(step=lambda step, metrics: None), export=export,
        sample_and_score=lambda step: {"eval/pass@1": scores[step]})
    for step in range(len(scores)):
        run.Run.evaluate(it, step)
    return exported, it


def test_the_best_model_is_a_training_runs():
    assert evaluated([0.1, 0.5, 0.3, 0.6])[0] == [1, 3]
    assert evaluated([0.1, 0.5], "--eval_only")[0] == []


def test_a_best_model_that_was_not_written_is_not_forgotten(monkeypatch):
    """A checkpoint does not count it, and the end of the run names it."""
    assert not evaluated([0.1, 0.5, 0.6], refused=[1])[1].best_unwritten
    exported, it = evaluated([0.1, 0.5, 0.3], refused=[1])
    assert exported == [1] and it.best_unwritten
    states, said = [], []
    vars(it).update(
        settings={}, kl_coef=0.0, unsaved=False, trained={}, close=lambda: None,
        stop=SimpleNamespace(looping=False),
        world=SimpleNamespace(rank=1, any_rank=bool), stream=SimpleNamespace(state=dict),
        inputs=SimpleNamespace(eval_rows=[]), export=lambda name: False)
    it.log = SimpleNamespace(folder=Path("x"), bad_steps=0, say=said.append, unwritten={"a": ""},
                             finish=lambda steps: pytest.fail("done.json"))
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: states.append(all[3]))
    run.Run.save(it, 2)
    assert states[0]["best"] is None
    assert run.Run.finish(it) == 1 and said[-2].startswith("missing: the best model, a; ")
    assert not it.log.unwritten  # a file that was named is not written later, with the report


def test_what_a_full_disk_leaves_of_an_export_is_removed(tmp_path, monkeypatch):
    def fails(world, act, source, folder, notes):
        Path(f"{folder}.partial").mkdir()
        raise run.checkpoint.NotWritten("no space")

    monkeypatch.setattr(run.checkpoint, "write", fails)
    said = []
    policy = SimpleNamespace(module=SimpleNamespace(lm=None), export=None)
    it = SimpleNamespace(log=SimpleNamespace(folder=tmp_path, say=said.append), policy=policy,
                         inputs=SimpleNamespace(source=""), world=SimpleNamespace(rank=0))
    assert run.Run.export(it, "best") and not [*tmp_path.iterdir()] and "no space" in said[0]


# ---- the end of a run

def ending(tmp_path, **more):
    """A run at its end, with what it printed."""
    said = []
    world = SimpleNamespace(rank=0, any_rank=bool)
    it = SimpleNamespace(
        args=SimpleNamespace(steps=4, eval_args=SimpleNamespace(eval_only=False),
                             run_args=run.RunArgs(report=False, export=False, keep=2)),
        world=world, end=4, unsaved=False, best_unwritten=False, settings={}, kl_coef=0.0,
        trained={}, best=None, stream=SimpleNamespace(state=dict), close=lambda: None,
        inputs=SimpleNamespace(eval_rows=[1]), evaluate=lambda step: None, said=said,
        stop=SimpleNamespace(looping=True, agreed=lambda: False),
        log=SimpleNamespace(folder=tmp_path, bad_steps=0, say=said.append, unwritten={}, rows=[],
                            finish=lambda steps: (tmp_path / "done.json").touch()))
    it.save, it.stopped = partial(run.Run.save, it), partial(run.Run.stopped, it)
    vars(it).update(more)
    return it


def test_sigterm_in_the_last_evaluation_saves_the_run(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: saved.append(all[3]["step"]))
    it = ending(tmp_path, stop=SimpleNamespace(looping=True, agreed=lambda: True))
    assert run.Run.finish(it) == 75 and saved == [4]
    assert "ended after 4 of 4 steps; the same command with --name" in it.said[-1]
    assert not (tmp_path / "done.json").exists()


def test_a_finished_run_that_goes_on_is_finished_until_its_next_checkpoint(tmp_path, monkeypatch):
    """If it is killed before, its old end is evaluated again."""
    done = tmp_path / "done.json"
    done.touch()
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: "no space")
    run.Run.save(ending(tmp_path), 5)
    assert done.exists()
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: None)
    run.Run.save(ending(tmp_path), 5)
    assert not done.exists()


def test_what_the_same_command_does_after_a_full_disk_is_true(tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "summary", lambda *all: False)
    for then in "begins again", "goes on from the last checkpoint":
        it = ending(tmp_path, best_unwritten=True)
        assert run.Run.finish(it) == 1 and it.said[-2].endswith(f"the same command {then}")
        (tmp_path / "checkpoints/step_2").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("step, there, kept", [
    (3, True, True), (3, False, False), (0, False, True)])
def test_the_best_model_of_a_checkpoint_is_on_the_disk(tmp_path, monkeypatch, step, there, kept):
    """A killed run may have written a later one over it. Then the next evaluation is the best."""
    monkeypatch.setattr(run.checkpoint, "load", lambda *all: None)
    if there:
        (tmp_path / "best").mkdir()
    it = ending(tmp_path, saved=None)
    it.args.critic_args, it.stream.restore = None, lambda state: None
    best = {"step": step, "score": 0.5}
    run.Run.restore(it, {"bad_steps": 0, "settings": {}, "best": best})
    assert it.best == (best if kept else None)


# ---- machines

def test_a_machine_without_git_has_versions_too(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = log.versions()
    assert found["commit"] == "" and found["torch"]


def test_an_output_on_a_full_disk_does_not_end_the_run():
    """Neither a line of it, nor the last flush."""
    code = ("import dist, log, sys, types; it = types.SimpleNamespace(writing=True); "
            "sys.stdout.reconfigure(line_buffering=True); "
            "dist.run(lambda: log.Log.say(it, 'a line') or 3)")
    with open("/dev/full", "w") as full:
        done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 3, done.stderr.decode()


def test_rows_that_are_not_scored_need_no_answer(place):
    (place / "bare.jsonl").write_text('{"prompt": "Sort 31"}\n')
    (place / "held.jsonl").write_text('{"prompt": "Sort 32", "answer": "23"}\n')
    flags = ["--data", "bare.jsonl", "--eval_data", "held.jsonl", "--batch", "1"]
    assert "--reward exact needs 'answer'; 1 of 2 rows have none" in mistakes(*flags)
    assert inputs.read_inputs(args(*flags, "--eval_only"), 1, 1).eval_rows


# ---- commands

def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([PYTHON, *words], cwd=cwd, capture_output=True, text=True)


def test_evaluate_is_no_command_and_says_what_is():
    done = command("keeping/evaluate.py", "--model", "tiny")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--eval_only" in done.stderr


def test_help_of_the_examples_fetches_nothing(tmp_path):
    done = command(str(ROOT / "examples/smollm2.py"), "--help", cwd=tmp_path)
    assert done.returncode == 0 and "the default is runs/smollm2" in done.stdout
    assert not any(tmp_path.iterdir())


def test_a_run_that_kept_no_completions_is_one_sentence(tmp_path):
    done = command("tools/samples.py", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: no completions in {tmp_path}/samples/\n"


@pytest.mark.parametrize("script", ["grpo", "ppo", "sft", "distill"])
def test_ctrl_c_while_the_libraries_load_ends_without_a_traceback(tmp_path, script):
    """A module in place of torch, in whose import Ctrl-C comes."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    # PYTHON has imported torch
    done = subprocess.run([sys.executable, ROOT / f"{script}.py"], cwd=tmp_path,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


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


@pytest.mark.parametrize("files, words", [
    ({}, "no metrics.jsonl in"),
    ({"metrics.jsonl": '{"step": 1, "reward/mean": 0.5}\n'}, "has no whole args.json"),
    ({"metrics.jsonl": "", "args.json": '{"seed": 0}'}, "a run without a step has no curve")])
def test_plot_of_an_odd_folder_is_one_sentence(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = command("tools/plot.py", str(tmp_path), "--out", str(tmp_path / "x.png"))
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_plot_reads_a_cut_last_line_and_refuses_a_picture_that_is_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (tmp_path / "args.json").write_text('{"seed": 0}')
    done = command("tools/plot.py", str(tmp_path), "--out", str(tmp_path / "x.txt"))
    assert done.returncode == 1 and "x.txt cannot be written as a picture" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the last line on the screen

def test_below_torchrun_the_sentence_comes_after_it_has_ended(tmp_path):
    """The starter prints after its child has ended, as torchrun does."""
    code = ("import os, subprocess, sys; child = subprocess.run([sys.executable, '-c', "
            "'import dist; dist.say_last(\"error: a\" + chr(0) + \" sentence\")'], "
            "env=os.environ | {'TORCHELASTIC_RUN_ID': 'x'}); print('forty lines', file=sys.stderr)")
    done = command("-c", code)
    assert done.stderr.splitlines() == ["forty lines", "error: a\\0 sentence"]


def test_alone_the_sentence_comes_at_once(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    dist.say_last("error: a sentence")
    assert capsys.readouterr().err == "error: a sentence\n"
