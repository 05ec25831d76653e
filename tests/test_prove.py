"""`./run.sh prove` holds for what is shipped, and says which promise a user's mistake breaks.

A mistake is a small edit of grpo.py, in a file of its own, tried with its own promise alone.
"""
import re
import subprocess

import pytest

from families import ROOT
from forked import PYTHON
from tools import prove

SOME = """import sys
from tools import prove
texts, numbers = [*prove.PROMISES], sys.argv.pop(1)
prove.PROMISES = {texts[int(n)]: prove.PROMISES[texts[int(n)]] for n in numbers}
sys.exit(prove.main())"""
# The number of the promise that breaks; text that stands once in grpo.py; its mistake; flags.
MISTAKES = """
0 | (w * loss).sum() | ((1 + world.rank) * w * loss).sum()
1 | (w * loss).sum() | (loss.sum() / max(1, len(loss)))
1 | (w * loss).sum() | (w * loss * (logp - old).detach().exp().mean()).sum()
1 | meter.add(w, | meter.add(torch.ones_like(w) / max(1, len(w)),
2 | old = micro.take(old_logprobs) | old = micro.take(old_logprobs.flip(0)) | --minibatches 2
3 | micro.take(advantages) | micro.take(advantages).roll(1)
4 | advantages = batch.per_token(advantages)\
 | advantages = batch.per_token(rewards - rewards[batch.scored].mean())
4 | loss_tokens[rows], args.aggregation | batch.tokens[rows], args.aggregation
6 | (w * loss).sum() | (w * (loss + 0.1 * (logp - old).square())).sum()
5 | meter = Meter(world)\
 | policy.n = getattr(policy, "n", 0) + 1; advantages = advantages / policy.n; meter = Meter(world)
""".strip().splitlines()
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


def proved(promises: str, words: str) -> tuple[list[str], str]:
    """`prove WORDS` with the promises of these numbers alone → the verdict of each, what it prints.
    Its exit status is 0 if all hold, and 1 if one falls short."""
    done = subprocess.run([PYTHON, "-c", SOME, promises, *words.split()], cwd=ROOT, timeout=900,
                          capture_output=True, text=True)
    found = re.findall(r"^.+: .+ limit 1e-12  (holds|falls short(?=: \w))", done.stdout, re.M)
    text = done.stdout + done.stderr
    assert len(found) == len(promises), text
    assert done.returncode == int(found != ["holds"] * len(promises)), text
    return found, text


def keeps(promises: str, words: str) -> str:
    """The promises of these numbers hold → what is printed."""
    found, printed = proved(promises, words)
    assert found == ["holds"] * len(promises), printed
    return printed


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_its_promise(mistake, tmp_path):
    """The table says that it falls short, and the advice that fits."""
    number, old, new, *flags = mistake.split(" | ")
    text = (ROOT / "grpo.py").read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in grpo.py"
    (tmp_path / "mine.py").write_text(text.replace(old, new))
    found, printed = proved(number, f"{tmp_path}/mine.py --group 4 {' '.join(flags)}")
    _, advice = [*prove.PROMISES.values()][int(number)]
    assert found == ["falls short"] and f"Is there {advice}?" in printed
    assert "Traceback" not in printed and "other rewards" not in printed


@pytest.mark.parametrize("promises, words", [
    ("0123456", "--group 4"), ("134", "ppo.py --minibatches 3 --kl_reward_coef 0.05 --gamma 0.99 "
     "--entropy_coef 0.01 --engine_correction truncate --aggregation sequence"),
    ("3", "--loss {}/mine.py:soft --group 2"), ("4", "--advantage {}/mine.py:pass_at_2 --group 4")])
def test_what_is_shipped_keeps_its_promises(promises, words, tmp_path):
    """So do a loss and an advantage of a file. One that needs rewards of 0 and 1 gets them."""
    (tmp_path / "mine.py").write_text(MINE)
    printed = keeps(promises, words.format(tmp_path))
    assert ("no gradient: does your function need other rewards? From here they are 0 or"
            in printed) == ("pass_at_2" in words)


def test_a_loss_that_returns_something_else_is_said_once(tmp_path):
    """It is the last line, and no promise is judged."""
    (tmp_path / "mine.py").write_text("def f(logp, *given, **named):\n    return logp.sum(), {}\n")
    command = [PYTHON, "-m", "tools.prove", "--loss", f"{tmp_path}/mine.py:f"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "limit" not in done.stdout + done.stderr
    assert re.search("mine.py:f must return two things: a loss for each of the [0-9]+ tokens",
                     done.stdout), done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: `learn` failed in the first trial")


def test_a_draw_over_the_batch_falls_short(tmp_path):
    """So a token of variants/clip_cov.py has a draw of its own."""
    (tmp_path / "mine.py").write_text(MINE)
    words = f"--loss {tmp_path}/mine.py:straight_cov --advantage grpo --group 4"
    assert proved("2", words)[0] == ["falls short"]


@pytest.mark.slow
@pytest.mark.parametrize("words", RECIPES)
def test_recipes(words):
    """Each recipe of the page keeps all promises."""
    keeps("0123456", words)
