"""ppo.py: the same update of policy and critic on any number of ranks and budgets, and what is particular to the critic."""
import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import grpo
import learning
import model
import ppo
import ranks
from learning import LONGEST, difference, fabricate, make_models, whole
from run import DTYPES

ROOT = Path(__file__).parent.parent
BASE = dict(max_prompt_tokens=learning.PROMPT, max_tokens=learning.COMPLETION, group=learning.GROUP, lr=1e-3, critic_lr=1e-3)
CASES = [dict(update_tokens=4096, score_tokens=4096, critic_update_tokens=4096, critic_score_tokens=4096),
         dict(update_tokens=LONGEST, score_tokens=77, critic_update_tokens=96, critic_score_tokens=50),
         dict(update_tokens=64, score_tokens=77, critic_update_tokens=LONGEST, critic_score_tokens=50, minibatches=3, epochs=2, kl_reward_coef=0.05,
              entropy_coef=0.01, engine_correction="truncate", aggregation="sequence", gamma=0.99)]


class SpyCritic(model.Critic):
    def step(self, lr):
        self.gradients.append([p.grad.to_local().clone() for p in self.module.parameters()])
        return super().step(lr)


def learn_all(world, folder: str, prompts: int, dtype: str) -> list[dict]:
    """One ppo.learn per case; before it the critic gets a head that is not zero, so that values matter from the start."""
    out = []
    compute = DTYPES[dtype]
    modules = [model.build(kind, f"{folder}/tied", world, compute=compute) for kind in (model.Scorer, model.Valuer, model.Scorer)]
    for case in CASES:
        args = ppo.Args(**{**BASE, "minibatches": 1} | case)
        optimizer = dict(betas=args.betas, weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm)
        policy, critic, reference = (kind(m, world, **optimizer) for kind, m in zip((learning.Spy, SpyCritic, model.Policy), modules))
        for module, noise in zip(modules, (0.0, 0.0, 0.05)):
            module.reshard()
            head = torch.linspace(-1, 1, 32, dtype=torch.float64).view(1, -1)
            learning.WEIGHTS.setdefault(f"{folder}/tied", learning.load_file(f"{folder}/tied/model.safetensors"))["head.weight"] = head
            learning.reset(module, f"{folder}/tied", noise)
        policy.gradients, critic.gradients = [], []
        metrics = ppo.learn(args, world, policy, critic, reference if args.kl_reward_coef else None, fabricate("mixed", prompts, args.group),
                            0, args.lr, args.critic_lr, args.kl_reward_coef)
        shards = lambda it: [p.detach().to_local().clone() for p in it.module.parameters()]
        for m in modules:
            m.reshard()
        out.append(dict(metrics=metrics, gradients=policy.gradients, critic_gradients=critic.gradients, policy=shards(policy), critic=shards(critic)))
    return out


@pytest.mark.parametrize("dtype, prompts, limit", [("float64", 7, 1e-12), ("float32", 1, 1e-5)])
def test_same_update_of_policy_and_critic_on_any_ranks_and_budgets(tmp_path_factory, dtype, prompts, limit):
    folder = str(tmp_path_factory.mktemp("models"))
    ranks.results(1, make_models, folder)
    runs = {size: list(zip(*ranks.results(size, learn_all, folder, prompts, dtype))) for size in (1, 2, 4)}
    for number in range(len(CASES)):
        one = runs[1][number]
        for size, outcomes in runs.items():
            many = outcomes[number]
            for what in ("gradients", "critic_gradients"):
                assert len(many[0][what]) == len(one[0][what]) > 0
                for k in range(len(one[0][what])):
                    assert difference(whole([o[what][k] for o in many]), whole([o[what][k] for o in one])) <= limit, (size, number, what, k)
            for what in ("policy", "critic"):
                assert difference(whole([o[what] for o in many]), whole([o[what] for o in one])) <= limit, (size, number, what)
            for outcome in many:
                learning_metrics = {k: v for k, v in outcome["metrics"].items() if k not in learning.LAYOUT_METRICS}
                for key, value in learning_metrics.items():
                    assert value == pytest.approx(one[0]["metrics"][key], rel=1e4 * limit, abs=1e4 * limit), key
    # The first two cases differ in budgets only.
    assert difference(whole([o["policy"] for o in runs[1][0]]), whole([o["policy"] for o in runs[1][1]])) <= limit
    assert difference(whole([o["critic"] for o in runs[1][0]]), whole([o["critic"] for o in runs[1][1]])) <= limit


def critic_facts(world, folder: str) -> dict:
    args = ppo.Args(**BASE, minibatches=1)
    optimizer = dict(betas=args.betas, weight_decay=0.0, max_grad_norm=1.0)
    policy = model.Policy(model.build(model.Scorer, f"{folder}/tied", world, compute=torch.float64), world, **optimizer)
    critic = model.Critic(model.build(model.Valuer, f"{folder}/tied", world, compute=torch.float64), world, **optimizer)
    storages = lambda it: {p.to_local().untyped_storage().data_ptr() for p in it.module.parameters()}
    samples = fabricate("plain", 4)
    snapshot = lambda it: torch.cat([p.detach().to_local().flatten() for p in it.module.parameters()])
    before = snapshot(policy), snapshot(critic)
    first = ppo.learn(args, world, policy, critic, None, samples, 0, 0.0, 1e-2, 0.0)          # lr 0: the critic's warm-up
    policy.module.reshard(), critic.module.reshard()
    middle = snapshot(policy), snapshot(critic)
    errors = [first["loss/value"]] + [ppo.learn(args, world, policy, critic, None, samples, k, 0.0, 1e-2, 0.0)["loss/value"] for k in range(8)]
    return {"shared": len(storages(policy) & storages(critic)), "policy moved": float((middle[0] - before[0]).norm()),
            "critic moved": float((middle[1] - before[1]).norm()), "errors": errors, "first": first}


def test_the_critic_is_its_own_model_starts_at_zero_and_learns_alone_in_its_warm_up(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("models"))
    ranks.results(1, make_models, folder)
    facts, = ranks.results(1, critic_facts, folder)
    assert facts["shared"] == 0
    assert facts["policy moved"] == 0 and facts["critic moved"] > 0
    assert facts["first"]["critic/value_mean"] == 0
    assert facts["errors"][-1] < 0.5 * facts["errors"][0]


def fields(script) -> dict[str, tuple]:
    """name → (annotation, default, help) of each Args field, read from the source."""
    body = next(n for n in ast.parse(Path(script.__file__).read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    found = {}
    for node, after in zip(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[node.target.id] = ast.unparse(node.annotation), ast.unparse(node.value), after.value.value
    return found


def test_the_two_scripts_share_their_flags_word_for_word():
    """They repeat each other's Args so that each is read alone; they must not drift apart."""
    ours, theirs = fields(grpo), fields(ppo)
    assert len(ours) == len([f for f in dataclasses.fields(grpo.Args)]) and len(theirs) == len(dataclasses.fields(ppo.Args))
    own_default = {"batch", "group", "minibatches"}
    own_help = {"group", "kl_reward_coef"}
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        assert a[0] == b[0] and (a[1] == b[1] or name in own_default) and (a[2] == b[2] or name in own_help), name
    assert ours.keys() - theirs.keys() == {"advantage", "advantage_eps", "dynamic_sampling", "refills", "overlong_filter", "loss", "kl_loss_coef", "kl_estimator"}
