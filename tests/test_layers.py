"""A file imports only what stands below it, so no import runs in a circle. CONTRIBUTING.md draws
the house in the words with which its files begin."""
import ast
import re
from pathlib import Path

from tracked import ROOT, tracked

ORDER = """errors verifiers worker parts.turns.replies parts.judges.waiting dist losses rewards
           parts.judges.pool texts data batch family parts.pictures.eyes parts.pictures.idefics3
           parts.pictures.qwen2_vl parts.pictures.rows parts.pictures.engine
           parts.pictures.seeing parts.pictures.flags parts.experts.experts parts.states.states
           model_files model rollout parts.turns.turns parts.carry.carry parts.sft.targets
           parts.report.tokens plan inputs parts.distill.divergence parts.distill.teacher log
           parts.report.report parts.report.args parts.lora.lora parts.trial.trial
           parts.other_systems.other_systems checkpoint evaluate flags run parts.sft.supervised
           grpo ppo sft distill""".split()  # the lowest first
TOOLS = ("strip", "seams", "pages", "conftest", "pairs")  # they import no component
PLACE = {name: i for i, name in enumerate(ORDER)}


def imported(path: Path) -> set[str]:
    """The files of this project that it imports, as "losses" or "parts.carry.carry"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & PLACE.keys()


def test_a_file_imports_what_stands_before_it_alone():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
             for path in tracked() if path.suffix == ".py"}
    assert not [(name, other) for name in ORDER if name in files
                for other in imported(files[name]) if PLACE[other] >= PLACE[name]]
    house = {name for name in files if "." not in name or name.startswith("parts.")
             and ".tests." not in name and not name.endswith("__init__")}
    assert not house - PLACE.keys() - {"nano", *(f"parts.{name}" for name in TOOLS)}


def test_the_house_is_drawn_in_the_words_with_which_its_files_begin():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = re.findall(r"^(\w+)\.py +(.+)", page.split("```")[1], re.M)
    names = [name for name, _ in drawn]
    assert names == [name for name in ORDER if name in names] + ["nano"]
    assert {*names} == {path.stem for path in ROOT.glob("*.py")} - {"sft", "distill"}
    assert not [name for name, words in drawn
                if not (ROOT / f"{name}.py").read_text().startswith(f'"""{name}.py: {words}')]


def test_a_folder_that_is_imported_is_a_package():
    """Without an __init__.py a user's tools.py, anywhere on the path, would hide tools/."""
    files = [path for path in tracked() if path.suffix == ".py"]
    folders, used = {path.parent.name for path in files if path.parent.parent == ROOT}, set()
    for path in files:
        if path.relative_to(ROOT).parts[0] in ("tests", "bench", "docs"):  # no user's process
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                used.add(node.module.partition(".")[0])
            if isinstance(node, ast.Import):
                used |= {alias.name.partition(".")[0] for alias in node.names}
    assert {"tools", "examples"} <= used & folders
    assert not [name for name in used & folders if not (ROOT / name / "__init__.py").exists()]
