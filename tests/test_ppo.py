"""What is the critic's own. test_prove.py has ppo.py's update on any ranks and budgets,
test_reference.py its formulas."""
import torch

import learning
import model
import ppo
import ranks
from learning import fabricate, make_models


def critic_facts(world, folder: str) -> dict:
    """What happens to both models in a warm-up of the critic."""
    args = learning.arguments(ppo, critic_lr=1e-3, dtype="float64")
    policy, critic = (
        wrapper(model.build(kind, f"{folder}/tied", world, args), world, args)
        for kind, wrapper in ((model.LogprobModel, model.Policy), (model.ValueModel, model.Critic)))

    def snapshot(trained):
        trained.module.reshard()
        return torch.cat([p.detach().to_local().flatten() for p in trained.module.parameters()])

    def pointers(trained):
        return {p.to_local().untyped_storage().data_ptr() for p in trained.module.parameters()}

    samples, before = fabricate("plain", 4), (snapshot(policy), snapshot(critic))
    metrics = [ppo.learn(args, world, (policy, critic), samples, lr=0.0, critic_lr=1e-2,
                         kl_coef=0.0) for _ in range(9)]
    return {"shared": len(pointers(policy) & pointers(critic)), "first": metrics[0],
            "moved": [float((snapshot(one) - old).norm()) for one, old in zip(
                (policy, critic), before, strict=True)],
            "errors": [one["loss/value"] for one in metrics]}


def test_the_critic_shares_nothing_starts_at_zero_and_learns_alone(tmp_path):
    make_models(None, str(tmp_path))
    facts, = ranks.results(1, critic_facts, str(tmp_path))
    assert facts["shared"] == 0 and facts["first"]["critic/value_mean"] == 0
    assert facts["moved"][0] == 0 < facts["moved"][1]
    assert facts["errors"][-1] < 0.5 * facts["errors"][0]
