"""Answers that are code: a completion is run on hidden tests, in a sandbox.

    pip install sandlock==0.9.0
    python parts/sft/sft.py --data examples/expressions.py:lessons --name line --batch 32 --steps 60
    python grpo.py --model runs/line/model --data examples/expressions.py:rows \\
        --eval_data examples/expressions.py:held_out --reward examples/expressions.py:solves \\
        --max_tokens 16 --max_prompt_tokens 64 --steps 30

A row has `tests`, pairs [x, f(x)]. A completion is a Python expression of x, or a program with a
function f. It is told each x; what it returns is compared outside of the sandbox, so it cannot read
the answers. The reward is the share of tests that pass.

sandlock (https://pypi.org/project/sandlock) confines a process by the kernel's Landlock and
seccomp, without root, namespaces or another program: it reads only Python's own library, writes no
file, has no network and no environment, signals no other process; its seconds, memory, processes
and output are limited. A kernel that cannot do this refuses the run at its start.
"""
import json
import os
import random
import select
import sys
import time

try:
    import sandlock
except ImportError:
    raise SystemExit(
        "examples/expressions.py needs sandlock: pip install sandlock==0.9.0.") from None

SECONDS, MEMORY, PROCESSES, OUTPUT = 2.0, "256M", 4, 10_000  # of a completion; OUTPUT in bytes
RUNNER = """
import json, sys
code, given = sys.argv[1].strip(), json.loads(sys.argv[2])
try:
    body = compile(code, "answer", "eval")
    def f(x):
        return eval(body, {"x": x})
except SyntaxError:
    names = {}
    exec(compile(code, "answer", "exec"), names)
    f = names["f"]
print()
print(json.dumps([f(x) for x in given]))
"""


def output_of(code: str, given: list) -> bytes:
    """Runs a program in the sandbox, and returns the first OUTPUT bytes that it writes."""
    library = {sys.base_prefix, *filter(os.path.isdir, ("/lib", "/lib64", "/usr/lib"))}
    box = sandlock.Sandbox(
        fs_readable=sorted(library), clean_env=True, max_memory=MEMORY, max_processes=PROCESSES,
        max_open_files=32, no_coredump=True)
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", RUNNER, code, json.dumps(given)]
    mode, end, found = sandlock.StdioMode, time.monotonic() + SECONDS, b""
    with box.popen(command, stdin=mode.NULL, stdout=mode.PIPED, stderr=mode.NULL) as process:
        while len(found) < OUTPUT and select.select(
                [process.stdout], [], [], max(0, end - time.monotonic()))[0]:
            if not (more := os.read(process.stdout.fileno(), OUTPUT)):
                break
            found += more
        process.kill()
    return found[:OUTPUT]


def solves(completion, tests, **row):
    """Returns the share of the tests whose value the code returns. What it writes is not trusted:
    only its last line counts, and that must be a list of numbers."""
    if len(completion) > 10_000 or "\0" in completion:
        return 0.0
    try:
        found = json.loads(output_of(completion, [x for x, _ in tests]).splitlines()[-1])
    except (ValueError, IndexError, RecursionError):  # it wrote nothing, or something else
        return 0.0
    if not isinstance(found, list) or len(found) != len(tests):
        return 0.0
    right = [type(y) in (int, float) and y == wanted
             for y, (_, wanted) in zip(found, tests, strict=True)]
    return sum(right) / len(tests)


if output_of("x", [42]) != b"\n[42]\n":  # when the reward is loaded, so before the weights
    raise RuntimeError("this kernel cannot confine a process (sandlock needs Landlock and seccomp, "
                       "Linux 6.7 or newer), so no code of a model is run here")


# ---- a small language: lines

LINES = [(a, b) for a in range(1, 10) for b in range(1, 10) if a != b]


def question(a: int, b: int) -> dict:
    """Returns a row: its code is a*x+b."""
    return {"question": f"Line {a} {b}", "tests": [[x, a * x + b] for x in (0, 1, -2, 10)]}


def rows(seed: int) -> list[dict]:
    """Six of seven lines."""
    return [question(a, b) for i, (a, b) in enumerate(LINES) if i % 7]


def held_out(seed: int) -> list[dict]:
    """The others."""
    return [question(a, b) for i, (a, b) in enumerate(LINES) if not i % 7]


def lessons(seed: int, n: int = 2000) -> list[dict]:
    """What can be said, with a bad habit: in three of four lessons slope and start are swapped."""
    rng, found = random.Random(seed), []
    for _ in range(n):
        a, b = rng.choice([line for i, line in enumerate(LINES) if i % 7])
        code = f"{b}*x+{a}" if rng.random() < 0.75 else f"{a}*x+{b}"
        found.append({"prompt": f"Line {a} {b}", "completion": code})
    return found
