"""--dtype float64 means it, in every family: transformers' own code rounds to float32 in places."""
import pytest
import torch
from transformers import AutoModelForCausalLM

import data
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
        args = model.ModelArgs(dtype="float64")
        policy = model.Policy(float64.build(model.LogprobModel, f"{folder}/{name}", world, args),
                              world, args, model.OptimizerArgs())
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
             if item.path.stem == "test_float64"]
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
