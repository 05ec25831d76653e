"""Which figures of bench/RESULTS.md are older than the code that they measured.

    python bench/stale.py            each table whose files changed since it was measured
    python bench/stale.py --all      also those that are up to date

Above each table, or once below the heading of a section for all of its tables, stands a comment:

    <!-- measured at COMMIT: FILE FILE …; kept: WHY -->

The files are those that the figures depend on; their comments and docstrings may change. `kept`
says why a table that is older stays. The exit status is 1 if a table is older and nothing says why
it stays, if it has no such comment, or if its commit or a file is not there.
"""
import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import command

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- measured at (\w+): ([^;]+?)(?:;\s+kept: (.+?))? -->", re.S)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Table(NamedTuple):
    """A table of the page, or the figures of a section without one."""
    name: str  # its section, and its first cell
    commit: str  # where it was measured; "": the page does not say
    files: list[str]
    kept: str  # why it stays if it is older


def tables_of(page: str) -> list[Table]:
    """All tables of a page, in order, and sections without one that have a comment. A comment holds
    until the next one, or the next heading."""
    found = []
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        name, mark, cells = section.partition("\n")[0].partition(" — ")[0], ("", "", ""), []
        for part in re.findall(r"<!--.*?-->|(?:^\|[^\n]*\n?)+", section, re.M | re.S):
            if match := MARK.fullmatch(part):
                mark = match.groups("")
            elif part.startswith("|"):
                cells.append((f"{name} | {part.splitlines()[2].split('|')[1].strip()}", mark))
        if mark[0] and not cells:
            cells.append((name, mark))
        found += [Table(cell, commit, files.split(), kept)
                  for cell, (commit, files, kept) in cells]
    return found


def git(*words: str) -> str:
    """The output of a git command. CalledProcessError: git refuses it."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def code(source: str) -> str:
    """A Python file without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def differs(commit: str, name: str) -> bool:
    """Whether the code of a file is another one than at a commit, or was not there."""
    if not git("ls-tree", commit, name):
        return True
    return code(git("show", f"{commit}:{name}")) != code((ROOT / name).read_text())


def why(table: Table) -> str:
    """Why the figures of a table may be wrong; "": they are of the code that is there."""
    if not table.commit:
        return "no comment says at which commit it was measured"
    if missing := [name for name in table.files if not (ROOT / name).exists()]:
        return f"not there: {' '.join(missing)}"
    try:
        changed = [name for name in table.files if differs(table.commit, name)]
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()
    return f"changed since {table.commit}: {' '.join(changed)}" if changed else ""


def main() -> int:
    """Prints the tables, and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also the tables that are up to date")
    options, wrong = parser.parse_args(), 0
    for table in tables_of((ROOT / "bench/RESULTS.md").read_text()):
        said = why(table)
        if said and table.kept:
            said += f". It stays: {' '.join(table.kept.split())}"
        elif said:
            wrong = 1
        if said or options.all:
            print(f"{table.name}: {said or 'up to date'}")
    return wrong


if __name__ == "__main__":
    command(main)
