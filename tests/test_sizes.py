"""The code stays small enough to read. `python tests/test_sizes.py` prints the counts."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST, WIDEST, TOTAL = 20_000, 100, 256_000  # bytes, columns, bytes
FILES = {path.name: path.stat().st_size for path in ROOT.glob("*.py")
         if path.name != "nano.py"}  # it repeats the others in short; test_nano.py limits it


def widths() -> dict[str, int]:
    """The width of every line of Python here, by place: "tiny.py:7"."""
    files = sorted(path for folder in (".", "tests", "bench", "examples", "exercises")
                   for path in (ROOT / folder).glob("*.py"))
    return {f"{path.relative_to(ROOT)}:{number}": len(line) for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1)}


def test_no_file_is_too_large():
    assert not {name: size for name, size in FILES.items() if size > LARGEST}


def test_all_files_together_are_not_too_large():
    assert sum(FILES.values()) <= TOTAL


def test_no_line_is_too_wide():
    assert not {place: width for place, width in widths().items() if width > WIDEST}


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    print(f"\n{sum(FILES.values()):,} bytes in {len(FILES)} top-level Python files "
          f"(at most {TOTAL:,}). The largest (at most {LARGEST:,} each):")
    for name in sorted(FILES, key=FILES.get, reverse=True)[:5]:
        print(f"{FILES[name]:9,}  {name}")
    place, width = max(widths().items(), key=lambda item: item[1])
    print(f"The widest line has {width} columns (at most {WIDEST}): {place}")


if __name__ == "__main__":
    main()
