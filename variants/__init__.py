"""Losses and advantages that fewer use: one file a paper. --loss variants/sapo.py:sapo takes one.

Loss: f(logprobs, old_logprobs, advantages, mask, *, engine_logprobs, clip_low, clip_high,
dual_clip) → token_loss (b, t), metrics. Advantage: f(rewards (N,), group, *, scored (N,) bool, eps,
parts {name: (weight, (N,))}, trained (N,) bool) → (N,) float64, 0 where not scored. **others may
stand for what a function does not use. Shapes are those of losses.py. refuses(args): why the flags
do not fit, or None. Constants are at the top: edit them there. Only losses and dist are imported.
"""
