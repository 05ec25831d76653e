"""Lets tests import the top-level files, keeps every test off the network and off the GPUs, sets
the order, and says at the end which promise is broken. No test may fail because the machine is
busy: limits of time are for hangs alone.
"""
import gc
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tyro._docstrings import _ClassTokenization

from house import of_a_part

torch.set_num_threads(1)  # the workers share the cores, and threads that wait for others spin

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests have more ranks than a machine has GPUs
os.environ["PYTHON_EXEC"] = str(Path(__file__).parent / "python")  # torchrun's ranks: forked.py
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in run.sh

# tyro reads the source of each class of flags again in each call: half of its time.
_ClassTokenization.make = cache(_ClassTokenization.make)
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# Fast files come first, then the longest: ./run.sh test runs three files at a time.
ORDER = ("losses", "plan", "data", "script", "faults", "same_update", "reference",
         "engine", "layouts", "situations", "prove", "nano", "ppo", "checkpoint", "dist", "packing",
         "families", "float64", "turns", "lora")


PROMISES = {  # what the tests hold: promise: its files
    "the same update on any ranks and budgets": """
        same_update ppo layouts situations packing float64 dist prove""",
    "each formula is the paper's": "losses variants reference",
    "exact resume from any kill": "checkpoint resume faults run",
    "refused before weights load, or it runs": """
        claims plan weights memory memory_tracker newcomer dry_run gpu bench_gpu""",
    "the engine is the policy": "engine families model",
    "a reward cannot hang a run": "rewards numbers",
    "every shape of row": "data rows ends",
    "a component hands on what is meant": "seams loop",
    "what a person sees": "log results",
    "the scripts and the README work": "script nano tiny host",
    "the code is written to be read, in layers": "style layers names",
    "the pages are true": "docs exercises details reports"}


def pytest_collection_modifyitems(items):
    for item in items:
        given = getattr(item, "callspec", None)
        if part := given and of_a_part([*given.params.values()]):
            item.add_marker(pytest.mark.skip(reason=f"without {part}"))
    place = {f"test_{name}": i for i, name in enumerate(ORDER)}
    items.sort(key=lambda item: place.get(item.path.stem, len(ORDER)))


def pytest_collection_finish():
    gc.freeze()  # later collections do not walk through what the libraries keep


def pytest_terminal_summary(terminalreporter):
    """The ten slowest files; the promise that each failed test breaks."""
    seconds, failed = Counter(), []
    for kind, reports in terminalreporter.stats.items():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
            if kind in ("failed", "error"):
                failed.append(report.nodeid)
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for file, spent in seconds.most_common(10):
            terminalreporter.line(f"{spent:7.1f} s  {file}")
    if failed:
        terminalreporter.section("broken promises")
    for test in failed:
        path = Path(test.partition("::")[0])
        promises = [promise for promise, files in PROMISES.items()
                    if path.stem.removeprefix("test_") in files.split()]
        promises += [f"what parts/{part}/README.md says" for part in path.parts[-3:-2]]
        terminalreporter.line(f"{promises[0] if promises else 'no promise names it'}: {test}")
