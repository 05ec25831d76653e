"""Completions that go on in the next step (README.md)."""
from parts.carry.carry import CarryArgs as Flags  # noqa: F401
from parts.carry.carry import CarryingEngine


def sizes(plan):
    """Batches go on over the end of an epoch, and more prompts are in flight."""
    carry = plan.args.parts.carry.carry
    if carry:
        plan.batches = [plan.args.batch]
        plan.in_flight = plan.args.batch * (1 + carry)


def engine(kind, run):
    return CarryingEngine if run.args.parts.carry.carry else None
