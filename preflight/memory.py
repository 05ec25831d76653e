"""memory.py: what fits on a GPU, from the sizes of a model.

Everywhere: plan is a plan.Plan, shape a Shape, card the bytes of a GPU (None: there is none).
"""
import resource
from collections import namedtuple
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from preflight.plan import BUDGETS, Phase, Plan, broken, ceil_div, changed, flags, typed
from rollout import engine_limits
from trainer import experts
from trainer.model import HEAD_LOGITS
from trainer.packing import EVEN

GIB = 2**30
RESERVED = 2.0 * GIB  # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB
CPU_CACHE = 1.0 * GIB
SCORE_HEAD, UPDATE_HEAD = 3, 5  # float32 (chunk, vocab), without and with backward
TEACHER_HEAD = 6  # more of them for --divergence
LADDER = [  # the cheapest first
    ("kv_cache_gb", 0.0), ("sleep_level", 2), ("checkpointing", True), ("offload", ("optimizer",)),
    ("offload", ("params", "optimizer")), ("offload", ("params", "optimizer", "reference")),
    ("head_chunk", 256), ("head_chunk", 64), ("cpu_offload", True), ("tp", 2), ("tp", 4), ("tp", 8)]


@dataclass
class Shape:
    """The sizes of a model. Its parameters are counted on the model itself."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer: int  # parameters of a layer
    root: int  # of the rest: embedding, head, last norm
    tied: bool  # the head is the embedding
    qk_norm: bool  # q and k are normalized
    fused: bool  # attention; else its memory grows with length²
    linears: dict  # {name: in + out} of the linear layers of a layer
    mixture: experts.Sizes | None = None  # of experts
    teacher: object = None  # the Shape of --teacher

    def __post_init__(self):
        self.q, self.kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.embedding = self.vocab * self.hidden
        self.params = self.layers * self.layer + self.root
        self.critic = self.params if self.tied else self.params - self.embedding  # no head

    def adapter(self, lora) -> int:
        """Parameters of LoRA's adapters. 0: all weights are trained."""
        layer = sum(n for name, n in self.linears.items() if lora.chosen(name))
        return lora.lora_rank * self.layers * layer

    def saved(self, c: int, keys: float) -> float:
        """Bytes that a layer keeps for backward, per token.

        c: bytes of a computed number. keys: see plan.Phase.
        """
        norms = 8 * self.hidden + 8 + 4 * c * self.hidden
        if self.qk_norm:
            norms += (self.q + self.kv) * (4 + c) + 4 * (self.heads + self.kv_heads)
        queries = 1 / EVEN  # with padding
        attention = (2 * c * (self.q * queries + self.kv * keys)  # q, output, k, v
                     + 4 * self.heads * queries  # log-sums
                     + c * self.q)  # output in the order of tokens
        return norms + attention + 4 * c * self.intermediate


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size")
KNOWN = """\
tiny qwen2 128 256 2 4 4 320 tied
Qwen2.5-0.5B qwen2 896 4864 24 14 2 151936 tied
Qwen2.5-1.5B qwen2 1536 8960 28 12 2 151936 tied
Qwen2.5-3B qwen2 2048 11008 36 16 2 151936 tied
Qwen2.5-7B qwen2 3584 18944 28 28 4 152064 untied
Qwen2.5-14B qwen2 5120 13824 48 40 8 152064 untied
Qwen2.5-32B qwen2 5120 27648 64 40 8 152064 untied
Qwen3-0.6B qwen3 1024 3072 28 16 8 151936 tied
Qwen3-1.7B qwen3 2048 6144 28 16 8 151936 tied
Qwen3-4B qwen3 2560 9728 36 32 8 151936 tied
Qwen3-8B qwen3 4096 12288 36 32 8 151936 untied
Llama-3.2-1B llama 2048 8192 16 32 8 128256 tied
Llama-3.2-3B llama 3072 8192 28 24 8 128256 tied
Llama-3.1-8B llama 4096 14336 32 32 8 128256 untied"""


def shape_of(model: str) -> Shape | None:
    """A model's shape, if its name is KNOWN: no file is read. None: another name."""
    from transformers import AutoConfig, AutoModelForCausalLM
    name = model.rpartition("/")[2].partition(":")[0]
    name = name.removesuffix("-Instruct").removesuffix("-Base")
    for line in KNOWN.splitlines():
        known, family, *sizes, head = line.split()
        if known == name:
            sizes = dict(zip(SIZES, map(int, sizes), strict=True))
            with torch.device("meta"):
                config = AutoConfig.for_model(
                    family, tie_word_embeddings=head == "tied", **sizes)
                return shape_from(AutoModelForCausalLM.from_config(config))
    return None


def shape_from(lm) -> Shape:
    """A model's shape, with or without its weights."""
    c, sizes = lm.config, {name: p.numel() for name, p in lm.named_parameters()}
    layer = sum(n for name, n in sizes.items() if ".0." in name)
    linears = {name.rpartition(".")[2]: m.in_features + m.out_features
               for name, m in lm.named_modules() if ".0." in name and hasattr(m, "in_features")}
    heads = c.num_attention_heads
    return Shape(
        hidden=c.hidden_size, layers=c.num_hidden_layers, heads=heads, vocab=c.vocab_size,
        intermediate=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        layer=layer, root=sum(sizes.values()) - c.num_hidden_layers * layer,
        tied="lm_head.weight" not in sizes, qk_norm="q_norm" in str(sizes),
        fused=c.model_type != "gemma2", linears=linears, mixture=experts.sizes(lm))


def number_bytes(dtype: str, card) -> int:
    """The bytes of a number in the trainer's computation."""
    if dtype == "auto":
        return 2 if card else 4
    return {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]


def widest(shape: Shape, tokens: int, *, grad: bool, c: int, m: int, keys: float,
           checkpointing: bool = False, head_chunk: int = 0, critic: bool = False,
           frozen: bool = False, ranks: float = 1) -> dict[str, float]:
    """The bytes of each part in the fullest moment of a micro-batch of `tokens`.

    c, m: bytes of a computed number, of a master weight. keys: see plan.Phase. frozen: only
    adapters have a gradient. ranks: that share a gradient.
    """
    hidden = tokens * shape.hidden * c  # what goes from layer to layer
    inner = tokens * shape.intermediate * c  # one of the wide matrices inside an MLP
    embedding = shape.embedding
    if critic:
        root, chunk, head = (embedding + shape.hidden) * c, 0, 0
    else:
        rows = min(tokens, head_chunk or max(1, HEAD_LOGITS // shape.vocab))
        root, chunk, head = shape.root * c, rows * shape.vocab * 4, embedding * c
    layer, saved = shape.layer * c, tokens * shape.saved(c, keys)
    root1, root2 = root + layer, root + 2 * layer  # with one layer, with two
    kept = hidden if checkpointing else saved  # of each layer, for backward
    last = shape.layers * kept + tokens * 4 * shape.hidden + 3 * hidden  # behind the last layer
    mlp = shape.layers * kept + 2 * inner + 3 * hidden  # in the backward of an MLP
    if checkpointing:
        mlp += saved  # its layer is computed again
    # Each moment: (gathered, activations, head).
    if not grad:
        inside = max(3 * inner, tokens * 12 * shape.hidden, saved - 4 * inner)  # MLP, norms, rest
        moments = [(root + root2, 0, 0), (root1, hidden, SCORE_HEAD * chunk),
                   (root2, 4 * hidden + inside, 0)]
    elif frozen:
        moments = [(root1, last, UPDATE_HEAD * chunk), (root2, mlp, 0)]
    else:
        wide = root * m / c  # the root's gradient, reduced: all of it, then this rank's part
        moments = [
            (root1, last, UPDATE_HEAD * chunk + head),  # a chunk of the head
            (root1, last, 3 * head),  # the sum of its gradients
            (root2, mlp, head),  # the last layer
            (root2 + shape.layer * m, mlp - kept, head),  # the one before; the last one is reduced
            (root + shape.layer * m, 2 * hidden, 2 * embedding * c + head),  # the embedding
            (wide + max(root, embedding * c + wide / ranks), 0, 0)]
    return dict(zip(("gathered", "activations", "head"), max(moments, key=sum), strict=True))


class EngineMemory:
    """The bytes of vLLM on one GPU."""
    weights = cache = workspace = awake = asleep = 0.0
    holds = 1  # without an engine nothing is too long for it

    def __init__(self, plan, shape, card):
        if plan.args.needs_engine:
            self.measure(plan, shape, card)

    def measure(self, plan, shape, card):
        e, lora = plan.args.engine_args, plan.args.lora_args
        c = number_bytes(plan.args.model_args.dtype, card)
        self.weights = c * shape.params / e.tp
        if lora.in_engine(c == 2):  # else it takes weights with adapters merged
            self.weights += c * shape.adapter(lora)

        tokens, seqs = engine_limits(e, card)
        graphs = ENGINE_GRAPHS if card and not e.eager else 0
        activations = c * tokens * (4 * shape.hidden + 3 * shape.intermediate / e.tp)
        logits = 3 * 4 * seqs * shape.vocab  # three float32 copies
        self.workspace = graphs + activations + logits

        block_tokens = 16 if card else 128
        kv = max(shape.kv / e.tp, shape.head_dim)  # at least one head
        block = 2 * c * block_tokens * shape.layers * kv  # keys and values
        sequence = block * ceil_div(plan.longest, block_tokens)  # the longest
        if e.kv_cache_gb:
            self.cache = e.kv_cache_gb * GIB
        elif card:
            share = e.gpu_memory_utilization * card
            self.cache = max(0.0, share - self.weights - self.workspace)
        else:  # what one call can use, and one sequence at least
            used = sequence * (1 + min(seqs, plan.requests))
            self.cache = max(block + sequence, min(CPU_CACHE, used))
        free = self.cache - block  # vLLM keeps a block to itself
        self.holds = max(0, min(seqs, int(free // sequence)))  # longest sequences

        if card and e.sleep_level:
            self.awake = self.weights + self.workspace  # in a sync, before its cache wakes
            self.asleep = graphs  # in training
        else:
            self.awake = self.asleep = self.weights + self.workspace + self.cache


class TrainerMemory:
    """The bytes of the trainer on one GPU."""

    def __init__(self, plan, shape, card):
        a, w = plan.args, plan.args.model_args
        self.shape, self.model_args = shape, w
        self.c = number_bytes(w.dtype, card)
        self.m = max(4, self.c)  # of a master weight
        self.trained, self.frozen = {"policy": shape.params}, 0  # parameters
        if a.critic_args:
            self.trained["critic"] = shape.critic
        adapter = shape.adapter(a.lora_args)
        if adapter:
            self.frozen = sum(self.trained.values())
            self.trained = dict.fromkeys(self.trained, adapter)
        self.ranks = w.shard_size or plan.ranks  # that share parameters, gradients, moments
        if card and w.cpu_offload:  # a GPU's share of them is 0
            self.ranks = float("inf")

        offload = w.offload if card else ()  # without a GPU there is one memory
        trained = self.m * sum(self.trained.values())
        weights = trained + self.c * self.frozen
        self.reference, self.divergence = shape.teacher or shape, a.divergence
        own = a.teacher or not adapter  # else it is the policy without its adapters
        if a.needs_reference and own and "reference" not in offload:
            weights += self.c * self.reference.params
        self.state = {"set aside": RESERVED if card else 0, "parameters": weights / self.ranks,
                      "optimizer": 2 * trained / self.ranks}
        self.waiting = dict(self.state)  # while the engine works
        if "params" in offload:
            self.waiting["parameters"] = 0
        if "optimizer" in offload:
            self.waiting["optimizer"] = 0

    def micro_batch(self, phase: Phase) -> dict[str, float]:
        """What a phase adds to the state."""
        w, grad = self.model_args, phase.name.endswith("update")
        who = "critic" if phase.name.startswith("critic") else "policy"
        parts = widest(
            self.shape, phase.tokens, grad=grad, c=self.c, m=self.m, keys=phase.keys,
            critic=who == "critic", checkpointing=w.checkpointing, head_chunk=w.head_chunk,
            frozen=self.frozen > 0, ranks=self.ranks)
        if grad:
            parts["gradients"] = self.m * self.trained[who] / self.ranks
        return self.beside_teacher(phase, parts)

    def beside_teacher(self, phase: Phase, parts: dict[str, float]) -> dict[str, float]:
        """The fuller one: parts, with what a teacher leaves for --divergence, or its own pass."""
        w, shape, tokens = self.model_args, self.reference, phase.tokens
        update = phase.name == "update" and self.divergence != "none"
        if not update and (phase.name != "score" or shape is self.shape):
            return parts
        alone = widest(shape, tokens, grad=False, c=self.c, m=self.m, keys=phase.keys,
                       head_chunk=w.head_chunk)
        if update:
            rows = min(tokens, w.head_chunk or max(1, HEAD_LOGITS // shape.vocab))
            parts = parts | {"teacher": (shape.root + tokens * shape.hidden) * self.c
                             + TEACHER_HEAD * rows * shape.vocab * 4}
        return max(parts, alone, key=lambda found: sum(found.values()))


Load = namedtuple("Load", "phase parts total")  # bytes on one GPU


def loads(plan, shape, card) -> list[Load]:
    """What is on one GPU in each phase of a step."""
    engine, trainer = EngineMemory(plan, shape, card), TrainerMemory(plan, shape, card)
    found = {}
    if plan.args.needs_engine:
        found["rollout"] = trainer.waiting | {
            "engine weights": engine.weights, "kv cache": engine.cache,
            "engine workspace": engine.workspace}
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in found:  # of several sizes, the largest comes first
            found[phase.name] = trainer.state | trainer.micro_batch(phase) | {
                "engine asleep": engine.asleep}
    largest = max(shape.embedding, shape.hidden * shape.intermediate)
    if plan.args.needs_engine:
        found["sync"] = trainer.waiting | {
            "one weight": 4 * trainer.c * largest,  # parts and whole, of it and the one before
            "engine awake": engine.awake}
    return [Load(name, parts, sum(parts.values())) for name, parts in found.items()]


def fits(plan, shape, card) -> bool:
    """Every phase leaves 3 % of the memory, and the cache holds a sequence."""
    limit = card or plan.free
    return EngineMemory(plan, shape, card).holds > 0 and all(
        load.total <= 0.97 * limit for load in loads(plan, shape, card))


# ---- the search for flags with which it fits ----

SHARE = "gpu_memory_utilization"


def ladder(plan, shape) -> list[tuple[str, object]]:
    """(flag, value), the cheapest first: smaller budgets, then LADDER. Values that break a rule are
    left out."""
    given, steps = flags(plan.args), []
    for name in BUDGETS:
        budget = given.get(name, 0) // 2
        while budget >= max(plan.longest, 4096):
            steps.append((name, budget))
            budget //= 2
    return [(name, value) for name, value in steps + LADDER if not broken(
        changed(plan.args, **{name: value}), plan.ranks, plan.n_rows, plan.n_eval, shape)]


def fitting(plan, shape, card, values: dict) -> dict | None:
    """The values, if it fits with them. Else the values and the engine's share with which it fits,
    the nearest to the given one. Else None."""
    tries = [values]
    if card:
        given = flags(plan.args)[SHARE]
        shares = sorted((n / 20 for n in range(2, 19)), key=lambda share: abs(share - given))
        tries += [values | {SHARE: share} for share in shares]
    for more in tries:
        if fits(replace(plan, args=changed(plan.args, **more)), shape, card):
            return more
    return None


def fewest(plan, shape, card) -> dict | None:
    """The flags to change so that it fits: {} if it fits already. None: no flags are enough."""
    steps, chosen = ladder(plan, shape), None
    # Walk down the ladder until it fits.
    for n in range(len(steps) + 1):
        chosen = fitting(plan, shape, card, dict(steps[:n]))  # each flag's last value
        if chosen is not None:
            break
    if chosen is None:
        return None
    # Leave out each flag that is not needed, or take the first of its values that is enough.
    for flag in list(chosen):
        others = {name: value for name, value in chosen.items() if name not in (flag, SHARE)}
        milder = [others | {name: value} for name, value in steps if name == flag]
        for fewer in [others, *milder]:
            found = fitting(plan, shape, card, fewer)
            if found is not None:
                chosen = found
                break
    return chosen


def spell(values: dict) -> str:
    return " ".join(typed(flag, value) for flag, value in values.items())


def verdict(plan, shape, card) -> tuple[str, Plan]:
    """Whether it fits, and if not, with which flags; and the plan that fits, else this one."""
    for doublings in range(8 if card else 1):
        wider = replace(plan, ranks=plan.ranks * 2**doublings)
        more = fewest(wider, shape, card)
        if more is not None:
            if doublings:
                more["ranks"] = wider.ranks
            words = f"does not fit; would with {spell(more)}" if more else "fits"
            return words, replace(wider, args=changed(plan.args, **more))
    return "does not fit; no flag helps", plan


# ---- what is printed ----

def planned(plan, shape, card) -> Plan:
    """The plan with its memory, for a GPU of `card` bytes or, without one, for plan.free."""
    if not shape.fused:
        return replace(plan, memory="  memory     no plan: attention is not fused in this model")
    words, best = verdict(plan, shape, card)  # its total is of the plan that fits
    top = max(loads(best, shape, card), key=lambda load: load.total)
    limit = f"{(card or plan.free) / GIB:.3g} GiB {'per GPU' if card else 'free per rank'}"
    a, holds = plan.args, EngineMemory(plan, shape, card).holds
    lines = [f"  memory     {words}: {top.total / GIB:.1f} of {limit} at most, in {top.phase}",
             *table(loads(plan, shape, card)), f"    {shape.params:,} parameters"]
    if a.needs_engine:
        lines[-1] += (f"; the engine's cache holds {holds:,} of the longest sequences "
                      f"({plan.longest:,} tokens), and one call asks for {plan.requests:,}")
    if a.lora_args.lora_rank:
        lines.append(f"  lora       {shape.adapter(a.lora_args):,} parameters are trained")
    return replace(plan, memory="\n".join(lines))


def table(found: list[Load]) -> list[str]:
    """A line for each part, in GiB, and a column for each phase."""
    rows = {"": [load.phase for load in found]}
    for part in {part: None for load in found for part, size in load.parts.items() if size}:
        rows[part] = [in_gib(load.parts.get(part, 0)) for load in found]
    rows["total"] = [in_gib(load.total) for load in found]
    return [f"    {name:<18}" + "".join(f"{cell:>15}" for cell in cells)
            for name, cells in rows.items()]


def in_gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else ""


# ---- what was used ----

def peak_memory(device):
    """Around a block. It gives a dict, which then has the peak of memory inside, in bytes."""
    return gpu_peak() if device.type == "cuda" else cpu_peak()


@contextmanager
def cpu_peak():
    """gb: resident in this process."""
    with suppress(OSError):  # the kernel's peak starts again
        Path("/proc/self/clear_refs").write_text("5")
    peak = {}
    yield peak
    peak["gb"] = resident()


@contextmanager
def gpu_peak():
    """All processes together. gb: without what PyTorch's allocator keeps; reserved_gb: with it."""
    torch.cuda.reset_peak_memory_stats()
    others = gpu_in_use() - torch.cuda.memory_reserved()
    peak = {}
    yield peak
    peak["gb"] = others + torch.cuda.max_memory_allocated()
    peak["reserved_gb"] = max(gpu_in_use(), others + torch.cuda.max_memory_reserved())


def resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gpu_in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
