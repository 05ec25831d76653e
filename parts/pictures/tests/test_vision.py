"""pictures/: what is seen is what transformers' processor and model see, in trainer and engine."""
import io
import json
import math
import pickle
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Config

import checkpoint
import data
import families
import grpo
import inputs
import model
import plan
import test_newcomer
import test_resume
import test_rows
import texts
from batch import Batch, Completion, Sample
from checkpoint import export_model
from errors import SettingsError
from examples import squares, tiny
from learning import begin_with, difference
from model_files import family_of, shape_from
from parts.pictures import kinds, seeing
from parts.pictures import rows as pictured
from parts.pictures.eyes import opened
from parts.pictures.idefics3 import Eyes
from ranks import results, script
from rewards import Score
from settings import changed
from shapes import shape_of
from tools import float64

GROUP, COMPLETION = 3, 10


KINDS = [*kinds.FAMILIES]
LAYERS = dict.fromkeys(KINDS, ("visual.blocks", "language_model.layers")) | {  # tower, text
    "idefics3": ("vision_model.encoder.layers", "text_model.layers")}


def make_model(path: Path, kind: str, name: str, *how, **more) -> None:
    """It would often sample the token of a picture."""
    squares.make_model(str(path / name), *how, kind=kind, **more)
    weights = load_file(path / name / "model.safetensors")
    weights["lm_head.weight"][model.config_of(str(path / name)).image_token_id] *= 3
    save_file(weights, path / name / "model.safetensors", metadata={"format": "pt"})


def make_folder(path: Path, kind: str) -> Path:
    """split/: a model of this kind. a.png to d.png, for Qwen of several shapes; a and b have one.
    For Idefics3 a picture of split/ is 4 tiles and the whole, and of one/ a tile."""
    rng, sizes = random.Random(0), [(64, 96), (64, 96), (160, 40), (33, 100)]
    pictures = [squares.draw(rng, i + 1) for i in range(4)]
    if kind == "idefics3":
        for name, seed, splits in ("one", 0, 1), ("split", 0, 2), ("teacher", 1, 2):
            make_model(path, kind, name, seed, splits, noise=0.1)
    else:
        try:
            import torchvision  # noqa: F401
        except Exception as error:  # a build for another torch raises a RuntimeError
            pytest.skip(f"torchvision: {str(error)[:200]}")
        make_model(path, kind, "split", 0, 4, noise=0.09)
        pictures = [p.resize(size) for p, size in zip(pictures, sizes, strict=True)]
        pictures[1] = ImageOps.invert(pictures[1])
    for name, picture in zip("abcd", pictures, strict=True):
        picture.save(path / f"{name}.png")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("vision"), "idefics3")


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory) -> Path:
    if request.param == "idefics3":
        return request.getfixturevalue("folder")
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


def config_of(folder: Path):
    return model.config_of(str(folder / "split"))


def read(folder: Path, *rows: dict, most: int = 0) -> list[data.Row]:
    """Rows by the shipped way, from a file beside the pictures. most: --max_image_tokens."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = str(folder / "split")
    make = partial(pictured.make_row, make=data.make_row, folder=pictured.folder_of(
        f"{folder}/rows.jsonl"), eyes=kinds.load_eyes(
            "x", source, model.config_of(source), 0, most))
    tokenizer = inputs.load_tokenizer("x", source)
    return data.load(f"{folder}/rows.jsonl", tokenizer, data.DataArgs(), make=make)[0]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


# ---- rows ----

@pytest.mark.parametrize("row", [
    {"prompt": "How many?", "image": "a.png"}, {"prompt": "<image>How many?", "images": ["c.png"]},
    {"problem": "First <image>, then\n<image>?", "images": ["a.png", "d.png"], "answer": "3"},
    {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "x<image>"}],
     "image": "d.png"}, {"prompt": "no picture"}, {"prompt": "none", "image": None}])
def test_ids_pixels_and_positions_are_those_of_transformers(family, row):
    """The same text and pictures through the model's own processor."""
    from transformers import AutoProcessor
    ours, processor = read(family, row)[0], AutoProcessor.from_pretrained(family / "split")
    names = pictured.values_of(row)
    images = {"images": [[Image.open(family / name) for name in names]]} if names else {}
    theirs = processor(text=[ours.prompt], return_tensors="pt", **images)
    assert ours.prompt_ids == theirs["input_ids"][0].tolist() and not ours.finished
    if not names:
        return
    seen, (pixels, *grids) = ours.pictures, ours.pictures.eyes.pixels(ours.pictures.sources)
    assert seen.sources == tuple(str(family / name) for name in names)
    assert seen.short_ids.count(seen.eyes.token) == len(names)
    assert torch.equal(pixels, theirs["pixel_values"].view_as(pixels))
    if grids:
        assert torch.equal(*grids, theirs["image_grid_thw"])
        positions, _ = model.skeleton(str(family / "split")).model.get_rope_index(
            theirs["input_ids"], theirs["mm_token_type_ids"], theirs["image_grid_thw"])
        assert seen.positions == positions[:, 0].tolist()


@pytest.mark.parametrize("size", [(1, 1), (300, 7), (7, 300), (33, 32), (64, 64), (500, 400)])
@pytest.mark.parametrize("least, most", [(0, 0), (9, 0), (0, 30), (9, 30)])
def test_a_picture_of_any_size_has_a_place_for_each_feature(family, size, least, most):
    tiles, source = config_of(family).model_type == "idefics3", str(family / "split")
    least = 0 if tiles else least  # all are scaled to one longest edge
    eyes = kinds.load_eyes("x", source, config_of(family), least, most)
    try:
        ids = eyes.ids_of(size)
    except SettingsError as error:  # long and thin
        assert most and re.search("tokens at its smallest, more than --max_im", str(error))
        return
    (pixels, *_), n = eyes.pixels([png(Image.new("RGB", size, "red"))]), ids.count(eyes.token)
    assert n == (4 * len(pixels) if tiles else len(pixels) // 4) and (tiles or n == len(ids))
    assert pixels.nbytes == eyes.bytes * n and least <= n and (not most or len(ids) <= most)


def test_bytes_structs_and_modes_are_taken(folder):
    eyes = Eyes(str(folder / "one"), model.config_of(str(folder / "one")))
    image = Image.open(folder / "a.png")
    for value in (png(image), {"bytes": png(image), "path": None}, {"bytes": None, "path": "a.png"},
                  "a.png"):
        source = pictured.source_of(value, folder)
        assert torch.equal(*eyes.pixels([source]), *eyes.pixels([str(folder / "a.png")]))
    for mode in ("L", "RGBA", "P", "1", "I;16", "CMYK"):
        made = io.BytesIO()
        Image.new(mode, (40, 30)).save(made, "tiff")
        assert eyes.pixels([made.getvalue()])[0].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "1", "CMYK"])
def test_a_picture_is_what_the_server_of_the_exported_model_makes_of_it(mode, folder):
    """With any opacity; in a palette, and in three channels, with a color that stands for none: of
    three channels vLLM shows it."""
    from vllm.multimodal.media.image import ImageMediaIO
    image, made = Image.open(folder / "a.png").convert("RGBA"), io.BytesIO()
    image.putalpha(Image.effect_noise(image.size, 90))
    image = image.convert("RGB" if mode in ("P", "CMYK") else "RGBA").convert(mode)
    clear = {"transparency": image.getpixel((0, 0))} if mode in ("P", "RGB") else {}
    image.save(made, "tiff" if mode == "CMYK" else "png", **clear)
    theirs = ImageMediaIO().load_bytes(made.getvalue()).media
    assert opened(made.getvalue()).tobytes() == theirs.tobytes()
    plain = Image.open(made).convert("RGB").tobytes()
    assert (theirs.tobytes() == plain) == (mode not in ("RGBA", "LA", "P"))


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_is_upright_as_transformers_opens_it(folder, tmp_path, turn):
    """A camera stores what it saw, and beside it in EXIF how it was held."""
    from transformers.image_utils import load_image
    exif, stored = Image.Exif(), Image.open(folder / "a.png").resize((60, 40)).crop((0, 0, 50, 40))
    exif[0x0112] = turn  # Orientation
    stored.save(tmp_path / "held.png", exif=exif)
    theirs = load_image(str(tmp_path / "held.png"))
    for source in str(tmp_path / "held.png"), (tmp_path / "held.png").read_bytes():
        ours = opened(source)
        assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
    assert (ours.tobytes() == stored.convert("RGB").tobytes()) == (turn == 1)


def broken(folder: Path, name: str) -> None:
    whole = png(Image.effect_noise((64, 64), 50))
    made = {"cut.png": whole[:len(whole) // 2], "text.png": b"no picture", "empty.png": b"",
            "none.png": whole[:16] + b"\0" * 8 + whole[24:]}  # its header says 0 x 0
    if name in made:
        (folder / name).write_bytes(made[name])
    if name == "huge.png":
        Image.new("1", (10_000, 10_000)).save(folder / name)


@pytest.mark.parametrize("row, words", [
    *(({"prompt": "q", "image": name}, f"a picture must be a whole .* and .*{name} cannot be op")
      for name in ("cut.png", "text.png", "empty.png", "none.png", "huge.png")),
    ({"prompt": "q", "image": "gone.png"}, "there is no picture .*gone.png"),
    ({"prompt": "q", "image": 3}, "a picture must be a path beside the data, the bytes .*not 3"),
    ({"prompt": "q", "image": "https://x.org/a.png"}, "there is no picture .*x.org/a.png"),
    ({"prompt": "<image><image>", "image": "a.png"}, "has 2 places <image> and the row 1 pict"),
    ({"prompt": "<image>", "images": ["a.png", "b.png"]}, "has 1 places <image> and the row 2"),
    ({"prompt": "see <image>"}, "has 1 places <image> and the row 0 pictures")])
def test_a_bad_row_is_one_sentence_with_its_number(folder, row, words):
    broken(folder, str(row.get("image")))
    with pytest.raises(SettingsError, match=f"rows.jsonl, row 2: .*{words}"):
        read(folder, {"prompt": "q", "image": "a.png"}, row)


def test_a_limit_scales_every_picture_down(folder):
    row = {"prompt": "q", "image": "a.png"}
    free, same, small = (read(folder, row, most=most)[0] for most in (0, 90, 20))
    assert free.prompt_ids == same.prompt_ids
    eyes = small.pictures.eyes
    assert len(small.pictures.places) == 4 and len(free.pictures.places) == 20
    assert eyes.pixels(small.pictures.sources)[0].shape == (1, 3, 32, 32)
    with pytest.raises(SettingsError, match="--max_image_tokens must be at least 7, .*got 6"):
        read(folder, row, most=6)


# ---- settings ----

@pytest.mark.parametrize("flags, words", [
    (dict(reply="x.py:Y"), "--reply is for models that read text alone"),
    (dict(carry=1.0, engine_correction="truncate"), "--carry is for models that read text alone"),
    (dict(train_vision=True, lora_rank=4), "--train_vision trains all weights of the tower"),
    (dict(train_vision=True), None), (dict(lora_rank=4), None), (dict(max_image_tokens=9), None)])
def test_settings_that_are_refused(folder, flags, words):
    shape = shape_from(model.skeleton(str(folder / "one")))
    args = changed(grpo.Args(), **dict(lr=1e-3) | flags)
    found = plan.problems(args, 1, shape=shape)
    assert len(found) == bool(words) and (not words or words in found[0]), found


def test_what_stands_for_a_picture_begins_with_nothing_else(folder):
    """Some tokenizers put a token before each text."""
    eyes = Eyes(str(folder / "one"), model.config_of(str(folder / "one")), 0)
    ids = eyes.ids_of((64, 64))
    begin_with(eyes.processor.tokenizer, "<image>")
    assert eyes.ids_of((64, 64)) == ids


PARTS = """{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image'
else '[' ~ p.text ~ ']' }}{% endfor %}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"""


def test_a_template_that_asks_for_parts_gets_them(folder):
    source = str(folder / "one")
    tokenizer = inputs.load_tokenizer("x", source)
    tokenizer.chat_template = PARTS
    make = partial(pictured.make_row, 0, name="x", tokenizer=tokenizer,
                   marks=texts.marks_of(tokenizer),
                   eyes=kinds.load_eyes("x", source, model.config_of(source)), folder=folder)
    columns = {"prompt": "1 <image> 2", "image": "a.png"}
    row = make(columns, args=data.DataArgs(), make=data.make_row)
    assert row.prompt == "[1 ]<image>[ 2]"
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    targets = pytest.importorskip("parts.sft.targets", reason="its rows are learned")
    row = make(columns | {"completion": "3"}, args=data.DataArgs(),
               make=partial(targets.make_row, eos_ids=ends))
    assert tokenizer.decode(row.target[0]) == "[3]<|im_end|>" and row.prompt == "[1 ]<image>[ 2]"


@pytest.mark.parametrize("kind", kinds.FAMILIES)
def test_the_tower_is_measured_on_its_layers(kind):
    """What a layer makes of a patch: q, k, v, what attention gives (4 hidden), and of the MLP its
    inner columns, twice with a gate (Qwen2.5-VL), and hidden."""
    config = AutoConfig.for_model(kind)
    config.get_text_config().pad_token_id = None  # Idefics3's is beyond its vocabulary
    with torch.device("meta"):
        tower = shape_from(AutoModelForImageTextToText.from_config(config)).tower
    c = config.vision_config
    hidden = c.embed_dim if kind == "qwen2_vl" else c.hidden_size
    inner = {"qwen2_vl": 4 * hidden, "qwen2_5_vl": 2 * getattr(c, "intermediate_size", 0)}.get(
        kind, getattr(c, "intermediate_size", 0))
    assert (tower.hidden, tower.made) == (hidden, 5 * hidden + inner)
    assert tower.deep == (3 if kind == "qwen3_vl" else 0)
    assert tower.patches == (config.scale_factor if kind == "idefics3" else 2) ** 2


@pytest.mark.parametrize("part, name, value", [
    ("processor", "do_pad", False), ("processor", "do_resize", False),
    ("vision_config", "image_size", 64), ("", "scale_factor", 1)])
def test_a_processor_that_is_not_the_models_is_refused(folder, tmp_path, part, name, value):
    source = str(shutil.copytree(folder / "split", tmp_path / "split"))
    config, path = model.config_of(source), tmp_path / "split/processor_config.json"
    if part == "processor":
        found = json.loads(path.read_text())
        found["image_processor"][name] = value
        path.write_text(json.dumps(found))
    else:
        setattr(config.vision_config if part else config, name, value)
    with pytest.raises(SettingsError, match="its tiles or their tokens are not the model's, or its "
                       "do_pad or do_resize is off"):
        kinds.load_eyes("x", source, config)


@pytest.mark.parametrize("teacher, words", [
    ("one", "must see as --model tiny"), ("text", "must see as --model tiny"),
    ("blind", "has no processor for pictures")])
def test_a_teacher_must_see_as_the_model_does(folder, teacher, words):
    """It gets the same ids and the same pixels."""
    distill = pytest.importorskip("parts.distill.distill", reason="it has the teacher")
    source = str(folder / "split")
    lm, args = model.skeleton(source), changed(distill.Args(), teacher=teacher)
    kinds.find_eyes(args, lm.config, source, str(folder / "teacher"))
    Qwen2Config(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder / "text")
    AutoConfig.from_pretrained(source).save_pretrained(folder / "blind")
    with pytest.raises(SettingsError, match=f"--teacher {teacher} {words}"):
        kinds.find_eyes(args, lm.config, source, str(folder / teacher))


@pytest.mark.parametrize("flags", [dict(train_vision=True), dict(max_image_tokens=64)])
def test_a_text_model_takes_no_flag_of_pictures_and_no_picture(folder, flags):
    args = changed(grpo.Args(), lr=1e-3, **flags)
    found = plan.problems(args, 1, shape=shape_of("tiny"))
    assert len(found) == 1 and re.search("needs a model that sees|--model sees no pict", found[0])
    read(folder, {"prompt": "q", "image": "a.png"})
    tokenizer = tiny.make_tokenizer()  # a fresh clone has no runs/tiny
    for part in tokenizer, tiny.make_model(tokenizer):
        part.save_pretrained(folder / "plain")
    args = changed(grpo.Args(), data=f"{folder}/rows.jsonl", max_tokens=64,
                        model=f"{folder}/plain")
    with pytest.raises(SettingsError, match="row 1.*has no place for image. Would work: rows"):
        inputs.read_files(args, 1, 1)


def test_the_plan_counts_the_tower_once_and_its_moments_if_it_is_trained(family):
    lm = model.skeleton(str(family / "split"))
    shape, moments, kind = shape_from(lm), [], lm.config.model_type
    assert shape.params == sum(p.numel() for p in lm.parameters())
    tower = sum(p.numel() for part in family_of(lm.config).parts(lm)[1:] for p in part.parameters())
    layer = lm.model.get_submodule(f"{LAYERS[kind][0]}.0")
    assert (shape.tower.params, shape.tower.layer) == (
        tower, sum(p.numel() for p in layer.parameters()))
    for trained in False, True:
        args = changed(grpo.Args(), train_vision=trained)
        parts = seeing.SeeingMemory(plan.Plan(args, 1, 8, 0), shape, None).parts
        moments.append(parts["moments"][1])
        assert parts["weights"][1] == 4 * shape.params
    assert moments[1] - moments[0] == 8 * tower


# ---- the trainer ----

def fabricate(folder: Path) -> list[Sample]:
    """Equal ids and other pictures; a prompt without one, before one with two. Some completions
    have the token of a picture, which a policy may sample."""
    rng = np.random.default_rng(0)
    found = read(folder, *({"prompt": "q", "image": f"{name}.png"} for name in "aba"),
                 {"prompt": "text alone"},
                 {"prompt": "<image> or <image>?", "images": ["c.png", "d.png"]})
    assert found[0].prompt_ids == found[1].prompt_ids
    samples = []
    for i, row in enumerate(found):
        for g in range(GROUP):
            ids = rng.integers(3, 324, rng.integers(1, COMPLETION + 1)).astype(np.int32)
            if g == 1:
                ids[-1] = ids[0] = found[0].pictures.eyes.token
            samples.append(Sample(data.Prompt(i, row), Completion(
                ids, np.full(len(ids), -6.0, np.float32), False), "t", Score(
                float(rng.random()), {"exact": 0.0}, None)))
    return samples


def naive(lm, sample: Sample):
    """log π(. | prefix) at each token of a completion, by transformers' parts, one row alone:
    (T, V)."""
    row, ids = sample.prompt.row, torch.tensor(sample.completion.ids).long()
    tokens, given = torch.tensor([row.prompt_ids + ids.tolist()]), {}
    x, spots = lm.get_input_embeddings()(tokens), torch.zeros(tokens.shape, dtype=torch.bool)
    if pictured.pictures_in(row):
        pixels, *grids = row.pictures.eyes.pixels(row.pictures.sources)
        pixels = pixels.to(x.dtype) if grids else pixels.to(x.dtype).unsqueeze(0)
        found = lm.model.get_image_features(pixels, *grids)
        spots[:, row.pictures.places] = True
        features = found.pooler_output if grids else found.pooler_output.flatten(0, 1)
        x = x.masked_scatter(spots.unsqueeze(-1), torch.cat([*features]).view(-1, x.shape[-1]))
        if grids:
            given = {"position_ids": lm.model.get_rope_index(
                tokens, spots.int(), image_grid_thw=grids[0])[0]}
        if hasattr(found, "deepstack_features"):
            given |= {"visual_pos_masks": spots, "deepstack_visual_embeds": [
                torch.cat([*part]) for part in found.deepstack_features]}
    text = family_of(lm.config).parts(lm)[0]
    hidden = text(inputs_embeds=x, **given).last_hidden_state[0, -len(ids) - 1:-1]
    logits = lm.lm_head(hidden)
    logits[:, lm.config.image_token_id] -= 100  # never sampled
    return logits.log_softmax(-1)


def in_float64(source: Path):
    from transformers import AutoModelForImageTextToText
    lm = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float64)
    for part in family_of(lm.config).parts(lm):
        float64.widen(part)
    return lm


def expected(folder: Path, samples, trains: bool) -> dict[str, torch.Tensor]:
    """The gradient of GRPO's loss, Σ -A log π / all tokens, a row at a time: {name: gradient}."""
    lm = in_float64(folder / "split")
    rewards = np.array([s.score.total for s in samples]).reshape(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten()
    tokens = sum(len(s.completion.ids) for s in samples)
    for advantage, sample in zip(advantages, samples, strict=True):
        ids = torch.tensor(sample.completion.ids).long().unsqueeze(-1)
        (-advantage * naive(lm, sample).gather(-1, ids).sum() / tokens).backward()
    frozen = () if trains else ("model.vision_model.", "model.connector.", "model.visual.")
    return {name: p.grad for name, p in lm.named_parameters() if not name.startswith(frozen)}


class Spy:
    """It keeps the gradient of its last step, by name, and whole."""

    def step(self, lr):
        self.gradient = {name.removeprefix("lm."): model.whole(p.grad).clone()
                         for name, p in self.parameters.items()}
        return super().step(lr)


def policy_of(folder: Path, world, args):
    """In float64: a Spy."""
    own = model.kinds(args, config_of(folder))
    module = float64.build(own.logprob_model, str(folder / "split"), world, args)
    return type("Spy", (Spy, own.policy), {})(module, world, args)


def updates(world, folder: Path) -> list:
    """[(gradient, parameters afterwards)] of two steps, for frozen towers and trained ones, and
    budgets from one longest row to everything."""
    found, samples = [], fabricate(folder)
    for trains, budget, again in ((False, 1000, False), (True, 1000, False), (True, 90, True),
                                  (False, 90, False)):
        args = changed(grpo.Args(), group=GROUP, max_tokens=COMPLETION, dtype="float64",
                            update_tokens=budget, checkpointing=again, max_grad_norm=0.0,
                            train_vision=trains)
        policy = policy_of(folder, world, args)
        grpo.learn(args, world, policy, samples, lr=1e-3)
        first = policy.gradient
        grpo.learn(args, world, policy, samples, lr=1e-3)
        after = {name: model.whole(p.detach()).clone()
                 for name, p in policy.module.lm.named_parameters()}
        found.append((first, after))
    return found


def flat(named: dict) -> torch.Tensor:
    return torch.cat([named[name].flatten() for name in sorted(named)])


def test_the_update_is_the_formula_on_any_ranks_and_budgets(family):
    samples = fabricate(family)
    formula = {trains: expected(family, samples, trains) for trains in (False, True)}
    runs = {size: results(size, updates, family, timeout=400)[0] for size in (1, 2, 3)}
    for size, found in runs.items():
        for (gradient, after), trains in zip(found, (False, True, True, False), strict=True):
            assert gradient.keys() == formula[trains].keys()
            assert difference(flat(gradient), flat(formula[trains])) < 1e-12, (size, trains)
            one = runs[1][int(trains)][1]
            assert difference(flat(after), flat(one)) < 1e-12
    start, moved = (flat(a) for a in (runs[1][0][1], runs[1][1][1]))
    assert difference(start, moved) > 1e-4  # the tower learned


def test_two_rows_with_equal_pictures_share_a_prompt_and_others_do_not(folder):
    samples, row = fabricate(folder)[:4], {"prompt": "q", "image": "a.png"}
    rows = read(folder, row, row, row | {"image": "b.png"}, row)
    for sample, same in zip(samples, rows, strict=True):
        sample.prompt = data.Prompt(0, replace(same, index=0))
    assert [owner for owner, _, _ in Batch(samples).sizes] == [0, 0, 2, 3]


def sharded(world, folder: str) -> list[str]:
    policy, args = families.trainer_of(folder, world), grpo.Args()
    module, own = policy.module, model.kinds(args, policy.module.lm.config)
    export_model(policy, folder, f"{folder}-out")
    critic = own.critic(model.build(own.value_model, folder, world, args), world, args)
    micro, = Batch(fabricate(Path(folder).parent)).micros(world, [*range(15)], 999, "values")
    assert critic.values(micro).shape == micro.targets.shape
    return [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]


def test_text_and_vision_layers_are_sharded_and_exported(family):
    """The first list of layers in the model is the tower's."""
    assert results(2, sharded, str(family / "split"))[0] == ["", *(
        f"lm.model.{part}.{i}" for part in LAYERS[config_of(family).model_type] for i in (0, 1))]
    ours, theirs = (load_file(family / name / "model.safetensors")
                    for name in ("split-out", "split"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapters_are_in_the_text_model_alone(family):
    lora = pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    lm = model.skeleton(str(family / "split"))
    lora.put_in(lm, lora.LoraArgs(4), torch.float32)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert trained and all(f"model.{LAYERS[lm.config.model_type][1]}" in name for name in trained)


# ---- the engine ----

def look(folder: Path, name: str, tp: int, lora_rank: int) -> dict:
    """What vision_worker.py found on two ranks."""
    out = Path(f"{folder}/out {name} {tp} {lora_rank}")
    script(Path(__file__).with_name("vision_worker.py"), folder, out, name, tp, lora_rank, ranks=2)
    return pickle.loads(out.read_bytes())


def all_see(found: dict, positions: bool = True) -> None:
    """After each of three loads, in which the tower changed too; two pictures in a row; rows with
    equal ids; completions that have the token of a picture, which no engine samples."""
    assert found["sampled"] == 0
    assert max(found["gaps"] + found["plain"]) < families.ROUNDINGS
    assert math.isfinite(found["swapped"]) and found["swapped"] > 1
    assert (found["line"] > 1) == positions
    # vLLM makes still more of ids that are expanded already, and says nothing.
    assert "engine and trainer differ in the ids of a prompt with pictures" in found["expanded"]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_engine_trainer_and_transformers_see_the_same(family, tp):
    found, tiles = look(family, "split", tp, 0), config_of(family).model_type == "idefics3"
    all_see(found, positions=not tiles)
    if tiles:  # without the reset an old picture is missed
        assert "cache miss" in found["stale"]


def test_a_processor_with_another_chat_template_than_the_tokenizer_is_refused(folder, tmp_path):
    """vllm serve takes the processor's."""
    split = shutil.copytree(folder / "split", tmp_path / "split")
    lm = model.skeleton(str(split))
    files = inputs.ModelFiles(None, inputs.load_tokenizer("x", str(split)), str(split), lm)
    kinds.check_template("x", files)
    text = files.tokenizer.chat_template
    (split / "chat_template.jinja").unlink()
    (split / "chat_template.json").write_text(json.dumps({"chat_template": "Other" + text}))
    with pytest.raises(SettingsError, match="no chat_template.json"):
        kinds.check_template("x", files)


# ---- a resume

def test_rows_of_other_pictures_are_other_rows(tmp_path):
    test_resume.another_row(tmp_path, kind=pictured.PicturedRow,
                            pictures=SimpleNamespace(sources=(b"other",)))


def test_another_picture_under_the_same_name_is_another_row(tmp_path):
    path, found = tmp_path / "a.png", []
    for content in b"a" * 300_000, b"b" + b"a" * 299_999, b"a" * 299_999 + b"b", b"a" * 300_001:
        path.write_bytes(content)
        rows = test_resume.rows(pictured.PicturedRow,
                                pictures=SimpleNamespace(sources=(str(path),)))
        found += checkpoint.row_digests(rows)[1][1:]
    assert len(set(found)) == len(found) == 4


# ---- ./run.sh vision

@pytest.mark.parametrize("line, words, graded", [
    ("vision", "grpo.py --model runs/squares-sft/model --lr 5e-4", True),
    ("vision:qwen2_5_vl", "grpo.py --model runs/squares-sft-qwen2_5_vl/model", True),
    ("vision --data mine.jsonl", "--data mine.jsonl", False)])
def test_run_sh_gives_the_job_its_flags_and_its_grade(tmp_path, line, words, graded):
    pytest.importorskip("parts.sft.sft", reason="the job begins with it")
    test_newcomer.gives(
        tmp_path, line, "", words, graded, "squares/model/processor_config.json",
        "squares/qwen2_5_vl/processor_config.json", "squares-sft/model/x",
        "squares-sft-qwen2_5_vl/model/x")


@pytest.mark.parametrize("name", ["me@lab.org", "a:b", "a b", "with:c@d", "@", "x@train"])
def test_a_path_may_hold_what_a_split_begins_with(tmp_path, name):
    (tmp_path / name).mkdir()
    spec = test_rows.store(tmp_path / name, "jsonl", [{"prompt": "q"}])
    assert pictured.folder_of(spec) == pictured.folder_of(f"{spec}.py:rows") == tmp_path / name
