"""Will this run work? Read plan.py, memory.py, inputs.py: all before the weights load.

This room may import chats and all below it.
"""
