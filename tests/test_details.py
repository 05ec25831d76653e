"""docs/learn/details.md is the list of mutations.py; details that had no test."""
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data
import families
import grpo
import learning
import mutations
import probes
import ranks
import test_packing
from running import evaluate
from trainer import model
from trainer.batch import Batch, Micro

ROOT = Path(__file__).parent.parent


# ---- the page

def test_every_row_of_the_page_has_a_mutation_of_its_line_and_its_test():
    cells = mutations.page_cells()
    assert [*cells] == [*range(1, len(mutations.ROWS) + 1)] and len(cells) >= 30
    for number, row in enumerate(mutations.ROWS, 1):
        what, line, effect, _ = cells[number]
        code, file = re.fullmatch(r"\[`(.*)`\]\(\.\./\.\./(.*)#L\d+\)", line).groups()
        assert (ROOT / row.file).read_text().count(row.old) == 1, (number, row.old)
        assert file == row.file and (code in row.old or row.old in code), number
        name = re.match(r"(\w+\.py)::(\w+)", row.test)
        assert f"\ndef {name[2]}(" in (ROOT / f"tests/test_{name[1]}").read_text(), number
        shape = re.escape(row.effect).replace(r"\{\}", ".+")
        assert re.fullmatch(f"{shape}|ends with \\w+", effect) and what, (number, effect)


@pytest.mark.slow
def test_every_mutation_is_caught_and_has_the_effect_of_the_page():
    """Minutes: engines and ranks."""
    done = subprocess.run([sys.executable, "tests/mutations.py"], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-6000:]


# ---- details that no other test held, or only a slower one

def test_an_update_is_the_formula():
    """test_same_update.py in small: no ranks, one model, no files."""
    lm, samples = test_packing.small("qwen2"), learning.fabricate("mixed", 7)
    lengths = [len(s.completion.ids) for s in samples]
    logprobs = test_packing.one_by_one(lm, samples).split(lengths)
    tokens, loss = 0, 0.0
    for start in range(0, len(samples), learning.GROUP):
        rewards = {i: samples[i].score.total for i in range(start, start + learning.GROUP)
                   if samples[i].score.total is not None}
        if len(rewards) > 1:
            mean = sum(rewards.values()) / len(rewards)
            tokens += sum(samples[i].completion.tokens for i in rewards)
            for i, reward in rewards.items():
                sampled = samples[i].completion.sampled
                loss -= (reward - mean) * logprobs[i][sampled].sum()
    (loss / tokens).backward()
    true = torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert learning.difference(probes.gradient(update_tokens=77), true) < 1e-12


def test_the_update_has_a_budget_of_its_own():
    """verl's update used the micro-batch size of the log-prob pass."""
    assert 40 < probes.largest_update() <= 50


def test_a_step_without_tokens_moves_nothing():
    """AdamW's momentum would move the weights, where no completion has a reward."""
    assert probes.moved_without_tokens() == 0


def test_a_token_with_the_id_of_padding_is_trained_on():
    """Where pad is the end token, `ids != pad` masked it out: completions never learnt to end."""
    assert probes.tokens_with_loss() == 8


def test_the_end_token_is_trained_on():
    assert probes.sampled() == 5


@pytest.mark.parametrize("ids, own, expected", [
    ([2, 7], 2, [2, 7]), ([2, 7], 5, [2, 5, 7]), (3, None, [3]), (None, None, [])])
def test_every_end_token_of_the_generation_config_ends_a_completion(tmp_path, ids, own, expected):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids or "null"}}}')
    assert data.eos_ids(str(tmp_path), probes.ending_in(own)) == expected


def test_log_probs_are_at_least_float32():
    error, dtype = probes.bfloat16_head()
    assert error < 0.01 and dtype == torch.float32


def two_passes(world, folder: str) -> bool:
    """Are the log-probs of two passes the same?"""
    families.make("GPT-2", folder)
    module = model.build(model.LogprobModel, folder, world, model.ModelArgs())
    micro = Micro(Batch(learning.fabricate("plain", 1)), [0, 1, 2, 3], world.device)
    first, second = (module(micro.inputs, micro.source, micro.targets, 1.0, "none")[0]
                     for _ in range(2))
    return torch.equal(first, second)


def test_a_dropout_of_the_config_is_off(tmp_path):
    """GPT-2's is 0.1. With it the ratio would not be 1 before the first update."""
    assert ranks.results(1, two_passes, str(tmp_path)) == [True]
    assert json.loads((tmp_path / "config.json").read_text())["resid_pdrop"] == 0.1


def test_a_truncated_completion_without_loss_counts_in_its_group():
    """--overlong_filter takes its loss, not its reward: else a group of good long answers and bad
    short ones would praise the short."""
    args = learning.arguments(overlong_filter=True)
    samples = learning.fabricate("plain", 1)
    batch = Batch(samples)
    loss_tokens, counts = grpo.tokens_in_loss(args, batch)
    advantages = grpo.compute_advantages(args, batch, loss_tokens, None, None)
    assert batch.truncated.sum() == counts["batch/dropped_overlong"] == 1
    assert not loss_tokens[batch.truncated].any() and loss_tokens[~batch.truncated].all()
    right = batch.of_rows(batch.rewards - batch.rewards.mean())
    assert torch.allclose(advantages, right, atol=1e-15)


def test_the_critics_targets_are_returns_from_before_the_whitening():
    assert probes.critic_targets() == 1


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied(gradient):
    layer, world = torch.nn.Linear(2, 1), probes.World()
    trained = model.Trained(layer, world, model.ModelArgs(), model.OptimizerArgs())
    before = [p.detach().clone() for p in layer.parameters()]
    layer.weight.grad, layer.bias.grad = torch.tensor([[gradient, 1.0]]), torch.ones(1)
    assert not trained.step(0.1) < float("inf") and layer.weight.grad is None
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
    layer.weight.grad = torch.ones(1, 2)
    assert trained.step(0.1) > 0 and not torch.equal(layer.weight, before[0])


def test_each_completion_has_a_seed_of_its_own():
    """Neighbours with seed + i share streams. Nor does it depend on the batch."""
    assert len({request.seed for request in probes.requests(64, 8)}) == 512
    alone = [request.seed for request in probes.requests(1, 8, first=5)]
    assert alone == [request.seed for request in probes.requests(64, 8)][40:48]


def test_sympy_gets_arithmetic_only():
    """Today's math-verify parses LaTeX itself; another path of it could reach sympy's eval."""
    assert probes.evaluated() == "refused"


@pytest.mark.parametrize("n, correct", [(4, 1), (5, 3), (5, 0)])
def test_pass_at_k_is_unbiased(n, correct):
    """It is the share of all k-subsets with a correct one."""
    for k in range(1, n + 1):
        subsets = [min(s) < correct for s in itertools.combinations(range(n), k)]
        assert evaluate.pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))
