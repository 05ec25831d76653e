"""export.py: the trained weights as folders that transformers, peft and vLLM load."""
import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from keeping.files import whole_folder
from trainer import lora
from trainer.model import FILES, Policy, config_of, names_in_files


def export_model(policy: Policy, source: str, folder: str, notes: dict | None = None):
    """A Hugging Face folder in the source's dtype, by rank 0. notes: {file: text}. A collective."""
    weights, dtype = {}, config_of(source).dtype or torch.float32
    names = names_in_files(policy.module.lm, source)  # of tied weights only the first
    for name, value in policy.weights(dtype):
        if policy.world.rank == 0 and name in names:
            weights[names[name]] = value.to("cpu", copy=True)  # may be a view of padded memory
    if policy.world.rank:
        return
    with whole_folder(folder) as unfinished:
        for path in Path(source).iterdir():
            if f"*{path.suffix}" in FILES and not path.name.endswith(".index.json"):
                shutil.copy(path, unfinished)
        save_torch_state_dict(weights, unfinished)
        for name, text in (notes or {}).items():
            (unfinished / name).write_text(text)


def export_adapter(policy: Policy, config: dict, folder: str):
    """peft's two files, in float32, by rank 0. A collective."""
    weights = {name: tensor.float().cpu().contiguous()
               for name, tensor in lora.tensors(policy.module.lm, policy.world.device)}
    if policy.world.rank == 0:
        with whole_folder(folder) as unfinished:
            save_file(weights, unfinished / "adapter_model.safetensors", {"format": "pt"})
            (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=1))
