"""Exercises 9 to 13: one run has a mistake, and you see its metrics only.

    python exercises/diagnose.py 9     # its curves, beside those of the same run without it

curves/9.json and so on are metrics of real runs of the tiny model, one value a step (sick.py makes
them). Each cause below has the metric that shows it, and checks: each returns a sentence where the
run contradicts the cause, else None.
"""
import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUMBERS = range(9, 14)
GAP, ENTROPY, REWARD = "rollout/logprob_gap_mean", "policy/entropy", "reward/mean"
LENGTH = "rollout/length_mean"
ROUNDING = 1e-5  # nats; the tiny model computes in float32


def end(values: list[float]) -> float:
    """The mean of the last 5 steps."""
    return sum(values[-5:]) / 5


# ---- what a run can say against a cause: (the run, the healthy run) → a sentence or None


def differs(run, healthy):
    for name, values in run.items():
        ours, theirs = end(values), end(healthy[name])
        if not 0.5 * theirs <= ours <= 2 * theirs:
            return f"{name} ends at {ours:.2g}, in the healthy run at {theirs:.2g}."


def gap_in_step_1(run, healthy):
    if run[GAP][0] > ROUNDING:
        return (f"Before the first update no weight is old, but {GAP} is {run[GAP][0]:.2g} in step "
                f"1 already.")


def no_gap_in_step_1(run, healthy):
    if run[GAP][0] <= ROUNDING:
        return (f"The engine would sample from another distribution from the first step on, but "
                f"{GAP} is {run[GAP][0]:.2g} in step 1.")


def no_gap_later(run, healthy):
    if max(run[GAP]) <= ROUNDING:
        return f"Engine and trainer would differ, but {GAP} is {max(run[GAP]):.2g} at most."


def any_gap(run, healthy):
    if max(run[GAP]) > ROUNDING:
        return f"Engine and trainer would still agree, but {GAP} reaches {max(run[GAP]):.2g}."


def reward_grows(run, healthy):
    if end(run[REWARD]) > run[REWARD][0] + 0.1:
        return (f"The samples would stay as they are, but {REWARD} goes from {run[REWARD][0]:.2g} "
                f"to {end(run[REWARD]):.2g}.")


def no_kl(run, healthy):
    if "loss/kl" not in run:
        return "This run has no KL term: there is no loss/kl."


def kl_not_negative(run, healthy):
    if min(run["loss/kl"]) >= 0:
        return "loss/kl is never below 0."


def kl_negative(run, healthy):
    if min(run.get("loss/kl", [0])) < 0:
        return (f"loss/kl is {end(run['loss/kl']):.2g} at the end. k3 is never below 0, whatever "
                f"the policy is.")


def reward_not_lost(run, healthy):
    if end(run[REWARD]) > 0.01:
        return (f"The policy would be destroyed, but {REWARD} ends at {end(run[REWARD]):.2g}.")


def entropy_not_low(run, healthy):
    if end(run[ENTROPY]) > 0.1 * run[ENTROPY][0]:
        return (f"The term would make the entropy small, but {ENTROPY} goes from "
                f"{run[ENTROPY][0]:.2g} to {end(run[ENTROPY]):.2g} only.")


def reward_not_high(run, healthy):
    if end(run[REWARD]) < 0.9:
        return f"{REWARD} ends at {end(run[REWARD]):.2g}: this reward was not had."


def answer_right(run, healthy):
    if "reward/exact" not in run:
        return "The reward is the exact answer in this task."
    if end(run["reward/exact"]) > 0.1:
        return (f"reward/exact ends at {end(run['reward/exact']):.2g}: the answers are right, and "
                f"not only the reward is high.")


# Of each cause: the metrics that show it, and the checks.
CAUSES = {
    "nothing is wrong": (REWARD, [differs]),
    "the engine samples at a lower temperature": (GAP, [no_gap_in_step_1, no_gap_later]),
    "the engine never gets new weights": (GAP, [gap_in_step_1, no_gap_later, reward_grows]),
    "the engine's prefix cache is of old weights": (GAP, [gap_in_step_1, no_gap_later]),
    "the KL term has the wrong sign": ("loss/kl", [no_kl, kl_not_negative]),
    "the learning rate is too high": (
        f"{ENTROPY} {LENGTH} grad/norm", [any_gap, kl_negative, reward_not_lost]),
    "the entropy term has the wrong sign": (ENTROPY, [entropy_not_low, reward_grows, kl_negative]),
    "the reward is high without a right answer": (
        "reward/exact", [any_gap, reward_not_high, answer_right])}


def curves(number: int) -> tuple[dict, dict]:
    """The metrics of the run and of the healthy run: {name: one value a step}."""
    found = json.loads((HERE / "curves" / f"{number}.json").read_text())
    return found["run"], found["healthy"]


def what_is_wrong(number: int, cause: str, metric: str) -> str | None:
    """None if the answer is right, else a sentence."""
    if cause not in CAUSES:
        return f"There is no cause {cause!r}. There are: {'; '.join(CAUSES)}."
    run, healthy = curves(number)
    shown, checks = CAUSES[cause]
    for check in checks:
        sentence = check(run, healthy)
        if sentence:
            return f"If {cause}: {sentence}"
    if metric not in run:
        return f"There is no metric {metric!r}. There are: {', '.join(run)}."
    if metric not in shown.split():
        return f"The cause is right, but {metric} is not what tells it from the other causes."
    return None


def main(number: int):
    run, healthy = curves(number)
    steps = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40)
    print(f"{'step':35}", *(f"{step:8}" for step in steps))
    for name, values in run.items():
        for which, line in ("this run", values), ("healthy", healthy[name]):
            print(f"{name:25} {which:9}", *(f"{line[step - 1]:8.2g}" for step in steps))
    print("\nPossible causes:", *CAUSES, sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, choices=[*NUMBERS], help="of an exercise")
    main(parser.parse_args().number)
