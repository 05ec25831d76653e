"""checkpoint.py: the whole state of a run, to disk and back, on any number of ranks.

    runs/NAME/checkpoints/step_N/   after N steps; step_N.partial until it is whole
        __R_0.distcp, .metadata     rank R's part of weights and AdamW's state; their index
        state.json                  step, position in the data, settings, sizes of these files

No random generator is saved: each completion has its own seed. torch unpickles .metadata: load only
what you wrote.
"""
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dist import SettingsError, World
from keeping import log
from keeping.files import NotWritten, writing
from keeping.files import read as read_file
from trainer.model import Trained

FIXED = ("script", "model", "source", "data", "rows", "prompt_template", "system",
         "max_prompt_tokens", "reward", "reply", "tools", "group", "seed", "dtype", "lora_rank",
         "lora_alpha", "lora_targets", "freeze_router", "teacher", "teacher_prompt", "loss_file",
         "advantage_file")  # else it is another run


class Saved(NamedTuple):
    path: Path
    state: dict  # of state.json


# ---- save ----

def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int):
    """Writes step_N, N = state["step"], and keeps the newest `keep`. NotWritten if a disk fails:
    then the older ones stay. A collective."""
    partial = folder / f"step_{state['step']}.partial"
    if world.rank == 0:
        make_room(partial)
    world.barrier()
    try:
        with writing(partial):
            dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial),
                     process_group=world.control)
    except CheckpointException as error:  # on all ranks, with the failures of all ranks
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise NotWritten(f"{partial}/__{rank}_0.distcp cannot be written ({cause}). Would work: "
                         f"space on the disk.") from None
    mine = written(*partial.glob(f"__{world.rank}_*"))
    sizes = dict(world.gather([*mine.items()]))  # {file: bytes}
    if world.rank == 0:
        seal(partial, state, sizes)
        forget(folder, state["step"], keep)


def make_room(partial: Path):
    """An empty folder, and nothing that a kill left."""
    with writing(partial):
        for left in partial.parent.glob("step_*.*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)


def seal(partial: Path, state: dict, sizes: dict[str, int]):
    """state.json, and the folder's final name: the checkpoint is whole."""
    for name in sizes:
        if not (partial / name).is_file():
            raise NotWritten(f"{name} is not in rank 0's {partial}. Would work: a folder that all "
                             f"machines share.")
    with writing(partial):
        sizes = sizes | written(partial / ".metadata")
        (partial / "state.json").write_text(json.dumps(state | {"files": sizes}, default=str))
        os.sync()
        path = partial.with_suffix("")
        remove(path)  # a damaged one
        partial.rename(path)
        os.sync()


def forget(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep`. Those after `step` are damaged: they were passed over."""
    kept = [n for n in steps(folder) if n <= step][-keep:]
    for old in set(steps(folder)) - set(kept):
        remove(folder / f"step_{old}")


def tensors(trained: dict[str, Trained]) -> dict[str, torch.Tensor]:
    """{"policy.lm.model.norm.weight": …, "….exp_avg": …}, tied weights once."""
    found = {}
    for who, it in trained.items():
        for name, p in it.parameters.items():
            found[f"{who}.{name}"] = p.detach()
            state = it.optimizer.state.get(p, {})
            found |= {f"{who}.{name}.{k}": value for k, value in state.items()}
    return found


# ---- resume ----

def newest(args, world: World, folder: Path, settings: dict) -> tuple[Saved | None, list[str]]:
    """The checkpoint that the run in `folder` goes on from; lines to print. A collective."""
    saved, notes = find(folder / "checkpoints", world)
    if saved:
        changed, step = compare(saved, settings), saved.state["step"]
        if step > args.steps and not args.eval_args.eval_only:
            raise SettingsError(f"--steps {args.steps}: {saved.path} is of a run that went further."
                                f" Would work: --steps {step}, or more.")
        notes.append(f"resumed from {saved.path}")
        if changed:
            notes[-1] += f"; changed since: {', '.join(changed)}"
    elif log.finished_steps(folder):
        raise SettingsError(f"--steps {args.steps}: {folder} is finished and has no checkpoint to "
                            f"go on from; choose another --name.")
    elif (folder / "metrics.jsonl").exists():
        notes.append(f"{folder} has no checkpoint: the run begins again")
    return saved, notes


def find(folder: Path, world: World) -> tuple[Saved | None, list[str]]:
    """The newest whole one; a sentence for each damaged one. A collective."""
    damaged = []
    for step in reversed(world.gather([steps(folder)])[0]):
        path = folder / f"step_{step}"
        state, wrong = read(path)
        wrong = world.gather(wrong)
        if not wrong:
            return Saved(path, state), damaged
        damaged.append(f"{path} is passed over: {wrong[0]}.")
    if damaged:  # to begin again over them would hide the loss
        raise SettingsError(f"no checkpoint of this run is whole: {' '.join(damaged)} "
                            f"Choose another --name, or remove {folder}.")
    return None, []


def read(path: Path) -> tuple[dict, list[str]]:
    """The state of a checkpoint, and what is wrong with its files."""
    try:
        state = read_file(path / "state.json")
        sizes = state.pop("files")
        found = written(*(path / name for name in sizes))
    except FileNotFoundError as error:
        return {}, [f"{Path(error.filename).name} is missing"]
    except SettingsError:
        return {}, ["state.json is missing or damaged"]
    return state, [f"{name} is not what was written: {found[name]:,} bytes, not {size:,}"
                   for name, size in sizes.items() if found[name] != size]


def compare(saved: Saved, settings: dict) -> list[str]:
    """A line for each setting that changed. SettingsError if one of FIXED did."""
    was, now = saved.state["settings"], json.loads(json.dumps(settings, default=str))
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    wrong = [f"{name} was {was[name]} and is now {now.get(name)}"
             for name in changed if name in FIXED and name in was]
    if wrong:
        raise SettingsError(f"{saved.path} was made with other settings: {'; '.join(wrong)}. "
                            f"Choose another --name.")
    return [f"{name} {now.get(name)} (was {was.get(name)})" for name in changed]


def load(saved: Saved, world: World, trained: dict[str, Trained]):
    """Fills weights and AdamW's state in place. A collective."""
    reader = dcp.FileSystemReader(saved.path)
    there = reader.read_metadata().state_dict_metadata
    for who, it in trained.items():
        for name, p in it.parameters.items():
            if f"{who}.{name}.step" in there:  # AdamW makes its state in its first step only
                it.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p).detach(),
                    "exp_avg_sq": torch.zeros_like(p).detach()}
    dcp.load(tensors(trained), storage_reader=reader, process_group=world.control)


# ---- files ----

def steps(folder: Path) -> list[int]:
    """N of each step_N, in order."""
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit())


def written(*paths: Path) -> dict[str, int]:
    """{file: bytes}"""
    return {path.name: path.stat().st_size for path in paths}


def remove(path: Path):
    """Renames, then removes: a kill leaves no half of a step_N."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_suffix(".gone")))
