"""Where a run stands: launchers, variables that others have set, closed streams, disks, and files
that are not what their names say."""
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import dist
import faults
import rollout
from data import read_file
from errors import SettingsError
from examples import tiny
from families import ROOT
from model_files import find

POINTER = ("version https://git-lfs.github.com/spec/v1\n"
           f"oid sha256:{'0' * 64}\nsize 123456\n")
COPIES = """OMPI_COMM_WORLD_SIZE=2 SLURM_STEP_NUM_TASKS=4 PMI_SIZE=2 PMIX_RANK=1
    MV2_COMM_WORLD_SIZE=2 FLUX_JOB_SIZE=2 JSM_NAMESPACE_SIZE=2 PALS_RANKID=1"""
ALONE = """OMPI_COMM_WORLD_SIZE=1 SLURM_STEP_NUM_TASKS=1 PMI_SIZE=1 PMIX_RANK=0
    MV2_COMM_WORLD_SIZE=1 FLUX_JOB_SIZE=1 JSM_NAMESPACE_SIZE=1 PALS_RANKID=0"""


@pytest.mark.parametrize("given", COPIES.split())
def test_copies_of_any_launcher_are_refused(monkeypatch, given):
    """Each would be a run of its own."""
    monkeypatch.setattr(os, "environ", dict([given.split("=")]))
    with pytest.raises(SettingsError, match=f"has {given} and no WORLD_SIZE: .* torchrun"):
        dist.place()


def test_a_process_alone_in_any_launcher_is_the_only_rank(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(word.split("=") for word in ALONE.split()))
    dist.place()
    assert os.environ["WORLD_SIZE"] == "1"


def run(*words, close: str = "", **env) -> tuple[int, str]:
    """A command of a shell in which these streams are closed → status, and what it printed."""
    done = subprocess.run(["bash", "-c", f'"$@" {close}', "x", *map(str, words)], text=True,
                          capture_output=True, timeout=300, env=os.environ | env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("close", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words, right", [
    ("grpo.py --plan", 0), ("grpo.py --batch 0", 2), ("tools/samples.py nowhere", 1)])
def test_a_stream_that_is_closed_ends_nothing(close, words, right):
    script, *flags = words.split()
    status, text = run(sys.executable, ROOT / script, *flags, close=close)
    assert "Traceback" not in text and status == right, text


def test_a_path_for_cd_sends_a_job_nowhere_else(tmp_path):
    for place in tmp_path, tmp_path / "other":
        (place / "rl").mkdir(parents=True)
        first = (ROOT / "run.sh").read_text().partition("\n\n")[0]  # up to its `cd`
        (place / "rl/run.sh").write_text(f"{first}\npwd\n")
    done = subprocess.run(["bash", "rl/run.sh"], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"CDPATH": str(tmp_path / "other")})
    assert done.stdout.split()[-1] == str(tmp_path / "rl"), done.stdout + done.stderr


def test_a_notebooks_backend_draws_curves_too(tmp_path):
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import json; from tools import plot; " \
           "plot.main()"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (tmp_path / "args.json").write_text(json.dumps({"seed": 0, "script": "grpo.py"}))
    status, text = run(sys.executable, "-c", code, "--out", tmp_path / "curve.png", tmp_path,
                       MPLBACKEND="module://matplotlib_inline.nowhere")
    assert status == 0 and (tmp_path / "curve.png").exists(), text


def test_a_long_folder_for_temporary_files_names_no_socket(monkeypatch):
    for folder, there in (("/tmp", False), ("/tmp/" + "x" * 90, True)):
        monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
        monkeypatch.setattr("tempfile.tempdir", folder)
        rollout.prepare_environment(True, rollout.EngineArgs(tp=2))
        assert (os.environ.get("VLLM_RPC_BASE_PATH") == "/tmp") == there


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_has_a_tiny_model(monkeypatch, tmp_path, number):
    def none(*_):
        raise OSError(number, "no locks")
    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr("examples.tiny.build", lambda folder, task: Path(folder).mkdir())
    assert Path(tiny.ensure(str(tmp_path))).is_dir()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet",
                                  "config.json", "tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    if name.startswith("rows"):
        (tmp_path / name).write_text(POINTER)
        reads, given = read_file, str(tmp_path / name)
    else:
        reads, given = find, str(tmp_path / "model")
        shutil.copytree(faults.model(), given)
        with suppress(FileNotFoundError):
            (tmp_path / "model" / name).unlink()
        (tmp_path / "model" / name).write_text(POINTER)
    with pytest.raises(SettingsError, match=f"{name} is a pointer of git-lfs.*git lfs pull"):
        reads(given)
