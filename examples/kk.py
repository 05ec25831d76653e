"""Knights and knaves: who tells the truth? Rewards for the rows of Logic-RL and of `tiny:kk`.

    python grpo.py --model tiny:kk --data examples/kk.py:rows --reward kk01
"""
import re

from answers import any_answer, last_answer
from examples.formats import format_tags


def rows(seed):
    """Puzzles of two people, made by tiny.py: those of --data tiny:kk."""
    from examples import tiny  # slow to import, and a worker needs the rewards alone
    return tiny.rows(1000, seed, "kk")


@any_answer
def kk(completion, answer, prompt="", **row):
    """Logic-RL's rule (arxiv.org/abs/2502.14768).

    3: right. -0.5: wrong. -1: not readable or complete. -3: wrong tags. The answer is
    '(1) Ava is a knight...'.
    """
    gold = dict(re.findall(r"([\w'-]+) is an? (knight|knave)", str(answer)))
    if not gold:
        raise ValueError(f"kk needs 'NAME is a knight' in the answer (got {answer!r:.200})")
    if not format_tags(completion, prompt):
        return -3.0
    said = last_answer(completion).lower()
    # "a knight or a knave" is no answer
    if len(re.findall("knight|knave", said)) != len(gold):
        return -1.0
    roles = [re.search(rf"\b{re.escape(name.lower())}\b\s+is\s+an?\s+(knight|knave)\b", said)
             for name in gold]
    if None in roles:
        return -1.0
    return 3.0 if [role[1] for role in roles] == list(gold.values()) else -0.5


def kk01(completion, answer, prompt="", **row):
    """1 if kk gives 3, else 0."""
    return float(kk(completion, answer, prompt=prompt) == 3.0)
