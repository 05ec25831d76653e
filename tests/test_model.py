"""model.py: a folder of weights goes in, and what comes out is the model that transformers has."""
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import model
from plan import SettingsError
from ranks import results

IDS = torch.arange(24).view(2, 12)
SOURCE = torch.tensor([0, 3, 11, 12, 22])


def make(folder, dtype: torch.dtype, tied: bool) -> str:
    """A random Qwen2 with `dtype` weights → its folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def logprobs_of(folder: str) -> torch.Tensor:
    """What transformers computes in float32 for the tokens after SOURCE."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = lm(IDS).logits.flatten(0, 1)[SOURCE].log_softmax(-1)
    return logprobs.gather(-1, IDS.flatten()[SOURCE + 1].unsqueeze(-1)).squeeze(-1).detach()


def load_and_export(world, folder: str, args: model.ModelArgs) -> torch.Tensor:
    """Log-probs of the loaded model, after a way to the host and back; it is exported too."""
    module = model.build(model.LogprobModel, folder, world, args)
    policy = model.Policy(module, world, args, model.OptimizerArgs())
    for device in (torch.device("cpu"), world.device):
        policy.move(device)
    with torch.no_grad():
        logp, _ = policy.run(IDS, SOURCE, IDS.flatten()[SOURCE + 1], 1.0, "none")
    policy.export(folder, f"{folder}-out", notes={"note.json": "{}"})
    return logp


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("dtype, tied, options", [
    (torch.bfloat16, True, {}), (torch.float32, False, {"cpu_offload": True}),
    (torch.float32, True, {"shard_size": 1, "offload": ("params", "optimizer")})])
def test_what_is_loaded_and_exported_is_what_transformers_has(tmp_path, size, dtype, tied, options):
    folder = make(tmp_path / "model", dtype, tied)
    for logp in results(size, load_and_export, folder, model.ModelArgs(**options)):
        assert torch.allclose(logp, logprobs_of(folder), atol=1e-5)
    out = f"{folder}-out"
    ours, theirs = (load_file(f"{path}/model.safetensors") for path in (out, folder))
    assert ours.keys() == theirs.keys()                 # with tied embeddings no lm_head.weight
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == dtype for n in ours)
    assert torch.equal(logprobs_of(out), logprobs_of(folder))
    assert set(os.listdir(out)) == set(os.listdir(folder)) | {"note.json"}


def refusal(world, folder: str) -> str:
    with pytest.raises(SettingsError) as caught:
        model.build(model.LogprobModel, folder, world, model.ModelArgs())
    return str(caught.value)


@pytest.mark.parametrize("there, said", [
    (None, "Missing key in checkpoint state_dict: model.layers.1.mlp.up_proj.weight"),
    ((48, 1), "torch.Size([48, 1]) and current: torch.Size([48, 32]) for model.layers.1.mlp.up_")])
def test_a_weight_that_is_missing_or_has_another_shape_is_named(tmp_path, there, said):
    folder, name = make(tmp_path, torch.float32, True), "model.layers.1.mlp.up_proj.weight"
    weights = load_file(f"{folder}/model.safetensors")
    del weights[name]
    save_file(weights | ({name: torch.ones(there)} if there else {}),
              f"{folder}/model.safetensors", metadata={"format": "pt"})
    assert said in results(1, refusal, folder)[0]
