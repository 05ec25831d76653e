"""The real script, with faults put in: `torchrun tests/faulty.py grpo --flags …` with FAULTS="WHERE:RANK:STEP:WHAT …" in the environment.

Shipped functions are wrapped from outside, so that the product has no hook for tests. At WHERE, on rank RANK (or * for all), in
step STEP (counted from 0; -1 is before the first), WHAT happens: raise, kill, hang, nan, full, term.
"""
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import dist  # first: it sets what torch reads
import tyro

import batch
import checkpoint
import log
import model
import rewards
import rollout
import run

PLACES = {"sync": (rollout.Engine, "load"), "rollout": (rollout.Engine, "generate"), "reward": (rewards.Scorer, "score"),
          "score": (batch.Batch, "score"), "forward": (model.Policy, "logprobs"), "backward": (model.Policy, "backward"), "update": (model.Policy, "step"),
          "log": (log.Log, "step"), "save": (checkpoint.dcp, "save"), "saved": (checkpoint, "fingerprint"), "evaluate": (run.Run, "evaluate"),
          "export": (model.Policy, "export"), "load": (checkpoint, "load"), "setup": (model, "build")}
now = -1


def wrap(owner, name: str, rank: str, step: int, what: str) -> None:
    shipped = getattr(owner, name)

    def wrapped(*args, **kwargs):
        global now
        if now != step or rank not in ("*", os.environ.get("RANK", "0")):
            return shipped(*args, **kwargs)
        if what == "raise":
            raise ValueError(f"a fault was put into {name} on rank {rank}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(1e6)
        if what == "term":                             # and go on
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "nan":
            return shipped(args[0], args[1] * float("nan"))
        if what == "full":                             # the kernel refuses to let files grow, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            return shipped(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    setattr(owner, name, wrapped)


def count_steps(shipped):
    def steps(self):
        global now
        for now in shipped(self):                      # a step lasts until the next one begins: its save is its own
            yield now
    return steps


if __name__ == "__main__":
    script = __import__(sys.argv.pop(1))
    run.Run.steps = count_steps(run.Run.steps)
    for fault in os.environ.get("FAULTS", "").split():
        place, rank, step, what = fault.split(":")
        if place == "engine":                          # inside vLLM: the class is only there once the engine is
            shipped = rollout.Engine.__init__

            def build(self, *args, _shipped=shipped, **kwargs):
                _shipped(self, *args, **kwargs)
                wrap(self.llm, "generate", rank, int(step), what)
            rollout.Engine.__init__ = build
        else:
            wrap(*PLACES[place], rank, int(step), what)
    dist.run(script.train, tyro.cli(script.Args, use_underscores=True))
