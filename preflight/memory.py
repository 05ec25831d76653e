"""memory.py: what fits on a GPU, from the sizes of a model.

plan: a plan.Plan. shape: a Shape. card: the bytes of a GPU; None: there is none.
"""
from collections import namedtuple
from dataclasses import dataclass, replace
from itertools import product

import torch

from pictures.seeing import text_of, tower_of
from preflight.plan import BUDGETS, Phase, Plan, ceil_div, changed, flags, table
from preflight.rules import broken, typed
from rollout import HELD, engine_limits
from trainer import experts
from trainer.model import HEAD_LOGITS
from trainer.packing import EVEN

GIB = 2**30
RESERVED = 2.0 * GIB  # CUDA context, NCCL and cuBLAS buffers, fragmentation
ENGINE_GRAPHS = 1.0 * GIB
CPU_CACHE = 1.0 * GIB
SCORE_HEAD, UPDATE_HEAD = 3, 5  # float32 (chunk, vocab), without and with backward
TEACHER_HEAD = 6  # more of them for --divergence
LADDER = [  # what makes a run smaller, the cheapest first
    ("kv_cache_gb", 0.0), ("sleep_level", 2), ("checkpointing", True), ("offload", ("optimizer",)),
    ("offload", ("params", "optimizer", "reference")), ("head_chunk", 256), ("cpu_offload", True),
    ("tp", 2), ("tp", 4), ("tp", 8)]


@dataclass
class Tower:
    """The sizes of what makes features of pictures."""
    params: int  # with the projector
    layers: int
    sharded: int  # parameters of all its layers
    hidden: int
    inner: int
    side: int  # pixels of a tile
    patches: int  # of a tile
    tokens: int  # that a tile becomes

    def bytes(self, tokens: int, c: int, trained=False, again=False) -> tuple[int, int]:
        """(what stays while the text model computes, the fullest moment before), as if all tokens
        were of the largest pictures. again: layers are computed again for backward."""
        tiles = ceil_div(tokens, self.tokens)
        patch, kept = tiles * self.patches * c, 12 * tiles * self.side**2  # its pixels
        if not trained:
            return kept, kept + patch * (5 * self.hidden + 2 * self.inner)
        saved = patch * (8 * self.hidden + 2 * self.inner)  # by a layer
        kept, alone = kept + 3 * patch * self.hidden, patch * (2 * self.hidden + self.inner)
        if again:
            alone, saved = alone + saved, patch * self.hidden
        kept += self.layers * saved
        return kept, kept + alone


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
    tower: Tower | None = None  # of a model that sees
    teacher: object = None  # the Shape of --teacher

    def __post_init__(self):
        self.q, self.kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.embedding = self.vocab * self.hidden
        self.params = self.layers * self.layer + self.root
        if self.tower:
            self.params += self.tower.sharded
        self.wide = self.intermediate * (self.mixture.used if self.mixture else 1)  # of a token
        self.critic = self.params if self.tied else self.params - self.embedding  # no head

    def adapter(self, lora) -> int:
        """Parameters of LoRA's adapters. 0: all weights are trained."""
        layer = sum(n for name, n in self.linears.items() if lora.chosen(name))
        return lora.lora_rank * self.layers * layer

    def uneven(self, ranks: float) -> float:
        """Parameters to add: FSDP gives the fullest rank whole experts."""
        if not self.mixture or ranks == float("inf"):
            return 0
        n = self.mixture.experts
        return (ceil_div(n, ranks) * ranks - n) * self.layers * 3 * self.mixture.inner * self.hidden

    def saved(self, c: int, keys: int, frozen: bool) -> float:
        """Bytes that a layer keeps for backward, per token: norms, attention, MLP.

        c: bytes of a computed number. keys: see plan.Phase. frozen: only adapters are trained.
        """
        norms = (8 + 4 * c) * self.hidden
        if self.qk_norm:
            norms += (4 + c) * (self.q + self.kv)
        attention = c * (self.q + 2 * self.q / EVEN + 2 * self.kv * keys)  # EVEN: with padding
        return norms + attention + 4 * c * self.wide + self.rows(c, frozen)

    def rows(self, c: int, frozen: bool = False) -> int:
        """Bytes that experts keep for backward, per token, beside what an MLP does."""
        return experts.saved(self.mixture, self.hidden, c, frozen) if self.mixture else 0


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "head_dim")
KNOWN = """\
tiny qwen2 128 256 2 4 4 320 tied
Qwen2.5-0.5B qwen2 896 4864 24 14 2 151936 tied
Qwen2.5-1.5B qwen2 1536 8960 28 12 2 151936 tied
Qwen2.5-3B qwen2 2048 11008 36 16 2 151936 tied
Qwen2.5-7B qwen2 3584 18944 28 28 4 152064 untied
Qwen3-0.6B qwen3 1024 3072 28 16 8 151936 tied
Qwen3-30B-A3B qwen3_moe 2048 6144 48 32 4 151936 128 untied
Llama-3.2-1B llama 2048 8192 16 32 8 128256 tied"""


def shape_of(model: str) -> Shape | None:
    """A model's shape, if its name is KNOWN; no file is read."""
    from transformers import AutoConfig, AutoModelForCausalLM
    name = model.rpartition("/")[2].partition(":")[0]
    name = name.removesuffix("-Instruct").removesuffix("-Base")
    for line in KNOWN.splitlines():
        known, family, *sizes, head = line.split()
        if known == name:
            sizes = dict(zip(SIZES, map(int, sizes), strict=False))  # head_dim may be missing
            with torch.device("meta"):
                config = AutoConfig.for_model(
                    family, tie_word_embeddings=head == "tied", **sizes)
                return shape_from(AutoModelForCausalLM.from_config(config))
    return None


def shape_from(lm) -> Shape:
    """A model's shape, with or without its weights."""
    c, sizes = lm.config.get_text_config(), {name: p.numel() for name, p in lm.named_parameters()}
    text = text_of(lm)
    layer = sum(p.numel() for name, p in text.named_parameters() if ".0." in name)
    linears = {name.rpartition(".")[2]: m.in_features + m.out_features
               for name, m in text.named_modules() if ".0." in name and hasattr(m, "in_features")}
    heads, mixture, tower = c.num_attention_heads, experts.sizes(lm), tower_sizes(lm)
    inner = mixture.inner if mixture else getattr(c, "intermediate_size", None)
    return Shape(
        hidden=c.hidden_size, layers=c.num_hidden_layers, heads=heads, vocab=c.vocab_size,
        intermediate=inner or 4 * c.hidden_size,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        layer=layer, linears=linears, mixture=mixture, tower=tower,
        root=sum(sizes.values()) - c.num_hidden_layers * layer - (tower.sharded if tower else 0),
        tied="lm_head.weight" not in sizes, qk_norm="q_norm" in str(sizes),
        fused=c.model_type != "gemma2")


def tower_sizes(lm) -> Tower | None:
    """None: a text model."""
    if not tower_of(lm):
        return None
    parts, c = tower_of(lm), lm.config.vision_config
    patches = (c.image_size // c.patch_size) ** 2
    return Tower(
        params=sum(p.numel() for part in parts for p in part.parameters()),
        sharded=sum(p.numel() for p in parts[0].encoder.parameters()), layers=c.num_hidden_layers,
        hidden=c.hidden_size, inner=c.intermediate_size, side=c.image_size, patches=patches,
        tokens=patches // lm.config.scale_factor**2)


def number_bytes(dtype: str, card) -> int:
    """Of a number that the trainer computes."""
    return {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]


class EngineMemory:
    """The bytes of vLLM on one GPU."""

    def __init__(self, plan, shape, card):
        e, lora = plan.args.engine_args, plan.args.lora_args
        c = number_bytes(plan.args.model_args.dtype, card)
        self.weights = c * shape.params / e.tp
        if lora.in_engine(c == 2):  # else it takes weights with adapters merged
            self.weights += c * shape.adapter(lora)

        tokens, seqs = engine_limits(e, card)
        graphs = ENGINE_GRAPHS if card and not e.eager else 0
        activations = c * tokens * (4 * shape.hidden + 3 * shape.wide / e.tp)
        logits = 3 * 4 * seqs * shape.vocab  # three float32 copies
        self.workspace = graphs + activations + logits
        if shape.tower:  # the pixels that it holds, and its own tower
            held = plan.requests * plan.args.data_args.max_prompt_tokens
            self.workspace += shape.tower.bytes(tokens, c)[1] + min(
                HELD * GIB, shape.tower.bytes(held, c)[0])

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
        # Of the longest sequences. vLLM keeps a block to itself.
        self.holds = max(0, min(seqs, int((self.cache - block) // sequence)))

        self.asleep = graphs  # what stays in training
        if not (card and e.sleep_level):
            self.asleep = self.weights + self.workspace + self.cache


class TrainerMemory:
    """The bytes of the trainer on one GPU."""

    def __init__(self, plan, shape, card):
        a, w = plan.args, plan.args.model_args
        self.args, self.shape, self.teacher = a, shape, shape.teacher or shape
        self.c = number_bytes(w.dtype, card)
        self.m = max(4, self.c)  # of a master weight
        self.ranks = w.shard_size or plan.ranks  # that share parameters, gradients, moments
        if card and w.cpu_offload:  # its share is 0
            self.ranks = float("inf")
        models = {"policy": shape.params + shape.uneven(self.ranks)}
        if a.critic_args:
            models["critic"] = shape.critic + shape.uneven(self.ranks)
        self.adapter, self.trained, frozen = shape.adapter(a.lora_args), models, 0
        if self.adapter:
            frozen = self.c * sum(models.values())
            self.trained = dict.fromkeys(models, self.adapter)
        elif shape.tower and not a.optimizer_args.train_vision:
            frozen = self.m * shape.tower.params * len(models)
            self.trained = {name: n - shape.tower.params for name, n in models.items()}

        offload = w.offload if card else ()  # without a GPU there is one memory
        trained, reference = self.m * sum(self.trained.values()), 0
        own = a.teacher or not self.adapter  # else it is the policy without its adapters
        if a.needs_reference and own and "reference" not in offload:
            reference = self.c * self.teacher.params
        self.state = {"set aside": RESERVED if card else 0,
                      "parameters": (trained + frozen + reference) / self.ranks,
                      "optimizer": 2 * trained / self.ranks}
        self.waiting = dict(self.state)  # while the engine works
        if "params" in offload:
            self.waiting["parameters"] = 0
        if "optimizer" in offload:
            self.waiting["optimizer"] = 0

    def micro_batch(self, phase: Phase) -> dict[str, float]:
        """What a phase adds to the state."""
        critic, teacher = phase.name.startswith("critic"), 0
        if not phase.name.endswith("update"):
            if phase.name == "score":
                teacher = self.score(self.teacher, phase, False)
            return {"micro-batch": max(teacher, self.score(self.shape, phase, critic))}
        gradients = self.m * self.trained["critic" if critic else "policy"] / self.ranks
        if self.args.divergence != "none":  # what the teacher's pass leaves for it
            t = self.teacher
            teacher = self.c * (t.root + phase.tokens * t.hidden)
            teacher += TEACHER_HEAD * self.logits(t, phase.tokens)
        return {"micro-batch": self.update(phase, critic) + teacher, "gradients": gradients}

    def logits(self, shape: Shape, tokens: int) -> int:
        """Bytes of the head's logits that exist at the same time, in float32."""
        chunk = self.args.model_args.head_chunk or max(1, HEAD_LOGITS // shape.vocab)
        return 4 * min(tokens, chunk) * shape.vocab

    def sizes(self, shape: Shape, phase: Phase, critic: bool) -> tuple[float, ...]:
        """Bytes in the largest micro-batch: what goes from layer to layer; a wide matrix in an MLP;
        what a layer saves for backward; the logits; the root; what FSDP gathers (the root, this
        rank's part of it, two layers); Tower.bytes."""
        c, tokens, a = self.c, phase.tokens, self.args
        logits, root = self.logits(shape, tokens), shape.root * c
        layer, tower = shape.layer, (0, 0)
        if shape.tower:
            trained = "update" in phase.name and a.optimizer_args.train_vision
            tower = shape.tower.bytes(tokens, c, trained, a.model_args.checkpointing)
            layer = max(layer, shape.tower.sharded // shape.tower.layers)
        if critic:
            logits, root = 0, (shape.embedding + shape.hidden) * c
        gathered = root + root / self.ranks + 2 * layer * c
        return (tokens * shape.hidden * c, tokens * shape.wide * c, tokens * shape.saved(
            c, phase.keys, self.adapter > 0), logits, root, gathered, *tower)

    def score(self, shape: Shape, phase: Phase, critic: bool) -> float:
        """Bytes in the fullest moment of a forward pass without gradient."""
        hidden, inner, saved, logits, root, gathered, *tower = self.sizes(shape, phase, critic)
        rows = phase.tokens * shape.rows(self.c, self.adapter > 0)
        # The next root, or what is wide in an MLP, in attention, in the head.
        wide = max(3 * inner + rows, saved - 4 * inner - rows, SCORE_HEAD * logits)
        return gathered + max(tower[1], tower[0] + 7 * hidden + max(root, wide))

    def update(self, phase: Phase, critic: bool) -> float:
        """Bytes in the fullest moment of a forward and backward pass, without its gradients."""
        shape = self.shape
        hidden, inner, saved, logits, root, gathered, *tower = self.sizes(shape, phase, critic)
        kept, again = shape.layers * saved + 3 * hidden, 0
        if self.args.model_args.checkpointing:  # a layer is computed again
            kept, again = shape.layers * hidden + 3 * hidden, saved
        # Gradients before they are reduced: of the head, the root and a layer.
        head, wide, layer = shape.embedding * self.c, shape.root * self.m, shape.layer * self.m
        if critic:
            head = 0
        if self.adapter:
            head = wide = layer = 0
        kept += tower[0]
        last = kept + 4 * phase.tokens * shape.hidden  # behind all layers
        inner += phase.tokens * shape.rows(self.c) / 2
        # There none is gathered ahead. It is much of a mixture alone.
        ahead = shape.layer * self.c if shape.mixture else 0
        return max(gathered + tower[1],
                   gathered - ahead + last + max(UPDATE_HEAD * logits + head, 3 * head),
                   gathered + layer + kept + again + 2 * inner + head,  # in an MLP
                   wide + max(root, shape.embedding * self.c + wide / self.ranks))


Load = namedtuple("Load", "phase parts total")  # bytes on one GPU


def loads(plan, shape, card) -> list[Load]:
    """What is on one GPU in each phase of a step."""
    trainer, found, asleep = TrainerMemory(plan, shape, card), {}, 0
    if plan.args.needs_engine:
        engine = EngineMemory(plan, shape, card)
        asleep = engine.asleep
        found["rollout"] = trainer.waiting | {
            "engine weights": engine.weights, "engine workspace": engine.workspace,
            # In a sync before it: a weight's parts and the whole, of it and the one before.
            "kv cache": max(engine.cache, 4 * trainer.c * shape.embedding)}
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in found:  # of several sizes, the largest comes first
            found[phase.name] = trainer.state | trainer.micro_batch(phase) | {
                "engine asleep": asleep}
    return [Load(name, parts, sum(parts.values())) for name, parts in found.items()]


def holds(plan, shape, card) -> int:
    """How many of the longest sequences the engine's cache holds. Without an engine: 1."""
    return EngineMemory(plan, shape, card).holds if plan.args.needs_engine else 1


def fits(plan, shape, card) -> bool:
    """Every phase leaves 3 % of the memory, and the cache holds a sequence."""
    largest = max(load.total for load in loads(plan, shape, card))
    return largest / 0.97 <= (card or plan.free) and holds(plan, shape, card) > 0


# ---- flags with which it fits ----

def flags_that_fit(plan, shape, card) -> dict | None:
    """The flags to change so that it fits, {} if it does. None: no flags are enough."""
    given, small = flags(plan.args), max(plan.longest, 4096)
    steps = [(name, small) for name in BUDGETS if given.get(name, 0) > small]
    steps += [(name, value) for name, value in LADDER if given[name] != value]
    tries = [{}, *({name: value} for name, value in steps),
             *(dict(steps[:n]) for n in range(2, len(steps) + 1))]
    shares = [{}, *({"gpu_memory_utilization": n / 10} for n in range(9, 0, -1) if card)]
    for values, share in product(tries, shares):
        args = changed(plan.args, **values, **share)
        if fits(replace(plan, args=args), shape, card) and not broken(
                args, plan.ranks, plan.n_rows, plan.n_eval, shape):
            return values | share
    return None


# ---- what is printed ----

def planned(plan, shape, card) -> Plan:
    """The plan with its memory, for a GPU of `card` bytes or, without one, for plan.free."""
    if not shape.fused:
        return replace(plan, memory="  memory     no plan: attention is not fused in this model")
    more, words = flags_that_fit(plan, shape, card), "fits"
    if more:
        words = "does not fit; would with " + " ".join(typed(*pair) for pair in more.items())
    elif more is None:
        words, more = "does not fit; no flag helps, perhaps more ranks do", {}
    best = replace(plan, args=changed(plan.args, **more))  # the total is of the plan that fits
    top = max(loads(best, shape, card), key=lambda load: load.total)
    limit = f"{(card or plan.free) / GIB:.3g} GiB {'per GPU' if card else 'free per rank'}"
    lines = [f"  memory     {words}: {top.total / GIB:.1f} of {limit} at most, in {top.phase}",
             *table(loads(plan, shape, card)), f"    {shape.params:,} parameters"]
    if shape.mixture:
        lines[-1] += f", {shape.params - shape.layers * shape.mixture.idle:,} of them for a token"
    if plan.args.needs_engine:
        lines[-1] += (f"; the engine's cache holds {holds(plan, shape, card):,} of the longest "
                      f"sequences ({plan.longest:,} tokens), and one call asks for "
                      f"{plan.requests:,}")
    adapter = shape.adapter(plan.args.lora_args)
    if adapter:
        lines.append(f"  lora       {adapter:,} parameters are trained")
    return replace(plan, memory="\n".join(lines))
