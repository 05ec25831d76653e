"""Losses and advantages that fewer use: one file a paper. --loss variants/sapo.py:sapo takes one.

Loss: f(logp, old, A, row, *, rows, engine_logprobs, clip_low, clip_high, dual_clip) → token_loss,
metrics; all are (n,), but for the number of rows and the bounds. Advantage: f(rewards (N,), group,
*, scored (N,) bool, eps, parts {name: (weight, (N,))}, trained (N,) bool) → (N,) float64, 0 where
not scored; a part is NaN where it does not apply. **others may stand for what a function does not
use. What they mean: losses.py. refuses(args): why the flags do not fit, or None. Constants are at
the top: edit them there. Only losses and dist are imported.
"""
