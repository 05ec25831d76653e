"""plan.py: the sizes of every part of a step, from the settings alone, and what is wrong there."""
from dataclasses import dataclass, is_dataclass, replace

from dist import KEYS, assert_divisible
from errors import Count, Positive, SettingsError, needed, outside


@dataclass
class PlanArgs:
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
        if not self.strict:
            return
        if getattr(plan.args, "dynamic_sampling", False):
            yield ("--strict cannot hold with --dynamic_sampling, where any number of groups may "
                   "stay: give one of them.")
        for prompts in plan.batches:
            batch = "--batch" if prompts == plan.args.batch else "a batch of these rows"
            try:
                assert_divisible(prompts * plan.args.group, plan.ranks * plan.args.minibatches,
                                 f"{batch} x --group", "ranks x --minibatches")
            except SettingsError as error:
                yield f"--strict: {error}"


def flags(args) -> dict[str, object]:
    """Every flag by its name, those in groups too."""
    found = {}
    for name, value in vars(args).items():
        found |= vars(value) if is_dataclass(value) else {name: value}
    return found


def changed(args, **values):
    """A copy of args with other values, in groups too."""
    for name, group in vars(args).items():
        if is_dataclass(group):
            inside = {flag: values.pop(flag) for flag in vars(group) if flag in values}
            if inside:
                values[name] = replace(group, **inside)
    return replace(args, **values)


def save_every(args) -> int:
    """Steps between two checkpoints. 0: there are none."""
    given = args.run_args.save_every
    if args.eval_args.eval_only:
        return 0
    return ceil_div(args.steps, 10) if given is None else given


def ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def count(n: int, word: str) -> str:
    """1 row, or 2 rows."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def spread(n: int, parts: int) -> str:
    """The size of each part: '64', or '85 or 86'."""
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
    keys: int  # copies of keys that packing.py makes for each token of a micro-batch, at most

    def __post_init__(self):
        self.tokens = min(self.budget, self.rows * self.longest)  # of the largest micro-batch
        self.width = max(1, self.budget // self.longest)  # sequences of a micro-batch
        self.micros = max(1, ceil_div(self.rows, self.width * self.ranks))  # of a rank
        # Micro-batches without a row. Each of the others has at least one row.
        self.padding = max(0, self.micros * self.ranks - self.rows)

    def __str__(self) -> str:
        text = (f"{self.rows:,} completions, {spread(self.rows, self.ranks)} a rank, in at most "
                f"{count(self.micros, 'round')} of {self.width} x {self.longest:,} tokens (budget "
                f"{self.budget:,})")
        return text + (f"; padding: {count(self.padding, 'row')}" if self.padding else "")


@dataclass
class Plan:
    """The sizes of every part of a step."""
    args: object
    ranks: int
    n_rows: int | None  # prompts in --data; None: not known
    n_eval: int
    shape: object = None  # the model's sizes (memory.Shape), if known
    local_size: int | None = None  # ranks of a machine, if known
    memory: object = None  # memory.Memory, if known

    def __post_init__(self):
        a, rows = self.args, self.n_rows or self.args.batch
        full = min(a.batch, rows)
        last = rows % a.batch or full  # the last batch of an epoch
        self.longest = a.data_args.max_prompt_tokens + a.max_tokens
        self.engines = max(1, self.ranks // a.engine_args.tp)
        self.batches = sorted({full, last}, reverse=True)  # in prompts
        self.in_flight = full  # prompts that the engine works on
        if a.carry_args and a.carry_args.carry:  # its batches go on over the end of an epoch
            self.batches = [a.batch]
            self.in_flight = a.batch * (1 + a.carry_args.carry)
        most = self.n_eval * a.eval_args.eval_samples
        if not a.eval_args.eval_only:
            most = max(most, self.in_flight * a.group)
        self.requests = ceil_div(most * a.engine_args.tp, self.ranks)  # to an engine in one call

    def too_small(self, name: str, budget: int):
        """Yields a sentence if a token budget does not hold the longest sequence."""
        if budget < self.longest:
            prompt = self.args.data_args.max_prompt_tokens
            yield (f"--{name} must be at least {self.longest:,} (got {budget:,}): "
                   f"--max_prompt_tokens {prompt} + --max_tokens {self.args.max_tokens}.")

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
        if a.supervised and self.n_eval:
            passes.append(("score", self.n_eval, a.score_tokens))
        # Completions that share a prompt have one copy of its tokens, but each copies its keys:
        # less than group + 1 keys a token. packing.py allows no more than KEYS.
        keys = min(KEYS, a.group + 1)
        return [Phase(*each, self.longest, self.ranks, keys) for each in passes]

    def text(self, short: bool = False) -> str:
        """What --plan prints. short: without details, which are indented by four."""
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
        """Yields lines: what is trained, on which rows, and what the engines are asked for."""
        a, prompts = self.args, self.batches[0]
        yield f"  trains     {a.model}, --lr {a.lr}, reward: {' '.join(a.reward) or 'none'}"
        if self.n_rows:
            yield (f"  data       {count(self.n_rows, 'prompt')}, "
                   f"{count(ceil_div(self.n_rows, a.batch), 'step')} an epoch, "
                   f"{count(self.batches[-1], 'prompt')} in the last")
        if not a.supervised:
            n = prompts * a.group
            yield (f"  rollout    {n:,} completions: {count(self.engines, 'engine')} of "
                   f"{count(a.engine_args.tp, 'rank')}, {spread(n, self.engines)} requests each")
        if self.in_flight > prompts:
            yield f"  carry      {self.in_flight:,} prompts in flight, a step trains on {prompts:,}"

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
    """A sentence for each rule that the settings break. The rules stand beside the flags: see
    errors.py for the range of one, and `rules` of each dataclass for those of several.

    n_rows, n_eval: rows to train and to evaluate on. shape, local_size: see Plan.
    """
    wrong, default = {}, flags(type(args)())
    for group in (args, *filter(is_dataclass, vars(args).values())):
        wrong |= outside(group)
    # Those of several flags see the default in the place of a wrong value.
    usable = changed(args, **{name: default[name] for name in wrong})
    plan, found = Plan(usable, max(1, ranks), n_rows, n_eval, shape, local_size), [*wrong.values()]
    values = flags(usable)
    for group in (usable, *filter(is_dataclass, vars(usable).values())):
        found += needed(group, values)
        if hasattr(group, "rules"):
            found += group.rules(plan)
    return found
