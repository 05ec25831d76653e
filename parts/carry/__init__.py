"""Completions that go on in the next step (--carry)."""
