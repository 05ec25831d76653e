"""Runs rewards in a process that rewards.py may kill."""
import ast
import asyncio
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
from contextlib import suppress
from pathlib import Path

from rewards import Item, Part, messages, number, parse
from verifiers import REWARDS, math_reward

KINDS = {"completions": "trl", "queries": "openrlhf", "solution_str": "verl",
         "completion": "ours", "turns": "ours"}   # by parameter
LOOP = asyncio.Runner()   # one loop for all calls: a client may outlive its call
CALLS = set("Integer Float Rational Symbol factorial sqrt exp log ln Abs sin cos tan cot sec csc "
            "asin acos atan sinh cosh tanh".split())
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name,
         ast.Load, ast.Call)


def load(part: Part, wanted: str) -> tuple:
    """(kind, function, its parameters or None: any, columns that it needs)."""
    function = REWARDS.get(part.name)
    if part.path:
        path = Path(part.path).absolute()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, part.name, None)
    elif part.name in ("math", "reasoning_gym"):
        shut_eval(part.name)
    parameters = inspect.signature(function).parameters.values() if callable(function) else []
    named = {p.name: p.default for p in parameters
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kinds = KINDS if wanted == "reward" else {"turns": "reply"}
    kind = next((kind for name, kind in kinds.items() if name in named), None)
    if not kind:
        sys.exit(f"{part.path} needs a function {part.name} with a parameter "
                 f"{' or '.join(kinds)} (it has {[*named]}).")
    given = arguments(kind, [Item("", "", None, {}, 0, False)])
    needs = [(part.name, name) for name, default in named.items() if default is inspect._empty
             and (name not in given or name == "answer" and not part.path)]
    takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else named
    return kind, function, takes, needs


def shut_eval(library: str):
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


def arguments(kind: str, items: list[Item]) -> dict:
    """All that a reward of this kind may take."""
    items = [item._replace(turns=item.turns or [{"role": "assistant", "content": item.completion}])
             for item in items]
    fields = items[0]._asdict()
    row = fields.pop("row")
    if kind == "reply":
        row = row | {name: fields[name] for name in ("prompt", "answer")}
        return row | {"row": row, "turns": fields["turns"]}
    if kind == "ours":
        return row | fields
    if kind == "verl":
        truth = (row.get("reward_model") or {}).get("ground_truth", fields["answer"])
        return {"data_source": None, "extra_info": None, **row,
                "solution_str": fields["completion"], "ground_truth": truth,
                "turns": fields["turns"]}
    if kind == "openrlhf":   # lists of one
        prompt = fields["prompt"]
        return {"queries": [prompt + fields["completion"]], "prompts": [prompt],
                "labels": [fields["answer"]], "turns": [fields["turns"]]}
    given = {n: [item.row.get(n) for item in items] for n in row}
    given |= {n: [getattr(item, n) for item in items] for n in fields}
    prompts, completions = given["prompt"], given["completion"]
    if isinstance(row.get("prompt"), list):   # TRL's conversational form
        prompts = [item.row["prompt"] for item in items]
        completions = given["turns"]
    return given | dict(
        prompts=prompts, completions=completions, log_extra=print, log_metric=print)


def call(kind, function, takes, items: list[Item]) -> list:
    """A reward of one completion, or of TRL's group."""
    given = arguments(kind, items)
    result = function(**{n: v for n, v in given.items() if takes is None or n in takes})
    if inspect.iscoroutine(result):
        result = LOOP.run(result)
    if isinstance(result, dict) and kind in ("verl", "openrlhf"):
        result = result["score" if kind == "verl" else "rewards"]
    results = list(result) if kind in ("trl", "openrlhf") else [result]
    if len(results) != len(items):
        raise ValueError(f"{len(results)} values for {len(items)} completions")
    return [(messages if kind == "reply" else number)(value) for value in results]


def answer(rewards: list[tuple], items: list[Item]) -> tuple:
    """(parts of each item, errors, first traceback, is this process usable)"""
    columns, errors, trace, usable = [], [None] * len(items), None, True
    for kind, function, takes, _ in rewards:
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


def guard():
    """Go on in a fork. When it ends, this process kills all that it started."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1)   # CHILD_SUBREAPER: orphans become children of this process
    prctl(1, signal.SIGTERM)   # PDEATHSIG: end with the trainer
    worker = os.fork()
    if not worker:
        prctl(1, signal.SIGKILL)
        return

    def kill_children(*_):
        for pid in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_children)
    while (ended := os.wait())[0] != worker:
        pass   # an orphan
    with suppress(ChildProcessError):   # none is left
        while True:
            kill_children()
            os.wait()
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def work(fd: str, memory: str, kind: str, *specs: str):
    guard()
    resource.setrlimit(resource.RLIMIT_AS, (int(memory),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, pipe = os.getpid(), socket.socket(fileno=int(fd))

    def send(message):
        if os.getpid() != me:   # a reward forked
            os._exit(0)
        # A surrogate alone has no bytes.
        pipe.sendall((json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace"))

    rewards, inbox = [load(part, kind) for part in parse(specs)], pipe.makefile("rb")
    kinds, _, _, needs = zip(*rewards, strict=True)
    send(["trl" in kinds, sum(needs, [])])
    while True:
        start, items = pickle.load(inbox)
        send([start, *answer(rewards, items)])


if __name__ == "__main__":
    work(*sys.argv[1:])
