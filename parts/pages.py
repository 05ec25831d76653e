"""Pages without the names that are gone: the row, the item, the sentence or the command goes.

A name is the target of a link, a flag, a job of run.sh, or a word in backticks. It is gone if the
project had it before and has it no more, so a page needs no marks. Words of plain English that only
a part gives a meaning are in the table of the parts.
"""
import posixpath
import re
import textwrap

NAMES = re.compile(r"\]\(([^)#\s]+)[^)]*\)|--(?:no-)?([a-z]\w+)|\./run\.sh (\w+)|`([^`]+)`|"
                   r"\b([\w/]+\.py\b|parts/\w+|variants/)")
NAME = re.compile(r"`[^`]+`|\[[^\]]+\]\([^)]+\)")
BLOCK = re.compile(r" *```.*?^ *```\n|\|[^\n]*\n|#+ [^\n]*\n|\n|"  # code, row, heading, blank line
                   r"[^\n]+\n(?:(?!\* |\d+\. |\||#+ | *```|\n)[^\n]*\n)*", re.S | re.M)
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z`*\[])")
CLAUSE = re.compile(r"(?<=;) |(?<=[.!?]) +(?=[A-Z`*\[])")  # of a cell


def names_of(files: dict[str, str]) -> set[str]:
    """What a page may name: files, words of the code, metrics, "--flag", "job NAME"."""
    found = {part for name in files for part in (
        name, posixpath.dirname(name) + "/", posixpath.dirname(name), posixpath.basename(name),
        posixpath.basename(name).partition(".")[0])}
    for name, text in files.items():
        if name.endswith((".py", ".sh", ".html")) and "other_systems" not in name:
            found |= {*re.findall(r"[A-Za-z_]\w+", text), *re.findall(r'"([a-z]+/[\w@]+)"', text)}
        if name.endswith(".py") and not {"tests", "bench"} & {*name.split("/")}:
            found |= {f"--{flag}" for flag in re.findall(r"^    (\w+): .* = ", text, re.M)}
    jobs = re.findall(r"^  (\w+)[ |:*\w]*\)", files.get("run.sh", ""), re.M)
    return found | {f"job {job}" for job in jobs}


def named(text: str, page: str) -> set[str]:
    """The names in a text of a page, as names_of has them, and "word WORD"."""
    found = {f"word {word}" for word in re.findall(r"\w+", text)}
    for link, flag, job, code, file in NAMES.findall(re.sub("^ *```.*", "", text, flags=re.M)):
        found |= {posixpath.normpath(posixpath.join(posixpath.dirname(page), link))} - {"."}
        found |= {file, f"--{flag}", f"job {job}"} - {"", "--", "job "}
        found |= {f"--{flag}" for flag in re.findall(r"--(?:no-)?([a-z]\w+)", code)}
        found |= {f"job {job}" for job in re.findall(r"\./run\.sh (\w+)", code)}
        found |= {*re.findall(r"[\w@]+(?:[./][\w@]+)*/?", code), *re.findall(r"[A-Za-z_]\w+", code)}
    return found


def without(text: str, page: str, gone: set[str]) -> str:
    """The page without what names one of `gone`, and without headings that have nothing below. A
    heading that names one goes with its section."""
    kept, skipped = [], 7  # the level of the heading whose section goes
    for block in [*BLOCK.findall(text), "# the end"]:
        if block.startswith("#") and level(block) <= skipped:
            skipped = level(block) if named(block, page) & gone else 7
        if skipped < 7:
            continue
        if named(block, page) & gone:
            block = shorter(block, page, gone)
            if not block and kept[-2:-1] and kept[-2].endswith(":\n"):
                del kept[-2:]  # what announced it
        if block and block[0] != "|" and re.match(r"\|[-|]+\n", "".join(kept[-1:])):
            del kept[-2:]  # a table without rows
        while block.startswith("#") and is_empty(kept, level(block)):
            del kept[-2:]
        if block != "\n" or kept[-1:] != ["\n"]:  # what stood between two blank lines is gone
            kept += [block] if block else []
    return re.sub(r"\n+$", "\n", "".join(kept[:-1]))


def level(block: str) -> int:
    """Of a heading: 1 to 6. Else 0."""
    return len(re.match("#*", block)[0])


def is_empty(kept: list[str], following: int) -> bool:
    """Whether a heading stands last, and the one that follows is not below it."""
    return kept[-1:] == ["\n"] and level("".join(kept[-2:-1])) >= following


def shorter(block: str, page: str, gone: set[str]) -> str:
    """What is left of a block that names one of `gone`: maybe nothing."""
    if block.lstrip().startswith("```"):
        return commands(block, page, gone)
    if block.startswith("|"):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", block)[1:-1]]
        kept = [cell and kept_of(cell, CLAUSE, page, gone, True) for cell in cells]
        lost = [new != old and not new for new, old in zip(kept, cells, strict=True)]
        return "" if any(lost) else f"| {' | '.join(kept)} |\n"
    mark = re.match(r"(\* |\d+\. |)", block)[0]
    kept = kept_of(" ".join(block[len(mark):].split()), SENTENCE, page, gone, bool(mark))
    return kept and textwrap.fill(mark + kept, 100, subsequent_indent=" " * len(mark),
                                  break_long_words=False, break_on_hyphens=False) + "\n"


def kept_of(text: str, cuts: re.Pattern, page: str, gone: set[str], one: bool) -> str:
    """A text without the names of a list, and then without the sentences, that are gone. one: it is
    an item or a cell, about what its first sentence says, and goes with it."""
    for name in filter(lambda name: named(name, page) & gone, NAME.findall(text)):
        name = re.escape(name)
        text = re.sub(rf"{name}, (?=[`\[])|(?<=[`)]), {name}(?=\.|$)", "", text, count=1)
    first, *others = cuts.split(text)
    if one and named(first, page) & gone:
        return ""
    return " ".join(part for part in (first, *others) if not named(part, page) & gone).rstrip(";")


def commands(block: str, page: str, gone: set[str]) -> str:
    """Code without the lines that name what is gone. Python, or one with output, goes whole."""
    if "```python" in block or re.search(r"^ *\$ ", block, re.M):
        return ""
    first, *lines, last = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", block)
    lines = [line for line in lines if not named(line, page) & gone]
    return first + "".join(lines) + last if "".join(lines).strip() else ""
