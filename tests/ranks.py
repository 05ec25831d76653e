"""Real ranks for tests: a function on W gloo processes, joined by the shipped `dist.join`.

A fork server has imported the libraries and grpo.py, so a rank costs a fork and not ten seconds.
"""
import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
for path in (str(HERE.parent), str(HERE)):
    if path not in sys.path:
        sys.path.insert(0, path)

from forked import PYTHON  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LONG = 900  # seconds: nothing takes so long that does not hang


def script(*words, ranks: int = 1, cwd=HERE.parent) -> subprocess.CompletedProcess:
    """A script that ran to its end with status 0; on several ranks by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([PYTHON, *(torchrun if ranks > 1 else []), *map(str, words)], cwd=cwd,
                          text=True, capture_output=True, timeout=LONG)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["ranks_preload"])
context.set_executable(PYTHON)  # it is a fork itself


def start_fork_server() -> None:
    """It does not get this sys.path, and passes over what it cannot import without a word."""
    path = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def free_port() -> int:
    """A port nobody listens on. The system gives others ports above these, at any time."""
    while True:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return s.getsockname()[1]


def rebuilt(it):
    raise AssertionError(f"FSDP would rebuild this {type(it).__name__} before every layer")


def _rank(function, rank: int, size: int, port: int, path: Path, timeout: float, args) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                      LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from torch.distributed import utils

    import dist
    torch.set_num_threads(1)
    utils.dataclasses = mock.Mock(replace=rebuilt)  # of FSDP's walk through a module's inputs
    try:
        world = dist.join(timeout)
        outcome = ("ok", function(world, *args))
        with contextlib.suppress(RuntimeError):  # all end together; some tests break that
            world.barrier()
    except BaseException:
        outcome = ("error", traceback.format_exc())
    path.write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)


def on_ranks(size: int, function, *args, timeout: float = 300.0) -> list[tuple[str, object]]:
    """function(world, *args) on `size` ranks → ("ok", result), ("error", text) or ("killed", "").
    """
    start_fork_server()
    with tempfile.TemporaryDirectory() as folder:
        port, end = free_port(), time.monotonic() + LONG
        paths = [Path(folder, str(rank)) for rank in range(size)]
        ranks = [context.Process(target=_rank, args=(
            function, rank, size, port, path, timeout, args)) for rank, path in enumerate(paths)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.1, end - time.monotonic()))
            process.kill()  # if it hangs
            process.join()
        return [pickle.loads(path.read_bytes()) if path.exists() else ("killed", "")
                for path in paths]


def results(size: int, function, *args, **options) -> list:
    """What function(world, *args) returned on each rank; AssertionError if one failed."""
    outcomes = on_ranks(size, function, *args, **options)
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "ok", f"rank {rank} of {size} {kind}:\n{value}"
    return [value for _, value in outcomes]
