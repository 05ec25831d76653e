"""tools/prove.py: does `learn` keep ten promises, with your settings and in your own file?

    ./run.sh prove --advantage rloo     grpo.py with these flags; --loss mine.py:NAME too
    ./run.sh prove ppo.py --lam 0.9     another script
    ./run.sh prove mine.py --beta 0.1   your copy of one

The file's own `learn` gets made-up samples and a random Qwen2 of two layers, in float64, on CPU, in
ways that must make one update; all rollouts of a policy that is a table (tools/uphill.py); and, to
the same samples, tests/reference.py's answer (tools/written.py).
Exit status 1: a promise is broken.
"""
import importlib.util
import math
import os
import random
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.optim.optimizer import register_optimizer_step_pre_hook

import checkpoint
import data
import dist
import losses
import model
import plan
from batch import Batch, MicroBatch, Sample
from errors import SettingsError, command
from flags import parse
from model_files import config_of
from tools import float64, uphill, written
from worker import ROOT, find_file

LIMIT = 1e-12  # as README.md promises
LARGE = 3e-3  # a rate with which ratios and values reach their bounds
MAX_NORM = 1e-3  # every gradient here exceeds it, so it is clipped
GIVEN = 0.9  # of a flag: `learn` is given a step's own rate and KL coefficient
VOCAB, PROMPT, LONGEST = 64, 8, 24  # ids; tokens of the longest prompt and completion
TINY = 1e-300  # it changes no sum but 0
ROLLOUTS, STATED = "every rollout of a table", "what the flags state"  # the second comes of it

PAPERS = "as the papers write it"

# A promise: (pairs of trials that must come to the same, what may break it).
PROMISES = {
    "ranks: the same on 1, 2 and 3": (
        [("base", "2 ranks"), ("base", "3 ranks")], "a mean over this rank's rows"),
    "budgets: any number of tokens in a micro-batch": (
        [("base", "small budgets")], "a mean over a micro-batch, or the budget of another pass"),
    "order: groups and rows in another (one minibatch)": (
        [("one minibatch", "another order")], "a tensor in another order"),
    "single sequences: one at a time, not packed": (
        [("base", "one by one")], "a loss that reads other rows"),
    "other groups: in no gradient but through losses.whiten": (
        [("group 0", "others altered")],
        "a mean over all groups, not by losses.whiten or losses.batch_std"),
    "a resumed step: from a checkpoint, on 3 ranks": (
        [("two steps", "resumed")], "state outside of models and optimizers"),
    "skipped: what is in no pass has no gradient": (
        [("base", "nothing skipped")],
        "a term that acts where the advantage is 0, and is not in `others_act` of learn"),
    "uphill: the expected step is what the flags state": (
        [(STATED, ROLLOUTS)], "a wrong sign, a detached term, a temperature left out, another "
        "denominator, or π_old that moves"),
    "nothing scored: no update of the weights": (
        [("base", "then nothing scored")], "an optimizer step without a gradient: momentum moves"),
    "formulas: what the flags name, as papers write it": (
        [(f"{PAPERS}, {steps}", steps) for steps in ("one update", "large updates", "clipped")],
        "a formula that is not what its name says in tests/reference_losses.py, or another step "
        "than clipping and AdamW with --lr")}


# ---- samples that are easy to learn from in a wrong way ----

def fabricate(args, seed: int, binary: bool = False, scored: bool = True) -> list[Sample]:
    """Groups of --group samples; their lengths do not depend on the seed.

    Prompts repeat side by side (2, 3) and apart (0, 5). Every second group has several turns, which
    are paid. Rewards are in (0, 1], or None in places. binary: 0 or 1. scored=False: all None.
    """
    rng, lengths, samples, prompts = random.Random(seed), random.Random(0), [], []
    for p in range(7 if args.group > 1 else 14):
        prompts.append([rng.randrange(VOCAB) for _ in range(lengths.randint(1, PROMPT))])
        if p in (3, 5):
            prompts[p] = prompts[{3: 2, 5: 0}[p]]
        for g in range(args.group):
            length = min(LONGEST, 1 + int(lengths.expovariate(1 / 5))) if p or g else LONGEST
            sampled = np.ones(length, bool)
            if p % 2:
                sampled[1:-1] = [lengths.random() < 0.5 for _ in sampled[1:-1]]
            ids = np.array([rng.randrange(VOCAB) for _ in sampled], np.int32)
            logprobs = np.array([rng.gauss(-4.2, 0.3) for _ in sampled], np.float32)
            right = (g == 0) == ((p + seed) % 2 == 0)  # the first alone, or all the others
            reward = float(right) if binary else round(rng.random(), 6)
            if p == 1:  # all are equal, up to rounding
                reward = 1.0 if binary else 0.3 if g else 0.1 + 0.2
            if not scored or (p == 3 and g == args.group - 1) or (p == 4 and g > 0):
                reward = None
            parts = defaultdict(lambda reward=reward: reward)  # each of --reward
            rng.random()
            samples.append(Sample(
                data.Prompt(p, data.Row(p, "", prompts[p], None, {}, "")),
                ids, logprobs * sampled, length == LONGEST, sampled, "", reward, parts))
    return samples


# ---- the trials ----

@dataclass
class Trial:
    """A way to call `learn`."""
    args: object
    steps: list[list[Sample]]  # of each call
    ranks: int = 1
    alone: range | None = None  # rows with a gradient, none of them packed
    whitens: bool = True  # else no losses.whiten, batch_std and metrics
    resumes: bool = False  # from the checkpoint within the trial of two steps
    skips: bool = True  # else each completion in the loss is computed, also with advantage 0
    learn: object = None  # in the place of the file's
    measured: bool = True  # else its metrics are of something else
    binary: bool | None = None  # of every rollout (uphill.py), whether rewards are 0 and 1


def shrunk(args):
    """The settings of a small model. With one update per rollout each ratio is 1, so there are two:
    else a loss that is wrong in the ratio would be proved."""
    sizes = dict(group=min(args.group, 8), minibatches=min(args.minibatches, 3),
                 epochs=2 if args.minibatches == 1 else min(args.epochs, 2), max_tokens=LONGEST + 1,
                 dtype="float64", shard_size=0, offload=(), cpu_offload=False, max_grad_norm=0.0)
    print("tried: one call of `learn`, with several updates, so that ratios are not 1. Not tried: "
          "`train`, the loop around it. Changed for it, the rest is yours:", sizes)
    return budget(replace(args, **sizes), 1 << 20)


def budget(args, tokens: int):
    """With this token budget of an update's passes, and twice that of others."""
    return replace(args, **{name: tokens * (1 if "update" in name else 2)
                            for name in plan.budgets(args)})


def trials(args, binary: bool) -> dict[str, Trial]:
    """Every trial by its name. binary: rewards are 0 or 1."""
    rows, later = fabricate(args, 0, binary), fabricate(args, 1, binary)
    nothing = fabricate(args, 2, scored=False)
    first, rest = rows[:args.group], slice(args.group, None)
    others = first + later[rest]
    if args.needs_reward:
        others += nothing
    one = replace(args, minibatches=1, epochs=args.minibatches * args.epochs)
    large = replace(one, lr=LARGE, minibatches=args.minibatches, epochs=3)
    if args.needs_critic:
        large = replace(large, critic_lr=LARGE)
    single = replace(args, minibatches=1, epochs=1)
    clipped = replace(single, max_grad_norm=MAX_NORM)
    plain = dict(learn=written.learn, measured=False)
    of_group = dict(alone=range(args.group), whitens=False)
    return {
        "base": Trial(args, [rows]),
        "2 ranks": Trial(args, [rows], ranks=2),
        "3 ranks": Trial(args, [rows], ranks=3),
        "small budgets": Trial(budget(args, PROMPT + LONGEST), [rows]),
        "one minibatch": Trial(one, [rows]),
        "another order": Trial(one, [rows[rest][::-1] + first]),
        "one by one": Trial(args, [rows], alone=range(len(rows))),
        "group 0": Trial(one, [rows], **of_group),
        "others altered": Trial(one, [others], **of_group),
        "two steps": Trial(args, [rows, later]),
        "resumed": Trial(args, [later], ranks=3, resumes=True),
        "nothing skipped": Trial(args, [rows], skips=False),
        "then nothing scored": Trial(args, [rows, nothing], measured=False),
        "one update": Trial(single, [rows]), "large updates": Trial(large, [rows]),
        "clipped": Trial(clipped, [rows]),
        f"{PAPERS}, one update": Trial(single, [rows], **plain),
        f"{PAPERS}, large updates": Trial(large, [rows], **plain),
        f"{PAPERS}, clipped": Trial(clipped, [rows], **plain),
        ROLLOUTS: Trial(args, [], binary=binary)}


# ---- one trial, in processes that end with it ----

def build(args, world, folder: str) -> dict:
    """All models. Their weights get noise: a zero would hide gradients."""
    kinds, made = model.kinds(args, config_of(folder)), {}
    made["policy"] = kinds.policy(float64.build(kinds.logprob_model, folder, world, args), world,
                                  args)
    if args.needs_critic:
        made["critic"] = kinds.critic(float64.build(kinds.value_model, folder, world, args), world,
                                      args)

    def reference():
        plain = model.kinds(args, config_of(folder), trained=False)
        return plain.policy(float64.build(plain.logprob_model, folder, world, args, trained=False),
                            world, args)

    if args.needs_reference:
        made["reference"] = made["policy"].reference(reference)
    generator = torch.Generator().manual_seed(0)
    for module in dict.fromkeys(one.module for one in made.values()):  # they may share one
        for p in module.parameters():
            noise = 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            noise = distribute_tensor(noise, p.device_mesh, p.placements, src_data_rank=None)
            p.data.add_(noise)
    return made


def flat(tensors) -> torch.Tensor:
    """All of them, whole and one after another: (n,). A collective."""
    return torch.cat([model.whole(x.detach()).flatten().clone() for x in tensors])


def plain_hidden(self, inputs, source):
    """model.Model.hidden of one sequence, by transformers: (n, H)."""
    out = self.lm.base_model(input_ids=inputs["input_ids"], use_cache=False)
    return out.last_hidden_state[0, source]


def set_conditions(trial: Trial, made: dict) -> None:
    """Changes this process for the trial."""
    def micro_batches(self, world, rows, budget, phase):
        if phase.startswith("update"):  # else a forward pass, which has no gradient
            rows = [row for row in rows if row in trial.alone]
        return [MicroBatch(self, part, world.device) for part in ([[row] for row in rows] or [[]])]

    summed = Batch.sum_tokens

    def sum_that_is_never_0(self, x):
        return summed(self, x) + TINY

    if trial.alone is not None:
        Batch.micro_batches = micro_batches
        model.Model.hidden = plain_hidden
        for one in made.values():
            one.module.lm.set_attn_implementation("sdpa")
    if not trial.whitens:
        losses.whiten, losses.batch_std = as_it_is, of_one
    if not trial.skips:
        Batch.sum_tokens = sum_that_is_never_0


def as_it_is(values, among):
    return torch.where(among, values.double(), 0)


def of_one(rewards, scored):
    return 1.0


def excess(args, made: dict) -> list[int]:
    """From here on, how many tokens above its budget each micro-batch with a gradient has."""
    over = [0]
    for name, one in made.items():
        limit = args.critic_update_tokens if name == "critic" else args.update_tokens

        def run(micro, *more, run=one.run, limit=limit):
            if torch.is_grad_enabled():
                over.append(micro.size - limit)
            return run(micro, *more)
        one.run = run
    return over


def attempt(trial: Trial, file, world, folder: str) -> dict:
    """`learn` of each step → the last one's gradients, weights, metrics: (n,)."""
    args, checkpoints, gradients = trial.args, Path(folder, "checkpoints"), []
    made = build(args, world, folder)
    set_conditions(trial, made)
    learner, options = made["policy"], {"lr": GIVEN * args.lr}
    if args.needs_critic:
        learner = made["policy"], made["critic"]
        options |= {"critic_lr": GIVEN * args.critic_lr, "kl_coef": GIVEN * args.kl_reward_coef}
    if args.needs_reference:
        options["reference"] = made.pop("reference")
    if trial.resumes:
        checkpoint.load(checkpoint.Saved(checkpoints / "step_1", {}), world, made)
    register_optimizer_step_pre_hook(lambda optimizer, *_: gradients.append(flat(
        p.grad for p in optimizer.param_groups[0]["params"])))
    over = excess(args, made)
    for number, samples in enumerate(trial.steps, 1):
        before, gradients[:] = gradients[:], []
        metrics = (trial.learn or file.learn)(args, world, learner, samples, **options)
        if not any(gradient.any() for gradient in gradients):  # a step with nothing to learn
            gradients[:] = before
        if number < len(trial.steps):
            checkpoint.save(checkpoints, world, made, {"step": number}, keep=1)
    found = {f"gradient {k}": gradient for k, gradient in enumerate(gradients, 1)}
    for name, one in made.items():
        one.module.reshard()  # after a forward without a backward, the root is whole
        found[f"{name}'s weights"] = flat(one.parameters.values())
    found["tokens of an update above its budget"] = torch.tensor([max(over)]).double()
    if trial.whitens and trial.skips and trial.measured:  # some are means over what is computed
        found["metrics"] = torch.tensor([*metrics.values()], dtype=torch.float64)
    return found


def rank(number: int, port: int, trial: Trial, file, folder: str) -> None:
    """One rank, in a process of its own. Rank 0 writes the outcome."""
    os.environ |= {name: str(value) for name, value in dict(
        RANK=number, LOCAL_RANK=number, WORLD_SIZE=trial.ranks, LOCAL_WORLD_SIZE=trial.ranks,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="prove",
        TORCHELASTIC_USE_AGENT_STORE=True).items()}
    world = dist.join(timeout=300)  # a busy machine is no failure
    if trial.binary is None:
        outcome = attempt(trial, file, world, folder)
    else:
        outcome, stated = uphill.outcomes(trial.args, file, world, trial.binary)
        outcome[STATED] = stated
    if number == 0:
        torch.save(outcome, f"{folder}/outcome")
    world.end()  # all together


def run(name: str, trial: Trial, file, folder: str) -> dict:
    """What comes of a trial, on forks of this process. Nothing: a rank failed."""
    print(f"  {name}", flush=True)
    # As under torchrun, the ranks meet at their parent's store: nobody else can take its port.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        start_processes(rank, (store.port, trial, file, folder), trial.ranks, start_method="fork")
    except ProcessException as error:
        print(f"  {name} failed: {error}", flush=True)
        return {}
    return torch.load(f"{folder}/outcome")


# ---- the table ----

def learns(outcome: dict) -> bool:
    """Whether a gradient is not 0, or its direction is judged."""
    return any(what.startswith(("gradient", "rise")) and x.any() for what, x in outcome.items())


def judge(pairs, outcomes: dict) -> tuple[float, str]:
    """The largest ‖a - b‖ / ‖a‖, and of what. inf: a trial failed, or there is no gradient."""
    found = []
    for first, second in pairs:
        one, other = outcomes[first], outcomes[second]
        if not (one and other):
            return math.inf, f"'{second if one else first}' failed, and its error stands above"
        if not (learns(one) and learns(other)):
            return math.inf, f"no gradient in {first} or in {second}"
        for what, a in one.items():
            if what == "metrics" and what not in other:
                continue
            figure = float((a - other.get(what, math.nan)).norm() / (a.norm() or 1.0))
            where = f"the {what} in the trial '{second}'"
            found.append((figure if math.isfinite(figure) else math.inf, where))
    return max(found)


def without(trial: str, promises: dict) -> dict:
    """The promises that are not of this trial."""
    return {text: one for text, one in promises.items() if one[0][0][1] != trial}


def prove(file, args) -> bool:
    """Prints for each promise whether `learn` keeps it → all hold."""
    args, broken, promises = shrunk(args), False, PROMISES
    if not args.needs_reward:
        promises = without("then nothing scored", promises)
    if why := written.why_not(args):
        print(f"Not tried: formulas, because {why}.")
        promises = without("one update", promises)
    if why := uphill.why_not(args):
        print(f"Not tried: uphill, because of this script: {why}.")
        promises = without(ROLLOUTS, promises)
    elif own := uphill.own_flags(args):
        print(f"What --{', --'.join(own)} state is not known: uphill only means that the expected "
              "reward rises.")
    wanted = {name for pairs, _ in promises.values() for pair in pairs for name in pair}
    with tempfile.TemporaryDirectory() as folder:
        float64.make(folder, VOCAB)
        chosen = trials(args, binary=False)
        outcomes = {"base": run("base", chosen["base"], file, folder)}
        if not outcomes["base"]:
            raise SettingsError("`learn` failed in the first trial: the error stands above.")
        if args.needs_reward and not learns(outcomes["base"]):
            print("no gradient: does your function need other rewards? From here they are 0 or 1.")
            chosen, outcomes = trials(args, binary=True), {}
        outcomes |= {name: run(name, trial, file, folder) for name, trial in chosen.items()
                     if name in wanted - outcomes.keys()}
        outcomes[STATED] = outcomes.get(ROLLOUTS, {}).pop(STATED, {})
    for text, (pairs, mistake) in promises.items():
        figure, what = judge(pairs, outcomes)
        verdict = "holds"
        if figure > LIMIT:
            verdict, broken = f"falls short: {what}. Is there {mistake}?", True
        print(f"{text:<54} {figure:>5.0e}  limit {LIMIT:.0e}  {verdict}")
    if broken:
        print("One mistake often breaks several promises: begin with the first that falls short.")
    return not broken


def load(path: str):
    """A file of grpo.py's form, found here or in the project, as a module. SettingsError: there is
    none, or it has another form."""
    works = "Would work: a copy of grpo.py or ppo.py."
    if not (file := find_file(path)):
        raise SettingsError(f"{path}: there is no such file, here or in {ROOT}. {works}")
    sys.path.append(str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"proved_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if lacks := [name for name in ("Args", "learn") if not hasattr(module, name)]:
        raise SettingsError(f"{path} has no {' and no '.join(lacks)}. {works}")
    return module


def main() -> int:
    """→ exit status."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    path = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1].endswith(".py") else "grpo.py"
    file = load(path)
    args = parse(file.Args, f"{path}: {__doc__}")
    if problems := plan.problems(args, 1):
        sys.exit("error: " + "\n  ".join(problems))
    args.choose_rates(0)  # of a small model
    return int(not prove(file, args))


if __name__ == "__main__":
    command(main)
