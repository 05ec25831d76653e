import losses


def free(logp, old, A, row, **others):
    """PPO's loss without the clip. All are (n,): one number a token."""
    ratio = losses.capped_ratio(logp, old)
    return -ratio * A, losses.ratio_metrics(logp - old, ratio, 0 * ratio)
