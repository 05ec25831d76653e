"""What bounds memory (plan.py, run.py, model.py); no knob for it changes the maths."""
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import grpo
import inputs
import learning
import model
import plan
import ppo
from batch import Batch, Micro
from errors import SettingsError
from examples import tiny
from learning import difference, fabricate
from live import Live
from model_files import shape_from
from part import extended
from plan import Memory
from ranks import results
from settings import changed
from shapes import shape_of
from tools import float64

ROOT = Path(__file__).parent.parent
GIB, QWEN_7B = 2**30, "Qwen/Qwen2.5-7B-Instruct"


def planned(script, ranks: int, model_name: str, gpu_gb: float, n_rows=7473, **flags) -> Memory:
    args = changed(script.Args(), model=model_name, **flags)
    assert not plan.problems(args, ranks, n_rows)
    shape = shape_of(model_name)
    kind = extended("memory", Memory, args, shape)
    return kind(plan.Plan(args, ranks, n_rows, 0), shape, gpu_gb * GIB)


# ---- the plan ----

def test_situation_4_needs_as_much_with_twice_the_completions():
    for group in 32, 64:
        found = planned(grpo, 4, QWEN_7B, 80, batch=8, group=group, max_tokens=4096)
        assert not found.fits and found.sentence().startswith(
            "does not fit: 157.3 of 80 GiB per GPU, in training. The largest part is micro-batch, "
            "123.4 GiB. Would work: --checkpointing")


@pytest.mark.parametrize("gpu_gb", [40, 60, 80])
@pytest.mark.parametrize("script, ranks", [(grpo, 4), (ppo, 8)])
def test_what_the_plan_says_would_work_does(script, ranks, gpu_gb):
    flags = dict(batch=8, group=8, max_tokens=4096)
    said = planned(script, ranks, QWEN_7B, gpu_gb, **flags).sentence()
    change = {name: int(value or 1) for name, value in re.findall(
        r"--(\w+)(?: (\d+))?", said.partition("Would work: ")[2])}
    assert change or "docs/use/memory_and_machines.md" in said
    assert planned(script, ranks, QWEN_7B, gpu_gb, **flags, **change).fits == bool(change)


def test_the_printed_plan_has_each_part_and_their_sum():
    flags = dict(batch=8, group=64, max_tokens=4096, kl_loss_coef=0.1)
    text = planned(grpo, 4, QWEN_7B, 80, **flags).text()
    rows = {name: (float(a), float(b)) for name, a, b in re.findall(
        r"^    ([a-z -]+?) +([\d.]+) +([\d.]+)$", text, re.M)}
    total = rows.pop("sum")
    assert [*rows] == ["set aside", "weights", "gradients", "moments", "reference", "micro-batch",
                       "logits", "engine"]
    for column in 0, 1:
        assert sum(sizes[column] for sizes in rows.values()) == pytest.approx(
            total[column], abs=0.05)
    # 4 bytes of a weight, of its gradient, of each of two moments; 2 of one of the reference.
    n = 7_615_616_512 / 4 / GIB
    for name, size in ("weights", 4), ("gradients", 4), ("moments", 8), ("reference", 2):
        assert rows[name][1] == pytest.approx(size * n, abs=0.01)
    assert rows["logits"][1] == pytest.approx(5 * 0.5, abs=0.01)  # of 512 MiB each


@pytest.mark.parametrize("part, change", [
    ("micro-batch", dict(checkpointing=True)), ("logits", dict(head_chunk=256)),
    ("micro-batch", dict(update_tokens=4608, score_tokens=8192)),
    ("engine", dict(gpu_memory_utilization=0.3)), ("engine", dict(kv_cache_gb=4.0)),
    ("moments", dict(offload=("optimizer",))), ("engine", dict(eager=True)),
    ("weights", dict(offload=("params", "optimizer"))),
    ("gradients", dict(cpu_offload=True))])
def test_what_the_page_says_makes_a_part_smaller(part, change):
    page = (ROOT / "docs/use/memory_and_machines.md").read_text()
    listed = page.partition("what to lower first")[2].partition("## LoRA")[0]
    flags = dict(batch=8, max_tokens=4096)
    before, after = (planned(grpo, 4, QWEN_7B, 80, **flags, **more) for more in ({}, change))
    assert sum(after.parts[part]) < sum(before.parts[part])
    assert all(f"--{name}" in listed for name in change)


@pytest.mark.parametrize("flags, n_eval, sequences", [
    (dict(batch=4, group=2), 0, 9), (dict(batch=4, group=2, max_num_seqs=5), 0, 6),
    (dict(batch=4096, group=8, max_num_seqs=4096), 0, None)])
def test_without_a_gpu_the_cache_is_what_one_call_can_use(flags, n_eval, sequences):
    args = changed(grpo.Args(), max_prompt_tokens=30, max_tokens=100, **flags)
    shape = shape_of("tiny")
    # A block of vLLM has 128 tokens there.
    two_blocks = 256 * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    expected = sequences * two_blocks if sequences else GIB
    made = plan.Plan(args, 1, 1000 if sequences else 10**6, n_eval)
    assert Memory(made, shape, None).cache == expected


def test_a_critic_needs_what_the_policy_needs():
    found = planned(ppo, 4, QWEN_7B, 80).parts
    assert found["critic"][1] == sum(found[name][1] for name in ("weights", "gradients", "moments"))


# ---- what the trainer holds ----

def all_on_two(world, folder: str) -> dict:
    return {"sync": stream_weights(world, folder),
            "knobs": {name: learn_with(world, folder, knob) for name, knob in KNOBS.items()}}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[str, list[dict]]:
    folder = str(tmp_path_factory.mktemp("models"))
    learning.make_models(None, folder)
    make_wide(folder)
    return folder, results(2, all_on_two, folder)


def make_wide(folder: str) -> None:
    """FOLDER/wide: a random Qwen2 of 8 layers, no weight much of the whole."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )).save_pretrained(f"{folder}/wide")


def build(world, folder: str, args, trained: bool = True) -> model.Policy:
    module = float64.build(model.LogprobModel, folder, world, args, trained=trained)
    return model.Policy(module, world, args)


def stream_weights(world, folder: str) -> tuple[int, int, int]:
    """Bytes: (live at most while the weights stream, the largest weight, the model).

    gloo's threads give a weight back when the machine lets them run, so a busy one adds to the
    peak. Of some passes the least counts: what the code itself holds is in each of them.
    """
    policy, peaks = build(world, f"{folder}/wide", learning.arguments(dtype="float32")), []
    for _ in range(10):
        with Live() as live:
            sizes = [weight.nbytes for _, weight in policy.weights(torch.bfloat16)]
        peaks.append(live.peak)
    return min(peaks), max(sizes), sum(sizes)


def test_weight_sync_streams(two_ranks):
    for peak, largest, everything in (found["sync"] for found in two_ranks[1]):
        assert largest <= peak <= 4 * largest  # its parts, the whole, and the one before
        assert peak < everything / 4


def planned_bytes(shape, phase: str, tokens: int, keys: float) -> float:
    """What the plan adds for a micro-batch of that size, gradients too."""
    args = learning.arguments(dtype="float32", head_chunk=8)
    found = Memory(plan.Plan(args, 1, None, 0), shape, None)
    added = found.micro_batch(plan.Phase(phase, 10**6, tokens, 1, 1, keys))
    return sum(added) + (found.parts["gradients"][1] if phase == "update" else 0)


def alone(tokens: int, world) -> Micro:
    """The largest micro-batch with one completion a prompt: the first prompt pads all others."""
    samples = [learning.sample([i] * (45 if i else 63), np.ones(2)) for i in range(tokens // 47)]
    micro = Micro(Batch(samples), list(range(len(samples))), world.device)
    assert tokens - 64 < micro.tokens <= tokens
    return micro


def peaks_of(world, folder: str, make, keys: int) -> list[tuple[float, float]]:
    """(bytes measured, bytes planned) of two micro-batches, each with and without gradient.
    make(tokens, world): the largest micro-batch of these tokens, which gathers `keys` keys."""
    args, found = learning.arguments(dtype="float32", head_chunk=8), []
    shape = shape_from(model.skeleton(f"{folder}/wide"))
    policy = build(world, f"{folder}/wide", args)
    for tokens, grad in product((1024, 2048), (True, False)):
        micro = make(tokens, world)
        with Live() as live, torch.set_grad_enabled(grad):
            logprobs, _ = policy.logprobs(micro, 1.0)
            if grad:
                policy.backward(logprobs.sum())
        policy.optimizer.zero_grad(set_to_none=True)
        found.append((live.peak, planned_bytes(shape, "update" if grad else "score", tokens, keys)))
    return found


def within_the_plan(peaks: list[tuple[float, float]]) -> None:
    for i, (peak, planned) in enumerate(peaks):
        assert (0.4 if i % 2 else 0.74) < peak / planned < 1, i  # it overestimates a score pass


def lone_peaks(world, folder: str) -> list[tuple[float, float]]:
    return peaks_of(world, folder, alone, 2)


def test_a_micro_batch_takes_what_the_plan_says(tmp_path):
    make_wide(str(tmp_path))
    within_the_plan(results(1, lone_peaks, str(tmp_path))[0])


# ---- no knob changes the maths ----

KNOBS = {"none": {}, "shard_size": dict(shard_size=1), "all others": dict(
    checkpointing=True, cpu_offload=True, offload=("params", "optimizer", "reference"),
    head_chunk=3, update_tokens=learning.LONGEST, score_tokens=learning.LONGEST)}


def learn_with(world, folder: str, knob: dict) -> tuple[list[dict], dict]:
    """Two steps with a reference → (both metrics, the parameters after)."""
    args = learning.arguments(
        minibatches=2, kl_loss_coef=0.05, entropy_coef=0.01, dtype="float64", **knob)
    policy = build(world, f"{folder}/tied", args)
    reference = build(world, f"{folder}/tied", args, trained=False)
    learning.reset(reference.module, f"{folder}/tied", noise=0.05)
    metrics = []
    for step in range(2):
        policy.move(torch.device("cpu"))
        sum(float(w.sum()) for _, w in policy.weights())
        policy.move(world.device)
        samples = fabricate("mixed", 5, seed=step)
        metrics.append(grpo.learn(args, world, policy, samples, lr=args.lr, reference=reference))
    return metrics, {
        name.removeprefix("lm."): p.detach().full_tensor()
        for name, p in policy.module.named_parameters()}


def test_no_knob_changes_the_update(two_ranks):
    one = two_ranks[1][0]["knobs"]
    before = load_file(f"{two_ranks[0]}/tied/model.safetensors")
    update = {knob: torch.cat([(p - before[name]).flatten() for name, p in after.items()])
              for knob, (_, after) in one.items()}
    assert float(update["none"].norm()) > 0.01
    start = torch.cat([before[name].flatten() for name in one["none"][1]])
    for knob in KNOBS:
        assert difference(start + update[knob], start + update["none"]) < 1e-12, knob
        for ours, theirs in zip(one[knob][0], one["none"][0], strict=True):
            # Adam would hide a gradient of another scale.
            for name in ("grad/norm", "loss/policy", "loss/kl", "loss/entropy"):
                expected = pytest.approx(theirs[name], rel=1e-10)
                assert ours[name] == expected, (knob, name)


# ---- without a GPU ----

@pytest.mark.parametrize("flags, said", [
    ({}, None), (dict(kv_cache_gb=1e-4), "the engine's cache holds no sequence of 768 tokens. "
                 "Would work: more --gpu_memory_utilization or --kv_cache_gb."),
    (dict(update_tokens=2**20), "GiB free per rank, in training. The largest part is micro-batch")])
def test_a_plan_that_is_larger_than_what_is_free_is_refused(monkeypatch, flags, said):
    monkeypatch.setattr(inputs, "free_bytes", lambda: 6 * GIB)
    args = changed(grpo.Args(), model=tiny.ensure(str(ROOT / "runs")), lr=1e-3, **flags)
    if not said:
        assert "fits: " in inputs.read_inputs(args, 2, 2).plan.text()
        return
    with pytest.raises(SettingsError, match="^this run does not fit: ") as caught:
        inputs.read_inputs(args, 2, 2)
    assert said in str(caught.value)
