"""reading.py: the rows of a model that sees."""
from functools import partial
from pathlib import Path

import data
from errors import SettingsError
from model_files import config_of
from parts.pictures import rows
from parts.pictures.seeing import load_eyes, sees


def maker(make, args, files, spec: str):
    """data.load's `make` for the rows of `spec`: with pictures, if the model sees. files: see
    inputs.ModelFiles."""
    if not sees(files.lm.config):
        return make
    eyes = find_eyes(args, files.lm, files.folder, files.reference)
    return partial(rows.make_row, make=make, eyes=eyes, folder=folder_of(spec))


def folder_of(spec: str) -> Path:
    """Of the data: paths of pictures begin there."""
    path = Path(data.parts_of(spec)[0])
    return path if path.is_dir() else path.parent


def find_eyes(args, lm, folder: str, reference: str | None = None):
    """Of --model, in its folder. reference: that of another model, which gets the same pixels."""
    eyes = load_eyes(args.model, folder, lm.config, *args.picture_args.limits)
    if reference:
        config = config_of(reference, "teacher")
        theirs = sees(config) and load_eyes(args.teacher, reference, config, flag="teacher")
        if not theirs or theirs.kind != eyes.kind:
            raise SettingsError(f"--teacher {args.teacher} must see as --model {args.model} does: "
                                "with an equal processor for pictures and an equal image token.")
    return eyes
