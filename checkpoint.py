"""checkpoint.py: the whole state of a run, to disk and back.

    runs/NAME/checkpoints/step_N/   after N steps
        __R_0.distcp                rank R's part of the weights and of AdamW's state   } torch.distributed.checkpoint: loads
        .metadata                   which tensor is where                               } on any number of ranks
        state.json                  step, position in the data, settings, versions, every rank's random generators, what the loop adds
        manifest.json               size and CRC of every file above, written last

A checkpoint is written as step_N.partial and renamed when all of it is on disk: a folder named step_N was whole once, and
the manifest tells whether it still is. Several machines need one shared folder. Load only what you wrote yourself:
torch's loader unpickles .metadata (the tensors and all of ours are not pickled), and a CRC finds damage, not malice.
"""
import json
import os
import random
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Saved:
    """A whole checkpoint on disk."""
    path: Path
    state: dict


# ---- save -----------------------------------------------------------------------------------------------------------

def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int) -> str | None:
    """Writes folder/step_N for N = state["step"] and keeps the newest `keep` → None, or why it could not, on every rank alike.

    A collective. Where it fails (a full disk, say) nothing is left of it, and the checkpoints that were there stay.
    """
    path = folder / f"step_{state['step']}"
    partial = path.with_suffix(".partial")
    state = state | {"generators": world.gather([generators()])}
    files: list[tuple[str, int, int]] = []

    def begin():
        if world.rank == 0:
            for left in folder.glob("step_*.*"):           # of saves and removals that were killed
                shutil.rmtree(left)
            partial.mkdir(parents=True)

    def write():
        dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial), process_group=world.control, no_dist=world.size == 1)
        files.extend(fingerprint(p) for p in partial.glob(f"__{world.rank}_*"))

    def seal():
        if world.rank == 0:
            durable(partial / "state.json", json.dumps(state, default=str))
            every = [*everyones, fingerprint(partial / ".metadata"), fingerprint(partial / "state.json")]
            durable(partial / "manifest.json", json.dumps({"files": sorted(every)}))
            sync(partial)
            remove(path)                                   # a damaged one of this very step, passed over when the run was resumed
            os.rename(partial, path)
            sync(folder)
            there = steps(folder)                          # newer ones than this were passed over too
            for old in set(there) - set([n for n in there if n <= state["step"]][-keep:]):
                remove(folder / f"step_{old}")

    trouble = said_by_any(world, begin) or said_by_any(world, write)
    everyones = world.gather(files)
    trouble = trouble or said_by_any(world, seal)
    if trouble and world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return trouble


def said_by_any(world: World, act) -> str | None:
    """Calls act() on every rank → what the disk said to the first one that it refused, on all of them; None if to none."""
    said = None
    try:
        act()
    except OSError as error:
        said = error.strerror or str(error)
    except CheckpointException as error:                   # torch's: what went wrong on which rank, raised on all of them
        cause = next(iter(error.failures.values()))[0]
        while not isinstance(cause, OSError) and cause.__context__:
            cause = cause.__context__
        said = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
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
        raise SettingsError(f"no checkpoint of this run is whole, so it cannot be resumed: {' '.join(passed)} "
                            f"Choose another --name, or remove {folder} to begin it anew.")
    return None, passed


def damage(path: Path, rank: int, ranks: int) -> str | None:
    """What is wrong with a checkpoint, as far as this rank's share of its files shows."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name, size, crc in files[rank::ranks]:
            if not (path / name).is_file():
                return f"{name} is missing"
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
            if fingerprint(path / name)[2] != crc:
                return f"{name} is not what was written (its CRC differs)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json cannot be read ({type(error).__name__})"
    return None


def compare(saved: Saved, settings: dict) -> list[str]:
    """A line for each setting that is not what it was; SettingsError for those that cannot change in the middle of a run."""
    was, now = saved.state["settings"], json.loads(json.dumps(settings, default=str))
    new = [k for k in {**was, **now} if was.get(k) != now.get(k) and k not in UNTOLD]
    if refused := [f"{k} was {was[k]} and is now {now.get(k)}" for k in new if k in FIXED and k in was]:
        raise SettingsError(f"{saved.path} cannot be resumed with other settings than it was made with: {'; '.join(refused)}. "
                            f"Give the old ones, or choose another --name.")
    return [f"{k} {now.get(k)} (was {was.get(k)})" for k in new]


def load(saved: Saved, world: World, trained: dict[str, Trained]) -> None:
    """Weights, AdamW's state and this rank's random generators, in place. A collective; the number of ranks may have changed."""
    reader = dcp.FileSystemReader(saved.path)
    there = reader.read_metadata().state_dict_metadata
    for who, it in trained.items():
        for name, p in it.module.named_parameters():       # AdamW has no state before its first step: make what is to be filled
            empty = {"step": lambda: torch.zeros((), device=p.device), "exp_avg": lambda: torch.zeros_like(p), "exp_avg_sq": lambda: torch.zeros_like(p)}
            it.optimizer.state[p] |= {k: new().detach() for k, new in empty.items() if f"{who}.{name}.{k}" in there}
    try:
        dcp.load(tensors(trained), storage_reader=reader, process_group=world.control, no_dist=world.size == 1)
    except CheckpointException as error:
        raise RuntimeError(f"{saved.path} could not be loaded: {error}") from None
    if world.rank < len(saved.state["generators"]):        # more ranks than before: nothing here draws from them, so the new ones keep theirs
        set_generators(saved.state["generators"][world.rank])


# ---- random generators ----------------------------------------------------------------------------------------------

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
    unhex = lambda text: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    torch.set_rng_state(unhex(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(unhex(state["cuda"]))


# ---- files ----------------------------------------------------------------------------------------------------------

def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))


def fingerprint(path: Path) -> tuple[str, int, int]:
    """(name, bytes, CRC-32) of a file, read in pieces."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(2**24):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return path.name, size, crc


def durable(path: Path, text: str) -> None:
    """Writes a file and waits until it is on disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def remove(path: Path) -> None:
    """Removes a checkpoint; one that a kill leaves half gone has no longer the name of one."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_suffix(".gone")))
