"""rewards.py: completions in, numbers out, in killable worker processes. The built-in rewards themselves are in verifiers.py.

    --reward math:1 format:0.2              a weighted sum of built-in rewards (the table REWARDS in verifiers.py)
    --reward my_rewards.py:tidy:0.5         an own function, in one of three signatures, told apart by its parameter names:

        def tidy(completion, answer, **row) -> float | None                          ours
        def compute_score(data_source, solution_str, ground_truth, extra_info=None)  verl's: a number, or a dict with "score"
        def tidy(prompts, completions, **columns) -> list                            TRL's: whole groups, plain strings

What a model wrote is hostile: it is parsed, never evaluated, and a verifier may still hang, crash or eat all memory on it. So
every reward runs in a worker process with limits. One completion that cannot be scored costs that completion only (its total is
None: no weight, no baseline, counted); its worker is killed and replaced, and the rest of the batch goes on.
"""
import ast
import ctypes
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import NamedTuple

from plan import SettingsError
from verifiers import REWARDS, math_reward

START_SECONDS = 120.0   # a worker may take this long to import its rewards
CHUNK = 128             # most units handed to a worker at once
TEXT = 4000             # characters kept of a traceback, and of what a worker prints


class RewardError(SettingsError):
    """Not one completion of a whole batch could be scored: the reward is broken, and training on nothing would hide it."""


@dataclass
class Item:
    """One completion to score. `prompt` is the text the model saw; `row` holds all columns of the data row."""
    prompt: str
    completion: str
    answer: object
    row: dict
    tokens: int                             # length of the completion
    truncated: bool                         # cut by max_tokens: no end of sequence
    completion_ids: list[int] | None = None  # only TRL-style functions may ask for them


@dataclass
class Score:
    """`total` = sum of weight * part; None (unscorable) when any part is None. `error` says why; None where a reward chose None."""
    total: float | None
    parts: dict[str, float | None]
    error: str | None


# ---------------------------------------------------------------------------------------------------- the setting `--reward`

class Part(NamedTuple):
    """One term of the sum. `path` is the file of an own function, None for a built-in."""
    name: str
    weight: float
    path: str | None


def parse(specs: list[str]) -> list[Part]:
    """['math:1', 'format:0.2', 'mine.py:tidy:0.5'] -> [(name, weight, path)]; the weight is 1 where none is given.

    Loads nothing. Raises SettingsError with a sentence a mistake, all of them at once.
    """
    parts, mistakes = [], []
    for spec in specs:
        *head, last = spec.split(":")
        try:
            weight, names = float(last), head
        except ValueError:
            weight, names = 1.0, [*head, last]
        name, path = (names or [""])[-1], ":".join(names[:-1]) or None
        if not math.isfinite(weight):
            mistakes.append(f"--reward {spec}: the weight must be a finite number, such as {':'.join([*names, '0.5'])}.")
        if path is None and name.endswith(".py"):
            mistakes.append(f"--reward {spec}: an own reward is FILE.py:FUNCTION, such as {name}:compute_score.")
        elif path is None and name not in REWARDS:
            mistakes.append(f"--reward {spec}: no reward is called {name!r}; known are {', '.join(REWARDS)}, or FILE.py:FUNCTION.")
        elif path is not None and not os.path.isfile(path):
            mistakes.append(f"--reward {spec}: there is no file {path!r}; give NAME, NAME:WEIGHT, FILE.py:FUNCTION or "
                            "FILE.py:FUNCTION:WEIGHT, with NAME one of " + ", ".join(REWARDS) + ".")
        elif name in [part.name for part in parts]:
            mistakes.append(f"--reward {spec}: {name!r} is there twice, and each is logged by its name; give it once with the sum "
                            "of the weights, or rename the function.")
        parts.append(Part(name, weight, path))
    if not specs:
        mistakes.append(f"--reward is empty; give at least one of {', '.join(REWARDS)}, or FILE.py:FUNCTION.")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return parts


def check(specs: list[str]) -> None:
    """Parse `specs` and load them once, in a worker that is thrown away. Raises SettingsError for whatever cannot run."""
    scorer = Scorer(specs, workers=1)
    try:
        scorer.needs_groups
    finally:
        scorer.close()


def load(part: Part) -> tuple[str, object, set[str] | None]:
    """(signature, function, the parameters it takes or None for any). Called in a worker only: an own file runs as it is loaded."""
    if part.name in ("math", "reasoning_gym") and part.path is None:
        shut_eval(part.name)
    if part.path is None:
        return "ours", REWARDS[part.name], None
    sys.path.insert(0, os.path.dirname(os.path.abspath(part.path)))   # its own imports, as if run there
    spec = importlib.util.spec_from_file_location("reward_" + os.path.basename(part.path).removesuffix(".py"), part.path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, part.name, None)
    if not callable(function):
        there = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == spec.name]
        raise SettingsError(f"--reward {part.path}:{part.name}: the file has no function {part.name!r}; it has {', '.join(there)}.")
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for kind, needed in {"trl": {"completions"}, "verl": {"solution_str", "ground_truth"}, "ours": {"completion"}}.items():
        if needed <= set(parameters):
            return kind, function, None if takes_any else set(parameters)
    raise SettingsError(f"--reward {part.path}:{part.name}: its parameters are ({', '.join(parameters)}), which is none of "
                        "(completion, answer, **row), (data_source, solution_str, ground_truth, extra_info), "
                        "(prompts, completions, **columns); rename them.")


def shut_eval(library: str) -> None:
    """Import the library and take Python's eval out of its scorers' reach: several of reasoning_gym's hand it the model's answer,
    plainly or through sympy's parse_expr. Plain evals become literal_eval; parse_expr then takes arithmetic and elementary
    functions only.
    """
    from sympy.parsing import sympy_parser
    called = {"Integer", "Float", "Rational", "Symbol", "factorial", "sqrt", "exp", "log", "ln", "Abs", "sin", "cos", "tan", "cot",
              "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call)
    stringify = sympy_parser.stringify_expr   # what parse_expr hands to eval is the string made here

    def arithmetic_only(*args, **kwargs):
        code = stringify(*args, **kwargs)
        for node in ast.walk(ast.parse(code.strip(), mode="eval")):
            if not isinstance(node, allowed) or isinstance(node, ast.Call) and getattr(node.func, "id", None) not in called:
                raise ValueError("not an expression of numbers, symbols and elementary functions")
        return code

    if stringify.__name__ != "arithmetic_only":
        sympy_parser.stringify_expr = arithmetic_only
    if library == "math":
        import logging
        import math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)   # it warns that its timer is off: on purpose
        math_reward(r"\boxed{\frac{1}{2}}", "0.5")                 # the grammar loads on first use: not on a completion's time
    else:
        import reasoning_gym
        for name, module in list(sys.modules.items()):
            # bitwise_arithmetic evaluates the row's own problem, never the answer, and needs operators for it
            if name.startswith("reasoning_gym.") and not name.endswith(".bitwise_arithmetic"):
                module.eval = ast.literal_eval


# ---------------------------------------------------------------------------------------------------- inside a worker

def call(kind: str, function, takes: set[str] | None, items: list[Item]) -> list[float | None]:
    """Call one reward on one completion (ours, verl's) or on a group (TRL's); one checked number an item."""
    first = items[0]
    if kind == "ours":
        given = {**first.row, "prompt": first.prompt, "completion": first.completion, "answer": first.answer,
                 "tokens": first.tokens, "truncated": first.truncated}
    elif kind == "verl":
        truth = first.row.get("reward_model") or {}
        given = {"data_source": first.row.get("data_source"), "solution_str": first.completion,
                 "ground_truth": truth.get("ground_truth", first.answer), "extra_info": first.row.get("extra_info")}
    else:
        given = {name: [item.row.get(name) for item in items] for name in first.row} | {"answer": [item.answer for item in items]}
        given |= {"prompts": [item.prompt for item in items], "completions": [item.completion for item in items],
                  "completion_ids": [item.completion_ids for item in items]}
    result = function(**{name: value for name, value in given.items() if takes is None or name in takes})
    if kind == "verl" and isinstance(result, dict):
        result = result["score"]
    results = list(result) if kind == "trl" else [result]
    if len(results) != len(items):
        raise ValueError(f"a TRL-style reward returned {len(results)} values for {len(items)} completions")
    return [number(value) for value in results]


def number(value) -> float | None:
    """A finite number (a bool counts, and so does a numpy or torch scalar) or None; anything else is a mistake in the reward."""
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise TypeError(f"a reward returned {str(value)[:100]!r} ({type(value).__name__}); it must be a finite number or None")
    return float(value)


def clip(text: str) -> str:
    """The end of a text, in characters that any file takes."""
    return text[-TEXT:].encode(errors="replace").decode()


def work(fd: int, memory_bytes: int, specs: list[str]) -> None:
    """A worker's life: load the rewards, say so, then answer each unit (one completion, or one group) with a line of JSON."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PR_SET_PDEATHSIG: never outlive the trainer
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, pipe = os.getpid(), socket.socket(fileno=fd)

    def say(**message) -> None:
        if os.getpid() != me:   # a child that a reward forked, on its way back into this loop
            os._exit(0)
        pipe.sendall(json.dumps(message).encode() + b"\n")

    try:
        rewards = [load(part) for part in parse(specs)]
    except Exception as error:  # own code may raise anything; the trainer reports it before the engine starts
        text = str(error) if isinstance(error, SettingsError) else (
            f"--reward {' '.join(specs)}: it must load without an error, and does not:\n{clip(traceback.format_exc())}")
        return say(refused=text)
    say(kinds=[kind for kind, _, _ in rewards])
    inbox = pipe.makefile("rb")
    while True:
        try:
            chunk = pickle.load(inbox)
        except EOFError:
            return
        for unit, packed in chunk:
            items = [Item(*values) for values in packed]
            parts, errors, trace, spent = [[None] * len(rewards) for _ in items], [None] * len(items), None, False
            for column, (kind, function, takes) in enumerate(rewards):
                for group in [range(len(items))] if kind == "trl" else [[i] for i in range(len(items))]:
                    try:
                        for i, value in zip(group, call(kind, function, takes, [items[i] for i in group])):
                            parts[i][column] = value
                    except Exception as error:  # own code and libraries may raise anything: it costs these completions
                        trace = trace or clip(traceback.format_exc())
                        spent = spent or isinstance(error, MemoryError)   # what filled the memory may still be held
                        for i in group:
                            errors[i] = errors[i] or clip(traceback.format_exception_only(error)[-1].strip())
            say(unit=unit, parts=parts, errors=errors, trace=trace, spent=spent)


# ---------------------------------------------------------------------------------------------------- the trainer's side

class Worker:
    """One worker process in a session of its own, the units it was handed, and the clock of the one it is at."""

    def __init__(self, specs: list[str], memory_gb: float):
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       "PYTHONHASHSEED": "0"}   # the order of a set must not change a reward from run to run
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", str(theirs.fileno()), str(int(memory_gb * 2**30)), *specs],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            pass_fds=[theirs.fileno()], env=environment, start_new_session=True)   # its forks can be killed with it
        theirs.close()
        self.socket.setblocking(False)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.kinds = None                 # the signatures of its rewards, once it has loaded them
        self.pending = deque()            # units handed out, in order; the first is being scored
        self.since = time.monotonic()     # of the last sign of life
        self.buffer, self.printed = b"", b""

    def send(self, chunk: list[tuple[int, list[Item]]], seconds: float) -> bool:
        """Hand over a chunk of units; False if the worker does not take it."""
        data = pickle.dumps([(unit, [tuple(getattr(item, f.name) for f in fields(Item)) for item in items]) for unit, items in chunk])
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(data)
        except OSError:   # it died, or stopped reading: the caller replaces it
            return False
        self.socket.setblocking(False)
        self.since = time.monotonic()
        return True

    def receive(self) -> tuple[list[dict], bool]:
        """(messages, is it gone). JSON and nothing else: these bytes come from a process that ran a stranger's text."""
        gone = self.process.poll() is not None   # asked first: all it said before its end can then be read
        if printed := self.process.stdout.read(1 << 20):
            self.printed = (self.printed + printed)[-TEXT:]
        try:
            while data := self.socket.recv(1 << 20):
                self.buffer += data
            gone = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            gone = True
        *lines, self.buffer = self.buffer.split(b"\n")
        try:
            return [json.loads(line) for line in lines], gone
        except ValueError:   # a reward wrote into our pipe
            return [], True

    def obituary(self) -> str:
        try:
            how = f"ended with code {self.process.wait(1)}"   # its pipe closes a moment before its end
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        printed = self.printed.decode(errors="replace").strip()
        return f"the worker {how}" + (f"; it printed: {printed}" if printed else "")

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdout.close()
        self.socket.close()


class Scorer:
    """A pool of worker processes that score completions: `timeout` seconds for one, `memory_gb` of address space for a worker.

    Make it in a thread that lives as long as it does (Linux ties the workers' lives to it). Starting is asynchronous: the workers
    import while the engine loads. After each `score`: `failures` counts completions lost to an "exception", "timeout" or "death",
    and `first_traceback` is the first one's text, or None.
    """

    def __init__(self, specs: list[str], workers: int = 2, timeout: float = 10.0, memory_gb: float = 4.0):
        """Raises SettingsError for a mistake in `specs` that shows without loading; `needs_groups` and `score` for the others."""
        self.specs, self.parts, self.timeout, self.memory_gb = specs, parse(specs), timeout, memory_gb
        self.failures, self.first_traceback = Counter(), None
        self.kinds = None
        self.fruitless = 0   # workers replaced since the last answer: something that never works must end
        self.selector = selectors.DefaultSelector()
        self.workers = []
        for _ in range(workers):
            self._start()

    @property
    def needs_groups(self) -> bool:
        """Whether a reward compares the completions of a prompt (TRL's signature). Waits for a worker to load; SettingsError."""
        while self.kinds is None:
            for worker, message in self._news():
                self._begin(worker, message)
        return "trl" in self.kinds

    def score(self, items: list[Item], group: int = 1) -> list[Score]:
        """One Score an item, in the items' order; each `group` consecutive items share a prompt. Never raises for a completion.

        Takes at most len(items) * timeout / workers seconds and a worker's start for each kill: usually far less.
        """
        if len(items) % group:
            raise ValueError(f"{len(items)} items are not whole groups of {group}")
        size = group if self.needs_groups else 1
        units = [range(start, start + size) for start in range(0, len(items), size)]
        scores: list[Score | None] = [None] * len(items)
        todo = deque(range(len(units)))
        self.failures, self.first_traceback, self.fruitless = Counter(), None, 0

        def give_up(unit: int, kind: str, why: str) -> None:
            self.fruitless = 0
            self.failures[kind] += len(units[unit])
            self.first_traceback = self.first_traceback or f"{why}\nThe completion: {items[units[unit][0]].completion[:300]!r}"
            for i in units[unit]:
                scores[i] = Score(None, {part.name: None for part in self.parts}, why)

        while todo or any(worker.pending for worker in self.workers):
            # 1. Hand out: an idle worker gets a share of what is left, smaller towards the end so that all finish together.
            for worker in list(self.workers):
                if todo and worker.kinds and not worker.pending:
                    share = min(CHUNK, math.ceil(len(todo) / (4 * len(self.workers))))
                    worker.pending.extend(todo.popleft() for _ in range(share))
                    if not worker.send([(unit, [items[i] for i in units[unit]]) for unit in worker.pending], self.timeout):
                        self._replace(worker, todo)
            # 2. Collect. Answers come in order, so a worker that is late or gone was at its first pending unit: that one is lost,
            #    and the rest is handed out again.
            for worker, message in self._news(self.timeout * size):
                if worker.kinds is None:
                    self._begin(worker, message)
                elif self._valid(message, worker, size):
                    self.fruitless = 0
                    for i, values, error in zip(units[worker.pending.popleft()], message["parts"], message["errors"]):
                        parts = {part.name: value for part, value in zip(self.parts, values)}
                        total = None if None in values else sum(p.weight * value for p, value in zip(self.parts, values))
                        scores[i] = Score(total, parts, error)
                        self.failures["exception"] += error is not None
                    self.first_traceback = self.first_traceback or message["trace"]
                    if message["spent"]:
                        self._replace(worker, todo)
                else:
                    if worker.pending:
                        give_up(worker.pending.popleft(), *(message if isinstance(message, tuple) else ("death", "garbled answer")))
                    self._replace(worker, todo)
            # 3. Workers that cannot even start any more (a full machine, an own file that changed) end the batch, not the run.
            if self.fruitless > 3 * len(self.workers):
                while todo:
                    give_up(todo.popleft(), "death", "no worker could be started again")
        return scores

    def close(self) -> None:
        """Kill the workers and all they started in their process groups."""
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.selector.close()

    def _start(self) -> None:
        worker = Worker(self.specs, self.memory_gb)
        self.selector.register(worker.socket, selectors.EVENT_READ)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ)
        self.workers.append(worker)

    def _replace(self, worker: Worker, todo: deque) -> None:
        """Kill a worker, put what it had not begun back in front, start another."""
        todo.extendleft(reversed(worker.pending))
        self.fruitless += 1
        self.selector.unregister(worker.socket)
        self.selector.unregister(worker.process.stdout)
        self.workers.remove(worker)
        worker.kill()
        self._start()

    def _news(self, seconds: float = math.inf):
        """Wait a moment, then yield (worker, message) for all that was said; the message is (kind, why) for a worker gone or late."""
        self.selector.select(timeout=0.1)
        for worker in list(self.workers):
            messages, gone = worker.receive()
            for message in messages:
                if worker in self.workers:   # not replaced meanwhile
                    worker.since = time.monotonic()
                    yield worker, message
            limit = START_SECONDS if worker.kinds is None else seconds
            if worker not in self.workers:
                continue
            if gone:
                yield worker, ("death", worker.obituary())
            elif (worker.pending or worker.kinds is None) and time.monotonic() - worker.since > limit:
                yield worker, ("timeout", f"no answer within {limit:g} seconds")

    def _begin(self, worker: Worker, message) -> None:
        """A worker's first word: the signatures it found, or why it cannot work. The first time, the latter ends the run."""
        if isinstance(message, dict) and "kinds" in message:
            worker.kinds = self.kinds = message["kinds"]
            return
        why = message["refused"] if isinstance(message, dict) and "refused" in message else (
            f"--reward {' '.join(self.specs)}: it must load within {START_SECONDS:g} seconds and {self.memory_gb:g} GB, and did not: "
            f"{message[1] if isinstance(message, tuple) else 'its first message makes no sense'}.")
        if self.kinds is None:
            raise SettingsError(why)
        self._replace(worker, deque())

    def _valid(self, message, worker: Worker, size: int) -> bool:
        """Is this the answer to the unit in flight, in the right shape? A reward that writes into our pipe must not be believed."""
        if not isinstance(message, dict):
            return False
        parts, errors = message.get("parts"), message.get("errors")
        return (bool(worker.pending) and message.get("unit") == worker.pending[0]
                and isinstance(parts, list) and isinstance(errors, list) and len(parts) == len(errors) == size and {"trace", "spent"} <= set(message)
                and all(isinstance(values, list) and len(values) == len(self.parts) for values in parts)
                and all(v is None or isinstance(v, float) and math.isfinite(v) for values in parts for v in values))


def raise_if_all_failed(scores: list[Score], first_traceback: str | None) -> None:
    """Raise RewardError if not one completion of the global batch has a total: run on the same list on every rank."""
    if scores and all(score.total is None for score in scores):
        why = next((score.error for score in scores if score.error), "every reward returned None")
        raise RewardError(f"None of this batch's {len(scores)} completions could be scored ({why}): a reward must give a finite "
                          f"number for some of them.\n\n{first_traceback or ''}")


if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
