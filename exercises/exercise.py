"""Run an exercise.

    python exercises/exercise.py 3               # as it is in its file
    python exercises/exercise.py 3 --solution    # show the solution, and run it
    python exercises/exercise.py                 # all, as they are
"""
import argparse
import re
import sys
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from solutions import SOLUTIONS  # noqa: E402

PART = re.compile(r"(# ---- your turn\n)(.*?)(# ---- the test\n)", re.S)


def run(number: int, part: str = "") -> str | None:
    """Run an exercise, with `part` between its marks if given → None, or why its test fails."""
    path, = HERE.glob(f"{number}_*.py")
    code = path.read_text()
    if part:  # blank lines after it: the lines below keep their numbers
        part = part.strip("\n") + "\n"
        blank = "\n" * (PART.search(code)[2].count("\n") - part.count("\n"))
        code = PART.sub(lambda match: match[1] + part + blank + match[3], code)
    module = sys.modules[path.stem] = types.ModuleType(path.stem)  # other processes look for it
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
        module.test()
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER",
                        help=f"1 to {max(SOLUTIONS)}; all without one")
    parser.add_argument("--solution", action="store_true")
    options = parser.parse_args()
    numbers, solved, failed = options.numbers or [*SOLUTIONS], options.solution, []
    if unknown := {*numbers} - {*SOLUTIONS}:
        parser.error(f"there is no exercise {unknown.pop()}: 1 to {max(SOLUTIONS)}.")
    for number in numbers:
        if solved:
            print(SOLUTIONS[number].strip("\n"))
        why = run(number, SOLUTIONS[number] if solved else "")
        if why:
            failed.append(number)
        print(f"{number}: fails: {why}" if why else f"{number}: solved", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
