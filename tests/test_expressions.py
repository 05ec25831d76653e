"""Code that a model wrote, in the sandbox of examples/expressions.py: what it tries, and what is
left of it. They need `pip install sandlock`, as the example does."""
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rewards import Pool

pytest.importorskip("sandlock", reason="pip install sandlock==0.9.0")
from examples import expressions  # noqa: E402

TESTS = [[x, 3 * x + 7] for x in (0, 1, -2, 10)]
RIGHT = "\ndef f(x):\n    return 3 * x + 7\n"
TRIED = "TRIED"  # what an attempt prints if it succeeds


def attempt(code: str) -> str:
    """A program that makes an attempt and prints TRIED if that raises no error."""
    return f"import os, sys\n{code}\nprint('{TRIED}')" + RIGHT


@pytest.mark.parametrize("code, score", [
    ("3*x+7", 1), (" 7 + x*3\n", 1), (RIGHT, 1), ("import math" + RIGHT, 1), ("3*x", 0),
    ("7", 0.25), ("", 0), ("lambda", 0), ("x.y", 0), ("True", 0), ("None", 0), ("float('nan')", 0),
    ("[7, 10, 1, 37]", 0), ("def g(x): return 1", 0), ("exit()", 0), ("\ud800", 0), ("1\0", 0),
    ("'7'", 0), ("9" * 20_000, 0), ("(" * 5000, 0),
    ("import os\nos._exit(0)", 0), ("print([7, 10, 1, 37])\nimport sys\nsys.exit()", 0)])
def test_a_completion_gets_the_share_of_its_tests(code, score):
    if "print" in code:  # it would have to know the answers, which it is not given
        assert expressions.solves(code, TESTS) == 1
    else:
        assert expressions.solves(code, TESTS) == score


@pytest.mark.parametrize("code", [
    "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
    "import socket; socket.getaddrinfo('example.com', 80)[0]",
    "open('/etc/passwd').read()", "os.listdir(HERE)", "open(HERE + '/secret').read()",
    "open('/tmp/left', 'w')", "open(HERE + '/left', 'w')", "os.mkdir(HERE + '/left')",
    "os.environ['SECRET']", "open(f'/proc/{os.getppid()}/environ').read()",
    "os.kill(os.getppid(), 9)", "os.kill(PARENT, 9)", "os.kill(1, 0)", "os.killpg(PARENT, 15)",
    "os.execv('/bin/sh', ['sh', '-c', 'echo TRIED'])",
    "import subprocess; subprocess.run(['ls', HERE], check=True)",
    "bytearray(10 ** 9)", "[os.fork() for _ in range(64)]", "os.setsid()",
    "import ctypes; ctypes.string_at(0)", "[os.dup(1) for _ in range(99)]",
    "__import__('ctypes').CDLL(None).ptrace(16, PARENT, 0, 0) + 1 or 1 / 0"])
def test_what_code_tries_fails_and_costs_no_other_completion(code, tmp_path, monkeypatch):
    """Another completion is scored by the same worker after it."""
    (tmp_path / "secret").write_text("s")
    monkeypatch.setenv("SECRET", "s")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        code = code.replace("PORT", str(server.getsockname()[1])).replace(
            "PARENT", str(os.getpid())).replace("HERE", repr(str(tmp_path)))
        found = expressions.output_of(attempt(code), [0])
        assert TRIED.encode() not in found, found
    assert {path.name for path in tmp_path.iterdir()} == {"secret"}
    assert not Path("/tmp/left").exists()
    assert expressions.solves("3*x+7", TESTS) == 1


@pytest.mark.parametrize("code", [
    "while True: pass", "while True: print('a' * 10_000)", "import time; time.sleep(600)",
    "x = []\nwhile True: x.append(bytearray(10 ** 6))", "while True: os.fork()",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    "if os.fork() == 0:\n    import time; time.sleep(77.7)"])
def test_time_memory_processes_and_output_are_limited(code):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert len(expressions.output_of(attempt(code), [0])) <= expressions.OUTPUT
    assert time.monotonic() - began < expressions.SECONDS + 8  # a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert not [pid for pid in children() if "answer" in pid]


def children() -> list[str]:
    """The commands of processes that this one started."""
    found = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], text=True,
                           capture_output=True).stdout.splitlines()
    return [line for line in found if "ps -o" not in line]


def test_a_worker_that_ends_takes_its_sandbox_along():
    """The trainer kills a worker that is late."""
    code = "import time; time.sleep(88.8)"
    process = subprocess.Popen([sys.executable, "-c", (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        f"from examples import expressions\nexpressions.SECONDS = 99\nprint(1, flush=True)\n"
        f"expressions.output_of({code!r}, [0])")], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    time.sleep(1)
    process.kill()
    process.wait()
    for _ in range(100):
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline")
                if b"88.8" in read(path) and path.parent.name != str(os.getpid())]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {left}")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended
        return b""


def test_a_batch_of_attacks_and_answers_is_scored_in_order():
    import contextlib

    import fakes
    from rewards import item_of, weighted_sum
    bad = ["while True: pass", attempt("os.kill(os.getppid(), 9)"), "open('/etc/passwd').read()"]
    texts = ["3*x+7", *bad, "7", "3*x+7"]
    items = [item_of(fakes.sample(text=text)) | {"columns": {"tests": TESTS}} for text in texts]
    specs = ["examples/expressions.py:solves"]
    with contextlib.closing(Pool(specs, fakes.args(reward_timeout=60.0))) as pool:
        pool.wait()
        scores = [weighted_sum(pool.specs, found)[0] for found in pool.ask(items)]
    assert scores == [1, 0, 0, 0, 0.25, 1]
