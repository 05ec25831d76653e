"""logprobs.py: compares engine, trainer and transformers before the first step.

Each of the three computes the log-probs of the same few completions. If one of them lacks something
(a key of config.json, a weight that was not loaded, a mask), the numbers differ and the run ends
before it learns from a wrong policy. So no list of supported keys is needed.

Read `compare_policies` first. M is the number of sampled tokens in these completions.
"""
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from batch import Batch, MicroBatch, Sample
from data import Prompt, Row
from errors import SettingsError
from rollout import hash_seed
from settings import Flags, Positive

ROWS, LONGEST, TOKENS = 8, 2, 64  # prompts; how many of them are the longest; tokens after each
ROUNDINGS, LEAST, MOST = 2, 0.005, 0.15  # the limit in bfloat16: its roundings, its range in nats
OF_ENGINE = "the engine did not take all weights, or lacks what this config.json asks for"
OF_TRAINER = ("LogprobModel in model.py or attention in batch.py lacks what this model does, or a "
              "row reaches its neighbour")


@dataclass
class GuardArgs(Flags):
    """The comparison before step 1"""
    max_gap: Positive | None = None
    """Largest allowed difference between log-probs of transformers, trainer and engine, in nats per
    token. None: 1e-3; in bfloat16 twice this model's rounding error, 0.005 to 0.15."""


def compare_policies(run):
    """Compares the policies of transformers, trainer and engine, prints how far they are apart, and
    raises a SettingsError if they are not one policy. A reference model of other files is compared
    too. All ranks must call it (a collective).

    A gap is the mean over tokens of the absolute difference of log-probs, in nats: rounding moves
    single tokens much, and their mean little.
    """
    prompts = prompts_of(run)
    samples, engine = sampled(run, prompts)
    plain, noise = transformers_logprobs(run.policy, run, samples)
    trainer = trainer_logprobs(run.policy, run, samples)
    gaps = {"trainer and transformers": trainer - plain}
    if engine is not None:
        gaps["engine and trainer"] = engine - trainer
    if run.inputs.reference:
        theirs, _ = transformers_logprobs(run.reference, run, samples)
        gaps["reference and transformers"] = trainer_logprobs(run.reference, run, samples) - theirs
    means = torch.stack([gap.abs().mean() for gap in (*gaps.values(), noise)])
    *means, rounding = run.world.max(means.nan_to_num(torch.inf)).tolist()
    judge(run, dict(zip(gaps, means, strict=True)), rounding)


def judge(run, gaps: dict[str, float], rounding: float):
    """Raises a SettingsError if a gap is above the limit, and prints the gaps otherwise.

    gaps and rounding are in nats a token, the largest of all ranks. The limit is --max_gap, or
    1e-3. In bfloat16 without --max_gap it is measured: gaps of right programs are about the
    `rounding` (bench/RESULTS.md), so twice that is allowed.
    """
    given = run.args.max_gap
    limit = given or 1e-3
    what = f"--max_gap {limit:g}"
    if run.dtype == torch.bfloat16 and not given:
        limit = min(MOST, max(LEAST, ROUNDINGS * rounding))
        what = f"{limit:.2g}: {ROUNDINGS} roundings of bfloat16, measured (or give --max_gap)"
    for who, gap in gaps.items():
        if gap > limit:
            cause = OF_ENGINE if who.startswith("engine") else OF_TRAINER
            raise SettingsError(f"{who} differ before an update by {gap:.2g} nats a token, more "
                                f"than {what}; likely cause: {cause}")
    found = ", ".join(f"{who} {gap:.1g}" for who, gap in gaps.items())
    run.log.say(f"  compared this {run.policy.module.lm.config.model_type} before its first step, "
                f"in nats a token: {found} (limit {limit:.1g})")


def prompts_of(run) -> list[Prompt]:
    """Returns the prompts to compare: of the first rows of training and evaluation, of the longest
    ones, and one made up that leaves room for TOKENS (or --max_tokens) alone. What depends on the
    length (windows, scaled frequencies) shows in the last one."""
    rows = run.inputs.rows + run.inputs.eval_rows
    longest = sorted(rows, key=lambda row: len(row.prompt_ids))[-LONGEST:]
    rows = rows[:ROWS - len(longest)] + longest
    words = [i for row in rows for i in row.prompt_ids]
    longest = run.inputs.plan.longest - min(TOKENS, run.args.max_tokens)
    rows.append(Row(len(rows), "", [*islice(cycle(words or [0]), longest)], None, {}, ""))
    return [Prompt(i, row) for i, row in enumerate(rows)]


def sampled(run, prompts: list[Prompt]) -> tuple[list[Sample], torch.Tensor | None]:
    """Samples a completion of each prompt with this rank's engine → (samples, the engine's
    log-probs (M,)). Without an engine the completions are words of the last prompt, and there are
    no log-probs: None."""
    room = min(TOKENS, run.args.max_tokens)
    samples = [Sample(p, reward=0.0, room=room,
                      seed=hash_seed(run.args.seed, "compare", p.position)) for p in prompts]
    if not run.engine:
        for s in samples:
            s.append(np.resize(prompts[-1].row.prompt_ids, room), np.zeros(room))
        return samples, None
    with run.engine.generating(run.policy):
        found = run.engine.generate(samples, run.args.temperature)
    for s, new in zip(samples, found, strict=True):
        s.append(**new)
    return samples, torch.from_numpy(np.concatenate([s.logprobs for s in samples])).double()


def trainer_logprobs(policy, run, samples: list[Sample]) -> torch.Tensor:
    """Returns the trainer's log-probs (M,) of the sampled tokens of this rank's samples. Each is a
    micro-batch of its own, in which it stands twice, and the second copy counts: a row that attends
    to its neighbour by mistake shows here. The last sample is the longest that fits, and stands
    once. All ranks must call it (a collective)."""
    found = []
    for sample in samples:
        copies = [sample] if sample is samples[-1] else [sample, sample]
        micro = MicroBatch(Batch(copies), [*range(len(copies))], run.world.device)
        with torch.no_grad():
            logprobs, _ = policy.logprobs(micro, run.args.temperature)
        found.append(logprobs[micro.row_of_token == len(copies) - 1].cpu().double())
    return torch.cat(found)


def transformers_logprobs(policy, run, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probs (M,) of all sampled tokens by transformers' own forward of each row
    alone, and in bfloat16 the change of each, with its sign, (M,), when every number of the
    embeddings moves at random by about a rounding: two right programs may differ by as much. In
    other dtypes this is zeros. All ranks must call it (a collective)."""
    heat, device = run.args.temperature, run.world.device
    plain = torch.cat([plain_logprobs(policy, s, heat, device) for s in samples])
    if run.dtype != torch.bfloat16:
        return plain, torch.zeros_like(plain)
    hook = policy.module.lm.get_input_embeddings().register_forward_hook(off_by_a_rounding)
    moved = torch.cat([plain_logprobs(policy, s, heat, device) for s in samples])
    hook.remove()
    return plain, moved - plain


def off_by_a_rounding(embedding, inputs, x):
    """A forward hook of the embedding: it moves each number at random by less than one unit of
    bfloat16's last place."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device) - 0.5
    return (x.float() * (1 + 2**-7 * noise)).to(x.dtype)


def plain_logprobs(policy, sample: Sample, heat: float, device):
    """Returns the log-probs (n,) of one sample's tokens by transformers' own forward. heat: the
    sampling temperature. All ranks must call it (a collective)."""
    module, micro = policy.module, MicroBatch(Batch([sample]), [0], device)  # a row alone
    register_fsdp_forward_method(module, "hf_logits")
    with torch.no_grad():
        logits = module.hf_logits(policy.inputs(micro), micro.source)
    module.reshard()
    logprobs = (logits.cpu().double() / heat).log_softmax(-1)  # (n, V)
    return logprobs.gather(-1, micro.targets.cpu().unsqueeze(-1)).squeeze(-1)
