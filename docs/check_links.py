"""Links to code: [`learn`](../grpo.py) names a function, a class, a method (`Batch.minibatches`)
or a constant of that file; no link has the number of a line. And claims about other projects: each
has a link to a thread, or to a file at a commit.

    python docs/check_links.py          # the names that are not there, the claims without a link
"""
import argparse
import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([\w.]+)(?:\(\))?`\]\(([\w./]+\.py)\)")

PROJECTS = re.compile(
    r"\b(TRL|verl|OpenRLHF|open-instruct|open-r1|SkyRL|slime|EasyR1|Logic-RL|TinyZero|tiny-grpo"
    r"|minimind|prime-rl|NeMo-RL|CleanRL|nano-aha-moment|Flash-RL|verifiers|ART)\b", re.I)
BUG = re.compile(
    r"\b(bugs?|errors?|mistakes?|wrong|fail(s|ed)?|silently|hangs?|hung|lost|crash(es|ed)?"
    r"|maximized|ignore[sd]|stops?|out of memory|masked|reused|seen elsewhere|others report)\b")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions|commit)/\w+")
FILE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/([\w.-]+)/")
SHORT = re.compile(r"\b[A-Za-z][\w-]*#\d+\b")  # verl#1028: nothing to click


@cache
def names_in(file: Path) -> set[str]:
    """The functions, classes and constants of a file; those inside a class or a function as
    `Outer.inner`."""
    found = set()

    def add(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                add(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not isinstance(
                    node, ast.FunctionDef):
                names = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(f"{prefix}{name.id}" for name in names if isinstance(name, ast.Name))

    add(ast.parse(file.read_text()), "")
    return found


def check(page: Path) -> list[str]:
    """A sentence for each link of a page to code that is not there."""
    text = page.read_text()
    wrong = [f"{page.name}: {name} has no `{code}`" for code, name in LINK.findall(text)
             if not code.endswith(".py") and (page.parent / name).exists()
             and code not in names_in(page.parent / name)]
    own = re.sub(r"https://\S+", "", text)
    return wrong + [f"{page.name}: {link} has the number of a line; name the function"
                    for link in re.findall(r"[\w./]+\.py#L\d+", own)]


def unlinked(page: Path) -> list[str]:
    """A sentence for each claim about another project that has nothing behind it. A claim is a row
    of a table, an item of a list or a paragraph with a project's name and a word such as "bug"."""
    wrong, text = [], re.sub("^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    places = dict(re.findall(r"^(\[[\w-]+\]): (\S+)$", text, re.M))  # [name]: URL, at the end
    text = re.sub(r"^\[[\w-]+\]: \S+$", "", text, flags=re.M)
    text = re.sub(r"\](\[[\w-]+\])", lambda m: f"]({places.get(m[1], m[1])})", text)
    for part in re.split(r"\n\s*\n|\n(?=\||\* |\d+\. )", text):
        bare = re.sub(r"\]\([^)]*\)|`[^`]*`", "", part)  # not the names inside links and code
        files = FILE.findall(part)
        for place in files:
            if not re.fullmatch("[0-9a-f]{40}", place):
                wrong.append(f"{page.name}: a file at {place!r} changes; link it at a commit")
        claim = PROJECTS.search(bare) and BUG.search(bare)
        pinned = files or THREAD.search(part)
        if claim and not pinned:
            wrong.append(f"{page.name}: no thread or commit behind {' '.join(part.split())[:70]!r}")
        wrong += [f"{page.name}: {name} is no link" for name in SHORT.findall(bare)]
    return wrong


def pages() -> list[Path]:
    return sorted(path for pattern in ("*.md", "docs/*/*.md", "exercises/*.md", "parts/*/*.md",
                                      "variants/*.md", "findings/*.md")
                  for path in ROOT.glob(pattern))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    found = [sentence for page in pages() for sentence in check(page)]
    found += [sentence for page in pages() for sentence in unlinked(page)]
    print("\n".join(found) or "every name is in its file, every claim has a link")
    sys.exit(bool(found))
