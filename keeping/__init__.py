"""What is kept of a run? Read files.py, log.py, checkpoint.py.

files.py: whole files. log.py: what is shown and written. samples.py: completions, to read.
checkpoint.py: save, resume, export. summary.py: the numbers, curve and grade at the end.
This room may import preflight and all below it.
"""
