"""8. A reward that hangs.

A reward runs what a model wrote through a parser, and the parser never ends. The others must get
their rewards, and the run must go on. A thread cannot be ended. Repair `score`.
"""
import multiprocessing
import queue
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

turns = multiprocessing.RawValue("Q")  # of the parser's loop, seen from every process


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
    end = time.monotonic() + 12  # for the reader's patience: think of it as for ever
    while text == "9^9^9^9" and time.monotonic() < end:
        turns.value += 1
    return len(text)


def test():
    found = queue.Queue()
    threading.Thread(daemon=True, target=run, args=(found,)).start()
    try:
        rewards = found.get(timeout=5)
    except queue.Empty:
        raise AssertionError("the run hangs: `score` has not come back after 5 seconds") from None
    assert rewards == [2, None, 3], f"not [2, None, 3]: {rewards}"
    for _ in range(10):  # what was ended a moment ago may still run a moment
        before = turns.value
        time.sleep(0.3)
        if turns.value == before:
            return
    raise AssertionError("the rewards are right, but the parser still runs, and uses a core. After "
                         "a day of training there are thousands like it")


def run(found):
    try:
        found.put(score(reward, ["12", "9^9^9^9", "345"], 1.0))
    except Exception:
        found.put(traceback.format_exc())


# In the project: `Worker` in rewards.py: processes that can be killed, with all they started.
