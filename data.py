"""data.py: rows → prompts: messages, chat template, the order of rows.

docs/use/data_and_rewards.md has the forms of rows. Messages come first: as people store them → as
chat templates want them. Where they cannot be read a ValueError names the message and the key.
"""
import csv
import io
import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from tqdm import tqdm

from errors import SettingsError, as_sentence
from settings import Count, Flags
from texts import Marks, marks_of, prompt_ids, templated
from verifiers import last_boxed
from worker import ROOT, load_file

# ---- messages ----

KEYS = ("role", "content", "name", "tool_call_id", "weight")  # of a message: OpenAI's
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's
SHAREGPT = {"human": "user", "gpt": "assistant"}
WORDS = (nodes.Name, "name"), (nodes.Getattr, "attr"), (nodes.Const, "value")  # of a template
# Columns that would change the prompt, where they hold this. A text `history` is a subject.
UNREAD = {"history": list, "functions": list, "videos": list, "audios": list, "images": object,
          "image": object}
PAGE = "docs/use/data_and_rewards.md has the forms, examples/convert.py converts others"
FORM = ('{"role": text, "content": text or [{"type": "text", "text": text}], '
        '"tool_calls": [{"function": {"name": text, "arguments": object}}], "weight": 0 or 1}')
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")  # JSON, or Python's


def not_null(columns: dict) -> dict:
    """Without None and NaN."""
    return {column: value for column, value in columns.items()
            if value is not None and value == value}  # NaN differs from itself


def first_of(names: tuple[str, ...], columns: dict) -> str | None:
    """The first of these names that is a column with a value. None: there is none."""
    return next((name for name in names if name in not_null(columns)), None)


def from_json(value):
    """What a JSON text says; other texts and values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def struct(column: str, value):
    """A text that begins as an object does is its JSON, as in a .csv."""
    if not str(value).startswith("{"):
        return value
    if isinstance(from_json(value), str):
        raise SettingsError(f"{column} must be an object or its JSON text, not {value!r:.300}.")
    return from_json(value)


def chat_of(column: str, value, role: str | None) -> list[dict]:
    """The messages of a column: OpenAI's or ShareGPT's, a list or its JSON text. Each content
    becomes a text; a weight stays where it is 0. role: of a plain text; None: it must be a chat."""
    if isinstance(value, str) and role and not CHAT.match(value):
        return [{"role": role, "content": value}]
    stored, found = from_json(value), []
    if not isinstance(stored, list):
        text = "text or " if role else ""
        raise ValueError(f"the {column} must be {text}a list of {FORM}, not {value!r:.300}")
    for i, m in enumerate(stored):
        try:
            found.append(message_of(m))
        except ValueError as wrong:
            raise ValueError(f"message {i} of {column}: its {wrong} cannot be used: {m!r:.300}. "
                             f"Would work: {FORM}") from None
    return found


def message_of(stored) -> dict:
    """ValueError: the key that is wrong."""
    m = not_null(stored) if isinstance(stored, dict) else {}
    if "from" in m and "role" not in m:
        m = {"role": m.pop("from"), "content": m.pop("value", None)} | m
    if not isinstance(m.get("role"), str):
        raise ValueError("role")
    m["role"] = SHAREGPT.get(m["role"], m["role"])
    calls = m.pop("tool_calls", None)
    if calls:
        m["tool_calls"] = [call_of(c) for c in (calls if isinstance(calls, list) else [calls])]
    m["content"] = text_of(m.get("content", "" if calls else None))
    weight = m.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError("weight")
    return m if weight or m["role"] != "assistant" else m | {"weight": 0}


def text_of(content) -> str:
    """The texts of its parts, one after another."""
    text, parts = "", content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        part = part if isinstance(part, dict) else {}
        if not isinstance(part.get("text"), str) or part.get("type") != "text":
            raise ValueError("content")
        text += part["text"]
    return text


def call_of(stored) -> dict:
    """A call. Its arguments become an object: OpenAI's are a JSON text."""
    call = stored if isinstance(stored, dict) else {}
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    arguments = from_json(function.get("arguments") or {})
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError("tool_calls")
    return not_null(call) | {"function": not_null(function) | {"arguments": arguments}}


# ---- what the chat template gets ----

def render(messages: list[dict], tokenizer, finished: bool, options: dict) -> str:
    """The text that the model sees. SettingsError: the chat template cannot write it."""
    if finished:
        if len(messages) > 1 or options:
            raise SettingsError("a finished chat text takes no --system, no tools and no other "
                                "messages.")
        return messages[0]["content"]
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages)
    goes_on = messages[-1]["role"] == "assistant"
    text = templated(messages, tokenizer, options, add_generation_prompt=not goes_on,
                     continue_final_message=goes_on)
    for m in messages if text else ():
        said = m["content"].strip()  # Llama writes what a tool says as JSON
        if (m["role"] not in ("user", "assistant") and said not in text
                and json.dumps(said, ensure_ascii=False) not in text):
            raise SettingsError(f"the chat template leaves out the message of role {m['role']}.")
    return text


def options_of(columns: dict, messages: list[dict], tokenizer) -> dict:
    """What the chat template gets beside the messages: a row's tools, which are schemas, and its
    chat_template_kwargs. SettingsError: it has no place for them, or for a key or a role of a
    message that OpenAI's do not have."""
    there, template = not_null(columns), tokenizer.chat_template
    own, more = (from_json(there.get(key)) for key in ("tools", "chat_template_kwargs"))
    own, more = own or [], more or {}
    if not (isinstance(own, list) and all(isinstance(one, dict) for one in [*own, more])):
        raise SettingsError("tools must be a list of schemas and chat_template_kwargs an object, "
                            f"not {own!r:.300} and {more!r:.300}.")
    options = more | ({"tools": own} if own else {})
    meant = [key for m in messages for key, value in m.items()
             if key not in KEYS and value not in (None, "", [], {})]
    meant += [m["role"] for m in messages if m["role"] not in ROLES]
    unread = [name for name, kind in UNREAD.items()
              if there.get(name) and isinstance(there[name], kind)]
    several = template.values() if isinstance(template, dict) else [template]
    known = {*options, *meant} if template == "" else set().union(*map(words_of, several))
    for key in [*options, *meant, *unread]:
        if key in unread or key not in known:
            raise SettingsError(f"the chat template of the model has no place for {key}. Would "
                                f"work: rows without it, or another model; {PAGE}.")
    return options


@cache
def words_of(template: str | None) -> set[str]:
    """What a chat template can read: its names, attributes and whole strings, as `tools`, `m.name`,
    `m['role'] == 'tool'`; not its comments, and not what it writes."""
    from transformers.utils.chat_template_utils import _compile_jinja_template
    with suppress(TemplateError):  # `templated` says why it cannot be compiled
        tree = _compile_jinja_template(template or "").environment.parse(template or "")
        return {getattr(node, field) for kind, field in WORDS for node in tree.find_all(kind)}
    return set()


# ---- rows ----

FILES = (".jsonl", ".json", ".parquet", ".csv")
PROMPTS = ("prompt", "question", "problem")
CHATS = ("messages", "conversations")
ANSWERS = ("answer", "solution", "ground_truth", "target")
STRUCTS = ("reward_model", "extra_info")  # verl's
GENERATED_ROWS = 1000


@dataclass
class DataArgs(Flags):
    """What the model is asked."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out."""
    prompt_template: str | None = None
    """The user's message, with {question} or any {column} filled in."""
    system: str | None = None
    """A system message, put before the prompt."""


@dataclass
class Row:
    index: int
    prompt: str  # what the model sees
    prompt_ids: list[int]
    answer: object
    columns: dict
    source: str  # `data_source`, or the name
    finished: bool = False  # its text was a rendered chat already
    # {"prompt": the column that it comes from, …}; None: the row has none.
    read: dict[str, str | None] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """What a message calls it: counted from 1, as an editor counts lines."""
        return self.index + 1

    def digested(self, of_file) -> list:
        """All that the loop gets. of_file: the digest of a file beside the data, by its path."""
        return [self.prompt_ids, self.answer, self.columns, None, None, []]


class Prompt(NamedTuple):
    position: int  # seeds the sampling
    row: Row


@dataclass
class Stream:
    """Prompts without end, ordered by (seed, epoch, len(rows))."""
    rows: list[Row]
    seed: int
    position: int = 0  # the whole state

    @property
    def epoch(self) -> int:
        """How often all rows have been drawn."""
        return self.position // len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, fewer at the end of an epoch."""
        epoch, start = divmod(self.position, len(self.rows))
        order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.rows))
        drawn = enumerate(order[start:start + n], self.position)
        prompts = [Prompt(position, self.rows[i]) for position, i in drawn]
        self.position += len(prompts)
        return prompts

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from what `state_dict` returned."""
        self.position = state["position"]


def load(spec: str, tokenizer, args: DataArgs, *, seed: int = 0,
         make=None, eos_ids=()) -> tuple[list[Row], str]:
    """The prompts of `spec` in order, and a sentence with their counts. make: in the place of
    make_row."""
    make = make or make_row
    raw, name = read(spec, seed)
    marks, rows = marks_of(tokenizer, eos_ids), []
    silent = os.environ.get("RANK", "0") != "0"
    for index, columns in enumerate(tqdm(  # it shows itself after ten seconds
            raw, spec, delay=10, mininterval=10, unit=" rows", disable=silent)):
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
    """A row as the model sees it. None: it asks nothing."""
    columns = columns | {key: struct(key, columns[key]) for key in STRUCTS if key in columns}
    messages, (column, answer) = messages_of(columns, args), answer_of(columns)
    if not messages:
        return None
    options, markers = options_of(columns, messages, tokenizer), ("<|im_start|>", *marks.begins)
    finished = any(m["content"].lstrip().startswith(markers) for m in messages)
    if not finished:
        marks.check([messages, options])
    text = render(messages, tokenizer, finished, options)
    source = str(columns.get("data_source") or name)
    f"{text}{answer}{source}".encode()  # a ValueError for half a surrogate pair
    # A chat template writes the BOS itself.
    plain = tokenizer.chat_template is None and not finished
    ids = prompt_ids(text, tokenizer, plain)
    asked = "--prompt_template" if args.prompt_template else first_of((*PROMPTS, *CHATS), columns)
    return Row(index, text, ids, answer, columns, source, finished,
               {"prompt": asked, "answer": column if str(answer).strip() else None})


def one_line(error) -> str:
    """What it says, without line breaks."""
    return " ".join(str(error).split())


def read(spec: str, seed: int = 0) -> tuple[list[dict], str]:
    """The raw rows of `spec`, and its name."""
    if ".py:" in spec:
        return rows_of_function(spec, seed), Path(spec).name
    name, config, split = parts_of(spec)
    if name in ("tiny", "reasoning_gym"):
        from examples import reasoning_gym_tasks, tiny
        make = tiny.rows if name == "tiny" else reasoning_gym_tasks.rows
        rows = make(GENERATED_ROWS, seed, config, split or "train")
        return rows, f"{name}/{config}" if config else name
    is_file = name.endswith(FILES) and not os.path.isdir(name)
    if is_file != os.path.isfile(name) or is_file and config + split:
        raise SettingsError(f"{spec} is no file on this machine, or does not end in "
                            f"{', '.join(FILES)}. Rows of another form: FILE.py:NAME, a function "
                            "that returns or yields dicts.")
    try:
        rows = read_file(name) if is_file else read_datasets(
            name, config or None, split or "train")
    except Exception as error:
        reason = error.__cause__ or error  # `datasets` itself says "an error occurred"
        raise SettingsError(f"{spec} cannot be loaded: {type(reason).__name__}: "
                            f"{one_line(reason)[:300]}") from error
    if not rows:
        raise SettingsError(f"{spec} has no rows.")
    parts = Path(os.path.splitext(name)[0] if is_file else name).parts[-2:]
    return rows, "/".join(parts).lstrip("./")


def rows_of_function(spec: str, seed: int) -> list[dict]:
    """The rows that the function of FILE.py:NAME returns or yields. It is called once on each rank,
    with the seed. SettingsError: there is none, it fails, or what it gives is no rows."""
    path, _, name = spec.rpartition(":")
    found = [it for it in (Path(path), ROOT / path) if it.is_file()]
    if not found:
        raise SettingsError(f"{spec}: there is no file {path} here or in {ROOT}.")
    with as_sentence(f"{spec} must be a function of a seed that returns or yields rows"):
        rows = list(getattr(load_file(found[0].resolve()), name)(seed))
        wrong = next((n for n, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
        if wrong:
            raise ValueError(f"row {wrong} is {rows[wrong - 1]!r:.80}, which is no dict")
        if not rows:
            raise ValueError("it gave none")
    return rows


def parts_of(spec: str) -> tuple[str, str, str]:
    """NAME[:config][@split]. The name of a file, or of a folder that is here, may hold : and @."""
    spec = os.path.expanduser(spec)
    marks = [] if spec.endswith(FILES) else re.finditer("[:@]", spec)
    ends = [*(mark.start() for mark in marks), len(spec)]
    end = max((end for end in ends if os.path.exists(spec[:end])), default=ends[0])
    return spec[:end], *re.fullmatch(":?([^@]*)@?(.*)", spec[end:], re.DOTALL).groups()


# Not by `datasets`: it reads 007 in a .csv as 7, "2026-01-31" in JSON as a date. It names no line.

def read_file(path: str) -> list[dict]:
    """The rows of one of FILES."""
    if path.endswith(".parquet"):
        import pyarrow.parquet
        return from_arrow(pyarrow.parquet.ParquetFile(path).read())  # read_table takes URIs
    parse = read_csv if path.endswith(".csv") else read_json
    return parse(Path(path).read_bytes().decode("utf-8-sig"))


def from_arrow(table) -> list[dict]:
    """The rows of a table. Its structs have the keys of all rows: those that are null go."""
    import pyarrow as pa

    def plain(value, kind):
        if pa.types.is_struct(kind) and value is not None:
            return {field.name: plain(value[field.name], field.type) for field in kind
                    if value[field.name] is not None}
        if isinstance(value, list) and hasattr(kind, "value_type"):
            return [plain(item, kind.value_type) for item in value]
        return from_json(value) if isinstance(kind, pa.JsonType) else value

    return [{field.name: plain(row[field.name], field.type) for field in table.schema}
            for row in table.to_pylist()]


def read_json(text: str) -> list[dict]:
    """Objects, or lists of objects, one after another."""
    rows, at, space, decoder = [], 0, re.compile(r"\s*"), json.JSONDecoder()
    while (at := space.match(text, at).end()) < len(text):
        found, at = decoder.raw_decode(text, at)  # an error names line and column
        rows += found if isinstance(found, list) else [found]
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {i} is not a JSON object")
    return rows


def read_csv(text: str) -> list[dict]:
    """An empty cell is None. Empty lines do not count."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a whole document
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names, rows = next(reader, []), []
    for cells in filter(None, reader):
        if len(cells) != len(names):
            raise ValueError(f"line {reader.line_num} does not fit the first line")
        rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
    return rows


def read_datasets(path: str, config: str | None, split: str) -> list[dict]:
    """A folder, or a name. A folder is read anew: files may change, and a home be read-only."""
    import datasets
    if not os.path.isdir(path):
        return from_arrow(datasets.load_dataset(path, config, split=split).with_format("arrow")[:])
    with tempfile.TemporaryDirectory() as cache:
        if re.search(r"[*?[]|::", os.path.abspath(path)):  # `datasets` would read it as a pattern
            path = shutil.copytree(os.path.abspath(path), f"{cache}/rows", copy_function=os.symlink)
        saved = f"{path}/*.arrow" if os.path.isfile(f"{path}/state.json") else None
        made = datasets.load_dataset_builder(  # `datasets` alone takes no folder of save_to_disk
            "arrow" if saved else path, config, data_files=saved, cache_dir=cache)
        files = made.config.data_files  # of each split
        others = [file for file in sum(files.values(), []) if not file.endswith(FILES)]
        if others and type(made).__name__.startswith(("Csv", "Json")):  # it would read 007 as 7
            raise SettingsError(f"{others[0]} does not end in {', '.join(FILES)}.")
        if others:
            made.download_and_prepare()
            return from_arrow(made.as_dataset(split).with_format("arrow")[:])
        rows = {name: sum(map(read_file, paths), []) for name, paths in files.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(
            {name: len(found) for name, found in rows.items()})
        return [row for part in parts for row in rows[part.splitname][part.from_:part.to]]


def messages_of(columns: dict, args: DataArgs) -> list[dict]:
    """The chat of a row; []: it asks nothing."""
    there, template = not_null(columns), args.prompt_template
    column = first_of((*PROMPTS, *CHATS), there)
    if not column and columns.keys() & {*PROMPTS}:
        return []
    messages = chat_of(column, there[column], "user") if column else []
    last = messages[-1] if messages else {"role": "user", "content": ""}
    answered = last["role"] == "assistant" and (column in CHATS or "tool_calls" in last)
    if template is not None and (answered or not column):
        last = {"role": "user", "content": fill_template(template, columns)}
        messages, template = [last], None
    elif answered:
        raise SettingsError(f"{column} ends with what the assistant says. Would work: a chat that "
                            "ends before it, or sft.py, which learns it.")
    elif not column:
        raise SettingsError(f"no prompt column in ({', '.join(columns)}); it needs "
                            f"{', '.join(PROMPTS)}, or --prompt_template, such as "
                            "'{instruction} {input}' for Alpaca's.")
    asked = last["content"]
    if asked.strip() and template is not None:
        asked = fill_template(template, {"question": asked, **columns, "prompt": asked})
        messages = [*messages[:-1], last | {"content": asked}]
    if not asked.strip() and last["role"] != "tool":
        return []
    system = there.get("system") or there.get("system_prompt") or None
    if args.system is not None:
        system, messages = args.system, [m for m in messages if m["role"] != "system"]
    if system is not None and messages[0]["role"] != "system":
        messages = [*chat_of("system", system, "system"), *messages]
    return messages


def answer_of(columns: dict) -> tuple[str | None, object]:
    """The column of a row's right answer, and the answer. (None, None): the row has none."""
    verl = columns.get("reward_model")
    if isinstance(verl, dict) and verl.get("ground_truth") is not None:
        return "reward_model", verl["ground_truth"]
    column = first_of(ANSWERS, columns)
    answer = columns.get(column)
    box = last_boxed(answer) if column == "solution" and isinstance(answer, str) else None
    return ("the last box of solution", box) if box else (column, answer)


def fill_template(template: str, columns: dict) -> str:
    """`template` with each {name} replaced by that column, except in the braces of LaTeX."""
    pattern = r"\\[A-Za-z]{2,}(?:\{[^{}]*\})+|\{([A-Za-z_]\w*)\}"
    names = {*re.findall(pattern, template)} - {""}
    if not names or names - columns.keys():
        raise SettingsError(f"--prompt_template {template!r} must name one or more columns of the "
                            f"row ({', '.join(columns)}); plain braces are {{ word }}.")
    there = {"": None} | not_null(columns)  # an empty cell is an empty text
    return re.sub(
        pattern, lambda match: str(there.get(match[1], "")) if match[1] else match[0], template)
