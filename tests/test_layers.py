"""A file imports only what stands below it, so no import runs in a circle. CONTRIBUTING.md draws
the house in the words with which its files begin."""
import ast
import re
from pathlib import Path

from tracked import ROOT, tracked

ORDER = """errors settings part verifiers worker dist losses rewards texts messages data batch
           family model_files model rollout plan inputs log checkpoint evaluate flags
           same_policy run grpo ppo""".split()  # the lowest first
PLACE = {name: i for i, name in enumerate(ORDER)}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
         for path in tracked() if path.suffix == ".py"}


def imported(path: Path) -> set[str]:
    """What it imports, as "losses" or "parts.carry.carry"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def parts_of(names) -> set[str]:
    """The parts of which these are files."""
    return {name.split(".")[1] for name in names if name.startswith("parts.")}


def test_a_file_imports_what_stands_before_it_alone():
    assert not [(name, other) for name in ORDER if name in FILES
                for other in imported(FILES[name]) & {*ORDER} if PLACE[other] >= PLACE[name]]
    assert not {name for name in FILES if "." not in name} - {*ORDER} - {"nano"}


def test_part_py_alone_knows_of_parts_and_a_part_of_no_other():
    for name, path in FILES.items():
        own, code = parts_of([name]), imported(path)
        if "." not in name:
            assert not parts_of(code) and "parts" not in code, name
        elif own and ".tests." not in name:
            assert parts_of(code) <= own and "parts" not in code, name


def test_the_house_is_drawn_in_the_words_with_which_its_files_begin():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = re.findall(r"^(\w+)\.py +(.+)", page.split("```")[1], re.M)
    names = [name for name, _ in drawn]
    assert names == [name for name in ORDER if name in names] + ["nano"]
    assert {*names} == {path.stem for path in ROOT.glob("*.py")}
    assert not [name for name, words in drawn
                if not (ROOT / f"{name}.py").read_text().startswith(f'"""{name}.py: {words}')]


def test_a_folder_that_is_imported_is_a_package():
    """Without an __init__.py a user's tools.py, anywhere on the path, would hide tools/."""
    files = [path for path in tracked() if path.suffix == ".py"]
    folders, used = {path.parent.name for path in files if path.parent.parent == ROOT}, set()
    for path in files:
        if path.relative_to(ROOT).parts[0] in ("tests", "bench", "docs", "which"):  # no user's
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                used.add(node.module.partition(".")[0])
            if isinstance(node, ast.Import):
                used |= {alias.name.partition(".")[0] for alias in node.names}
    assert {"tools", "examples"} <= used & folders
    assert not [name for name in used & folders if not (ROOT / name / "__init__.py").exists()]
