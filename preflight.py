"""preflight.py: a run's inputs, found before weights load: model, tokenizer, rows.

Mistakes are found here, in seconds: all flags are checked, every row of the data is read with the
chat template, the rewards are loaded, and the memory is planned. `read_inputs` does this for a run
and `show_plan` for --plan; both call `read_files`. A mistake ends the run with a SettingsError
before any weight is loaded.
"""
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import data
import dist
import model
import model_files
import part
import rewards
from chat_template import eos_ids
from errors import Mistakes, SettingsError, as_sentence, numbered, tell
from memory import GIB
from model_files import shape_from
from plan import Plan, Shape, problems


@dataclass
class Inputs:
    """What a run works with. `read_files` fills it from top to bottom."""
    source: str  # the model's folder
    tokenizer: object  # of transformers
    lm: object  # the model without weights (model.skeleton)
    shape: Shape  # the model's sizes, for the plan
    reward_facts: rewards.Pool  # closed: it knows what the rewards need, and scores nothing
    ends: list[int] = field(default_factory=list)  # ids that end a completion
    reference: str | None = None  # the folder of the reference model; None: it is the same
    rows: list[data.Row] = field(default_factory=list)
    eval_rows: list[data.Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines that the run prints at its start
    # {a sentence about what may be wrong: the metric that shows whether it was; "": nothing does}.
    # They are printed at the start, and at the end again if the metric was above 0.
    warnings: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    kv_cache: float = 0.0  # bytes of the engine's cache


def show_plan(args) -> int:
    """Prints the plan of --plan, which needs no torchrun, GPU or weights. Returns the exit status:
    1 if the run does not fit into memory, else 0."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    size = args.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    found = read_files(args, size, weights=False)
    kind = part.memory(args.memory, args, found.shape)
    planned = kind(found.plan, found.shape, args.gpu_gb * GIB)
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
    planned = part.memory(args.memory, args, found.shape)(
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
    reward_facts = check_flags(args, ranks, local_size)
    folder, lm, tokenizer = open_model(args.model, "model", weights)
    tokenizer.clock = (datetime.fromisoformat(began) if began else datetime.now()).strftime
    inputs = Inputs(folder, tokenizer, lm, shape_from(lm), reward_facts)
    inputs.ends = check_ends(args, inputs)
    args.find_reference(inputs, weights)
    inputs.rows = args.load_rows("data", args.seed, inputs)
    inputs.eval_rows = args.load_rows("eval_data", 0, inputs)  # the same rows for any --seed
    from_parts = part.check(args, inputs)
    args.choose_rates(inputs.shape.params)
    counts = ranks, len(inputs.rows), len(inputs.eval_rows), inputs.shape, local_size
    Mistakes(problems(args, *counts) + from_parts).stop()
    inputs.plan = Plan(args, *counts)
    return inputs


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


# ---- the model ----

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


def check_ends(args, inputs: Inputs) -> list[int]:
    """Returns the ids that end a completion, of those that the model can write. If there are none
    and --stop is empty, it adds a warning. SettingsError: there are none, and the script samples
    nothing, so it would train on rows without an end."""
    ends, vocab = eos_ids(inputs.source, inputs.tokenizer), inputs.shape.vocab
    found = [i for i in ends if 0 <= i < vocab]
    said = (f"--model {args.model} has no token that ends a completion: its files name {ends} of "
            f"{vocab:,} ids.")
    if not found and not args.needs_rollouts:
        raise SettingsError(said)
    if not found and not args.stop:
        inputs.warnings[f"{said} Each runs on to --max_tokens. Would work: --stop."] = (
            "rollout/truncated_frac")
    return found
