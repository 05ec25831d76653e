"""The real script with faults: FAULTS="WHERE:RANK:STEP:WHAT …" torchrun tests/faulty.py grpo …

Shipped functions are wrapped from outside, so the product has no hook for tests. At WHERE, on rank
RANK (* is all), in step STEP (from 0; -1 is before the first), WHAT happens: raise, kill, hang,
nan, full, none, term, wrong.
"""
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import batch
import checkpoint
import dist
import log
import model
import rewards
import rollout
import run

PLACES = {
    "sync": (rollout.Engine, "load"), "rollout": (rollout.Engine, "generate"),
    "reward": (rewards.Pool, "ask"),
    "score": (batch.Batch, "score"), "forward": (model.Policy, "logprobs"),
    "backward": (model.Policy, "backward"), "update": (model.Policy, "step"),
    "log": (log.Log, "step"), "save": (checkpoint.dcp, "save"),
    "saved": (checkpoint, "check_shared"), "evaluate": (run.Run, "evaluate"),
    "weights": (model.Policy, "weights"), "export": (run, "export_model"),
    "setup": (model, "build")}


def found(place: str):
    """MODULE/CLASS/METHOD, of a part."""
    module, owner, name = place.split("/")
    return getattr(importlib.import_module(module), owner), name


def wrap(owner, name: str, rank: str, step: int, what: str) -> None:
    shipped = getattr(owner, name)

    def wrapped(*args, **kwargs):
        now = dist.World.joined.step if dist.World.joined else -1
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
        if what == "wrong":                            # one tensor that is another's
            return ((name, weight.flip(0) if name.endswith("0.self_attn.q_proj.weight") else weight)
                    for name, weight in shipped(*args, **kwargs))
        if what in ("full", "none"):                   # files cannot grow, as on a full disk
            most = 100_000 if what == "full" else 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        try:
            return shipped(*args, **kwargs)
        finally:
            infinite = resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    script = importlib.import_module(sys.argv.pop(1).replace("/", "."))
    for fault in os.environ.get("FAULTS", "").split():
        place, rank, step, what = fault.split(":")
        if place == "engine":                          # inside vLLM, which is there once it starts
            shipped = rollout.Engine.__init__

            def build(self, *args, _shipped=shipped, _fault=(rank, int(step), what), **kwargs):
                _shipped(self, *args, **kwargs)
                wrap(self.llm, "generate", *_fault)
            rollout.Engine.__init__ = build
        else:
            owner, name = PLACES.get(place) or found(place)
            wrap(owner, name, rank, int(step), what)
    script.main()
