"""What older policies sampled is learned as the papers' formulas say: tests/reference.py."""
import numpy as np
import pytest

import test_reference
from parts.carry.carry import Carried
from reference_settings import BOUNDS, Setting
from test_reference import differences, outcomes

folder, right = test_reference.folder, test_reference.right


class Older(Setting):
    """Older policies sampled the first tokens."""

    def samples(self, step):
        found, rng = super().samples(step), np.random.default_rng(step)
        for sample in found:
            c = sample.completion
            steps = np.sort(rng.integers(step - 3, step + 1, len(c.ids))).astype(np.int32)
            sample.completion = Carried(**vars(c), steps=steps)
            sample.completion.logprobs += c.sampled * 0.3 * (steps - step).astype(np.float32)
        return found


SETTINGS = [Older(f"grpo group=3 steps=2 engine_correction=truncate kl_loss_coef=0.3 "
                  f"entropy_coef=0.2 {BOUNDS}")]


@pytest.fixture(scope="module")
def shipped(folder):
    return outcomes(folder, dict(enumerate(SETTINGS)))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))
