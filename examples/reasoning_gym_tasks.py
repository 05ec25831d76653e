"""Puzzles of the reasoning-gym library (github.com/open-thought/reasoning-gym), and its scorers.

    python grpo.py --data reasoning_gym:gcd --reward reasoning_gym ...
"""
import ast
import functools
import os
import pickle
import subprocess
import sys
import zlib

from verifiers import any_answer, last_answer, shut_sympy

MAKE = """import pickle, random, sys, numpy, reasoning_gym
task, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
out, sys.stdout = sys.stdout.buffer, sys.stderr
random.seed(seed)
numpy.random.seed(seed)
pickle.dump(list(reasoning_gym.create_dataset(task, size=size, seed=seed)), out)"""


def rows(n: int, seed: int, task: str, split: str) -> list[dict]:
    """n puzzles, made in a process of its own: some depend on its hash seed."""
    # Puzzle i is made from seed + i: neighbours would share nearly all.
    seed = zlib.crc32(f"{split} {seed}".encode()) // 2
    done = subprocess.run([sys.executable, "-c", MAKE, task, str(n), str(seed)],
                          capture_output=True, env=os.environ | {"PYTHONHASHSEED": "0"})
    if done.returncode:
        from dist import SettingsError  # not above: it imports torch, and a worker imports this
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SettingsError(f"reasoning_gym:{task} cannot be generated: {last}")
    return pickle.loads(done.stdout)


@any_answer
def score(completion, answer, metadata, **row):
    """The library's score, 0 to 1, of the last <answer>, or of all. A worker calls shut_eval
    before."""
    scorer, text = scorer_of(metadata["source_dataset"]), last_answer(completion)
    puzzle = row | {"answer": answer, "metadata": metadata}
    try:
        return float(scorer(completion.strip() if text is None else text, puzzle))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # The answer is wrong. Or the row is, if its answer raises too.
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
