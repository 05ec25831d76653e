"""Will this run work? Read plan.py, shape.py, memory.py, inputs.py: all before the weights load.

floor.py: the least time of a step. This room may import chats and all below it.
"""
