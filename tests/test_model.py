"""model.py: a folder of weights goes in, and what comes out is the model that transformers has."""
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import fakes
import model
import model_files
from batch import pack
from checkpoint import export_model
from errors import SettingsError
from examples import tiny
from families import ROUNDINGS, batch_of
from ranks import results
from test_families import refused

IDS = torch.arange(24).view(2, 12)
SOURCE = torch.tensor([0, 3, 11, 12, 22])
UP = "model.layers.1.mlp.up_proj.weight"
OPTIONS = [{"cpu_offload": True}, {"shard_size": 1, "offload": ("params", "optimizer")}]


def make(folder, dtype=torch.float32, tied: bool = True) -> str:
    """A random Qwen2 with `dtype` weights → its folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def logprobs_of(folder: str, dtype=torch.float32) -> torch.Tensor:
    """What transformers computes for the tokens after SOURCE."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    logprobs = lm(IDS).logits.flatten(0, 1)[SOURCE].log_softmax(-1)
    return logprobs.gather(-1, IDS.flatten()[SOURCE + 1].unsqueeze(-1)).squeeze(-1).detach()


def load_and_export(world, folders: list[str]) -> list[torch.Tensor]:
    """Log-probs of the loaded models, after a way to the host and back; they are exported too."""
    found = []
    for folder, options in zip(folders, OPTIONS, strict=True):
        args = fakes.args(**options)
        module = model.build(model.LogprobModel, folder, world, args)
        policy = model.Policy(module, world, args)
        for device in (torch.device("cpu"), world.device):
            policy.move(device)
        ids, positions, packed, _ = pack(
            [*range(len(IDS))], IDS.tolist(), [row[:1] for row in IDS], world.device)
        inputs = {"input_ids": ids, "position_ids": positions, "packed": packed}
        with torch.no_grad():
            micro = SimpleNamespace(inputs=inputs, source=SOURCE)
            found.append(policy.run(micro, IDS.flatten()[SOURCE + 1], 1.0, False)[0])
        export_model(policy, folder, f"{folder}-out", [3])
    return found


@pytest.mark.parametrize("size", (1, 2))
def test_what_is_loaded_and_exported_is_what_transformers_has(tmp_path, size):
    kinds = (torch.bfloat16, False), (torch.float32, True)
    folders = [make(tmp_path / f"{tied}", dtype, tied) for dtype, tied in kinds]
    for logps in results(size, load_and_export, folders):
        for folder, logp in zip(folders, logps, strict=True):
            theirs, exact = logprobs_of(folder), logprobs_of(folder, torch.float64)
            assert (logp - theirs).abs().max() < ROUNDINGS * (theirs - exact).abs().max()
    for folder, (dtype, _) in zip(folders, kinds, strict=True):
        ours, theirs = (load_file(f"{path}/model.safetensors") for path in (
            f"{folder}-out", folder))
        assert ours.keys() == theirs.keys()             # with tied embeddings no lm_head.weight
        assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == dtype for n in ours)
        assert {*os.listdir(f"{folder}-out")} == {*os.listdir(folder), "generation_config.json"}


@pytest.mark.parametrize("flaw, said", [
    ("shape", f"{UP} has the shape [48, 32]; the *.safetensors have [48, 1]"),
    ("no tokenizer", "has no tokenizer that transformers can load"),
    ("many ids", "must have tokens with ids below 50 (the largest is ")])
def test_a_folder_that_does_not_fit_is_refused_by_a_run_and_by_the_plan(tmp_path, flaw, said):
    make(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)            # 320 ids, for a model of 50
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if flaw == "shape":
        weights[UP] = torch.ones(48, 1)
    save_file(weights, path, metadata={"format": "pt"})
    for file in tmp_path.glob("token*") if flaw == "no tokenizer" else ():
        file.unlink()
    assert all(said in sentence for sentence in refused(tmp_path))


def refusal(world, folder: str) -> str:
    with pytest.raises(SettingsError) as caught:
        model.build(model.LogprobModel, folder, world, fakes.args())
    return str(caught.value)


def test_a_weight_that_is_not_finite_is_named_on_every_rank(tmp_path):
    folder, path = make(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(path)
    weights[UP][40, 3] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    for sentence in results(2, refusal, folder):
        assert f"{UP} has values that are not finite" in sentence


def updated(world, folders: list[str]) -> list[dict]:
    """The weights of policies and critics after a step on equal samples, with a token 7 inside."""
    found = []
    for folder in folders:
        args = fakes.args()
        policy = model.Policy(model.build(model.LogprobModel, folder, world, args), world, args)
        critic = model.Critic(model.build(model.ValueModel, folder, world, args), world, args)
        torch.nn.init.ones_(critic.module.head.weight)
        micro, = batch_of([[3, 7, 5]], [[4, 7, 9]]).micros(world, [0], 99, "update")
        policy.backward(policy.logprobs(micro, 1.0)[0].sum())
        critic.backward(critic.values(micro).sum())
        for trained in policy, critic:
            assert trained.step(1e-3) > 0
            found.append({name: model.whole(p.detach()) for name, p in trained.parameters.items()})
    return found


def test_what_pads_elsewhere_is_trained_as_any_other_token(tmp_path):
    """Two folders differ in pad_token_id alone. The row moves by the learning rate in both."""
    folders = [make(tmp_path / f"{pad}", tied=False) for pad in (7, None)]
    path = Path(folders[0], "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 7}))
    policy, critic, *plain = results(1, updated, folders)[0]
    for found, others in zip((policy, critic), plain, strict=True):
        assert all(torch.equal(p, others[name]) for name, p in found.items())
        rows = found["lm.model.embed_tokens.weight"]
        was = load_file(f"{folders[0]}/model.safetensors")["model.embed_tokens.weight"]
        assert torch.allclose((rows - was)[7].abs(), torch.tensor(1e-3), rtol=1e-2)
        assert not (rows - was)[8].any()  # of no sample


@pytest.mark.parametrize("name, why", [
    ("runs/x", "this is the folder of a run"), ("runs/x/adapter", "this is an adapter"),
    ("runs/x/checkpoints/step_2", "this is a checkpoint"), ("theirs", "this is an adapter"),
    ("empty", "this folder has no config.json")])
def test_a_folder_that_is_no_model_is_named_and_the_model_beside_it(
        name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("runs/x/args.json", "runs/x/model/config.json", "theirs/adapter_config.json",
                 "runs/x/adapter/adapter_config.json", "runs/x/checkpoints/step_2/.metadata",
                 "empty/notes.txt"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{}")
    with pytest.raises(SettingsError) as caught:
        model_files.find(name)
    assert why in str(caught.value)
    assert ("Would work: --model runs/x/model." in str(caught.value)) == name.startswith("runs")
