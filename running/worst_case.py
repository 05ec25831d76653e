"""worst_case.py: before the first update, the largest micro-batch of each phase is tried."""
import re

import numpy as np
import torch

from chats.teacher import beside
from data import Prompt, Row
from dist import cut, peak_memory
from errors import SettingsError
from pictures.seeing import in_line
from preflight.memory import GIB
from preflight.plan import Phase, Plan, ceil_div
from rewards import Score
from trainer.batch import Batch, Completion, Micro, Sample


def try_worst_case(run):
    """--try_worst_case: the largest micro-batch of each phase."""
    wanted = run.args.run_args.try_worst_case
    if wanted == "off" or (wanted == "auto" and run.world.device.type != "cuda"):
        return
    peaks = measure_phases(run.inputs.plan, run.world, run.inputs.shape.vocab, run.policy,
                           run.reference, run.critic, run.inputs.rows)
    peaks = ", ".join(f"{name} {peak / GIB:.2f} GiB" for name, peak in peaks.items())
    run.log.say(f"  worst case: the largest micro-batch of each phase fits; peaks {peaks}")


def measure_phases(plan: Plan, world, vocab: int, policy, reference=None, critic=None,
                   rows: list[Row] = ()) -> dict[str, float]:
    """{phase: its peak in bytes, of the rank that needs most}. Changes no weights and no optimizer
    state. rows: of the data; the one with the most tokens of pictures is looked at. A collective.
    """
    a, peaks = plan.args, {}
    seen = max((row for row in rows if row.pictures), default=None, key=lambda row: len(
        row.pictures.places) / len(row.prompt_ids))

    def update(micro):
        teacher = beside(reference, micro, a.temperature, a.divergence)
        entropy = "grad" if a.entropy_coef else "value"
        found = policy.logprobs(micro, a.temperature, entropy, teacher)
        policy.backward(sum(found).sum())
        if teacher:
            reference.module.reshard()

    def score(micro):
        for scored in (reference, policy) if reference else (policy,):
            scored.logprobs(micro, a.temperature)

    def values(micro):
        critic.backward(critic.values(micro).sum())  # of a score pass: nothing

    forwards = {"update": update, "score": score, "critic update": values, "critic score": values}
    models = [it for it in (policy, critic) if it]
    moments = [torch.empty(2 * p.to_local().nbytes, dtype=torch.uint8, device=p.device)
               for it in models if not it.optimizer.state
               for p in it.parameters.values()]  # held, as in the first optimizer step
    for phase in plan.phases(max(plan.batches)):
        if phase.name not in peaks:  # of several sizes, the largest comes first
            peaks[phase.name] = measure(phase, world, vocab, forwards[phase.name], seen)
            for it in models:
                it.optimizer.zero_grad()
    del moments
    torch.cuda.empty_cache()
    most = world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist()
    return dict(zip(peaks, most, strict=True))


def measure(phase: Phase, world, vocab: int, forward, seen: Row | None = None) -> float:
    """The peak of a phase in bytes. Half of the tokens come first: they may fit."""
    for tokens in phase.tokens // 2, phase.tokens:
        peak_memory(world.device)  # starts again
        try:
            with torch.set_grad_enabled("update" in phase.name):
                forward(worst_micro(
                    tokens, phase.longest, phase.keys, vocab, world.device, seen))
        except (MemoryError, RuntimeError) as error:
            if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
                raise
            end(world, phase, tokens)
    return peak_memory(world.device)


def sample(prompt: list[int], completion: np.ndarray, pictures=None) -> Sample:
    """Of these ids, with log-probs of 0."""
    row = Row(0, "", prompt, None, {}, "", pictures=pictures)
    return Sample(Prompt(0, row), Completion(
        completion.astype(np.int32), np.zeros(len(completion), np.float32), False), "",
        Score(0.0, {}, None))


def worst_micro(tokens: int, longest: int, keys: int, vocab: int, device,
                seen: Row | None = None) -> Micro:
    """The largest micro-batch of `tokens`: equal rows of at most `longest`, which share a prompt so
    long that attention gathers `keys` keys for each token (see plan.Phase). The tower computes the
    pictures of `seen` as often as `tokens` have room for that row."""
    rows = ceil_div(tokens, longest)
    n = max(2, tokens // rows)  # tokens of a row
    p = max(1, n - 1 - ceil_div(n, keys))  # of its prompt
    pictures = None
    if seen:
        times = max(1, tokens // len(seen.prompt_ids))
        places = [i % p for i in range(times * len(seen.pictures.places))]
        pictures = seen.pictures._replace(
            sources=seen.pictures.sources * times, places=places, positions=in_line(p).tolist())
    batch = Batch([sample([0] * p, np.arange(n - p) % vocab, pictures)] * (rows * keys))
    return Micro(batch, cut(batch.sizes, max(tokens, n))[0], device)


def end(world, phase: Phase, failed: int):
    """Ends the run."""
    flag, half = f"--{phase.name.replace(' ', '_')}_tokens", failed // 2
    advice = f"at most {flag} {half}" if half >= phase.longest else "--checkpointing or more ranks"
    raise SettingsError(
        f"{flag} {phase.budget} needs too much memory: a micro-batch with {failed} tokens does not "
        f"fit on rank {world.rank}. Use {advice}.") from None

