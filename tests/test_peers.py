"""Losses, advantages and corrections equal TRL's and verl's: their own code, run on our numbers.

    pip download --no-deps -d FOLDER trl==1.16 verl==0.9.1
    PEERS=FOLDER python -m pytest -m slow tests/test_peers.py

Neither is installed here, because both need many packages. So a test takes the text of one function
out of the wheel and runs that. Without PEERS the tests are skipped.
"""
import ast
import math
import os
import sys
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
from preflight import loss_flags
from test_losses import F64, close, gradient
from test_variants import advantages, ragged, variant
from test_variants import loss as ours_of

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


def batch(seed: int, per_token: bool = False):
    """Numbers everywhere: theirs multiply by the mask. The row without a token is left out."""
    logprobs, old, engine, A, mask = ragged(seed, per_token=per_token)
    logprobs, old, engine, A = (
        torch.where(x.isnan(), -0.5, x)[:5].detach() for x in (logprobs, old, engine, A))
    return logprobs.requires_grad_(), old, engine, A, mask[:5]


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

    args = Anything(sapo_temperature_pos=1.0, sapo_temperature_neg=1.5, delta=None,
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
    inputs = {"prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(5, 9),
              "completion_mask": mask.long(), "advantages": A.squeeze(1),
              "old_per_token_logps": old} | (inputs or {})
    nan = {"nanmin": torch.min, "nanmax": torch.max}
    return function(path, "_compute_loss", **nan)(trainer, None, inputs)


def ours(loss, mask, kind: str = "sequence"):
    """The sum with the weights of an aggregation."""
    weights = losses.token_weights(mask.sum(1), kind, max_tokens=99)[:, None]
    return torch.where(mask, weights * loss, 0).sum()


@pytest.fixture
def edited(monkeypatch):
    """Constants of variants/ that act more on these numbers."""
    def edit(name: str, **values):
        module = sys.modules[loss_flags.own("loss", variant(name)).function.__module__]
        for constant, value in values.items():
            monkeypatch.setattr(module, constant, value)
    return edit


def check(mine, theirs, logprobs):
    """Values and gradients."""
    assert abs(float((mine - theirs).detach())) < 1e-12
    assert close(gradient(mine, logprobs), gradient(theirs, logprobs), 1e-12)
    assert gradient(mine, logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["sapo", "gmpo", "opsm"])
def test_trls_losses(name, seed, edited):
    logprobs, old, engine, A, mask = batch(seed)
    path, inputs, given = {
        "sapo": (GRPO_TRAINER, None, {"loss_type": "sapo"}),
        "gmpo": ("trl/experimental/gmpo/gmpo_trainer.py", None,
                 {"epsilon_low": 0.1, "epsilon_high": 0.15}),
        "opsm": (GRPO_TRAINER, {"sampling_per_token_logps": engine},
                 {"loss_type": "grpo", "off_policy_mask_threshold": 0.02})}[name]
    theirs = trl_loss(path, logprobs, old, A, mask, inputs, **given)
    edited("sapo", TAU_OTHER=1.5)
    edited("opsm", DELTA=0.02)
    bounds = {"clip_low": 0.1, "clip_high": 0.15} if name == "gmpo" else PPO
    mine, metrics = ours_of(name, logprobs, old, A, mask, engine, **bounds)
    check(ours(mine, mask), theirs, logprobs)
    assert seed or name != "opsm" or metrics["opsm_cut"].any()


@pytest.mark.parametrize("seed", range(5))
def test_trls_kl_times_the_ratio(seed):
    logprobs, old, ref, A, mask = batch(seed)
    theirs = trl_loss(GRPO_TRAINER, logprobs, old, A, mask, {"ref_per_token_logps": ref}, beta=0.3,
                      loss_type="grpo", args={"use_bias_correction_kl": True})
    mine, _ = losses.clip_loss(logprobs, old, A, mask, **PPO)
    kl = losses.kl_estimate(logprobs, ref, mask, kind="k3_ratio", old_logprobs=old)
    check(ours(mine + 0.3 * kl, mask), theirs, logprobs)


@pytest.mark.parametrize("kind, mode, low", [
    ("truncate", "token_truncate", None), ("mask", "token_mask", 0.9),
    ("sequence_truncate", "sequence_truncate", None), ("sequence_mask", "sequence_mask", 0.4),
    ("sequence_mask", "sequence_mask", None)])
@pytest.mark.parametrize("seed", range(5))
def test_trls_corrections(kind, mode, low, seed):
    logprobs, old, engine, A, mask = batch(seed)
    node = statement(GRPO_TRAINER, "_generate_and_score_completions", "per_token_logps_diff =")
    trainer = Anything(use_vllm=True, vllm_importance_sampling_correction=True,
                       vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.3,
                       vllm_importance_sampling_clip_min=low)
    found = run([node], {"self": trainer, "old_per_token_logps": old, "tool_mask": None,
                         "sampling_per_token_logps": engine, "completion_mask": mask.long()})
    weights = found["vllm_importance_sampling_ratio"]  # (5, 9) or (5, 1)
    mine, _ = losses.engine_correction(old, engine, mask, kind=kind, low=low or 0.0, high=1.3)
    assert close(mine[mask], weights.expand(mask.shape)[mask], 1e-12)
    loss, _ = losses.clip_loss(logprobs, old, A, mask, **PPO)
    theirs = trl_loss(GRPO_TRAINER, logprobs, old, A, mask, {"importance_sampling_ratio": weights},
                      loss_type="grpo", use_vllm=True, vllm_importance_sampling_correction=True)
    check(ours(loss * mine, mask), theirs, logprobs)


def trl_advantages(parts, weights, **given):
    """parts (N, K), groups of 4 → (N,): their lines."""
    node = statement(GRPO_TRAINER, "_generate_and_score_completions", "'sum_then_normalize':")
    std = function("trl/trainer/utils.py", "nanstd")
    found = run([node], {
        "self": Anything(reward_weights=torch.tensor(weights, dtype=F64), num_generations=4,
                         reward_funcs=weights, **given), "num_generations": 4, "nanstd": std,
        "rewards_per_func": parts, "device": "cpu", "unscorable_mask": parts.isnan().all(1)})
    return torch.nan_to_num(found["advantages"], nan=0.0), found["rewards"]


def rewards_of(seed: int) -> torch.Tensor:
    """(12, 2): one row has none."""
    parts = torch.tensor(np.random.default_rng(seed).normal(size=(12, 2)))
    parts[5] = math.nan
    return parts


@pytest.mark.parametrize("scale, kind", [("batch", "lite_ppo"), ("group", "grpo"),
                                         ("none", "dr_grpo")])
@pytest.mark.parametrize("seed", range(5))
def test_trls_std_of_the_batch(scale, kind, seed):
    parts = rewards_of(seed)
    theirs, rewards = trl_advantages(parts, [1.0, 0.5], scale_rewards=scale,
                                     multi_objective_aggregation="sum_then_normalize")
    mine = advantages(kind, rewards, 4, eps=1e-4)
    assert close(mine, theirs, 1e-12) and mine.any()


def our_gdpo(parts, eps: float):
    """(N, 2), with weights 1 and 0.5 → (N,)"""
    scored = ~parts.isnan().any(1)
    exact, short = torch.nan_to_num(parts).T
    return loss_flags.own("advantage", variant("gdpo")).function(
        exact, 4, scored=scored, eps=eps, trained=scored,
        parts={"exact": (1.0, exact), "short": (0.5, short)})


@pytest.mark.parametrize("seed", range(5))
def test_trls_gdpo(seed):
    """They divide by std + 1e-4 in the end, we by √(var + 1e-8): their constant is taken out."""
    parts = rewards_of(seed)
    theirs, sums = trl_advantages(parts, [1.0, 0.5],
                                  multi_objective_aggregation="normalize_then_sum")
    sums = sums[~sums.isnan()]
    mine = our_gdpo(parts, 1e-4) * (sums.var() + 1e-8).sqrt()
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


def verl_loss(name: str, logprobs, old, A, mask, **config):
    config = Config(**{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None,
                       "global_batch_info": {}} | config)
    names = {"verl_F": verl_functions(), "ActorConfig": Config, "AlgoConfig": type(None)}
    names["agg_loss"] = function(CORE, "agg_loss", **names)
    loss = function(CORE, f"compute_policy_loss_{name}", **names)
    return loss(old, logprobs, A.expand(mask.shape), mask.to(F64), "token-mean", config)[0]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_verls_dppo_and_sapo(seed, per_token, edited):
    logprobs, old, _, A, mask = batch(seed, per_token)
    theirs = verl_loss("dppo_tv", logprobs, old, A, mask, clip_ratio_low=0.05, clip_ratio_high=0.08)
    mine, metrics = ours_of("dppo", logprobs, old, A, mask)
    check(ours(mine, mask, "token"), theirs, logprobs)
    assert metrics["clip_frac"].any()
    theirs = verl_loss("sapo", logprobs, old, A, mask, tau_pos=1.0, tau_neg=1.5)
    edited("sapo", TAU_OTHER=1.5)
    mine, _ = ours_of("sapo", logprobs, old, A, mask)
    error = 1e-7  # of their 1e-8 in a row's length
    assert abs(float((ours(mine, mask) - theirs).detach())) < error


def test_verls_dppo_far_from_pi_old():
    """Both cut the log-ratio at 20 and the ratio at 20."""
    old = torch.tensor([[-30.0, -9.0, -1.0]], dtype=F64)
    logprobs = torch.tensor([[-5.0, -5.0, -20.5]], dtype=F64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        A = torch.tensor([[sign]], dtype=F64)
        theirs = verl_loss("dppo_tv", logprobs, old, A, mask)
        mine, _ = ours_of("dppo", logprobs, old, A, mask, **PPO)
        check(ours(mine, mask, "token"), theirs, logprobs)


@pytest.mark.parametrize("seed", range(5))
def test_verls_gmpo(seed):
    """Up to their 1e-8 in a row's length."""
    logprobs, old, _, A, mask = batch(seed)
    theirs = verl_loss("geo_mean", logprobs, old, A, mask, clip_ratio_low=0.1, clip_ratio_high=0.15)
    mine, _ = ours_of("gmpo", logprobs, old, A, mask)
    assert abs(float((ours(mine, mask) - theirs).detach())) < 1e-7
    assert close(gradient(ours(mine, mask), logprobs), gradient(theirs, logprobs), 1e-7)


@pytest.mark.parametrize("kind, level, threshold", [
    ("truncate", "token", 1.1), ("mask", "token", "0.9_1.1"),
    ("sequence_truncate", "sequence", 1.1), ("sequence_mask", "sequence", "0.9_1.1")])
@pytest.mark.parametrize("seed", range(5))
def test_verls_corrections(kind, level, threshold, seed):
    _, old, engine, _, mask = batch(seed)
    names = {"verl_F": verl_functions(), "SAFETY_BOUND": 20.0,
             "compute_is_metrics": lambda **options: {}}
    names["_parse_rollout_is_threshold"] = function(CORRECTION, "_parse_rollout_is_threshold")
    theirs, _ = function(CORRECTION, "compute_rollout_correction_weights", **names)(
        old - engine, mask.to(F64), level, threshold)
    mine, _ = losses.engine_correction(old, engine, mask, kind=kind, low=0.9, high=1.1)
    assert close(mine[mask], theirs[mask], 1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_verls_geometric_rejection(seed, edited):
    """Theirs is about engine / trainer: their bounds are 1 / ours."""
    logprobs, old, engine, A, mask = batch(seed)
    names = {"verl_F": verl_functions(), "SAFETY_BOUND": 20.0, "compute_rs_metrics":
             lambda **options: {}, "SUPPORTED_ROLLOUT_RS_OPTIONS": {"seq_mean_k1"},
             "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": set()}
    names["_parse_rollout_rs_thresholds"] = lambda *given: {
        "seq_mean_k1": {"lower": 1 / 1.05, "upper": 1 / 0.95}}
    theirs, _ = function(CORRECTION, "compute_rollout_rejection_mask", **names)(
        old - engine, mask.to(F64), "seq_mean_k1", "given above")
    edited("geometric", LOW=0.95, HIGH=1.05)
    mine, metrics = ours_of("geometric", logprobs, old, A, mask, engine, **PPO)
    assert torch.equal(metrics["engine_cut"], mask & (theirs == 0))
    clipped, _ = losses.clip_loss(logprobs, old, A, mask, **PPO)
    assert torch.equal(mine, torch.where(theirs > 0, clipped, 0))


@pytest.mark.parametrize("seed", range(5))
def test_verls_gdpo(seed):
    """They whiten over tokens; with one token a completion both are the same, up to 1e-7."""
    parts, index = rewards_of(seed), np.arange(12) // 4
    parts[5] = 0.3
    names = {"verl_F": verl_functions()}
    names["compute_grpo_outcome_advantage"] = function(CORE, "compute_grpo_outcome_advantage")
    one = torch.ones(12, 1, dtype=F64)
    config = Config(gdpo_reward_keys=["exact", "short"], gdpo_reward_weights=[1.0, 0.5])
    theirs, _ = function(CORE, "compute_gdpo_outcome_advantage", **names)(
        one * 0, one, index, 1e-6, config=config,
        non_tensor_batch={"exact": parts[:, 0].numpy(), "short": parts[:, 1].numpy()},
        batch={"prompts": one, "attention_mask": torch.ones(12, 2).long()})
    assert close(our_gdpo(parts, 1e-6), theirs[:, 0], 1e-6)
