"""Completions -> numbers, in the processes of reward_worker.py.

    --reward math:1 format:0.2    a weighted sum of built-in rewards
    --reward mine.py:tidy:0.5     your own function: reward_worker.KINDS, docs/rewards.md
"""
import contextlib
import json
import math
import os
import pickle
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from errors import SettingsError
from verifiers import REWARDS

WORKER = os.path.join(os.path.dirname(__file__), "reward_worker.py")
START_SECONDS, MEMORY_GB = 120, 4   # of a worker
LONGEST_REPLY = 1_000_000   # characters


@dataclass
class RewardArgs:
    """Processes that score completions"""
    reward_workers: int = 2
    """Worker processes per rank."""
    reward_timeout: float = 10.0
    """Seconds for one completion. A late one has no score and is counted."""


class Item(NamedTuple):
    prompt: str
    completion: str
    answer: object
    row: dict
    tokens: int
    truncated: bool
    completion_ids: list[int] | None = None
    turns: list[dict] | None = None   # messages; None: one turn


@dataclass
class Score:
    total: float | None   # sum of weight * part; None if a part is None
    parts: dict[str, float | None]
    error: str | None   # None if the reward returned None


class Part(NamedTuple):
    name: str
    weight: float
    path: str | None   # of your own function


def parse(specs: list[str]) -> list[Part]:
    """One SettingsError has all mistakes."""
    parts, mistakes = [], [] if specs else ["--reward is empty."]
    for spec in specs:
        match = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::(-?\d*\.?\d+(?:e-?\d\d?)?))?", spec)
        path, name, weight = match.groups() if match else (None, spec, None)
        if name in [part.name for part in parts]:
            mistakes.append(f"--reward {spec}: it is given twice.")
        if not os.path.isfile(path) if path else name not in REWARDS:
            mistakes.append(f"--reward {spec}: no such {'file' if path else 'reward'}.")
        parts.append(Part(name, float(weight or 1), path))
    if mistakes:
        raise SettingsError("\n".join(mistakes) + "\nA reward is NAME or FILE.py:FUNCTION, and "
                            f":WEIGHT if not 1 (finite). Names: {', '.join(REWARDS)}")
    return parts


def check(specs: list[str]) -> list:
    """[(reward, column that it needs), …]. SettingsError if one cannot load."""
    with contextlib.closing(Scorer(specs, RewardArgs(reward_workers=1))) as scorer:
        scorer.needs_groups  # noqa: B018
        return scorer.loads[1]


def check_rows(needs: list, rows: list, kind: str = "reward"):
    """SettingsError if a row lacks what a reward needs."""
    for name, column in needs:
        lack = [row for row in rows if (
            row.answer in (None, "") if column == "answer" else column not in row.columns)]
        if lack:
            raise SettingsError(f"--{kind} {name} needs {column!r}; {len(lack)} of {len(rows)} "
                                f"rows have none (first: row {lack[0].index} of {lack[0].source}).")


def number(value) -> float | None:
    """A finite number (also of numpy or torch) as a float, or None."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number or None (got {str(value)[:100]!r})")
    return float(value)


def messages(value) -> list[dict] | None:
    """What a --reply returned, as messages. None: the episode is over."""
    found = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if found is None:
        return None
    if not (found and isinstance(found, list) and all(
            isinstance(m, dict) and type(m.get("role")) is type(m.get("content")) is str
            for m in found) and sum(len(m["content"]) for m in found) <= LONGEST_REPLY):
        raise TypeError('a reply must be None, text, or a list of {"role": text, "content": text}, '
                        f"with {LONGEST_REPLY:,} characters at most (got {str(value)[:100]!r})")
    return [{"role": m["role"], "content": m["content"]} for m in found]


class Worker:
    """A process that kills all that its rewards started when it ends."""

    def __init__(self, specs: list[str], closed: threading.Event):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", WORKER, str(theirs.fileno()), str(int(MEMORY_GB * 2**30)),
                 *specs],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:replace",
                     "PYTHONHASHSEED": "0"})   # order of sets
        self.closed, self.received, self.printed = closed, b"", b""

    def receive(self, seconds: float):
        """Its next message, or an OSError."""
        deadline, pipes = time.monotonic() + seconds, [self.socket, self.process.stdout]
        while b"\n" not in self.received:
            ready = select.select(pipes, [], [], 0.1)[0]
            read = {pipe: os.read(pipe.fileno(), 1 << 16) for pipe in ready}
            self.received += read.get(self.socket, b"")
            self.printed = (self.printed + read.get(self.process.stdout, b""))[-4000:]
            if ready and not any(read.values()):   # all processes that held the pipes are gone
                raise OSError(f"the worker ended with code {self.process.wait()}; it printed: "
                              f"{self.printed.decode(errors='replace').strip()}")
            if self.closed.is_set() or time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:g} seconds")
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def kill(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.process.kill()   # it was stopped
        self.process.wait()
        self.process.stdout.close()
        self.socket.close()


class Scorer:
    """Worker processes, with one thread for each. kind: reward, or reply (turns.py)."""

    def __init__(self, specs: list[str], args: RewardArgs, kind: str = "reward"):
        self.specs, self.parts, self.timeout = specs, parse(specs), args.reward_timeout
        self.units, self.loaded, self.closed = queue.Queue(), threading.Event(), threading.Event()
        self.loads = self.refused = self.first_traceback = None
        self.failed_starts = self.unscored = 0
        self.kind, self.warned = kind, False
        self.printed = []   # in the last batch
        self.threads = [threading.Thread(target=self._serve, daemon=True)
                        for _ in range(args.reward_workers)]
        for thread in self.threads:
            thread.start()

    @property
    def needs_groups(self) -> bool:
        """Is a reward of TRL's kind? SettingsError if one cannot load."""
        if not self.loaded.wait(START_SECONDS / 12) and os.environ.get("RANK", "0") == "0":
            print(f"--{self.kind} {' '.join(self.specs)} is still loading (limit: "
                  f"{START_SECONDS} s)", flush=True)
        self.loaded.wait()
        if not self.loads:
            error = SettingsError(self.refused)
            error.alone = True  # the workers of another rank may have loaded
            raise error
        return self.loads[0]

    def score(self, items: list[Item], group: int = 1) -> list[Score]:
        """Each `group` items in a row share a prompt."""
        size = group if self.needs_groups else 1
        self.items, self.scores = items, [None] * len(items)
        self.first_traceback, self.failed_starts, self.printed = None, 0, []
        for i in range(0, len(items), size):
            self.units.put(slice(i, i + size))
        self.units.join()
        return self.scores

    def close(self):
        self.closed.set()
        for _ in self.threads:
            self.units.put(None)
        for thread in self.threads:
            thread.join(5)

    def _serve(self):
        """A thread starts its workers itself: PDEATHSIG is tied to a *thread*."""
        worker = self._replace(None)
        while unit := self.units.get():
            if not worker or worker.process.poll() is not None:   # it died idle
                worker = self._replace(worker)
            usable = self._score_unit(worker, unit)
            self.units.task_done()
            if not usable:
                worker = self._replace(worker)
        self._replace(worker)   # closed: this only kills

    def _replace(self, worker: Worker | None) -> Worker | None:
        """A new worker. None after too many failed starts."""
        while True:
            if worker:
                worker.kill()
            tries = 3 * len(self.threads) if self.loads else 1
            if self.failed_starts >= tries or self.closed.is_set():
                return None
            worker = None
            try:
                worker = Worker([self.kind, *self.specs], self.closed)
                self.loads = worker.receive(START_SECONDS)
                self.failed_starts = 0
                return worker
            except Exception as error:
                self.failed_starts += 1
                self.refused = (f"--{self.kind} cannot load (limits: {START_SECONDS} s, "
                                f"{MEMORY_GB} GB): {error}")
            finally:
                self.loaded.set()

    def _score_unit(self, worker: Worker | None, unit: slice) -> bool:
        """False: the worker must be replaced."""
        items = self.items[unit]
        try:
            if not worker:
                raise OSError(f"no worker starts: {self.refused}")
            worker.socket.settimeout(self.timeout)
            worker.socket.sendall(pickle.dumps((unit.start, items)))
            start, parts, errors, trace, usable = worker.receive(self.timeout * len(items))
            if start != unit.start:
                raise ValueError(start)
            scores = [self._sum(*one) for _, *one in zip(items, parts, errors, strict=True)]
        except Exception as error:   # a reward can write into the pipe
            why = str(error) if isinstance(error, OSError) else f"no valid answer ({error!r})"
            trace, usable = f"{why}\nThe completion: {items[0].completion[:300]!r}", False
            scores = [self._sum([None] * len(self.parts), why) for _ in items]
        self.first_traceback = self.first_traceback or trace
        self.scores[unit] = scores
        if worker:
            self.printed.append(worker.printed.decode(errors="replace"))
            worker.printed = b""
        return usable

    def _sum(self, values: list, error: str | None) -> Score:
        if self.kind == "reply":
            return Score(None if error else 0.0, {"reply": messages(*values)}, error)
        parts = {p.name: number(v) for p, v in zip(self.parts, values, strict=True)}
        total = None if None in values else sum(p.weight * parts[p.name] for p in self.parts)
        return Score(total, parts, error and str(error))
