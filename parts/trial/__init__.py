"""The largest micro-batches are tried before the first rollout (--try_worst_case)."""
