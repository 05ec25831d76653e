"""What --checkpointing keeps is on the host: the same gradients; the inputs of layers are freed."""
import weakref

import pytest
import torch

import fakes
import families
import learning
import memory
import part
import plan
import ranks
from batch import Batch
from parts.activations import activations, plug
from shapes import shape_of

FLAGS = dict(checkpointing=True, dtype="float64")


def copied(pin_memory: bool):
    """As torch's save_on_cpu, which copies nothing where all is on the host already."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)


def gradients(world, folder: str, away: bool) -> tuple[dict, list[bool]]:
    """The gradients of an update, and of each layer's input whether it is still there before the
    backward pass."""
    policy = families.trainer_of(folder, world, activation_offload=away, **FLAGS)
    inputs, activations.save_on_cpu = [], copied
    for layer in policy.module.lm.base_model.layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
    batch = Batch(learning.fabricate("mixed", 7))
    for micro in batch.micro_batches(world, [*range(len(batch.samples))], 400, "update"):
        inputs.clear()
        logprobs, entropy = policy.logprobs(micro, 1.0, True)
        there = [one() is not None for one in inputs]
        policy.backward((logprobs + 0.1 * entropy).sum())
    return {name: p.grad.full_tensor() for name, p in policy.parameters.items()}, there


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradients_are_the_same_bits_and_the_inputs_are_freed(size, tmp_path):
    ranks.results(1, learning.make_models, str(tmp_path))
    plain, there = ranks.results(size, gradients, f"{tmp_path}/tied", False)[0]
    ours, away = ranks.results(size, gradients, f"{tmp_path}/tied", True)[0]
    assert plain.keys() == ours.keys() and all(map(torch.equal, plain.values(), ours.values()))
    assert there == [True, True] and away == [False, False]


def test_it_is_planned_and_needs_checkpointing(refused):
    assert refused("grpo", "activation_offload=True", "--activation_offload needs --checkpointing")
    assert refused("grpo", "activation_offload=True checkpointing=True", "fine")
    shape, found = shape_of("Qwen2.5-7B"), []
    for away in False, True:
        args = fakes.args(checkpointing=True, activation_offload=away, dtype="bfloat16", plan=True)
        kind = part.memory(memory.Memory, args, shape)
        found.append(kind(plan.Plan(args, 8, 64, 0), shape, 80 * memory.GIB))
    micro = [one.parts["micro-batch"][1] for one in found]
    tokens = next(p.tokens for p in found[0].plan.phases(64) if p.name == "update")
    assert micro[0] - micro[1] == tokens * 27 * 2 * 3584
    assert plug.memory(None, fakes.args(), shape) is None
    assert plug.model(None, fakes.args(activation_offload=True), None, False) is None
    assert plug.model(None, fakes.args(activation_offload=True), None, True) is (
        activations.HostModel)
