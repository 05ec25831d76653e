"""Makes the flat top-level files importable from tests/, and keeps every test off the network."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FIRST = ("losses", "dist", "plan", "data", "rewards", "memory", "checkpoint", "same_update", "situations", "ppo", "tiny")    # the others start engines


def pytest_collection_modifyitems(items):
    """Fast ones first."""
    place = {f"test_{name}": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
