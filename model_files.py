"""model_files.py: which files in a folder are the model, and its architecture.

A run loads what transformers would load from the folder, or it is refused. So every check here
raises a SettingsError before any weight is read: a model_type that is not supported, a tensor that
is missing, left over, or of another shape than config.json says.

Top to bottom: `find` gets a folder, `architecture_of` and `config_of` read its config.json,
`weight_files` chooses the *.safetensors, `names_in_files` compares their headers with the model,
and `load` fills the sharded model.
"""
import json
import re
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import list_repo_files, snapshot_download
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

import part
from architecture import Architecture, Shape
from errors import SettingsError, as_sentence
from files import not_a_pointer

FILES = ("*.json", "*.txt", "*.jinja", "*.model", "additional_chat_templates/*.jinja")
SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
OTHERS = {  # what a folder is that has this file and no config.json: for the error message
    ".metadata": "this is a checkpoint: tools/export.py makes a model of it",
    "adapter_config.json": "this is an adapter: merge_and_unload of peft makes a model of it",
    "args.json": "this is the folder of a run, which has its model in model/"}
# Buffers that old checkpoints have. transformers computes them, so files need not match.
BUFFERS = r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.masked_bias$"


def find(model: str, flag: str = "model", weights: bool = True) -> str:
    """Returns the folder of a model, given that folder or a name on the Hugging Face hub.

    A model of the hub is fetched, without its weights if `weights` is False. `flag` is the flag
    that the error message names. SettingsError: it is neither a folder with config.json nor a model
    of the hub. The message says what the folder is instead, and a folder model/ nearby that would
    work.
    """
    path, works = Path(model), ""
    if (path / "config.json").is_file():
        for file in filter(Path.is_file, path.iterdir()):
            not_a_pointer(file)
        return model
    why = next((said for file, said in OTHERS.items() if (path / file).exists()),
               "this folder has no config.json")
    for near in [folder / "model" for folder in (path, *path.parents[:2])]:
        if path.is_dir() and (near / "config.json").is_file():
            works = f" Would work: --{flag} {near}."
            break
    if not path.is_dir():
        try:
            return fetch(model, weights)
        except SettingsError:
            raise
        except Exception as error:
            why = f"no folder, not in the hub's cache, and the hub gave a {type(error).__name__}"
    raise SettingsError(f"--{flag} {model} must be tiny, a folder with config.json and "
                        f"*.safetensors, or a name on the Hugging Face hub ({why}).{works}")


def fetch(model: str, weights: bool) -> str:
    """Downloads a hub repository and returns its local folder. It downloads the small files and, if
    `weights` is True, only those weight files that are the model (`weight_files`)."""
    folder, listed = snapshot_download(model, allow_patterns=FILES), None
    if not weights:
        return folder
    commit = Path(folder).name
    with suppress(Exception):  # without a connection the hub raises many kinds of errors
        listed = list_repo_files(model, revision=commit)
    wanted = [path.name for path in weight_files(folder, listed)]
    return snapshot_download(model, revision=commit, allow_patterns=[*FILES, *wanted])


def architecture_of(config) -> Architecture:
    """Returns the Architecture of a model by the model_type of its config. A type that no part
    knows gets Architecture itself, a dense text model."""
    return architectures().get(config.model_type, Architecture)(config)


def architectures() -> dict[str, type[Architecture]]:
    """{model_type: its class} of the models that parts add: those that are more than a dense text
    model."""
    return part.merged("ARCHITECTURES")


def shape_from(lm) -> Shape:
    """Returns the sizes of a model, which may be without its weights."""
    return architecture_of(lm.config).shape(lm)


def config_of(folder: str, flag: str = "model"):
    """Reads config.json and returns transformers' configuration object.

    SettingsError: it cannot be read, or it describes no language model that transformers loads from
    plain files (an unknown model_type, architectures of another class, quantized weights, an
    adapter, …), or one whose rotary frequencies depend on the longest row. Other keys are not
    checked here: parts/guards compares what the model computes before the first step.
    """
    from transformers import AutoConfig, conversion_mapping
    with as_sentence(f"--{flag} {folder}: cannot read its config.json"):
        config = AutoConfig.from_pretrained(folder)
    kind, classes, said = config.model_type, config.architectures or [], config.to_dict()
    rope = re.search("dynamic|longrope", str(config.get_text_config().to_dict().get(
        "rope_parameters")))
    known = architecture_of(config).class_name
    # transformers makes some models' weights, such as experts, of those in files: a part must too.
    made = conversion_mapping.get_checkpoint_conversion_mapping(kind)
    for what, wrong in (
            (f"model_type {kind}", not known or (
                kind not in architectures() and "WeightConverter" in str(made))),
            (f"architecture {classes}", classes != [known] * len(classes)),
            ("quantized weights", "quantization_config" in said),
            ("transformers_weights", said.get("transformers_weights")),
            ("an adapter_config.json", Path(folder, "adapter_config.json").exists()),
            (f"rotary type {rope and rope[0]}", rope)):  # it would depend on the longest row
        if wrong:
            raise SettingsError(
                f"--{flag} {folder} has {what}, which is not supported. Would work: "
                f"{', '.join(['a causal language model of transformers', *architectures()])}.")
    return config


def weight_files(folder: str, listed: list[str] | None = None) -> list[Path]:
    """Returns the files that are the model, chosen as transformers chooses them.

    An index names them; without one it is model.safetensors; without both, it is the numbered
    shards. `listed` has the file names of a repository of which not all are in the folder.
    SettingsError: a file is missing, there are only pickled weights, or there are two models of
    which transformers and vLLM would read different ones.
    """
    names = {*(listed or (path.name for path in Path(folder).iterdir() if path.is_file()))}
    index, single = "model.safetensors.index.json", "model.safetensors"
    counts = sorted({match[1] for name in names if (match := SHARD.fullmatch(name))})
    pickled = sorted(name for name in names if name.startswith("pytorch_model"))
    files = [single]
    if index in names:
        files = shards_of(Path(folder, index))
    elif counts and single not in names:
        files = [f"model-{i:05}-of-{n}.safetensors" for n in counts for i in range(1, int(n) + 1)]
    if pickled and not {index, single} & names:
        why = (f"{pickled[0]} and no safetensors that count (they can be converted: "
               "https://huggingface.co/spaces/safetensors/convert)")
    elif single in names - {*files}:
        why = f"two models: {single}, which transformers reads, and {index}, which vLLM reads"
    elif absent := [name for name in files if name not in names]:
        why = f"no {absent[0]}"
    else:
        return [Path(folder, name) for name in files]
    raise SettingsError(f"{folder} has {why}. Would work: what save_pretrained of transformers "
                        "writes into an empty folder.")


def shards_of(index: Path) -> list[str]:
    """Returns the sorted file names that an index (*.index.json) names. SettingsError: it cannot be
    read, or has no weight_map."""
    try:
        files = json.loads(index.read_text())["weight_map"].values()
        return sorted({min(files), *map(str, files)})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError(f"{index} has no weight_map of tensors to files ({error}).") from None


def tensors(lm):
    """Yields (name, tensor, its first row in the file) of all that files have of a model: its
    parameters, and some buffers (Gemma 4). Of a sharded parameter the tensor is this rank's rows.
    Older files may have another name, which `names_in_files` finds."""
    saved, architecture = lm.state_dict().keys(), architecture_of(lm.config)
    for name, p in (*lm.named_parameters(), *lm.named_buffers()):
        first, rows = 0, p.detach()
        if isinstance(rows, DTensor):
            first, rows = rows.__create_chunk_list__()[0].offsets[0], rows.to_local()
        if name in saved:
            yield from architecture.pieces(name, rows, first)


def names_in_files(lm, folder: str, flag: str = "model") -> dict[str, str]:
    """Compares an unsharded `lm` with its files' headers. Returns {name of `tensors`: name in the
    files}. SettingsError: a tensor is missing, duplicated, of another shape, or not of the model. A
    tied head that was saved too must have the embedding's values, which are read for that."""
    shapes, homes = {}, {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                here = {name: file.get_slice(name).get_shape() for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{path} is not a complete safetensors file ({error}).") from None
        if twice := sorted(here.keys() & shapes):
            raise SettingsError(f"{folder}: {homes[twice[0]].name} and {path.name} both have "
                                f"{twice[0]}. Would work: the files of one save.")
        shapes |= here
        homes |= dict.fromkeys(here, path)
    found = {}
    for name, tensor, _ in tensors(lm):
        tries = (name.removeprefix(f"{lm.base_model_prefix}."),  # GPT-2
                 name.replace("lm_head", "embed_out"),  # GPT-NeoX
                 name.replace(".language_model", ""))  # the name in older files
        found[name] = next((other for other in tries if other in shapes), name)
        if (there := shapes.get(found[name])) != [*tensor.shape]:
            raise SettingsError(f"--{flag} {folder}: by config.json {name} has the shape "
                                f"{[*tensor.shape]}; the *.safetensors have {there or 'none'}.")
    ignored = "|".join([*lm._keys_to_ignore_on_load_unexpected, *BUFFERS])
    for name in sorted(shapes.keys() - found.values()):
        twin = found.get(lm.all_tied_weights_keys.get(name))  # of a tied head that was saved
        if not twin and re.search(ignored, name):
            continue
        why = "which is not of the model. Would work: the config.json of these weights"
        if twin:
            one, other = (safe_open(homes[n], "pt").get_tensor(n).to(lm.dtype)
                          for n in (name, twin))
            if torch.equal(one, other):
                continue
            why = (f"which differs from {twin}, and config.json ties them. Would work: "
                   '"tie_word_embeddings": false')
        raise SettingsError(f"--{flag} {folder}: {homes[name].name} has {name}, {why}.")
    return found


def load(lm, names: dict[str, str], folder: str):
    """Loads a sharded model in place from the files, and converts to its dtypes. Each rank reads
    only its own rows. names: what `names_in_files` returned. Parameters not in it are in no file,
    and keep their values."""
    wanted = {names[name]: (first, rows) for name, rows, first in tensors(lm) if name in names}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in wanted.keys() & file.keys():
                first, rows = wanted[name]
                part = slice(first, first + len(rows)) if rows.dim() else ...
                rows.copy_(file.get_slice(name)[part])
