"""The code is written to be read, in layers. Ruff holds its own rules (`./run.sh test` runs it).

`python tests/test_style.py` prints the sizes of the core, in tokens of code.
"""
import ast
import io
import re
import shutil
import sys
import tokenize
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tracked import ROOT, tracked

LONGEST = 40  # lines of a function, but for the two that are read as a whole
WHOLE = ("train", "learn")
LARGEST = 600  # lines of a file
HELPER = 12_000  # bytes of a file of tests/, but for the reference: helpers are code too
CORE = 51_000  # tokens of code of the core: prose does not count, so nobody has to squeeze it
# A file imports what stands before it.
ORDER = """errors files settings part answers worker dist losses rewards messages
           chat_template data batch architecture model_files model rollout plan memory
           preflight log metrics identity checkpoint evaluate flags run grpo ppo nano""".split()
PYTHON = {str(path.relative_to(ROOT)): path for path in tracked() if path.suffix == ".py"}
PARTS = {name: path for name, path in PYTHON.items()
         if re.fullmatch(r"parts/\w+/\w+\.py", name)}
TREES = {name: ast.parse(path.read_text()) for name, path in PYTHON.items()
         if "/" not in name or name in PARTS}  # of the core and of the parts
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree: ast.AST) -> set[str]:
    """The modules that a file imports, at its top or in a function: "losses", "parts.carry"."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_a_file_imports_what_stands_before_it_alone():
    """So no import runs in a circle; and no file in front stands outside the order."""
    for name in ORDER:
        later = {*ORDER[ORDER.index(name):]}
        assert not imported(TREES[f"{name}.py"]) & later, name
    assert {name for name in TREES if "/" not in name} == {f"{name}.py" for name in ORDER}


def test_the_core_knows_of_no_part_and_a_part_of_no_other():
    """part.py asks the parts, and it alone. The tests of the core import none either."""
    for name, tree in TREES.items() | {
            (name, ast.parse(PYTHON[name].read_text())) for name in PYTHON
            if name.startswith("tests/")}:
        known = {module.split(".")[1] for module in imported(tree) if module.startswith("parts.")}
        assert known <= ({name.split("/")[1]} if name in PARTS else set()), name


def test_the_page_lists_every_file_in_the_order_of_the_imports():
    """CONTRIBUTING.md has the names; the first line of each file says what it does."""
    assert re.findall(r"(\w+)\.py", (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]) == ORDER
    for name in ORDER:
        assert re.match(rf"{name}\.py: +\S", ast.get_docstring(TREES[f"{name}.py"])), name


def test_no_file_hides_a_module():
    """Python puts the folder of a script first in sys.path, and a worker that of a reward's file:
    there numbers.py would be `import numbers` to every library. Nor may a file have the name of a
    package that some set-up of the project installs, as in `trl==1.16.0`."""
    installed = {name.partition("/")[0] for name in packages_distributions()}
    pinned = {name.replace("-", "_").lower() for path in tracked() if path.suffix in (".py", ".sh")
              for name in re.findall(r"([A-Za-z][\w-]*)(?:\[\w,]*\])?==", path.read_text())}
    assert {"torch", "numpy"} <= installed and {"gguf", "accelerate"} <= pinned
    hidden = {*sys.stdlib_module_names} | installed | pinned
    assert not [name for name in PYTHON if Path(name).stem in hidden]
    assert not {Path(name).parts[0] for name in PYTHON if "/" in name} & hidden


def test_functions_and_files_are_short():
    """But for `train` and `learn`, and nano.py, which are read as a whole."""
    for name, tree in TREES.items():
        assert PYTHON[name].read_text().count("\n") <= LARGEST, name
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.name not in WHOLE:
                assert node.end_lineno - node.lineno < LONGEST, f"{name}:{node.lineno}"
    assert not [name for name, path in PYTHON.items() if path.stat().st_size > HELPER
                and re.fullmatch(r"tests/(?!test_|reference).*", name)]


def test_each_promise_has_its_tests_and_each_test_its_promise():
    """PROMISES in conftest.py is the one list: it begins with those of the README, in its words."""
    from conftest import PROMISES
    readme = (ROOT / "README.md").read_text().partition("## Why it exists")[2]
    bold = re.findall(r"^\* \*\*(.+?)\.\*\*", readme, re.M)
    assert bold and [*PROMISES][:len(bold)] == bold
    named = {name for files in PROMISES.values() for name in files.split()}
    assert named == {Path(name).stem.removeprefix("test_") for name in PYTHON
                     if name.startswith("tests/test_")}


@pytest.mark.slow
def test_to_collect_the_tests_writes_nothing_into_the_checkout(tmp_path):
    """A model, a folder of runs or a cache would be met by a test that looks at all files."""
    from ranks import script
    copy, made = tmp_path / "copy", shutil.ignore_patterns(".*", "runs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=made)
    before = {*copy.rglob("*")}
    script("-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", cwd=copy)
    assert {path for path in copy.rglob("*") if "__pycache__" not in path.parts} == before


# ---- the sizes

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}


def tokens_of(source: str) -> int:
    """Names, numbers, strings and operators: without comments, docstrings and layout."""
    prose = {line for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
             for line in range(node.lineno, node.end_lineno + 1)}
    return sum(token.type not in LAYOUT and token.start[0] not in prose
               for token in tokenize.generate_tokens(io.StringIO(source).readline))


def core() -> dict[str, int]:
    """{file: tokens} of the files in front but nano.py."""
    return {name: tokens_of(PYTHON[name].read_text()) for name in TREES
            if "/" not in name and name != "nano.py"}


def test_the_core_is_not_too_large():
    assert sum(core().values()) <= CORE
    assert tokens_of('"""A page."""\nx = 1  # 3\ndef f(y):\n    """Of y."""\n    return y\n') == 11


def main() -> None:
    """Prints the sizes."""
    print(f"{sum(core().values()):,} tokens of code in the core (at most {CORE:,}). The largest:")
    for name, size in sorted(core().items(), key=lambda item: -item[1])[:5]:
        print(f"{size:9,}  {name}")


if __name__ == "__main__":
    main()
