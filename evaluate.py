"""evaluate.py: a set of rows → pass@1 and pass@k per data source, through the same engine and rewards as training.

Every row is evaluated exactly once, whatever their number and the number of ranks; nothing is padded. A completion passes
when its first --reward is at least --eval_pass. The seeds depend on the row only, so evaluations of two policies are paired.
"""
from math import comb
from typing import TYPE_CHECKING

from data import Prompt

if TYPE_CHECKING:
    from run import Run, Sample


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The probability that at least one of k samples is correct, unbiased from n ≥ k of which `correct` were.

    1 - C(n - correct, k) / C(n, k)                              https://arxiv.org/abs/2107.03374, equation 1
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be in 1..{n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def ks(samples: int) -> list[int]:
    """The k to report for this many samples a row: powers of two, and all of them."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def table(passed: list[list[bool]], sources: list[str]) -> dict[str, float]:
    """passed[i]: outcomes of row i's samples, sources[i]: where it is from → {eval/SOURCE/pass@k: mean over the source's rows}."""
    metrics = {}
    for source in dict.fromkeys(sources):
        rows = [p for p, s in zip(passed, sources) if s == source]
        metrics |= {f"eval/{source}/pass@{k}": sum(pass_at_k(len(p), sum(p), k) for p in rows) / len(rows) for k in ks(len(rows[0]))}
    return metrics


def evaluate(run: "Run", step: int) -> tuple[dict[str, float], list["Sample"]]:
    """All of run.eval_rows with --eval_samples completions each at --eval_temperature: (metrics, samples), on every rank."""
    args = run.args
    prompts = [Prompt(i, row) for i, row in enumerate(run.eval_rows)]
    samples = run.sample(prompts, step, args.eval_samples, temperature=args.eval_temperature, salt="eval")
    first = next(iter(samples[0].score.parts))
    groups = [samples[i:i + args.eval_samples] for i in range(0, len(samples), args.eval_samples)]
    passed = [[s.score.parts[first] is not None and s.score.parts[first] >= args.eval_pass for s in group] for group in groups]
    metrics = table(passed, [row.source for row in run.eval_rows])
    for source in dict.fromkeys(row.source for row in run.eval_rows):
        mine = [s for s in samples if s.prompt.row.source == source]
        scored = [s.score.total for s in mine if s.score.total is not None]
        metrics[f"eval/{source}/rows"] = len(mine) // args.eval_samples
        metrics[f"eval/{source}/unscored"] = len(mine) - len(scored)
        metrics[f"eval/{source}/length_mean"] = sum(len(s.completion.ids) for s in mine) / len(mine)
        if scored:
            metrics[f"eval/{source}/reward"] = sum(scored) / len(scored)
    return metrics, samples
