"""Lets tests import the top-level files, keeps every test off the network, and sets the order."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# These come first, because they are fast. The others start engines.
FIRST = ("sizes", "losses", "dist", "plan", "data", "rewards", "memory", "checkpoint",
         "same_update", "situations", "ppo", "tiny")


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
