"""dist.py: the splits as pure functions (any sizes), and the collectives (real gloo processes)."""
import os
import socket
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dist
import forked
import ranks
from batch import KEYS, Batch, balance, cut, packed_tokens
from dist import assert_divisible, share
from errors import SettingsError
from learning import fabricate

# ---- share ----

@given(st.integers(0, 500), st.integers(1, 70))
def test_share_gives_every_item_once_in_order_and_evenly(n, ranks):
    items = list(range(n))
    parts = [items[share(n, ranks, rank)] for rank in range(ranks)]
    assert [i for part in parts for i in part] == items
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_assert_divisible_names_the_numbers_and_values_that_work():
    assert assert_divisible(12, 4, "--batch", "ranks") == 3
    with pytest.raises(SettingsError, match="--batch is 512 and ranks is 6") as caught:
        assert_divisible(512, 6, "--batch", "ranks")
    assert str(caught.value).endswith("work: --batch 510 or 516, or ranks 4 or 8.")


# ---- balance ----

# Groups of a prompt's length and its completions' lengths → (prompt's number, prompt, completion).
groups = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 20), min_size=1,
                                                         max_size=9)), max_size=20)


def rows_of(groups) -> list[tuple[int, int, int]]:
    return [(g, p, c) for g, (p, completions) in enumerate(groups) for c in completions]


def computed(micro, sizes) -> int:
    """The tokens of a micro-batch, by its definition."""
    return (sum(p for _, p in {sizes[r][:2] for r in micro})
            + sum(sizes[r][2] - 1 for r in micro))


@settings(max_examples=150)
@given(groups, st.integers(60, 400))
def test_cut_keeps_the_budget_and_every_row(groups, budget):
    sizes = rows_of(groups)
    micros = cut(sizes, budget)
    assert sorted(i for micro in micros for i in micro) == list(range(len(sizes)))
    for micro in micros:
        assert micro and packed_tokens(micro, sizes) == computed(micro, sizes) <= budget
        assert sum(sum(sizes[r][1:]) for r in micro) <= KEYS * budget
    assert len(cut(sizes, budget + 1)) <= len(micros)  # the search in balance needs it
    with pytest.raises(ValueError, match=f"row {len(sizes)} has 401 tokens; the budget is"):
        cut([*sizes, (99, 1, 400)], budget)


@settings(max_examples=200)
@given(groups, st.integers(1, 9), st.integers(60, 400))
def test_balance(groups, ranks, budget):
    sizes = rows_of(groups)
    lanes = balance(sizes, ranks, budget)
    rows = [i for lane in lanes for micro in lane for i in micro]
    assert sorted(rows) == list(range(len(sizes)))  # every row exactly once
    # As many micro-batches on every rank.
    assert len(lanes) == ranks and len({len(lane) for lane in lanes}) == 1 and lanes[0]
    assert all(computed(micro, sizes) <= budget for lane in lanes for micro in lane)
    empty = sum(not micro for lane in lanes for micro in lane)
    # Padding only where there are fewer rows than micro-batches.
    assert empty == max(0, len(lanes[0]) * ranks - len(sizes))
    # And no more micro-batches than the budget asks for.
    assert len(lanes[0]) == max(1, -(-len(cut(sizes, budget)) // ranks))
    assert balance(sizes, ranks, budget) == lanes
    # In a round the largest comes first: no rank has all of them only by its number.
    for micros in zip(*lanes, strict=True):
        costs = [computed(micro, sizes) for micro in micros]
        assert costs == sorted(costs, reverse=True)


def test_the_largest_micro_batch_is_as_small_as_the_rounds_allow():
    sizes = [(prompt, 1, tokens) for prompt, tokens in enumerate((30, 10, 10, 10))]
    assert balance(sizes, ranks=2, budget=61) == [[[0]], [[1, 2, 3]]]


@given(st.integers(0, 60), st.integers(1, 9))
def test_minibatches_are_fixed_by_request_order(n, count):
    batch = Batch(fabricate("plain", n, group=1))
    parts = batch.minibatches(count, 2)
    assert parts[:count] == parts[count:]
    parts = parts[:count]
    assert len(parts) == count and [r for part in parts for r in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ---- collectives: real processes ----

def everything(world):
    """Every collective once, on any number of ranks."""
    import torch
    requests = [f"request {i}" for i in range(2 * world.size + 1)]
    mine = world.mine(requests)
    world.same_phase("rollout", 3)
    return dict(
        gathered=world.gather([(text, world.rank) for text in mine]), nothing=world.gather([]),
        any_rank=[world.any_rank(flag) for flag in (False, world.rank == world.size - 1, True)],
        differences=world.differences({"--lr": 1e-3 if world.rank == 0 else 2e-3, "--batch": 8,
                                       "--betas": (0.9, float("nan"))}),
        sum=float(world.sum(torch.tensor(world.rank + 1.0, dtype=torch.float64))),
        empty_sum=world.sum(torch.zeros(0)).numel(),
        max=float(world.max(torch.tensor(float(world.rank)))))


@pytest.mark.parametrize("size", [1, 3])
def test_collectives(size):
    answers = ranks.results(size, everything)
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    texts, owners = zip(*answer["gathered"], strict=True)
    assert list(texts) == [f"request {i}" for i in range(2 * size + 1)]  # in request order
    assert list(owners) == [r for r in range(size) for _ in range(2 + (r == 0))]
    assert answer["differences"] == (["--lr is 0.001 on rank 0 and 0.002 on rank 1; it must be the "
                                      "same on all ranks."] if size > 1 else [])
    assert answer["nothing"] == [] and answer["any_rank"] == [False, True, True]
    assert answer["sum"] == size * (size + 1) / 2 and answer["empty_sum"] == 0
    assert answer["max"] == size - 1


def disagree(world, words):
    """Each `words` entry is the (phase, step, count) of every rank → the errors of this rank."""
    errors = []
    for entry in words:
        phase, world.step, count = entry[world.rank]
        try:
            world.same_phase(phase, count)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_disagree_are_both_named():
    """Another number of micro-batches, another phase, another step: no hang, the same error."""
    ok, behind = ("update", 4, 2), ("update", 5, 2)
    words = [(ok, ok, ("update", 4, 3)), (ok, ("old logprobs", 4, 2), ok),
             (("update", 10**9, 10**6), behind, behind), (ok, ok, ok)]
    errors = ranks.results(3, disagree, words)
    assert errors[0] == errors[1] == errors[2] and errors[0].pop() == ""
    for text, phases in zip(errors[0], words, strict=False):
        assert text.startswith("ranks disagree: ") and text.endswith(f" {list(phases)}"), text


# ---- start and end ----

KUBEFLOW = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
LAUNCHED = KUBEFLOW | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize("given, expected", [
    ({}, dist.ALONE), ({"RANK": "0", "MASTER_ADDR": "left"}, dist.ALONE),
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, dist.ALONE),
    ({"WORLD_SIZE": "1", "RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, dist.ALONE),
    (KUBEFLOW, KUBEFLOW | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}), (LAUNCHED, LAUNCHED),
    (LAUNCHED | {"WORLD_SIZE": "1"}, LAUNCHED | {"WORLD_SIZE": "1"})])
def test_a_process_that_nobody_made_a_rank_is_the_only_one(monkeypatch, given, expected):
    environ = dict(given)
    monkeypatch.setattr(os, "environ", environ)
    dist.place()
    assert environ == given | expected


@pytest.mark.parametrize("given", ["RANK=1", "SLURM_STEP_NUM_TASKS=4", "OMPI_COMM_WORLD_SIZE=2"])
def test_copies_that_would_not_know_of_each_other_are_refused(monkeypatch, given):
    monkeypatch.setattr(os, "environ", dict([given.split("=")]))
    with pytest.raises(SettingsError, match=f"has {given} and no WORLD_SIZE: .* torchrun .*=1"):
        dist.place()


def test_what_another_job_left_is_refused(monkeypatch):
    given = {"WORLD_SIZE": "2", "RANK": "0"}
    monkeypatch.setattr(os, "environ", given)
    with pytest.raises(SettingsError, match="WORLD_SIZE=2 and no MASTER_ADDR, MASTER_PORT"):
        dist.place()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(SettingsError, match=f"met within --timeout 1 s .*MASTER_PORT={port}"):
        dist.join(timeout=1)


RESTARTED = f"""
import os, sys, time
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


def test_torchrun_starts_ranks_again_and_one_rank_says_why_they_ended(tmp_path):
    """The store of torchrun still has the addresses of the ranks that ended."""
    (tmp_path / "main.py").write_text(RESTARTED)
    done = subprocess.run(
        [forked.PYTHON, "-m", "torch.distributed.run", "--local_addr=127.0.0.1",
         "--nproc_per_node=3", "--max_restarts=3", "main.py"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        env=os.environ | {"PYTHON_EXEC": forked.PYTHON, "OMP_NUM_THREADS": "1"})
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    began = [line for line in lines if line.startswith("began ")]
    assert len(began) == 3 and len({*began}) == 1, done.stdout
    said = [line for line in lines if line.startswith(("error: ", "[rank "))]
    assert [*dict.fromkeys(said)] == ["error: a sentence", "[rank 2] failed:"], done.stdout
