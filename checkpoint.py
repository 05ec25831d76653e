"""checkpoint.py: the whole state of a run, to disk and back, on any number of ranks.

    runs/NAME/checkpoints/step_N/   after N steps; step_N.partial until it is whole
        __R_0.distcp, .metadata     rank R's part of weights and AdamW's state; their index
        state.json                  step, position in the data, settings, sizes of these files

Each completion has its own seed: no generator is saved. torch unpickles .metadata: load only
what you wrote.
"""
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from dist import World
from errors import SettingsError
from model import Trained

FIXED = ("script", "model", "source", "data", "rows", "prompt_template", "system",
         "max_prompt_tokens", "reward", "reply", "group", "seed", "dtype", "lora_rank",
         "lora_alpha", "lora_targets")  # else it is another run


class Saved(NamedTuple):
    path: Path
    state: dict


def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int):
    """Writes step_N, N = state["step"], and keeps the newest `keep` → None, or why it failed; then
    the older ones stay. A collective."""
    path, files = folder / f"step_{state['step']}", {}
    partial = path.with_suffix(".partial")

    def begin():
        for left in folder.glob("step_*.*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    def write():
        dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial),
                 process_group=world.control)
        files.update(written(*partial.glob(f"__{world.rank}_*")))

    def seal():
        if missing := [name for name in everyones if not (partial / name).is_file()]:
            raise OSError(f"{missing[0]} is not in rank 0's {partial}: use one shared folder")
        done = state | {"files": everyones | written(partial / ".metadata")}
        (partial / "state.json").write_text(json.dumps(done, default=str))
        os.sync()
        remove(path)  # a damaged one
        partial.rename(path)
        os.sync()
        newest = [n for n in steps(folder) if n <= state["step"]][-keep:]
        for old in set(steps(folder)) - set(newest):  # newer ones are damaged
            remove(folder / f"step_{old}")

    trouble = failure(world, begin, world.rank == 0) or failure(world, write)
    everyones = dict(world.gather([*files.items()]))
    trouble = trouble or failure(world, seal, world.rank == 0)
    if trouble and world.rank == 0:
        left = [f"the newest checkpoint is step_{n}" for n in steps(folder)]
        trouble += (f"; {shutil.disk_usage(folder.parent).free / 2**30:.1f} GiB are free there; "
                    f"{left[-1] if left else 'there is no other'}")
        shutil.rmtree(partial, ignore_errors=True)
    return trouble


def failure(world: World, act, here: bool = True):
    """act() on the ranks with `here` → the first disk error, on all ranks."""
    message = []
    try:
        if here:
            act()
    except (OSError, SafetensorError) as error:
        message = [str(error)]
        if why := getattr(error, "strerror", None):
            message = [f"{error.filename or 'state.json'}: {why}"]
    except CheckpointException as error:  # of any rank
        rank, [why, *_] = next(iter(error.failures.items()))
        message = [f"__{rank}_0.distcp: {str(why).splitlines()[0]}"]
    return next(iter(world.gather(message)), None)


def tensors(trained: dict[str, Trained]):
    """{"policy.lm.model.norm.weight": …, "….exp_avg": …}, tied weights once."""
    found = {}
    for who, it in trained.items():
        for name, p in it.parameters.items():
            found[f"{who}.{name}"] = p.detach()
            found |= {f"{who}.{name}.{key}": value for key, value in it.optimizer.state[p].items()}
    return found


def find(folder: Path, world: World) -> tuple[Saved | None, list[str]]:
    """The newest whole one; a sentence for each damaged one. A collective."""
    passed = []
    for step in world.gather([steps(folder)])[0][::-1]:
        path = folder / f"step_{step}"
        state, wrong = read(path)
        if not (wrong := world.gather(wrong)):
            return Saved(path, state), passed
        passed.append(f"{path} is passed over: {wrong[0]}.")
    if passed:  # to begin again over them would hide the loss
        raise SettingsError(f"no checkpoint of this run is whole: {' '.join(passed)} "
                            f"Choose another --name, or remove {folder}.")
    return None, passed


def read(path: Path):
    """The state of a checkpoint, and what is wrong with its files."""
    try:
        state = json.loads((path / "state.json").read_text())
        files = state.pop("files")
        there = written(*(path / name for name in files))
        return state, [f"{name} is not what was written: {there[name]:,} bytes, not {size:,}"
                       for name, size in files.items() if there[name] != size]
    except FileNotFoundError as error:
        return {}, [f"{Path(error.filename).name} is missing"]
    except (OSError, ValueError, KeyError) as error:
        return {}, [f"state.json cannot be read ({type(error).__name__})"]


def compare(saved: Saved, settings: dict) -> list[str]:
    """A line for each setting that changed, if none of FIXED did."""
    was, now = saved.state["settings"], json.loads(json.dumps(settings, default=str))
    new = [k for k in was | now if was.get(k) != now.get(k) and k not in ("resume", "strict")]
    if no := [f"{k} was {was[k]} and is now {now.get(k)}" for k in new if k in FIXED and k in was]:
        raise SettingsError(f"{saved.path} was made with other settings: {'; '.join(no)}. "
                            f"Choose another --name.")
    return [f"{k} {now.get(k)} (was {was.get(k)})" for k in new]


def load(saved: Saved, world: World, trained: dict[str, Trained]):
    """Fills weights and AdamW's state in place. A collective."""
    reader = dcp.FileSystemReader(saved.path)
    there = reader.read_metadata().state_dict_metadata
    for who, it in trained.items():
        for name, p in it.parameters.items():
            if f"{who}.{name}.step" in there:  # AdamW makes its state in its first step only
                empty = {k: torch.zeros_like(p).detach() for k in ("exp_avg", "exp_avg_sq")}
                it.optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | empty
    dcp.load(tensors(trained), storage_reader=reader, process_group=world.control)


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit())


def written(*paths: Path):
    return {path.name: path.stat().st_size for path in paths}


def remove(path: Path):
    """Renames, then removes: a kill leaves no half of a step_N."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_suffix(".gone")))
