"""Turn credit learns as its formula says, in the updates of tests/reference.py."""
import pytest

import reference_losses
import test_reference
from parts.turns.turns import Turns
from reference_losses import mean
from reference_settings import TWICE, Setting
from test_reference import differences, outcomes

folder, right = test_reference.folder, test_reference.right
CREDIT = "advantage=parts/turns/turn_credit.py:turn_credit"


def turn_credit(args, step, rewards: list) -> list[list[float]]:
    """A token of turn k: what its episode gets from turn k on, minus the mean over the others of
    the group of what they get from their turn k on, which is 0 where they have none."""
    weight = sum(float(spec.partition(":")[2] or 1) for spec in args.reward
                 if spec.partition(":")[0] == "turns")

    def to_go(i: int, k: int) -> float:
        completion = step.completions[i]
        if k > completion.turns()[-1]:
            return 0.0
        paid = [weight * x for x in completion.paid]
        return rewards[i] - sum(paid) + sum(paid[k:])

    advantages: list[list[float]] = [[] for _ in rewards]
    for i in step.trained():
        first = i - i % args.group
        others = [j for j in range(first, first + args.group) if j != i and rewards[j] is not None]
        advantages[i] = [to_go(i, k) - mean([to_go(j, k) for j in others])
                         for k in step.completions[i].turns()]
    return advantages


reference_losses.OWN["turn_credit"] = turn_credit


class Played(Setting):
    """Each turn is paid."""

    def samples(self, step):
        found = super().samples(step)
        for i, sample in enumerate(found):
            p, g = sample.prompt.row.index, i % self.group
            done, score = sample.completion, sample.score
            starts = 1 + int((done.sampled[1:] > done.sampled[:-1]).sum())
            turns = [{"paid": (7 * g + 3 * p + 5 * k) % 9 / 8} for k in range(starts)]
            sample.completion = Turns(**vars(done), turns=turns)
            score.parts["turns"] = score.total
        return found


SETTINGS = [
    Played(f"grpo group=3 steps=2 {CREDIT} reward=('turns',)"),
    Played(f"grpo group=3 steps=1 {CREDIT} reward=('exact', 'turns:0.5') overlong_buffer=8 "
           f"kl_reward_coef=0.2 overlong_filter=True aggregation=constant {TWICE}")]


@pytest.fixture(scope="module")
def shipped(folder):
    return outcomes(folder, dict(enumerate(SETTINGS)))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[one.words for one in SETTINGS])
def test_learn_is_the_reference(number, shipped, right):
    assert not differences(shipped[number], right(SETTINGS[number], number))
