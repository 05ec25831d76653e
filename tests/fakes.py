"""Fakes: a rank without others, an engine without vLLM, made-up samples, a run's folder."""
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

import dist
import faults
import grpo
import identity
import ppo
import rollout
from batch import Sample
from data import Prompt, Row
from preflight import load_tokenizer

SCRIPTS = {"grpo": grpo, "ppo": ppo}


class World(dist.World):
    """A rank whose collectives give its own part."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu"):
        super().__init__(rank, size, rank, size, torch.device(device), None,
                         again="./run.sh --name x")

    def gather(self, mine, more=0.0):
        return list(mine)

    def sum(self, tensor):
        return tensor

    max = sum

    def same_phase(self, *announced):
        pass

    barrier = meet = end = same_phase


class Log:
    """It measures nothing. `said` has its lines."""

    def __init__(self):
        self.said = []
        self.say = self.said.append

    def time(self, name):
        return nullcontext()


def args(script="grpo", **flags):
    """The script's Args with these flags, wherever they live. script: a module, or its name."""
    return replace(SCRIPTS.get(script, script).Args(lr=1e-3), **flags)


def made_of(args) -> dict[str, identity.Entry]:
    """The identity of a run of the tiny model with two rows."""
    folder = faults.model()
    made = SimpleNamespace(source=folder, reference=None, rows=rows(2), eval_rows=[], ends=[2],
                           tokenizer=load_tokenizer("tiny", folder))
    return identity.identity(args, made, World())


def rows(n: int) -> list[Row]:
    return [Row(i, f"p{i}", [i], "a", {}, "rows") for i in range(n)]


def sample(reward: float | None = None, i: int = 0, text: str = "", source: str = "x",
           answer: object = "a", n: int = 3, **more) -> Sample:
    """A completion of row i with n tokens and this reward."""
    row = Row(i, f"p{i}", [1], answer, {}, source)
    return Sample(Prompt(i, row), np.arange(n, dtype=np.int32), text=text, reward=reward,
                  rewards={"exact": reward}, **more)


def engine_of(rank: int = 0, size: int = 1, tp: int = 1) -> rollout.Engine:
    """An engine without vLLM, in place of __init__."""
    it = object.__new__(rollout.Engine)
    vars(it).update(
        world=World(rank, size), args=rollout.EngineArgs(tp=tp), log=Log(), engine_count=size // tp,
        seed=7, max_tokens=9, eos_ids=[4, 6], bar=False, on_gpu=False,
        dtype=torch.float32)
    return it


class Llm:
    """vLLM's LLM, as far as making one goes. Its worker on a GPU leaves one thread."""
    options, asked = {}, []

    def __init__(self, folder, **options):
        Llm.options = options
        torch.set_num_threads(1)

    def apply_model(self, function):
        pass

    def generate(self, prompts, params, **options):
        Llm.asked = params
        return []


def without_vllm(monkeypatch) -> type[Llm]:
    """What is imported from vLLM in this test is a stub."""
    stub = ModuleType("vllm")
    stub.LLM, stub.SamplingParams = Llm, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(rollout, "prepare_environment", lambda *_: None)
    return Llm


def write_run(folder: Path, metrics: list[dict], samples: dict[str, list], **args) -> Path:
    """A run's folder: args.json, metrics.jsonl, samples/NAME.jsonl."""
    (folder / "samples").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"seed": 0, "name": folder.name} | args))
    files = {"metrics": metrics} | {f"samples/{name}": rows for name, rows in samples.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
