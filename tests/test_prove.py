"""`./run.sh prove` is green for what is shipped, and red in the right line for a user's mistake.

A mistake is a small edit of grpo.py, in a file of its own, tried with its own promise alone.
"""
import re
import subprocess
from pathlib import Path

import pytest

from forked import PYTHON
from tools import prove

ROOT = Path(__file__).parent.parent
RANKS, BUDGETS, ORDER, SINGLE, GROUPS, RESUMED = range(6)
SOME = """import sys
from tools import prove
texts, numbers = [*prove.PROMISES], sys.argv.pop(1)
prove.PROMISES = {texts[int(n)]: prove.PROMISES[texts[int(n)]] for n in numbers}
sys.exit(prove.main())"""
BACKWARD = "policy.backward((w * loss).sum())"
NOTE = "    batch.note_advantages(advantages, loss_tokens)  # for samples/\n"
BASELINE = '    if args.advantage == "reinforce++-baseline":\n'
METER = "meter.add(w, details)"
MISTAKES = {  # (the promise that it breaks, text that is found once, its mistake, flags)
    "an update that depends on the rank": (
        RANKS, BACKWARD, BACKWARD.replace("w * ", "(1 + world.rank) * w * "), ""),
    "a mean over the micro-batch": (
        BUDGETS, BACKWARD, "policy.backward(loss.sum() / max(1, len(loss)))", ""),
    "a mean of ratios over the micro-batch": (  # 1 with one update per rollout
        BUDGETS, BACKWARD,
        "policy.backward((w * loss * (logp - old).detach().exp().mean()).sum())", ""),
    "a metric's mean over the micro-batch": (
        BUDGETS, METER, "meter.add(torch.ones_like(w) / max(1, len(w)), details)", ""),
    "old log-probs in another order": (
        ORDER, "old = micro.take(old_logprobs)", "old = micro.take(old_logprobs.flip(0))",
        "--minibatches 2"),
    "a loss that reads its neighbour": (
        SINGLE, "micro.take(advantages)", "micro.take(advantages).roll(1)", ""),
    "a baseline of all groups": (
        GROUPS, BASELINE, "    advantages = batch.of_rows(rewards - rewards[batch.scored].mean())\n"
        f"{BASELINE}", ""),
    "unscored completions in a denominator": (
        GROUPS, "loss_tokens[rows], args.aggregation", "batch.tokens[rows], args.aggregation", ""),
    "state outside the checkpoint": (
        RESUMED, NOTE,
        "    policy.calls = getattr(policy, 'calls', 0) + 1\n"
        "    advantages = advantages / policy.calls\n", "")}
MINE = '''import torch

import losses

def soft(logp, old, A, row, **others):
    ratio = (logp - old).exp()
    return -A * (1 + 0.3 * torch.tanh((ratio - 1) / 0.3)), {"ratio": ratio.detach()}

def straight_cov(logp, old, A, row, **bounds):
    """variants/clip_cov.py as a draw over the batch."""
    loss, metrics = losses.clip_loss(logp, old, A, row, **bounds)
    inside = torch.nonzero(((logp - logp.mean()) * (A - A.mean())).detach() > 0.02).flatten()
    order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(0))
    cut = inside[order[:len(logp) // 10]]
    return loss * torch.ones_like(loss).index_fill(0, cut, 0), metrics

def pass_at_2(rewards, group, *, scored, **others):
    """R - mean, of the success of pairs: https://arxiv.org/abs/2508.10751. It has no gradient
    unless some rewards are exactly 0 and some exactly 1."""
    right, wrong = (rewards == 1) & scored, (rewards == 0) & scored
    n, failed = (x.view(-1, group).sum(1).repeat_interleave(group) for x in (scored, wrong))
    both = n * (n - 1)
    rate = 1 - failed * (failed - 1) / both.clamp(min=1)
    alone = 1 - (failed - 1) / (n - 1).clamp(min=1)
    A = torch.where(right, 1 - rate, torch.where(wrong, alone - rate, 0.0))
    return torch.where((failed > 0) & (n > failed), A, 0.0).double()
'''
PAGE = "".join(path.read_text() for path in (
    ROOT / "docs/use/recipes.md", ROOT / "variants/README.md") if path.exists())
RECIPES = re.findall(r"^\| .*\| `((?:ppo\.py )?--[^`]+)` \|$", PAGE, re.M)


def proved(promises: str, *words: str) -> tuple[list[str], str]:
    """`prove WORDS` with the promises of these numbers alone → the verdict of each, what it prints.
    Its exit status is 0 if all hold, and 1 if one falls short."""
    done = subprocess.run([PYTHON, "-c", SOME, promises, *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=900)
    found = re.findall(r"^.+: .+ limit 1e-12  (holds|falls short: \w)", done.stdout, re.M)
    text = done.stdout + done.stderr
    assert len(found) == len(promises), text
    assert done.returncode == int(found != ["holds"] * len(promises)), text
    return [verdict.split(":")[0] for verdict in found], text


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_breaks_its_promise(name, tmp_path):
    number, old, new, flags = MISTAKES[name]
    text = (ROOT / "grpo.py").read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in grpo.py"
    (tmp_path / "mine.py").write_text(text.replace(old, new))
    found, printed = proved(str(number), str(tmp_path / "mine.py"), "--group", "4", *flags.split())
    _, advice = [*prove.PROMISES.values()][number]
    assert found == ["falls short"] and f"Is there {advice}?" in printed
    assert "Traceback" not in printed and "other rewards" not in printed


@pytest.mark.parametrize("numbers, words", [
    ("012345", "--group 4"), ("34", "ppo.py"),
    ("1", "ppo.py --minibatches 3 --kl_reward_coef 0.05 --gamma 0.99 --entropy_coef 0.01 "
           "--engine_correction truncate --aggregation sequence"),
    ("3", "--lora_rank 4 --kl_loss_coef 0.1 --group 2"),
    ("3", "--loss {}/mine.py:soft --group 2"),  # a loss needs no registration
    ("2", "--loss tests/often.py:clip_cov --advantage grpo --group 4"),
    ("1", "--advantage parts/turns/turn_credit.py:turn_credit --reward turns --group 4 "
          "--reply examples/doors.py:Doors")])
def test_what_is_shipped_keeps_its_promises(numbers, words, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    found, printed = proved(numbers, *words.format(tmp_path).split())
    assert found == ["holds"] * len(numbers), printed


def test_an_advantage_that_needs_rewards_of_0_and_1_gets_them(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = f"--advantage {tmp_path}/mine.py:pass_at_2 --group 4".split()
    found, printed = proved("4", *words)
    assert found == ["holds"], printed
    assert "no gradient: does your function need other rewards? From here they are 0 or" in printed


def test_a_draw_over_the_batch_falls_short(tmp_path):
    """So a token of variants/clip_cov.py has a draw of its own."""
    (tmp_path / "mine.py").write_text(MINE)
    words = f"--loss {tmp_path}/mine.py:straight_cov --advantage grpo --group 4".split()
    assert proved("2", *words)[0] == ["falls short"]


def test_the_limit_is_the_one_of_the_readme():
    said = re.search(r"\((\S+) in float64\).*?`./run.sh prove`", (ROOT / "README.md").read_text(),
                     re.S)
    assert float(said[1]) == prove.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("words", [*RECIPES, "sft.py", "distill.py --teacher x --divergence jsd"])
def test_recipes(words):
    found, printed = proved("012345", *words.split())
    assert found == ["holds"] * 6 and len(RECIPES) > 20, printed
