"""An exercise fails as given, passes with its solution, and tells why a wrong repair is wrong."""
import re
import subprocess
import sys

import pytest

from families import ROOT
from forked import PYTHON
from tables import table

sys.path.insert(0, str(ROOT / "exercises"))
import diagnose  # noqa: E402
import exercise  # noqa: E402
from solutions import SOLUTIONS  # noqa: E402

SLOW = {7: pytest.mark.slow, 8: pytest.mark.slow}  # they start processes and wait
# The exercise; text that stands once in its solution; a wrong repair; what is said of it.
WRONG = """
1 | mask.sum() | mask.numel() | The mean over all tokens is
3 | tuple(prompt) not in self.cache | True | 8 prefills for 2 prompts
3 | self.cache = {} | self.cache = getattr(self, 'cache', {}) | engine and trainer differ
4 | .square() / 2 | .square() | expected gradient
5 | gamma * lam * following | lam * following | the next one?
5 | gamma * value_after | value_after | and not
6 | rewards.max() == rewards.min() | rewards.std() < 0.3 | it is still the best
6 | rewards.max() == rewards.min() | not rewards.sum() | of 0.1
9 | the engine samples at a lower temperature | the learning rate is too high | still agree
9 | the engine samples at a lower temperature | bad luck | There are: nothing is wrong;
9 | rollout/logprob_gap_mean | reward/mean | not what tells it
12 | the reward is high without a right answer | nothing is wrong | ends at
7 | ReduceOp.MAX | ReduceOp.MIN | rank 1 is told
8 | worker.kill() | pass | still runs
14 | torch.minimum(ratio * A, | torch.maximum(ratio * A, | more likely already
14 | torch.minimum(ratio * A, | (ratio * A - 0 * | more likely already
14 | -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)\
   | -ratio.clamp(1 - low, 1 + high) * A | it must come back
14 | 1 + high | high | has not moved
15 | max(0, n - c - i) / (n - i) | max(0, n - c) / n | different samples
15 | max(0, n - c - i) | n - c - i | draws of
16 | [self.seed, epoch] | self.seed | its own order
16 | [self.seed, epoch] | epoch | another seed
16 | [self.seed, epoch] | [self.seed, self.position] | each row once
"""


def marked(number, *cells):
    """A case of this exercise."""
    return pytest.param(int(number), *cells, marks=SLOW.get(int(number), ()))


@pytest.mark.parametrize("number, old, new, why", [marked(*cells) for cells in table(WRONG)])
def test_a_wrong_repair_fails_and_is_told_why(number, old, new, why):
    """The exercise's own test says what is wrong with it."""
    solution = SOLUTIONS[number]
    assert solution.count(old) == 1
    assert why in (exercise.run(number, solution.replace(old, new)) or "it passed")


@pytest.mark.parametrize("number", map(marked, SOLUTIONS))
def test_an_exercise_fails_as_given_passes_with_its_solution_and_names_a_line(number):
    """The line is in the project, and the README lists the exercise. A run fits one cause only."""
    assert exercise.run(number, "") and exercise.run(number, SOLUTIONS[number]) is None
    path, = (ROOT / "exercises").glob(f"{number}_*.py")
    code, file = re.search(r"^# In the project: `(.*?)`.*? in ([\w/]+\.py)", path.read_text(),
                           re.M).groups()
    assert code in (ROOT / file).read_text(), path
    assert f"]({path.name})" in (ROOT / "exercises/README.md").read_text()
    if number in diagnose.NUMBERS:
        fit, = [cause for cause, (metrics, _) in diagnose.CAUSES.items() if all(
            diagnose.what_is_wrong(number, cause, one) is None for one in metrics.split())]
        assert fit in SOLUTIONS[number]


@pytest.mark.parametrize("command, status, text", [
    ("exercise.py 6", 1, "6: fails"), ("exercise.py 6 --solution", 0, "6: solved"),
    ("diagnose.py 9", 0, "rollout/logprob_gap_mean  this run      0.18")])
def test_the_commands_run_exercises_show_solutions_and_print_curves(command, status, text):
    """As exercises/README.md types them."""
    name, *flags = command.split()
    done = subprocess.run([PYTHON, f"exercises/{name}", *flags], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == status and text in done.stdout, done
