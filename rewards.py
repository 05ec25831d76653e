"""rewards.py: completions → scores, by workers; one that hangs is killed.

    --reward math:1 format:0.2    a weighted sum of built-in rewards
    --reward mine.py:tidy:0.5     your own function: worker.py

An Item is a completion with its row. A call has what a reward gets at once: one item, or all of a
prompt. A Pool has workers, which answer calls: an Answer for each item, which becomes a Score.
"""
import contextlib
import json
import math
import os
import pickle
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

from errors import SettingsError, as_sentence
from part import asked
from settings import Flags, Range, changed
from verifiers import REWARDS, answers_of
from worker import Item, Part

ROOT = os.path.dirname(os.path.abspath(__file__))
START_SECONDS = 120  # a worker's start, at most
MEMORY_GB = 4  # of a worker
FAILED_CALLS = 8  # the run ends after so many calls, in batches without one score


@dataclass
class RewardArgs(Flags):
    """Processes that score completions"""
    reward_workers: Annotated[int, Range(1, 4096)] = 2
    """Worker processes per rank."""
    reward_timeout: Annotated[float, Range(1, 1e6)] = 10.0
    """Seconds for one completion. A late one has no score and is counted."""


@dataclass
class Score:
    """The reward of a completion."""
    total: float | None  # the sum of weight * part; None: it has no reward
    parts: dict[str, float | None]  # what each reward returned; None: no number
    error: str | None  # why it has no reward; None: it has one


@dataclass
class Answer:
    """What the workers found for an item."""
    values: list  # of each part a number; None: it has none
    error: str | None  # None: nothing failed

    def score(self, parts: list[Part]) -> Score:
        """Returns the weighted sum of the values. NaN means that a reward does not apply to the row
        (functions of TRL's form return None for it): the others count. None means that a reward
        failed or cannot say: then the completion has no score. Without parts it is 0.
        """
        known = {part: value for part, value in zip(parts, self.values, strict=True)
                 if value is not None and not math.isnan(value)}
        found = {part.name: known.get(part) for part in parts}
        if self.error:
            return Score(None, found, self.error)
        if None in self.values:
            silent = parts[self.values.index(None)]
            return Score(None, found, f"{silent.name} returned None")
        if parts and not known:
            return Score(None, found, "every reward returned None: none applies to the row")
        return Score(sum((part.weight * value for part, value in known.items()), 0.0), found, None)


# ---- a batch ----

def score_samples(run, samples: list, group: int) -> None:
    """Scores the samples of a step, and notes text and score in each, on every rank. `group`
    neighbours share a prompt. All ranks must call it (a collective).
    """
    run.world.same_phase("reward", len(samples))
    with run.log.time("reward"):
        size = group if run.scorer.groups else 1  # completions of a call
        calls = [samples[i:i + size] for i in range(0, len(samples), size)]
        items = [item_of(sample, run.engine.text)
                 for call in run.world.mine(calls) for sample in call]
        run.scorer.progress["global_step"] = max(run.world.step, 0)  # -1: before the first
        scores = scores_of(run.scorer, items, size)
        texts = [item.completion for item in items]
        scored = run.world.gather(list(zip(texts, scores, strict=True)))
    for sample, (text, score) in zip(samples, scored, strict=True):
        sample.text, sample.score = text, score
    report(run.scorer, run.log, [score.error for _, score in scored], len(calls))


def item_of(sample, text) -> Item:
    """Returns what a worker gets of a sample. text: the function that decodes ids."""
    row, completion = sample.prompt.row, sample.completion
    words = text(completion.ids)
    return Item(row.prompt, words, row.answer, row.columns, completion.tokens,
                completion.truncated, completion.ids.tolist(), completion.messages(words))


def scores_of(pool, items: list[Item], size: int = 1) -> list[Score]:
    """Returns the scores of the items, of which `size` neighbours are one call. Without --reward
    each is 0, of no parts.
    """
    return [answer.score(pool.parts) for answer in pool.ask(items, size)]


def report(pool, log, errors: list[str | None], calls: int) -> None:
    """Prints the first failure of a run. Raises a SettingsError after batches without a single
    score, once they made FAILED_CALLS calls.

    errors: of each completion, on all ranks; None: it has a score. calls: how many were made.
    """
    failure = next(filter(None, errors), None)
    # One score (no error) starts the count again; a batch without any adds all its calls.
    pool.unanswered = 0 if None in errors else pool.unanswered + calls
    if pool.unanswered >= FAILED_CALLS:
        raise SettingsError(f"None of this batch's {len(errors)} completions has a reward, because "
                            f"of --{pool.flag}:\n{failure}")
    if failure and not pool.warned:
        log.say(f"a completion has no reward, because of --{pool.flag}; it is counted (printed "
                f"once):\n{failure}")
        pool.warned = True


# ---- the flags and the rows ----

def parse(specs: list[str]) -> list[Part]:
    """Reads the words of --reward → parts. Raises a SettingsError with all mistakes."""
    parts, mistakes = [], []
    of_parts = {name: path for known in asked("REWARDS").values() for name, path in known.items()}
    for spec in specs:
        match = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::(.+))?", spec)
        path, name, number = match.groups() if match else (None, spec, None)
        path, weight = path or of_parts.get(name), math.nan
        path = path and file_of(path)
        with contextlib.suppress(ValueError):
            weight = float(number or 1)
        metrics = ["mean", "std"] if path else []
        taken = [part.name for part in parts] + metrics
        if not (os.path.isfile(path) if path else name in REWARDS):
            what = f"file, here or in {ROOT}" if path else "reward"
            mistakes.append(f"--reward {spec}: no such {what}.")
        if name in taken:
            mistakes.append(f"--reward {spec}: reward/{name} is another metric; rename it.")
        if not math.isfinite(weight):
            mistakes.append(f"--reward {spec}: its weight must be a finite number.")
        parts.append(Part(name, weight, path))
    if not specs:
        mistakes.append("--reward is empty.")
    if mistakes:
        raise SettingsError("\n".join([
            *mistakes, "A reward is NAME or FILE.py:FUNCTION, and :WEIGHT if not 1. "
            f"Names: {', '.join([*REWARDS, *of_parts])}"]))
    return parts


def file_of(path: str) -> str:
    """Returns the path of a reward's file: in the current folder or, as for --loss, in the
    project's.
    """
    return path if os.path.isfile(path) else os.path.join(ROOT, path)


def check(specs: list[str], args) -> tuple[list, list[str]]:
    """Starts a worker to see whether the rewards load, and returns what it says of them: (the
    columns that they need, the names of those that are `async def`). Raises a SettingsError if one
    cannot be loaded.
    """
    parse(specs)
    with contextlib.closing(Pool(specs, changed(args, reward_workers=1))) as pool:
        pool.wait()
        return pool.needs, pool.waits


def check_rows(needs: list, rows: list, flag: str = "reward"):
    """Raises a SettingsError if a row lacks a column that a reward needs, or has an answer that no
    reward can read. needs: [(reward, column), …].
    """
    for name, column in needs:
        for row in rows:
            where = f"--{flag} {name} needs {column!r}: row {row.number} of {row.source}"
            if column == "answer":
                with as_sentence(where):
                    answers_of(row.answer)
            elif column not in row.columns:
                raise SettingsError(f"{where} has none.")


def try_once(args, rows: list, waits: list[str], notes: list[str]) -> None:
    """Calls the functions of files once, for a made-up completion of the first row, before weights
    load. Raises a SettingsError if what one returns can be no reward. One that raises, or is late,
    may be right for a real completion: `notes` gets a line. One that is `async def` asks a server,
    and is not called.
    """
    if waits or not rows or not any(".py:" in spec for spec in args.reward):
        return
    row, text = rows[0], "a made-up completion"
    item = Item(row.prompt, text, row.answer, row.columns, len(text), False, [],
                [{"role": "assistant", "content": text}])
    with contextlib.closing(Pool(list(args.reward), changed(args, reward_workers=1))) as pool:
        pool.wait()
        size = args.group if pool.groups else 1
        error = pool.ask([item] * size, size)[0].error
    if not error:
        return
    lines = error.strip().splitlines()
    why = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    said = f"--reward, for {text!r} of row {row.number} of {row.source}: {why}"
    if why.startswith("TypeError: a reward must be "):
        raise SettingsError(said)
    notes.append(f"{said} (it may be right for a real one)")


# ---- the processes ----

class Worker:
    """A process that leads a session, so that all that its rewards fork is killed with it. It runs
    `work` of a module, such as worker.py. what: the arguments of `load` there. seconds: how long a
    message to it may take.
    """

    def __init__(self, module: str, what: tuple, seconds: float):
        self.received, self.code = b"", None
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(seconds)  # it may have stopped reading
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:replace",
                       "PYTHONHASHSEED": "0",  # a set has the same order in every worker
                       "PYTHONPATH": ROOT}
        start = f"import {module}; {module}.work({theirs.fileno()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", start], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment)
        self.send((int(MEMORY_GB * 2**30), *what))

    def send(self, message) -> None:
        """Sends it a message. Raises an OSError if it has ended, or does not read."""
        self.socket.sendall(pickle.dumps(message))

    def receive(self, seconds: float):
        """Returns its next message. Raises an OSError if it ended or sent none within `seconds`.
        Messages are JSON: to unpickle what a reward wrote could run its code in the trainer.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError(f"no answer within {seconds:g} seconds")
            if select.select([self.socket], [], [], left)[0]:
                sent = self.socket.recv(1 << 16)
                self.received += sent
                if not sent:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(1)  # it may still be on its way out
                    raise OSError(f"the worker ended with code {self.kill()}")
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def kill(self) -> int:
        """Ends its session and returns its exit code."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # no process is left
                os.killpg(self.process.pid, signal.SIGKILL)
            self.code = self.process.wait()
            self.socket.close()
        return self.code


class Pool:
    """Worker processes that score completions, and a thread for each, which gives it calls and
    waits for its answers. A worker that is late or dies is killed, and another one takes its place.

    specs: the words of --reward. args: the script's.
    """
    flag: ClassVar = "reward"
    module: ClassVar = "worker"  # of its workers
    answer: ClassVar = Answer

    def __init__(self, specs: list[str], args):
        self.args, self.parts = args.reward_args, self.parse(specs) if specs else []
        self.tried = threading.Event()  # one worker started, or could not
        self.refused = ""  # why no worker starts
        # What a worker says of the functions:
        self.groups = False  # does one take all completions of a prompt in one call?
        self.waits = []  # the names of those that are `async def`
        self.needs = None  # [(reward, column that it needs), …]
        self.unanswered, self.warned = 0, False  # for `report`: calls in a row; was one printed?
        self.progress = {"global_step": 0}  # of TRL's trainer_state
        # Lists of calls, which are slices of a batch; None ends a thread.
        self.inboxes = self.make_inboxes(self.args.reward_workers if self.parts else 0)
        self.threads = [threading.Thread(target=self._serve, daemon=True, args=(inbox,))
                        for inbox in self.inboxes]
        for thread in self.threads:
            thread.start()

    def parse(self, specs: list[str]) -> list[Part]:
        """Reads the words of the flag → parts."""
        return parse(specs)

    def make_inboxes(self, count: int) -> list[queue.Queue]:
        """Returns an inbox for each of `count` workers. Here all workers share one."""
        return [queue.Queue()] * count

    def what(self) -> tuple:
        """Returns the arguments that a worker's `load` gets."""
        return (self.parts,)

    def take(self, told: list) -> None:
        """Notes what a worker's `load` returned about the functions."""
        self.groups, self.waits, self.needs = told

    def wait(self) -> None:
        """Returns once a worker has loaded the rewards. Raises a SettingsError if none can."""
        if not self.parts:
            return
        self.tried.wait()
        if self.needs is None:
            raise SettingsError(self.refused)

    def ask(self, items: list[Item], size: int = 1) -> list[Answer]:
        """Returns an Answer for each item. `size` neighbours are one call. Without --reward no
        worker is asked, and each Answer has no values.
        """
        if not self.parts:
            return [self.answer([], None) for _ in items]
        self.items, self.answers, self.refused = items, [None] * len(items), ""
        self.put([slice(start, start + size) for start in range(0, len(items), size)])
        for inbox in self.inboxes:
            inbox.join()
        return self.answers

    def put(self, calls: list[slice]) -> None:
        """Puts the calls into the inboxes, in lists: a worker gets all calls of a list at once.
        Here each call is alone in its list.
        """
        for call in calls:
            self.inboxes[0].put([call])

    def close(self):
        """Ends the workers."""
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(5)

    def _serve(self, inbox: queue.Queue):
        """Runs a thread: takes calls from the inbox, and gives them to a worker that it starts and
        replaces. The worker ends with the thread's process, by Linux' PDEATHSIG.
        """
        worker = None
        with contextlib.suppress(OSError):
            worker = self._start()
        self.tried.set()
        while calls := inbox.get():
            try:
                worker = worker or self._start()
                self.call(worker, calls)
            except Exception as error:  # whatever a reward did to its worker
                if worker:
                    worker.kill()
                worker = None
                self.failed(inbox, calls, error)
            inbox.task_done()
        if worker:
            worker.kill()

    def _start(self) -> Worker:
        """Starts a worker and waits until it has loaded the rewards. Raises an OSError if it
        cannot; the next batch tries again.
        """
        if self.refused:
            raise OSError(self.refused)
        worker = None
        try:
            worker = Worker(self.module, self.what(), self.args.reward_timeout)
            told = worker.receive(START_SECONDS)
            if isinstance(told, str):
                raise OSError(told)
        except Exception as error:
            if worker:
                worker.kill()
            self.refused = (f"--{self.flag} cannot load (limits: {START_SECONDS} s, {MEMORY_GB} "
                            f"GB): {error}")
            raise OSError(self.refused) from None
        self.take(told)
        return worker

    def call(self, worker: Worker, calls: list[slice]) -> None:
        """Has a worker answer these calls, and notes the answers. Raises an exception if the worker
        has none.
        """
        batch = [self.items[call] for call in calls]
        worker.send((self.progress, batch))
        for call, found in zip(calls, worker.receive(self.seconds(batch)), strict=True):
            self.answers[call] = [self.answer(*of_item) for of_item in found]

    def seconds(self, batch: list[list[Item]]) -> float:
        """Returns how many seconds a worker may take for these calls."""
        return self.args.reward_timeout * sum(map(len, batch))

    def failed(self, inbox: queue.Queue, calls: list[slice], error: Exception) -> None:
        """Handles the end of a worker. A call that was alone has no answer; of several, each is
        made again, alone.
        """
        if len(calls) > 1:
            for call in calls:
                inbox.put([call])
            return
        items = self.items[calls[0]]
        why = f"{error}\nThe completion: {items[0].completion[:300]!r}"
        self.answers[calls[0]] = [self.answer([None] * len(self.parts), why)] * len(items)
