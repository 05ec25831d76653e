"""A script with faults, or with a record of what passes between its components.

    FAULTS="WHERE:RANK:STEP:WHAT …" torchrun tests/faulty.py grpo FLAGS
    RECORD=FOLDER torchrun tests/faulty.py grpo FLAGS

Shipped functions are wrapped from outside, so the product has no hook for tests. At WHERE, on rank
RANK (* is all), in step STEP (from 0; -1 is before the first), WHAT happens: raise, SIGKILL,
SIGTERM, hang, slow, nan, wrong, full, or JOB: SIGTERM to this rank and all its processes, as a
scheduler has it (JOB-0.1: after 0.1 s, while the function runs). NO_LOCKS=ENOLCK: so flock fails. A
record is FOLDER/RANK.jsonl: a line [name, step, what] for each call of a function of `RECORDED`.
"""
import errno
import fcntl
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

import dist
from tables import table

RANK = os.environ.get("RANK", "0")
PLACES = dict(table("""
setup | model/build
sync | rollout/Engine/load
weights | model/Policy/weights
rollout | rollout/Engine/generate
engine | rollout/Engine/outputs
reward | rewards/Pool/ask
score | batch/Batch/forward
forward | model/Policy/logprobs
backward | model/Policy/backward
log | log/Log/step
save | torch.distributed.checkpoint/save
saved | checkpoint/check_shared
evaluate | run/Run/evaluate
export | run/export_model
written | checkpoint/save_torch_state_dict
"""))


def wrap(place: str, act) -> None:
    """In the place of the function, act(function, *arguments) is called. place: MODULE/FUNCTION, or
    MODULE/CLASS/METHOD."""
    module, *path, name = place.split("/")
    owner = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)
    shipped = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: act(shipped, *args, **kwargs))


def step() -> int:
    return dist.World.joined.step if dist.World.joined else -1


# ---- faults

def end_job() -> None:
    """SIGTERM to this process, its workers and what they have started."""
    for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    time.sleep(0.1)  # until the handlers have run


def no_locks(file, how):
    number = getattr(errno, os.environ["NO_LOCKS"])
    raise OSError(number, os.strerror(number))


def fault(rank: str, when: str, what: str):
    """What `wrap` calls: the function, but for one thing on this rank in this step."""
    def act(shipped, *args, **kwargs):
        if step() != int(when) or rank not in ("*", RANK):
            return shipped(*args, **kwargs)
        if what == "raise":
            raise ValueError(f"a fault was put into {shipped.__name__} on rank {rank}")
        if what.startswith("SIG"):  # and go on, if it can
            os.kill(os.getpid(), signal.Signals[what])
        if what.startswith("JOB"):
            delay = float(what.partition("-")[2] or 0)
            threading.Timer(delay, end_job).start() if delay else end_job()
        if what in ("hang", "slow"):
            time.sleep(1e6 if what == "hang" else 6)
        if what == "nan":
            return shipped(args[0], args[1] * float("nan"))
        if what == "wrong":  # one tensor that is another's
            return ((name, weight.flip(0) if name.endswith("0.self_attn.q_proj.weight") else weight)
                    for name, weight in shipped(*args, **kwargs))
        if what == "full":  # from here on no file can grow above this size, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return shipped(*args, **kwargs)
    return act


# ---- a record

RECORDED = {  # the function: what is written of its arguments
    "vllm/LLM/__init__": lambda self, folder, **options: options,
    "vllm/LLM/generate": lambda self, prompts, params, **options: [
        {name: getattr(p, name) for name in p.__struct_fields__}
        | {"prompt": len(asked["prompt_token_ids"])}
        for asked, p in zip(prompts, params, strict=True)],
    "dist/World/same_phase": lambda self, name, count: [name, count],
    "dist/join": lambda timeout: timeout,
    "model/build": lambda kind, folder, world, args, trained=True: [kind.__name__, trained],
    "losses/token_rewards": lambda *given, kl_coef: kl_coef,
    "checkpoint/load": lambda saved, *given: saved.state["step"]}


def record(name: str, what) -> None:
    with open(Path(os.environ["RECORD"], f"{RANK}.jsonl"), "a") as file:
        file.write(json.dumps([name, step(), what], default=str) + "\n")


def recorded(place: str, seen):
    """What `wrap` calls: the function, after its arguments are recorded."""
    def act(shipped, *args, **kwargs):
        record(place, seen(*args, **kwargs))
        return shipped(*args, **kwargs)
    return act


def main() -> None:
    if sys.argv[1:] in ([], ["--help"]):
        return print(__doc__)
    script = importlib.import_module(sys.argv.pop(1).replace("/", "."))
    if "NO_LOCKS" in os.environ:
        fcntl.flock = no_locks
    for one in os.environ.get("FAULTS", "").split():
        place, *how = one.split(":")
        wrap(PLACES[place], fault(*how))
    if "RECORD" in os.environ:
        for place, seen in RECORDED.items():
            wrap(place, recorded(place, seen))
    script.main()


if __name__ == "__main__":
    main()
