"""checkpoint.py: save and resume: the state of a run; the export.

    runs/NAME/checkpoints/step_N/   after N steps; step_N.partial until it is whole
        __R_0.distcp, .metadata     rank R's part of weights and AdamW's state; their index
        state.json                  step, position in the data, the run's identity, digests of these

A checkpoint is whole or absent. A resumed run makes the same updates as one that was never stopped,
and identity.py refuses what would make it another run. No random generator is saved: each
completion has its own seed. The number of ranks may change.

torch unpickles .metadata, which can run any code, so load only what you wrote.
"""
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException

import files
from dist import World
from errors import SettingsError
from files import NotWritten, not_written, read, whole_folder, writing
from identity import Entry, compare
from model import Policy, Trained
from model_files import FILES, config_of


class Saved(NamedTuple):
    """A checkpoint on disk."""
    path: Path
    state: dict  # what state.json has
    changed: list[str] = []  # sentences about what the resumed run takes over


# ---- save ----

def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int,
         best: int | None = None) -> list[str]:
    """Writes step_N, N = state["step"], and keeps the newest `keep` checkpoints, and that of the
    step `best`. Returns the names of those removed, on rank 0. NotWritten: a disk failed; the
    older ones then stay. All ranks must call it (a collective)."""
    path, gone = folder / f"step_{state['step']}", []
    partial = path.with_suffix(".partial")
    if world.any_rank(path.exists()):  # SIGTERM came after the last save
        return gone
    if world.rank == 0:
        make_room(partial)
    world.meet()
    try:
        with writing(partial):
            dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial),
                     process_group=world.control)  # this calls fsync for each file
    except CheckpointException as error:  # on all ranks, with the failures of all ranks
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise not_written(f"{partial}/__{rank}_0.distcp", cause) from None
    check_shared(partial, world)
    with writing(partial):
        mine = [path.name for path in partial.glob(f"__{world.rank}_*")]
        digests = world.gather(digests_of(partial, mine + [".metadata"] * (world.rank == 0)))
        if world.rank == 0:
            (partial / "state.json").write_text(
                json.dumps(state | {"files": dict(digests)}, default=str))
            os.sync()
            partial.rename(path)  # now it is whole
            os.sync()
            for step in {*steps(folder)[:-keep]} - {best}:
                old = folder / f"step_{step}"
                shutil.rmtree(old.rename(old.with_suffix(".gone")))  # a kill leaves no half of it
                gone.append(old.name)
    world.meet()
    return gone


def digests_of(folder: Path, names: list[str]) -> list[tuple[str, str]]:
    """Returns [(name, digest of its bytes), …] of those of the files that are there."""
    found = []
    for name in names:
        with suppress(FileNotFoundError), open(folder / name, "rb") as file:
            found.append((name, hashlib.file_digest(file, "blake2b").hexdigest()[:24]))
    return found


def check_shared(partial: Path, world: World):
    """Raises NotWritten if a machine does not see rank 0's folder: then the parts would lie in
    several folders. All ranks must call it (a collective)."""
    if world.any_rank(not (partial / ".metadata").exists()):  # rank 0 wrote it
        raise NotWritten(f"some ranks do not see rank 0's {partial}. Would work: a folder that all "
                         f"machines share.")


def make_room(partial: Path):
    """Makes the empty folder `partial`, and removes every unfinished checkpoint that a kill left
    beside it."""
    with writing(partial):
        for left in partial.parent.glob("step_*.*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)


def tensors(trained: dict[str, Trained]) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} of what a checkpoint has, such as "policy.lm.model.norm.weight" and
    the same with ".exp_avg" for a moment of AdamW. Tied weights are there once."""
    found = {}
    for who, it in trained.items():
        for name, p in it.parameters.items():
            found[f"{who}.{name}"] = p.detach()
            state = it.optimizer.state.get(p, {})
            found |= {f"{who}.{name}.{k}": value for k, value in state.items()}
    return found


# ---- resume ----

def newest(args, world: World, folder: Path, made_of: dict[str, Entry]) -> Saved | None:
    """Returns the checkpoint from which the run in `folder` is resumed, with what changes, or None
    if it begins.

    made_of: the identity of this command's run. SettingsError: the run is finished and has no
    checkpoint, it went further than --steps, or it would be another run. All ranks must call it (a
    collective).
    """
    saved = find(folder / "checkpoints", world)
    if saved is None:
        if args.eval_only and files.steps_in(folder):
            raise SettingsError(f"--eval_only: {folder} has steps but no checkpoint of them. Would "
                                f"work: another --name, to evaluate --model itself.")
        if (folder / "done.json").exists():
            raise SettingsError(f"--steps {args.steps}: {folder} is finished and has no checkpoint "
                                f"to resume from; choose another --name.")
        return None
    step = saved.state["step"]
    changed = compare(saved.state["settings"], made_of, saved.path, step)
    if args.eval_only:
        return saved
    if step > args.steps:
        raise SettingsError(f"--steps {args.steps}: {saved.path} is from a run that went further."
                            f" Would work: --steps {step}, or more.")
    return saved._replace(changed=changed)


def kl_coef(args, state: dict) -> float:
    """Returns the KL coefficient of the next step. One that --kl_target adapted is that of the
    checkpoint, unless --kl_reward_coef has another value than before."""
    flags = vars(args)
    given, adapts = flags.get("kl_reward_coef", 0.0), flags.get("kl_target")
    return state["kl_coef"] if adapts and given == state["settings"]["kl_reward_coef"] else given


def find(folder: Path, world: World) -> Saved | None:
    """Returns the newest checkpoint in a folder, as rank 0 sees it, or None. SettingsError: it is
    damaged. All ranks must call it (a collective)."""
    numbers = world.gather([steps(folder)])[0]  # as rank 0 sees them
    if not numbers:
        return None
    path = folder / f"step_{numbers[-1]}"
    try:
        return Saved(path, world.together(whole, path, world))
    except SettingsError as error:
        works = f"to resume after step {numbers[-2]}" if numbers[1:] else "to start over"
        raise SettingsError(f"{str(error).partition(' Would work')[0]} Would work: `rm -r {path}`, "
                            f"{works}.") from None


def whole(path: Path, world: World) -> dict:
    """Returns the state.json of a checkpoint. SettingsError: it cannot be read, or a file of
    tensors is not as it was written; each rank reads its share of them."""
    state = read(path / "state.json")
    kept = state.get("files", {})  # an older checkpoint has no digests
    mine = world.mine(sorted(kept))
    there = dict(digests_of(path, mine))
    if wrong := [name for name in mine if there.get(name) != kept[name]]:
        raise SettingsError(f"{path}/{wrong[0]} is damaged: it is not what was written.")
    return state


def load(saved: Saved, world: World, trained: dict[str, Trained]):
    """Fills weights and AdamW's state from a checkpoint, in place; it may have been saved on
    another number of ranks. SettingsError: it cannot be read. All ranks must call it (a
    collective)."""
    there = names_in(saved.path)
    for who, it in trained.items():
        for name, p in it.parameters.items():
            if f"{who}.{name}.step" in there:  # AdamW makes its state in its first step only
                it.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p).detach(),
                    "exp_avg_sq": torch.zeros_like(p).detach()}
    fill(tensors(trained), saved.path, world)


def fill(wanted: dict[str, torch.Tensor], path: Path, world: World):
    """Reads the tensors of these names from a checkpoint, in place. SettingsError: it cannot be
    read. All ranks must call it (a collective)."""
    try:
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), process_group=world.control)
    except CheckpointException as error:  # on all ranks
        cause = next(iter(error.failures.values()))[0]
        raise SettingsError(f"{path} cannot be read ({cause}). Would work: without it.") from None


def names_in(path: Path) -> set[str]:
    """Returns the names of the tensors in a checkpoint, as `tensors` has them."""
    return {*dcp.FileSystemReader(path).read_metadata().state_dict_metadata}


def steps(folder: Path) -> list[int]:
    """Returns the number N of each whole step_N in a folder, in order."""
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit())


# ---- export: the trained weights as folders that transformers, peft and vLLM load ----

def export_model(policy: Policy, source: str, folder: str, ends: list[int] = ()):
    """Writes the policy as a folder in Hugging Face format, in the dtype of `source`, on rank 0.
    source: the folder of the model that training started from, whose small files are copied. ends:
    the ids that end a completion. All ranks must call it (a collective)."""
    weights, dtype = {}, config_of(source).dtype or torch.float32
    names = policy.module.names  # of tied weights only the first
    for name, value in policy.weights(dtype):
        if policy.world.rank == 0 and name in names:
            weights[names[name]] = value.to("cpu", copy=True)  # may be a view of padded memory
    if policy.world.rank == 0:
        with whole_folder(folder) as unfinished:
            for path in (path for pattern in FILES for path in Path(source).glob(pattern)):
                if ".index." not in path.name:
                    there = unfinished / path.relative_to(source)
                    there.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, there)  # copy no permissions: a cache's are read-only
            save_torch_state_dict(weights, unfinished)
            write_ends(unfinished, ends)
    policy.world.meet()


def write_ends(folder: Path, ends: list[int]):
    """Adds the ids that end a completion to generation_config.json, if there are any, so that
    transformers and vLLM end a completion where the run did."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if ends:
        path.write_text(json.dumps(found | {"eos_token_id": [*ends]}, indent=2))
