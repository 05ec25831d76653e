"""summary.py: how a run ended: its numbers, curve, page and grade. On rank 0."""
import io
import sys

import numpy as np

from keeping.files import write_whole
from keeping.log import Log, is_evaluation


def grade(run_log: Log, flags) -> bool:
    """Prints how the run began and ended, and draws it → whether it missed a grade."""
    steps = [row for row in run_log.rows if not is_evaluation(row)]
    evaluations = [row for row in run_log.rows if is_evaluation(row)]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    scores = [row["eval/pass@1"] for row in evaluations if "eval/pass@1" in row]
    losses = [row["eval/perplexity"] for row in evaluations if row.get("eval/perplexity")]
    n, first, last = len(rewards), 1, 1
    if n >= 13:
        first, last = 3, 10
    missed = False
    for flag, words, before, after in [
            ("target_reward", f"reward, first {first} and last {last} of {n} steps",
             rewards[:first], rewards[-last:]),
            ("", "held-out perplexity, before and after", losses[:1], losses[1:][-1:]),
            ("target_eval", "held-out pass@1, before and after", scores[:1], scores[1:][-1:])]:
        target, reached = vars(flags).get(flag), False
        if after:
            before, after = np.mean(before), np.mean(after)
            run_log.say(f"{words}: {before:.3f} -> {after:.3f}")
            reached = target and before <= target[0] and after >= target[1]
        if target and not reached:
            missed = True
            print(f"missed --{flag}: at most {target[0]} before and at least {target[1]} after",
                  file=sys.stderr)
    if rewards:
        draw_curve(run_log)
    seconds = sum(row["time/step"] for row in steps)
    tokens = sum(row.get("rollout/tokens") or row["batch/tokens"] for row in steps)
    run_log.say(f"{tokens:,} tokens in {seconds:.0f} s, all phases")
    return missed


def draw_curve(run_log: Log):
    """curve.png."""
    from tools import plot
    picture = io.BytesIO()
    plot.draw([plot.runs_in(run_log.folder)], picture)
    write_whole(run_log.folder / "curve.png", picture.getvalue())


def write_report(run_log: Log):
    """report.html."""
    from tools import report
    text = report.page([run_log.folder], most_read=report.AT_THE_END)
    write_whole(run_log.folder / "report.html", text)
