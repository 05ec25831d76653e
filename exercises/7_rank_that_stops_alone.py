"""7. A rank that stops alone.

Two ranks train. After each step a rank looks whether it should stop: its scheduler told it, or its
clock did. The other one waits in a collective for ever. Repair `should_stop`.
"""
import datetime
import multiprocessing
import os
import tempfile

import torch
import torch.distributed as td


# ---- your turn
def should_stop(told):
    """told: was this rank told to stop? → does it end now? Called by all ranks after each step."""
    return told
# ---- the test


def train(rank, file, ended):
    td.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                          timeout=datetime.timedelta(seconds=3))
    steps = 0
    for step in range(5):
        gradient = torch.ones(1)
        try:
            td.all_reduce(gradient)
        except RuntimeError:
            steps = -1  # nobody came
            break
        steps += 1
        if should_stop(told=rank == 1 and step == 2):
            break
    ended.put((rank, steps))
    ended.close()
    ended.join_thread()
    os._exit(0)


def test():
    context = multiprocessing.get_context("fork")
    ended = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=train, args=(rank, f"{folder}/file", ended))
                 for rank in range(2)]
        for process in ranks:
            process.start()
        steps = dict(ended.get(timeout=30) for _ in ranks)
        for process in ranks:
            process.join(10)
    assert steps == {0: 3, 1: 3}, f"steps of each rank, -1 if it waited for the other: {steps}"


# In the project: `def agree` in dist.py; `stopping = run.stop.agreed()` in grpo.py.
