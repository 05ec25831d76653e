"""A model with experts learns as the papers' formulas say: experts_reference.py."""
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import test_reference
from experts_reference import Mixed
from reference_settings import TWICE, Setting
from test_reference import differences, outcomes

right = test_reference.right


class Routed(Setting):
    """Of a model with experts."""

    def model(self, lm, args, head=None, adapted=True):
        return Mixed(lm, args, head)


SETTINGS = [Routed(f"grpo group=3 steps=1 {TWICE}"),
            Routed("grpo group=3 steps=2 freeze_router=True checkpointing=True")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("experts"))
    torch.manual_seed(0)
    test_reference.save_two(Qwen3MoeForCausalLM(Qwen3MoeConfig(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True,
        **test_reference.SIZES)), path)
    return path


@pytest.fixture(scope="module")
def shipped(folder):
    found = outcomes(folder, dict(enumerate(SETTINGS)))
    for outcome in found.values():  # metrics of the router: test_experts.py
        outcome["metrics"] = [{name: value for name, value in metrics.items()
                               if "router/" not in name} for metrics in outcome["metrics"]]
    return found


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))
