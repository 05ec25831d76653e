"""run.sh: which GPUs a run sees, the environment that goes with them, and what set-up asks for."""
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tracked import ROOT

SMI = ["GPU 0: NVIDIA H100 (UUID: GPU-aa1)", "GPU 1: NVIDIA H100 (UUID: GPU-aa2)",
       "GPU 2: NVIDIA H100 (UUID: GPU-bc3)"]
PARTS = [SMI[0], "  MIG 1g.10gb     Device  0: (UUID: MIG-d4)",
         "  MIG 1g.10gb     Device  1: (UUID: MIG-e5)", *SMI[1:]]


def put(path: Path, *lines: str) -> None:
    """A program of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def shell(folder: Path, command: str, **env: str | None) -> subprocess.CompletedProcess:
    """A command in bash, with the folder's programs first. None: the variable is not set."""
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | env
    return subprocess.run(["bash", "-c", command], cwd=folder, text=True, capture_output=True,
                          env={name: value for name, value in env.items() if value is not None})


def counted(folder: Path, listed: list[str], values: list[str]) -> list[int]:
    """What run.sh counts for values of CUDA_VISIBLE_DEVICES, the last unset, where nvidia-smi -L
    prints the lines `listed`."""
    put(folder / "nvidia-smi", *(f"echo '{line}'" for line in listed))
    (folder / "values").write_text("".join(f"{value}\n" for value in values))
    code = re.search(r"^listed=.*?^}$", (ROOT / "run.sh").read_text(), re.M | re.S)[0]
    done = shell(folder, f"{code}\nwhile IFS= read -r CUDA_VISIBLE_DEVICES; do visible_gpus; done "
                         "<values; unset CUDA_VISIBLE_DEVICES; visible_gpus")
    assert not done.stderr
    return [*map(int, done.stdout.split())]


def test_run_sh_counts_the_gpus_that_are_visible(tmp_path, monkeypatch):
    """As torch does, which reads the variable as CUDA does."""
    values = {"": 0, "-1": 0, "0": 1, "2,1": 2, "0,1,2": 3, "0,7,1": 1, "7": 0, "0,-1,1": 1,
              "1,1": 0, "0,,1": 1, " 1, 2": 2, "NoDevFiles": 0, "GPU-aa1": 1, "GPU-b,GPU-aa2": 2,
              "GPU-aa": 0, "GPU-bc3,GPU-b": 0, "GPU-bc3,GPU-x,GPU-aa1": 1, "GPU-aa1,1": 1,
              "1,GPU-aa1": 1, "MIG-d4": 0}
    assert counted(tmp_path, SMI, [*values]) == [*values.values(), 3]
    assert counted(tmp_path, [], ["0", ""]) == [0, 0, 0]
    # CUDA shows one part of a GPU, and then nothing else.
    assert counted(tmp_path, PARTS, ["MIG-d4", "MIG-d4,MIG-e5", "MIG-x", "0,1", "1,2", "1,0"]) == [
        1, 1, 0, 1, 2, 1, 1]
    for name, value in dict(count=3, uuid=["GPU-aa1", "GPU-aa2", "GPU-bc3"]).items():
        monkeypatch.setattr(torch.cuda, f"_raw_device_{name}_nvml", lambda value=value: value)
    rng = random.Random(0)
    drawn = [",".join(rng.sample(pool, rng.randint(1, 4))) for _ in range(100) for pool in (
        ["0", " 1", "2x", "3", "11", "-1", "x", ""],
        ["GPU-aa1", "GPU-aa2", "GPU-b", "GPU-bc3", "GPU-aa", "GPU-", "0", "GPU-x", " GPU-aa1"])]
    for value, count in zip(drawn, counted(tmp_path, SMI, drawn), strict=False):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert count == torch.cuda._device_count_nvml(), value


@pytest.mark.parametrize("listed, visible, there, line, says", [
    (SMI, None, "", "", "venv nproc 3"), (SMI, "1", "", "ppo", "venv ppo.py"),
    (SMI, "", "", "", "running on the CPU, from .venv-cpu\nvenv-cpu nproc 2"),
    (SMI, "-1", "", "", "running on the CPU, from .venv-cpu\nvenv-cpu nproc 2"),
    (SMI, "0,1", "", "test", "running on the CPU, from .venv-cpu\nvenv-cpu"),
    (SMI, None, ".ready-x-gpu", "prove", "running on the CPU, from .venv-cpu\nvenv-cpu"),
    (SMI, "2", ".ready-x-gpu", "kk", "venv grpo.py"),
    ([], None, "", "test", "venv\n"), ([], "0", "", "", "venv nproc 2"),
    ([], None, ".ready-x-gpu", "", "running on the CPU, from .venv-cpu\nvenv-cpu nproc 2"),
    (SMI, "7", "", "", "error: CUDA_VISIBLE_DEVICES is 7, which leaves no GPU of those")])
def test_run_sh_takes_the_environment_of_the_gpus_that_are_visible(
        tmp_path, listed, visible, there, line, says):
    """With GPUs, what runs on the CPU has an environment of its own; without, there is one. Here
    each is installed."""
    text = (ROOT / "run.sh").read_text()
    (tmp_path / "run.sh").write_text(text.replace('[ -e "$stamp" ] && return', "return"))
    put(tmp_path / "nvidia-smi", *(f"echo '{line}'" for line in listed))
    for kind in "venv", "venv-cpu":
        for name in "python", "ruff":
            put(tmp_path / f".{kind}/bin/{name}",
                f'echo "{kind} $@" | sed "s/ tools.launch.py -.*_per_node / nproc /; s/ check.*//; '
                's/ -m .*//"')
    (tmp_path / ".venv" / (there or "x")).touch()
    done = shell(tmp_path, f"bash run.sh {line}", CUDA_VISIBLE_DEVICES=visible, RANKS=None)
    assert (done.stdout + done.stderr).startswith(says), done.stdout + done.stderr
    assert done.returncode == 2 * says.startswith("error")


@pytest.mark.parametrize("compiler, status", [("false", 2), (None, 1)])
def test_a_gpu_needs_a_compiler_and_pythons_headers(tmp_path, compiler, status):
    """Set-up says so before it downloads 4 GB. Here pip finds nothing to install. The environment
    of a machine that had no GPU is made anew, since pip would keep its CPU build of torch."""
    for name in "run.sh", "requirements.txt":
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/lib").mkdir(parents=True)
    (tmp_path / ".venv/.ready-x-cpu").touch()
    put(tmp_path / "nvidia-smi", f"echo '{SMI[0]}'")
    done = shell(tmp_path, "bash run.sh setup", CUDA_VISIBLE_DEVICES=None, CC=compiler,
                 PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == status, done.stderr
    assert ("error: a GPU needs a C compiler" in done.stderr) == (status == 2), done.stderr
    assert not (tmp_path / ".venv/.ready-x-cpu").exists()


def test_an_example_names_one_command_that_installs_its_package():
    """Without its version or --no-deps, pip may replace packages that torch and vLLM need."""
    said = {}
    for path in (ROOT / "examples").glob("*.py"):
        found = re.findall(r"pip install ((?:--no-deps )?[\w-]+(?:==[\d.]*\d)?)", path.read_text())
        said |= {path.name: set(found)} if found else {}
    assert {len(commands) for commands in said.values()} == {1}, said
    pins, = re.findall(r"PINS=\((.*)\)", (ROOT / "examples/check_environments.sh").read_text())
    assert {*pins.split()} <= set.union(*said.values()), (pins, said)
