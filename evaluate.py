"""evaluate.py: completions of held-out rows → pass@1 and pass@k, with intervals.

An evaluation samples --eval_samples completions of each row of --eval_data and scores them. A
completion passes when the first --reward that applies to its row is at least --eval_pass. The seed
of a completion depends on its row and not on the step, so evaluations of two policies are paired.

`sample_rows` makes the completions. The other functions compute their metrics.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import ClassVar

import numpy as np

import losses
from batch import Batch, Sample
from data import Prompt, Row
from rewards import Pool, score_samples
from settings import Count, Flags, Number


@dataclass
class EvalArgs(Flags):
    """Evaluation on --eval_data."""
    eval_every: int = 0
    """Steps between evaluations. 0: only before the first step and after the last."""
    eval_samples: Count = 1
    """k: completions per row. pass@1 is their mean; pass@k is unbiased."""
    eval_temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    eval_pass: Number = 1.0
    """A completion passes if its first --reward is at least this."""
    eval_only: bool = False
    """Evaluate --model on --eval_data and exit."""
    switch: ClassVar[str] = "eval_data"

    def rules(self, plan):
        """Yields a sentence for each rule that these settings break (see settings.Flags). plan: the
        plan.Plan.
        """
        if self.eval_temperature and not 0.01 <= self.eval_temperature <= 2:  # vLLM's own limits
            yield (f"--eval_temperature must be 0, or from 0.01 to 2 (got "
                   f"{self.eval_temperature}).")
        if self.eval_samples > 1 and self.eval_temperature == 0:
            yield (f"--eval_samples must be 1 if --eval_temperature is 0 (got "
                   f"{self.eval_samples}): all samples of a row would be equal.")


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the probability that at least one of k samples of a row is correct. It is estimated
    without bias from n >= k samples, `correct` of which are correct.

        1 - C(n - correct, k) / C(n, k)              https://arxiv.org/abs/2107.03374, equation 1
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def sample_rows(engine, pool: Pool, rows: list[Row], args) -> Iterator[list[Sample]]:
    """Samples and scores --eval_samples completions of each row, and yields them in batches of
    about as many as a step has. engine: a rollout.Engine inside its `generating`. args: the
    script's. All ranks must exhaust it (a collective).
    """
    prompts = [Prompt(i, row) for i, row in enumerate(rows)]
    size = max(1, args.batch * args.group // args.eval_samples)
    for start in range(0, len(prompts), size):
        samples = engine.sample(prompts[start:start + size], args.eval_samples,
                                args.eval_temperature, "eval")
        score_samples(pool, engine.world, engine.log, samples, args.eval_samples)
        yield samples


def evaluation_metrics(samples: list[Sample], args: EvalArgs) -> dict[str, float]:
    """Returns {name: value} of the metrics eval/NAME over all rows. With several data sources it
    also returns eval/SOURCE/NAME for each source.

    samples: the completions of all rows, where `eval_samples` neighbours belong to one row.
    """
    metrics = named("eval/", samples, args)
    sources = dict.fromkeys(s.prompt.row.source for s in samples)  # unlike a set, it has an order
    if len(sources) > 1:
        for source in sources:
            some = [s for s in samples if s.prompt.row.source == source]
            metrics |= named(f"eval/{source}/", some, args)
    return metrics


def named(prefix: str, samples: list[Sample], args: EvalArgs) -> dict[str, float]:
    """Returns the metrics of these samples, with `prefix` before each name. With n = eval_samples
    they are pass@k for k = 1, 2, 4, … and n, each with the ends of its interval; the number of rows
    and of unscored completions; the mean length in sampled tokens; and the mean reward. If n > 1,
    they have groups_equal: the share of rows whose scored rewards are all equal, so that grpo.py
    would get no gradient from them.
    """
    n, passed = args.eval_samples, [passes(s, args.eval_pass) for s in samples]
    correct = [sum(passed[i:i + n]) for i in range(0, len(samples), n)]  # of each row
    totals = [s.reward for s in samples if s.reward is not None]
    found = {}
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        rows = np.array([pass_at_k(n, c, k) for c in correct])
        found[f"pass@{k}"] = rows.mean()
        found[f"pass@{k}_low"], found[f"pass@{k}_high"] = interval(rows)
    found["rows"], found["unscored"] = len(correct), len(samples) - len(totals)
    found["length_mean"] = sum(s.tokens for s in samples) / len(samples)
    if totals:
        found["reward"] = sum(totals) / len(totals)
    if n > 1:
        batch = Batch(samples)
        equal = ~losses.keep_groups(batch.rewards, n, batch.scored)
        found["groups_equal"] = equal.double().mean().item()
    return {prefix + name: value for name, value in found.items()}


def passes(sample: Sample, least: float) -> bool:
    """Returns whether a completion passes: whether the first reward that applies to its row is at
    least `least`, up to rounding. A completion without a reward does not pass.
    """
    values = [value for value in sample.rewards.values() if value is not None]
    if sample.reward is None:
        return False
    return values[0] >= least or losses.equal(values[0], least)


def interval(rows: np.ndarray, draws: int = 1000) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of the mean of `rows`, values in [0, 1]. It is the
    range in which the mean of other rows of the same kind would be.

    The interval is a percentile bootstrap: the rows are drawn `draws` times with replacement,
    always by the same random numbers. A row of 0 and a row of 1 are added first, because ten rows
    that all fail do not prove that all rows do.
    """
    rows, rng = np.append(rows, [0.0, 1.0]), np.random.default_rng(0)
    means = [rng.choice(rows, len(rows)).mean() for _ in range(draws)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
