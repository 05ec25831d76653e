"""8. A reward that hangs.

A reward runs what a model wrote through a parser, and the parser never ends. The others must get
their rewards, and the run must go on. A thread cannot be ended. Repair `score`.
"""
import multiprocessing  # noqa: F401
import threading
import time
from concurrent.futures import ThreadPoolExecutor


# ---- your turn
def score(reward, completions, seconds):
    """→ the reward of each completion, None if it takes longer than `seconds`."""
    rewards = []
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(reward, text) for text in completions]:
            try:
                rewards.append(future.result(timeout=seconds))
            except TimeoutError:
                rewards.append(None)
    return rewards
# ---- the test


def reward(text):
    end = time.monotonic() + 8  # for the reader's patience: think of it as for ever
    while text == "9^9^9^9" and time.monotonic() < end:
        pass
    return len(text)


def test():
    found = []
    work = threading.Thread(daemon=True, target=lambda: found.extend(
        score(reward, ["12", "9^9^9^9", "345"], 0.5)))
    work.start()
    work.join(4)
    assert found, "the run hangs: `score` has not come back after 4 seconds"
    assert found == [2, None, 3], found


# In the project: `Worker` in rewards.py: processes that can be killed, with all they started.
