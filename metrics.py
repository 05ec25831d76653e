"""metrics.py: the definition of each metric, in words and formulas.

`python grpo.py --metrics` prints this file's table and those of the parts. No other file has a
definition of a metric.

A run appends one JSON object per step to metrics.jsonl, and one per evaluation. Metrics are
computed over all ranks: except for times and memory, none depends on the number of ranks or on the
token budgets. Numbers have ten digits, and a value that is not finite is null.
"""
import textwrap

import part
from errors import tell

TERMS = """\
Log-probs and entropies are in nats. Token mean: the mean over all sampled tokens in the loss.
Weighted mean of x: Σ w·x / Σ w, where w are the loss's own token weights (--aggregation) and the
sums run over all minibatches of the step. It is over the completions that learn, and 0 if none
does; that of loss/… is over all completions in the loss. A completion does not learn if its
advantages are all 0 and no KL term, entropy term or loss of a file acts on it: its loss is 0 for
every weight of the model, so it is in no pass."""

METRICS = {  # heading: {metric: its definition}
    "Reward and rollout, of every completion that was sampled in the step": {
        "step": "steps done: 1 in the line of the first step, 0 in that of the first evaluation",
        "reward/mean": "mean total reward of the scored completions",
        "reward/std": "standard deviation (ddof 0) of these rewards",
        "reward/NAME": "mean of one of the summed rewards, before its weight",
        "rollout/completions": "completions sampled",
        "rollout/unscored": "completions without a reward",
        "rollout/length_mean": "sampled tokens per completion",
        "rollout/turns_mean": "runs of sampled tokens per completion: 1 without replies in it",
        "rollout/truncated_frac": "share of the completions that were cut by --max_tokens",
        "rollout/tokens": "tokens sampled",
        "rollout/tokens_per_s": "tokens sampled / time/rollout",
        "rollout/logprob_gap_mean":
            "weighted mean of |log π_trainer - log π_engine|, before the update",
        "rollout/logprob_gap_max": "the largest such difference of a token that learns",
        "policy/entropy":
            "-Σ log π_engine / sampled tokens. At each token the expectation of -log π is the "
            "entropy of the sampling distribution, so this estimates its mean over tokens: Σ log π "
            "is unbiased, and the ratio of the two sums is consistent"},
    "Loss and policy": {
        "loss/policy": "weighted mean of the token loss, before the KL and entropy terms",
        "loss/kl": "weighted mean of the KL estimate of --kl_loss_coef",
        "loss/entropy": "with --entropy_coef: weighted mean of the entropy of the sampling "
                        "distribution, computed from all logits",
        "policy/ratio": "weighted mean of r = π/π_old; with gspo or gmpo of the completion's ratio",
        "policy/clip_frac": "weighted mean of 1 where the bounds cut: no gradient is left, or a "
                            "weight is at its bound (cispo)",
        "policy/approx_kl": "weighted mean of (r - 1) - log r, with r of the token: an estimate of "
                            "KL(π_old‖π)",
        "policy/engine_ratio": "with --engine_correction: weighted mean of π_trainer/π_engine; of "
                               "a completion, if the correction is",
        "policy/engine_cut": "weighted mean of 1 where that ratio was truncated or masked",
        "policy/NAME": "weighted mean of a metric that a loss of a file returns",
        "policy/kl": "ppo.py with a reference model: token mean of log π_old - log π_ref",
        "policy/kl_coef": "ppo.py with a reference model: the coefficient of that KL",
        "grad/norm": "norm of the gradient over all parameters before clipping, mean over the "
                     "optimizer steps. 0: no completion learns",
        "grad/norm_not_finite": "optimizer steps that were not applied, because the gradient was "
                                "not finite",
        "lr": "the learning rate that the optimizer used",
        "update/steps": "optimizer steps applied",
        "update/skipped": "minibatches without a token in the loss; they have no optimizer step"},
    "Critic (ppo.py)": {
        "loss/value": "weighted mean of the value loss",
        "critic/clip_frac": "weighted mean of 1 where --value_clip made the error larger",
        "critic/explained_var":
            "1 - Σ(return - V)² / Σ(return - mean return)², over the tokens in the loss",
        "critic/value_mean": "token mean of V, before the update",
        "critic/grad_norm": "as grad/norm, for the critic",
        "critic/grad_norm_not_finite": "as grad/norm_not_finite, for the critic",
        "critic/lr": "as lr, for the critic"},
    "Batch and data": {
        "batch/prompts": "prompts of the update",
        "batch/groups_equal":
            "grpo.py: share of the groups whose scored rewards are all equal: no gradient",
        "batch/trained": "completions in the loss",
        "batch/tokens": "tokens of the update, prompts included",
        "batch/dropped": "completions not trained on: the sum of the reasons below",
        "batch/dropped_unscored": "without a reward",
        "batch/dropped_no_baseline": "fewer completions of the group have a reward than the "
                                     "advantage compares: 2, or LEAST of its file",
        "batch/dropped_overlong": "truncated, with --overlong_filter",
        "batch/dropped_equal": "all rewards of the group are equal, with --dynamic_sampling",
        "batch/dropped_surplus": "of groups beyond --batch, with --dynamic_sampling",
        "data/position": "prompts taken from the data so far"},
    "Evaluation, in a line of its own; of several data sources also as eval/SOURCE/…": {
        "eval/pass@K": "mean over rows of 1 - C(n-c, K)/C(n, K), where c of n = --eval_samples "
                       "completions pass; K are the powers of two up to n, and n",
        "eval/pass@K_low": "lower end of its 95 % interval over rows (bootstrap, with one row of "
                           "0 and one of 1 added). It says nothing about other seeds",
        "eval/pass@K_high": "upper end of this interval",
        "eval/rows": "rows evaluated",
        "eval/groups_equal": "share of the rows whose scored completions all have the same reward, "
                             "or none has one: GRPO gets no gradient from such a prompt",
        "eval/reward": "mean total reward of the scored completions",
        "eval/length_mean": "sampled tokens per completion",
        "eval/unscored": "completions without a reward",
        "time/eval": "seconds of the evaluation"},
    "Time in seconds on rank 0, and memory": {
        "time/step": "the whole step, without evaluation and checkpoints",
        "time/loading": "models, engine and reward workers; in the first line after a start",
        "time/sync": "new weights into the engine",
        "time/rollout": "generation",
        "time/reward": "scoring by the rewards",
        "time/logprobs": "old and reference log-probs; in ppo.py also values",
        "time/update": "updates of the policy",
        "time/update_critic": "updates of the critic (ppo.py)",
        "memory/peak_gb": "the most GiB in use since the row before, on the rank that needed most. "
                          "On a GPU: of all processes on it. On a CPU: resident in the rank"}}


def show_metrics():
    """Prints the definition of each metric, those of the parts last."""
    tell(TERMS)
    tables = METRICS | {f"parts/{name}": table for name, table in part.asked("METRICS").items()}
    for heading, table in tables.items():
        tell(f"\n{heading}")
        for name, definition in table.items():
            tell(textwrap.fill(f"{name:<27} {definition}", 100, initial_indent="  ",
                               subsequent_indent=" " * 30, break_on_hyphens=False))
