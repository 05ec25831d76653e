"""What fits on a GPU, from the sizes of a model."""
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

from errors import SettingsError
from packing import EVEN, KEYS
from plan import BUDGETS, LORA_RANKS, Plan, broken, changed, flags, typed

GIB = 2**30
RESERVED = 2.0 * GIB  # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB
CPU_CACHE = 1.0 * GIB
ENGINE_TOKENS = 8192  # prompt tokens in one pass of the engine
HEAD_LOGITS = 2**27  # of one chunk where --head_chunk is 0
SCORE_HEAD, UPDATE_HEAD = 3, 5  # float32 (chunk, vocab), without and with backward
LADDER = [  # the cheapest first
    ("kv_cache_gb", 0.0), ("sleep_level", 2), ("checkpointing", True), ("offload", ("optimizer",)),
    ("offload", ("params", "optimizer")), ("offload", ("params", "optimizer", "reference")),
    ("head_chunk", 256), ("head_chunk", 64), ("cpu_offload", True), ("tp", 2), ("tp", 4), ("tp", 8)]


@dataclass
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: int = 0  # the head is the embedding
    bias: int = 0  # on q, k and v
    head_dim: int = 0  # 0: hidden / heads
    qk_norm: int = 0  # q and k are normalized
    layer: int = 0  # parameters of a layer; 0: attention, norms, MLP
    root: int = 0  # of the rest; 0: embedding, head, last norm
    linears: dict | None = None  # {name: in + out} of a layer; None: a plain decoder's
    fused: bool = True  # attention; else its memory grows with length²

    def __post_init__(self):
        head = self.head_dim or self.hidden // self.heads
        self.q, self.kv = self.heads * head, self.kv_heads * head
        self.embedding = self.vocab * self.hidden
        self.layer = self.layer or (
            2 * self.hidden * (self.q + self.kv) + self.bias * (self.q + 2 * self.kv)
            + 2 * self.hidden + self.qk_norm * 2 * head + 3 * self.hidden * self.intermediate)
        self.root = self.root or self.embedding * (2 - self.tied) + self.hidden
        self.params = self.layers * self.layer + self.root
        h, i = self.hidden, self.intermediate
        if self.linears is None:
            self.linears = dict(
                q_proj=h + self.q, k_proj=h + self.kv, v_proj=h + self.kv, o_proj=self.q + h,
                gate_proj=h + i, up_proj=h + i, down_proj=i + h)

    def adapter(self, lora) -> int:
        """Parameters of LoRA's adapters."""
        layer = sum(n for name, n in self.linears.items() if lora.chosen(name))
        return lora.lora_rank * self.layers * layer

    def saved(self, c: int, packed: bool = False) -> float:
        """Bytes that a layer keeps for backward, per token. c: bytes of a computed number."""
        queries, keys = (1 / EVEN, KEYS) if packed else (1, 1)  # of attention, per token
        return (8 * self.hidden + 8 + 4 * c * self.hidden  # norms
                + self.qk_norm * ((self.q + self.kv) * (4 + c) + 4 * (self.heads + self.kv_heads))
                + 2 * c * (self.q * queries + self.kv * keys)  # q, output, k, v
                + packed * c * self.q + 4 * self.heads * queries  # output in order, log-sums
                + 4 * c * self.intermediate)


SHAPES = {name: Shape(*map(int, sizes)) for name, *sizes in map(str.split, """\
tiny 128 256 2 4 4 320 1 1
Qwen2.5-0.5B 896 4864 24 14 2 151936 1 1
Qwen2.5-1.5B 1536 8960 28 12 2 151936 1 1
Qwen2.5-3B 2048 11008 36 16 2 151936 1 1
Qwen2.5-7B 3584 18944 28 28 4 152064 0 1
Qwen2.5-14B 5120 13824 48 40 8 152064 0 1
Qwen2.5-32B 5120 27648 64 40 8 152064 0 1
Qwen3-0.6B 1024 3072 28 16 8 151936 1 0 128 1
Qwen3-1.7B 2048 6144 28 16 8 151936 1 0 128 1
Qwen3-4B 2560 9728 36 32 8 151936 1 0 128 1
Qwen3-8B 4096 12288 36 32 8 151936 0 0 128 1
Llama-3.2-1B 2048 8192 16 32 8 128256 1
Llama-3.2-3B 3072 8192 28 24 8 128256 1
Llama-3.1-8B 4096 14336 32 32 8 128256""".splitlines())}


def shape_of(model: str, sizes: tuple[str, ...] = ()) -> Shape | None:
    name = "tiny" if model.startswith("tiny") else (
        model.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base"))
    try:
        if sizes:
            return Shape(**{name: int(value) for name, value in (s.split("=") for s in sizes)})
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SettingsError("--sizes must be hidden=… intermediate=… layers=… heads=… kv_heads=… "
                            f"vocab=… ({type(error).__name__}).") from None
    return None if Path(model).is_dir() else SHAPES.get(name)


def shape_from(lm) -> Shape:
    c, sizes = lm.config, {name: p.numel() for name, p in lm.named_parameters()}
    get = lambda name, default: getattr(c, name, None) or default
    layers, heads = c.num_hidden_layers, c.num_attention_heads
    layer = sum(n for name, n in sizes.items() if ".0." in name)
    return Shape(c.hidden_size, get("intermediate_size", 4 * c.hidden_size), layers, heads,
                 get("num_key_value_heads", heads), c.vocab_size,
                 tied="lm_head.weight" not in sizes, head_dim=get("head_dim", 0),
                 qk_norm="q_norm" in str(sizes), layer=layer,
                 root=sum(sizes.values()) - layers * layer, fused=c.model_type != "gemma2",
                 linears={name.rpartition(".")[2]: m.in_features + m.out_features
                          for name, m in lm.named_modules()
                          if ".0." in name and hasattr(m, "in_features")})


def widest(shape: Shape, tokens: int, *, grad: bool, c: int, m: int, checkpointing: bool = False,
           head_chunk: int = 0, critic: bool = False, packed: bool = False,
           frozen: bool = False) -> dict[str, float]:
    """The bytes of each part in the fullest moment of a micro-batch of `tokens`.

    c, m: bytes of a computed number, of a master weight. frozen: only adapters have a gradient.
    """
    s, h, i = shape, tokens * shape.hidden * c, tokens * shape.intermediate * c
    root = (s.embedding + s.hidden if critic else s.root) * c
    rows = min(tokens, head_chunk or max(1, HEAD_LOGITS // s.vocab))
    chunk, head = (0, 0) if critic else (rows * s.vocab * 4, s.embedding * c)
    one, two = root + s.layer * c, root + 2 * s.layer * c
    saved = tokens * s.saved(c, packed)
    kept = h if checkpointing else saved  # of each layer
    last = s.layers * kept + tokens * 4 * s.hidden + 3 * h
    mlp = s.layers * kept + saved * checkpointing + 2 * i + 3 * h
    moments = [  # (gathered, activations, head)
        (one, last, UPDATE_HEAD * chunk + head),  # a chunk of the head
        (one, last, 3 * head),  # the sum of its gradients
        (two, mlp, head),  # the last layer
        (two + s.layer * m, mlp - kept, head),  # the one before; the last one's is reduced
        (root + s.layer * m, 2 * h, 2 * s.embedding * c + head),  # the embedding
        (root * (1 + m / c), 0, 0)]  # its gradient is reduced
    if frozen:
        moments = [(one, last, UPDATE_HEAD * chunk), (two, mlp, 0)]
    if not grad:
        moments = [(root + two, 0, 0), (one, h, SCORE_HEAD * chunk),
                   (two, 4 * h + max(3 * i, tokens * 12 * s.hidden, packed * (saved - 4 * i)), 0)]
    return dict(zip(("gathered", "activations", "head"), max(moments, key=sum), strict=True))


Load = namedtuple("Load", "phase parts total")  # bytes on one GPU


class EngineMemory:
    """The bytes of vLLM on one GPU of `card` bytes (None: CPU)."""

    def __init__(self, plan: Plan, s: Shape, card: float | None):
        e = plan.args.engine_args
        self.c = c = {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[
            plan.args.model_args.dtype]  # bytes of a computed number
        graphs = ENGINE_GRAPHS * bool(card and not e.eager)
        activations = ENGINE_TOKENS * c * (4 * s.hidden + 3 * s.intermediate / e.tp)
        lora = plan.args.lora_args
        self.adapter = lora.in_engine(c == 2)
        room = next((r for r in LORA_RANKS if r >= lora.lora_rank), 0) / max(1, lora.lora_rank)
        self.weights = (s.params / e.tp + self.adapter * room * s.adapter(lora)) * c
        self.workspace = graphs + activations + 3 * e.max_num_seqs * s.vocab * 4
        tokens = 16 if card else 128
        block = tokens * 2 * s.layers * max(s.kv / e.tp, s.kv / s.kv_heads) * c
        sequence = -(-plan.longest // tokens) * block
        self.cache = e.kv_cache_gb * GIB or (
            max(0.0, e.gpu_memory_utilization * card - self.weights - self.workspace) if card else
            max(block + sequence, min(
                CPU_CACHE, (1 + min(e.max_num_seqs, plan.requests)) * sequence)))
        free = self.cache - block  # vLLM keeps a block to itself
        self.holds = max(0, min(e.max_num_seqs, int(free // sequence)))
        self.awake, self.kept = self.weights + self.workspace, graphs  # in a sync; in training
        if not (card and e.sleep_level):
            self.awake = self.kept = self.awake + self.cache


def loads(plan: Plan, shape: Shape, card: float | None) -> list[Load]:
    a, w, policy = plan.args, plan.args.model_args, shape.params
    engine = EngineMemory(plan, shape, card)
    c, m = engine.c, max(4, engine.c)
    critic = policy - (1 - shape.tied) * shape.embedding if a.critic_args else 0
    offload = w.offload if card else ()  # without a GPU there is one memory
    adapter = shape.adapter(a.lora_args)  # 0: all weights are trained
    trains = {False: adapter or policy, True: adapter * bool(a.critic_args) or critic}
    frozen = c * (policy + critic) * bool(adapter)
    reference = a.needs_reference and "reference" not in offload and not adapter
    shards = float("inf") if card and w.cpu_offload else w.shard_size or plan.ranks
    state = {"set aside": RESERVED if card else 0,
             "parameters": (m * sum(trains.values()) + frozen + c * policy * reference) / shards,
             "optimizer": 2 * m * sum(trains.values()) / shards}
    rest = state | {part: 0 for part, name in (("parameters", "params"), ("optimizer",) * 2)
                    if name in offload}
    found = {"rollout": rest | {"engine weights": engine.weights, "kv cache": engine.cache,
                                "engine workspace": engine.workspace}}
    for phase in plan.phases(max(plan.batches)):
        of_critic, grad = phase.name.startswith("critic"), phase.name.endswith("update")
        parts = widest(
            shape, phase.tokens, grad=grad, c=c, m=m, checkpointing=w.checkpointing,
            head_chunk=w.head_chunk, critic=of_critic, packed=a.group > 1,
            frozen=bool(adapter))
        found.setdefault(phase.name, state | parts | {  # of an uneven cut, the larger part
            "gradients": grad * m * trains[of_critic] / shards,
            "engine asleep": engine.kept})
    found["sync"] = rest | {  # its parts, the whole, and the weight before
        "one weight": 4 * c * max(shape.embedding, shape.hidden * shape.intermediate),
        "engine awake": engine.awake}
    return [Load(name, parts, sum(parts.values())) for name, parts in found.items()]


def fits(plan: Plan, shape: Shape, card: float | None, spare: float = 0.0) -> bool:
    """Every phase leaves `spare` bytes, and the cache holds a sequence."""
    return EngineMemory(plan, shape, card).holds > 0 and all(
        load.total <= (card or plan.free) - spare for load in loads(plan, shape, card))


def fewest(plan: Plan, shape: Shape, card: float | None) -> dict | None:
    """The flags with which it fits, none too many, with 3 % to spare."""
    given, least, share = flags(plan.args), max(plan.longest, 4096), "gpu_memory_utilization"
    steps = [(name, given[name] >> k) for name in BUDGETS if name in given for k in range(1, 12)
             if given[name] >> k >= least] + LADDER
    steps = [(name, value) for name, value in steps if not broken(
        changed(plan.args, **{name: value}), plan.ranks, plan.n_rows, plan.n_eval, shape)]
    shares = [s / 20 for s in range(2, 19) if card]
    shares = [{share: s} for s in sorted(shares, key=lambda s: abs(s - given[share]))]

    def first(tries: list[dict]) -> dict | None:
        for more in (more | other for more in tries for other in [{}, *shares]):
            changed_plan = replace(plan, args=changed(plan.args, **more))
            if fits(changed_plan, shape, card, spare=0.03 * (card or plan.free)):
                return more

    more = first([dict(steps[:n]) for n in range(len(steps) + 1)])
    for flag in more or ():
        rest = {name: value for name, value in more.items() if name not in (flag, share)}
        more = first([rest, *(rest | {name: value} for name, value in steps if name == flag)])
    return more


def spell(values: dict) -> str:
    return " ".join(typed(*item) for item in values.items())


def planned(plan: Plan, shape: Shape | None, card: float | None) -> Plan:
    if not (shape and shape.fused):
        return replace(plan, memory="  memory     no plan: attention is not fused in this model")
    found, best, limit = loads(plan, shape, card), plan, card or plan.free
    words = "fits: " if limit else ""
    if limit and not fits(plan, shape, card):
        words = "does not fit; no flag helps: "
        for ranks in [plan.ranks << k for k in range(8 if card else 1)]:
            wider = replace(plan, ranks=ranks)
            if (more := fewest(wider, shape, card)) is not None:
                best = replace(wider, args=changed(plan.args, **more))
                more |= {"ranks": ranks} if ranks > plan.ranks else {}
                words = f"does not fit; would with {spell(more)}: "
                break
    top = max(loads(best, shape, card), key=lambda load: load.total)
    of = f"of {limit / GIB:.3g} " * (limit > 0) + f"GiB {'per GPU' if card else 'free per rank'}"
    asked = -(-max(plan.batches) * plan.args.group * plan.args.engine_args.tp // plan.ranks)
    adapter, engine = shape.adapter(plan.args.lora_args), EngineMemory(plan, shape, card)
    takes = "them alone" if engine.adapter else "weights with them merged"
    if engine.adapter and card and plan.args.engine_args.sleep_level:
        takes += (f", and keeps {engine.weights / GIB:.3g} GiB of weights on the host of each rank "
                  f"(sleep level 1)")
    gib = lambda value: f"{value / GIB:.2f}" if value else ""
    rows = {"": [load.phase for load in found]}
    rows |= {part: [gib(load.parts.get(part)) for load in found]
             for load in found for part in load.parts if load.parts[part]}
    rows["total"] = [gib(load.total) for load in found]
    return replace(plan, memory="\n".join([
        f"  memory     {words}{top.total / GIB:.1f} {of} at most, in {top.phase}",
        *(f"    {name:<18}" + "".join(map("{:>15}".format, cells)) for name, cells in rows.items()),
        f"    {shape.params:,} parameters; the engine's cache holds "
        f"{engine.holds:,} of the longest sequences ({plan.longest:,} "
        f"tokens), and a step asks it for {asked:,}",
        *[f"  lora       {adapter:,} parameters are trained; the engine takes {takes}"]
        * bool(adapter)]))
