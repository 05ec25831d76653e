"""model.py and model_files.py: what a folder of weights computes is what transformers computes.

Engine, trainer and transformers are equal in every family, slowly; test_float64.py has the trainer
without an engine. What one of the three programs computes otherwise is refused. Folders of weights
are drawn from seeds as people leave them: a run has the tensors that transformers would have, or
names what is wrong.
"""
import json
import os
import random
import re
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import fakes
import families
import grpo
import model
import model_files
import preflight
from checkpoint import export_model
from errors import SettingsError
from families import ROUNDINGS, same
from family_cases import CASES, ROPE, WINDOWS, make
from ranks import on_ranks, results
from shapes import in_cache

write = partial(save_file, metadata={"format": "pt"})

# ---- trainer = transformers = engine, in each family ----

def exported(world, folder: str) -> None:
    export_model(families.trainer_of(folder, world), folder, f"{folder}-out", [2, 3])


def test_an_export_is_a_whole_folder_of_its_model(tmp_path):
    """Weights in bfloat16 come back bit for bit, though the trainer's are in float32; and so does
    every small file, of a folder that may not be written, to one that may be. The ends are those
    of the run."""
    folder, out = tmp_path / "model", tmp_path / "model-out"
    make("Llama", str(folder))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o444)
    results(1, exported, str(folder))
    assert same(load_file(folder / "model.safetensors"), load_file(out / "model.safetensors"))
    for path in paths:
        there = out / path.relative_to(folder)
        assert there.stat().st_mode & 0o200
        assert path.suffix == ".safetensors" or path.name == "generation_config.json" or (
            there.read_bytes() == path.read_bytes()), path
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 3]


PLAIN_ROPE = dict(rope_type="default", rope_theta=10000.0)
EQUAL = [  # options of config.json that all three programs compute alike
    ("qwen2", dict(layer_types=WINDOWS[:1] * 2, use_sliding_window=True, sliding_window=64)),
    ("gemma4_text", dict(rope_parameters=dict.fromkeys(WINDOWS, PLAIN_ROPE)))]
UNEQUAL = [  # these they do not: one of them leaves an option out, or ends in an error
    ("llama", dict(sliding_window=32)), ("gemma", dict(attention_bias=True)),
    ("gemma", dict(final_logit_softcapping=0.5)), ("phi3", dict(hidden_act="relu")),
    ("llama", dict(rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5))),
    ("cohere", dict(tie_word_embeddings=False)),
    ("qwen2", dict(dual_chunk_attention_config=dict(chunk_size=64))),
    ("granitemoehybrid", dict(layer_types=["mamba", "full_attention"])),
    ("ministral3", dict(rope_parameters=ROPE | dict(  # it shows from 128 tokens on
        original_max_position_embeddings=128, llama_4_scaling_beta=0.1))),
    ("cohere2", dict(sliding_window=32, layer_types=WINDOWS)), ("apertus", {}),
    ("hyperclovax", dict(logits_scaling=3.0))]


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [*((name, {}) for name in CASES), *EQUAL], ids=str)
def test_engine_trainer_and_transformers_are_the_same(name, options):
    """Elsewhere models of OLMo2, Granite and Gemma 2 crashed, or were wrong by 1 to 3 nats."""
    *gaps, rounding = families.with_engine(name, options)
    assert max(gaps) < ROUNDINGS * rounding


@pytest.mark.slow
@pytest.mark.parametrize("kind, options", UNEQUAL, ids=str)
def test_no_model_runs_that_one_of_them_computes_otherwise(kind, options):
    """Each of these was refused by a key of its config.json, and nobody knew the next key."""
    said = families.with_engine(kind, options)
    assert re.search("differ before an update by|Error: ", said)


@pytest.mark.parametrize("kind, options", [
    ("gemma3_text", dict(use_bidirectional_attention=True)),
    ("lfm2", dict(layer_types=["conv", "full_attention"]))])  # its state goes from row to row
def test_a_trainer_without_an_engine_is_compared_with_transformers(tmp_path, kind, options):
    make(kind, str(tmp_path), options)
    (_, said), = on_ranks(1, families.three_steps, str(tmp_path), False)
    assert "trainer and transformers differ before an update" in said


# ---- another model is refused in one sentence, by a run and by --plan ----

def refused(folder: Path, words: str) -> None:
    args = fakes.args(model=str(folder))
    for look in lambda: preflight.read_inputs(args, 1, 1), lambda: preflight.show_plan(args):
        with pytest.raises(SettingsError, match=words):
            look()


CONFIG, GENERATION, ANY = "config.json", "generation_config.json", {"architectures": None}


@pytest.mark.parametrize("file, change, words", [
    *((CONFIG, ANY | {"model_type": kind},
       f"has model_type {kind}, which is not supported. Would work: a causal language model")
      for kind in ("t5", "gemma3", "qwen2_moe", "deepseek_v3", "minimax", "afmoe")),
    (CONFIG, ANY | {"model_type": "gpt_oss"},
     "has model_type gpt_oss, which is not supported .GptOssForCausalLM does not"),
    (CONFIG, {"architectures": ["Qwen2ForSequenceClassification"]}, "has architecture .*Sequence"),
    (CONFIG, {"rope_parameters": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)},
     "has rotary type dynamic"),
    (CONFIG, {"transformers_weights": "x.safetensors"}, "has transformers_weights"),
    (CONFIG, {"quantization_config": {"quant_method": "fp8"}}, "has quantized weights"),
    ("adapter_config.json", {}, "has an adapter_config.json"),
    ("tokenizer.json", {"model": None}, "has no tokenizer that transformers can load"),
    *((GENERATION, {"eos_token_id": ends}, f"{GENERATION}: eos_token_id must be the number")
      for ends in (True, [2, "x"]))])
def test_a_folder_with_another_small_file_is_refused(tmp_path, file, change, words):
    make("Qwen2", str(tmp_path))
    path = tmp_path / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | change))
    refused(tmp_path, words)




@pytest.mark.parametrize("name, why", [
    ("runs/x", "this is the folder of a run"), ("runs/x/checkpoints/step_2", "this is a checkp"),
    ("theirs", "this is an adapter"), ("empty", "this folder has no config.json")])
def test_a_folder_that_is_no_model_is_named_and_the_model_beside_it(
        name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("runs/x/args.json", "runs/x/model/config.json", "theirs/adapter_config.json",
                 "runs/x/checkpoints/step_2/.metadata", "empty/notes.txt"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{}")
    with pytest.raises(SettingsError, match=why) as caught:
        model_files.find(name)
    assert ("Would work: --model runs/x/model." in str(caught.value)) == name.startswith("runs")


# ---- folders of weights, drawn from seeds ----

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


def save(folder: Path, weights: dict, count: int) -> list[str]:
    """One file, or `count` shards with their index → the names of the files."""
    shards = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = shards or ["model.safetensors"]
    where = dict(zip(sorted(weights), cycle(files), strict=False))
    for file in files:
        write({name: weights[name] for name in where if where[name] == file}, folder / file)
    if shards:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def ones(*names: str, size: int = 4) -> dict:
    return {name: torch.ones(size) for name in names}


HARMLESS = {  # what may become of the tensors in a file, and may not be refused
    "nothing": dict,
    "float16": lambda found: {name: p.half() for name, p in found.items()},
    "buffers of old versions": lambda found: found | ones(
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids",
        "h.1.attn.masked_bias")}
FLAWS = {  # the same, and it may be refused
    "twice": lambda found: found | ones("model.norm.weight", size=16),
    "another layer": lambda found: found | ones("model.layers.2.mlp.up_proj.weight"),
    "lost": lambda found: dict([*found.items()][1:]),
    "shape": lambda found: {name: p[..., :3].clone() for name, p in found.items()},
    "nan on the last rank": lambda found: {
        name: torch.cat([p[:-1], p[-1:] * float("nan")]) for name, p in found.items()}}
DAMAGES = {  # of a file, which may be the index
    "absent": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")}
BESIDE = {  # other files, of another save
    "nothing": [], "file": ["model.safetensors"], "shard": ["model-00001-of-00001.safetensors"],
    "folder": ["original/model.safetensors"], "names": [
        "consolidated.safetensors", "adapter_model.safetensors", "MODEL.safetensors",
        "model.fp16.safetensors", "pytorch_model.bin", "optimizer.pt"]}


def draw(folder: Path, seed: int) -> tuple[str, set[str], bool]:
    """Writes a folder → (what is in it, names of files and tensors, whether it must load)."""
    rng, flaws = random.Random(seed), [*FLAWS, *DAMAGES] if seed % 2 else [*HARMLESS]
    tied, flaw = rng.random() < 0.7, flaws[seed // 2 % len(flaws)]
    head = rng.choice(["usual", "equal", "other", "alone"]) if tied else "usual"
    count, beside = rng.choice([0, 2, 3]), rng.choice([*BESIDE])
    make("Qwen2", str(folder), dict(tie_word_embeddings=tied, hidden_size=16))
    made = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    old, new = ({name: torch.randn_like(p).half().float()  # float16 has these numbers too
                 for name, p in made.items()} for _ in "12")
    if head != "usual":
        new[HEAD] = new[EMBEDDING] + (head == "other")
    if head == "alone":
        del new[EMBEDDING]
    (folder / "original").mkdir()
    for name in BESIDE[beside]:
        write(old, folder / name)
    files = save(folder, new, count)
    if flaw in DAMAGES:
        DAMAGES[flaw](folder / rng.choice([*files, INDEX] if count else files))
    else:
        path = folder / rng.choice(files)
        write((HARMLESS | FLAWS)[flaw](load_file(path)), path)
    loads = flaw in HARMLESS and head in ("usual", "equal") and (beside != "file" or not count)
    return (f"seed {seed}: {flaw}, head {head}, {count} shards, beside {beside}",
            {*os.listdir(folder), *new, HEAD}, loads)


def loaded(world, folders: list[str]) -> list[dict | str]:
    """Of each folder what a run has as weights, a tied head too; or its sentence."""
    found = []
    for folder in folders:
        try:
            lm = model.build(model.LogprobModel, folder, world, grpo.Args()).lm
            found.append({name: model.whole(p) for name, p in lm.state_dict().items()})
        except SettingsError as error:
            found.append(str(error))
    return found


def by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """transformers wants an index of all shards."""
    if not {"model.safetensors", INDEX} & {*os.listdir(folder)}:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {
            name: path.name for path in folder.glob("model-*-of-*.safetensors")
            for name in load_file(path)}}))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow)
                                       for i in range(1, 9))])
def test_what_is_loaded_is_what_transformers_loads_or_a_sentence_names_it(tmp_path, part):
    """On both ranks, though a tensor that is not finite is on one of them."""
    seeds = range(30 * part, 30 * part + 30)
    drawn = {seed: draw(tmp_path / str(seed), seed) for seed in seeds}
    ours, others = results(2, loaded, [f"{tmp_path}/{seed}" for seed in seeds])
    for (seed, (what, names, loads)), found, other in zip(drawn.items(), ours, others, strict=True):
        if isinstance(found, dict):
            theirs = by_transformers(tmp_path / str(seed))
            assert same(found, other) and same(found, theirs), what
            continue
        assert found == other and not loads, (what, found)
        assert any(name in found for name in names) or re.search(
            r"no model\S*\.safetensors", found), (what, found)
    assert {type(found) for found in ours} == {dict, str}


# ---- a repository on the hub ----

@pytest.mark.parametrize("count", (0, 2))
def test_of_a_repository_the_model_is_fetched_and_nothing_else(tmp_path, monkeypatch, count):
    """Of one commit. The folder has the small files, and the hub lists all."""
    files, hub, commit = save(tmp_path, ones("a", "b"), count), mock.Mock(), tmp_path.name
    for file in files:
        (tmp_path / file).unlink()
    hub.fetch.return_value = str(tmp_path)
    hub.list.return_value = [*files, *os.listdir(tmp_path), *BESIDE["names"]]
    monkeypatch.setattr(model_files, "snapshot_download", hub.fetch)
    monkeypatch.setattr(model_files, "list_repo_files", hub.list)
    assert model_files.find("some/model") == str(tmp_path)
    small = model_files.FILES
    assert hub.mock_calls == [
        mock.call.fetch("some/model", allow_patterns=small),
        mock.call.list("some/model", revision=commit),
        mock.call.fetch("some/model", revision=commit, allow_patterns=[*small, *files])]


def test_without_a_connection_an_earlier_download_is_the_model(tmp_path, monkeypatch):
    """As the hub's own library lays it out; tests are offline. A download that was cut is
    refused."""
    in_cache(tmp_path, "some/tiny")
    folder, = tmp_path.glob("*/snapshots/*")
    files = save(folder, ones("a", "b"), 2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_files.find("some/tiny") == str(folder)
    (folder / files[1]).unlink()
    (folder / files[1]).symlink_to("nowhere")  # in a cache each file is a link
    with pytest.raises(SettingsError, match=f"has no {files[1]}. Would work"):
        model_files.find("some/tiny")


# ---- what --offload moves

@pytest.mark.parametrize("names", [(), ("optimizer",), ("params", "optimizer")])
def test_what_offload_names_moves(names):
    layer = torch.nn.Linear(1, 1)
    trained = model.Trained(layer, fakes.World(), fakes.args())
    layer(torch.ones(1)).backward()
    trained.step(0.1)
    trained.moving = names  # as on a GPU
    trained.move(torch.device("meta"))
    assert layer.weight.is_meta == ("params" in names)
    moments = [state[key] for state in trained.optimizer.state.values()
               for key in ("exp_avg", "exp_avg_sq")]
    assert [moment.is_meta for moment in moments] == ["optimizer" in names] * 4
