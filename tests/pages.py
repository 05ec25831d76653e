"""Runs the Python blocks of a page in order. What a block prints stands in the `text` block after
it.

    python tests/pages.py docs/learn/one_step.md            # compare
    python tests/pages.py docs/learn/one_step.md --write    # put what is printed into the page

A page that goes on where another ends begins with
`globals().update(names_after("docs/learn/one_step.md"))`.
"""
import argparse
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.S)
NUMBER = r"-?\d+\.\d+(?:e[+-]\d+)?"


def same(text: str, printed: str) -> bool:
    """Equal words, and numbers within 1e-4."""
    numbers, ours = (re.findall(NUMBER, t) for t in (text, printed))
    words, our_words = (re.sub(NUMBER, "#", t).split() for t in (text, printed))
    return words == our_words and len(numbers) == len(ours) and all(
        abs(float(a) - float(b)) <= 1.01e-4 for a, b in zip(numbers, ours, strict=True))


def names_after(page: str) -> dict:
    """The names that the blocks of a page leave. Nothing is printed."""
    names = {}
    with redirect_stdout(io.StringIO()):
        for code, _ in BLOCK.findall((ROOT / page).read_text()):
            exec(compile(code, page, "exec"), names)
    return names


def run(path: Path, write: bool) -> bool:
    """Whether the page says what its blocks print."""
    names, right = {}, True

    def block(match) -> str:
        nonlocal right
        code, text = match.groups()
        with redirect_stdout(out := io.StringIO()):
            exec(compile(code, str(path), "exec"), names)
        if not write and not same(text, out.getvalue()):
            right = False
            sys.stderr.write(f"{code}printed\n{out.getvalue()}and the page says\n{text}\n")
        return f"```python\n{code}```\n\n```text\n{out.getvalue()}```\n"

    page = path.read_text()
    assert page.count("```python\n") == page.count("```\n\n```text\n"), "a block without its output"
    new = BLOCK.sub(block, page)
    if write:
        path.write_text(new)
    return right or write


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = run(options.page, options.write)
    if found:
        print(f"{options.page}: every number is what its code prints")
    sys.stdout.flush()
    os._exit(not found)
