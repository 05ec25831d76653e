"""Off-policy sequence masking, of DeepSeek-V3.2.    https://arxiv.org/abs/2512.02556, TRL

    clip's loss, but 0 where A_t < 0 and 1/|o| * sum_t (engine_t - logp_t) > DELTA

A completion that the policy has left since the engine sampled it does not become less likely still.
It still counts in the denominators; a KL or entropy term stays. This is a loss of its own: it does
not combine with another --loss.
"""
import losses

DELTA = 0.1  # nats a token. The report gives none; Trinity-RFT (pull 420): 0.05 to 0.2


def opsm(logp, old, A, row, *, n_rows, engine_logprobs, **bounds):
    loss, metrics = losses.clip_loss(logp, old, A, row, **bounds)
    moved = losses.row_mean(engine_logprobs - logp.detach(), row, n_rows)
    keep = (A >= 0) | (moved <= DELTA)
    return loss * keep, metrics | {"opsm_cut": ~keep}
