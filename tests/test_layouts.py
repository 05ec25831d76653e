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

import pytest
import torch
from safetensors.torch import load_file

import ranks
from examples import tiny
from families import ROOT
from files import read
from forked import PYTHON
from learning import difference

SAME = "reward/mean loss/policy policy/entropy grad/norm eval/pass@1".split()
SEVEN = (352487, 510432, 294736, 375098, 519634, 541867, 826491)  # no multiple of most layouts
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SIZES = ("--batch 5 --group 4 --max_tokens 12 --max_prompt_tokens 64 --update_tokens 300 "
         "--minibatches 2 --lr 1e-3 --samples_every 1 --seed 7 --model")


def launch(folder: Path, *flags: str, ranks_each=1, machines=1) -> list[tuple[int, str]]:
    """grpo.py with tiny sizes on `machines` → (exit status, all it printed) of each.

    `{machine}` in a flag is the machine's number.
    """
    port, launched = ranks.free_port(), []
    for machine in range(machines):
        (folder / str(machine)).mkdir()
        command = (f"{PYTHON} -m torch.distributed.run --nnodes={machines} --node_rank={machine} "
                   f"--nproc_per_node={ranks_each} --master_addr=127.0.0.1 --master_port={port} "
                   f"{ROOT}/grpo.py {SIZES} {tiny.ensure(f'{ROOT}/runs')}").split()
        with open(folder / f"{machine}.log", "w") as log:
            launched.append(subprocess.Popen(
                [*command, *(flag.format(machine=machine) for flag in flags)], stdout=log,
                stderr=log, cwd=folder / str(machine), env=ENV))
    try:
        return [(process.wait(600), (folder / f"{machine}.log").read_text())
                for machine, process in enumerate(launched)]
    finally:
        for process in launched:
            process.terminate()  # torchrun ends its ranks


def run(folder: Path, *flags: str, **layout) -> tuple[list[dict], list[dict], torch.Tensor]:
    """A whole run of two steps → the rows of samples/, of metrics.jsonl, and the weights."""
    (folder / "seven.jsonl").write_text("".join(json.dumps(
        {"question": f"Sort {n}", "answer": "".join(sorted(str(n)))}) + "\n" for n in SEVEN))
    ended = launch(folder, "--steps", "2", "--eval_data", f"{folder}/seven.jsonl", *flags, **layout)
    assert not any(status for status, _ in ended), "\n".join(text[-3000:] for _, text in ended)
    written, = {path.parent for path in folder.rglob("metrics.jsonl")}
    assert written.parent == folder / "0/runs", "only rank 0 writes"
    weights = load_file(written / "model/model.safetensors")
    rows = [json.loads(line) for file in sorted((written / "samples").iterdir())
            for line in open(file)]
    for row in rows:  # the engine's log-probs differ by rounding
        row.pop("engine_logprobs", None)
    return rows, read(written / "metrics.jsonl"), torch.cat(
        [weights[name].double().flatten() for name in sorted(weights)])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run on one rank: each completion counts once, its end token is trained on, and the engine
    is the policy."""
    samples, rows, weights = run(tmp_path_factory.mktemp("one"))
    assert len(rows) == 4  # an evaluation before, one after
    assert rows[0]["eval/rows"] == rows[-1]["eval/rows"] == 7
    for row in rows[1:-1]:
        assert row["batch/trained"] + row["batch/dropped"] == row["rollout/completions"] == 20
        assert row["rollout/logprob_gap_max"] < 1e-4 and row["grad/norm"] > 0
    trained = [row for row in samples if "sampled" in row]
    ends = {row["token_texts"][-1] for row in trained if not row["truncated"]}
    assert len(trained) == 40 and {tiny.END} <= ends <= {tiny.END, tiny.END_OF_TEXT}
    return samples, rows, weights


@pytest.mark.parametrize("flags, layout", [("--tp 2", (2, 1)), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("--shard_size 1", (1, 2)), ("--shard_size 2", (2, 2)), ("--tp 2", (2, 2)),
        ("--tp 4", (4, 1)), ("", (3, 1))))])
def test_other_layouts_draw_what_one_rank_draws(tmp_path, one, flags, layout):
    """The same tokens, metrics and weights. vLLM for CPU names an engine's shared memory after its
    ranks and leaves it behind: every second run with --tp ended with "errno: 17"."""
    before = os.listdir("/dev/shm")
    samples, rows, weights = run(tmp_path, *flags.split(), ranks_each=layout[0], machines=layout[1])
    assert not [name for name in set(os.listdir("/dev/shm")) - set(before) if "cpushm" in name]
    assert samples == one[0] and difference(weights, one[2]) < 1e-5
    for ours, theirs in zip(rows, one[1], strict=True):
        expected = {name: theirs[name] for name in SAME if name in theirs}
        found = {name: ours[name] for name in expected}
        assert found and found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("flags, error", [
    ("--lr 1e-{machine}", "--lr is 1.0 on rank 0 and 0.1 on rank 1"),
    ("--save_every 1", "--save_every 1 needs a folder that all machines share")])
def test_machines_that_cannot_work_together_are_refused(tmp_path, flags, error):
    """Before anything loads."""
    ended = launch(tmp_path, *flags.split(), machines=2)
    assert all(status for status, _ in ended)
    assert ended[0][1].startswith(f"error: {error}") and not list(tmp_path.rglob("metrics.jsonl"))
