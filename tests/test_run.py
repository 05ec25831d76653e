"""A run between its steps and at its end: evaluations, what is saved, grades, exit statuses."""
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import dist
import evaluate
import log
import losses
import run
from errors import SettingsError
from fakes import args, run_of, sample
from flags import RunArgs
from log import NotWritten
from tools import export

ROOT = Path(__file__).parent.parent


# ---- evaluations

def test_an_evaluation_has_its_own_temperature_and_samples(monkeypatch):
    it = MagicMock(args=args(eval_data="tiny", eval_samples=3, eval_temperature=0.7, group=5,
                             temperature=1.5))
    it.inputs.eval_rows, scored = ["a", "b"], []
    monkeypatch.setattr(evaluate, "score_samples", lambda *all: scored.append(all[2]))
    monkeypatch.setattr(evaluate, "evaluation_metrics", lambda samples, args: {})
    monkeypatch.setattr(evaluate, "write_samples", it.written)
    evaluate.sampled_metrics(it, 7)
    prompts, group, temperature, purpose = it.engine.sample.call_args.args
    assert [p.row for p in prompts] == ["a", "b"] and [p.position for p in prompts] == [0, 1]
    assert (group, temperature, purpose, scored) == (3, 0.7, "eval", [3])
    it.written.assert_called_once_with(it.log, "eval_00007", it.engine.sample(),
                                       decode=it.engine.tokenizer.decode)


def test_one_overall_pass_rate_and_one_of_each_source():
    found = evaluate.evaluation_metrics(
        [sample(1.0, 0, source="a"), sample(0.0, 1, source="a"), sample(0.0, 2, source="b"),
         sample(None, 3, source="b")], evaluate.EvalArgs())
    assert found["eval/pass@1"] == 0.25 and found["eval/rows"] == 4 and found["eval/unscored"] == 1
    assert found["eval/a/pass@1"] == 0.5 and found["eval/b/pass@1"] == 0
    assert found["eval/reward"] == pytest.approx(1 / 3)  # a judge that fails is no 0
    assert found["eval/a/reward"] == 0.5 and found["eval/b/reward"] == 0
    assert found["eval/pass@1_low"] < 0.25 < found["eval/pass@1_high"]
    line = log.Log(Path(), SimpleNamespace(rank=0), 3).evaluation_line({"step": 3} | found)
    assert line.startswith("evaluation after 3 steps: pass@1 0.250 (0.")
    assert "a/pass@1 0.500 (" in line and "b/pass@1 0.000 (" in line
    assert not any(key.startswith("eval/x/") for key in evaluate.evaluation_metrics(
        [sample(1.0, 0), sample(None, 1)], evaluate.EvalArgs()))  # one source has no own line


def test_the_groups_that_would_teach_nothing_are_those_without_an_advantage():
    """A completion without a score is no value of its own."""
    rewards = [1, 1, 1, 1, 1, None, 1, None, None, None, None, None, 1, 0, None, 1, 0, 0]
    found = evaluate.evaluation_metrics(
        [sample(value, i // 3) for i, value in enumerate(rewards)],
        evaluate.EvalArgs(eval_samples=3))
    advantages = losses.group_advantages(
        torch.tensor([r or 0.0 for r in rewards]), 3, kind="dr_grpo", eps=0.0,
        scored=torch.tensor([r is not None for r in rewards]))
    none = (advantages.view(-1, 3) == 0).all(1)
    assert none.tolist() == [True] * 4 + [False] * 2
    assert found["eval/groups_equal"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("rate, n", [(0.02, 1), (0.5, 4)])
def test_the_interval_covers_the_true_rate(rate, n):
    """20 rows with their own rates, `n` samples each. 95 % is promised: at least 90 % is held."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        rates = rng.beta(2 * rate, 2 * (1 - rate), 20)
        low, high = evaluate.interval(rng.binomial(n, rates) / n, draws=200)
        covered += low <= rate <= high
    assert covered >= 180


# ---- what is kept

@pytest.mark.parametrize("step, shown", [(0, True), (1, False), (3, True)])
def test_a_step_is_recorded(tmp_path, monkeypatch, step, shown):
    """--steps is 4: each second step, and the last one."""
    written, engine = [], MagicMock()
    it = run_of(tmp_path, args(steps=4, samples_every=2), engine=engine)
    monkeypatch.setattr(run, "write_samples", lambda *all, **o: written.append((all, o)))
    it.record(step, ["all"])
    kept = (it.log, f"step_{step + 1:05d}", ["all"]), dict(show=3, decode=engine.tokenizer.decode)
    assert written == ([kept] if shown else [])


@pytest.mark.parametrize("now, coef", [(0.1, 0.07), (0.3, 0.3)])
def test_a_checkpoint_has_the_state_and_a_resumed_run_takes_it(tmp_path, monkeypatch, now, coef):
    """A new --kl_reward_coef is taken, and an adapted one goes on."""
    saved, loaded = [], []
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: saved.append(all))
    monkeypatch.setattr(run.checkpoint, "load", lambda *all: loaded.append(all))

    def ppo(kl_reward_coef: float) -> run.Run:
        it = run_of(tmp_path, args(keep=3), engine=MagicMock(), kl_coef=kl_reward_coef, settings={
            "kl_reward_coef": kl_reward_coef})
        it.args = SimpleNamespace(**vars(it.args) | {
            "critic_args": True, "kl_target": 0.1, "kl_reward_coef": kl_reward_coef})
        it.stateful["another"] = MagicMock(state_dict=lambda: ["a part's"])
        return it

    it, again = ppo(0.1), ppo(now)
    it.kl_coef, it.log.bad_steps, it.stream.position = 0.07, 2, 7
    it.save(5)
    (folder, _, _, state, keep), = saved
    assert (folder, state["step"], keep) == (tmp_path / "checkpoints", 5, 3)
    found = SimpleNamespace(state=json.loads(json.dumps(state)))
    again.restore(found)
    assert loaded == [(found, again.world, again.trained)]
    assert (again.kl_coef, again.log.bad_steps, again.stream.position) == (coef, 2, 7)
    again.stateful["another"].load_state_dict.assert_called_once_with(["a part's"])


@pytest.mark.parametrize("steps, flags, after", [
    (35, {}, [4, 8, 12, 16, 20, 24, 28, 32, 35]), (3, {}, [1, 2, 3]), (35, {"save_every": 0}, []),
    (35, {"eval_only": True}, []), (7, {"save_every": 3}, [3, 6, 7])])
def test_about_ten_checkpoints_are_kept_unless_told_otherwise(tmp_path, steps, flags, after):
    it = run_of(tmp_path, args(steps=steps, **flags))
    assert [step for step in range(1, steps + 1) if step in it.saves] == after


@pytest.mark.parametrize("started, argv, size, local, command", [
    ("./run.sh kk", ["grpo.py", "--steps", "9"], 2, 2, "./run.sh kk --name a-b"),
    (None, ["grpo.py"], 1, 1, "bin/python grpo.py --name a-b"),
    (None, ["grpo.py", "--name", "a-b", "--system", "Be kind."], 4, 4,
     "bin/torchrun --nproc_per_node 4 grpo.py --name a-b "
     "(with your flags of torchrun)"),
    (None, ["ppo.py", "--name=a-b"], 4, 2,
     "bin/torchrun --nproc_per_node 2 ppo.py --name a-b (with your flags of torchrun)")])
def test_a_run_says_the_command_that_goes_on(monkeypatch, started, argv, size, local, command):
    monkeypatch.setattr(run.sys, "argv", argv)
    monkeypatch.setattr(run.sys, "executable", f"{run.os.getcwd()}/bin/python")
    monkeypatch.setenv("STARTED_AS", started or "")
    assert run.again(SimpleNamespace(size=size, local_size=local), "a-b") == command


# ---- the end

@pytest.mark.parametrize("flags, stops, rank, missed, status, order", [
    ({}, False, 0, False, 0, [4, "export", "done 4"]), ({}, False, 0, True, 1, [
        4, "export", "done 4"]),
    ({}, False, 1, True, 1, [4, "export", "done 4"]),  # rank 0 missed it
    ({}, True, 0, False, 75, [4, "saved 4"]),  # SIGTERM in the last evaluation
    (dict(eval_only=True), False, 0, False, 0, [4])])
def test_how_a_run_ends(tmp_path, monkeypatch, flags, stops, rank, missed, status, order):
    found, it = [], run_of(tmp_path, args(eval_data="tiny", steps=4, **flags))
    for name, say in dict(evaluate="{}", export="export").items():
        monkeypatch.setattr(run.Run, name, lambda it, step="", say=say: found.append(
            step if step != "" else say))
    monkeypatch.setattr(run.checkpoint, "save", lambda *all: found.append(
        f"saved {all[3]['step']}"))
    monkeypatch.setattr(run.log, "grade", lambda *all: missed)
    monkeypatch.setattr(run.log, "draw_curve", lambda log: None)
    it.world.rank, it.world.any_rank = rank, lambda flag: flag or rank > 0
    it.log.finish = lambda steps: found.append(f"done {steps}")
    it.stop.agreed = lambda: stops
    assert it.finish() == status and found == order
    assert ("ended after 4 of 4 steps. This goes on: ./run.sh --name x" in it.log.said[-1]) == stops


@pytest.mark.parametrize("flags, missed", [
    ({"target_reward": (0.2, 0.9), "target_eval": (0.05, 0.97)}, []),
    ({"target_reward": (0.05, 0.9), "target_eval": (0.05, 0.99)},
     ["--target_reward", "--target_eval"]),
    ({"target_reward": (0.2, 0.99), "target_eval": (0.01, 0.97)},
     ["--target_reward", "--target_eval"])])
def test_a_run_is_graded_by_both_ends_of_both_numbers(monkeypatch, capsys, flags, missed):
    rows = [{"reward/mean": r, "time/step": 1.0, "rollout/tokens": 7, "grad/norm": 1.0}
            for r in [0.0, 0.1, 0.2] + [0.95] * 10]
    rows = [{"eval/rows": 9, "eval/pass@1": 0.05}, *rows, {"eval/rows": 9, "eval/pass@1": 0.97}]
    said = []
    it = log.Log(Path(), SimpleNamespace(rank=0), 13)
    it.rows, it.say = rows, said.append
    found = log.grade(it, RunArgs(**flags))
    lines = capsys.readouterr().err.splitlines()
    assert found == bool(missed) and [line.split()[1].strip(":") for line in lines] == missed
    assert "reward, first 3 and last 10 of 13 steps: 0.100 -> 0.950" in said
    assert "held-out pass@1, before and after: 0.050 -> 0.970" in said


@pytest.mark.parametrize("ending, status, words", [
    (75, 75, ""), (KeyboardInterrupt(), 130, "interrupted. This goes on: ./run.sh --name x\n"),
    (SettingsError("a sentence"), 2, "error: a sentence\n"),
    (NotWritten("a sentence"), 1, "error: a sentence\n"),
    (ValueError("a bug"), 1, "[rank 0] failed:\nTraceback"),
    (ConnectionResetError("Connection reset by peer"), 1, "[rank 0] failed:\nTraceback")])
def test_how_a_process_ends(tmp_path, monkeypatch, capsys, ending, status, words):
    """What torchrun shows of a failure is in its error file."""
    def leave(status):
        raise SystemExit(status)

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("faulthandler.enable", lambda **options: None)
    monkeypatch.setattr(dist.os, "_exit", leave)
    monkeypatch.setattr(dist.World, "joined", SimpleNamespace(again="./run.sh --name x"))
    main = MagicMock(side_effect=[ending])  # an exception is raised, a number returned
    with pytest.raises(SystemExit) as ended:
        dist.run(main)
    said, is_bug = capsys.readouterr().err, "failed" in words
    assert ended.value.code == status
    assert said.startswith(words) if is_bug else said == words
    assert file.exists() == ("error" in words or is_bug)
    if file.exists():
        told = json.loads(file.read_text())["message"]
        assert told["message"].endswith(str(ending))
        traced = "Traceback" in told["extraInfo"]["py_callstack"]
        assert traced != isinstance(ending, SettingsError)


def test_a_machine_without_git_has_versions_too(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert log.versions()["commit"] == ""


# ---- odd folders


@pytest.mark.parametrize("run_name, step, to, words", [
    ("none", None, None, "none has no checkpoints. A run keeps some with --save_every."),
    ("x", 7, None, "x has no checkpoint of step 7. Would work: 2, 10."),
    ("x", None, None, "x/step_10 exists. Would work: --to and the name of a new folder."),
    ("x", 2, ".", " exists. Would work: --to"),
    ("x", 2, None, "--model m has other weights than when the run began.")])
def test_an_export_of_what_is_not_there_is_one_sentence(tmp_path, monkeypatch, run_name, step, to,
                                                        words):
    monkeypatch.chdir(tmp_path)
    for name in "step_2", "step_10", "step_12.partial":
        (tmp_path / "x/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "x/checkpoints" / name / "state.json").write_text(
            '{"settings": {"model": "m", "model_files": "other"}}')
    for name in "x/step_10", "m":
        (tmp_path / name).mkdir()
    for name in "config.json", "model.safetensors":
        (tmp_path / "m" / name).write_text("{}")
    with pytest.raises(SettingsError) as error:
        export.export(Path(run_name), step, to and Path(to))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_command_that_would_write_over_a_finished_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/done.json").write_text('{"steps": 60}')
    now, more = datetime(2024, 2, 3, 4, 5, 6), args(name="x", steps=90)
    with pytest.raises(SettingsError, match="runs/x is finished, with 60 steps"):
        log.choose_folder(args(name="x", steps=60), now)
    assert log.choose_folder(args(), now) == Path("runs/grpo-20240203-040506")
    assert log.choose_folder(more, now) == Path("runs/x")
    with pytest.raises(SettingsError, match="runs/x is finished and has no checkpoint"):
        run.checkpoint.newest(more, SimpleNamespace(gather=list), Path("runs/x"), {})
    (tmp_path / "runs/x/args.json").touch()
    with pytest.raises(SettingsError, match="runs/x exists; choose another, or --resume"):
        log.choose_folder(args(name="x", steps=90, resume=False), now)
