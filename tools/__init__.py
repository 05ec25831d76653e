"""For finished runs and for forks. Each file runs alone: `python tools/plot.py RUN`.

prove.py: does an edited `learn` keep ten promises? uphill.py: one of them, on all rollouts of a
table; written.py: another, a step as the papers write it. float64.py: what prove and tests compute
in.
plot.py, samples.py, compare.py: curves, completions, two runs beside each other.
report.py: a page (parts/report/).
export.py: a model of any checkpoint.
first_hour.py, watched.py: does a GPU compute what a CPU does? What a run uses of it.
"""
