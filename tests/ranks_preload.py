"""What the fork server of ranks.py imports once for all ranks. It must start no thread."""
import gc
import threading

import tqdm

tqdm.tqdm.set_lock(threading.RLock())     # its own is a semaphore, which the fork server would leak
import grpo  # noqa: E402, F401

gc.freeze()  # a rank does not walk through what it never frees
