"""memory.py: what fits, from a model's config alone. No torch here: arithmetic that a laptop does before a GPU is rented.

    python grpo.py --plan --model Qwen/Qwen2.5-7B-Instruct --ranks 4 --gpu_gb 80 --batch 8 --group 64 --max_tokens 4096

A step has four phases: rollout, score, update, sync. For each: what one GPU holds at its fullest moment, part by part, the sum
against the card, and where the sum is too much, the fewest flags that mend it, found by this same arithmetic.

What the trainer holds is counted from what the code in model.py allocates, and agrees with FSDP's own memory tracker within
10 % (tests/test_memory_tracker.py). What vLLM and CUDA hold beside it are allowances: the constants below.
"""
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path

from plan import Plan, SettingsError, needs_old_logprobs, needs_reference, problems

GIB = 2**30
RESERVED = 2.0 * GIB         # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB    # CUDA graphs and what else the engine keeps when it sleeps; none with --eager
ENGINE_TOKENS = 8192         # prompt tokens that the engine takes in one pass
HEAD_LOGITS = 2**27          # logits held at once by the head when --head_chunk is 0: 512 MiB in float32
HEAD_COPIES = {"score": 3, "update": 5, "entropy": 11}   # float32 tensors of chunk x vocabulary at once; "entropy": its gradient too


# ---- a model's sizes ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder: attention, gated MLP, RMS norms (Llama, Mistral, Qwen 2 and 3)."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False          # the head is the embedding
    bias: bool = False          # on the projections to q, k and v
    head_dim: int = 0           # 0: hidden / heads
    qk_norm: bool = False       # q and k are normalized (Qwen 3)

    @property
    def q(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        projections = 2 * self.hidden * (self.q + self.kv) + self.bias * (self.q + 2 * self.kv)
        return projections + 3 * self.hidden * self.intermediate + 2 * self.hidden + self.qk_norm * 2 * self.q // self.heads

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        return self.layers * self.layer + self.root

    def saved(self, c: int) -> int:
        """Bytes that one layer keeps for backward, per token, without checkpointing. c: bytes of a computed number.

        Two norms keep their float32 input and both sides of their scale; attention q, k, v, its output and float32 log-sums
        (the attention kernel never keeps a length x length matrix); the MLP its gate before and after, up, and their product.
        """
        norms = 2 * (4 * self.hidden + 4 + 2 * c * self.hidden)
        qk_norms = self.qk_norm * ((self.q + self.kv) * (4 + c) + 4 * (self.heads + self.kv_heads))
        attention = c * (2 * self.q + 2 * self.kv) + 4 * self.heads
        return norms + qk_norms + attention + 4 * c * self.intermediate


QWEN = dict(bias=True)
SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 4, 320, tied=True, **QWEN),
    "Qwen2.5-0.5B": Shape(896, 4864, 24, 14, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-3B": Shape(2048, 11008, 36, 16, 2, 151936, tied=True, **QWEN),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, 152064, **QWEN),
    "Qwen2.5-14B": Shape(5120, 13824, 48, 40, 8, 152064, **QWEN),
    "Qwen2.5-32B": Shape(5120, 27648, 64, 40, 8, 152064, **QWEN),
    "Qwen3-0.6B": Shape(1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-1.7B": Shape(2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-4B": Shape(2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128, qk_norm=True),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 151936, head_dim=128, qk_norm=True),
    "Llama-3.2-1B": Shape(2048, 8192, 16, 32, 8, 128256, tied=True),
    "Llama-3.2-3B": Shape(3072, 8192, 28, 24, 8, 128256, tied=True),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128256),
}


def shape_of(model: str, sizes: tuple[str, ...] = ()) -> Shape:
    """The shape of --model: from --sizes, this file's table, a folder's config.json, or the hub's, in this order."""
    if sizes:
        try:
            return Shape(**{name: int(value) for name, value in (size.split("=") for size in sizes)})
        except (TypeError, ValueError):
            names = " ".join(f"{f.name}=…" for f in fields(Shape))
            raise SettingsError(f"--sizes {' '.join(sizes)}: give all of {names} (whole numbers; the last four may be left out).") from None
    known = SHAPES.get("tiny" if model.startswith("tiny") else model.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base"))
    if known and not Path(model).is_dir():
        return known
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download
        try:
            path = Path(hf_hub_download(model, "config.json"))
        except Exception as error:     # a dozen kinds, from a bad name to no network: all mean "not there"
            raise SettingsError(f"--model {model}: no folder here, not in memory.py's table, and the hub's config.json could not be had "
                                f"({type(error).__name__}); give its sizes: --sizes hidden=3584 intermediate=18944 layers=28 heads=28 "
                                f"kv_heads=4 vocab=152064.") from None
    return shape_from(json.loads(path.read_text()))


def shape_from(config: dict) -> Shape:
    """The shape in a transformers config. SettingsError for a model that is no plain dense decoder."""
    if config.get("num_experts") or config.get("num_local_experts") or "num_hidden_layers" not in config or "intermediate_size" not in config:
        raise SettingsError(f"there is no memory plan for a model of type {config.get('model_type')!r}, only for dense decoders.")
    kind, heads = config.get("model_type", ""), config["num_attention_heads"]
    return Shape(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads,
                 config["vocab_size"], bool(config.get("tie_word_embeddings")), kind == "qwen2" or bool(config.get("attention_bias")),
                 config.get("head_dim") or 0, kind == "qwen3")


# ---- one forward, or forward and backward ---------------------------------------------------------------------------

def widest(shape: Shape, tokens: int, *, grad: bool, c: int, m: int, checkpointing: bool = False, head_chunk: int = 0, copies: int = 0) -> dict[str, float]:
    """The fullest moment of one micro-batch of `tokens` padded tokens, beyond the sharded state → bytes of its parts.

    c: bytes of a computed number, m: of a master weight. copies: HEAD_COPIES, 0 for the critic, whose head is a vector. Which moment
    is fullest depends on the sizes, so each is counted and the largest taken. FSDP keeps the root's weights gathered
    throughout; of the layers it has the one at work and the next, and in backward the last one's gradient on its way.
    """
    s, h, i = shape, tokens * shape.hidden * c, tokens * shape.intermediate * c
    embedding, root = s.embedding * c, (s.root if copies else s.embedding + s.hidden) * c
    chunk = min(tokens, head_chunk or max(1, HEAD_LOGITS // s.vocab)) * s.vocab * 4
    last_norm = tokens * 4 * s.hidden + 2 * h
    if not grad:
        return max([dict(gathered=root + s.layer * c, activations=last_norm + h, head=copies * chunk),
                    dict(gathered=root + 2 * s.layer * c, activations=4 * h + max(3 * i, tokens * 12 * s.hidden), head=0)], key=total)
    one = tokens * s.saved(c)
    kept = s.layers * (h if checkpointing else one)                                      # at the end of forward
    working = (one if checkpointing else 0) + 2 * i + 3 * h                              # a layer's backward, in the MLP
    before_last = kept - (h if checkpointing else one)
    in_flight = root + 2 * s.layer * c + s.layer * m                                     # with a gradient being reduced
    return max([
        dict(gathered=root + s.layer * c, activations=kept + last_norm + h, head=copies * chunk + embedding * bool(copies)),      # a chunk of the head
        dict(gathered=root + s.layer * c, activations=kept + last_norm + h, head=3 * embedding * bool(copies)),                   # its gradients added up
        dict(gathered=root + 2 * s.layer * c, activations=kept + working, head=embedding * bool(copies)),                         # the last layer
        dict(gathered=in_flight, activations=before_last + working, head=embedding * bool(copies)),                               # the one before
        dict(gathered=root + s.layer * m, activations=2 * h, head=2 * embedding),                                                 # the embedding
        dict(gathered=root * (1 + m / c), activations=0, head=0)], key=total)                                                    # its gradient reduced


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


# ---- the phases of a step -------------------------------------------------------------------------------------------

@dataclass
class Load:
    """What one GPU holds in the fullest moment of a phase, in bytes, by part."""
    phase: str
    parts: dict[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        return total(self.parts)


@dataclass
class Engine:
    """What vLLM holds on one GPU, in bytes."""
    weights: float
    workspace: float
    cache: float                # key-value cache; negative: the share does not even hold the weights
    per_sequence: float         # of the longest possible one
    kept: float                 # while the trainer works

    def __init__(self, args, shape: Shape, card: float | None, c: int, longest: int):
        graphs = ENGINE_GRAPHS if card and not args.eager else 0
        self.weights = shape.params * c / args.tp
        self.workspace = graphs + ENGINE_TOKENS * c * (4 * shape.hidden + 3 * shape.intermediate / args.tp) + 3 * args.max_num_seqs * shape.vocab * 4
        self.per_sequence = longest * 2 * shape.layers * max(shape.kv / args.tp, shape.kv / shape.kv_heads) * c
        given = args.kv_cache_gb or (0 if card else 1)
        self.cache = given * GIB if given else args.gpu_memory_utilization * card - self.weights - self.workspace
        self.kept = graphs if card and args.sleep_level else self.total

    @property
    def total(self) -> float:
        return self.weights + self.workspace + max(0.0, self.cache)

    def holds(self, args) -> int:
        """The longest sequences it has room for at once."""
        return min(args.max_num_seqs, int(max(0.0, self.cache) // self.per_sequence))


def element_bytes(args, gpu: bool = True) -> tuple[int, int]:
    """(of a computed number, of a master weight) for --dtype."""
    c = {"auto": 2 if gpu else 4, "bfloat16": 2, "float32": 4, "float64": 8}[args.dtype]
    return c, max(4, c)


def loads(plan: Plan, shape: Shape, card: float | None) -> list[Load]:
    """Every phase of a step. card: bytes of the GPU; None on CPU, where nothing is set aside."""
    a, (c, m) = plan.args, element_bytes(plan.args, card is not None)
    shards = a.shard_size or plan.ranks
    critic, reference = hasattr(a, "critic_update_tokens"), needs_reference(a)
    head = max(1, len(plan.args.betas)) and shape.params                                 # the policy's own parameters
    value = shape.params - (0 if shape.tied else shape.embedding)                        # the critic has the base's without the head
    trained = (head + critic * value) / shards
    state = dict(parameters=m * trained + reference * c * head / shards, optimizer=2 * m * trained)
    if reference and "reference" in a.offload:
        state["parameters"] = m * trained
    if a.cpu_offload:
        state = dict(parameters=0, optimizer=0)
    rest = dict(state) | ({"parameters": 0} if "params" in a.offload else {}) | ({"optimizer": 0} if "optimizer" in a.offload else {})
    engine, other = Engine(a, shape, card, c, plan.longest), {"set aside": RESERVED if card else 0}

    def passes(name: str, budget: int, rows: int, of: int, grad: bool, copies: int) -> Load:
        tokens = min(budget, rows * plan.longest)
        parts = widest(shape, tokens, grad=grad, c=c, m=m, checkpointing=a.checkpointing, head_chunk=a.head_chunk, copies=copies)
        gradients = m * of / shards if grad and not a.cpu_offload else 0
        return Load(name, state | {"gradients": gradients} | parts | {"engine asleep": engine.kept} | other, f"{tokens:,} tokens")

    rows = max(plan.batches) * a.group
    minibatch = -(-rows // a.minibatches)
    found = [Load("rollout", rest | {"engine weights": engine.weights, "engine workspace": engine.workspace, "kv cache": max(0.0, engine.cache)} | other,
                  f"{engine.holds(a):,} sequences")]
    if needs_old_logprobs(a) or reference:
        found.append(passes("score", a.score_tokens, rows, head, False, HEAD_COPIES["score"]))
    found.append(passes("update", a.update_tokens, minibatch, head, True, HEAD_COPIES["entropy" if a.entropy_coef else "update"]))
    if critic:
        found += [passes("critic score", a.critic_score_tokens, rows, value, False, 0), passes("critic update", a.critic_update_tokens, minibatch, value, True, 0)]
    awake = engine.weights + engine.workspace if card and a.sleep_level else engine.total  # the cache wakes when the weights are in
    largest = max(shape.embedding, shape.hidden * shape.intermediate)
    return found + [Load("sync", rest | {"one weight": largest * (m / shards + 2 * c), "engine awake": awake} | other)]


# ---- does it fit, and what would ------------------------------------------------------------------------------------

def why_not(plan: Plan, shape: Shape, card: float) -> list[str]:
    """What does not fit, a sentence each; none: it fits."""
    a = plan.args
    engine = Engine(a, shape, card, element_bytes(a)[0], plan.longest)
    found = [f"{load.phase} needs {load.total / GIB:.1f} of {card / GIB:g} GiB" for load in loads(plan, shape, card) if load.total > card]
    if engine.holds(a) < 1:
        found.append(f"the engine's share ({engine.total / GIB:.1f} GiB) has no room for one sequence of {plan.longest:,} tokens: it needs "
                     f"{(engine.weights + engine.workspace + engine.per_sequence) / GIB:.1f} GiB")
    return found


def options(plan: Plan) -> list[tuple[str, list]]:
    """(flag, values that save more and more), the flag that costs least time first; gpu_memory_utilization in order of nearness."""
    a, least = plan.args, max(plan.longest, 4096)            # micro-batches below that leave a GPU idle
    shares = sorted((s / 20 for s in range(2, 19)), key=lambda s: abs(s - a.gpu_memory_utilization))
    halves = lambda budget, floor: [b for b in (budget >> k for k in range(1, 12)) if b >= floor] or [floor][:budget > floor]
    rests = ("optimizer",), ("params", "optimizer"), ("params", "optimizer", "reference")
    listed = [
        ("gpu_memory_utilization", shares[1:] if not a.kv_cache_gb else []),
        ("sleep_level", [2][:a.sleep_level < 2]),
        *((name, halves(getattr(a, name), least)) for name in ("score_tokens", "update_tokens", "critic_score_tokens", "critic_update_tokens") if hasattr(a, name)),
        ("checkpointing", [True][:not a.checkpointing]),
        ("offload", [r for r in rests[:3 if needs_reference(a) else 2] if set(r) > set(a.offload)]),
        ("head_chunk", [256, 64] if not a.head_chunk else []),
        ("tp", [t for t in (2, 4, 8) if t > a.tp and plan.ranks % t == 0]),
        ("cpu_offload", [True][:not a.cpu_offload])]
    return [(flag, values) for flag, values in listed if values]


def fewest(plan: Plan, shape: Shape, card: float) -> dict | None:
    """The fewest flags (of those, the cheapest and mildest) with which it fits; {} if it does already, None if nothing helps."""
    def fits(flags: dict) -> bool:
        return not why_not(replace(plan, args=replace(plan.args, **flags)), shape, card)

    if fits({}):
        return {}
    every = options(plan)
    for count in range(1, len(every) + 1):
        for chosen in combinations(every, count):
            shares = dict(chosen).get("gpu_memory_utilization", [None])
            for share in shares:                             # the one flag that may be too small as well as too large
                flags = {flag: values[-1] for flag, values in chosen} | ({"gpu_memory_utilization": share} if share is not None else {})
                if not fits(flags):
                    continue
                for flag, values in reversed(chosen):        # the strongest values fit: now the mildest of each, dearest flag first
                    if flag != "gpu_memory_utilization":
                        flags[flag] = next(v for v in values if fits(flags | {flag: v}))
                if not problems(replace(plan.args, **flags), plan.ranks, plan.n_rows, plan.n_eval, suggest=False):
                    return flags
    return None


def spell(flags: dict) -> str:
    """Flags as they are typed."""
    return " ".join(f"--{k}" if v is True else f"--{k} {' '.join(v) if isinstance(v, tuple) else v}" for k, v in flags.items())


# ---- for people -----------------------------------------------------------------------------------------------------

ROWS = ("parameters", "gradients", "optimizer", "gathered", "activations", "head", "one weight",
        "engine weights", "engine workspace", "kv cache", "engine awake", "engine asleep", "set aside")


def table(found: list[Load], card: float | None) -> Iterator[str]:
    """The parts of every phase, a column each."""
    wide = max(10, *(len(load.phase) + 2 for load in found))
    line = lambda name, cells: f"    {name:<18}" + "".join(f"{cell:>{wide}}" for cell in cells)
    yield line("", [load.phase for load in found])
    for part in ROWS:
        if any(load.parts.get(part) for load in found):
            yield line(part, [f"{load.parts[part] / GIB:.2f}" if load.parts.get(part) else "" for load in found])
    yield line("total" + (f" of {card / GIB:g}" if card else ""), [f"{load.total / GIB:.2f}" for load in found])


def text(plan: Plan, shape: Shape, card: float | None) -> str:
    """The memory plan: every phase of a step, on one GPU (or, without a card, one rank's process)."""
    a, found = plan.args, loads(plan, shape, card)
    engine = Engine(a, shape, card, element_bytes(a, card is not None)[0], plan.longest)
    asked = -(-max(plan.batches) * a.group // (plan.ranks // a.tp))
    lines = [f"  memory     GiB per {'GPU' if card else 'rank'}, at the fullest moment of each phase; {shape.params / 1e9:.2f} B parameters", *table(found, card),
             f"    the engine's cache holds {engine.holds(a):,} of the longest sequences ({plan.longest:,} tokens) at once; a step asks it for {asked:,}"]
    if not card:
        return "\n".join(lines)
    wrong = why_not(plan, shape, card)
    if not wrong:
        return "\n".join([*lines, f"    fits: {max(load.total for load in found) / GIB:.1f} of {card / GIB:g} GiB at most"])
    lines += [f"    does not fit: {sentence}" for sentence in wrong]
    flags = fewest(plan, shape, card)
    if flags:
        better = replace(plan, args=replace(a, **flags))
        top = max(loads(better, shape, card), key=lambda load: load.total)
        return "\n".join([*lines, f"    fits with: {spell(flags)}    ({top.phase}: {top.total / GIB:.1f} of {card / GIB:g} GiB)"])
    more = next((r for r in (plan.ranks * 2**k for k in range(1, 8)) if fewest(replace(plan, ranks=r), shape, card) is not None), None)
    if more:
        flags = fewest(replace(plan, ranks=more), shape, card)
        return "\n".join([*lines, f"    no flags make it fit on {plan.ranks} rank{'s' * (plan.ranks > 1)}; {more} fit, with: {spell(flags) or 'no other flag'}"])
    return "\n".join([*lines, "    no flags make it fit, on any number of ranks up to 128 times as many"])
