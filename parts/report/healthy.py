"""healthy.py: the range of a metric in a healthy run, what a value outside means, and what to try.

report.html marks where a curve leaves its range. A metric outside is a reason to look; one inside
is no proof. `warnings` has what no range of one metric shows.
"""
from collections import Counter

HEALTHY = {  # metric: (the range, what it means if it is outside, what to try)
    "rollout/logprob_gap_mean": (
        "below 0.001 in float32; in bfloat16 --max_gap is the limit",
        "The engine is not the policy that is trained.",
        "See docs/use/troubleshooting.md, the gap between engine and trainer."),
    "policy/entropy": (
        "above 0.005",
        "All completions of a prompt are the same: nothing to learn from.",
        "A smaller --lr, a larger --clip_high. If the reward is high too, the task is done."),
    "policy/approx_kl": (
        "below 0.05",
        "One step moves the policy far.",
        "Fewer --epochs or --minibatches, a smaller --lr."),
    "policy/clip_frac": (
        "below 0.3",
        "Many tokens are at the bounds of the ratio and have no gradient.",
        "Fewer --epochs or --minibatches, a smaller --lr."),
    "policy/ratio": (
        "between 0.9 and 1.1",
        "Old and new log-probs are not of the same thing.",
        "Look at the gap first. Then a smaller --lr."),
    "reward/std": (
        "above 0.001",
        "All rewards of the step are equal: all advantages are 0.",
        "Easier or harder prompts, a reward with more values, a larger --group."),
    "grad/norm": (
        "between 1e-9 and 10",
        "0: nothing to learn from. Large: the gradient is clipped.",
        "0: see reward/std. Large: a smaller --lr, more warm-up."),
    "grad/norm_not_finite": (
        "below 1",
        "The optimizer step was not applied. Three such steps in a row end the run.",
        "A smaller --lr or --max_grad_norm. See whether one prompt does it."),
    "loss/kl": (
        "between 0 and 1",
        "Below 0: the wrong sign (k2 and k3 cannot be). Large: the policy is far from its "
        "start.",
        "Large: a larger --kl_loss_coef, a smaller --lr."),
    "rollout/truncated_frac": (
        "below 0.2",
        "Completions are cut before they answer.",
        "A larger --max_tokens, --overlong_filter, or a reward for shorter ones."),
    "rollout/unscored": (
        "below 1",
        "The reward failed on some completions; they are left out.",
        "Read the printed traceback."),
    "critic/explained_var": (
        "above 0",
        "The critic predicts worse than a constant: the advantages are noise.",
        "A larger --critic_lr, --critic_warmup_steps."),
}

PASSES = 0.9  # above this pass@1 has little room to rise
COMMON = 1 / 3  # share of the completions that may be one text


def warnings(curves: dict[str, list], rows: list[dict]) -> list[str]:
    """Returns sentences about a run whose metrics may all be in their ranges.

    curves: each metric by name, an item a row, None where it has none. rows: the lines of samples/
    of the last evaluation, or of the last step if there is none.
    """
    return [*better_reward_alone(curves), *one_text(rows)]


def better_reward_alone(curves: dict[str, list]):
    """The reward rises by a quarter of its first standard deviation or more, and the last pass@1
    is within the interval of the first."""
    def of(name: str) -> list[float]:
        return [value for value in curves.get(name, []) if value is not None]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    reward, std, passed, high = map(of, ("reward/mean", "reward/std", "eval/pass@1",
                                         "eval/pass@1_high"))
    if min(len(reward) / 2, len(std), len(passed) / 2, len(high)) < 1:
        return
    few = min(3, len(reward) // 2)
    before, after = mean(reward[:few]), mean(reward[-few:])
    if after - before > mean(std[:few]) / 4 and passed[-1] <= high[0] and passed[-1] < PASSES:
        yield (f"The reward rose from {before:.3g} to {after:.3g}, but pass@1 did not: "
               f"{passed[0]:.3f} before, {passed[-1]:.3f} after. The reward may pay for something "
               "else than a right answer: read samples/eval_*.")


def one_text(rows: list[dict]):
    """More than a third of the completions are one text, which no right answer is as often."""
    texts = Counter(row["completion"].strip() for row in rows)
    answers = Counter(str(row["answer"]) for row in rows if row.get("answer") is not None)
    (text, count), *_ = texts.most_common(1) or [("", 0)]
    most = max(answers.values(), default=0)
    if len(rows) >= 10 and count > max(COMMON * len(rows), 1.5 * most):
        words = repr(text[:40] + (" …" if len(text) > 40 else ""))
        yield (f"{count:,} of {len(rows):,} completions are the same text, {words}: the model may "
               "earn partial credit without reading the prompt.")
