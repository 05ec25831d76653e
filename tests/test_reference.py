"""The shipped `learn` of each script is the papers' update, in float64: reference.py.

Each setting learns for a few steps from made-up completions. Gradients, weights and metrics must be
those of the reference: not those of another layout, which may have the same mistake.
"""
import copy
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import data
import distill
import grpo
import losses
import ppo
import ranks
import reference
import reference_sft
import rewards
import sft
from preflight import plan
from trainer import experts, lora, model
from trainer.batch import Completion, Sample
from wirings import WIRINGS

VOCAB, PROMPT, COMPLETION = 24, 5, 16
LIMIT = 1e-11
BUDGETS = (4096, 60, PROMPT + COMPLETION)  # everything, a few rows, one longest row
SCRIPTS = {"grpo": grpo, "ppo": ppo, "sft": sft, "distill": distill}
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Setting:
    """Flags of a script, and what it learns from."""
    script: str
    flags: tuple[tuple[str, object], ...]
    group: int
    steps: int
    experts: bool = False

    def __str__(self) -> str:
        flags = " ".join(f"{name}={value}" for name, value in self.flags)
        experts = "experts " if self.experts else ""
        return f"{self.script} group={self.group} steps={self.steps} {experts}{flags}".strip()

    def folder(self, name: str) -> str:
        """policy or start → its folder."""
        return f"experts-{name}" if self.experts else name


def on_grpo(group: int = 3, steps: int = 2, **flags) -> Setting:
    return Setting("grpo", tuple(flags.items()), group, steps)


def on_experts(**flags) -> Setting:
    return replace(on_grpo(**flags), experts=True)


def on_ppo(group: int = 1, steps: int = 2, **flags) -> Setting:
    return Setting("ppo", tuple(flags.items()), group, steps)


def on_sft(steps: int = 2, **flags) -> Setting:
    return Setting("sft", tuple(flags.items()), 1, steps)


def on_distill(group: int = 3, steps: int = 2, **flags) -> Setting:
    return Setting("distill", tuple(flags.items()), group, steps)


def variant(name: str) -> str:
    return f"variants/{name}.py:{name}"


MANY = dict(steps=1, minibatches=2, epochs=2)  # the ratio leaves 1 within a step
TIGHT = dict(clip_low=0.03, clip_high=0.05)
BOUNDS = dict(correction_low=0.7, correction_high=1.2)
REWARDED = dict(reward=("exact",), reward_coef=2.0)
HINT = dict(teacher_prompt="{question} {answer}")
AGGREGATIONS = ("token", "sequence", "constant", "prompt")
SETTINGS = [
    # The default, and the advantages.
    on_grpo(), on_grpo(steps=3, minibatches=2, epochs=2), on_grpo(advantage="rloo"),
    on_grpo(advantage="grpo", advantage_eps=0.3),
    *(on_grpo(advantage=kind, overlong_buffer=8, **TIGHT, **MANY) for kind in (
        "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")),
    on_grpo(group=1, advantage="reinforce++", steps=2),
    on_grpo(advantage=variant("lite_ppo"), overlong_buffer=8, advantage_eps=0.1),
    on_grpo(advantage=variant("maxrl")),
    on_grpo(advantage=variant("gdpo"), reward=("exact", "short:0.5"), overlong_filter=True, **MANY),
    # Losses, with each aggregation.
    *(on_grpo(loss=loss, aggregation=aggregation, **TIGHT, **MANY)
      for loss in ("clip", "gspo", "cispo") for aggregation in AGGREGATIONS),
    *(on_grpo(loss="reinforce", aggregation=aggregation) for aggregation in AGGREGATIONS),
    on_grpo(loss=variant("sapo"), aggregation="sequence", **MANY),
    *(on_grpo(loss=variant("gmpo"), aggregation=aggregation, **TIGHT, **MANY)
      for aggregation in ("token", "sequence")),
    on_grpo(loss=variant("gmpo"), advantage="reinforce++", **TIGHT, **MANY),
    on_grpo(loss=variant("dppo"), clip_low=0.01, clip_high=0.02, **MANY),
    on_grpo(loss=variant("ipo"), clip_low=0.01, clip_high=0.02, **MANY),
    on_grpo(loss=variant("ipo"), engine_correction="mask", **BOUNDS, **MANY),
    on_grpo(loss=variant("opsm"), entropy_coef=0.2, **MANY),
    on_grpo(loss=variant("opsm"), engine_correction="truncate", dual_clip=1.1, **BOUNDS, **MANY),
    on_grpo(dual_clip=1.1, epochs=3), on_grpo(loss="gspo", dual_clip=1.02, **MANY),
    on_grpo(clip_low=1.0, clip_high=0.1, loss="cispo", **MANY),
    # A KL term in the loss, in the reward.
    *(on_grpo(kl_loss_coef=0.3, kl_estimator=kind, **MANY) for kind in (
        "k1", "k2", "k3", "k3_ratio")),
    on_grpo(kl_loss_coef=0.3, temperature=0.6, aggregation="sequence"),
    *(on_grpo(kl_reward_coef=0.2, advantage=kind, temperature=0.8, **MANY) for kind in (
        "dr_grpo", "grpo", "reinforce++", "reinforce++-baseline")),
    on_grpo(kl_reward_coef=0.2, advantage="rloo", overlong_filter=True, overlong_buffer=8),
    # The engine's log-probs.
    *(on_grpo(engine_correction=kind, kl_loss_coef=0.3, entropy_coef=0.2, **BOUNDS, **more)
      for kind in ("truncate", "mask") for more in ({}, MANY)),
    on_grpo(engine_correction="truncate", loss="cispo", temperature=0.7, **BOUNDS, **MANY),
    on_grpo(engine_correction="mask", loss="reinforce", aggregation="constant", **BOUNDS),
    *(on_grpo(engine_correction=kind, kl_loss_coef=0.3, **BOUNDS, **MANY)
      for kind in ("sequence_truncate", "sequence_mask")),
    on_grpo(engine_correction="sequence_mask", loss=variant("gmpo"), **BOUNDS, **MANY),
    # Entropy, temperature, length, optimizer.
    on_grpo(entropy_coef=0.3), on_grpo(entropy_coef=0.3, temperature=1.7, **MANY),
    on_grpo(temperature=0.5, **MANY), on_grpo(overlong_filter=True, **MANY),
    on_grpo(overlong_filter=True, advantage="reinforce++", overlong_buffer=12),
    on_grpo(minibatches=5), on_grpo(minibatches=30, steps=1),
    on_grpo(max_grad_norm=0.01, weight_decay=0.1, betas=(0.8, 0.95), steps=3),
    on_grpo(max_grad_norm=0.0, **MANY),
    # LoRA.
    on_grpo(lora_rank=2, kl_loss_coef=0.3, **MANY),
    on_grpo(lora_rank=2, lora_alpha=1.0, lora_targets=("q_proj", "down_proj"), kl_reward_coef=0.2),
    # Experts.
    on_experts(router_aux_coef=0.3, **MANY), on_experts(freeze_router=True, checkpointing=True),
    on_experts(router_aux_coef=0.3, kl_loss_coef=0.3, checkpointing=True),
    # ppo.py
    on_ppo(), on_ppo(steps=3, minibatches=2, epochs=2), on_ppo(group=2, gamma=0.9, lam=0.8),
    on_ppo(gamma=0.95, lam=1.0, kl_reward_coef=0.2, **MANY), on_ppo(lam=0.0, value_clip=None),
    on_ppo(value_clip=0.02, epochs=3, steps=1, **TIGHT), on_ppo(dual_clip=1.1, epochs=3, steps=1),
    *(on_ppo(aggregation=kind, entropy_coef=0.2, temperature=0.7, **TIGHT, **MANY)
      for kind in ("sequence", "constant", "prompt")),
    on_ppo(overlong_buffer=8, temperature=1.4, kl_reward_coef=0.3),
    on_ppo(kl_reward_coef=0.3, kl_target=0.01, kl_horizon=20, steps=3),
    *(on_ppo(engine_correction=kind, entropy_coef=0.2, **BOUNDS) for kind in ("truncate", "mask")),
    on_ppo(engine_correction="sequence_mask", group=2, **BOUNDS),
    on_ppo(critic_warmup_steps=1), on_ppo(minibatches=20, steps=1),
    on_ppo(max_grad_norm=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    on_ppo(lora_rank=2, kl_reward_coef=0.2, **MANY),
    # sft.py
    on_sft(), on_sft(minibatches=7, epochs=2, temperature=0.7), on_sft(lora_rank=2, minibatches=2),
    on_sft(max_grad_norm=0.01, weight_decay=0.1, betas=(0.8, 0.95), steps=3),
    # distill.py: another teacher, the policy without its adapters, a hint in the teacher's prompt
    on_distill(teacher="x"), on_distill(teacher="x", distill_coef=0.3, temperature=0.7, **MANY),
    on_distill(teacher="x", group=1, dual_clip=1.1, aggregation="sequence", **TIGHT, **MANY),
    *(on_distill(teacher="x", divergence=kind, distill_coef=0.5, head_chunk=5, **MANY)
      for kind in ("reverse_kl", "forward_kl", "jsd")),
    *(on_distill(teacher="x", divergence=kind, temperature=1.5, **REWARDED, **TIGHT, **MANY)
      for kind in ("none", "reverse_kl", "forward_kl", "jsd")),
    *(on_distill(divergence=kind, **HINT) for kind in ("none", "reverse_kl", "jsd")),
    *(on_distill(divergence=kind, lora_rank=2, aggregation="prompt", **HINT, **MANY)
      for kind in ("none", "forward_kl")),
    on_distill(teacher="x", engine_correction="truncate", **REWARDED, **BOUNDS),
    on_distill(teacher="x", engine_correction="mask", divergence="jsd", **BOUNDS, **REWARDED),
]


# ---- what is learnt from ----


def hostile(group: int, seed: int) -> list[Sample]:
    """Groups that a mistake may confuse; the rows are in request order.

    0 and 5 have one prompt, 3 and 4 too. 1 has equal rewards, 2 one scored completion, 5 none in
    its first half. Some completions have one token, some are truncated, some have replies.
    """
    rng, samples = np.random.default_rng(seed), []
    groups = 6 if group > 1 else 14
    prompts = [rng.integers(0, VOCAB, rng.integers(1, PROMPT + 1)).tolist() for _ in range(groups)]
    prompts[5], prompts[4] = prompts[0], prompts[3]
    for p, prompt in enumerate(prompts):
        row = data.Row(p, "q", prompt, "a", {}, "made up")
        for g in range(group):
            truncated = rng.random() < 0.2
            length = COMPLETION if truncated else int(rng.choice([1, 2, 3, 5, 8, 12]))
            sampled = np.ones(length, bool)
            if rng.random() < 0.6:  # replies, never at the start
                sampled[1:-1] = rng.random(max(0, length - 2)) < 0.6
            reward = float(rng.integers(0, 9)) / 8
            if p == 1:
                reward = 0.25
            if (p == 2 and g > 0) or (p == 5 and g < group // 2) or (group == 1 and p % 5 == 4):
                reward = None
            short = None if reward is None else round(length * reward, 2) % 1  # of GDPO alone
            logprobs = np.log(1 / VOCAB) + 0.7 * rng.standard_normal(length)
            samples.append(Sample(
                data.Prompt(p, row),
                Completion(rng.integers(0, VOCAB, length).astype(np.int32),
                           (logprobs * sampled).astype(np.float32), truncated, sampled),
                "text", rewards.Score(reward, {"exact": reward, "short": short}, None)))
    return samples


def samples_of(setting: Setting, step: int) -> list[Sample]:
    """What a step learns from. For sft.py two rows teach nothing. With a hint the teacher has
    another prompt: also where two rows have the same one."""
    samples = hostile(setting.group, step)
    rng = np.random.default_rng(step)
    if setting.script == "sft":
        for sample in samples[4:6]:
            sample.completion.sampled[:] = False
    if "teacher_prompt" in dict(setting.flags):
        for sample in samples[::setting.group]:
            sample.prompt.row.teacher_ids = rng.integers(0, VOCAB, PROMPT).tolist()
    return samples


def plainly(sample: Sample) -> reference.Completion:
    """The same for the reference."""
    completion = sample.completion
    return reference.Completion(
        sample.prompt.row.prompt_ids, completion.ids.tolist(), completion.sampled.tolist(),
        completion.logprobs[completion.sampled].tolist(), completion.truncated,
        sample.score.total, sample.score.parts)


def make_models(folder: str) -> None:
    """FOLDER/policy and FOLDER/start: two random models of two layers, close to each other. Two
    more of them, FOLDER/experts-…, have experts."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    dense = Qwen3ForCausalLM(Qwen3Config(**sizes))
    mixed = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True,
        **sizes))
    for lm, prefix in (dense, ""), (mixed, "experts-"):
        lm.double().save_pretrained(f"{folder}/{prefix}policy")
        with torch.no_grad():
            for p in lm.parameters():
                p *= 1 + 0.2 * torch.randn_like(p)
        lm.save_pretrained(f"{folder}/{prefix}start")


def start_of(name: str, shape) -> torch.Tensor:
    """The first weights of an adapter or of the critic's head; none is zero."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(setting: Setting, number: int):
    """Args of the setting's script, whose budgets depend on the setting's number."""
    budget, other = BUDGETS[number % 2], BUDGETS[number // 2 % 3]
    options = dict(group=setting.group, max_tokens=COMPLETION, max_prompt_tokens=PROMPT,
                   minibatches=1, lr=0.01, update_tokens=budget, score_tokens=other,
                   dtype="float64")
    if setting.script == "ppo":
        options |= dict(critic_lr=0.02, critic_update_tokens=other, critic_score_tokens=budget)
    return plan.changed(SCRIPTS[setting.script].Args(), **options | dict(setting.flags))


def rates(args, step: int) -> tuple[float, float]:
    """The learning rates of policy and critic."""
    if args.critic_args is None:
        return args.lr, 0.0
    waits = step < args.critic_args.critic_warmup_steps
    return 0.0 if waits else args.lr, args.critic_args.critic_lr


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


class SpyRouted(experts.Routed, Spy, model.Policy):  # after what it adds to the gradient
    pass


class SpyCritic(Spy, model.Critic):
    pass


class Shipped:
    """The models of the shipped code, built once; each setting begins with the same weights."""

    def __init__(self, world, folder: str):
        self.world, self.folder, self.built = world, folder, {}

    def module(self, kind, name: str, args, adapters=None):
        key = (kind, name, str(adapters), args.model_args.checkpointing,
               args.expert_args.freeze_router)
        if key not in self.built:
            module = model.build(kind, f"{self.folder}/{name}", self.world, args.model_args,
                                 adapters=adapters)
            for parameter, p in module.named_parameters():
                if lora.is_adapter(parameter) or parameter == "head.weight":
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

    def trained(self, spy, kind, args):
        """A policy or a critic with a new optimizer."""
        adapters = args.lora_args if args.lora_args.lora_rank else None
        module = self.module(kind, self.setting.folder("policy"), args, adapters)
        made = spy(module, self.world, args.model_args, args.optimizer_args)
        for name, p in made.parameters.items():
            if name == "head.weight":  # Critic starts with zeros
                self.put(p, start_of("head", p.shape))
        made.gradients = []
        return made

    def learn(self, setting: Setting, args) -> dict:
        """What comes out of a setting's steps."""
        self.setting = setting
        spy = partial(SpyRouted, args.expert_args) if setting.experts else SpyPolicy
        policy = self.trained(spy, model.LogprobModel, args)
        critic = before = None
        if args.needs_reference and args.lora_args.lora_rank and not args.teacher:
            before = lora.Base(policy)
        elif args.needs_reference:
            start = self.module(model.LogprobModel, setting.folder("start"), args)
            before = model.Policy(start, self.world, args.model_args, args.optimizer_args)
        if setting.script == "ppo":
            critic = self.trained(SpyCritic, model.ValueModel, args)
        found, kl_coef = [], getattr(args, "kl_reward_coef", 0.0)
        for step in range(setting.steps):
            samples, (lr, critic_lr) = samples_of(setting, step), rates(args, step)
            if setting.script != "ppo":
                options = {} if setting.script == "sft" else {"reference": before}
                found.append(SCRIPTS[setting.script].learn(
                    args, self.world, policy, samples, lr=lr, **options))
                continue
            found.append(ppo.learn(args, self.world, (policy, critic), samples, lr=lr,
                                   critic_lr=critic_lr, kl_coef=kl_coef, reference=before))
            if args.kl_target is not None:
                kl_coef = losses.adaptive_kl(kl_coef, found[-1]["policy/kl"], n=len(samples),
                                             target=args.kl_target, horizon=args.kl_horizon)
        return outcome(found, [policy.gradients, [] if critic is None else critic.gradients],
                       [policy.weights_now(), {} if critic is None else critic.weights_now()])


def learn_all(world, folder: str, settings: dict[int, Setting]) -> dict[int, dict]:
    """The outcome of each setting."""
    shipped = Shipped(world, folder)
    return {number: shipped.learn(setting, arguments(setting, number))
            for number, setting in settings.items()}


# ---- the reference ----


def adapters_of(base, args) -> dict:
    """{layer: (A, B)} of the layers that --lora_targets names; lm_head has none."""
    rank, targets, found = args.lora_args.lora_rank, args.lora_args.lora_targets, {}
    for layer in range(2 if rank else 0):
        for linear in LINEAR:
            name = f"layers.{layer}.{linear}"
            if targets == ("all-linear",) or linear.split(".")[1] in targets:
                out, width = base.get_submodule(name).weight.shape
                shapes = {"lora_A": (rank, width), "lora_B": (out, rank)}
                found[name] = tuple(start_of(f"{name}.{which}", shape).requires_grad_()
                                    for which, shape in shapes.items())
    return found


def expected(setting: Setting, args, lms: dict) -> dict:
    """What the reference makes of a setting's steps."""
    def copied(name: str):
        lm = copy.deepcopy(lms[name])
        model.widen(lm)
        return lm

    lm, critic, before = copied(setting.folder("policy")), None, None
    policy = reference.Model(lm, args, adapters_of(lm.base_model, args))
    if args.needs_reference:
        itself = args.lora_args.lora_rank and not args.teacher
        before = reference.Model(copied(setting.folder("policy" if itself else "start")), args, {})
    if setting.script == "ppo":
        lm, head = copied(setting.folder("policy")), start_of("head", (1, 16))[0].requires_grad_()
        critic = reference.Model(lm, args, adapters_of(lm.base_model, args), head)
    found, kl_coef = [], getattr(args, "kl_reward_coef", 0.0)
    for step in range(setting.steps):
        samples = samples_of(setting, step)
        completions = [plainly(sample) for sample in samples]
        lr, critic_lr = rates(args, step)
        if setting.script == "sft":
            found.append(reference_sft.sft(args, policy, completions, lr))
            continue
        if setting.script == "distill":
            seen = [replace(c, prompt=s.prompt.row.teacher_ids or c.prompt)
                    for s, c in zip(samples, completions, strict=True)]
            found.append(reference_sft.distill(args, policy, before, completions, seen, lr))
            continue
        if setting.script == "grpo":
            found.append(reference.grpo(args, policy, before, completions, lr))
            continue
        found.append(reference.ppo(
            args, policy, critic, before, completions, lr, critic_lr, kl_coef))
        if args.kl_target is not None:
            kl_coef = reference.adaptive_kl(
                args, kl_coef, found[-1]["policy/kl"], len(completions))
    return outcome(found, [policy.gradients, [] if critic is None else critic.gradients],
                   [policy.trained, {} if critic is None else critic.trained])


def outcome(metrics: list[dict], gradients: list[list[dict]], weights: list[dict]) -> dict:
    """Metrics of each step; gradients of each update, then weights, of policy and critic."""
    return {"metrics": metrics, "gradients": [[flat(g) for g in each] for each in gradients],
            "weights": [flat(each) for each in weights]}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """{name: tensor} → one vector."""
    parts = [tensors[name].detach().flatten() for name in sorted(tensors, key=short)]
    return torch.cat(parts) if parts else torch.zeros(0)


# ---- both are equal ----


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖; ‖a‖ where b is 0."""
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm()) if b.norm() > 0 else float(a.norm())


def differences(ours: dict, theirs: dict) -> list[str]:
    """A sentence for each gradient, metric and weight that is not the reference's."""
    found = []
    for who, mine, right in zip(("policy", "critic"), ours["gradients"], theirs["gradients"],
                                strict=True):
        assert len(mine) == len(right), f"{who}: {len(mine)} updates, not {len(right)}"
        found += [(f"{who}, gradient of update {k}", gap(a, b))
                  for k, (a, b) in enumerate(zip(mine, right, strict=True))]
    for who, mine, right in zip(("policy", "critic"), ours["weights"], theirs["weights"],
                                strict=True):
        found.append((f"{who}, weights", gap(mine, right)))
    for step, (mine, right) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        assert not any(value for name, value in mine.items() if "not_finite" in name)
        names = {name for name in mine.keys() ^ right.keys() if "not_finite" not in name}
        assert not names, f"metrics of one side: {sorted(names)}"
        found += [(f"{name} of step {step}: {mine[name]} not {right[name]}",
                   abs(mine[name] - right[name]) / max(1.0, abs(right[name])))
                  for name in right]
    return [f"{what} (off by {size:.1e})" for what, size in found
            if not (math.isfinite(size) and size <= LIMIT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("reference"))
    make_models(path)
    return path


@pytest.fixture(scope="module")
def right(folder):
    """number → what the reference makes of this setting."""
    lms = {name: AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", dtype=torch.float64, attn_implementation="sdpa").eval()
        for name in ("policy", "start", "experts-policy", "experts-start")}

    @cache
    def found(number: int) -> dict:
        return expected(SETTINGS[number], arguments(SETTINGS[number], number), lms)

    return found


@pytest.fixture(scope="module")
def shipped(folder, request) -> dict[int, dict]:
    """number → what the shipped code makes of the settings that are tested, or else of all."""
    tested = [item.callspec.params["number"] for item in request.session.items
              if getattr(item, "originalname", "") == "test_learn_is_the_reference"]
    numbers = tested or range(len(SETTINGS))
    return ranks.results(1, learn_all, folder, {n: SETTINGS[n] for n in numbers})[0]


def listed() -> list:
    """The settings that the list of wirings needs. The others are slow."""
    needed = {test for *_, test in WIRINGS}
    return [pytest.param(number, id=str(setting),
                         marks=[] if str(setting) in needed else pytest.mark.slow)
            for number, setting in enumerate(SETTINGS)]


@pytest.mark.parametrize("number", listed())
def test_learn_is_the_reference(number, shipped, right):
    wrong = differences(shipped[number], right(number))
    assert not wrong, "\n".join([str(SETTINGS[number]), *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_learn_is_the_reference_on_more_ranks(size, folder, right):
    """Every rank has the reference's metrics, and the whole gradients and weights are its."""
    for outcomes in ranks.results(size, learn_all, folder, dict(enumerate(SETTINGS)), timeout=300):
        for number, ours in outcomes.items():
            wrong = differences(ours, right(number))
            assert not wrong, "\n".join([f"{size} ranks, {SETTINGS[number]}", *wrong])


def test_the_settings_reach_what_they_are_for(shipped):
    """Bounds act on a part of the tokens, ratios leave 1, rows are dropped for each reason."""
    def values(name: str) -> list[float]:
        return [m[name] for outcome in shipped.values() for m in outcome["metrics"] if name in m]

    for name in ("policy/clip_frac", "policy/engine_cut", "critic/clip_frac"):
        assert sum(0.05 < value < 0.95 for value in values(name)) >= 4, name
    assert sum(value > 0.01 for value in values("policy/approx_kl")) > 30
    for name in ("dropped_unscored", "dropped_no_baseline", "dropped_overlong"):
        assert max(values(f"batch/{name}")) > 0, name
    assert max(values("update/skipped")) > 0


# ---- the loop around `learn` ----


def around(script, monkeypatch, args, steps: int) -> tuple[list[dict], MagicMock]:
    """What the shipped `train` gives to `learn` in each step, and the run. There is no engine."""
    run, given = MagicMock(start=0, end=steps, evaluations=(), saves=(), carry=None), []
    run.log.times, run.kl_coef = {"time/rollout": 1.0}, getattr(args, "kl_reward_coef", 0.0)
    run.engine.sample.side_effect = [hostile(args.group, seed) for seed in range(20)]
    run.stop.agreed.return_value = False

    def learn(args, world, models, samples, **options):
        given.append(options | {"models": models, "samples": samples})
        return {"policy/kl": 0.01 * len(given), "batch/dropped": 1}

    for name, fake in dict(set_up=lambda args: run, learn=learn, compare_policies=MagicMock(),
                           score_samples=MagicMock()).items():
        monkeypatch.setattr(script, name, fake, raising=False)  # sft.py has not all of them
    script.train(args)
    return given, run


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_step_is_logged_and_watched(script, monkeypatch):
    """What `learn` returned goes to metrics.jsonl, and to the watch that ends a broken run."""
    rate = {"lr": 0.5, "critic_lr": 0.5} if script == "ppo" else {"lr": 0.5}
    args = plan.changed(SCRIPTS[script].Args(), group=1, **rate)
    _, run = around(SCRIPTS[script], monkeypatch, args, 3)
    logged = [call.args for call in run.log.step.call_args_list]
    assert [step for step, _ in logged] == [1, 2, 3]
    assert [call.args[0] for call in run.log.watch.call_args_list] == [m for _, m in logged]
    assert [m["policy/kl"] for _, m in logged] == [0.01, 0.02, 0.03]


@pytest.mark.parametrize("schedule, warmup, rates", [
    ("constant", 2, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ("linear", 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ("cosine", 2, [0.5, 1.0, 1.0, 0.85355339, 0.5, 0.14644661]),
    ("linear", 0, [1.0, 0.8, 0.6, 0.4, 0.2]),
    ("cosine", 1, [1.0, 1.0, 0.85355339, 0.5, 0.14644661])])
def test_the_rates_of_a_schedule(schedule, warmup, rates):
    args = model.OptimizerArgs(warmup_steps=warmup, lr_schedule=schedule)
    found = [model.learning_rate(step, len(rates), 2.0, args) for step in range(len(rates))]
    assert found == pytest.approx([2.0 * rate for rate in rates], abs=1e-8)


def test_ppo_passes_rates_and_the_adapted_coefficient(monkeypatch):
    args = plan.changed(
        ppo.Args(), lr=0.5, critic_lr=2.0, steps=6, warmup_steps=2, critic_warmup_steps=3,
        lr_schedule="linear", kl_reward_coef=0.3, kl_target=0.02, kl_horizon=100)
    given, run = around(ppo, monkeypatch, args, 6)
    schedule = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [step["critic_lr"] for step in given] == [2.0 * x for x in schedule]
    assert [step["lr"] for step in given] == [0.0] * 3 + [0.5 * x for x in schedule[3:]]
    coefficients = [0.3]
    for step in range(5):
        coefficients.append(reference.adaptive_kl(
            args, coefficients[-1], 0.01 * (step + 1), len(given[step]["samples"])))
    assert [step["kl_coef"] for step in given] == pytest.approx(coefficients, rel=1e-12)
    assert given[0]["models"] == (run.policy, run.critic)
    assert given[0]["reference"] is run.reference


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(monkeypatch):
    batch, group = 7, 3
    args = plan.changed(grpo.Args(), batch=batch, group=group, dynamic_sampling=True, lr=0.5)
    given, run = around(grpo, monkeypatch, args, 1)
    kept, samples_of_all, refills = [], [], 0
    while len(kept) < batch:
        samples, refills = hostile(group, refills), refills + 1
        samples_of_all += samples
        for start in range(0, len(samples), group):
            members = samples[start:start + group]
            if len({s.score.total for s in members} - {None}) > 1:
                kept.append(members)
    assert run.engine.sample.call_count == refills == 2 and len(kept) > batch
    theirs = [s.completion.ids.tolist() for s in given[0]["samples"]]
    assert theirs == [s.completion.ids.tolist() for members in kept[:batch] for s in members]
    noted, = run.stream.note.call_args.args  # every group has a difficulty, the refused ones too
    assert [s.completion.ids.tolist() for s in noted] == [
        s.completion.ids.tolist() for s in samples_of_all]
    (_, metrics), _ = run.log.step.call_args
    scores = [s.score.total for s in samples_of_all if s.score.total is not None]
    assert metrics["reward/mean"] == pytest.approx(np.mean(scores))  # not of the kept ones
    assert metrics["batch/dropped_surplus"] == (len(kept) - batch) * group
    assert metrics["batch/dropped_equal"] == 12 * group - len(kept) * group
    assert metrics["batch/dropped"] == 1 + 12 * group - batch * group
    assert given[0]["lr"] == 0.5 and given[0]["reference"] is run.reference
