"""`./run.sh prove` holds for what is shipped, and says which promise a user's mistake breaks.

A mistake is a small edit of grpo.py, in a file of its own, tried with its own promise alone.
"""
import re
import subprocess
import sys

import pytest

import fakes
from errors import SettingsError
from families import ROOT
from flags import parse
from forked import PYTHON
from tools import prove, uphill

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
7 | policy_loss(logp, old, A, | policy_loss(logp, old, -A,
7 | old = micro.take(old_logprobs) if args.needs_old_logprobs else logp.detach()\
 | old = logp.detach()
1 | rows, args.update_tokens, "update" | rows, args.logprob_tokens, "update"
8 | if not weights.any(): | if False:
9 | **args.bounds) | **{**args.bounds, "clip_low": 0.9, "clip_high": 9.0})
9 | policy.step(lr) | policy.step(args.lr)
9 | policy.step(lr) | setattr(policy, "max_grad_norm", 1e9) or policy.step(lr)
9 | from run import Run, set_up | from run import Run, set_up; white = losses.whiten;\
 losses.whiten = lambda x, among: white(x, among >= 0) | --advantage reinforce++
9 | from run import Run, set_up | from run import Run, set_up; weigh = losses.token_weights;\
 losses.token_weights = lambda n, *given, max_tokens, **named: weigh(\
 n, *given, max_tokens=n.max(), **named) | --aggregation constant
""".strip().splitlines()
# Other mistakes that break the last promise, in grpo.py.
DOWNHILL = """
loss + args.kl_loss_coef * kl | loss - args.kl_loss_coef * kl | --kl_loss_coef 0.05
loss + args.kl_loss_coef * kl | loss + args.kl_loss_coef * kl.detach() | --kl_loss_coef 0.05
micro, args.temperature, args.entropy_coef != 0) | micro, 1.0, args.entropy_coef != 0)
loss_tokens[rows], args.aggregation | batch.all_tokens[rows], args.aggregation
loss - args.entropy_coef * entropy | loss - args.entropy_coef * entropy.detach()\
 | --entropy_coef 0.01
rewards = rewards - args.kl_reward_coef | rewards = rewards + args.kl_reward_coef\
 | --kl_reward_coef 0.05
old, engine, micro.row_of_token, n_rows | engine, old, micro.row_of_token, n_rows\
 | --engine_correction truncate
batch.minibatches(args.minibatches, args.epochs) | batch.minibatches(args.minibatches, 1)
A = micro.take(advantages).to(logp.dtype) | A = micro.take(advantages).to(logp.dtype).abs()
batch.all_tokens, args.max_tokens, args.overlong | batch.tokens, args.max_tokens, args.overlong\
 | --overlong_buffer 3
old = micro.take(old_logprobs) if | old = micro.engine_logprobs if
else logp.detach() | else micro.engine_logprobs
cut = batch.truncated & args.overlong_filter | cut = ~batch.truncated & args.overlong_filter\
 | --overlong_filter
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
    """`prove WORDS` with the promises of these numbers alone → the verdict of each that can be
    tried, what it prints. Its exit status is 0 if all hold, and 1 if one falls short."""
    done = subprocess.run([PYTHON, "-c", SOME, promises, *words.split()], cwd=ROOT, timeout=900,
                          capture_output=True, text=True)
    found = re.findall(r"^.+: .+ limit 1e-12  (holds|falls short(?=: \w))", done.stdout, re.M)
    text = done.stdout + done.stderr
    names = [[*prove.PROMISES][int(number)].split(":")[0] for number in promises]
    tried = [name for name in names if f"Not tried: {name}, because" not in text]
    assert len(found) == len(tried), text
    assert done.returncode == int(found != ["holds"] * len(tried)), text
    return found, text


def keeps(promises: str, words: str) -> str:
    """The promises of these numbers hold → what is printed."""
    found, printed = proved(promises, words)
    assert {*found} == {"holds"}, printed
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
    ("0123456789", "--group 4"), ("134789", "ppo.py --minibatches 3 --kl_reward_coef 0.05 "
     "--gamma 0.99 --entropy_coef 0.01 --engine_correction truncate --aggregation sequence"),
    ("9", "--lora_rank 4 --kl_loss_coef 0.1 --weight_decay 0.1 --betas 0.8 0.9"),
    ("37", "--loss {}/mine.py:soft --group 2"),
    ("4", "--advantage {}/mine.py:pass_at_2 --group 4")])
def test_what_is_shipped_keeps_its_promises(promises, words, tmp_path):
    """So do a loss and an advantage of a file. One that needs rewards of 0 and 1 gets them."""
    (tmp_path / "mine.py").write_text(MINE)
    printed = keeps(promises, words.format(tmp_path))
    assert ("no gradient: does your function need other rewards? From here they are 0 or"
            in printed) == ("pass_at_2" in words)


OWN = {  # a file's function, by the flag that takes it, and what is said of its mistake
    "loss upside_down": "slope of the objective", "loss detached": "gradient",
    "loss doubled": "slope of the objective", "loss of_probabilities": "slope of the objective",
    "loss only_good": "slope of the objective", "advantage reversed_sign": "rise of the expected",
    "advantage of_the_neighbour": "rise of the expected",
    "advantage of_the_size": "rise of the expected"}
WRONG = """import losses
from losses import capped_ratio, group_advantages

def upside_down(logp, old, A, row, **others):
    return capped_ratio(logp, old) * A, {}

def detached(logp, old, A, row, **others):
    return -capped_ratio(logp, old).detach() * A + 0 * logp, {}

def doubled(logp, old, A, row, **others):
    return -2 * capped_ratio(logp, old) * A, {}

def of_probabilities(logp, old, A, row, **others):
    return -logp.exp() * A, {}

def only_good(logp, old, A, row, **others):
    return -capped_ratio(logp, old) * A.clamp(min=0), {}

def centred(rewards, group, scored):
    return group_advantages(rewards, group, kind="dr_grpo", eps=0, scored=scored)

def reversed_sign(rewards, group, *, scored, **others):
    return -centred(rewards, group, scored)

def of_the_neighbour(rewards, group, *, scored, **others):
    return centred(rewards.view(-1, group).roll(1, 1).flatten(), group, scored)

def of_the_size(rewards, group, *, scored, **others):
    return centred(rewards, group, scored).abs()
"""


def uphill_of(path, words: str, monkeypatch) -> tuple[float, str]:
    """The last promise of a file with these flags, in this process → prove.judge of it."""
    file = prove.load(str(path))
    monkeypatch.setattr(sys, "argv", ["", *words.split()])
    args = parse(file.Args, "")
    args.choose_rates(0)
    ours, stated = uphill.outcomes(args, file, fakes.World(), binary="pass_at" in words)
    return prove.judge([("stated", "ours")], {"stated": stated, "ours": ours})


@pytest.mark.parametrize("mistake", DOWNHILL)
def test_a_step_that_is_not_what_the_flags_state_falls_short(mistake, tmp_path, monkeypatch):
    """It holds with the same flags before the mistake."""
    old, new, *flags = mistake.split(" | ")
    text, words = (ROOT / "grpo.py").read_text(), f"--group 4 {' '.join(flags)}"
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in grpo.py"
    for name, code in ("right", text), ("wrong", text.replace(old, new)):
        (tmp_path / f"{name}.py").write_text(code)
    assert uphill_of(tmp_path / "right.py", words, monkeypatch)[0] < prove.LIMIT
    assert uphill_of(tmp_path / "wrong.py", words, monkeypatch)[0] > 1e-3


@pytest.mark.parametrize("name", OWN)
def test_a_step_of_a_file_that_does_not_go_uphill_falls_short(name, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(WRONG)
    flag, function = name.split()
    words = f"--{flag} {tmp_path}/wrong.py:{function} --group 4"
    figure, what = uphill_of(ROOT / "grpo.py", words, monkeypatch)
    assert figure > 1e-3 and OWN[name] in what


@pytest.mark.parametrize("words", RECIPES + [
    "--group 1 --advantage reinforce++ --kl_reward_coef 0.1",
    "--kl_loss_coef 0.1 --kl_estimator k1", "ppo.py --lam 1 --gamma 0.9 --entropy_coef 0.01",
    "--kl_loss_coef 0.1 --kl_estimator k2 --entropy_coef 0.01 --aggregation sequence",
    "--entropy_coef -0.05 --reward exact:0", "--loss reinforce --overlong_filter",
    "--engine_correction sequence_mask --aggregation prompt", "--dual_clip 3 --temperature 0.5",
    "--loss {}/mine.py:soft", "ppo.py --lam 0 --kl_reward_coef 0.05 --value_clip 0.02"])
def test_a_sound_step_goes_uphill(words, tmp_path, monkeypatch):
    """Each recipe, and flags that no recipe has: no false alarm."""
    (tmp_path / "mine.py").write_text(MINE)
    path, _, rest = words.rpartition("ppo.py ")
    path = "ppo.py" if words.startswith("ppo.py") else "grpo.py"
    figure, what = uphill_of(ROOT / path, rest.format(tmp_path), monkeypatch)
    assert figure < prove.LIMIT, what


@pytest.mark.parametrize("sign, verdict", [("+", "holds"), ("-", "falls short")])
def test_of_a_term_with_a_flag_of_its_own_only_the_rise_is_judged(sign, verdict, tmp_path):
    """A copy of grpo.py has a term that no flag of grpo.py states."""
    text = (ROOT / "grpo.py").read_text()
    text = text.replace("    refills: int = 3\n", "    refills: int = 3\n    pull: float = 0.01\n")
    text = text.replace("(w * loss).sum()", f"(w * ({sign}loss + args.pull * logp**2)).sum()")
    (tmp_path / "mine.py").write_text(text)
    found, printed = proved("7", f"{tmp_path}/mine.py --group 4")
    assert found == [verdict] and "What --pull state is not known" in printed


@pytest.mark.parametrize("text, said", [
    (None, "there is no such file, here or in .*Would work: a copy of grpo.py"),
    ("x = 1", "has no Args and no learn. Would work"), ("Args = 1", "has no learn")])
def test_a_file_of_another_form_is_a_sentence(text, said, tmp_path):
    """It was a traceback of importlib."""
    if text:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SettingsError, match=said):
        prove.load(f"{tmp_path}/mine.py")


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
    keeps("0123456789", words)
