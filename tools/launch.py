"""launch.py: torchrun that adds nothing to the words of the rank that failed first.

    python tools/launch.py --nproc_per_node 2 grpo.py FLAGS     the flags of torchrun, and a script

After a failure torchrun prints a traceback of its own, a table and its log, 30 lines and more, so
that the rank's sentence is no longer on the screen. This prints none of them, and its exit status
is that of the rank. ./run.sh starts its jobs so.
"""
import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could say nothing
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as stop:  # the ranks have said what to do
        sys.exit(128 + stop.sigval)
