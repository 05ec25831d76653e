"""identity.py: what a run is made of, and what a resume may change.

`identity` has an entry for each thing that acts on a number of the run: its flags, rows, model,
files of the user, code, ranks and libraries. A checkpoint keeps their values, and `compare` holds
those of a resume against them. A fixed entry must be the same. Any other may differ: the run says
so in a line, and resumes. What acts on no number, such as a comment or the time of a file, is in no
entry.
"""
import ast
import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

from answers import REWARDS
from chat_template import render
from dist import World
from errors import SettingsError
from log import versions
from model import compute_dtype
from model_files import config_of, weight_files
from rewards import parse
from settings import renamed, sections
from worker import ROOT, find_file

# A resume must not change these. The dataclasses of flags add names of their own: `fixed`.
FIXED = frozenset("dtype group model_files precision reference_files rows row_digests script "
                  "seed config".split())
NOT_ACTED_ON = {"transformers_version", "_name_or_path"}  # keys of config.json


class Entry(NamedTuple):
    """One thing of which a run is made."""
    value: object  # as JSON has it
    fixed: bool = False  # True: a resume with another value is refused. False: it is reported
    flag: bool = False  # whether it is the value of a flag


def identity(args, inputs, world: World) -> dict[str, Entry]:
    """Returns {name: Entry} of a run. The values are equal on all ranks, unless their machines have
    other files."""
    config = config_of(inputs.source).to_dict()
    found = vars(args) | {
        "script": args.script, "ranks": world.size,
        "precision": str(compute_dtype(args, world.device)),
        "rows": len(inputs.rows), "row_digests": row_digests(inputs.rows),
        "rows of --eval_data": digest(row_digests(inputs.eval_rows)),
        "model_files": digest_of_files(inputs.source),
        "reference_files": digest_of_files(inputs.reference),
        "config": digest({key: config[key] for key in sorted(config.keys() - NOT_ACTED_ON)}),
        "tokenizer": digest_of_tokenizer(inputs.tokenizer), "end tokens": inputs.ends,
        "code": {name_of(path): digest_of_code(path) for path in sorted(code_of(args))},
        **{name: found for name, found in versions().items() if name != "commit"}}
    fixed = FIXED.union(*(group.fixed for group in sections(args)))
    return {name: Entry(json.loads(json.dumps(value)), name in fixed, name in vars(args))
            for name, value in found.items()}


def of_one_rank(made_of: dict[str, Entry]) -> dict[str, object]:
    """Returns {name for a message: value} of what must be the same on all ranks."""
    found = {"--" * it.flag + name: digest(it.value) if name == "row_digests" else it.value
             for name, it in made_of.items()}
    return found | found.pop("code")  # a digest of each file


def compare(was: dict, now: dict[str, Entry], place: Path, step: int) -> list[str]:
    """Returns a sentence for each entry that differs from that of a checkpoint. was: {name: value}
    that the checkpoint at `place` keeps; what it lacks is not compared. step: its step.
    SettingsError: a fixed entry differs."""
    said, wrong, was = [], [], renamed(was)
    for name, (value, fixed, flag) in now.items():
        before = was.get(name, value)
        if value == before:
            continue
        if name == "row_digests" and len(value) == len(before):
            wrong.append(f"row {first_other(before, value)} of --data differs, or its prompt or a "
                         "file of it")
        elif fixed and name != "row_digests":  # then `rows` says it
            wrong.append(f"{name} was {before} and is now {value}")
        elif isinstance(value, dict):  # of files: each has its own line
            said += [f"resumed with another {file} ({value[file]}, was {before[file]})"
                     for file in value if before.get(file, value[file]) != value[file]]
        elif name in ("tokenizer", "rows of --eval_data"):
            said.append(f"resumed with another {name} ({value}, was {before})")
        else:
            said.append(f"resumed with {'--' * flag}{name} {words(value)} (was {words(before)})")
    if wrong:
        raise SettingsError(f"{place} was made with other settings: {'; '.join(wrong)}. Would "
                            f"work: the previous settings, or another --name.")
    gone = [f"resumed without {name} {words(was[name])}, which is no longer a setting"
            for name in was.keys() - now.keys() - {"changes", "commit", "config.json"}]
    return gone + [f"{one} from step {step + 1} on" for one in said]


def first_other(before: list, now: list) -> int:
    """Returns the number, from 1, of the first row that differs. Both are row_digests."""
    return next(new for new, old in zip(now, before, strict=True) if new != old)[0] + 1


def words(value):
    """Returns a flag's value as a person writes it: a list as a text with spaces between its items,
    any other value as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


# ---- digests ----

def digest(value) -> str:
    """Returns a hash of repr(value), as 12 hexadecimal digits."""
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()


def row_digests(rows: list) -> list:
    """Returns [index, digest] of each row."""
    return [[row.index, digest(json.dumps(row.digested(sampled), default=str))] for row in rows]


def digest_of_files(folder: str | None) -> str:
    """Returns a digest of the weight files of a model's folder. None, for no folder, has a digest
    too."""
    return digest([*map(sampled, weight_files(folder) if folder else [])])


def sampled(path: str | Path) -> str:
    """Returns a digest of a file that is fast to compute: of its size, and of 64 kB at each of 64
    places."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        return digest([size, *(os.pread(file.fileno(), 2**16, start)
                               for start in range(0, size, size // 64 + 1))])


def digest_of_tokenizer(tokenizer) -> str:
    """Returns a digest of what a tokenizer does: of its own parts, and of what the chat template
    writes of a few chats."""
    backend, chats = getattr(tokenizer, "backend_tokenizer", None), []
    for roles in ("user", "system user", "user assistant user", "user assistant tool"):
        with suppress(SettingsError):  # the template refuses such a chat
            chats.append(render([{"role": role, "content": "QX7"} for role in roles.split()],
                                   tokenizer, {}) if tokenizer.chat_template else None)
    return digest([backend.to_str() if backend else sorted(tokenizer.get_vocab().items()), chats])


def digest_of_code(path: Path) -> str:
    """Returns a digest of a file of Python, without its comments and its layout."""
    code = path.read_bytes()
    with suppress(SyntaxError):
        code = ast.dump(ast.parse(code))
    return digest(code)


def code_of(args) -> set[Path]:
    """Returns the files of code that act on a run: the script and those of the project that are
    loaded; the rewards', and each FILE.py that a flag names, with the files beside it that it
    imports. Of --data and --eval_data the rows count, not a file that makes them."""
    loaded = [(name, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()]]
    found = {Path(file).absolute() for name, file in loaded if file and not name.startswith("own_")}
    found = {path for path in found if path.is_relative_to(ROOT) and path.suffix == ".py"
             and path.is_file() and not path.is_relative_to(sys.prefix)
             and "tests" not in path.parts}
    found.add(Path(sys.modules[type(args).__module__].__file__).absolute())
    files = [part.path or f"{REWARDS[part.name].partition(':')[0].replace('.', '/')}.py"
             for part in (parse(list(args.reward)) if args.reward else [])]
    for name, value in vars(args).items():
        if name not in ("data", "eval_data", "reward"):
            words = map(str, value if isinstance(value, tuple) else [value])
            files += [match[1] for word in words if (match := re.match(r"(.+\.py):", word))]
    return found.union(*(imported(find_file(file)) for file in files))


def imported(path: Path, found: set[Path] | None = None) -> set[Path]:
    """Returns a file of Python, and those beside it, or of the project, that it imports, itself or
    by another. found: the files that are known already; the new ones are added."""
    found = set() if found is None else found
    found.add(path)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = getattr(node, "module", None) or ""
            names = [start, *(f"{start}.{one.name}".strip(".") for one in node.names)]
            for name, folder in product(filter(None, names), (path.parent, ROOT)):
                file = folder / f"{name.replace('.', '/')}.py"
                if file.is_file() and file not in found:
                    imported(file, found)
    return found


def name_of(path: Path) -> str:
    """Returns a file's name in messages: within the project from there, else as flags have it."""
    return os.path.relpath(path, ROOT) if path.is_absolute() and path.is_relative_to(ROOT) else str(
        path)
