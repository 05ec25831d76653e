"""files.py: files and folders that are whole or absent."""
import shutil
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: str | bytes):
    """A kill leaves no half of this file."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
    unfinished.replace(path)


@contextmanager
def whole_folder(folder: str | Path):
    """Gives an empty folder to fill, which then replaces this one. A kill leaves no half of it."""
    unfinished = Path(f"{folder}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
