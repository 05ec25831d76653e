"""What do all training scripts share while they run? Read args.py, run.py.

args.py: the command line. run.py: the set-up, Run, the end. loss_flags.py: the flags of the loss,
and --loss FILE.py:NAME. evaluate.py: held-out rows. worst_case.py and same_policy.py: what is tried
before the first update.
This room may import all the others.
"""
