"""The real scripts, killed, stopped and broken in every way that the docs promise to survive."""
import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import faults
from faults import Attempt, differences, last, metrics, progress

LONG = 200  # seconds: on a busy machine an end takes some, a wait for --timeout takes 600


@pytest.fixture(scope="session")
def tiny() -> str:
    return faults.model()


@pytest.fixture
def start(tmp_path, tiny):
    attempts = []

    def begin(*flags, **options):
        attempts.append(Attempt(tmp_path, "--model", tiny, *flags, **options))
        return attempts[-1]
    yield begin
    for attempt in attempts:
        attempt.kill()


def tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def rows(path: Path, never: int = 0) -> None:
    """A data set of 16 numbers to sort; the answer of one of them is "never"."""
    path.write_text("".join(json.dumps({
        "question": f"Sort {n}", "answer": "never" if n == never else "".join(sorted(str(n)))})
        + "\n" for n in range(500123, 500139)))


# ---- in a few minutes ----

@pytest.mark.parametrize("script", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_run_killed_in_a_save_and_stopped_ends_like_another(start, tmp_path, script):
    rows(tmp_path / "rows.jsonl")
    flags = ["--steps", "4", "--eval_data", "rows.jsonl", "--eval_every", "2"]
    if script == "ppo":
        flags += ["--kl_reward_coef", "0.05", "--kl_target", "0.02"]

    def go(name, **o):
        return start("--name", name, *flags, script=script, **o)

    status, text = go("alone").end()
    steps = [r["step"] for r in metrics(tmp_path / "runs/alone")]
    assert status == 0 and steps == [0, 1, 2, 2, 3, 4, 4], text   # with evaluations
    saved = tmp_path / "runs/x/checkpoints"

    # Rank 1 is killed with its tensors written, before the rename.
    status, text = go("x", faults="saved:1:3:kill").end()
    assert status == 1 and "exitcode  : -9" in tail(text), text
    assert sorted(os.listdir(saved)) == ["step_2", "step_4.partial"]

    # SIGTERM to rank 0 alone, in the middle of step 2.
    status, text = go("x", faults="forward:0:2:term").end()
    assert "resumed from runs/x/checkpoints/step_2" in text, text
    assert "SIGTERM: ended after 3 of 4 steps" in text and "exitcode  : 75" in tail(text), text
    assert sorted(os.listdir(saved)) == ["step_2", "step_3"], text

    status, text = go("x").end()
    assert status == 0 and "resumed from runs/x/checkpoints/step_3" in text, text
    assert differences(tmp_path / "runs/alone", tmp_path / "runs/x") == []


SLEEPY = """
import time
def sleepy(completion, answer, **row):
    if answer == "never":
        time.sleep(1e6)
    return sum(a == b for a, b in zip(completion, answer)) / 6
"""


def test_what_a_run_survives_and_what_ends_it(start, tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    rows(tmp_path / "rows.jsonl", never=500126)
    flags = ("--name", "x", "--steps", "9", "--data", "rows.jsonl", "--reward", "sleepy.py:sleepy",
             "--reward_timeout", "2")
    status, text = start(*flags, faults="backward:*:0:nan save:1:3:full").end()
    seen = metrics(tmp_path / "runs/x")
    assert [r["step"] for r in seen] == [1, 2, 3, 4], text
    # A gradient that is not finite is not applied, and the run goes on.
    assert "had a gradient that is not finite and were not applied" in text
    assert seen[0]["grad/norm_not_finite"] in (1, 2)     # a minibatch may have no gradient
    # A reward that hangs costs its own completions: four of one prompt.
    assert sum(r["rollout/unscored"] for r in seen) == 4
    assert "a completion has no reward" in text
    # A full disk ends the run in one sentence. The older checkpoint stays.
    sentence = r"^error: runs/x/checkpoints/step_4.partial/__1_0.distcp cannot be written \(.*\)"
    assert status == 1 and len(re.findall(sentence, text, re.MULTILINE)) == 1, text
    assert "exitcode  : 1" in text and "NotWritten: runs/x/checkpoints" in tail(text, 8), text
    assert sorted(os.listdir(tmp_path / "runs/x/checkpoints")) == ["step_2", "step_4.partial"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_wrong_tensor_in_one_engine_ends_a_run_before_its_first_update(start, tmp_path, script):
    status, text = start("--name", "x", script=script, faults="weights:1:0:wrong").end()
    assert status == 1 and "exitcode  : 2" in tail(text), text
    assert text.count("error: engine and trainer differ before an update by") == 1, text
    assert "failed:" not in text and progress(tmp_path / "runs/x") == 0, text


def test_refused_with_one_sentence_before_anything_loads(start, tmp_path):
    def refuse(*flags):
        return start(*flags, torchrun=False).end()

    (tmp_path / "runs/held/samples").mkdir(parents=True)
    with open(tmp_path / "runs/held/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = refuse("--name", "held")
    (tmp_path / "runs/file").write_text("in the way")
    for (status, text), words in ((held, "another run is writing runs/held"), (refuse(
            "--name", "file"), "runs/file cannot be written")):
        assert status == 2 and f"error: {words}" in text and "Traceback" not in text, text


# ---- slow: one start each

@pytest.mark.slow
@pytest.mark.parametrize("place", [
    "setup", "sync", "engine", "reward", "score", "backward", "log", "save", "evaluate", "export"])
def test_one_rank_raises_in_any_phase_and_all_end_in_seconds(start, place):
    step = {"setup": -1, "export": 2, "evaluate": 0}.get(place, 1)
    attempt = start("--name", "x", "--steps", "3", "--eval_data", "tiny", "--eval_every", "1",
                    "--save_every", "1", "--engine_correction", "truncate",
                    faults=f"{place}:1:{step}:raise")
    attempt.printed("a fault was put into")
    raised = time.monotonic()
    status, text = attempt.end()
    assert status == 1 and "a fault was put into" in text.split("Root Cause")[1], text
    assert time.monotonic() - raised < LONG, text


@pytest.mark.slow
@pytest.mark.parametrize("place, stuck", [("rollout", 0), ("forward", 1)])
def test_a_stuck_rank_is_named_after_timeout(start, place, stuck):
    """The others wait in our own barrier, or inside FSDP's collectives."""
    attempt = start("--name", "x", "--steps", "9", "--timeout", "20",
                    faults=f"{place}:{stuck}:2:hang")
    attempt.printed("step 2/9")
    began = time.monotonic()
    status, text = attempt.end()
    assert status == 1 and time.monotonic() - began < LONG
    names = (rf"for rank {stuck}\b|[Rr]anks? {stuck} failed to pass|"
             rf"waiting for send/recv from rank {stuck}")
    assert re.search(names, tail(text, 20)), text


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "a process without torchrun"])
def test_sigterm_saves_and_ends(start, tmp_path, whom):
    """A scheduler may signal torchrun or the whole group. Without torchrun the status is ours."""
    alone = "without" in whom
    attempt = start("--name", "x", "--steps", "500", "--save_every", "0", torchrun=not alone,
                    signals=True)
    attempt.printed("  3/500")
    (os.killpg if whom == "group" else os.kill)(attempt.process.pid, signal.SIGTERM)
    status, text = attempt.end()
    assert "This goes on: " in text and (status == 75 or not alone), text
    done, run = int(re.search(r"ended after (\d+) of 500 steps", text)[1]), tmp_path / "runs/x"
    assert last(run).name == f"step_{done}" and progress(run) == done


@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_save_and_end(start, tmp_path):
    """They went on alone, to the end, and the same command was refused."""
    attempt = start("--name", "x", "--steps", "500", signals=True, PYTHON_EXEC=sys.executable)
    attempt.printed("  3/500")
    ranks = attempt.ranks()
    attempt.process.kill()
    deadline = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert last(tmp_path / "runs/x").name == f"step_{progress(tmp_path / 'runs/x')}"


@pytest.mark.slow
def test_ctrl_c_ends_at_once_even_in_generation(start):
    attempt = start("--name", "x", "--steps", "9", faults="rollout:0:1:hang",  # rank 1 waits
                    signals=True)
    attempt.printed("step 1/9")
    time.sleep(1)
    ranks, began = attempt.ranks(), time.monotonic()
    os.killpg(attempt.process.pid, signal.SIGINT)
    status, text = attempt.end()
    assert time.monotonic() - began < LONG
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert text.count("interrupted") == 1, text
