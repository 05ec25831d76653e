"""Adapters learn as the papers' formulas say: lora_reference.py."""
import pytest

import test_reference
from lora_reference import Adapted
from reference_settings import CHOICES, TWICE, drawn
from test_reference import differences, every_pair, outcomes

folder, right = test_reference.folder, test_reference.right
SETTINGS = [Adapted("grpo group=3 steps=2 lora_rank=2 lora_alpha=1.0 "
                    "lora_targets=('q_proj', 'down_proj') kl_reward_coef=0.2"),
            Adapted(f"grpo group=3 steps=1 lora_rank=2 kl_loss_coef=0.3 {TWICE}")]


@pytest.fixture(scope="module")
def shipped(folder):
    return outcomes(folder, dict(enumerate(SETTINGS)))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_every_pair_of_flags_on_any_ranks(script, size, folder, right):
    choices = CHOICES[script] | {"lora_rank": (2,)}
    every_pair(drawn(script, choices, Adapted), size, folder, right)
