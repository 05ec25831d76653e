"""All sizes of a run, and all checks of its settings, before anything loads."""
import re
from dataclasses import dataclass, is_dataclass, replace


@dataclass
class PlanArgs:
    """The plan"""
    plan: bool = False
    """Print the plan for these settings and exit."""
    ranks: int = 1
    """Ranks to plan for."""
    gpu_gb: float = 80.0
    """GiB of the GPU to plan for. A run plans for the GPU it has."""
    sizes: tuple[str, ...] = ()
    """Sizes of the model to plan for:
    hidden=… intermediate=… layers=… heads=… kv_heads=… vocab=…"""
    strict: bool = False
    """Padding rows are an error. It names the nearest sizes without."""


def flags(args) -> dict[str, object]:
    """Every flag by its name, those in groups too."""
    return {name: value for field, group in vars(args).items()
            for name, value in (vars(group) if is_dataclass(group) else {field: group}).items()}


def changed(args, **values):
    """A copy of args with other values, in groups too."""
    for field, group in vars(args).items():
        if is_dataclass(group) and (inside := vars(group).keys() & values.keys()):
            values[field] = replace(group, **{name: values.pop(name) for name in inside})
    return replace(args, **values)


def count(n: int, word: str) -> str:
    return f"{n:,} {word}{'s' * (n != 1)}"


def spread(n: int, parts: int) -> str:
    """'64', or '85 or 86'."""
    small, extra = divmod(n, parts)
    return f"{small:,} or {small + 1:,}" if extra else f"{small:,}"


@dataclass
class Phase:
    """A model's pass over completions, if every sequence is the longest possible."""
    name: str
    rows: int  # completions of all ranks
    budget: int  # tokens of a micro-batch
    longest: int  # tokens of a sequence
    ranks: int

    def __post_init__(self):
        self.tokens = min(self.budget, self.rows * self.longest)
        self.width = max(1, self.budget // self.longest)  # its sequences
        self.micros = max(1, -(-self.rows // (self.width * self.ranks)))  # of a rank
        self.padding = max(0, self.micros * self.ranks - self.rows)  # empty micro-batches

    def __str__(self) -> str:
        idle = self.padding / (self.micros * self.ranks)
        return (f"{self.rows:,} completions, {spread(self.rows, self.ranks)} a rank, in at most "
                f"{count(self.micros, 'round')} of {self.width} x {self.longest:,} tokens (budget "
                f"{self.budget:,}); padding: {count(self.padding, 'row')} ({idle:.0%})")


@dataclass
class Plan:
    args: object
    script: str
    ranks: int
    n_rows: int | None  # prompts in --data, if known
    n_eval: int
    memory: str = ""  # text of the memory plan
    free: float = 0.0  # bytes for a rank that has no GPU; 0: not known

    def __post_init__(self):
        a, rows = self.args, self.n_rows or self.args.batch
        full = min(a.batch, rows)
        self.longest = a.data_args.max_prompt_tokens + a.max_tokens
        self.batches = sorted({full, rows % a.batch or full}, reverse=True)
        most = max(full * a.group, self.n_eval * a.eval_args.eval_samples)
        self.requests = -(-most * a.engine_args.tp // self.ranks)  # to one engine in one call

    def phases(self, prompts: int) -> list[Phase]:
        a, critic, rows = self.args, self.args.critic_args, prompts * self.args.group
        parts = sorted({-(-rows // a.minibatches), rows // a.minibatches}, reverse=True)
        passes = [("update", part, a.update_tokens) for part in parts]
        if critic:
            passes += [("critic update", part, critic.critic_update_tokens) for part in parts]
        if a.needs_old_logprobs or a.needs_reference:
            passes.append(("score", rows, a.score_tokens))
        if critic:
            passes.append(("critic score", rows, critic.critic_score_tokens))
        return [Phase(*each, self.longest, self.ranks) for each in passes]

    def text(self, short: bool = False) -> str:
        a, engines = self.args, self.ranks // self.args.engine_args.tp
        lines = [f"plan for {self.script} on {count(self.ranks, 'rank')}: {a.batch:,} prompts x "
                 f"{a.group:,} completions = {a.batch * a.group:,} completions and "
                 f"{count(a.minibatches * a.epochs, 'optimizer step')} a step"]
        if self.n_rows:
            lines.append(f"  data       {self.n_rows:,} prompts, {-(-self.n_rows // a.batch):,} "
                         f"steps an epoch, {self.batches[-1]:,} prompts in the last")
        for i, prompts in enumerate(self.batches):
            n = prompts * a.group
            lines += [f"  {'last batch' if i else 'rollout':<10} {n:,} completions: "
                      f"{count(engines, 'engine')} of {count(a.engine_args.tp, 'rank')}, "
                      f"{spread(n, engines)} requests each; {spread(n, self.ranks)} a rank "
                      f"for its {a.reward_args.reward_workers} reward workers",
                      *(f"{'  ' * (1 + i)}{p.name:<10} {p}" for p in self.phases(prompts))]
        if m := self.n_eval * a.eval_args.eval_samples:
            lines.append(f"  evaluation {self.n_eval:,} rows x {a.eval_args.eval_samples} = {m:,} "
                         f"requests, {spread(m, engines)} an engine")
        lines += self.memory.splitlines()
        return "\n".join(line for line in lines if not (short and line.startswith("    ")))


@dataclass
class Rule:
    holds: bool
    sentence: str  # where it fails; the first word is the flag
    tries: list | tuple = ()  # (flag, values)
    fixes: tuple = ()  # (flag, the first value that works)

    @property
    def kind(self) -> str:
        return self.sentence.split()[0]

    def __str__(self) -> str:
        fixes = " or ".join(typed(*fix) for fix in self.fixes)
        return f"{self.sentence} Would work: {fixes}." if fixes else self.sentence


def typed(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{'no-' * (not value)}{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


INF = float("inf")
LORA_RANKS = 0, 1, 8, 16, 32, 64, 128, 256, 320, 512  # of the adapters that vLLM has room for
BUDGETS = ("update_tokens", "score_tokens", "critic_update_tokens", "critic_score_tokens")
RANGES = {name: (words, inside) for words, inside, names in (  # others: at least 0
    ("at least 1", lambda x: 1 <= x < INF, """batch group minibatches epochs max_prompt_tokens
        max_tokens max_turns eval_samples tp ranks steps keep samples_every max_bad_steps"""),
    ("from 1 to 4,096", lambda x: 1 <= x <= 4096, "max_num_seqs reward_workers"),
    ("at least 0 and below 2^63", lambda x: 0 <= x < 2**63, "seed"),
    ("more than 0", lambda x: 0 < x < INF, """lr critic_lr gpu_gb kl_target
        kl_horizon max_gap lora_alpha"""),
    ("from 0.01 to 2", lambda x: 0.01 <= x <= 2, "temperature"),  # vLLM's own limits
    ("0, or from 0.01 to 2", lambda x: x == 0 or 0.01 <= x <= 2, "eval_temperature"),
    ("from 1 to 1e6", lambda x: 1 <= x <= 1e6, "timeout reward_timeout stop_seconds"),
    ("more than 0 and at most 1", lambda x: 0 < x <= 1, "gpu_memory_utilization"),
    ("more than 1", lambda x: x > 1, "dual_clip"),
    ("a number", lambda x: -INF < x < INF, "target_reward eval_pass entropy_coef"),
    ("between 0 and 1", lambda x: 0 <= x <= 1, "gamma lam"),
    ("1 in training", lambda x: x == 1, "top_p"),
    ("some text", bool, "model data name eval_data wandb reply prompt_template"),
    ("two numbers in [0, 1)", lambda x: len(x) == 2 and all(0 <= b < 1 for b in x), "betas"),
) for name in names.split()}


def rules(args, ranks: int, n_rows=None, n_eval=0, shape=None, machine=None):
    """Every Rule of several flags; each is in its range here."""
    plan, given = Plan(args, "", ranks, n_rows, n_eval), flags(args) | {"ranks": ranks}
    stop, least = given["stop"], min(plan.batches)
    own = r"(?!tiny-(sort|kk|guess|sharpen)-)\w[\w .,=+@-]*"
    name, p = str(args.name), args.plan_args
    yield Rule(re.fullmatch(own, name) and len(name.encode()) <= 200,
               f"--name must be at most 200 bytes of letters, digits, spaces and _.,=+@-, begin "
               f"with a letter or digit, and not be a tiny model's (got {name[:60]!r}).",
               [("name", ["my-run"])])
    yield Rule(p.plan or p.ranks in (1, ranks), f"--ranks {p.ranks} needs --plan: a run has the "
               f"ranks of torchrun --nproc_per_node.", [("plan", [True])])
    yield Rule("" not in stop, "--stop must not have an empty string.",
               [("stop", [tuple(filter(None, stop))])])
    for name, off in ("eval_every", 0), ("eval_only", False):
        yield Rule(
            args.eval_data or not given[name], f"--{name} needs --eval_data.", [(name, [off])])

    tokens = f"--max_prompt_tokens {given['max_prompt_tokens']} + --max_tokens {args.max_tokens}"
    limits = [
        ("minibatches", "at most", least * args.group,
         f"the smallest batch has {least} prompts x --group {args.group}"),
        ("overlong_buffer", "at most", args.max_tokens, "--max_tokens"),
        *((name, "at least", plan.longest, tokens) for name in BUDGETS)]
    if given["target_reward"] is not None:
        limits.append(("steps", "at least", 13, "for --target_reward"))
    if given["eval_temperature"] == 0:
        limits.append(("eval_samples", "at most", 1, "--eval_temperature is 0"))
    if args.engine_correction == "mask":
        limits.append(("correction_low", "at most", args.correction_high, "--correction_high"))
    for name, words, limit, why in limits:
        value = given.get(name, limit)
        yield Rule(value >= limit if words == "at least" else value <= limit,
                   f"--{name} must be {words} {limit:,} (got {value:,}): {why}.", [(name, [limit])])

    rank, targets, off = given["lora_rank"], given["lora_targets"], [("lora_rank", [0])]
    yield Rule(rank <= LORA_RANKS[-1] or given["lora_sync"] == "merged",
               f"--lora_rank must be at most {LORA_RANKS[-1]}, which the engine has room for, or "
               f"--lora_sync merged (got {rank:,}).",
               [("lora_rank", [LORA_RANKS[-1]]), ("lora_sync", ["merged"])])
    if rank and shape:
        yield Rule(shape.linears, "--lora_rank needs layers of torch.nn.Linear, and this model has "
                   "none.", off)
        yield Rule(targets and not {*targets} - {"all-linear", *shape.linears}, "--lora_targets "
                   f"must be all-linear or some of {' '.join(shape.linears)} (got "
                   f"{' '.join(targets) or 'none'}).",
                   [("lora_targets", [("all-linear",)]), *off])

    parts = [(ranks, "ranks"), (machine or 0, "ranks of a machine")]
    if shape:  # vLLM copies key-value heads, and pads the vocabulary to 64
        parts += [(shape.heads, "attention heads"), (shape.intermediate, "columns of the MLP"),
                  (shape.kv_heads * (given["tp"] % shape.kv_heads > 0), "key-value heads"),
                  (-(-shape.vocab // 64) * 64, "tokens of the vocabulary")]
    for name, wholes in ("tp", parts), ("shard_size", parts[:1]):
        value = given[name] or 1
        words = " and ".join(f"{n:,} {word}" for n, word in wholes if n % value)
        yield Rule(not words, f"--{name} must divide the {words} (got {value}).",
                   [(name, range(min(value, ranks), 0, -1))])

    tried = plan.batches if args.plan_args.strict else []
    if tried and given.get("dynamic_sampling"):  # any smaller batch
        tried = range(1, min(tried[0], 2 * ranks * args.minibatches) + 1)
    near = lambda n: sorted(range(max(1, n - 256), n + 256), key=lambda other: abs(other - n))
    for p in [p for n in tried for p in plan.phases(n) if p.padding][:1]:
        yield Rule(False, f"--strict allows no padding: {p.name} has {p.rows} completions for "
                   f"{ranks} ranks x {p.micros} rounds.",
                   [(name, near(given[name])) for name in ("batch", "group", "ranks")])


def broken(args, ranks: int, *sizes, **more) -> list[Rule]:
    """The checks that fail. *sizes, **more: see `rules`."""
    default, found, usable = flags(type(args)()), [], {}
    for name, value in (flags(args) | {"ranks": ranks}).items():
        words, inside = RANGES.get(name, ("at least 0", lambda x: 0 <= x < INF))
        known = value is not None and (name in RANGES or isinstance(value, int | float))
        if known and not inside(value):
            usable[name] = default[name]
            found.append(Rule(False, f"--{name} must be {words} (got {value}).",
                              [(name, [*range(99 * ("least" in words)), default[name]])]))
    others = [*args.rules(), *rules(changed(args, **usable), max(1, ranks), *sizes, **more)]
    return found + [rule for rule in others if not rule.holds]


def problems(args, ranks: int, *sizes, **more) -> list[Rule]:
    """And for each the changes that end it and make no new problem."""
    found = broken(args, ranks, *sizes, **more)
    kinds = {rule.kind for rule in found}
    for rule in found:
        for flag, values in rule.tries:
            for value in values:
                there = value if flag == "ranks" else ranks
                left = broken(changed(args, **{flag: value}), there, *sizes, **more)
                if {r.kind for r in left} <= kinds - {rule.kind}:
                    rule.fixes += ((flag, value),)
                    break
    return found


def warnings(args) -> list[str]:
    found, loss = [], flags(args).get("loss")
    if loss == "gspo" and max(args.clip_low, args.clip_high) >= 0.05:
        found.append("--loss gspo rarely clips; its paper: --clip_low 3e-4 --clip_high 4e-4.")
    if loss in ("clip", "gspo") and args.minibatches * args.epochs == 1:
        found.append("one update per rollout: the ratio is 1, so nothing is clipped.")
    return found
