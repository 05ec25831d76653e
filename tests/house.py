"""What this checkout has: `rm -r parts/NAME` removes a part, and its cases go with it.

`module` has a stand-in for a module that is gone: a test that asks it for something is skipped. A
case whose parameters name such a part is skipped by conftest.py, `kept` leaves it out of a table,
and `needs("lora")` is the mark of a test.
"""
import base64
import gzip
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tracked import ROOT

WORDS = {  # in a case: what says that it is of a part
    "carry": "carr(y|ied)",
    "distill": "distill|teacher",
    "experts": "experts|mixtral|olmoe|moe|mellum|A3B|replay_routing|freeze_router",
    "judges": "async def|reward_retries",
    "lora": "lora|'rank'",
    "pictures": r"pictures?\b|vision|squares|idefics|_vl\b|image|sees",
    "report": "report",
    "sft": r"\bsft\b",
    "states": r"qwen3[._]5|linear_attention",
    "turns": r"reply|turns|turn_credit|environment|examples/(again|doors|guess)|\b(game|doors)\b",
    "trial": "worst_case",
    "other_systems": "other_systems",
    "variants": "variants|often"}


def has(*names: str) -> bool:
    """Whether each of these parts is here."""
    return all((ROOT / ("" if name == "variants" else "parts") / name / "__init__.py").exists()
               for name in names)


GONE = [name for name in WORDS if not has(name)]


def needs(*names: str):
    """The mark of a test that uses them."""
    return pytest.mark.skipif(not has(*names), reason=f"without {', '.join(names)}")


def of_a_part(case) -> str | None:
    """The part that is gone and that a case names."""
    said = str(case)
    return next((name for name in GONE if re.search(WORDS[name], said, re.I)), None)


def kept(cases):
    """A list, or a dictionary, of cases, without those of parts that are gone."""
    if isinstance(cases, dict):
        return {name: case for name, case in cases.items() if not of_a_part((name, case))}
    return [case for case in cases if not of_a_part(case)]


class Gone:
    """In the place of a module that was deleted. It is false."""

    def __init__(self, name: str):
        self.name = name

    def __bool__(self):
        return False

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest looks at it
            raise AttributeError(attribute)
        pytest.skip(f"without {self.name}", allow_module_level=True)


def module(name: str) -> ModuleType | Gone:
    """module("parts.lora.lora")."""
    there = (ROOT / f"{name.replace('.', '/')}.py").exists()
    return importlib.import_module(name) if there else Gone(name)


def adapters(args):
    """The LoRA flags of a script's Args. None: all weights are trained."""
    flags = getattr(args.parts, "lora", None)
    return flags if flags and flags.lora_rank else None


QUIET = ("--no-report",) if has("report") else ()
WHERE = {"grpo": "grpo", "ppo": "ppo", "sft": "parts.sft.sft", "distill": "parts.distill.distill"}
SCRIPTS = {name: module(where) for name, where in WHERE.items() if module(where)}


def write_run(folder: Path, metrics: list[dict], samples: dict[str, list], **args) -> Path:
    """A run's folder: args.json, metrics.jsonl, samples/NAME.jsonl."""
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": 0, "name": folder.name} | args))
    files = {"metrics": metrics} | {f"samples/{name}": rows for name, rows in samples.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def parts(page: Path) -> tuple[dict, list]:
    """The data of a page: its head, its blocks; None for one that is left out."""
    def unpacked(text: str):
        return json.loads(gzip.decompress(base64.b64decode(text)))

    data = json.loads(re.search('<script id="data"[^>]*>(.*?)</script>', page.read_text())[1])
    return unpacked(data["head"]), [unpacked(x) if x else None for x in data["blocks"]]
