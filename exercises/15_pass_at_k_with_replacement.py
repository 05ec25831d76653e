"""15. pass@k with replacement.

Of n samples of a problem c are right. pass@k is the probability that k samples have a right one.
With the rate c/n of one sample this is 1 - (1 - c/n)^k, or is it? No run trains on this number, so
no curve of a training step shows a mistake in it. Repair `pass_at_k`.
"""
from itertools import combinations


# ---- your turn
def pass_at_k(n, c, k):
    """n samples, c of them right, k of them drawn (1 <= k <= n) → a number in [0, 1]."""
    return 1 - (1 - c / n) ** k
# ---- the test


def test():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = [any(i < c for i in some) for some in combinations(range(n), k)]
                true, found = sum(draws) / len(draws), pass_at_k(n, c, k)
                assert abs(found - true) < 1e-9, (
                    f"n = {n}, c = {c}, k = {k}: {len(draws)} draws of {k} different samples, of "
                    f"which {sum(draws)} have a right one: {true:.3f}, and not {found:.3f}")
    assert abs(pass_at_k(10**4, 5, 100) - 0.04902) < 1e-4, "for large n and k"


# In the project: `1.0 - comb(n - correct, k) / comb(n, k)` in evaluate.py.
