"""canary.py: before the first update: does it fit, is the engine the policy?"""
import re
import time

import numpy as np
import torch
import torch.distributed as td
from torch.distributed.fsdp import register_fsdp_forward_method

from data import Prompt, Row
from dist import SettingsError, cut
from preflight.memory import GIB, peak_memory
from preflight.plan import Phase, Plan, ceil_div
from rewards import Score
from trainer.batch import Batch, Completion, Micro, Sample
from trainer.teacher import beside

LAST = 64  # tokens that `compare` looks at


def try_worst_case(run):
    """--canary: the largest micro-batch of each phase."""
    wanted = run.args.run_args.canary
    if wanted == "off" or (wanted == "auto" and run.world.device.type != "cuda"):
        return
    peaks = canary(run.checked.plan, run.world, run.checked.shape.vocab, run.policy, run.reference,
                   run.critic)
    peaks = ", ".join(f"{name} {peak / GIB:.2f} GiB" for name, peak in peaks.items())
    run.log.say(f"  canary: a worst-case micro-batch of each phase fits; peaks {peaks}")


def canary(plan: Plan, world, vocab: int, policy, reference=None, critic=None) -> dict:
    """{phase: its peak in bytes}. Changes no weights and no optimizer state."""
    a, peaks = plan.args, {}

    def update(micro):
        with beside(reference, micro, a.temperature, a.divergence) as formula:
            found = policy.logprobs(
                micro, a.temperature, "grad" if a.entropy_coef else "value", formula)
            policy.backward(sum(found).sum())

    def score(micro):
        if reference:
            reference.logprobs(micro, a.temperature)
        policy.logprobs(micro, a.temperature)

    def values(micro):
        critic.backward(critic.values(micro).sum())  # of a score pass: nothing

    passes = {"update": (update, policy), "score": (score, policy)}
    if critic:
        passes |= dict.fromkeys(["critic update", "critic score"], (values, critic))
    moments = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.device)
               for trained in (policy, critic) if trained and not trained.optimizer.state
               for p in trained.parameters.values()]  # held, as in the first optimizer step
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in peaks:  # of several sizes, the largest comes first
            forward, trained = passes[phase.name]
            peaks[phase.name] = measure(phase, world, vocab, forward)
            trained.optimizer.zero_grad()
    del moments
    torch.cuda.empty_cache()
    return peaks


def measure(phase: Phase, world, vocab: int, forward) -> float:
    """The peak of a phase in bytes. Half of the tokens come first: they may fit."""
    for tokens in phase.tokens // 2, phase.tokens:
        try:
            with peak_memory(world.device) as peak, torch.set_grad_enabled("update" in phase.name):
                forward(worst_micro(tokens, phase.longest, phase.keys, vocab, world.device))
        except (MemoryError, RuntimeError) as error:
            if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
                raise
            end(world, phase, tokens)
    return peak["gb"]


def sample(prompt: list[int], completion: np.ndarray) -> Sample:
    return Sample(Prompt(0, Row(0, "", prompt, None, {}, "")), Completion(
        completion.astype(np.int32), np.zeros(len(completion), np.float32), False), "",
        Score(0.0, {}, None))


def worst_micro(tokens: int, longest: int, keys: int, vocab: int, device) -> Micro:
    """The largest micro-batch of `tokens`: equal rows of at most `longest`, which share a prompt so
    long that attention gathers `keys` keys for each token (see plan.Phase)."""
    rows = ceil_div(tokens, longest)
    n = max(2, tokens // rows)  # tokens of a row
    p = max(1, n - 1 - ceil_div(n, keys))  # of its prompt
    batch = Batch([sample([0] * p, np.arange(n - p) % vocab)] * (rows * keys))
    return Micro(batch, cut(batch.sizes, max(tokens, n))[0], device)


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


def compare(run, samples: list[Sample]):
    """SettingsError if transformers, trainer and engine are not one policy. A collective.

    It compares the mean over the last tokens of one completion of each engine: rounding moves
    single tokens much, and their mean little. The trainer computes the completion twice in one
    packed input, and the second one counts: it may not look at its neighbour.
    """
    world, policy = run.world, run.policy
    mine = world.mine(samples) or samples
    sample = max(mine, key=lambda s: s.completion.tokens)
    twice = Micro(Batch([sample, sample]), [0, 1], world.device)
    with torch.no_grad():
        trainer = policy.logprobs(twice, run.args.temperature)[0][1][twice.sampled[1]]
    trainer = trainer[-LAST:].cpu().double()
    done = sample.completion
    engine = torch.from_numpy(done.logprobs[done.sampled][-LAST:])
    gaps = [(trainer - other).abs().mean()
            for other in (plain_logprobs(run, sample)[-LAST:], engine)]
    gaps = world.max(torch.stack(gaps).nan_to_num(torch.inf)).tolist()
    causes = [
        ("trainer and transformers", "LogprobModel in model.py or attention in packing.py lacks "
         "what this family does to logits or scores"),
        ("engine and trainer", "the engine did not take all weights, has an old prefix cache, or "
         "samples otherwise")]
    for gap, (who, cause) in zip(gaps, causes, strict=True):
        if gap > run.max_gap:
            raise SettingsError(
                f"{who} differ before the first update by {gap:.2g} nats a token, more than "
                f"--max_gap {run.max_gap:g}; likely cause: {cause}")


def plain_logprobs(run, sample: Sample):
    """(n,) of the last sampled tokens, at most LAST, by transformers' own forward. A collective."""
    module = run.policy.module
    micro = Micro(Batch([sample]), [0], run.world.device)  # one row: packed is as it is
    register_fsdp_forward_method(module, "plain_logits")
    with torch.no_grad():
        logits = module.plain_logits(micro.inputs["input_ids"][0], micro.source[-LAST:])
    module.reshard()
    logprobs = (logits.cpu().double() / run.args.temperature).log_softmax(-1)  # (n, V)
    return logprobs.gather(-1, micro.targets[-LAST:].cpu().unsqueeze(-1)).squeeze(-1)
