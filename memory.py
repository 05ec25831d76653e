"""memory.py: the memory of a rank, planned: a formula in bytes for each of its parts.

c: bytes of a number in the computation (--dtype). m: bytes of a trained weight, of its gradient,
and of each of its two moments in AdamW. Each formula is an upper bound of what was measured, and
for whole models of 0.5B and more at most a third above it (tests/test_memory.py).
docs/use/memory_and_machines.md has most of the formulas in words.
"""
import math
from dataclasses import replace

from architecture import Shape
from batch import EVEN
from model import HEAD_LOGITS
from plan import Phase, Plan, budgets, ceil_div
from rollout import block_tokens, engine_limits

GIB = 2**30
SET_ASIDE = 2.0 * GIB  # CUDA's context, buffers of NCCL and cuBLAS, fragmentation
GRAPHS = 1.0 * GIB  # the engine's CUDA graphs
CPU_CACHE = 1.0 * GIB  # the most that an engine without a GPU takes for its cache by default
FORWARD_HEAD, UPDATE_HEAD = 2, 5  # float32 matrices (chunk, vocabulary), without and with backward


class Memory:
    """The memory of a rank, as a sum of parts in bytes.

    card: bytes of its GPU. None: it has no GPU, and may use `free` bytes of the machine's memory.

    parts: {part: (bytes while the engine samples, bytes while the trainer learns)}. sums: the two
    sums over all parts. cache: bytes of the engine's key-value cache, which has room for `holds`
    sequences of the longest length. fits: whether both sums leave 3 % of the memory to spare, and
    the cache holds a sequence.
    """

    def __init__(self, plan: Plan, shape: Shape, card: float | None, free: float = 0.0):
        self.plan, self.args, self.shape = plan, plan.args, shape
        self.card, self.room = card, card or free
        self.c = {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[
            self.args.dtype]
        self.m = max(4, self.c)
        self.cache = self.holds = 0.0
        self.parts = {"set aside": (SET_ASIDE, SET_ASIDE) if card else (0.0, 0.0),
                      **self.models(), **self.passes(),
                      "engine": self.engine() if self.args.needs_engine else (0.0, 0.0)}
        self.sums = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        cached = self.holds > 0 or not self.args.needs_engine
        self.fits = max(self.sums) <= 0.97 * self.room and cached  # 3 % must be left over

    # ---- weights ----

    @property
    def trained(self) -> int:
        """The number of the policy's parameters that are trained."""
        return 0 if self.args.eval_only else self.shape.params

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint: weights and AdamW's two moments of each model that is trained."""
        return 3 * self.m * self.trained * (2 if self.args.needs_critic else 1)

    def shards(self) -> float:
        """Returns the number of ranks that share a copy of the weights: a rank keeps 1 / shards of
        them. It is infinite with --cpu_offload, because then the GPU keeps none."""
        if self.card and self.args.cpu_offload:
            return math.inf
        return self.args.shard_size or self.plan.ranks

    def weights(self) -> float:
        """Returns the bytes of the policy's weights, of all ranks together."""
        return self.m * self.shape.params

    def reference(self) -> float:
        """Returns the bytes of the reference model's weights, of all ranks together."""
        return self.c * (self.shape.reference or self.shape).params

    def models(self) -> dict[str, tuple[float, float]]:
        """Returns the parts for weights and for what their training keeps: gradients and AdamW's
        moments."""
        args, shards = self.args, self.shards()
        weights, gradients = self.weights() / shards, self.m * self.trained / shards
        # It has all of these too. What --offload moves of it is not taken off: an upper bound.
        critic = weights + 3 * gradients if args.needs_critic else 0.0
        reference = self.reference() / shards if args.needs_reference else 0.0
        away = args.offload if self.card else ()  # without a GPU there is one memory
        reference = 0.0 if "reference" in away else reference  # it stays on the host
        return {"weights": (0.0 if "params" in away else weights, weights),
                "gradients": (0.0, gradients),
                "moments": (0.0 if "optimizer" in away else 2 * gradients, 2 * gradients),
                "critic": (critic, critic), "reference": (reference, reference)}

    # ---- a micro-batch ----

    def passes(self) -> dict[str, tuple[float, float]]:
        """Returns the parts for the largest micro-batch and the largest chunk of logits among all
        phases, as (bytes while the engine samples, bytes while the trainer learns)."""
        found = [self.micro_batch(phase) for phase in self.plan.phases(max(self.plan.batches))]
        micro = max((layers for layers, _ in found), default=0.0)
        logits = max((logits for _, logits in found), default=0.0)
        return {"micro-batch": (0.0, micro), "logits": (0.0, logits)}

    def micro_batch(self, phase: Phase) -> tuple[float, float]:
        """Returns the bytes of a phase's largest micro-batch: (layers and the weights that FSDP
        gathers for them, logits). A critic has no logits."""
        tokens, shape, args = phase.tokens, self.shape, self.args
        critic, update = phase.name.startswith("critic"), phase.name.endswith("update")
        if phase.name == "logprobs" and shape.reference and shape.reference.params > shape.params:
            shape = shape.reference  # it scores too, and is the larger one
        chunk = args.head_chunk or max(1, HEAD_LOGITS // shape.vocab)
        copies = UPDATE_HEAD if update else FORWARD_HEAD
        logits = copies * self.m * min(tokens, chunk) * shape.vocab
        root = shape.root
        if critic:  # its head has one column
            logits, root = 0.0, shape.vocab * shape.hidden
        kept, work = self.of_token(shape, phase, update)
        # A layer's work, the logits, and a second copy of the root, which FSDP has while it gathers
        # it, are never there together. The sum has the logits, so they are subtracted here.
        work = max(tokens * work, logits, self.c * root) - logits
        return self.gathered(shape, root, update) + tokens * kept + work, logits

    def gathered(self, shape: Shape, root: int, update: bool) -> float:
        """Returns the bytes that FSDP holds beside its shards: the whole root, which has so many
        parameters, a copy of the root's shard in --dtype, and two whole layers, this one and the
        next. In an update also the gradients that it sums."""
        sums = self.gradient_sum(root) if update else 0.0
        return self.c * (root + root / self.shards() + 2 * shape.layer) + sums

    def gradient_sum(self, root: int) -> float:
        """Returns the bytes of the gradients that FSDP sums at once: those of a layer, and before
        it those of the root, of which `root` is the number of parameters. The root's gradients are
        counted in --dtype, before they are cast for the sum."""
        return self.m * self.shape.layer + self.c * root

    def of_token(self, shape: Shape, phase: Phase, update: bool) -> tuple[float, float]:
        """Returns the bytes for one token of a micro-batch: (what the layers keep for the backward
        pass and what is between them, the work of the layer that is being computed)."""
        layer, vector = self.layer(shape, phase.keys), self.c * shape.hidden
        beside = 8 * vector  # what is computed between and after the layers
        mlp = 4 * self.c * shape.wide  # the four activations of an MLP
        if not update:  # a layer's MLP comes after the rest of it is freed
            return beside, max(mlp, layer - mlp)
        if self.args.checkpointing:  # each layer keeps its input, one is computed again
            return shape.layers * vector + beside, layer + mlp / 2
        return shape.layers * layer + beside, mlp / 2  # the gradients of two of the four

    def layer(self, shape: Shape, keys: int) -> float:
        """Returns the bytes that one layer keeps for the backward pass, for each token. keys is the
        field of Phase: how many copies of keys attention makes for a token."""
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        norms = (8 + 4 * self.c) * shape.hidden + (4 + self.c) * (q + kv)
        attention = self.c * (q + 2 * q / EVEN + 2 * kv * keys)  # 1 / EVEN: the padding
        return norms + attention + 4 * self.c * shape.wide

    # ---- the engine ----

    def engine_weights(self) -> float:
        """Returns the bytes of the weights in the engine of a rank."""
        return self.c * self.shape.params / self.args.tp

    def engine_work(self, tokens: int, seqs: int) -> float:
        """Returns the bytes of a forward pass of the engine. tokens: of prompts in one pass. seqs:
        completions at once."""
        tp, shape = self.args.tp, self.shape
        # For each token of the vocabulary: three logits in float32, and on a GPU a count and two
        # bits, which vLLM's sampler keeps of each completion.
        sampling = seqs * shape.vocab * (16.25 if self.card else 12)
        return self.c * tokens * (4 * shape.hidden + 3 * shape.wide / tp) + sampling

    def engine(self) -> tuple[float, float]:
        """Returns the bytes of the engine: (while it samples, while it sleeps and the trainer
        learns). It sets `cache`, the bytes of its key-value cache, and `holds`, the number of
        longest sequences that fit into it."""
        e, shape, card = self.args, self.shape, self.card
        tokens, seqs = engine_limits(e, card, self.plan.longest)
        graphs = GRAPHS if card and not e.eager else 0.0
        fixed = self.engine_weights() + graphs + self.engine_work(tokens, seqs)
        tokens = block_tokens(card, self.plan.longest)
        kv = shape.head_dim * max(1, shape.kv_heads / e.tp)
        block = 2 * self.c * tokens * shape.layers * kv  # keys and values
        sequence = block * ceil_div(self.plan.longest, tokens)  # the longest
        if e.kv_cache_gb:
            self.cache = e.kv_cache_gb * GIB
        elif card:
            self.cache = max(0.0, e.gpu_memory_utilization * card - fixed)
        else:  # what one call can use and one sequence more; room for one sequence at least
            used = sequence * (1 + min(seqs, self.plan.requests))
            self.cache = max(block + sequence, min(CPU_CACHE, used))
        # vLLM keeps one block for itself.
        self.holds = max(0, min(seqs, int((self.cache - block) // sequence)))
        # A sync of weights holds the largest one, the embedding, four times. An engine that slept
        # has no cache during the sync, so the larger of the two counts.
        sync, sleeps = 4 * self.c * shape.vocab * shape.hidden, card and e.sleep_level
        awake = fixed + (max(self.cache, sync) if sleeps else self.cache + sync)
        return awake, (graphs if sleeps else awake)  # the CUDA graphs stay on the GPU

    # ---- in words ----

    def sentence(self) -> str:
        """Returns a sentence: that the run fits; or what does not fit, and what would help: the
        first change with which it fits, of those that cost only time and change no number, or a
        page if none is enough."""
        column = self.sums.index(max(self.sums))
        when, total = ("rollout", "training")[column], self.sums[column] / GIB
        whose = "per GPU" if self.card else "free per rank"
        room = f"{self.room / GIB:.3g} GiB {'by --gpu_gb' if self.args.plan else whose}"
        if self.fits:
            return f"fits: {total:.1f} of {room} at most, in {when}"
        if self.args.needs_engine and not self.holds:
            return (f"does not fit: the engine cannot cache a sequence of {self.plan.longest:,} "
                    "tokens. Would work: a larger --gpu_memory_utilization or --kv_cache_gb")
        part = max(self.parts, key=lambda name: self.parts[name][column])
        least = dict.fromkeys(budgets(self.args), self.plan.longest)
        works = "How to reduce it: docs/use/memory_and_machines.md"
        for change in {"checkpointing": True}, least, {"checkpointing": True} | least:
            plan = replace(self.plan, args=replace(self.args, **change))
            if type(self)(plan, self.shape, self.card, self.room).fits:
                words = " ".join(f"--{name} {value}" for name, value in change.items())
                works = f"Would work: {words.replace(' True', '')}"
                break
        return (f"does not fit: {total:.1f} of {room}, in {when}. The largest part is {part}, "
                f"{self.parts[part][column] / GIB:.1f} GiB. {works}")

    def text(self) -> str:
        """Returns the lines of --plan about memory: the sentence, and the table of the parts."""
        if not self.shape.fused:
            return "  memory     no plan: attention is not fused in this model"
        rows = {"GiB": ("rollout", "training")} | {
            name: (f"{a / GIB:.2f}", f"{b / GIB:.2f}")
            for name, (a, b) in {**self.parts, "sum": self.sums}.items() if a or b}
        lines = [f"  memory     {self.sentence()}",
                 *(f"    {name:<14}{a:>10}{b:>10}" for name, (a, b) in rows.items()),
                 f"    {self.shape.params:,} parameters, {self.trained:,} are trained"]
        if self.args.needs_engine:
            lines.append(f"    the engine computes at most {self.holds:,} of the longest sequences "
                         f"({self.plan.longest:,} tokens) at once; one call requests "
                         f"{self.plan.requests:,}")
        return "\n".join(lines)
