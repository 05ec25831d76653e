"""A random reward, the control of an experiment: nothing can be learned from it.

    ./run.sh --reward exact:0 examples/coin.py:coin      trains on coins, and still logs `exact`
"""
import random


def coin(prompts, completions, **columns):
    """1 or 0 for each completion, 1 with probability 0.25. Equal completions get different coins:
    a hash of the completion would be a task, and it could be learned."""
    rng = random.Random(repr((prompts, completions)))
    return [float(rng.random() < 0.25) for _ in completions]
