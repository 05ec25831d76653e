def near(completion, answer, **row):
    """The share of digits in their place, instead of all or nothing."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
