"""floor.py: the least seconds that a step can take on one known card, by arithmetic: --plan has it.

A matrix product needs 2 FLOPs for each weight and token, and twice that again for its gradients.
Each round of decoding reads all weights, and the keys and values of what it goes on with. Sizes are
the plan's: every sequence is the longest possible. A real run takes longer:
docs/use/memory_and_machines.md has by how much, and whose.
"""
from preflight.plan import ceil_div
from rollout import engine_limits

CARD, FLOPS, BANDWIDTH = "H100 SXM", 989e12, 3.35e12  # dense bfloat16 FLOP/s; bytes/s


def seconds(planned) -> dict[str, float]:
    """{phase: seconds} of a step of a Memory's plan."""
    plan, args, shape, c = planned.plan, planned.args, planned.shape, 2
    idle = shape.mixture.idle * shape.layers if shape.mixture else 0
    width = shape.heads * shape.head_dim
    prompts, longest = max(plan.batches), args.max_tokens
    rows, asked = prompts * args.group, args.data_args.max_prompt_tokens
    tokens = prompts * asked + rows * longest  # each prompt once
    pairs = prompts * asked**2 / 2 + rows * longest * (asked + longest / 2)  # of attention
    forward = (2 * (shape.params - idle) * tokens + 4 * shape.layers * width * pairs) / plan.ranks
    again = 4 if args.model_args.checkpointing else 3  # forwards of one update
    scores = args.needs_old_logprobs + args.needs_reference
    models = 2 if args.critic_args else 1
    found = {"score": (scores + models - 1) * forward / FLOPS,
             "update": models * again * args.epochs * forward / FLOPS}
    if args.needs_engine:
        tp = args.engine_args.tp
        together = min(plan.requests, engine_limits(args.engine_args, planned.card)[1],
                       planned.holds or 1)
        reads = ceil_div(plan.requests, together) * longest * c * shape.params / tp
        keys = 2 * c * shape.layers * shape.kv_heads * shape.head_dim
        reads += rows * tp / plan.ranks * keys / tp * longest * (asked + longest / 2)
        found = {"rollout": reads / BANDWIDTH, **found}
    return found


def text(planned) -> str:
    """A line of the plan."""
    found = {phase: spent for phase, spent in seconds(planned).items() if spent}
    parts = " + ".join(f"{phase} {spent:.2g}" for phase, spent in found.items())
    total, steps = sum(found.values()), planned.args.steps
    return (f"  floor      {total:.2g} s a step on {planned.plan.ranks:,} x {CARD} ({parts}), "
            f"{total * steps / 3600:.2g} h for {steps:,} steps; published runs took 3 to 7 times "
            f"as long")
