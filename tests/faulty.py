"""A script with faults, or with a record of what passes between its components.

    FAULTS="WHERE:RANK:STEP:WHAT …" torchrun tests/faulty.py grpo FLAGS
    RECORD=FOLDER torchrun tests/faulty.py grpo FLAGS

Shipped functions are wrapped from outside, so the product has no hook for tests. At WHERE, on rank
RANK (* is all), in step STEP (from 0; -1 is before the first), WHAT happens: raise, kill, hang,
nan, full, none, term, wrong. A record is FOLDER/RANK.jsonl: a line [name, step, what] for each
call of a function of `RECORDED`.
"""
import importlib
import json
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

RANK = os.environ.get("RANK", "0")
PLACES = {
    "sync": (rollout.Engine, "load"), "rollout": (rollout.Engine, "generate"),
    "reward": (rewards.Pool, "ask"), "engine": (rollout.Engine, "outputs"),
    "score": (batch.Batch, "score"), "forward": (model.Policy, "logprobs"),
    "backward": (model.Policy, "backward"), "update": (model.Policy, "step"),
    "log": (log.Log, "step"), "save": (checkpoint.dcp, "save"),
    "saved": (checkpoint, "check_shared"), "evaluate": (run.Run, "evaluate"),
    "weights": (model.Policy, "weights"), "export": (run, "export_model"),
    "setup": (model, "build")}


def wrap(place: str, act) -> None:
    """In the place of the function, act(function, *arguments) is called. place: a name of PLACES,
    or MODULE/CLASS/METHOD or MODULE/FUNCTION."""
    module, *path = place.split("/")
    if place in PLACES:
        owner, name = PLACES[place]
    else:
        owner, name = importlib.import_module(module), path[-1]
        owner = getattr(owner, path[0]) if len(path) > 1 else owner
    shipped = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: act(shipped, *args, **kwargs))


def step() -> int:
    return dist.World.joined.step if dist.World.joined else -1


# ---- faults

def fault(rank: str, when: str, what: str):
    """What `wrap` calls: the function, but for one thing on this rank in this step."""
    def act(shipped, *args, **kwargs):
        if step() != int(when) or rank not in ("*", RANK):
            return shipped(*args, **kwargs)
        if what == "raise":
            raise ValueError(f"a fault was put into {shipped.__name__} on rank {rank}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(1e6)
        if what == "term":  # and go on
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "nan":
            return shipped(args[0], args[1] * float("nan"))
        if what == "wrong":  # one tensor that is another's
            return ((name, weight.flip(0) if name.endswith("0.self_attn.q_proj.weight") else weight)
                    for name, weight in shipped(*args, **kwargs))
        if what in ("full", "none"):  # files cannot grow, as on a full disk
            limit_files(100_000 if what == "full" else 1)
        try:
            return shipped(*args, **kwargs)
        finally:
            limit_files(resource.RLIM_INFINITY)
    return act


def limit_files(size: int) -> None:
    """No file of this process can grow above `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---- a record

RECORDED = {  # the function: what is written of its arguments
    "vllm/LLM/__init__": lambda self, folder, **options: options,
    "vllm/LLM/generate": lambda self, prompts, params, **options: [
        {name: getattr(p, name) for name in p.__struct_fields__} for p in params],
    "dist/World/same_phase": lambda self, name, count: [name, count],
    "dist/join": lambda timeout: timeout,
    "model/build": lambda kind, folder, world, args, trained=True: [kind.__name__, trained],
    "losses/token_rewards": lambda *given, kl_coef: kl_coef,
    "checkpoint/load": lambda saved, *given: saved.state["step"]}


def record(name: str, what) -> None:
    with open(Path(os.environ["RECORD"], f"{RANK}.jsonl"), "a") as file:
        file.write(json.dumps([name, step(), what], default=str) + "\n")


class Wandb:
    """In the place of wandb: it records, and with RECORD_WANDB=away its server does not answer."""

    def __init__(self, **how):
        record("wandb.init", how)

    def log(self, row, step):
        record("wandb.log", [row, step])
        if os.environ.get("RECORD_WANDB") == "away":
            raise ConnectionError("the server is away")

    def finish(self):
        record("wandb.finish", None)


def main() -> None:
    script = importlib.import_module(sys.argv.pop(1).replace("/", "."))
    for one in os.environ.get("FAULTS", "").split():
        place, *how = one.split(":")
        wrap(place, fault(*how))
    if "RECORD" in os.environ:
        import wandb
        wandb.init, wandb.login = Wandb, lambda **asked: asked != {"prompt": False, "verify": False}
        for place, seen in RECORDED.items():
            def act(shipped, *args, _name=place, _seen=seen, **kwargs):
                record(_name, _seen(*args, **kwargs))
                return shipped(*args, **kwargs)
            wrap(place, act)
    script.main()


if __name__ == "__main__":
    main()
