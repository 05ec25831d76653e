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
    source: str  # the model's folder
    config: object
    tokenizer: object
    rows: list[data.Row]
    eval_rows: list[data.Row]
    notes: list[str]  # lines to print
    plan: plan.Plan
    kv_cache: float  # bytes; 0: the engine finds out
    bridge: turns.Bridge | None  # None: one turn


class NoTokenizer:
    """Of a model that is not here."""
    added_tokens_decoder, chat_template = {}, None

    def __call__(self, text, **options):
        return {"input_ids": []}


def show_plan(args) -> None:
    """--plan, without torchrun, GPU or weights."""
    print(check(args, args.plan_args.ranks, None, make=False).plan.text())


def check(args, ranks: int, machine: int | None, make: bool = True) -> Checked | None:
    """Everything but the weights. `machine`: the ranks of one machine.

    Not `make`: a model that is not here is neither made nor fetched.
    """
    mistakes, p, shape = Mistakes(), args.plan_args, None
    if make and not mistakes.attempt(find_model, args.model, make=False):
        check(args, ranks, machine, make=False)  # all else first
    source = mistakes.attempt(find_model, args.model, make)
    of_model = lambda lm: lm and memory.shape_from(lm)
    if p.plan and (p.sizes or not (source or mistakes)):
        shape = mistakes.attempt(memory.shape_of, args.model, p.sizes)
        if not (shape or source or mistakes):  # config.json comes from the hub
            shape = of_model(mistakes.attempt(model.skeleton, args.model))
    needs = mistakes.attempt(rewards.check, list(args.reward))
    lm = source and mistakes.attempt(model.skeleton, source)
    tokenizer = source and mistakes.attempt(load_tokenizer, args.model, source)
    load = lambda spec, seed: spec and mistakes.attempt(
        data.load, spec, tokenizer or NoTokenizer(), args.data_args, seed=seed) or ([], None)
    rows, report = load(args.data, args.seed)
    eval_rows, eval_report = load(args.eval_data, 0)  # they do not depend on --seed
    everything, n_rows, n_eval = rows + eval_rows, len(rows), len(eval_rows)
    mistakes.attempt(rewards.check_rows, needs or [], everything)
    bridge = args.turn_args.reply and mistakes.attempt(
        turns.check, args, lm and tokenizer, tokenizer and eos_ids(source, tokenizer),
        lm and lm.config.vocab_size, everything)
    shape = shape or of_model(lm)
    mistakes += map(str, plan.problems(args, ranks, n_rows or None, n_eval, shape, machine))
    if lm:
        mistakes.attempt(model.names_in_files, lm, source)
        mistakes += model_limits(args, lm.config, tokenizer, everything if tokenizer else [])
    mistakes.stop()
    if not (source or p.plan):
        return None

    card = p.gpu_gb * memory.GIB if p.plan else gpu_bytes()
    free = 0.0 if card else free_bytes() / machine
    sizes = memory.planned(
        plan.Plan(args, args.script, ranks, n_rows, n_eval, free=free), shape, card)
    kv_cache = args.engine_args.kv_cache_gb * memory.GIB or (0 if card else memory.CPU_CACHE)
    if shape and shape.fused:
        engine = memory.EngineMemory(sizes, shape, card)
        kv_cache = kv_cache if card else engine.cache
        certain = not card or kv_cache and (
            not engine.holds or engine.weights + engine.cache > card)  # the rest is an estimate
        if certain and not p.plan and not memory.fits(sizes, shape, card):
            words = sizes.memory.splitlines()[0].removeprefix("  memory     ")
            raise SettingsError(f"this run {words}.")
    notes = [line for line in (report, eval_report) if line]
    notes += [f"note: {line}" for line in plan.warnings(args)]
    if source and not eos_ids(source, tokenizer):
        notes.append("note: the model has no end-of-sequence token: only --stop and --max_tokens "
                     "end completions.")
    return Checked(source, lm and lm.config, tokenizer, rows, eval_rows, notes, sizes, kv_cache,
                   bridge)


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


def find_model(name: str, make: bool) -> str | None:
    """--model → a folder. None: it is not here, and not `make`."""
    if not is_tiny(name):
        return model.find(name) if make or Path(name).is_dir() else None
    from examples import tiny
    task = name.partition(":")[2] or "sort"
    if task not in tiny.TASKS:
        known = ", ".join(f"tiny:{task}" for task in tiny.TASKS)
        raise SettingsError(f"--model {name} is not a model that tiny.py makes; it makes {known}.")
    try:
        make = make or Path(tiny.place("runs", task)).is_dir()
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


def is_tiny(name: str) -> bool:
    return name.partition(":")[0] == "tiny"


def eos_ids(source: str, tokenizer) -> list[int]:
    """What ends a completion, by the generation config and the tokenizer."""
    path = Path(source) / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
