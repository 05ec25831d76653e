"""evaluate.py: completions of every evaluation row → pass@1 and pass@k per data source.

A completion passes when its first --reward is at least --eval_pass. Its seed depends on its row and
not on the step, so evaluations of two policies are paired.
"""
from dataclasses import dataclass
from math import comb

from batch import Sample


@dataclass
class EvalArgs:
    """Evaluation on --eval_data."""
    eval_every: int = 0
    """Steps between evaluations. 0: only before the first step and after the last."""
    eval_samples: int = 1
    """k: completions of each row. pass@1 is their mean; pass@k is unbiased."""
    eval_temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    eval_pass: float = 1.0
    """A completion passes when its first --reward is at least this."""
    eval_only: bool = False
    """Evaluate --model on --eval_data, and end."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The probability that one of k samples is correct, unbiased, from n >= k samples.

    1 - C(n - correct, k) / C(n, k)                  https://arxiv.org/abs/2107.03374, equation 1
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluation_metrics(samples: list[Sample], args: EvalArgs) -> dict[str, float]:
    """eval/SOURCE/NAME for each data source. `eval_samples` consecutive samples share a row."""
    metrics = {}
    for source in dict.fromkeys(s.prompt.row.source for s in samples):
        some = [s for s in samples if s.prompt.row.source == source]
        for name, value in source_metrics(some, args.eval_samples, args.eval_pass).items():
            metrics[f"eval/{source}/{name}"] = value
    return metrics


def source_metrics(samples: list[Sample], n: int, least: float) -> dict[str, float]:
    """Of n samples a row: pass@k for k = 1, 2, 4, … and n; and the mean reward, if there is one."""
    firsts = [next(iter(s.score.parts.values())) for s in samples]  # of the first --reward
    passed = [first is not None and first >= least for first in firsts]
    correct = [sum(passed[i:i + n]) for i in range(0, len(samples), n)]  # of each row
    totals = [s.score.total for s in samples if s.score.total is not None]
    found = {}
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        found[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in correct) / len(correct)
    found["rows"], found["unscored"] = len(correct), len(samples) - len(totals)
    found["length_mean"] = sum(s.completion.tokens for s in samples) / len(samples)
    if totals:
        found["reward"] = sum(totals) / len(totals)
    return found
