"""tools/export.py: a checkpoint of a run → a folder that transformers, vLLM and --model load.

    python tools/export.py runs/NAME             the newest one, to runs/NAME/step_N
    python tools/export.py runs/NAME 40 --to X   that of step 40, to X

It reads --model again, which may be a path from the folder of the run's command. Adapters are
merged.
"""
import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
import dist
import flags
import identity
import model
import preflight
from chat_template import eos_ids
from errors import SettingsError, tell


def find(run: Path, step: int | None) -> Path:
    """The checkpoint of a step; None: the newest."""
    there = checkpoint.steps(run / "checkpoints")
    if not there:
        raise SettingsError(f"{run} has no checkpoints. A run keeps some with --save_every.")
    if step not in (None, *there):
        raise SettingsError(f"{run} has no checkpoint of step {step}. Would work: "
                            f"{', '.join(map(str, there))}.")
    return run / f"checkpoints/step_{there[-1] if step is None else step}"


def load(settings: dict, source: str, path: Path, world: dist.World) -> model.Policy:
    """The policy of a checkpoint, in the run's precision."""
    args = flags.CommonArgs()
    given = {name: value for name, value in settings.items() if name in vars(args)}
    args = replace(args, **given | {"dtype": settings["precision"].removeprefix("torch."),
                                    "offload": (), "cpu_offload": False, "shard_size": 0})
    kinds = model.kinds(args, model.config_of(source))
    module = model.build(kinds.logprob_model, source, world, args)
    own = {f"policy.{name}": p.detach() for name, p in module.named_parameters()}
    # What was not trained is not in the checkpoint: it stays as --model has it.
    checkpoint.fill({name: own[name] for name in own.keys() & checkpoint.names_in(path)},
                    path, world)
    return kinds.policy(module, world, args)


def export(run: Path, step: int | None, to: Path | None) -> None:
    """Writes the folder. SettingsError: there is no such checkpoint or model."""
    path = find(run := run.absolute(), step)
    to = (to or run / path.name).absolute()
    if run.parent.name == "runs":
        os.chdir(run.parent.parent)
    if to.exists():
        raise SettingsError(f"{to} exists. Would work: --to and the name of a new folder.")
    settings = checkpoint.whole(path, world := dist.join())["settings"]
    name = settings["model"]
    source = preflight.find_model(name)
    files = identity.digest_of_files(source)
    if files != settings.get("model_files", files):  # an older checkpoint has none
        raise SettingsError(f"--model {name} has other weights than when the run began.")
    ends, vocab = eos_ids(source, preflight.load_tokenizer(name, source)), model.config_of(
        source).get_text_config().vocab_size
    checkpoint.export_model(load(settings, source, path, world), source, to,
                            [i for i in ends if 0 <= i < vocab])
    tell(str(to))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("step", type=int, nargs="?")
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU may be in use
    dist.run(export, args.run, args.step, args.to)


if __name__ == "__main__":
    main()
