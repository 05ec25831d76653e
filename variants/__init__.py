"""Losses and advantages that fewer use: one file a paper. --loss variants/sapo.py:sapo takes one.

Loss: f(logp, old, A, row, *, n_rows, engine_logprobs, draws, clip_low, clip_high, dual_clip) →
token_loss, metrics; all are (n,), but for the number of rows and the bounds. draws() gives each
token a random number, the same in any order. A loss gets completions whose advantages are 0 too.
dual_clip: None unless it is given. Advantage: f(rewards (N,), group, *, scored (N,) bool,
eps, parts {name: (weight, (N,))}, trained (N,) bool, row (M,), lengths (N,), old_logprobs (M,),
engine_logprobs (M,), batch) → (N,) float64, 0 where not scored. parts: the rewards of --reward, NaN
where one does not apply. batch: the batch.Batch of the step.
PER = "token" in a file says that its function returns (M,), and LEAST = 2 that it compares the
completions of a prompt: a group with fewer scored ones is not trained on. Without it LEAST is 1:
then the function decides what a lone scored completion gets. **others must stand for
what a function does not use. What they mean: losses.py. refuses(args): why the flags do not fit, or
None. Constants are at the top: edit them there. Of the project only files in front are imported.
"""
