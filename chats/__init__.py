"""Which ids stand between the turns of a chat? targets.py: which of them sft.py learns.

turns.py: episodes of several turns. toolcalls.py: what the model calls in them.
This room may import trainer, rollout and all that they import.
"""
