"""rewards.py: completions → rewards, in workers; one that hangs is killed.

    --reward math:1 format:0.2    a weighted sum of built-in rewards
    --reward mine.py:tidy:0.5     your own function: worker.py

For each completion a worker gets a dict, the item: {name of a parameter: argument}. It returns
{name of a reward: its number, or a text that says why not}. A job is what succeeds or fails as a
whole: one item, or all items of a prompt if a reward takes groups. A message to a worker has a list
of jobs: here always one; a part may send several.

A reward that hangs, raises or ends its process costs only its own completions, which then have no
reward. Top to bottom, from the outside in: scoring a batch, checking the flags and rows before the
first step, and the processes.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import part
from answers import ANSWERS, REWARDS, answers_of
from dist import World
from errors import SettingsError, as_sentence
from settings import Flags, Range
from worker import ROOT, RewardSpec, find_file

START_SECONDS = 120  # timeout for a worker to start, and for what its first job loads
MEMORY_GB = 4  # memory limit of a worker, and of each process that a reward starts
FAILED_JOBS = 8  # after whole batches with this many jobs and no score, the run ends


@dataclass
class RewardArgs(Flags):
    """Processes that score completions"""
    reward_workers: Annotated[int, Range(1, 4096)] = 2
    """Worker processes per rank."""
    reward_timeout: Annotated[float, Range(1, 1e6)] = 10.0
    """Seconds per completion. A late one has no score and is counted."""


# ---- a batch ----

def score_samples(pool: "Pool", world: World, log, samples: list, group: int) -> None:
    """Scores the samples of a step across all ranks, and sets text, reward, rewards and error of
    each sample on every rank. `group` consecutive samples share a prompt. log: a log.Log. All ranks
    must call it (a collective).
    """
    world.same_phase("reward", len(samples))
    with log.time("reward"):
        size = group if pool.groups else 1  # completions per job
        jobs = [samples[i:i + size] for i in range(0, len(samples), size)]
        mine = sum(world.mine(jobs), [])
        for sample in mine:
            sample.text = pool.decode(sample.ids)
        pool.progress["global_step"] = max(world.step, 0)  # -1 before the first step
        items = [item_of(sample) for sample in mine]
        results = pool.ask(items, size)
        # Rewards have their own time limits, and a worker's first job loads what it needs.
        more = pool.seconds([items]) + START_SECONDS
        gathered = world.gather([(s.text, one) for s, one in zip(mine, results, strict=True)], more)
    for sample, (text, one) in zip(samples, gathered, strict=True):
        sample.text = text
        sample.reward, sample.rewards, sample.error = weighted_sum(pool.specs, one)
    report(pool, log, [sample.error for sample in samples], len(jobs))


def item_of(sample) -> dict:
    """Returns the arguments of a reward's function for a sample, by the names of the parameters:
    worker.ITEM. `columns` holds the columns of its row, each of which becomes an argument under its
    own name (Reward.given).
    """
    row = sample.prompt.row
    return {"prompt": row.prompt, "completion": sample.text, "answer": row.answer,
            "tokens": sample.tokens, "truncated": sample.truncated,
            "completion_ids": sample.ids.tolist(), "turns": sample.messages(),
            "columns": row.columns}


def weighted_sum(specs: list[RewardSpec], found: dict) -> tuple[float | None, dict, str | None]:
    """Returns reward, rewards and error of a Sample: the weighted sum of the rewards that apply to
    its row, the number of each, and why there is no sum.

    found: what a worker returned, {name: value}. A value is a number; None: the reward does not
    apply to the row (a function in TRL's format returned None); or a text: why it has none. A name
    that is no reward's, such as a part's count, is only in `rewards`.

    There is no sum if a reward has none, or if none applies. The sum of no rewards is 0.
    """
    rewards = {name: None if isinstance(value, str) else value for name, value in found.items()}
    errors = [value for value in found.values() if isinstance(value, str)]
    applied = [spec for spec in specs if rewards[spec.name] is not None]
    if specs and not applied:
        errors.append("every reward returned None: none applies to the row")
    if errors:
        return None, rewards, errors[0]
    return sum((spec.weight * rewards[spec.name] for spec in applied), 0.0), rewards, None


def report(pool, log, errors: list[str | None], jobs: int) -> None:
    """Prints the first failure of a run. Raises a SettingsError once consecutive batches without
    any score have had FAILED_JOBS jobs.

    errors: why each completion of the batch, on all ranks, has no score; None: it has one. jobs:
    their number in the batch.
    """
    failure = next(filter(None, errors), None)
    # One score (an error of None) resets the count; a batch without any score adds its jobs.
    pool.unanswered = 0 if None in errors else pool.unanswered + jobs
    if pool.unanswered >= FAILED_JOBS:
        raise SettingsError(f"None of this batch's {len(errors)} completions has a reward, because "
                            f"of --{pool.flag}:\n{failure}")
    if failure and not pool.warned:
        log.say(f"a completion has no reward, because of --{pool.flag}; rollout/unscored counts "
                f"them (printed once):\n{failure}")
        pool.warned = True


# ---- the flags and the rows ----

def parse(words: list[str]) -> list[RewardSpec]:
    """Returns the RewardSpec of each word of --reward: NAME or FILE.py:FUNCTION, with :WEIGHT if
    it is not 1. Raises a SettingsError that lists all errors.
    """
    rewards, mistakes = [], []
    # The rewards that the folders of parts/ add.
    added = part.merged("REWARDS")
    for word in words:
        match = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::(.+))?", word)
        path, name, number = match.groups() if match else (None, word, None)
        path = path or added.get(name)
        path = path and str(find_file(path) or path)
        weight = math.nan
        with contextlib.suppress(ValueError):
            weight = float(number or 1)
        taken = [reward.name for reward in rewards]
        if path:  # reward/mean and reward/std are other metrics
            taken += ["mean", "std"]
        if not (os.path.isfile(path) if path else name in REWARDS):
            what = f"file, here or in {ROOT}" if path else "reward"
            mistakes.append(f"--reward {word}: no such {what}.")
        if name in taken:
            mistakes.append(f"--reward {word}: reward/{name} is another metric; rename it.")
        if not math.isfinite(weight):
            mistakes.append(f"--reward {word}: its weight must be a finite number.")
        rewards.append(RewardSpec(name, weight, path))
    if not words:
        mistakes.append("--reward is empty.")
    if mistakes:
        raise SettingsError("\n".join([
            *mistakes, "A reward is NAME or FILE.py:FUNCTION, and :WEIGHT if not 1, such as "
            f"--reward exact format:0.2. Names: {', '.join([*REWARDS, *added])}"]))
    return rewards


def check(words: list[str], args) -> "Pool":
    """Starts a worker to check that the rewards can be loaded. Returns a closed Pool with what is
    known about them. Raises a SettingsError if one cannot be loaded. words: those of --reward.
    """
    parse(words)  # rejects an empty --reward; a Pool may have none, as when a teacher scores
    with contextlib.closing(Pool(words, replace(args, reward_workers=1))) as pool:
        pool.wait()
        return pool


def check_rows(needs: list, rows: list, warnings: dict, flag: str = "reward"):
    """Raises a SettingsError if a row lacks a column that a reward needs, if a built-in reward
    cannot read its answer, or if no row has the answer that a user's function takes. If only some
    rows lack it, adds a warning. needs: a Pool's. flag: the flag in the message.
    """
    for name, column, always in needs:
        for row in rows if always else ():
            where = f"--{flag} {name} needs {column!r}: row {row.number} of {row.source}"
            if column == "answer":
                with as_sentence(where):
                    answers_of(row.answer)
            elif column not in row.columns:
                raise SettingsError(f"{where} has none.")
        if always or not (without := [row for row in rows if row.answer is None]):
            continue
        some = f"{len(without):,} of {len(rows):,}"
        said = f"--{flag} {name} takes an answer, and {some} rows have none"
        if len(without) == len(rows):
            raise SettingsError(f"{said}. Their columns are {', '.join(rows[0].columns)}. Would "
                                f"work: an answer in {', '.join(ANSWERS)}.")
        warnings[f"{said}; the first is row {without[0].number} of {without[0].source}."] = ""


# ---- the processes ----

class Worker:
    """The trainer's handle of a worker process. The process runs `work` of a module such as
    worker.py, which is the other side of the socket. It leads a session, so all processes that its
    rewards fork are killed with it. module: the module's name. to_load: the arguments of its
    `load`, the first message. seconds: the timeout for sending a message.
    """

    def __init__(self, module: str, to_load: tuple, seconds: float):
        self.received, self.code, self.new = b"", None, True  # new: no job yet
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(seconds)  # the process may have stopped reading
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:replace",
                       "PYTHONHASHSEED": "0"}  # the same set order in every worker
        start = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
                 f"import {module}; {module}.work({theirs.fileno()})")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", start], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment)
        self.send(to_load)

    def send(self, message) -> None:
        """Sends a message to the process. Raises an OSError if it has exited or does not read."""
        self.socket.sendall(pickle.dumps(message))

    def receive(self, seconds: float):
        """Returns the next message from the process. Raises an OSError if the process has exited,
        if it or a process that it started uses more than MEMORY_GB, or if no message arrives within
        `seconds`. Messages are JSON, because unpickling a reward's output could run its code in the
        trainer.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError(f"no answer within {seconds:g} seconds")
            if largest(self.process.pid) > MEMORY_GB * 2**30:
                # A system limit would fail inside the reward, which may then return 0.
                raise OSError(f"it used more than {MEMORY_GB:g} GB of memory")
            if select.select([self.socket], [], [], min(left, 0.1))[0]:
                sent = self.socket.recv(1 << 16)
                self.received += sent
                if not sent:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(1)  # it may still be exiting
                    raise OSError(f"the worker ended with code {self.kill()}")
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def kill(self) -> int:
        """Kills all processes in the worker's session, and returns the worker's exit code."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # the session has no processes left
                os.killpg(self.process.pid, signal.SIGKILL)
            self.code = self.process.wait()
            self.socket.close()
        return self.code


def largest(pid: int | str) -> int:
    """Returns the largest private memory, in bytes, of a process and those that it started. 0: it
    has exited.
    """
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        lists = Path(f"/proc/{pid}/task").glob("*/children")  # of each thread
        started = sum((file.read_text().split() for file in lists), [])
        return max([(resident - shared) * os.sysconf("SC_PAGE_SIZE"), *map(largest, started)])
    return 0


class Pool:
    """Worker processes that score completions. Each has a thread in the trainer, which sends it
    jobs and waits for its answers. A worker that is late or dies is killed and replaced.

    words: those of --reward. args: the script's. decode: turns the ids of a completion into
    the text for a reward (chat_template.decoder); None: `ask` gets texts.
    """
    flag: ClassVar = "reward"
    module: ClassVar = "worker"  # the module that its workers run

    def __init__(self, words: list[str], args, decode=None):
        self.args, self.decode = args, decode
        self.specs = self.parse(words) if words else []
        self.tried = threading.Event()  # set once a worker has started, or could not start
        self.refused = ""  # why no worker can start
        # What a worker reports about the functions (worker.load):
        self.groups = False  # True: a function takes all completions of a prompt in one call
        self.waits = []  # names of those that are `async def`
        self.silent = []  # names of those that return nothing
        self.reads = []  # their parameters
        # [(reward, column, whether each row must have it), …]; None: no worker has loaded them
        self.needs = None if self.specs else []
        self.loading = START_SECONDS  # extra time for a worker's first job
        # For `report`: jobs since the last score; whether a failure was printed.
        self.unanswered, self.warned = 0, False
        self.progress = {"global_step": 0}  # of TRL's trainer_state
        # The threads take lists of jobs from the inboxes. A job is a slice of `self.items`, and its
        # results go to that slice of `self.found`: `ask` makes both. None ends a thread.
        self.inboxes = self.make_inboxes(self.args.reward_workers if self.specs else 0)
        self.threads = [threading.Thread(target=self._serve, daemon=True, args=(inbox,))
                        for inbox in self.inboxes]
        for thread in self.threads:
            thread.start()

    def parse(self, words: list[str]) -> list[RewardSpec]:
        """Returns the RewardSpec of each word of the flag."""
        return parse(words)

    def make_inboxes(self, count: int) -> list[queue.Queue]:
        """Returns an inbox for each of `count` workers. Here they all share one."""
        return [queue.Queue()] * count

    def to_load(self) -> tuple:
        """Returns the arguments that a worker's `load` gets: the rewards (a list of RewardSpec)."""
        return (self.specs,)

    def take(self, told: dict) -> None:
        """Stores what a worker's `load` returned about the functions (see worker.load)."""
        vars(self).update(told)

    def wait(self) -> None:
        """Waits until a worker has loaded the rewards. Raises a SettingsError if none can. Without
        rewards, it returns immediately.
        """
        if not self.specs:
            return
        self.tried.wait()
        if self.needs is None:
            raise SettingsError(self.refused)

    def ask(self, items: list[dict], size: int = 1) -> list[dict]:
        """Has the workers score the items, and returns what they found for each: {name of a reward:
        a number, None or a text} (see weighted_sum). `size` consecutive items are one job.
        Without --reward no worker is asked, and each is {}.
        """
        if not self.specs:
            return [{} for _ in items]
        self.items, self.found = items, [None] * len(items)
        self.refused = ""  # with a new batch a worker may start again
        self.put([slice(start, start + size) for start in range(0, len(items), size)])
        for inbox in self.inboxes:
            inbox.join()
        return self.found

    def put(self, jobs: list[slice]) -> None:
        """Puts lists of jobs into the inboxes; a worker gets a list in one message. Here each list
        has one job.
        """
        for job in jobs:
            self.inboxes[0].put([job])

    def close(self):
        """Ends the threads and the workers."""
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(5)

    def _serve(self, inbox: queue.Queue):
        """Runs a thread: takes lists of jobs from the inbox and has its worker do them. The
        thread starts the worker and replaces it if it fails. Linux's PDEATHSIG ends the worker
        together with the trainer's process.
        """
        worker = None
        with contextlib.suppress(OSError):
            worker = self._start()
        self.tried.set()
        while jobs := inbox.get():
            try:
                worker = worker or self._start()
                self.do(worker, jobs)
            except Exception as error:  # a reward can break its worker in any way
                if worker:
                    worker.kill()
                worker = None
                if isinstance(error, InterruptedError):
                    inbox.put(jobs)
                else:
                    self.failed(inbox, jobs, error)
            inbox.task_done()
        if worker:
            worker.kill()

    def _start(self) -> Worker:
        """Starts a worker, waits until it has loaded the rewards, and returns it. Raises an OSError
        if it cannot; `refused` then has the reason, and the next batch tries again.
        """
        if self.refused:
            raise OSError(self.refused)
        worker = None
        try:
            worker = Worker(self.module, self.to_load(), self.args.reward_timeout)
            told = worker.receive(START_SECONDS)
            if isinstance(told, str):  # why it cannot load
                raise OSError(told)
        except Exception as error:
            if worker:
                worker.kill()
            self.refused = (f"--{self.flag} cannot load (limits: {START_SECONDS} s, {MEMORY_GB} "
                            f"GB): {error}")
            raise OSError(self.refused) from None
        self.take(told)
        return worker

    def do(self, worker: Worker, jobs: list[slice]) -> None:
        """Has a worker do these jobs, and stores what it found. Raises an exception if the worker
        fails or does not answer in time. Its first job may load what the function needs.
        InterruptedError: the worker got SIGTERM, which may have ended processes that a reward
        started, so another worker must do them.
        """
        sent, began = [self.items[job] for job in jobs], time.monotonic()
        loading, worker.new = self.loading if worker.new else 0, False
        worker.send((self.progress, loading, sent))
        try:
            results = worker.receive(self.seconds(sent) + loading)
        except TimeoutError as error:
            # If this was its first job, the next worker's may load at most half as long.
            self.loading = min(self.loading, loading / 2 or self.loading)
            raise TimeoutError(f"{error} (--reward_timeout {self.args.reward_timeout:g})") from None
        if not results:
            raise InterruptedError
        if loading:  # the next worker's first job may load four times as long as this one took
            self.loading = 4 * (time.monotonic() - began)
        for job, found in zip(jobs, results, strict=True):
            self.found[job] = found

    def seconds(self, sent: list[list]) -> float:
        """Returns the time limit for these jobs, in seconds: --reward_timeout per completion. sent:
        the items of each job.
        """
        return self.args.reward_timeout * sum(map(len, sent))

    def failed(self, inbox: queue.Queue, jobs: list[slice], error: Exception) -> None:
        """Handles a worker's failure. If it had one job, the items of that job have no reward. If
        it had several, each goes back into the inbox on its own.
        """
        if len(jobs) > 1:
            for job in jobs:
                inbox.put([job])
            return
        items = self.items[jobs[0]]
        why = f"{error}\nThe completion: {items[0]['completion'][:300]!r}"
        self.found[jobs[0]] = [{spec.name: why for spec in self.specs} for _ in items]
