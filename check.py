"""check.py: all that can be known from flags and files, before any weight is loaded."""
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import data
import memory
import model
import plan
import rewards
import turns
from errors import Mistakes, SettingsError


@dataclass
class Checked:
    """What a run works with. Of a model that is not here, the first three are None."""
    source: str | None  # its folder
    config: object
    tokenizer: object
    shape: memory.Shape | None  # its sizes; None: not known
    rows: list[data.Row]
    eval_rows: list[data.Row]
    notes: list[str]  # lines to print
    bridge: turns.Bridge | None  # None: one turn
    plan: plan.Plan | None  # None: there are mistakes
    kv_cache: float = 0.0  # bytes; 0: the engine finds out


class NoTokenizer:
    """Of a model that is not here: its rows are read, and have no tokens."""
    added_tokens_decoder, chat_template = {}, None

    def __call__(self, text, **options):
        return {"input_ids": []}


def show_plan(args) -> None:
    """--plan, without torchrun, GPU or weights. It fetches no model."""
    mistakes = Mistakes()
    source = mistakes.attempt(find_model, args.model)
    needs = mistakes.attempt(rewards.check, list(args.reward))
    found = check_files(args, args.plan_args.ranks, None, source, needs, mistakes)
    mistakes.stop()
    card = args.plan_args.gpu_gb * memory.GIB
    print(memory.planned(found.plan, found.shape, card).text())


def check(args, ranks: int, machine: int) -> Checked:
    """All that a run needs, but no weights. SettingsError with all mistakes.

    machine: the ranks of one machine.
    """
    mistakes = Mistakes()
    source = mistakes.attempt(find_model, args.model)
    needs = mistakes.attempt(rewards.check, list(args.reward))
    if source is None:  # to make or fetch it takes time: first look at all else
        check_files(args, ranks, machine, None, needs, mistakes)
        mistakes.stop()
        source = find_model(args.model, make=True)
    found = check_files(args, ranks, machine, source, needs, mistakes)
    mistakes.stop()
    check_memory(found, gpu_bytes(), machine)
    found.notes += [f"note: {line}" for line in plan.warnings(args)]
    if not eos_ids(source, found.tokenizer):
        found.notes.append("note: the model has no end-of-sequence token: only --stop and "
                           "--max_tokens end completions.")
    return found


def check_files(args, ranks: int, machine: int | None, source: str | None, needs: list | None,
                mistakes: Mistakes) -> Checked:
    """The model's files, the rows, the reply and the flags; mistakes go to `mistakes`.

    source: the model's folder; None: it is not here. needs: of the rewards; None: a mistake.
    """
    lm = tokenizer = bridge = None
    if source:
        lm = mistakes.attempt(model.skeleton, source)
        tokenizer = mistakes.attempt(load_tokenizer, args.model, source)
    shape = mistakes.attempt(find_shape, args, lm)

    rows, note = load_rows(args, args.data, args.seed, tokenizer, mistakes)
    eval_rows, eval_note = load_rows(  # they do not depend on --seed
        args, args.eval_data, 0, tokenizer, mistakes)
    everything = rows + eval_rows
    mistakes.attempt(rewards.check_rows, needs or [], everything)

    if args.turn_args.reply:
        template = None, [], 0
        if lm and tokenizer:
            template = tokenizer, eos_ids(source, tokenizer), lm.config.vocab_size
        bridge = mistakes.attempt(turns.check, args, *template, everything)

    n_rows, n_eval = len(rows) or None, len(eval_rows)
    mistakes += map(str, plan.problems(args, ranks, n_rows, n_eval, shape, machine))
    if lm:
        mistakes.attempt(model.names_in_files, lm, source)
        mistakes += model_limits(args, lm.config, tokenizer, everything if tokenizer else [])
    sizes = None if mistakes else plan.Plan(args, args.script, ranks, n_rows, n_eval)
    notes = [line for line in (note, eval_note) if line]
    config = lm.config if lm else None
    return Checked(source, config, tokenizer, shape, rows, eval_rows, notes, bridge, sizes)


# ---- the model ----

def is_tiny(name: str) -> bool:
    return name.partition(":")[0] == "tiny"


def find_model(name: str, make: bool = False) -> str | None:
    """--model → its folder. Where it is not here: None, or if `make`, it is made or fetched."""
    if not is_tiny(name):
        return model.find(name) if make or Path(name).is_dir() else None
    from examples import tiny
    task = name.partition(":")[2] or "sort"
    if task not in tiny.TASKS:
        known = ", ".join(f"tiny:{task}" for task in tiny.TASKS)
        raise SettingsError(f"--model {name} is not a model that tiny.py makes; it makes {known}.")
    folder = tiny.place("runs", task)
    if Path(folder).is_dir():
        return folder
    try:
        return tiny.ensure("runs", task) if make else None
    except OSError as error:
        raise SettingsError(f"runs/ cannot be written ({error.strerror}).") from None


def load_tokenizer(name: str, source: str):
    from transformers import AutoTokenizer
    try:
        found = AutoTokenizer.from_pretrained(source)
        if len(found) <= len(found.all_special_ids):  # transformers makes one without files
            raise ValueError("it would be empty")
        return found
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model {name} has no tokenizer that transformers can load "
                            f"({str(error).splitlines()[0]}).") from None


def eos_ids(source: str, tokenizer) -> list[int]:
    """What ends a completion, by the generation config and the tokenizer."""
    path = Path(source) / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def find_shape(args, lm) -> memory.Shape | None:
    """The model's sizes. A plan for a model that is not here has other ways to know them."""
    p = args.plan_args
    if p.plan and p.sizes:
        return memory.shape_of(args.model, p.sizes)
    if lm:
        return memory.shape_from(lm)
    if not p.plan or Path(args.model).is_dir():  # a folder with a mistake
        return None
    known = memory.shape_of(args.model)
    return known or memory.shape_from(model.skeleton(args.model))  # config.json, from the hub


def model_limits(args, config, tokenizer, rows: list[data.Row]) -> list[str]:
    """Sentences for what the model cannot take."""
    found, name, vocab = [], f"--model {args.model}", config.vocab_size
    prompt, longest = args.data_args.max_prompt_tokens, args.max_tokens
    room = getattr(config, "max_position_embeddings", None)
    if room and prompt + longest > room:
        works = f" Would work: --max_tokens {room - prompt}." if prompt < room else ""
        found.append(f"--max_prompt_tokens {prompt} + --max_tokens {longest} must be at most the "
                     f"{room} positions of {args.model}.{works}")
    head = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    served = 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512
    if head not in served and not torch.cuda.is_available():
        found.append(f"{name} has heads of size {head}; without a GPU vLLM serves "
                     f"{', '.join(map(str, served))}.")
    gpu = args.plan_args.plan or torch.cuda.is_available()
    dtype = model.compute_dtype(args.model_args, torch.device("cuda" if gpu else "cpu"))
    if args.lora_args.in_engine(dtype == torch.bfloat16) and config.model_type == "stablelm":
        found.append(f"{name} is of type stablelm, for which vLLM takes no adapters. Would work: "
                     f"--lora_sync merged.")
    if tokenizer and tokenizer.vocab_size > vocab:  # but for added tokens
        found.append(f"{name} has a tokenizer of {tokenizer.vocab_size:,} ids and weights for "
                     f"{vocab:,}.")
    for row in rows:
        largest = max(row.prompt_ids, default=None)
        if largest is None or largest >= vocab:  # inside vLLM it would break the engine
            found.append(f"{name}: row {row.index} of {row.source} must have tokens with ids below "
                         f"{vocab} (the largest is {largest}).")
            break
    return found


# ---- rows and memory ----

def load_rows(args, spec: str | None, seed: int, tokenizer, mistakes: Mistakes):
    """Rows, and a sentence with their counts. ([], None) without data, or with a mistake in it."""
    if not spec:
        return [], None
    tokenizer = tokenizer or NoTokenizer()
    found = mistakes.attempt(data.load, spec, tokenizer, args.data_args, seed=seed)
    return found or ([], None)


def check_memory(found: Checked, card: float | None, machine: int) -> None:
    """Adds memory to the plan. SettingsError if it is certain that the run does not fit.

    card: bytes of this rank's GPU; None: it has none.
    """
    asked, shape = found.plan.args.engine_args.kv_cache_gb * memory.GIB, found.shape
    if not card:
        found.plan.free = free_bytes() / machine
    found.plan = memory.planned(found.plan, shape, card)
    if not shape.fused:
        found.kv_cache = asked or (0.0 if card else memory.CPU_CACHE)
        return
    engine = memory.EngineMemory(found.plan, shape, card)
    found.kv_cache = asked if card else engine.cache
    # On a GPU all but the engine's weights and a given cache is an estimate.
    certain = not card or asked and (not engine.holds or engine.weights + engine.cache > card)
    if certain and not memory.fits(found.plan, shape, card):
        words = found.plan.memory.splitlines()[0].removeprefix("  memory     ")
        raise SettingsError(f"this run {words}.")


def gpu_bytes() -> float | None:
    """Of this rank's GPU, if it has one. It makes no CUDA context."""
    if torch.cuda.is_available():
        rank = int(os.environ.get("LOCAL_RANK", 0))
        return torch.cuda.get_device_properties(rank).total_memory


def free_bytes() -> int:
    """Of this machine, or the limit of its container."""
    words = Path("/proc/meminfo").read_text().split()
    found = [1024 * int(words[words.index("MemAvailable:") + 1])]
    for path in "memory.max", "memory/memory.limit_in_bytes":
        with suppress(OSError, ValueError):  # another kind of container, or no limit
            found.append(int(Path("/sys/fs/cgroup", path).read_text()))
    return min(found)
