"""How does a completion go on, and which of its ids are learned? Read turns.py.

toolcalls.py: what the model calls in a turn. carry.py: completions that go on in the next step.
targets.py: which ids of a chat sft.py learns. teacher.py: a second model beside the policy.
This room may import trainer, rollout and all that they import.
"""
