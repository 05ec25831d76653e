"""The project's own files: those that git tracks. What a user puts beside them is the user's."""
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tracked(root: Path = ROOT) -> list[Path]:
    """Of a tree without git: all files but those of set-up and of runs."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    names = [name for name in done.stdout.split("\0") if name]
    found = [root / name for name in names] or [
        path for top in root.iterdir() if top.name != "runs" and not top.name.startswith(".")
        for path in (top, *top.rglob("*"))]
    return sorted(path for path in found if path.is_file())
