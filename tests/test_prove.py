"""`./run.sh prove` is green for what is shipped, and red in the right line for a user's mistake.

Each mistake is a small edit of a script, in a file of its own. The fast tests try some mistakes and
their own promise alone, in one process; the slow ones try all of everything.
"""
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from forked import PYTHON
from tools import prove

ROOT = Path(__file__).parent.parent
EVERY = [*range(1, 11)]
RANKS, BUDGET, SHARED, ORDER, NAN, UNSCORED, LOOP, METRICS, RESUMED, GROUP = EVERY


class Mistake(NamedTuple):
    line: int  # the promise that it breaks
    old: str  # found once in the script
    new: str
    flags: str = ""
    script: str = "grpo.py"


BACKWARD = "policy.backward((w * torch.where(m, loss, 0)).sum())"
WEIGHTS = """losses.token_weights(
            loss_tokens[rows], args.aggregation, max_tokens=args.max_tokens,
            prompts=prompts[rows])"""
ROWS = "m, w = micro.sampled, micro.slice(weights)  # (b, t), (b, 1)"
NOTE = "    batch.note_advantages(advantages, loss_tokens)  # for samples/\n"
WHITEN = ("micro.slice(advantages)  #",
          "losses.whiten(micro.slice(advantages).expand(m.shape), m)  #")
BASELINE = '    if args.advantage == "reinforce++-baseline":\n'
MISTAKES = {
    "a mean over the micro-batch": Mistake(
        BUDGET, BACKWARD,
        "policy.backward(torch.where(m, loss, 0).sum() / m.sum().clamp(min=1))"),
    "a sum over padding": Mistake(
        NAN, 'if args.engine_correction != "none":\n',
        "loss = loss * (logprobs - old).detach().sum(1, keepdim=True).exp()\n"
        '                if args.engine_correction != "none":\n'),
    "a loss that reads its neighbour": Mistake(
        LOOP, "micro.slice(advantages)  #", "micro.slice(advantages).roll(1, 0)  #"),
    "a baseline of all groups": Mistake(
        GROUP, BASELINE, f"    advantages = rewards - rewards[batch.scored].mean()\n{BASELINE}"),
    "an update that depends on the rank": Mistake(
        RANKS, BACKWARD, BACKWARD.replace("w * ", "(1 + world.rank) * w * ")),
    "weights from this rank's rows": Mistake(
        RANKS, ROWS, "m = micro.sampled\n                w = losses.token_weights("
        "m.sum(1, True), args.aggregation, max_tokens=24)"),
    "unscored completions in a denominator": Mistake(
        UNSCORED, WEIGHTS, WEIGHTS.replace("loss_tokens[rows]", "batch.tokens[rows]")),
    "unscored completions in the baseline": Mistake(
        NAN, "scored=batch.scored)  # (N,)", "scored=torch.ones_like(batch.scored))  # (N,)"),
    "a sum over replies": Mistake(
        NAN, NOTE, "    advantages = advantages + 0.1 * batch.sums(old_logprobs)\n",
        "--minibatches 2"),
    "a whitening of each micro-batch": Mistake(
        BUDGET, *WHITEN),
    "old log-probs in another order": Mistake(
        ORDER, "old = micro.slice(old_logprobs)", "old = micro.slice(old_logprobs.flip(0))",
        "--minibatches 2"),
    "state outside the checkpoint": Mistake(
        RESUMED, NOTE,
        "    policy.calls = getattr(policy, 'calls', 0) + 1\n"
        "    advantages = advantages / policy.calls\n"),
    "a metric's mean over the micro-batch": Mistake(
        METRICS, "meter.add(micro, w, details)",
        "meter.add(micro, m / m.sum().clamp(min=1), details)"),
    "ppo: whitening of each micro-batch": Mistake(
        BUDGET, *WHITEN, script="ppo.py"),
    "ppo: values of other rows": Mistake(
        GROUP, "losses.gae(rewards, values, mask,", "losses.gae(rewards, values.roll(1, 0), mask,",
        script="ppo.py"),
}
FAST = ["a mean over the micro-batch", "a sum over padding", "a loss that reads its neighbour",
        "a baseline of all groups", "an update that depends on the rank",
        "weights from this rank's rows", "unscored completions in a denominator",
        "a sum over replies", "a whitening of each micro-batch", "old log-probs in another order",
        "state outside the checkpoint"]
PAGE = (ROOT / "docs/use/recipes.md").read_text()
RECIPES = re.findall(r"^\| .*\| `((?:ppo\.py )?--[^`]+)` \|$", PAGE, re.M)
SOFT = '''import torch
import losses

def soft(logprobs, old_logprobs, advantages, mask, **others):
    logp, old, A = losses.select(mask, logprobs, old_logprobs, advantages)
    ratio = (logp - old).exp()
    return -A * (1 + 0.3 * torch.tanh((ratio - 1) / 0.3)), {"ratio": ratio.detach()}
'''


def edited(folder: Path, name: str, script: str, *changes: tuple[str, str]) -> str:
    """A copy of a script with these changes → its path."""
    text = (ROOT / script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {old!r} is {text.count(old)} times in {script}"
        text = text.replace(old, new)
    path = folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.py"
    path.write_text(text)
    return str(path)


def proved(folder: Path, cases: list) -> list[dict[int, tuple[bool, str]]]:
    """Of each case (file, flags, promises): {promise: (whether it holds, what differs most)}."""
    (folder / "cases").write_text(json.dumps([[path, flags.split(), numbers]
                                              for path, flags, numbers in cases]))
    done = subprocess.run([PYTHON, "tests/prove_worker.py", folder / "cases",
                           folder / "out"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((folder / "out").read_text())
    return [{int(n): tuple(result) for n, result in one.items()} for one in found]


def broken(result: dict) -> dict[int, str]:
    return {n: what for n, (holds, what) in result.items() if not holds}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """Of each case of the fast tests, by its name."""
    folder = tmp_path_factory.mktemp("prove")
    cases = {"grpo": ("grpo.py", "", EVERY), "ppo": ("ppo.py", "", [NAN, LOOP, GROUP]),
             "lora": ("grpo.py", "--lora_rank 4 --kl_loss_coef 0.1", [LOOP]),
             "soft": ("grpo.py", f"--loss {folder}/soft.py:soft", [LOOP])}
    (folder / "soft.py").write_text(SOFT)
    for name in FAST:
        m = MISTAKES[name]
        cases[name] = edited(folder, name, m.script, (m.old, m.new)), m.flags, [m.line]
    return dict(zip(cases, proved(folder, [*cases.values()]), strict=True))


@pytest.mark.parametrize("name", FAST)
def test_a_mistake_breaks_its_promise(found, name):
    assert [*broken(found[name])] == [MISTAKES[name].line]


@pytest.mark.parametrize("name", ["grpo", "ppo", "lora"])
def test_what_is_shipped_keeps_its_promises(found, name):
    assert broken(found[name]) == {}


def test_a_loss_of_ones_own_needs_no_registration(found):
    assert broken(found["soft"]) == {}


def test_the_table_says_where_to_look(capsys):
    first, second, *_ = prove.PROMISES
    prove.show([prove.Result(first, 1e-15, "2 ranks: policy, update 1", False),
                prove.Result(second, 0.2, "small budgets: policy, update 1", True)])
    _, _, good, bad, advice = capsys.readouterr().out.splitlines()
    assert "holds" in good and "falls short: small budgets: policy, update 1" in bad
    assert "losses.whiten" in bad
    assert advice == f"Look at (line 2): {second.advice}."


def test_flags_that_contradict_each_other_are_refused():
    done = subprocess.run([PYTHON, "-m", "tools.prove", "--group", "1"], cwd=ROOT, text=True,
                          capture_output=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "error: --advantage dr_grpo compares the completions" in last


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 1])
def test_the_command(tmp_path, status):
    path, mistake = "grpo.py", MISTAKES["a baseline of all groups"]
    if status:
        path = edited(tmp_path, "mine", "grpo.py", (mistake.old, mistake.new))
    done = subprocess.run([PYTHON, "-m", "tools.prove", path, "--group", "2"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    table = [line for line in done.stdout.splitlines() if line[:2].strip().isdigit()]
    assert len(table) >= len(EVERY)
    wrong = [line.split()[0] for line in table if "falls short" in line]
    assert wrong == ["10"][:status]


@pytest.mark.slow
def test_every_promise_of_ppo_and_lora(tmp_path):
    found = proved(tmp_path, [("ppo.py", "--kl_reward_coef 0.1 --epochs 2", EVERY),
                              ("ppo.py", "--lora_rank 4", EVERY),
                              ("grpo.py", "--lora_rank 4 --kl_loss_coef 0.1", EVERY)])
    assert [broken(result) for result in found] == [{}, {}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("flags", RECIPES)
def test_recipes(tmp_path, flags):
    script = "ppo.py" if flags.startswith("ppo.py") else "grpo.py"
    found, = proved(tmp_path, [(script, flags.removeprefix("ppo.py "), EVERY)])
    assert broken(found) == {} and len(RECIPES) > 20


@pytest.mark.slow
def test_what_else_a_mistake_breaks(tmp_path):
    """No mistake is seen by chance: its own line is among the broken ones, with the others tried.
    """
    cases = [(edited(tmp_path, name, m.script, (m.old, m.new)), m.flags, EVERY)
             for name, m in MISTAKES.items()]
    for (name, m), result in zip(MISTAKES.items(), proved(tmp_path, cases), strict=True):
        print(name, broken(result))
        assert m.line in broken(result), name
        assert len(broken(result)) < len(EVERY), name
