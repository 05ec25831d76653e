"""keeping/log.py: lines, times, memory, and what Weights & Biases gets."""
import json
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import Prompt, Row
from dist import SettingsError
from keeping import log
from keeping import summary as grade
from rewards import Score
from trainer.batch import Completion, Sample

WORLD = SimpleNamespace(rank=0, device=torch.device("cpu"), max=lambda tensor: tensor)


def opened(folder: Path, steps: int = 3, start: int = 0, project: str | None = None,
           max_gap: float = 1e-3) -> log.Log:
    it = log.Log(folder, WORLD, steps, project, max_gap)
    it.open({"lr": 0.1, "seed": 0}, "the plan", start)
    return it


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wandb_records(path: Path) -> list:
    """The records of an offline .wandb file, which is LevelDB's log format after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record
    data, at, parts, records = path.read_bytes(), 7, b"", []
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:               # a header does not cross a block
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):                                 # a whole record, or its last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_wandb_offline_has_every_metric_of_every_step_and_the_run_is_closed(
        tmp_path, monkeypatch, capsys):
    """Without a key the run is offline; `wandb.finish(quiet=True)` once left every run open."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = []
    it = opened(tmp_path / "a-run", project="test")
    it.say = said.append
    for step in range(3):
        if step == 1:
            it.step(step, {"eval/rows": 4, "eval/pass@1": 0.25})
        with it.phase("rollout"), it.time("reward"):
            pass
        it.step(step + 1, {"reward/mean": 0.5 * step, "lr": 1e-6, "batch/tokens": 100 + step,
                       "loss/policy": float("nan") if step == 2 else -0.25})
    it.finish(3)
    it.close()
    assert not any("wandb" in line for line in said), said
    assert "wandb has no key: the run is recorded offline" in capsys.readouterr().out
    [file] = (tmp_path / "a-run/wandb").glob("offline-run-*/*.wandb")
    records = wandb_records(file)
    found = {}
    for record in records:
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json)
               for item in record.history.item}
        found |= {row["_step"]: row} if row else {}
    rows = lines(tmp_path / "a-run")
    evaluation = rows.pop(1)
    assert len(rows) == len(found) == 3 and evaluation["eval/pass@1"] == 0.25
    assert found[1]["eval/pass@1"] == 0.25
    for row in rows:
        assert {"reward/mean", "time/rollout", "memory/peak_gb"} <= row.keys()
        assert {k: v for k, v in row.items() if v is not None}.items() <= found[row["step"]].items()
    assert rows[2]["loss/policy"] is None and "loss/policy" not in found[3]
    assert records[-1].WhichOneof("record_type") == "exit"


def test_a_failure_of_wandb_costs_one_line_and_not_the_run(tmp_path, monkeypatch, capsys):
    import wandb
    for place in ("init", "log", "finish"):
        def bad(*a, **k):
            return (_ for _ in ()).throw(ConnectionError("the server is away"))

        def good(*a, **k):
            return None

        run = SimpleNamespace(log=bad if place == "log" else good)
        monkeypatch.setattr(wandb, "teardown", bad if place == "finish" else good)
        monkeypatch.setattr(wandb, "init", bad if place == "init" else lambda run=run, **k: run)
        it = opened(tmp_path / place, project="test")
        for step in range(3):
            it.step(step, {"lr": 1.0})
        it.finish(3)
        it.close()
        text = capsys.readouterr().out
        assert text.count("wandb is off from here: ConnectionError: the server is away") == 1, place
        assert len(lines(tmp_path / place)) == 3 and (tmp_path / place / "done.json").exists()


def test_lines_after_the_resumed_step_are_dropped_and_a_torn_one_too(tmp_path):
    it = opened(tmp_path, steps=5)
    for step in range(4):
        if step == 2:
            it.step(step, {"eval/rows": 4})                # comes again after the resume
        it.step(step + 1, {"reward/mean": torch.tensor(0.5), "x": float("inf"), "n": 3})
    it.close()
    it.lock.close()                                        # as when the process ends
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    again = opened(tmp_path, steps=5, start=2)
    again.step(3, {"n": 4})
    again.close()
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3] == [r["step"] for r in again.rows]
    assert lines(tmp_path)[0] == {"step": 1, "reward/mean": 0.5, "x": None, "n": 3}
    grade.draw_curve(again)
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_samples_and_a_best_model_of_a_killed_run_go_with_its_lines(tmp_path):
    opened(tmp_path).lock.close()
    for name in "step_00002", "step_00003", "eval_00001", "eval_00002", "my_own_3", "my_best":
        (tmp_path / f"samples/{name}.jsonl").touch()
    (tmp_path / "best").mkdir()
    best, done = tmp_path / "best/best.json", tmp_path / "done.json"
    best.write_text('{"step": 1}')
    done.write_text('{"steps": 2}')
    opened(tmp_path, start=2).lock.close()
    assert {p.stem for p in tmp_path.glob("samples/*")} == {
        "step_00002", "eval_00001", "my_own_3", "my_best"}
    assert best.exists()
    assert done.exists()  # it goes when a checkpoint takes its place
    best.write_text('{"step": 2}')
    it = log.Log(tmp_path, WORLD, 3)
    it.open({"eval_only": True}, "the plan", 2)
    it.lock.close()
    assert best.exists()
    opened(tmp_path, start=2)
    assert not best.parent.exists()


def test_other_ranks_write_nothing_and_one_run_has_the_folder(tmp_path):
    first = opened(tmp_path / "a")
    with pytest.raises(SettingsError, match="another run is writing"):
        opened(tmp_path / "a")
    first.close()
    other = log.Log(tmp_path / "b", SimpleNamespace(**vars(WORLD) | {"rank": 1}), 3, "test")
    other.open({}, "", 0)
    other.step(0, {"reward/mean": 1.0})
    other.samples("x", [])
    other.say("nothing")
    other.finish(3)
    other.close()
    assert not (tmp_path / "b").exists()


def sample(text: str, total: float | None, prompt="p", answer: object = "a", **more) -> Sample:
    row = Row(0, prompt, [1], answer, {}, "x")
    return Sample(Prompt(7, row), Completion(np.ones(3, np.int32), np.zeros(3), False), text,
                  Score(total, {"exact": total}, None), **more)


def test_samples_are_one_object_a_line_and_half_a_surrogate_pair_is_kept(tmp_path, capsys):
    it = opened(tmp_path)                                  # JSON may have it: "\\ud83d"
    it.samples("x", [sample("é\ud83d", None, answer="\ud83d"), sample("b\n", 0.5, advantage=-0.25)],
               show=1)
    it.close()
    first, second = map(json.loads, (tmp_path / "samples/x.jsonl").read_text().splitlines())
    assert first["completion"] == "é\ud83d" and first["answer"] == "\ud83d"
    assert first["reward"] is first["advantage"] is None
    assert second == {
        "position": 7, "prompt": "p", "completion": "b\n",
        "turns": [{"role": "assistant", "content": "b\n"}], "answer": "a", "reward": 0.5,
        "rewards": {"exact": 0.5}, "advantage": -0.25, "tokens": 3, "truncated": False}
    assert "[unscored] p -> é" in capsys.readouterr().out


@pytest.mark.parametrize("steps, skipped, norm, bad, told", [
    (1, 0, 0.0, 0, True), (0, 1, 0.0, 0, True),   # equal rewards in every group; nothing scored
    (1, 0, 0.5, 0, False), (0, 0, 0.0, 1, False), (0, 0, 0.0, 0, False)])   # bad; critic warm-up
def test_a_step_without_anything_to_learn_says_so(
        tmp_path, capsys, steps, skipped, norm, bad, told):
    it = opened(tmp_path)
    it.step(0, {"grad/norm": norm, "update/steps": steps, "update/skipped": skipped,
                "grad/norm_not_finite": bad})
    it.close()
    assert ("grad 0.00  nothing to learn from" in capsys.readouterr().out) == told


@pytest.mark.parametrize("gap, told", [
    ({}, False), ({"rollout/logprob_gap_mean": 0.15}, False),              # {}: critic warm-up
    ({"rollout/logprob_gap_mean": float("nan")}, False), ({"rollout/logprob_gap_mean": 0.7}, True)])
def test_a_gap_above_max_gap_is_said(tmp_path, capsys, gap, told):
    it = opened(tmp_path, max_gap=0.15)
    it.step(0, {"reward/mean": 0.5} | gap)
    it.close()
    assert ("differ by more than --max_gap" in capsys.readouterr().out) == told


def test_gradients_that_are_not_finite_are_said_and_too_many_in_a_row_end_the_run(
        tmp_path, capsys):
    it = log.Log(tmp_path, WORLD, 9, max_bad_steps=3)
    for bad in (1, 2, 0, 1, 1):
        it.watch({"grad/norm_not_finite": bad, "critic/grad_norm_not_finite": 0, "grad/norm": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert [line[0] + line[-1] for line in said] == ["11", "22", "11", "12"]    # updates, in a row
    with pytest.raises(RuntimeError, match="3 steps in a row .*--max_bad_steps"):
        it.watch({"grad/norm_not_finite": 0, "critic/grad_norm_not_finite": 1})


def test_peaks_are_measured_a_phase(tmp_path):
    it = opened(tmp_path)
    with it.phase("small"):
        pass
    with it.phase("large"):
        torch.ones(64 * 2**20)                             # 256 MiB, which are gone at the end
    it.step(0, {})
    it.step(1, {})
    it.close()
    first, second = it.rows
    assert first["memory/large_gb"] - first["memory/small_gb"] > 0.2
    assert first["memory/peak_gb"] == first["memory/large_gb"] > 0 and first["time/large"] > 0
    assert second == {"step": 1}


def test_long_work_shows_a_line_every_half_minute_in_a_file(tmp_path, monkeypatch, capsys):
    """An evaluation of 1,000 rows was silent for eight minutes."""
    now = [100.0]
    monkeypatch.setattr(log.Log, "beat", lambda self: None)            # the thread shows nothing
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    it = opened(tmp_path)
    with it.time("step"), it.phase("rollout"):
        assert list(it.count(range(3), desc="prompts")) == [0, 1, 2]        # as vLLM does
        bar = it.count(total=1000, desc="vLLM's", postfix="speed: 0")
        for second in range(95):
            now[0] += 1
            bar.postfix = f"output: {second} toks/s"
            bar.update(2)
            if second % 30 == 29:
                it.show(it.bar)
        assert bar.format_dict["elapsed"] == 95            # vLLM divides by it
        bar.close()
    it.show(it.bar)                                        # between two phases
    with it.time("update"):                                # nothing counts
        for _ in range(3):
            it.show(it.bar)
            now[0] += 29
    it.close()
    assert capsys.readouterr().out.splitlines() == [
        "  rollout: 60 of 1000 in 00:30, 07:50 left, output: 29 toks/s",
        "  rollout: 120 of 1000 in 01:00, 07:20 left, output: 59 toks/s",
        "  rollout: 180 of 1000 in 01:30, 06:50 left, output: 89 toks/s",
        "  update: 00:58"]


def test_a_thread_shows_it_while_the_run_works(tmp_path, monkeypatch):
    shown = threading.Event()
    monkeypatch.setattr(log.Log, "show", lambda self, bar: shown.set())
    it = opened(tmp_path)
    assert shown.wait(300)
    it.close()


LONG_WORK = """
import log, os, sys, time, torch
from pathlib import Path
from types import SimpleNamespace
world = SimpleNamespace(rank=int(sys.argv[2]), device=torch.device("cpu"), max=lambda x: x)
log.Log.beat = lambda self: None
it = log.Log(Path(sys.argv[1]), world, 60)
it.open({}, "", 0)
with it.phase("rollout"):
    bar = it.count(total=8, postfix="output: 9 toks/s")
    bar.update(3)
    if world.rank == 0:
        it.show(it.bar)
it.say("a line")
it.step(1, {"reward/mean": 0.5})
it.close()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_long_work_is_a_bar_on_a_terminal(tmp_path, rank):
    """The bar leaves nothing behind."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 100))
    os.set_blocking(ours, False)
    subprocess.run([sys.executable, "-c", LONG_WORK, tmp_path, str(rank)],
                   cwd=Path(log.__file__).parent, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    if rank:
        with pytest.raises(OSError):                       # nothing came
            os.read(ours, 10000)
        return
    text = os.read(ours, 10000).decode()
    assert "rollout: 3 of 8 in 00:00, 00:00 left, output: 9 toks/s" in text
    assert "step 0/60 |" in text and "?" not in text
    lines = [line.split("\r")[-1].strip() for line in text.split("\r\n")]
    assert lines == ["a line", "step  1/60  reward 0.500", ""]


def test_a_full_disk_costs_files_and_not_the_run(tmp_path, capsys):
    it = opened(tmp_path, steps=3)
    it.step(1, {"reward/mean": 0.5})
    for file in ("samples/step_1.partial", "curve.partial", "metrics.partial"):
        (tmp_path / file).symlink_to("/dev/full")
    size, infinite = (tmp_path / "metrics.jsonl").stat().st_size, resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, infinite))
    it.step(2, {"reward/mean": 0.6})
    resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))
    it.samples("step_1", [sample("y" * 999, 1.0)])
    grade.draw_curve(it)
    with pytest.raises(SettingsError, match="cannot be written .No space left on device"):
        it.lock.close()
        opened(tmp_path, start=1)
    text = capsys.readouterr().out
    for file in ("metrics.jsonl was not written (No space", "samples/step_1.jsonl", "curve.png"):
        assert f"{tmp_path}/{file}" in text and text.count("the run goes on") == 3, text
    it.finish(2)
    assert not (tmp_path / "done.json").exists()           # files are missing
    for file in ("samples/step_1.partial", "curve.partial", "metrics.partial"):
        (tmp_path / file).unlink()
    it.step(3, {"reward/mean": 0.7})                       # there is room again: nothing is lost
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert "y" * 999 in (tmp_path / "samples/step_1.jsonl").read_text()
    it.finish(3)
    it.close()
    assert (tmp_path / "done.json").exists() and it.unwritten == {}
    assert [r["reward/mean"] for r in lines(tmp_path)] == [0.5, 0.6, 0.7]
