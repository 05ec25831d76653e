"""`./run.sh prove` is green for what is shipped, and red in the right line for a user's mistake.

A mistake is a small edit of grpo.py, in a file of its own, tried with its own promise alone.
"""
import json
import re
import subprocess
from pathlib import Path

import pytest

from forked import PYTHON

ROOT = Path(__file__).parent.parent
EVERY = [*range(1, 10)]
RANKS, BUDGET, SHARED, ORDER, UNSCORED, LOOP, METRICS, RESUMED, GROUP = EVERY
BACKWARD = "policy.backward((w * loss).sum())"
NOTE = "    batch.note_advantages(advantages, loss_tokens)  # for samples/\n"
BASELINE = '    if args.advantage == "reinforce++-baseline":\n'
MISTAKES = {  # (the promise that it breaks, text that is found once, its mistake, flags)
    "a mean over the micro-batch": (
        BUDGET, BACKWARD, "policy.backward(loss.sum() / max(1, len(loss)))", ""),
    "a loss that reads its neighbour": (
        LOOP, "micro.of_tokens(advantages)", "micro.of_tokens(advantages).roll(1)", ""),
    "a baseline of all groups": (
        GROUP, BASELINE, "    advantages = batch.of_rows(rewards - rewards[batch.scored].mean())\n"
        f"{BASELINE}", ""),
    "an update that depends on the rank": (
        RANKS, BACKWARD, BACKWARD.replace("w * ", "(1 + world.rank) * w * "), ""),
    "unscored completions in a denominator": (
        UNSCORED, "loss_tokens[rows], args.aggregation", "batch.tokens[rows], args.aggregation",
        ""),
    "old log-probs in another order": (
        ORDER, "old = micro.of_tokens(old_logprobs)", "old = micro.of_tokens(old_logprobs.flip(0))",
        "--minibatches 2"),
    "state outside the checkpoint": (
        RESUMED, NOTE,
        "    policy.calls = getattr(policy, 'calls', 0) + 1\n"
        "    advantages = advantages / policy.calls\n", ""),
    "a metric's mean over the micro-batch": (
        METRICS, "meter.add(w, details)",
        "meter.add(torch.ones_like(w) / max(1, len(w)), details)", ""),
}
PAGE = (ROOT / "docs/use/recipes.md").read_text()
RECIPES = re.findall(r"^\| .*\| `((?:ppo\.py )?--[^`]+)` \|$", PAGE, re.M)
SOFT = '''import torch

def soft(logp, old, A, row, **others):
    ratio = (logp - old).exp()
    return -A * (1 + 0.3 * torch.tanh((ratio - 1) / 0.3)), {"ratio": ratio.detach()}
'''


def edited(folder: Path, name: str) -> str:
    """A copy of grpo.py with a mistake → its path."""
    _, old, new, _ = MISTAKES[name]
    text = (ROOT / "grpo.py").read_text()
    assert text.count(old) == 1, f"{name}: {old!r} is {text.count(old)} times in grpo.py"
    path = folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.py"
    path.write_text(text.replace(old, new))
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
    folder = tmp_path_factory.mktemp("prove")
    cases = {"grpo": ("grpo.py", "", EVERY), "ppo": ("ppo.py", "", [LOOP, GROUP]),
             "lora": ("grpo.py", "--lora_rank 4 --kl_loss_coef 0.1", [LOOP]),
             "soft": ("grpo.py", f"--loss {folder}/soft.py:soft", [LOOP])}
    (folder / "soft.py").write_text(SOFT)
    for name, (line, _, _, flags) in MISTAKES.items():
        cases[name] = edited(folder, name), flags, [line]
    return dict(zip(cases, proved(folder, [*cases.values()]), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_breaks_its_promise(found, name):
    assert [*broken(found[name])] == [MISTAKES[name][0]]


@pytest.mark.parametrize("name", ["grpo", "ppo", "lora", "soft"])  # a loss needs no registration
def test_what_is_shipped_keeps_its_promises(found, name):
    assert broken(found[name]) == {}


@pytest.mark.slow
def test_the_command(tmp_path):
    path = edited(tmp_path, "a baseline of all groups")
    done = subprocess.run([PYTHON, "-m", "tools.prove", path, "--group", "2"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    wrong = [line.split()[0] for line in done.stdout.splitlines() if "falls short" in line]
    assert done.returncode == 1 and wrong == ["9"], done.stdout + done.stderr
    assert "Look at (line 9): a baseline of other groups" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flags", RECIPES)
def test_recipes(tmp_path, flags):
    script = "ppo.py" if flags.startswith("ppo.py") else "grpo.py"
    found, = proved(tmp_path, [(script, flags.removeprefix("ppo.py "), EVERY)])
    assert broken(found) == {} and len(RECIPES) > 20
