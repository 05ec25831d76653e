"""Random models of many families, and how far engine and trainer are from transformers.

`python tests/families.py` tries the models of family_cases.CASES, `python tests/families.py X` one
of them by its name, or any other model_type of transformers (half a minute each).
"""
import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import torch

import data
import fakes
import grpo
import model
import part
from batch import Batch, Sample
from checkpoint import export_model
from family_cases import CASES, make
from rollout import Engine
from tools import float64

ROOT = Path(__file__).parent.parent
HEAT = 0.7  # the temperature
# Two ways to compute one model may differ by so many times what float32 rounds, which each run
# measures: kernels differ from one CPU to the next. Four kernels gave at most 2.9.
ROUNDINGS = 8


# ---- the objects of a run

def prompt(i: int, ids: list[int]) -> data.Prompt:
    return data.Prompt(i, data.Row(i, "", ids, None, {}, ""))


def scored(prompts, completions) -> Batch:
    """A batch of completions, each a list of ids, without the engine's log-probs or a reward."""
    return Batch([Sample(p, np.array(ids, np.int32), reward=0.0)
                  for p, ids in zip(prompts, completions, strict=True)])


def batch_of(*groups: tuple[list[int], list[list[int]]]) -> Batch:
    """A batch of groups, each a prompt and its completions."""
    prompts = [prompt(i, ids) for i, (ids, some) in enumerate(groups) for _ in some]
    return scored(prompts, [ids for _, some in groups for ids in some])


def trainer_of(folder: str, world, **flags) -> model.Policy:
    """The policy of a run with these flags."""
    args = replace(grpo.Args(model=folder), **flags)
    kinds = model.kinds(args, model.config_of(folder))
    return kinds.policy(float64.build(kinds.logprob_model, folder, world, args), world, args)


def run_of(world, policy, engine=None, prompts=(), dtype=torch.float32, folder: str = "",
           tp: int = 1):
    """What an engine and the comparison of policies need of a run."""
    return SimpleNamespace(
        world=world, policy=policy, engine=engine, reference=None, critic=None, dtype=dtype,
        log=fakes.Log(), stateful={},
        args=replace(policy.args, max_num_seqs=64, tp=tp, max_tokens=24, temperature=HEAT,
                     dtype=str(dtype).removeprefix("torch.")),
        inputs=SimpleNamespace(
            source=folder, lm=policy.module.lm, tokenizer=None, ends=[2], kv_cache=2**28,
            reference=None, plan=SimpleNamespace(longest=256),
            rows=[p.row for p in prompts], eval_rows=[]))


def compare(run) -> None:
    """As a run compares its policies before step 1. SettingsError: they are not one."""
    ready = part.asked("ready")
    assert ready, "parts/guards compares them"
    for function in ready.values():
        function(run)


def engine_of(folder: str, world, policy, tp: int = 1, dtype=torch.float32, rows=()) -> Engine:
    """The engine of a run with this policy."""
    run = run_of(world, policy, dtype=dtype, folder=folder, tp=tp)
    run.inputs.rows = [*rows]
    kind = part.engine(Engine, run.args, run.inputs.lm.config, dtype)
    return kind(run.args, world, run.inputs, run.log, [policy])


def update(world, policy, batch: Batch) -> None:
    """One step, which moves every weight."""
    for micro in batch.micro_batches(world, list(range(len(batch.samples))), 400, "update"):
        logprobs, entropy = policy.logprobs(micro, HEAT, True)
        policy.backward((logprobs + 0.1 * entropy).sum() / 100)
    norm = policy.step(3e-3)
    assert 0 < norm < float("inf"), f"the gradient's norm is {norm}"


# ---- the log-probs (M,) of sampled tokens, by each of the three

def trainer_logprobs(world, policy, batch: Batch) -> torch.Tensor:
    return batch.forward(world, 400, "score", lambda micro: policy.logprobs(micro, HEAT)[0])


def engine_logprobs(batch: Batch) -> torch.Tensor:
    return batch.engine_logprobs


def single_rows(lm, batch: Batch, heat: float = HEAT) -> torch.Tensor:
    """By transformers' own forward of each row alone."""
    out = []
    for sample in batch.samples:
        prompt = sample.prompt.row.prompt_ids
        ids = torch.tensor([*prompt, *sample.ids])
        logits = lm(ids.unsqueeze(0)).logits[0, len(prompt) - 1:-1]  # (T, V)
        logprobs = (logits / heat).log_softmax(-1).gather(-1, ids[len(prompt):].unsqueeze(-1))
        out.append(logprobs.squeeze(-1)[torch.from_numpy(sample.sampled)])
    return torch.cat(out)


def load(folder: str, dtype=torch.float32):
    """transformers' own model of a folder. In float64 nothing is rounded to float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    if dtype == torch.float64:
        float64.widen(lm)
    return lm


@torch.no_grad()
def plain(folder: str, batch: Batch, heat: float = HEAT, dtype=torch.float32) -> torch.Tensor:
    """`single_rows` of the model in a folder."""
    return single_rows(load(folder, dtype), batch, heat)


def rounding(folder: str, batch: Batch, heat: float = HEAT) -> float:
    """How far transformers' own float32 is from its float64 here, at most, in nats."""
    return float((plain(folder, batch, heat) - plain(folder, batch, heat, torch.float64)
                  ).abs().max())


def same(one: dict, other: dict) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one)


# ---- trainer, engine and transformers, before and after updates

def three_steps(world, folder: str, engine: bool, tp: int = 1, **flags
                ) -> list[tuple[Batch, torch.Tensor]]:
    """[(completions, the trainer's log-probs)] before, between and after two updates. The weights
    of each are exported to FOLDER-0, FOLDER-1 and FOLDER-2.

    Two completions of each of three random prompts, which are longer than a window and a cache
    block. An engine loads weights three times. Before all, the policies are compared as a run
    compares them. SettingsError: they are not one policy.
    """
    rng, policy, found = np.random.default_rng(0), trainer_of(folder, world, **flags), []
    prompts = [prompt(i, rng.integers(3, 320, 100 + 10 * i).tolist()) for i in (0, 1, 5)]
    prompts = [p for p in prompts for _ in range(2)]
    vllm = engine_of(folder, world, policy, tp) if engine else None
    compare(run_of(world, policy, vllm, prompts))
    for step in range(3):
        batch = scored(prompts, rng.integers(3, 320, (len(prompts), 24)))
        if vllm:
            vllm.load(policy)
            samples = [Sample(p, reward=0.0, seed=i) for i, p in enumerate(prompts)]
            vllm.complete(samples, HEAT)
            batch = Batch(samples)
        found.append((batch, trainer_logprobs(world, policy, batch)))
        export_model(policy, folder, f"{folder}-{step}")
        update(world, policy, batch)
    return found


def gaps(folder: str, found) -> tuple[float, float, float]:
    """The largest |trainer - transformers|, |engine - trainer| and `rounding` of all steps, in
    nats."""
    each = []
    for step, (batch, ours) in enumerate(found):
        there = plain(f"{folder}-{step}", batch), batch.engine_logprobs
        each.append([*(float((ours - theirs).abs().max()) for theirs in there),
                     rounding(f"{folder}-{step}", batch)])
    return tuple(map(max, zip(*each, strict=True)))


def with_engine(name: str, options: dict | None = None) -> tuple[float, float, float] | str:
    """`gaps` of a model, with an engine on each of two ranks; or the error with which it ends."""
    from ranks import on_ranks  # it sets what multiprocessing starts, so a worker may not import it
    with tempfile.TemporaryDirectory() as folder:
        make(name, f"{folder}/model", options)
        (kind, found), _ = on_ranks(2, three_steps, f"{folder}/model", True)
        return gaps(f"{folder}/model", found) if kind == "ok" else found


def main(words: list[str]) -> None:
    """Prints a line of the table in bench/RESULTS.md for each word, and ends at the first model
    that may not run."""
    for name in words or CASES:
        found = with_engine(name)
        if isinstance(found, str) or max(found) > ROUNDINGS * found[2]:
            sys.exit(f"error: {name} may not run: {found}")
        print(f"| {name} | `{CASES.get(name, [name])[0]}` | {found[0]:.0e} | {found[1]:.0e} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a case, or a model_type")
    main(parser.parse_args().names)
