"""trial.py: a run that needs too much memory ends before it has done any work."""
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from batch import Batch, MicroBatch, Sample, cut
from data import Prompt, Row
from dist import peak_memory
from errors import SettingsError
from memory import GIB
from plan import Phase, Plan, ceil_div
from settings import Flags


@dataclass
class TrialArgs(Flags):
    """The largest micro-batches."""
    try_worst_case: Literal["auto", "on", "off"] = "auto"
    """Try a worst-case micro-batch of each phase before the first rollout. auto: on GPU."""


def try_worst_case(run):
    """--try_worst_case: the largest micro-batch of each phase."""
    wanted = run.args.try_worst_case
    if run.args.eval_only or wanted == "off" or (
            wanted == "auto" and run.world.device.type != "cuda"):
        return
    peaks = measure_phases(run.inputs.plan, run.world, run.inputs.shape.vocab, run.policy,
                           run.reference, run.critic)
    peaks = ", ".join(f"{name} {peak / GIB:.2f} GiB" for name, peak in peaks.items())
    run.log.say(f"  worst case: the largest micro-batch of each phase fits; peaks {peaks}")


def measure_phases(plan: Plan, world, vocab: int, policy, reference=None,
                   critic=None) -> dict[str, float]:
    """{phase: its peak in bytes, of the rank that needs most}. Changes no weights and no optimizer
    state. A collective."""
    a, peaks = plan.args, {}

    def update(micro):
        found = policy.logprobs(micro, a.temperature, a.entropy_coef != 0,
                                a.formula(reference, micro))
        policy.backward(sum(found).sum())
        if reference:
            reference.module.reshard()  # a formula may leave its head whole

    def logprobs(micro):
        for scored in (reference, policy) if reference else (policy,):
            scored.logprobs(micro, a.temperature)

    def values(micro):
        found = critic.values(micro)
        if found.requires_grad:  # not in a forward pass
            critic.backward(found.sum())

    forwards = {"update": update, "logprobs": logprobs,
                "critic update": values, "critic values": values}
    models = [it for it in (policy, critic) if it]
    moments = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.device)
               for it in models if not it.optimizer.state
               for p in it.parameters.values()]  # held, as in the first optimizer step
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in peaks:  # of several sizes, the largest comes first
            peaks[phase.name] = measure(phase, world, vocab, forwards[phase.name])
            for it in models:
                it.optimizer.zero_grad()
    del moments
    torch.cuda.empty_cache()
    most = world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist()
    return dict(zip(peaks, most, strict=True))


def measure(phase: Phase, world, vocab: int, forward) -> float:
    """The peak of a phase in bytes. Half of the tokens come first: they may fit."""
    for tokens in phase.tokens // 2, phase.tokens:
        peak_memory(world.device)  # starts again
        try:
            with torch.set_grad_enabled("update" in phase.name):
                forward(worst_micro(tokens, phase.longest, phase.keys, vocab, world.device))
        except (MemoryError, RuntimeError) as error:
            if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
                raise
            end(world, phase, tokens)
    return peak_memory(world.device)


def worst_micro(tokens: int, longest: int, keys: int, vocab: int, device) -> MicroBatch:
    """The largest micro-batch of `tokens`: equal rows of at most `longest`, which share a prompt so
    long that attention gathers `keys` keys for each token (see plan.Phase)."""
    rows = ceil_div(tokens, longest)
    n = max(2, tokens // rows)  # tokens of a row
    p = max(1, n - 1 - ceil_div(n, keys))  # of its prompt
    ids = (np.arange(n - p) % vocab).astype(np.int32)
    one = Sample(Prompt(0, Row(0, "", [0] * p, None, {}, "")), ids, reward=0.0)
    batch = Batch([one] * (rows * keys))
    return MicroBatch(batch, cut(batch.sizes, max(tokens, n))[0], device)


def end(world, phase: Phase, failed: int):
    """Ends the run."""
    flag, half = f"--{phase.name.replace(' ', '_')}_tokens", failed // 2
    advice = f"at most {flag} {half}" if half >= phase.longest else "--checkpointing or more ranks"
    raise SettingsError(
        f"{flag} {phase.budget} needs too much memory: a micro-batch with {failed} tokens does not "
        f"fit on rank {world.rank}. Use {advice}.") from None
