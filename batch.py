"""batch.py: the global batch, the same list on every rank, and how it is cut for memory.

    batch → minibatches    one optimizer step each; their rows are fixed by the samples' order
    minibatch → ranks → micro-batches    for memory (dist.balance); this never changes the maths
"""
import math
from collections import defaultdict
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
    advantages: torch.Tensor | None = None  # (T,)
    looks: tuple = ()  # log.look's, before and after the update


def note_advantages(samples: list[Sample], advantages, mask):
    """Each sample keeps the mean of its row of advantages (N, T) where mask (N, T) is true."""
    for sample, row, bears in zip(samples, advantages, mask, strict=True):
        sample.advantages = row
        sample.advantage = float(row[bears].mean()) if bears.any() else None


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """Vectors → one matrix, zeros to the right."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)


@dataclass
class Work:
    """What the micro-batches of a phase hold, on all ranks."""
    with_grad: int = 0  # rows
    without_grad: int = 0  # rows, computed for the metrics alone
    computed: int = 0  # tokens
    needed: int = 0  # tokens, if each prompt were computed once

    def metrics(self) -> dict[str, float]:
        pad_frac = 1 - self.needed / self.computed if self.computed else 0.0
        return {"batch/with_grad": self.with_grad, "batch/without_grad": self.without_grad,
                "batch/pad_frac": pad_frac}


class Batch:
    """N samples in request order. (N, T) tensors are right-padded and begin with the completion."""

    def __init__(self, samples: list[Sample]):
        completions = [s.completion for s in samples]
        self.prompts = [s.prompt.row.prompt_ids for s in samples]
        self.ids = [c.ids for c in completions]
        self.lengths = torch.tensor([len(ids) for ids in self.ids], dtype=torch.long)  # (N,)
        self.truncated = torch.tensor([c.truncated for c in completions], dtype=torch.bool)
        rewards = [s.score.total for s in samples]  # None: not scored
        self.scored = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
        self.rewards = torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64)
        self.engine_logprobs = pad([torch.from_numpy(c.logprobs) for c in completions])  # (N, T)
        # Never from `ids != pad`: pad may also be an end-of-sequence token.
        self.sampled = pad([torch.from_numpy(c.sampled) for c in completions]).bool()  # (N, T)
        self.sizes = []  # of each row, see dist.Size; equal neighbours share a prompt
        for i, prompt in enumerate(self.prompts):
            if i == 0 or prompt != self.prompts[i - 1]:
                owner = i
            self.sizes.append((owner, len(prompt), len(self.ids[i])))
        self.tokens = sum(p + c for _, p, c in self.sizes)
        self.work: dict[str, Work] = defaultdict(Work)  # of each phase

    def minibatches(self, count: int, epochs: int) -> list[list[int]]:
        """The row numbers of each optimizer step."""
        rows = list(range(len(self.sizes)))
        return [rows[share(len(rows), count, k)] for k in range(count)] * epochs

    def micros(self, world: World, rows: list[int], budget: int, phase: str,
               learns=None) -> list["Micro"]:
        """My micro-batches of `rows`, each at most `budget` tokens, as many on all ranks.

        learns (N,) bool: the rows with a gradient. The others come last, in other micro-batches.
        """
        learning = [row for row in rows if learns is None or learns[row]]
        others = [row for row in rows if learns is not None and not learns[row]]
        work = self.work[phase]
        work.with_grad += len(learning)
        work.without_grad += len(others)
        # Without a row too: the optimizer needs a gradient, even if it is 0.
        micros = self.cut(world, learning, budget, work, learns=True)
        if others:
            micros += self.cut(world, others, budget, work, learns=False)
        world.same_phase(phase, len(micros))
        return micros

    def cut(self, world: World, rows: list[int], budget: int, work: Work, learns: bool):
        """My micro-batches of these rows."""
        sizes = [self.sizes[row] for row in rows]
        lanes = balance(sizes, world.size, budget)
        work.computed += sum(tokens(micro, sizes) for lane in lanes for micro in lane)
        work.needed += tokens(range(len(rows)), sizes)
        return [Micro(self, [rows[i] for i in micro], world.device, learns)
                for micro in lanes[world.rank]]

    def score(self, world: World, budget: int, phase: str, forward) -> torch.Tensor:
        """forward(micro) → (b, t), without gradient, over all rows → (N, T) on every rank."""
        scores = None
        with torch.no_grad():
            for micro in self.micros(world, range(len(self.sizes)), budget, phase):
                out = forward(micro).cpu()
                scores = out.new_zeros(self.sampled.shape) if scores is None else scores
                if micro.rows:
                    scores[micro.rows, :out.shape[1]] = out
        return world.sum(scores)  # one rank computed each row, the others add zero


class Micro:
    """Rows of the batch as one packed input; without rows, one dummy row of weight 0.

    Only sampled tokens are predicted. The output at token `source` predicts the id `target`: this
    shift by one is made in packing.pack, and nowhere else.
    """

    def __init__(self, batch: Batch, rows: list[int], device: torch.device, learns: bool = True):
        self.batch, self.rows, self.device, self.learns = batch, rows, device, learns
        parts = [(batch.sizes[r][0], torch.tensor(batch.prompts[r]),
                  torch.from_numpy(batch.ids[r]).long()) for r in rows]
        sampled = [batch.sampled[r, :len(batch.ids[r])] for r in rows]
        if not rows:
            zero = torch.zeros(1, dtype=torch.long)
            parts, sampled = [(0, zero, zero)], [torch.ones(1, dtype=torch.bool)]
        ids, positions, packed, sources = pack(parts, device)
        self.inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device),
                       "packed": packed}
        real = torch.cat(sampled)
        self.source = torch.cat(sources)[real].to(device)  # (n,)
        self.targets = torch.cat([completion for _, _, completion in parts])[real].to(device)
        sampled = pad(sampled)  # (b, t)
        self.place = sampled.flatten().nonzero().flatten().to(device)  # (n,)
        self.tokens, self.sampled = ids.numel(), sampled.to(device)

    def slice(self, values: torch.Tensor) -> torch.Tensor:
        """(N, T) of the batch → (b, t); zeros for the dummy row."""
        if not self.rows:
            return torch.zeros((1, 1), dtype=values.dtype, device=self.device)
        return values[self.rows, :self.sampled.shape[1]].to(self.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) of the predicted tokens → (b, t), zeros elsewhere. Differentiable."""
        flat = values.new_zeros(self.sampled.numel()).index_copy(0, self.place, values)
        return flat.view(self.sampled.shape)


class Meter:
    """Means of per-token metrics, with the loss's own weights. Its sums stay on the device."""

    def __init__(self, world: World):
        self.world, self.sums = world, {}  # name → sum of weight * value
        zero = torch.zeros((), dtype=torch.float64, device=world.device)
        self.weight = self.gap = self.tokens = self.gap_max = zero
        self.norms: list[float] = []  # gradient norm of each optimizer step
        self.skipped = 0  # minibatches without a token to learn from

    def add(self, mask, weights, metrics):
        """One micro-batch: metrics {name: (b, t)}, to average over mask (b, t) with weights."""
        self.weight = self.weight + weights.sum()
        for name, values in metrics.items():
            values = torch.where(mask, values.detach().double(), 0)  # (b, t)
            self.sums[name] = self.sums.get(name, 0.0) + (weights * values).sum()

    def add_gap(self, micro: Micro, mask, logprobs):
        """|trainer - engine| over mask (b, t), in nats: is the engine the policy?"""
        gap = logprobs.detach().double() - micro.slice(micro.batch.engine_logprobs)
        gap = torch.where(mask, gap.abs(), 0)  # (b, t)
        self.gap, self.tokens = self.gap + gap.sum(), self.tokens + mask.sum()
        self.gap_max = torch.maximum(self.gap_max, gap.max())

    def metrics(self, prefix: str = "policy/", norm: str = "grad/norm") -> dict[str, float]:
        """Over all ranks and optimizer steps; a name without "/" gets the prefix."""
        finite = [n for n in self.norms if math.isfinite(n)]  # only these were applied
        out = {norm: sum(finite) / max(1, len(finite)), "update/steps": len(finite),
               f"{norm}_not_finite": len(self.norms) - len(finite), "update/skipped": self.skipped}
        sums = torch.stack([self.weight, self.gap, self.tokens, *self.sums.values()])
        weight, gap, tokens, *sums = self.world.sum(sums.cpu()).tolist()
        if tokens:
            out["rollout/logprob_gap_mean"] = gap / tokens
            out["rollout/logprob_gap_max"] = float(self.world.max(self.gap_max.cpu()))
        for name, value in zip(self.sums, sums, strict=True):
            out[name if "/" in name else prefix + name] = value / (weight or 1.0)
        return out


def sample_metrics(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Of all completions of a step, sampled in `seconds`."""
    done = [s.completion for s in samples]
    tokens = sum(c.tokens for c in done)
    scored = [s.score.total for s in samples if s.score.total is not None]
    turns = sum(1 + (c.sampled[1:] > c.sampled[:-1]).sum() for c in done)  # runs of sampled tokens
    metrics = {
        "rollout/completions": len(samples), "rollout/unscored": len(samples) - len(scored),
        "rollout/tokens": tokens, "rollout/tokens_per_s": tokens / seconds,
        "rollout/length_mean": tokens / len(samples),
        "rollout/reply_failed": sum(c.failed for c in done),
        "rollout/turns_mean": float(turns / len(done)),
        "rollout/truncated_frac": sum(c.truncated for c in done) / len(done)}
    for name in samples[0].score.parts:
        values = [s.score.parts[name] for s in samples]
        if any(v is not None for v in values):
            metrics[f"reward/{name}"] = float(np.mean([v for v in values if v is not None]))
    if scored:
        metrics |= {"reward/mean": float(np.mean(scored)), "reward/std": float(np.std(scored))}
    return metrics
