"""Exact resume: a run that is killed at any instant goes on to the same numbers, bit for bit; what
a kill or a full disk leaves is whole or absent; a resume that would be another run is refused."""
import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import checkpoint
import fakes
import faults
import files
import identity
import log
import ranks
from data import Row
from errors import SettingsError
from fakes import SCRIPTS
from faults import ROOT, Attempt, differences, last, metrics, progress
from tables import table

LONG = 200  # seconds: on a busy machine an end takes some, a wait for --timeout takes 600


@pytest.fixture
def start(tmp_path):
    """Starts a real script in tmp_path, and ends what is left of it."""
    attempts = []

    def begin(*flags, model=None, **options):
        attempts.append(Attempt(tmp_path, "--model", model or faults.model(), "--name", "x", *flags,
                                **options))
        return attempts[-1]
    yield begin
    for attempt in attempts:
        attempt.kill()


def write_rows(path: Path, never: int = 0) -> None:
    """A data set of 16 numbers to sort; the answer of one of them is "never"."""
    path.write_text("".join(json.dumps({
        "question": f"Sort {n}", "answer": "never" if n == never else "".join(sorted(str(n)))})
        + "\n" for n in range(500123, 500139)))


# ---- any kill is no kill

DATE = "{% set form = '%Y%m' ~ '%d' %}{{ '<|im_start|>system ' ~ strftime_now(form) ~ '\n' }}"


def dated_model(folder: Path) -> Path:
    """The tiny model with a template that writes the day, as that of Llama 3 does."""
    shutil.copytree(faults.model(), folder)
    template = folder / "chat_template.jinja"
    template.write_text(DATE + template.read_text())
    return folder


@pytest.mark.parametrize("script", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_run_killed_in_a_save_and_stopped_in_a_step_ends_like_another(start, tmp_path, script):
    """It is resumed on another day, and by the command that it prints. So a checkpoint holds
    weights and AdamW's state of policy and critic, the place in the data, the KL coefficient and
    the day; and the learning rate goes on. On one rank in the place of two it makes the same steps
    but for rounding."""
    write_rows(tmp_path / "rows.jsonl")
    model, hour = dated_model(tmp_path / "dated"), time.gmtime().tm_hour
    today, yesterday = ({"TZ": f"<noon>{hour - 12 + hours:+d}"} for hours in (0, 13))
    flags = ("--steps 4 --eval_data rows.jsonl --eval_every 2 --max_prompt_tokens 64 "
             "--lr_schedule linear").split()
    if script == "ppo":
        flags += "--kl_reward_coef 0.05 --kl_target 0.02 --kl_horizon 20".split()

    def go(*more, **options):
        return start(*flags, *more, model=str(model), script=script, **options).end()

    status, text = go("--name", "alone", **today)
    alone, run = tmp_path / "runs/alone", tmp_path / "runs/x"
    assert status == 0 and [row["step"] for row in metrics(alone)] == [0, 1, 2, 2, 3, 4, 4], text
    again = re.search(r"a new run. After a kill: (.*) \(with your flags of torchrun\)", text)[1]

    # Rank 1 is killed when its tensors are written, before the rename.
    status, text = go(FAULTS="saved:1:3:SIGKILL", **today)
    assert status == 1 and "exitcode  : -9" in text, text
    assert sorted(os.listdir(run / "checkpoints")) == ["step_2", "step_4.partial"]

    # SIGTERM to rank 0 alone, in the middle of a step.
    status, text = go(FAULTS="forward:0:2:SIGTERM", **yesterday)
    assert "resumed from runs/x/checkpoints/step_2" in text, text
    assert "SIGTERM: ended after 3 of 4 steps" in text and "exitcode  : 75" in text, text
    assert sorted(os.listdir(run / "checkpoints")) == ["step_2", "step_3"], text

    env = os.environ | yesterday | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(shlex.split(again.replace("--name alone", "--name x")), cwd=tmp_path,
                          env=env, text=True, capture_output=True)
    assert "resumed from runs/x/checkpoints/step_3" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and differences(alone, run) == []

    # On one rank, from step 2, with a flag that may change. Flags that are not given are the run's.
    shutil.copytree(alone, one := tmp_path / "runs/one")
    shutil.rmtree(one / "checkpoints/step_4")
    (one / "done.json").unlink()
    done = ranks.script(ROOT / f"{script}.py", "--name", "one", "--keep", "3", cwd=tmp_path)
    said = [f"resumed with --{change} from step 3 on" for change in (
        "keep 3 (was 2)", "name one (was alone)", "ranks 1 (was 2)")]
    assert sorted(json.loads((one / "args.json").read_text())["changes"]) == said
    assert sorted(re.findall("^  (resumed with --.*)", done.stdout, re.MULTILINE)) == said
    assert f"resumes after step 2 of 4, begun {files.read(alone / 'args.json')['began']}" in (
        done.stdout)
    for ours, theirs in zip(metrics(one), metrics(alone), strict=True):
        close = {name: value for name, value in theirs.items() if "gap" not in name}
        assert {name: ours[name] for name in close} == pytest.approx(close, rel=1e-3, abs=1e-6)


SLEEPY = """
import time
def sleepy(completion, answer, **row):
    if answer == "never":
        time.sleep(1e6)
    return sum(a == b for a, b in zip(completion, answer)) / 6
"""


def test_what_a_run_survives_and_what_ends_it(start, tmp_path):
    """A gradient that is not finite is not applied; a reward that hangs costs its own completions,
    four of one prompt; a full disk ends the run in one sentence, and the older checkpoint stays."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    # Its prompt is of the second step: a worker has 120 s for its first job.
    write_rows(tmp_path / "rows.jsonl", never=500127)
    status, text = start(*"--steps 9 --data rows.jsonl --reward sleepy.py:sleepy".split(),
                         *"--reward_timeout 2 --lr_schedule linear".split(),
                         FAULTS="backward:*:0:nan save:1:3:full").end()
    seen = metrics(tmp_path / "runs/x")
    # A rate is a step's, and each of these has two minibatches.
    assert [row["lr"] for row in seen] == pytest.approx([1e-3 * (1 - i / 9) for i in range(4)])
    assert [row["step"] for row in seen] == [1, 2, 3, 4], text
    assert "had a non-finite gradient and were not applied" in text
    assert seen[0]["grad/norm_not_finite"] in (1, 2)  # a minibatch may have no gradient
    assert sum(row["rollout/unscored"] for row in seen) == 4
    assert "a completion has no reward" in text
    sentence = r"^error: runs/x/checkpoints/step_4.partial/__1_0.distcp cannot be written \(.*\)"
    assert status == 1 and len(re.findall(sentence, text, re.MULTILINE)) == 1, text
    assert "exitcode  : 1" in text and "NotWritten: runs/x/checkpoints" in text[-2000:], text
    assert sorted(os.listdir(tmp_path / "runs/x/checkpoints")) == ["step_2", "step_4.partial"]


# ---- slow: one start each

@pytest.mark.slow
@pytest.mark.parametrize("script, seed", [("grpo", 1), ("ppo", 2)])
def test_random_kills_of_any_process_at_any_instant(script, seed):
    """The README's command, with five kills: its status is 1 if anything but a time differs."""
    ranks.script("tests/faults.py", "--kills", 5, "--script", script, "--seed", seed)


PHASES = """
setup:1:-1:raise | a fault was put into
weights:1:-1:wrong | engine and trainer differ before an update by
evaluate:1:0:raise | a fault was put into
sync:1:1:raise | a fault was put into
engine:1:1:raise | a fault was put into
reward:1:1:raise | a fault was put into
score:1:1:raise | a fault was put into
backward:1:1:raise | a fault was put into
log:1:1:raise | a fault was put into
save:1:1:raise | a fault was put into
export:1:2:raise | a fault was put into
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault, words", table(PHASES))
def test_one_rank_that_fails_in_any_phase_ends_all(start, tmp_path, fault, words):
    """Within seconds, with its own error; a wrong tensor in one engine before the first update."""
    attempt = start(*"--steps 3 --eval_data tiny --eval_every 1 --save_every 1".split(),
                    "--engine_correction", "truncate", FAULTS=fault)
    attempt.printed(words)
    failed = time.monotonic()
    status, text = attempt.end()
    assert status == 1 and time.monotonic() - failed < LONG, text
    assert words in text.split("Root Cause")[1], text
    assert "wrong" not in fault or progress(tmp_path / "runs/x") == 0, text


@pytest.mark.slow
@pytest.mark.parametrize("place, stuck, said", [
    ("rollout", 0, "waiting for send/recv from rank 0"),
    ("reward", 1, "Ranks 1 failed to pass"), ("forward", 1, "Timed out waiting")])
def test_a_stuck_rank_ends_all_after_timeout(start, place, stuck, said):
    """Between two passes it is named. Inside FSDP's collectives gloo says only that it waited."""
    attempt = start("--steps", "9", "--timeout", "20", FAULTS=f"{place}:{stuck}:2:hang")
    attempt.printed("step 2/9")
    began = time.monotonic()
    status, text = attempt.end()
    assert status == 1 and time.monotonic() - began < LONG
    assert said in text[-5000:], text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["TERM to all", "TERM to one process without torchrun",
                                 "KILL to torchrun", "INT to all"])
def test_a_run_that_is_asked_to_end_saves_and_ends(start, tmp_path, how):
    """A scheduler may signal torchrun or the whole group; ranks of a torchrun that is killed must
    not go on alone; Ctrl-C ends at once, even while another rank generates."""
    number, interrupted = getattr(signal, f"SIG{how.split()[0]}"), how == "INT to all"
    attempt = start("--steps", "500", "--save_every", "0", torchrun="without" not in how,
                    signals=True, PYTHON_EXEC=sys.executable,
                    FAULTS="rollout:0:2:hang" if interrupted else "")
    attempt.printed("  2/500" if interrupted else "  3/500")
    time.sleep(1)
    ranks_of_it = attempt.ranks()
    (os.killpg if "all" in how else os.kill)(attempt.process.pid, number)
    _, left = psutil.wait_procs(ranks_of_it, LONG)
    status, text = attempt.end()
    assert not left and "To resume: " in text, text
    assert text.count("interrupted") == interrupted and ("without" not in how or status == 75)
    if not interrupted:
        done, run = int(re.search(r"ended after (\d+) of 500", text)[1]), tmp_path / "runs/x"
        assert last(run) == progress(run) == done


# ---- a resume that would be another run

@pytest.mark.parametrize("script", SCRIPTS)
def test_another_value_of_any_entry_is_refused_or_said(script, tmp_path):
    """What is fixed is a flag, or a fact of the data, the models and the script."""
    found = fakes.made_of(SCRIPTS[script].Args())
    fixed = {name for name, entry in found.items() if entry.fixed}
    assert {name for name in fixed if not found[name].flag} == {
        "script", "rows", "row_digests", "model_files", "reference_files", "precision",
        "config"}
    kept = {name: entry.value for name, entry in found.items()}
    for name, (value, _, flag) in found.items():
        other = {bool: not value, list: [["x", 1]], str: "another", dict: {}}.get(type(value), 17)
        now = found | {name: found[name]._replace(value=other)}
        if name in fixed - {"row_digests"}:
            words = f"{name} was {value} and is now {other}"
            with pytest.raises(SettingsError, match=re.escape(words)):
                identity.compare(kept, now, tmp_path, 7)
        elif flag:
            assert identity.compare(kept, now, tmp_path, 7) == [
                f"resumed with --{name} {identity.words(other)} (was {identity.words(value)}) from "
                "step 8 on"]
        elif name not in ("row_digests", "code"):
            said, = identity.compare(kept, now, tmp_path, 7)
            assert name in said and str(identity.words(other)) in said
    assert identity.compare(kept, found, tmp_path, 7) == []
    with pytest.raises(SettingsError, match="group was .*; seed was"):  # all in one sentence
        identity.compare(kept | {"group": 99, "seed": 99}, found, tmp_path, 7)
    assert identity.compare(kept | {"gone": 3}, found, tmp_path, 7) == [
        "resumed without gone 3, which is no longer a setting"]


@pytest.mark.parametrize("changes", [
    dict(prompt_ids=[1, 3]), dict(answer="b"), dict(answer=None), dict(columns={"x": 9})])
def test_another_row_is_refused_and_named(tmp_path, changes):
    """By its number in the file, of which some rows were too long."""
    rows = [Row(i, f"p{i}", [1, i], f"a{i}", {"x": i, "when": datetime(2026, 1, 1)}, "s")
            for i in (0, 2, 5)]
    kept = {"row_digests": identity.row_digests(rows)}
    rows[1] = replace(rows[1], **changes)
    now = {"row_digests": identity.Entry(identity.row_digests(rows), True)}
    with pytest.raises(SettingsError, match=r"row 3 of --data differs"):
        identity.compare(kept, now, tmp_path, 1)


def test_weights_have_another_digest_if_one_number_or_the_size_differs(tmp_path):
    digests = set()
    for content in bytes(3_000_000), bytes(70_000) + b"1" + bytes(2_929_999), bytes(3_000_001):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(identity.digest_of_files(str(tmp_path)))
    assert len(digests) == 3


def test_each_file_that_a_users_file_imports_is_read_once(tmp_path, monkeypatch):
    """By a file that imports all of the core, the files of which import each other, and one beside
    it that imports it."""
    own, read, parse = tmp_path / "own.py", [], identity.ast.parse
    core = sorted(path.stem for path in ROOT.glob("*.py"))
    own.write_text("import beside\ndef f():\n    import " + ", ".join(core))
    (tmp_path / "beside.py").write_text("import own")
    monkeypatch.setattr(identity.ast, "parse", lambda code: read.append(code) or parse(code))
    found = identity.imported(own)
    assert found >= {own, tmp_path / "beside.py", *ROOT.glob("*.py")} and len(read) == len(found)


def test_a_coefficient_that_was_adapted_is_that_of_the_checkpoint():
    """Unless its flag has a new value."""
    ppo, state = fakes.args("ppo", kl_reward_coef=0.3, kl_target=0.1), {"kl_coef": 0.07}
    for before, after in (0.3, 0.07), (0.1, 0.3):
        assert checkpoint.kl_coef(ppo, state | {"settings": {"kl_reward_coef": before}}) == after


# ---- checkpoints: whole or absent, and the newest is found

def models(value: float = 1.0) -> dict:
    """A model of one vector, as far as a checkpoint knows it."""
    p = torch.nn.Parameter(torch.full((3,), value))
    return {"policy": SimpleNamespace(parameters={"w": p}, optimizer=torch.optim.AdamW([p]))}


def test_the_newest_checkpoints_are_kept_and_found_by_their_numbers(tmp_path):
    """What a kill left goes; a second save of a step (SIGTERM after the last one) writes nothing;
    one that was cut is a sentence; a run that went further is not cut short."""
    folder, world = tmp_path / "checkpoints", fakes.World()
    assert checkpoint.find(folder, world) is None
    for left in "step_8.partial", "step_1.gone":
        (folder / left).mkdir(parents=True)
    gone = [checkpoint.save(folder, world, models(), {"step": step, "settings": {}}, 2)
            for step in (8, 9, 10, 10)]
    assert sorted(os.listdir(folder)) == ["step_10", "step_9"] and gone == [[], [], ["step_8"], []]
    saved, other = checkpoint.find(folder, world), models(2.0)
    assert saved.state["step"] == 10
    checkpoint.load(saved, world, other)
    p = other["policy"].parameters["w"]
    assert p.tolist() == [1.0] * 3 and not other["policy"].optimizer.state[p]  # before any update

    def newest(**flags):
        return checkpoint.newest(fakes.args(**flags), world, tmp_path, {})

    assert newest(steps=10).path == newest(steps=9, eval_only=True).path == saved.path
    with pytest.raises(SettingsError, match="--steps 9: .*step_10 .* Would work: --steps 10"):
        newest(steps=9)


def unshared(world, folder: str) -> str:
    """Saves in a folder of this rank alone, after a step that one rank has already."""
    own = Path(folder, str(world.rank))
    if world.rank:
        (own / "step_7").mkdir(parents=True)
    checkpoint.save(own, world, models(), {"step": 7}, 1)
    with pytest.raises(files.NotWritten) as error:
        checkpoint.save(own, world, models(), {"step": 8}, 1)
    return str(error.value)


def test_ranks_that_share_no_folder_are_told_and_decide_together(tmp_path):
    for said in ranks.results(2, unshared, str(tmp_path)):
        assert "some ranks do not see rank 0's" in said and "all machines share" in said
    assert not [*tmp_path.glob("0/step_7*")] and not (tmp_path / "0/step_8").exists()


# ---- the run's folder after a kill, and on a full disk

@contextmanager
def opened(folder: Path, start: int = 0, **more):
    """The log of a run that goes on after `start` steps, until its process ends."""
    it = log.Log(folder, fakes.World(), 5)
    it.open({"seed": 0, "began": "2026-01-02"} | more, "the plan", start)
    yield it
    it.lock.close()


def test_what_was_written_after_the_checkpoint_is_removed_and_made_again(tmp_path):
    """A line that a kill cut off, lines and samples of later steps and evaluations, and done.json.
    A user's own files stay."""
    with opened(tmp_path) as it:
        for step in 1, 2, 3, 4:
            it.step(step, {"x": torch.tensor(0.5), "small": 2.47e-10, "inf": float("inf")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    for name in "step_00002", "step_00003", "eval_00002", "eval_00003", "my_own_3", "my_best":
        (tmp_path / f"samples/{name}.jsonl").touch()
    (tmp_path / "done.json").write_text('{"steps": 2}')
    with opened(tmp_path, 2) as it:
        it.step(3, {"n": 4})
    lines = files.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in lines] == [1, 2, 3] == [row["step"] for row in it.rows]
    assert lines[0] == {"step": 1, "x": 0.5, "small": 2.47e-10, "inf": None,
                        "memory/peak_gb": lines[0]["memory/peak_gb"]}
    assert {path.stem for path in tmp_path.glob("samples/*")} == {
        "step_00002", "eval_00002", "my_own_3", "my_best"}
    assert not (tmp_path / "done.json").exists()


def test_steps_without_a_checkpoint_are_moved_aside_and_named(tmp_path, capsys):
    with opened(tmp_path / "x") as it:
        it.step(1, {"n": 1})
        (tmp_path / "x/samples/step_00001.jsonl").touch()
    with opened(tmp_path / "x") as again:
        assert not again.rows and not files.read(tmp_path / "x/metrics.jsonl")
    assert f"its files are now in {tmp_path}/x.1/" in capsys.readouterr().out
    assert [row["n"] for row in files.read(tmp_path / "x.1/metrics.jsonl")] == [1]
    assert (tmp_path / "x.1/samples/step_00001.jsonl").exists()


def test_one_run_has_the_folder_and_it_is_a_folder(tmp_path):
    with opened(tmp_path / "a"), pytest.raises(SettingsError, match="another run is writing"), \
            opened(tmp_path / "a"):
        pass
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(files.NotWritten, match="/file cannot be written"), opened(
            tmp_path / "file"):
        pass


def test_the_ranks_of_a_resumed_run_look_at_its_lock_at_once(tmp_path, monkeypatch):
    """Each rank looks before it starts: one that finds another looking must not take it for a run
    that writes."""
    monkeypatch.chdir(tmp_path)
    args, now = fakes.args(name="x"), datetime.now()
    path = tmp_path / "runs/x/.lock"
    path.parent.mkdir(parents=True)
    path.touch()
    with open(path) as of_another_rank:
        fcntl.flock(of_another_rank, fcntl.LOCK_SH)
        assert files.choose_folder(args, now) == Path("runs/x")
    with open(path) as of_another_run:
        files.lock(of_another_run, tmp_path)
        with pytest.raises(SettingsError, match="another run is writing"):
            files.choose_folder(args, now)


def fill(it: log.Log) -> None:
    """Writes a folder, as the export does."""
    with files.whole_folder(it.folder / "model") as unfinished:
        (unfinished / "weights").write_text("y" * 99)


@pytest.mark.parametrize("file, write, ends", [
    ("metrics.jsonl", lambda it: it.step(2, {"reward/mean": 0.6}), True), ("model", fill, True),
    ("samples/x.jsonl", lambda it: log.write_samples(it, "x", [fakes.sample(text="y" * 999)]),
     False)])
def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, capsys, file, write, ends):
    """It ends the run in a sentence, or, where a file only decorates the run, costs a line."""
    with opened(tmp_path) as it:
        it.step(1, {"reward/mean": 0.5})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        try:
            write(it)
            said = capsys.readouterr().out
        except files.NotWritten as error:
            said = f"{error.status} {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    words = f"1 {tmp_path}/{file} cannot be" if ends else f"{file} is not written: NotWritten: "
    assert words in said, said
    assert "(ulimit -f)" in said and (file == "metrics.jsonl" or not (tmp_path / file).exists())
    with opened(tmp_path, 1) as again:  # the same command goes on
        write(again)
    assert files.read(tmp_path / "metrics.jsonl")[0]["step"] == 1 and (tmp_path / file).exists()


def test_what_is_renamed_into_place_was_on_the_disk_before(tmp_path, monkeypatch):
    """A crash of the machine leaves the old file or the new one, never an empty one."""
    order, shipped = [], Path.replace
    for name in "fsync", "sync":
        monkeypatch.setattr(os, name, lambda *number: order.append("fsync"))
    for name in "replace", "rename":
        monkeypatch.setattr(Path, name, lambda self, to: (order.append("rename"),
                                                          shipped(self, to)))
    files.write_whole(tmp_path / "done.json", "{}")
    fill(SimpleNamespace(folder=tmp_path))
    assert order == ["fsync", "rename"] * 2
