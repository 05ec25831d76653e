"""plan.py: the sizes of a run, and the rules for its settings, before anything loads."""
import re
from dataclasses import dataclass, is_dataclass, replace

from dist import KEYS
from trainer.lora import LORA_RANKS


@dataclass
class PlanArgs:
    """The plan"""
    plan: bool = False
    """Print the plan for these settings and exit."""
    ranks: int = 1
    """Ranks to plan for."""
    gpu_gb: float = 80.0
    """GiB of the GPU to plan for. A run plans for the GPU it has."""
    strict: bool = False
    """Any micro-batch without a row is an error. It names the nearest sizes without."""


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


def ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def count(n: int, word: str) -> str:
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def spread(n: int, parts: int) -> str:
    """The size of each part: '64', or '85 or 86'."""
    small, extra = divmod(n, parts)
    return f"{small:,} or {small + 1:,}" if extra else f"{small:,}"


# ---- the sizes ----

BUDGETS = ("update_tokens", "score_tokens", "critic_update_tokens", "critic_score_tokens")


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
        idle = self.padding / (self.micros * self.ranks)
        return (f"{self.rows:,} completions, {spread(self.rows, self.ranks)} a rank, in at most "
                f"{count(self.micros, 'round')} of {self.width} x {self.longest:,} tokens (budget "
                f"{self.budget:,}); padding: {count(self.padding, 'row')} ({idle:.0%})")


@dataclass
class Plan:
    """The sizes of every part of a step."""
    args: object
    ranks: int
    n_rows: int | None  # prompts in --data, if known
    n_eval: int
    memory: str = ""  # text of the memory plan
    free: float = 0.0  # bytes for a rank that has no GPU; 0: not known

    def __post_init__(self):
        a, rows = self.args, self.n_rows or self.args.batch
        full = min(a.batch, rows)
        last = rows % a.batch or full  # the last batch of an epoch
        self.longest = a.data_args.max_prompt_tokens + a.max_tokens
        self.batches = sorted({full, last}, reverse=True)  # in prompts
        most = max(full * a.group, self.n_eval * a.eval_args.eval_samples)
        self.requests = ceil_div(most * a.engine_args.tp, self.ranks)  # to an engine in one call

    def phases(self, prompts: int) -> list[Phase]:
        """The passes over a batch. The largest of several sizes comes first."""
        a, critic, rows = self.args, self.args.critic_args, prompts * self.args.group
        parts = sorted({ceil_div(rows, a.minibatches), rows // a.minibatches}, reverse=True)
        passes = [("update", part, a.update_tokens) for part in parts]
        if critic:
            passes += [("critic update", part, critic.critic_update_tokens) for part in parts]
        if a.needs_old_logprobs or a.needs_reference:
            passes.append(("score", rows, a.score_tokens))
        if a.supervised and self.n_eval:
            passes.append(("score", self.n_eval, a.score_tokens))
        if critic:
            passes.append(("critic score", rows, critic.critic_score_tokens))
        # Completions that share a prompt have one copy of its tokens, but each copies its keys:
        # less than group + 1 keys a token. packing.py allows no more than KEYS.
        keys = min(KEYS, self.args.group + 1)
        return [Phase(*each, self.longest, self.ranks, keys) for each in passes]

    def text(self, short: bool = False) -> str:
        """What --plan prints. short: without details, which are indented by four."""
        a, prompts, tp = self.args, self.batches[0], self.args.engine_args.tp
        n, engines = prompts * a.group, self.ranks // tp
        steps = count(a.minibatches * a.epochs, "optimizer step")
        lines = [f"plan for {a.script} on {count(self.ranks, 'rank')}: {prompts:,} prompts x "
                 f"{a.group:,} completions = {n:,} completions and {steps} a step"]
        if prompts < a.batch:
            lines[0] += f" (--batch {a.batch:,}, but --data has only {prompts:,})"
        if self.n_rows:
            lines.append(f"  data       {self.n_rows:,} prompts, "
                         f"{ceil_div(self.n_rows, a.batch):,} steps an epoch, "
                         f"{self.batches[-1]:,} prompts in the last")
        if not a.supervised:
            lines.append(f"  rollout    {n:,} completions: {count(engines, 'engine')} of "
                         f"{count(tp, 'rank')}, {spread(n, engines)} requests each; "
                         f"{spread(n, self.ranks)} a rank for its "
                         f"{a.reward_args.reward_workers} reward workers")
        lines += [f"  {phase.name:<10} {phase}" for phase in self.phases(prompts)]
        if self.n_eval and a.needs_engine:
            samples = a.eval_args.eval_samples
            m = self.n_eval * samples
            lines.append(f"  evaluation {self.n_eval:,} rows x {samples} = {m:,} requests, "
                         f"{spread(m, engines)} an engine")
        lines += self.memory.splitlines()
        if short:
            lines = [line for line in lines if not line.startswith("    ")]
        return "\n".join(lines)


# ---- rules ----

@dataclass
class Rule:
    """A rule that the settings break, and what would end that."""
    sentence: str  # for the user; its first word is the flag
    tries: list  # (flag, values that may work)
    fixes: tuple = ()  # (flag, the first of them that does)

    @property
    def kind(self) -> str:
        return self.sentence.split()[0]

    def __str__(self) -> str:
        if not self.fixes:
            return self.sentence
        return f"{self.sentence} Would work: {' or '.join(typed(*fix) for fix in self.fixes)}."


def typed(flag: str, value: object) -> str:
    """As on the command line."""
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value is None or value == ():
        return f"no --{flag}"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"--{flag} {value}"


INF = float("inf")
RANGES = {flag: (words, holds) for flags, words, holds in [  # all other numbers: at least 0
    ("batch group minibatches epochs max_prompt_tokens max_tokens max_turns eval_samples tp ranks "
     "steps keep samples_every max_bad_steps", "at least 1", lambda x: 1 <= x < INF),
    ("max_environments", "at least 1", lambda x: 1 <= x < INF),
    ("reward_workers reward_concurrency", "from 1 to 4,096", lambda x: 1 <= x <= 4096),
    ("reward_retries", "from 0 to 100", lambda x: 0 <= x <= 100),
    ("reward_pause", "from 0 to 3,600", lambda x: 0 <= x <= 3600),
    ("max_num_seqs", "from 0 to 4,096", lambda x: 0 <= x <= 4096),
    ("seed", "at least 0 and below 2^63", lambda x: 0 <= x < 2**63),
    ("lr critic_lr gpu_gb kl_target kl_horizon max_gap", "more than 0", lambda x: 0 < x < INF),
    ("lora_alpha", "more than 0 and at most 1e6", lambda x: 0 < x <= 1e6),
    ("lora_rank", "from 0 to 65,536", lambda x: 0 <= x <= 65536),
    ("temperature", "from 0.01 to 2", lambda x: 0.01 <= x <= 2),  # vLLM's own limits
    ("eval_temperature", "0, or from 0.01 to 2", lambda x: x == 0 or 0.01 <= x <= 2),
    ("timeout reward_timeout stop_seconds", "from 1 to 1e6", lambda x: 1 <= x <= 1e6),
    ("gpu_memory_utilization", "more than 0 and at most 1", lambda x: 0 < x <= 1),
    ("dual_clip", "more than 1", lambda x: x > 1),
    ("eval_pass entropy_coef", "a number", lambda x: -INF < x < INF),
    ("difficulty", "LOW and HIGH with 0 <= LOW <= HIGH <= 1", lambda x: 0 <= x[0] <= x[1] <= 1),
    ("target_reward target_eval", "two numbers", lambda x: all(-INF < end < INF for end in x)),
    ("gamma lam", "between 0 and 1", lambda x: 0 <= x <= 1),
    ("top_p", "1 in training", lambda x: x == 1),
    ("model data name eval_data wandb reply prompt_template", "some text", bool),
    ("sapo_taus", "two numbers above 0", lambda x: len(x) == 2 and all(0 < y < INF for y in x)),
    ("betas", "two numbers in [0, 1)",
     lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x)),
] for flag in flags.split()}


NEEDS = {  # flags that change nothing without another one, or without one of these
    "eval_every eval_only eval_samples eval_temperature target_eval": "eval_data",
    "eval_pass": "eval_data difficulty",
    "lora_alpha lora_targets lora_sync": "lora_rank", "max_turns": "reply tools",
    "max_environments": "reply"}


def outside(args, ranks: int) -> dict[str, Rule]:
    """{flag: Rule} of every flag whose value is not in its range. None is always allowed."""
    default, found = flags(type(args)()), {}
    for name, value in (flags(args) | {"ranks": ranks}).items():
        if value is None or not (name in RANGES or isinstance(value, int | float)):
            continue
        words, holds = RANGES.get(name, ("at least 0", lambda x: 0 <= x < INF))
        if not holds(value):
            tries = [default[name]]
            if isinstance(default[name], int):  # problems() takes the first that works
                tries = [0, 1, default[name]]
            found[name] = Rule(f"--{name} must be {words} (got {value}).", [(name, tries)])
    return found


# ---- rules of several flags: each is in its range here ----

def names_of(specs: tuple[str, ...]) -> list[str]:
    return [spec.partition(":")[0] for spec in specs]


def run_rules(plan: Plan):
    """--name, which becomes a folder, and flags that need another flag."""
    args = plan.args
    name, ranks = str(args.name), args.plan_args.ranks
    # The folders runs/tiny-… hold the tiny models.
    own = re.fullmatch(r"(?!tiny-(sort|kk|guess|skilled|sharpen)-)\w[\w .,=+@-]*", name)
    if not own or len(name.encode()) > 200:
        yield Rule(f"--name must be at most 200 bytes of letters, digits, spaces and _.,=+@-, "
                   f"begin with a letter or digit, and not be a tiny model's (got {name[:60]!r}).",
                   [("name", ["my-run"])])
    if not args.plan_args.plan and ranks not in (1, plan.ranks):
        yield Rule(f"--ranks {ranks} needs --plan: a run has the ranks of torchrun "
                   f"--nproc_per_node.", [("plan", [True])])
    stop = args.engine_args.stop
    if "" in stop:
        yield Rule("--stop must not have an empty string.",
                   [("stop", [tuple(text for text in stop if text)])])
    if "environment" in names_of(args.reward) and not args.turn_args.reply:
        yield Rule("--reward environment needs --reply FILE.py:CLASS.", [("reward", [("exact",)])])
    if args.turn_args.tools:
        yield from tool_rules(args)
    given, default = flags(args), flags(type(args)())
    for name in ("target_reward", "target_eval") if given["eval_only"] else ():
        if given[name]:
            yield Rule(f"--{name} grades training, and --eval_only has none.", [(name, [None])])
    for names, needed in NEEDS.items():
        for name in names.split():
            if given[name] != default[name] and not any(map(given.get, needed.split())):
                words = " or --".join(needed.split())
                yield Rule(f"--{name} needs --{words}.", [(name, [default[name]])])
    if given["difficulty"] and not args.needs_reward:
        yield Rule(f"--difficulty keeps pass rates, and {args.script} needs no reward.",
                   [("difficulty", [None])])


def tool_rules(args):
    """--tools."""
    off = ("tools", [()])
    if args.turn_args.reply:
        yield Rule("--tools and --reply both answer the model: give one of them.",
                   [off, ("reply", [None])])
    if args.teacher_prompt:
        yield Rule("--teacher_prompt makes prompts without the schemas of --tools.",
                   [("teacher_prompt", [None]), off])
    if args.supervised:
        yield Rule(f"--tools is for rollouts, and {args.script} learns from chats.", [off])


def limit_rules(plan: Plan):
    """Numbers that other flags limit."""
    a, given, smallest = plan.args, flags(plan.args), min(plan.batches)
    # (flag, its limit, why)
    most = [("minibatches", smallest * a.group,
             f"the smallest batch has {smallest} prompts x --group {a.group}"),
            ("overlong_buffer", a.max_tokens, "--max_tokens")]
    if given["eval_temperature"] == 0:
        most.append(("eval_samples", 1, "--eval_temperature is 0"))
    if given.get("engine_correction") in ("mask", "sequence_mask", "geometric"):
        most.append(("correction_low", a.correction_high, "--correction_high"))
    tokens = f"--max_prompt_tokens {given['max_prompt_tokens']} + --max_tokens {a.max_tokens}"
    least = [(name, plan.longest, tokens) for name in BUDGETS if name in given]
    if given["target_reward"] is not None:
        least.append(("steps", 13, "for --target_reward"))  # its first 3 and last 10
    wrong = [(name, f"at most {limit:,}", limit, why)
             for name, limit, why in most if given.get(name, 0) > limit]
    wrong += [(name, f"at least {limit:,}", limit, why)
              for name, limit, why in least if given[name] < limit]
    for name, words, limit, why in wrong:
        yield Rule(f"--{name} must be {words} (got {given[name]:,}): {why}.", [(name, [limit])])


def lora_rules(lora, shape):
    """Adapters. shape: see broken."""
    most, off = LORA_RANKS[-1], ("lora_rank", [0])
    if lora.lora_rank > most and lora.lora_sync != "merged":
        yield Rule(f"--lora_rank must be at most {most} for the engine (got {lora.lora_rank:,}).",
                   [("lora_rank", [most]), ("lora_sync", ["merged"])])
    if not lora.lora_rank or shape is None:
        return
    if not shape.linears:
        yield Rule("--lora_rank needs layers of torch.nn.Linear, and this model has none.", [off])
    if not lora.lora_targets or {*lora.lora_targets} - {"all-linear", *shape.linears}:
        yield Rule(f"--lora_targets must be all-linear or some of {' '.join(shape.linears)} (got "
                   f"{' '.join(lora.lora_targets) or 'none'}"
                   f"{'; experts take no adapters' if shape.mixture else ''}).",
                   [("lora_targets", [("all-linear",)]), off])


def expert_rules(args, shape):
    """Routers of mixtures of experts. shape: see broken."""
    given, lora = args.expert_args, args.lora_args.lora_rank > 0
    off = {name: (name, [default]) for name, default in flags(type(given)()).items()}
    for name, value in vars(given).items():
        if value and shape and not shape.mixture:
            yield Rule(f"--{name} needs a model with experts.", [off[name]])
    for name in ("router_aux_coef", "freeze_router"):
        if getattr(given, name) and lora:
            yield Rule(f"--{name} is for routers that are trained, and with --lora_rank they are "
                       "not.", [off[name], ("lora_rank", [0])])
    if given.router_aux_coef and given.freeze_router:
        yield Rule("--router_aux_coef trains routers, and --freeze_router keeps them.",
                   [off["router_aux_coef"], off["freeze_router"]])
    if given.replay_routing and (args.turn_args.reply or args.turn_args.tools):
        yield Rule("--replay_routing is for one turn: of a reply's tokens no experts are known.",
                   [off["replay_routing"]])
    if given.replay_routing and not args.needs_engine:
        yield Rule("--replay_routing needs an engine.", [off["replay_routing"]])


def divisor_rules(plan: Plan, shape, local_size: int | None):
    """Numbers that must divide others. shape, local_size: see broken."""
    tp, shard_size = plan.args.engine_args.tp, plan.args.model_args.shard_size
    wholes = [(plan.ranks, "ranks")]
    if local_size:
        wholes.append((local_size, "ranks of a machine"))
    if shape:
        wholes += [(shape.heads, "attention heads"), (shape.intermediate, "columns of the MLP")]
        if tp % shape.kv_heads != 0:  # vLLM copies the heads where --tp is a multiple of them
            wholes.append((shape.kv_heads, "key-value heads"))
        vocab = 64 * ceil_div(shape.vocab, 64)  # vLLM pads it
        wholes.append((vocab, "tokens of the vocabulary"))
    for name, value, parts in ("tp", tp, wholes), ("shard_size", shard_size or 1, wholes[:1]):
        words = " and ".join(f"{n:,} {word}" for n, word in parts if n % value)
        if words:
            yield Rule(f"--{name} must divide the {words} (got {value}).",
                       [(name, range(min(value, plan.ranks), 0, -1))])


def strict_rules(plan: Plan):
    """--strict: no batch has padding."""
    given, batches = flags(plan.args) | {"ranks": plan.ranks}, plan.batches
    if given.get("dynamic_sampling"):  # any number of groups stays; more: the same padding
        largest = min(batches[0], 2 * plan.ranks * plan.args.minibatches)
        batches = range(1, largest + 1)
    padded = [phase for n in batches for phase in plan.phases(n) if phase.padding]
    if padded:
        phase = padded[0]
        yield Rule(f"--strict allows no padding: {phase.name} has {phase.rows} completions for "
                   f"{plan.ranks} ranks x {phase.micros} rounds.",
                   [(name, nearest(given[name])) for name in ("batch", "group", "ranks")])


def nearest(n: int) -> list[int]:
    """The whole numbers around n, the nearest first."""
    return sorted(range(max(1, n - 256), n + 256), key=lambda other: abs(other - n))


def broken(args, ranks: int, n_rows: int | None = None, n_eval: int = 0, shape=None,
           local_size: int | None = None) -> list[Rule]:
    """The rules that the settings break. None: not known.

    n_rows, n_eval: rows to train and to evaluate on. shape: memory.Shape.
    local_size: ranks of a machine.
    """
    wrong, default = outside(args, ranks), flags(type(args)())
    usable = changed(args, **{name: default[name] for name in wrong})
    plan = Plan(usable, max(1, ranks), n_rows, n_eval)
    found = [*wrong.values(), *usable.rules(), *run_rules(plan), *limit_rules(plan),
             *lora_rules(usable.lora_args, shape), *expert_rules(usable, shape),
             *divisor_rules(plan, shape, local_size)]
    if usable.plan_args.strict:
        found += strict_rules(plan)
    return found


def problems(args, ranks: int, *sizes, **more) -> list[Rule]:
    """What `broken` finds, each with the changes that end it and break no other rule."""
    found = broken(args, ranks, *sizes, **more)
    kinds = {rule.kind for rule in found}
    for rule in found:
        for flag, values in rule.tries:
            for value in values:
                there = value if flag == "ranks" else ranks
                left = broken(changed(args, **{flag: value}), there, *sizes, **more)
                # This rule holds now, and no other is broken that was not before.
                if {other.kind for other in left} <= kinds - {rule.kind}:
                    rule.fixes += ((flag, value),)
                    break
    return found


def warnings(args) -> list[str]:
    """Notes on settings that are allowed, and rarely meant."""
    found, loss = [], flags(args).get("loss")
    if loss == "gspo" and max(args.clip_low, args.clip_high) >= 0.05:
        found.append("--loss gspo rarely clips; its paper: --clip_low 3e-4 --clip_high 4e-4.")
    if loss == "gmpo" and max(args.clip_low, args.clip_high) < 0.3:
        found.append("--loss gmpo clips log ratios; its paper: --clip_low 0.4 --clip_high 0.4.")
    if (loss in ("clip", "gspo", "gmpo", "dppo", "ipo")
            and args.minibatches * args.epochs == 1):
        found.append("one update per rollout: the ratio is 1, so nothing is clipped.")
    if args.turn_args.reply and "exact" in names_of(args.reward):
        found.append("--reward exact compares the whole episode, replies too, with the answer.")
    return found
