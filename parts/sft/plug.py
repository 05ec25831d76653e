"""Supervised fine-tuning: a script (README.md)."""

METRICS = {
    "batch/learned_tokens": "tokens that the assistant says",
    "policy/perplexity": "exp of loss/policy",
    "eval/loss": "mean of -log π over the tokens to learn of all rows",
    "eval/perplexity": "exp of eval/loss",
    "eval/entropy": "mean entropy of π over these tokens"}
