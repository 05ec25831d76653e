"""trial.py: the worst micro-batch fills its budget, changes nothing, and ends a run in a sentence.
"""
import re
from types import SimpleNamespace

import pytest
import torch

import grpo
import learning
import plan
from batch import KEYS
from errors import SettingsError
from learning import fabricate
from parts.trial import trial
from ranks import on_ranks, results
from test_memory import build, make_wide, peaks_of, within_the_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    learning.make_models(None, path)
    return path


def worst(tokens: int, world):
    return trial.worst_micro(tokens, 64, KEYS, 256, world.device)


def worst_peaks(world, folder: str) -> list[tuple[float, float]]:
    return peaks_of(world, folder, worst, KEYS)


def test_the_worst_micro_batch_takes_what_the_plan_says(tmp_path):
    make_wide(str(tmp_path))
    within_the_plan(results(1, worst_peaks, str(tmp_path))[0])


def run_phases(world, folder: str) -> tuple[dict, bool, bool]:
    """(its peaks, are weights and optimizer untouched, are gradients gone)."""
    args = learning.arguments(update_tokens=2048, score_tokens=2048, minibatches=2, dtype="float32")
    policy = build(world, f"{folder}/tied", args)
    grpo.learn(args, world, policy, fabricate("mixed", 4), lr=args.lr)

    def state():
        moments = [v for s in policy.optimizer.state.values() for v in s.values()]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone()
                for t in [*policy.module.parameters(), *moments]]
    before = state()
    made = plan.Plan(args, world.size, 64, 0)
    peaks = trial.measure_phases(made, world, learning.VOCAB, policy)
    same = all(map(torch.equal, before, state()))
    return peaks, same, all(p.grad is None for p in policy.module.parameters())


def test_the_worst_case_leaves_everything_as_it_was(folder):
    found = results(2, run_phases, folder)
    for peaks, same, clean in found:
        assert set(peaks) == {"update", "score"} and all(p > 0 for p in peaks.values())
        assert same and clean
    assert found[0][0] == found[1][0]  # of the rank that needs most


@pytest.mark.parametrize("keys", [2, 3, KEYS])
@pytest.mark.parametrize("tokens", [1000, 32, 2])
def test_the_worst_micro_batch_fills_the_budget_and_no_row_is_too_long(tokens, keys):
    micro = trial.worst_micro(tokens, 32, keys, 64, torch.device("cpu"))
    assert tokens - 32 / keys <= micro.tokens <= max(tokens, 2)  # no other completion fits
    lengths = [sum(micro.batch.sizes[row][1:]) for row in micro.rows]  # prompt and completion
    assert max(lengths) <= 32
    if tokens > 64:  # and attention gathers nearly as many keys as it may
        assert 0.9 * keys * tokens <= sum(lengths) <= keys * tokens


def out_of_memory(world, folder: str, whom: tuple[int, ...]) -> None:
    """A layer of these ranks has no memory in its second forward."""
    args = learning.arguments(update_tokens=1024, score_tokens=1024, minibatches=2,
                              dtype="float32")
    policy = build(world, f"{folder}/untied", args)
    layer, calls = policy.module.lm.model.layers[1], []
    shipped = layer.forward

    def forward(*inputs, **options):
        calls.append(1)
        if world.rank in whom and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return shipped(*inputs, **options)

    layer.forward = forward
    trial.measure_phases(plan.Plan(args, world.size, 64, 0), world, learning.VOCAB, policy)


@pytest.mark.parametrize("whom", [(1,), (0, 1)])
def test_out_of_memory_in_a_layer_ends_all_ranks_with_one_sentence(folder, whom):
    # The other rank is in a collective that the first will never join.
    ended = on_ranks(2, out_of_memory, folder, whom, timeout=60.0)
    assert all(kind == "error" for kind, _ in ended)
    sentences = [text for _, text in ended if "SettingsError" in text]
    assert len(sentences) == len(whom), ended  # torchrun ends the others
    assert "--update_tokens 1024 needs too much memory" in sentences[0]
    suggested = int(re.search(r"at most --update_tokens (\d+)", sentences[0]).group(1))
    failed = int(re.search(r"with (\d+) tokens", sentences[0].replace(",", "")).group(1))
    assert learning.LONGEST <= suggested < failed


@pytest.mark.parametrize("failed, advice", [
    (80, "at most --update_tokens 40"), (79, "--checkpointing or more ranks")])
def test_a_budget_that_would_fit_holds_a_longest_row(failed, advice):
    phase = SimpleNamespace(name="update", longest=40, budget=99)
    with pytest.raises(SettingsError, match=f"with {failed} tokens .* Use {advice}"):
        trial.end(SimpleNamespace(rank=0), phase, failed)
