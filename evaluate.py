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
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be in 1..{n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def ks(samples: int) -> list[int]:
    """The k to report for this many samples a row: the powers of two, and all of them."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def evaluation_metrics(samples: list[Sample], args: EvalArgs) -> dict[str, float]:
    """eval/SOURCE/NAME for each data source. `eval_samples` consecutive samples share a row."""
    k = args.eval_samples
    groups = [samples[i:i + k] for i in range(0, len(samples), k)]
    metrics = {}
    for source in dict.fromkeys(s.prompt.row.source for s in samples):
        rows = [group for group in groups if group[0].prompt.row.source == source]
        scores = [sample.score for group in rows for sample in group]
        firsts = [[next(iter(sample.score.parts.values())) for sample in group] for group in rows]
        correct = [sum(first is not None and first >= args.eval_pass for first in group)
                   for group in firsts]
        totals = [score.total for score in scores if score.total is not None]
        metrics |= {f"eval/{source}/pass@{j}": sum(pass_at_k(k, c, j) for c in correct) / len(rows)
                    for j in ks(k)}
        lengths = [len(sample.completion.ids) for group in rows for sample in group]
        metrics |= {f"eval/{source}/rows": len(rows),
                    f"eval/{source}/unscored": len(scores) - len(totals),
                    f"eval/{source}/length_mean": sum(lengths) / len(lengths)}
        if totals:
            metrics[f"eval/{source}/reward"] = sum(totals) / len(totals)
    return metrics
