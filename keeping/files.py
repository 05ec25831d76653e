"""files.py: files that are whole or absent, and how they are read again."""
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from errors import SettingsError


class NotWritten(SettingsError):
    """A disk failed. The run ends with status 1, and the same command goes on."""
    status = 1


@contextmanager
def writing(path: str | Path):
    """NotWritten where a disk fails inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise NotWritten(f"{path} cannot be written ({error}). Would work: a folder that you may "
                         f"write, with space on its disk.") from None


def write_whole(path: Path, content: str | bytes):
    """A kill, or a crash of the machine, leaves no half of this file."""
    unfinished = path.with_suffix(".partial")
    with writing(path):
        with open(unfinished, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


@contextmanager
def whole_folder(folder: str | Path):
    """Gives an empty folder to fill, which then replaces this one. No half of it is left either."""
    unfinished = Path(f"{folder}.partial")
    with writing(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        os.sync()  # the files are on the disk before the name is
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def as_lines(rows: list[dict]) -> str:
    """Objects, as .jsonl has them."""
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def read(path: Path):
    """What a .json has; of a .jsonl the list of its lines, without a last one that a kill cut off.
    SettingsError: it is not there, or damaged."""
    place = path
    try:
        text = path.read_text()
        if path.suffix == ".json":
            return json.loads(text)
        rows = []
        for number, line in enumerate(text.split("\n")[:-1], 1):
            place = f"line {number} of {path}"
            rows.append(json.loads(line))
        return rows
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise SettingsError(f"{path} is damaged, as after a crash of the machine ({error}). Would "
                            f"work: without {place}.") from None
