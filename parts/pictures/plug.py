"""Models that see pictures (README.md)."""
from functools import partial

from model import LogprobModel
from parts.pictures import seeing
from parts.pictures.engine import LookingEngine
from parts.pictures.flags import PictureArgs as Flags  # noqa: F401
from parts.pictures.kinds import NAMES, check_template, find_eyes
from parts.pictures.rows import folder_of
from parts.pictures.rows import make_row as make_pictured_row

ARCHITECTURES = dict.fromkeys(NAMES, seeing.Seeing)


def make_row(make, args, inputs, spec):
    config = inputs.lm.config
    if config.model_type not in ARCHITECTURES:
        return make
    eyes = find_eyes(args, config, inputs.source, inputs.reference)
    check_template(args.model, inputs)
    return partial(make_pictured_row, make=make, eyes=eyes, folder=folder_of(spec))


def model(kind, args, config, trained):
    if config.model_type in ARCHITECTURES:
        return seeing.SeeingLogprobModel if kind is LogprobModel else seeing.SeeingModel


def policy(kind, args, config, trained):
    return seeing.Seer if config.model_type in ARCHITECTURES else None


def engine(kind, args, config, dtype):
    return LookingEngine if config.model_type in ARCHITECTURES else None


def memory(kind, args, shape):
    return seeing.SeeingMemory if isinstance(shape, seeing.SeeingShape) else None
