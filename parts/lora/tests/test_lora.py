"""An adapter is the policy in the trainer, in the engine and in the exported folders, and it learns
as the paper says."""
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import fakes
import families
import model
import plan
import ppo
import reference
from examples import tiny
from fakegpu import GPU, learned, on_gpus
from fakes import SCRIPTS, World
from families import ROOT
from model_files import shape_from
from parts.lora import lora, plug
from ranks import results
from reference_settings import CHOICES, Setting, drawn
from rollout import Engine
from shapes import shape_of
from tables import table
from updates import every_pair, folder, right, start_of  # noqa: F401

# ---- the update


class Model(reference.Model):
    """The model's own weights stay; of the layers that --lora_targets names A and B learn."""

    def parameters(self, lm) -> dict:
        """y = W x + alpha / rank · B (A x)        https://arxiv.org/abs/2106.09685"""
        found, flags = {}, self.args
        for name, layer in lm.base_model.named_modules():
            own = name.rpartition(".")[2]
            if not isinstance(layer, torch.nn.Linear) or flags.lora_targets not in (
                    ("all-linear",),) and own not in flags.lora_targets:
                continue
            A, B = (start_of(f"{name}.lora_{which}", shape).requires_grad_() for which, shape in (
                ("A", (flags.lora_rank, layer.in_features)),
                ("B", (layer.out_features, flags.lora_rank))))
            found |= {f"{name}.lora_A": A, f"{name}.lora_B": B}
            scale = (flags.lora_alpha or 2 * flags.lora_rank) / flags.lora_rank
            layer.register_forward_hook(lambda _, inputs, y, A=A, B=B, scale=scale: (
                y + scale * (inputs[0] @ A.T) @ B.T))
        return found


class Adapted(Setting):
    """Adapters learn; the reference model is the policy without them."""
    before = "policy"

    def model(self, lm, args, head=None, adapted=True):
        return (Model if adapted else reference.Model)(lm, args, head)


FLAGS = {"lora_rank": (2, 3), "lora_alpha": (None, 1.0),
         "lora_targets": (("all-linear",), ("q_proj", "down_proj"))}


@pytest.mark.parametrize("count", [3, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_adapters_learn_as_the_formulas_say_on_two_ranks(name, count, folder, right):  # noqa: F811
    every_pair(drawn(name, FLAGS | CHOICES[name], Adapted, count=count), 2, folder, right)


# ---- the engine and the folders

def three_steps(world, folder: str, sync: str, tp: int):  # noqa: F811
    """Those of families.py. No load empties the prefix cache: only the path of an adapter, which is
    new in each load, keeps the engine from what it has of an older one."""
    if sync == "adapter":
        Engine.forget = lambda engine: None
    return families.three_steps(world, folder, True, tp, lora_rank=4, lora_sync=sync)


@pytest.mark.parametrize("name, sync, tp", [
    ("Llama, tied", "adapter", 1), ("Llama, tied", "merged", 1),
    pytest.param("Qwen2", "adapter", 2, marks=pytest.mark.slow),
    pytest.param("Qwen2", "merged", 2, marks=pytest.mark.slow)])
def test_engine_with_adapter_or_merged_weights_and_the_folder_are_the_trainer(
        name, sync, tp, tmp_path):
    """On two ranks, before, between and after two updates."""
    families.make(name, f"{tmp_path}/it")
    found = families.gaps(f"{tmp_path}/it", results(
        2, three_steps, f"{tmp_path}/it", sync, tp)[0])
    assert max(found[:2]) < families.ROUNDINGS * found[2], found


def started(world, folder: str) -> dict:  # noqa: F811
    """The parameters of a bfloat16 model with new adapters, whole, and their own dtypes."""
    policy = families.trainer_of(folder, world, dtype="bfloat16", lora_rank=4, seed=7)
    return {n: (p.dtype, n in policy.parameters, p.detach().full_tensor().float().numpy())
            for n, p in policy.module.named_parameters()}


def test_adapters_start_alike_on_any_layout(tmp_path):
    """B at 0, A uniform in ± 1/sqrt(in), each with its own numbers, in float32."""
    families.make("Qwen2", str(tmp_path))
    one, two = (results(size, started, str(tmp_path))[-1] for size in (1, 3))
    draws = []
    for name, (dtype, trained, value) in one.items():
        assert two[name][:2] == (dtype, trained) and (two[name][2] == value).all()
        assert trained == lora.is_adapter(name)
        assert dtype == (torch.float32 if trained else torch.bfloat16)  # no masters of the base
        if name.endswith("lora_B"):
            assert not value.any()
        elif trained:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < abs(value).max() <= bound and abs(value.mean()) < bound / 4
            draws.append(str(value[0, :8]))
    assert len(draws) == len({*draws}) == 14


def test_ppo_trains_adapters_beside_the_model_they_started_from_and_exports_them(
        real_run, tmp_path):
    """The merged folder is W + alpha / rank · B A of adapter/, which names its base."""
    (first, second), _ = real_run(
        "ppo.py", "--lora_rank 2 --lora_alpha 3 --steps 2 --kl_reward_coef 0.1 --batch 8 "
        "--max_prompt_tokens 64 --max_tokens 12 --reward short")
    base = tiny.ensure(str(ROOT / "runs"))
    assert first["policy/kl"] == 0 != second["policy/kl"] and first["lr"] == 3e-3
    config = json.loads((tmp_path / "runs/x/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 3, base)
    made = load_file(tmp_path / "runs/x/adapter/adapter_model.safetensors")
    was, now = (load_file(f"{path}/model.safetensors") for path in (
        base, tmp_path / "runs/x/model"))
    assert was.keys() == now.keys()
    moved = {name for name in was if not torch.equal(was[name], now[name])}
    assert len(moved) == len(made) / 2 == 14
    for name in moved:
        a, b = (made[f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"]
                for part in ("lora_A", "lora_B"))
        assert torch.allclose(now[name], was[name] + 1.5 * b @ a, rtol=0, atol=1e-6)


def test_a_step_mixes_no_devices(tmp_path):
    """On tensors without numbers (tests/fakegpu.py): adapters in float32 are trained beside a base
    in bfloat16, which is the reference too."""
    families.make("Qwen2", str(tmp_path))
    flags = dict(lora_rank=4, kl_loss_coef=0.1, checkpointing=True)
    for place, found in zip((GPU, "cpu"), on_gpus(learned, [
            (4, str(tmp_path), "grpo", flags | more) for more in ({}, dict(cpu_offload=True))]),
            strict=True):
        assert isinstance(found, dict), found
        for what in "gradients", "parameters", "saved":
            assert found[what] == {(place, "float32")}
        assert found["reference"] == {(place, "float32"), (place, "bfloat16")}
        assert found["engine"] == {(GPU, "bfloat16")} and found["buffers"] == {(GPU, "float32")}
        assert found["moments"] == 2 and found["packings"] == found["micros"]


# ---- before a run

@pytest.mark.parametrize("name", ["Llama", "Phi3", "GPT-2"])
def test_the_plan_counts_the_adapters_or_finds_nothing_to_adapt(refused, tmp_path, name):
    """Moments, gradients and an engine's copy are those of adapters alone."""
    families.make(name, str(tmp_path))
    lm, args = model.skeleton(str(tmp_path)), fakes.args(lora_rank=4)
    shape = shape_from(lm)
    none = "--lora_rank finds no torch.nn.Linear"
    assert refused("grpo", "lora_rank=4", none if name == "GPT-2" else "fine", shape)
    lora.put_in(lm, args, torch.float32)
    added = sum(p.numel() for n, p in lm.named_parameters() if lora.is_adapter(n))
    assert lora.added(args, shape) == added and bool(added) == (name != "GPT-2")
    memory = plug.memory(None, args, shape)(plan.Plan(args, 1, 8, 0), shape, None)
    assert memory.parts["moments"] == (8 * added, 8 * added)
    assert memory.parts["weights"][1] == 4 * (shape.params + added)


@pytest.mark.parametrize("flags, sentence", table("""
lora_targets=('q_proj','query') | --lora_targets must be all-linear or some of q_proj k_proj v_proj
    o_proj gate_proj up_proj down_proj (got q_proj query).
lora_targets=('lm_head',) | (got lm_head).
lora_targets=() | --lora_rank finds no torch.nn.Linear to adapt
lora_rank=513 | --lora_rank must be at most 512 (got 513): vLLM takes no larger adapter. Would work:
    --lora_sync merged, which needs none.
lora_rank=512 | fine
lora_rank=600 lora_sync=merged | fine"""))
def test_refusals(refused, flags, sentence):
    """The head is never adapted."""
    assert refused("grpo", f"lora_rank=16 {flags}", sentence, shape_of("tiny"))


def test_rates_that_are_not_given_are_ten_times_those_of_full_training():
    inputs, full = SimpleNamespace(shape=SimpleNamespace(params=135_000_000)), ppo.Args()
    full.choose_rates(135_000_000)
    for given in 0, 0.5:
        args = fakes.args(ppo, lora_rank=8, lr=given)
        plug.check(args, inputs)
        assert args.lr == (given or 10 * full.lr)
        assert args.critic_lr == 10 * full.critic_lr


def test_an_engine_has_room_for_the_rank_and_keeps_its_base_asleep(monkeypatch):
    """The base comes once: a deeper sleep would lose it. bfloat16 gets the adapter by itself."""
    llm = fakes.without_vllm(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    lm = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    policy = SimpleNamespace(args=fakes.args(lora_rank=9), layers={"q_proj.weight": None},
                             module=SimpleNamespace(lm=lm))
    assert plug.engine(None, policy.args, None, torch.float32) is None
    engine = families.engine_of("", World(device="cuda"), policy, dtype=torch.bfloat16)
    assert isinstance(engine, lora.TakingEngine) and engine.sleep_level == 1
    assert llm.options["max_lora_rank"] == 16 and llm.options["enable_lora"]
    assert llm.options["lora_target_modules"] == ["q_proj"]
