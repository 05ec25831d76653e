"""Links to lines of code. The text of a link is code of that line: [`code`](../file.py#L12).

    python docs/check_links.py          # which links point to another line
    python docs/check_links.py --fix    # write the right numbers
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")


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
    assert text.count(".py#L") == len(LINK.findall(text)), f"a link of {page.name} has no code"
    return wrong


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("exercises/*.md")])


if __name__ == "__main__":
    found = [sentence for page in pages() for sentence in check(page, "--fix" in sys.argv)]
    print("\n".join(found) or "every link to a line is right")
    sys.exit(bool(found))
