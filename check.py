"""check.py: all that can be known from flags and files, before any weight is loaded."""
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import data
import memory
import model
import plan
import rewards
from plan import SettingsError


@dataclass
class Checked:
    """What the check has read and planned."""
    source: str  # the model's folder
    config: object
    tokenizer: object
    rows: list[data.Row]
    eval_rows: list[data.Row]
    notes: list[str]  # lines to print
    plan: plan.Plan
    kv_cache: float  # bytes; 0: the engine finds out


class Mistakes(list):
    """Sentences of the SettingsErrors that `attempt` has caught."""

    def attempt(self, function, *args, **options):
        """The result of function(…), or None and one more sentence."""
        try:
            return function(*args, **options)
        except SettingsError as error:
            self.append(str(error))

    def stop(self) -> None:
        """Raise all of them as one SettingsError."""
        if self:
            raise SettingsError(plan.together(self))


class NoTokenizer:
    """For a model that is not here: its prompts have no tokens."""
    added_tokens_decoder, chat_template = {}, None

    def __call__(self, text, **options):
        return {"input_ids": []}


def show_plan(args) -> None:
    """--plan: print what would run on --ranks ranks, without torchrun, GPU or weights."""
    print(check(args, args.planning.ranks, None, make=False).plan.text())


def check(args, ranks: int, machine: int | None, make: bool = True) -> Checked | None:
    """Read and check everything but the weights. `machine`: the ranks of one machine.

    Not `make`: a model that is not here is neither made nor fetched.
    """
    mistakes, p, shape = Mistakes(), args.planning, None
    if make and not mistakes.attempt(find_model, args.model, make=False):
        check(args, ranks, machine, make=False)  # all else first
    source = mistakes.attempt(find_model, args.model, make)
    if p.plan and (p.sizes or not (source or mistakes)):
        shape = mistakes.attempt(memory.shape_of, args.model, p.sizes)
    needs = mistakes.attempt(rewards.check, list(args.reward))
    config = mistakes.attempt(model.config_of, source) if source else None
    tokenizer = mistakes.attempt(load_tokenizer, args.model, source) if source else None
    load = lambda spec, seed: spec and mistakes.attempt(
        data.load, spec, tokenizer or NoTokenizer(), args.prompts, seed=seed) or ([], None)
    rows, report = load(args.data, args.seed)
    eval_rows, eval_report = load(args.eval_data, 0)  # they do not depend on --seed
    mistakes.attempt(rewards.check_rows, needs or [], rows + eval_rows)
    with suppress(SettingsError):  # there is no memory plan for some models
        shape = shape or (memory.shape_from(config.to_dict()) if config else None)
    n_rows, n_eval = len(rows), len(eval_rows)
    mistakes += map(str, plan.problems(args, ranks, n_rows or None, n_eval, shape, machine))
    if config:
        mistakes += model_limits(args, config, rows + eval_rows if tokenizer else [])
    mistakes.stop()
    if not (source or p.plan):
        return None

    card = p.gpu_gb * memory.GIB if p.plan else gpu_bytes()
    sizes = plan.Plan(args, args.script, ranks, n_rows, n_eval)
    kv_cache = args.engine.kv_cache_gb * memory.GIB or (0 if card else memory.CPU_CACHE)
    if shape:
        kv_cache = kv_cache if card else memory.EngineMemory(sizes, shape, card).cache
        sizes = memory.planned(sizes, shape, card)
    else:
        sizes = replace(sizes, memory=f"  memory     no plan for models of type "
                                      f"{config.model_type!r}, only for dense decoders")
    notes = [line for line in (report, eval_report) if line]
    notes += [f"note: {line}" for line in plan.warnings(args)]
    return Checked(source, config, tokenizer, rows, eval_rows, notes, sizes, kv_cache)


def gpu_bytes() -> float | None:
    """The memory of this rank's GPU; None without one. It makes no CUDA context."""
    if torch.cuda.is_available():
        rank = int(os.environ.get("LOCAL_RANK", 0))
        return torch.cuda.get_device_properties(rank).total_memory


def find_model(name: str, make: bool) -> str | None:
    """--model → a folder, or None: it is not here, and not `make`."""
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
    """The folder's tokenizer. SettingsError if transformers cannot load it."""
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model {name} has no tokenizer that transformers can load "
                            f"({str(error).splitlines()[0]}).") from None


def model_limits(args, config, rows: list[data.Row]) -> list[str]:
    """Sentences for sequences and tokens that the model cannot take."""
    found, room = [], getattr(config, "max_position_embeddings", None)
    prompt, longest = args.prompts.max_prompt_tokens, args.max_tokens
    if room and prompt + longest > room:
        works = f" Would work: --max_tokens {room - prompt}." if prompt < room else ""
        found.append(f"--max_prompt_tokens {prompt} + --max_tokens {longest} must be at most the "
                     f"{room} positions of {args.model}.{works}")
    wrong = [r for r in rows if not 0 <= max(r.prompt_ids, default=-1) < config.vocab_size]
    for row in wrong[:1]:  # inside vLLM it would break the engine
        found.append(f"--model {args.model} has a tokenizer that does not fit it: row {row.index} "
                     f"of {row.source} has {len(row.prompt_ids)} tokens, the largest id is "
                     f"{max(row.prompt_ids, default=None)}; it must have at least one, and ids "
                     f"below {config.vocab_size}.")
    return found


def is_tiny(name: str) -> bool:
    """Whether --model is one that tiny.py makes."""
    return name.partition(":")[0] == "tiny"


def eos_ids(source: str, tokenizer) -> list[int]:
    """All ids that end a completion: the generation config's list and the tokenizer's own."""
    path = Path(source) / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
