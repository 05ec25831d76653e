"""What docs/learn/one_step.md makes up: a model of 30 weights, and samples that no engine made."""
from types import SimpleNamespace

import numpy as np
import torch

from batch import Batch, Sample
from data import Row
from learning import sample

torch.set_printoptions(precision=4, sci_mode=False, linewidth=96)


class Small(torch.nn.Module):
    """The state of a token is E[token] + P[position]; the logits are that state times E."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=8, model_type="by hand")
        self.config.get_text_config = lambda: self.config
        self.config.to_dict = lambda: vars(self.config)
        g = torch.Generator().manual_seed(0)
        E, P = (torch.randn(n, 2, generator=g, dtype=torch.float64).round(decimals=1)
                for n in (8, 7))
        self.E, self.P = torch.nn.Parameter(E), torch.nn.Parameter(P)

    def forward(self, input_ids, position_ids=None, packed=None, use_cache=False):
        if position_ids is None:  # rows: 0, 1, 2, ...
            position_ids = torch.arange(input_ids.shape[1])
        return SimpleNamespace(last_hidden_state=self.E[input_ids] + self.P[position_ids])

    def lm_head(self, hidden):
        return hidden @ self.E.T

    base_model = property(lambda self: self)


def samples_of(prompt_ids: list[int], position: int, completions: list) -> list[Sample]:
    """A group: (ids, the engine's log-probs, reward) of each completion."""
    row = Row(position, "", prompt_ids, None, {}, "by hand")
    return [sample(row, np.array(ids), reward, np.array(logprobs), ids[-1] != 0)
            for ids, logprobs, reward in completions]


def show(name: str, x: torch.Tensor) -> None:
    print(f"{name} {tuple(x.shape)}\n{x}")


def show_rows(name: str, x: torch.Tensor, batch: Batch) -> None:
    """A vector of all tokens (M,), with a line for each completion."""
    print(f"{name} {tuple(x.shape)}")
    for i, own in enumerate(batch.split(x.detach())):
        print(f"  {i}:", *(f"{value:7.4f}" for value in own.tolist()))
