"""Runs rewards in a process that rewards.py may kill."""
import ast
import ctypes
import importlib.util
import inspect
import json
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from rewards import Item, Part, number, parse
from verifiers import REWARDS, math_reward

KINDS = {"completions": "trl", "solution_str": "verl", "completion": "ours"}   # by parameter
CALLS = set("Integer Float Rational Symbol factorial sqrt exp log ln Abs sin cos tan cot sec csc "
            "asin acos atan sinh cosh tanh".split())
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name,
         ast.Load, ast.Call)


def load(part: Part) -> tuple:
    """(kind, function, its parameters or None: any)."""
    if part.path is None:
        if part.name in ("math", "reasoning_gym"):
            shut_eval(part.name)
        return "ours", REWARDS[part.name], None
    path = Path(part.path).absolute()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, part.name, None)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    kinds = [kind for name, kind in KINDS.items() if name in parameters]
    if not kinds:
        sys.exit(f"{path} needs a function {part.name} with a parameter {' or '.join(KINDS)} "
                 f"(it has {list(parameters)}).")
    takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters
    return kinds[0], function, takes


def shut_eval(library: str) -> None:
    """Import the library, and keep eval away from what a model wrote."""
    from sympy.parsing import sympy_parser
    stringify = sympy_parser.stringify_expr   # sympy evals it

    def arithmetic_only(*args, **kwargs):
        code = stringify(*args, **kwargs)
        for node in ast.walk(ast.parse(code.strip(), mode="eval")):
            called = getattr(node, "func", None)
            if not isinstance(node, NODES) or called and getattr(called, "id", "") not in CALLS:
                raise ValueError("this is not arithmetic")
        return code

    sympy_parser.stringify_expr = arithmetic_only
    if library == "math":
        logging.getLogger("math_verify").setLevel(logging.ERROR)   # it warns: no timer
        math_reward(r"\boxed{\frac{1}{2}}", "0.5")   # loads the grammar
    else:
        import reasoning_gym  # noqa: F401
        for name, module in list(sys.modules.items()):
            # bitwise_arithmetic evaluates only the row's problem.
            if name.startswith("reasoning_gym.") and not name.endswith(".bitwise_arithmetic"):
                module.eval = ast.literal_eval


def call(kind, function, takes, items: list[Item]) -> list:
    """A reward of one completion, or of TRL's group."""
    fields = items[0]._asdict()
    row = fields.pop("row")
    if kind == "ours":
        given = row | fields
    elif kind == "verl":
        truth = (row.get("reward_model") or {}).get("ground_truth", fields["answer"])
        given = {"data_source": None, "extra_info": None, **row,
                 "solution_str": fields["completion"], "ground_truth": truth}
    else:
        many = {"prompt": "prompts", "completion": "completions"}
        given = {n: [item.row.get(n) for item in items] for n in row}
        given |= {many.get(n, n): [getattr(item, n) for item in items] for n in fields}
    result = function(**{n: v for n, v in given.items() if takes is None or n in takes})
    if kind == "verl" and isinstance(result, dict):
        result = result["score"]
    results = list(result) if kind == "trl" else [result]
    if len(results) != len(items):
        raise ValueError(f"{len(results)} values for {len(items)} completions")
    return [number(value) for value in results]


def answer(rewards: list[tuple], items: list[Item]) -> tuple:
    """(parts of each item, errors, first traceback, is this process usable)"""
    columns, errors, trace, usable = [], [None] * len(items), None, True
    for kind, function, takes in rewards:
        columns.append([])
        size = len(items) if kind == "trl" else 1
        for i in range(0, len(items), size):
            try:
                columns[-1] += call(kind, function, takes, items[i:i + size])
            except Exception as error:
                columns[-1] += [None] * size
                errors[i:i + size] = [f"{type(error).__name__}: {error}"[:1000]] * size
                trace = trace or traceback.format_exc()[-4000:]
                usable &= not isinstance(error, MemoryError)
    return list(zip(*columns, strict=True)), errors, trace, usable


def work(fd: str, memory: str, *specs: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PDEATHSIG: end with the trainer
    resource.setrlimit(resource.RLIMIT_AS, (int(memory),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, pipe = os.getpid(), socket.socket(fileno=int(fd))

    def send(message) -> None:
        if os.getpid() != me:   # a reward forked
            os._exit(0)
        # A surrogate alone has no bytes.
        pipe.sendall((json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace"))

    rewards, inbox = [load(part) for part in parse(specs)], pipe.makefile("rb")
    send([kind for kind, _, _ in rewards])
    while True:
        start, items = pickle.load(inbox)
        send([start, *answer(rewards, items)])


if __name__ == "__main__":
    work(*sys.argv[1:])
