"""An exercise passes with every right repair, and with no wrong one."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked import PYTHON

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "exercises"))
import diagnose  # noqa: E402
import exercise  # noqa: E402
from solutions import SOLUTIONS  # noqa: E402

SLOW = (7, 8)  # they start processes, and take seconds


def edited(number: int, old: str, new: str) -> str:
    """The solution with one passage changed."""
    assert SOLUTIONS[number].count(old) == 1
    return SOLUTIONS[number].replace(old, new)


GAP, TEMPERATURE = "rollout/logprob_gap_mean", "the engine samples at a lower temperature"
CACHE, KL = "the engine's prefix cache is of old weights", "the KL term has the wrong sign"
HOLE, RATE = "the reward is high without a right answer", "the learning rate is too high"

# Of each wrong repair: a name, the code, and a part of the sentence that tells why it is wrong.
WRONG = {
    1: [("all tokens at once", '''
def losses_of_parts(token_loss, mask, parts):
    return token_loss[mask].mean()
''', "Return a list"),
        ("all tokens at once, in equal parts", '''
def losses_of_parts(token_loss, mask, parts):
    return [token_loss[mask].mean() / len(parts) for rows in parts]
''', "which are not in memory at the same time"),
        ("weights by rows", '''
def losses_of_parts(token_loss, mask, parts):
    return [token_loss[rows][mask[rows]].mean() * len(rows) / len(mask) for rows in parts]
''', "The mean over all tokens is"),
        ("the padding counts", edited(1, "mask.sum()", "mask.numel()"),
         "The mean over all tokens is")],
    2: [("-1", '''
def tokens_with_loss(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return ids, ids != -1
''', "there is no token -1"),
        ("an id above the vocabulary", '''
def tokens_with_loss(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=VOCABULARY)
    return ids, ids != VOCABULARY
''', "there is no token 8"),
        ("another token", '''
def tokens_with_loss(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    return ids, ids != 3
''', "was sampled, and"),
        ("up to the first end", '''
def tokens_with_loss(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    return ids, (ids == END).cumsum(1) - (ids == END).int() == 0
''', "was sampled, and")],
    3: [("no cache", '''
class Engine:
    def load(self, embedding, head):
        self.embedding, self.head = embedding.clone(), head.clone()

    def logprobs(self, prompt):
        return (prefill(self.embedding, prompt) @ self.head).log_softmax(-1)
''', "8 prefills for 2 prompts"),
        ("a new cache at each call", edited(3, "tuple(prompt) not in self.cache", "True"),
         "8 prefills for 2 prompts"),
        ("a cache of one prompt", edited(
            3, "not in self.cache:\n", "not in self.cache:\n            self.cache.clear()\n"),
         "8 prefills for 2 prompts"),
        ("emptied before the first step only", edited(
            3, "self.cache = {}", "self.cache = getattr(self, 'cache', {})"),
         "engine and trainer differ")],
    4: [("its square", edited(4, ".square() / 2", ".square()"), "expected gradient"),
        ("k3", edited(4, "(logprobs - ref_logprobs).square() / 2",
                      "(ref_logprobs - logprobs).exp() - 1 - (ref_logprobs - logprobs)"),
         "expected gradient")],
    5: [("no gamma", edited(5, "gamma * lam * following", "lam * following"), "the next one?"),
        ("lambda squared", edited(5, "gamma * lam * following", "gamma * lam**2 * following"),
         "the next one?"),
        ("no lambda", edited(5, "gamma * lam * following", "gamma * following"), "and not"),
        ("no gamma in delta", edited(5, "gamma * value_after", "value_after"), "and not")],
    6: [("a large threshold", edited(6, "rewards.max() == rewards.min()", "rewards.std() < 0.3"),
         "it is still the best"),
        ("a small threshold", edited(6, "rewards.max() == rewards.min()", "rewards.std() < 0.01"),
         "it is still the best"),
        ("a larger eps", '''
def advantages(rewards, eps=1e-4):
    return (rewards - rewards.mean()) / (rewards.std() + eps)
''', "rewards of 0.1"),
        ("the sum", edited(6, "rewards.max() == rewards.min()", "not rewards.sum()"), "of 0.1")],
    7: [("what rank 1 was told", '''
def should_stop(told):
    flag = torch.tensor(int(told))
    td.broadcast(flag, src=1)
    return bool(flag)
''', "rank 0 is told"),
        ("what rank 0 was told", '''
def should_stop(told):
    flag = torch.tensor(int(told))
    td.broadcast(flag, src=0)
    return bool(flag)
''', "rank 1 is told"),
        ("if all are told", edited(7, "ReduceOp.MAX", "ReduceOp.MIN"), "rank 1 is told"),
        ("always", "def should_stop(told):\n    return True\n", "rank 1 is told"),
        ("asked only where told", '''
def should_stop(told):
    if told:
        td.all_reduce(torch.ones(1))
    return told
''', "waited in vain")],
    8: [("the thread is left", '''
def score(reward, completions, seconds):
    pool, rewards = ThreadPoolExecutor(), []
    for future in [pool.submit(reward, text) for text in completions]:
        try:
            rewards.append(future.result(timeout=seconds))
        except TimeoutError:
            rewards.append(None)
    pool.shutdown(wait=False)
    return rewards
''', "still runs"),
        ("the process is left", edited(8, "        worker.kill()", "        # worker.kill()"),
         "still runs"),
        ("nobody waits", edited(8, "ours.poll(seconds)", "ours.poll(0)"), "not [2, None, 3]"),
        ("an alarm", '''
import signal
def score(reward, completions, seconds):
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
''', "main thread")],
    9: [("a cache", edited(9, TEMPERATURE, CACHE), "in step 1 already"),
        ("no weights", edited(9, TEMPERATURE, "the engine never gets new weights"),
         "in step 1 already"),
        ("the rate", edited(9, TEMPERATURE, "the learning rate is too high"), "still agree"),
        ("another metric", edited(9, GAP, "reward/mean"), "not what tells it"),
        ("no such cause", edited(9, TEMPERATURE, "bad luck"), "There are: nothing is wrong;"),
        ("no such metric", edited(9, GAP, "loss/kl"), "There are: reward/mean,")],
    10: [("nothing", edited(10, CACHE, "nothing is wrong"), "policy/entropy ends at"),
         ("no weights", edited(10, CACHE, "the engine never gets new weights"),
          "reward/mean goes from 0.38 to 0.9"),
         ("the temperature", edited(10, CACHE, TEMPERATURE), "3.1e-07 in step 1")],
    11: [("the rate", edited(11, KL, "the learning rate is too high"), "k3 is never below 0"),
         ("the entropy term", edited(11, KL, "the entropy term has the wrong sign"), "only."),
         ("another metric", edited(11, "loss/kl", "grad/norm"), "not what tells it")],
    12: [("nothing", edited(12, HOLE, "nothing is wrong"), "ends at"),
         ("the rate", edited(12, HOLE, "the learning rate is too high"), "ends at 1"),
         ("what is paid for", edited(12, "reward/exact", "reward/mean"), "not what tells it")],
    13: [("the KL", edited(13, RATE, KL), "no KL term"),
         ("a hole", edited(13, RATE, HOLE), "reward/mean ends at 0"),
         ("the entropy term", edited(13, RATE, "the entropy term has the wrong sign"),
          "policy/entropy goes from 0.75 to 5.4")]}

RIGHT = {
    1: [("means, weighted by tokens", '''
def losses_of_parts(token_loss, mask, parts):
    return [token_loss[rows][mask[rows]].mean() * mask[rows].sum() / mask.sum() for rows in parts]
'''), ("a weight for each token", '''
import losses
def losses_of_parts(token_loss, mask, parts):
    weights = mask * losses.token_weights(mask.sum(1), "token", max_tokens=6).view(-1, 1)
    return [(weights[rows] * token_loss[rows]).sum() for rows in parts]
''')],
    2: [("a padded mask", '''
def tokens_with_loss(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True), pad([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
''')],
    3: [("a version in the key", '''
class Engine:
    version, cache = 0, {}

    def load(self, embedding, head):
        self.embedding, self.head, self.version = embedding, head, self.version + 1

    def logprobs(self, prompt):
        key = (self.version, *prompt)
        if key not in self.cache:
            self.cache[key] = prefill(self.embedding, prompt)
        return (self.cache[key] @ self.head).log_softmax(-1)
''')],
    4: [("the score function", '''
def kl_loss(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).detach() * logprobs
'''), ("the ratio is differentiated too", '''
def kl_loss(logprobs, ref_logprobs):
    return (logprobs - logprobs.detach()).exp() * (logprobs - ref_logprobs)
''')],
    5: [("a sum over the future", '''
def gae(rewards, values, gamma, lam):
    after = torch.cat([values[1:], torch.zeros(1)])
    deltas = rewards + gamma * after - values
    powers = (gamma * lam) ** torch.arange(len(rewards))
    future = [powers[:len(rewards) - t] * deltas[t:] for t in range(len(rewards))]
    return torch.stack([part.sum() for part in future])
''')],
    6: [("float64", '''
def advantages(rewards, eps=1e-9):
    rewards = rewards.double()
    return ((rewards - rewards.mean()) / (rewards.std() + eps)).float()
'''), ("differences to the first", '''
def advantages(rewards, eps=1e-9):
    rewards = rewards - rewards[0]
    return (rewards - rewards.mean()) / (rewards.std() + eps)
''')],
    7: [("a sum", '''
def should_stop(told):
    flag = torch.tensor(float(told))
    td.all_reduce(flag)
    return flag > 0
'''), ("gathered objects", '''
def should_stop(told):
    everyone = [None, None]
    td.all_gather_object(everyone, told)
    return any(everyone)
''')],
    8: [("multiprocessing.Pool", '''
def score(reward, completions, seconds):
    rewards = []
    with multiprocessing.Pool(len(completions)) as pool:
        for result in [pool.apply_async(reward, (text,)) for text in completions]:
            try:
                rewards.append(result.get(seconds))
            except multiprocessing.TimeoutError:
                rewards.append(None)
    return rewards
'''), ("a pool of the other module, ended", '''
from concurrent.futures import ProcessPoolExecutor
def score(reward, completions, seconds):
    rewards, pool = [], ProcessPoolExecutor(len(completions))
    for future in [pool.submit(reward, text) for text in completions]:
        try:
            rewards.append(future.result(timeout=seconds))
        except TimeoutError:
            rewards.append(None)
    for process in list(pool._processes.values()):
        process.kill()
    return rewards
'''), ("terminated, one at a time", edited(8, "worker.kill()", "worker.terminate()"))]}


def run(number: int, part: str) -> str | None:
    """exercise.run. Those that start processes run in a process of their own."""
    if number not in SLOW:
        return exercise.run(number, part)
    code = f"import exercise, os; print(exercise.run({number}, {part!r}), flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "exercises", timeout=120,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return None if done.stdout == "None\n" else done.stdout


def cases(repairs: dict) -> list:
    """(number, …) of each repair, with its name. Those of 7 and 8 take seconds: they are slow."""
    made = []
    for number in repairs:
        for name, *case in repairs[number]:
            marks = [pytest.mark.slow] if number in SLOW else []
            made.append(pytest.param(number, *case, id=f"{number}, {name}", marks=marks))
    return made


@pytest.mark.parametrize("number, part, why", cases(WRONG))
def test_a_wrong_repair_fails_and_is_told_why(number, part, why):
    assert why in (run(number, part) or "it passed")


@pytest.mark.parametrize("number, part", cases(RIGHT))
def test_a_right_repair_passes(number, part):
    assert run(number, part) is None


@pytest.mark.parametrize("number", [
    pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SOLUTIONS])
def test_an_exercise_fails_as_given_and_passes_with_its_solution(number):
    assert run(number, "")
    assert run(number, SOLUTIONS[number]) is None


@pytest.mark.parametrize("number", [n for n in SOLUTIONS if n > 8])
def test_a_run_fits_one_cause_only(number):
    """And its curves are whole: 40 steps of each metric, and of the healthy run."""
    fits = [cause for cause, (metric, _) in diagnose.CAUSES.items()
            if diagnose.what_is_wrong(number, cause, metric) is None]
    assert len(fits) == 1 and fits[0] in SOLUTIONS[number]
    run, healthy = diagnose.curves(number)
    assert run.keys() == healthy.keys() and len(run) >= 7
    assert {len(values) for values in (*run.values(), *healthy.values())} == {40}
    assert diagnose.what_is_wrong(number, "nothing is wrong", "reward/mean")


def test_the_curves_are_printed():
    done = subprocess.run([PYTHON, "exercises/diagnose.py", "9"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "rollout/logprob_gap_mean  this run      0.18" in done.stdout
    assert "the KL term has the wrong sign" in done.stdout


def test_the_command_runs_exercises_and_shows_solutions():
    for flag, status, printed in ((), 1, "6: fails"), (("--solution",), 0, "6: solved"):
        done = subprocess.run([PYTHON, "exercises/exercise.py", "6", *flag], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == status and printed in done.stdout, done


def test_exercises_name_lines_that_are_there():
    for number in SOLUTIONS:
        path, = (ROOT / "exercises").glob(f"{number}_*.py")
        code, file = re.search(r"^# In the project: `(.*?)`.*? in ([\w/]+\.py)", path.read_text(),
                               re.M).groups()
        assert code in (ROOT / file).read_text(), path
        assert f"]({path.name})" in (ROOT / "exercises/README.md").read_text()
