"""Qwen-VL: what is seen is what transformers' processor and model see, in trainer and engine.
Their processor needs torchvision, here too."""
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import data
import grpo
import learning
import model
import model_files
import plan
import ranks
from batch import Batch, Micro
from data import Row
from errors import SettingsError
from examples import squares
from model_files import shape_from
from parts.pictures import kinds, seeing
from parts.pictures.engine import HELD, parts_of
from parts.pictures.rows import PicturedRow, Pictures
from rollout import Request
from test_vision import all_see, config_of, fabricate, look, make_folder, naive, read
from tracked import ROOT

KINDS = [kind for kind in kinds.FAMILIES if kind.startswith("qwen")]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


# ---- rows ----

def test_a_picture_whose_side_is_too_long_is_named_with_its_row(folder):
    Image.new("RGB", (2010, 10)).save(folder / "thin.png")
    Image.new("RGB", (1500, 10)).save(folder / "long.png")
    good, thin, long = ({"prompt": "q", "image": f"{name}.png"} for name in ("a", "thin", "long"))
    with pytest.raises(SettingsError, match="rows.jsonl, row 2: a picture of "
                       "2,010 x 10 pixels has a side that is more than 200 times the other"):
        read(folder, good, thin)
    read(folder, good, long)
    with pytest.raises(SettingsError, match="row 2.*1,500 x 10 pixels has .* tokens at its small"):
        read(folder, good, long, most=16)


def test_limits_that_leave_no_size_are_refused(folder):
    for least, most, words in (20, 10, "at least 20 and at most 10"), (0, 3, "at least 4 and at"):
        with pytest.raises(SettingsError, match=words):
            kinds.load_eyes("x", str(folder / "split"), config_of(folder), least, most)


def test_a_processor_of_another_model_is_refused(folder):
    config = config_of(folder)
    config.vision_config.patch_size = 16
    with pytest.raises(SettingsError, match="sizes of a patch are not the model's"):
        kinds.load_eyes("x", str(folder / "split"), config)


def test_equal_pictures_of_a_group_count_once_in_a_call(folder):
    """The parts of a call are cut by the tokens that pictures have, not by the most."""
    rows = read(folder, *({"prompt": "q", "image": f"{name}.png"} for name in "ab"))
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
        kinds.load_eyes("x", "nowhere", config)


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


def test_a_row_is_what_transformers_own_forward_makes_of_it(folder):
    """With nothing of ours: its processor, positions, places and deepstack."""
    from transformers import AutoProcessor
    row = read(folder, {"prompt": "<image> or <image>?", "images": ["c.png", "d.png"]})[0]
    sample = fabricate(folder)[0]
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
    eyes = [kinds.load_eyes("x", str(folder / name), lm.config) for name in ("hub", "split")]
    assert eyes[0].size == eyes[1].size == {"shortest_edge": 1024, "longest_edge": 128**2}


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
    """The words of its command."""
    page = (ROOT / "parts/pictures/geometry3k.sh").read_text()
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
    ranks.script(*words, ranks=2, cwd=folder)
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
    "ppo.py --train_vision", "ppo.py", "grpo.py --lora_rank 4 --lora_sync adapter",
    "parts/sft/sft.py", "parts/sft/sft.py --train_vision", "grpo.py --temperature 0.7"])
def test_scripts_train_on_pictures(folder, words):
    script, *flags = words.split()
    rows = [{"prompt": "q", "image": f"{'abcd'[i % 4]}.png", "answer": str(i)} for i in range(8)]
    (folder / "shown.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = [] if script.endswith("sft.py") else ["--reward", "exact", "--group", "2"]
    found = run_script(
        folder, str(ROOT / script), *flags, *reward, "--model", str(folder / "split"), "--data",
        "shown.jsonl", "--batch", "4", "--steps", "2", "--max_tokens", "12", "--lr", "1e-3")
    assert all(row.get("rollout/logprob_gap_max", 0) < 1e-4 for row in found)
    run = max((folder / "runs").glob("*/model"), key=lambda path: path.stat().st_mtime)
    AutoModelForImageTextToText.from_pretrained(run)


# ---- the engine ----

@pytest.mark.slow
@pytest.mark.parametrize("name, lora_rank", [("split", 4), ("hub", 0)])
def test_with_adapters_and_as_the_hub_has_it_all_see_the_same(folder, name, lora_rank):
    if lora_rank:
        pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    if name == "hub":
        if config_of(folder).model_type == "qwen3_vl":
            pytest.skip("split/ is as the hub has it")
        hub_like(folder)
    all_see(look(folder, name, 1, lora_rank))
