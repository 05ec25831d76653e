"""Lets tests import the top-level files, keeps every test off the network and off the GPUs, and
sets the order. A test that wants a GPU gives its own process CUDA_VISIBLE_DEVICES.

No test may fail because the machine is busy. Limits of time are for hangs alone.
"""
import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # two workers share the cores, and threads that wait for others spin

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests have more ranks than a machine has GPUs
os.environ["PYTHON_EXEC"] = str(Path(__file__).parent / "python")  # torchrun's ranks: forked.py
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in run.sh

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# Fast files come first, then the longest: ./run.sh test runs two files at a time.
ORDER = ("sizes", "losses", "plan", "data", "script", "faults", "same_update", "reference",
         "engine", "layouts", "situations", "prove", "nano", "ppo", "checkpoint", "dist", "packing",
         "families", "float64", "turns", "lora")


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(ORDER)}
    items.sort(key=lambda item: place.get(item.path.stem, len(ORDER)))
