"""The limit of the comparison of engine, trainer and transformers."""
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fakes
from errors import SettingsError
from parts.guards import logprobs


@pytest.mark.parametrize("engine, trainer, rounding, max_gap, words", [
    (1e-3, 1e-3, 0.0, None, None), (2e-3, 1e-6, 0.0, None, "engine and trainer differ "),
    (0.011, 1e-3, 0.0075, None, None), (0.004, 1e-3, 1e-4, None, None),  # of few uncertain tokens
    (0.02, 1e-3, 0.0075, None, "engine and .* more than 0.015: 2 roundings of bfloat16"),
    (1e-3, 0.02, 0.0075, None, "trainer and transformers differ .* more than 0.015.* model.py or"),
    (inf, 1e-3, 0.0075, None, "engine and trainer differ "), (0.02, 1e-3, 0.0075, 0.03, None),
    (0.014, 1e-3, 0.0075, 0.01, "more than --max_gap 0.01"),
    (0.2, 1e-3, 3.0, None, "more than 0.15: 2 roundings")])
def test_the_limit_of_the_comparison_is_what_bfloat16_rounds_in_this_run(
        engine, trainer, rounding, max_gap, words):
    """rounding: of bfloat16; in float32 it is 0. words: of the sentence that ends the run."""
    run = SimpleNamespace(dtype=torch.bfloat16 if rounding else torch.float32, log=fakes.Log(),
                          policy=mock.Mock(), args=fakes.args(max_gap=max_gap))
    gaps = {"trainer and transformers": trainer, "engine and trainer": engine}
    with pytest.raises(SettingsError, match=words) if words else nullcontext():
        logprobs.judge(run, gaps, rounding)
    assert bool(run.log.said) != bool(words)
