"""Small models that see, rows with pictures, and what transformers' own model and processor make of
them. Run by torchrun from test_pictures.py, `pictures_worker.py FOLDER OUT TP` compares an engine
that sees, the trainer and transformers. Rank 0 writes OUT."""
import json
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(1, str(Path(__file__).parents[3] / "tests"))
import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

import data
import dist
import families
import inputs
import model
import same_policy
from batch import Completion, Sample
from checkpoint import export_model
from examples import squares
from model_files import family_of
from parts.pictures import kinds
from parts.pictures import rows as pictured
from rewards import Score
from tools import float64

HEAT, GROUP = 0.9, 3  # the temperature; completions of a prompt
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
    return data.load(str(path), inputs.load_tokenizer("x", source), data.DataArgs(), make=make)[0]


def fabricate(folder: Path) -> list[Sample]:
    """Completions of ROWS. Some have the token of a picture, which stands for none there."""
    rng, samples = np.random.default_rng(0), []
    for i, row in enumerate(read(folder, *ROWS)):
        for g in range(GROUP):
            ids = rng.integers(3, 324, rng.integers(1, 11)).astype(np.int32)
            if g == 1:
                ids[-1] = ids[0] = config_of(folder).image_token_id
            samples.append(Sample(data.Prompt(i, row), Completion(
                ids, np.full(len(ids), -6.0, np.float32), False), "t", Score(
                float(rng.random()), {"exact": 0.0}, None)))
    return samples


class Transformers:
    """transformers' own model and processor of a folder, one row alone."""

    def __init__(self, folder: str, dtype=torch.float64):
        self.processor = AutoProcessor.from_pretrained(folder)
        self.lm = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        for part in family_of(self.lm.config).parts(self.lm) if dtype == torch.float64 else ():
            float64.widen(part)
        embedding = self.lm.get_input_embeddings()
        embedding.register_forward_hook(lambda *_: F.embedding(self.ids, embedding.weight))

    def logprobs(self, sample: Sample, heat: float = 1.0):
        """log π of each token of a completion: (T,). In a completion the model does not look for
        pictures: it gets another id there, and the right embedding."""
        row, ids = sample.prompt.row, torch.tensor(sample.completion.ids).long().unsqueeze(0)
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


def engine_run(folder: str, out: str, tp: str) -> None:
    """Three loads of weights, with an update of all that is trained between → the largest gaps of
    engine and trainer, in what float32 rounds."""
    world, source = dist.join(120), f"{folder}/model"
    policy = families.trainer_of(source, world, train_vision=True)
    made, found = fabricate(Path(folder)), []
    prompts = [sample.prompt for sample in made[::GROUP]]
    engine = families.engine_of(source, world, policy, int(tp), rows=[it.row for it in prompts])
    for step in range(3):
        engine.load(policy)
        samples = engine.sample(prompts, 4, HEAT)
        assert not any((s.completion.ids == engine.eyes.token).any() for s in samples)
        batch = families.scored(*zip(*((s.prompt, s.completion) for s in samples + made),
                                     strict=True))
        ours = batch.score(world, 400, "score", lambda m: policy.logprobs(m, HEAT)[0])
        export_model(policy, source, f"{out}.{step}")
        world.barrier()
        with torch.no_grad():
            plain, exact = (torch.cat([it.logprobs(s, HEAT) for s in samples + made]) for it in (
                Transformers(f"{out}.{step}", dtype) for dtype in (torch.float32, torch.float64)))
        theirs = families.engine_logprobs(batch)
        sampled = torch.arange(len(ours)) < sum(len(s.completion.ids) for s in samples)
        likely = exact > -50  # that of an image token is about -100, which float32 rounds
        rounding = (plain - exact)[likely].abs().max()
        found.append([float(gap.abs().max() / rounding) for gap in (
            (ours - plain)[likely], (ours - theirs)[sampled])])
        same_policy.compare_policies(families.run_of(world, policy, engine, prompts))
        for micro in batch.micros(world, [*range(len(samples))], 400, "update"):
            policy.backward(policy.logprobs(micro, 1.0)[0].sum() / 100)
        assert policy.step(3e-3) > 0
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    dist.run(engine_run, *sys.argv[1:])
