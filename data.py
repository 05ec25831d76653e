"""data.py: rows → prompts (docs/data.md)."""
import csv
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError

from dist import SettingsError
from examples import countdown
from scoring.replies import is_message
from scoring.verifiers import last_boxed

FILES = (".jsonl", ".json", ".parquet", ".csv")
PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution", "ground_truth", "target")
GENERATED_ROWS = 1000
COME_BACK = 4  # epochs from one that has all rows to the next, with --difficulty


@dataclass
class DataArgs:
    """What the model is asked."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out."""
    prompt_template: str | None = None
    """The user's message, with {question} or any {column} filled in."""
    system: str | None = None
    """A system message, put before the prompt."""
    difficulty: tuple[float, float] | None = None
    """LOW HIGH: from the second epoch on, rows whose last pass rate was outside are left out. Every
    fourth epoch has all rows."""


@dataclass
class Row:
    index: int
    prompt: str  # what the model sees
    prompt_ids: list[int]
    answer: object
    columns: dict
    source: str  # `data_source`, or the name
    control: bool = False  # control tokens inside its own text: in a chat they end a message
    finished: bool = False  # its text was a rendered chat already
    target: tuple[list[int], list[bool]] | None = None  # ids to learn from, see chats.py
    teacher_ids: list[int] | None = None  # the prompt that --teacher_prompt makes


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
        return self.position // len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, fewer at the end of an epoch."""
        epoch, start = divmod(self.position, len(self.rows))
        order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.rows))
        drawn = enumerate(order[start:start + n], self.position)
        prompts = [Prompt(position, self.rows[i]) for position, i in drawn]
        self.position += len(prompts)
        return prompts

    def note(self, samples: list) -> dict[str, int]:
        return {"data/position": self.position}  # a metric

    def state(self) -> dict:
        """For a checkpoint."""
        return {"position": self.position}

    def restore(self, state: dict) -> None:
        self.position = state["position"]


@dataclass
class StreamByDifficulty(Stream):
    """The same order, without rows that are too hard or too easy now: --difficulty.

    Each row keeps its position, and so its seeds. `rates` is the share of a row's last completions
    that passed: {its index: share}. It is the same on every rank, because the samples are.
    """
    low: float = 0.0
    high: float = 1.0
    passes: float = 1.0  # --eval_pass: a completion passes from this first reward on
    rates: dict[int, float] = field(default_factory=dict)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, fewer at the end of an epoch. An epoch may have none left."""
        prompts = []
        while not prompts:
            left_out = self.left_out(self.epoch)
            rest = super().next(len(self.rows))  # of this epoch
            prompts = [prompt for prompt in rest if prompt.row.index not in left_out][:n]
        if len(prompts) == n:
            self.position = prompts[-1].position + 1
        return prompts

    def left_out(self, epoch: int) -> set[int]:
        """The indices of rows that this epoch does not have."""
        if epoch % COME_BACK == 0:
            return set()
        return {i for i, rate in self.rates.items() if not self.low <= rate <= self.high}

    def note(self, samples: list) -> dict[str, int]:
        """Takes the pass rates of all samples of a step → metrics."""
        passed = defaultdict(list)
        for sample in samples:
            value = next(iter(sample.score.parts.values()))  # of the first reward
            if value is not None:
                passed[sample.prompt.row.index].append(value >= self.passes)
        self.rates |= {i: sum(found) / len(found) for i, found in passed.items()}
        rates = self.rates.values()
        return super().note(samples) | {
            "data/too_hard": sum(rate < self.low for rate in rates),
            "data/too_easy": sum(rate > self.high for rate in rates)}

    def state(self) -> dict:
        return super().state() | {"rates": self.rates}

    def restore(self, state: dict) -> None:
        super().restore(state)  # JSON made the indices text
        self.rates = {int(i): rate for i, rate in state.get("rates", {}).items()}


def stream(args, rows: list[Row]) -> Stream:
    """The order that a run's flags ask for."""
    if args.data_args.difficulty is None:
        return Stream(rows, args.seed)
    low, high = args.data_args.difficulty
    return StreamByDifficulty(rows, args.seed, 0, low, high, args.eval_args.eval_pass)


def load(spec: str, tokenizer, args: DataArgs, *, seed: int = 0,
         make=None) -> tuple[list[Row], str]:
    """The prompts of `spec` in order, and a sentence with their counts. make: in the place of
    make_row."""
    make = make or make_row
    raw, name = read(spec, seed)
    tokens = tokenizer.added_tokens_decoder.values()
    controls = [token.content for token in tokens if token.special and token.content]
    rows = []
    for index, columns in enumerate(raw):
        try:
            row = make(index, columns, name, tokenizer, controls, args)
        except TemplateError as error:
            raise SettingsError(f"the model's chat template fails with row {index} of {spec} "
                                f"(counted from 0): {' '.join(str(error).split())}") from error
        except (SettingsError, ValueError) as error:
            raise SettingsError(
                f"{spec}, row {index} (counted from 0): {' '.join(str(error).split())}") from error
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
    report = (
        f"{name}: {len(kept)} of {len(raw)} prompts kept, {lengths[0]} to {lengths[len(kept) - 1]} "
        f"tokens; left out: {len(rows) - len(kept)} longer than {limit} tokens, "
        f"{len(raw) - len(rows)} empty; duplicates (kept): "
        f"{len(kept) - len({row.prompt for row in kept})}")
    if len(kept) > 1 and len({row.prompt for row in kept}) == 1:
        report += "; all prompts are the same text: does the chat template use the messages?"
    control = [row.index for row in rows if row.control]
    if control:
        report += f"; control tokens inside the text: {len(control)} (first: row {control[0]})"
    return kept, report


def make_row(index: int, columns: dict, name: str, tokenizer, controls: list[str],
             args: DataArgs, tools: list[dict] | None = None) -> Row | None:
    """A row as the model sees it. None: it asks nothing. controls: texts of control tokens. tools:
    the schemas of --tools."""
    there = not_null(columns)
    messages, answer = messages_of(columns, there, args.prompt_template), answer_of(columns, there)
    if not messages:
        return None
    contents = [m["content"] for m in messages]
    markers = ("<|im_start|>", *controls)
    finished = any(content.lstrip().startswith(markers) for content in contents)
    text = render(messages, tokenizer, args.system, finished, tools)
    source = str(columns.get("data_source") or name)
    f"{text}{answer}{source}".encode()  # a ValueError for half a surrogate pair
    # A chat template writes the BOS itself.
    plain = tokenizer.chat_template is None and not finished
    ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
    inside = not finished and any(
        control in content for control in controls for content in contents)
    return Row(index, text, ids, answer, columns, source, inside, finished)


def not_null(columns: dict) -> dict:
    return {column: value for column, value in columns.items()
            if value is not None and value == value}  # NaN differs from itself


def read(spec: str, seed: int = 0) -> tuple[list[dict], str]:
    """The raw rows of `spec`, and its name."""
    spec = os.path.expanduser(spec)
    name, config, split = re.fullmatch("([^:@]*):?([^@]*)@?(.*)", spec, re.DOTALL).groups()
    if name in ("tiny", "reasoning_gym"):
        from examples import reasoning_gym_tasks, tiny
        make = tiny.rows if name == "tiny" else reasoning_gym_tasks.rows
        rows = make(GENERATED_ROWS, seed, config, split or "train")
        return rows, f"{name}/{config}" if config else name
    is_file = spec.endswith(FILES) and not os.path.isdir(spec)  # its name may hold : and @
    path = spec if is_file else name
    if "://" in spec:
        raise SettingsError(f"{spec} is a URL; download it.")
    if not is_file and os.path.isfile(name):
        raise SettingsError(f"{spec} is a file; it must end in {', '.join(FILES)}.")
    if os.path.lexists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise SettingsError(f"{path} is a pipe or a broken link.")
    try:
        rows = read_file(path) if is_file else read_datasets(path, config or None, split)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{spec} must be UTF-8 (its byte {error.start:,} is not); convert it, "
                            f"for example with iconv.") from error
    except csv.Error as error:
        raise SettingsError(f"{spec} is no whole .csv ({error}): is a quotation mark never "
                            f"closed?") from error
    except Exception as error:
        raise SettingsError(
            f"{spec} cannot be loaded as a {', '.join(FILES)} file, a folder or a Hugging Face "
            f"name: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    if not rows:
        raise SettingsError(f"{spec} has no rows.")
    parts = Path(os.path.splitext(path)[0] if is_file else path).parts[-2:]
    return rows, "/".join(part for part in parts if part not in ("/", ".."))


def read_file(path: str) -> list[dict]:
    if path.endswith(".parquet"):
        import pyarrow.parquet  # `datasets` refuses empty tables and map columns
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.endswith(".csv"):
        return read_csv(path)
    text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    is_list = path.endswith(".json") and text.lstrip().startswith(b"[")
    parts = [text] if is_list else text.split(b"\n")  # str.splitlines would also cut at U+2028
    rows = []
    for line, part in enumerate(parts, start=1):
        if not part.strip():
            continue
        try:
            found = json.loads(part.decode())
            for row in found if is_list else [found]:
                rows.append({**row})  # fails unless it is an object
        except (TypeError, ValueError, RecursionError) as error:
            line, column = line + getattr(error, "lineno", 1) - 1, getattr(error, "colno", 1)
            raise ValueError(f"{path}:{line}:{column}: not one JSON object (after {len(rows)} "
                             f"others): {getattr(error, 'msg', error)}") from error
    return rows


def read_csv(path: str) -> list[dict]:
    """An empty cell is None. Empty lines do not count."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        names, *rows = [cells for cells in csv.reader(file, strict=True) if cells] or [[]]
    for i, cells in enumerate(rows):
        if not len(cells) == len(names) == len({*names}):
            raise ValueError(f"row {i} (counted from 0) does not fit the first line")
    return [{name: cell or None for name, cell in zip(names, cells, strict=True)}
            for cells in rows]


def read_datasets(path: str, config: str | None, split: str) -> list[dict]:
    import datasets
    if not any(Path(path, name).is_file() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(path, config, split=split or "train").to_list()
    data = datasets.load_from_disk(path)
    if split or isinstance(data, dict):
        data = data[split or "train"]
    return data.to_list()


def messages_of(columns: dict, there: dict, template: str | None) -> list[dict]:
    """The chat of a row; []: it asks nothing. there: the columns that are not null."""
    if columns.keys() & {*PROMPTS}:
        prompt = next((there[name] for name in PROMPTS if name in there), "")
    elif {"nums", "target"} <= there.keys():
        prompt = fill_template(countdown.PROMPT, there)
    elif template is not None:
        prompt, template = fill_template(template, there), None
    else:
        raise SettingsError(f"no prompt column in ({', '.join(columns)}); it needs "
                            f"{', '.join(PROMPTS)}, nums and target, or --prompt_template.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        raise SettingsError('the prompt must be text or a list of {"role": text, "content": text}, '
                            f"not {repr(prompt)[:80]}.")
    asked = messages[-1]["content"] if messages else ""
    if asked.strip() and template is not None:
        asked = fill_template(template, {"question": asked, **there, "prompt": asked})
        messages = [*messages[:-1], messages[-1] | {"content": asked}]
    return messages if asked.strip() else []


def answer_of(columns: dict, there: dict):
    """The right answer of a row, or None. there: the columns that are not null."""
    verl = there.get("reward_model")
    if isinstance(verl, dict) and verl.get("ground_truth") is not None:
        return verl["ground_truth"]
    if {"nums", "target"} <= there.keys():
        return {"target": there["target"], "numbers": there["nums"]}
    if there.keys() & {"question", "problem"} and not columns.keys() & {"prompt", *ANSWERS}:
        raise SettingsError(f"no answer column in ({', '.join(columns)}); a question needs "
                            f"{', '.join(ANSWERS)}.")
    column = next((name for name in ANSWERS if name in there), None)
    answer = there.get(column)
    box = last_boxed(answer) if column == "solution" and isinstance(answer, str) else None
    return answer if box is None else box


def fill_template(template: str, columns: dict) -> str:
    """`template` with each {name} replaced by that column, except in the braces of LaTeX."""
    pattern = r"\\[A-Za-z]{2,}(?:\{[^{}]*\})+|\{([A-Za-z_]\w*)\}"
    names = {*re.findall(pattern, template)} - {""}
    if not names or names - columns.keys():
        raise SettingsError(f"--prompt_template {template!r} must name one or more columns of the "
                            f"row ({', '.join(columns)}); plain braces are {{ word }}.")
    return re.sub(pattern, lambda match: str(columns[match[1]]) if match[1] else match[0], template)


def render(messages: list[dict], tokenizer, system: str | None, finished: bool,
           tools: list[dict] | None = None) -> str:
    if finished:
        if len(messages) > 1 or system is not None or tools:
            raise SettingsError("a finished chat text takes no --system, no --tools and no other "
                                "messages.")
        return messages[0]["content"]
    if system is not None:
        messages = with_system(messages, system)
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages)
    goes_on = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=not goes_on,
        continue_final_message=goes_on)


def with_system(messages: list[dict], system: str) -> list[dict]:
    """In the place of a system message that is there."""
    return [{"role": "system", "content": system},
            *(m for m in messages if m["role"] != "system")]


def add_teacher_prompts(rows: list[Row], tokenizer, args: DataArgs, template: str) -> None:
    """distill.py: the prompt of each row for the teacher. It must not be shorter than the row's
    own: micro-batches are cut by it."""
    args = replace(args, prompt_template=template)
    for row in rows:
        try:
            made = make_row(row.index, row.columns, row.source, tokenizer, [], args)
        except ValueError as error:  # half a surrogate pair
            raise SettingsError(f"--teacher_prompt, row {row.index}: {error}") from None
        if made is None:
            raise SettingsError(f"--teacher_prompt gives row {row.index} no text.")
        row.teacher_ids = made.prompt_ids
        if not len(row.prompt_ids) <= len(row.teacher_ids) <= args.max_prompt_tokens:
            raise SettingsError(
                f"--teacher_prompt gives row {row.index} {len(row.teacher_ids)} tokens; it must "
                f"give from the prompt's own {len(row.prompt_ids)} up to --max_prompt_tokens "
                f"{args.max_prompt_tokens}.")
