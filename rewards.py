"""rewards.py: completions → numbers, in the processes of scoring/worker.py.

    --reward math:1 format:0.2    a weighted sum of built-in rewards
    --reward mine.py:tidy:0.5     your own function: scoring/worker.KINDS, docs/rewards.md
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
from dataclasses import asdict, dataclass
from typing import NamedTuple

from dist import SettingsError
from scoring.verifiers import REWARDS

ROOT = os.path.dirname(os.path.abspath(__file__))
START_SECONDS = 120  # a worker's start, at most
MEMORY_GB = 4  # of a worker
LONGEST_REPLY = 1_000_000  # characters
FAILED_CALLS = 8  # in a row end the run; fewer may be an accident


@dataclass
class RewardArgs:
    """Processes that score completions"""
    reward_workers: int = 2
    """Worker processes per rank."""
    reward_timeout: float = 10.0
    """Seconds for one completion. A late one has no score and is counted."""
    reward_concurrency: int = 64
    """Calls of `async def` rewards that run at once in one worker."""
    reward_retries: int = 2
    """An `async def` reward that raises or is late is tried again so often."""
    reward_pause: float = 1.0
    """Seconds before the first retry. Each further pause is twice as long."""
    max_environments: int = 256
    """Environments of a --reply CLASS that live at once in one worker. More are made again."""


class Item(NamedTuple):
    """A completion, as a worker gets it."""
    prompt: str
    completion: str
    answer: object
    row: dict
    tokens: int
    truncated: bool
    completion_ids: list[int] | None = None
    turns: list[dict] | None = None  # messages; None: one turn


class Move(NamedTuple):
    """What an environment (--reply FILE.py:CLASS) is asked: its reply to the last turn."""
    row: dict
    seed: int  # of the episode, which it also names
    turns: list[dict]
    said: list[list[dict] | None]  # its replies so far
    over: bool = False  # not a reply, but its reward: the episode is over
    checked: bool = False  # is it played again then?
    completion: str = ""  # as of an Item, for errors


@dataclass
class Score:
    """What a completion got. Of a reply: total 0, and its messages as the part."""
    total: float | None  # sum of weight * part; None if a part is None
    parts: dict[str, float | None]
    error: str | None  # None if the reward returned None
    printed: str = ""  # by the call
    retries: int = 0  # of `async def` rewards
    pause: float = 0.0  # seconds before these retries, together


class Part(NamedTuple):
    """One of the rewards that are added up."""
    name: str
    weight: float
    path: str | None  # of your own function


def score_samples(run, samples: list, group: int) -> None:
    """Give samples their texts and scores. `group` in a row share a prompt. A collective."""
    run.world.same_phase("reward", len(samples))
    with run.log.time("reward"):
        size = group if run.scorer.groups else 1  # completions of a call
        calls = [samples[i:i + size] for i in range(0, len(samples), size)]
        items = [item_of(sample, run.engine.tokenizer)
                 for call in run.world.mine(calls) for sample in call]
        scores = run.scorer.score(items, size)
        texts = [item.completion for item in items]
        scored = run.world.gather(list(zip(texts, scores, strict=True)))
    for sample, (text, score) in zip(samples, scored, strict=True):
        sample.text, sample.score = text, score
        if sample.completion.failed:  # whatever its reward returned
            sample.score = Score(None, dict.fromkeys(score.parts), "its reply failed")
    report(run.scorer, run.log, [score for _, score in scored], len(calls))


def item_of(sample, tokenizer) -> Item:
    row, completion = sample.prompt.row, sample.completion
    text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return Item(row.prompt, text, row.answer, row.columns, completion.tokens,
                completion.truncated, completion.ids.tolist(), completion.turns)


def report(scorer, log, scores: list[Score], calls: int) -> None:
    """Print what the calls printed, and what failed."""
    printed = "".join(score.printed for score in scores)[-1000:]
    if printed:
        log.say(f"a {scorer.kind} printed (the last 1,000 characters):\n{printed}")
    scorer.unscored += calls
    if any(score.total is not None for score in scores):
        scorer.unscored = 0
    if scorer.unscored or any(score.error for score in scores):
        report_failure(scorer, log, scores)


def report_failure(scorer, log, scores: list[Score]) -> None:
    """A run's first one is printed. SettingsError after FAILED_CALLS in a row without a score."""
    failure = next((s.error for s in scores if s.error), "every reward returned None")
    if scorer.unscored >= FAILED_CALLS:
        raise SettingsError(
            f"None of this batch's {len(scores)} completions has a {scorer.kind}:\n{failure}")
    if not scorer.warned:
        log.say(f"a completion has no {scorer.kind}; it is counted (printed once):\n{failure}")
        scorer.warned = True


def parse(specs: list[str], kind: str = "reward") -> list[Part]:
    """The words of --reward (or --reply). One SettingsError has all mistakes."""
    parts, mistakes = [], []
    for spec in specs:
        match = re.fullmatch(r"(?:(.+\.py):)?(\w+)(?::(-?\d*\.?\d+(?:e-?\d\d?)?))?", spec)
        path, name, weight = match.groups() if match else (None, spec, None)
        if path and not os.path.isfile(path):
            mistakes.append(f"--{kind} {spec}: no such file.")
        if spec.endswith(".py"):
            mistakes.append(f"--{kind} {spec}: which function of it? {spec}:NAME.")
        elif not path and name not in REWARDS:
            mistakes.append(f"--{kind} {spec}: no such reward.")
        if name in [part.name for part in parts]:
            mistakes.append(f"--{kind} {spec}: the name {name} is given twice.")
        if name in ("mean", "std") and kind == "reward":
            mistakes.append(f"--{kind} {spec}: reward/{name} is another metric; rename it.")
        parts.append(Part(name, float(weight or 1), path))
    if not specs:
        mistakes.append(f"--{kind} is empty.")
    if mistakes:
        raise SettingsError("\n".join(mistakes) + "\nA reward is NAME or FILE.py:FUNCTION, and "
                            f":WEIGHT if not 1 (finite). Names: {', '.join(REWARDS)}")
    return parts


def check(specs: list[str]) -> list:
    """[(reward, column that it needs), …]. SettingsError if one cannot load."""
    parse(specs)
    with contextlib.closing(Scorer(specs, RewardArgs(reward_workers=1))) as scorer:
        scorer.wait()
        return scorer.needs


def check_rows(needs: list, rows: list, kind: str = "reward"):
    """SettingsError if a row lacks what a reward needs."""
    for name, column in needs:
        lack = [row for row in rows if column not in row.columns]
        if column == "answer":
            lack = [row for row in rows if row.answer in (None, "")]
        if lack:
            raise SettingsError(f"--{kind} {name} needs {column!r}; {len(lack)} of {len(rows)} "
                                f"rows have none (first: row {lack[0].index} of {lack[0].source}).")


def number(value) -> float | None:
    """A finite number (also of numpy or torch) as a float, or None. Else a TypeError."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number or None (got {str(value)[:100]!r}, "
                        f"a {type(value).__name__})")
    return float(value)


def messages(value) -> list[dict] | None:
    """What a --reply returned, as messages. None: the episode is over. Else a TypeError."""
    if value is None:
        return None
    found = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if (not isinstance(found, list) or not found or not all(map(is_message, found))
            or sum(len(m["content"]) for m in found) > LONGEST_REPLY):
        raise TypeError('a reply must be None, text, or a list of {"role": text, "content": text}, '
                        f"with {LONGEST_REPLY:,} characters at most (got {str(value)[:100]!r})")
    return [{"role": m["role"], "content": m["content"]} for m in found]


def is_message(value) -> bool:
    return (isinstance(value, dict) and isinstance(value.get("role"), str)
            and isinstance(value.get("content"), str))


class Worker:
    """A process that kills all that its rewards started when it ends."""

    def __init__(self, specs: list[str], kind: str, args: RewardArgs):
        self.received, self.printed = b"", b""
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:replace",
                       "PYTHONHASHSEED": "0",  # order of sets
                       "PYTHONPATH": ROOT}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "scoring.worker", str(theirs.fileno()),
                 str(int(MEMORY_GB * 2**30)), kind, json.dumps(asdict(args)), *specs],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment)

    def receive(self, seconds: float):
        """Its next message. OSError: it ended, or sent none in time."""
        deadline, output = time.monotonic() + seconds, self.process.stdout
        while b"\n" not in self.received:
            ready = select.select([self.socket, output], [], [], 0.1)[0]
            sent = self.socket.recv(1 << 16) if self.socket in ready else b""
            printed = os.read(output.fileno(), 1 << 16) if output in ready else b""
            self.received += sent
            self.printed = (self.printed + printed)[-4000:]
            if ready and not sent and not printed:  # all processes that held the pipes are gone
                raise OSError(f"the worker ended with code {self.process.wait()}; it printed: "
                              f"{self.take_printed().strip()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:g} seconds")
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def take_printed(self) -> str:
        printed, self.printed = self.printed.decode(errors="replace"), b""
        return printed

    def kill(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.process.kill()  # it was stopped
        self.process.wait()
        self.process.stdout.close()
        self.socket.close()


class Scorer:
    """Worker processes, with one thread for each. kind: reward, reply (turns.py) or tools
    (toolcalls.py). Without specs every score is 0, of no parts.

    homes: each item has its worker, which keeps the environment.
    """

    def __init__(self, specs: list[str], args: RewardArgs, kind: str = "reward",
                 homes: bool = False):
        self.specs, self.kind, self.args = specs, kind, args
        self.parts = parse(specs, kind) if specs else []
        self.tried = threading.Event()  # was a worker started, or refused?
        self.groups = False  # does a reward take all completions of a prompt in one call?
        self.together = False  # is a reward `async def`? Then a worker gets its share at once
        self.needs = None  # [(reward, column that it needs), …], once a worker has loaded them
        self.refused, self.failed_starts = None, 0  # why and how often a worker did not start
        self.calls = queue.Queue()  # lists of slices of a batch's items; None ends a thread
        self.methods = []  # of a --reply CLASS; the schemas of --tools
        self.unscored, self.warned = 0, False  # calls in a row without a score; for `report`
        self.inboxes = [queue.Queue() if homes else self.calls
                        for _ in range(args.reward_workers if specs else 0)]
        self.threads = [threading.Thread(target=self._serve, daemon=True, args=(inbox,))
                        for inbox in self.inboxes]
        for thread in self.threads:
            thread.start()

    def wait(self) -> None:
        """Until a worker has loaded the rewards. SettingsError if none can."""
        if not self.specs:
            return
        self.tried.wait()
        if self.needs is None:
            error = SettingsError(self.refused)
            error.alone = True  # the workers of another rank may have loaded
            raise error

    def score(self, items: list[Item | Move], size: int = 1, homes=()) -> list[Score]:
        """A score for each item. Each `size` items in a row are one call. homes: a number for each
        item; items of the same number have the same worker."""
        if not self.specs:
            return [Score(0.0, {}, None) for _ in items]
        self.items, self.scores, self.failed_starts = items, [None] * len(items), 0
        calls = [slice(start, start + size) for start in range(0, len(items), size)]
        share = 1
        if self.together:
            share = math.ceil(len(calls) / len(self.threads)) or 1
        for i in range(0, len(calls), share):
            home = homes[i] if homes else 0
            self.inboxes[home % len(self.inboxes)].put(calls[i:i + share])
        for inbox in self.inboxes:
            inbox.join()
        return self.scores

    def close(self):
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(5)

    def _serve(self, inbox: queue.Queue):
        """A thread. It starts its workers itself: PDEATHSIG is tied to a *thread*."""
        worker = self._replace(None)
        while calls := inbox.get():
            if not worker or worker.process.poll() is not None:  # it died idle
                worker = self._replace(worker)
            answered = self._score_calls(worker, calls)
            inbox.task_done()
            if not answered:
                worker = self._replace(worker)
        if worker:
            worker.kill()

    def _replace(self, worker: Worker | None) -> Worker | None:
        """A new worker that has loaded the rewards. None after too many failed starts."""
        while True:
            if worker:
                worker.kill()
            tries = 1 if self.needs is None else 3 * len(self.threads)
            if self.failed_starts >= tries:
                return None
            worker = None
            try:
                worker = Worker(self.specs, self.kind, self.args)
                self.groups, self.together, self.methods, self.needs = worker.receive(
                    START_SECONDS)
                self.failed_starts = 0
                return worker
            except Exception as error:
                self.failed_starts += 1
                self.refused = (f"--{self.kind} cannot load (limits: {START_SECONDS} s, "
                                f"{MEMORY_GB} GB): {error}")
            finally:
                self.tried.set()

    def _score_calls(self, worker: Worker | None, calls: list[slice]) -> bool:
        """False: the worker stopped answering. Which of several calls did it is not known then:
        those without an answer are queued again, each alone."""
        left = {call.start: call for call in calls}
        size = calls[0].stop - calls[0].start  # of a call; the last one may be shorter
        try:
            if not worker:
                raise OSError(f"no worker starts: {self.refused}")
            worker.socket.settimeout(self.args.reward_timeout)
            sent = [(call.start, self.items[call]) for call in calls]
            worker.socket.sendall(pickle.dumps(sent))
            while left:
                message = worker.receive(self.args.reward_timeout * size)
                if message is None and self.together:  # a sign of life
                    continue
                start, *answer = message
                self.scores[left[start]] = self._scores(self.items[left[start]], *answer)
                del left[start]
        except Exception as error:  # a reward can write into the socket
            if len(calls) > 1:
                for call in left.values():
                    self.calls.put([call])
                left = {}
            for call in left.values():
                self.scores[call] = self._no_scores(self.items[call], error)
            answered = False
        else:
            answered = True
        first = self.scores[calls[0]]
        if worker and first[0]:  # None: it is queued again
            first[0].printed = worker.take_printed()[-1000:]
        return answered

    def _no_scores(self, items: list[Item], error: Exception) -> list[Score]:
        why = str(error) if isinstance(error, OSError) else f"no valid answer ({error!r})"
        why += f"\nThe completion: {items[0].completion[:300]!r}"
        return [self._sum([None] * len(self.parts), why) for _ in items]

    def _scores(self, items: list[Item], values: list, errors: list, retries: int,
                pause: float) -> list[Score]:
        """The scores of a call, from a worker's answer. An exception if it is no valid one."""
        scores = [self._sum(*one) for _, *one in zip(items, values, errors, strict=True)]
        scores[0].retries, scores[0].pause = int(retries), float(pause)
        return scores

    def _sum(self, values: list, error: str | None) -> Score:
        if self.kind != "reward":
            reply = values[0]
            if isinstance(reply, float):  # the reward of an environment
                return Score(0.0, {"reply": None, "reward": number(reply)}, error)
            return Score(None if error else 0.0, {"reply": messages(reply)}, error)
        parts = {p.name: number(v) for p, v in zip(self.parts, values, strict=True)}
        if None in parts.values():
            return Score(None, parts, error)
        return Score(sum(p.weight * parts[p.name] for p in self.parts), parts, error)
