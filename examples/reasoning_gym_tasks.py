"""Puzzles of the reasoning-gym library (github.com/open-thought/reasoning-gym), and its scorers.

    python grpo.py --data reasoning_gym:gcd --reward reasoning_gym ...
"""
import ast
import contextlib
import functools
import os
import pickle
import subprocess
import sys
import zlib
from unicodedata import normalize

from answers import last_answer
from errors import SettingsError
from examples.mathematics import shut_sympy

ANY = "the library's scorer gives full pay to any text. Would work: another task."
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAKE = """import pickle, random, sys, numpy, reasoning_gym
from examples.reasoning_gym_tasks import pays_anything
task, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
out, sys.stdout = sys.stdout.buffer, sys.stderr
random.seed(seed)
numpy.random.seed(seed)
puzzles = list(reasoning_gym.create_dataset(task, size=size, seed=seed))
pickle.dump((puzzles, any(map(pays_anything, puzzles[:20]))), out)"""


def rows(n: int, seed: int, task: str, split: str) -> list[dict]:
    """n puzzles, made in a process of its own: some depend on its hash seed."""
    # Puzzle i is made from seed + i: neighbours would share nearly all.
    seed = zlib.crc32(f"{split} {seed}".encode()) // 2
    done = subprocess.run([sys.executable, "-c", MAKE, task, str(n), str(seed)],
                          capture_output=True,
                          env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": ROOT})
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SettingsError(f"reasoning_gym:{task} cannot be generated: {last}")
    puzzles, unfit = pickle.loads(done.stdout)
    if unfit:
        raise SettingsError(f"reasoning_gym:{task} cannot be learned: {ANY}")
    return puzzles


def pays_anything(puzzle: dict) -> bool:
    """Whether the library's scorer gives full pay to a text that answers nothing."""
    with contextlib.suppress(Exception):  # of many kinds: it could not read it
        return scorer_of(puzzle["metadata"]["source_dataset"])("zzz", puzzle) >= 1
    return False


def score(completion, metadata, answer=None, **row):
    """The library's score, 0 to 1, of the last <answer>, or of all. Some puzzles have no answer of
    their own, and are scored by their metadata. A worker calls shut_eval before."""
    completion = normalize("NFC", completion)  # a letter is written in one way
    answer = normalize("NFC", answer) if isinstance(answer, str) else answer
    scorer, text = scorer_of(metadata["source_dataset"]), last_answer(completion)
    puzzle = row | {"answer": answer, "metadata": metadata}
    if answer is None and has_answers(metadata["source_dataset"]):
        raise ValueError("this task's puzzles have an answer, and the row has none.")
    if pays_anything(puzzle):
        raise ValueError(ANY)
    try:
        return float(scorer(completion.strip() if text is None else text, puzzle))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # The answer is wrong. Or the row is, if its answer raises too.
        if answer is not None:
            scorer(str(answer), puzzle)
        return 0.0


def shut_eval():
    """Import the library. Its scorers then evaluate only literals of what a model wrote."""
    import reasoning_gym  # noqa: F401
    shut_sympy()
    for name, module in list(sys.modules.items()):
        # bitwise_arithmetic evaluates only the row's problem.
        if name.startswith("reasoning_gym.") and not name.endswith(".bitwise_arithmetic"):
            module.eval = ast.literal_eval


@functools.cache
def scorer_of(task: str):
    import reasoning_gym
    return reasoning_gym.get_score_answer_fn(task)


@functools.cache
def has_answers(task: str) -> bool:
    """Whether a puzzle that the library makes has an answer of its own."""
    import reasoning_gym
    return reasoning_gym.create_dataset(task, size=1, seed=0)[0]["answer"] is not None
