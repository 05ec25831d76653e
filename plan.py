"""plan.py: memory and sizes of a step, from the settings alone, and what is wrong there.

docs/use/memory_and_machines.md has most of the formulas in words. Each is a bound, but for 2 %.
"""
from dataclasses import dataclass, replace

from dist import KEYS, assert_divisible
from errors import SettingsError
from family import Shape
from model import HEAD_LOGITS
from part import ask
from rollout import engine_limits
from settings import (
    Count,
    Flags,
    Positive,
    changed,
    groups,
    needed,
    outside,
    save_every,
    values_of,
)


@dataclass
class PlanArgs(Flags):
    """The plan"""
    plan: bool = False
    """Print the plan for these settings and exit."""
    ranks: Count = 1
    """Ranks to plan for."""
    gpu_gb: Positive = 80.0
    """GiB of the GPU to plan for. A run plans for the GPU it has."""
    strict: bool = False
    """The completions of every optimizer step must divide evenly over the ranks."""

    def rules(self, plan):
        """See plan.problems."""
        if not self.plan and (self.ranks, self.gpu_gb) != (1, 80.0):
            yield "--ranks and --gpu_gb need --plan."
        if self.strict and getattr(plan.args, "dynamic_sampling", False):
            yield "--strict cannot hold with --dynamic_sampling: give one of them."
        for prompts in plan.batches if self.strict else ():
            batch = "--batch" if prompts == plan.args.batch else "a batch of these rows"
            try:
                assert_divisible(prompts * plan.args.group, plan.ranks * plan.args.minibatches,
                                 f"{batch} x --group", "ranks x --minibatches")
            except SettingsError as error:
                yield f"--strict: {error}"


def budgets(args) -> dict[str, int]:
    """{flag: tokens of a micro-batch}."""
    return {name: value for name, value in values_of(args).items()
            if name.endswith(("update_tokens", "score_tokens"))}


def ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def count(n: int, word: str) -> str:
    """1 row, or 2 rows."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def spread(n: int, parts: int) -> str:
    """The size of each part: 64, or 85 or 86."""
    small, extra = divmod(n, parts)
    return f"{small:,} or {small + 1:,}" if extra else f"{small:,}"


# ---- the sizes ----

@dataclass
class Phase:
    """A model's pass over completions, if every sequence is the longest possible."""
    name: str
    rows: int  # completions of all ranks
    budget: int  # tokens of a micro-batch
    longest: int  # tokens of a sequence
    ranks: int
    keys: int  # copies of keys that attention makes for a token, on average: see Plan.phases

    def __post_init__(self):
        self.tokens = min(self.budget, self.rows * self.longest)  # of the largest micro-batch
        self.width = max(1, self.budget // self.longest)  # sequences of a micro-batch
        self.micros = max(1, ceil_div(self.rows, self.width * self.ranks))  # of a rank
        # Rows of padding, a micro-batch each, where there are fewer rows than micro-batches.
        self.padding = max(0, self.micros * self.ranks - self.rows)

    def __str__(self) -> str:
        text = (f"{self.rows:,} completions, {spread(self.rows, self.ranks)} a rank, in at most "
                f"{count(self.micros, 'round')} of {self.width} x {self.longest:,} tokens (budget "
                f"{self.budget:,})")
        return text + (f"; padding: {count(self.padding, 'row')}" if self.padding else "")


@dataclass
class Plan:
    """The sizes of a step. None: not known."""
    args: object
    ranks: int
    n_rows: int | None  # prompts in --data
    n_eval: int
    shape: Shape | None = None  # the model's sizes
    local_size: int | None = None  # ranks of a machine
    memory: "Memory | None" = None

    def __post_init__(self):
        a, rows = self.args, self.n_rows or self.args.batch
        full = min(a.batch, rows)
        last = rows % a.batch or full  # the last batch of an epoch
        self.longest = a.data_args.max_prompt_tokens + a.max_tokens
        self.engines = max(1, self.ranks // a.engine_args.tp)
        self.batches = sorted({full, last}, reverse=True)  # in prompts
        self.in_flight = full  # prompts that the engine works on
        ask("sizes", self)  # parts may change some
        most = self.n_eval * a.eval_args.eval_samples
        if not a.eval_args.eval_only:
            most = max(most, self.in_flight * a.group)
        self.requests = ceil_div(most * a.engine_args.tp, self.ranks)  # to an engine in one call

    def phases(self, prompts: int) -> list[Phase]:
        """The passes over a batch. The largest of several sizes comes first."""
        a, critic, rows, passes = self.args, self.args.critic_args, prompts * self.args.group, []
        parts = sorted({ceil_div(rows, a.minibatches), rows // a.minibatches}, reverse=True)
        if not a.eval_args.eval_only:
            passes += [("update", part, a.update_tokens) for part in parts]
            if critic:
                passes += [("critic update", part, critic.critic_update_tokens) for part in parts]
            if a.needs_old_logprobs or a.needs_reference:
                passes.append(("score", rows, a.score_tokens))
            if critic:
                passes.append(("critic score", rows, critic.critic_score_tokens))
        if self.n_eval and not a.needs_rollouts:  # rows have their completions
            passes.append(("score", self.n_eval, a.score_tokens))
        # Completions share their prompt's tokens, but each copies the prompt's keys for its
        # attention: on average less than group + 1 a token. dist.cut allows KEYS a token.
        keys = min(KEYS, a.group + 1)
        return [Phase(*each, self.longest, self.ranks, keys) for each in passes]

    def text(self, short: bool = False) -> str:
        """What --plan prints. short: without the lines that are indented by four."""
        a, samples = self.args, self.args.eval_args.eval_samples
        lines = [f"plan for {a.script} on {count(self.ranks, 'rank')}: {self.step()}"]
        if not a.eval_args.eval_only:
            lines += self.training()
        lines += [f"  {phase.name:<10} {phase}" for phase in self.phases(self.batches[0])]
        if self.n_eval and a.needs_engine:
            n = self.n_eval * samples
            lines.append(f"  evaluation {self.n_eval:,} rows x {samples} = {n:,} requests, "
                         f"{spread(n, self.engines)} an engine")
        if self.memory:
            lines += self.memory.text().splitlines()
        lines.append(f"  saved      {self.saved()}")
        return "\n".join(x for x in lines if not short or not x.startswith("    "))

    def step(self) -> str:
        """What one step trains on."""
        a, prompts = self.args, self.batches[0]
        if a.eval_args.eval_only:
            return f"an evaluation of {count(self.n_eval, 'row')}, and no training"
        steps = count(a.minibatches * a.epochs, "optimizer step")
        text = (f"{prompts:,} prompts x {a.group:,} completions = {prompts * a.group:,} "
                f"completions and {steps} a step")
        if prompts < a.batch:
            text += f" (--batch {a.batch:,}, but --data has only {prompts:,})"
        return text

    def training(self):
        """Yields lines: what is trained, and what the engines are asked for."""
        a, prompts = self.args, self.batches[0]
        yield f"  trains     {a.model}, --lr {a.lr}, reward: {' '.join(a.reward) or 'none'}"
        if self.n_rows:
            yield (f"  data       {count(self.n_rows, 'prompt')}, "
                   f"{count(ceil_div(self.n_rows, a.batch), 'step')} an epoch, "
                   f"{count(self.batches[-1], 'prompt')} in the last")
        if a.needs_rollouts:
            n = prompts * a.group
            yield (f"  rollout    {n:,} completions: {count(self.engines, 'engine')} of "
                   f"{count(a.engine_args.tp, 'rank')}, {spread(n, self.engines)} requests each")
        if self.in_flight > prompts:
            yield f"  engine     {self.in_flight:,} prompts in flight, a step trains on {prompts:,}"

    def saved(self) -> str:
        """How often a run keeps a checkpoint, and how much."""
        every, keep = save_every(self.args), self.args.run_args.keep
        if self.args.eval_args.eval_only:
            return "nothing (--eval_only)"
        if not every:
            return "no checkpoint (--save_every 0), but after SIGTERM"
        size = f": {keep} x {self.memory.checkpoint / 1e9:.3g} GB in runs/" if self.memory else ""
        return f"every {count(every, 'step')}, the newest {keep} stay{size}"


# ---- the rules of all flags ----

def problems(args, ranks: int, n_rows: int | None = None, n_eval: int = 0, shape=None,
             local_size: int | None = None) -> list[str]:
    """A sentence for each rule that the settings break: the range of a flag (errors.py), and those
    of several, which `rules` of their dataclass yields. The other arguments: see Plan."""
    wrong, default = {}, values_of(type(args)())
    for group in groups(args):
        wrong |= outside(group)
    # The others see the default in the place of a wrong value.
    usable = changed(args, **{name: default[name] for name in wrong})
    plan, found = Plan(usable, max(1, ranks), n_rows, n_eval, shape, local_size), [*wrong.values()]
    values = values_of(usable)
    for group in groups(usable):
        found += [*needed(group, values), *group.rules(plan)]
    longest = "--max_prompt_tokens {max_prompt_tokens} + --max_tokens {max_tokens}".format(**values)
    found += [f"--{name} must be at least {plan.longest:,} (got {tokens:,}): {longest}."
              for name, tokens in budgets(usable).items() if tokens < plan.longest]
    return found


# ---- memory ----
#
# c: bytes of a number in the computation (--dtype). m: bytes of a trained weight, of its gradient,
# and of each of its two moments.

GIB = 2**30
SET_ASIDE = 2.0 * GIB  # CUDA's context, buffers of NCCL and cuBLAS, fragmentation
GRAPHS = 1.0 * GIB  # of the engine
CPU_CACHE = 1.0 * GIB  # of an engine without a GPU
SCORE_HEAD, UPDATE_HEAD = 2, 5  # float32 matrices (chunk, vocabulary), without and with backward


class Memory:
    """The memory of a rank.

    card: bytes of its GPU; None: it has none, and may use `free` bytes of the machine.
    parts: {part: (bytes while the engine samples, bytes while the trainer learns)}. sums: of both.
    cache: bytes of the engine's cache, which `holds` so many of the longest sequences.
    """

    def __init__(self, plan: Plan, shape: Shape, card: float | None, free: float = 0.0):
        self.plan, self.args, self.shape = plan, plan.args, shape
        self.card, self.room = card, card or free
        model = self.args.model_args
        self.c = {"auto": 2 if card else 4, "bfloat16": 2, "float32": 4, "float64": 8}[model.dtype]
        self.m = max(4, self.c)
        # A rank keeps at most 1 / self.ranks of the weights (Shape.cuts). Infinite: its GPU keeps
        # none.
        self.ranks = shape.cuts(model.shard_size or plan.ranks)
        if card and model.cpu_offload:
            self.ranks = float("inf")
        self.cache = self.holds = 0.0
        self.parts = {"set aside": (SET_ASIDE, SET_ASIDE) if card else (0.0, 0.0),
                      **self.models(), **self.passes(),
                      "engine": self.engine() if self.args.needs_engine else (0.0, 0.0)}
        self.sums = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        cached = self.holds > 0 or not self.args.needs_engine
        self.fits = max(self.sums) <= 0.97 * self.room and cached  # 3 % to spare

    @property
    def trained(self) -> int:
        """Parameters of the policy that are trained."""
        if self.args.eval_args.eval_only:
            return 0
        return self.shape.params - self.shape.frozen(self.args)

    @property
    def checkpoint(self) -> float:
        """Its bytes: weights and moments."""
        return 3 * self.m * self.trained * (2 if self.args.critic_args else 1)

    def weights(self) -> float:
        """Bytes of the policy's weights, of all ranks together."""
        return self.m * self.shape.params

    def reference(self) -> float:
        """Bytes of the reference model's weights, of all ranks together."""
        return self.c * (self.shape.reference or self.shape).params

    def gradient_sum(self, root: int) -> float:
        """Bytes of the gradients that FSDP sums at once: a layer's, and before it the root's."""
        return self.m * self.shape.layer + self.c * root

    def engine_weights(self) -> float:
        """Bytes of the weights in the engine of a rank."""
        return self.c * self.shape.params / self.args.engine_args.tp

    def models(self) -> dict[str, tuple[float, float]]:
        """Weights, and what their training keeps."""
        args = self.args
        weights, gradients = self.weights() / self.ranks, self.m * self.trained / self.ranks
        critic = reference = 0.0
        if args.critic_args:  # it has all of these too
            critic = weights + 3 * gradients
        if args.needs_reference:
            reference = self.reference() / self.ranks
        away = args.model_args.offload if self.card else ()  # without a GPU there is one memory
        reference = 0.0 if "reference" in away else reference  # it stays there
        return {"weights": (0.0 if "params" in away else weights, weights),
                "gradients": (0.0, gradients),
                "moments": (0.0 if "optimizer" in away else 2 * gradients, 2 * gradients),
                "critic": (critic, critic), "reference": (reference, reference)}

    def passes(self) -> dict[str, tuple[float, float]]:
        """The largest micro-batch, and the largest chunk of logits."""
        found = [self.micro_batch(phase) for phase in self.plan.phases(max(self.plan.batches))]
        micro, logits = (max(sizes) for sizes in zip((0.0, 0.0), *found, strict=True))
        return {"micro-batch": (0.0, micro), "logits": (0.0, logits)}

    def micro_batch(self, phase: Phase) -> tuple[float, float]:
        """Bytes of its largest: (layers and what FSDP gathers for them, logits)."""
        c, tokens, args, critic = self.c, phase.tokens, self.args, phase.name.startswith("critic")
        update, shape, other = phase.name.endswith("update"), self.shape, self.shape.reference
        if phase.name == "score" and other and other.params > shape.params:
            shape = other  # it scores too
        root = shape.vocab * shape.hidden if critic else shape.root
        # FSDP holds the whole root, its own shard cast to --dtype, and two layers: this one and
        # the next.
        gathered = c * (root + root / self.ranks + 2 * shape.layer)
        again = update and args.model_args.checkpointing  # layers keep inputs, and compute again
        kept = shape.layers if update and not again else 1  # layers, for backward
        mlp, layer = 4 * c * shape.wide, shape.layer_bytes(c, phase.keys)
        # Backward has gradients of two of an MLP's four activations. A score pass has the MLP, or
        # the rest of one layer.
        size = kept * layer + mlp / 2 if update else max(mlp, layer - mlp)
        size += 8 * c * shape.hidden  # beside the layers' own: 8 vectors between and after them
        if again:
            size += shape.layers * c * shape.hidden
        if update:
            gathered += self.gradient_sum(root)
        whole, each = shape.beside(c, args, update)  # of a text model: nothing
        gathered, size = gathered + whole, size + each
        copies = UPDATE_HEAD if update else SCORE_HEAD
        chunk = args.model_args.head_chunk or max(1, HEAD_LOGITS // shape.vocab)
        layers, logits = tokens * size, copies * 4 * min(tokens, chunk) * shape.vocab
        if critic:
            logits = 0
        # A score pass never holds a layer's work and logits at once, but the sum adds both.
        if not update:
            layers = max(layers - logits, tokens * 8 * c * shape.hidden)
        return gathered + layers, logits

    def engine(self) -> tuple[float, float]:
        """Bytes while it samples, and asleep. Sets `cache` and `holds`."""
        e, shape, c, card = self.args.engine_args, self.shape, self.c, self.card
        weights = self.engine_weights()
        tokens, seqs = engine_limits(e, card)
        graphs = GRAPHS if card and not e.eager else 0.0
        work = graphs + c * tokens * (4 * shape.hidden + 3 * shape.wide / e.tp)
        work += 3 * 4 * seqs * shape.vocab  # three float32 copies of the logits
        work += shape.in_engine(c, tokens)
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
        self.holds = max(0, min(seqs, int((self.cache - block) // sequence)))  # vLLM keeps a block
        # A sync holds the largest weight, the embedding, four times. An engine that slept has no
        # cache yet.
        sync, sleeps = 4 * c * shape.vocab * shape.hidden, card and e.sleep_level
        awake = weights + work + (max(self.cache, sync) if sleeps else self.cache + sync)
        return awake, graphs if sleeps else awake

    def sentence(self) -> str:
        """It fits, or what does not."""
        column = self.sums.index(max(self.sums))
        when, total = ("rollout", "training")[column], self.sums[column] / GIB
        whose = "per GPU" if self.card else "free per rank"
        room = f"{self.room / GIB:.3g} GiB {'by --gpu_gb' if self.args.plan_args.plan else whose}"
        if self.fits:
            return f"fits: {total:.1f} of {room} at most, in {when}"
        if self.args.needs_engine and not self.holds:
            return (f"does not fit: the engine's cache holds no sequence of {self.plan.longest:,} "
                    "tokens. Would work: more --gpu_memory_utilization or --kv_cache_gb")
        part = max(self.parts, key=lambda name: self.parts[name][column])
        return (f"does not fit: {total:.1f} of {room}, in {when}. The largest part is {part}, "
                f"{self.parts[part][column] / GIB:.1f} GiB. {self.works()}")

    def works(self) -> str:
        """Flags with which it fits, of those that change memory and time alone."""
        least = dict.fromkeys(budgets(self.args), self.plan.longest)
        for change in {"checkpointing": True}, least, {"checkpointing": True} | least:
            plan = replace(self.plan, args=changed(self.args, **change))
            if type(self)(plan, self.shape, self.card, self.room).fits:
                words = " ".join(f"--{name} {value}" for name, value in change.items())
                return f"Would work: {words.replace(' True', '')}"
        return "What makes it smaller: docs/use/memory_and_machines.md"

    def text(self) -> str:
        """A sentence, and the table."""
        if not self.shape.fused:
            return "  memory     no plan: attention is not fused in this model"
        rows = {"GiB": ("rollout", "training")} | {
            name: (f"{a / GIB:.2f}", f"{b / GIB:.2f}")
            for name, (a, b) in {**self.parts, "sum": self.sums}.items() if a or b}
        lines = [f"  memory     {self.sentence()}",
                 *(f"    {name:<14}{a:>10}{b:>10}" for name, (a, b) in rows.items()),
                 f"    {self.shape.params:,} parameters, {self.trained:,} are trained"]
        if self.args.needs_engine:
            lines.append(f"    the engine's cache holds {self.holds:,} of the longest sequences "
                         f"({self.plan.longest:,} tokens); one call asks for "
                         f"{self.plan.requests:,}")
        return "\n".join(lines)
