"""The worst micro-batch fills its budget, changes nothing, and ends a run in a sentence."""
import re
from types import SimpleNamespace

import pytest
import torch

import families
import grpo
import learning
import plan
from batch import KEYS
from parts.trial import trial
from ranks import on_ranks, results

BUDGETS = dict(update_tokens=1024, logprob_tokens=1024, minibatches=2, batch=4, group=4,
               max_tokens=24, max_prompt_tokens=8, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    families.make("Qwen2", path)
    return path


def tried(world, folder: str) -> tuple[list[str], dict[str, float]]:
    """What is said, before and after which nothing differs; the peak of each phase in bytes."""
    policy = families.trainer_of(folder, world, try_worst_case="on", lr=1e-3, **BUDGETS)
    args, said = policy.args, []
    grpo.learn(args, world, policy, learning.fabricate("mixed", 4), lr=args.lr)

    def state():
        moments = [v for s in policy.optimizer.state.values() for v in s.values()]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone()
                for t in [*policy.module.parameters(), *moments]]

    before, run = state(), SimpleNamespace(
        args=args, world=world, policy=policy, reference=policy, critic=None, log=SimpleNamespace(
            say=said.append), inputs=SimpleNamespace(
                plan=plan.Plan(args, world.size, 64, 0), shape=SimpleNamespace(vocab=320)))
    trial.try_worst_case(run)
    assert all(map(torch.equal, before, state()))
    assert all(p.grad is None for p in policy.module.parameters())
    for setting in "auto", "off":  # on a CPU
        args.try_worst_case = setting
        trial.try_worst_case(run)
    return said, trial.measure_phases(run.inputs.plan, world, 320, policy)


def test_the_worst_case_leaves_everything_as_it_was(folder):
    """Weights and moments, on two ranks, which have the peaks of the rank that needs most."""
    one, two = results(2, tried, folder)
    (said,), _ = one
    assert one == two
    peak = r"(update|logprobs) \d.\d\d GiB"
    assert re.search(f"fits; peaks {peak}, {peak}", said)


@pytest.mark.parametrize("keys", [2, 3, KEYS])
@pytest.mark.parametrize("tokens", [1000, 32, 2])
def test_the_worst_micro_batch_fills_the_budget_and_no_row_is_too_long(tokens, keys):
    micro = trial.worst_micro(tokens, 32, keys, 64, torch.device("cpu"))
    assert tokens - 32 / keys <= micro.size <= max(tokens, 2)  # no other completion fits
    lengths = [sum(micro.batch.sizes[row][1:]) for row in micro.rows]  # prompt and completion
    assert max(lengths) <= 32
    if tokens > 64:  # and attention gathers nearly as many keys as it may
        assert 0.9 * keys * tokens <= sum(lengths) <= keys * tokens


def out_of_memory(world, folder: str, whom: tuple[int, ...]) -> None:
    """A layer of these ranks has no memory in its second forward."""
    policy, calls = families.trainer_of(folder, world, **BUDGETS), []
    layer = policy.module.lm.model.layers[1]
    shipped = layer.forward

    def forward(*inputs, **options):
        calls.append(1)
        if world.rank in whom and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return shipped(*inputs, **options)

    layer.forward = forward
    trial.measure_phases(plan.Plan(policy.args, world.size, 64, 0), world, 320, policy)


@pytest.mark.parametrize("whom", [(1,), (0, 1)])
def test_out_of_memory_in_a_layer_ends_all_ranks_with_one_sentence(folder, whom):
    """Also a rank in a collective that the first will never join."""
    ended = on_ranks(2, out_of_memory, folder, whom, timeout=60.0)
    assert all(kind == "error" for kind, _ in ended)
    sentences = [text for _, text in ended if "SettingsError" in text]
    assert len(sentences) == len(whom), ended  # torchrun ends the others
    found = re.search(r"--update_tokens 1024 needs too much memory: a micro-batch with (\d+) "
                      r"tokens .*at most --update_tokens (\d+)", sentences[0])
    assert 32 <= int(found[2]) < int(found[1])
