"""memory.py: what fits, from a model's config alone. No torch here: arithmetic that a laptop does before a GPU is rented.

    python grpo.py --plan --model Qwen/Qwen2.5-7B-Instruct --ranks 4 --gpu_gb 80 --batch 8 --group 64 --max_tokens 4096

A step has four phases: rollout, score, update, sync. For each: what one GPU holds at its fullest moment, part by part, the sum
against the card, and where the sum is too much, the fewest flags that mend it, found by this same arithmetic.

What the trainer holds is counted from what the code in model.py allocates, and agrees with FSDP's own memory tracker within
10 % (tests/test_memory_tracker.py). What vLLM and CUDA hold beside it are allowances: the constants below.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from plan import Plan, needs_reference, problems, said
from shapes import Shape

GIB = 2**30
RESERVED = 2.0 * GIB         # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB    # CUDA graphs and what else the engine keeps when it sleeps; none with --eager
CPU_CACHE = 1.0 * GIB        # the engine's key-value cache on CPU is no larger, unless --kv_cache_gb says so
GPU_BLOCK, CPU_BLOCK = 16, 128   # tokens of a block of it
ENGINE_TOKENS = 8192         # prompt tokens that the engine takes in one pass
HEAD_LOGITS = 2**27          # logits held at once by the head when --head_chunk is 0: 512 MiB in float32
SCORE_HEAD, UPDATE_HEAD = 3, 5   # float32 tensors of chunk x vocabulary at once, without and with a backward


# ---- one forward, or forward and backward ---------------------------------------------------------------------------

def widest(shape: Shape, tokens: int, *, grad: bool, c: int, m: int, checkpointing: bool = False, head_chunk: int = 0, critic: bool = False) -> dict[str, float]:
    """The fullest moment of one micro-batch of `tokens` padded tokens, beyond the sharded state → bytes of its parts.

    c: bytes of a computed number, m: of a master weight. Which moment is fullest depends on the sizes, so each is counted and
    the largest taken. FSDP keeps the root's weights gathered throughout; of the layers it has the one at work and the next,
    and in backward the last one's gradient on its way. The critic's head is a vector.
    """
    s, h, i = shape, tokens * shape.hidden * c, tokens * shape.intermediate * c
    embedding, root = s.embedding * c, (s.embedding + s.hidden if critic else s.root) * c
    chunk = 0 if critic else min(tokens, head_chunk or max(1, HEAD_LOGITS // s.vocab)) * s.vocab * 4
    head = 0 if critic else embedding                                                    # the gradient of its weight
    last_norm = tokens * 4 * s.hidden + 2 * h
    if not grad:
        return max([dict(gathered=2 * root + 2 * s.layer * c),                           # the start: as it came from the ranks, and in place
                    dict(gathered=root + s.layer * c, activations=h, head=SCORE_HEAD * chunk),
                    dict(gathered=root + 2 * s.layer * c, activations=4 * h + max(3 * i, tokens * 12 * s.hidden))], key=total)
    one = tokens * s.saved(c)
    kept = s.layers * (h if checkpointing else one)                                      # at the end of forward
    working = (one if checkpointing else 0) + 2 * i + 3 * h                              # a layer's backward, in the MLP
    before_last = kept - (h if checkpointing else one)
    in_flight = root + 2 * s.layer * c + s.layer * m                                     # with a gradient being reduced
    return max([
        dict(gathered=root + s.layer * c, activations=kept + last_norm + h, head=UPDATE_HEAD * chunk + head),   # a chunk of the head
        dict(gathered=root + s.layer * c, activations=kept + last_norm + h, head=3 * head),                     # its gradients added up
        dict(gathered=root + 2 * s.layer * c, activations=kept + working, head=head),                           # the last layer
        dict(gathered=in_flight, activations=before_last + working, head=head),                                 # the one before
        dict(gathered=root + s.layer * m, activations=2 * h, head=2 * embedding + head),                        # the embedding
        dict(gathered=root * (1 + m / c))], key=total)                                                          # its gradient reduced


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


# ---- the phases of a step -------------------------------------------------------------------------------------------

@dataclass
class Load:
    """What one GPU holds in the fullest moment of a phase, in bytes, by part."""
    phase: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return total(self.parts)


class Engine:
    """What vLLM holds on one GPU, in bytes: weights, workspace, key-value cache; of it per longest sequence; and asleep."""

    def __init__(self, plan: Plan, shape: Shape, card: float | None):
        args, (c, _) = plan.args, element_bytes(plan.args, card is not None)
        graphs = ENGINE_GRAPHS if card and not args.eager else 0
        self.weights = shape.params * c / args.tp
        self.workspace = graphs + ENGINE_TOKENS * c * (4 * shape.hidden + 3 * shape.intermediate / args.tp) + 3 * args.max_num_seqs * shape.vocab * 4
        block = GPU_BLOCK if card else CPU_BLOCK
        self.per_sequence = -(-plan.longest // block) * block * 2 * shape.layers * max(shape.kv / args.tp, shape.kv / shape.kv_heads) * c
        if args.kv_cache_gb:
            self.cache = args.kv_cache_gb * GIB
        elif card:
            self.cache = max(0.0, args.gpu_memory_utilization * card - self.weights - self.workspace)
        else:                                                # what can be used, and one more: vLLM keeps a block to itself
            self.cache = min(CPU_CACHE, (1 + min(args.max_num_seqs, plan.requests)) * self.per_sequence)
        self.kept = graphs if card and args.sleep_level else self.total

    @property
    def total(self) -> float:
        return self.weights + self.workspace + self.cache

    def holds(self, args) -> int:
        """The longest sequences it has room for at once."""
        return min(args.max_num_seqs, int(self.cache // self.per_sequence))


def element_bytes(args, gpu: bool = True) -> tuple[int, int]:
    """(of a computed number, of a master weight) for --dtype."""
    c = {"auto": 2 if gpu else 4, "bfloat16": 2, "float32": 4, "float64": 8}[args.dtype]
    return c, max(4, c)


def loads(plan: Plan, shape: Shape, card: float | None) -> list[Load]:
    """Every phase of a step. card: bytes of the GPU; None on CPU, where nothing is set aside."""
    a, (c, m) = plan.args, element_bytes(plan.args, card is not None)
    shards, policy = a.shard_size or plan.ranks, shape.params
    critic = policy - (0 if shape.tied else shape.embedding) if hasattr(a, "critic_update_tokens") else 0   # the base without the head
    reference = c * policy if needs_reference(a) and "reference" not in a.offload else 0
    state = dict(parameters=(m * (policy + critic) + reference) / shards, optimizer=2 * m * (policy + critic) / shards)
    if a.cpu_offload:
        state = dict.fromkeys(state, 0)
    rest = {"parameters": 0 if "params" in a.offload else state["parameters"], "optimizer": 0 if "optimizer" in a.offload else state["optimizer"]}
    engine, other = Engine(plan, shape, card), {"set aside": RESERVED if card else 0}

    found = [Load("rollout", rest | {"engine weights": engine.weights, "engine workspace": engine.workspace, "kv cache": engine.cache} | other)]
    for phase in plan.phases(max(plan.batches)):
        if any(load.phase == phase.name for load in found):    # the smaller minibatch of an uneven cut
            continue
        of_critic, grad = phase.name.startswith("critic"), phase.name.endswith("update")
        parts = widest(shape, phase.tokens, grad=grad, c=c, m=m, checkpointing=a.checkpointing, head_chunk=a.head_chunk, critic=of_critic)
        gradients = m * (critic if of_critic else policy) / shards if grad and not a.cpu_offload else 0
        found.append(Load(phase.name, state | {"gradients": gradients} | parts | {"engine asleep": engine.kept} | other))
    awake = engine.weights + engine.workspace if card and a.sleep_level else engine.total  # the cache wakes when the weights are in
    streamed = 4 * c * max(shape.embedding, shape.hidden * shape.intermediate)            # its parts, the whole, and the one before
    return found + [Load("sync", rest | {"one weight": streamed, "engine awake": awake} | other)]


# ---- does it fit, and what would ------------------------------------------------------------------------------------

def why_not(plan: Plan, shape: Shape, card: float, spare: float = 0.0) -> list[str]:
    """What does not fit with `spare` bytes left over, a sentence each; none: it fits."""
    a = plan.args
    engine = Engine(plan, shape, card)
    found = [f"{load.phase} needs {load.total / GIB:.1f} of {card / GIB:g} GiB" for load in loads(plan, shape, card) if load.total > card - spare]
    if engine.holds(a) < 1:
        found.append(f"the engine's share ({engine.total / GIB:.1f} GiB) has no room for one sequence of {plan.longest:,} tokens: it needs "
                     f"{(engine.weights + engine.workspace + engine.per_sequence) / GIB:.1f} GiB")
    return found


def options(plan: Plan, shape: Shape) -> list[tuple[str, list]]:
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
        ("tp", [t for t in (2, 4, 8) if t > a.tp and plan.ranks % t == shape.heads % t == 0]),
        ("cpu_offload", [True][:not a.cpu_offload])]
    return [(flag, values) for flag, values in listed if values]


def fewest(plan: Plan, shape: Shape, card: float) -> dict | None:
    """The fewest flags (of those, the cheapest and mildest) with which it fits with 3 % to spare; {} if it does already, None: nothing helps."""
    def fits(flags: dict) -> bool:
        return not why_not(replace(plan, args=replace(plan.args, **flags)), shape, card, spare=0.03 * card)

    if not why_not(plan, shape, card):
        return {}
    every = options(plan, shape)
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
                if not problems(replace(plan.args, **flags), plan.ranks, plan.n_rows, plan.n_eval, shape, suggest=False):
                    return flags
    return None


def spell(flags: dict) -> str:
    """Flags as they are typed."""
    return " ".join(said(flag, value) for flag, value in flags.items())


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


def planned(plan: Plan, shape: Shape, card: float | None) -> Plan:
    """The plan with its memory."""
    return replace(plan, memory=text(plan, shape, card))


def text(plan: Plan, shape: Shape, card: float | None) -> str:
    """The memory plan: a verdict in one line, then every phase of a step on one GPU (or, without a card, in one rank's process)."""
    a, found = plan.args, loads(plan, shape, card)
    engine = Engine(plan, shape, card)
    asked = -(-max(plan.batches) * a.group // (plan.ranks // a.tp))
    lines = [*table(found, card), f"    {shape.params:,} parameters; the engine's cache holds {engine.holds(a):,} of the longest sequences "
                                  f"({plan.longest:,} tokens) at once, and a step asks it for {asked:,}"]
    wrong = why_not(plan, shape, card) if card else []
    if not wrong:
        return "\n".join([f"  memory     {'fits: ' * bool(card)}{fullest(found, card)}", *lines])
    lines += [f"    does not fit: {sentence}" for sentence in wrong]
    for ranks in (plan.ranks * 2**k for k in range(8)):
        there = replace(plan, ranks=ranks)
        flags = fewest(there, shape, card)
        if flags is not None:
            better = fullest(loads(replace(there, args=replace(a, **flags)), shape, card), card)
            more = f"--ranks {ranks} " * (ranks > plan.ranks)
            return "\n".join([f"  memory     does not fit; would with {more}{spell(flags)}: {better}", *lines])
    return "\n".join([f"  memory     does not fit, with no flags and on no number of ranks up to {ranks:,}", *lines])


def fullest(found: list[Load], card: float | None) -> str:
    """The fullest phase, in words."""
    top = max(found, key=lambda load: load.total)
    return f"{top.total / GIB:.1f} {f'of {card / GIB:.3g} ' if card else ''}GiB per {'GPU' if card else 'rank'} at most, in {top.phase}"
