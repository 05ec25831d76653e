"""checkpoint.py: the whole state of a run, to disk and back.

    runs/NAME/checkpoints/step_N/   after N steps
        __R_0.distcp                rank R's part of the weights and of AdamW's state   } torch.distributed.checkpoint: loads
        .metadata                   which tensor is where                               } on any number of ranks
        state.json                  step, position in the data, settings, versions, every rank's random generators, what the loop adds
        manifest.json               size and CRC of every file above, written last

Written as step_N.partial and renamed when all of it is on disk: step_N was whole once, and the manifest tells whether it still is.
Several machines need one shared folder. Load only what you wrote: torch unpickles .metadata, and a CRC finds damage, not malice.
"""
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dist import World
from model import Trained
from plan import SettingsError

# What the saved state has no meaning without, or what makes one curve of one run. Anything else may change, and is listed.
FIXED = ("algorithm", "model", "source", "data", "rows", "prompt_template", "system", "max_prompt_tokens", "reward", "group", "seed", "dtype")
UNTOLD = ("name", "resume", "plan", "strict")       # no part of the numbers, nor of how they are made


class Saved(NamedTuple):
    """A whole checkpoint on disk."""
    path: Path
    state: dict


# ---- save -----------------------------------------------------------------------------------------------------------

def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int) -> str | None:
    """Writes folder/step_N for N = state["step"] and keeps the newest `keep` → None, or why it could not, on every rank alike.

    A collective. Where it fails (a full disk, say) nothing is left of it, and the older ones stay.
    """
    path, partial = folder / f"step_{state['step']}", folder / f"step_{state['step']}.partial"
    state = state | {"generators": world.gather([generators()])}
    files: list[tuple[str, int, int]] = []

    def begin():
        for left in folder.glob("step_*.*"):               # of saves and removals that were killed
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    def write():
        dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial), process_group=world.control)
        files.extend(fingerprint(p) for p in partial.glob(f"__{world.rank}_*"))

    def seal():
        if missing := [name for name, *_ in everyones if not (partial / name).is_file()]:
            raise OSError(f"{missing[0]} is not in rank 0's {partial}: the machines of a run need one shared folder")
        durable(partial / "state.json", json.dumps(state, default=str))
        every = [*everyones, fingerprint(partial / ".metadata"), fingerprint(partial / "state.json")]
        durable(partial / "manifest.json", json.dumps({"files": sorted(every)}))
        sync(partial)
        remove(path)                                       # a damaged one of this very step, passed over when the run was resumed
        os.rename(partial, path)
        sync(folder)
        newest = [n for n in steps(folder) if n <= state["step"]][-keep:]       # those after this one were passed over
        for old in set(steps(folder)) - set(newest):
            remove(folder / f"step_{old}")

    trouble = said_by_any(world, begin, alone=True) or said_by_any(world, write)
    everyones = world.gather(files)
    trouble = trouble or said_by_any(world, seal, alone=True)
    if trouble and world.rank == 0:                        # torch's own words on a full disk are cryptic
        trouble += f"; {shutil.disk_usage(folder.parent).free / 2**30:.1f} GiB are free there"
        shutil.rmtree(partial, ignore_errors=True)
    return trouble


def said_by_any(world: World, act, alone: bool = False) -> str | None:
    """act() on every rank, or on rank 0 alone → what the disk said to the first rank that it refused, on all; None if to none."""
    said = None
    try:
        act() if world.rank == 0 or not alone else None
    except (OSError, CheckpointException) as error:        # torch's tells what went wrong on which rank, and is raised on all
        said = str(next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error.strerror or error).split("\n")[0]
    return next((s for s in world.gather([said]) if s), None)


def tensors(trained: dict[str, Trained]) -> dict[str, torch.Tensor]:
    """Every sharded tensor by name: "policy.lm.model.norm.weight", "policy.lm.model.norm.weight.exp_avg", … Tied weights once."""
    return {f"{who}.{name}{kind}": tensor for who, it in trained.items() for name, p in it.module.named_parameters()
            for kind, tensor in {"": p.detach(), **{f".{k}": v for k, v in it.optimizer.state[p].items()}}.items()}


# ---- find, compare, load --------------------------------------------------------------------------------------------

def find(folder: Path, world: World) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint and a sentence for each newer one that is not; the ranks share the reading. A collective.

    SettingsError: there are some, and all are damaged. To begin anew over them would hide the loss.
    """
    passed = []
    for step in world.gather([steps(folder)])[0][::-1]:
        path = folder / f"step_{step}"
        wrong = next((w for w in world.gather([damage(path, world.rank, world.size)]) if w), None)
        if wrong is None:
            return Saved(path, json.loads((path / "state.json").read_text())), passed
        passed.append(f"{path} is passed over: {wrong}.")
    if passed:
        raise SettingsError(f"none of this run's checkpoints is whole: {' '.join(passed)} Choose another --name, or remove {folder} to begin anew.")
    return None, passed


def damage(path: Path, rank: int, ranks: int) -> str | None:
    """What is wrong with a checkpoint, as far as this rank's share of its files shows."""
    try:
        for name, size, crc in json.loads((path / "manifest.json").read_text())["files"][rank::ranks]:
            if (now := fingerprint(path / name)) != (name, size, crc):
                return f"{name} is not what was written: {now[1]:,} bytes with CRC {now[2]:08x}, not {size:,} with {crc:08x}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json cannot be read ({type(error).__name__})"
    return None


def compare(saved: Saved, settings: dict) -> list[str]:
    """A line for each setting that is not what it was; SettingsError for those that cannot change in the middle of a run."""
    was, now = saved.state["settings"], json.loads(json.dumps(settings, default=str))
    new = [k for k in {**was, **now} if was.get(k) != now.get(k) and k not in UNTOLD]
    if refused := [f"{k} was {was[k]} and is now {now.get(k)}" for k in new if k in FIXED and k in was]:
        raise SettingsError(f"{saved.path} was made with other settings: {'; '.join(refused)}. Give the old ones, or choose another --name.")
    return [f"{k} {now.get(k)} (was {was.get(k)})" for k in new]


def load(saved: Saved, world: World, trained: dict[str, Trained]) -> None:
    """Weights, AdamW's state and this rank's random generators, in place. A collective; the number of ranks may have changed."""
    reader = dcp.FileSystemReader(saved.path)
    there = reader.read_metadata().state_dict_metadata
    for who, it in trained.items():
        for name, p in it.module.named_parameters():       # AdamW has no state before its first step: make what is to be filled
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{who}.{name}.{key}" in there:
                    it.optimizer.state[p][key] = torch.zeros((), device=p.device) if key == "step" else torch.zeros_like(p).detach()
    dcp.load(tensors(trained), storage_reader=reader, process_group=world.control)
    if world.rank < len(saved.state["generators"]):        # ranks that were not there before keep their own: nothing here draws from them
        set_generators(saved.state["generators"][world.rank])


# ---- random generators, and files -----------------------------------------------------------------------------------

def generators() -> dict:
    """The state of this process's random generators, as JSON. Completions need none of them: each has its own seed."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None}


def set_generators(state: dict) -> None:
    """Undoes `generators`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(state["numpy"]))
    for name, put in (("torch", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if state[name] and (name == "torch" or torch.cuda.is_available()):
            put(torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8))


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit())


def fingerprint(path: Path) -> tuple[str, int, int]:
    """(name, bytes, CRC-32) of a file, read in pieces."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(2**24):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return path.name, size, crc


def durable(path: Path, text: str) -> None:
    """Writes a file and waits until it is on disk."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    os.fsync(fd := os.open(path, os.O_RDONLY))
    os.close(fd)


def remove(path: Path) -> None:
    """Removes a checkpoint; one that a kill leaves half gone has no longer the name of one."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_suffix(".gone")))
