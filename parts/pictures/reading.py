"""reading.py: the rows of a model that sees, and what its engine must know of them."""
from functools import partial
from pathlib import Path

import data
from errors import SettingsError, as_sentence
from model_files import config_of
from parts.pictures import rows
from parts.pictures.seeing import FAMILIES, sees
from rollout import HELD


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
    limits = args.data_args.min_image_tokens, args.data_args.max_image_tokens
    eyes = load_eyes(args.model, folder, lm.config, *limits)
    if reference:
        config = config_of(reference, "teacher")
        theirs = sees(config) and load_eyes(args.teacher, reference, config, flag="teacher")
        if not theirs or theirs.kind != eyes.kind:
            raise SettingsError(f"--teacher {args.teacher} must see as --model {args.model} does: "
                                "with an equal processor for pictures and an equal image token.")
    return eyes


def load_eyes(name: str, folder: str, config, *limits: int, flag: str = "model"):
    """Those of a model's family. SettingsError: its files have no processor."""
    with as_sentence(f"--{flag} {name} has no processor for pictures that transformers can load"):
        return FAMILIES[config.model_type].Eyes(folder, config, *limits)


def for_engine(args, inputs, lm) -> dict:
    """What an Engine gets beside. {}: the model sees none."""
    if not sees(lm.config):
        return {}
    eyes = find_eyes(args, lm, inputs.source)
    return {"eyes": eyes, "pictures": options(eyes, inputs.rows + inputs.eval_rows)}


def options(eyes, everything: list[data.Row]) -> dict:
    """vLLM's. Its own normalization would have noise for a mean, by load_format="dummy"."""
    found = [rows.pictures_in(row) for row in everything]
    most = max((len(it.sources) for it in found if it), default=0)
    return {"limit_mm_per_prompt": {"image": max(1, most), "video": 0},
            "mm_processor_cache_gb": HELD, "mm_device_do_normalize": False,
            "mm_processor_kwargs": {"size": eyes.size}}
