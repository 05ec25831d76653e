"""A setting's steps by the shipped `learn` on real ranks, and by reference.py."""
import copy
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import learning
import model
import ranks
from batch import Batch
from learning import difference
from reference_settings import Setting, arguments
from tools import float64
from tools.written import plainly

LIMIT = 1e-11  # from the reference
SIZES = learning.SIZES | dict(hidden_size=16, intermediate_size=24, head_dim=8,
                              tie_word_embeddings=True, initializer_range=0.3)


def save_two(lm, folder: str) -> None:
    """FOLDER/policy is the model, FOLDER/start one that is close to it."""
    lm.double().save_pretrained(f"{folder}/policy")
    with torch.no_grad():
        for p in lm.parameters():
            p *= 1 + 0.2 * torch.randn_like(p)
    lm.save_pretrained(f"{folder}/start")


def start_of(name: str, shape) -> torch.Tensor:
    """The first weights of what no file has, such as the critic's head; none is zero."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def all_steps(setting: Setting, args, policy, critic, learn) -> dict:
    """Metrics of each step; gradients of each update, then weights, of policy and critic.

    learn(samples, lr, kl_coef) → metrics.
    """
    found, kl_coef = [], getattr(args, "kl_reward_coef", 0.0)
    for step in range(setting.steps):
        waits = setting.script == "ppo" and step < args.critic_warmup_steps
        found.append(learn(setting.samples(step), 0.0 if waits else args.lr, kl_coef))
    models = [one for one in (policy, critic) if one is not None]
    return {"metrics": found, "gradients": [[flat(g) for g in one.gradients] for one in models],
            "weights": [flat(one.weights_now()) for one in models]}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """{name: tensor} → one vector."""
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors, key=short)])


# ---- the shipped code ----


def short(name: str) -> str:
    """A parameter's name without the prefixes of the classes around the model."""
    return name.removeprefix("lm.").removeprefix("model.").removesuffix("head.weight") or "head"


@cache
def names_in(folder: str) -> set[str]:
    """The parameters of a folder's model."""
    return {*map(short, model.skeleton(folder).state_dict())}


class Spy:
    """A policy or a critic that keeps each optimizer step's gradient: {name: whole tensor}."""

    def step(self, lr):
        self.gradients.append({short(name): model.whole(p.grad).clone()
                               for name, p in self.parameters.items()})
        return super().step(lr)

    def weights_now(self) -> dict[str, torch.Tensor]:
        self.module.reshard()  # after a forward without backward, the root is whole
        return {short(name): model.whole(p.detach()).clone()
                for name, p in self.parameters.items()}


class Shipped:
    """What the shipped code makes of a setting, on this rank."""

    def __init__(self, world, folder: str, setting: Setting, args):
        self.world, self.folder, self.setting, self.args = world, folder, setting, args

    def build(self, kind: str, role: str, name: str, trained: bool = True):
        """A policy or a critic with the weights of a folder. kind, role: of model.Kinds."""
        folder = f"{self.folder}/{self.setting.folder(name)}"
        kinds = model.kinds(self.args, model.config_of(folder), trained)
        module = float64.build(getattr(kinds, kind), folder, self.world, self.args)
        for parameter, p in module.named_parameters():
            if short(parameter) not in names_in(folder):
                assert parameter != "head.weight" or not p.to_local().any()  # V is 0 at first
                full = start_of(short(parameter), p.shape).to(p.dtype)
                p.data.copy_(distribute_tensor(full, p.device_mesh, p.placements,
                                               src_data_rank=None))
        made = type("Spied", (Spy, getattr(kinds, role)), {})(module, self.world, self.args)
        made.gradients = []
        return made

    def run(self) -> dict:
        """Gradients, weights and metrics of all steps, and micro-batches: (phase, budget, [(rows,
        tokens) …]) of each call. Before each step the engine reads the weights."""
        args, setting, critic, before, calls = self.args, self.setting, None, None, []
        policy = self.build("logprob_model", "policy", "policy")
        script = setting.scripts[setting.script]
        if setting.script == "ppo":
            critic = self.build("value_model", "critic", "policy")
        if args.needs_reference:
            load = partial(self.build, "logprob_model", "policy", "start", trained=False)
            before = load() if setting.teaches else policy.reference(load)

        def learn(samples, lr, kl_coef):
            assert all(weight.isfinite().all() for _, weight in policy.weights())
            models, options = policy, {"reference": before}
            if critic is not None:
                models = policy, critic
                options |= {"critic_lr": args.critic_lr, "kl_coef": kl_coef}
            return script.learn(args, self.world, models, samples, lr=lr,
                                **setting.options(**options))

        def micro_batches(batch, world, rows, budget, phase, real=Batch.micro_batches):
            made = real(batch, world, rows, budget, phase)
            calls.append((phase, budget, [(tuple(m.rows), m.size) for m in made]))
            return made

        with patch.object(Batch, "micro_batches", micro_batches):
            return all_steps(setting, args, policy, critic, learn) | {"micros": calls}


def learn_all(world, folder: str, settings: dict[int, Setting]) -> dict[int, dict]:
    """The outcome of each setting on this rank."""
    return {number: Shipped(world, folder, setting, arguments(setting, number)).run()
            for number, setting in settings.items()}


def on_ranks(folder: str, settings: dict[int, Setting], size: int) -> dict[int, list[dict]]:
    """number → the outcome of each rank."""
    found = ranks.results(size, learn_all, folder, settings, timeout=500)
    return {number: [outcomes[number] for outcomes in found] for number in settings}


# ---- the reference ----


def expected(setting: Setting, args, lms) -> dict:
    """What the reference makes of a setting's steps. lms: folder → its model."""
    def made(name: str, head=None, adapted: bool = True):
        return setting.model(copy.deepcopy(lms(setting.folder(name))), args, head, adapted)

    policy, critic, before = made("policy"), None, None
    if args.needs_reference:
        before = made(setting.before, adapted=False)
    if setting.script == "ppo":
        critic = made("policy", head=start_of("head", (1, 16))[0].requires_grad_())

    def learn(samples, lr, kl_coef):
        completions = [plainly(sample) for sample in samples]
        return setting.learn(args, (policy, critic, before), samples, completions, lr, kl_coef)

    return all_steps(setting, args, policy, critic, learn)


# ---- both are equal ----


def gaps(ours: dict, theirs: dict) -> dict[str, float]:
    """The relative difference of each gradient, of all weights and of each metric."""
    found = {}
    for who, mine, right in zip("policy critic".split(), ours["gradients"], theirs["gradients"],
                                strict=False):
        found |= {f"{who}, gradient of update {k}": difference(a, b)
                  for k, (a, b) in enumerate(zip(mine, right, strict=True))}
    found |= {f"weights {k}": difference(a, b) for k, (a, b) in enumerate(
        zip(ours["weights"], theirs["weights"], strict=True))}
    for step, (mine, right) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        assert not any(value for name, value in mine.items() if "not_finite" in name)
        names = {name for name in mine.keys() ^ right.keys() if "not_finite" not in name}
        assert not names, f"metrics of one side: {sorted(names)}"
        found |= {f"metric {name} of step {step}: {mine[name]} not {right[name]}":
                  abs(mine[name] - right[name]) / max(1.0, abs(right[name])) for name in right}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Random models of two layers."""
    path = str(tmp_path_factory.mktemp("reference"))
    torch.manual_seed(0)
    save_two(Qwen3ForCausalLM(Qwen3Config(**SIZES)), path)
    save_two(Qwen2ForCausalLM(Qwen2Config(**SIZES | {"tie_word_embeddings": False})),
             f"{path}/untied")
    return path


@pytest.fixture(scope="module")
def right(folder):
    """(setting, number) → what the reference makes of it."""
    lms = cache(lambda name: AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", dtype=torch.float64, attn_implementation="sdpa").eval())
    return cache(lambda setting, number: expected(setting, arguments(setting, number), lms))


def check(setting: Setting, outcomes: list[dict], theirs: dict, limit: float = LIMIT,
          of_metrics: float = 1.0) -> None:
    """Asserts that what each rank makes of a setting has no gap above the limit to another outcome;
    that of metrics is so many times the limit."""
    for ours in outcomes:
        wrong = [f"{what} (off by {size:.1e})" for what, size in gaps(ours, theirs).items()
                 if not size <= limit * (of_metrics if what.startswith("metric") else 1)]
        assert not wrong, "\n".join([setting.words, *wrong])


def every_pair(settings: list[Setting], size: int, folder: str, right) -> None:
    """Asserts that every rank has the reference's metrics, whole gradients and weights."""
    for number, found in on_ranks(folder, dict(enumerate(settings)), size).items():
        one = settings[number]
        check(one, found, right(one, number), 10 * LIMIT)  # drawn flags: any values
