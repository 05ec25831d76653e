"""reward_worker.py: runs rewards in a process that rewards.py may kill."""
import ast
import asyncio
import ctypes
import importlib.util
import inspect
import json
import logging
import os
import pickle
import pkgutil
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from chats.toolcalls import Tools
from examples import reasoning_gym_tasks
from rewards import Item, Move, Part, RewardArgs, messages, number, parse
from scoring.verifiers import REWARDS, math_reward

# A parameter of a reward shows its kind. The first that fits counts.
KINDS = {"completions": "trl", "queries": "openrlhf", "solution_str": "verl",
         "completion": "ours", "turns": "ours"}
LOOP = asyncio.Runner()  # one loop for all calls: a client may outlive its call
BEAT = 0.2  # seconds between two signs of life
# Arithmetic: all that sympy may evaluate.
CALLS = set("Integer Float Rational Symbol factorial sqrt exp log ln Abs sin cos tan cot sec csc "
            "asin acos atan sinh cosh tanh".split())
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name,
         ast.Load, ast.Call)


class Reward(NamedTuple):
    kind: str
    function: Callable
    takes: list[str] | None  # its parameters; None: any
    needs: list[tuple[str, str]]  # (its name, column of the row)
    waits: bool  # `async def`: calls of it run together


def load(part: Part, wanted: str) -> Reward:
    """Its function, and how to call it. wanted: "reward" or "reply"."""
    function = find(part)
    if function is None:
        sys.exit(f"{part.path} has no {part.name}.")
    if wanted == "reply" and inspect.isclass(function):
        return Reward("environment", Environments(function), None, [], False)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    named = {name: p for name, p in parameters.items()
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kinds = KINDS if wanted == "reward" else {"turns": "reply"}
    kind = next((kind for name, kind in kinds.items() if name in named), None)
    if not kind:
        sys.exit(f"{part.path} needs a function {part.name} with a parameter "
                 f"{' or '.join(kinds)} (it has {list(named)}).")
    given = arguments(kind, [Item("", "", None, {}, 0, False)]).keys()
    if not part.path:
        given -= {"answer"}  # it must not be None
    needs = [(part.name, name) for name, p in named.items()
             if p.default is p.empty and name not in given]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return Reward(kind, function, None if any_name else list(named), needs, waits)


def load_tools(parts: list[Part]) -> Tools:
    functions = [find(part) for part in parts]
    for part, function in zip(parts, functions, strict=True):
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            sys.exit(f"{part.path} needs a function {part.name} (def, not async def).")
    return Tools(functions)


def find(part: Part):
    """The function of a --reward or --reply. None: the file has none of this name."""
    if part.path:
        path = Path(part.path).absolute()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, part.name, None)
    if part.name == "math":
        shut_eval()
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns: no timer
        math_reward(r"\boxed{\frac{1}{2}}", "0.5")  # loads the grammar
    if part.name == "reasoning_gym":
        shut_eval()
        reasoning_gym_tasks.shut_eval()
    return pkgutil.resolve_name(REWARDS[part.name])


def shut_eval():
    """Keep sympy from evaluating what a model wrote, unless it is arithmetic."""
    from sympy.parsing import sympy_parser
    stringify = sympy_parser.stringify_expr  # sympy evals what it returns

    def arithmetic_only(*args, **kwargs):
        code = stringify(*args, **kwargs)
        for node in ast.walk(ast.parse(code.strip(), mode="eval")):
            called = getattr(node, "func", None)
            if not isinstance(node, NODES) or called and getattr(called, "id", "") not in CALLS:
                raise ValueError("this is not arithmetic")
        return code

    sympy_parser.stringify_expr = arithmetic_only


@dataclass
class Call:
    """Completions that are scored together: one, or all of a prompt."""
    start: int
    items: list[Item]
    values: dict[int, list] = field(default_factory=dict)  # of each reward, by its place
    errors: list[str | None] = field(default_factory=list)  # of each item
    retries: int = 0
    pause: float = 0.0  # seconds

    def __post_init__(self):
        self.errors = [None] * len(self.items)

    def answer(self) -> list:
        values = [self.values[place] for place in sorted(self.values)]
        return [self.start, [*zip(*values, strict=True)], self.errors, self.retries, self.pause]

    def parts(self, reward: Reward) -> list[slice]:
        """The items of each call of the function."""
        size = len(self.items) if reward.kind == "trl" else 1
        return [slice(i, i + size) for i in range(0, len(self.items), size)]

    def fails(self, part: slice, error: str) -> list[None]:
        nothing = [None] * len(self.items[part])
        self.errors[part] = [error] * len(nothing)
        return nothing


def score_plain(rewards: list[Reward], call: Call) -> None:
    """The values of a call by the rewards that are no coroutines."""
    for place, reward in enumerate(rewards):
        if reward.waits:
            continue
        call.values[place] = values = []
        for part in call.parts(reward):
            items = call.items[part]
            try:
                result = start(reward, items)
                if inspect.iscoroutine(result):
                    result = LOOP.run(result)
                values += values_of(reward, result, items)
            except MemoryError:  # it ends this process: what holds the memory may stay
                raise
            except Exception:
                values += call.fails(part, traceback.format_exc()[-2000:])


async def score_waiting(rewards: list[Reward], calls: list[Call], args: RewardArgs, send) -> None:
    """The values of all calls by the coroutines, together. Each is sent as soon as it is known."""
    async def finish(call):
        for place, reward in enumerate(rewards):
            if reward.waits:
                found = await asyncio.gather(*(
                    tried(reward, call, part, args, slots) for part in call.parts(reward)))
                call.values[place] = [value for values in found for value in values]
        send(call.answer())

    async def beat():
        while True:  # until a reward blocks the loop
            send(None)
            await asyncio.sleep(BEAT)

    slots, beats = asyncio.Semaphore(args.reward_concurrency), asyncio.create_task(beat())
    try:
        await asyncio.gather(*map(finish, calls))
    finally:
        beats.cancel()


async def tried(reward: Reward, call: Call, part: slice, args: RewardArgs, slots) -> list:
    """The values of one call of a coroutine, after retries where it raises or is late."""
    items = call.items[part]

    async def once():
        return values_of(reward, await start(reward, items), items)

    seconds = args.reward_timeout * len(items)
    async with slots:
        for retry in range(args.reward_retries + 1):
            task = asyncio.create_task(once())
            # Not asyncio.timeout: it waits for a coroutine that does not let itself be cancelled.
            await asyncio.wait([task], timeout=seconds)
            if not task.done():
                task.cancel()
                error = why = f"no answer within {seconds:g} seconds"
            elif task.exception() is None:
                return task.result()
            elif isinstance(task.exception(), MemoryError):  # as in score_plain
                raise task.exception()
            else:
                error = "".join(traceback.format_exception(task.exception()))[-2000:]
                why = repr(task.exception())[:200]
            if retry < args.reward_retries:
                pause = args.reward_pause * 2**retry
                call.retries, call.pause = call.retries + 1, call.pause + pause
                print(f"tried again in {pause:g} s: {why}")
                await asyncio.sleep(pause)
    return call.fails(part, error)


def start(reward: Reward, items: list[Item]):
    """What the function returns for one completion, or for all of TRL's group."""
    if reward.kind == "environment":
        return reward.function.play(*items)
    given = arguments(reward.kind, items)
    if reward.takes is not None:
        given = {name: value for name, value in given.items() if name in reward.takes}
    return reward.function(**given)


def values_of(reward: Reward, result, items: list[Item]) -> list:
    if reward.kind == "environment":
        return [result]
    if reward.kind == "reply":
        return [messages(result)]
    if isinstance(result, dict) and reward.kind in ("verl", "openrlhf"):
        result = result["score" if reward.kind == "verl" else "rewards"]
    results = list(result) if reward.kind in ("trl", "openrlhf") else [result]
    if len(results) != len(items):
        raise ValueError(f"{len(results)} values for {len(items)} completions")
    return [number(value) for value in results]


def arguments(kind: str, items: list[Item]) -> dict:
    """All that a reward of this kind may take. Only TRL's has more than one item."""
    items = [item._replace(turns=item.turns or [{"role": "assistant", "content": item.completion}])
             for item in items]
    if kind == "trl":
        return columns_of(items)
    fields = items[0]._asdict()
    row, turns = fields.pop("row"), fields["turns"]
    prompt, completion, answer = fields["prompt"], fields["completion"], fields["answer"]
    if kind == "reply":
        row = row | {"prompt": prompt, "answer": answer}
        return row | {"row": row, "turns": turns}
    if kind == "verl":
        truth = (row.get("reward_model") or {}).get("ground_truth", answer)
        return {"data_source": None, "extra_info": None, **row, "solution_str": completion,
                "ground_truth": truth, "turns": turns}
    if kind == "openrlhf":  # lists of one
        return {"queries": [prompt + completion], "prompts": [prompt], "labels": [answer],
                "turns": [turns]}
    return row | fields


def columns_of(items: list[Item]) -> dict:
    """TRL's: a list for each column of the rows and for each field of the items."""
    row = items[0].row
    given = {name: [item.row.get(name) for item in items] for name in row}
    given |= {name: [getattr(item, name) for item in items] for name in Item._fields}
    del given["row"]
    prompts, completions = given["prompt"], given["completion"]
    if isinstance(row.get("prompt"), list):  # TRL's conversational form
        prompts, completions = [item.row["prompt"] for item in items], given["turns"]
    return given | {"prompts": prompts, "completions": completions, "log_extra": print,
                    "log_metric": print}


class Environments:
    """Those of a --reply CLASS that live in this worker, by the seeds of their episodes."""

    def __init__(self, kind: type):
        self.kind, self.live, self.most = kind, {}, 1
        self.methods = [name for name in ("reply", "reward", "close")
                        if inspect.isfunction(getattr(kind, name, None))]
        if "reply" not in self.methods:
            sys.exit(f"the class {kind.__name__} needs a method reply(turns).")
        if any(inspect.iscoroutinefunction(getattr(kind, name)) for name in self.methods):
            sys.exit(f"the methods of the class {kind.__name__} must be def, not async def.")

    def play(self, move: Move) -> list[dict] | float | None:
        """Its reply, as messages. None: the episode is over. Of a move that is over: the reward."""
        it = self.live.pop(move.seed, None)
        if it is None or not move.said:  # an evaluation has the same episodes each time
            it = self.replayed(move)
        if move.over:
            return self.ended(it, move)
        said = messages(it.reply([dict(turn) for turn in move.turns]))
        self.live[move.seed] = it
        while len(self.live) > self.most:
            self.close(self.live.pop(next(iter(self.live))))
        return said

    def replayed(self, move: Move):
        """Made, and given its turns again. ValueError if it does not answer as before."""
        it, end = self.kind(dict(move.row), move.seed), 1
        for said in move.said:
            now = messages(it.reply([dict(turn) for turn in move.turns[:end]]))
            if now != said:
                raise ValueError(f"the environment answered otherwise when it was played again: "
                                 f"{str(said)[:200]}, then {str(now)[:200]}")
            end += 1 + len(said or [])
        return it

    def ended(self, it, move: Move) -> float | None:
        reward = self.reward(it)
        if move.checked:
            again = self.reward(self.replayed(move))
            if again != reward:
                raise ValueError(f"the environment answered otherwise when it was played again: "
                                 f"its reward was {reward}, then {again}")
        return reward

    def reward(self, it) -> float | None:
        """None: it has none, or cannot tell."""
        found = number(it.reward()) if "reward" in self.methods else None
        self.close(it)
        return found

    def close(self, it) -> None:
        if "close" in self.methods:
            it.close()


def guard():
    """Go on in a fork. When it ends, this process kills all that it started."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1)  # CHILD_SUBREAPER: orphans become children of this process
    prctl(1, signal.SIGTERM)  # PDEATHSIG: end with the trainer
    worker = os.fork()
    if not worker:
        prctl(1, signal.SIGKILL)
        return

    def kill_children(*_):
        for pid in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_children)
    while (ended := os.wait())[0] != worker:
        pass  # an orphan
    with suppress(ChildProcessError):  # none is left
        while True:
            kill_children()
            os.wait()
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def work(fd: str, memory: str, kind: str, args: str, *specs: str):
    guard()
    resource.setrlimit(resource.RLIMIT_AS, (int(memory),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, pipe = os.getpid(), socket.socket(fileno=int(fd))

    def send(message):
        if os.getpid() != me:  # a reward forked
            os._exit(0)
        # A surrogate alone has no bytes.
        pipe.sendall((json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace"))

    parts, methods, args = parse(specs, kind), [], RewardArgs(**json.loads(args))
    if kind == "tools":
        tools = load_tools(parts)
        rewards, methods = [Reward("reply", tools.answer, ["turns"], [], False)], tools.schemas
    else:
        rewards = [load(part, kind) for part in parts]
    groups = any(reward.kind == "trl" for reward in rewards)
    together = any(reward.waits for reward in rewards)
    for reward in rewards:
        if reward.kind == "environment":
            reward.function.most, methods = args.max_environments, reward.function.methods
    send([groups, together, methods, [need for reward in rewards for need in reward.needs]])
    inbox = pipe.makefile("rb")
    while True:
        calls = [Call(start, items) for start, items in pickle.load(inbox)]
        for call in calls:
            score_plain(rewards, call)
            send(None if together else call.answer())
        if together:
            LOOP.run(score_waiting(rewards, calls, args, send))


if __name__ == "__main__":
    work(*sys.argv[1:])
