"""Completions that go on in the next step (README.md)."""
from parts.carry.carry import Carry, CarryingEngine
from parts.carry.carry import CarryArgs as Flags  # noqa: F401

METRICS = {
    "carry/in_flight": "completions in flight after the step",
    "carry/old_tokens_frac": "share of the sampled tokens that older policies sampled",
    "carry/age_mean": "mean steps since a completion began, also of completions that "
                      "--dynamic_sampling refused",
    "carry/age_max": "the most such steps",
    "carry/token_age_mean": "mean steps since a token was sampled",
    "carry/token_age_max": "the most such steps",
    "rollout/decode_steps": "steps of the engine",
    "rollout/tokens": "with --carry those of the completions that the step took, also those of "
                      "older steps",
    "rollout/tokens_per_s": "with --carry of the tokens that the engine generated in this step; "
                            "null if it generated none",
    "policy/entropy": "with --carry of the policies that sampled the tokens"}


def sizes(plan):
    """Batches go on over the end of an epoch, and more prompts are in flight."""
    carry = plan.args.carry
    if carry:
        plan.batches = [plan.args.batch]
        plan.in_flight = plan.args.batch * (1 + carry)


def engine(kind, args, config, dtype):
    return CarryingEngine if args.carry else None


def begin(run):
    if run.args.carry and run.engine:
        run.engine.carry = run.stateful["carry"] = Carry(run.args, run.stream)
