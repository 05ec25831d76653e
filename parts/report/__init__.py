"""A page of a run, with its curves, its completions and their tokens (--report)."""
