"""loss_flags.py: the flags of the loss, and the functions that --loss and --advantage name.

Both take a name of losses.py, or FILE.py:NAME: a function of a file, as in variants/. The file is
found from the current folder or from the project's, and loaded before weights are.
"""
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

import losses
from errors import Number, Range, SettingsError, not_default
from scoring.signatures import ROOT, load


@dataclass
class ClipArgs:
    """The loss of a token."""
    clip_low: float = 0.2
    """ε below: ratios under 1 - ε are clipped."""
    clip_high: float = 0.2
    """ε above: ratios over 1 + ε are clipped (DAPO: 0.28)."""
    dual_clip: Annotated[float, Range(1, above=True)] | None = None
    """c > 1: loss at most -c·A where A < 0 (https://arxiv.org/abs/1912.09729)."""
    aggregation: Literal["token", "sequence", "constant", "prompt"] = "token"
    """token: mean over the global minibatch's tokens (DAPO). sequence: mean of each completion's
    mean (GRPO). constant: mean of each completion's sum / --max_tokens (Dr. GRPO). prompt: mean of
    the mean over each prompt's tokens (ScaleRL)."""
    engine_correction: Literal["none", "truncate", "mask", "sequence_truncate",
                               "sequence_mask", "sequence_mean"] = "none"
    """Weight losses by π_trainer/π_engine. truncate: at most high (TIS). mask: 0 outside [low,
    high] (IcePop). sequence_: by the ratio of the whole completion. sequence_mean: by the geometric
    mean of its tokens' ratios, truncated."""
    correction_low: float = 0.5
    """Lower bound; truncate has none."""
    correction_high: float = 2.0
    """Upper bound."""

    def rules(self, plan):
        """See plan.problems."""
        masks = self.engine_correction in ("mask", "sequence_mask")
        if masks and self.correction_low > self.correction_high:
            yield (f"--correction_low must be at most --correction_high {self.correction_high} "
                   f"(got {self.correction_low}).")
        yield from super().rules(plan)

    @property
    def bounds(self) -> dict[str, float | None]:
        """What every loss takes."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high,
                "dual_clip": self.dual_clip}

    @property
    def correction(self) -> dict[str, object]:
        """What losses.engine_correction takes."""
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
    """DAPO: minus up to 1 over this many tokens before --max_tokens. 0: none."""

    def rules(self, plan):
        """See plan.problems."""
        if self.overlong_buffer > plan.args.max_tokens:
            yield (f"--overlong_buffer must be at most --max_tokens {plan.args.max_tokens:,} (got "
                   f"{self.overlong_buffer:,}).")
        yield from super().rules(plan)


# ---- functions of a file

BUILT_IN = {"loss": losses.LOSSES, "advantage": dict.fromkeys(
    ["dr_grpo", "grpo", "rloo", "reinforce++", "reinforce++-baseline"], losses.group_advantages)}
NAMES = {flag: tuple(functions) for flag, functions in BUILT_IN.items()}
TAKES = {  # positional arguments, and those by name
    "loss": ("logp old A row", "n_rows engine_logprobs draws clip_low clip_high dual_clip"),
    "advantage": ("rewards group", "scored eps parts trained row lengths turn turn_rewards "
                                   "old_logprobs engine_logprobs")}


class Own(NamedTuple):
    """A function of a file, or a built-in one."""
    function: Callable
    refuses: Callable | None = None  # args -> why these settings do not fit it, or None
    per: str = "completion"  # or token: what has one number of an advantage
    uses_old: bool = False  # has it a parameter old_logprobs?


@cache
def own(flag: str, spec: str) -> Own:
    """What --loss or --advantage names. SettingsError if it cannot be loaded."""
    if spec in NAMES[flag]:
        return Own(BUILT_IN[flag][spec])
    path, name = find(flag, spec)
    try:
        module = load(path)
    except Exception as error:
        raise SettingsError(f"--{flag} {spec}: {path} cannot be loaded: {type(error).__name__}: "
                            f"{error}. Would work: a file that `python {path}` runs.") from error
    function = getattr(module, name, None)
    by_order, by_name = (words.split() for words in TAKES[flag])
    try:
        signature = inspect.signature(function)
        signature.bind(*by_order, **dict.fromkeys(by_name))
    except (TypeError, ValueError) as error:  # there is none, or it takes something else
        raise SettingsError(
            f"--{flag} {spec}: {path} needs a function {name}({', '.join(by_order)}, *, "
            f"{', '.join(by_name)}); **others may stand for some of the last ({error}).") from error
    if flag == "loss":
        try_loss(spec, function)
    return Own(function, getattr(module, "refuses", None), getattr(module, "PER", "completion"),
               "old_logprobs" in signature.parameters)


def try_loss(spec: str, function: Callable):
    """SettingsError unless a loss returns what it must, for three tokens of two completions."""
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old, row = logp.detach() - 0.1, torch.tensor([0, 0, 1])
    try:
        loss, metrics = function(
            logp, old, old.sign(), row, n_rows=2, engine_logprobs=old, clip_low=0.2, clip_high=0.2,
            dual_clip=None, draws=lambda: torch.full((3,), 0.5))
        shapes = [tuple(x.shape) for x in (loss, *metrics.values())]
        why = "" if set(shapes) == {(3,)} else f"of three tokens it returns shapes {shapes}"
    except Exception as error:  # it is a user's
        why = f"of three tokens it raises {type(error).__name__}: {error}"
    if why:
        raise SettingsError(f"--loss {spec} must return token_loss (n,) and a dict of metrics "
                            f"(n,): {why}.")


def find(flag: str, spec: str) -> tuple[Path, str]:
    """The file and the name in it."""
    file, _, name = spec.rpartition(":")
    for path in Path(file), ROOT / file:
        if file.endswith(".py") and path.is_file():
            return path.resolve(), name
    works = f"{', '.join(NAMES[flag])}, or a function of a file: --{flag} FILE.py:NAME"
    if (ROOT / "variants" / f"{spec}.py").is_file():
        works = f"--{flag} variants/{spec}.py:{spec}"
    raise SettingsError(f"--{flag} {spec}: there is no such {flag}, and no such file here or in "
                        f"{ROOT}. Would work: {works}.")


def rules(args):
    """Yields a sentence for what does not fit --loss or --advantage, and for a file that has no
    such function."""
    if args.group == 1 and args.advantage != "reinforce++":
        yield (f"--advantage {args.advantage} compares the completions of a prompt, so --group "
               f"must be at least 2 (got 1). With one completion: --advantage reinforce++.")
    updates = args.minibatches * args.epochs
    if args.loss == "reinforce" and updates > 1:
        yield (f"--loss reinforce has no ratio: --minibatches x --epochs must be 1 (got "
               f"{updates}). For several updates: --loss clip.")
    for flag, names in NAMES.items():
        spec = getattr(args, flag)
        try:
            one = own(flag, spec)
        except SettingsError as error:
            yield str(error)
            continue
        takes = inspect.signature(one.function).parameters
        if flag == "loss" and "others" in takes:  # it names what it uses
            yield from (f"--{name} does nothing with --loss {spec}. Would work: without it."
                        for name in args.bounds if name in not_default(args) and name not in takes)
        if refused := one.refuses and one.refuses(args):
            yield f"--{flag} {spec} {refused} Would work: --{flag} {names[0]}."
