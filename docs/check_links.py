"""Links to lines of code. The text of a link is code of that line: [`code`](../file.py#L12). And
claims about other projects: each has a link to a thread, or to a file at a commit.

    python docs/check_links.py          # which links point to another line
    python docs/check_links.py --fix    # write the right numbers
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")

PROJECTS = re.compile(
    r"\b(TRL|verl|OpenRLHF|open-instruct|open-r1|SkyRL|slime|EasyR1|Logic-RL|TinyZero|tiny-grpo"
    r"|minimind|prime-rl|NeMo-RL|CleanRL|nano-aha-moment|Flash-RL|verifiers|ART)\b", re.I)
BUG = re.compile(
    r"\b(bugs?|errors?|mistakes?|wrong|fail(s|ed)?|silently|hangs?|hung|lost|crash(es|ed)?"
    r"|maximized|ignore[sd]|stops?|out of memory|masked|reused|seen elsewhere|others report)\b")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions|commit)/\w+")
FILE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/([\w.-]+)/")
SHORT = re.compile(r"\b[A-Za-z][\w-]*#\d+\b")  # verl#1028: nothing to click


def lines_with(code: str, file: Path) -> list[int]:
    return [n for n, line in enumerate(file.read_text().splitlines(), 1) if code in line]


def check(page: Path, fix: bool = False) -> list[str]:
    """A sentence for each link of a page that is wrong and cannot be, or was not, put right."""
    wrong = []

    def one(match) -> str:
        code, name, number = match.groups()
        found = lines_with(code, page.parent / name)
        if len(found) == 1 and fix:
            return match[0].replace(f"#L{number})", f"#L{found[0]})")
        if found != [int(number)]:
            wrong.append(f"{page.name}: `{code}` is in lines {found} of {name}, not in {number}")
        return match[0]

    text = page.read_text()
    new = LINK.sub(one, text)
    if new != text:
        page.write_text(new)
    own = re.sub(r"https://\S+", "", text)
    assert own.count(".py#L") == len(LINK.findall(text)), f"a link of {page.name} has no code"
    return wrong


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
    return sorted(path for pattern in ("*.md", "docs/*/*.md", "exercises/*.md", "parts/*/*.md")
                  for path in ROOT.glob(pattern))


if __name__ == "__main__":
    found = [sentence for page in pages() for sentence in check(page, "--fix" in sys.argv)]
    found += [sentence for page in pages() for sentence in unlinked(page)]
    print("\n".join(found) or "every link to a line is right, every claim has a link")
    sys.exit(bool(found))
