"""canary.py: measures a worst-case micro-batch of each phase before the first rollout."""
import re
import time

import numpy as np
import torch
import torch.distributed as td

from batch import Batch, Completion, Micro, Sample
from data import Prompt, Row
from log import Peak
from plan import Phase, Plan, SettingsError
from rewards import Score


def canary(plan: Plan, world, vocab: int, policy, reference=None, critic=None) -> dict:
    """{phase: its peak in bytes}. Changes no weights and no optimizer state."""
    a, peaks, entropy = plan.args, {}, "grad" if plan.args.entropy_coef else "value"
    forwards = {
        "update": lambda micro: sum(policy.logprobs(micro, a.temperature, entropy)),
        "score": lambda micro: [model.logprobs(micro, a.temperature)[0]
                                for model in (policy, reference) if model][-1]}
    moments = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.device)
               for trained in (policy, critic) if trained and not trained.optimizer.state
               for p in trained.module.parameters()]  # held, as in the first optimizer step
    for phase in plan.phases(max(plan.batches)):
        trained = critic if phase.name.startswith("critic") else policy
        if phase.name not in peaks:
            forward = forwards.get(phase.name) or critic.values
            peaks[phase.name] = measure(phase, world, vocab, forward, trained)
            trained.optimizer.zero_grad(set_to_none=True)
    del moments
    torch.cuda.empty_cache()
    return peaks


def measure(phase: Phase, world, vocab: int, forward, trained) -> float:
    """The peak of a phase. Half of the tokens come first: they may fit."""
    for tokens in phase.tokens // 2, phase.tokens:
        peak = Peak(world.device)
        try:
            with torch.set_grad_enabled("update" in phase.name):
                out = forward(worst_micro(tokens, phase.longest, vocab, world.device))
                if out.requires_grad:
                    trained.backward(out.sum())
        except (MemoryError, RuntimeError) as error:
            if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
                raise
            end(world, phase, tokens)
        del out
    return peak.read()[0]


def worst_micro(tokens: int, longest: int, vocab: int, device):
    """Equal rows of at most `longest` that fill `tokens`, with a prompt of one token."""
    rows = -(-tokens // longest)
    n = max(2, tokens // rows) - 1
    completion = Completion(np.arange(n, dtype=np.int32) % vocab, np.zeros(n, np.float32), False)
    sample = Sample(Prompt(0, Row(0, "", [0], None, {}, "")), completion, "", Score(0.0, {}, None))
    return Micro(Batch([sample] * rows), list(range(rows)), device)


def end(world, phase: Phase, failed: int):
    if world.size > 1 and td.distributed_c10d._get_default_store().add("canary", 1) > 1:
        time.sleep(1)  # the first rank prints first
        raise SystemExit(2)
    flag, half = f"--{phase.name.replace(' ', '_')}_tokens", failed // 2
    advice = f"at most {flag} {half}" if half >= phase.longest else "--checkpointing or more ranks"
    error = SettingsError(f"{flag} {phase.budget} needs too much memory: a micro-batch with "
                          f"{failed} tokens does not fit on rank {world.rank}. Use {advice}.")
    error.alone = True
    raise error from None
