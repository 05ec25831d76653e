"""bench/host.py in small: what the host does for a step grows with real tokens alone."""
from bench import host
from live import Live


def test_padding_costs_nothing():
    """A matrix of all completions would double with the longest one, which is the last."""
    found = []
    for longest in 16_000, 32_000:
        samples = host.make_samples(64, 8, 256, longest)
        with Live() as live:
            host.learn(samples, 8, 64, 4, 512 + longest)
        found.append((live, sum(s.completion.tokens for s in samples)))
    (short, tokens), (long, more) = found
    assert more == tokens + 16_000
    assert long.total / short.total < 1.1 * more / tokens
    assert long.largest <= 8 * more  # no tensor has more than one number a token
