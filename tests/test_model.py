"""model.py and model_files.py: what a folder of weights computes is what transformers computes.

The trainer equals transformers in each family, before and after updates, on two ranks; slowly, with
engines, in every family. What one of the three programs computes otherwise is refused. Folders of
weights are drawn from seeds as people leave them: a run has the tensors that transformers would
have, or names what is wrong.
"""
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2Config,
)

import fakes
import families
import grpo
import inputs
import model
import model_files
import same_policy
from checkpoint import export_model
from errors import SettingsError
from examples import tiny
from families import ROUNDINGS
from family_cases import CASES, ROPE, WINDOWS, make
from ranks import on_ranks, results
from settings import changed

# ---- trainer = transformers = engine, in each family ----

# The head's scale, bound or bias; buffers outside rotary embeddings; other names of layers. And
# where the weights are: none of these flags changes numbers.
TRAINED = {"Mistral": {}, "Gemma 2": {}, "Gemma 3": dict(cpu_offload=True), "Gemma 4": {},
           "Granite": dict(shard_size=1), "Cohere": {}, "Phi": dict(cpu_offload=True),
           "Ministral 3": {}, "GPT-2": dict(shard_size=1), "GPT-NeoX": {}}


def trained(world, folder: str, table: dict) -> dict:
    """{name: (families.three_steps, what ppo.py's critic with a head of ones computes of the first
    batch)}"""
    found = {}
    for name, flags in table.items():
        path, args = f"{folder}/{name}", grpo.Args()
        steps = families.three_steps(world, path, False, head_chunk=50, checkpointing=True, **flags)
        critic = model.Critic(model.build(model.ValueModel, path, world, args), world, args)
        torch.nn.init.ones_(critic.module.head.weight)
        found[name] = steps, steps[0][0].score(world, 400, "score", critic.values)
    return found


@torch.no_grad()
def values(folder: str, batch, dtype) -> torch.Tensor:
    """The same by transformers: the sums of the states before each token, (M,)."""
    lm, found = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager"), []
    for sample in batch.samples:
        ids = [*sample.prompt.row.prompt_ids, *sample.completion.ids]
        states = lm(torch.tensor([ids]))[0][0, -len(sample.completion.ids) - 1:-1]
        found.append(states.sum(-1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("families"))
    for name in TRAINED:
        make(name, f"{folder}/{name}")
    path = f"{folder}/GPT-2/model.safetensors"  # on the hub its names have no prefix
    weights = {n.removeprefix("transformer."): p for n, p in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder, results(2, trained, folder, TRAINED, timeout=300)[0]


@pytest.mark.parametrize("name", TRAINED)
def test_trainer_and_critic_are_transformers_before_and_after_updates(found, name):
    """On two ranks, with the memory knobs, in float32; transformers loads each export. And the
    export before the first update has the names and bits of the folder."""
    path, (steps, critic) = f"{found[0]}/{name}", found[1][name]
    gap, _, rounding = families.gaps(path, steps)
    assert gap < ROUNDINGS * rounding
    theirs, exact = (values(path, steps[0][0], dtype) for dtype in (torch.float32, torch.float64))
    assert (critic - theirs).abs().max() < ROUNDINGS * (theirs - exact).abs().max()
    assert same(*(load_file(f"{path}{way}/model.safetensors") for way in ("", "-0")))


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one)


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
    ("llama", dict(sliding_window=32)), ("granite", dict(sliding_window=32)),
    ("gemma", dict(attention_bias=True)), ("gemma", dict(final_logit_softcapping=0.5)),
    ("llama", dict(rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5))),
    ("phi3", dict(hidden_act="relu")), ("gemma2", dict(hidden_activation="silu")),
    ("llama", dict(is_causal=False)), ("llama", dict(logits_scaling=0.5)),
    ("cohere", dict(tie_word_embeddings=False)), ("olmo2", dict(attn_logit_softcapping=0.5)),
    ("gemma4_text", dict(use_bidirectional_attention="all")),
    ("exaone4", dict(layer_types=WINDOWS[1:] * 2)), ("ernie4_5", dict(use_bias=True)),
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
    ("olmo2", dict(is_causal=False)), ("gemma3_text", dict(use_bidirectional_attention=True)),
    ("lfm2", dict(layer_types=["conv", "full_attention"]))])  # its state goes from row to row
def test_a_trainer_without_an_engine_is_compared_with_transformers(tmp_path, kind, options):
    make(kind, str(tmp_path), options)
    (_, said), = on_ranks(1, families.three_steps, str(tmp_path), False)
    assert "trainer and transformers differ before an update" in said


# ---- another model is refused in one sentence, by a run and by --plan ----

def refused(folder: Path, words: str) -> None:
    args = changed(grpo.Args(), max_tokens=64, max_prompt_tokens=64, model=str(folder))
    for look in lambda: inputs.read_inputs(args, 1, 1), lambda: inputs.show_plan(args):
        with pytest.raises(SettingsError, match=words):
            look()


@pytest.mark.parametrize("kind, options, words", [
    *((kind, {}, f"^.* has model_type {kind}, which is not supported. Would work: a causal lang")
      for kind in ("t5", "gemma3", "llava")),
    ("gpt_oss", {}, "has model_type gpt_oss, which is not supported .GptOssForCausalLM does not"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "has architecture .*Sequence"),
    ("llama", {"rope_parameters": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)},
     "has rotary type dynamic"),
    ("llama", {"transformers_weights": "x.safetensors"}, "has transformers_weights"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "has quantized weights")])
def test_other_models_are_refused(tmp_path, kind, options, words):
    config = AutoConfig.for_model(kind).to_dict() | options
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny.make_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, words)


@pytest.mark.parametrize("options, file, text, words", [
    ({"vocab_size": 50}, "notes.txt", "", r"must have tokens with ids below 50 \(the largest is "),
    ({}, "adapter_config.json", "{}", "has an adapter_config.json"),
    ({}, "tokenizer.json", "", "has no tokenizer that transformers can load"),
    *(({}, "generation_config.json", f'{{"eos_token_id": {ends}}}',
       "generation_config.json: eos_token_id must be the number") for ends in (
           '"2"', '[2, "x"]', "true", "2.0", "[[2]]"))])
def test_small_files_that_do_not_fit_the_model_are_refused(tmp_path, options, file, text, words):
    make("Qwen2", str(tmp_path), options)
    (tmp_path / file).write_text(text)
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

CONFIGS = {tied: Qwen2Config(
    hidden_size=8, intermediate_size=8, num_key_value_heads=1, vocab_size=16, num_hidden_layers=2,
    num_attention_heads=2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied)
    for tied in (True, False)}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


def write(weights: dict, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a link
    save_file(weights, path, metadata={"format": "pt"})


def save(folder: Path, weights: dict, count: int, index: bool = True) -> list[str]:
    """One file, or `count` shards with their index → the names of the files."""
    names, files = sorted(weights), ["model.safetensors"]
    if count:
        files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    where = {name: files[i % len(files)] for i, name in enumerate(names)}
    for file in files:
        write({name: weights[name] for name in names if where[name] == file}, folder / file)
    if index and count:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def edit(change):
    """A flaw: `change` of the tensors in one file."""
    return lambda folder, path: write(change(load_file(path)), path)


def in_index(change):
    """A flaw: `change` of the text of an index."""
    def flaw(folder, path):
        if (folder / INDEX).exists():
            (folder / INDEX).write_text(change((folder / INDEX).read_text()))
    return flaw


def add(*names: str, shape: int = 4):
    return edit(lambda found: found | {name: torch.ones(shape) for name in names})


HARMLESS = {  # may not be refused
    "nothing": lambda folder, path: None,
    "float16": edit(lambda found: {name: p.half() for name, p in found.items()}),
    "buffers of old versions": add("model.layers.0.self_attn.rotary_emb.inv_freq",
                                   "model.embeddings.position_ids", "h.1.attn.masked_bias")}
FLAWS = {  # may be refused
    "no file": lambda folder, path: path.unlink(),
    "cut": lambda folder, path: path.write_bytes(path.read_bytes()[:-1]),
    "pointer": lambda folder, path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "twice": lambda folder, path: [add("model.norm.weight", shape=8)(folder, other)
                                   for other in folder.glob("model*.safetensors")],
    "another layer": add("model.layers.2.mlp.up_proj.weight"),
    "lost": edit(lambda found: dict(list(found.items())[1:])),
    "shape": edit(lambda found: {name: p[..., :3].clone() for name, p in found.items()}),
    "nan on the last rank": edit(lambda found: {
        name: torch.cat([p[:-1], p[-1:] * float("nan")]) for name, p in found.items()}),
    "index cut": in_index(lambda text: text[:-5]),
    "index names an absent file": in_index(
        lambda text: text.replace("00001-of", "00009-of", 1))}
BESIDE = {  # other files, of another save
    "nothing": lambda folder, old, count: None,
    "shards": lambda folder, old, count: save(folder, old, count + 1 or 2, False),
    "file": lambda folder, old, count: save(folder, old, 0),
    "folder": lambda folder, old, count: save(folder / "original", old, count),
    "names": lambda folder, old, count: [write(old, folder / f"{name}.safetensors") for name in (
        "consolidated", "adapter_model", "MODEL", "model.fp16")],
    "pickles": lambda folder, old, count: [torch.save(old, folder / name) for name in (
        "pytorch_model.bin", "optimizer.pt")]}


def draw(folder: Path, seed: int) -> tuple[dict, bool]:
    """Writes a folder → (what is in it, whether it must load)."""
    rng, flaws = random.Random(seed), FLAWS if seed % 2 else HARMLESS
    tied, flaw = rng.random() < 0.7, [*flaws][seed // 2 % len(flaws)]
    head = rng.choice(["usual", "usual", "equal", "other", "alone", "none"])
    count, index, beside = rng.choice([0, 2, 3]), rng.random() < 0.8, rng.choice([*BESIDE])
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(CONFIGS[tied])
    lm.config.architectures = [type(lm).__name__]
    lm.config.save_pretrained(folder)
    old, new = ({name: torch.randn_like(p).half().float()  # float16 has these numbers too
                 for name, p in lm.named_parameters()} for _ in "12")
    if head == "none":
        new.pop(HEAD, None)
    elif tied and head != "usual":
        new[HEAD] = new[EMBEDDING] + (head == "other")
        if head == "alone":
            del new[EMBEDDING]
    files = save(folder, new, count, index)
    BESIDE[beside](folder, old, count)
    if rng.random() < 0.2:
        link(folder)
    flaws[flaw](folder, folder / rng.choice(files))
    loads = flaw in HARMLESS and (index or not count) and beside != "file" and head in (
        ("usual", "equal", "none") if tied else ("usual", "equal", "other", "alone"))
    return dict(tied=tied, flaw=flaw, head=head, count=count, index=index, beside=beside,
                seed=seed, names=[*new, HEAD]), loads


def link(folder: Path) -> None:
    """As in the hub's cache: each file is a link."""
    (folder / "blobs").mkdir()
    for i, path in enumerate(sorted(path for path in folder.glob("*.*") if path.is_file())):
        path.rename(folder / "blobs" / str(i))
        path.symlink_to(Path("blobs", str(i)))


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
    drawn = [draw(tmp_path / str(seed), seed) for seed in seeds]
    ours, others = results(2, loaded, [f"{tmp_path}/{seed}" for seed in seeds])
    for (what, loads), found, other, seed in zip(drawn, ours, others, seeds, strict=True):
        folder = tmp_path / str(seed)
        if isinstance(found, dict):
            assert same(found, other) and same(found, by_transformers(folder)), what
            continue
        names = {path.name for path in folder.iterdir()} | {*what.pop("names")}
        assert found == other and not loads, (what, found)
        assert any(name in found for name in names) or re.search(
            r"no model\S*\.safetensors", found), (what, found)
    assert {type(found) for found in ours} == {dict, str}


# ---- a repository on the hub ----

@pytest.mark.parametrize("count", (0, 2))
def test_of_a_repository_the_model_is_fetched_and_nothing_else(tmp_path, monkeypatch, count):
    """Of one commit. The folder has the small files, and the hub lists all."""
    files = save(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, count)
    for file in files:
        (tmp_path / file).unlink()
    listed, asked = [*files, *os.listdir(tmp_path), "model.fp16.safetensors",
                     "consolidated.safetensors", "pytorch_model.bin"], []
    monkeypatch.setattr(
        model_files, "snapshot_download", lambda name, allow_patterns, revision=None: asked.append(
            (revision, [*allow_patterns])) or str(tmp_path))
    monkeypatch.setattr(model_files, "list_repo_files", lambda name, revision: listed)
    assert model_files.find("some/model") == str(tmp_path)
    small = [*model_files.FILES]
    assert asked == [(None, small), (tmp_path.name, small + files)]


def test_without_a_connection_an_earlier_download_is_the_model(tmp_path, monkeypatch):
    """As the hub's own library lays it out; tests are offline. A download that was cut is
    refused."""
    folder = tmp_path / "models--some--model/snapshots" / ("0" * 40)
    CONFIGS[True].save_pretrained(folder)
    files = save(folder, {"a": torch.ones(2), "b": torch.ones(2)}, 2)
    link(folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs/main").write_text(folder.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_files.find("some/model") == str(folder)
    (folder / files[1]).resolve().unlink()  # the link points nowhere
    with pytest.raises(SettingsError, match=f"has no {files[1]}. Would work"):
        model_files.find("some/model")


# ---- the limit of the comparison, and what --offload moves

def compared(gaps: dict, rounding: float = 0.0, max_gap: float | None = None) -> str:
    """The sentence of a run, or of its end."""
    log, bfloat16 = fakes.Log(), rounding > 0
    lm = SimpleNamespace(config=SimpleNamespace(model_type="kind"))
    try:
        same_policy.judge(SimpleNamespace(
            dtype=torch.bfloat16 if bfloat16 else torch.float32, log=log,
            policy=SimpleNamespace(module=SimpleNamespace(lm=lm)),
            args=SimpleNamespace(run_args=SimpleNamespace(max_gap=max_gap))), gaps, rounding)
    except SettingsError as error:
        log.say(str(error))
    return log.said[0]


def test_the_limit_of_the_comparison_is_what_bfloat16_rounds_in_this_run():
    pair, other = "engine and trainer", "trainer and transformers"
    assert "compared this kind before" in compared({other: 1e-3, pair: 1e-3})
    assert f"{pair} differ " in compared({other: 1e-6, pair: 2e-3})
    assert "compared this kind" in compared({other: 1e-3, pair: 0.011}, rounding=0.0075)
    assert "compared this kind" in compared({pair: 0.004}, rounding=1e-4)  # of few uncertain tokens
    for gaps in {other: 1e-3, pair: 0.02}, {other: 0.02, pair: 1e-3}, {pair: float("inf")}:
        assert re.match(rf"{max(gaps, key=gaps.get)} differ .* than 0.015: 2 roundings of bfloat16",
                        compared(gaps, rounding=0.0075))
    assert "compared this kind" in compared({pair: 0.02}, rounding=0.0075, max_gap=0.03)
    assert "more than --max_gap 0.01" in compared({pair: 0.014}, rounding=0.0075, max_gap=0.01)
    assert "more than 0.15: 2 roundings" in compared({pair: 0.2}, rounding=3.0)


def test_what_offload_names_moves():
    moved, p = [], torch.nn.Parameter(torch.zeros(2))
    module = torch.nn.Linear(1, 1)
    module.to = moved.append
    for names, count in ((), 0), (("optimizer",), 0), (("params", "optimizer"), 1):
        it = object.__new__(model.Trained)
        it.module, it.moving, it.optimizer = module, names, torch.optim.AdamW([p])
        moment = torch.zeros(2)
        it.optimizer.state[p] = {"exp_avg": moment, "exp_avg_sq": moment, "step": 1}
        it.move(torch.device("meta"))
        assert moved == [torch.device("meta")] * count
        there = it.optimizer.state[p]["exp_avg_sq"].device.type
        assert there == ("meta" if "optimizer" in names else "cpu")
