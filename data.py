"""Rows → prompts: where the data comes from, what the model sees, and the order it sees it in.

    rows, report = load("openai/gsm8k:main", tokenizer, max_prompt_tokens=512)
    stream = Stream(rows, seed=1)
    stream.take(8)                     # at most 8 Prompt(position, row); stream.position = k resumes exactly there

What `--data` may say (`read`):

    rows.jsonl  rows.json  rows.parquet    a file: one JSON object a line, a JSON list of objects, or a table
    some/folder[@split]                    files or a saved data set that the `datasets` library can load
    name[:config][@split]                  a Hugging Face data set, from the local cache or the hub; the split is `train` unless said
    reasoning_gym:TASK[@split]             `size` puzzles from a generator of the reasoning-gym library; each split has its own seeds
    tiny[:TASK][@split]                    `size` rows of the procedural task in tiny.py; its splits, train and test, share no question

Which rows are understood, by the columns they have (`prompt_of`, `answer_of`; the first line that fits counts, a null is no column):

    has                                    prompt               answer                              seen in
    prompt, reward_model.ground_truth      messages or str      reward_model["ground_truth"]        verl, TinyZero, Logic-RL
    prompt                                 messages or str      answer|solution|ground_truth|target TRL (may be missing: None)
    question, metadata.source_dataset      question             answer (columns: reasoning_gym_*)   reasoning-gym
    question or problem                    that text            answer|solution|ground_truth|target GSM8K, MATH, AIME
    nums, target                           TinyZero's sentence  {"target": …, "numbers": […]}       countdown
    anything, with --prompt_template       the filled template  as in the lines above

A `solution` with a \\boxed{…} gives what stands in its last box. Other answers are handed on untouched (GSM8K's "… #### 18" too):
taking them apart is the reward's business, which is handed every column the row brought (`Row.columns`).

A str prompt is one user message, and messages go through the tokenizer's chat template, exactly once: a single text that begins with
a chat marker (`<|im_start|>…`, as Logic-RL's rows do) is a finished prompt and is left as it is. A tokenizer that has no chat
template gets plain text. (TRL never templates a str prompt; here it is templated wherever there is a template.)
"""
import json
import os
import pickle
import re
import subprocess
import sys
import zlib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plan import SettingsError

FILES = (".jsonl", ".json", ".parquet")
PROMPTS = ("prompt", "question", "problem")                     # columns that hold a prompt; the first one there counts
ANSWERS = ("answer", "solution", "ground_truth", "target")      # columns that hold an answer; the first one there counts
GENERATED_ROWS = 1000                                           # of a generator, where no size is given
# Jiayi-Pan/TinyZero examples/data_preprocess/countdown.py, the user's part of its instruct prompt
COUNTDOWN = ("Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic operations (+, -, *, /) "
             "and each number can only be used once. Show your work in <think> </think> tags. And return the final answer in "
             "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.")


@dataclass
class Row:
    index: int              # where it stands in its source, counted from 0 (blank lines do not count)
    prompt: str             # the finished text the model sees, after the chat template
    prompt_ids: list[int]   # its tokens, a BOS included where the model wants one
    answer: object          # what the reward compares with; None where the row has none
    columns: dict           # everything the row brought, and what reward functions need besides
    source: str             # its `data_source` column, or else the name of the file or data set: evaluation reports per source


class Prompt(NamedTuple):
    position: int           # of this draw in the whole stream, unique across epochs: it seeds the sampling
    row: Row


@dataclass
class Report:
    """What became of the rows of one source. read = kept + too_long + empty."""
    name: str
    limit: int              # max_prompt_tokens
    read: int = 0
    kept: int = 0
    too_long: int = 0       # left out: more than `limit` tokens
    empty: int = 0          # left out: nothing but blanks to ask
    duplicates: int = 0     # kept: the same finished prompt as an earlier row
    templated: int = 0      # came with a chat template already applied, and left as it was
    shortest: int = 0       # tokens, over the kept prompts
    longest: int = 0

    def text(self) -> str:
        """One line for people."""
        line = f"{self.name}: {self.kept} of {self.read} prompts kept, {self.shortest} to {self.longest} tokens; "
        line += f"left out: {self.too_long} longer than {self.limit} tokens, {self.empty} empty; duplicates (kept): {self.duplicates}"
        return line + (f"; already templated: {self.templated}" if self.templated else "")


def load(spec: str, tokenizer, *, max_prompt_tokens: int, prompt_template: str | None = None, system: str | None = None,
         seed: int = 0, size: int | None = None) -> tuple[list[Row], Report]:
    """The rows of `spec` as prompts for `tokenizer`, in their source's order, and a report of what was left out.

    prompt_template: the user's message, with {question} (the row's own prompt) or any {column} filled in.
    system: a system message put in front, in place of one the row has.
    seed, size: for generators; `size` also cuts files and data sets to their first rows.
    SettingsError: anything wrong with the source, a row or the template, and when no prompt is left.
    """
    brought, name = read(spec, seed, size)
    report = Report(name, max_prompt_tokens, read=len(brought))
    # What a templated prompt begins with and a question never does: ChatML's marker, and this tokenizer's special tokens.
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content)
    markers = ("<|im_start|>", *special)
    rows, kinds = [], []                                        # kinds[i]: how the text of rows[i] came about
    for index, columns in enumerate(brought):
        where = f"{spec}, row {index} (counted from 0)"
        prompt, answer = prompt_of(columns, prompt_template, where), answer_of(columns, where)
        if not prompt:
            report.empty += 1
            continue
        text, kind = finish(prompt, tokenizer, system, markers, where)
        kinds.append(kind)
        metadata = columns.get("metadata")
        if isinstance(metadata, dict) and "source_dataset" in metadata:     # reasoning-gym's scorers take the whole entry
            columns = {**columns, "reasoning_gym_task": metadata["source_dataset"], "reasoning_gym_entry": columns}
        rows.append(Row(index, text, [], answer, columns, str(columns.get("data_source") or name)))

    # A template writes the BOS itself, so only plain text asks the tokenizer for one: never two.
    for special in (False, True):
        if chosen := [row for row, kind in zip(rows, kinds) if (kind == "plain") == special]:
            ids = tokenizer([row.prompt for row in chosen], add_special_tokens=special)["input_ids"]
            for row, row_ids in zip(chosen, ids):
                row.prompt_ids = row_ids

    kept = [row for row in rows if len(row.prompt_ids) <= max_prompt_tokens]
    lengths = sorted(len(row.prompt_ids) for row in rows)
    if not rows:
        raise SettingsError(f"{spec}: all {report.read} rows have an empty prompt; at least one has to ask something.")
    if not kept:
        raise SettingsError(f"{spec}: no prompt is left: the shortest of {len(rows)} has {lengths[0]} tokens and --max_prompt_tokens is "
                            f"{max_prompt_tokens}; --max_prompt_tokens {lengths[0]} keeps it, {lengths[-1]} keeps them all.")
    report.templated = kinds.count("finished")
    report.kept, report.too_long = len(kept), len(rows) - len(kept)
    report.shortest, report.longest = lengths[0], lengths[len(kept) - 1]
    report.duplicates = len(kept) - len({row.prompt for row in kept})
    return kept, report


# ---- Sources: spec → raw rows -------------------------------------------------------------------------------------------------------

def read(spec: str, seed: int = 0, size: int | None = None) -> tuple[list[dict], str]:
    """The raw rows of `spec` (the first `size` of them; None: all, or GENERATED_ROWS of a generator) and the source's name.

    Needs no tokenizer and changes nothing in a row. SettingsError: see the readers below.
    """
    if size is not None and size < 1:
        raise SettingsError(f"size {size} asks for no rows of {spec}; a size is at least 1.")
    path, (kind, task, split) = Path(spec).expanduser(), parts(spec)
    if kind == "tiny":
        import tiny
        if task and task not in tiny.TASKS or split not in ("", "train", "test"):
            raise SettingsError(f"no such rows: {spec}; tiny[:TASK][@split] knows the tasks {', '.join(tiny.TASKS)} "
                                f"and the splits train and test.")
        wanted = {"task": task} if task else {}
        return tiny.rows(size or GENERATED_ROWS, seed, split=split or "train", **wanted), f"tiny/{task}" if task else "tiny"
    if kind == "reasoning_gym":
        # Puzzle i is made from the generator's seed + i, so neighbouring seeds would share nearly all their puzzles: spread them.
        seed = zlib.crc32(f"{split or 'train'} {seed}".encode()) // 2
        return read_reasoning_gym(task, size or GENERATED_ROWS, seed), f"reasoning_gym/{task}"
    if path.suffix in FILES and not path.is_dir():
        rows, name = read_file(path), path.with_suffix("")
    else:
        rows, name = read_datasets(spec, size)
    if not rows:
        raise SettingsError(f"{spec} is empty: it has no rows; at least one is needed.")
    return rows[:size], "/".join(part for part in name.parts[-2:] if part not in ("/", ".."))       # gsm8k/train, openai/gsm8k


def parts(spec: str) -> tuple[str, str, str]:
    """name[:config][@split] → (name, config, split), "" where one is not there. A split may hold colons: train[:100]."""
    head, _, split = spec.partition("@")
    name, _, config = head.partition(":")
    return name, config, split


def read_file(path: Path) -> list[dict]:
    """The rows of a JSONL, JSON or parquet file. SettingsError: no such file, unreadable, malformed (file:line), not an object."""
    if not path.is_file():
        raise SettingsError(f"no such file: {path}; {nearby(path)}")
    if path.suffix == ".parquet":
        import pyarrow.parquet
        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (ValueError, OSError) as error:                  # ArrowInvalid is a ValueError
            raise SettingsError(f"{path} cannot be read as parquet: {one_line(error)}") from error
    # Lines end at b"\n" alone: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and text.lstrip().startswith(b"["):
        rows = {f"{path}, item {i} (counted from 0)": item for i, item in enumerate(parse_json(text, path, 1))}
    else:
        rows = {f"{path}:{i}": parse_json(line, path, i) for i, line in enumerate(text.split(b"\n"), start=1) if line.strip()}
    for where, item in rows.items():
        if not isinstance(item, dict):
            raise SettingsError(f'{where}: a row has to be an object such as {{"question": …, "answer": …}}, not {json.dumps(item)[:60]}')
    return list(rows.values())


def parse_json(text: bytes, path: Path, line: int) -> object:
    """json.loads of what begins at this line of a file, with an error that says where it went wrong."""
    rule = "each line has to be one JSON object"
    try:
        return json.loads(text.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path}:{line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}; {rule}.") from error
    except (ValueError, RecursionError) as error:               # not UTF-8, a number of thousands of digits, brackets without end
        raise SettingsError(f"{path}:{line}: not JSON: {one_line(error)}; {rule}.") from error


def read_datasets(spec: str, size: int | None) -> tuple[list[dict], Path]:
    """The rows of a folder or of a Hugging Face data set, and its path or name without config and split.

    SettingsError: not here and not to be had (offline, unknown, private), an unknown config or split, several splits and none named.
    """
    name, config, split = parts(spec)
    folder = Path(name).expanduser()
    if not name or not folder.is_dir() and (spec.startswith((".", "/", "~")) or name.count("/") > 1 or folder.is_file()):
        what = "no such folder" if not folder.is_file() else f"only {', '.join(FILES)} files can be read"
        raise SettingsError(f"{what}: {name}; {nearby(folder)}")
    import datasets
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():       # written by save_to_disk
            data = datasets.load_from_disk(str(folder))
            data = data[split] if split else data
        else:
            data = datasets.load_dataset(str(folder) if folder.is_dir() else name, config or None, split=split or None)
    except ConnectionError as error:
        raise SettingsError(f"{name} is no file or folder here ({nearby(folder)}), it is not in the local Hugging Face cache, "
                            f"and the hub cannot be reached: {one_line(error)}") from error
    except Exception as error:      # the loader is not ours and raises a dozen kinds; all mean that this data set cannot be had
        raise SettingsError(f"the data set {spec} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    if isinstance(data, dict):
        if "train" not in data and len(data) > 1:
            raise SettingsError(f"{spec} has no split train; say which with {spec}@SPLIT: {', '.join(data)}.")
        data = data.get("train", next(iter(data.values())))
    return data.select(range(min(size or len(data), len(data)))).to_list(), folder


# Some generators walk over sets or draw from the global generator, so their puzzles would change with the process: between ranks,
# and after a resume. A process of its own, with Python's hash seed and both global generators fixed, makes them a function of the seed.
GENERATE = """
import pickle, random, sys
import numpy, reasoning_gym
out, sys.stdout = sys.stdout.buffer, sys.stderr
task, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(seed); numpy.random.seed(seed % 2**32)
data = reasoning_gym.create_dataset(task, size=size, seed=seed)
pickle.dump([data[i] for i in range(size)], out)
"""


def read_reasoning_gym(task: str, size: int, seed: int) -> list[dict]:
    """`size` puzzles: question, answer (null where many are right), metadata. SettingsError: unknown task, a generator that fails."""
    done = subprocess.run([sys.executable, "-c", GENERATE, task, str(size), str(seed)], capture_output=True,
                          env={**os.environ, "PYTHONHASHSEED": "0"})
    if done.returncode == 0:
        return pickle.loads(done.stdout)                        # written by our own child a moment ago
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SettingsError(f"reasoning_gym:{task} needs the reasoning-gym library: {one_line(error)}") from error
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise SettingsError(f"reasoning_gym has no task {task!r}; nearest of its {len(DATASETS)}: {', '.join(near)}.")
    raise SettingsError(f"reasoning_gym:{task} cannot be generated: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")


def nearby(path: Path) -> str:
    """What to say of a path that is not there: the names most like it in its folder."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    names = sorted(entry.name for entry in path.parent.iterdir())
    near = get_close_matches(path.name, names, n=3, cutoff=0.5) or [name for name in names if name.endswith(FILES)][:5]
    return f"nearest in {path.parent}: {', '.join(near)}" if near else f"nothing in {path.parent} has a name like it"


def one_line(error: BaseException) -> str:
    """The message of an error from elsewhere, on one line of bearable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---- Shapes: raw row → prompt and answer --------------------------------------------------------------------------------------------

def prompt_of(columns: dict, template: str | None, where: str) -> str | list[dict]:
    """What a raw row asks, as a text or as messages: the table at the top, then the template. Empty, "", if there is nothing to ask.

    SettingsError: no column that the table knows, a prompt that is neither text nor messages, a template column that is missing.
    """
    there = {name: value for name, value in columns.items() if value is not None}
    column = next((name for name in PROMPTS if name in there), None)
    if column:
        prompt = there[column]
    elif any(name in columns for name in PROMPTS):              # there, but null
        return ""
    elif "nums" in there and "target" in there:
        prompt = fill(COUNTDOWN, there, where)
    elif template is not None:
        return fill(template, there, where)
    else:
        raise SettingsError(f"{where}: no prompt column: it has {', '.join(columns) or 'none'}; one of {', '.join(PROMPTS)} "
                            f"(or nums and target) is needed, or a --prompt_template that names columns.")
    if not isinstance(prompt, str) and not is_messages(prompt):
        raise SettingsError(f'{where}: `{column}` has to be a text or a list of {{"role": …, "content": text}} messages, '
                            f"not {repr(prompt)[:80]}")
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    if not asked.strip():
        return ""
    if template is None:
        return prompt
    asked = fill(template, {"question": asked, **there, "prompt": asked}, where)
    return asked if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": asked}]


def answer_of(columns: dict, where: str) -> object:
    """What the reward compares with: the table at the top. SettingsError: a question that comes without any answer column."""
    there = {name: value for name, value in columns.items() if value is not None}
    verl = there.get("reward_model")
    if isinstance(verl, dict) and verl.get("ground_truth") is not None:
        return verl["ground_truth"]
    if "nums" in there and "target" in there:
        return {"target": there["target"], "numbers": there["nums"]}        # as TinyZero's own ground_truth
    if not any(name in columns for name in ANSWERS) and "prompt" not in columns and ("question" in there or "problem" in there):
        raise SettingsError(f"{where}: no answer column: it has {', '.join(columns)}; a question needs one of {', '.join(ANSWERS)} "
                            f"(for a reward that needs no answer, call the question `prompt`).")
    column = next((name for name in ANSWERS if name in there), None)
    answer = there.get(column)
    return last_boxed(answer) if column == "solution" and isinstance(answer, str) else answer


def is_messages(prompt: object) -> bool:
    """Whether this is a chat: a list, empty or of {"role": str, "content": str}."""
    return isinstance(prompt, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                                            for m in prompt)


def fill(template: str, columns: dict, where: str) -> str:
    """`template` with each {name} replaced by that column, in one pass: braces inside the data, and all others, stay as they are.

    {name} means one bare word. The braces of a LaTeX command stay too, so \\boxed{answer} does not give the answer away.
    Not str.format: it would trip over \\boxed{}, and would evaluate {a.b[c]}. SettingsError: no such column, or none named at all.
    """
    used = []

    def replace(match):
        if (name := match["name"]) is None:
            return match[0]
        if name not in columns:
            raise SettingsError(f"--prompt_template names {{{name}}}, which is no column of {where}: it has {', '.join(columns)} "
                                f"(for the braces themselves write {{ {name} }}).")
        used.append(name)
        return str(columns[name])

    text = re.sub(r"\\[A-Za-z]{2,}(?:\{[^{}]*\})+|\{(?P<name>[A-Za-z_]\w*)\}", replace, template)
    if not used:
        raise SettingsError(f"--prompt_template {template!r} names no column, so every prompt would be the same; "
                            f"put in one of {', '.join('{%s}' % name for name in columns)}.")
    return text


def last_boxed(text: str) -> str:
    """What stands in the last \\boxed{…} of a worked solution, its braces balanced; the whole text if there is no complete one."""
    start = text.rfind("\\boxed{") + len("\\boxed{")
    depth = 1
    for end in range(start, len(text) if "\\boxed{" in text else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return text


# ---- Templates: prompt → the text the model sees ------------------------------------------------------------------------------------

def finish(prompt: str | list[dict], tokenizer, system: str | None, markers: tuple[str, ...], where: str) -> tuple[str, str]:
    """The text the model sees and how it came about: "finished" (as it was), "templated" (by us) or "plain" (there is no template).

    A chat that ends with the assistant's own words is to be continued, not answered.
    SettingsError: a finished prompt beside other messages or --system, a chat that the template refuses, text that is not Unicode.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [message["content"] for message in messages]
    if any("\ud800" <= character <= "\udfff" for content in contents if not content.isascii() for character in content):
        raise SettingsError(f"{where}: the prompt holds half a surrogate pair, which is no character and cannot be encoded.")
    if any(content.lstrip().startswith(markers) for content in contents):
        if len(messages) > 1 or system is not None:
            raise SettingsError(f"{where}: the prompt is a finished chat text (it begins with {contents[-1].lstrip()[:16]!r}), so neither "
                                f"--system nor other messages can be added; build it anew from the row's columns with --prompt_template.")
        return contents[0], "finished"
    if system is not None:
        messages = [{"role": "system", "content": system}, *(message for message in messages if message["role"] != "system")]
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages), "plain"
    from jinja2 import TemplateError
    goes_on = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise SettingsError(f"{where}: the tokenizer's chat template refuses the roles {roles}: {one_line(error)}") from error
    return text, "templated"


# ---- Order: where we are in the data ------------------------------------------------------------------------------------------------

class Stream:
    """An endless walk over `rows`, epoch after epoch. `position` is its whole state: prompts handed out since the start, settable.

    Epoch e is a permutation that depends on (seed, e, number of rows) and on nothing before it, so any position can be entered directly.
    """

    def __init__(self, rows: list[Row], seed: int, shuffle: bool = True):
        if not rows:
            raise SettingsError("there are no rows to draw prompts from; at least one is needed.")
        self.rows, self.seed, self.shuffle, self.position = rows, seed, shuffle, 0

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt comes from, counted from 0."""
        return self.position // len(self.rows)

    def order(self, epoch: int) -> np.ndarray:
        """(len(rows),) the row drawn at each offset of this epoch."""
        if not self.shuffle:
            return np.arange(len(self.rows))
        return np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.rows))

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, or what is left of this epoch if that is less: a batch never mixes epochs, and no row is dropped."""
        offset = self.position % len(self.rows)
        drawn = self.order(self.epoch)[offset:offset + n]
        first, self.position = self.position, self.position + len(drawn)
        return [Prompt(first + i, self.rows[j]) for i, j in enumerate(drawn)]


def batches_per_epoch(n_rows: int, batch: int) -> int:
    """Calls of `Stream.take(batch)` in one epoch, the last, shorter one included."""
    return -(-n_rows // batch)
