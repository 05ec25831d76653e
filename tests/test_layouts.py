"""The whole script on other ranks, machines, shardings and engines draws the same completions.

Token for token, on CPU in float32, with the engine. A request has its own seed and the update is
the same but for rounding. Rounding may turn a token in the end, so only the first steps are
compared: step 1 comes after one update on each layout.

A machine is one `torchrun --nnodes N --node_rank K` on the loopback, in its own folder.
"""
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import ranks
from examples import tiny
from forked import PYTHON
from learning import difference

ROOT = Path(__file__).parent.parent
SAME = ("reward/mean", "loss/policy", "policy/entropy", "grad/norm", "eval/pass@1")
SEVEN = (352487, 510432, 294736, 375098, 519634, 541867, 826491)  # no multiple of most layouts
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Ran(NamedTuple):
    """What a run wrote: its samples, one text a step and evaluation; metrics; exported weights."""
    samples: list[str]
    rows: list[dict]
    weights: torch.Tensor


def launch(folder: Path, *flags: str, ranks_each=1, machines=1,
           script="grpo.py") -> list[tuple[int, str]]:
    """A script with tiny sizes on `machines` → (exit status, all it printed) of each.

    `{machine}` in a flag is the machine's number.
    """
    flags = ["--batch", "5", "--group", "4", "--max_tokens", "12", "--max_prompt_tokens", "64",
             "--update_tokens", "300", "--minibatches", "2", "--lr", "1e-3", "--samples_every", "1",
             "--model", tiny.ensure(str(ROOT / "runs")), *flags]
    (folder / "data").mkdir()
    (folder / "data/seven.jsonl").write_text("".join(json.dumps(
        {"question": f"Sort {n}", "answer": "".join(sorted(str(n)))}) + "\n" for n in SEVEN))
    port, launched = ranks.free_port(), []
    for machine in range(machines):
        (folder / str(machine)).mkdir()
        command = [
            PYTHON, "-m", "torch.distributed.run", f"--nnodes={machines}",
            f"--node_rank={machine}", f"--nproc_per_node={ranks_each}", "--master_addr=127.0.0.1",
            f"--master_port={port}", ROOT / script, *(f.format(machine=machine) for f in flags)]
        with open(folder / f"{machine}.log", "w") as log:
            launched.append(subprocess.Popen(command, cwd=folder / str(machine), stdout=log,
                                             stderr=log, env=ENV))
    try:
        return [(process.wait(600), (folder / f"{machine}.log").read_text())
                for machine, process in enumerate(launched)]
    finally:
        for process in launched:
            process.terminate()  # torchrun ends its ranks


def run(folder: Path, *flags: str, ranks_each=1, machines=1, steps=2) -> Ran:
    """A whole run, and what must be so on any layout."""
    ended = launch(folder, "--steps", str(steps), "--eval_data", str(folder / "data/seven.jsonl"),
                   *flags, ranks_each=ranks_each, machines=machines)
    assert not any(status for status, _ in ended), "\n".join(text[-3000:] for _, text in ended)
    written = [path.parent for path in folder.rglob("metrics.jsonl")]
    assert len(written) == 1 and written[0].parent == folder / "0/runs", "only rank 0 writes"
    rows = [json.loads(line) for line in open(written[0] / "metrics.jsonl")]
    files = sorted((written[0] / "samples").iterdir())
    assert len(rows) == len(files) == steps + 2  # an evaluation before, one after
    assert rows[0]["eval/rows"] == rows[-1]["eval/rows"] == 7
    for row in rows[1:-1]:  # each completion counts once
        assert row["batch/trained"] + row["batch/dropped"] == row["rollout/completions"] == 20
        assert row["rollout/logprob_gap_max"] < 1e-4, "the engine is not the policy"
    weights = load_file(written[0] / "model/model.safetensors")
    weights = torch.cat([weights[name].double().flatten() for name in sorted(weights)])
    return Ran([drawn(file) for file in files], rows, weights)


def drawn(file: Path) -> str:
    """A file of samples/ without the engine's log-probs: they differ by rounding."""
    rows = [json.loads(line) for line in open(file)]
    return "".join(json.dumps({key: row[key] for key in row if key != "engine_logprobs"}) + "\n"
                   for row in rows)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Ran:
    """A run on one rank."""
    ran = run(tmp_path_factory.mktemp("one"))
    assert len(set(ran.samples)) == 4 and all(row["grad/norm"] > 0 for row in ran.rows[1:-1])
    return ran


def same(ran: Ran, one: Ran) -> None:
    assert ran.samples == one.samples
    for ours, theirs in zip(ran.rows, one.rows, strict=True):
        numbers, expected = ({name: row[name] for name in SAME if name in row}
                             for row in (ours, theirs))  # the loss is a sum of terms near 0.1
        assert expected and numbers == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert difference(ran.weights, one.weights) < 1e-5


@pytest.mark.slow
def test_two_machines_with_a_copy_of_the_weights_each(tmp_path, one):
    same(run(tmp_path, "--shard_size", "1", machines=2), one)


def test_an_engine_of_two_ranks(tmp_path, one):
    """vLLM for CPU names an engine's shared memory after its ranks and leaves it behind: every
    second run with --tp ended with "errno: 17"."""
    before = os.listdir("/dev/shm")
    same(run(tmp_path, "--tp", "2", ranks_each=2), one)
    assert not [name for name in set(os.listdir("/dev/shm")) - set(before) if "cpushm" in name]


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each, machines, flags", [
    (1, 2, ()), (2, 2, ("--shard_size", "2")), (2, 2, ("--tp", "2")), (4, 1, ("--tp", "2")),
    (4, 1, ("--tp", "4"))])
def test_other_layouts_draw_what_one_rank_draws(tmp_path, one, ranks_each, machines, flags):
    same(run(tmp_path, *flags, ranks_each=ranks_each, machines=machines), one)


@pytest.mark.slow
@pytest.mark.parametrize("seed, steps", [(0, 5)] + [(seed, 2) for seed in range(1, 10)])
def test_any_ranks_draw_what_one_draws(tmp_path, seed, steps):
    ran = {}
    for size in (1, 2, 3):
        (tmp_path / str(size)).mkdir()
        ran[size] = run(tmp_path / str(size), "--seed", str(seed), ranks_each=size, steps=steps)
    same(ran[2], ran[1])
    same(ran[3], ran[1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each, flags, error", [
    (1, ("--lr", "1e-{machine}"), "--lr is 1.0 on rank 0 and 0.1 on rank 1"),
    (1, ("--save_every", "1"), "--save_every 1 needs a folder that all machines share")])
def test_machines_that_cannot_work_together_are_refused(tmp_path, ranks_each, flags, error):
    """Before anything loads."""
    ended = launch(tmp_path, *flags, ranks_each=ranks_each, machines=2)
    assert all(status for status, _ in ended)
    assert ended[0][1].startswith(f"error: {error}") and not list(tmp_path.rglob("metrics.jsonl"))
