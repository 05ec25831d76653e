"""Will this run work? Read plan.py, shape.py, memory.py, inputs.py: all before the weights load.

loss_flags.py: the flags of the loss, and --loss FILE.py:NAME. worst_case.py and same_policy.py:
what is tried before the first update.
This room may import chats and all below it.
"""
