"""Geometric rejection of what the engine sampled from another policy: verl's seq_mean_k1.

    clip's loss, but 0 where exp(1/|o| * sum_t (old_t - engine_t)) is outside [LOW, HIGH]

It still counts in the denominators; a KL or entropy term stays. This is a loss of its own: it does
not combine with another --loss, nor with --engine_correction, which is about the same ratio.
"""
import losses

LOW, HIGH = 0.999, 1.001


def geometric(logprobs, old_logprobs, advantages, mask, *, engine_logprobs, **bounds):
    loss, metrics = losses.clip_loss(logprobs, old_logprobs, advantages, mask, **bounds)
    old, engine = losses.select(mask, old_logprobs, engine_logprobs)
    ratio = losses.row_mean(old - engine, mask).exp().expand(mask.shape)
    keep = (ratio >= LOW) & (ratio <= HIGH)
    return loss * keep, metrics | {"engine_ratio": ratio, "engine_cut": mask & ~keep}


def refuses(args) -> str | None:
    if args.engine_correction != "none":
        return "does not combine with --engine_correction, which is about the same ratio."
