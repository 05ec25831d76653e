"""checkpoint.py: save and resume: state of a run, digests of rows and weights; the export.

    runs/NAME/checkpoints/step_N/   after N steps; step_N.partial until it is whole
        __R_0.distcp, .metadata     rank R's part of weights and AdamW's state; their index
        state.json                  step, position in the data, settings, digests

A checkpoint is whole or absent. A resumed run makes the same updates as one that was never stopped,
and `check` refuses settings or rows that would make it another run. No random generator is saved:
each completion has its own seed. The number of ranks may change.

torch unpickles .metadata, which can run any code, so load only what you wrote.
"""
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException

import log
from dist import World
from errors import SettingsError
from log import NotWritten, not_written, read, whole_folder, writing
from model import Policy, Trained, compute_dtype, skeleton
from model_files import FILES, config_of, names_in_files, weight_files
from settings import groups, restored, values_of

# Settings with which a resume would be another run. Any other setting may change: the run takes it
# over and prints a line. The dataclasses of flags add names of their own: `fixed`.
FIXED = frozenset("dtype group model_files precision reference_files rows script seed".split())


class Saved(NamedTuple):
    """A checkpoint on disk."""
    path: Path
    state: dict  # what state.json has
    changed: list[str] = []  # sentences about what the resumed run takes over


# ---- save ----

def save(folder: Path, world: World, trained: dict[str, Trained], state: dict, keep: int):
    """Writes step_N, N = state["step"], and keeps the newest `keep` checkpoints. NotWritten: a disk
    failed; then the older ones stay. All ranks must call it (a collective)."""
    path = folder / f"step_{state['step']}"
    partial = path.with_suffix(".partial")
    if world.any_rank(path.exists()):  # SIGTERM came after the last save
        return
    if world.rank == 0:
        make_room(partial)
    world.barrier()
    try:
        with writing(partial):
            dcp.save(tensors(trained), storage_writer=dcp.FileSystemWriter(partial),
                     process_group=world.control)  # this calls fsync for each file
    except CheckpointException as error:  # on all ranks, with the failures of all ranks
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise not_written(f"{partial}/__{rank}_0.distcp", cause) from None
    check_shared(partial, world)
    if world.rank == 0:
        with writing(partial):
            (partial / "state.json").write_text(json.dumps(state, default=str))
            os.sync()
            partial.rename(path)  # now it is whole
            os.sync()
            for step in steps(folder)[:-keep]:
                old = folder / f"step_{step}"
                shutil.rmtree(old.rename(old.with_suffix(".gone")))  # a kill leaves no half of it


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

def newest(args, world: World, folder: Path, settings: dict) -> Saved | None:
    """Returns the checkpoint from which the run in `folder` goes on, or None if it begins.

    settings: those of this command, to compare. SettingsError: the run is finished and has no
    checkpoint, it went further than --steps, or its settings or rows would make it another run. All
    ranks must call it (a collective).
    """
    saved = find(folder / "checkpoints", world)
    if saved is None:
        if log.finished_steps(folder):
            raise SettingsError(f"--steps {args.steps}: {folder} is finished and has no checkpoint "
                                f"to go on from; choose another --name.")
        return None
    goes_on = check(saved, settings, values_of(args), fixed(args))
    step = saved.state["step"]
    if args.eval_args.eval_only:
        return saved
    if step > args.steps:
        raise SettingsError(f"--steps {args.steps}: {saved.path} is of a run that went further."
                            f" Would work: --steps {step}, or more.")
    return goes_on._replace(changed=goes_on.changed + consequences(args, saved.state))


def consequences(args, state: dict) -> list[str]:
    """Returns a line for each learning rate and reward weight that other flags than before change
    in the steps to come: its value in the next step and in the last one, and what it was in the
    step before."""
    step, lines = state["step"], []
    before = restored(args, state["settings"])
    ahead = [(args.rates(s), before.rates(s)) for s in range(step, args.steps)]
    was = before.rates(step - 1)
    for name in dict.fromkeys([*was, *args.rates(step)]):
        if any(new.get(name) != old.get(name) for new, old in ahead):
            first, last = (ahead[i][0].get(name, 0.0) for i in (0, -1))
            then = "" if first == last else f", {last:.3g} in step {args.steps}"
            lines.append(f"{name} is {first:.3g} in step {step + 1}{then} (it was "
                         f"{was.get(name, 0.0):.3g} in step {step})")
    if (coef := kl_coef(args, state)) != state.get("kl_coef", coef):
        lines.append(f"kl_coef is {coef:.3g} in step {step + 1} (it was {state['kl_coef']:.3g})")
    return lines


def kl_coef(args, state: dict) -> float:
    """Returns the KL coefficient of the next step. One that --kl_target adapted goes on from the
    checkpoint, unless --kl_reward_coef has another value than before."""
    flags = values_of(args)
    given, adapts = flags.get("kl_reward_coef", 0.0), flags.get("kl_target")
    return state["kl_coef"] if adapts and given == state["settings"]["kl_reward_coef"] else given


def find(folder: Path, world: World) -> Saved | None:
    """Returns the newest checkpoint in a folder, as rank 0 sees it, or None. All ranks must call it
    (a collective)."""
    numbers = world.gather([steps(folder)])[0]  # as rank 0 sees them
    if not numbers:
        return None
    path = folder / f"step_{numbers[-1]}"
    return Saved(path, world.together(read, path / "state.json"))


def fixed(args) -> frozenset[str]:
    """Returns the names of the settings that a resume may not change: FIXED, and those that the
    dataclasses of flags name."""
    return FIXED.union(*(group.fixed for group in groups(args)))


def check(saved: Saved, settings: dict, flags=(), fixed=FIXED) -> Saved:
    """Returns the checkpoint with sentences about what this resume changes.

    settings: of this command; flags: the names among them that are flags. SettingsError: one of
    `fixed`, or a row of the data, is another than before.
    """
    was, now = saved.state["settings"], json.loads(json.dumps(settings, default=str))
    rows = now.pop("row_digests", [])
    changed = [name for name in now if was.get(name, now[name]) != now[name]]
    wrong = [f"{name} was {was[name]} and is now {now[name]}" for name in changed if name in fixed]
    before = was.get("row_digests", rows)  # an older checkpoint has none
    if not wrong and rows != before:
        first = next(new for new, old in zip(rows, before, strict=True) if new != old)[0]
        wrong = [f"row {first + 1} of --data differs, or its prompt or a file of it"]
    if wrong:
        raise SettingsError(f"{saved.path} was made with other settings: {'; '.join(wrong)}. "
                            f"Would work: those of before, or another --name.")
    dropped = was.keys() - now.keys() - {"row_digests", "changes"}
    gone = [f"resumed without {name} {words(was[name])}, which is no setting any more"
            for name in dropped]
    return saved._replace(changed=gone + [
        f"resumed with {'--' if name in flags else ''}{name} {words(now[name])} (was "
        f"{words(was[name])}) from step {saved.state['step'] + 1} on" for name in changed])


def words(value):
    """Returns a flag's value as a person writes it: a list as a text with spaces between its items,
    any other value as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


# ---- what a run is made of ----

def facts(args, inputs, world: World) -> dict:
    """Returns what a run is made of beside its flags, all of it the same on every rank: the script,
    digests of rows and model files, and the dtype of the computation."""
    return {"script": args.script, "rows": len(inputs.rows),
            "row_digests": row_digests(inputs.rows), "model_files": digest_of_files(inputs.source),
            "reference_files": digest_of_files(inputs.reference),
            "precision": str(compute_dtype(args.model_args, world.device))}


def digest(value) -> str:
    """Returns a hash of repr(value), as 12 hexadecimal digits."""
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()


def row_digests(rows: list) -> list:
    """Returns [index, digest] of each row."""
    return [[row.index, digest(json.dumps(row.digested(sampled), default=str, skipkeys=True))]
            for row in rows]


def digest_of_files(folder: str | None) -> str:
    """Returns a digest of the weight files of a model's folder. None, for no folder, has a digest
    too."""
    return digest([*map(sampled, weight_files(folder) if folder else [])])


def sampled(path: str | Path) -> str:
    """Returns a digest of a file that is fast to compute: of its size, and of 64 kB at each of 64
    places."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        return digest([size, *(os.pread(file.fileno(), 2**16, start)
                               for start in range(0, size, size // 64 + 1))])


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
    names = names_in_files(skeleton(source), source)  # of tied weights only the first
    for name, value in policy.weights(dtype):
        if policy.world.rank == 0 and name in names:
            weights[names[name]] = value.to("cpu", copy=True)  # may be a view of padded memory
    if policy.world.rank:
        return
    with whole_folder(folder) as unfinished:
        for path in (path for pattern in FILES for path in Path(source).glob(pattern)):
            if ".index." not in path.name:
                there = unfinished / path.relative_to(source)
                there.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, there)  # copy no permissions: a cache's are read-only
        save_torch_state_dict(weights, unfinished)
        write_ends(unfinished, ends)


def write_ends(folder: Path, ends: list[int]):
    """Adds the ids that end a completion to generation_config.json, if there are any, so that
    transformers and vLLM end a completion where the run did."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if ends:
        path.write_text(json.dumps(found | {"eos_token_id": [*ends]}, indent=2))
