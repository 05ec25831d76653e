"""How does a completion become a number? Read verifiers.py, signatures.py, worker.py.

messages.py reads the messages of rows, for data.py. The rest runs in worker processes, which
rewards.py starts and may kill: replies.py is for --reply, waiting.py for `async def` rewards.
Nothing here imports torch.
"""
