"""Starts scripts without importing torch and vLLM again: a fork instead of 14 s of a core.

`python` beside this file stands for the interpreter: `tests/python grpo.py FLAGS`, torchrun with
PYTHON_EXEC=tests/python, the workers of pytest, the server of ranks.py. It passes its arguments,
environment, folder and open files to a server, which has imported the libraries and none of our
files. The server forks a keeper, and that the child, which runs the script as `__main__`. Signals
go to the child, its exit status comes back, and it dies with who asked for it. The server starts
with its first client and ends a while after its last.

A test of the start itself (imports, the parent process, variables that libraries read when they are
imported) uses the real interpreter.
"""
import array
import atexit
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
INTERPRETER = os.environ["PYTHON_OF_TESTS"] = os.path.abspath(sys.executable)  # `python` starts it
ADDRESS = Path(tempfile.gettempdir(), "forked-" + hashlib.sha1(
    f"{INTERPRETER} {HERE} {os.getuid()} {Path(__file__).stat().st_mtime_ns}".encode()
    ).hexdigest()[:12])
PYTHON = str(HERE / "python")
IDLE = 60  # seconds until a server without a client ends
LATER = (  # what libraries import in the middle of a run
    "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler", "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
    "vllm.plugins.lora_resolvers.hf_hub_resolver", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "PIL.PngImagePlugin", "tyro._backends._tyro_backend",
    "typeguard")


# ---- the client

def client() -> None:
    files = array.array("i", [0, 1, 2, *inherited()])
    connection = connect()
    request = {"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(),
               "parent": os.getppid(), "files": list(files)}
    connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    stream = connection.makefile("rwb")
    stream.write(json.dumps(request).encode() + b"\n")
    stream.flush()
    pid = int(stream.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, partial(pass_on, pid))
    status = os.waitstatus_to_exitcode(int(stream.readline() or b"9"))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def pass_on(pid: int, number: int, _) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def inherited() -> list[int]:
    """The open files that the parent passes beside the standard ones, as multiprocessing does."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # what listed them is closed again
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def connect() -> socket.socket:
    """To the server. The first client starts it."""
    with open(f"{ADDRESS}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for trial in range(2):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(ADDRESS))
                return connection
            except OSError:
                connection.close()
            if trial == 0:
                start_server()
    raise SystemExit("error: the server of tests/forked.py did not start")


def start_server() -> None:
    """It listens when it closes its standard output."""
    server = subprocess.Popen([INTERPRETER, __file__, "--serve"], start_new_session=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=open(f"{ADDRESS}.log", "w"), cwd="/")
    server.stdout.read()


# ---- the server

def preload() -> None:
    """What a run imports from libraries. It must start no thread."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_CPP_LOG_LEVEL="ERROR",
                      VLLM_LOGGING_LEVEL="ERROR", CUDA_VISIBLE_DEVICES="",
                      TORCHDYNAMO_DISABLE="1")
    sys.path[0] = str(HERE.parent)
    import vllm  # noqa: F401
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    import run  # noqa: F401
    for name in LATER:
        importlib.import_module(name)
    # vLLM does these two in each engine, and walks through all loggers and all modules.
    configure_logging_if_needed(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    for name, module in list(sys.modules.items()):  # a script imports its own files
        file = Path(getattr(module, "__file__", None) or "/")
        ours = file.is_relative_to(HERE.parent) and not file.is_relative_to(sys.prefix)
        if ours and name != "__main__":
            del sys.modules[name]
    del sys.path[0]


def serve() -> None:
    """Forks a keeper for each client. It ends when no client came for a while and none is left."""
    preload()
    gc.freeze()  # a child does not copy what it never frees
    gc.unfreeze = gc.collect  # at the end vLLM would walk through all of it twice
    ADDRESS.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(ADDRESS))
    listener.listen(64)
    listener.settimeout(IDLE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that ended are no zombies
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its starter waits for this
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            with suppress(ChildProcessError):  # no keeper is left
                os.waitpid(-1, os.WNOHANG)
                continue
            return ADDRESS.unlink()
        if not os.fork():
            listener.close()
            return keep(connection)
        connection.close()


def keep(connection) -> None:
    """Forks the child, tells its client how it ends, and kills it if the client ends first."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    request, files = receive(connection)
    pid = os.fork()
    if not pid:
        connection.close()
        return become(request, files)
    for file in files:
        os.close(file)
    connection.send(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        connection.send(f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def receive(connection) -> tuple[dict, list[int]]:
    _, [(_, _, data)], _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4 * 64))
    files = array.array("i", data)
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1 << 16)
    return json.loads(line), list(files)


def become(request: dict, files: list[int]) -> None:
    """The child is now `python *argv`."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]  # clear of all numbers
    for file in files:
        os.close(file)
    for number, copy in zip(request["files"], copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    os.chdir(request["cwd"])
    from huggingface_hub import constants  # it has read the server's variable
    constants.HF_HUB_CACHE = os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE)
    os.getppid = partial(int, request["parent"])  # the client's, as where nothing is forked
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    argv = request["argv"]
    while argv[0].startswith("-") and argv[0] not in ("-c", "-m"):  # a switch, such as -u
        argv = argv[1:]
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    status = 1
    try:
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            exec(argv[1], {"__name__": "__main__"})
        elif argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # the end of an interpreter, without its walk through all objects
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        if not stream.closed:  # what captures output may have closed it
            stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve()
    elif sys.argv[1:] == ["--help"]:
        print(__doc__)
    else:
        client()
