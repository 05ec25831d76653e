"""same_policy.py: before the first update: are engine, trainer and transformers one policy?"""
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from errors import SettingsError
from pictures import seeing
from trainer.batch import Batch, Completion, Micro, Sample

LAST = 64  # tokens of a completion that are compared


def compare_policies(run, samples: list[Sample]) -> bool:
    """SettingsError if transformers, trainer and engine are not one policy. False: with
    --carry a step may have no new token of an engine. A collective.

    It compares the mean over the last tokens of one completion of each engine: rounding moves
    single tokens much, and their mean little. The trainer computes the completion twice in one
    packed input, and the second one counts: it may not look at its neighbour.
    """
    world, policy = run.world, run.policy
    mine = world.mine(samples) or samples
    sample = max(mine, key=lambda s: int(sampled_in(world.step, s.completion).sum()))
    twice = Micro(Batch([sample, sample]), [0, 1], world.device)
    with torch.no_grad():
        trainer = policy.logprobs(twice, run.args.temperature)[0][twice.row == 1]
    trainer = trainer[-LAST:].cpu().double()
    done, now = sample.completion, sampled_in(world.step, sample.completion)[-LAST:]
    engine = torch.from_numpy(done.logprobs[done.sampled][-LAST:])
    gaps = [(trainer - plain_logprobs(run, sample)[-LAST:]).abs().mean(),
            ((trainer - engine).abs() * now).sum() / now.sum().clamp(min=1)]
    gaps = world.max(torch.stack(gaps).nan_to_num(torch.inf)).tolist()
    causes = [
        ("trainer and transformers", "LogprobModel in model.py or attention in packing.py lacks "
         "what this family does to logits or scores"),
        ("engine and trainer", "the engine did not take all weights, has an old prefix cache, or "
         "samples otherwise")]
    for gap, (who, cause) in zip(gaps, causes, strict=True):
        if gap > run.max_gap:
            raise SettingsError(
                f"{who} differ before an update by {gap:.2g} nats a token, more than "
                f"--max_gap {run.max_gap:g}; likely cause: {cause}")
    return not world.any_rank(not now.any())


def sampled_in(step: int, c: Completion) -> torch.Tensor:
    """(n,) bool: the sampled tokens of this step. With --carry others are of older policies."""
    if c.steps is None:
        return torch.ones(c.tokens, dtype=torch.bool)
    return torch.from_numpy(c.steps == step)


def plain_logprobs(run, sample: Sample):
    """(n,) of the last sampled tokens, at most LAST, by transformers' own forward. A collective."""
    module, lm = run.policy.module, run.policy.module.lm
    micro = Micro(Batch([sample]), [0], run.world.device)  # one row: packed is as it is
    seen = {"input_ids": micro.inputs["input_ids"]}
    if seeing.sees(lm.config):
        seen |= seeing.pictures_of(lm, micro)
    register_fsdp_forward_method(module, "plain_logits")
    with torch.no_grad():
        logits = module.plain_logits(micro.source[-LAST:], **seen)
    module.reshard()
    logprobs = (logits.cpu().double() / run.args.temperature).log_softmax(-1)  # (n, V)
    return logprobs.gather(-1, micro.targets[-LAST:].cpu().unsqueeze(-1)).squeeze(-1)
