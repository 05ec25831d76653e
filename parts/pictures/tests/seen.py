"""Small models that see, rows with pictures, what transformers' own model and processor make of
them, and how far an engine that sees and the trainer are from that."""
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

import data
import families
import model
import preflight
from batch import Batch, Sample
from checkpoint import export_model
from examples import squares
from learning import sample
from model_files import architecture_of
from parts.pictures import kinds
from parts.pictures import rows as pictured
from tools import float64

GROUP = 3  # completions of a prompt
ROWS = [{"prompt": "q", "image": "a.png"}, {"prompt": "<image>q", "images": ["b.png"]},
        {"prompt": "q", "image": "a.png"}, {"prompt": "text alone", "image": None},
        {"problem": "First <image>, then\n<image>?", "images": ["c.png", "d.png"], "answer": "3"},
        {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "x<image>"}],
         "image": "d.png"}]


def make_folder(path: Path, kind: str) -> Path:
    """model/ of this kind, whose head would often sample the token of a picture. a.png to d.png, of
    several shapes for Qwen; a and b have one."""
    rng, pictures = random.Random(0), []
    squares.make_model(f"{path}/model", 0, 2 if kind == "idefics3" else 4, kind=kind,
                       noise=0.1 if kind == "idefics3" else 0.09)
    weights = load_file(path / "model/model.safetensors")
    weights["lm_head.weight"][config_of(path).image_token_id] *= 3
    save_file(weights, path / "model/model.safetensors", metadata={"format": "pt"})
    for i, size in enumerate([(64, 96), (64, 96), (160, 40), (33, 100)]):
        pictures.append(squares.draw(rng, i + 1))
        if kind != "idefics3":
            pictures[-1] = pictures[-1].resize(size)
    pictures[1] = ImageOps.invert(pictures[1])
    for name, picture in zip("abcd", pictures, strict=True):
        picture.save(path / f"{name}.png")
    return path


def config_of(folder: Path):
    return model.config_of(f"{folder}/model")


def read(folder: Path, *rows: dict) -> list[data.Row]:
    """Rows by the shipped way, from a file beside the pictures."""
    path, source = folder / "rows.jsonl", f"{folder}/model"
    path.write_text("\n".join(map(json.dumps, rows)))
    make = partial(pictured.make_row, make=data.make_row, folder=pictured.folder_of(str(path)),
                   eyes=kinds.load_eyes("x", source, config_of(folder)))
    tokenizer = preflight.load_tokenizer("x", source)
    return data.load(str(path), tokenizer, data.DataArgs(), make=make)[0]


def fabricate(folder: Path) -> list[Sample]:
    """Completions of ROWS. Some have the token of a picture, which stands for none there."""
    rng, samples = np.random.default_rng(0), []
    for row in read(folder, *ROWS):
        for g in range(GROUP):
            ids = rng.integers(3, 324, rng.integers(1, 11))
            if g == 1:
                ids[-1] = ids[0] = config_of(folder).image_token_id
            samples.append(sample(row, ids, float(rng.random()), -6.0))
    return samples


class Transformers:
    """transformers' own model and processor of a folder, one row alone."""

    def __init__(self, folder: str, dtype=torch.float64):
        self.processor = AutoProcessor.from_pretrained(folder)
        self.lm = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        stacks = architecture_of(self.lm.config).stacks(self.lm)
        for part in stacks if dtype == torch.float64 else ():
            float64.widen(part)
        embedding = self.lm.get_input_embeddings()
        embedding.register_forward_hook(lambda *_: F.embedding(self.ids, embedding.weight))

    def logprobs(self, sample: Sample, heat: float = 1.0):
        """log π of each token of a completion: (T,). In a completion the model does not look for
        pictures: it gets another id there, and the right embedding."""
        row, ids = sample.prompt.row, torch.tensor(sample.ids).long().unsqueeze(0)
        seen, never = pictured.pictures_in(row), self.lm.config.image_token_id
        given = self.processor(text=[row.prompt], return_tensors="pt", **{
            "images": [[Image.open(path) for path in seen.sources]]} if seen else {})
        assert given["input_ids"][0].tolist() == row.prompt_ids
        del given["attention_mask"]
        self.ids = torch.cat([given["input_ids"], ids], 1)
        given["input_ids"] = torch.cat([given["input_ids"], ids.masked_fill(ids == never, 0)], 1)
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], 0 * ids], 1)
        logits = self.lm(**given.to(self.lm.dtype)).logits[0, -ids.numel() - 1:-1]
        logits[:, never] -= 100  # no policy samples it
        return (logits / heat).log_softmax(-1).gather(-1, ids.T).squeeze(-1)


def batch_of(samples: list[Sample]) -> Batch:
    """A batch without rewards: those of the engine have none."""
    return Batch([replace(s, reward=0.0) for s in samples])


def engine_run(world, folder: Path, tp: int) -> list[list[float]]:
    """Three loads of weights, with an update of all that is trained between → the largest gaps of
    the trainer from transformers and from the engine, in what float32 rounds."""
    source, out, found = f"{folder}/model", f"{folder}/out{tp}", []
    policy = families.trainer_of(source, world, train_vision=True)
    made = fabricate(folder)
    prompts = [sample.prompt for sample in made[::GROUP]]
    engine = families.engine_of(source, world, policy, tp, rows=[it.row for it in prompts])
    for step in range(3):
        engine.load(policy)
        samples = engine.sample(prompts, 4, families.HEAT)
        assert not any((s.ids == engine.eyes.token).any() for s in samples)
        batch = batch_of(samples + made)
        ours = families.trainer_logprobs(world, policy, batch)
        export_model(policy, source, f"{out}.{step}")
        world.barrier()
        with torch.no_grad():
            plain, exact = (
                torch.cat([it.logprobs(s, families.HEAT) for s in batch.samples])
                for it in (Transformers(f"{out}.{step}", torch.float32),
                           Transformers(f"{out}.{step}", torch.float64)))
        theirs = families.engine_logprobs(batch)
        sampled = torch.arange(len(ours)) < sum(len(s.ids) for s in samples)
        likely = exact > -50  # that of an image token is about -100, which float32 rounds
        rounding = (plain - exact)[likely].abs().max()
        found.append([float(gap.abs().max() / rounding) for gap in (
            (ours - plain)[likely], (ours - theirs)[sampled])])
        families.compare(families.run_of(world, policy, engine, prompts))
        families.update(world, policy, batch_of(samples))
    engine.close()
    return found
