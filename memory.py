"""memory.py: what fits on a GPU, from the sizes of a model. Arithmetic only: it needs no torch.

The trainer's parts agree with FSDP's memory tracker. What vLLM and CUDA hold are the constants.
"""
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

from plan import BUDGETS, Plan, SettingsError, broken, changed, flags, typed

GIB = 2**30
RESERVED = 2.0 * GIB  # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB  # none with --eager
CPU_CACHE = 1.0 * GIB  # the largest key-value cache on CPU
ENGINE_TOKENS = 8192  # prompt tokens in one pass of the engine
HEAD_LOGITS = 2**27  # logits of one chunk where --head_chunk is 0: 512 MiB in float32
SCORE_HEAD, UPDATE_HEAD = 3, 5  # float32 tensors (chunk, vocab), without and with backward
LADDER = [  # what saves memory, the cheapest first
    ("sleep_level", 2), ("checkpointing", True), ("offload", ("optimizer",)),
    ("offload", ("params", "optimizer")), ("offload", ("params", "optimizer", "reference")),
    ("head_chunk", 256), ("head_chunk", 64), ("cpu_offload", True), ("tp", 2), ("tp", 4), ("tp", 8)]


@dataclass
class Shape:
    """A dense decoder (Llama, Mistral, Qwen 2 and 3)."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: int = 0  # 1: the head is the embedding
    bias: int = 0  # 1: on the projections to q, k and v
    head_dim: int = 0  # 0: hidden / heads
    qk_norm: int = 0  # 1: q and k are normalized (Qwen 3)

    def __post_init__(self):
        head = self.head_dim or self.hidden // self.heads
        self.q, self.kv = self.heads * head, self.kv_heads * head
        self.embedding = self.vocab * self.hidden
        self.layer = (  # parameters: attention, norms, MLP
            2 * self.hidden * (self.q + self.kv) + self.bias * (self.q + 2 * self.kv)
            + 2 * self.hidden + self.qk_norm * 2 * head + 3 * self.hidden * self.intermediate)
        self.root = self.embedding * (2 - self.tied) + self.hidden  # embedding, head, last norm
        self.params = self.layers * self.layer + self.root

    def saved(self, c: int) -> int:
        """Bytes that a layer keeps for backward, per token. c: bytes of a computed number."""
        return (8 * self.hidden + 8 + 4 * c * self.hidden  # norms: float32 input, factors of scale
                + self.qk_norm * ((self.q + self.kv) * (4 + c) + 4 * (self.heads + self.kv_heads))
                + 2 * c * (self.q + self.kv) + 4 * self.heads  # q, k, v, output, log-sums
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


def shape_of(model: str, sizes: tuple[str, ...] = ()) -> Shape:
    """The shape of --model: from --sizes, SHAPES, a folder or the hub."""
    name = "tiny" if model.startswith("tiny") else (
        model.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base"))
    try:
        if sizes:
            return Shape(**{name: int(value) for name, value in (s.split("=") for s in sizes)})
        if name in SHAPES and not Path(model).is_dir():
            return SHAPES[name]
        from transformers import PretrainedConfig
        return shape_from(PretrainedConfig.get_config_dict(model)[0])
    except (OSError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SettingsError(
            f"--model {model} must be a folder or on the hub; or give --sizes hidden=… "
            f"intermediate=… layers=… heads=… kv_heads=… vocab=… (got {sizes}; "
            f"{type(error).__name__}).") from None


def shape_from(config: dict) -> Shape:
    """The shape in a transformers config."""
    get, kind = config.get, config.get("model_type")
    sizes = [get(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                    "num_attention_heads", "num_key_value_heads", "vocab_size")]
    sizes[4] = sizes[4] or sizes[3]
    if not all(sizes) or get("num_experts") or get("num_local_experts"):
        raise SettingsError(f"--model must be a dense decoder for a memory plan (got {kind!r}).")
    return Shape(*sizes, bool(get("tie_word_embeddings")),
                 kind == "qwen2" or bool(get("attention_bias")),
                 get("head_dim") or 0, kind == "qwen3")


def widest(shape: Shape, tokens: int, *, grad: bool, c: int, m: int, checkpointing: bool = False,
           head_chunk: int = 0, critic: bool = False) -> dict[str, float]:
    """The fullest moment of a micro-batch of `tokens` padded tokens → bytes of each part.

    c, m: bytes of a computed number, of a master weight. FSDP gathers the root and two layers.
    """
    s, h, i = shape, tokens * shape.hidden * c, tokens * shape.intermediate * c
    root = (s.embedding + s.hidden if critic else s.root) * c
    rows = min(tokens, head_chunk or max(1, HEAD_LOGITS // s.vocab))
    chunk, head = (0, 0) if critic else (rows * s.vocab * 4, s.embedding * c)
    one, two = root + s.layer * c, root + 2 * s.layer * c
    saved = tokens * s.saved(c)
    kept = h if checkpointing else saved  # of each layer, after forward
    last = s.layers * kept + tokens * 4 * s.hidden + 3 * h  # with the last norm
    mlp = s.layers * kept + saved * checkpointing + 2 * i + 3 * h
    moments = [  # (gathered, activations, head)
        (one, last, UPDATE_HEAD * chunk + head),  # a chunk of the head
        (one, last, 3 * head),  # the sum of its gradients
        (two, mlp, head),  # the last layer
        (two + s.layer * m, mlp - kept, head),  # the one before; the last one's is reduced
        (root + s.layer * m, 2 * h, 2 * s.embedding * c + head),  # the embedding
        (root * (1 + m / c), 0, 0)]  # its gradient is reduced
    if not grad:
        moments = [(root + two, 0, 0), (one, h, SCORE_HEAD * chunk),
                   (two, 4 * h + max(3 * i, tokens * 12 * s.hidden), 0)]
    return dict(zip(("gathered", "activations", "head"), max(moments, key=sum), strict=True))


Load = namedtuple("Load", "phase parts total")  # bytes on one GPU in the fullest moment of a phase


class EngineMemory:
    """The bytes of vLLM on one GPU. card: those of the GPU; None on CPU."""

    def __init__(self, plan: Plan, shape: Shape, card: float | None):
        e, s = plan.args.engine, shape
        self.c = c = {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[
            plan.args.weights.dtype]  # bytes of a computed number
        graphs = ENGINE_GRAPHS if card and not e.eager else 0
        activations = ENGINE_TOKENS * c * (4 * s.hidden + 3 * s.intermediate / e.tp)
        self.weights = s.params * c / e.tp
        self.workspace = graphs + activations + 3 * e.max_num_seqs * s.vocab * 4
        block, width = 16 if card else 128, max(s.kv / e.tp, s.kv / s.kv_heads)
        sequence = -(-plan.longest // block) * block * 2 * s.layers * width * c
        # On CPU: what can be used, and one more, which vLLM keeps to itself.
        self.cache = e.kv_cache_gb * GIB or (
            max(0.0, e.gpu_memory_utilization * card - self.weights - self.workspace) if card else
            min(CPU_CACHE, (1 + min(e.max_num_seqs, plan.requests)) * sequence))
        self.holds = min(e.max_num_seqs, int(self.cache // sequence))  # longest sequences
        asleep, whole = card and e.sleep_level, self.weights + self.workspace + self.cache
        self.kept = graphs if asleep else whole  # while the trainer works
        self.awake = self.weights + self.workspace if asleep else whole  # in a sync


def loads(plan: Plan, shape: Shape, card: float | None) -> list[Load]:
    """Every phase of a step."""
    a, w, policy, engine = plan.args, plan.args.weights, shape.params, EngineMemory(
        plan, shape, card)
    c, m = engine.c, max(4, engine.c)  # bytes of a computed number, of a master weight
    critic = policy - (1 - shape.tied) * shape.embedding if a.critic else 0  # without the head
    reference = c * policy if a.needs_reference and "reference" not in w.offload else 0
    shards = float("inf") if w.cpu_offload else w.shard_size or plan.ranks
    state = {"set aside": RESERVED if card else 0,
             "parameters": (m * (policy + critic) + reference) / shards,
             "optimizer": 2 * m * (policy + critic) / shards}
    rest = state | {"parameters": state["parameters"] * ("params" not in w.offload),
                    "optimizer": state["optimizer"] * ("optimizer" not in w.offload)}
    found = {"rollout": rest | {"engine weights": engine.weights, "kv cache": engine.cache,
                                "engine workspace": engine.workspace}}
    for phase in plan.phases(max(plan.batches)):
        of_critic, grad = phase.name.startswith("critic"), phase.name.endswith("update")
        parts = widest(shape, phase.tokens, grad=grad, c=c, m=m, checkpointing=w.checkpointing,
                       head_chunk=w.head_chunk, critic=of_critic)
        parts |= {"gradients": grad * m * (critic if of_critic else policy) / shards,
                  "engine asleep": engine.kept}
        found.setdefault(phase.name, state | parts)  # of an uneven cut, the larger part
    # A weight in the sync: its parts, the whole, and the one before.
    one_weight = 4 * c * max(shape.embedding, shape.hidden * shape.intermediate)
    found["sync"] = rest | {"one weight": one_weight, "engine awake": engine.awake}
    return [Load(name, parts, sum(parts.values())) for name, parts in found.items()]


def fits(plan: Plan, shape: Shape, card: float, spare: float = 0.0) -> bool:
    """Whether each phase leaves `spare` bytes, and the engine has room for one sequence."""
    return EngineMemory(plan, shape, card).holds > 0 and all(
        load.total <= card - spare for load in loads(plan, shape, card))


def fewest(plan: Plan, shape: Shape, card: float) -> dict | None:
    """Flags with which it fits, none too many, with 3 % to spare; None: there are none."""
    given, least, share = flags(plan.args), max(plan.longest, 4096), "gpu_memory_utilization"
    steps = [(name, given[name] >> k) for name in BUDGETS if name in given for k in range(1, 12)
             if given[name] >> k >= least] + LADDER  # smaller budgets would leave a GPU idle
    steps = [step for step in steps if not broken(
        changed(plan.args, **dict([step])), plan.ranks, plan.n_rows, plan.n_eval, shape, None)]
    shares = [{share: s / 20} for s in range(2, 19)]
    shares.sort(key=lambda other: abs(other[share] - given[share]))

    def first(tries: list[dict]) -> dict | None:
        """The first that fits, if need be with another share of the engine."""
        for more in (more | other for more in tries for other in [{}, *shares]):
            if fits(replace(plan, args=changed(plan.args, **more)), shape, card, 0.03 * card):
                return more

    more = first([dict(steps[:n]) for n in range(len(steps) + 1)])
    for flag in more or ():  # dropped, or as mild as can be
        rest = {name: value for name, value in more.items() if name not in (flag, share)}
        more = first([rest, *(rest | {name: value} for name, value in steps if name == flag)])
    return more


def spell(values: dict) -> str:
    return " ".join(typed(flag, value) for flag, value in values.items())


def planned(plan: Plan, shape: Shape, card: float | None) -> Plan:
    """The plan with the text of its memory."""
    found, best, words = loads(plan, shape, card), plan, "fits: " if card else ""
    if card and not fits(plan, shape, card):
        more = fewest(plan, shape, card)
        best = replace(plan, args=changed(plan.args, **(more or {})))
        words = f"does not fit; would with {spell(more)}: " if more else (
            "does not fit; would need more ranks: ")
    top = max(loads(best, shape, card), key=lambda load: load.total)
    of = f"of {card / GIB:.3g} GiB per GPU" if card else "GiB per rank"
    asked = -(-max(plan.batches) * plan.args.group * plan.args.engine.tp // plan.ranks)
    gib = lambda value: f"{value / GIB:.2f}" if value else ""
    rows = {part: [gib(load.parts.get(part)) for load in found]
            for load in found for part in load.parts if load.parts[part]}
    rows["total"] = [gib(load.total) for load in found]
    return replace(plan, memory="\n".join([
        f"  memory     {words}{top.total / GIB:.1f} {of} at most, in {top.phase}",
        *(f"    {name:<18}" + "".join(f"{cell:>15}" for cell in cells)
          for name, cells in ({"": [load.phase for load in found]} | rows).items()),
        f"    {shape.params:,} parameters; the engine's cache holds "
        f"{EngineMemory(plan, shape, card).holds:,} of the longest sequences ({plan.longest:,} "
        f"tokens), and a step asks it for {asked:,}"]))
