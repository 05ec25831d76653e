"""What this checkout has. A part that was deleted takes its cases with it: `./run.sh strip`."""
import json
from pathlib import Path

import pytest

from tracked import ROOT


def has(*names: str) -> bool:
    """Whether each of these parts is here."""
    return all((ROOT / place / name / "__init__.py").exists() for name in names
               for place in ("" if name == "variants" else "parts",))


def needs(*names: str):
    """The mark of a test that uses them."""
    return pytest.mark.skipif(not has(*names), reason=f"without {', '.join(names)}")


def write_run(folder: Path, metrics: list[dict], samples: dict[str, list], **args) -> Path:
    """A run's folder: args.json, metrics.jsonl, samples/NAME.jsonl."""
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": 0, "name": folder.name} | args))
    files = {"metrics": metrics} | {f"samples/{name}": rows for name, rows in samples.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
