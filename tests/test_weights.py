"""Which files and which tensors of a folder are the model: as transformers has it, or refused.

The sweep makes folders as people leave them: shards of two saves, an index beside other weights,
variants, heads that are tied and saved, buffers of old versions, files that are cut.
"""
import json
import random
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, Qwen2Config

import fakes
import inputs
import model
import model_files
import texts
from checkpoint import export_model
from errors import SettingsError
from examples import tiny
from ranks import results

INDEX = "model.safetensors.index.json"
SIZES = dict(vocab_size=16, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True,
             bos_token_id=None, eos_token_id=None)
CONFIGS = {
    "qwen2": Qwen2Config(hidden_size=8, intermediate_size=8, num_key_value_heads=1, **SIZES),
    "untied": Qwen2Config(hidden_size=8, intermediate_size=8, num_key_value_heads=1,
                          **SIZES | {"tie_word_embeddings": False}),
    "gpt2": GPT2Config(hidden_size=8, n_positions=32, **SIZES)}
HEAD = "lm_head.weight"


def tensors(kind: str, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(CONFIGS[kind])
    found = {name: torch.randn_like(p) for name, p in lm.named_parameters()}
    return found


def write_config(folder: Path, kind: str):
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind]
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)


def save(folder: Path, found: dict, count: int = 0, v: str = "", index: bool = True) -> list[str]:
    """One file, or `count` shards with their index → the names of the files."""
    if not count:
        save_file(found, folder / f"model{v}.safetensors", metadata={"format": "pt"})
        return [f"model{v}.safetensors"]
    files = [f"model{v}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = sorted(found)
    for i, file in enumerate(files):
        save_file({name: found[name] for name in names[i::count]}, folder / file,
                  metadata={"format": "pt"})
    if index:
        where = {name: files[i % count] for i, name in enumerate(names)}
        (folder / f"model.safetensors.index{v}.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return files


def theirs(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- what a run has ----

def loaded(world, folders: list[Path]) -> list:
    """Of each folder what a run has as weights, a tied head too, or the sentence."""
    found = []
    for folder in map(str, folders):
        try:
            lm = model.build(model.LogprobModel, folder, world, fakes.args()).lm
            found.append({name: model.whole(p) for name, p in lm.state_dict().items()})
        except SettingsError as error:
            found.append(str(error))
    return found


def ours(*folders: Path) -> list:
    return results(1, loaded, folders)[0]


# ---- small files ----

def whole(folder: Path) -> None:
    """A model with every small file that transformers writes for a causal language model."""
    write_config(folder, "qwen2")
    save(folder, tensors("qwen2", 0), 2)
    tokenizer = tiny.make_tokenizer()
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2]).save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(tokenizer.chat_template)
    (folder / "preprocessor_config.json").write_text('{"size": 3}')


def refusal(folder: Path) -> str:
    try:
        lm = model.skeleton(str(folder))
        model_files.names_in_files(lm, str(folder))
        tokenizer = inputs.load_tokenizer("x", str(folder))
        texts.eos_ids(str(folder), tokenizer)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ends", ['"2"', '"</s>"', '[2, "x"]', '{"a": 1}', "true", "2.0", "[[2]]"])
def test_an_end_that_is_no_number_of_a_token_is_named(tmp_path, ends):
    whole(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    assert "generation_config.json: eos_token_id must be the number" in refusal(tmp_path)


def exported(world, folder: str) -> None:
    args = fakes.args()
    policy = model.Policy(model.build(model.LogprobModel, folder, world, args), world, args)
    export_model(policy, folder, f"{folder}-out")


def test_an_export_has_every_small_file_of_its_model(tmp_path):
    """Of a folder that may not be written, such as a shared cache, to one that may be."""
    whole(tmp_path / "model")
    for path in (tmp_path / "model").rglob("*.*"):
        path.chmod(0o444)
    results(1, exported, str(tmp_path / "model"))
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "model-out").rglob("*.*"))
    there = {str(path.relative_to(tmp_path / "model")): path for path in (
        tmp_path / "model").rglob("*") if path.is_file() and "safetensors" not in path.name}
    for name, path in there.items():
        assert (tmp_path / "model-out" / name).read_bytes() == path.read_bytes(), name


# ---- a repository on the hub ----

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of a repository; asked: (commit, files) of each download."""
    repository, cached = tmp_path / "repository", tmp_path / "abcdef"
    asked = []

    def download(name, allow_patterns, revision=None):
        files = [path for path in repository.iterdir() if path.is_file()
                 and any(path.match(pattern) for pattern in allow_patterns)]
        asked.append((revision, sorted(path.name for path in files)))
        cached.mkdir(exist_ok=True)
        for path in files:
            shutil.copy(path, cached)
        return str(cached)

    monkeypatch.setattr(model_files, "snapshot_download", download)
    monkeypatch.setattr(model_files, "list_repo_files", lambda name, revision: [
        path.name for path in repository.iterdir()])
    write_config(repository, "qwen2")
    return SimpleNamespace(repository=repository, cached=cached, asked=asked)


@pytest.mark.parametrize("count", (0, 2))
def test_of_a_repository_the_model_is_fetched_and_nothing_else(hub, count):
    files = save(hub.repository, tensors("qwen2", 0), count)
    save(hub.repository, tensors("qwen2", 1), 2, ".fp16")
    save_file(tensors("qwen2", 2), hub.repository / "consolidated.safetensors")
    (hub.repository / "pytorch_model.bin").write_bytes(b"")
    assert model_files.find("some/model") == str(hub.cached)
    (_, small), (commit, everything) = hub.asked
    assert {*everything} - {*small} == {*files} and commit == hub.cached.name


def test_a_repository_of_pickles_is_refused_before_they_are_fetched(hub):
    (hub.repository / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SettingsError, match="has pytorch_model.bin .*/spaces/safetensors/convert"):
        model_files.find("some/model")
    assert len(hub.asked) == 1


@pytest.mark.parametrize("whole", (True, False))
def test_without_a_connection_an_earlier_download_is_the_model(tmp_path, monkeypatch, whole):
    """As the hub's own library lays it out; tests are offline."""
    repository = tmp_path / "models--some--model"
    folder = repository / "snapshots" / ("0" * 40)
    write_config(folder, "qwen2")
    files = save(folder, tensors("qwen2", 0), 2)
    link(folder)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(folder.name)
    if not whole:
        (folder / files[1]).resolve().unlink()  # the download was cut: the link points nowhere
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    if whole:
        assert model_files.find("some/model") == str(folder)
        assert [path.name for path in model_files.weight_files(str(folder))] == files
        return
    with pytest.raises(SettingsError, match=f"has no {files[1]}. Would work"):
        model_files.find("some/model")


# ---- the sweep ----

def drop(folder: Path, files, rng):
    (folder / rng.choice(files)).unlink()


def cut(folder: Path, files, rng):
    path = folder / rng.choice(files)
    path.write_bytes(path.read_bytes()[:-rng.choice([1, 40, 10_000])])


def edit(folder: Path, files, rng, change):
    path = folder / rng.choice(files)
    found = change(load_file(path))
    path.unlink()  # it may be a link
    save_file(found, path, metadata={"format": "pt"})


def edit_index(folder: Path, files, rng, change):
    for path in folder.glob("*.index.*json"):
        path.write_text(change(json.loads(path.read_text())))


def add(name: str, shape=(4,)):
    """One more tensor in a file."""
    return lambda folder, files, rng: edit(
        folder, files, rng, lambda found: found | {name: torch.ones(shape)})


def twice(folder: Path, files, rng):
    """A tensor of one file in another too."""
    name, value = rng.choice(list(load_file(folder / files[0]).items()))
    edit(folder, files[1:] or files, rng, lambda found: found | {name: value + 1})


def index_json(change):
    return lambda folder, files, rng: edit_index(folder, files, rng, change)


def more_in_index(name: str, file: str):
    return index_json(lambda index: json.dumps(
        index | {"weight_map": index["weight_map"] | {name: file}}))


def half(found: dict) -> dict:
    return {name: p.half() for name, p in found.items()}


LAYER = "model.layers.2.mlp.up_proj.weight"
FLAWS = {  # may be refused
    "drop": drop, "cut": cut, "twice": twice, "another layer": add(LAYER, (8, 8)),
    "value head": add("v_head.summary.weight"), "scale": add("model.layers.0.mlp.up_proj.scale"),
    "prefix twice": add("model.model.norm.weight", (8,)),
    "lost": lambda *a: edit(*a, lambda found: dict(list(found.items())[1:])),
    "shape": lambda *a: edit(*a, lambda found: {n: p[..., :3].clone() for n, p in found.items()}),
    "empty": lambda folder, files, rng: (folder / rng.choice(files)).write_bytes(b""),
    "folder for a file": lambda folder, files, rng: [
        (folder / files[0]).unlink(), (folder / files[0]).mkdir()],
    "pointer": lambda folder, files, rng: (folder / files[0]).write_text(
        "version https://git-lfs.github.com/spec/v1\n"),
    "index is broken": index_json(lambda index: json.dumps(index)[:-5]),
    "index has no map": index_json(lambda index: json.dumps({"metadata": {}})),
    "index is a list": index_json(lambda index: "[]"),
    "index is empty": index_json(lambda index: json.dumps(index | {"weight_map": {}})),
    "index has numbers": index_json(lambda index: json.dumps(index | {"weight_map": {"a": 1}})),
    "index names an absent file": more_in_index(LAYER, "model-00009-of-00009.safetensors"),
    "index names an absent tensor": more_in_index(LAYER, "model-00001-of-00002.safetensors"),
    "other head": add(HEAD, (16, 8)),
    "adapter": lambda folder, files, rng: (folder / "adapter_config.json").write_text("{}"),
    "explicit": lambda folder, files, rng: (folder / "config.json").write_text(json.dumps(
        json.loads((folder / "config.json").read_text()) | {"transformers_weights": files[0]}))}
HARMLESS = {
    "frequencies": add("model.layers.0.self_attn.rotary_emb.inv_freq"),
    "positions": add("model.embeddings.position_ids"),
    "float16": lambda *a: edit(*a, half),
    "nothing": lambda *a: None}
HARMLESS_GPT2 = {
    "mask": add("h.0.attn.bias", (1, 1, 4, 4)), "masked": add("transformer.h.1.attn.masked_bias"),
    "float16": HARMLESS["float16"], "nothing": HARMLESS["nothing"]}


def beside(folder: Path, old: dict, rng, count: int) -> str:
    """Other files, which transformers does not read where there is an index or a model.safetensors
    → what they are."""
    what = rng.choice(["nothing", "shards", "part", "fp16", "consolidated", "bin", "optimizer",
                       "adapter", "folder", "upper", "file"])
    if what in ("shards", "part"):
        files = save(folder, old, count + 1 or 2, index=False)
        if what == "part":
            (folder / rng.choice(files)).unlink()
    if what == "file":
        save(folder, old)
    if what == "fp16":
        save(folder, old, rng.choice([0, 2]), ".fp16")
    if what == "folder":
        (folder / "original").mkdir()
        save(folder / "original", old, rng.choice([0, 2]))
    names = {"consolidated": "consolidated", "adapter": "adapter_model", "upper": "MODEL"}
    if what in names:
        save_file(old, folder / f"{names[what]}.safetensors")
    if what == "bin":
        torch.save(old, folder / "pytorch_model.bin")
    if what == "optimizer":
        for name in ("optimizer.bin", "training_args.bin", "optimizer.pt"):
            torch.save({}, folder / name)
    return what


def link(folder: Path):
    """As in the hub's cache: each file is a link."""
    (folder / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.glob("*.*"))):
        path.rename(folder / "blobs" / str(i))
        path.symlink_to(Path("blobs", str(i)))


def make(folder: Path, seed: int) -> dict:
    rng = random.Random(seed)
    kind = rng.choice(list(CONFIGS))
    old, new = tensors(kind, 2 * seed), tensors(kind, 2 * seed + 1)
    write_config(folder, kind)
    head = rng.choice(["usual", "usual", "equal", "other", "alone", "none"])
    embedding = next(name for name in new if "embed_tokens" in name or "wte" in name)
    if head == "none":
        new.pop(HEAD, None)
    elif head != "usual" and HEAD not in new:
        new[HEAD] = new[embedding].clone() + (head == "other")
        if head == "alone":
            del new[embedding]
    if kind == "gpt2" and rng.random() < 0.5:  # on the hub its names have no prefix
        new = {name.removeprefix("transformer."): p for name, p in new.items()}
    count, v = rng.choice([0, 2, 3]), rng.choice(["", "", "", ".fp16"])  # a variant is refused
    index = rng.random() < 0.8
    files = save(folder, new, count, v, index)
    other = beside(folder, old, rng, count)
    harmless = HARMLESS_GPT2 if kind == "gpt2" else HARMLESS
    name = rng.choice(list(harmless if rng.random() < 0.5 else FLAWS))
    linked = rng.random() < 0.2
    if linked and name in harmless:
        link(folder)
    (harmless | FLAWS)[name](folder, files, rng)
    fine = (name in harmless and not v and (index or not count) and other != "file" and (
        head in ("usual", "equal", "other", "alone") if kind == "untied"
        else head in ("usual", "equal", "none")))
    return {"new": new, "fine": fine, "v": v, "kind": kind, "head": head, "flaw": name,
            "count": count, "index": index, "beside": other, "seed": seed}


def by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """transformers wants an index of all shards."""
    with suppress(OSError):
        return theirs(folder)
    where = {name: path.name for path in folder.glob("model-*-of-*.safetensors")
             for name in load_file(path)}
    if where:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return theirs(folder)


def check(folder: Path, made: dict, found: dict | str) -> str:
    """found: what a run loads, or its sentence."""
    what = {name: value for name, value in made.items() if name != "new"}
    if isinstance(found, dict):
        assert same(found, by_transformers(folder)), what
        return "loaded"
    names = {path.name for path in folder.iterdir()} | {*made["new"], HEAD}
    assert any(name in found for name in names) or re.search(
        r"transformers_weights|no model\S*\.safetensors", found), f"{what}: {found}"
    assert not made["fine"], f"{what}: {found}"
    return "refused"


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow)
                                       for i in range(1, 10))])
def test_what_is_loaded_is_what_transformers_loads_or_a_sentence_names_it(tmp_path, part):
    folders = {tmp_path / str(seed): seed for seed in range(20 * part, 20 * part + 20)}
    made = [make(*item) for item in folders.items()]
    assert {*map(check, folders, made, ours(*folders))} == {"loaded", "refused"}
