"""batch.py: the global batch, the same list on every rank, and how it is cut for memory.

    batch → minibatches    one optimizer step each; their rows are fixed by the samples' order
    minibatch → ranks → micro-batches    for memory (dist.balance); this never changes the maths
"""
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data import Prompt
from dist import World, balance, share, tokens
from packing import pack
from rewards import Score


@dataclass
class Completion:
    """What came after a prompt."""
    ids: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, 0 where not sampled
    truncated: bool  # it reached --max_tokens and has no end-of-sequence token
    sampled: np.ndarray = None  # (T,) bool: not what a reply put in (turns.py)
    turns: list[dict] | None = None  # messages; None: one turn
    failed: bool = False  # its reply failed

    def __post_init__(self):
        if self.sampled is None:
            self.sampled = np.ones(len(self.ids), bool)

    @property
    def tokens(self) -> int:
        """The sampled ones."""
        return int(self.sampled.sum())


@dataclass
class Sample:
    """A completion with its prompt."""
    prompt: Prompt
    completion: Completion
    text: str = ""  # decoded when it is scored
    score: Score | None = None  # its reward
    advantage: float | None = None  # mean of its tokens; None: it bears no loss


def note_advantages(samples: list[Sample], advantages, mask):
    """Each sample keeps the mean of its row of advantages (N, T) where mask (N, T) is true."""
    for sample, row, bears in zip(samples, advantages, mask, strict=True):
        sample.advantage = float(row[bears].mean()) if bears.any() else None


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """Vectors → one matrix, zeros to the right."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)


WORTH = 1.25  # packing costs as much as this factor on the tokens (bench/RESULTS.md)


class Batch:
    """N samples in request order. (N, T) tensors are right-padded and begin with the completion.

    packs: whether the model can take packed micro-batches (canary.choose_packing).
    """

    def __init__(self, samples: list[Sample], packs: bool = False):
        completions = [s.completion for s in samples]
        self.sequences = [torch.cat([torch.tensor(s.prompt.row.prompt_ids),
                                     torch.from_numpy(s.completion.ids).long()]) for s in samples]
        self.lengths = torch.tensor([len(c.ids) for c in completions], dtype=torch.long)  # (N,)
        self.truncated = torch.tensor([c.truncated for c in completions], dtype=torch.bool)
        rewards = [s.score.total for s in samples]  # None: not scored
        self.scored = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
        self.rewards = torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64)
        self.engine_logprobs = pad([torch.from_numpy(c.logprobs) for c in completions])  # (N, T)
        # Never from `ids != pad`: pad may also be an end-of-sequence token.
        self.sampled = pad([torch.from_numpy(c.sampled) for c in completions]).bool()  # (N, T)

        prompts = [s.prompt.row.prompt_ids for s in samples]
        owner, self.sizes = -1, []  # of each row: see dist.cut
        for i, prompt in enumerate(prompts):
            owner += not i or prompt != prompts[i - 1]
            self.sizes.append((owner, len(prompt), len(completions[i].ids)))
        self.tokens = sum(map(len, self.sequences))
        once = tokens(range(len(samples)), self.sizes, packed=True)
        self.packed = packs and self.tokens > WORTH * once
        self.work: dict[str, Counter] = defaultdict(Counter)  # of each phase, on all ranks

    def minibatches(self, count: int, epochs: int) -> list[list[int]]:
        """The row numbers of each optimizer step."""
        rows = list(range(len(self.sequences)))
        return [rows[share(len(rows), count, k)] for k in range(count)] * epochs

    def micros(self, world: World, rows: list[int], budget: int, phase: str,
               learns=None) -> list["Micro"]:
        """My micro-batches of `rows`, each at most `budget` tokens, as many on all ranks.

        learns (N,) bool: the rows with a gradient. The others come last, in other micro-batches.
        """
        made, work = [], self.work[phase]
        for flag in (True, False):
            part = [r for r in rows if flag == (learns is None or learns[r])]
            sizes = [self.sizes[r] for r in part]
            if part or flag:  # the optimizer needs a gradient, even if it is 0
                lanes = balance(sizes, world.size, budget, self.packed)
                work["computed"] += sum(
                    tokens(micro, sizes, self.packed) for lane in lanes for micro in lane)
                work["needed"] += tokens(range(len(part)), sizes, packed=True)
                work[flag] += len(part)
                made += [Micro(self, [part[i] for i in micro], world.device, flag)
                         for micro in lanes[world.rank]]
        world.same_phase(phase, len(made))
        return made

    def work_metrics(self, phase: str) -> dict[str, float]:
        """Rows of a phase with and without a gradient, and the wasted part of its tokens."""
        work = self.work[phase]
        return {"batch/with_grad": work[True], "batch/without_grad": work[False],
                "batch/pad_frac": 1 - work["needed"] / (work["computed"] or 1)}

    def score(self, world: World, budget: int, phase: str, forward) -> torch.Tensor:
        """forward(micro) → (b, t), without gradient, over all rows → (N, T) on every rank."""
        scores = None
        with torch.no_grad():
            for micro in self.micros(world, range(len(self.sequences)), budget, phase):
                out = forward(micro).cpu()
                scores = out.new_zeros(self.sampled.shape) if scores is None else scores
                if micro.rows:
                    scores[micro.rows, :out.shape[1]] = out
        return world.sum(scores)  # one rank computed each row, the others add zero


class Micro:
    """Rows of the batch as one input; without rows, one dummy row of weight 0.

    The output at a token predicts the next one: `source` makes that shift, here and nowhere else.
    Only sampled tokens are predicted.
    A padded input is (b, L) and needs no mask: causal attention never looks to the right. A packed
    one is (1, S): see packing.py.
    """

    def __init__(self, batch: Batch, rows: list[int], device: torch.device, learns: bool = True):
        self.batch, self.rows, self.device, self.learns = batch, rows, device, learns
        sequences = [batch.sequences[r] for r in rows] or [torch.zeros(2, dtype=torch.long)]
        lengths = batch.lengths[rows] if rows else torch.ones(1, dtype=torch.long)
        prompts = [len(s) - n for s, n in zip(sequences, lengths.tolist(), strict=True)]
        if batch.packed:
            owners = [batch.sizes[r][0] for r in rows] or [0]
            parts = [s.split([p, len(s) - p]) for s, p in zip(sequences, prompts, strict=True)]
            ids, positions, packed, last, start = pack(owners, parts, device)
            self.inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device),
                           "packed": packed}
        else:
            ids = pad(sequences)  # (b, L)
            start = torch.arange(len(ids)) * ids.shape[1] + torch.tensor(prompts)
            last, self.inputs = start - 1, {"input_ids": ids.to(device)}
        at = torch.arange(int(lengths.max()))
        sampled = batch.sampled[rows, :len(at)] if rows else torch.ones(1, 1, dtype=torch.bool)
        # A completion's first token is predicted by the prompt's last, the others by their left.
        source = torch.where(at == 0, last.view(-1, 1), start.view(-1, 1) + at - 1)[sampled]
        targets = pad([s[p:] for s, p in zip(sequences, prompts, strict=True)])[sampled]
        self.tokens, self.sampled = ids.numel(), sampled.to(device)  # (b, t)
        self.source, self.targets = source.to(device), targets.to(device)  # (n,), (n,) their ids

    def slice(self, values: torch.Tensor) -> torch.Tensor:
        """(N, T) of the batch → (b, t); zeros for the dummy row."""
        if not self.rows:
            return torch.zeros((1, 1), dtype=values.dtype, device=self.device)
        return values[self.rows, :self.sampled.shape[1]].to(self.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) of the predicted tokens → (b, t), zeros elsewhere. Differentiable."""
        return values.new_zeros(self.sampled.shape).masked_scatter(self.sampled, values)


class Meter:
    """Means of per-token metrics, with the loss's own weights."""

    def __init__(self, world: World):
        self.world, self.sums, self.gap_max = world, defaultdict(float), 0.0
        self.norms: list[float] = []  # gradient norm of each optimizer step
        self.skipped = 0  # minibatches without a token to learn from

    def add(self, micro: Micro, mask, weights, metrics, old_logprobs=None):
        """One micro-batch: metrics {name: (b, t)}, to average over mask (b, t) with weights."""
        sums = {name: (weights * torch.where(mask, value.detach().double(), 0)).sum()
                for name, value in metrics.items()}
        sums["weight"] = weights.sum()
        if old_logprobs is not None:  # |trainer - engine|: is the engine the policy?
            gap = old_logprobs.detach().double() - micro.slice(micro.batch.engine_logprobs)
            gap = torch.where(mask, gap.abs(), 0)
            sums |= {"gap": gap.sum(), "tokens": mask.sum()}
            self.gap_max = max(self.gap_max, float(gap.max()))
        for name, value in sums.items():
            self.sums[name] += float(value)

    def metrics(self, prefix: str = "policy/", norm: str = "grad/norm") -> dict[str, float]:
        """Over all ranks and optimizer steps; a name without "/" gets the prefix."""
        sums = torch.tensor(list(self.sums.values()), dtype=torch.float64)
        total = dict(zip(self.sums, self.world.sum(sums).tolist(), strict=True))
        finite = [n for n in self.norms if math.isfinite(n)]  # only these were applied
        out = {norm: sum(finite) / max(1, len(finite)), "update/steps": len(finite),
               f"{norm}_not_finite": len(self.norms) - len(finite), "update/skipped": self.skipped}
        if "gap" in total:
            gap_max = self.world.max(torch.tensor(self.gap_max, dtype=torch.float64))
            out |= {"rollout/logprob_gap_mean": total.pop("gap") / (total.pop("tokens") or 1.0),
                    "rollout/logprob_gap_max": float(gap_max)}
        weight = total.pop("weight", 0.0) or 1.0
        return out | {name if "/" in name else prefix + name: value / weight
                      for name, value in total.items()}


def sample_metrics(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Of all completions of a step, sampled in `seconds`."""
    rewards = {name: [s.score.parts[name] for s in samples] for name in samples[0].score.parts}
    rewards["mean"] = [s.score.total for s in samples]
    rewards = {name: [r for r in values if r is not None] for name, values in rewards.items()}
    done, scored = [s.completion for s in samples], rewards["mean"]
    tokens = sum(c.tokens for c in done)
    turns = sum(1 + (c.sampled[1:] > c.sampled[:-1]).sum() for c in done)  # runs of sampled tokens
    means = {f"reward/{name}": float(np.mean(values)) for name, values in rewards.items() if values}
    return means | ({"reward/std": float(np.std(scored))} if scored else {}) | {
        "rollout/completions": len(samples), "rollout/unscored": len(samples) - len(scored),
        "rollout/tokens": tokens, "rollout/tokens_per_s": tokens / seconds,
        "rollout/length_mean": tokens / len(samples),
        "rollout/reply_failed": sum(c.failed for c in done),
        "rollout/turns_mean": float(turns / len(done)),
        "rollout/truncated_frac": sum(c.truncated for c in done) / len(done)}
