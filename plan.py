"""plan.py: arithmetic before anything loads. Every size derived once, every mistake found, the plan printed.

`python grpo.py --plan --ranks 64 --batch 512 --group 8` prints the plan and exits: no torchrun, no GPU, no weights.
A run makes the same plan first, prints its short form and keeps it as plan.txt. All problems come in one message, each
with the numbers, the rule, and the nearest values that work (tried on this very check before they are named).
"""
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, fields
from functools import cache


class SettingsError(Exception):
    """A mistake in the settings or their files: one sentence with what was given, the rule, and what would work."""
    alone = False            # found by every rank alike; True: by this one, which then has to tell


@dataclass
class Problem:
    """One thing that is wrong, the values of single flags worth trying, and (filled in later) the changes that do mend it."""
    text: str
    tries: tuple[tuple[str, Iterable], ...] = ()
    fixes: tuple[tuple[str, object], ...] = ()

    @property
    def kind(self) -> str:
        """What it is about, without the numbers: its first word, which is a flag."""
        return self.text.split()[0].rstrip(":")

    def __str__(self) -> str:
        return self.text + (f" Would work: {' or '.join(said(*fix) for fix in self.fixes)}." if self.fixes else "")


def said(flag: str, value: object) -> str:
    """A setting as it is typed."""
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"{'' if flag == 'ranks' else '--'}{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


@dataclass
class Phase:
    """What a model pass does with `rows` completions: at worst, when every one is as long as it can be."""
    name: str
    rows: int               # completions of one pass, all ranks together
    budget: int             # padded tokens of one micro-batch, per rank
    longest: int            # tokens of the longest possible sequence
    ranks: int

    @property
    def tokens(self) -> int:
        """Padded tokens of the largest micro-batch there can be."""
        return min(self.budget, self.rows * self.longest)

    @property
    def rows_per_micro(self) -> int:
        """Longest sequences that fit a micro-batch."""
        return max(1, self.budget // self.longest)

    @property
    def micros(self) -> int:
        """Micro-batches on every rank, at worst; shorter sequences need fewer."""
        return max(1, -(-(-(-self.rows // self.rows_per_micro)) // self.ranks))

    @property
    def padding(self) -> int:
        """Micro-batches of one padding row, all ranks together: there are more micro-batches to run than rows to put in them."""
        return max(0, self.micros * self.ranks - self.rows)

    def text(self) -> str:
        """One line: what each rank gets, in how many micro-batches, and what is padding."""
        each = spread(self.rows, self.ranks)
        line = f"{self.rows:,} completions, about {each} a rank, in at most {self.micros} micro-batch{'es' * (self.micros > 1)} " \
               f"of {self.rows_per_micro} x {self.longest:,} tokens (budget {self.budget:,})"
        share = self.padding / (self.micros * self.ranks)
        return line + (f"; padding: {self.padding} row{'s' * (self.padding > 1)} of 2 tokens, "
                       f"{share:.0%} of the micro-batches idle" if self.padding else "; no padding rows")


def spread(n: int, parts: int) -> str:
    """How n items fall on `parts`, in words: '64', or '85 or 86'."""
    small, extra = divmod(n, parts)
    return f"{small:,}" if not extra else f"{small:,} or {small + 1:,}"


@dataclass
class Plan:
    """Every size of a run, derived from Args, the rank count and the lengths of the data: nothing is derived elsewhere."""
    args: object
    script: str
    ranks: int
    n_rows: int | None       # prompts in --data; None where --plan cannot know
    n_eval: int              # prompts in --eval_data
    memory: str = ""         # the memory plan's text

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence: the budgets' lower bound and the engine's context."""
        return self.args.max_prompt_tokens + self.args.max_tokens

    @property
    def batches(self) -> list[int]:
        """The different numbers of prompts that a step can have: --batch, and what is left at the end of an epoch."""
        if self.n_rows is None:
            return [self.args.batch]
        return sorted({min(self.args.batch, self.n_rows), self.n_rows % self.args.batch or min(self.args.batch, self.n_rows)}, reverse=True)

    @property
    def optimizer_steps(self) -> int:
        """Per rollout."""
        return self.args.minibatches * self.args.epochs

    @property
    def requests(self) -> int:
        """The most completions that one engine is asked for in one call, of a step or of an evaluation."""
        return -(-max(max(self.batches) * self.args.group, self.n_eval * self.args.eval_samples) * self.args.tp // self.ranks)

    def phases(self, prompts: int) -> Iterator[Phase]:
        """The passes through each model for a step of this many prompts."""
        a, rows = self.args, prompts * self.args.group
        minibatch = -(-rows // a.minibatches)
        for rows_of_minibatch in sorted({minibatch, rows // a.minibatches}, reverse=True):
            yield Phase("update", rows_of_minibatch, a.update_tokens, self.longest, self.ranks)
            if hasattr(a, "critic_update_tokens"):
                yield Phase("critic update", rows_of_minibatch, a.critic_update_tokens, self.longest, self.ranks)
        if needs_old_logprobs(a) or needs_reference(a):
            yield Phase("score", rows, a.score_tokens, self.longest, self.ranks)
        if hasattr(a, "critic_score_tokens"):
            yield Phase("critic score", rows, a.critic_score_tokens, self.longest, self.ranks)

    @property
    def sizes(self) -> Iterable[int]:
        """Every number of prompts an update may have: those of `batches`, and with dynamic sampling any smaller one.

        Of those, padding repeats or is over beyond 2 x ranks rows in a minibatch, so no more of them are looked at.
        """
        if not getattr(self.args, "dynamic_sampling", False):
            return self.batches
        return range(1, min(max(self.batches), 2 * self.ranks * self.args.minibatches) + 1)

    @property
    def padding(self) -> int:
        """The most padding micro-batches that any pass of any step can need."""
        return max(phase.padding for prompts in self.sizes for phase in self.phases(prompts))

    def text(self, short: bool = False) -> str:
        """The plan for people; `short` for the start of a run."""
        a, engines = self.args, self.ranks // self.args.tp
        n = a.batch * a.group
        lines = [f"plan for {self.script} on {self.ranks} rank{'s' * (self.ranks > 1)}: {a.batch:,} prompts x {a.group:,} completions "
                 f"= {n:,} completions and {self.optimizer_steps} optimizer step{'s' * (self.optimizer_steps > 1)} a step"]
        if self.n_rows is not None:
            full, rest = divmod(self.n_rows, a.batch)
            lines.append(f"  data       {self.n_rows:,} prompts: {full + bool(rest):,} steps an epoch"
                         + (f", the last with the {rest:,} that are left" if rest and full else
                            f", each with all {rest:,} (fewer than --batch {a.batch:,})" if rest else ""))
        else:
            lines.append("  data       not read here: the last batch of an epoch is not in this plan")
        lines.append(f"  rollout    {engines:,} engine{'s' * (engines > 1)} of {a.tp} rank{'s' * (a.tp > 1)}: {spread(n, engines)} requests each; no padding")
        lines.append(f"  reward     {spread(n, self.ranks)} completions a rank, {a.reward_workers} worker processes each")
        lines += [f"  {phase.name:<10} {phase.text()}" for phase in self.phases(self.batches[0])]
        if not (needs_old_logprobs(a) or needs_reference(a)):
            lines.append("  score      not needed: with one update per rollout the ratio is 1, and no reference model is used")
        for prompts in self.batches[1:]:
            lines.append(f"  last batch {prompts:,} prompts = {prompts * a.group:,} completions, {spread(prompts * a.group, engines)} an engine")
            if not short:
                lines += [f"    {phase.name:<8} {phase.text()}" for phase in self.phases(prompts)]
        if self.n_eval:
            m = self.n_eval * a.eval_samples
            lines.append(f"  evaluation {self.n_eval:,} rows x {a.eval_samples} = {m:,} requests, {spread(m, engines)} an engine; no padding")
        return "\n".join(lines) + (f"\n{self.memory.splitlines()[0] if short else self.memory}" if self.memory else "")


def needs_old_logprobs(args) -> bool:
    """Whether old log-probs need a pass of their own: with one update per rollout they are the update's, unless something uses them before."""
    return args.algorithm == "ppo" or args.minibatches * args.epochs > 1 or args.engine_correction != "none" or bool(args.kl_reward_coef)


def needs_reference(args) -> bool:
    """Whether any KL term is on: only then a reference model is loaded."""
    return bool(args.kl_reward_coef or getattr(args, "kl_loss_coef", 0))


# ---- checks ---------------------------------------------------------------------------------------------------------

SIZES = ("batch", "group", "minibatches", "epochs", "max_prompt_tokens", "max_tokens", "eval_samples", "tp")
POSITIVE = SIZES + ("steps", "lr", "critic_lr", "temperature", "reward_workers", "reward_timeout", "timeout", "stop_seconds", "gpu_gb", "max_num_seqs", "keep",
                    "samples_every", "max_bad_steps")
NOT_NEGATIVE = ("warmup_steps", "critic_warmup_steps", "weight_decay", "max_grad_norm", "kl_reward_coef", "kl_loss_coef", "entropy_coef", "eval_every",
                "save_every", "eval_temperature", "head_chunk", "shard_size", "kv_cache_gb", "refills", "overlong_buffer", "clip_low",
                "clip_high", "advantage_eps", "correction_low", "correction_high", "value_clip", "seed")


def problems(args, ranks: int, n_rows: int | None = None, n_eval: int = 0, shape=None, machine: int | None = None, suggest: bool = True) -> list[Problem]:
    """Everything about sizes and combinations that cannot run or would not mean what it says.

    shape: the model's (shapes.py), and machine: the ranks of one machine; without them --tp is held against the ranks alone.
    A change is suggested only if this same check, run on it, no longer finds that problem, and no new one.
    """
    found = flag_problems(args, ranks)
    kinds = {p.kind for p in found}
    if ranks > 0:
        # The arithmetic needs sizes that are numbers; where some are not, what it finds however they are mended is told as well.
        bad = {name for name in (*SIZES, "shard_size") if f"--{name}" in kinds}
        mended = [{n: values[n] for n in bad} for values in (defaults(type(args)), defaults(type(args)) | dict.fromkeys(SIZES, 1))[:1 + bool(bad)]]
        first, *others = [size_problems(changed(args, **values), ranks, n_rows, n_eval, shape, machine) for values in mended]
        found += [p for p in first if all(p.kind in {q.kind for q in other} for other in others)]
    if suggest:
        kinds = {p.kind for p in found}
        for problem in found:
            for flag, values in problem.tries:
                for value in values:
                    a, w = (args, value) if flag == "ranks" else (changed(args, **{flag: value}), ranks)
                    there = w if machine == ranks else machine             # more ranks than now: still one machine, or more of the same
                    if {p.kind for p in problems(a, w, n_rows, n_eval, shape, there, suggest=False)} <= kinds - {problem.kind}:
                        problem.fixes += ((flag, value),)
                        break
    return found


def changed(args, **values):
    """args with other values. (dataclasses.replace is slow, and this is asked thousands of times.)"""
    other = copy(args)
    vars(other).update(values)
    return other


@cache
def defaults(kind: type) -> dict[str, object]:
    """The default of every flag of a script."""
    return {f.name: f.default for f in fields(kind)}


def flag_problems(args, ranks: int) -> list[Problem]:
    """Flags that are wrong whatever the sizes come to."""
    found = []
    default = defaults(type(args))
    for names, least, rule in ((POSITIVE, 1, "more than 0"), (NOT_NEGATIVE, 0, "0 or more")):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and not ((value > 0 if least else value >= 0) and value < float("inf")):
                nearest = range(least, 1025) if isinstance(value, int) or not least else ()
                found.append(Problem(f"--{name} is {value}; it must be a number, {rule}.", ((name, [*nearest, default[name]]),)))
    if ranks < 1:
        found.append(Problem(f"ranks is {ranks}; there must be at least one.", (("ranks", range(1, 1025)),)))
    if not 0 < args.gpu_memory_utilization <= 1:
        found.append(Problem(f"--gpu_memory_utilization is {args.gpu_memory_utilization}; it must be more than 0 and at most 1.",
                             (("gpu_memory_utilization", [default["gpu_memory_utilization"]]),)))
    if "" in args.stop:
        found.append(Problem("--stop has an empty string, which would end every completion before it begins.",
                             (("stop", [tuple(s for s in args.stop if s)]),)))
    if not 0 < args.top_p <= 1:
        found.append(Problem(f"--top_p is {args.top_p}; it must be 1.", (("top_p", [1.0]),)))
    elif args.top_p < 1:
        found.append(Problem(f"--top_p is {args.top_p}: the engine would sample from a truncated distribution that the trainer's log-probs do not "
                             f"describe, so every ratio would be biased; training samples with top_p 1.", (("top_p", [1.0]),)))
    if len(args.betas) != 2 or not all(0 <= b < 1 for b in args.betas):
        found.append(Problem(f"--betas is {args.betas}; they must be two numbers in [0, 1).", (("betas", [(0.9, 0.999)]),)))
    if args.seed >= 2**63:
        found.append(Problem(f"--seed is {args.seed}; it must be below 2^63.", (("seed", [2**63 - 1]),)))
    if args.target_reward is not None and args.steps < 13:
        found.append(Problem(f"--target_reward compares the first 3 with the last 10 steps; --steps is {args.steps}.",
                             (("steps", [13]), ("target_reward", [None]))))
    if args.eval_every and not args.eval_data:
        found.append(Problem(f"--eval_every is {args.eval_every}, but there is no --eval_data.", (("eval_every", [0]),)))
    if args.eval_only and not args.eval_data:
        found.append(Problem("--eval_only needs --eval_data: rows to evaluate on.", (("eval_only", [False]),)))
    if args.eval_samples > 1 and args.eval_temperature == 0:
        found.append(Problem(f"--eval_samples is {args.eval_samples} at --eval_temperature 0: greedy samples are all the same.",
                             (("eval_samples", [1]), ("eval_temperature", [1.0]))))
    if args.dual_clip is not None and not args.dual_clip > 1:
        found.append(Problem(f"--dual_clip is {args.dual_clip}; it must be more than 1 (the paper's is 3).", (("dual_clip", [3.0]),)))
    if args.engine_correction == "mask" and args.correction_low > args.correction_high:
        found.append(Problem(f"--correction_low {args.correction_low} is above --correction_high {args.correction_high}: all would be masked.",
                             (("correction_low", [args.correction_high]),)))
    return found + (grpo_problems(args) if args.algorithm == "grpo" else ppo_problems(args))


def size_problems(args, ranks: int, n_rows: int | None, n_eval: int, shape=None, machine: int | None = None) -> list[Problem]:
    """What the sizes come to together. They are all numbers by now."""
    found = []

    def near(flag: str, reach: int = 256) -> tuple[tuple[str, Iterable], tuple[str, Iterable]]:
        """The values below and above, nearest first."""
        value = ranks if flag == "ranks" else getattr(args, flag)
        return (flag, range(value - 1, max(0, value - reach), -1)), (flag, range(value + 1, value + reach))

    def divisors(flag: str) -> tuple[tuple[str, Iterable], ...]:
        value, divide = getattr(args, flag), [d for d in range(1, ranks + 1) if ranks % d == 0]
        return (flag, [d for d in reversed(divide) if d < value]), (flag, [d for d in divide if d > value])

    def multiples(of: int) -> tuple[tuple[str, Iterable], ...]:
        return ("ranks", range(ranks - ranks % of, 0, -of)), ("ranks", range(ranks - ranks % of + of, ranks + 64 * of, of))

    longest = args.max_prompt_tokens + args.max_tokens
    for name in ("update_tokens", "score_tokens", "critic_update_tokens", "critic_score_tokens"):
        budget = getattr(args, name, None)
        if budget is not None and budget < longest:
            found.append(Problem(f"--{name} is {budget:,}, but one sequence may have max_prompt_tokens {args.max_prompt_tokens:,} + max_tokens "
                                 f"{args.max_tokens:,} = {longest:,} tokens and must fit in one micro-batch.", ((name, [longest]),)))
    if ranks % args.tp:
        found.append(Problem(f"--tp is {args.tp} and there are {ranks} ranks; an engine of {args.tp} ranks must divide them.",
                             divisors("tp") + multiples(args.tp)))
    elif machine and machine % args.tp:
        found.append(Problem(f"--tp is {args.tp} and a machine has {machine} ranks; they must divide into engines, because an engine's ranks must be on "
                             f"one machine.", divisors("tp")))
    if shape and (parts := uneven(shape, args.tp)):
        found.append(Problem(f"--tp is {args.tp}; an engine's ranks share the model evenly, which its {parts} would not allow.", divisors("tp")))
    if args.shard_size and ranks % args.shard_size:
        found.append(Problem(f"--shard_size is {args.shard_size} and there are {ranks} ranks; it must divide them.",
                             divisors("shard_size") + multiples(args.shard_size)))
    plan = Plan(args, "", ranks, n_rows, n_eval)
    least = min(plan.batches) * args.group
    if args.minibatches > least:
        last = "the last batch of an epoch" if len(plan.batches) > 1 else "a batch"
        found.append(Problem(f"--minibatches is {args.minibatches}, but {last} has {min(plan.batches)} prompts x group {args.group} = {least} "
                             f"completions, and every minibatch must have at least one.", (
                                 ("minibatches", range(least, max(0, least - 256), -1)),
                                 ("group", range(-(-args.minibatches // min(plan.batches)), args.minibatches + 1))) + near("batch")))
    if args.overlong_buffer > args.max_tokens:
        found.append(Problem(f"--overlong_buffer is {args.overlong_buffer} and --max_tokens is {args.max_tokens}; the buffer is its last part.",
                             (("overlong_buffer", [args.max_tokens]),)))
    worst = next((phase for prompts in plan.sizes for phase in plan.phases(prompts) if phase.padding), None) if args.strict else None
    if worst:
        found.append(Problem(f"--strict: {worst.name} has {worst.rows} completions in a pass, for {ranks} ranks x {worst.micros} micro-batches: "
                             f"{worst.padding} would be padding alone.", near("batch") + near("group") + near("ranks")))
    return found


def uneven(shape, tp: int) -> str:
    """What of the model tp ranks cannot share evenly, in words. vLLM pads the vocabulary to 64s, and gives several ranks the same key-value head."""
    vocab = -(-shape.vocab // 64) * 64
    parts = ((f"{shape.heads} attention heads", shape.heads % tp), (f"{shape.kv_heads} key-value heads", shape.kv_heads % tp and tp % shape.kv_heads),
             (f"MLP of width {shape.intermediate:,}", shape.intermediate % tp), (f"vocabulary of {vocab:,}", vocab % tp))
    return ", ".join(words for words, rest in parts if rest)


def ppo_problems(args) -> list[Problem]:
    """Combinations of ppo.py's flags that make no sense."""
    found = [Problem(f"--{name} is {value}; it must be in [0, 1].", ((name, [1.0]),))
             for name in ("gamma", "lam") if not 0 <= (value := getattr(args, name)) <= 1]
    if args.kl_target is not None and not args.kl_reward_coef:
        found.append(Problem(f"--kl_target is {args.kl_target}, but --kl_reward_coef is 0: there is no coefficient to adapt.", (("kl_reward_coef", [0.05]),)))
    return found


def grpo_problems(args) -> list[Problem]:
    """Combinations of grpo.py's flags that make no sense."""
    found = []
    if args.group == 1 and args.advantage != "reinforce++":
        found.append(Problem(f"--advantage {args.advantage} compares the completions of a prompt, and --group is 1: every advantage would be 0.",
                             (("group", [2, *range(3, 65)]), ("advantage", ["reinforce++"]))))
    if args.dynamic_sampling and args.group == 1:
        found.append(Problem("--dynamic_sampling keeps groups whose rewards differ, and --group is 1: none would.",
                             (("group", [2, *range(3, 65)]), ("dynamic_sampling", [False]))))
    if args.kl_loss_coef and args.kl_reward_coef:
        found.append(Problem(f"--kl_loss_coef {args.kl_loss_coef} and --kl_reward_coef {args.kl_reward_coef} are both on: the KL would count twice.",
                             (("kl_loss_coef", [0.0]), ("kl_reward_coef", [0.0]))))
    if args.loss in ("cispo", "reinforce") and args.dual_clip is not None:
        found.append(Problem(f"--dual_clip is {args.dual_clip}, but --loss {args.loss} has no clipped surrogate that it could bound.",
                             (("dual_clip", [None]), ("loss", ["clip"]))))
    if args.loss == "reinforce" and args.minibatches * args.epochs > 1:
        found.append(Problem(f"--loss reinforce has no ratio to correct for its {args.minibatches * args.epochs} updates per rollout; after the "
                             f"first they would be off-policy.", (("loss", ["clip"]),)))
    return found


def warnings(args) -> list[str]:
    """Settings that run as they say but are seldom meant."""
    found = []
    if getattr(args, "loss", "") == "gspo" and max(args.clip_low, args.clip_high) >= 0.05:
        found.append(f"--loss gspo clips the ratio of whole sequences, which moves far less than a token's: {args.clip_low} and {args.clip_high} will "
                     f"hardly ever clip; the paper uses --clip_low 3e-4 --clip_high 4e-4.")
    if getattr(args, "loss", "") in ("clip", "gspo") and args.minibatches * args.epochs == 1:
        found.append("one update per rollout: the ratio is exactly 1, clipping is inert, and the loss's value is near 0 though its gradient is not "
                     "(the old log-probs are the update's own, so no score pass is run for them).")
    return found


def together(found: list[str]) -> str:
    """Problems as one message."""
    return found[0] if len(found) == 1 else f"{len(found)} problems:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(found, 1))


def make(args, script: str, ranks: int, n_rows: int | None, n_eval: int) -> Plan:
    """The plan, or one SettingsError with every problem there is."""
    found = problems(args, ranks, n_rows, n_eval)
    if found:
        raise SettingsError(together([str(p) for p in found]))
    return Plan(args, script, ranks, n_rows, n_eval)
