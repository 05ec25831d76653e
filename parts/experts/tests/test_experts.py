"""A mixture of experts is its equation, learns as the papers' formulas say, and uses the experts
that the engine used where --replay_routing says so."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

import fakes
import families
import memory
import plan
import reference
from errors import SettingsError
from parts.experts import experts, plug
from reference_settings import OFTEN, Setting, choices, drawn
from shapes import shape_of
from tables import table
from updates import SIZES, every_pair, right, save_two  # noqa: F401

KINDS = {"qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                           head_dim=64, norm_topk_prob=True),
         "mixtral": dict(num_local_experts=8, sliding_window=64, head_dim=32),
         "olmoe": dict(num_experts=8, num_experts_per_tok=3, num_key_value_heads=2),
         "mellum": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                        head_dim=64, sliding_window=64,
                        layer_types=["sliding_attention", "full_attention"])}


# ---- the update


class Mixed(reference.Model):
    """A model with experts, as the papers write them. It counts the experts of sampled tokens."""

    def parameters(self, lm) -> dict:
        self.blocks = [block for block in lm.modules() if hasattr(block, "experts")]
        for block in self.blocks:
            block.forward = lambda hidden, block=block: self.mixture(block, hidden)
        found = super().parameters(lm)
        if self.args.freeze_router:
            found = {name: p for name, p in found.items() if ".gate." not in name}
        return found

    def mixture(self, block, hidden):
        """y = Σ_e p_e / (Σ_j p_j) · D_e (silu(G_e x) * U_e x) over the k largest p_e, or over those
        that the engine used: (1, L, H) → same. OLMoE has no division."""
        out = []
        for t, x in enumerate(hidden[0]):
            p = (block.gate.weight @ x).softmax(-1)
            used = sorted(range(len(p)), key=lambda e: -p[e].item())[:block.gate.top_k]
            if self.routes is not None:
                used = self.routes[t, self.blocks.index(block)].tolist()
            whole = sum(p[e] for e in used) if getattr(block.gate, "norm_topk_prob", True) else 1.0
            y = 0.0
            for e in used:
                gate, up = block.experts.gate_up_proj[e].chunk(2)
                inner = torch.nn.functional.silu(gate @ x) * (up @ x)
                y = y + p[e] / whole * (block.experts.down_proj[e] @ inner)
                if torch.is_grad_enabled() and t in self.places:
                    self.counts[self.blocks.index(block), e] += 1
            out.append(y)
        return torch.stack(out).unsqueeze(0)

    def hidden(self, completion):
        before, n = len(completion.prompt) - 1, len(completion.tokens)
        self.routes = getattr(completion, "routes", None)
        self.places = {before + t for t in range(n) if completion.sampled[t]}
        ids = torch.tensor([completion.prompt + completion.tokens])[:, :-1]
        hidden = self.lm.base_model(ids, use_cache=False).last_hidden_state[0]
        return hidden[sorted(self.places)]


class Routed(Setting):
    """With --replay_routing an engine told two of five experts for each token in two layers. The
    completions of a group disagree about their prompt, which has those of the first one."""

    def model(self, lm, args, head=None, adapted=True):
        return Mixed(lm, args, head)

    def samples(self, step):
        found = super().samples(step)
        for i, sample in enumerate(found if self.flags["replay_routing"] else ()):
            n = len(sample.prompt.row.prompt_ids) + len(sample.ids) - 1
            draws = np.random.default_rng([step, i]).random((n, 2, 5))
            sample.extras["routes"] = draws.argsort(-1)[..., :2]
        return found

    def learn(self, args, models, samples, completions, lr, kl_coef):
        """And the load: f_e = how often e was chosen / all choices, in each layer."""
        for i, completion in enumerate(completions):
            if self.flags["replay_routing"]:
                first, own = (samples[k].extras["routes"] for k in (i - i % args.group, i))
                p = len(completion.prompt)
                completion.routes = np.concatenate([first[:p], own[p:]])
        models[0].counts = np.zeros((2, 5))
        found = super().learn(args, models, samples, completions, lr, kl_coef)
        f = models[0].counts / models[0].counts.sum(1, keepdims=True)
        entropy = stats.entropy(f, base=5, axis=1)
        return found | {
            "router/largest_mean": f.max(1).mean(), "router/largest_worst": f.max(),
            "router/entropy_mean": entropy.mean(), "router/entropy_worst": entropy.min()}


FIVE = dict(num_experts=5, num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=8,
            pad_token_id=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Random models of five experts."""
    path = str(tmp_path_factory.mktemp("experts"))
    torch.manual_seed(0)
    for kind in "qwen3_moe", "mixtral", "olmoe":
        config = AutoConfig.for_model(kind, **SIZES | FIVE | {"norm_topk_prob": kind != "olmoe"})
        save_two(AutoModelForCausalLM.from_config(config), f"{path}/{kind}")
    return path


CHOICES = OFTEN | choices("""
kl_loss_coef 0.3
steps 1 2
freeze_router False True
replay_routing False True
lm qwen3_moe/ mixtral/ olmoe/""")


@pytest.mark.parametrize("count", [6, pytest.param(10**6, marks=pytest.mark.slow)])
def test_experts_learn_as_the_formulas_say_on_two_ranks(count, folder, right):  # noqa: F811
    """Also with experts that were told, with frozen routers; the load of a layer is in metrics."""
    every_pair(drawn("grpo", CHOICES, Routed, group=3, count=count), 2, folder, right)


# ---- the engine and the files

@pytest.mark.parametrize("kind", [kind if i < 2 else pytest.param(kind, marks=pytest.mark.slow)
                                  for i, kind in enumerate(KINDS)])
def test_engine_and_trainer_are_transformers(kind):
    """On two ranks, before, between and after two updates, of the exported files."""
    found = families.with_engine(kind, KINDS[kind])
    assert max(found[:2]) < families.ROUNDINGS * found[2], found


def test_the_engine_is_asked_for_its_experts_and_one_that_tells_none_ends_the_run(monkeypatch):
    """vLLM tells them on a GPU alone: here its part is a stub."""
    llm, routes = fakes.without_vllm(monkeypatch), np.zeros((5, 2, 2))
    module = SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(model_type="mixtral")))
    for replays in False, True:
        engine = families.engine_of("folder", fakes.World(), SimpleNamespace(
            args=fakes.args(replay_routing=replays), module=module))
        assert llm.options["enable_return_routed_experts"] == replays
    found = engine.new_tokens(SimpleNamespace(
        token_ids=[1], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop",
        routed_experts=routes))
    assert found["routes"] is routes
    blind = object.__new__(experts.RoutedPolicy)
    blind.replays, blind.batch = True, SimpleNamespace(samples=[fakes.sample(1.0)])
    with pytest.raises(RuntimeError, match="did not tell its experts"):
        blind.step(1e-3)


# ---- before a run

@pytest.mark.parametrize("name, flags, words", table("""
Qwen3-30B-A3B | freeze_router=True | fine
Qwen3-30B-A3B | replay_routing=True | fine
tiny | freeze_router=True | --freeze_router needs a model with experts.
tiny | replay_routing=True | --replay_routing needs a model with experts."""))
def test_flags_are_for_models_with_experts(refused, name, flags, words):
    assert refused("grpo", flags, words, shape_of(name))


def test_the_experts_of_the_engine_need_a_gpu():
    inputs = SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(model_type="mixtral")))
    with pytest.raises(SettingsError, match="--replay_routing needs a GPU"):
        plug.check(fakes.args(replay_routing=True), inputs)


def test_the_plan_counts_all_parameters_and_those_of_a_token():
    """As its card says: 30.5B in total and 3.3B activated. A rank has whole experts."""
    shape = shape_of("Qwen3-30B-A3B")
    assert shape.params == 30_532_122_624
    assert shape.params - shape.layers * shape.idle == 3_353_032_704
    made = plan.Plan(fakes.args(), 3, 64, 0)
    found = plug.memory(None, None, shape)(made, shape, 80 * memory.GIB)
    assert found.parts["weights"][1] == pytest.approx(4 * shape.params * 43 / 128)
