"""Run an exercise.

    python exercises/exercise.py 3               # as it is in its file
    python exercises/exercise.py 3 --solution    # show the solution, and run it
    python exercises/exercise.py                 # all, as they are
"""
import re
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from solutions import SOLUTIONS  # noqa: E402

PART = re.compile(r"(# ---- your turn\n)(.*?)(# ---- the test\n)", re.S)


def run(number: int, solved: bool) -> str | None:
    """None, or what the test says."""
    path, = HERE.glob(f"{number}_*.py")
    code = path.read_text()
    if solved:  # the lines below keep their numbers
        part = SOLUTIONS[number].strip("\n") + "\n"
        blank = "\n" * (PART.search(code)[2].count("\n") - part.count("\n"))
        code = PART.sub(lambda match: match[1] + part + blank + match[3], code)
    names = {"__name__": f"exercise_{number}"}
    try:
        exec(compile(code, str(path), "exec"), names)
        names["test"]()
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    return None


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()] or [*SOLUTIONS]
    solved, failed = "--solution" in sys.argv, []
    for number in numbers:
        if solved:
            print(SOLUTIONS[number].strip("\n"))
        said = run(number, solved)
        print(f"{number}: " + (f"fails: {said}" if said else "solved"), flush=True)
        failed += [number] if said else []
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
