"""rules.py: the rules that the settings of a run must keep, each with values that work."""
import re
from dataclasses import dataclass

from preflight.plan import BUDGETS, Plan, ceil_div, changed, flags
from trainer.lora import LORA_RANKS


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


# ---- each flag by itself ----

INF = float("inf")
RANGES = {flag: (words, holds) for flags, words, holds in [  # all other numbers: at least 0
    ("batch group minibatches epochs max_prompt_tokens max_tokens max_turns eval_samples tp ranks "
     "steps keep samples_every carry_tokens", "at least 1", lambda x: 1 <= x < INF),
    ("carry", "from 0 to 8", lambda x: 0 <= x <= 8),
    ("reward_workers", "from 1 to 4,096", lambda x: 1 <= x <= 4096),
    ("max_num_seqs", "from 0 to 4,096", lambda x: 0 <= x <= 4096),
    ("reward_retries", "from 0 to 10", lambda x: 0 <= x <= 10),
    ("seed", "at least 0 and below 2^63", lambda x: 0 <= x < 2**63),
    ("lr critic_lr gpu_gb kl_target kl_horizon max_gap lora_alpha", "more than 0",
     lambda x: 0 < x < INF),
    ("temperature", "from 0.01 to 2", lambda x: 0.01 <= x <= 2),  # vLLM's own limits
    ("eval_temperature", "0, or from 0.01 to 2", lambda x: x == 0 or 0.01 <= x <= 2),
    ("timeout reward_timeout", "from 1 to 1e6", lambda x: 1 <= x <= 1e6),
    ("gpu_memory_utilization", "more than 0 and at most 1", lambda x: 0 < x <= 1),
    ("dual_clip", "more than 1", lambda x: x > 1),
    ("gamma lam", "between 0 and 1", lambda x: 0 <= x <= 1),
    ("betas", "two numbers in [0, 1)", lambda x: all(0 <= beta < 1 for beta in x)),
    ("eval_pass entropy_coef", "a number", lambda x: -INF < x < INF),
    ("target_reward target_eval", "two numbers", lambda x: all(-INF < end < INF for end in x)),
    ("model data name eval_data wandb reply prompt_template", "some text", bool),
] for flag in flags.split()}


def outside(args, ranks: int) -> dict[str, Rule]:
    """{flag: Rule} of every flag whose value is not in its range. None is always allowed."""
    default, found = flags(type(args)()), {}
    for name, value in (flags(args) | {"ranks": ranks}).items():
        if value is None or not (name in RANGES or isinstance(value, int | float)):
            continue
        words, holds = RANGES.get(name, ("at least 0", lambda x: 0 <= x < INF))
        if not holds(value):
            found[name] = Rule(f"--{name} must be {words} (got {value}).",
                               [(name, [default[name]])])
    return found


# ---- several flags together: each is in its range here ----

NEEDS = {  # flags that change nothing without another one, or without one of these
    "eval_every eval_only eval_pass eval_samples eval_temperature target_eval": "eval_data",
    "lora_alpha lora_targets lora_sync": "lora_rank",
    "max_turns": "reply tools", "ranks gpu_gb": "plan"}


def run_rules(plan: Plan):
    """Flags that need another flag, or that another one makes senseless."""
    args, given, default = plan.args, flags(plan.args), flags(type(plan.args)())
    name, stop = str(args.name), given["stop"]
    # --name becomes a folder. The folders runs/tiny-… hold the tiny models.
    own = re.fullmatch(r"(?!tiny-(sort|kk|guess|skilled|experts|sharpen)-)\w[\w .,=+@-]*", name)
    if not own or len(name.encode()) > 200:
        yield Rule(f"--name must be at most 200 bytes of letters, digits, spaces and _.,=+@-, "
                   f"begin with a letter or digit, and not be a tiny model's (got {name[:60]!r}).",
                   [("name", ["my-run"])])
    if "" in stop:
        yield Rule("--stop must not have an empty string.",
                   [("stop", [tuple(text for text in stop if text)])])
    if any(spec.startswith("environment") for spec in args.reward) and not given["reply"]:
        yield Rule("--reward environment needs --reply FILE.py:CLASS.", [("reward", [("exact",)])])
    for names, needed in NEEDS.items():
        for name in names.split():
            if given[name] != default[name] and not any(map(given.get, needed.split())):
                words = " or --".join(needed.split())
                yield Rule(f"--{name} needs --{words}.", [(name, [default[name]])])


def carry_rules(args):
    """--carry. Old policies sampled a part of its tokens."""
    given, off = flags(args), ("carry", [0.0])
    if given["engine_correction"] == "none":
        yield Rule("--engine_correction must be on with --carry: older policies sampled some of a "
                   "step's tokens.",
                   [("engine_correction", ["truncate"]), off])
    for name in ("reply", "tools", "stop"):
        if given[name]:
            yield Rule(f"--{name} needs whole completions, and --carry stops them between rounds.",
                       [off, (name, [type(given[name])()])])


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
    tokens = f"--max_prompt_tokens {given['max_prompt_tokens']} + --max_tokens {a.max_tokens}"
    most = [("minibatches", smallest * a.group,  # (flag, its limit, why)
             f"the smallest batch has {smallest} prompts x --group {a.group}"),
            ("overlong_buffer", a.max_tokens, "--max_tokens")]
    least = [(name, plan.longest, tokens) for name in BUDGETS]
    if given["eval_temperature"] == 0:
        most.append(("eval_samples", 1, "--eval_temperature is 0"))
    if given.get("engine_correction") in ("mask", "sequence_mask"):
        most.append(("correction_low", a.correction_high, "--correction_high"))
    if a.lora_args.lora_sync != "merged":
        most.append(("lora_rank", LORA_RANKS[-1], "vLLM takes no larger adapter; --lora_sync "
                     "merged needs none"))
    if given["target_reward"]:
        least.append(("steps", 13, "for --target_reward"))  # its first 3 and last 10
    wrong = [(name, "at most", *why) for name, *why in most if given.get(name, 0) > why[0]]
    wrong += [(name, "at least", *why) for name, *why in least if given.get(name, INF) < why[0]]
    for name, words, limit, why in wrong:
        yield Rule(f"--{name} must be {words} {limit:,} (got {given[name]:,}): {why}.",
                   [(name, [limit])])


def lora_rules(lora, shape):
    """--lora_targets. shape: see broken."""
    if not lora.lora_rank or shape is None:
        return
    if {*lora.lora_targets} - {"all-linear", *shape.linears}:
        experts = "; experts take no adapters" if shape.mixture else ""
        yield Rule(f"--lora_targets must be all-linear or some of {' '.join(shape.linears)} (got "
                   f"{' '.join(lora.lora_targets)}{experts}).",
                   [("lora_targets", [("all-linear",)])])
    elif not shape.adapter(lora):
        yield Rule("--lora_rank finds no torch.nn.Linear to adapt: --lora_targets names none, or "
                   "the model has none.", [("lora_rank", [0]), ("lora_targets", [("all-linear",)])])


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
    if given.replay_routing and args.carry_args and args.carry_args.carry:
        yield Rule("--replay_routing is for completions of one round, and --carry goes on with "
                   "them.", [off["replay_routing"], ("carry", [0.0])])
    if given.replay_routing and args.teacher_prompt:
        yield Rule("--replay_routing has no experts for the prompts of --teacher_prompt.",
                   [off["replay_routing"]])
    if given.replay_routing and not args.needs_engine:
        yield Rule("--replay_routing needs an engine.", [off["replay_routing"]])


def picture_rules(args, shape):
    """Models that see. shape: see broken."""
    given, default = flags(args), flags(type(args)())
    sees = shape is not None and shape.tower is not None
    for name in ("max_image_tokens", "train_vision"):
        if given[name] and shape and not sees:
            yield Rule(f"--{name} needs a model that sees pictures.", [(name, [default[name]])])
    if given["train_vision"] and given["lora_rank"]:
        yield Rule("--train_vision trains all weights of the tower, and --lora_rank trains "
                   "adapters alone.", [("train_vision", [False]), ("lora_rank", [0])])
    for name in ("reply", "tools", "carry", "teacher_prompt"):
        if sees and given.get(name):
            yield Rule(f"--{name} is for models that read text alone: --model sees pictures, and "
                       "they are sampled in one turn, for the prompt of the row.",
                       [(name, [default[name]])])


def divisor_rules(plan: Plan, shape, local_size: int | None):
    """Numbers that must divide others. shape, local_size: see broken."""
    tp, shard_size = plan.args.engine_args.tp, plan.args.model_args.shard_size or 1
    wholes = [(plan.ranks, "ranks")]
    if plan.ranks % shard_size:
        yield Rule(f"--shard_size must divide the {plan.ranks:,} ranks (got {shard_size}).",
                   [("shard_size", [0])])
    if local_size:
        wholes.append((local_size, "ranks of a machine"))
    if shape:
        wholes += [(shape.heads, "attention heads"), (shape.intermediate, "columns of the MLP")]
        if tp % shape.kv_heads != 0:  # vLLM copies the heads where --tp is a multiple of them
            wholes.append((shape.kv_heads, "key-value heads"))
        vocab = 64 * ceil_div(shape.vocab, 64)  # vLLM pads it
        wholes.append((vocab, "tokens of the vocabulary"))
    words = " and ".join(f"{n:,} {word}" for n, word in wholes if n % tp)
    if words:
        yield Rule(f"--tp must divide the {words} (got {tp}).",
                   [("tp", range(min(tp, plan.ranks), 0, -1))])


def strict_rules(plan: Plan):
    """--strict: no batch has padding."""
    given = flags(plan.args) | {"ranks": plan.ranks}
    if given.get("dynamic_sampling"):
        yield Rule("--strict cannot hold with --dynamic_sampling: any number of groups may stay.",
                   [("strict", [False]), ("dynamic_sampling", [False])])
    for phase in (phase for n in plan.batches for phase in plan.phases(n)):
        if phase.padding:
            yield Rule(f"--strict allows no padding: {phase.name} has {phase.rows} completions for "
                       f"{plan.ranks} ranks x {phase.micros} rounds.",
                       [(name, nearest(given[name])) for name in ("batch", "group", "ranks")])
            return


def nearest(n: int) -> list[int]:
    """The whole numbers around n, the nearest first."""
    return sorted(range(max(1, n - 256), n + 256), key=lambda other: abs(other - n))


# ---- all rules ----

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
             *picture_rules(usable, shape), *divisor_rules(plan, shape, local_size)]
    if usable.turn_args.tools:
        found += tool_rules(usable)
    if usable.carry_args and usable.carry_args.carry:
        found += carry_rules(usable)
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
