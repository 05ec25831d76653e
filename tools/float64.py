"""tools/float64.py: a model that computes in float64, for prove.py and the tests.

What must be equal is then equal to the last digits.
"""
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

import model
from model_files import architecture_of


class Float64(TorchFunctionMode):
    """Inside, float64 stays float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            args = [torch.float64 if x is torch.float32 else x for x in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **kwargs)


def widen(lm):
    """transformers rounds to float32 in norms, some rotations and softmax, also in a float64 model:
    a shared prompt would change the gradient by 1e-7. In place."""
    def wide(forward, *args, **kwargs):
        with Float64():
            return forward(*args, **kwargs)

    whole = getattr(lm, "base_model", lm)
    for part in whole.children():  # embeddings, layers, rotary frequencies, last norm
        for module in part if isinstance(part, nn.ModuleList) else [part]:
            module.forward = partial(wide, module.forward)


def make(folder: str, vocab: int) -> None:
    """A small random Qwen2, as a folder."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)


def build(kind, folder: str, world, args, **options):
    """model.build. With --dtype float64 nothing in the model is rounded to float32."""
    shipped = model.skeleton

    def skeleton(*given):
        lm = shipped(*given)
        for part in architecture_of(lm.config).stacks(lm):
            widen(part)
        return lm

    wide = args.dtype == "float64"
    with patch.object(model, "skeleton", skeleton if wide else shipped):
        return model.build(kind, folder, world, args, **options)
