"""sft.py learns as its formula says, in the updates of tests/reference.py."""
import math

import pytest

import test_reference
from parts.sft import sft
from reference import Completion, Model, Step, mean, minibatches, weighted_means
from reference_settings import OFTEN, Setting, drawn
from test_reference import differences, every_pair, outcomes

folder, right = test_reference.folder, test_reference.right


def learned(args, policy: Model, completions: list[Completion], lr: float) -> dict[str, float]:
    """One step of sft.py → metrics. "sampled" are the tokens that are learned.

    L = -Σ log π(token) / n over the n learned tokens of a minibatch
    """
    fates = ["trained" if any(c.sampled) else "nothing" for c in completions]
    step, terms, norms = Step(completions, fates, [], None, []), [], []
    for rows in minibatches(args, step):
        n = sum(sum(completions[i].sampled) for i in rows)
        for i in rows:
            logps, _ = policy.logprobs(completions[i])
            (-logps.sum() / n).backward()
            terms += [(1 / n, True, {"loss/policy": -logp}) for logp in logps]
        if rows:
            norms.append(policy.step(lr))
    metrics = weighted_means(terms)
    return metrics | {
        "policy/perplexity": math.exp(metrics["loss/policy"]), "grad/norm": mean(norms), "lr": lr,
        "batch/prompts": len(completions), "batch/trained": fates.count("trained"),
        "batch/tokens": sum(len(c.prompt) + len(c.tokens) for c in completions),
        "batch/learned_tokens": sum(sum(c.sampled) for c in completions),
        "update/steps": len(norms), "update/skipped": minibatches(args, step).count([])}


class Supervised(Setting):
    """Two rows teach nothing."""
    scripts = {"sft": sft}

    def samples(self, step):
        found = super().samples(step)
        for sample in found[4:6]:
            sample.completion.sampled[:] = False
        return found

    def model(self, lm, args, head=None, adapted=True):
        if "lora_rank" not in self.flags:
            return super().model(lm, args, head, adapted)
        from parts.lora.tests.lora_reference import Model as Adapted
        return Adapted(lm, args, head)

    def options(self, **options):
        return {}

    def learn(self, args, models, samples, completions, lr, kl_coef):
        return learned(args, models[0], completions, lr)


SETTINGS = [Supervised("sft group=1 steps=2"),
            Supervised("sft group=1 steps=2 minibatches=7 epochs=2 temperature=0.7")]


@pytest.fixture(scope="module")
def shipped(folder):
    return outcomes(folder, dict(enumerate(SETTINGS)))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_pair_of_flags_on_any_ranks(size, folder, right):
    every_pair(drawn("sft", OFTEN, Supervised, group=1), size, folder, right)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_pair_of_flags_with_adapters(size, folder, right):
    pytest.importorskip("parts.lora.lora", reason="it has the adapters")
    choices = OFTEN | {"lora_rank": (2,)}
    every_pair(drawn("sft", choices, Supervised, group=1), size, folder, right)
