"""What a page says of names that are gone: a row, an item, a sentence or a command that has one goes.

A name is the target of a link, a flag, a job of run.sh, or a word in backticks. It is gone if the
code had it before and has it no more.
"""
import posixpath
import re
import textwrap

NAMES = re.compile(r"\]\(([^)#\s]+)[^)]*\)|--(?:no-)?([a-z]\w+)|\./run\.sh (\w+)|`([^`]+)`")
BLOCK = re.compile(r" *```.*?^ *```\n|\|[^\n]*\n|#[^\n]*\n|\n|"          # code, row, heading, blank
                   r"(?:[^\n|#]|#(?! ))[^\n]*\n(?:(?!\* |\d+\. |\||#|\n| *```)[^\n]*\n)*", re.S | re.M)


def names_of(files: dict[str, str]) -> set[str]:
    """All that a page may name: files, words of the code, metrics, "--flag", "job x"."""
    found = {*files, *(posixpath.basename(name) for name in files)}
    for name, text in files.items():
        if name.endswith((".py", ".sh", ".html")):
            found |= {*re.findall(r"[A-Za-z_]\w+", text)}
            found |= {*re.findall(r'"([a-z]+/[\w@]+)"', text)}
        if name.endswith(".py") and not {"tests", "bench"} & {*name.split("/")}:
            found |= {f"--{flag}" for flag in re.findall(r"^    (\w+): .* = ", text, re.M)}
    return found | {f"job {job}" for job in re.findall(r"^  (\w+)[ |:*\w]*\)", files.get("run.sh", ""), re.M)}


def named(text: str, page: str) -> set[str]:
    """What a text of a page names, as names_of has it."""
    found = set()
    for link, flag, job, code in NAMES.findall(text):
        if link:
            found.add(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))
        found |= {f"--{flag}"} if flag else set()
        found |= {f"job {job}"} if job else set()
        found |= {*re.findall(r"[\w@]+(?:[./][\w@]+)*", code), *re.findall(r"[A-Za-z_]\w+", code)}
        found |= {f"--{flag}" for flag in re.findall(r"--(?:no-)?([a-z]\w+)", code)}
    return found


def without(text: str, page: str, gone: set[str]) -> str:
    """The page without what names one of `gone`, and without headings that have nothing below."""
    kept = []
    for block in BLOCK.findall(text):
        if not named(block, page) & gone:
            kept.append(block)
        elif block.lstrip().startswith("```"):
            kept.append(commands(block, page, gone))
            if not kept[-1] and len(kept) > 2 and kept[-3].rstrip().endswith(":"):
                kept[-3] = ""   # what announced it
        elif block[0] not in "|#":
            kept.append(sentences(block, page, gone))
    text = re.sub(r"\n{3,}", "\n\n", "".join(kept))
    for _ in range(3):   # a section of sections
        text = re.sub(r"^(#+) [^\n]*\n+(?=(#+) )", lambda m: m[0] if len(m[2]) > len(m[1]) else "",
                      text, flags=re.M)
        text = re.sub(r"(\n#+ [^\n]*\n+)\Z", "\n", text)
    return text


def commands(block: str, page: str, gone: set[str]) -> str:
    """A code block without the commands that name what is gone. One with output goes whole."""
    if "```python" in block or re.search(r"^\$ ", block, re.M):
        return ""
    first, *lines, last = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", block)
    lines = [line for line in lines if not named(line, page) & gone]
    return first + "".join(lines) + last if "".join(lines).strip() else ""


def sentences(block: str, page: str, gone: set[str]) -> str:
    """A paragraph or an item without the sentences that name what is gone."""
    mark = re.match(r"(\* |\d+\. |)", block)[0]
    found = re.split(r"(?<=[.:!?)]) +(?=[A-Z`*\[])", " ".join(block[len(mark):].split()))
    kept = [one for one in found if not named(one, page) & gone]
    if not kept:
        return ""
    return textwrap.fill(mark + " ".join(kept), 100, subsequent_indent=" " * len(mark),
                         break_long_words=False, break_on_hyphens=False) + "\n"
