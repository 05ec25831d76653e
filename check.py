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


def show_plan(args) -> None:
    """--plan: print what would run on --ranks ranks, without torchrun, GPU or weights."""
    p, mistakes = args.planning, Mistakes()
    mistakes.attempt(rewards.check, list(args.reward))
    n_rows, n_eval = (mistakes.attempt(count_rows, spec) for spec in (args.data, args.eval_data))
    shape = mistakes.attempt(memory.shape_of, args.model, p.sizes)
    mistakes += map(str, plan.problems(args, p.ranks, n_rows, n_eval or 0, shape))
    mistakes.stop()
    sizes = plan.Plan(args, args.script, p.ranks, n_rows, n_eval or 0)
    print(memory.planned(sizes, shape, p.gpu_gb * memory.GIB).text())


def count_rows(spec: str | None) -> int:
    """Rows of a data set, read without a tokenizer."""
    return len(data.read(spec)[0]) if spec else 0


def check(args, ranks: int, machine: int) -> Checked:
    """Read and check everything but the weights. `machine`: the ranks of one machine."""
    mistakes = Mistakes()
    mistakes.attempt(rewards.check, list(args.reward))
    if is_tiny(args.model) and not any(Path("runs").glob("tiny-*/config.json")):
        flaws = map(str, plan.problems(args, ranks, machine=machine))
        Mistakes([*mistakes, *flaws]).stop()  # before it takes time to make the model
    source = mistakes.attempt(find_model, args.model)
    config = mistakes.attempt(model.config_of, source) if source else None
    tokenizer = mistakes.attempt(load_tokenizer, args.model, source) if source else None
    loaded = {"rows": ([], None), "eval_rows": ([], None)}
    for name, spec, seed in (("rows", args.data, args.seed), ("eval_rows", args.eval_data, 0)):
        if spec and tokenizer:  # evaluation rows do not depend on --seed
            found = mistakes.attempt(data.load, spec, tokenizer, args.prompts, seed=seed)
            loaded[name] = found or loaded[name]
    (rows, report), (eval_rows, eval_report) = loaded.values()
    shape = None
    with suppress(SettingsError):  # there is no memory plan for some models
        shape = memory.shape_from(config.to_dict()) if config else None
    n_rows, n_eval = len(rows), len(eval_rows)
    mistakes += map(str, plan.problems(args, ranks, n_rows or None, n_eval, shape, machine))
    mistakes += model_limits(args, config, rows + eval_rows) if config else []
    mistakes.stop()

    card = gpu_bytes()
    sizes = plan.Plan(
        args, args.script, ranks, n_rows, n_eval, free=0.0 if card else free_bytes() / machine)
    kv_cache = args.engine.kv_cache_gb * memory.GIB or (0 if card else memory.CPU_CACHE)
    if shape:
        engine = memory.EngineMemory(sizes, shape, card)
        kv_cache = kv_cache if card else engine.cache
        sizes = memory.planned(sizes, shape, card)
        certain = not card or kv_cache and (
            not engine.holds or engine.weights + engine.cache > card)  # the rest is an estimate
        if certain and not memory.fits(sizes, shape, card):
            raise SettingsError("this run" + sizes.memory.splitlines()[0].removeprefix(
                "  memory    ") + ".")
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


def free_bytes() -> int:
    """Memory that is free on this machine, or the limit of its container."""
    found = Path("/proc/meminfo").read_text().split()
    found = [1024 * int(found[found.index("MemAvailable:") + 1])]
    for path in "memory.max", "memory/memory.limit_in_bytes":
        with suppress(OSError, ValueError):  # another kind of container, or no limit
            found.append(int(Path("/sys/fs/cgroup", path).read_text()))
    return min(found)


def find_model(name: str) -> str:
    """--model → a folder. Makes a tiny model on first use."""
    if not is_tiny(name):
        return model.find(name)
    from examples import tiny
    task = name.partition(":")[2]
    if task and task not in tiny.TASKS:
        known = ", ".join(f"tiny:{task}" for task in tiny.TASKS)
        raise SettingsError(f"--model {name} is not a model that tiny.py makes; it makes {known}.")
    return tiny.ensure("runs", *([task] if task else []))


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
