"""inputs.py: what a run works with, found before weights load: model, tokenizer, rows."""
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

import data
import dist
import model
import model_files
import rewards
from errors import Mistakes, SettingsError, as_sentence, tell
from model_files import shape_from
from part import ask, extended
from plan import GIB, Plan, Shape, count, problems
from texts import check_tokenizer, eos_ids


@dataclass
class Inputs:
    """What a run works with, before its weights load."""
    source: str  # the model's folder
    tokenizer: object
    shape: Shape
    reference: str | None  # the folder of the reference model; None: it is the same
    rows: list[data.Row]
    eval_rows: list[data.Row]
    notes: list[str]  # lines to print
    plan: Plan
    waits: list[str]  # rewards that are `async def`
    ends: list[int]  # ids that end a completion
    kv_cache: float = 0.0  # bytes; 0: the engine chooses


def show_plan(args) -> int:
    """Prints the plan of --plan, which needs neither torchrun nor a GPU, and loads no weights.
    Returns the exit status, 1 if it does not fit.
    """
    found = read_files(args, args.plan_args.ranks, weights=False)
    kind = extended("memory", args.memory, args, found.shape)
    planned = kind(found.plan, found.shape, args.plan_args.gpu_gb * GIB)
    found.plan.memory = planned
    tell("\n  ".join([found.plan.text(), *found.notes]))
    return int(found.shape.fused and not planned.fits)


def read_inputs(args, ranks: int, local_size: int, began: str | None = None) -> Inputs:
    """Returns all that a run needs but its weights. A model that is not here is made or fetched.
    Raises a SettingsError as read_files does, or if it is certain that the run does not fit.
    """
    found, card, free = read_files(args, ranks, local_size, began), None, 0.0
    if torch.cuda.is_available():  # this makes no CUDA context
        card = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory
    else:
        free = free_bytes() / local_size
    planned = extended("memory", args.memory, args, found.shape)(
        found.plan, found.shape, card, free)
    found.plan.memory = planned
    if args.needs_engine and (args.engine_args.kv_cache_gb or not card):
        found.kv_cache = planned.cache
    # On a GPU the plan is an estimate, and without fused attention there is none.
    if found.shape.fused and not card and not planned.fits:
        raise SettingsError(f"this run {planned.sentence()}.")
    return found


def free_bytes() -> int:
    """Returns the bytes that are free on this machine, or the limit of its container."""
    words = Path("/proc/meminfo").read_text().split()
    found = [1024 * int(words[words.index("MemAvailable:") + 1])]
    for path in "memory.max", "memory/memory.limit_in_bytes":
        with suppress(OSError, ValueError):  # another kind of container, or no limit
            found.append(int(Path("/sys/fs/cgroup", path).read_text()))
    return min(found)


def read_files(args, ranks: int, local_size: int | None = None, began: str | None = None,
               weights: bool = True) -> Inputs:
    """Reads and checks the model's files and the rows. Raises a SettingsError with all mistakes of
    the flags, or of the first file that is broken, or with all that does not fit together.

    local_size: see Plan. began: the time for chat templates that ask for it; None: now. weights:
    fetch the weights of a model of the hub too.
    """
    (needs, waits), notes = check_flags(args, ranks, local_size), []
    folder, lm, tokenizer = open_model(args.model, "model", weights)
    tokenizer.clock = (datetime.fromisoformat(began) if began else datetime.now()).strftime
    shape = shape_from(lm)
    ends = check_ends(args, eos_ids(folder, tokenizer), shape.vocab, notes)
    files = ModelFiles(shape, tokenizer, folder, lm, ends)
    files = args.find_reference(files, weights)
    rows = args.load_rows("data", args.seed, files, notes)
    eval_rows = args.load_rows("eval_data", 0, files, notes)  # for any --seed
    everything = rows + eval_rows
    check_tokenizer(tokenizer, folder, rows[:FIRST] + eval_rows[:FIRST])
    notes += [f"--{flag} has {what_is_read(found)}"
              for flag, found in (("data", rows), ("eval_data", eval_rows)) if found]
    trains = args.needs_rollouts and not args.eval_args.eval_only
    rewards.check_rows(needs, everything if trains else eval_rows)
    rewards.try_once(args, everything if trains else eval_rows, waits, notes)
    ask("check", args, files, everything)
    args.choose_rates(files.shape.params)
    counts = ranks, len(rows), len(eval_rows), files.shape, local_size
    mistakes = Mistakes(problems(args, *counts))
    mistakes += model_limits(args, files.lm.config, everything)
    mistakes.stop()
    return Inputs(files.folder, files.tokenizer, files.shape, files.reference, rows, eval_rows,
                  notes, Plan(args, *counts), waits, files.ends)


def check_flags(args, ranks: int, local_size: int | None) -> tuple[list, list[str]]:
    """Returns what the rewards need, and which of them wait. Raises a SettingsError with all
    mistakes of the flags.
    """
    mistakes = Mistakes(dist.gpu_mistakes(local_size) if local_size else [])
    mistakes += problems(args, ranks, local_size=local_size)
    found = [], []
    if args.reward or args.needs_reward:
        found = mistakes.attempt(rewards.check, list(args.reward), args)
    mistakes.stop()
    return found


# ---- the rows ----

def what_is_read(rows: list[data.Row]) -> str:
    """Returns which columns the run reads, each combination with its number of rows, and the
    answers that several rows have and that hold no digit: some data sets write "proof" or
    "notfound" where there is no answer.
    """
    forms = Counter(", ".join(f"{what} from {column}" if column else f"no {what}"
                              for what, column in row.read.items()) for row in rows)
    words = Counter(str(row.answer) for row in rows if row.read.get("answer"))
    common = [f"{word!r:.40} {n:,} times" for word, n in words.most_common()
              if n > 1 and not re.search(r"\d", word)][:3]
    found = [f"{count(n, 'row')}: {form}" for form, n in forms.most_common()]
    if common:
        found.append("answers without a digit: " + ", ".join(common))
    return "; ".join(found)


# ---- the model ----

class ModelFiles(NamedTuple):
    """What the files of --model say."""
    shape: Shape
    tokenizer: object
    folder: str
    lm: object  # model.skeleton
    ends: list[int] = []  # ids that end a completion
    reference: str | None = None  # the folder of the reference model; None: it is the same


def open_model(name: str, flag: str, weights: bool = True):
    """Returns a model by its name: (its folder, the model without weights, its tokenizer). flag:
    the name of the flag, for messages.
    """
    folder = find_model(name, flag, weights)
    lm = model.skeleton(folder, flag=flag)
    if weights or Path(name).is_dir():
        model_files.names_in_files(lm, folder, flag)
    return folder, lm, load_tokenizer(name, folder, flag)


def is_tiny(name: str) -> bool:
    """Returns whether --model is one that examples/tiny.py makes."""
    return name.partition(":")[0] == "tiny"


def find_model(name: str, flag: str = "model", weights: bool = True) -> str:
    """Returns the folder of a model by its name. One that is not here is made (tiny) or fetched."""
    if not is_tiny(name):
        return model_files.find(name, flag, weights)
    from examples import tiny
    task = name.partition(":")[2] or "sort"
    if task not in tiny.TASKS:
        known = ", ".join(f"tiny:{task}" for task in tiny.TASKS)
        raise SettingsError(f"--{flag} {name} is not a model that tiny.py makes; it makes {known}.")
    try:
        return tiny.ensure("runs", task)
    except OSError as error:
        raise SettingsError(f"runs/ cannot be written ({error.strerror}).") from None


def load_tokenizer(name: str, source: str, flag: str = "model"):
    """Loads transformers' tokenizer of the folder `source`. Raises a SettingsError if it has none.

    The path is absolute: transformers reads some tokenizers otherwise by the name of their folder,
    and an export has another name.
    """
    from transformers import AutoTokenizer
    with as_sentence(f"--{flag} {name} has no tokenizer that transformers can load"):
        found = AutoTokenizer.from_pretrained(os.path.abspath(source))
        if len(found) <= len(found.all_special_ids):  # transformers makes one without files
            raise ValueError("it would be empty")
        return found


FIRST = 200  # rows of --data, and of --eval_data


def check_ends(args, ends: list[int], vocab: int, notes: list[str]) -> list[int]:
    """Returns those of the ids that the model can write. `notes` gets a sentence if there are none;
    a script that samples nothing ends with a SettingsError.
    """
    found = [i for i in ends if 0 <= i < vocab]
    said = (f"--model {args.model} has no token that ends a completion: its files name {ends} of "
            f"{vocab:,} ids.")
    if not found and not args.needs_rollouts:
        raise SettingsError(said)
    if not found and not args.engine_args.stop:
        notes.append(f"{said} Each goes on to --max_tokens. Would work: --stop.")
    return found


def model_limits(args, config, rows: list[data.Row]) -> list[str]:
    """Returns sentences for what the model or its engine cannot take: sequences beyond its
    positions, and ids beyond its vocabulary.
    """
    found, text = [], config.get_text_config()
    prompt, longest = args.data_args.max_prompt_tokens, args.max_tokens
    room = text.to_dict().get("max_position_embeddings")
    if room and prompt + longest > room:
        works = f" Would work: --max_tokens {room - prompt}." if prompt < room else ""
        found.append(f"--max_prompt_tokens {prompt} + --max_tokens {longest} must be at most the "
                     f"{room} positions of {args.model}.{works}")
    for row in rows:
        largest = max(row.prompt_ids, default=None)
        if largest is None or largest >= text.vocab_size:  # it would break the engine
            found.append(f"--model {args.model}: row {row.number} of {row.source} must have tokens "
                         f"with ids below {text.vocab_size} (the largest is {largest}).")
            break
    return found

