"""--dtype float64 means it, in every family: transformers' own code rounds to float32 in places.
And a gradient is the derivative of what is computed, for each parameter."""
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import data
import fakes
import families
import model
from batch import Batch
from learning import difference
from ranks import results
from tools import float64


def samples_of() -> Batch:
    """Two prompts with two completions each. They are longer than the windows of the models."""
    generator = torch.Generator().manual_seed(0)
    rows = [data.Row(i, "", torch.randint(3, 320, (80 + 9 * i,), generator=generator).tolist(),
                     None, {}, "") for i in (0, 0, 1, 1)]
    rows[1::2] = rows[::2]
    completions = [families.Completion(
        torch.randint(3, 320, (n,), generator=generator).int().numpy(),
        torch.zeros(n).numpy(), False) for n in (24, 7, 1, 16)]
    return families.scored([data.Prompt(row.index, row) for row in rows], completions)


def packed(world, folder: str, names: list[str]) -> dict[str, tuple]:
    """{family: (M,) log-probs and a gradient} of the trainer, all rows in one micro-batch."""
    found = {}
    for name in names:
        args = fakes.args(dtype="float64")
        policy = model.Policy(float64.build(model.LogprobModel, f"{folder}/{name}", world, args),
                              world, args)
        batch = samples_of()
        micro, = batch.micros(world, [0, 1, 2, 3], 10_000, "update")
        logprobs, _ = policy.logprobs(micro, families.HEAT)
        logprobs.sum().backward()
        gradient = {n.removeprefix("lm."): model.whole(p.grad) for n, p in
                    policy.parameters.items()}
        in_order = torch.zeros(int(batch.tokens.sum()), dtype=torch.float64)
        in_order[micro.places] = logprobs.detach()
        found[name] = in_order, gradient
    return found


def alone(folder: str, name: str) -> tuple:
    """The same of plain transformers, one row at a time, in wide norms."""
    lm = AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", dtype=torch.float64, attn_implementation="eager",
        experts_implementation="eager")
    float64.widen(lm)
    logprobs = families.single_rows(lm, samples_of())
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in lm.named_parameters()}


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    folder = str(tmp_path_factory.mktemp("float64"))
    names = [item.callspec.params["name"] for item in request.session.items
             if item.path.stem == "test_float64" and "name" in item.callspec.params]
    for name in names:
        families.make(name, f"{folder}/{name}")
    return folder, results(1, packed, folder, names, timeout=300)[0]


# Kinds of layers; test_families.py has every family in float32.
SOME = ("Llama, tied", "Qwen3.5", "Gemma 2", "Gemma 4", "EXAONE 4", "OLMoE", "GPT-2")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in SOME else pytest.mark.slow) for name in families.CASES])
def test_packed_rows_are_single_rows_to_the_last_digits(found, name):
    folder, ours = found
    (logprobs, gradient), (theirs, their_gradient) = ours[name], alone(folder, name)
    assert logprobs.dtype == torch.float64
    assert (logprobs - theirs).abs().max() < 1e-12
    flat = [torch.cat([g[n].flatten() for n in sorted(their_gradient)])
            for g in (gradient, their_gradient)]
    assert difference(*flat) < 1e-12


# ---- a gradient is a derivative ----

def slopes(world, folder: str, names: list[str]) -> dict[str, tuple[float, float]]:
    """{family and parameter: (the trainer's derivative along a random direction, what a small step
    in this direction shows)} of a sum of log-probs."""
    found, draws = {}, torch.Generator().manual_seed(0)
    for name in names:
        args = fakes.args(dtype="float64")
        module = float64.build(model.LogprobModel, f"{folder}/{name}", world, args)
        policy = model.Policy(module, world, args)
        micro, = samples_of().micros(world, [0, 1, 2, 3], 10_000, "update")
        value = policy.logprobs(micro, families.HEAT)[0].sum()
        value.backward()
        for key, p in policy.parameters.items():
            step = 1e-6 * torch.randn(p.shape, generator=draws, dtype=torch.float64)
            values = []
            with torch.no_grad():
                for sign in 1, -2, 1:  # there, to the other side, back
                    p.to_local().add_(sign * step)
                    values.append(float(policy.logprobs(micro, families.HEAT)[0].sum()))
            found[f"{name}: {key}"] = (float((model.whole(p.grad) * step).sum()) / 1e-6,
                                       (values[0] - values[1]) / 2e-6)
    return found


@pytest.mark.parametrize("count", [4, pytest.param(99, marks=pytest.mark.slow)])
def test_the_gradient_of_each_parameter_is_what_a_small_step_shows(tmp_path, count):
    """Whatever config.json names as the token of the padding: torch leaves out its row of an
    embedding, and here it is a token of the prompts, as SmolLM2's end token is."""
    rng = random.Random(0)
    names = rng.sample([*families.CASES], min(count, len(families.CASES)))
    words = samples_of().samples[0].prompt.row.prompt_ids
    for name in names:
        families.make(name, f"{tmp_path}/{name}")
        path = Path(f"{tmp_path}/{name}/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(
            ("pad_token_id", "eos_token_id"), rng.choice(words))))
    found = results(1, slopes, str(tmp_path), names, timeout=600)[0]
    assert {key.partition(":")[0] for key in found} == {*names}
    for key, (slope, shown) in found.items():
        assert abs(slope - shown) < 1e-5 * max(1, abs(shown)), key
