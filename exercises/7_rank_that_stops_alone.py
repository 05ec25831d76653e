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


def train(rank, told_rank, file, ended):
    td.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                          timeout=datetime.timedelta(seconds=3))
    steps = 0
    try:
        for step in range(5):
            td.all_reduce(torch.ones(1))  # the gradient
            steps += 1
            if should_stop(told=rank == told_rank and step == 2):
                break
    except RuntimeError:
        steps = -1  # nobody came
    ended.put((rank, steps))
    ended.close()
    ended.join_thread()
    os._exit(0)


def test():
    context = multiprocessing.get_context("fork")
    for told_rank, right in ((1, 3), (0, 3), (None, 5)):
        ended = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=train, args=(rank, told_rank, f"{folder}/file", ended))
                     for rank in range(2)]
            for process in ranks:
                process.start()
            steps = dict(ended.get(timeout=30) for _ in ranks)
            for process in ranks:
                process.join(10)
        told = "no rank is told" if told_rank is None else f"rank {told_rank} is told in step 3"
        assert steps == {0: right, 1: right}, (
            f"{told}: the steps of each rank are {steps}, where -1 is a rank that waited in vain. "
            f"Both must do {right}")


# In the project: `def any_rank` in dist.py; `stopping = run.stop.agreed()` in grpo.py.
