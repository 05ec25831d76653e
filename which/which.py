"""Which GRPO are you running? Released code of nine systems and this project, on the same numbers.

    python which/which.py              the tables of docs/learn/which_grpo.md, a minute
    python which/which.py --vectors    writes which/which.json: by the papers' formulas and polgrad

pip downloads the wheels (pinned below, without their dependencies, 7 MB) into runs/wheels. None of
them is installed: the text of a function or of some lines is taken out of the wheel and run here,
with stand-ins for what it does not compute with. Defaults are read out of the wheels too. Nothing
of theirs is in this repository. What their trainers do around these lines is done here: the mean
over ranks (DDP, FSDP), and the division by the number of micro-batches where a trainer divides.

To hold a loss of your own to the vectors:

    cases = json.load(open("which/which.json"))
    for case in cases["losses"]:
        logp, old = (pad(case[name]) for name in ("logp", "old"))   # rows of tokens -> your shape
        loss = mine(logp, old, pad(case["advantages"]), **case["flags"])
        assert abs(loss - case["loss"]["sequence"]) < 1e-12         # or token, constant, ...
"""
import argparse
import ast
import functools
import itertools
import json
import math
import subprocess
import sys
import typing
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, f"{sys.path[0]}/tests")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn

import losses
import reference_losses

ROOT = Path(__file__).resolve().parent.parent
FOLDER, VECTORS = ROOT / "runs/wheels", ROOT / "which/which.json"
WHEELS = ("trl==1.16.0", "verl==0.9.1", "openrlhf==0.11.2", "skyrl==0.3.0", "ms-swift==4.6.0",
          "oat-llm==0.2.4", "areal==1.0.4", "openpipe-art==0.5.18", "tinker-cookbook==0.6.1",
          "polgrad==0.2.1")
F64, FUNCTIONS = torch.float64, ast.FunctionDef | ast.AsyncFunctionDef
LENGTHS = [2, 4, 6, 8]  # tokens of the completions whose tokens are weighed
SPLITS = {"whole": [[[0, 1, 2, 3]]], "in two": [[[0, 1], [2, 3]]],
          "two ranks": [[[0, 1]], [[2, 3]]]}  # [rank][micro-batch]: numbers of completions
LIMIT = 16  # the most tokens of a completion
RATIOS = (0.5, 1.5, 6.0)


# ---- their code

def fetch(folder: Path = FOLDER) -> Path:
    """Downloads the wheels that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    lacking = [one for one in WHEELS if not wheel(one, folder)]
    if lacking:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                        "--python-version", "3.11", "--platform", "manylinux1_x86_64",
                        "--ignore-requires-python", "--only-binary", ":all:",
                        "--disable-pip-version-check", "-d", str(folder), *lacking], check=True)
    return folder


def wheel(requirement: str, folder: Path = FOLDER) -> Path | None:
    """The file of "trl==1.16.0"."""
    name, version = requirement.split("==")
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


class Anything:
    """What is not given is None, or another one of these: a trainer, a config, a logger."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        return Anything(training=True) if name in ("model", "args", "actor", "algo") else None

    def get(self, name, default=None):
        return self.__dict__.get(name, default)


def same(x, **options):
    """Gathers nothing."""
    return x


@functools.cache
def text_of(requirement: str, path: str) -> str:
    """Of a file of a wheel."""
    return zipfile.ZipFile(wheel(requirement)).read(path).decode()


@functools.cache
def tree_of(requirement: str, path: str) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(text_of(requirement, path))


class Theirs:
    """The code of a wheel. Paths are those in the wheel, `prefix` before them."""

    def __init__(self, requirement: str, prefix: str = ""):
        self.requirement, self.prefix = requirement, prefix

    def node(self, path: str, name: str) -> ast.AST:
        """The function or class, or Class.method, without decorators and without its imports."""
        found = tree_of(self.requirement, self.prefix + path)
        for part in name.split("."):
            found = next(n for n in ast.walk(found) if getattr(n, "name", None) == part
                         and isinstance(n, FUNCTIONS | ast.ClassDef))
        for inner in ast.walk(found):
            if isinstance(inner, FUNCTIONS):
                inner.decorator_list = [n for n in inner.decorator_list
                                        if ast.unparse(n) == "staticmethod"]
                inner.body = [n for n in inner.body if not isinstance(n, ast.ImportFrom)]
        return found

    def take(self, path: str, name: str, **names):
        """The function or class itself."""
        return run([self.node(path, name)], names)[name.rpartition(".")[2]]

    def lines(self, path: str, name: str, first: str, last: str | None = None) -> list[ast.stmt]:
        """The statements of one block of a function from the one with the text `first` to the one
        with `last`: of the innermost block."""
        last, best = last or first, None
        for home in ast.walk(self.node(path, name)):
            for block in (getattr(home, "body", None), getattr(home, "orelse", None)):
                texts = [ast.unparse(n) for n in block] if isinstance(block, list) else []
                start = next((i for i, text in enumerate(texts) if first in text), None)
                end = next((i for i, text in enumerate(texts) if last in text), None)
                if start is not None and end is not None:
                    best = block[start:max(start, end) + 1]  # walk goes inwards
        return best

    def default(self, path: str, name: str):
        """Of Class.field, of a --flag, or of a dotted key of a YAML file."""
        if path.endswith("yaml"):
            return functools.reduce(dict.get, name.split("."), yaml.safe_load(
                text_of(self.requirement, self.prefix + path)))
        for node in ast.walk(tree_of(self.requirement, self.prefix + path)):
            if name.startswith("-") and isinstance(node, ast.Call) and node.args:
                if ast.unparse(node.args[0]).removeprefix("f").strip("'") == name:
                    value = ast.unparse(keyword(node, "default"))
                    return eval(value, {"prefix": "actor"})
            if isinstance(node, ast.ClassDef) and node.name == name.partition(".")[0]:
                field = next((n.value for n in node.body if isinstance(n, ast.AnnAssign)
                              and n.target.id == name.partition(".")[2]), None)
                if isinstance(field, ast.Call):
                    field = keyword(field, "default")
                return ast.literal_eval(field)
        raise KeyError(name)


def keyword(call: ast.Call, name: str) -> ast.expr:
    """Its value."""
    return next(k.value for k in call.keywords if k.arg == name)


def run(nodes: list[ast.stmt], names: dict) -> dict:
    """Statements of theirs, with these names -> all names after them. Annotations are not looked
    up."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*future, *nodes], []))
    names = {"torch": torch, "np": np, "math": math, "F": F, "nn": nn, "dist": dist,
             "functools": functools, "itertools": itertools, "defaultdict": defaultdict,
             "logger": Anything(warning=print), **vars(typing), **names}
    exec(compile(module, "theirs", "exec"), names)
    return names


# ---- a batch

def padded(rows: list, fill: float = 0.0) -> torch.Tensor:
    """Rows of numbers -> (rows, the longest one's)."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=F64)


def micro(batch: dict, rows: list[int]) -> SimpleNamespace:
    """Some rows of {name: rows of tokens}, each (rows, width). logp and entropy have gradients."""
    part = {name: padded([values[i] for i in rows], -0.5) for name, values in batch.items()}
    part["mask"] = padded([[1.0] * len(batch["logp"][i]) for i in rows])
    for name in "logp", "entropy":
        part[name] = part.get(name, part["logp"]).clone().requires_grad_()
    return SimpleNamespace(**part)


def whole_of(batch: dict, split: list) -> SimpleNamespace:
    """What a micro-batch may know of the optimizer step."""
    masks = [micro(batch, rows).mask for rank in split for rows in rank]
    return SimpleNamespace(tokens=sum(mask.sum() for mask in masks), masks=masks,
                           rows=sum(len(mask) for mask in masks), ranks=len(split),
                           micros=len(split[0]))


def update(system, batch: dict, split: list, of: str = "logp", **options) -> list[torch.Tensor]:
    """The gradient of one optimizer step: split[rank][micro-batch] has numbers of rows. Of each
    row, (its tokens,). The ranks' gradients are averaged, as by DDP and FSDP."""
    found, whole = {}, whole_of(batch, split)
    for rank in split:
        for rows in rank:
            part = micro(batch, rows)
            loss = system.loss(part, whole, **options)
            slope = torch.autograd.grad(loss, getattr(part, of))[0] / whole.ranks
            found |= {i: slope[j, :len(batch["logp"][i])] for j, i in enumerate(rows)}
    return [found[i] for i in sorted(found)]


# ---- the systems: advantages (P, G) -> (P, G); loss: of a micro-batch, with the shipped defaults

class TRL:
    """huggingface/trl"""
    name, code = "TRL", Theirs("trl==1.16.0")
    TRAINER, CONFIG = "trl/trainer/grpo_trainer.py", "trl/trainer/grpo_config.py"
    modes, flag = ("dapo", "grpo", "dr_grpo", "bnpo"), "loss_type"

    def default(self, name):
        return self.code.default(self.CONFIG, f"GRPOConfig.{name}")

    def advantages(self, rewards, scale_rewards=None):
        P, G = rewards.shape
        found = run(self.code.lines(self.TRAINER, "_generate_and_score_completions",
                                    "'sum_then_normalize':"), {
            "self": Anything(reward_weights=torch.ones(1, dtype=F64), num_generations=G,
                             scale_rewards=scale_rewards or self.default("scale_rewards"),
                             multi_objective_aggregation=self.default(
                                 "multi_objective_aggregation")),
            "nanstd": self.code.take("trl/trainer/utils.py", "nanstd"), "num_generations": G,
            "rewards_per_func": rewards.reshape(-1, 1), "device": "cpu",
            "unscorable_mask": torch.zeros(P * G, dtype=torch.bool)})
        return found["advantages"].view(P, G)

    def bounds(self, **given):
        """Their lines: epsilon_high falls back to epsilon."""
        args = SimpleNamespace(epsilon=self.default("epsilon"),
                               epsilon_high=self.default("epsilon_high"))
        args.__dict__.update(given)
        names = {"self": SimpleNamespace(), "args": args}
        return vars(run(self.code.lines(self.TRAINER, "__init__", "self.epsilon_low =",
                                        "self.epsilon_high ="), names)["self"])

    def loss(self, part, whole, mode=None, kind="clip", beta=0.0, engine=False, entropy=0.0,
             dual=None, **bounds):
        args = Anything(delta=dual, steps_per_generation=whole.micros,
                        use_bias_correction_kl=self.default("use_bias_correction_kl"))
        trainer = Anything(
            args=args, beta=beta, top_entropy_quantile=1.0, importance_sampling_level="token",
            loss_type="cispo" if kind == "cispo" else mode or self.default("loss_type"),
            current_gradient_accumulation_steps=whole.micros, max_completion_length=LIMIT,
            _metrics=defaultdict(lambda: defaultdict(list)), use_vllm=engine,
            vllm_importance_sampling_correction=engine, entropy_coef=entropy,
            _entropy_bonus_enabled=entropy > 0,
            accelerator=Anything(gather=same, reduce=same, num_processes=whole.ranks),
            _get_per_token_logps_and_entropies=lambda *a, **k: (part.logp, part.entropy, None),
            **self.bounds(**bounds))
        ids = torch.zeros(len(part.mask), 1)
        inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": torch.zeros_like(
            part.mask), "completion_mask": part.mask, "advantages": part.A,
            "old_per_token_logps": part.old, "num_items_in_batch": whole.tokens,
            "ref_per_token_logps": getattr(part, "ref", part.old)}
        if engine:
            inputs["importance_sampling_ratio"] = self.correction(part)
        return self.code.take(self.TRAINER, "_compute_loss", nanmin=torch.min, nanmax=torch.max)(
            trainer, None, inputs)

    def correction(self, part):
        """The factor of each token, with vLLM."""
        names = {name: self.default(name) for name in (
            "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")}
        found = run(self.code.lines(self.TRAINER, "_generate_and_score_completions",
                                    "mask = completion_mask if", "invalid_mis_mask"), {
            "self": Anything(use_vllm=True, **names), "old_per_token_logps": part.old,
            "sampling_per_token_logps": part.engine, "completion_mask": part.mask,
            "tool_mask": None, "mask": part.mask})
        return found["vllm_importance_sampling_ratio"].expand_as(part.mask)


class Verl:
    """verl-project/verl"""
    name, code = "verl", Theirs("verl==0.9.1")
    CORE, ACTOR = "verl/trainer/ppo/core_algos.py", "verl/trainer/config/actor/actor.yaml"
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    flag = "loss_agg_mode"

    @functools.cached_property
    def names(self):
        """Of the functions that others call."""
        found = {"ActorConfig": Anything, "AlgoConfig": type(None), "DictConfig": dict}
        for name in "masked_sum", "masked_mean", "masked_var", "masked_whiten":
            found[name] = self.code.take("verl/utils/torch_functional.py", name, **found)
        found["verl_F"] = SimpleNamespace(**found)
        found["agg_loss"] = self.code.take(self.CORE, "agg_loss", **found)
        found["kl_penalty_forward"] = self.code.take(self.CORE, "kl_penalty_forward")
        return found

    def default(self, name):
        return self.code.default(self.ACTOR, name)

    def advantages(self, rewards, estimator="compute_grpo_outcome_advantage", **options):
        index = np.repeat(np.arange(len(rewards)), rewards.shape[1])
        one = rewards.reshape(-1, 1).clone()
        return self.code.take(self.CORE, estimator, **self.names)(
            one, torch.ones_like(one), index=index, **options)[0].view(rewards.shape)

    def loss(self, part, whole, mode=None, kind="clip", entropy=0.0, dual=None):
        given = {name: self.default(name) for name in (
            "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
        info = {"dp_size": whole.ranks, "batch_num_tokens": whole.tokens,
                "global_batch_size": whole.rows, "loss_scale_factor": self.default(
                    "loss_scale_factor")}
        mode = mode or self.default("loss_agg_mode")
        name = {"clip": "vanilla"}.get(kind, kind)
        loss, _ = self.code.take(self.CORE, f"compute_policy_loss_{name}", **self.names)(
            part.old, part.logp, part.A, part.mask, mode, Anything(global_batch_info=info, **given))
        extra = self.names["agg_loss"](part.entropy, part.mask, mode, **info)
        return loss - entropy * extra

    def kl(self, logp, ref, old, kind):
        return self.code.take(self.CORE, "kl_penalty", **self.names)(logp, ref, kind)


class OpenRLHF:
    """OpenRLHF/OpenRLHF"""
    name, flag = "OpenRLHF", "actor.loss_agg_mode"
    code = Theirs("openrlhf==0.11.2", "openrlhf-0.11.2.data/purelib/openrlhf/")
    modes, CLI = ("token-mean", "seq-mean-token-mean"), "cli/train_ppo_ray.py"
    MAKER = "trainer/ppo_utils/experience_maker.py"

    @functools.cached_property
    def names(self):
        found = {name: self.code.take("models/utils.py", name)
                 for name in ("masked_mean", "compute_reward")}
        found["aggregate_loss"] = self.code.take("models/loss.py", "aggregate_loss", **found)
        return found | {"apply_length_penalties": lambda *given: None, "KL_IS_WEIGHT_CLIP": 10.0}

    def default(self, name):
        return self.code.default(self.CLI, f"--{name}")

    def advantages(self, rewards, estimator="group_norm"):
        P, G = rewards.shape
        advantage = Anything(estimator=estimator, gamma=1.0)
        maker = Anything(
            advantage_estimator=estimator, kl_ctl=SimpleNamespace(value=0.0),
            strategy=SimpleNamespace(args=Anything(
                algo=SimpleNamespace(advantage=advantage),
                rollout=SimpleNamespace(n_samples_per_prompt=G),
                reward=SimpleNamespace(clip_range=self.default("reward.clip_range")))))
        returns = self.code.take(self.MAKER, "get_cumulative_returns")
        maker.get_cumulative_returns = functools.partial(returns, maker)
        one = torch.ones(P * G, 1, dtype=F64)
        made = SimpleNamespace(rewards=rewards.flatten(), index=list(range(P * G)), info={},
                               action_mask=one, kl=0 * one)
        self.code.take(self.MAKER, "compute_advantages_and_returns", **self.names)(maker, [made])
        return made.advantages.view(P, G)

    def loss(self, part, whole, mode=None, kind="clip", entropy=0.0, dual=None):
        eps = self.default("actor.eps_clip")
        mode = mode or self.default("actor.loss_agg_mode")
        policy = self.code.take("models/loss.py", "PolicyLoss", **self.names)(
            eps, eps, dual or self.default("actor.dual_clip"), mode == "token-mean")
        info = self.code.take("utils/loss_utils.py", "_optimizer_step_loss_norm")(
            whole.masks, None, whole.ranks, whole.micros)
        loss = policy(part.logp, part.old, part.A, part.mask, **info)[0]
        extra = self.names["aggregate_loss"](part.entropy, part.mask, **info)
        return (loss - entropy * extra) / whole.micros  # DeepSpeed divides

    def kl(self, logp, ref, old, kind, **options):
        return self.code.take("models/utils.py", "compute_approx_kl", **self.names)(
            logp, ref, old, kind, **options)


class SkyRL:
    """NovaSky-AI/SkyRL"""
    name, code, flag = "SkyRL", Theirs("skyrl==0.3.0"), "loss_reduction"
    CORE, CONFIG = "skyrl/backends/skyrl_train/utils/ppo_utils.py", "skyrl/train/config/config.py"
    modes = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "token_mean_legacy")

    @functools.cached_property
    def names(self):
        path = "skyrl/backends/skyrl_train/utils/torch_utils.py"
        found = {name: self.code.take(path, name) for name in ("masked_mean", "safe_exp_delta")}
        found["reduce_loss"] = self.code.take(self.CORE, "reduce_loss")
        path = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
        found["apply_off_policy_correction"] = self.code.take(path, "apply_off_policy_correction")
        return found

    def default(self, name, home="AlgorithmConfig"):
        return self.code.default(self.CONFIG, f"{home}.{name}")

    def advantages(self, rewards, estimator="compute_grpo_outcome_advantage", **options):
        return Verl.advantages(self, rewards, estimator, **options)

    def loss(self, part, whole, mode=None, kind="clip", entropy=0.0, dual=None):
        config = SimpleNamespace(
            policy_loss_type="dual_clip" if dual else self.default("policy_loss_type"),
            off_policy_correction=None, clip_ratio_c=dual,
            eps_clip_low=self.default("eps_clip_low"), eps_clip_high=self.default("eps_clip_high"),
            cispo=SimpleNamespace(**{name: self.default(name, "CISPOConfig") for name in (
                "cispo_eps_clip_low", "cispo_eps_clip_high")}))
        scale = self.code.take(self.CORE, "apply_loss_reduction_to_advantages_minibatch")
        rows = [row for mask in whole.masks for row in mask]  # on the driver, of all ranks
        mask = padded([row.tolist() for row in rows])
        weights = scale(torch.ones_like(mask), mask, mode or self.default("loss_reduction"),
                        len(whole.masks[0]), LIMIT)
        mine = next(i for i, one in enumerate(whole.masks) if one.shape == part.mask.shape
                    and bool((one == part.mask).all()))
        start = sum(len(one) for one in whole.masks[:mine])
        weights = weights[start:start + len(part.mask), :part.mask.shape[1]]
        name = {"clip": "ppo_policy_loss", "cispo": "compute_policy_loss_cispo"}[kind]
        loss, _ = self.code.take(self.CORE, name, **self.names)(
            part.logp, part.old, part.A * weights, config, part.mask)
        extra = self.names["masked_mean"](part.entropy, part.mask) / whole.micros
        return loss * whole.ranks - entropy * extra

    def kl(self, logp, ref, old, kind):
        return self.code.take(self.CORE, "compute_approx_kl")(logp, ref, None, kind)


class Swift:
    """modelscope/ms-swift"""
    name, code, flag = "ms-swift", Theirs("ms-swift==4.6.0"), "loss_type"
    TRAINER, MIXIN = "swift/rlhf_trainers/grpo_trainer.py", "swift/rlhf_trainers/args_mixin.py"
    ARGS, WINDOW = "swift/arguments/rlhf_args.py", ("dapo", "cispo")  # fipo too
    modes = ("grpo", "dapo", "dr_grpo", "bnpo")

    @functools.cached_property
    def args(self):
        """Their lines fill in what is not given."""
        args = SimpleNamespace(
            **dict.fromkeys(("beta", "loss_type", "scale_rewards", "kl_in_reward")),
            rlhf_type="grpo", advantage_estimator=self.default("advantage_estimator"))
        for inside, first, last in (("_init_grpo", "if self.beta is None", None),
                                    ("_set_default", "if self.loss_type is None", None),
                                    ("_init_grpo", "if self.kl_in_reward is None",
                                     "if self.scale_rewards is None")):
            run(self.code.lines(self.ARGS, inside, first, last), {"self": args})
        return args

    def default(self, name):
        return self.code.default(self.MIXIN, f"GRPOArgumentsMixin.{name}")

    def advantages(self, rewards, estimator=None, scale_rewards=None):
        one = rewards.reshape(-1, 1)
        return self.code.take("swift/rl_core/advantage.py", "compute_advantages")(
            one, torch.ones(1, dtype=F64), rewards.shape[1],
            estimator or self.args.advantage_estimator,
            scale_rewards or self.args.scale_rewards)[0].view(rewards.shape)

    def loss(self, part, whole, mode=None, kind="clip", beta=0.0, dual=None):
        mode = "cispo" if kind == "cispo" else mode or self.args.loss_type
        eps = self.default("epsilon")
        trainer = Anything(
            loss_type=mode, beta=beta, importance_sampling_level="token", compute_entropy=False,
            max_completion_length=LIMIT, args=Anything(delta=dual), epsilon_low=eps,
            epsilon_high=eps, accelerator=Anything(num_processes=whole.ranks), sdar_loss_coef=0,
            current_gradient_accumulation_steps=whole.micros, disable_rollout_importance_sampling=1,
            _get_per_token_logps_and_entropies=lambda *a, **k: (part.logp, None))
        trainer._undo_gradient_accumulation_scaling = functools.partial(self.code.take(
            self.TRAINER, "_undo_gradient_accumulation_scaling",
            WINDOW_NORMALIZED_LOSS_TYPES=self.WINDOW), trainer)
        batch = Anything(completion_mask=part.mask, advantages=part.A, old_per_token_logps=part.old,
                         ref_per_token_logps=getattr(part, "ref", part.old),
                         num_items_in_batch=whole.tokens)
        lines = self.code.lines(self.TRAINER, "_compute_loss_and_metrics", "mode =",
                                "self.loss_type in WINDOW_NORMALIZED_LOSS_TYPES")
        loss = run(lines, {"self": trainer, "grpo_batch": batch, "model": None, "model_inputs": {},
                           "gather_object": same,
                           "WINDOW_NORMALIZED_LOSS_TYPES": self.WINDOW})["loss"]
        return loss / whole.micros  # transformers' Trainer divides


class Oat:
    """sail-sg/oat"""
    name, code, flag = "oat", Theirs("oat-llm==0.2.4"), "critic_type"
    PPO, modes = "oat/algorithms/ppo.py", ("drgrpo", "grpo")

    def default(self, name):
        home = "PPOArgs" if name in ("tis_c", "cliprange", "kl_penalty_coef") else "OATArgs"
        return self.code.default(self.PPO if home == "PPOArgs" else "oat/args.py",
                                 f"{home}.{name}")

    def advantages(self, rewards, critic_type=None):
        args = SimpleNamespace(num_samples=rewards.shape[1],
                               critic_type=critic_type or self.default("critic_type"))
        return self.code.take(self.PPO, "compute_monte_carlo_advantages")(
            SimpleNamespace(args=args), rewards.reshape(-1, 1), None).view(rewards.shape)

    def loss(self, part, whole, mode=None, kind="clip", engine=False, beta=0.0):
        args = SimpleNamespace(critic_type=mode or self.default("critic_type"), beta=beta,
                               generate_max_length=LIMIT, reinforce_update=False,
                               cliprange=self.default("cliprange"),
                               tis_c=self.default("tis_c") if engine else None)
        tools = {name: self.code.take("oat/utils/ops.py", name)
                 for name in ("masked_sum", "masked_mean")}
        learner = SimpleNamespace(args=args)
        run(self.code.lines(self.PPO, "PPOLearner._init", "self.masked_aggregator ="),
            {"self": learner, "args": args, **tools})
        lines = self.code.lines(self.PPO, "learning_step", "if args.reinforce_update:",
                                "if args.beta > 0:")
        names = {"self": learner, "args": args, "new_logps": part.logp, "mb_logps": part.old,
                 "mb_actor_logps": getattr(part, "engine", part.old), "mb_advantage": part.A,
                 "mb_response_masks": part.mask, "mb_loss_masks": torch.ones(len(part.mask)),
                 "stats": defaultdict(list), "infos": {}, "kl_v1_sum": 0, "kl_v2_sum": 0,
                 "act_num_token": 0, "ref_logps": getattr(part, "ref", None),
                 "mini_batch_inds": slice(None), "mb_last_valid_token_pos": 0}
        names["mb_last_valid_token_pos"] = part.mask.shape[1] + 1
        return run(lines, {**names, **tools})["loss"] / whole.micros  # DeepSpeed divides


class AReaL:
    """inclusionAI/AReaL"""
    name, code, flag, modes = "AReaL", Theirs("areal==1.0.4"), "", ("",)
    CONFIG = "areal/api/cli_args.py"

    def default(self, name, home="PPOActorConfig"):
        return self.code.default(self.CONFIG, f"{home}.{name}")

    def advantages(self, rewards, **given):
        """With given: as actor.reward_norm."""
        if not given:
            assert self.default("reward_norm") is None and self.default("adv_norm") is None
            return rewards
        config = SimpleNamespace(**{name: self.default(name, "NormConfig") for name in (
            "mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps")} | given,
            group_size=rewards.shape[1])
        norm = self.code.take("areal/utils/data.py", "Normalization")(config)
        return norm(rewards.flatten()).double().view(rewards.shape)

    def loss(self, part, whole, mode=None, kind="clip", dual=None):
        loss, _ = self.code.take("areal/utils/functional/functional.py", "ppo_actor_loss_fn")(
            part.logp, part.old, part.old, part.A, self.default("eps_clip"), part.mask.bool(),
            self.default("eps_clip_higher"), dual or self.default("c_clip"))
        # The engine weighs a micro-batch by loss_weight_fn: its tokens (trainer/ppo/actor.py).
        return loss * part.mask.sum() / whole.tokens * whole.ranks


class ART:
    """OpenPipe/ART"""
    name, code, modes = "ART", Theirs("openpipe-art==0.5.18"), ()

    def default(self, name):
        """Of LocalBackend.train."""
        given = self.code.node("art/local/backend.py", "LocalBackend.train").args
        names = [a.arg for a in given.kwonlyargs]
        return given.kw_defaults[names.index(name)].value

    def advantages(self, rewards, scale_rewards=None):
        path = "art/preprocessing/tokenize.py"
        if scale_rewards is None:
            scale_rewards = self.default("scale_rewards")
        first = self.code.lines(path, "tokenize_trajectory_groups", "reward_mean =", "reward_std =")
        then = self.code.lines(path, "tokenize_trajectory_groups", "advantage =",
                               "if scale_rewards:")
        found = []
        for row in rewards.tolist():
            group = [SimpleNamespace(reward=reward) for reward in row]
            names = run(first[:2], {"group": group})
            found.append([run(then, {**names, "trajectory": one, "scale_rewards": scale_rewards})[
                "advantage"] for one in group])
        return torch.tensor(found, dtype=F64)

    def loss(self, part, whole, kind=None, **options):
        # They shift these by one token, so that each stands where it is predicted.
        names = {"logprobs": part.old, "advantages": part.A, "assistant_mask": part.mask,
                 "weights": part.mask}
        inputs = {name: F.pad(x, (1, 0)) for name, x in names.items()}
        shift = self.code.take("art/loss.py", "shift_tensor")
        function = self.code.take("art/loss.py", "loss_fn", Loss=SimpleNamespace,
                                  shift_tensor=shift)
        return function(inputs, F.pad(part.logp, (0, 1)), None, None,
                        {"ppo": (kind or self.default("loss_fn")) in ("clip", "ppo")}).policy_loss


class Tinker:
    """thinking-machines-lab/tinker-cookbook"""
    name, code, modes = "tinker-cookbook", Theirs("tinker-cookbook==0.6.1"), ()

    def advantages(self, rewards):
        groups = [SimpleNamespace(get_total_rewards=row.tolist) for row in rewards]
        return torch.stack(self.code.take(
            "tinker_cookbook/rl/data_processing.py", "compute_advantages")(groups)).double()


class Here:
    """This project"""
    name, flag, modes = "here", "--aggregation", ("token", "sequence", "constant")

    def advantages(self, rewards, kind="dr_grpo", eps=1e-6):
        return losses.group_advantages(rewards.flatten(), rewards.shape[1], kind=kind, eps=eps,
                                       scored=torch.ones(rewards.numel(), dtype=torch.bool)
                                       ).view(rewards.shape)

    def loss(self, part, whole, mode=None, kind="clip", entropy=0.0, beta=0.0, ref_kind="k3",
             correction="none", low=0.5, high=2.0, clip_low=0.2, clip_high=0.2, dual_clip=None):
        mask = part.mask.bool()
        logp, old, A = part.logp[mask], part.old[mask], part.A[mask]
        row = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
        loss, _ = losses.LOSSES[kind](logp, old, A, row, n_rows=len(mask), clip_low=clip_low,
                                      clip_high=clip_high, dual_clip=dual_clip)
        if correction != "none":
            loss = loss * losses.engine_correction(
                old, part.engine[mask], row, n_rows=len(mask), kind=correction, low=low,
                high=high)[0]
        if beta:
            loss = loss + beta * losses.kl_estimate(logp, part.ref[mask], kind=ref_kind, old=old)
        lengths = torch.cat([one.sum(1) for one in whole.masks]).long()
        weights = losses.token_weights(lengths, mode or "token", max_tokens=LIMIT,
                                       prompts=torch.zeros_like(lengths))
        weight = {int(n): w for n, w in zip(lengths, weights, strict=True)}
        w = torch.stack([weight[int(n)] for n in mask.sum(1)])[row]
        # grpo.py adds gradients up over ranks; `update` takes their mean
        return (w * (loss - entropy * part.entropy[mask])).sum() * whole.ranks


SYSTEMS = [TRL(), Verl(), OpenRLHF(), SkyRL(), Swift(), Oat(), AReaL(), ART(), Tinker(), Here()]


# ---- the questions

def number(x: float) -> str:
    """A number as the page writes it."""
    text = f"{float(x) + 0.0:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def numbers(xs) -> str:
    """Some of them."""
    return ", ".join(number(x) for x in xs)


def version(system) -> str:
    """Of its wheel; ours has none."""
    return system.code.requirement.split("==")[1] if hasattr(system, "code") else ""


def table(head: str, rows: list[list]) -> str:
    """Markdown."""
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


CENTERED = "0.75, −0.25"  # R - mean, where one of four is right
ADVANTAGES = [  # system, as GRPO: its flag and options; without the std: its flag and options
    ("TRL", "default", {}, '`scale_rewards="none"`', {"scale_rewards": "none"}),
    ("verl", "`adv_estimator=grpo`", {}, "`norm_adv_by_std_in_grpo=False`",
     {"norm_adv_by_std_in_grpo": False}),
    ("OpenRLHF", "`estimator group_norm`", {}, "`estimator dr_grpo`", {"estimator": "dr_grpo"}),
    ("SkyRL", "default", {}, "`grpo_norm_by_std=false`", {"grpo_norm_by_std": False}),
    ("ms-swift", "default", {}, "`scale_rewards none`", {"scale_rewards": "none"}),
    ("oat", "`critic_type grpo`", {"critic_type": "grpo"}, "default", {}),
    ("AReaL", "`reward_norm` group, group", {"mean_level": "group", "std_level": "group"},
     "(default: raw rewards)", {}),
    ("ART", "default", {}, "`scale_rewards=False`", {"scale_rewards": False}),
    ("tinker-cookbook", None, {}, "always", {}),
    ("here", "`--advantage grpo`", {"kind": "grpo"}, "default", {})]


def advantage_table() -> str:
    """Two groups: one of four is right, three of four are."""
    rewards, rows = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]], dtype=F64), []
    for name, flag, options, other, without in ADVANTAGES:
        system, found = NAMED[name], ["", ""]
        if flag:
            found = [numbers(row[[0, 3]]) for row in system.advantages(rewards, **options)]
        plain = numbers(system.advantages(rewards, **without)[0, [0, 3]])
        other += "" if plain == CENTERED else f": {plain}"
        rows.append([f"{name} {version(system)}".strip(), flag or "", *found, other])
    return table("| system | as GRPO | one of four right: advantage of right, wrong | three right "
                 f"| R − mean ({CENTERED}) with |", rows)


def eps_line() -> str:
    """What is added to the std: read off the advantage."""
    rewards, found = torch.tensor([[1, 0, 0, 0]], dtype=F64), {}
    for name, flag, options, _, _ in ADVANTAGES:
        if flag:
            std = rewards.std(correction=0 if name == "ART" else 1)
            A = NAMED[name].advantages(rewards, **options)[0, 0]
            found[name] = round(math.log10(0.75 / float(A) - float(std)))
    large = [name for name, power in found.items() if power == -4]
    rest = [power for power in found.values() if power != -4]
    return f"{' and '.join(large)} add 1e-4 to it, the others 1e{max(rest)} to 1e{min(rest)}."


def population_line() -> str:
    """ART's advantage in units of OpenRLHF's."""
    rewards = torch.tensor([[1, 0, 0, 0]], dtype=F64)
    art, other = (NAMED[name].advantages(rewards)[0, 0] for name in ("ART", "OpenRLHF"))
    return f"{art / other:.3f} at G = 4"


def vllm_line() -> str:
    """TRL's correction."""
    trl = NAMED["TRL"]
    assert trl.default("vllm_importance_sampling_correction")
    return (f"with vLLM: `{trl.default('vllm_importance_sampling_mode')}`, "
            f"{trl.default('vllm_importance_sampling_clip_max'):g}")


def tis_line() -> str:
    """oat's correction."""
    return f"`tis_c` {NAMED['oat'].default('tis_c'):g}"


def verl_dual_line() -> str:
    """verl's default."""
    return f"dual clip on ({NAMED['verl'].default('clip_ratio_c'):g}, documented)"


def rloo_line() -> str:
    """The same number in all that have it."""
    rewards = torch.tensor([[1, 0, 0, 0]], dtype=F64)
    options = {"verl": "compute_rloo_outcome_advantage", "SkyRL": "compute_rloo_outcome_advantage",
               "OpenRLHF": "rloo", "ms-swift": "rloo"}
    found = {name: numbers(NAMED[name].advantages(rewards, estimator=one, **(
        {"scale_rewards": "none"} if name == "ms-swift" else {}))[0, [0, 3]])
        for name, one in options.items()}
    found["here"] = numbers(NAMED["here"].advantages(rewards, kind="rloo")[0, [0, 3]])
    assert len(set(found.values())) == 1, found
    return f"`rloo` is {found['here']} in {', '.join(found)}."


def constant_batch(lengths=LENGTHS, **more) -> dict:
    """Rows with A = 1 and the ratio 1: a token's gradient is minus its weight."""
    rows = {"logp": -1.0, "old": -1.0, "A": 1.0}
    return {name: [[x] * n for n in lengths] for name, x in rows.items()} | more


def weights(system, split: str, of: str = "logp", **options) -> str:
    """Of a token in the shortest completion, and in the longest."""
    scale = -options.get("entropy", 1.0)
    found = update(system, constant_batch(), SPLITS[split], of, **options)
    assert max(float(x.std(correction=0)) for x in found) < 1e-12  # alike within a completion
    return numbers([found[0][0] / scale, found[-1][0] / scale])


def weight_table() -> str:
    """Four completions of 2, 4, 6, 8 tokens; the limit is 16. A system's first mode is its
    default. Rows are padded to the longest of a micro-batch: so does verl's default trainer."""
    assert NAMED["verl"].code.default("verl/trainer/config/ppo_trainer.yaml", "trainer.use_v1")
    rows = []
    for system in SYSTEMS:
        for mode in system.modes:
            whole, halves, ranks = (weights(system, split, mode=mode) for split in SPLITS)
            assert halves == ranks, (system.name, mode)
            first = ""
            if mode == system.modes[0]:
                assert weights(system, "in two") == halves
                first = f"{system.name} `{system.flag}`".replace(" ``", "")
            rows.append([first, f"`{mode}`".replace("``", ""), whole,
                         "same" if halves == whole else halves])
    return table("| system, flag | value | whole | in two |", rows)


def grouped(rows: list[list]) -> list[list]:
    """Systems with the same numbers share a row."""
    found = defaultdict(list)
    for name, *cells in rows:
        found[tuple(cells)].append(name)
    return [[", ".join(names), *cells] for cells, names in found.items()]


def entropy_table() -> str:
    """The weight of a token's entropy."""
    return table("| entropy in | whole | in two |", grouped([
        [name, *(weights(NAMED[name], split, "entropy", entropy=0.01)
                 for split in ("whole", "in two"))]
        for name in ("TRL", "SkyRL", "verl", "OpenRLHF", "here")]))


def one_token(r: float, A: float) -> dict:
    """A batch of one token with the ratio r."""
    return {"logp": [[math.log(r) - 1]], "old": [[-1.0]], "A": [[A]]}


def factors(system, A: float, **options) -> str:
    """What A ∇log π is multiplied by, at each ratio."""
    if system.name == "oat":
        options["mode"] = "grpo"  # one token has the weight 1
    return numbers([-update(system, one_token(r, A), [[[0]]], **options)[0] / A for r in RATIOS])


def clip_table() -> str:
    """Of one token with A = 1 and A = -1."""
    rows, cispo = [], {"TRL", "verl", "SkyRL", "ms-swift", "ART", "here"}
    for system in SYSTEMS:
        if hasattr(system, "loss"):
            rows.append([system.name, factors(system, 1.0, kind="clip"),
                         factors(system, -1.0, kind="clip"),
                         factors(system, 1.0, kind="cispo") if system.name in cispo else "none"])
    return table("| system | clip, A > 0 | clip, A < 0 | cispo, both |",
                 grouped(rows))


# system, kind as its flag names it (empty: `beta`), options of the loss or of `kl`
KLS = [("TRL", "", {"beta": 1.0}), ("verl", " `low_var_kl`", "low_var_kl"),
       ("verl", " `k3+`", "k3+"), ("OpenRLHF", " `k3`", "k3"), ("OpenRLHF", " `k2`", "k2"),
       ("SkyRL", "", "k3"), ("ms-swift", "", {"beta": 1.0}),
       ("oat", "", {"beta": 1.0, "mode": "grpo"}), ("here", " `k3`", "k3"),
       ("here", " `k2`", "k2"), ("here", " `k3_ratio`", "k3_ratio")]
POINTS = ((0.5, 1.0), (-0.5, 1.0), (-3.0, 1.0), (0.5, 1.5))  # log π/π_ref, π/π_old


def kl_slope(system, how, d: float, r: float) -> float:
    """d(the term)/d(log π) of one token."""
    logp = torch.tensor([[-1.0]], dtype=F64, requires_grad=True)
    ref, old = logp.detach() - d, logp.detach() - math.log(r)
    if isinstance(how, str):
        if system.name == "here":
            term = losses.kl_estimate(logp, ref, kind=how, old=old)
        else:
            term = system.kl(logp, ref, old, how)
        return float(torch.autograd.grad(term.sum(), logp)[0])
    batch = {"logp": [[-1.0]], "old": old.tolist(), "ref": ref.tolist(), "A": [[0.0]]}
    return float(update(system, batch, [[[0]]], **how)[0])


def kl_table() -> str:
    """The derivatives at POINTS."""
    return table("| system | d = 0.5 | d = −0.5 | d = −3 | d = 0.5, r = 1.5 |", grouped([
        [name + flag, *(number(kl_slope(NAMED[name], how, *point)) for point in POINTS)]
        for name, flag, how in KLS]))


DUAL = {"verl": "`clip_ratio_c`", "TRL": "`delta`", "ms-swift": "`delta`",
        "OpenRLHF": "`actor.dual_clip`", "AReaL": "`c_clip`",
        "SkyRL": "`policy_loss_type=dual_clip`", "here": "`--dual_clip`"}


def dual_line() -> str:
    """The flag of dual clip: with 3 all give the same."""
    for name in DUAL:
        given = {"kind": "clip", "dual_clip" if name == "here" else "dual": 3.0}
        assert factors(NAMED[name], -1.0, **given) == "0, 1.5, 0", name
        assert factors(NAMED[name], 1.0, **given) == "0.5, 0, 0", name
    flags = defaultdict(list)
    for name, flag in DUAL.items():
        flags[flag].append(name)
    return "; ".join(f"{', '.join(names)} {flag}" for flag, names in flags.items())


def engine_table() -> str:
    """Two completions, π_trainer / π_engine of their tokens: (.5, 1.2, 4) and (1.2, 4)."""
    ratios = [[0.5, 1.2, 4.0], [1.2, 4.0]]
    batch = constant_batch([3, 2], engine=[[-1 - math.log(w) for w in row] for row in ratios])
    rows = []
    for name, options in (("TRL", {"engine": True, "mode": "grpo"}),
                          ("oat", {"engine": True, "mode": "grpo"}),
                          ("here", {"mode": "sequence"})):
        found = update(NAMED[name], batch, [[[0, 1]]], **options)
        rows.append([name, *(numbers(-x * 2 * len(x)) for x in found)])
    off = {"verl": NAMED["verl"].code.default(
               "verl/trainer/config/algorithm/rollout_correction.yaml", "rollout_is"),
           "SkyRL": NAMED["SkyRL"].default("tis_ratio_type", "OffPolicyCorrectionConfig"),
           "ms-swift": NAMED["ms-swift"].default("rollout_importance_sampling_mode"),
           "OpenRLHF": NAMED["OpenRLHF"].default("algo.advantage.is_correction_level")}
    assert {value or "off" for value in off.values()} == {"off"}
    assert not NAMED["AReaL"].default("recompute_logprob")
    assert not NAMED["ART"].default("precalculate_logprobs")
    return table("| system | w = 0.5, 1.2, 4 | w = 1.2, 4 |", rows)


def default_table() -> str:
    """What else is on. The gradient's norm of TRL and ms-swift is transformers' default."""
    trl, verl, rlhf, sky, swift, oat, areal, art = (NAMED[name] for name in (
        "TRL", "verl", "OpenRLHF", "SkyRL", "ms-swift", "oat", "AReaL", "ART"))
    args = SimpleNamespace(learning_rate=None, tuner_type="full")
    run(swift.code.lines("swift/arguments/sft_args.py", "SftArguments",
                         "if self.learning_rate is None"), {"self": args})
    art_norm = next(keyword(n, "max_grad_norm").value for n in ast.walk(art.code.node(
        "art/dev/get_model_config.py", "get_model_config")) if isinstance(n, ast.Call)
        and any(k.arg == "max_grad_norm" for k in n.keywords))
    rows = [["TRL", trl.default("learning_rate"), "", trl.default("beta")],
            ["verl", float(verl.default("optim.lr")), verl.code.default(
                "verl/trainer/config/actor/dp_actor.yaml", "grad_clip"),
             verl.default("kl_loss_coef") if verl.default("use_kl_loss") else 0],
            ["OpenRLHF", rlhf.default("{prefix}.adam.lr"), rlhf.default("{prefix}.max_norm"),
             rlhf.default("algo.kl.init_coef")],
            ["SkyRL", sky.default("lr", "OptimizerConfig"),
             sky.default("max_grad_norm", "OptimizerConfig"),
             sky.default("kl_loss_coef") if sky.default("use_kl_loss") else 0],
            ["ms-swift", args.learning_rate, "", swift.args.beta],
            ["oat", oat.default("learning_rate"), oat.default("max_norm"), oat.default("beta")],
            ["AReaL", areal.default("lr", "OptimizerConfig"),
             areal.default("gradient_clipping", "OptimizerConfig"), areal.default("kl_ctl")],
            ["ART", art.default("learning_rate"), art_norm, art.default("kl_penalty_coef")]]
    import grpo
    args = grpo.Args()
    rows.append(["here", args.usual_lr, args.max_grad_norm, args.kl_loss_coef])
    return table("| system | learning rate | gradient norm | KL coefficient |", grouped([
        [name, *(x if x == "" else f"{x:g}" for x in values)] for name, *values in rows]))


# ---- recipes: to get another system's update here

GRPO_4 = "--advantage grpo --advantage_eps 1e-4"
RECIPES = [  # system, its settings in words, options of its advantages and loss, flags of grpo.py
    ("TRL", "defaults, no vLLM", {}, {}, GRPO_4),
    ("TRL", "defaults, vLLM", {}, {"engine": True},
     f"{GRPO_4} --engine_correction sequence_mask --correction_low 0 --correction_high 3"),
    ("TRL", '`loss_type="grpo", beta=0.04`', {}, {"mode": "grpo", "beta": 0.04},
     f"{GRPO_4} --aggregation sequence --kl_loss_coef 0.04 --kl_estimator k3_ratio"),
    ("TRL", '`loss_type="cispo", epsilon_high=5`', {}, {"kind": "cispo", "epsilon_high": 5.0},
     f"{GRPO_4} --loss cispo --clip_low 1 --clip_high 4"),
    ("verl", "`adv_estimator=grpo`", {}, {}, "--advantage grpo --dual_clip 3"),
    ("OpenRLHF", "`estimator group_norm`, `kl.init_coef 0`", {}, {},
     "--advantage grpo --advantage_eps 1e-9"),
    ("SkyRL", "`use_kl_loss=false`", {}, {}, "--advantage grpo"),
    ("SkyRL", "the same, `policy_loss_type=cispo`", {}, {"kind": "cispo"},
     "--advantage grpo --loss cispo --clip_low 0 --clip_high 5"),
    ("ms-swift", "defaults", {}, {"beta": 0.04},
     f"{GRPO_4} --aggregation sequence --kl_loss_coef 0.04"),
    ("oat", "defaults", {}, {"engine": True, "beta": 0.1},
     "--advantage dr_grpo --aggregation constant --engine_correction truncate --kl_loss_coef 0.1"),
    ("AReaL", "`reward_norm` group, group; `recompute_logprob`; `kl_ctl=0`",
     {"mean_level": "group", "std_level": "group"}, {},
     "--advantage grpo --advantage_eps 1e-5")]


def options_of(flags: str) -> tuple[dict, dict]:
    """Flags of grpo.py -> options of Here's advantages, and of its loss."""
    words = flags.replace("--", "").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    advantage = {"kind": given.pop("advantage", "dr_grpo"),
                 "eps": float(given.pop("advantage_eps", 1e-6))}
    names = {"aggregation": "mode", "loss": "kind", "engine_correction": "correction",
             "correction_low": "low", "correction_high": "high", "kl_loss_coef": "beta",
             "kl_estimator": "ref_kind"}
    words = "mode", "kind", "correction", "ref_kind"
    loss = {names.get(name, name): value for name, value in given.items()}
    return advantage, {name: x if name in words else float(x) for name, x in loss.items()}


def apart(recipe: tuple, split: list) -> float:
    """The largest difference of the two updates' gradients, in units of the largest entry. Two
    groups of eight, after the policy has moved far; their trainer cuts the step as `split` says,
    ours takes it whole."""
    name, _, advantage, options, flags = recipe
    rng, lengths = np.random.default_rng(3), (2, 4, 6, 8, 3, 5, 1, 7) * 2
    rewards = torch.tensor([[1, 0] * 4, [1, 1, 0.3, 0] * 2], dtype=F64)
    old = [(-rng.exponential(size=n)).tolist() for n in lengths]
    near = {part: [[x + far * y for x, y in zip(row, rng.normal(size=len(row)), strict=True)]
                   for row in old] for part, far in (("logp", 1.2), ("engine", .5))}
    near["ref"] = [[x + rng.normal() / 2 for x in row] for row in near["logp"]]  # no k3 is over 10
    found = []
    for system, mine, its in ((NAMED[name], advantage, options),
                              (NAMED["here"], *options_of(flags))):
        A = system.advantages(rewards, **mine).flatten().tolist()
        batch = near | {"old": old, "A": [[a] * n for a, n in zip(A, lengths, strict=True)]}
        found.append(torch.cat(update(
            system, batch, split if system.name == name else [[list(range(16))]], **its)))
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


QUARTERS = [list(range(i, i + 4)) for i in range(0, 16, 4)]
CUTS = ([QUARTERS], [QUARTERS[:2], QUARTERS[2:]])  # on one rank, and on two


def recipe_table() -> str:
    """Cut in four micro-batches, on one rank and on two."""
    rows = []
    for recipe in RECIPES:
        far = max(apart(recipe, cut) for cut in CUTS)
        flags = recipe[4].replace("--advantage grpo", "").strip()
        rows.append([recipe[0], recipe[1], f"`{flags}`" if flags else "",
                     next(text for text in ("1e-15", "1e-7", "1") if far < float(text))])
    return table("| system | settings | here: `--advantage grpo` and | apart |", rows)


# ---- the vectors: what the papers' formulas give, by tests/reference_losses.py and by polgrad

LOSS_CASES = {  # name: --loss, its bounds, how far the policy has moved
    "clip": ("clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}, 0.4),
    "dapo": ("clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}, 0.4),
    "dual clip": ("clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, 1.5),
    "gspo": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}, 1e-3),
    "gspo wide": ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": None}, 0.4),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 0.2, "dual_clip": None}, 0.6),
    "cispo two-sided": ("cispo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}, 0.6)}
ROWS, GROUP = (7, 1, 3, 5, 4, 2), 3  # tokens of six completions, of two prompts
AGGREGATIONS = ("token", "sequence", "constant", "prompt")
CORRECTIONS = ("truncate", "mask", "sequence_truncate", "sequence_mask", "sequence_mean")
SOURCES = {"grpo": "https://arxiv.org/abs/2402.03300",
           "dr_grpo": "https://arxiv.org/abs/2503.20783",
           "rloo": "https://arxiv.org/abs/2402.14740", "maxrl": "https://arxiv.org/abs/2602.02710",
           "reinforce++, reinforce++-baseline": "https://arxiv.org/abs/2501.03262",
           "clip": "https://arxiv.org/abs/1707.06347", "dapo": "https://arxiv.org/abs/2503.14476",
           "dual clip": "https://arxiv.org/abs/1912.09729",
           "gspo": "https://arxiv.org/abs/2507.18071", "cispo": "https://arxiv.org/abs/2506.13585",
           "kl": "http://joschu.net/blog/kl-approx.html; "
                 "k3_ratio: https://arxiv.org/abs/2512.02556",
           "truncate": "https://fengyao.notion.site/off-policy-rl",
           "mask": "https://arxiv.org/abs/2510.18855",
           "prompt": "https://arxiv.org/abs/2510.13786"}


def drawn(rng, scale: float = 1.0) -> list[list[float]]:
    """Random rows of ROWS."""
    return [[round(scale * x, 6) for x in rng.normal(size=n)] for n in ROWS]


def moved(rows: list, by: list) -> list[list[float]]:
    """Rows plus rows."""
    return [[round(a + b, 6) for a, b in zip(row, more, strict=True)]
            for row, more in zip(rows, by, strict=True)]


def flat(rows) -> list[float]:
    """All numbers of rows."""
    return [float(x) for row in rows for x in row]


class Both:
    """polgrad beside the reference, and how far they were apart."""

    def __init__(self):
        sys.path.insert(0, str(wheel("polgrad==0.2.1")))
        import polgrad
        self.polgrad, self.compared, self.worst = polgrad, 0, 0.0

    def agree(self, ours, theirs) -> None:
        """Two lists of numbers."""
        apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert apart <= 1e-12, apart
        self.compared, self.worst = self.compared + len(ours), max(self.worst, apart)

    def aggregation(self, name: str) -> dict:
        mode = {"token": "TOKEN_MEAN", "sequence": "SEQ_MEAN_TOKEN_MEAN",
                "constant": "TOKEN_SUM_NORM"}[name]
        return {"aggregation": self.polgrad.Aggregation[mode],
                "norm_len": LIMIT if name == "constant" else None}

    def config(self, kind: str, flags: dict, aggregation: str):
        ratio = self.polgrad.RatioKind["SEQUENCE_TOKEN" if kind == "gspo" else "TOKEN"]
        surrogate = self.polgrad.SurrogateKind["CISPO" if kind == "cispo" else "PG_CLIP"]
        low = None if kind == "cispo" and flags["clip_low"] == 1 else flags["clip_low"]
        return self.polgrad.PolicyLossConfig(
            ratio=ratio, surrogate=surrogate, clip=self.polgrad.ClipConfig(
                low, flags["clip_high"], flags["dual_clip"]), **self.aggregation(aggregation))


def reference_loss(kind: str, flags: dict, case: dict, aggregation: str):
    """-> the loss, its gradient in each row, and the loss of each token."""
    args = SimpleNamespace(**flags, aggregation=aggregation, group=GROUP, max_tokens=LIMIT)
    total, found, leaves, lengths = 0.0, [], [], {i: len(x) for i, x in enumerate(case["logp"])}
    for i, (logp, old, A) in enumerate(zip(case["logp"], case["old"], case["advantages"],
                                           strict=True)):
        leaf = [torch.tensor(x, dtype=F64, requires_grad=True) for x in logp]
        ratios = [(x - y, a) for x, y, a in zip(leaf, old, A, strict=True)]
        each = [reference_losses.token_loss(args, kind, x, y, a, ratios)[0]
                for x, y, a in zip(leaf, old, A, strict=True)]
        total = total + reference_losses.token_weight(args, i, lengths) * sum(each)
        leaves.append(leaf)
        found.append([float(x.detach()) for x in each])
    slopes = iter(torch.autograd.grad(total, sum(leaves, []), materialize_grads=True))
    return float(total.detach()), [[float(next(slopes)) for _ in leaf] for leaf in leaves], found


def loss_vectors(both: Both, rng) -> list[dict]:
    """Of LOSS_CASES."""
    made = []
    for name, (kind, flags, far) in LOSS_CASES.items():
        old = [[-abs(x) for x in row] for row in drawn(rng)]
        A = [round(float(x), 6) for x in rng.normal(size=len(ROWS))]
        case = {"name": name, "loss_kind": kind, "flags": flags, "max_tokens": LIMIT,
                "group": GROUP, "logp": moved(old, drawn(rng, far)), "old": old,
                "advantages": [[a] * n for a, n in zip(A, ROWS, strict=True)],
                "loss": {}, "gradient": {}}
        for aggregation in AGGREGATIONS:
            loss, slope, case["token_loss"] = reference_loss(kind, flags, case, aggregation)
            case["loss"][aggregation], case["gradient"][aggregation] = loss, slope
            if aggregation != "prompt":  # polgrad has none
                logp = padded(case["logp"]).requires_grad_()
                mask = padded([[1.0] * n for n in ROWS]).bool()
                theirs = both.polgrad.policy_loss(
                    both.config(kind, flags, aggregation), logprobs=logp, response_mask=mask,
                    old_logprobs=padded(old), advantages=torch.tensor(A, dtype=F64)).loss
                both.agree([loss], [float(theirs.detach())])
                both.agree(flat(slope), torch.autograd.grad(theirs, logp)[0][mask].tolist())
        made.append(case)
    return made


def advantage_vectors(both: Both, rng) -> list[dict]:
    """Three batches of groups."""
    made, eps = [], 1e-6
    for name, rewards in (("one right of four", [[1.0, 0.0, 0.0, 0.0]]),
                          ("binary", [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
                          ("real", rng.uniform(0, 2, size=(3, 5)).round(6).tolist())):
        rewards = [[float(x) for x in row] for row in rewards]
        batch, args = flat(rewards), SimpleNamespace(advantage_eps=eps)
        lengths = [int(n) for n in rng.integers(1, 6, size=len(batch))]
        found = {kind: [reference_losses.group_advantage(args, kind, R, row, batch)
                        for row in rewards for R in row]
                 for kind in ("grpo", "dr_grpo", "rloo", "maxrl")}
        for kind, of in (("reinforce++", batch), ("reinforce++-baseline", found["dr_grpo"])):
            white = reference_losses.whiten([[x] * n for x, n in zip(of, lengths, strict=True)])
            found[kind] = [row[0] for row in white]
            mask = padded([[1.0] * n for n in lengths]).bool()
            if len(set(of)) > 1:
                theirs = both.polgrad.whiten(torch.tensor(of)[:, None].expand(mask.shape), mask)
                both.agree(found[kind], theirs[:, 0].tolist())
        ids = torch.arange(len(rewards)).repeat_interleave(len(rewards[0]))
        for kind, scale in (("grpo", "std"), ("dr_grpo", "none")):
            config = both.polgrad.GroupNormConfig(scale=scale, eps=eps)
            both.agree(found[kind], both.polgrad.grpo_advantages(
                torch.tensor(batch), ids, config).tolist())
        both.agree(found["rloo"], both.polgrad.rloo_advantages(torch.tensor(batch), ids).tolist())
        made.append({"name": name, "rewards": rewards, "eps": eps, "lengths": lengths,
                     "advantages": found})
    return made


def kl_vectors(both: Both, rng) -> dict:
    """Values and derivatives of each estimator."""
    logp = [[-abs(x) for x in row] for row in drawn(rng)]
    case = {"logp": logp, "ref": moved(logp, drawn(rng, 0.5)), "old": moved(logp, drawn(rng, 0.3))}
    for kind in ("k1", "k2", "k3", "k3_ratio"):
        x = torch.tensor(flat(logp), requires_grad=True)
        values = [reference_losses.kl_loss(kind, *three) for three in zip(
            x, flat(case["ref"]), flat(case["old"]), strict=True)]
        slope = torch.autograd.grad(sum(values), x)[0].tolist()
        case[kind] = {"value": [float(v) for v in values], "gradient": slope}
        if kind != "k3_ratio":
            leaf = padded(logp).requires_grad_()
            mask = padded([[1.0] * n for n in ROWS]).bool()
            theirs = both.polgrad.kl_estimate(leaf, padded(case["ref"]), both.polgrad.KLEstimator(
                kind), response_mask=mask)
            both.agree(case[kind]["value"], theirs[mask].tolist())
            both.agree(slope, torch.autograd.grad(theirs.sum(), leaf)[0][mask].tolist())
    return case


def aggregation_vectors(both: Both) -> dict:
    """The weight of a token of each completion. However the step is cut, it stays the same."""
    case = {"lengths": LENGTHS, "group": 2, "max_tokens": LIMIT, "weights": {},
            "micro_batches": {name: split for name, split in SPLITS.items()}}
    mask = padded([[1.0] * n for n in LENGTHS]).bool()
    for name in AGGREGATIONS:
        args = SimpleNamespace(aggregation=name, group=2, max_tokens=LIMIT)
        found = [reference_losses.token_weight(args, i, dict(enumerate(LENGTHS))) for i in range(4)]
        case["weights"][name] = found
        if name != "prompt":
            given = both.aggregation(name)
            both.agree(found, both.polgrad.effective_token_weights(
                mask, given["aggregation"], norm_len=given["norm_len"])[:, 0].tolist())
    args = SimpleNamespace(aggregation="token")
    halves = [dict(enumerate(LENGTHS[:2])), dict(enumerate(LENGTHS[2:]))]
    means = [reference_losses.token_weight(args, 0, half) / 2 for half in halves for _ in half]
    both.agree(means, both.polgrad.microbatch_token_weights(
        mask, both.polgrad.Aggregation.TOKEN_MEAN, [2, 2])[:, 0].tolist())
    return case | {"mean of micro-batch means, in two": means}


def correction_vectors(both: Both, rng) -> dict:
    """The factors of each correction."""
    old = [[-abs(x) for x in row] for row in drawn(rng)]
    case = {"old": old, "engine": moved(old, drawn(rng, 0.5)), "low": 0.5, "high": 2.0,
            "factors": {}}
    mask = padded([[1.0] * n for n in ROWS]).bool()
    for kind in CORRECTIONS:
        args = SimpleNamespace(engine_correction=kind, correction_low=0.5, correction_high=2.0)
        case["factors"][kind] = [reference_losses.engine_correction(args, *pair)[0]
                                 for pair in zip(old, case["engine"], strict=True)]
        level = {"truncate": "token", "sequence_truncate": "sequence"}.get(kind)
        if level:  # the loss of polgrad with A = 1 and the ratio 1 is minus the factors' mean
            config = both.polgrad.PolicyLossConfig(
                ratio=both.polgrad.RatioKind.TOKEN, surrogate=both.polgrad.SurrogateKind.PG,
                clip=None, is_correction=both.polgrad.ISCorrectionConfig(level=level, cap=2.0),
                **both.aggregation("token"))
            theirs = both.polgrad.policy_loss(
                config, logprobs=padded(old), old_logprobs=padded(old), response_mask=mask,
                rollout_logprobs=padded(case["engine"]), advantages=torch.ones(len(ROWS)))
            both.agree(flat(case["factors"][kind]), (-theirs.per_token_objective)[mask].abs(
                ).tolist())
    return case


def entropy_vectors(both: Both, rng) -> dict:
    """A mask leaves tokens out: in the sum, and in the number of tokens."""
    entropy = [[abs(x) for x in row] for row in drawn(rng)]
    mask = [[int(t % 3 != 1) for t in range(n)] for n in ROWS]
    case = {"entropy": entropy, "mask": mask, "max_tokens": LIMIT, "group": GROUP, "value": {}}
    lengths = {i: sum(row) for i, row in enumerate(mask)}
    for name in AGGREGATIONS:
        args = SimpleNamespace(aggregation=name, group=GROUP, max_tokens=LIMIT)
        case["value"][name] = sum(
            reference_losses.token_weight(args, i, lengths) * x
            for i, row in enumerate(entropy) for x, m in zip(row, mask[i], strict=True) if m)
        if name != "prompt":
            given = both.aggregation(name)
            both.agree([case["value"][name]], [float(both.polgrad.aggregate(
                padded(entropy), padded(mask).bool(), given["aggregation"],
                norm_len=given["norm_len"]))])
    return case


def vectors() -> tuple[dict, Both]:
    """All cases; and what polgrad was asked."""
    both, rng = Both(), np.random.default_rng(72)
    return {
        "about": "Inputs and what the papers' formulas give, in float64, by tests/reference_losses"
                 ".py, and by polgrad 0.2.1 where it has the algorithm; both agree to 1e-12. Rows "
                 "of tokens are completions without padding. A loss is made smaller. flags: ratios "
                 "are bounded by 1 - clip_low and 1 + clip_high; gspo is GSPO-token. std: ddof 1.",
        "papers": SOURCES, "advantages": advantage_vectors(both, rng),
        "losses": loss_vectors(both, rng), "kl": kl_vectors(both, rng),
        "aggregation": aggregation_vectors(both), "corrections": correction_vectors(both, rng),
        "entropy": entropy_vectors(both, rng)}, both


NAMED = {system.name: system for system in SYSTEMS}
QUESTIONS = {
    "advantage": advantage_table, "population std": population_line, "eps": eps_line,
    "rloo": rloo_line, "weight": weight_table, "entropy": entropy_table, "clip": clip_table,
    "verl": verl_dual_line, "dual": dual_line, "kl": kl_table, "engine": engine_table,
    "vLLM": vllm_line, "oat": tis_line, "defaults": default_table, "recipes": recipe_table}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vectors", action="store_true")
    given = parser.parse_args()
    torch.set_default_dtype(F64)  # some of theirs divide two counts
    fetch()
    if given.vectors:
        made, both = vectors()
        VECTORS.write_text(json.dumps(made) + "\n")
        print(f"{VECTORS.stat().st_size:,} bytes; polgrad: {both.compared} numbers, at most "
              f"{both.worst:.1e} apart")
        return
    warnings.filterwarnings("ignore", message="cov")  # ART's correlation of one number
    print(*WHEELS)
    for name, make in QUESTIONS.items():
        print(f"\n{name}\n{make()}")


if __name__ == "__main__":
    main()
