"""What is seen is what transformers' processor and model see, in trainer and engine. Qwen's
processor needs torchvision, here too."""
import base64
import io
import json
import random
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForImageTextToText

import data
import fakes
import families
import grpo
import memory
import model
import plan
import preflight
import ranks
from batch import Batch, Sample
from checkpoint import export_model
from data import Prompt
from errors import SettingsError
from examples import squares, tiny
from fakegpu import GPU, learned, on_gpus
from families import ROOT
from flags import parse_words
from learning import difference
from model_files import architecture_of, shape_from
from parts.pictures import kinds, seeing
from parts.pictures import rows as pictured
from parts.pictures.engine import HELD, compare_ids, parts_of
from parts.pictures.eyes import opened
from seen import (
    GROUP,
    Transformers,
    config_of,
    engine_run,
    fabricate,
    make_folder,
    read,
)
from shapes import shape_of
from tables import table
from tools import float64
from updates import Spy, short

ROW = {"prompt": "q", "image": "a.png"}


@pytest.fixture(scope="module", params=kinds.ARCHITECTURES)
def family(request, tmp_path_factory) -> Path:
    """The folder of each family's model and pictures."""
    if request.param != "idefics3":
        pytest.importorskip("torchvision", exc_type=Exception)
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("vision"), "idefics3")


def png(image: Image.Image, kind: str = "png", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# ---- engine, trainer, transformers

@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_engine_trainer_and_transformers_see_the_same(family, tp):
    """On two ranks, after each of three loads, in which the tower changed too: rows with equal ids
    and other pictures, two pictures in a row, a row without one, completions with the token of a
    picture, which no engine samples."""
    found = ranks.results(2, engine_run, family, tp)[0]
    assert len(found) == 3 and np.max(found) < families.ROUNDINGS, found


def updates(world, folder: Path) -> list:
    """The gradients of a frozen tower and of a trained one, with two budgets; which modules are
    sharded; how many values a critic that sees gives."""
    found, samples, source = [], fabricate(folder), f"{folder}/model"
    for trains, budget in (False, 120), (True, 1000), (True, 120):
        args = fakes.args(group=GROUP, max_tokens=10, dtype="float64", update_tokens=budget,
                          checkpointing=budget == 120, max_grad_norm=0.0, train_vision=trains)
        own = model.kinds(args, config_of(folder))
        module = float64.build(own.logprob_model, source, world, args)
        policy = type("Spied", (Spy, own.policy), {"gradients": found})(module, world, args)
        if not trains:
            export_model(policy, source, f"{folder}/same")
        grpo.learn(args, world, policy, samples, lr=1e-3)
    args = grpo.Args()
    critic = own.critic(model.build(own.value_model, source, world, args), world, args)
    micro = Batch(samples).micro_batches(world, [*range(len(samples))], 400, "values")[0]
    return [found, [name for name, part in module.named_modules() if isinstance(part, FSDPModule)],
            critic.values(micro).shape == micro.targets.shape]


def test_the_update_is_the_formula_on_any_ranks_and_budgets(family):
    """Σ -A log π / all tokens, by transformers in float64, a row at a time; text and tower are
    sharded, and an export has the files' names and values, bit for bit."""
    samples, theirs = fabricate(family), Transformers(f"{family}/model")
    rewards = np.array([s.reward for s in samples]).reshape(-1, GROUP)
    tokens = sum(len(s.ids) for s in samples)
    for A, s in zip((rewards - rewards.mean(1, keepdims=True)).flatten(), samples, strict=True):
        (-A * theirs.logprobs(s).sum() / tokens).backward()
    tower = tuple(f"model.{name}." for name in architecture_of(theirs.lm.config).own.TOWER)
    for size in 1, 2:
        gradients, sharded, values = ranks.results(size, updates, family, timeout=400)[0]
        for found, trains in zip(gradients, (False, True, True), strict=True):
            right = {short(name): p.grad for name, p in theirs.lm.named_parameters()
                     if trains or not name.startswith(tower)}
            assert found.keys() == right.keys()
            assert difference(*(torch.cat([g[name].flatten() for name in sorted(right)])
                                for g in (found, right))) < 1e-12, (size, trains)
        assert values and len(sharded) == 1 + 2 + 2
    ours, files = (load_file(family / name / "model.safetensors") for name in ("same", "model"))
    assert ours.keys() == files.keys() and all(torch.equal(ours[n], files[n]) for n in files)


@pytest.mark.parametrize("flags", [
    dict(cpu_offload=True), dict(offload=("reference",), kl_loss_coef=0.1)], ids=str)
def test_a_step_mixes_no_devices(flags, tmp_path):
    """On tensors without numbers (tests/fakegpu.py). A tower's rotary frequencies are a buffer,
    which most families leave where it is; without pictures the tower runs too."""
    folders = [str(tmp_path / kind) for kind in kinds.ARCHITECTURES]
    for folder, kind in zip(folders, kinds.ARCHITECTURES, strict=True):
        tokenizer = tiny.make_tokenizer()
        tokenizer.add_tokens(squares.MARKS + squares.QWENS, special_tokens=True)
        AutoModelForImageTextToText.from_config(
            squares.config_of(kind, tokenizer)).save_pretrained(folder)
    for found in on_gpus(learned, [(4, folder, "grpo", flags) for folder in folders]):
        assert isinstance(found, dict), found
        assert found["buffers"] <= {(GPU, "float32"), (GPU, "int64")}
        assert found["engine"] == {(GPU, "bfloat16")}


def test_the_plan_counts_the_tower_once_and_its_moments_if_it_is_trained(family):
    """What a layer makes of a patch is q, k, v, what attention gives, and of the MLP its inner
    columns, twice with a gate (Qwen2.5-VL), and hidden: 64 and 128 in these models."""
    lm, moments = model.skeleton(f"{family}/model"), []
    shape, kind = shape_from(lm), lm.config.model_type
    towers = architecture_of(lm.config).stacks(lm)[1:]
    tower = sum(p.numel() for one in towers for p in one.parameters())
    assert (shape.params, shape.tower.params) == (sum(p.numel() for p in lm.parameters()), tower)
    sizes = vars(shape.tower)
    assert [sizes[name] for name in ("hidden", "patches", "layers", "deep", "made")] == [
        64, 4, 2, kind == "qwen3_vl", 5 * 64 + 128 * (1 + (kind == "qwen2_5_vl"))]
    for trained in False, True:
        made = plan.Plan(fakes.args(train_vision=trained), 1, 8, 0)
        moments.append(seeing.SeeingMemory(made, shape, None).parts["moments"][1])
    assert moments[1] - moments[0] == 8 * tower


# ---- pictures and rows

@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "1", "CMYK"])
def test_a_picture_is_what_the_server_of_the_exported_model_makes_of_it(mode, folder):
    """With any opacity, and with a color that stands for none."""
    from vllm.multimodal.media.image import ImageMediaIO
    image = Image.open(folder / "a.png").convert("RGBA")
    image.putalpha(Image.effect_noise(image.size, 90))
    image = image.convert("RGB" if mode in ("P", "CMYK") else "RGBA").convert(mode)
    clear = {"transparency": image.getpixel((0, 0))} if mode in ("P", "RGB") else {}
    made = png(image, "tiff" if mode == "CMYK" else "png", **clear)
    assert opened(made).tobytes() == ImageMediaIO().load_bytes(made).media.tobytes()


def test_a_picture_is_upright_as_transformers_opens_it(tmp_path):
    """A camera stores what it saw, and beside it in EXIF how it was held: eight ways."""
    from transformers.image_utils import load_image
    exif, path = Image.Exif(), tmp_path / "held.png"
    for exif[0x0112] in range(1, 9):
        Image.effect_noise((50, 40), 50).convert("RGB").save(path, exif=exif)
        theirs = load_image(str(path))
        for source in str(path), path.read_bytes():
            assert opened(source).size == theirs.size
            assert opened(source).tobytes() == theirs.tobytes()


MODES = ("RGB", "RGBA", "LA", "P", "L", "1", "CMYK")
STRUCTS = ("bytes", "path", "url", "image", "base64", "data")


def held(rng: random.Random, folder: Path) -> tuple[str, object, np.ndarray]:
    """A picture as a row may hold it, in a column of this name, and its pixels."""
    mode, turned = rng.choice(MODES), rng.randrange(1, 9)
    image = Image.effect_noise((rng.randrange(20, 70), rng.randrange(20, 70)), 90).convert("RGBA")
    image.putalpha(Image.effect_noise(image.size, 90))
    image = image.convert("RGB" if mode in ("P", "CMYK") else "RGBA").convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turned
    file = io.BytesIO()
    image.save(file, "tiff" if mode == "CMYK" else "png", exif=exif)
    raw, path = file.getvalue(), folder / f"{rng.choice(['x', 'a b', 'é', '9j', 'abcd'])}.png"
    path.write_bytes(raw)
    pixels, text = np.asarray(opened(raw)), base64.b64encode(raw).decode()
    texts = [path.name, str(path), path.as_uri(), f"file://{path}", text, f" {text}\n",
             base64.encodebytes(raw).decode(), base64.urlsafe_b64encode(raw).decode().rstrip("="),
             f"data:image/png;base64,{text}", f"data:image/png;name=a.png;base64,{text}"]
    others = [raw, bytearray(raw), memoryview(raw), file, path, Image.open(io.BytesIO(raw)),
              [*raw], pixels.copy(), torch.tensor(pixels).permute(2, 0, 1), pixels[..., 0].copy()]
    value = rng.choice(texts + others)
    if value is others[-1]:
        pixels = np.stack([value] * 3, -1)
    for key in rng.sample(STRUCTS, rng.randrange(3)) + ["image"] * isinstance(value, list):
        value = {key: value, "type": "image_url", "path" if key == "bytes" else "bytes": None}
    column = rng.choice(["image", "images", "messages"])
    if column == "messages":
        part = {"type": "image", "image": value} if rng.random() < 0.5 else {
            "type": "image_url", "image_url": {"url": value}}
        value = [{"role": "user", "content": [part, {"type": "text", "text": "q"}]}]
    elif column == "images" and (rng.random() < 0.8 or not isinstance(value, str)):
        many = [value], (value,), np.array([value, None], dtype=object)[:1]
        value = json.dumps([value]) if isinstance(value, str) and rng.random() < 0.3 else (
            rng.choice(many))
    return column, value, pixels


@pytest.fixture(scope="module")
def looking(folder):
    """The eyes and the tokenizer of a model."""
    source = f"{folder}/model"
    return kinds.load_eyes("x", source, config_of(folder)), preflight.load_tokenizer("x", source)


@pytest.fixture
def row_of(looking, tmp_path, monkeypatch):
    """Makes a row of Python's own columns, with pictures in tmp_path."""
    eyes, tokenizer = looking
    make = partial(pictured.make_row, make=data.make_row, folder=tmp_path, eyes=eyes)

    def row(columns: dict) -> data.Row:
        monkeypatch.setattr(data, "read", lambda *_: ([columns], "own"))
        return data.load("own", tokenizer, data.DataArgs(), make=make)[0][0]
    return row


@pytest.mark.parametrize("seed", range(200))
def test_a_picture_is_the_same_however_a_row_holds_it(tmp_path, seed, row_of):
    """As text, bytes, an object, pixels; in a struct, a list, a message."""
    column, value, pixels = held(random.Random(seed), tmp_path)
    row = row_of({column: value} | ({} if column == "messages" else {"prompt": "q"}))
    assert np.array_equal(np.asarray(opened(*row.pictures.sources)), pixels), (column, value)


DEEP = np.full((9, 9), 9000, np.uint16)
BAD = {"http": "https://x.org/a.png", "bucket": "s3://b/a.png", "hub": "hf://datasets/a/b.png",
       "gone": "gone.png", "folder": ".", "empty": "", "number": 5, "none": [None], "true": True,
       "float": np.zeros((9, 9, 3), np.float32), "16 bit": DEEP, "32 bit": DEEP.astype(np.int32),
       "5 axes": np.zeros((1, 1, 9, 9, 3), np.uint8), "channels": np.zeros((9, 9, 5), np.uint8),
       "no size": np.zeros((0, 9, 3), np.uint8), "cut": base64.b64encode(b"\x89PNG\r\n").decode(),
       "text": base64.b64encode(b"no picture " * 900).decode(), "long": "x/" * 9000,
       "nul": "a\0b", "plain data": "data:image/png,abc", "svg": "<svg></svg>", "deep": [["a.png"]],
       "bad data": "data:image/png;base64,@@@@" * 500, "struct": {"x": 1}, "object": object(),
       "limits": {"image": "a.png", "max_pixels": 5}, "nothing": {"bytes": None, "path": None},
       "pixels": [[[0, 0, 0]] * 9] * 9, "16 bit file": png(Image.fromarray(DEEP)),
       "float file": png(Image.fromarray(DEEP.astype(np.float32)), "tiff"),
       "16 bit image": Image.fromarray(DEEP), "garbage": b"\x89PNG" * 9000,
       "huge image": Image.new("1", (10_000, 10_000)), "film": {"type": "video", "image": "a.png"}}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_picture_is_one_short_sentence_with_a_way_out(name, row_of):
    for column in "image", "images":
        with pytest.raises(SettingsError) as error:
            row_of({"prompt": "q", column: BAD[name]})
        assert re.match(r"own, row 1: .*(Would work: |must be )", str(error.value)), error.value
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_another_picture_is_another_row_and_one_place_has_all_pictures(folder, row_of):
    """A resume compares rows by the files of their pictures."""
    shutil.copy(folder / "a.png", folder / "e.png")
    one, = read(folder, {"prompt": "q", "image": "e.png"})
    before = one.digested(digest)
    shutil.copy(folder / "b.png", folder / "e.png")
    assert one.digested(digest) != before
    picture = Image.new("RGB", (9, 9))
    part = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
    for row in {"image": picture, "images": [picture]}, {"messages": part, "image": picture}:
        with pytest.raises(SettingsError, match="Would work: all of them in images"):
            row_of({"prompt": "q"} | row)


def digest(path: str) -> bytes:
    return Path(path).read_bytes()


def broken(folder: Path) -> None:
    whole = png(Image.effect_noise((64, 64), 50))
    for name, made in {"cut": whole[:len(whole) // 2], "text": b"no picture", "empty": b"",
                       "none": whole[:16] + b"\0" * 8 + whole[24:]}.items():  # it says 0 x 0
        (folder / f"{name}.png").write_bytes(made)
    Image.new("1", (10_000, 10_000)).save(folder / "huge.png")


@pytest.mark.parametrize("row, words", table(r"""
{"prompt": "q", "image": "cut.png"} | must be a whole .* and .*cut.png cannot be opened
{"prompt": "q", "image": "text.png"} | must be a whole .* and .*text.png cannot be opened
{"prompt": "q", "image": "empty.png"} | must be a whole .* and .*empty.png cannot be opened
{"prompt": "q", "image": "none.png"} | must be a whole .* and .*none.png cannot be opened
{"prompt": "q", "image": "huge.png"} | must be a whole .* and .*huge.png cannot be opened
{"prompt": "q", "image": "gone.png"} | there is no picture .*gone.png
{"prompt": "q", "image": 3} | its picture is 3. Would work: a path beside the data, bytes
{"prompt": "<image><image>", "image": "a.png"} | has 2 places <image> and the row 1 pict
{"prompt": "see <image>"} | has 1 places <image> and the row 0 pictures"""))
def test_a_bad_row_is_one_sentence_with_its_number(folder, row, words):
    broken(folder)
    with pytest.raises(SettingsError, match=f"rows.jsonl, row 2: .*{words}"):
        read(folder, ROW, json.loads(row))


def test_a_call_of_the_engine_holds_a_bounded_part_of_the_pixels(folder):
    """Those of a group count once. An engine with other ids ends the run."""
    row, = read(folder, ROW)
    for size, parts in (HELD * 2**29, [12]), (HELD * 2**29 + 1, [3, 3, 3, 3]):
        samples = [Sample(Prompt(0, replace(row, pictures=row.pictures._replace(
            bytes=size, sources=(name,))))) for name in "abab" for i in range(3)]
        assert [len(part) for part in parts_of(samples)] == parts
    samples = [Sample(families.prompt(0, [1, 2]))]
    compare_ids(samples, [SimpleNamespace(prompt_token_ids=[1, 2])])
    with pytest.raises(RuntimeError, match="differ in the ids of a prompt with pictures: 1 and 2"):
        compare_ids(samples, [SimpleNamespace(prompt_token_ids=[1])])


# ---- settings and files

@pytest.mark.parametrize("name, flags, words", table("""
sees | train_vision=True | fine
sees | max_image_tokens=9 | fine
tiny | train_vision=True | --train_vision needs a model that sees pictures
tiny | max_image_tokens=64 | --max_image_tokens needs a model that sees pictures"""))
def test_flags_are_for_models_that_see(refused, folder, name, flags, words):
    shape = shape_of("tiny")
    if name == "sees":
        shape = shape_from(model.skeleton(f"{folder}/model"))
    assert refused("grpo", flags, words, shape)


def load(folder, change=lambda config: None, least=0, most=0):
    """Eyes of a model whose config.json was changed."""
    config = config_of(folder)
    change(config)
    return kinds.load_eyes("x", f"{folder}/model", config, least, most)


def test_what_does_not_fit_a_models_files_is_refused(family, tmp_path):
    """Limits that leave no size; another model's processor; a teacher that sees in another way; a
    processor with another chat template, which vllm serve would take."""
    tiles, source = config_of(family).model_type == "idefics3", f"{family}/model"
    for least, most, words in [(1, 0, "--min_image_tokens must be 0"), (
            0, 6, "--max_image_tokens must be at least 7, .*got 6")] if tiles else [
            (20, 10, "at least 20 and at most 10"), (0, 3, "at least 4 and at most 3")]:
        with pytest.raises(SettingsError, match=words):
            load(family, least=least, most=most)
    with pytest.raises(SettingsError, match="are not the model's"):
        load(family, lambda config: setattr(config.vision_config, "patch_size", 16))
    copy = shutil.copytree(source, tmp_path / "model")
    args = fakes.args()
    args.teacher = "t"
    kinds.find_eyes(args, config_of(family), source, str(copy))
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "text")
    with pytest.raises(SettingsError, match="--teacher t must see as --model"):
        kinds.find_eyes(args, config_of(family), source, str(tmp_path / "text"))
    files = preflight.Inputs(str(copy), preflight.load_tokenizer("x", str(copy)), None, None, None)
    kinds.check_template("x", files)
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "Other"}))
    with pytest.raises(SettingsError, match="no chat_template.json"):
        kinds.check_template("x", files)


# ---- the command of EasyR1

def easyr1() -> list[str]:
    """The words of the command in geometry3k.sh, from grpo.py on."""
    script = (ROOT / "parts/pictures/geometry3k.sh").read_text()
    return shlex.split(script[script.index("grpo.py --model"):].replace("\\\n", ""))


def test_easyr1s_job_passes_the_checks_and_fits_by_the_plan():
    args = parse_words(grpo.Args, "", easyr1()[1:])
    config = AutoConfig.for_model("qwen2_5_vl", text_config=dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064,
        rope_parameters=squares.ROPE | {"mrope_section": [16, 24, 24]}), vision_config=dict(
        hidden_size=1280, intermediate_size=3420, depth=32, num_heads=16, out_hidden_size=3584))
    with torch.device("meta"):
        shape = shape_from(AutoModelForImageTextToText.from_config(config))
    assert shape.params == 8_292_166_656  # as the hub says
    assert not plan.problems(args, 8, 2101, 601, shape)
    planned = memory.Memory(plan.Plan(args, 8, 2101, 601), shape, 80 * memory.GIB)
    assert planned.fits, planned.text()


def test_easyr1s_job_runs_on_rows_of_its_layout(family):
    """On two ranks, as one engine."""
    import pyarrow as pa
    import pyarrow.parquet
    tiles = config_of(family).model_type == "idefics3"
    for split, n in ("train", 8), ("test", 3):
        rows = [{"images": [{"bytes": (family / f"{'abcd'[i % 4]}.png").read_bytes(),
                             "path": None}], "problem": f"<image>Find x if y is {i}.",
                 "answer": "\\frac { 15 } { 2 }"} for i in range(n)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), family / f"{split}.parquet")
    words = easyr1()
    for flag, value in dict(
            model=family / "model", data=family / "train.parquet", batch=4, steps=2,
            eval_data=family / "test.parquet", eval_every=1, minibatches=2, max_tokens=12,
            min_image_tokens=0 if tiles else 9, max_image_tokens=40).items():
        words[words.index(f"--{flag}") + 1] = str(value)
    ranks.script(ROOT / words[0], *words[1:], ranks=2, cwd=family)
    found = [json.loads(line) for line in open(family / "runs/geometry3k/metrics.jsonl")]
    steps = [row for row in found if "reward/format_boxed" in row]
    assert len(steps) == 2 and max(row["rollout/logprob_gap_max"] for row in steps) < 1e-4
    AutoModelForImageTextToText.from_pretrained(family / "runs/geometry3k/model")
