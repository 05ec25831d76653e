"""plan.py: the sizes of a step, before anything loads, and invalid settings.

It loads no weights and needs no GPU, so --plan answers in seconds how many micro-batches a step has
and whether it fits into memory. Before a run, the same code refuses settings that cannot work.

Top to bottom: Phase and Plan have the sizes, and `problems` collects the sentences of all rules.
memory.py has the formulas of a rank's memory.
"""
from dataclasses import dataclass, replace

import part
from architecture import Shape
from batch import KEYS
from dist import assert_divisible
from errors import SettingsError
from settings import Count, Flags, Positive, needed, outside, save_every, sections


@dataclass
class PlanArgs(Flags):
    """The plan"""
    plan: bool = False
    """Print the plan for these settings and exit."""
    metrics: bool = False
    """Print the definition of each metric and exit."""
    ranks: Count | None = None
    """Ranks to plan for. None: those started by torchrun, or 1."""
    gpu_gb: Positive = 80.0
    """GPU memory to plan for, in GiB. A run plans for its own GPU."""
    strict: bool = False
    """Require the completions of every optimizer step to divide evenly over the ranks."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if not self.plan and (self.ranks, self.gpu_gb) != (None, 80.0):
            yield "--ranks and --gpu_gb need --plan."
        for prompts in plan.batches if self.strict else ():
            batch = "--batch" if prompts == plan.args.batch else "a batch of these rows"
            try:
                assert_divisible(prompts * plan.args.group, plan.ranks * plan.args.minibatches,
                                 f"{batch} x --group", "ranks x --minibatches")
            except SettingsError as error:
                yield f"--strict: {error}"


def budgets(args) -> dict[str, int]:
    """Returns {flag: tokens} of the flags that limit the tokens of a micro-batch."""
    return {name: value for name, value in vars(args).items()
            if name.endswith(("update_tokens", "logprob_tokens"))}


def ceil_div(n: int, size: int) -> int:
    """Returns n / size, rounded up."""
    return -(-n // size)


def count(n: int, word: str) -> str:
    """Returns a number with its word: "1 row", "2 rows"."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def spread(n: int, parts: int) -> str:
    """Returns in words the size of each part if n items are split into so many parts: "64", or "85
    or 86" if they do not divide evenly."""
    small, extra = divmod(n, parts)
    return f"{small:,} or {small + 1:,}" if extra else f"{small:,}"


# ---- the sizes ----

@dataclass
class Phase:
    """A model's pass over completions, if every sequence has the longest possible length. From the
    fields it computes the sizes of the micro-batches."""
    name: str
    rows: int  # completions of all ranks
    budget: int  # tokens of a micro-batch
    longest: int  # tokens of a sequence
    ranks: int
    keys: int  # keys that attention copies for a token: a bound of the mean (Plan.phases)

    def __post_init__(self):
        self.tokens = min(self.budget, self.rows * self.longest)  # of the largest micro-batch
        self.width = max(1, self.budget // self.longest)  # sequences of a micro-batch
        self.rounds = max(1, ceil_div(self.rows, self.width * self.ranks))  # of a rank
        # All ranks have equally many micro-batches. If there are fewer rows than micro-batches, the
        # remaining ones are empty and compute one dummy token (batch.MicroBatch), as padding.
        self.padding = max(0, self.rounds * self.ranks - self.rows)

    def __str__(self) -> str:
        """Returns the phase as a line of --plan."""
        text = (f"{self.rows:,} completions, {spread(self.rows, self.ranks)} a rank, in at most "
                f"{count(self.rounds, 'round')} of {self.width} x {self.longest:,} tokens (budget "
                f"{self.budget:,})")
        return text + (f"; padding: {count(self.padding, 'row')}" if self.padding else "")


@dataclass
class Plan:
    """The sizes of a step. A field that is None is not known yet."""
    args: object
    ranks: int
    n_rows: int | None  # prompts in --data
    n_eval: int  # rows in --eval_data
    shape: Shape | None = None  # the model's sizes
    local_size: int | None = None  # ranks of a machine
    memory: object = None  # the memory.Memory of a rank

    def __post_init__(self):
        a, rows = self.args, self.n_rows or self.args.batch
        full = min(a.batch, rows)
        last = rows % a.batch or full  # the last batch of an epoch
        self.longest = a.max_prompt_tokens + a.max_tokens
        self.engines = max(1, self.ranks // a.tp)
        self.batches = sorted({full, last}, reverse=True)  # in prompts
        self.in_flight = full  # prompts that the engine works on
        part.sizes(self)  # parts may change some of them
        most = self.n_eval * a.eval_samples
        if not a.eval_only:
            most = max(most, self.in_flight * a.group)
        self.requests = ceil_div(most * a.tp, self.ranks)  # to an engine in one call

    def phases(self, prompts: int) -> list[Phase]:
        """Returns the passes over a batch of so many prompts. Uneven minibatches have two sizes,
        and the larger one comes first."""
        a, rows, passes = self.args, prompts * self.args.group, []
        parts = sorted({ceil_div(rows, a.minibatches), rows // a.minibatches}, reverse=True)
        if not a.eval_only:
            passes += [("update", part, a.update_tokens) for part in parts]
            if a.needs_critic:
                passes += [("critic update", part, a.critic_update_tokens) for part in parts]
            if a.needs_old_logprobs or a.needs_reference:
                passes.append(("logprobs", rows, a.logprob_tokens))
            if a.needs_critic:
                passes.append(("critic values", rows, a.critic_value_tokens))
        if self.n_eval and not a.needs_rollouts:  # the rows have their completions already
            passes.append(("logprobs", self.n_eval, a.logprob_tokens))
        # Completions share their prompt's tokens, but each copies the prompt's keys for its
        # attention: on average less than group + 1 a token. batch.cut allows KEYS a token.
        keys = min(KEYS, a.group + 1)
        return [Phase(*each, self.longest, self.ranks, keys) for each in passes]

    def text(self, short: bool = False) -> str:
        """Returns what --plan prints. With `short` the lines that are indented by four are left
        out, such as the table of memory."""
        a, samples = self.args, self.args.eval_samples
        lines = [f"plan for {a.script} on {count(self.ranks, 'rank')}: {self.step()}"]
        if not a.eval_only:
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
        """Returns in words what one step trains on: prompts, completions and optimizer steps, and
        whether --data has less than a batch. With --eval_only: what is evaluated."""
        a, prompts = self.args, self.batches[0]
        if a.eval_only:
            return f"an evaluation of {count(self.n_eval, 'row')}, and no training"
        steps = count(a.minibatches * a.epochs, "optimizer step")
        text = (f"{prompts:,} prompts x {a.group:,} completions = {prompts * a.group:,} "
                f"completions and {steps} a step")
        if prompts < a.batch:
            text += f" (--batch {a.batch:,}, but --data has only {prompts:,})"
        return text

    def training(self):
        """Yields the lines of --plan that say what is trained, on which data, and how many requests
        each engine gets."""
        a, prompts = self.args, self.batches[0]
        yield f"  trains     {a.model}, --lr {a.lr}, reward: {' '.join(a.reward) or 'none'}"
        if self.n_rows:
            rest = self.n_rows % a.batch
            last = rest if rest in self.batches else prompts
            yield (f"  data       {count(self.n_rows, 'prompt')}, "
                   f"{count(ceil_div(self.n_rows, a.batch), 'step')} an epoch, "
                   f"{count(last, 'prompt')} in the last")
        if a.needs_rollouts:
            n = prompts * a.group
            yield (f"  rollout    {n:,} completions: {count(self.engines, 'engine')} of "
                   f"{count(a.tp, 'rank')}, {spread(n, self.engines)} requests each")
        if self.in_flight > prompts:
            yield f"  engine     {self.in_flight:,} prompts in flight, a step trains on {prompts:,}"

    def saved(self) -> str:
        """Returns in words how often a run saves a checkpoint, how many it keeps, and their
        size."""
        every, keep = save_every(self.args), self.args.keep
        if self.args.eval_only:
            return "nothing (--eval_only)"
        if not every:
            return "no checkpoint (--save_every 0), except after SIGTERM"
        size = f": {keep} x {self.memory.checkpoint / 1e9:.3g} GB in runs/" if self.memory else ""
        return f"every {count(every, 'step')}, the newest {keep} stay{size}"


# ---- the rules of all flags ----

def problems(args, ranks: int, n_rows: int | None = None, n_eval: int = 0, shape=None,
             local_size: int | None = None) -> list[str]:
    """Returns a sentence for each rule that the settings break: the range of each flag (the types
    in settings.py), and the rules of several flags, which `rules` of their dataclass yields. A flag
    that is out of its range has its default while the other rules are checked. The other arguments
    are the fields of Plan."""
    wrong, default = outside(args), vars(type(args)())
    # The other rules see the default in the place of a wrong value: one mistake, one sentence.
    usable = replace(args, **{name: default[name] for name in wrong})
    plan = Plan(usable, max(1, ranks), n_rows, n_eval, shape, local_size)
    found = [*wrong.values(), *usable.rules(plan)]
    for section in sections(usable):
        found += [*needed(section, usable), *section.rules(plan)]
    longest = "--max_prompt_tokens {max_prompt_tokens} + --max_tokens {max_tokens}".format(
        **vars(usable))
    found += [f"--{name} must be at least {plan.longest:,} (got {tokens:,}): {longest}."
              for name, tokens in budgets(usable).items() if tokens < plan.longest]
    return [*dict.fromkeys(found)]  # ClipArgs is a section and a base of a script's own class
