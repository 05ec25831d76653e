"""Losses, advantages and corrections equal TRL's and verl's: their own code, run on our numbers.

    pip download --no-deps -d FOLDER trl==1.16 verl==0.9.1
    PEERS=FOLDER python -m pytest -m slow tests/test_peers.py

Neither is installed here, because both need many packages. So a test takes the text of one function
out of the wheel and runs that. Without PEERS the tests are skipped.
"""
import ast
import math
import os
import typing
import zipfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import losses
from running import loss_flags
from test_losses import F64, LENGTHS, act_more, advantages, close, gradient, ragged, variant
from test_losses import loss as ours_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    "PEERS" not in os.environ, reason="PEERS names no folder with the wheels of trl and verl")]
PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
GRPO_TRAINER, CORE = "trl/trainer/grpo_trainer.py", "verl/trainer/ppo/core_algos.py"
CORRECTION, FUNCTIONAL = "verl/trainer/ppo/rollout_corr_helper.py", "verl/utils/torch_functional.py"


@pytest.fixture(autouse=True)
def in_float64():
    """TRL's nanstd divides two counts, which is float32 by default."""
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def tree(path: str) -> ast.Module:
    """A file of the wheel whose name begins like the path."""
    wheel, = Path(os.environ["PEERS"]).glob(f"{path.partition('/')[0]}-*.whl")
    return ast.parse(zipfile.ZipFile(wheel).read(path))


def run(nodes: list[ast.stmt], names: dict) -> dict:
    """Their statements, with these names → all names after them. Annotations are not looked up."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*future, *nodes], []))
    names = {"torch": torch, "np": np, "math": math, "F": F, "defaultdict": defaultdict,
             **vars(typing), **names}
    exec(compile(module, "a peer", "exec"), names)
    return names


def function(path: str, name: str, **names):
    """A function or method of theirs, without its decorators."""
    node, = (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    return run([node], names)[name]


def statement(path: str, inside: str, text: str) -> ast.stmt:
    """The smallest `if` of a function of theirs that contains the text."""
    whole, = (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)
              and n.name == inside)
    found = [n for n in ast.walk(whole) if isinstance(n, ast.If) and text in ast.unparse(n)]
    return min(found, key=lambda n: len(ast.unparse(n)))


def batch():
    """Ours, (n,) each, and theirs: (5, 7), and the mask. The completion without a token is left
    out. Theirs multiply by the mask, so there are numbers everywhere."""
    logp, old, engine, A, row = ragged(17)
    mask = torch.arange(7) < torch.tensor(LENGTHS[:5]).unsqueeze(1)
    logp = logp.detach().requires_grad_()

    def padded(x):
        return torch.full(mask.shape, -0.5).masked_scatter(mask, x)

    return (logp, old, engine, A, row), (*map(padded, (logp, old, engine, A)), mask)


# ---- TRL


class Anything:
    """A trainer: what is not given is off, 0 or does nothing."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        if name in ("model", "args"):
            return Anything(training=True)
        return None


def trl_loss(path: str, logprobs, old, A, mask, inputs=None, **given):
    """The value of their _compute_loss, on log-probs that are already there."""
    def same(x, **options):
        return x

    args = Anything(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, delta=None,
                    **given.pop("args", {}))
    trainer = Anything(
        **{"_get_per_token_logps_and_entropies": lambda *a, **k: (logprobs, logprobs * 0, None),
           "top_entropy_quantile": 1.0, "beta": 0.0, "epsilon_low": 0.2,
           "epsilon_high": 0.2, "importance_sampling_level": "token", "args": args,
           "_metrics": defaultdict(lambda: defaultdict(list)), "use_vllm": False,
           "current_gradient_accumulation_steps": 1, "max_completion_length": 99,
           "accelerator": Anything(gather=same, reduce=same),
           "get_off_policy_mask": function(GRPO_TRAINER, "get_off_policy_mask")} | given)
    nothing = torch.zeros(5, 1)
    inputs = {"prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(5, 7),
              "completion_mask": mask.long(), "advantages": A[:, 0],
              "old_per_token_logps": old} | (inputs or {})
    nan = {"nanmin": torch.min, "nanmax": torch.max}
    return function(path, "_compute_loss", **nan)(trainer, None, inputs)


def ours(loss, row, kind: str = "sequence"):
    """The sum with the weights of an aggregation."""
    return (losses.token_weights(row.bincount(), kind, max_tokens=99)[row] * loss).sum()


def check(mine, theirs, logprobs):
    """Values and gradients."""
    assert abs(float((mine - theirs).detach())) < 1e-12
    assert close(gradient(mine, logprobs), gradient(theirs, logprobs), 1e-12)
    assert gradient(mine, logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sapo", "gmpo", "opsm"])
def test_trls_losses(name, monkeypatch):
    act_more(monkeypatch, "opsm", DELTA=0.02)
    mine, (logprobs, old, engine, A, mask) = batch()
    path, inputs, given = {
        "sapo": (GRPO_TRAINER, None, {"loss_type": "sapo"}),
        "gmpo": ("trl/experimental/gmpo/gmpo_trainer.py", None,
                 {"epsilon_low": 0.1, "epsilon_high": 0.15}),
        "opsm": (GRPO_TRAINER, {"sampling_per_token_logps": engine},
                 {"loss_type": "grpo", "off_policy_mask_threshold": 0.02})}[name]
    theirs = trl_loss(path, logprobs, old, A, mask, inputs, **given)
    bounds = {} if name == "gmpo" else PPO
    logp, old, engine, A, row = mine
    loss, _ = ours_of(name, logp, old, A, row, engine, **bounds)
    check(ours(loss, row), theirs, logp)


def test_trls_kl_times_the_ratio():
    (logp, old, ref, A, row), (logprobs, their_old, their_ref, their_A, mask) = batch()
    theirs = trl_loss(GRPO_TRAINER, logprobs, their_old, their_A, mask,
                      {"ref_per_token_logps": their_ref}, beta=0.3, loss_type="grpo",
                      args={"use_bias_correction_kl": True})
    mine, _ = losses.clip_loss(logp, old, A, row, **PPO)
    kl = losses.kl_estimate(logp, ref, kind="k3_ratio", old=old)
    check(ours(mine + 0.3 * kl, row), theirs, logp)


@pytest.mark.parametrize("kind, mode, low", [
    ("truncate", "token_truncate", None), ("mask", "token_mask", 0.9),
    ("sequence_truncate", "sequence_truncate", None), ("sequence_mask", "sequence_mask", 0.4)])
def test_trls_corrections(kind, mode, low):
    mine, (logprobs, old, engine, A, mask) = batch()
    node = statement(GRPO_TRAINER, "_generate_and_score_completions", "per_token_logps_diff =")
    trainer = Anything(use_vllm=True, vllm_importance_sampling_correction=True,
                       vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.3,
                       vllm_importance_sampling_clip_min=low)
    found = run([node], {"self": trainer, "old_per_token_logps": old, "tool_mask": None,
                         "sampling_per_token_logps": engine, "completion_mask": mask.long()})
    weights = found["vllm_importance_sampling_ratio"]  # (5, 7) or (5, 1)
    theirs = trl_loss(GRPO_TRAINER, logprobs, old, A, mask, {"importance_sampling_ratio": weights},
                      loss_type="grpo", use_vllm=True, vllm_importance_sampling_correction=True)
    logp, old, engine, A, row = mine
    factors, _ = losses.engine_correction(old, engine, row, n_rows=5, kind=kind, low=low or 0.0,
                                          high=1.3)
    loss, _ = losses.clip_loss(logp, old, A, row, **PPO)
    check(ours(loss * factors, row), theirs, logp)


def trl_advantages(parts, weights, **given):
    """parts (N, K), groups of 4 → (N,): their lines."""
    node = statement(GRPO_TRAINER, "_generate_and_score_completions", "'sum_then_normalize':")
    std = function("trl/trainer/utils.py", "nanstd")
    found = run([node], {
        "self": Anything(reward_weights=torch.tensor(weights, dtype=F64), num_generations=4,
                         reward_funcs=weights, **given), "num_generations": 4, "nanstd": std,
        "rewards_per_func": parts, "device": "cpu", "unscorable_mask": parts.isnan().all(1)})
    return torch.nan_to_num(found["advantages"], nan=0.0), found["rewards"]


PARTS = torch.tensor(np.random.default_rng(0).normal(size=(12, 2)))
PARTS[5] = math.nan  # one row has none


@pytest.mark.parametrize("scale, kind", [("batch", "lite_ppo"), ("group", "grpo"),
                                         ("none", "dr_grpo")])
def test_trls_advantages(scale, kind):
    theirs, rewards = trl_advantages(PARTS, [1.0, 0.5], scale_rewards=scale,
                                     multi_objective_aggregation="sum_then_normalize")
    mine = advantages(kind, rewards, 4, eps=1e-4)
    assert close(mine, theirs, 1e-12) and mine.any()


@pytest.mark.parametrize("lacking", ["both rewards", "one of them"])
def test_trls_gdpo(lacking):
    """A reward that is None for a completion is not applicable to it, and is no 0 in its group.

    They divide by std + 1e-4 in the end, we by √(var + 1e-8): their constant is taken out."""
    parts = PARTS.clone()
    if lacking == "one of them":
        parts[5, 1] = 0.3
    theirs, sums = trl_advantages(parts, [1.0, 0.5],
                                  multi_objective_aggregation="normalize_then_sum")
    scored, (exact, short) = ~parts.isnan().all(1), parts.T
    mine = loss_flags.own("advantage", variant("gdpo")).function(
        exact.nan_to_num(), 4, scored=scored, eps=1e-4, trained=scored,
        parts={"exact": (1.0, exact), "short": (0.5, short)})
    sums = sums[~sums.isnan()]
    mine = mine * (sums.var() + 1e-8).sqrt()
    assert close(mine, theirs * (sums.std() + 1e-4), 1e-12) and mine.any()


# ---- verl


@cache
def verl_functions() -> SimpleNamespace:
    """Of their torch_functional."""
    found = {}
    for name in ("masked_sum", "masked_mean", "masked_var", "masked_whiten"):
        found[name] = function(FUNCTIONAL, name, **found)
    return SimpleNamespace(**found)


class Config(SimpleNamespace):
    """Of their actor."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def test_verls_dppo():
    mine, (logprobs, old, _, A, mask) = batch()
    config = Config(clip_ratio=0.2, clip_ratio_low=0.05, clip_ratio_high=0.08, global_batch_info={})
    names = {"verl_F": verl_functions(), "ActorConfig": Config, "AlgoConfig": type(None)}
    names["agg_loss"] = function(CORE, "agg_loss", **names)
    theirs = function(CORE, "compute_policy_loss_dppo_tv", **names)(
        old, logprobs, A, mask.to(F64), "token-mean", config)[0]
    logp, old, _, A, row = mine
    loss, metrics = ours_of("dppo", logp, old, A, row)
    check(ours(loss, row, "token"), theirs, logp)
    assert metrics["clip_frac"].any()


def test_verls_geometric_rejection(monkeypatch):
    """Theirs is about engine / trainer: their bounds are 1 / ours."""
    (logp, old, engine, A, row), (_, their_old, their_engine, _, mask) = batch()
    names = {"verl_F": verl_functions(), "SAFETY_BOUND": 20.0, "compute_rs_metrics":
             lambda **options: {}, "SUPPORTED_ROLLOUT_RS_OPTIONS": {"seq_mean_k1"},
             "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": set()}
    names["_parse_rollout_rs_thresholds"] = lambda *given: {
        "seq_mean_k1": {"lower": 1 / 1.05, "upper": 1 / 0.95}}
    theirs, _ = function(CORRECTION, "compute_rollout_rejection_mask", **names)(
        their_old - their_engine, mask.to(F64), "seq_mean_k1", "given above")
    act_more(monkeypatch, "geometric", LOW=0.95, HIGH=1.05)
    mine, metrics = ours_of("geometric", logp, old, A, row, engine, **PPO)
    kept = theirs[mask] > 0  # (n,)
    assert torch.equal(metrics["engine_cut"], ~kept) and 0 < kept.sum() < len(kept)
    clipped, _ = losses.clip_loss(logp, old, A, row, **PPO)
    assert torch.equal(mine, torch.where(kept, clipped, 0))
