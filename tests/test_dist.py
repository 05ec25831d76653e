"""No rank decides alone: splits that all ranks agree on, collectives on real processes, and how
ranks start, fail and end. Batches are cut here too, because that is how ranks share them."""
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dist
import ranks
from batch import KEYS, balance, cut, packed_tokens
from dist import assert_divisible, share
from errors import SettingsError
from files import NotWritten
from tables import table
from tracked import ROOT

# ---- splits: pure functions ----

@given(st.integers(0, 500), st.integers(1, 70))
def test_share_gives_every_item_once_in_order_and_evenly(n, size):
    """The shares of all ranks, one after another, are the list; the first ones may be larger."""
    parts = [range(n)[share(n, size, rank)] for rank in range(size)]
    assert [i for part in parts for i in part] == [*range(n)]
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_a_number_that_does_not_divide_is_refused_with_those_that_do():
    assert assert_divisible(12, 4, "--batch", "ranks") == 3
    with pytest.raises(SettingsError, match="--batch is 512 and ranks is 6: .*work: --batch 510 or "
                                            "516, or ranks 4 or 8"):
        assert_divisible(512, 6, "--batch", "ranks")


# For each prompt its tokens, and the tokens of its completions.
prompts = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 20), min_size=1,
                                                          max_size=9)), max_size=20)


@given(prompts, st.integers(1, 9), st.integers(60, 400))
def test_balance_gives_every_rank_as_many_micro_batches_within_the_budget(prompts, size, budget):
    """Every row is in one of them. There are as few as the budget allows, padding only where rows
    are lacking, and the largest of a round is not always the same rank's."""
    sizes = [(number, p, c) for number, (p, some) in enumerate(prompts) for c in some]
    lanes = balance(sizes, size, budget)
    micros = [micro for lane in lanes for micro in lane]
    assert sorted(row for micro in micros for row in micro) == [*range(len(sizes))]
    assert len(lanes) == size and len({len(lane) for lane in lanes}) == 1
    assert len(lanes[0]) == max(1, -(-len(cut(sizes, budget)) // size))
    assert sum(not micro for micro in micros) == max(0, len(micros) - len(sizes))
    for micro in [*micros, *cut(sizes, budget)]:
        tokens = (sum(p for _, p in {sizes[row][:2] for row in micro})
                  + sum(sizes[row][2] - 1 for row in micro))  # each prompt once
        assert packed_tokens(micro, sizes) == tokens <= budget
        assert sum(sum(sizes[row][1:]) for row in micro) <= KEYS * budget
    for of_a_round in zip(*lanes, strict=True):
        costs = [packed_tokens(micro, sizes) for micro in of_a_round]
        assert costs == sorted(costs, reverse=True)
    assert len(cut(sizes, budget + 1)) <= len(cut(sizes, budget))  # the search in balance needs it
    with pytest.raises(ValueError, match="has 401 tokens; the budget is"):
        cut([*sizes, (99, 1, 400)], budget)


def test_the_largest_micro_batch_is_as_small_as_the_rounds_allow():
    sizes = [(prompt, 1, tokens) for prompt, tokens in enumerate((30, 10, 10, 10))]
    assert balance(sizes, ranks=2, budget=61) == [[[0]], [[1, 2, 3]]]


# ---- collectives: real processes ----

def everything(world):
    """Calls every collective, and those that compare ranks with ranks that differ."""
    def fails():
        if world.rank:
            raise SettingsError(f"rank {world.rank} has no disk")

    found = [world.gather([(item, world.rank) for item in world.mine(range(7))]), world.gather([]),
             [world.any_rank(flag) for flag in (False, world.rank == 2, True)],
             world.differences({"--lr": min(world.rank, 1), "--nan": float("nan")}),
             float(world.sum(torch.tensor(world.rank + 1.0))),
             float(world.max(torch.tensor(float(world.rank)))),
             world.together(world.same_phase, "reward", 7)]
    for call in (fails,), (world.same_phase, "update", 3 - world.rank // 2):
        with pytest.raises((SettingsError, RuntimeError)) as error:
            world.together(*call)
        found.append(str(error.value))
    return found


def test_all_ranks_get_the_same_answer_of_every_collective():
    """Items in rank order; a flag, a failure or a difference of one rank is known to all; ranks
    that begin another number of micro-batches end with one error, not in a wait."""
    first, *others = ranks.results(3, everything)
    assert others == [first, first]
    *found, failed, phase = first
    assert found == [
        [*enumerate([0, 0, 0, 1, 1, 2, 2])], [], [False, True, True],
        ["--lr is 0 on rank 0 and 1 on rank 1; it must be the same on all ranks."], 6, 2, None]
    assert failed == "rank 1 has no disk"
    assert phase.endswith("[('update', -1, 3), ('update', -1, 3), ('update', -1, 2)]")


# ---- the start ----

# The environment, and what is added to it: alone, also with what another job left, or in a job of
# Slurm or MPI that has more tasks elsewhere; Kubeflow's rank on its own machine; torchrun's rank.
PLACED = """
HOME=/ | ALONE
RANK=0 MASTER_ADDR=left | ALONE
SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 | ALONE
WORLD_SIZE=1 RANK=3 OMPI_COMM_WORLD_SIZE=4 | ALONE
WORLD_SIZE=2 RANK=1 MASTER_ADDR=a MASTER_PORT=7 | LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
WORLD_SIZE=1 RANK=1 MASTER_ADDR=a MASTER_PORT=7 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
     TORCHELASTIC_RUN_ID=x | HOME=/
""".replace("ALONE", " ".join(map("=".join, dist.ALONE.items())))
LOST = """
RANK=1 | has RANK=1 and no WORLD_SIZE: .* torchrun .*=1
SLURM_STEP_NUM_TASKS=4 | has SLURM_STEP_NUM_TASKS=4 and no WORLD_SIZE: .* torchrun .*=1
OMPI_COMM_WORLD_SIZE=2 | has OMPI_COMM_WORLD_SIZE=2 and no WORLD_SIZE: .* torchrun .*=1
WORLD_SIZE=2 RANK=0 | WORLD_SIZE=2 and no MASTER_ADDR, MASTER_PORT
"""


def environ_of(text: str) -> dict[str, str]:
    """Returns the variables of "NAME=VALUE NAME=VALUE", and HOME."""
    return dict(word.split("=") for word in ["HOME=/", *text.split()])


@pytest.mark.parametrize("given, added", table(PLACED))
def test_a_process_is_the_only_rank_or_one_of_several(monkeypatch, given, added):
    """By what torchrun and schedulers set."""
    monkeypatch.setattr(os, "environ", environ_of(given))
    dist.place()
    assert os.environ == environ_of(given) | environ_of(added)


@pytest.mark.parametrize("given, words", table(LOST))
def test_a_copy_that_knows_of_no_other_is_refused(monkeypatch, given, words):
    """And what another job left."""
    monkeypatch.setattr(os, "environ", environ_of(given))
    with pytest.raises(SettingsError, match=words):
        dist.place()


def test_a_rank_that_never_comes_is_named_after_the_timeout(monkeypatch):
    port = str(ranks.free_port())
    monkeypatch.setattr(os, "environ", environ_of(
        f"WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"))
    with pytest.raises(SettingsError, match=f"within --timeout 1 s .*MASTER_PORT={port}"):
        dist.join(timeout=1)


# ---- the end ----

RESTARTED = f"""
import os, sys
sys.path.insert(0, {str(dist.__file__).removesuffix("dist.py")!r})
import dist, errors
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def main():
    world = dist.join(60.0)
    dist.Stop(world)  # a rank that has an end of its own
    if attempt == 0 and world.rank == 1:
        os.kill(os.getpid(), 9)
    if attempt == 1:
        raise errors.SettingsError("a sentence")
    if attempt == 2 and world.rank == 2:
        raise ValueError("a bug")
    print("began", *{{*world.gather([world.began])}}, flush=True)
dist.run(main)
"""


def test_a_rank_that_fails_ends_all_and_torchrun_starts_them_again(tmp_path):
    """One rank is killed, all raise the same sentence, one has a bug: the first text says why, and
    the status is that of the cause. The ranks of a restart meet, although torchrun's store
    still has the old addresses, and know when the run began."""
    (tmp_path / "main.py").write_text(RESTARTED)
    done = ranks.script("-m", "torch.distributed.run", "--local_addr=127.0.0.1",
                        "--nproc_per_node=3", "--max_restarts=3", "main.py", cwd=tmp_path)
    lines = (done.stdout + done.stderr).splitlines()
    began = [line for line in lines if line.startswith("began ")]
    assert len(began) == 3 and len({*began}) == 1, began
    # On a busy machine another rank may say that one is gone, before torchrun ends it.
    said = [line for line in lines if line in ("error: a sentence", "ValueError: a bug")]
    assert [*dict.fromkeys(said)] == ["error: a sentence", "ValueError: a bug"], done.stderr
    assert {"-9", "2", "1"} <= {*re.findall(r"exitcode: (-?\d+)", done.stderr)}, done.stderr


STUCK = f"""
import ctypes, os, sys
sys.path.insert(0, {str(dist.__file__).removesuffix("dist.py")!r})
import dist
dist.Ring.GRACE = 2
def main():
    world = dist.join(900.0)
    dist.Stop(world)
    world.barrier()
    if world.rank == 1:
        if sys.argv[1] == "raise":
            raise ValueError("a bug")
        os.kill(os.getpid(), int(sys.argv[1]))
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call waits for ever, in C
        ctypes.CDLL(None).pthread_mutex_lock(lock)
dist.run(main)
"""


@pytest.mark.parametrize("how", ["raise", "9"])
def test_a_rank_that_fails_ends_the_others_also_where_no_signal_reaches_them(how, tmp_path):
    """On two machines of two ranks, though torchrun would wait for them for an hour. The rank that
    failed says why before the others say that it did."""
    (tmp_path / "main.py").write_text(STUCK)
    agents = [subprocess.Popen(
        [ranks.PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2",
         "--local_addr=127.0.0.1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}",
         "--shutdown_timeout=3600", "main.py", how], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for port in [ranks.free_port()] * 2]
    try:
        said = [agent.communicate(timeout=ranks.LONG / 10)[0] for agent in agents]
    finally:
        for agent in filter(lambda agent: agent.poll() is None, agents):  # it waits for ever
            for process in [*psutil.Process(agent.pid).children(), agent]:
                process.kill()
    assert [agent.returncode for agent in agents] == [1, 1], said
    lines = [line for text in said for line in text.splitlines()]
    assert lines.count("error: another rank has failed, so this one exits") == 3, said
    first = [re.search("^ValueError: a bug|^error: ", text, re.M)[0] for text in said]
    assert how == "9" or "ValueError: a bug" in first, said


def patient(world) -> bool:
    """Rank 0 is busy for a while, and again after the others have ended."""
    dist.Ring.GRACE = 0.5
    time.sleep(2.0 * (world.rank == 0))
    world.end()
    if world.rank:
        os._exit(0)
    time.sleep(2.0)
    return world.ring.is_alive()


def test_a_rank_that_is_busy_or_ends_later_is_not_ended():
    assert ranks.on_ranks(3, patient) == [("ok", False), *[("killed", "")] * 2]


@pytest.mark.parametrize("ending, status, words", [
    (75, 75, ""), (KeyboardInterrupt(), 130, "interrupted. To resume: ./run.sh --name x\n"),
    (SettingsError("a sentence"), 2, "error: a sentence\n"),
    (NotWritten("a sentence"), 1, "error: a sentence\n"),
    (ValueError("a bug"), 1, r"\[rank 0\] failed:\nTraceback.*"),
    (ConnectionResetError("Connection reset by peer"), 1, r"\[rank 0\] failed:\nTraceback.*")])
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
    assert ended.value.code == status
    assert re.fullmatch(words, capsys.readouterr().err, re.DOTALL)
    assert file.exists() == isinstance(ending, Exception)
    if file.exists():
        told = json.loads(file.read_text())["message"]
        assert told["message"].endswith(str(ending))
        traced = "Traceback" in told["extraInfo"]["py_callstack"]
        assert traced != isinstance(ending, SettingsError)


def late(world, more: float) -> float:
    """Seconds until a gather ends, or fails, where rank 1 comes after 4 seconds."""
    began = time.monotonic()
    time.sleep(4.0 * world.rank)
    with suppress(RuntimeError):
        world.gather([1], more)
        return 100 + time.monotonic() - began
    return time.monotonic() - began


def test_timeout_is_the_limit_of_a_gather_and_rewards_have_their_own_beside_it():
    """torch's monitored_barrier has a limit of 30 minutes of its own."""
    (_, failed), _ = ranks.on_ranks(2, late, 0.0, timeout=2.0)
    assert 1.5 < failed < 4
    (_, passed), _ = ranks.on_ranks(2, late, 60.0, timeout=2.0)
    assert passed > 103


QUIET = f"""
import os, sys
sys.path.insert(0, {str(dist.__file__).removesuffix("dist.py")!r})
import dist
from errors import SettingsError
def main():
    world = dist.join(60.0)
    world.again = "./run.sh --name x"
    if world.rank == int(sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2])) if sys.argv[2] != "0" else None
        raise SettingsError("a sentence")
    world.barrier()
dist.run(main)
"""


@pytest.mark.parametrize("rank, number, status, said", [
    (0, 0, 2, "error: a sentence"), (1, 0, 2, "error: a sentence"),
    (1, 9, 137, "error: rank 1 was ended by SIGKILL"), (0, 2, 130, "interrupted. To resume: ")])
def test_launch_adds_nothing_to_what_the_first_rank_says(tmp_path, rank, number, status, said):
    """torchrun adds a traceback, a table and its log: 23 to 35 lines."""
    (tmp_path / "main.py").write_text(QUIET)
    done = subprocess.run(
        [sys.executable, ROOT / "tools/launch.py", "--standalone", "--nproc_per_node", "2",
         "main.py", str(rank), str(number)], cwd=tmp_path, text=True, capture_output=True,
        timeout=ranks.LONG)
    assert done.returncode == status, done.stderr
    lines = {line for line in done.stderr.splitlines() if "error: another rank" not in line}
    assert lines and all(line.startswith(said) for line in lines), done.stderr
