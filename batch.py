"""batch.py: the global batch, one list in request order that is the same on every rank, and how it is cut for memory.

Three cuts, from large to small; only the first changes the maths:
    batch → minibatches    one optimizer step each; membership fixed by request order, before anything is split
    minibatch → ranks      data parallel  } `dist.balance`: by padded tokens, as many micro-batches on every rank
    rank → micro-batches   what fits      }
"""
import math
from dataclasses import dataclass

import numpy as np
import torch

from dist import World, balance, share


@dataclass
class Completion:
    """What the engine made of one request: the sampled ids (T,) int32 with their log-probs (T,) float32."""
    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool                 # ran into --max_tokens: there is no end-of-sequence token


class Batch:
    """N completions, in request order. Token tensors are (N, T), right-padded over completion positions, on the host.

    A token of the prompt is never in them: position 0 is the first completion token.
    """

    def __init__(self, prompts: list[list[int]], completions: list[Completion]):
        n = len(completions)
        self.prompts = prompts
        self.prompt_lengths = [len(p) for p in prompts]
        self.lengths = [len(c.ids) for c in completions]
        self.totals = [p + c for p, c in zip(self.prompt_lengths, self.lengths)]                       # what a row costs
        self.truncated = torch.tensor([c.truncated for c in completions], dtype=torch.bool)           # (N,)
        longest = max(self.lengths, default=0)
        self.ids = torch.zeros(n, longest, dtype=torch.long)                                          # (N, T)
        self.engine_logprobs = torch.zeros(n, longest)                                                # (N, T)
        for i, c in enumerate(completions):
            self.ids[i, :len(c.ids)] = torch.from_numpy(c.ids.astype(np.int64))
            self.engine_logprobs[i, :len(c.ids)] = torch.from_numpy(c.logprobs)
        # Built from lengths, never from `ids != pad`: where pad is also an end-of-sequence token, that would untrain it.
        self.present = torch.arange(longest) < torch.tensor(self.lengths).view(n, 1)                   # (N, T)

    def __len__(self) -> int:
        return len(self.lengths)

    def minibatches(self, count: int) -> list[list[int]]:
        """Row numbers of each of `count` minibatches: contiguous and even in request order, on any number of ranks."""
        rows = list(range(len(self)))
        return [rows[share(len(rows), count, k)] for k in range(count)]

    def micros(self, world: World, rows: list[int], budget: int, phase: str, step: int) -> list["Micro"]:
        """My micro-batches of `rows`, of at most `budget` padded tokens each; as many as on every other rank."""
        lanes = balance([self.totals[r] for r in rows], world.size, budget)
        world.meet(phase, step, len(lanes[world.rank]))
        return [Micro(self, [rows[i] for i in micro], world.device) for micro in lanes[world.rank]]

    def score(self, world: World, budget: int, phase: str, step: int, forward) -> torch.Tensor:
        """forward(micro) → (b, t) without gradient, for all rows: the (N, T) result, the same on every rank."""
        scores = None
        with torch.no_grad():
            for micro in self.micros(world, list(range(len(self))), budget, phase, step):
                out = forward(micro)
                if scores is None:
                    scores = torch.zeros(self.ids.shape, dtype=out.dtype)
                if micro.rows:
                    scores[micro.rows, :out.shape[1]] = out.cpu()
        return world.sum(scores)               # each row was computed by one rank, the others add zero: exact


class Micro:
    """Some rows of the batch as one right-padded model input on the device; no rows: one finite dummy, selected out.

    Under a causal mask a real token never sees padding to its right, so no attention mask is needed and the fast
    attention kernel is kept. The logits at position t-1 predict token t: `source` does that shift, once, for everyone.
    """

    def __init__(self, batch: Batch, rows: list[int], device: torch.device):
        self.batch, self.rows, self.device, self.totals = batch, rows, device, [batch.totals[r] for r in rows]
        prompts = [batch.prompt_lengths[r] for r in rows] or [1]
        lengths = [batch.lengths[r] for r in rows] or [1]
        wide, long = max(p + c for p, c in zip(prompts, lengths)), max(lengths)
        ids = torch.zeros(len(prompts), wide, dtype=torch.long)
        for i, r in enumerate(rows):
            ids[i, :prompts[i]] = torch.tensor(batch.prompts[r])
            ids[i, prompts[i]:prompts[i] + lengths[i]] = batch.ids[r, :lengths[i]]
        at = torch.arange(long)
        present = at < torch.tensor(lengths).view(-1, 1)                                               # (b, t)
        start = torch.arange(len(prompts)) * wide + torch.tensor(prompts) - 1                          # predicts token 0
        self.ids = ids.to(device)                                                                      # (b, L)
        self.present = present.to(device)                                                              # (b, t)
        self.source = (start.view(-1, 1) + at)[present].to(device)                                     # (n,) into b·L
        self.targets = ids.flatten()[(start.view(-1, 1) + at)[present] + 1].to(device)                 # (n,)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """(N, T) or (N,) of the batch → (b, t) or (b,) of this micro-batch; zeros for the dummy."""
        if not self.rows:
            shape = (1, 1) if values.dim() == 2 else (1,)
            return torch.zeros(shape, dtype=values.dtype, device=self.device)
        part = values[self.rows]
        return (part[:, :self.present.shape[1]] if values.dim() == 2 else part).to(self.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) values of the predicted tokens → (b, t), zeros where there is no token. Differentiable."""
        out = torch.zeros(self.present.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.present, values)


class Meter:
    """Means of per-token metrics over the global minibatch, with the loss's own weights: the same on any number of ranks."""

    def __init__(self, world: World):
        self.world, self.sums = world, {}
        self.steps = self.not_finite = self.skipped = 0        # optimizer steps applied, refused, and without any token
        self.norm = self.gap_max = 0.0

    def add(self, micro: Micro, mask: torch.Tensor, weights: torch.Tensor, metrics: dict[str, torch.Tensor], old_logprobs: torch.Tensor | None = None) -> None:
        """metrics (b, t) each; padding is selected out. Every rank adds the same names; the dummy's values weigh nothing."""
        add = lambda name, value: self.sums.__setitem__(name, self.sums.get(name, 0.0) + value)
        add("weight", weights.sum())
        add("real", sum(micro.totals))
        add("padded", micro.ids.numel())
        for name, value in metrics.items():
            add(f"mean {name}", (weights * torch.where(mask, value.detach().double(), 0)).sum())
        if old_logprobs is not None:                           # |trainer's - engine's|: how far the engine is from being the policy
            gap = torch.where(mask, (old_logprobs.detach().double() - micro.take(micro.batch.engine_logprobs).double()).abs(), 0)
            add("gap", gap.sum())
            add("tokens", mask.sum())
            self.gap_max = max(self.gap_max, float(gap.max()))

    def step(self, norm: float) -> None:
        """One optimizer step with this gradient norm; one that is not finite was not applied."""
        if math.isfinite(norm):
            self.steps, self.norm = self.steps + 1, self.norm + norm
        else:
            self.not_finite += 1

    def metrics(self, names: dict[str, str], prefix: str = "policy/", norm: str = "grad/norm",
                layout: bool = True) -> dict[str, float]:
        """All of it over all ranks, means over the optimizer steps. Names not in `names` get the prefix. A collective."""
        keys = list(self.sums)
        total = dict(zip(keys, self.world.sum(torch.tensor([float(self.sums[k]) for k in keys], dtype=torch.float64)).tolist()))
        weight = total.get("weight") or 1.0
        means = {k.removeprefix("mean "): v / weight for k, v in total.items() if k.startswith("mean ")}
        out = {names.get(k, prefix + k): v for k, v in means.items()}
        out |= {norm: self.norm / max(1, self.steps), f"{norm}_not_finite": self.not_finite}
        if layout:
            out |= {"update/steps": self.steps, "update/skipped": self.skipped,
                    "batch/pad_frac": 1 - total["real"] / total["padded"] if total.get("padded") else 0.0}
        if "gap" in total:
            out |= {"rollout/logprob_gap_mean": total["gap"] / (total["tokens"] or 1.0),
                    "rollout/logprob_gap_max": float(self.world.max(torch.tensor(self.gap_max, dtype=torch.float64)))}
        return out
