"""Experts learn the same on any number of ranks, with any budgets."""
import numpy as np
import pytest

from learning import LONGEST, Case
from test_experts import make_model
from test_same_update import case, run_on, same


class Routed(Case):
    """Of a model with experts."""

    @property
    def source(self):
        return "experts"

    def prepare(self, samples):
        if self.options.get("replay_routing"):
            give_routes(samples)


def give_routes(samples: list) -> None:
    """Two of five experts at random for each token in two layers, as the engine would tell them.
    The completions of a group disagree about their prompt."""
    for number, sample in enumerate(samples):
        n = len(sample.prompt.row.prompt_ids) + len(sample.completion.ids) - 1
        draws = np.random.default_rng(number).random((n, 2, 5))
        sample.completion.routes = draws.argsort(-1)[..., :2]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("experts"))
    make_model(f"{folder}/experts")
    return folder


def check(models, cases: list[Case]) -> None:
    same(cases, run_on((1, 2), models, cases))


def test_experts_learn_the_same_on_two_ranks(models):
    check(models, [
        case(7, kind=Routed, kl_loss_coef=0.1, entropy_coef=0.01, minibatches=3, steps=2,
             update_tokens=LONGEST, score_tokens=96, checkpointing=True),
        case(7, kind=Routed, replay_routing=True, minibatches=2, update_tokens=77,
             score_tokens=64)])


def test_beside_adapters_too(models):
    pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    check(models, [case(3, kind=Routed, lora_rank=2, kl_loss_coef=0.1, minibatches=2,
                        update_tokens=64)])
