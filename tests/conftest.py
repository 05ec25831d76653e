"""Lets tests import the top-level files, keeps every test off the network and off the GPUs, sets
the order of the files, and says at the end of each promise whether it holds. No test may fail
because the machine is busy: limits of time are for hangs alone.
"""
import gc
import os
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from tyro._docstrings import _ClassTokenization

from forked import PYTHON

torch.set_num_threads(1)  # the workers share the cores, and threads that wait for others spin

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests have more ranks than a machine has GPUs
os.environ["PYTHON_EXEC"] = PYTHON  # torchrun's ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in run.sh
os.environ.pop("STARTED_AS", None)  # ./run.sh test's own: a run would print it as its command

# tyro reads the source of each class of flags again in each call: half of its time.
_ClassTokenization.make = cache(_ClassTokenization.make)
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow],
                          database=None)  # collecting writes no .hypothesis
settings.load_profile("any speed")

# Each promise of the README, in its words and first; then those of the other pages; and the files
# test_NAME.py that prove it. A file proves one promise, so a failure breaks one by name. The tests
# of parts/NAME prove what its README.md says.
PROMISES = {
    "The same update on any layout": "update layouts float64 prove left_out",
    "A plan before anything loads": "plan claims memory gpu",
    "Exact resume": "resume life",
    "Each formula is the paper's": "losses",
    "The engine is the policy": "engine model",
    "A reward cannot hang a run, and nothing that a model wrote is executed but in a sandbox":
        "rewards numbers doors lake expressions",
    "Each row and template is read as transformers reads it, or refused":
        "rows convert ends dates columns brought",
    "A run does what its flags say, and shows what it did":
        "run set_up compare tiny nano words surroundings",
    "No rank decides alone, and a rank that fails ends all": "dist",
    "The pages are true (./run.sh walk types what they say)":
        "pages drawn walk exercises bench_gpu calls first_hour host faults",
    "The code is written to be read, in layers": "style"}


def name_of(nodeid: str) -> str:
    """The NAME of the file test_NAME.py of a test's id."""
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_")


def promise_of(nodeid: str) -> str:
    """The promise that a test proves, from the file in its id."""
    if nodeid.startswith("parts/"):
        return f"What parts/{nodeid.split('/')[1]}/README.md says"
    return next((promise for promise, files in PROMISES.items()
                 if name_of(nodeid) in files.split()), "No promise names them")


def pytest_collection_modifyitems(items):
    """The longest files come first: ./run.sh test runs three files at a time."""
    first = "life run resume update order engine loggers model pages rows".split()
    items.sort(key=lambda item: [*first, name_of(item.nodeid)].index(name_of(item.nodeid)))


def pytest_collection_finish():
    gc.freeze()  # later collections do not walk through what the libraries keep


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Prints of each promise whether it holds, how many tests passed, their seconds, the tests that
    break it, and why others were skipped. It holds only if all its files ran, whole. Under
    pytest-xdist the process that prints has the reports of all workers."""
    part = (exitstatus > 1 or config.option.keyword or config.option.maxfail
            or any("::" in word for word in config.args))
    seconds, passed, broken = Counter(), defaultdict(list), defaultdict(list)
    skipped = defaultdict(Counter)  # {promise: {why: how many tests}}
    for outcome, reports in terminalreporter.stats.items():
        for report in reports if outcome in ("", "passed", "failed", "error", "skipped") else ():
            promise = promise_of(report.nodeid)
            if outcome == "skipped":
                skipped[promise][report.longrepr[2].removeprefix("Skipped: ")] += 1
            seconds[promise] += getattr(report, "duration", 0.0)
            if outcome in ("failed", "error"):
                broken[promise].append(report.nodeid)
            if outcome == "passed":
                passed[promise].append(name_of(report.nodeid))
    if not seconds:
        return
    terminalreporter.section("promises")
    for promise in dict.fromkeys([*PROMISES, *sorted(seconds)]):
        missing = {*PROMISES.get(promise, "").split()} - {*passed[promise]}
        state = ("BROKEN" if broken[promise] else "not asked" if not passed[promise] else
                 "in part" if missing or part or skipped[promise] else "holds")
        terminalreporter.line(f"{state:9} {seconds[promise]:6.1f} s  {promise} "
                              f"({len(passed[promise])} tests)")
        for why, count in skipped[promise].items():
            terminalreporter.line(f"{'':20}{count} skipped: {why}")
        for nodeid in broken[promise]:
            terminalreporter.line(f"{'':20}{nodeid}")
