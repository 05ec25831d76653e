"""What stands around the loop, and what is kept of a run? Read run.py first.

log.py: what is shown and written. samples.py: completions, to read. files.py: whole files.
checkpoint.py: save, resume, export. evaluate.py: held-out rows. summary.py: the end of a run.
This room may import all the others.
"""
