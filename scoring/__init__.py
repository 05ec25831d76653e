"""How does a completion become a number? Read verifiers.py, signatures.py, replies.py, worker.py.

The code here runs in worker processes, which rewards.py starts and may kill. It imports no torch.
"""
