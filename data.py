"""data.py: rows → prompts: where rows come from, the chat template, and their order.

    --data rows.jsonl            a file: .jsonl, .json, .parquet or .csv
    --data mine.py:rows          a function of the seed that returns or yields rows, as dicts
    --data openai/gsm8k:main     a data set from the Hugging Face hub

CommonArgs.load_rows (flags.py) calls `load`. It gets the stored rows from `read` and turns each
into a Row: messages.py reads its columns, the tokenizer's chat template renders the text that the
model sees, and the tokenizer its ids. A Stream then draws rows.
"""
import csv
import io
import json
import os
import re
import traceback
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import NamedTuple
from uuid import UUID

import numpy as np
from tqdm import tqdm

from chat_template import Marks, marks_of, options_of, prompt_ids, prompt_text
from errors import SettingsError, as_sentence
from files import not_a_pointer
from messages import CHATS, PROMPTS, answer_of, first_of, from_json, messages_of
from settings import Count, Flags
from worker import ROOT, find_file, load_file

FILES = (".jsonl", ".json", ".parquet", ".csv")
GENERATED_ROWS = 1000  # for tiny and reasoning_gym
MOST_ROWS = 1_000_000  # from a user's function; one more counts as endless


@dataclass
class DataArgs(Flags):
    """Prompts."""
    max_prompt_tokens: Count = 512
    """Leave out longer prompts."""
    prompt_template: str | None = None
    """The user message, with {question} or any {column} filled in."""
    system: str | None = None
    """A system message before the prompt."""


# ---- prompts, and their order ----

@dataclass
class Row:
    """A data row, as the loop uses it."""
    index: int  # among all stored rows, from 0
    prompt: str  # the text that the model sees
    prompt_ids: list[int]
    answer: object
    columns: dict
    source: str  # its column `data_source`, or the name of the data
    rendered: bool = False  # its text was already a rendered chat, and no template was applied
    # {"prompt", "answer" or "system message": the column it was read from}; None: the row has none.
    origins: dict[str, str | None] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The row's number in messages to the user, from 1."""
        return self.index + 1

    def digested(self, of_file) -> list:
        """Returns what training depends on, for checkpoint.row_digests. of_file: a function from a
        path to its digest, for a class whose rows name files."""
        return [self.prompt_ids, self.answer, self.columns]


class Prompt(NamedTuple):
    """A drawn row: its place in the order of the run, and the row. Its text is `row.prompt`."""
    position: int  # from 0; it seeds the sampling
    row: Row


@dataclass
class Stream:
    """An endless stream of prompts. Each epoch is a permutation of the rows by (seed, epoch).
    `position`, the number of prompts drawn so far, is the whole state."""
    rows: list[Row]
    seed: int
    position: int = 0

    @property
    def epoch(self) -> int:
        """The number of times that all rows have been drawn."""
        return self.position // len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """Returns the next n prompts, fewer at the end of an epoch."""
        epoch, start = divmod(self.position, len(self.rows))
        # % 2**64: a seed may be negative, which default_rng does not accept.
        order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.rows))
        drawn = enumerate(order[start:start + n], self.position)
        prompts = [Prompt(position, self.rows[i]) for position, i in drawn]
        self.position += len(prompts)
        return prompts

    def state_dict(self) -> dict:
        """Returns what a checkpoint keeps."""
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Resumes from what `state_dict` returned."""
        self.position = state["position"]


def load(spec: str, tokenizer, args: DataArgs, *, seed: int = 0,
         make=None, eos_ids=()) -> tuple[list[Row], str]:
    """Reads the data `spec` and returns its rows in order, and a sentence with their counts.

    Rows with an empty prompt or more than --max_prompt_tokens tokens are left out. seed: for rows
    made by a function. make: a function to call instead of make_row. eos_ids: the ids that end a
    completion; no row may contain their texts.
    SettingsError: a row cannot be read (with its number), or no row is left.
    """
    make = make or make_row
    raw, name = read(spec, seed)
    marks, rows = marks_of(tokenizer, eos_ids), []
    for index, columns in enumerate(progress(raw, spec)):
        try:
            row = make(index, columns, name, tokenizer, marks, args)
        except (SettingsError, ValueError) as error:
            raise SettingsError(f"{spec}, row {index + 1}: {one_line(error)}") from error
        if row:
            rows.append(row)
    if not rows:
        raise SettingsError(f"{spec}: all {len(raw)} prompts are empty.")
    limit, lengths = args.max_prompt_tokens, sorted(len(row.prompt_ids) for row in rows)
    kept = [row for row in rows if len(row.prompt_ids) <= limit]
    if not kept:
        raise SettingsError(
            f"{spec}: no prompt is left; the shortest has more than {limit} tokens: "
            f"--max_prompt_tokens {lengths[0]} keeps it, {lengths[-1]} keeps all.")
    return kept, (
        f"{name}: {len(kept)} of {len(raw)} prompts kept, {lengths[0]} to {lengths[len(kept) - 1]} "
        f"tokens; left out: {len(rows) - len(kept)} longer than {limit} tokens, "
        f"{len(raw) - len(rows)} empty")


def make_row(index: int, columns: dict, name: str, tokenizer, marks: Marks,
             args: DataArgs) -> Row | None:
    """Makes a Row from a stored row with the values `columns`. None: its prompt is empty.
    ValueError, SettingsError: it cannot be read, or the chat template has no place for part of it.
    name: the data's name. marks: the template's control tokens. A text that begins with one is a
    rendered chat already; any other must contain none.
    """
    columns = plain(columns, "")
    messages = messages_of(columns, args.prompt_template, args.system)
    column, answer = answer_of(columns)
    if not messages:
        return None
    options = options_of(columns, messages, tokenizer)
    # A text that begins like a chat or message in the template is already a rendered chat. ChatML's
    # beginning, the most common one, is tried for every tokenizer.
    begins = ("<|im_start|>", *marks.begins)
    rendered = any(m["content"].lstrip().startswith(begins) for m in messages)
    if rendered and (len(messages) > 1 or options):
        raise SettingsError("a finished chat text takes no --system, no tools and no other "
                            "messages.")
    if not rendered:
        marks.check([messages, options])  # no control tokens of the template
    text = messages[0]["content"] if rendered else prompt_text(messages, tokenizer, options)
    source = str(columns.get("data_source") or name)
    f"{text}{answer}{source}".encode()  # raises a ValueError for half a surrogate pair
    # A chat template writes the BOS itself; for plain text the tokenizer adds it.
    ids = prompt_ids(text, tokenizer, add_bos=tokenizer.chat_template is None and not rendered)
    origins = {"prompt": first_of((*PROMPTS, *CHATS), columns),
               "answer": column if str(answer).strip() else None}
    if args.prompt_template:
        origins["prompt"] = "--prompt_template"
    system = first_of(("system", "system_prompt"), columns)
    if system and args.system is None and messages[0]["content"] == columns[system]:
        origins["system message"] = system
    return Row(index, text, ids, answer, columns, source, rendered, origins)


BASIC = (bool, str, int, float, bytes)
# Types whose str() is their whole value.
SAYING = (Decimal, Fraction, UUID, PurePath, date, time, timedelta)


def plain(value, column: str):
    """Converts a stored value to Python's own types: numpy, torch and pandas values to a number or
    list, a tuple or set to a list, a missing value to None. column: its name, for the message; ""
    for a whole row. ValueError: it has another type, which has no text to identify it at a resume.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "tolist"):  # numpy, torch and pandas
        if getattr(value.dtype, "str", "").endswith("8[ns]"):  # else tolist() gives an integer
            value = value.astype(value.dtype.str.replace("[ns]", "[us]"))
        return plain(value.tolist(), column)
    if isinstance(value, BASIC):  # including an Enum that is a str
        kind = next(kind for kind in BASIC if isinstance(value, kind))
        return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, SAYING):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key, column)): plain(one, column or str(key))
                for key, one in value.items()}
    if isinstance(value, Set):
        value = sorted(value, key=lambda one: (str(type(one)), str(one)))
    if isinstance(value, Sequence):
        return [plain(one, column) for one in value]
    raise ValueError(f"its column {column} holds a {type(value).__name__}. Would work: a text, "
                     f"number, date, list or dict.")


def one_line(error) -> str:
    """Returns an error's message without line breaks."""
    return " ".join(str(error).split())


# ---- where rows come from ----

def read(spec: str, seed: int = 0) -> tuple[list[dict], str]:
    """Reads the rows of `spec` as stored and returns them with a name for them. spec: a file,
    FILE.py:NAME, tiny or reasoning_gym for generated rows, or a hub data set; the last three as
    NAME[:CONFIG][@SPLIT]. seed: for rows made by a function. SettingsError: there are no rows, or
    they cannot be read."""
    if ".py:" in spec:
        return rows_of_function(spec, seed), Path(spec).name
    path = os.path.expanduser(spec)
    name, config, split = re.fullmatch("([^:@]*):?([^@]*)@?(.*)", path, re.DOTALL).groups()
    if name in ("tiny", "reasoning_gym"):  # even if there is a folder of this name
        from examples import reasoning_gym_tasks, tiny
        make = tiny.rows if name == "tiny" else reasoning_gym_tasks.rows
        return (make(GENERATED_ROWS, seed, config, split or "train"),
                f"{name}/{config}" if config else name)
    if os.path.isfile(path) and path.endswith(FILES):
        rows = try_read(spec, read_file, path)
        name = "/".join(Path(path).with_suffix("").parts[-2:])  # FOLDER/FILE
    elif os.path.exists(path) or path.endswith(FILES):
        raise SettingsError(
            f"{spec} is not a file on this machine, or does not end in {', '.join(FILES)}. For "
            "other formats: FILE.py:NAME, a function that returns or yields dicts, such as "
            "`def rows(seed): return datasets.load_from_disk(\"FOLDER\")`.")
    else:
        rows = try_read(spec, read_hub, name, config or None, split or "train")
    if not rows:
        raise SettingsError(f"{spec} has no rows.")
    return rows, name.lstrip("./")


def try_read(spec: str, function, *args) -> list[dict]:
    """Returns function(*args). A library's exception becomes a one-sentence SettingsError, with the
    cause that `datasets` hides behind a generic error."""
    try:
        return function(*args)
    except SettingsError:
        raise
    except Exception as error:
        reason = error.__cause__ or error
        raise SettingsError(f"{spec} cannot be loaded: {type(reason).__name__}: "
                            f"{one_line(reason)[:300]}") from error


def rows_of_function(spec: str, seed: int) -> list[dict]:
    """Returns the rows that the function of FILE.py:NAME returns or yields. Each row is copied
    (`plain`), so the function may reuse one dict. It is called once on each rank, with the seed.
    SettingsError: there is no such function, it fails (with the line in the file), its result is
    not rows, or there are more than MOST_ROWS."""
    path, _, name = spec.rpartition(":")
    if not (found := find_file(path)):
        raise SettingsError(f"{spec}: there is no file {path} here or in {ROOT}.")
    found, rows = found.resolve(), []
    with as_sentence(f"{spec} must be a function of a seed that returns or yields rows"):
        try:
            function = vars(load_file(found)).get(name)
            if function is None:
                raise ValueError(f"{path} has no {name}")
            for row in progress(function(seed), spec):
                rows.append(plain_row(row, len(rows) + 1, spec))
                if len(rows) > MOST_ROWS:
                    raise SettingsError(f"{spec} yields more than {MOST_ROWS:,} rows, perhaps "
                                        "endlessly. Would work: a function that ends.")
        except SettingsError:
            raise
        except (Exception, SystemExit) as error:  # the file may raise anything
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                     if frame.filename == str(found)]
            if not lines:
                raise ValueError(error) from error
            raise SettingsError(f"{spec} raised {type(error).__name__} in line {lines[-1]} of "
                                f"{path}: {one_line(error)[:300]}") from error
        if not rows:
            raise ValueError("it gave none")
    return rows


def plain_row(row, number: int, spec: str) -> dict:
    """Returns a function's row with plain values. ValueError: it is not a dict. SettingsError: it
    holds a value of another type."""
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number} is {row!r:.80}, which is not a dict")
    try:
        return plain(row, "")
    except ValueError as error:
        raise SettingsError(f"{spec}, row {number}: {error}") from None


def progress(rows, spec: str):
    """Yields the rows. After ten seconds, rank 0 shows a progress line with their count."""
    quiet = os.environ.get("RANK", "0") != "0"
    return tqdm(rows, spec, delay=10, mininterval=10, unit=" rows", disable=quiet)


def read_hub(name: str, config: str | None, split: str) -> list[dict]:
    """Reads a data set from the hub, or from its local cache, with the `datasets` library."""
    import datasets
    return from_arrow(datasets.load_dataset(name, config, split=split).with_format("arrow")[:])


# Files are not read with `datasets`: it reads 007 in a .csv as the number 7 and "2026-01-31" in
# JSON as a date, and its errors name no line.

def read_file(path: str) -> list[dict]:
    """Reads the rows of a file with one of the extensions FILES."""
    not_a_pointer(path)
    if path.endswith(".parquet"):
        import pyarrow.parquet
        return from_arrow(pyarrow.parquet.ParquetFile(path).read())  # read_table: "a:b" is a URI
    text = Path(path).read_bytes().decode("utf-8-sig")
    return read_csv(text) if path.endswith(".csv") else read_json(text)


def once(names: list[str], what: str) -> None:
    """Raises a ValueError if a name occurs twice: one value would replace another."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the {what} {twice[0]} appears twice")


def from_arrow(table) -> list[dict]:
    """Returns the rows of an Arrow table. In Arrow each struct has the keys of all rows, null if a
    row lacks one; these nulls are removed."""
    import pyarrow as pa
    once(table.schema.names, "column")

    def plain(value, kind):
        if pa.types.is_struct(kind) and value is not None:
            return {field.name: plain(value[field.name], field.type) for field in kind
                    if value[field.name] is not None}
        if isinstance(value, list) and not pa.types.is_map(kind):
            return [plain(item, kind.value_type) for item in value]
        return from_json(value) if isinstance(kind, pa.JsonType) else value

    return [{field.name: plain(row[field.name], field.type) for field in table.schema}
            for row in table.to_pylist()]


def read_json(text: str) -> list[dict]:
    """Reads consecutive objects, or lists of objects, so .json and .jsonl are read the same way."""
    def unique(pairs: list[tuple]) -> dict:
        once([key for key, _ in pairs], "key")
        return dict(pairs)

    rows, at, space = [], 0, re.compile(r"\s*")
    decoder = json.JSONDecoder(object_pairs_hook=unique)
    while (at := space.match(text, at).end()) < len(text):
        found, at = decoder.raw_decode(text, at)  # an error names line and column
        rows += found if isinstance(found, list) else [found]
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {i} is not a JSON object")
    return rows


def read_csv(text: str) -> list[dict]:
    """Returns the cells of each line, by the names in the first line. An empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a whole document
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names, rows = next(reader, []), []
    once(names, "column")
    for cells in filter(None, reader):
        if len(cells) != len(names):
            raise ValueError(f"line {reader.line_num} does not fit the first line")
        rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
    return rows
