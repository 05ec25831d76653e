"""What this checkout has. A part that was deleted takes its cases with it: `./run.sh strip`."""
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tracked import ROOT


def has(*names: str) -> bool:
    """Whether each of these parts is here."""
    return all((ROOT / place / name / "__init__.py").exists() for name in names
               for place in ("" if name == "variants" else "parts",))


def needs(*names: str):
    """The mark of a test that uses them."""
    return pytest.mark.skipif(not has(*names), reason=f"without {', '.join(names)}")


def module(name: str) -> ModuleType | None:
    """module("parts.lora.lora"), module("sft"): None where the part was deleted."""
    there = (ROOT / f"{name.replace('.', '/')}.py").exists()
    return importlib.import_module(name) if there else None


SCRIPTS = {name: module(name) for name in ("grpo", "ppo", "sft", "distill") if module(name)}


def write_run(folder: Path, metrics: list[dict], samples: dict[str, list], **args) -> Path:
    """A run's folder: args.json, metrics.jsonl, samples/NAME.jsonl."""
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": 0, "name": folder.name} | args))
    files = {"metrics": metrics} | {f"samples/{name}": rows for name, rows in samples.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
