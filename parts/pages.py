"""Pages without the names that are gone: the row, the item, the sentence or the command goes.

A name is the target of a link, a flag, a job of run.sh, or a word in backticks. It is gone if the
project had it before and has it no more, so a page needs no marks.
"""
import posixpath
import re
import textwrap

NAMES = re.compile(r"\]\(([^)#\s]+)[^)]*\)|--(?:no-)?([a-z]\w+)|\./run\.sh (\w+)|`([^`]+)`")
LISTED = re.compile(r"`[^`]+`, (?=`)|(?<=`), `[^`]+`(?=\.|$)|"  # one of several names, or links
                    r"\[[^\]]+\]\([^)]+\), (?=\[)|(?<=\)), \[[^\]]+\]\([^)]+\)(?=\.|$)")
BLOCK = re.compile(r" *```.*?^ *```\n|\|[^\n]*\n|#+ [^\n]*\n|\n|"  # code, row, heading, blank line
                   r"[^\n]+\n(?:(?!\* |\d+\. |\||#+ | *```|\n)[^\n]*\n)*", re.S | re.M)
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z`*\[])")


def names_of(files: dict[str, str]) -> set[str]:
    """What a page may name: files, words of the code, metrics, "--flag", "job NAME"."""
    found = {part for name in files for part in (
        name, posixpath.basename(name), posixpath.basename(name).partition(".")[0])}
    for name, text in files.items():
        if name.endswith((".py", ".sh", ".html")):
            found |= {*re.findall(r"[A-Za-z_]\w+", text), *re.findall(r'"([a-z]+/[\w@]+)"', text)}
        if name.endswith(".py") and not {"tests", "bench"} & {*name.split("/")}:
            found |= {f"--{flag}" for flag in re.findall(r"^    (\w+): .* = ", text, re.M)}
    jobs = re.findall(r"^  (\w+)[ |:*\w]*\)", files.get("run.sh", ""), re.M)
    return found | {f"job {job}" for job in jobs}


def named(text: str, page: str) -> set[str]:
    """The names in a text of a page, as names_of has them."""
    found = set()
    for link, flag, job, code in NAMES.findall(re.sub("^ *```.*", "", text, flags=re.M)):
        found |= {posixpath.normpath(posixpath.join(posixpath.dirname(page), link))} - {"."}
        found |= {f"--{flag}", f"job {job}"} - {"--", "job "}
        found |= {f"--{flag}" for flag in re.findall(r"--(?:no-)?([a-z]\w+)", code)}
        found |= {f"job {job}" for job in re.findall(r"\./run\.sh (\w+)", code)}
        found |= {*re.findall(r"[\w@]+(?:[./][\w@]+)*", code), *re.findall(r"[A-Za-z_]\w+", code)}
    return found


def without(text: str, page: str, gone: set[str]) -> str:
    """The page without what names one of `gone`, and without headings that have nothing below."""
    kept = []
    for block in [*BLOCK.findall(text), "# the end"]:
        if named(block, page) & gone:
            block = shorter(block, page, gone)
            if not block and kept[-2:-1] and kept[-2].endswith(":\n"):
                del kept[-2:]  # what announced it
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
    if block.startswith("#"):
        return ""
    if not block.startswith("|"):
        mark = re.match(r"(\* |\d+\. |)", block)[0]
        kept = kept_of(" ".join(block[len(mark):].split()), SENTENCE, " ", page, gone)
        return kept and textwrap.fill(mark + kept, 100, subsequent_indent=" " * len(mark),
                                      break_long_words=False, break_on_hyphens=False) + "\n"
    cells = [kept_of(cell.strip(), re.compile("; |" + SENTENCE.pattern), "; ", page, gone)
             for cell in re.split(r"(?<!\\)\|", block)[1:-1]]
    return f"| {' | '.join(cells)} |\n" if all(cells) else ""


def kept_of(text: str, cuts: re.Pattern, glue: str, page: str, gone: set[str]) -> str:
    """A text without the names of a list, and then the sentences, that are gone."""
    for name in LISTED.findall(text):
        if named(name, page) & gone:
            text = text.replace(name, "", 1)
    if not named(text, page) & gone:
        return text
    return glue.join(part for part in cuts.split(text) if not named(part, page) & gone)


def commands(block: str, page: str, gone: set[str]) -> str:
    """Code without the commands that name what is gone. Python, or one with output, goes whole."""
    if "```python" in block or re.search(r"^ *\$ ", block, re.M):
        return ""
    first, *lines, last = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", block)
    lines = [line for line in lines if not named(line, page) & gone]
    return first + "".join(lines) + last if "".join(lines).strip() else ""
