"""Layers that keep a state: no row reaches another; their memory; where their models cannot run."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fakes
import families
import model
import ranks
from batch import pack
from errors import SettingsError
from live import Live
from model_files import shape_from
from parts.states import plug, states

KIND, OPTIONS = "qwen3_5_text", dict(
    layer_types=["linear_attention", "full_attention"], head_dim=32, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)


def test_packed_rows_are_transformers_rows_alone_before_and_after_updates(tmp_path):
    """On two ranks, of the exported files. On a CPU there is no engine for them."""
    families.make(KIND, f"{tmp_path}/it", OPTIONS)
    found = ranks.results(2, families.three_steps, f"{tmp_path}/it", False)[0]
    trainer, _, rounding = families.gaps(f"{tmp_path}/it", found)
    assert trainer < families.ROUNDINGS * rounding, (trainer, rounding)


def test_the_plan_counts_the_copies_that_a_layer_with_a_state_computes(tmp_path):
    """Three completions, each with its prompt again, and the prompt itself."""
    families.make(KIND, str(tmp_path), OPTIONS | dict(
        hidden_size=256, linear_num_key_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128))
    lm = model.skeleton(str(tmp_path), torch.float32).to_empty(device="cpu")
    for p in lm.parameters():
        torch.nn.init.normal_(p, std=0.02)
    *_, packed, _ = pack([0] * 3, [[1] * 100] * 3, [torch.ones(61)] * 3, torch.device("cpu"))
    hidden = torch.randn(1, packed.tokens, 256, requires_grad=True)
    with Live() as live:
        out = lm.model.layers[0].linear_attn(hidden_states=hidden, packed=packed)
    saved = sum(storage.nbytes() for storage in live.live) - out.nbytes  # for backward
    shape, keys = shape_from(lm), (100 + 3 * 160) / packed.tokens
    memory = object.__new__(plug.memory(None, None, shape))
    memory.c = 4
    counted = memory.layer(shape, keys) - memory.layer(replace(shape, state=0), keys)
    assert saved < counted * packed.tokens < 1.5 * saved


def test_it_is_refused_where_a_run_on_a_cpu_has_an_engine():
    inputs = SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(model_type=KIND)))
    words = "on a CPU vLLM computes a qwen3_5_text .* Would work: a GPU, or sft.py"
    with pytest.raises(SettingsError, match=words):
        plug.check(fakes.args(), inputs)
    plug.check(SimpleNamespace(needs_engine=False), inputs)
    assert plug.ARCHITECTURES[KIND] is states.Stateful
