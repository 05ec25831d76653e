"""supervised.py: rows that have their completions, and how well sft.py's policy predicts them."""
from dataclasses import dataclass
from math import exp

import numpy as np
import torch

from batch import Batch, Sample
from data import Prompt
from log import Meter
from run import Run


def given(prompt: Prompt) -> Sample:
    """A sample that nobody sampled: its row has the completion (targets.py)."""
    ids, learned = prompt.row.target
    return Sample(prompt, np.array(ids, np.int32), sampled=np.array(learned), reward=0.0)


@dataclass
class Supervised(Run):
    """The run of sft.py: it predicts --eval_data, and samples it where --reward is given."""

    def __post_init__(self):
        super().__post_init__()
        self.log.compared = {"eval/perplexity": None} | self.log.compared

    def held_out(self, step: int) -> dict[str, float]:
        """Means over all tokens to learn of --eval_data, and what run.Run has. A collective.

        eval/loss: -log π in nats. eval/perplexity: exp of it. eval/entropy: of π.
        """
        batch = Batch([given(Prompt(i, row)) for i, row in enumerate(self.inputs.eval_rows)])
        rows, meter = list(range(len(batch.samples))), Meter(self.world)
        weights = torch.ones(len(rows), dtype=torch.float64)  # (N,): every token counts alike
        with self.log.time("eval"), torch.no_grad():
            for micro in batch.micro_batches(
                    self.world, rows, self.args.logprob_tokens, "held out"):
                logprobs, entropy = self.policy.logprobs(micro, self.args.temperature, True)
                meter.add(micro.per_token(weights), {
                    "eval/loss": -logprobs, "eval/entropy": entropy})
            found = meter.metrics()
        found = {"eval/rows": len(rows), "eval/loss": found["eval/loss"],
                 "eval/perplexity": exp(min(found["eval/loss"], 700.0)),
                 "eval/entropy": found["eval/entropy"]}
        return found | (super().held_out(step) if self.engine else {})
