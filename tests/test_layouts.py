"""The whole script on 1, 2 and 3 ranks: the same completions, token for token (CPU, float32, the engine included).

A request has its own seed and the update is the same to rounding, so a run's samples do not depend on the layout. Rounding may in
the end turn a token, so this is asked of the first steps only: step 1 comes after one update on each layout.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from ranks import free_port

ROOT = Path(__file__).parent.parent


def run(folder: Path, size: int, steps: int, seed: int) -> list[str]:
    """The files that a run of `grpo.py` on `size` ranks wrote about its completions, one text a step."""
    name = f"seed{seed}_ranks{size}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}", f"--master_port={free_port()}", str(ROOT / "grpo.py"),
               "--batch", "5", "--group", "4", "--steps", str(steps), "--max_tokens", "12", "--max_prompt_tokens", "64", "--seed", str(seed),
               "--samples_every", "1", "--name", name, "--no-export", "--update_tokens", "300", "--minibatches", "2",
               "--model", tiny.ensure(str(ROOT / "runs")), "--lr", "1e-3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    files = sorted((folder / "runs" / name / "samples").glob("step_*"))
    assert len(files) == steps, files
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    assert all(row["grad/norm"] > 0 for row in rows if "grad/norm" in row)
    return [file.read_text() for file in files]


def test_two_ranks_draw_what_one_draws(tmp_path):
    one, two = run(tmp_path, 1, 2, seed=0), run(tmp_path, 2, 2, seed=0)
    assert one == two and one[0] != one[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed, steps", [(0, 5)] + [(seed, 2) for seed in range(1, 10)])
def test_any_ranks_draw_what_one_draws(tmp_path, seed, steps):
    one = run(tmp_path, 1, steps, seed)
    for size in (2, 3):
        assert run(tmp_path, size, steps, seed) == one
