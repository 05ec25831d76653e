"""batch.py: the global batch, the same on every rank, and how it is cut for memory.

    batch → minibatches    one optimizer step each; their rows are fixed by the samples' order
    minibatch → ranks → micro-batches    for memory (dist.balance); this never changes the maths

N completions have M tokens together. What is one number a completion is (N,). What is one number a
token is (M,): the tokens of all completions, one after another. Only the rows of a micro-batch are
padded, to (b, t): no cost grows with N × the longest completion.
"""
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data import Prompt
from dist import World, balance, share
from rewards import Score
from trainer.packing import pack, to_device


@dataclass
class Completion:
    """What came after a prompt."""
    ids: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, 0 where not sampled
    truncated: bool  # it reached --max_tokens and has no end-of-sequence token
    sampled: np.ndarray = None  # (T,) bool: not what a reply put in (turns.py)
    turns: list[dict] | None = None  # messages; None: one turn
    failed: bool = False  # its reply failed
    steps: np.ndarray | None = None  # (T,) int32, of --carry: the step whose policy sampled it
    routes: np.ndarray | None = None  # (prompt + T - 1, layers, k): the experts of each token

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
    advantage: float | None = None  # mean of its tokens; None: not in the loss
    advantages: torch.Tensor | None = None  # (T,), or () if its tokens have the same
    looks: tuple = ()  # samples.look's, before and after the update


def given(prompt: Prompt) -> Sample:
    """A sample that nobody sampled: its row has the completion (targets.py)."""
    ids, learned = prompt.row.target
    completion = Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), False,
                            np.array(learned))
    return Sample(prompt, completion, "", Score(0.0, {}, None))


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """Vectors → one matrix, zeros to the right."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)


class Batch:
    """N samples in request order. `spans` says which of the M tokens are a completion's."""

    def __init__(self, samples: list[Sample]):
        self.samples, done = samples, [s.completion for s in samples]
        self.lengths = torch.tensor([len(c.ids) for c in done], dtype=torch.long)  # (N,)
        self.tokens = torch.tensor([c.tokens for c in done], dtype=torch.long)  # (N,) sampled ones
        self.truncated = torch.tensor([c.truncated for c in done], dtype=torch.bool)  # (N,)
        rewards = [s.score.total for s in samples]  # None: not scored
        self.scored = torch.tensor([r is not None for r in rewards], dtype=torch.bool)  # (N,)
        self.rewards = torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64)  # (N,)
        masks = [c.sampled for c in done]  # never `ids != pad`: pad may end a sequence
        self.sampled = torch.from_numpy(np.concatenate(masks or [np.zeros(0, bool)]))  # (M,)
        self.spans, self.sizes = [], []  # of each row; sizes: see dist.Size
        start, last = 0, None
        for i, sample in enumerate(samples):
            row, end = sample.prompt.row, start + len(sample.completion.ids)
            if last != (row.prompt_ids, row.pictures):  # equal neighbours share a prompt
                owner, last = i, (row.prompt_ids, row.pictures)
            self.sizes.append((owner, len(row.prompt_ids), end - start))
            self.spans.append(slice(start, end))
            start = end

    def part(self, name: str) -> torch.Tensor:
        """(N,) float64: one of the rewards that --reward adds up, without its weight."""
        parts = [s.score.parts[name] for s in self.samples]
        return torch.tensor([x or 0.0 for x in parts], dtype=torch.float64)

    def mask(self, loss_tokens) -> torch.Tensor:
        """(M,) bool: which tokens are in the loss: those of a completion with loss_tokens > 0."""
        return self.sampled & (loss_tokens > 0).repeat_interleave(self.lengths)

    def minibatches(self, count: int, epochs: int) -> list[list[int]]:
        """The row numbers of each optimizer step."""
        rows = list(range(len(self.sizes)))
        return [rows[share(len(rows), count, k)] for k in range(count)] * epochs

    def micros(self, world: World, rows: list[int], budget: int, phase: str,
               learns=None) -> list["Micro"]:
        """My micro-batches of `rows`, each at most `budget` tokens, as many on all ranks.

        learns (N,) bool: the rows with a gradient. The others come last, in other micro-batches.
        """
        micros = []
        for has_grad in True, False:
            part = [row for row in rows if has_grad == (learns is None or bool(learns[row]))]
            if part or has_grad:  # without a row too: the optimizer needs a gradient, even if 0
                lanes = balance([self.sizes[row] for row in part], world.size, budget)
                micros += [Micro(self, [part[i] for i in micro], world.device, has_grad)
                           for micro in lanes[world.rank]]
        world.same_phase(phase, len(micros))
        return micros

    def score(self, world: World, budget: int, phase: str, forward) -> torch.Tensor:
        """forward(micro) → (b, t), without gradient, over all rows → (M,) on every rank. Or a stack
        (k, b, t) → (k, M)."""
        micros = self.micros(world, range(len(self.sizes)), budget, phase)
        with torch.no_grad():
            found = [forward(micro).cpu() for micro in micros]
        scores = found[0].new_zeros(*found[0].shape[:-2], len(self.sampled))
        for micro, values in zip(micros, found, strict=True):
            self.put(scores, micro.rows, values)
        return world.sum(scores)  # one rank computed each row, the others add zero

    def put(self, scores, rows: list[int], values) -> None:
        """(…, b, t) into scores (…, M)."""
        for row, one in zip(rows, values.unbind(-2), strict=True):
            scores[..., self.spans[row]] = one[..., :self.sizes[row][2]]

    def slice(self, values, rows: list[int]):
        """(N,) → (b, 1), or (M,) → (b, t) with zeros to the right. None stays None."""
        if values is None:
            return None
        if len(values) == len(self.samples):
            return values[rows].unsqueeze(1)
        return pad([values[self.spans[row]] for row in rows])

    def sums(self, values) -> torch.Tensor:
        """(M,) → (N,): of each completion's tokens. (N,) stays as it is."""
        if len(values) == len(self.samples):
            return values
        sums = [float(values[span].sum(dtype=torch.float64)) for span in self.spans]
        return torch.tensor(sums, dtype=torch.float64)

    def by_row(self, function, *values) -> list[torch.Tensor]:
        """function(*matrices (b, t)) → matrices, over all rows → (M,) float64 each.

        values: (N,), (M,) or None. Rows of similar lengths come together: at most half is padding.
        """
        blocks, found = defaultdict(list), []
        for row, (_, _, length) in enumerate(self.sizes):
            blocks[length.bit_length()].append(row)
        for rows in list(blocks.values()) or [[]]:
            made = function(*(self.slice(x, rows) for x in values))
            found = found or [torch.zeros(len(self.sampled), dtype=torch.float64) for _ in made]
            for whole, matrix in zip(found, made, strict=True):
                self.put(whole, rows, matrix)
        return found

    def note_advantages(self, advantages, loss_tokens) -> None:
        """For samples/: each sample gets its own, and the mean over its loss_tokens."""
        by_token = len(advantages) > len(self.samples)
        means = self.sums(advantages) / loss_tokens if by_token else advantages
        for i, sample in enumerate(self.samples):
            sample.advantages = advantages[self.spans[i] if by_token else i]
            sample.advantage = float(means[i]) if loss_tokens[i] else None


# The input without rows: its only token was not sampled.
NOTHING = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), False, np.zeros(1, bool))


class Micro:
    """b rows of the batch as one packed input. With b = 0 the model computes one dummy token, and
    all matrices are empty: their gradient is 0.

    Only sampled tokens are predicted. The output at token `source` predicts the id `target`: this
    shift by one is made in packing.pack, and nowhere else.
    """

    def __init__(self, batch: Batch, rows: list[int], device: torch.device, learns: bool = True):
        self.batch, self.rows, self.device, self.learns = batch, rows, device, learns
        done = [batch.samples[row].completion for row in rows] or [NOTHING]
        prompts = [batch.samples[row].prompt.row.prompt_ids for row in rows] or [[0]]
        owners = [batch.sizes[row][0] for row in rows] or [0]
        completions = [torch.from_numpy(c.ids).long() for c in done]
        ids, positions, packed, sources = pack(owners, prompts, completions, device)
        self.inputs = {"input_ids": to_device(ids, device), "packed": packed,
                       "position_ids": to_device(positions, device)}
        sampled = [torch.from_numpy(c.sampled) for c in done]
        self.source = to_device(torch.cat(sources)[torch.cat(sampled)], device)  # (n,)
        self.targets = to_device(torch.cat(completions)[torch.cat(sampled)], device)  # (n,)
        engine_logprobs = pad([torch.from_numpy(c.logprobs) for c in done])[:len(rows)]
        self.engine_logprobs = to_device(engine_logprobs, device)  # (b, t)
        sampled = pad(sampled)[:len(rows)]  # (b, t)
        self.place = to_device(sampled.flatten().nonzero().flatten(), device)  # (n,)
        self.tokens, self.sampled = ids.numel(), to_device(sampled, device)

    def slice(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) of the batch → (b, 1), or (M,) → (b, t)."""
        return to_device(self.batch.slice(values, self.rows), self.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) of the predicted tokens → (b, t), zeros elsewhere. Differentiable."""
        flat = values.new_zeros(self.sampled.numel()).index_copy(0, self.place, values)
        return flat.view(self.sampled.shape)


GAP = "rollout/logprob_gap_mean"  # of |trainer - engine| in nats: is the engine the policy?


class Meter:
    """Means of per-token metrics, with the loss's own weights. Its sums stay on the device."""

    def __init__(self, world: World):
        self.world, self.sums = world, defaultdict(float)  # name → sum of weight * value
        self.weight = self.gap_max = torch.zeros(1, dtype=torch.float64, device=world.device)
        self.norms: list[float] = []  # gradient norm of each optimizer step
        self.skipped = 0  # minibatches without a token to learn from

    def add(self, micro: Micro, weights, metrics):
        """One micro-batch: metrics {name: (b, t)}, to average with weights (b, 1)."""
        weights = weights * micro.sampled  # (b, t)
        self.weight = self.weight + weights.sum()
        for name, values in metrics.items():
            values = torch.where(micro.sampled, values.detach().double(), 0)
            self.sums[name] = self.sums[name] + (weights * values).sum()
            if name == GAP:
                self.gap_max = torch.cat([self.gap_max, values.flatten()]).max().view(1)

    def metrics(self, prefix: str = "policy/", norm: str = "grad/norm") -> dict[str, float]:
        """Over all ranks and optimizer steps; a name without "/" gets the prefix."""
        finite = [n for n in self.norms if math.isfinite(n)]  # only these were applied
        out = {norm: sum(finite) / max(1, len(finite)), "update/steps": len(finite),
               f"{norm}_not_finite": len(self.norms) - len(finite), "update/skipped": self.skipped}
        sums = [float(x) for x in (self.weight, *self.sums.values())]
        weight, *sums = self.world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        for name, value in zip(self.sums, sums, strict=True):
            out[name if "/" in name else prefix + name] = value / (weight or 1.0)
        if GAP in self.sums:
            out["rollout/logprob_gap_max"] = float(self.world.max(self.gap_max.cpu()))
        return out


def sample_metrics(samples: list[Sample], seconds: float) -> dict[str, float]:
    """A step's metrics of all its completions, which took `seconds` to sample."""
    done, scores = [s.completion for s in samples], [s.score for s in samples]
    tokens, scored = sum(c.tokens for c in done), [s.total for s in scores if s.total is not None]
    turns = sum(1 + (c.sampled[1:] > c.sampled[:-1]).sum() for c in done)  # runs of sampled tokens
    metrics = {
        "rollout/completions": len(done), "rollout/unscored": len(done) - len(scored),
        "rollout/tokens": tokens, "rollout/tokens_per_s": tokens / (seconds or math.inf),
        "rollout/length_mean": tokens / len(done), "rollout/turns_mean": float(turns / len(done)),
        "rollout/truncated_frac": sum(c.truncated for c in done) / len(done),
        "rollout/reply_failed": sum(c.failed for c in done),
        "rollout/reward_retries": sum(s.retries for s in scores)}
    for name in scores[0].parts:
        values = [s.parts[name] for s in scores if s.parts[name] is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    if scored and scores[0].parts:  # else there is no --reward
        metrics |= {"reward/mean": float(np.mean(scored)), "reward/std": float(np.std(scored))}
    return metrics
