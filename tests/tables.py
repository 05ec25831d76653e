"""Tables of tests as text."""
import re


def table(text: str) -> list[list[str]]:
    """Returns the cells of each line, which stand between " | ". A line that is indented goes on
    with the line before it."""
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    return [[cell.strip() for cell in re.split(r" \|(?= )", line)] for line in lines]
