"""rewards.py: completions → numbers, in the processes of worker.py.

    --reward math:1 format:0.2    a weighted sum of built-in rewards
    --reward mine.py:tidy:0.5     your own function: worker.py

An Item is a completion with its row. A call has what a reward gets at once: one item, or all of a
prompt. A Pool has workers, which answer calls: an Answer for each item, and `score_of` makes a
Score of it. parts/turns/turns.py has a Pool too, for --reply, and reads messages.
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
from typing import Annotated, NamedTuple

from errors import Range, SettingsError, as_sentence
from parts.judges import waiting
from parts.turns.replies import Move
from verifiers import REWARDS, answers_of
from worker import Item, Part, names_twice

ROOT = os.path.dirname(os.path.abspath(__file__))
START_SECONDS = 120  # a worker's start, at most
MEMORY_GB = 4  # of a worker
FAILED_CALLS = 8  # the run ends after so many, in batches without one answer


@dataclass
class RewardArgs:
    """Processes that score completions"""
    reward_workers: Annotated[int, Range(1, 4096)] = 2
    """Worker processes per rank."""
    reward_timeout: Annotated[float, Range(1, 1e6)] = 10.0
    """Seconds for one completion. A late one has no score and is counted."""
    reward_retries: Annotated[int, Range(0, 10)] = 2
    """An `async def` reward that raises or is late is tried again so often."""


@dataclass
class Score:
    """What a completion got."""
    total: float | None  # the sum of weight * part; None: it has no reward
    parts: dict[str, float | None]  # what each reward returned; None: no number
    error: str | None  # why it has no reward; None: it has one
    retries: int = 0  # of `async def` rewards


class Answer(NamedTuple):
    """What the workers found for an item."""
    values: list  # of each part: a number, or the messages of a reply; None: it has none
    error: str | None  # None: nothing failed
    retries: int = 0  # of its call, with the first item


# ---- a batch ----

def score_samples(run, samples: list, group: int) -> None:
    """Gives samples texts and scores. `group` in a row share a prompt. A collective."""
    run.world.same_phase("reward", len(samples))
    with run.log.time("reward"):
        size = group if run.scorer.groups else 1  # completions of a call
        calls = [samples[i:i + size] for i in range(0, len(samples), size)]
        items = [item_of(sample, run.engine.text)
                 for call in run.world.mine(calls) for sample in call]
        run.scorer.progress["global_step"] = max(run.world.step, 0)
        scores = scores_of(run.scorer, items, size)
        texts = [item.completion for item in items]
        scored = run.world.gather(list(zip(texts, scores, strict=True)))
    for sample, (text, score) in zip(samples, scored, strict=True):
        sample.text, sample.score = text, score
        if sample.completion.failed:  # whatever its reward returned
            sample.score = Score(None, dict.fromkeys(score.parts), "its reply failed")
    report(run.scorer, run.log, [score.error for _, score in scored], len(calls))


def item_of(sample, text) -> Item:
    """What a worker gets of a sample. text: ids → str."""
    row, completion = sample.prompt.row, sample.completion
    return Item(row.prompt, text(completion.ids), row.answer, row.columns, completion.tokens,
                completion.truncated, completion.ids.tolist(), completion.turns)


def scores_of(pool, items: list[Item], size: int = 1) -> list[Score]:
    """The scores of the items, of which `size` in a row are one call. Without --reward they are 0,
    of no parts."""
    if not pool.parts:
        return [Score(0.0, {}, None) for _ in items]
    return [score_of(pool.parts, answer) for answer in pool.ask(items, size)]


def score_of(parts: list[Part], answer: Answer) -> Score:
    """The weighted sum of the values. NaN: this reward does not apply to the row (in TRL's lists:
    None), and the others count. None: it failed, and the completion has no score."""
    known = {part: value for part, value in zip(parts, answer.values, strict=True)
             if value is not None and not math.isnan(value)}
    found = {part.name: known.get(part) for part in parts}
    if None in answer.values:
        silent = parts[answer.values.index(None)]
        error = answer.error or f"{silent.name} returned None"
        return Score(None, found, error, answer.retries)
    if not known:
        return Score(None, found, "every reward returned None", answer.retries)
    total = sum(part.weight * value for part, value in known.items())
    return Score(total, found, None, answer.retries)


def report(pool, log, errors: list[str | None], calls: int) -> None:
    """Prints the first failure of a run. SettingsError if FAILED_CALLS in a row have no answer.

    errors: of each completion, on all ranks; None: it has an answer. calls: how many were made.
    """
    failure = next(filter(None, errors), None)
    # One answer (no error) starts the count again; a batch without any adds all its calls.
    pool.unanswered = 0 if None in errors else pool.unanswered + calls
    if pool.unanswered >= FAILED_CALLS:
        raise SettingsError(f"None of this batch's {len(errors)} completions has a reward, because "
                            f"of --{pool.kind}:\n{failure}")
    if failure and not pool.warned:
        log.say(f"a completion has no reward, because of --{pool.kind}; it is counted (printed "
                f"once):\n{failure}")
        pool.warned = True


# ---- the flags and the rows ----

def parse(specs: list[str], kind: str = "reward") -> list[Part]:
    """The words of --reward (or of --reply) → parts. One SettingsError has all mistakes."""
    parts, mistakes = [], []
    for spec in specs:
        match = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::(.+))?", spec)
        path, name, number = match.groups() if match else (None, spec, None)
        if path and not os.path.isfile(path):  # as of --loss: here, or in the project
            path = os.path.join(ROOT, path)
        weight = math.nan
        with contextlib.suppress(ValueError):
            weight = float(number or 1)
        taken = [part.name for part in parts] + (["mean", "std", "turns"] if path else [])
        if kind != "reward" and (number or not path):
            mistakes.append(f"--{kind} {spec}: it must be FILE.py:FUNCTION; it has no weight.")
        elif not (os.path.isfile(path) if path else name in REWARDS):
            what = f"file, here or in {ROOT}" if path else "reward"
            mistakes.append(f"--{kind} {spec}: no such {what}.")
        if kind == "reward" and name in taken:
            mistakes.append(f"--{kind} {spec}: reward/{name} is another metric; rename it.")
        if not math.isfinite(weight):
            mistakes.append(f"--{kind} {spec}: its weight must be a finite number.")
        parts.append(Part(name, weight, path))
    if not specs:
        mistakes.append(f"--{kind} is empty.")
    if mistakes and kind == "reward":
        mistakes.append("A reward is NAME or FILE.py:FUNCTION, and :WEIGHT if not 1. "
                        f"Names: {', '.join(REWARDS)}")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    if names := names_twice(parts):
        raise SettingsError(f"--{kind}: two of its folders have {', '.join(names)}, and an import "
                            "takes one of them. Would work: all in one folder, or other names.")
    return parts


def check(specs: list[str]) -> list:
    """[(reward, column that it needs), …]. SettingsError if one cannot load."""
    parse(specs)
    with contextlib.closing(Pool(specs, RewardArgs(reward_workers=1))) as pool:
        pool.wait()
        return pool.needs


def check_rows(needs: list, rows: list, kind: str = "reward"):
    """SettingsError if a row lacks what a reward needs, or has an answer that none can read."""
    for name, column in needs:
        for row in rows:
            where = f"--{kind} {name} needs {column!r}: row {row.index} of {row.source}"
            if column == "answer":
                with as_sentence(where):
                    answers_of(row.answer)
            elif column not in row.columns:
                raise SettingsError(f"{where} has none.")


# ---- the processes ----

class Worker:
    """A process that leads a session: all that its rewards fork is killed with it."""

    def __init__(self, kind: str, parts: list[Part], args: RewardArgs):
        self.received, self.code = b"", None
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(args.reward_timeout)  # it may have stopped reading
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:replace",
                       "PYTHONHASHSEED": "0",  # a set has the same order in every worker
                       "PYTHONPATH": ROOT}
        start = f"import worker; worker.work({theirs.fileno()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", start], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment)
        self.send((kind, parts, int(MEMORY_GB * 2**30), args.reward_timeout, args.reward_retries))

    def send(self, message) -> None:
        """OSError: it ended, or does not read."""
        self.socket.sendall(pickle.dumps(message))

    def receive(self, seconds: float):
        """Its next message. OSError: it ended, or sent none in time. JSON: to unpickle what a
        reward wrote could run its code here."""
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
        """Ends the session. The worker's exit code."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # no process is left
                os.killpg(self.process.pid, signal.SIGKILL)
            self.code = self.process.wait()
            self.socket.close()
        return self.code


class Pool:
    """Worker processes, and a thread for each, which gives it calls and waits for its answers.

    kind: the flag, reward or reply. Of a reply each worker keeps its own environments (turns.py).
    """

    def __init__(self, specs: list[str], args: RewardArgs, kind: str = "reward"):
        self.kind, self.args = kind, args
        self.parts = parse(specs, kind) if specs else []
        self.tried = threading.Event()  # one worker started, or could not
        self.refused = ""  # why no worker starts
        # What a worker says of the functions:
        self.groups = False  # does one take all completions of a prompt in one call?
        self.together = False  # is one `async def`? Then a worker gets many calls at once
        self.methods = []  # of a --reply CLASS
        self.needs = None  # [(reward, column that it needs), …]
        self.unanswered, self.warned = 0, False  # for `report`: calls in a row; was one printed?
        self.progress = {"global_step": 0}  # of TRL's trainer_state
        # Lists of calls, which are slices of a batch; None ends a thread.
        shared = queue.Queue()
        self.inboxes = [queue.Queue() if kind == "reply" else shared
                        for _ in range(args.reward_workers if self.parts else 0)]
        self.threads = [threading.Thread(target=self._serve, daemon=True, args=(inbox,))
                        for inbox in self.inboxes]
        for thread in self.threads:
            thread.start()

    def wait(self) -> None:
        """Until a worker has loaded the rewards. SettingsError if none can."""
        if not self.parts:
            return
        self.tried.wait()
        if self.needs is None:
            raise SettingsError(self.refused)

    def ask(self, items: list[Item | Move], size: int = 1, homes=()) -> list[Answer]:
        """An answer for each item. `size` items in a row are one call. homes: a number for each
        item; the same worker gets all items of a number, and keeps their environment."""
        self.items, self.answers, self.refused = items, [None] * len(items), ""
        calls = [slice(start, start + size) for start in range(0, len(items), size)]
        share = waiting.TOGETHER if self.together else 1
        for i in range(0, len(calls), share):
            home = homes[i] if homes else 0
            self.inboxes[home % len(self.inboxes)].put(calls[i:i + share])
        for inbox in self.inboxes:
            inbox.join()
        return self.answers

    def close(self):
        """Ends the workers."""
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(5)

    def _serve(self, inbox: queue.Queue):
        """A thread. Its workers are its own: Linux kills them when it ends (PDEATHSIG)."""
        worker = None
        with contextlib.suppress(OSError):
            worker = self._start()
        self.tried.set()
        while calls := inbox.get():
            try:
                worker = worker or self._start()
                self._ask(worker, calls)
            except Exception as error:  # whatever a reward did to its worker
                self._fail(inbox, calls, worker, error)
                worker = None
            inbox.task_done()
        if worker:
            worker.kill()

    def _start(self) -> Worker:
        """A worker that has loaded the rewards. OSError if it cannot, until the next batch."""
        if self.refused:
            raise OSError(self.refused)
        worker = None
        try:
            worker = Worker(self.kind, self.parts, self.args)
            loaded = worker.receive(START_SECONDS)
            if isinstance(loaded, str):
                raise OSError(loaded)
        except Exception as error:
            if worker:
                worker.kill()
            self.refused = (f"--{self.kind} cannot load (limits: {START_SECONDS} s, {MEMORY_GB} "
                            f"GB): {error}")
            raise OSError(self.refused) from None
        self.groups, self.together, self.methods, self.needs = loaded
        return worker

    def _ask(self, worker: Worker, calls: list[slice]) -> None:
        """Gives these calls their answers. An exception if the worker has none."""
        batch = [self.items[call] for call in calls]
        seconds = self.args.reward_timeout * len(batch[0])
        if self.together:
            seconds = waiting.longest(seconds, self.args.reward_retries)
        worker.send((self.progress, batch))
        for call, found in zip(calls, worker.receive(seconds), strict=True):
            self.answers[call] = [Answer(*of_item) for of_item in found]

    def _fail(self, inbox: queue.Queue, calls: list[slice], worker: Worker | None,
              error: Exception) -> None:
        """Ends the worker. A lone call has failed. Several are made again, each alone."""
        if worker:
            worker.kill()
        if len(calls) > 1:
            for call in calls:
                inbox.put([call])
            return
        items = self.items[calls[0]]
        why = f"{error}\nThe completion: {items[0].completion[:300]!r}"
        self.answers[calls[0]] = [Answer([None] * len(self.parts), why)] * len(items)
