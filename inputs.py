"""inputs.py: a run's inputs, found before weights load: model, tokenizer, rows.

Mistakes are found here, in seconds: all flags are checked, every row of the data is read with the
chat template, the rewards are loaded, and the memory is planned. `read_inputs` does this for a run
and `show_plan` for --plan; both call `read_files`. A mistake ends the run with a SettingsError
before any weight is loaded.
"""
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import data
import dist
import model
import model_files
import rewards
from errors import Mistakes, SettingsError, as_sentence, numbered, tell
from model_files import shape_from
from part import ask, extended
from plan import GIB, Plan, Shape, count, problems
from texts import check_tokenizer, eos_ids


@dataclass
class Inputs:
    """What a run works with: the result of `read_inputs`."""
    source: str  # the model's folder
    tokenizer: object  # of transformers
    shape: Shape  # the model's sizes, for the plan
    reference: str | None  # the folder of the reference model; None: it is the same
    rows: list[data.Row]
    eval_rows: list[data.Row]
    notes: list[str]  # lines that the run prints at its start
    # {a sentence about what may be wrong: the metric that shows whether it was; "": nothing does}.
    # They are printed at the start, and at the end again if the metric was above 0.
    warnings: dict[str, str]
    plan: Plan
    waits: list[str]  # rewards that are `async def`
    ends: list[int]  # ids that end a completion
    kv_cache: float = 0.0  # bytes of the engine's cache


def show_plan(args) -> int:
    """Prints the plan of --plan, which needs no torchrun, GPU or weights. Returns the exit status:
    1 if the run does not fit into memory, else 0."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    size = args.plan_args.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    found = read_files(args, size, weights=False)
    kind = extended("memory", args.memory, args, found.shape)
    planned = kind(found.plan, found.shape, args.plan_args.gpu_gb * GIB)
    found.plan.memory = planned
    tell("\n  ".join([found.plan.text(), *found.notes]))
    if found.warnings:
        tell(numbered("warnings:", found.warnings))
    return int(found.shape.fused and not planned.fits)


def read_inputs(args, ranks: int, local_size: int, began: str | None = None) -> Inputs:
    """Reads all that a run needs, but loads no weights. A model that is not on this machine is made
    or fetched. began: see `read_files`. SettingsError: a mistake that `read_files` finds, or on a
    CPU a run that does not fit into memory."""
    found, card = read_files(args, ranks, local_size, began), dist.card_bytes()
    planned = extended("memory", args.memory, args, found.shape)(
        found.plan, found.shape, card, free_bytes() / local_size)
    found.plan.memory = planned
    found.kv_cache = planned.cache
    # On a GPU the plan is an estimate, and without fused attention there is none.
    if found.shape.fused and not card and not planned.fits:
        raise SettingsError(f"this run {planned.sentence()}.")
    return found


def free_bytes() -> int:
    """Returns the bytes of memory that this machine has free, or the limit of its container if that
    is less."""
    words = Path("/proc/meminfo").read_text().split()
    found = [1024 * int(words[words.index("MemAvailable:") + 1])]
    for path in "memory.max", "memory/memory.limit_in_bytes":
        with suppress(OSError, ValueError):  # another kind of container, or no limit
            found.append(int(Path("/sys/fs/cgroup", path).read_text()))
    return min(found)


def read_files(args, ranks: int, local_size: int | None = None, began: str | None = None,
               weights: bool = True) -> Inputs:
    """Checks flags and files, and returns the Inputs of a run.

    local_size: ranks of a machine; None with --plan. began: the time that chat templates get if
    they ask for it; None: now. weights: whether the weights of a model of the hub are fetched too.

    SettingsError: all mistakes of the flags together; or the first file that is broken; or all that
    does not fit together.
    """
    scorer, notes, warnings = check_flags(args, ranks, local_size), [], {}
    folder, lm, tokenizer = open_model(args.model, "model", weights)
    tokenizer.clock = (datetime.fromisoformat(began) if began else datetime.now()).strftime
    shape = shape_from(lm)
    ends = check_ends(args, eos_ids(folder, tokenizer), shape.vocab, warnings)
    files = ModelFiles(shape, tokenizer, folder, lm, ends)
    files = args.find_reference(files, weights)
    rows = args.load_rows("data", args.seed, files, notes)
    eval_rows = args.load_rows("eval_data", 0, files, notes)  # the same rows for any --seed
    everything = rows + eval_rows
    check_tokenizer(tokenizer, folder, rows[:FIRST] + eval_rows[:FIRST])
    notes += [f"--{flag} has {what_is_read(found)}"
              for flag, found in (("data", rows), ("eval_data", eval_rows)) if found]
    trains = args.needs_rollouts and not args.eval_args.eval_only
    what_is_shared(rows if trains else [], eval_rows, warnings)
    scored = everything if trains else eval_rows
    rewards.check_rows(scorer.needs, scored, warnings)
    rewards.try_once(args, scored, scorer, warnings)
    ask("check", args, files, everything)
    args.choose_rates(files.shape.params)
    for sentences in ask("warn", args, files, everything, scorer):
        warnings |= dict.fromkeys(sentences, "")
    counts = ranks, len(rows), len(eval_rows), files.shape, local_size
    mistakes = Mistakes(problems(args, *counts))
    mistakes += model_limits(args, files.lm.config, everything)
    mistakes.stop()
    return Inputs(files.folder, files.tokenizer, files.shape, files.reference, rows, eval_rows,
                  notes, warnings, Plan(args, *counts), scorer.waits, files.ends)


def check_flags(args, ranks: int, local_size: int | None) -> rewards.Pool:
    """Checks the flags and loads the rewards once. Returns a closed Pool with what is known about
    the rewards. SettingsError: all flag errors together."""
    mistakes = Mistakes(dist.gpu_mistakes(local_size) if local_size else [])
    mistakes += problems(args, ranks, local_size=local_size)
    found = rewards.Pool([], args)  # of no rewards
    if args.reward or args.needs_reward:
        found = mistakes.attempt(rewards.check, list(args.reward), args)
    mistakes.stop()
    return found


# ---- the rows ----

def what_is_read(rows: list[data.Row]) -> str:
    """Describes from which columns the run reads prompt and answer: each combination of columns
    with its number of rows. Where most answers hold a digit, it adds up to three that several rows
    share and that hold none, because some data sets write "proof" or "notfound" where there is no
    answer."""
    forms = Counter(", ".join(f"{what} from {column}" if column else f"no {what}"
                              for what, column in row.read.items()) for row in rows)
    answers = Counter(str(row.answer) for row in rows if row.read.get("answer"))
    words = {word: n for word, n in answers.most_common() if not re.search(r"\d", word)}
    found = [f"{count(n, 'row')}: {form}" for form, n in forms.most_common()]
    common = [f"{word!r:.40} {n:,} times" for word, n in words.items() if n > 1][:3]
    if common and 2 * sum(words.values()) <= answers.total():
        found.append("answers without a digit: " + ", ".join(common))
    return "; ".join(found)


def what_is_shared(rows: list[data.Row], eval_rows: list[data.Row], warnings: dict):
    """Adds a warning if rows of the evaluation are rows of the training too: then its result says
    little about other rows."""
    known = {hash(repr(row.digested(str))) for row in rows}
    if shared := sum(hash(repr(row.digested(str))) in known for row in eval_rows):
        warnings[f"{shared:,} of the {len(eval_rows):,} rows of --eval_data are rows of --data "
                 "too, so an evaluation says little about unseen rows. Would work: rows that are "
                 "held out."] = ""


# ---- the model ----

class ModelFiles(NamedTuple):
    """What the files of --model say."""
    shape: Shape
    tokenizer: object
    folder: str
    lm: object  # the model without weights (model.skeleton)
    ends: list[int] = []  # ids that end a completion
    reference: str | None = None  # the folder of the reference model; None: it is the same


def open_model(name: str, flag: str, weights: bool = True):
    """Opens a model by its name. Returns (its folder, the model without weights, its tokenizer).
    If the weights are on this machine, their names and shapes are compared with the model."""
    folder = find_model(name, flag, weights)
    lm = model.skeleton(folder, flag=flag)
    if weights or Path(name).is_dir():
        model_files.names_in_files(lm, folder, flag)
    return folder, lm, load_tokenizer(name, folder, flag)


def is_tiny(name: str) -> bool:
    """Whether the name of --model is one that examples/tiny.py makes: tiny or tiny:TASK."""
    return name.partition(":")[0] == "tiny"


def find_model(name: str, flag: str = "model", weights: bool = True) -> str:
    """Returns the folder of a model by its name. A tiny model is made and a model of the hub is
    fetched, if it is not on this machine. SettingsError: there is no such model, or runs/ cannot be
    written."""
    if not is_tiny(name):
        return model_files.find(name, flag, weights)
    from examples import tiny
    task = name.partition(":")[2] or "sort"
    if task not in tiny.TASKS:
        known = ", ".join(f"tiny:{task}" for task in tiny.TASKS)
        raise SettingsError(f"--{flag} {name} is not a model of tiny.py, which builds {known}.")
    try:
        return tiny.ensure("runs", task)
    except OSError as error:
        raise SettingsError(f"runs/ cannot be written ({error.strerror}).") from None


def load_tokenizer(name: str, source: str, flag: str = "model"):
    """Loads transformers' tokenizer from the folder `source`. SettingsError: the folder has none.

    The path is made absolute because transformers reads some tokenizers in another way by the name
    of their folder, and an export has another name.
    """
    from transformers import AutoTokenizer
    with as_sentence(f"--{flag} {name} has no tokenizer that transformers can load"):
        found = AutoTokenizer.from_pretrained(os.path.abspath(source))
        if len(found) <= len(found.all_special_ids):  # transformers makes it without files
            raise ValueError("it would be empty")
        return found


FIRST = 200  # rows of --data, and of --eval_data, on which the tokenizer is checked


def check_ends(args, ends: list[int], vocab: int, warnings: dict) -> list[int]:
    """Returns those of the ids `ends` that the model can write. If there are none and --stop is
    empty, it adds a warning. SettingsError: there are none, and the script samples nothing, so it
    would train on rows without an end."""
    found = [i for i in ends if 0 <= i < vocab]
    said = (f"--model {args.model} has no token that ends a completion: its files name {ends} of "
            f"{vocab:,} ids.")
    if not found and not args.needs_rollouts:
        raise SettingsError(said)
    if not found and not args.engine_args.stop:
        warnings[f"{said} Each runs on to --max_tokens. Would work: --stop."] = (
            "rollout/truncated_frac")
    return found


def model_limits(args, config, rows: list[data.Row]) -> list[str]:
    """Returns a sentence for each thing that the model or its engine cannot take: sequences longer
    than its positions, and rows with ids outside its vocabulary."""
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

