"""files.py: files written whole or not at all, and the run's folder.

Rank 0 writes. A file is written under another name and then renamed, so a kill or a full disk
leaves it whole or absent. Only metrics.jsonl is appended to, and `read` drops a last line that a
kill cut off.

    runs/NAME/  args.json  plan.txt  metrics.jsonl  samples/  curve.png  checkpoints/  model/

docs/reference/metrics_and_files.md describes every file.
"""
import errno
import fcntl
import json
import os
import re
import shutil
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from safetensors import SafetensorError

from errors import SettingsError

# ---- files that are whole or absent ----

class NotWritten(SettingsError):
    """A file could not be written. The run ends with status 1, and the same command resumes from
    the last checkpoint."""
    status = 1


WAYS_OUT = {  # what would help, by the operating system's error; other errors say it themselves
    errno.ENOSPC: "space on its disk", errno.EDQUOT: "a larger quota on its disk",
    errno.EFBIG: "a larger limit of a file's size (ulimit -f)",
    errno.EROFS: "a disk that is not read-only",
    errno.EACCES: "permission for it", errno.EPERM: "permission for it"}


def not_written(path: str | Path, error: BaseException) -> NotWritten:
    """Returns the NotWritten for an error of the operating system, with what would help. Its number
    is read from its text, because some libraries pass on only the text."""
    said = re.search(r"(?:os error |Errno )(\d+)", str(error))
    works = WAYS_OUT.get(int(said[1])) if said else None
    return NotWritten(f"{path} cannot be written ({error})."
                      + (f" Would work: {works}." if works else ""))


@contextmanager
def writing(path: str | Path):
    """A context in which a failure to write becomes a NotWritten that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise not_written(path, error) from None


def write_whole(path: Path, content: str | bytes):
    """Writes a file under another name, flushes it to the disk and renames it. A kill, or a crash
    of the machine, leaves no half of it."""
    unfinished = path.with_suffix(".partial")
    with writing(path):
        with open(unfinished, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


@contextmanager
def whole_folder(folder: str | Path):
    """A context that gives an empty folder to fill. It replaces `folder` at the end, so no half of
    it is ever left there."""
    unfinished = Path(f"{folder}.partial")
    with writing(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        os.sync()  # the files are on the disk before the name is
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def as_lines(rows: list[dict]) -> str:
    """Returns objects as the lines of a .jsonl file."""
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def read(path: Path):
    """Returns the value of a .json file; or of a .jsonl file the list of its lines, without a last
    one that a kill cut off. SettingsError: it is missing or damaged."""
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
        raise SettingsError(f"{path} is damaged, as after a crash of the machine ({error}). "
                            f"Would work: without {place}.") from None


def not_a_pointer(path: Path) -> None:
    """SettingsError: the file is a pointer of git-lfs, which a clone has in the place of a large
    file."""
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise SettingsError(f"{path} is a pointer of git-lfs, not the file. Would work: git "
                                "lfs install, then git lfs pull, in its folder.")


# ---- the folder of a run ----

def choose_folder(args, now: datetime) -> Path:
    """Returns runs/NAME of a run that is new, unfinished, or asked for more steps. It makes no
    folder. Without --name the name is that of the script and the time `now`. SettingsError: a run
    of this name is finished or being written, or it is there and --no-resume was given."""
    folder = Path("runs", args.name or f"{Path(args.script).stem}-{now:%Y%m%d-%H%M%S}")
    if args.eval_only:
        return folder
    if not args.resume and (folder / "args.json").exists():
        raise SettingsError(f"--name {args.name}: {folder} exists; choose another, or --resume.")
    done = read(folder / "done.json") if (folder / "done.json").exists() else {}
    if reached := done.get("stop_at"):
        if reached >= (args.stop_at or 0) > 0:
            raise SettingsError(f"--name {args.name}: {folder} is finished: it reached --stop_at "
                                f"{reached}; choose another, or a higher --stop_at.")
    elif args.steps <= done.get("steps", 0):
        raise SettingsError(f"--name {args.name}: {folder} is finished, with {done['steps']} "
                            f"steps; choose another, or more --steps.")
    if (folder / ".lock").exists():
        with open(folder / ".lock") as file:
            lock(file, folder, fcntl.LOCK_SH)  # until it is closed; other ranks look too
    return folder


def lock(file, folder: Path, kind=fcntl.LOCK_EX) -> str | None:
    """Locks a run's folder by its file .lock, until the file is closed or the process ends.
    Returns None, or why the disk has no locks. SettingsError: another run has the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"another run is writing {folder}; choose another --name.") from None
    except OSError as error:  # some disks of networks
        return error.strerror


def output_folder(folder: Path, args) -> Path:
    """Returns where a command writes: the run's folder; with --eval_only of a run that is there, a
    new one inside, so that nothing of the run changes."""
    if not (args.eval_only and (folder / "args.json").exists()):
        return folder
    number = 1
    while (found := folder / f"eval_only_{number}").exists():
        number += 1
    return found


def began(folder: Path | None, now: datetime) -> str:
    """Returns the time when the run in `folder` began for the first time, as a text in ISO format,
    because chat templates may write the date. It is the time `now` for a new run."""
    path = Path(folder or "", "args.json")
    kept = read(path).get("began") if folder and path.exists() else None
    return kept or now.isoformat(" ", "seconds")


def finished_steps(folder: Path) -> int:
    """Returns the number of steps of a finished run, by its done.json. 0: the run is not
    finished."""
    path = folder / "done.json"
    return read(path)["steps"] if path.exists() else 0


def steps_in(folder: Path) -> bool:
    """Returns whether a run has made steps, by its metrics.jsonl."""
    return any(row["step"] for row in read_metrics(folder / "metrics.jsonl"))


def read_metrics(path: Path) -> list[dict]:
    """Reads the rows of metrics.jsonl. It returns [] if there is no such file."""
    return read(path) if path.exists() else []


def is_evaluation(row: dict) -> bool:
    """Whether a row of metrics.jsonl is of an evaluation. If not, it is of a step."""
    return "eval/rows" in row
