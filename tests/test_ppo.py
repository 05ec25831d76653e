"""ppo.py: the same update of policy and critic on any ranks and budgets; what is the critic's own.
"""
import pytest
import torch
from safetensors.torch import load_file

import house
import learning
import model
import ppo
import ranks
from learning import LONGEST, difference, fabricate, make_models, whole
from tools import float64

lora = house.module("parts.lora.lora")

LIMIT = 1e-12
BASE = dict(critic_lr=1e-3, minibatches=1, critic_update_tokens=4096, critic_score_tokens=4096)
CASES = [dict(update_tokens=4096, score_tokens=4096),
         dict(update_tokens=LONGEST, score_tokens=77, critic_update_tokens=96,
              critic_score_tokens=50),
         dict(update_tokens=64, score_tokens=77, critic_update_tokens=LONGEST,
              critic_score_tokens=50, minibatches=3, epochs=2, kl_reward_coef=0.05, gamma=0.99,
              entropy_coef=0.01, engine_correction="truncate", aggregation="sequence")]


class SpyCritic(model.Critic):
    """The shipped critic, which keeps the gradient of each optimizer step."""

    def step(self, lr):
        self.gradients.append([p.grad.to_local().clone() for p in self.parameters.values()])
        return super().step(lr)


def shards(trained: model.Trained) -> list[torch.Tensor]:
    """This rank's part of every parameter."""
    trained.module.reshard()
    return [p.detach().to_local().clone() for p in trained.module.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    make_models(None, path)
    return path


def learn_all(world, folder: str, rank: int) -> list[dict]:
    """One ppo.learn per case. The critic's head is not zero, so values matter from the start."""
    out, source = [], f"{folder}/tied"
    weights = model.ModelArgs(dtype="float64")
    kinds = (model.LogprobModel, model.ValueModel, model.LogprobModel)
    modules = [float64.build(kind, source, world, weights, adapters=rank and lora.LoraArgs(rank))
               for kind in kinds]
    for case in CASES:
        args = learning.arguments(ppo, **BASE | case)
        policy, critic, reference = (
            kind(module, world, weights, args.optimizer_args) for kind, module in
            zip((learning.Spy, SpyCritic, model.Policy), modules, strict=True))
        learning.WEIGHTS.setdefault(source, load_file(f"{source}/model.safetensors"))
        head = torch.linspace(-1, 1, 32, dtype=torch.float64).view(1, -1)
        learning.WEIGHTS[source]["head.weight"] = head
        for module, noise in zip(modules, (0.0, 0.0, 0.05), strict=True):
            learning.reset(module, source, noise)
        policy.gradients, critic.gradients = [], []
        metrics = ppo.learn(args, world, (policy, critic), fabricate("mixed", 7, args.group),
                            lr=args.lr, critic_lr=args.critic_args.critic_lr, reference=reference,
                            kl_coef=args.kl_reward_coef)
        out.append(dict(metrics=metrics, gradients=policy.gradients, policy=shards(policy),
                        critic_gradients=critic.gradients, critic=shards(critic)))
    return out


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_same_update_on_any_ranks_and_budgets(folder, rank):
    one, three = (list(zip(*ranks.results(size, learn_all, folder, rank), strict=True))
                  for size in (1, 3))
    for many, alone in zip(three, one, strict=True):
        for what in ("gradients", "critic_gradients"):
            assert len(many[0][what]) == len(alone[0][what]) > 0
            for k in range(len(alone[0][what])):
                ours, theirs = (whole([o[what][k] for o in side]) for side in (many, alone))
                assert difference(ours, theirs) <= LIMIT, (what, k)
        for outcome in many:
            assert outcome["metrics"] == pytest.approx(alone[0]["metrics"], rel=1e-8, abs=1e-8)
    for what in ("policy", "critic"):  # the first two cases differ in budgets only
        ends = [[whole([o[what] for o in outcomes]) for outcomes in runs] for runs in (one, three)]
        assert all(difference(*pair) <= LIMIT for pair in zip(*ends, strict=True))
        assert difference(*ends[0][:2]) <= LIMIT


def critic_facts(world, folder: str) -> dict:
    """What happens to both models in a warm-up of the critic."""
    args, weights = learning.arguments(ppo, **BASE), model.ModelArgs(dtype="float64")
    policy = model.Policy(model.build(model.LogprobModel, f"{folder}/tied", world, weights), world,
                          weights, args.optimizer_args)
    critic = model.Critic(model.build(model.ValueModel, f"{folder}/tied", world, weights), world,
                          weights, args.optimizer_args)

    def snapshot(trained):
        return torch.cat([p.flatten() for p in shards(trained)])

    def pointers(trained):
        return {p.to_local().untyped_storage().data_ptr() for p in trained.module.parameters()}

    samples, before = fabricate("plain", 4), (snapshot(policy), snapshot(critic))

    def learn():
        return ppo.learn(args, world, (policy, critic), samples, lr=0.0, critic_lr=1e-2,
                         kl_coef=0.0)

    first = learn()
    after = snapshot(policy), snapshot(critic)
    return {"shared": len(pointers(policy) & pointers(critic)), "first": first,
            "policy moved": float((after[0] - before[0]).norm()),
            "critic moved": float((after[1] - before[1]).norm()),
            "errors": [first["loss/value"]] + [learn()["loss/value"] for _ in range(8)]}


def test_the_critic_shares_nothing_starts_at_zero_and_learns_alone(folder):
    facts, = ranks.results(1, critic_facts, folder)
    assert facts["shared"] == 0
    assert facts["policy moved"] == 0 and facts["critic moved"] > 0
    assert facts["first"]["critic/value_mean"] == 0
    assert facts["errors"][-1] < 0.5 * facts["errors"][0]
