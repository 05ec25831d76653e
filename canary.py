"""canary.py: before the first update: can rows be packed, does it fit, is the engine the policy?"""
import re
import time

import numpy as np
import torch
import torch.distributed as td
from torch.distributed.fsdp import register_fsdp_forward_method

from batch import Batch, Completion, Micro, Sample
from data import Prompt, Row
from dist import cut
from errors import SettingsError
from log import peak_from_now
from packing import KEYS
from plan import Phase, Plan
from rewards import Score

LAST = 64  # tokens that `compare` looks at


def choose_packing(models: list, world, config, longest: int, bfloat16: bool) -> str:
    """Pack from now on, if that does not change the log-probs of short rows → what it is.

    It does with other positions, sinks, recurrence. A window does not show in short rows.
    """
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if window and window < longest:
        return f"padded rows: attention has a window of {window:,} tokens, fewer than {longest:,}"
    if models[0].module.lm.attention != "sdpa":
        return "padded rows: the scores of its attention are capped"
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 4, 12))
    samples = [sample(prompt[:8 + g].tolist(), completion[:4 * i + 1])
               for g, (prompt, *group) in enumerate(ids) for i, completion in enumerate(group)]
    rows, packed = (logprobs(models, samples, packs, world) for packs in (False, True))
    gap = float((rows - packed).abs().mean())
    # Measured: 1e-6 in float32. 0.06 in bfloat16, on random tokens.
    if not gap < (0.25 if bfloat16 else 1e-4):
        logprobs(models, samples, False, world)
        return f"padded rows: packed ones differ by {gap:.2g} nats in this model"
    return f"each prompt once: packed rows differ by {gap:.0e} nats from padded ones"


def logprobs(models, samples, packs: bool, world):
    for model in models:
        model.pack(packs)
    return Batch(samples, packs).score(
        world, 1024, "packing", lambda micro: models[0].logprobs(micro, 1.0)[0])


def canary(plan: Plan, world, vocab: int, policy, reference=None, critic=None) -> dict:
    """{phase: its peak in bytes}. Changes no weights and no optimizer state."""
    a, peaks, entropy = plan.args, {}, "grad" if plan.args.entropy_coef else "value"
    forwards = {
        "update": lambda micro: sum(policy.logprobs(micro, a.temperature, entropy)),
        "score": lambda micro: [model.logprobs(micro, a.temperature)[0]
                                for model in (policy, reference) if model][-1]}
    moments = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.device)
               for trained in (policy, critic) if trained and not trained.optimizer.state
               for p in trained.parameters.values()]  # held, as in the first optimizer step
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in peaks:
            trained = critic if phase.name.startswith("critic") else policy
            forward = forwards.get(phase.name) or critic.values
            peaks[phase.name] = measure(phase, world, vocab, forward, trained)
            trained.optimizer.zero_grad()
    del moments
    torch.cuda.empty_cache()
    return peaks


def measure(phase: Phase, world, vocab: int, forward, trained) -> float:
    """The peak of a phase. Half of the tokens come first: they may fit."""
    for tokens in phase.tokens // 2, phase.tokens:
        peak = peak_from_now(world.device)
        try:
            with torch.set_grad_enabled("update" in phase.name):
                out = forward(worst_micro(
                    tokens, phase.longest, vocab, world.device, trained.packs))
                if out.requires_grad:
                    trained.backward(out.sum())
        except (MemoryError, RuntimeError) as error:
            if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
                raise
            end(world, phase, tokens)
        del out
    return peak.read()["gb"]


def sample(prompt: list[int], completion: np.ndarray) -> Sample:
    return Sample(Prompt(0, Row(0, "", prompt, None, {}, "")), Completion(
        completion.astype(np.int32), np.zeros(len(completion), np.float32), False), "",
        Score(0.0, {}, None))


def worst_micro(tokens: int, longest: int, vocab: int, device, packs: bool):
    """The largest micro-batch of `tokens`: equal rows of at most `longest`.

    Padded, prompts have one token. Packed, all rows share a prompt so long that attention gathers
    as many keys as it may.
    """
    rows = -(-tokens // longest)
    n = max(2, tokens // rows)
    p = n - 1 - -(-n // KEYS) if packs and n > KEYS else 1
    rows *= KEYS if packs else 1
    batch = Batch([sample([0] * p, np.arange(n - p) % vocab)] * rows, packs)
    first, *_ = cut(batch.sizes, max(tokens, n), batch.packed)
    return Micro(batch, first, device)


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

    It compares the mean over the last tokens of one completion of each rank's engine: rounding
    moves it little, and single tokens much.
    """
    world, policy, temperature = run.world, run.policy, run.args.temperature
    sample = max(world.mine(samples) or samples, key=lambda s: s.completion.tokens)
    micro, done = Micro(Batch([sample]), [0], world.device), sample.completion
    register_fsdp_forward_method(policy.module, "logits")
    with torch.no_grad():
        trainer = policy.logprobs(micro, temperature)[0][micro.sampled][-LAST:].cpu().double()
        logits = policy.module.logits(micro.inputs["input_ids"], micro.source[-LAST:])
    logits = logits[0].cpu().double()
    policy.module.reshard()
    plain = (logits / temperature).log_softmax(-1)[range(len(logits)), micro.targets[-LAST:].cpu()]
    engine = torch.from_numpy(done.logprobs[done.sampled][-LAST:])
    gaps = torch.stack([(trainer - other).abs().mean() for other in (plain, engine)])
    for gap, who, cause in zip(
            world.max(gaps.nan_to_num(torch.inf)).tolist(),
            ("trainer and transformers", "engine and trainer"),
            ("LogprobModel in model.py misses what this family does to its logits",
             "the engine did not take all weights, kept a prefix cache of old ones, or samples "
             "otherwise"), strict=True):
        if gap > run.max_gap:
            raise SettingsError(
                f"{who} differ before the first update by {gap:.2g} nats a token, more than "
                f"--max_gap {run.max_gap:g}; likely cause: {cause}")
