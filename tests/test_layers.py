"""A file imports only what stands below it, so no import runs in a circle."""
import ast
from pathlib import Path

from tracked import ROOT, tracked

LAYERS = """errors/ scoring/ dist/ losses/ rewards/ data/ pictures/ trainer/ rollout/ chats/
            preflight/ keeping/ running/ grpo ppo sft distill""".split("/")  # from the lowest
PLACE = {name: i for i, names in enumerate(LAYERS) for name in names.split()}


def imported(path: Path) -> set[str]:
    """The files of this project that it imports, as "losses" or "trainer.batch"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.partition(".")[0] in PLACE}


def test_no_file_imports_what_stands_above_it_and_no_room_has_a_circle():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
             for path in tracked() if path.suffix == ".py"}
    names = {name: path for name, path in names.items() if name.partition(".")[0] in PLACE}
    below = {name: imported(path) & names.keys() for name, path in names.items()}
    assert not [(name, other) for name in names for other in below[name]
                if PLACE[other.partition(".")[0]] > PLACE[name.partition(".")[0]]]
    while free := [name for name in below if not below[name] & below.keys() - {name}]:
        below = {name: others for name, others in below.items() if name not in free}
    assert not below, "these import each other"


def test_a_folder_that_is_imported_is_a_package():
    """Without an __init__.py a user's tools.py, anywhere on the path, would hide tools/."""
    files = [path for path in tracked() if path.suffix == ".py"]
    folders, used = {path.parent.name for path in files if path.parent.parent == ROOT}, set()
    for path in files:
        if path.parent.name in ("tests", "bench"):  # they run in no user's process
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                used.add(node.module.partition(".")[0])
            if isinstance(node, ast.Import):
                used |= {alias.name.partition(".")[0] for alias in node.names}
    assert {"tools", "results", "trainer"} <= used & folders
    assert not [name for name in used & folders if not (ROOT / name / "__init__.py").exists()]
