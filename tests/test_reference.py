"""The shipped `learn` of each script is the papers' update, in float64: reference.py.

Each setting learns for a few steps from made-up completions. Gradients, weights and metrics must be
those of the reference: not those of another layout, which may have the same mistake.
"""
import copy
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import losses
import model
import ranks
import reference
import reference_losses
from batch import Sample
from fakes import SCRIPTS
from learning import difference
from reference_settings import CHOICES, SETTINGS, VOCAB, Setting, arguments, drawn
from tools import float64

LIMIT = 1e-11


SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    tie_word_embeddings=True, initializer_range=0.3, bos_token_id=None, eos_token_id=None)


def plainly(sample: Sample) -> reference.Completion:
    """The same for the reference."""
    completion = sample.completion
    return reference.Completion(
        sample.prompt.row.prompt_ids, completion.ids.tolist(), completion.sampled.tolist(),
        completion.logprobs[completion.sampled].tolist(), completion.truncated,
        sample.score.total, sample.score.parts,
        [turn["paid"] for turn in getattr(completion, "turns", ())],
        np.random.default_rng([sample.prompt.position, *completion.ids.tolist()]).random(
            completion.tokens).tolist())


def make_models(folder: str) -> None:
    """FOLDER/policy and FOLDER/start: two random models of two layers, close to each other."""
    torch.manual_seed(0)
    save_two(Qwen3ForCausalLM(Qwen3Config(**SIZES)), folder)


def save_two(lm, folder: str) -> None:
    """The model, and one that is close to it."""
    lm.double().save_pretrained(f"{folder}/policy")
    with torch.no_grad():
        for p in lm.parameters():
            p *= 1 + 0.2 * torch.randn_like(p)
    lm.save_pretrained(f"{folder}/start")


def start_of(name: str, shape) -> torch.Tensor:
    """The first weights of what no file has, such as the critic's head; none is zero."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def all_steps(setting: Setting, args, policy, critic, learn, adapt) -> dict:
    """Metrics of each step; gradients of each update, then weights, of policy and critic.

    learn(samples, lr, kl_coef) → metrics; adapt(kl_coef, kl, samples) → the next coefficient.
    """
    found, kl_coef = [], getattr(args, "kl_reward_coef", 0.0)
    for step in range(setting.steps):
        waits = setting.script == "ppo" and step < args.critic_args.critic_warmup_steps
        samples = setting.samples(step)
        found.append(learn(samples, 0.0 if waits else args.lr, kl_coef))
        if setting.script == "ppo" and args.kl_target is not None:
            kl_coef = adapt(kl_coef, found[-1]["policy/kl"], len(samples))
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


class Spy:
    """Keeps each optimizer step's gradient: {name: whole tensor}."""

    def step(self, lr):
        self.gradients.append({short(name): model.whole(p.grad).clone()
                               for name, p in self.parameters.items()})
        return super().step(lr)

    def weights_now(self) -> dict[str, torch.Tensor]:
        self.module.reshard()  # after a forward without backward, the root is whole
        return {short(name): model.whole(p.detach()).clone()
                for name, p in self.parameters.items()}


class SpyPolicy(Spy, model.Policy):
    pass


class SpyCritic(Spy, model.Critic):
    pass


class Shipped:
    """The models of the shipped code, built once; each setting begins with the same weights."""

    def __init__(self, world, folder: str):
        self.world, self.folder, self.built = world, folder, {}

    def module(self, kind: str, name: str, args, trained: bool = True):
        key = kind, name, trained and str(args.parts), args.model_args.checkpointing
        if key not in self.built:
            folder = f"{self.folder}/{name}"
            found = getattr(model.kinds(args, model.config_of(folder), trained), kind)
            module = float64.build(found, folder, self.world, args)
            files = {*map(short, AutoModelForCausalLM.from_pretrained(folder).state_dict())}
            for parameter, p in module.named_parameters():
                if short(parameter) not in files:
                    self.put(p, start_of(short(parameter), p.shape))
            module.reshard()
            self.built[key] = module, {n: model.whole(p.detach()).clone()
                                       for n, p in module.named_parameters()}
        module, weights = self.built[key]
        module.reshard()
        for parameter, p in module.named_parameters():
            self.put(p, weights[parameter])
        return module

    def put(self, p, full: torch.Tensor):
        with torch.no_grad():
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))

    def trained(self, spy, kind: str, folder: str, args):
        """A policy or a critic with a new optimizer."""
        module = self.module(kind, folder, args)
        role = "policy" if kind == "logprob_model" else "critic"
        base = getattr(model.kinds(args, module.lm.config), role)
        made = type("Spied", (spy, base), {})(module, self.world, args)
        for name, p in made.parameters.items():
            if name == "head.weight":  # Critic starts with zeros
                self.put(p, start_of("head", p.shape))
        made.gradients = []
        return made

    def learn(self, setting: Setting, args) -> dict:
        """What comes out of a setting's steps."""
        folder = setting.folder("policy")
        policy = self.trained(SpyPolicy, "logprob_model", folder, args)
        critic = before = None

        def load():
            start = self.module("logprob_model", setting.folder("start"), args, trained=False)
            kinds = model.kinds(args, start.lm.config, trained=False)
            return kinds.policy(start, self.world, args)

        if args.needs_reference:
            before = load() if setting.teaches else policy.reference(load)
        if setting.script == "ppo":
            critic = self.trained(SpyCritic, "value_model", folder, args)

        def learn(samples, lr, kl_coef):
            models, options = policy, {"reference": before}
            if setting.script == "ppo":
                models = policy, critic
                options |= {"critic_lr": args.critic_args.critic_lr, "kl_coef": kl_coef}
            return setting.scripts[setting.script].learn(
                args, self.world, models, samples, lr=lr, **setting.options(**options))

        return all_steps(setting, args, policy, critic, learn, lambda kl_coef, kl, n: (
            losses.adaptive_kl(kl_coef, kl, n=n, target=args.kl_target, horizon=args.kl_horizon)))


def learn_all(world, folder: str, settings: dict[int, Setting]) -> dict[int, dict]:
    """The outcome of each setting."""
    shipped = Shipped(world, folder)
    return {number: shipped.learn(setting, arguments(setting, number))
            for number, setting in settings.items()}


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

    return all_steps(setting, args, policy, critic, learn,
                     partial(reference_losses.adaptive_kl, args))


# ---- both are equal ----


def differences(ours: dict, theirs: dict, limit: float = LIMIT) -> list[str]:
    """A sentence for each gradient, metric and weight that is not the reference's."""
    found = []
    for who, mine, right in zip("policy critic".split(), ours["gradients"], theirs["gradients"],
                                strict=False):
        found += [(f"{who}, gradient of update {k}", difference(a, b))
                  for k, (a, b) in enumerate(zip(mine, right, strict=True))]
    found += [("weights", difference(a, b))
              for a, b in zip(ours["weights"], theirs["weights"], strict=True)]
    for step, (mine, right) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        assert not any(value for name, value in mine.items() if "not_finite" in name)
        names = {name for name in mine.keys() ^ right.keys() if "not_finite" not in name}
        assert not names, f"metrics of one side: {sorted(names)}"
        found += [(f"{name} of step {step}: {mine[name]} not {right[name]}",
                   abs(mine[name] - right[name]) / max(1.0, abs(right[name])))
                  for name in right]
    return [f"{what} (off by {size:.1e})" for what, size in found
            if not (math.isfinite(size) and size <= limit)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("reference"))
    make_models(path)
    return path


@pytest.fixture(scope="module")
def right(folder):
    """setting → what the reference makes of it, with the budgets of this number."""
    lms = cache(lambda name: AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", dtype=torch.float64, attn_implementation="sdpa").eval())
    return cache(lambda setting, number: expected(setting, arguments(setting, number), lms))


@pytest.fixture(scope="module")
def shipped(folder, request) -> dict[int, dict]:
    """number → what the shipped code makes of the settings that are tested, or else of all."""
    tested = [item.callspec.params["number"] for item in request.session.items
              if getattr(item, "originalname", "") == "test_learn_is_the_reference"]
    numbers = tested or range(len(SETTINGS))
    return outcomes(folder, {n: SETTINGS[n] for n in numbers})


def outcomes(folder: str, settings: dict[int, Setting]) -> dict[int, dict]:
    """What the shipped code makes of each."""
    return ranks.results(1, learn_all, folder, settings)[0]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_pair_of_flags_on_any_ranks(script, size, folder, right):
    every_pair(drawn(script, CHOICES[script]), size, folder, right)


def every_pair(settings: list[Setting], size: int, folder: str, right) -> None:
    """Every rank has the reference's metrics, and the whole gradients and weights are its."""
    settings = dict(enumerate(settings))
    for found in ranks.results(size, learn_all, folder, settings, timeout=500):
        for number, ours in found.items():
            wrong = differences(ours, right(settings[number], number), 10 * LIMIT)  # any values
            assert not wrong, "\n".join([settings[number].words, *wrong])


def test_the_settings_reach_what_they_are_for(shipped):
    """Bounds act on a part of the tokens, ratios leave 1, rows are dropped for each reason."""
    def values(name: str) -> list[float]:
        return [m[name] for outcome in shipped.values() for m in outcome["metrics"] if name in m]

    for name in ("policy/clip_frac", "policy/engine_cut", "critic/clip_frac"):
        assert sum(0.05 < value < 0.95 for value in values(name)) >= 4, name
    for name in ("policy/opsm_cut", "policy/cov_cut"):
        assert any(0 < value < 1 for value in values(name)), name
    acts: dict[str, bool] = {}  # loss: does its bound cut some of the tokens, in some setting
    for number, outcome in shipped.items():
        loss = SETTINGS[number].flags.get("loss", "clip")
        acts[loss] = acts.get(loss, False) or any(
            0 < m.get("policy/clip_frac", 0) < 1 for m in outcome["metrics"])
    assert [loss for loss, some in acts.items() if not some] == [
        "reinforce", "variants/sapo.py:sapo"]
    cut, = [outcome["metrics"][0]["policy/engine_cut"] for number, outcome in shipped.items()
            if "geometric" in SETTINGS[number].words]
    assert 0.05 < cut < 0.95
    assert sum(value > 0.01 for value in values("policy/approx_kl")) > 20
    for name in ("dropped_unscored", "dropped_no_baseline", "dropped_overlong"):
        assert max(values(f"batch/{name}")) > 0, name
    assert max(values("update/skipped")) > 0
