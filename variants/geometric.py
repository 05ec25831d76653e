"""Geometric rejection of what the engine sampled from another policy: verl's seq_mean_k1.

    clip's loss, but 0 where exp(1/|o| * sum_t (old_t - engine_t)) is outside [LOW, HIGH]

It still counts in the denominators; a KL or entropy term stays. This is a loss of its own: it does
not combine with another --loss, nor with --engine_correction, which is about the same ratio.

The made-up samples of ./run.sh prove lie outside of these bounds. With wider ones it is proved:
./run.sh prove --loss tests/often.py:geometric
"""
import losses

LOW, HIGH = 0.999, 1.001


def geometric(logp, old, A, row, *, n_rows, engine_logprobs, **bounds):
    loss, metrics = losses.clip_loss(logp, old, A, row, **bounds)
    ratio = losses.row_mean(old - engine_logprobs, row, n_rows).exp()
    keep = (ratio >= LOW) & (ratio <= HIGH)
    return loss * keep, metrics | {"engine_ratio": ratio, "engine_cut": ~keep}


def refuses(args) -> str | None:
    if args.engine_correction != "none":
        return "does not combine with --engine_correction, which is about the same ratio."
