"""tools/prove.py: does `learn` keep its promises, with your settings and in your own file?

    ./run.sh prove --advantage rloo        grpo.py with these flags; --loss mine.py:NAME too
    ./run.sh prove ppo.py --lam 0.9        ppo.py with these flags
    ./run.sh prove sft.py                  sft.py
    ./run.sh prove mine.py --beta 0.1      your edited copy of one of them, with its own flags

It calls the file's own `learn` on the samples of hostile.py, with a random model of two layers of
--model's family, in float64, on CPU. It does so in many ways that must all make the same update:
PROMISES. Nothing is generated. It takes about a minute. Exit status 1: a promise is broken.
"""
import importlib.util
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import Mistakes, SettingsError
from preflight import plan
from running.args import parse
from tools.hostile import LONGEST, PROMPT, altered, fabricate, make_models, without_loss
from tools.trial import Outcome, Trial, run_trials

LIMIT = 1e-9  # of a relative difference; float64 gives 1e-14, a mistake 1e-3 or more


class Promise(NamedTuple):
    text: str
    pairs: list[tuple[str, str]]  # names of trials that must come to the same
    parts: tuple[str, ...]  # in what: fields of Outcome
    advice: str  # where to look if it is broken


UPDATE = ("gradients", "moved")
SAME = [("base", "2 ranks"), ("base", "3 ranks")]
BUDGETS = [("base", "small budgets"), ("base", "other budgets, 2 ranks")]
SHARED, ORDER = [("base", "prompts not shared")], [("one minibatch", "another order")]
PROMISES = [
    Promise("the same update on 1, 2 and 3 ranks", SAME, UPDATE,
            "a sum or mean over this rank's rows; a use of world.rank or world.size"),
    Promise("any token budget", BUDGETS, UPDATE,
            "a mean over a micro-batch: weights must be fixed before `micros` splits the rows"),
    Promise("prompts shared by their completions or not", SHARED, UPDATE,
            "packing.py, and Batch.sizes"),
    Promise("groups and their rows in another order (it defines minibatches: here one)", ORDER,
            UPDATE, "an (N,) or (M,) tensor in another order; a loss that reads neighbours"),
    Promise("completions without loss absent or present", [("one minibatch", "more unscored")],
            UPDATE, "a mean or a denominator that counts completions without loss"),
    Promise("one sequence at a time, by transformers alone", [("base", "plain loop")], UPDATE,
            "a loss that reads other rows of its micro-batch; packing.py; model.py"),
    Promise("metrics alike in the first four lines", SAME + BUDGETS + SHARED + ORDER,
            ("metrics",), "what Meter.add gets: per-token values and the loss's weights"),
    Promise("a step resumed from a checkpoint, on 3 ranks", [("two steps", "resumed")], UPDATE,
            "state that is neither in a model nor in its optimizer"),
    Promise("a group's gradient, whatever the other groups' tokens and rewards",
            [("group 0", "group 0, others altered")], ("gradients",),
            "a baseline of other groups' rewards. Is it a whitening by design? Use losses.whiten, "
            "losses.batch_std")]


# ---- the trials ----

def shrunk(args):
    """The user's settings, with sizes that fit a model of two layers."""
    sizes = dict(group=min(args.group, 4), minibatches=min(args.minibatches, 3),
                 epochs=min(args.epochs, 2), max_tokens=LONGEST, dtype="float64", shard_size=0,
                 offload=(), cpu_offload=False)
    if plan.flags(args).get("overlong_buffer"):
        sizes["overlong_buffer"] = min(args.overlong_buffer, 8)
    return budgets(plan.changed(args, **sizes), 1 << 20, 1 << 20)


def budgets(args, update: int, score: int):
    """With these token budgets, a critic's too."""
    values = {name: score if "score" in name else update for name in plan.BUDGETS}
    return plan.changed(args, **{k: v for k, v in values.items() if k in plan.flags(args)})


def trials(args) -> dict[str, Trial]:
    size, longest = args.group, PROMPT + LONGEST
    rows, later = fabricate(args, seed=0), fabricate(args, seed=1)
    groups = [rows[i:i + size] for i in range(0, len(rows), size)]
    rng = random.Random(2)
    mixed = [rng.sample(group, size) for group in rng.sample(groups, len(groups))]
    more = [without_loss(sample, args) for sample in fabricate(args, seed=3)]
    more = rows[:size] + more[:size] + rows[size:] + more[size:2 * size]
    others = rows[:size] + altered(rows[size:], seed=4)
    one = plan.changed(args, minibatches=1, epochs=args.minibatches * args.epochs)
    return {
        "base": Trial(args, [rows]),
        "2 ranks": Trial(args, [rows], ranks=2),
        "3 ranks": Trial(args, [rows], ranks=3),
        "small budgets": Trial(budgets(args, longest, 50), [rows]),
        "other budgets, 2 ranks": Trial(budgets(args, 90, longest), [rows], ranks=2),
        "prompts not shared": Trial(args, [rows], shared=False),
        "one minibatch": Trial(one, [rows]),
        "another order": Trial(one, [sum(mixed, [])]),
        "more unscored": Trial(one, [more]),
        "plain loop": Trial(args, [rows], plain=True),
        "two steps": Trial(args, [rows, later]),
        "saved": Trial(args, [rows], save=True),
        "resumed": Trial(args, [later], ranks=3, load=True),
        "group 0": Trial(one, [rows], only=range(size)),
        "group 0, others altered": Trial(one, [others], only=range(size))}


# ---- the table ----

class Result(NamedTuple):
    promise: Promise
    figure: float  # the largest relative difference; inf: a trial failed
    what: str  # of what
    whitened: bool

    @property
    def holds(self) -> bool:
        return self.figure <= LIMIT


def relative(a, b) -> float:
    """‖a - b‖ / ‖b‖; ‖a‖ where b is 0. Of a number: at least 1 is in the denominator."""
    if isinstance(a, torch.Tensor):
        return float((a - b).norm() / (b.norm() or 1.0))
    return abs(a - b) / max(1.0, abs(b))


def differences(promise: Promise, outcomes: dict[str, Outcome]) -> dict[str, float]:
    """{"trial: what": how much it differs}. A gradient of 0 would prove nothing: it is an inf."""
    found = {}
    for first, second in promise.pairs:
        if not {first, second} <= outcomes.keys():
            return {f"{second}: no outcome": math.inf}
        if not any(gradient.any() for gradient in outcomes[first].gradients.values()):
            return {f"{first}: every gradient is 0": math.inf}
        for part in promise.parts:
            one, other = (getattr(outcomes[name], part) for name in (first, second))
            for name in one.keys() | other.keys():
                both = name in one and name in other
                found[f"{second}: {name}"] = (
                    relative(other[name], one[name]) if both else math.inf)
    return found


def judge(promise: Promise, outcomes: dict[str, Outcome]) -> Result:
    found = differences(promise, outcomes)
    for what, figure in found.items():
        if math.isnan(figure):
            found[what] = math.inf
    what = max(found, key=found.get)
    whitened = any(outcomes[name].whitened for pair in promise.pairs for name in pair
                   if name in outcomes)
    return Result(promise, found[what], what, whitened)


def prove(file, args, promises=PROMISES) -> list[Result]:
    """Which of the promises the file's `learn` keeps, with these flags."""
    was, args = plan.flags(args), shrunk(args)
    smaller = {name: value for name, value in plan.flags(args).items()
               if value != was[name] and name not in plan.BUDGETS}
    print("made small:", ", ".join(f"--{name} {value} (was {was[name]})"
                                   for name, value in smaller.items()), flush=True)
    names = {name for promise in promises for pair in promise.pairs for name in pair}
    if "resumed" in names:
        names.add("saved")
    with tempfile.TemporaryDirectory() as folder:
        make_models(args.model, folder)
        wanted = {name: trial for name, trial in trials(args).items() if name in names}
        outcomes = run_trials(wanted, file, folder)
    return [judge(promise, outcomes) for promise in promises]


def show(results: list[Result]) -> None:
    print(f"\n{'relative difference':>99} limit")
    for number, result in enumerate(results, 1):
        text = result.promise.text
        if result.whitened:
            text += ", before losses.whiten"
        verdict = "holds" if result.holds else f"falls short: {result.what}"
        print(f"{number:2} {text:<88} {result.figure:>7.0e} {LIMIT:.0e} {verdict}")
    broken = [(number, r) for number, r in enumerate(results, 1) if not r.holds]
    for number, result in broken:
        print(f"Look at (line {number}): {result.promise.advice}.")
    if not broken:
        print("Every promise holds for these flags.")


def load(path: str):
    """A file of grpo.py's form, as a module."""
    sys.path.append(str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"proved_{Path(path).stem}", path)
    file = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = file  # dataclasses look their module up
    spec.loader.exec_module(file)
    return file


def main() -> int:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # three ranks, anywhere
    torch.set_num_threads(1)
    path = "grpo.py"
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        path = sys.argv.pop(1)
    if not Path(path).is_file():
        sys.exit(f"error: {path} is no file. Would work: grpo.py, ppo.py, sft.py, distill.py or a "
                 "copy of one of them.")
    file = load(path)
    args = parse(file.Args, f"{path}'s flags; sizes are cut down. {__doc__}")
    try:
        Mistakes(plan.problems(args, 1)).stop()
    except SettingsError as error:
        sys.exit(f"error: {error}")
    results = prove(file, args)
    show(results)
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
