"""log.py and samples.py: lines, times, memory, and what Weights & Biases gets."""
import json
import mmap
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors import SafetensorError

import log
from errors import SettingsError
from fakes import World, sample

WORLD = World()


def opened(folder: Path, steps: int = 3, start: int = 0, project: str | None = None,
           began: str = "2026-01-02 03:04:05") -> log.Log:
    it = log.Log(folder, WORLD, steps, project)
    it.open({"lr": 0.1, "seed": 0, "began": began}, "the plan", start)
    return it


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_wandb_gets_every_metric_of_every_step_and_is_finished(tmp_path, monkeypatch):
    """Without a key the run is offline. (test_script.py has a real one.)"""
    import wandb
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "init", MagicMock())
    asked = {"prompt": False, "verify": False}  # nobody is asked, nor the server
    monkeypatch.setattr(wandb, "login", lambda **how: how != asked)
    it, run = opened(tmp_path / "a-run", project="test"), wandb.init.return_value
    assert wandb.init.call_args.kwargs["mode"] == "offline"
    it.lock.close()
    for began in "2026-01-02 03:04:05", "2026-01-02 03:04:06":  # a resume; the name used again
        opened(tmp_path / "a-run", project="test", began=began).lock.close()
    ids = [call.kwargs["id"] for call in wandb.init.call_args_list]
    assert ids[0] == ids[1] != ids[2] and ids[2].startswith("a-run-")
    for step in range(3):
        if step == 1:
            it.times["time/sync"] = 1.0  # it would replace the step's
            it.step(step, {"eval/rows": 4, "eval/pass@1": 0.25})
        with it.time("rollout"), it.time("reward"):
            pass
        it.step(step + 1, {"reward/mean": 0.5 * step, "loss/policy": float("nan")})
    it.close()
    rows = lines(tmp_path / "a-run")
    rows[1] = {"eval/rows": 4, "eval/pass@1": 0.25}
    assert [call.args[0] for call in run.log.call_args_list] == rows
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [1, 1, 2, 3]
    assert {"time/rollout", "memory/peak_gb"} <= rows[0].keys() and run.finish.called


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_failure_of_wandb_costs_one_line_and_not_the_run(tmp_path, monkeypatch, capsys, place):
    import wandb
    run = MagicMock()
    monkeypatch.setattr(wandb, "init", MagicMock(return_value=run))
    broken = {"init": wandb.init, "log": run.log, "finish": run.finish}[place]
    broken.side_effect = ConnectionError("the server is away")
    it = opened(tmp_path / "a", project="test")
    for step in range(3):
        it.step(step, {"lr": 1.0})
    it.finish(3)
    it.close()
    said = "wandb is off from here: ConnectionError: the server is away"
    assert capsys.readouterr().out.count(said) == 1
    assert len(lines(tmp_path / "a")) == 3 and (tmp_path / "a/done.json").exists()


def test_lines_after_the_resumed_step_are_dropped_and_a_torn_one_too(tmp_path):
    it = opened(tmp_path, steps=5)
    for step in range(4):
        if step == 2:
            it.step(step, {"eval/rows": 4})  # comes again after the resume
        it.step(step + 1, {"reward/mean": torch.tensor(0.5), "x": float("inf"), "n": 3})
    it.close()
    it.lock.close()  # as when the process ends
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    again = opened(tmp_path, steps=5, start=2)
    again.step(3, {"n": 4})
    again.close()
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3] == [r["step"] for r in again.rows]
    first = lines(tmp_path)[0]
    assert first == {"step": 1, "reward/mean": 0.5, "x": None, "n": 3,
                     "memory/peak_gb": first["memory/peak_gb"]}


def test_small_numbers_keep_their_digits(tmp_path):
    """Rounded to ten places, a learning rate of 2.47e-10 was 2e-10."""
    it, small = opened(tmp_path), {"lr": 2.47e-10, "policy/approx_kl": -3.3e-11, "x": 1 / 3e5}
    it.step(1, small | {"data/position": 12345678901234})
    it.lock.close()
    row, = lines(tmp_path)
    assert row == {"step": 1, "lr": 2.47e-10, "policy/approx_kl": -3.3e-11, "x": 3.333333333e-06,
                   "data/position": 12345678901234, "memory/peak_gb": row["memory/peak_gb"]}


def test_a_step_says_how_long_the_rest_takes(tmp_path):
    it, line = opened(tmp_path, steps=100), {}
    for step, seconds in (1, 900.0), (2, 3.0), (3, 3.0), (100, 3.0):  # the first one compiles
        it.rows.append({"step": step, "time/step": seconds})
        line[step] = it.step_line(it.rows[-1])
    assert line[3].endswith("3.00 s  5 min left") and "left" not in line[100]
    assert [log.duration(s) for s in (45, 600, 20000)] == ["45 s", "10 min", "5.6 h"]
    it.lock.close()


def test_samples_of_a_killed_run_go_with_its_lines(tmp_path):
    opened(tmp_path).lock.close()
    for name in "step_00002", "step_00003", "eval_00001", "eval_00002", "my_own_3", "my_best":
        (tmp_path / f"samples/{name}.jsonl").touch()
    done = tmp_path / "done.json"
    done.write_text('{"steps": 2}')
    opened(tmp_path, start=2).lock.close()
    assert {p.stem for p in tmp_path.glob("samples/*")} == {
        "step_00002", "eval_00001", "my_own_3", "my_best"}
    assert not done.exists()  # more steps were asked for
    done.write_text('{"steps": 2}')
    it = log.Log(tmp_path, WORLD, 3)
    it.open({"eval_only": True}, "the plan", 2)
    it.lock.close()
    assert done.exists()


def test_other_ranks_write_nothing_and_one_run_has_the_folder(tmp_path):
    first = opened(tmp_path / "a")
    with pytest.raises(SettingsError, match="another run is writing"):
        opened(tmp_path / "a")
    first.close()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(log.NotWritten, match="/file cannot be written"):
        opened(tmp_path / "file")
    other = log.Log(tmp_path / "b", World(1), 3, "test")
    other.open({}, "", 0)
    other.step(0, {"reward/mean": 1.0})
    log.write_samples(other, "x", [])
    other.say("nothing")
    other.finish(3)
    other.close()
    assert not (tmp_path / "b").exists()


def test_samples_are_one_object_a_line_and_half_a_surrogate_pair_is_kept(tmp_path, capsys):
    it = opened(tmp_path)  # JSON may have it: "\\ud83d"
    log.write_samples(it, "x", [
        sample(None, 7, "é\ud83d", answer="\ud83d"), sample(0.5, 7, "b\n", advantage=-0.25)],
        show=1)
    it.close()
    first, second = map(json.loads, (tmp_path / "samples/x.jsonl").read_text().splitlines())
    assert first["completion"] == "é\ud83d" and first["answer"] == "\ud83d"
    assert first["reward"] is first["advantage"] is None
    assert second == {
        "position": 7, "prompt": "p7", "completion": "b\n",
        "turns": [{"role": "assistant", "content": "b\n"}], "answer": "a", "reward": 0.5,
        "rewards": {"exact": 0.5}, "advantage": -0.25, "tokens": 3, "truncated": False}
    assert "[unscored] p7 -> é" in capsys.readouterr().out


@pytest.mark.parametrize("steps, skipped, bad, norm, told", [
    (1, 0, 0, 0.0, True), (0, 1, 0, 0.0, True),  # equal rewards in every group; nothing scored
    (0, 0, 1, 0.0, False), (0, 0, 0, 0.0, False),  # not finite; the critic's warm-up
    (1, 0, 0, 1e-13, True)])  # a rounding error is no gradient
def test_a_step_without_anything_to_learn_says_so(tmp_path, steps, skipped, bad, norm, told):
    line = log.Log(tmp_path, WORLD, 3).step_line({
        "step": 1, "grad/norm": norm, "update/steps": steps, "update/skipped": skipped,
        "grad/norm_not_finite": bad})
    assert ("grad 0.00  nothing to learn from" in line) == told


def test_gradients_that_are_not_finite_are_said_and_too_many_in_a_row_end_the_run(
        tmp_path, capsys):
    it = log.Log(tmp_path, WORLD, 9)
    for bad in (1, 2, 0, 1, 1):
        it.watch({"grad/norm_not_finite": bad, "critic/grad_norm_not_finite": 0, "grad/norm": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert [line[0] + line[-1] for line in said] == ["11", "22", "11", "12"]  # updates, in a row
    with pytest.raises(RuntimeError, match="3 steps in a row had"):
        it.watch({"grad/norm_not_finite": 0, "critic/grad_norm_not_finite": 1})


def test_the_peak_of_a_step_is_that_of_the_rank_that_needed_most(tmp_path):
    it = opened(tmp_path)
    it.step(0, {})
    with it.time("large"), mmap.mmap(-1, 2**28) as new:  # the heap may hold as much, unused
        new[::4096] = bytes(2**16)
    it.step(1, {})
    it.step(2, {})
    it.close()
    before, large, after = (row["memory/peak_gb"] for row in it.rows)
    assert large - before > 0.2 and large - after > 0.2  # it starts again in each step
    assert it.rows[1]["time/large"] > 0 and "time/large" not in it.rows[2]
    more = World()
    more.max = lambda peak: peak + 2**30  # another rank's
    other = log.Log(tmp_path, more, 9)
    other.step(0, {})
    assert other.rows[0]["memory/peak_gb"] > 1


# ---- a disk that is full, and what a crash leaves

@contextmanager
def full_disk(most: int = 1):
    """Files cannot grow above `most` bytes."""
    infinite = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, infinite))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))


def fill(folder: Path):
    """As the export does."""
    with log.whole_folder(folder / "model") as unfinished:
        (unfinished / "weights").write_text("y" * 99)


@pytest.mark.parametrize("file, write", [
    ("metrics.jsonl", lambda it: it.step(2, {"reward/mean": 0.6})),
    ("model", lambda it: fill(it.folder))])
def test_a_full_disk_ends_the_run_in_a_sentence_and_leaves_no_half_of_a_file(tmp_path, file, write):
    it = opened(tmp_path)
    it.step(1, {"reward/mean": 0.5})
    with full_disk(), pytest.raises(log.NotWritten) as error:
        write(it)
    assert error.value.status == 1 and "(ulimit -f)" in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/{file} cannot be written (")
    assert file == "metrics.jsonl" or not (tmp_path / file).exists()
    it.lock.close()
    again = opened(tmp_path, start=1)  # the same command goes on
    write(again)
    assert [row["step"] for row in lines(tmp_path)][:1] == [1] and (tmp_path / file).exists()


@pytest.mark.parametrize("file, write", [
    ("samples/step_1.jsonl", lambda it: log.write_samples(
        it, "step_1", [sample(1.0, text="y" * 999)])), ("curve.png", log.draw_curve)])
def test_what_only_decorates_a_run_fails_in_a_line(tmp_path, capsys, file, write):
    it = opened(tmp_path)
    it.step(1, {"reward/mean": 0.5})
    with full_disk():
        write(it)
    assert capsys.readouterr().out.count(f"{file} is not written: NotWritten: ") == 1
    assert not (tmp_path / file).exists()
    write(it)
    assert (tmp_path / file).exists()


@pytest.mark.parametrize("error, works", [
    (OSError(28, "No space left on device"), " Would work: space on its disk."),
    (PermissionError(13, "Permission denied", "config.json"), " Would work: permission for it."),
    (SafetensorError("I/O error: No space left on device (os error 28)"), "space on its disk."),
    (NotADirectoryError(20, "Not a directory"), "Not a directory).")])
def test_the_way_out_fits_the_error(error, works):
    with pytest.raises(log.NotWritten) as caught, log.writing("x"):
        raise error
    assert str(caught.value).endswith(works)


def test_a_terminal_that_closed_ends_no_run():
    """Also of the standard error; what comes later is dropped too."""
    code = ("import sys; sys.path.insert(0, '.'); from errors import tell\n"
            "for i in range(9999): tell('x' * 99); tell('y', sys.stderr)\nprint('z'); sys.exit(7)")
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, cwd=Path(log.__file__).parent)
    done.stdout.read(9)
    done.stdout.close()
    assert done.wait(60) == 7


def test_steps_without_a_checkpoint_are_moved_aside_and_named(tmp_path, capsys):
    it = opened(tmp_path / "x")
    it.step(1, {"n": 1})
    it.lock.close()
    (tmp_path / "x/samples/step_00001.jsonl").touch()
    again = opened(tmp_path / "x")
    assert not again.rows and not lines(tmp_path / "x")
    assert f"all of it is now in {tmp_path}/x.1/" in capsys.readouterr().out
    assert [row["n"] for row in lines(tmp_path / "x.1")] == [1]
    assert (tmp_path / "x.1/samples/step_00001.jsonl").exists()
    again.lock.close()


def test_what_is_renamed_into_place_was_on_the_disk_before(tmp_path, monkeypatch):
    """A crash of the machine leaves the old file or the new one, never an empty one."""
    order, shipped = [], Path.replace
    monkeypatch.setattr(log.os, "fsync", lambda number: order.append("fsync"))
    monkeypatch.setattr(log.os, "sync", lambda: order.append("fsync"))
    for name in "replace", "rename":
        monkeypatch.setattr(Path, name, lambda self, to: (order.append("rename"),
                                                          shipped(self, to)))
    log.write_whole(tmp_path / "done.json", "{}")
    fill(tmp_path)
    assert order == ["fsync", "rename"] * 2


@pytest.mark.parametrize("file, content, words", [
    ("done.json", b"", "done.json is damaged, as after a crash of the machine (Expecting value"),
    ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "without line 2 of {0}/metrics.jsonl."),
    ("args.json", b"\xff", "Would work: without {0}/args.json."),
    ("nowhere.json", None, "nowhere.json cannot be read (No such file or directory).")])
def test_a_damaged_file_is_one_sentence(tmp_path, file, content, words):
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(SettingsError) as error:
        log.read(tmp_path / file)
    assert words.format(tmp_path) in str(error.value) and "\n" not in str(error.value)
    if file == "metrics.jsonl":
        with pytest.raises(SettingsError, match="metrics.jsonl is damaged"):
            opened(tmp_path)  # the run does not go on
