"""flags.py: the flags that scripts share, with their defaults, and the command line.

Each component defines the dataclass of its flags next to its code (settings.py). Here are those of
the loss and of the run, and CommonArgs, which inherits all of them. `parse` turns the command line
into an Args; a run resumed with --name takes omitted flags from its args.json.

--loss and --advantage take a name in losses.py, or FILE.py:NAME: a function in a file, as in
variants/. The file is looked up in the current folder, then in the project's, and loaded before the
weights.
"""
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import tyro

import dist
import losses
import part
from data import DataArgs, Row, load, make_row
from errors import Mistakes, SettingsError, open_streams
from evaluate import EvalArgs
from files import read
from memory import Memory
from metrics import show_metrics
from model import ModelArgs, OptimizerArgs
from plan import PlanArgs
from rewards import RewardArgs
from rollout import EngineArgs
from settings import (
    Count,
    Flags,
    Number,
    Positive,
    Range,
    lists_of,
    not_default,
    renamed,
    restored,
    sections,
)
from worker import ROOT, find_file, load_file

# ---- the flags of the loss ----

@dataclass
class ClipArgs(Flags):
    """The loss of a token."""
    clip_low: float = 0.2
    """ε below: ratios under 1 - ε are clipped."""
    clip_high: float = 0.2
    """ε above: ratios over 1 + ε are clipped (DAPO: 0.28)."""
    dual_clip: Annotated[float, Range(1, above=True)] | None = None
    """c > 1: limit the loss to -c·A if A < 0 (https://arxiv.org/abs/1912.09729)."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """token: mean over the minibatch's tokens (DAPO). sequence: mean of each completion's mean
    (GRPO). constant: mean of each completion's sum / --max_tokens (Dr. GRPO). prompt: mean of the
    mean over each prompt's tokens (ScaleRL)."""
    engine_correction: Literal["none", "truncate", "mask", "sequence_truncate",
                               "sequence_mask", "sequence_mean"] = "none"
    """Weight losses by π_trainer/π_engine. truncate: at most high (TIS). mask: 0 outside [low,
    high] (IcePop). sequence_: use the completion's ratio. sequence_mean: use the geometric mean of
    its tokens' ratios, truncated."""
    correction_low: float = 0.5
    """Lower bound; truncate has none."""
    correction_high: float = 2.0
    """Upper bound."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        masks = self.engine_correction in ("mask", "sequence_mask")
        if masks and self.correction_low > self.correction_high:
            yield (f"--correction_low must be at most --correction_high {self.correction_high} "
                   f"(got {self.correction_low}).")
        yield from super().rules(plan)

    @property
    def bounds(self) -> dict[str, float | None]:
        """The ratio's bounds, by the argument names of a loss."""
        return {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}

    @property
    def correction(self) -> dict[str, object]:
        """The arguments of losses.engine_correction that come from flags."""
        return {"kind": self.engine_correction, "low": self.correction_low,
                "high": self.correction_high}


@dataclass
class LossArgs(ClipArgs):
    """loss and reward penalties"""
    entropy_coef: Number = 0.0
    """Bonus for the sampling distribution's entropy."""
    kl_reward_coef: float = 0.0
    """β of the KL to the starting model in the reward. 0: none."""
    overlong_buffer: int = 0
    """DAPO: penalty of up to 1 over this many tokens before --max_tokens. 0: none."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.overlong_buffer > plan.args.max_tokens:
            yield (f"--overlong_buffer must be at most --max_tokens {plan.args.max_tokens:,} (got "
                   f"{self.overlong_buffer:,}).")
        yield from super().rules(plan)


# ---- functions of a file

# The built-in names. For an advantage, group_advantages only holds the place: it is not called
# through this table. grpo.compute_advantages chooses by the name.
NAMES = {"loss": losses.LOSSES, "advantage": dict.fromkeys(
    ["dr_grpo", "grpo", "rloo", "reinforce++", "reinforce++-baseline"], losses.group_advantages)}
TAKES = {  # arguments of such a function: the positional ones, and those by name
    "loss": ("logp old A row", "n_rows engine_logprobs draws clip_low clip_high dual_clip"),
    "advantage": ("rewards group", "scored eps parts trained row lengths old_logprobs "
                                   "engine_logprobs batch")}


class Chosen(NamedTuple):
    """A function of --loss or --advantage, built in or from a file, with that file's settings."""
    function: Callable  # not called for a built-in advantage: see grpo.compute_advantages
    refuses: Callable | None = None  # args → why they do not fit the function, or None
    per: str = "completion"  # or token: what an advantage has one number for
    least: int = 1  # how many scored completions an advantage needs in a group
    uses_old: bool = False  # whether it takes old_logprobs


@cache
def chosen(flag: str, spec: str) -> Chosen:
    """Loads the function of --loss or --advantage. The result is cached. SettingsError: the file
    cannot be loaded, has no such function, or the function's arguments are not those of TAKES."""
    if spec in NAMES[flag]:
        return Chosen(NAMES[flag][spec], least=1 if spec == "reinforce++" else 2)
    function, module = function_of(flag, spec, *TAKES[flag])
    known = {name.lower(): vars(module)[name] for name in ("refuses", "PER", "LEAST")
             if name in vars(module)}
    uses_old = "old_logprobs" in inspect.signature(function).parameters
    if flag == "loss":
        function = checked_loss(function, spec)
    return Chosen(function, uses_old=uses_old, **known)


def function_of(flag: str, spec: str, by_order: str, by_name: str) -> tuple[Callable, ModuleType]:
    """Loads the file of a flag's FILE.py:NAME → the function, and the module. by_order, by_name:
    the names of its arguments. SettingsError: the file cannot be loaded, has no such function, or
    it takes other arguments."""
    path, name = find(flag, spec)
    try:
        module = load_file(path)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise SettingsError(f"--{flag} {spec}: {path} cannot be loaded: {type(error).__name__}: "
                            f"{error}. Would work: a file that `python {path}` runs.") from error
    function = vars(module).get(name)
    by_order, by_name = by_order.split(), by_name.split()
    try:
        inspect.signature(function).bind(*by_order, **dict.fromkeys(by_name))
    except (TypeError, ValueError) as error:
        why = error if function else "there is none"
        raise SettingsError(
            f"--{flag} {spec}: {path} needs a function {name}({', '.join(by_order)}, *, "
            f"{', '.join(by_name)}); **others may stand for some of the last ({why}).") from error
    return function, module


def checked_loss(function, spec: str):
    """Wraps a loss from a file. The wrapper passes copies of the tensors, and raises a
    SettingsError if the loss does not return a loss for each token, (n,), and a dict of metrics."""
    def own(value):
        """Returns a copy of a tensor, which the function may overwrite."""
        return value.clone() if isinstance(value, torch.Tensor) else value

    @wraps(function)
    def checked(logp, *given, **named):
        named = {name: own(value) for name, value in named.items()}
        match function(own(logp), *map(own, given), **named):
            case torch.Tensor() as loss, dict() as metrics if loss.shape == logp.shape:
                return loss, metrics
        raise SettingsError(f"--loss {spec} must return two things: a loss for each of the "
                            f"{len(logp)} tokens, a tensor (n,), and a dict of metrics.")
    return checked


def find(flag: str, spec: str) -> tuple[Path, str]:
    """Returns the file of FILE.py:NAME, and the name in it. SettingsError: there is no such file.
    """
    file, _, name = spec.rpartition(":")
    if file.endswith(".py") and (path := find_file(file)):
        return path.resolve(), name
    works = f"a function of a file: --{flag} FILE.py:NAME"
    if flag in NAMES:
        works = f"{', '.join(NAMES[flag])}, or {works}"
    if flag in NAMES and (ROOT / "variants" / f"{spec}.py").is_file():
        works = f"--{flag} variants/{spec}.py:{spec}"
    raise SettingsError(f"--{flag} {spec}: there is no such {flag}, and no such file here or in "
                        f"{ROOT}. Would work: {works}.")


def rules(args):
    """Yields a sentence for each setting that does not fit the function of --loss or
    --advantage."""
    updates = args.minibatches * args.epochs
    if args.loss == "reinforce" and updates > 1:
        yield (f"--loss reinforce has no ratio: --minibatches x --epochs must be 1 (got "
               f"{updates}). For several updates: --loss clip.")
    for flag, names in NAMES.items():
        spec = getattr(args, flag)
        try:
            one = chosen(flag, spec)
        except SettingsError as error:
            yield str(error)
            continue
        takes = inspect.signature(one.function).parameters
        if flag == "loss" and "others" in takes:  # it names each bound that it uses
            yield from (f"--{name} has no effect with --loss {spec}. Would work: without it."
                        for name in args.bounds if name in not_default(args) and name not in takes)
        if flag == "advantage" and args.group < one.least:
            yield (f"--advantage {spec} compares the completions of a prompt, so --group must be "
                   f"at least {one.least} (got {args.group}). With fewer: --advantage reinforce++.")
        if refused := one.refuses and one.refuses(args):
            yield f"--{flag} {spec} {refused} Would work: --{flag} {next(iter(names))}."


# ---- the flags of a run ----

@dataclass
class RunArgs(Flags):
    """The run's folder, checkpoints and output."""
    resume: bool = True
    """--no-resume: refuse if runs/NAME exists."""
    save_every: int | None = None
    """Steps between checkpoints; one more after the last step. None: a tenth of --steps. 0: only
    after SIGTERM."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint of the best evaluation (the earliest if tied). The best of many
    noisy numbers is biased upwards: evaluate it on other rows."""
    stop_at: Annotated[float, Range(0, 1, above=True)] | None = None
    """End the run after an evaluation with at least this pass@1, as after the last step."""
    samples_every: Count = 10
    """Steps between printing a few completions and saving all of them in samples/."""
    target_reward: tuple[Number, Number] | None = None
    """Exit with status 1 unless the mean reward of the first 3 steps is at most the first number,
    and that of the last 10 at least the second."""
    target_eval: tuple[Number, Number] | None = None
    """The same for pass@1 before the first step and after the last."""
    export: bool = True
    """Write the trained model to runs/NAME/model. For a checkpoint: tools/export.py."""
    timeout: Annotated[float, Range(1, 1e6)] = 600.0
    """Seconds that a rank waits for another."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if self.target_reward and plan.args.steps < 13:
            yield (f"--target_reward compares the first 3 and the last 10 steps: --steps must be "
                   f"at least 13 (got {plan.args.steps}).")
        if plan.args.eval_only and (self.target_reward or self.target_eval):
            yield "--target_reward and --target_eval grade training, and --eval_only does none."
        for name in "target_eval", "keep_best", "stop_at":
            if getattr(self, name) and not plan.args.eval_data:
                yield f"--{name} needs --eval_data."
        if (self.keep_best or self.stop_at) and not plan.args.reward:
            yield "--keep_best and --stop_at need --reward: pass@1 is computed from rewards."


@dataclass
class CommonArgs(DataArgs, EngineArgs, ModelArgs, OptimizerArgs, RewardArgs, EvalArgs, RunArgs,
                 PlanArgs, *part.asked("Flags").values()):
    """The flags that all scripts have: those of each component and of each part, and here those
    that several files read. The usual ones come first. It also reads the rows (`load_rows`)."""
    model: str = "tiny"
    """A folder in Hugging Face format, a hub name, or tiny, tiny:kk, tiny:guess (from tiny.py)."""
    data: str = "tiny"
    """A .jsonl, .json, .parquet or .csv file, a hub NAME[:CONFIG][@SPLIT], reasoning_gym:TASK,
    tiny, or your own function FILE.py:NAME, which takes --seed and returns or yields rows (dicts).
    """
    reward: tuple[str, ...] = ("exact",)
    """Rewards to add up, each NAME[:WEIGHT], or your own function FILE.py:NAME[:WEIGHT]."""
    batch: Count = 64
    """P: prompts per step, over all ranks. Any number works on any number of ranks."""
    group: Count = 8
    """G: completions per prompt."""
    max_tokens: Count = 256
    """Maximum tokens per completion. One that reaches it counts as truncated."""
    temperature: Annotated[float, Range(0.01, 2)] = 1.0  # vLLM's own limits
    """Temperature of sampling, and of the trainer's log-probs."""
    steps: Count = 60
    """Number of rollouts, each with its update."""
    lr: Positive | None = None
    """Peak learning rate. None: 3e-4 for a model below ten million parameters, else 1e-6. The
    plan prints it."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the data order and of each completion's random stream."""
    name: str | None = None
    """The run is runs/NAME; an unfinished one is resumed. None: a name from the time."""
    eval_data: str | None = None
    """Rows to evaluate on before the first step and after the last, in the formats of --data."""
    minibatches: Count = 1
    """Optimizer steps per pass over the batch."""
    epochs: Count = 1
    """Passes over the samples of each rollout."""
    update_tokens: int = 16384
    """Tokens per forward and backward pass, per rank, counting shared prompts once. Sets the
    memory, never changes the maths."""
    logprob_tokens: int = 32768
    """The same without gradient: old and reference log-probs."""

    script: ClassVar[str]  # the file's name
    needs_critic: ClassVar[bool] = False  # True in ppo.py, which has its flags too
    memory: ClassVar[type] = Memory  # the class that plans the memory
    needs_rollouts: ClassVar[bool] = True  # False: the rows have their completions
    needs_reward: ClassVar[bool] = True
    needs_engine: ClassVar[bool] = True
    entropy_coef: ClassVar[float] = 0.0  # grpo.py and ppo.py have it
    usual_lr: ClassVar[float] = 1e-6  # the default --lr of a model that is not small

    def choose_rates(self, parameters: int, factor: float = 1) -> None:
        """Sets --lr and --critic_lr if not given: `factor` times the usual rates for a model with
        this many parameters."""
        lr, critic_lr = (3e-4, 1e-3) if parameters < 10_000_000 else (self.usual_lr, 1e-5)
        self.lr = self.lr or factor * lr
        if self.needs_critic:
            self.critic_lr = self.critic_lr or factor * critic_lr

    def find_reference(self, inputs, weights: bool) -> None:
        """Sets the reference model of `inputs` (preflight.Inputs). Here it is the model itself, so
        nothing changes; a script may have another. weights: also fetch them."""

    def load_rows(self, flag: str, seed: int, inputs, make=make_row) -> list[Row]:
        """Reads the rows of --data or --eval_data (`flag` is its name), or returns [] if it is not
        set. inputs: a preflight.Inputs, whose notes get a sentence with the row counts. make: a
        script's replacement for make_row."""
        spec = getattr(self, flag)
        if not spec:
            return []
        make = part.make_row(make, self, inputs, spec)  # `make` itself, unless a part wraps it
        rows, note = load(spec, inputs.tokenizer, self, seed=seed, make=make,
                          eos_ids=inputs.ends)
        inputs.notes.append(f"--{flag} {note}")
        return rows

    def formula(self, reference, micro):
        """Returns a formula for `Policy.logprobs`, from a script whose update computes something
        else from the logits, such as parts/distill. None, as here, means log-probs."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        name = "my-run" if self.name is None else self.name
        # runs/tiny-… hold the tiny models.
        if not re.fullmatch(r"(?!tiny-)\w[\w .,=+@-]*", name) or len(name.encode()) > 200:
            yield (f"--name must be at most 200 bytes of letters, digits, spaces and _.,=+@-, "
                   f"begin with a letter or digit, and not with tiny- (got {name[:60]!r}). Would "
                   f"work: --name my-run.")
        smallest = min(plan.batches)
        if self.minibatches > smallest * self.group:
            yield (f"--minibatches must be at most {smallest * self.group:,} (got "
                   f"{self.minibatches:,}): the smallest batch has {smallest:,} prompts x --group "
                   f"{self.group:,}.")


TEN = """\
Start with these ten. All have defaults: ./run.sh sets them for a small task.

    --model --data --reward         what is trained, on which rows, and what a good answer gets
    --batch --group --max_tokens    prompts of a step, completions of each, tokens of each
    --lr --steps --update_tokens    the step's size, their number, and what fits into memory
    --save_every                    steps between two checkpoints, from which a run resumes

"""


OF_A_CALL = frozenset("eval_only name ranks resume".split())  # a resumed run does not keep these


def parse(kind: type, description: str):
    """Parses the command line into the script's Args. If --name is an existing run of this script,
    omitted flags keep the run's values, except those of OF_A_CALL. An error is printed as a
    sentence and exits with status 2; --metrics also prints and exits."""
    open_streams()
    # A file gets each line at once, and a terminal without é gets an escape.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    mistakes, words = Mistakes(), part.words(sys.argv[1:])
    args = mistakes.attempt(parse_words, kind, description, words)
    path = Path("runs", args.name, "args.json") if args and args.name else None
    if path and path.is_file():
        kept = mistakes.attempt(lambda: renamed(read(path)))
        if kept and kept.get("script") == kind.script:
            args = mistakes.attempt(parse_again, kind, description, words, kept)
            mistakes[:] = [f"{path}, beside the command line: {one}" for one in mistakes]
    if mistakes:
        dist.run(mistakes.stop)  # prints and ends
    if args.metrics:
        dist.run(show_metrics)
    return args


def as_one_list(kind: type, words: list[str], default) -> tuple[list[str], object]:
    """Joins the values of a list flag that is given several times, such as `--reward exact --reward
    short:0.2`. Returns the words, and the Args with the other values. default: None, or the Args of
    an earlier run."""
    lists = {name: [] for name in lists_of(kind())}
    rest, here = [], None  # here: (words, values) of the list that is being read
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            here = ([word], [value] * bool(equals)) if name in lists else None
            if here:
                lists[name].append(here)
        elif here:
            here[0].append(word), here[1].append(word)
        rest += [] if here else [word]
    for name, given in lists.items():
        values = sum((some for _, some in given), [])
        if len(given) > 1 and any(value.startswith("-") for value in values):  # no words of tyro's
            default = replace(default or kind(), **{name: (*values,)})
        else:
            rest += [f"--{name}", *values] if len(given) > 1 else sum((it for it, _ in given), [])
    return rest, default


def parse_again(kind: type, description: str, words: list[str], kept: dict):
    """Parses the words again into Args. An omitted flag gets its value in `kept` (args.json), if
    it is not in OF_A_CALL. Keys of `kept` that are no longer flags are ignored. SettingsError: a
    kept value is no longer valid."""
    kept = {name: value for name, value in kept.items()
            if name in vars(kind()) and name not in OF_A_CALL}
    texts, before = {}, []
    for name, value in kept.items():
        if isinstance(value, bool):
            before.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list) and any(str(item).startswith("--") for item in value):
            texts[name] = value  # a string that looks like a flag: --stop=--
        elif isinstance(value, list):
            before += [f"--{name}", *map(str, value)]
        else:
            before.append(f"--{name}={value}")
    default = restored(parse_words(kind, description, before), texts)
    return parse_words(kind, description, words, default=default)


def with_headings(args) -> type:
    """Returns the Args as tyro shows it, with the values of args as its defaults: the flags of each
    section are in a field of their own, a heading of --help. The inherited fields of the same names
    are init=False, so that tyro does not offer them twice."""
    found = {type(one).__name__.replace("Args", "_args").lower(): one for one in sections(args)}
    inside = {name for one in found.values() for name in vars(one)}
    return make_dataclass(type(args).__name__, [
        *((flag.name, flag.type, field(init=False) if flag.name in inside else field(
            default=getattr(args, flag.name))) for flag in fields(args)),
        *((name, type(one), field(default_factory=partial(replace, one)))
          for name, one in found.items())], bases=(type(args),))


def flat(kind: type, shown):
    """Returns the Args that tyro read as one of `with_headings`."""
    inside = {name: value for one in vars(shown).values() if isinstance(one, Flags)
              for name, value in vars(one).items()}
    return kind(**{name: value for name, value in (vars(shown) | inside).items()
                   if not isinstance(value, Flags)})


def parse_words(kind: type, description: str, words: list[str], default=None):
    """Parses the words of a command line into Args. SettingsError: tyro's message about a wrong
    word, or the name here of another system's flag."""
    said = io.StringIO()
    words, default = as_one_list(kind, words, default)
    shown_as = with_headings(default or kind())
    try:
        with redirect_stderr(said):
            return flat(kind, tyro.cli(
                shown_as, description=TEN + description, args=words, use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,)))
    except BrokenPipeError:  # --help | head
        os._exit(0)
    except SystemExit as end:
        if not end.code:  # --help
            dist.run(Mistakes().stop)
        for found, rest in part.unknown(words):
            mistakes = Mistakes(found)
            mistakes.attempt(parse_words, kind, description, rest, default)
            mistakes.stop()
        lines = said.getvalue().splitlines()  # in a frame, which some terminals have in ASCII
        inside = " ".join(line.strip("│| ") for line in lines if line.startswith(("│", "|")))
        # For a type with alternatives, tyro adds each one's message about the word.
        parts = [re.sub(r"\s+Got errors: .*", "", part).strip()
                 for part in re.split("─+|-{5,}", inside)]
        raise SettingsError("\n  ".join(filter(None, parts)) or said.getvalue().strip()) from None
