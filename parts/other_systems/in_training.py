"""in_training.py: what a config.json asks for in training, in transformers' own, and no run here
does: dropout, noise of routers, losses that balance experts.

The gradient of a policy is that of the function which sampled, and the engine has none of these.
"""
import json
import re
from pathlib import Path

# Of the heads of classifiers, which a language model has not: not said.
KEYS = re.compile(r"(?!classifier|summary).*(drop|jitter|(aux|z|balanc\w*)_loss)")


def asked(stored) -> list[str]:
    """["KEY VALUE", …] of a config.json, in whichever of its configurations."""
    found = []
    for key, value in stored.items():
        if isinstance(value, dict):
            found += asked(value)
        elif KEYS.match(key) and type(value) in (int, float) and value > 0:
            found.append(f"{key} {value:g}")
    return found


def sentence(folder: str) -> str:
    """What a run says of a model's folder. "": it asks for nothing in training."""
    found = asked(json.loads(Path(folder, "config.json").read_text()))
    return (f"config.json asks for {', '.join(found)} in training: left out, as the engine has "
            "none of it") if found else ""
