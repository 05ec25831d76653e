"""What stands around the loop, and what is kept of a run? Read run.py first.

log.py: what is shown and written. checkpoint.py: save and resume. evaluate.py: held-out rows.
export.py: the trained model. files.py: whole files. summary.py: the end of a run.
This room may import all the others.
"""
