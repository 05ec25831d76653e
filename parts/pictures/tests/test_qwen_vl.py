"""Qwen-VL: what is seen is what transformers' processor and model see, in trainer and engine.
Their processor needs torchvision, here too."""
import json
import math
import os
import pickle
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import data
import families
import grpo
import learning
import model
import model_files
import plan
from batch import Batch, Micro
from checkpoint import export_model
from data import Row
from errors import SettingsError
from examples import squares
from forked import PYTHON
from learning import difference
from model_files import family_of, shape_from
from parts.lora import lora
from parts.pictures import rows as pictured
from parts.pictures import seeing
from parts.pictures.engine import HELD, parts_of
from parts.pictures.rows import PicturedRow, Pictures
from parts.trial import trial
from ranks import results
from rollout import Request
from test_vision import expected, fabricate, flat, naive, png, read, updates
from tools import float64
from tracked import ROOT

KINDS = [kind for kind in seeing.FAMILIES if kind.startswith("qwen")]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    """split/: a model of this kind, which would often sample the token of a picture. a.png to
    d.png, of several shapes; a and b have one."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # a build for another torch raises a RuntimeError
        pytest.skip(f"torchvision: {str(error)[:200]}")
    path = tmp_path_factory.mktemp(request.param)
    squares.make_model(str(path / "split"), 0, 4, noise=0.09, kind=request.param)
    kept = load_file(path / "split/model.safetensors")
    kept["lm_head.weight"][config_of(path).image_token_id] *= 3
    save_file(kept, path / "split/model.safetensors", metadata={"format": "pt"})
    rng = random.Random(0)
    for i, size in enumerate([(64, 96), (64, 96), (160, 40), (33, 100)]):
        drawn = squares.draw(rng, i + 1).resize(size)
        (ImageOps.invert(drawn) if i == 1 else drawn).save(path / f"{'abcd'[i]}.png")
    return path


def config_of(folder: Path, **changes):
    """Of split/, or of a copy of its files with other values in config.json."""
    if not changes:
        return model.config_of(str(folder / "split"))
    source = json.loads((folder / "split/config.json").read_text())
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = source
        for part in parts:
            place = place[part]
        place[last] = value
    (folder / "changed").mkdir(exist_ok=True)
    (folder / "changed/config.json").write_text(json.dumps(source))
    return model.config_of(str(folder / "changed"))


# ---- rows ----

@pytest.mark.parametrize("row", [
    {"prompt": "How many?", "image": "a.png"}, {"prompt": "<image>How many?", "images": ["c.png"]},
    {"problem": "First <image>, then\n<image>?", "images": ["a.png", "d.png"], "answer": "3"},
    {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "x<image>"}],
     "image": "d.png"}, {"prompt": "no picture"}])
def test_ids_pixels_and_positions_are_those_of_transformers(folder, row):
    from transformers import AutoProcessor
    ours, processor = read(folder, row, kind="split")[0], AutoProcessor.from_pretrained(
        folder / "split")
    names = pictured.values_of(row)
    images = {"images": [Image.open(folder / name) for name in names]} if names else {}
    theirs = processor(text=[ours.prompt], return_tensors="pt", **images)
    assert ours.prompt_ids == theirs["input_ids"][0].tolist()
    assert ours.prompt.count("<|image_pad|>") == len(names)
    if names:
        pixels, grids = ours.pictures.eyes.pixels(ours.pictures.sources)
        assert torch.equal(pixels, theirs["pixel_values"])
        assert torch.equal(grids, theirs["image_grid_thw"])
        positions, _ = model.skeleton(str(folder / "split")).model.get_rope_index(
            theirs["input_ids"], theirs["mm_token_type_ids"], theirs["image_grid_thw"])
        assert ours.pictures.positions == positions[:, 0].tolist()
        assert 4 * len(ours.pictures.places) == len(pixels)


@pytest.mark.parametrize("size", [(1, 1), (300, 7), (7, 300), (33, 32), (64, 64), (500, 400)])
@pytest.mark.parametrize("limits", [(0, 0), (9, 0), (0, 30), (9, 30)])
def test_a_picture_of_any_size_has_a_place_for_each_feature(folder, size, limits):
    eyes = seeing.load_eyes("x", str(folder / "split"), config_of(folder), *limits)
    try:
        ids = eyes.ids_of(size)
    except SettingsError as error:  # long and thin
        assert limits[1] and re.search("tokens at its smallest, more than --max_im", str(error))
        return
    pixels, _ = eyes.pixels([png(Image.new("RGB", size, "red"))])
    assert len(ids) == len(pixels) // 4 and pixels.nbytes == eyes.bytes * len(ids)
    assert (limits[0] or 4) <= len(ids) and (not limits[1] or len(ids) <= limits[1])


def test_a_picture_whose_side_is_too_long_is_named_with_its_row(folder):
    Image.new("RGB", (2010, 10)).save(folder / "thin.png")
    Image.new("RGB", (1500, 10)).save(folder / "long.png")
    good, thin, long = ({"prompt": "q", "image": f"{name}.png"} for name in ("a", "thin", "long"))
    with pytest.raises(SettingsError, match="rows.jsonl, row 1 .counted from 0.: a picture of "
                       "2,010 x 10 pixels has a side that is more than 200 times the other"):
        read(folder, good, thin, kind="split")
    read(folder, good, long, kind="split")
    with pytest.raises(SettingsError, match="row 1 .*1,500 x 10 pixels has .* tokens at its small"):
        read(folder, good, long, kind="split", most=16)


def test_two_rows_with_equal_pictures_share_a_prompt(folder):
    row = {"prompt": "q", "image": "a.png"}
    samples = fabricate(folder, "split")[:4]
    for sample, same in zip(samples, read(folder, row, row, row | {"image": "b.png"}, row,
                                          kind="split"), strict=True):
        sample.prompt = data.Prompt(0, same)
    assert [owner for owner, _, _ in Batch(samples).sizes] == [0, 0, 2, 3]


def test_limits_that_leave_no_size_are_refused(folder):
    for least, most, words in (20, 10, "at least 20 and at most 10"), (0, 3, "at least 4 and at"):
        with pytest.raises(SettingsError, match=words):
            seeing.load_eyes("x", str(folder / "split"), config_of(folder), least, most)


def test_a_processor_of_another_model_is_refused(folder):
    with pytest.raises(SettingsError, match="sizes of a patch are not the model's"):
        seeing.load_eyes("x", str(folder / "split"), config_of(
            folder, vision_config__patch_size=16))


def test_equal_pictures_of_a_group_count_once_in_a_call(folder):
    """The parts of a call are cut by the tokens that pictures have, not by the most."""
    rows = read(folder, *({"prompt": "q", "image": f"{name}.png"} for name in "ab"), kind="split")
    half = HELD * 2**30 // 2
    requests, large = ([
        Request(row.prompt_ids, i, row=replace(row, pictures=row.pictures._replace(bytes=size)))
        for row in (*rows, *rows) for i in range(3)] for size in (half, half + 1))
    assert [len(part) for part in parts_of(requests)] == [12]
    assert [len(part) for part in parts_of(large)] == [3, 3, 3, 3]
    assert rows[0].pictures.bytes == 3 * 64 * 96 + 24 * 12 * 2 * 16**2
    assert [len(part) for part in parts_of([Request([1], 0)])] == [1] and parts_of([]) == [[]]


# ---- settings ----

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [ImportError("No module named 'torchvision'"),
                                   RuntimeError("operator torchvision::nms does not exist")])
def test_without_torchvision_a_sentence_says_what_to_install(kind, error, monkeypatch):
    class Broken:
        def find_spec(self, name, *given):
            if name == "torchvision":
                raise error

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    config = SimpleNamespace(model_type=kind)
    with pytest.raises(SettingsError, match=f"pictures of a {kind} need torchvision, and its "
                       "import fails .*torchvision.*Would work: pip install torchvision==0.28.0"):
        seeing.load_eyes("x", "nowhere", config)


def test_the_plan_counts_the_tower_once_and_its_moments_if_it_is_trained(folder):
    lm = model.skeleton(str(folder / "split"))
    shape, moments = shape_from(lm), []
    assert shape.params == sum(p.numel() for p in lm.parameters())
    tower, = family_of(lm.config).parts(lm)[1:]
    assert shape.tower.params == sum(p.numel() for p in tower.parameters())
    assert shape.tower.layer == sum(p.numel() for p in tower.blocks[0].parameters())
    for trained in False, True:
        args = plan.changed(grpo.Args(), train_vision=trained)
        parts = plan.Memory(plan.Plan(args, 1, 8, 0), shape, None).parts
        moments.append(parts["moments"][1])
    assert moments[1] - moments[0] == 8 * shape.tower.params


# ---- the trainer ----

def test_a_completion_goes_on_behind_the_largest_position_of_its_prompt():
    """Not at the number of its prompt's tokens: a picture of 2 x 3 tokens takes three steps. In
    transformers' own order; no torchvision is needed."""
    grid = np.concatenate([np.array([[0, 1]] * 3), 2 + np.indices((1, 2, 3)).reshape(3, -1),
                           np.array([[5]] * 3)], 1)  # two words, the picture, a word: (3, 9)
    seen = Pictures((b"",), [], [2, 3, 4, 5, 6, 7], None, grid.tolist())
    rows = [PicturedRow(0, "", [7] * 9, None, {}, "", pictures=seen),
            Row(1, "", [8] * 4, None, {}, "")]
    samples = [learning.sample(row, np.arange(n))
               for row, n in zip((rows[0], rows[0], rows[1]), (3, 2, 3), strict=True)]
    found = seeing.positions_of(Micro(Batch(samples), [0, 1, 2], torch.device("cpu")))
    line = [6, 7, 6, 4, 5]  # completions without their last tokens: behind 5, 5 and 3
    assert found.squeeze(1).tolist() == [[*axis, 0, 1, 2, 3, *line] for axis in grid.tolist()]


def test_the_update_is_the_formula_on_any_ranks_and_budgets(folder):
    samples, kind = fabricate(folder, "split"), "split"
    formula = {trains: expected(folder, kind, samples, trains) for trains in (False, True)}
    runs = {size: results(size, updates, folder, kind, timeout=400)[0] for size in (1, 2, 3)}
    for size, found in runs.items():
        for (gradient, after), trains in zip(found, (False, True, True, False), strict=True):
            assert gradient.keys() == formula[trains].keys()
            assert difference(flat(gradient), flat(formula[trains])) < 1e-12, (size, trains)
            one = runs[1][int(trains)][1]
            assert difference(flat(after), flat(one)) < 1e-12
    start, moved = (flat(a) for a in (runs[1][0][1], runs[1][1][1]))
    assert difference(start, moved) > 1e-4  # the tower learned


def test_a_row_is_what_transformers_own_forward_makes_of_it(folder):
    """With nothing of ours: its processor, positions, places and deepstack."""
    from transformers import AutoProcessor
    row = read(folder, {"prompt": "<image> or <image>?", "images": ["c.png", "d.png"]},
               kind="split")[0]
    sample = fabricate(folder, "split")[0]
    sample.prompt = data.Prompt(0, row)
    processor = AutoProcessor.from_pretrained(folder / "split")
    lm = AutoModelForImageTextToText.from_pretrained(folder / "split", dtype=torch.float64)
    given = processor(text=[row.prompt], return_tensors="pt", images=[
        Image.open(folder / f"{name}.png") for name in "cd"])
    ids = torch.tensor(sample.completion.ids).long().unsqueeze(0)
    given["input_ids"] = torch.cat([given["input_ids"], ids], 1)
    given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], 0 * ids], 1)
    del given["attention_mask"]
    assert lm.config.image_token_id not in ids
    with torch.no_grad():
        logits = lm(**given.to(torch.float64)).logits[0, -ids.numel() - 1:-1]
        logits[:, lm.config.image_token_id] -= 100
        assert (naive(lm, sample) - logits.log_softmax(-1)).abs().max() < 1e-5


def tried(world, folder: Path) -> list[int]:
    """Patches that the tower saw in each forward of the worst case."""
    args = plan.changed(grpo.Args(), max_tokens=60, max_prompt_tokens=60, update_tokens=480,
                        score_tokens=480, minibatches=2)
    module = float64.build(model.LogprobModel, str(folder / "split"), world, args.model_args)
    policy = model.Policy(module, world, args.model_args, args.optimizer_args)
    rows, patches = read(folder, {"prompt": "q", "image": "a.png"}, kind="split"), []
    family_of(module.lm.config).parts(module.lm)[1].register_forward_pre_hook(
        lambda tower, given: patches.append(len(given[0])))
    trial.measure_phases(plan.Plan(args, 1, 8, 0), world, 9, policy,
                       row_of=policy.family.largest(rows, trial.text_row))
    return [*patches, len(rows[0].prompt_ids)]


def test_the_worst_case_has_as_many_pictures_as_fit(folder):
    (*patches, row), = results(1, tried, folder)
    assert patches == [4 * 24 * (240 // row), 4 * 24 * (480 // row)] * 2


def sharded(world, folder: str) -> list[str]:
    module = model.build(model.LogprobModel, f"{folder}/split", world, model.ModelArgs())
    policy = model.Policy(module, world, model.ModelArgs(), model.OptimizerArgs())
    export_model(policy, f"{folder}/split", f"{folder}/split-out")
    critic = model.build(model.ValueModel, f"{folder}/split", world, model.ModelArgs())
    critic = model.Critic(critic, world, model.ModelArgs(), model.OptimizerArgs())
    made = fabricate(Path(folder), "split")
    micro, = Batch(made).micros(world, [*range(15)], 999, "values")
    assert critic.values(micro).shape == micro.targets.shape
    return [name for name, part in module.named_modules()
            if isinstance(part, torch.distributed.fsdp.FSDPModule)]


def test_text_and_vision_layers_are_sharded_and_exported(folder):
    assert results(2, sharded, str(folder))[0] == ["", *(
        f"lm.model.{part}.{i}" for part in ("visual.blocks", "language_model.layers")
        for i in (0, 1))]
    ours, theirs = (load_file(folder / name / "model.safetensors")
                    for name in ("split-out", "split"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def hub_like(folder: Path) -> Path:
    """As Qwen publishes: the text model's values beside the tower's, and older names of both
    (save_pretrained writes these too)."""
    path = folder / "hub"
    path.mkdir(exist_ok=True)
    for file in (folder / "split").glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    source = json.loads((folder / "split/config.json").read_text())
    text = source.pop("text_config")
    rope = text.pop("rope_parameters")
    source |= text | {"rope_theta": rope["rope_theta"], "tie_word_embeddings": True, "rope_scaling":
                      {"type": "mrope", "mrope_section": rope["mrope_section"]},
                      "model_type": source["model_type"]}
    (path / "config.json").write_text(json.dumps(source))
    kept = load_file(folder / "split/model.safetensors")
    del kept["lm_head.weight"]
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    (path / "preprocessor_config.json").write_text(json.dumps(dict(
        image_processor_type="Qwen2VLImageProcessor", patch_size=8, merge_size=2,
        temporal_patch_size=2, min_pixels=32 * 32, max_pixels=128 * 128)))
    return path


def test_a_folder_as_the_hub_has_it_is_the_same_model(folder):
    if config_of(folder).model_type == "qwen3_vl":
        pytest.skip("its names on the hub are those of transformers")
    lm = model.skeleton(str(hub_like(folder)))
    names = model_files.names_in_files(lm, str(folder / "hub"))
    assert names["model.language_model.layers.0.mlp.up_proj.weight"] == (
        "model.layers.0.mlp.up_proj.weight")
    assert names["model.visual.merger.mlp.0.weight"] == "visual.merger.mlp.0.weight"
    eyes = [seeing.load_eyes("x", str(folder / name), lm.config) for name in ("hub", "split")]
    assert eyes[0].size == eyes[1].size == {"shortest_edge": 1024, "longest_edge": 128**2}


def test_adapters_are_in_the_text_model_alone(folder):
    lm = model.skeleton(str(folder / "split"))
    lora.put_in(lm, lora.LoraArgs(4), torch.float32)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("model.language_model.") for name in trained)


# ---- scripts ----

def geometry(folder: Path, name: str, n: int) -> Path:
    """Rows as geometry3k has them."""
    import pyarrow as pa
    import pyarrow.parquet
    rows = [{"images": [{"bytes": (folder / f"{'abcd'[i % 4]}.png").read_bytes(), "path": None}],
             "problem": f"<image>Find x if y is {i}.", "answer": "\\frac { 15 } { 2 }"}
            for i in range(n)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / name)
    return folder / name


def easyr1() -> list[str]:
    """The words of the command in recipes.md."""
    page = (ROOT / "parts/pictures/README.md").read_text()
    command, = re.findall(r"^torchrun.*(?:\\\n.*)*Qwen2.5-VL(?:.*\\\n)*.*$", page, re.M)
    return shlex.split(command.replace("\\\n", ""))


def smaller(words: list[str], **values) -> list[str]:
    """With other values behind flags. None: without the flag and its value."""
    words = [*words]
    for name, value in values.items():
        at = words.index(f"--{name}")
        words[at:at + 2] = [] if value is None else [f"--{name}", str(value)]
    return words


def run_script(folder: Path, *words: str) -> list[dict]:
    """On two ranks, as one engine or two → its metrics."""
    done = subprocess.run(
        [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", *words],
        cwd=folder, text=True, capture_output=True, timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    run = max((folder / "runs").glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in run.open()]


def test_easyr1s_job_passes_the_checks_and_fits_by_the_plan():
    args = tyro.cli(grpo.Args, args=easyr1()[4:], config=(tyro.conf.OmitArgPrefixes,),
                    use_underscores=True)
    config = AutoConfig.for_model("qwen2_5_vl", text_config=dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064,
        rope_parameters=squares.ROPE | {"mrope_section": [16, 24, 24]}), vision_config=dict(
        hidden_size=1280, intermediate_size=3420, depth=32, num_heads=16, out_hidden_size=3584))
    with torch.device("meta"):
        shape = shape_from(AutoModelForImageTextToText.from_config(config))
    assert shape.params == 8_292_166_656  # as the hub says
    assert not plan.problems(args, 8, 2101, 601, shape)
    planned = plan.Memory(plan.Plan(args, 8, 2101, 601), shape, 80 * plan.GIB)
    assert planned.fits, planned.text()


def test_easyr1s_job_runs_on_rows_of_its_layout(folder):
    words = smaller(easyr1()[3:], model=folder / "split", data=geometry(folder, "train.parquet", 8),
                    eval_data=geometry(folder, "test.parquet", 3), eval_every=1, batch=4, steps=2,
                    minibatches=2, max_tokens=12, min_image_tokens=9, max_image_tokens=30)
    found = run_script(folder, str(ROOT / words[0]), *words[1:])
    steps = [row for row in found if "reward/math" in row]
    assert len(steps) == 2 and all("reward/format_boxed" in row for row in steps)
    assert max(row["rollout/logprob_gap_max"] for row in steps) < 1e-4
    assert json.loads((folder / "runs/geometry3k/args.json").read_text())["train_vision"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    "ppo.py --train_vision", "ppo.py", "grpo.py --lora_rank 4 --lora_sync adapter", "sft.py",
    "sft.py --train_vision", "grpo.py --temperature 0.7"])
def test_scripts_train_on_pictures(folder, words):
    script, *flags = words.split()
    rows = [{"prompt": "q", "image": f"{'abcd'[i % 4]}.png", "answer": str(i)} for i in range(8)]
    (folder / "shown.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = [] if script == "sft.py" else ["--reward", "exact", "--group", "2"]
    found = run_script(
        folder, str(ROOT / script), *flags, *reward, "--model", str(folder / "split"), "--data",
        "shown.jsonl", "--batch", "4", "--steps", "2", "--max_tokens", "12", "--lr", "1e-3")
    assert all(row.get("rollout/logprob_gap_max", 0) < 1e-4 for row in found)
    run = max((folder / "runs").glob("*/model"), key=lambda path: path.stat().st_mtime)
    AutoModelForImageTextToText.from_pretrained(run)


# ---- the engine ----

@pytest.fixture(scope="module", params=["split 1 0", *(pytest.param(
    words, marks=pytest.mark.slow) for words in ("split 2 0", "split 1 4", "hub 1 0"))])
def engine(folder, request) -> dict:
    """What vision_worker.py found with this folder, --tp and --lora_rank."""
    out = Path(f"{folder}/out {request.param}")
    if request.param.startswith("hub"):
        if config_of(folder).model_type == "qwen3_vl":
            pytest.skip("split/ is as the hub has it")
        hub_like(folder)
    done = subprocess.run(
        [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
         Path(__file__).with_name("vision_worker.py"), folder, out, *request.param.split()],
        cwd=ROOT,
        text=True, capture_output=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert out.exists(), done.stderr[-6000:]
    return pickle.loads(out.read_bytes())


def test_engine_trainer_and_transformers_see_the_same(engine):
    """After each of three loads, in which the tower changed too; two pictures in a row; rows with
    equal ids; completions that have the token of a picture, which no engine samples."""
    assert engine["sampled"] == 0
    assert max(engine["gaps"] + engine["plain"]) < families.ROUNDINGS
    assert engine["swapped"] > 1 and engine["line"] > 1
    assert math.isfinite(engine["swapped"])
    assert "engine and trainer differ in the ids of a prompt with pictures" in engine["expanded"]
