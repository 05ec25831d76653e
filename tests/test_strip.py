"""./run.sh strip: what is left after a part is deleted. The command is tried on a small house, and
on this one."""
import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples import tiny
from forked import PYTHON
from tracked import ROOT, tracked

HOUSE = {
    "parts/seams.py": '''PARTS = {
    "wings": {"files": ["fly.py"], "words": ["airborne"]},
    "fins": {},
    "parts": {"folder": "parts", "files": ["tests/test_strip.py"]},
}
SEAMS = {
    "wings": [("core.py", "from parts.wings import flap\\n", ""),
              ("core.py", "    go = flap(walk)\\n", "    go = walk\\n")],
    "fins": [
        ("core.py", "DEPTH = 7  # of fins\\n", "")],
    "parts": [("run.sh", "  strip) python3 parts/strip.py ;;\\n", "")],
}
''',
    "parts/wings/__init__.py": "def flap(f):\n    return f\n", "parts/fins/__init__.py": "",
    "fly.py": "WINGSPAN = 3\n", "nano.py": "\n",
    "core.py": ("from parts.wings import flap\n\nDEPTH = 7  # of fins\n\n\ndef walk():\n"
                "    go = flap(walk)\n    return go\n"),
    "run.sh": ("# ./run.sh fly [FLAGS]   with fly.py\n#    far\n# ./run.sh walk\ncase x in\n"
               "  fly)   train fly.py\n         land ;;\n"
               "  walk)  train core.py ;;\n  strip) python3 parts/strip.py ;;\n  *) ;;\nesac\n"),
    "results/fly.json": '{"command": "./run.sh fly --fast"}',
    "results/walk.json": '{"command": "./run.sh walk"}',
    "tests/test_strip.py": "", "picture.png": "\udcff\n",
    "README.md": """# A house

`walk()` is the core. `flap()` makes it fly, and `fly.py` is a script. What is airborne is fast. The
end.

## Flight

* `WINGSPAN` is a name, [fly](fly.py) another.
* See [fly](fly.py).

```
./run.sh fly   # in the air
```

| name | what |
|---|---|
| `flap()` | flies |
| `walk()` | walks; with `fly.py` it flies |

## Last

Read `walk`, `flap`, `DEPTH`.
"""}


@pytest.fixture
def house(tmp_path) -> Path:
    """A small house, in a checkout of git."""
    for name, text in HOUSE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    for name in ("strip.py", "pages.py"):
        shutil.copy(ROOT / "parts" / name, tmp_path / "parts")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    for words in "init -q", "add -A", "-c user.name=x -c user.email=x@y commit -qm x":
        subprocess.run(["git", *words.split()], cwd=root, check=True)


def strip(root: Path, *words: str, answer: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "parts/strip.py", *words], cwd=root, input=answer,
                          capture_output=True, text=True)


def test_a_part_goes_with_its_seams_its_job_and_what_pages_say_of_it(house):
    assert strip(house, "wings", answer="n\n").returncode == 1  # nothing yet
    assert (house / "parts/wings").exists()
    done = strip(house, "wings", answer="y\n")
    assert done.returncode == 0 and "./run.sh test" in done.stdout, done.stderr
    assert not (house / "parts/wings").exists() and not (house / "fly.py").exists()
    assert [path.name for path in house.glob("results/*")] == ["walk.json"]
    text = {name: (house / name).read_text() for name in ("core.py", "run.sh", "README.md")}
    assert text["core.py"] == (
        "\nDEPTH = 7  # of fins\n\n\ndef walk():\n    go = walk\n    return go\n")
    assert text["run.sh"] == ("# ./run.sh walk\ncase x in\n  walk)  train core.py ;;\n"
                              "  strip) python3 parts/strip.py ;;\n  *) ;;\nesac\n")
    assert text["README.md"] == """# A house

`walk()` is the core. The end.

## Flight

| name | what |
|---|---|
| `walk()` | walks |

## Last

Read `walk`, `DEPTH`.
"""
    assert "wings" not in (house / "parts/seams.py").read_text()
    assert (house / "picture.png").read_bytes() == b"\xff\n"
    commit(house)
    assert "wings is no part" in strip(house, "wings", "--yes").stderr
    listed = strip(house, "--list").stdout
    assert "fins" in listed and "1 lines in 1 files" in listed and "core" in listed
    done = strip(house, "--all", "--yes")  # the last one: the table and the command go too
    assert done.returncode == 0 and not (house / "parts").exists(), done.stderr
    assert "DEPTH" not in (house / "core.py").read_text()
    assert "strip" not in (house / "run.sh").read_text()


@pytest.mark.parametrize("words, said", [
    (["feet"], "feet is no part that is here: wings, fins are."),
    (["parts"], "parts is no part"), (["fins", "fins"], "fins is there twice."),
    (["--all", "fins"], "leave out fins"), (["--quiet"], "--quiet is no flag"), ([], "say which")])
def test_a_mistake_is_one_sentence_and_nothing_is_done(house, words, said):
    done = strip(house, *words, "--yes")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=house, text=True,
                              capture_output=True).stdout


def test_what_git_does_not_have_is_not_lost_and_a_seam_must_be_there_once(house):
    (house / "mine.py").write_text("")
    assert "changed in mine.py: commit it" in strip(house, "fins", "--yes").stderr
    (house / "mine.py").unlink()
    (house / "core.py").write_text(HOUSE["core.py"] + "DEPTH = 7  # of fins\n")
    assert "changed in core.py" in strip(house, "fins", "--yes").stderr
    commit(house)
    done = strip(house, "wings", "fins", "--yes")
    assert "core.py has 2 times what parts/seams.py has of fins" in done.stderr
    assert done.returncode == 2 and (house / "parts/wings").exists()


# ---- this house

TABLE = runpy.run_path(str(ROOT / "parts/seams.py"))
PARTS = [name for name in TABLE["PARTS"] if name != "parts"
         and (ROOT / TABLE["PARTS"][name].get("folder", f"parts/{name}")).is_dir()]
# What the core means by words that a part has too.
PLAIN = set("""args engine flags reading report rows states targets tokens trial turns waiting
    divergence Call Group Base pool pass_at_k geometric""".split())


READ = "CHANGELOG.md", "draw.py"  # what was; and pictures, of which it draws those that are there


def words_of(name: str) -> set[str]:
    """The names of a part: its folder, its modules, its public classes, its flags."""
    found = {name}
    for path in (ROOT / TABLE["PARTS"][name].get("folder", f"parts/{name}")).glob("*.py"):
        found |= {path.stem} - {"__init__"}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                flags = [part for part in node.body if isinstance(part, ast.AnnAssign)
                         and "ClassVar" not in ast.unparse(part.annotation)]
                found.add(node.name)
                if node.name.endswith("Args"):
                    found |= {part.target.id for part in flags}
                    found.add(node.name.removesuffix("Args").lower() + "_args")
    return found - PLAIN


def imports(text: str) -> set[str]:
    """The modules that a Python file imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def stripped(folder: Path, *names: str) -> Path:
    """A copy of this checkout without these parts. Ruff finds nothing there, no file names or
    imports one that is gone, and no core file has a name of theirs."""
    for path in tracked():
        to = folder / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    commit(folder)
    done = strip(folder, *names, "--yes")
    assert done.returncode == 0, done.stderr
    commit(folder)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    (folder / "runs").mkdir()
    for made in (ROOT / "runs").glob("tiny*"):
        (folder / "runs" / made.name).symlink_to(made)
    python = [path for path in tracked(folder) if path.suffix == ".py"]
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", *python],
                           cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    gone = PARTS if names == ("--all",) else names
    words = {word for name in gone for word in words_of(name)} | (
        {"parts/", "from parts", "strip.py"} if names == ("--all",) else
        {f"parts.{name}" for name in gone})
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})\b")
    lost = {path.relative_to(ROOT) for path in tracked()} - {
        path.relative_to(folder) for path in tracked(folder)}
    texts = {path.relative_to(folder): path.read_text() for path in tracked(folder)
             if path.suffix in (".py", ".sh", ".md", ".toml", ".txt", ".ipynb")}
    paths = "|".join(re.escape(str(path)) for path in lost)
    assert not [(str(path), found) for path, text in texts.items()
                if path.parts[0] != "tests" and path.name not in READ
                for found in re.findall(rf"(?<![\w/.])(?:{paths})(?!\w)", text)]
    modules = {".".join(path.with_suffix("").parts) for path in lost if path.suffix == ".py"}
    assert not [(str(path), name) for path, text in texts.items()
                if path.suffix == ".py" and path.parts[0] != "tests" and path.name not in READ
                for name in imports(text) & modules]
    front = sorted({*folder.glob("*.py")} - {folder / "nano.py"})
    assert not [f"{path.name}:{i}: {line.strip()}" for path in front
                for i, line in enumerate(path.read_text().splitlines(), 1) if pattern.search(line)]
    return folder


def metrics_of(home: Path, place: Path) -> list[dict]:
    """Of three steps of the tiny model on one rank, without what depends on the clock."""
    model = tiny.ensure(str(ROOT / "runs"))
    done = subprocess.run(
        [PYTHON, home / "grpo.py", "--model", model, *"""--data tiny --steps 3 --batch 8
         --max_tokens 16 --max_prompt_tokens 64 --no-export --save_every 0 --name x""".split()],
        cwd=place, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith(("time/", "memory/")) and "per_s" not in name}
            for line in (place / "runs/x/metrics.jsonl").read_text().splitlines()]


def test_without_all_parts_the_core_trains_with_the_same_numbers(tmp_path):
    house = stripped(tmp_path / "house", "--all")
    assert not (house / "parts").exists() and not (house / "variants").exists()
    (tmp_path / "whole").mkdir()
    (tmp_path / "core").mkdir()
    whole, core = (metrics_of(home, tmp_path / name)
                   for home, name in ((ROOT, "whole"), (house, "core")))
    assert len(core) == 3 and core == [{name: step[name] for name in theirs}
                                       for step, theirs in zip(whole, core, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PARTS, "--all"])
def test_what_is_left_passes_its_tests_and_the_first_command_runs(tmp_path, name):
    house = stripped(tmp_path, name)
    for words in (
            ["-m", "pytest", "-q", "-n", "2", "--ignore", "tests/test_strip.py"],
            ["-m", "torch.distributed.run", "--local_addr", "127.0.0.1", "--nproc_per_node", "4",
             "grpo.py", "--batch", "8", "--steps", "2", "--no-export", "--max_tokens", "16"]):
        done = subprocess.run([house / ".venv/bin/python", *words], cwd=house, text=True,
                              capture_output=True, timeout=3600)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_readme_says_how_large_the_core_is():
    core = strip(ROOT, "--list").stdout.splitlines()[-1]
    lines, count = re.search(r"([\d,]+) lines +([\d,]+) bytes", core).groups()
    kB = round(int(count.replace(",", "")) / 1000)
    assert f"**The core** is {lines} lines, {kB} kB" in (ROOT / "README.md").read_text()
