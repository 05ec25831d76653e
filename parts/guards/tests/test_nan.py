"""A policy whose log-probs are NaN or infinite is not one policy with the others: the run ends
before its first step."""
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fakes
from errors import SettingsError
from parts.guards import logprobs as guard

PLAIN = torch.linspace(-3.0, -0.1, 12, dtype=torch.float64)
WHO = "transformers", "trainer", "engine", "reference", "its transformers"


class Others(fakes.World):
    """This rank, of several: `theirs` is what the largest of the others has."""

    def __init__(self, theirs: float = 0.0):
        super().__init__(0, 2)
        self.theirs = theirs

    def max(self, tensor):
        return torch.maximum(tensor, torch.full_like(tensor, self.theirs))


def compared(monkeypatch, logprobs: dict, dtype=torch.float32, world=None) -> str:
    """compare_policies on these log-probs (M,) of WHO → what it prints. None: without it."""
    policy, reference = mock.Mock(), mock.Mock()
    reference_files = None if logprobs["reference"] is None else "start"
    run = SimpleNamespace(
        dtype=dtype, log=fakes.Log(), args=fakes.args(), world=world or fakes.World(),
        policy=policy, reference=reference, inputs=SimpleNamespace(reference=reference_files))

    def of(one, names):
        return logprobs[names[one is reference]]

    monkeypatch.setattr(guard, "prompts_of", lambda run: [])
    monkeypatch.setattr(guard, "sampled", lambda *_: ([], logprobs["engine"]))
    monkeypatch.setattr(guard, "transformers_logprobs", lambda one, *_: (
        of(one, ("transformers", "its transformers")), torch.zeros_like(PLAIN)))
    monkeypatch.setattr(guard, "trainer_logprobs",
                        lambda one, *_: of(one, ("trainer", "reference")))
    guard.compare_policies(run)
    return "\n".join(run.log.said)


def policies(**others) -> dict:
    return dict.fromkeys(WHO, PLAIN) | others


def broken(value: float, places: slice) -> torch.Tensor:
    found = PLAIN.clone()
    found[places] = value
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("who", [*WHO, "engine trainer", "trainer transformers", "all"])
def test_a_policy_with_a_number_that_is_not_finite_ends_the_run(monkeypatch, who, value, dtype):
    """At one token or at all; also where all of them are broken alike, whose difference is NaN."""
    names = WHO if who == "all" else [who] if who in WHO else who.split()
    for places in slice(None), slice(3, 4), slice(11, 12):
        odd = dict.fromkeys(names, broken(value, places))
        with pytest.raises(SettingsError, match="differ before an update by (inf|1.8e.308) nats"):
            compared(monkeypatch, policies(**odd), dtype)


@pytest.mark.parametrize("missing", [(), ("engine",), ("reference",), ("engine", "reference")])
def test_equal_policies_are_printed(monkeypatch, missing):
    """The control: without an engine, and without a reference model, there are fewer gaps."""
    text = compared(monkeypatch, policies(**dict.fromkeys(missing)))
    assert "trainer and transformers 0" in text
    assert ("engine and trainer 0" in text) == ("engine" not in missing)
    assert ("reference and transformers 0" in text) == ("reference" not in missing)


def test_a_broken_policy_of_another_rank_ends_this_one_too(monkeypatch):
    """Each rank compares its own completions, and all end together."""
    assert compared(monkeypatch, policies(), world=Others())
    with pytest.raises(SettingsError, match="by inf nats"):
        compared(monkeypatch, policies(), world=Others(math.inf))
    with pytest.raises(SettingsError, match="by inf nats"):  # the max of NaN and 0 may be 0
        compared(monkeypatch, policies(trainer=broken(math.nan, slice(0, 1))), world=Others())
