"""states.py: the memory of layers that keep a state, and where their models cannot run."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
from batch import pack
from errors import SettingsError
from model_files import shape_from
from parts.states import plug, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_the_copies_that_a_layer_with_a_state_computes(dtype):
    """Of Qwen3.5: three completions, each with its prompt again, and the prompt itself."""
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=256, intermediate_size=256, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2, vocab_size=64, linear_num_key_heads=4,
        linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"])
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
        states.put_in_rows(lm)
    lm.to_empty(device="cpu")
    for p in lm.parameters():
        torch.nn.init.normal_(p, std=0.02)
    *_, packed, _ = pack([0] * 3, [[1] * 100] * 3, [torch.ones(61)] * 3, torch.device("cpu"))
    layer, seen = lm.model.layers[0].linear_attn, {}

    def keep(x):
        seen[x.untyped_storage().data_ptr()] = x  # held, so no address comes twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = torch.randn(1, packed.tokens, 256, dtype=dtype, requires_grad=True)
        layer(hidden_states=hidden, packed=packed)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = sum(x.untyped_storage().nbytes() for at, x in seen.items() if at not in own)
    shape, c, keys = shape_from(lm), dtype.itemsize, (100 + 3 * 160) / packed.tokens
    memory = object.__new__(states.StateMemory)
    memory.c = c
    counted = memory.layer(shape, keys) - memory.layer(replace(shape, state=0), keys)
    assert saved < counted * packed.tokens < 1.5 * saved


def test_a_model_with_a_state_is_refused_where_a_run_on_a_cpu_has_an_engine():
    files = SimpleNamespace(lm=SimpleNamespace(config=AutoConfig.for_model("qwen3_5_text")))
    words = "on a CPU vLLM computes a qwen3_5_text .* Would work: a GPU, or sft.py"
    with pytest.raises(SettingsError, match=words):
        plug.check(grpo.Args(), files, [])


def test_without_an_engine_it_runs():
    sft = pytest.importorskip("parts.sft.sft")
    files = SimpleNamespace(lm=SimpleNamespace(config=AutoConfig.for_model("qwen3_5_text")))
    plug.check(sft.Args(), files, [])
