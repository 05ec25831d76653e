"""lora.py: an adapter is the policy in the trainer, in the engine and in the exported folders."""
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import families
import grpo
import model
import plan
import ppo
from errors import SettingsError
from examples import tiny
from families import ROOT
from model_files import shape_from
from parts.lora import lora, plug
from ranks import results, script
from settings import changed
from shapes import shape_of
from test_gpu import made_engine
from test_memory import QWEN_7B, planned


def compare(folder: Path, name: str, ranks: int, tp: int) -> dict:
    families.make(name, str(folder / "model"))
    script(Path(__file__).with_name("lora_worker.py"), folder / "model", folder / "out",
           tp, ranks=ranks)
    return pickle.loads((folder / "out").read_bytes()) | {"folder": folder}


def all_holds(found: dict) -> None:
    gap = dict(found["gap"])
    assert found["start"], "at step 0 the log-probs are not those of the base model"
    assert gap.pop("no cache reset, old path") > 1e-2   # so a stale prefix would show
    assert len(gap) == 6 and all(
        gap[when] < families.ROUNDINGS * found["rounding"][when] for when in gap), found
    assert found["effect"] > 0.1                        # the adapters change what is compared
    assert found["reference"], "scale 0 is not the base model"
    assert found["untouched"], "a sync changed the trainer's tensors"
    first, *later = found["gradients"]
    names = {n for n in found["moved"] if lora.is_adapter(n)}
    assert names == first.keys() and len(names) >= 2 * 2 * 4    # A and B, layers, linears
    assert all(min(gradients.values()) > 0 for gradients in later)
    assert all((norm > 0) == name.endswith("B") for name, norm in first.items())
    assert all((moved > 0) == (name in names) for name, moved in found["moved"].items())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return compare(tmp_path_factory.mktemp("lora"), "Llama, tied", 2, 1)


def test_engine_with_adapter_or_merged_weights_is_the_trainer(found):
    all_holds(found)


@pytest.mark.slow
def test_on_another_layout_and_family(tmp_path):
    all_holds(compare(tmp_path, "Qwen2", 2, 2))


def test_the_merged_folder_is_the_policy_and_the_adapter_is_small(found):
    batch = found["batch"]
    base, adapter, merged = (f"{found['folder']}/{name}" for name in (
        "model", "adapter", "out.model"))
    gap = (families.plain(merged, batch) - found["logprobs"]).abs().max()
    assert gap < families.ROUNDINGS * families.rounding(merged, batch)
    assert sorted(os.listdir(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(Path(adapter, "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8
    assert config["base_model_name_or_path"] == base and "q_proj" in config["target_modules"]


@pytest.mark.slow
def test_vllm_serves_the_adapter(found):
    base, adapter, merged = (f"{found['folder']}/{name}" for name in (
        "model", "adapter", "out.model"))
    prompts = [s.prompt.row.prompt_ids for s in found["batch"].samples]
    pairs = zip(families.plain_vllm(base, prompts, adapter),
                families.plain_vllm(merged, prompts), strict=True)
    for (ids, ours), (others, theirs) in pairs:
        limit = families.ROUNDINGS * families.rounding(merged, found["batch"])
        assert ids == others and max(
            abs(a - b) for a, b in zip(ours, theirs, strict=True)) < limit


def started(world, folder: str) -> dict:
    """The parameters of a bfloat16 model with new adapters, whole, and their own dtypes."""
    policy = families.trainer_of(folder, world, dtype="bfloat16", lora_rank=4, seed=7)
    module = policy.module
    return {n: (p.dtype, n in policy.parameters, p.detach().full_tensor().float().numpy())
            for n, p in module.named_parameters()}


def test_adapters_start_alike_on_any_layout(tmp_path):
    families.make("Qwen2", str(tmp_path))
    one, = results(1, started, str(tmp_path))
    two = results(3, started, str(tmp_path))[2]
    draws = []
    for name, (dtype, trained, value) in one.items():
        assert two[name][:2] == (dtype, trained) and (two[name][2] == value).all()
        assert trained == lora.is_adapter(name)
        assert dtype == (torch.float32 if trained else torch.bfloat16)    # no masters of the base
        if name.endswith("lora_B"):
            assert not value.any()
        elif trained:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < abs(value).max() <= bound and abs(value.mean()) < bound / 4
            draws.append(value[0, :8].tolist())
    assert len(draws) == 14 and len({*map(str, draws)}) == 14       # each has its own numbers


@pytest.mark.parametrize("script", [grpo, ppo])
def test_rates_that_are_not_given_are_ten_times_those_of_full_training(script):
    full, adapters = script.Args(), changed(script.Args(), lora_rank=8)
    files = SimpleNamespace(shape=SimpleNamespace(params=135_000_000))
    full.choose_rates(files.shape.params)
    plug.check(adapters, files, [])
    assert adapters.lr == 10 * full.lr
    if full.critic_args:
        assert adapters.critic_args.critic_lr == 10 * full.critic_args.critic_lr
    plug.check(given := changed(script.Args(), lora_rank=8, lr=0.5), files, [])
    assert given.lr == 0.5


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_the_plan_counts_the_adapters(tmp_path, name):
    families.make(name, str(tmp_path))
    lm, args = model.skeleton(str(tmp_path)), changed(grpo.Args(), lora_rank=4, lr=1e-3)
    shape = shape_from(lm)
    lora.put_in(lm, args.parts.lora, torch.float32)
    sizes = [p.numel() for n, p in lm.named_parameters() if lora.is_adapter(n)]
    assert not plan.problems(args, 1, shape=shape)
    assert args.parts.lora.added(shape) == sum(sizes) > 0
    assert all(p.requires_grad == lora.is_adapter(n) for n, p in lm.named_parameters())


@pytest.mark.parametrize("options, sentence", [
    (dict(lora_targets=("q_proj", "query")), "--lora_targets must be all-linear or some of q_proj "
     "k_proj v_proj o_proj gate_proj up_proj down_proj (got q_proj query)."),
    (dict(lora_targets=("lm_head",)), "(got lm_head)."),  # never the head
    (dict(lora_targets=()), "--lora_rank finds no torch.nn.Linear to adapt"),
    (dict(lora_rank=600), "--lora_rank must be at most 512 (got 600): vLLM takes no larger "
     "adapter. Would work: --lora_sync merged, which needs none."),
    (dict(lora_rank=600, lora_sync="merged"), None)])
def test_refusals(options, sentence):
    args = changed(grpo.Args(), **dict(lora_rank=16, lr=1e-3) | options)
    found = plan.problems(args, 1, shape=shape_of("tiny"))
    assert len(found) == bool(sentence) and (not sentence or sentence in found[0])


def test_a_model_without_linear_layers_is_refused(tmp_path):
    families.make("GPT-2", str(tmp_path))
    shape = shape_from(model.skeleton(str(tmp_path)))
    args = changed(grpo.Args(), lora_rank=4, lr=1e-3)
    assert plan.problems(args, 1, shape=shape)[0].startswith("--lora_rank finds no")


def test_a_full_disk_leaves_the_adapter_that_was_there(tmp_path, monkeypatch):
    def fails(tensors, path, *all):
        Path(path).write_text("half of it")
        raise OSError("no space")

    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("old")
    monkeypatch.setattr(lora, "tensors", lambda *all: [])
    monkeypatch.setattr(lora, "save_file", fails)
    with pytest.raises(SettingsError, match="no space"):
        policy = SimpleNamespace(module=SimpleNamespace(lm=None), layers=[])
        lora.export(SimpleNamespace(
            policy=policy, args=changed(grpo.Args(), model="a/b"), log=SimpleNamespace(
                folder=tmp_path), world=SimpleNamespace(rank=0, device="cpu"),
            inputs=SimpleNamespace(source="a/b")))
    assert [p.read_text() for p in (tmp_path / "adapter").iterdir()] == ["old"]


def test_ppo_trains_adapters_beside_the_model_they_started_from_and_exports_them(tmp_path):
    base = tiny.ensure(str(ROOT / "runs"))
    script(ROOT / "ppo.py", "--model", base, *"""--lora_rank 2 --lora_alpha 3 --steps 2
        --kl_reward_coef 0.1 --batch 8 --minibatches 1 --max_prompt_tokens 64 --max_tokens 12
        --reward short --name x""".split(), cwd=tmp_path)
    first, second = map(json.loads, (tmp_path / "runs/x/metrics.jsonl").open())
    assert first["policy/kl"] == 0 != second["policy/kl"]
    config = json.loads((tmp_path / "runs/x/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 3, base)
    made = load_file(tmp_path / "runs/x/adapter/adapter_model.safetensors")
    was, now = load_file(f"{base}/model.safetensors"), load_file(
        tmp_path / "runs/x/model/model.safetensors")
    assert was.keys() == now.keys()
    changed = {name for name in was if not torch.equal(was[name], now[name])}
    assert len(changed) == len(made) / 2 > 0
    for name in changed:
        a, b = (made[f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"]
                for part in ("lora_A", "lora_B"))
        assert torch.allclose(now[name], was[name] + 1.5 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name, folder, base", [
    ("./base", "./base", "{here}/base"), ("runs/x/model", "runs/x/model", "{here}/runs/x/model"),
    ("tiny", "runs/tiny-sort-1", "{here}/runs/tiny-sort-1"), ("/a/base", "/a/base", "/a/base"),
    ("Qwen/Qwen2.5-0.5B", "/cache/snapshots/1", "Qwen/Qwen2.5-0.5B")])
def test_an_adapter_names_its_base_so_that_any_folder_finds_it(
        name, folder, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lora.base_of(name, folder) == base.format(here=tmp_path)


@pytest.mark.parametrize("rank, room", [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_an_engine_has_room_for_the_rank(rank, room):
    engine = object.__new__(lora.TakingEngine)
    vars(engine).update(config={"r": rank, "target_modules": ["q_proj"]}, on_gpu=True,
                        args=SimpleNamespace(eager=False, max_num_seqs=0))
    assert engine.options(9)["max_lora_rank"] == room


def test_an_engine_that_keeps_its_base_keeps_it_asleep(monkeypatch):
    engine, options = made_engine(
        monkeypatch, lora.TakingEngine, "cuda", max_num_seqs=64, lora_rank=4)
    assert options["max_num_seqs"] == 64 and options["enable_prefix_caching"]
    assert engine.sleep_level == 1 and options["enable_sleep_mode"]


def test_adapters_make_the_moments_smaller():
    flags = dict(batch=8, max_tokens=4096)
    before, after = (planned(grpo, 4, QWEN_7B, 80, **flags, **more)
                     for more in ({}, dict(lora_rank=8)))
    assert sum(after.parts["moments"]) < sum(before.parts["moments"])
