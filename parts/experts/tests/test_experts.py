"""experts.py: the layer is its equation, and routes that were recorded are those that are used."""
import copy
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import families
import grpo
import learning
import model
import plan
import rollout
from batch import Batch
from checkpoint import export_model
from dist import World
from experts_reference import mixture
from model_files import shape_from
from parts.experts import experts
from ranks import results
from settings import changed
from shapes import shape_of
from tools import float64

KINDS = ("Mixtral", "OLMoE", "Qwen3-MoE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("experts"))
    for name in KINDS:
        families.make(name, f"{path}/{name}")
    return path


@pytest.mark.parametrize("name", KINDS)
def test_a_mixture_is_its_equation(folder, name):
    lm = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float64,
                                              experts_implementation="eager")
    block, x = experts.blocks(lm)[1], torch.randn(1, 40, 64, dtype=torch.float64)
    E, k = block.gate.num_experts, block.gate.top_k
    routing = experts.RoutedPolicy(SimpleNamespace(
        lm=lm, named_parameters=lm.named_parameters, parameters=lm.parameters), None,
        changed(grpo.Args(), replay_routing=True))
    chosen = (x[0] @ block.gate.weight.T).topk(k).indices  # (40, k)
    other = (chosen + 1) % E
    for routes in (None, chosen, other):
        routing.routes = None if routes is None else routes.unsqueeze(1).expand(-1, 2, -1)
        found = []
        for layer in (block, partial(mixture, block, chosen=routes, normed=getattr(
                block.gate, "norm_topk_prob", True))):
            lm.zero_grad()
            with float64.Float64():
                y = layer(x)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in block.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def built(world, folder: str, **options):
    args = learning.arguments(**options)
    kinds = model.kinds(args, model.config_of(folder))
    return kinds.policy(float64.build(kinds.logprob_model, folder, world, args), world, args)


def exported(world, folder: str) -> list[str]:
    policy = built(world, folder)
    export_model(policy, folder, f"{folder}-out")
    return [name for name, _ in policy.weights(torch.float32)]


@pytest.mark.parametrize("name", KINDS)
def test_engine_and_export_have_a_checkpoints_names(folder, name):
    path = f"{folder}/{name}"
    names = results(3, exported, path)[0]  # 8 experts on 3 ranks
    ours, theirs = (load_file(f"{p}/model.safetensors") for p in (f"{path}-out", path))
    assert ours.keys() == theirs.keys() == {*names}
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def scores(policy, batch) -> torch.Tensor:
    return batch.score(policy.world, 60, "score", lambda m: policy.logprobs(m, 1.0)[0])


def replayed(world, folder: str) -> tuple:
    """Log-probs with the policy's own routes; with them replayed; with others."""
    batch, policy = Batch(learning.fabricate("plain", 3)), built(world, folder, replay_routing=True)
    own, seen = scores(policy, batch), {}
    for layer, router in enumerate(policy.routers):
        router.register_forward_hook(
            lambda _, given, out, layer=layer: seen.update({layer: out[2]}))
    for sample in batch.samples:  # each row alone
        alone = Batch([sample])
        with torch.no_grad():
            micro, = alone.micros(world, [0], 60, "score")
            policy.module(micro.inputs, micro.source, micro.targets, 1.0, False)
            policy.module.reshard()
        sample.completion.routes = np.stack([seen[layer].numpy() for layer in range(2)], 1)
    again = scores(policy, batch)
    changed = copy.deepcopy(batch)
    last = changed.samples[-1].completion
    last.routes[-1] = (last.routes[-1] + 1) % 5  # of its last token that is an input
    return own, again, scores(policy, changed)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    return make_model(f"{path}/experts")


def make_model(folder: str) -> str:
    """A random Qwen3-MoE of two layers, in float64, of the sizes of learning.make_models."""
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **learning.SIZES, head_dim=16, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True)).double().save_pretrained(folder)
    return folder


def test_recorded_routes_change_no_bit_and_other_routes_change_their_tokens(models):
    own, again, changed = results(1, replayed, models)[0]
    assert torch.equal(own, again)
    moved = (changed - own).abs() > 1e-12
    assert moved.nonzero().flatten().tolist() == [len(own) - 1]


def missing(world, folder: str) -> str:
    args = learning.arguments(replay_routing=True)
    policy = built(world, folder, replay_routing=True)
    with pytest.raises(RuntimeError) as caught:
        grpo.learn(args, world, policy, learning.fabricate("plain", 2), lr=1e-3)
    return str(caught.value)


def test_an_engine_that_tells_no_experts_ends_the_run(models):
    assert "did not tell its experts" in results(1, missing, models)[0]


def test_the_engine_is_asked_for_its_experts(monkeypatch):
    """vLLM tells them on a GPU alone: here its part is a stub."""
    given, stub = {}, ModuleType("vllm")

    class Llm:
        def __init__(self, folder, **options):
            given.update(options)

        def apply_model(self, function):
            pass

    stub.LLM = Llm
    monkeypatch.setitem(__import__("sys").modules, "vllm", stub)
    monkeypatch.setattr(rollout, "prepare_environment", lambda *_: None)
    for routes in (True, False):
        world = World(0, 1, 0, 1, torch.device("cpu"), None)
        policy = SimpleNamespace(args=changed(grpo.Args(), replay_routing=routes), module=(
            SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(model_type="mixtral")))))
        engine = families.engine_of("folder", world, policy)
        assert given["enable_return_routed_experts"] == routes
    routes = np.zeros((5, 2, 2))
    found = engine.completion(SimpleNamespace(
        token_ids=[1], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop",
        routed_experts=routes))
    assert found.routes is routes


def test_the_load_of_a_layer():
    """Even, and one expert alone: entropy / log E is 1 and 0."""
    even = experts.load_metrics(torch.tensor([[2.0, 2, 2, 2], [8, 0, 0, 0]]))
    assert even == {"router/largest_mean": 0.625, "router/largest_worst": 1.0,
                    "router/entropy_mean": 0.5, "router/entropy_worst": 0.0}


@pytest.mark.parametrize("flags, words", [
    (dict(lora_rank=4, lora_targets=("gate_proj",)), "must be all-linear or some of q_proj k_proj "
     "v_proj o_proj (got gate_proj)."),
    (dict(lora_rank=4, freeze_router=True), "--freeze_router is for routers that are trained"),
    (dict(replay_routing=True, reply="x.py:Y"), "--replay_routing is for one turn"),
    (dict(replay_routing=True, carry=1.0, engine_correction="truncate"), "--replay_routing needs "
     "whole completions"),
    (dict(freeze_router=True), None), (dict(replay_routing=True), None)])
def test_refusals(folder, flags, words):
    shape = shape_from(model.skeleton(f"{folder}/Qwen3-MoE"))
    args = changed(grpo.Args(), **dict(lr=1e-3) | flags)
    found = plan.problems(args, 1, shape=shape)
    assert len(found) == bool(words) and (not words or words in found[0]), found


def test_a_dense_model_has_no_router():
    args = changed(grpo.Args(), lr=1e-3, freeze_router=True)
    found = plan.problems(args, 1, shape=shape_of("tiny"))
    assert len(found) == 1 and found[0].startswith("--freeze_router needs a model with experts.")


def test_the_plan_counts_all_parameters_and_those_of_a_token():
    """As its card says: 30.5B in total and 3.3B activated."""
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    assert shape.params == 30_532_122_624
    assert shape.params - shape.layers * shape.idle == 3_353_032_704


def test_a_rank_has_whole_experts():
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    made = plan.Plan(changed(grpo.Args(), lr=1e-3), 3, 64, 0)
    found = experts.MixtureMemory(made, shape, 80 * plan.GIB)
    assert found.parts["weights"][1] == pytest.approx(4 * shape.params * 43 / 128)
