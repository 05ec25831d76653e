"""How does a completion become a number? Read verifiers.py, signatures.py, replies.py, worker.py.

messages.py reads the messages of rows, for data.py. The rest runs in worker processes, which
rewards.py starts and may kill. Nothing here imports torch.
"""
