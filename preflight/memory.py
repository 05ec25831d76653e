"""memory.py: does a run fit? A plain formula for each part of the memory of one GPU.

docs/use/memory_and_machines.md has them in words. Each is an upper bound. The bytes of a number: c
as it is computed, m in a trained weight (float32). R ranks share the weights. card: the
bytes of a GPU, or None.
"""
from preflight.plan import Phase, Plan, ceil_div
from preflight.shape import Shape
from rollout import HELD, engine_limits
from trainer.model import HEAD_LOGITS

GIB = 2**30
SET_ASIDE = 2.0 * GIB  # CUDA's context, buffers of NCCL and cuBLAS, fragmentation
GRAPHS = 1.0 * GIB  # of the engine
CPU_CACHE = 1.0 * GIB  # of an engine without a GPU
SCORE_HEAD, UPDATE_HEAD = 3, 5  # float32 matrices (chunk, vocabulary), without and with backward
TEACHER_HEAD = 6  # more of them for --divergence
SMALLER = {  # the two flags that make a part smaller
    "set aside": "--ranks and --gpu_gb (more or larger GPUs)",
    "weights": "--offload params and --lora_rank", "gradients": "--lora_rank and --cpu_offload",
    "moments": "--offload optimizer and --lora_rank", "critic": "--lora_rank and --cpu_offload",
    "reference": "--offload reference and --lora_rank",
    "micro-batch": "--checkpointing and a smaller --update_tokens (or --score_tokens)",
    "logits": "a smaller --head_chunk and a smaller --update_tokens",
    "engine": "a smaller --gpu_memory_utilization (or --kv_cache_gb) and --tp"}


class Memory:
    """parts: {part: (bytes in the rollout, bytes in training)} of one GPU."""

    def __init__(self, plan: Plan, shape: Shape, card: float | None):
        self.plan, self.args, self.shape, self.card = plan, plan.args, shape, card
        args, model = plan.args, plan.args.model_args
        self.c = {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[model.dtype]
        self.m = max(4, self.c)
        self.ranks = model.shard_size or plan.ranks
        if shape.mixture:  # a rank has whole experts
            self.ranks = shape.mixture.experts / ceil_div(shape.mixture.experts, self.ranks)
        if card and model.cpu_offload:
            self.ranks = float("inf")
        self.adapter = shape.adapter(args.lora_args)
        trained, weights = shape.params, self.m * shape.params
        if self.adapter:
            trained, weights = self.adapter, self.c * shape.params + self.m * self.adapter
        elif shape.tower and not args.optimizer_args.train_vision:
            trained -= shape.tower.params
        weights, gradients = weights / self.ranks, self.m * trained / self.ranks
        self.checkpoint = 3 * self.m * trained * (2 if args.critic_args else 1)  # bytes
        critic = reference = 0.0
        if args.critic_args:  # it has all of these too
            critic = weights + 3 * gradients
        if args.needs_reference and (args.teacher or not self.adapter):  # else it is the policy
            reference = self.c * (shape.teacher or shape).params / self.ranks
        away = model.offload if card else ()  # without a GPU there is one memory
        reference = 0.0 if "reference" in away else reference
        passes = [self.micro_batch(phase) for phase in plan.phases(max(plan.batches))]
        micro, logits = (max(sizes) for sizes in zip(*passes, strict=True))
        self.cache = self.holds = 0.0
        engine = self.engine() if args.needs_engine else (0.0, 0.0)
        self.parts = {
            "set aside": (SET_ASIDE, SET_ASIDE) if card else (0.0, 0.0),
            "weights": (0.0 if "params" in away else weights, weights),
            "gradients": (0.0, gradients),
            "moments": (0.0 if "optimizer" in away else 2 * gradients, 2 * gradients),
            "critic": (critic, critic), "reference": (reference, reference),
            "micro-batch": (0.0, micro), "logits": (0.0, logits), "engine": engine}
        self.sums = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        room = card or plan.free
        self.fits = max(self.sums) <= 0.97 * room and (self.holds > 0 or not args.needs_engine)

    def micro_batch(self, phase: Phase) -> tuple[float, float]:
        """(layers and what FSDP gathers for them, logits) of the largest one."""
        c, tokens, args, critic = self.c, phase.tokens, self.args, phase.name.startswith("critic")
        update, shape, teacher = phase.name.endswith("update"), self.shape, self.shape.teacher
        if phase.name == "score" and teacher and teacher.params > shape.params:
            shape = teacher  # it scores too
        root = shape.vocab * shape.hidden if critic else shape.root
        gathered = c * (root + root / self.ranks + 2 * shape.layer)
        again = update and args.model_args.checkpointing  # layers keep inputs, and compute again
        kept = shape.layers if update and not again else 1  # layers, for backward
        mlp, layer = 4 * c * shape.wide, shape.layer_bytes(c, phase.keys)
        size = kept * layer + mlp / 2 if update else max(mlp, layer - mlp)
        size += 8 * c * shape.hidden  # what goes from layer to layer, and behind the last
        if again:
            size += shape.layers * c * shape.hidden
        if update and not self.adapter:  # gradients before FSDP reduces them
            gathered += self.m * (shape.layer + root / 2)
        if shape.tower:
            trained = 1 if again else shape.tower.layers
            gathered += 2 * c * shape.tower.layer
            learns = update and args.optimizer_args.train_vision
            size += shape.tower.bytes(c, trained if learns else 0)
        copies = UPDATE_HEAD if update else SCORE_HEAD
        if update and args.divergence != "none":  # the teacher's head and hidden states
            teacher, copies = teacher or shape, copies + TEACHER_HEAD
            gathered, size = gathered + c * teacher.root, size + c * teacher.hidden
        chunk = args.model_args.head_chunk or max(1, HEAD_LOGITS // shape.vocab)
        layers, logits = tokens * size, copies * 4 * min(tokens, chunk) * shape.vocab
        if critic:
            logits = 0
        if not update:  # a layer's work is gone when the head begins
            layers, logits = max(layers - logits, tokens * 8 * c * shape.hidden), logits
        return gathered + layers, logits

    def engine(self) -> tuple[float, float]:
        """While it samples, and while it sleeps. It sets `cache`, in bytes, and `holds`: how many
        of the longest sequences are in it."""
        e, shape, c, card = self.args.engine_args, self.shape, self.c, self.card
        weights = c * shape.params / e.tp
        if self.args.lora_args.in_engine(c == 2):  # else adapters are merged into the weights
            weights += c * self.adapter
        tokens, seqs = engine_limits(e, card)
        graphs = GRAPHS if card and not e.eager else 0.0
        work = graphs + c * tokens * (4 * shape.hidden + 3 * shape.wide / e.tp)
        work += 3 * 4 * seqs * shape.vocab  # three float32 copies of the logits
        if shape.tower:  # and the pixels that it holds
            work += tokens * shape.tower.bytes(c, 0) + HELD * GIB
        block_tokens = 16 if card else 128
        kv = shape.head_dim * max(1, shape.kv_heads / e.tp)
        block = 2 * c * block_tokens * shape.layers * kv  # keys and values
        sequence = block * ceil_div(self.plan.longest, block_tokens)  # the longest
        if e.kv_cache_gb:
            self.cache = e.kv_cache_gb * GIB
        elif card:
            self.cache = max(0.0, e.gpu_memory_utilization * card - weights - work)
        else:  # what one call can use, and one sequence at least
            used = sequence * (1 + min(seqs, self.plan.requests))
            self.cache = max(block + sequence, min(CPU_CACHE, used))
        self.holds = max(0, min(seqs, int((self.cache - block) // sequence)))  # vLLM has a block
        # A sync holds a weight's parts and the whole, twice, before the cache is there.
        awake = weights + work + max(self.cache, 4 * c * shape.vocab * shape.hidden)
        return awake, graphs if card and e.sleep_level else awake

    def sentence(self) -> str:
        """It fits, or the largest part and what makes it smaller."""
        column = self.sums.index(max(self.sums))
        when, total = ("rollout", "training")[column], self.sums[column] / GIB
        size = f"{(self.card or self.plan.free) / GIB:.3g} GiB"
        size += " per GPU" if self.card else " free per rank"
        if self.fits:
            return f"fits: {total:.1f} of {size} at most, in {when}"
        if self.args.needs_engine and not self.holds:
            return (f"does not fit: the engine's cache holds no sequence of {self.plan.longest:,} "
                    "tokens. What makes it larger: --gpu_memory_utilization and --kv_cache_gb")
        part = max(self.parts, key=lambda name: self.parts[name][column])
        return (f"does not fit: {total:.1f} of {size}, in {when}. The largest part is {part}, "
                f"{self.parts[part][column] / GIB:.1f} GiB; what makes it smaller: {SMALLER[part]}")

    def text(self) -> str:
        """What the plan prints: a sentence, and the table."""
        if not self.shape.fused:
            return "  memory     no plan: attention is not fused in this model"
        rows = {"GiB": ("rollout", "training")} | {
            name: (f"{a / GIB:.2f}", f"{b / GIB:.2f}")
            for name, (a, b) in {**self.parts, "sum": self.sums}.items() if a or b}
        lines = [f"  memory     {self.sentence()}",
                 *(f"    {name:<14}{a:>10}{b:>10}" for name, (a, b) in rows.items()),
                 f"    {self.shape.params:,} parameters"]
        if self.args.needs_engine:
            lines[-1] += (f"; the engine's cache holds {self.holds:,} of the longest sequences "
                          f"({self.plan.longest:,} tokens), and one call asks for "
                          f"{self.plan.requests:,}")
        if self.adapter:
            lines.append(f"  lora       {self.adapter:,} parameters are trained")
        return "\n".join(lines)
