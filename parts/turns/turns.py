"""turns.py: several turns: what is appended to the sampled ids, and when an episode ends.

    prompt | y1 <end> | \\n <user> z1 <end> \\n <assistant> | y2 <end> | …
             sampled    the reply z1, not sampled           sampled

Ids are only appended: what was sampled is never decoded and encoded again. See parts/turns/.
"""
import math
import queue
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import ClassVar, NamedTuple

import numpy as np

from batch import Sample
from chat_template import decoder, ids_after, marks_of, render, texts_of
from data import Row
from errors import SettingsError
from parts.turns.replies import Move
from rewards import Pool, check_rows, report
from rollout import Engine, hash_seed
from settings import Count, Flags
from worker import ROOT, RewardSpec, find_file

TOGETHER = 64  # jobs that a worker gets at once of an `async def`
WORDS = "<think>\nt\n</think>\n\nQX7"  # of a turn; some templates drop the first part later


@dataclass
class TurnArgs(Flags):
    """Several turns."""
    reply: str | None = None
    """FILE.py:FUNCTION that replies to the model or ends the episode, or FILE.py:CLASS, an
    environment with a state. None: one turn."""
    max_turns: Count = 8
    """Maximum number of the model's turns per episode."""
    switch: ClassVar[str] = "reply"

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if paid_by(plan.args) and not self.reply:
            yield "--reward environment or turns needs --reply FILE.py:NAME."
        if self.reply and vars(plan.args).get("replay_routing"):
            yield ("--replay_routing is for one turn: of a reply's tokens no experts are known.")
        if self.reply and plan.shape and plan.shape.kind == "pictures":
            yield ("--reply is for models that read text alone: --model sees pictures, and answers "
                   "in one turn.")


def paid_by(args) -> set[str]:
    """Of --reward those that an environment pays."""
    return {"environment", "turns"} & {spec.partition(":")[0] for spec in args.reward}


class ReplyPool(Pool):
    """Workers that answer turns. Each has an inbox, and keeps its own environments."""
    flag: ClassVar = "reply"
    module: ClassVar = "parts.turns.replies"

    def parse(self, words: list[str]) -> list[RewardSpec]:
        """FILE.py:NAME."""
        path, name = re.fullmatch(r"(?:(.+\.py):)?(.*)", words[0]).groups()
        if not path or not name.isidentifier():
            raise SettingsError(
                f"--reply {words[0]}: it must be FILE.py:FUNCTION; it has no weight.")
        if not (found := find_file(path)):
            raise SettingsError(f"--reply {words[0]}: no such file, here or in {ROOT}.")
        return [RewardSpec(name, math.nan, str(found))]

    def make_inboxes(self, count: int) -> list[queue.Queue]:
        """See rewards.Pool."""
        return [queue.Queue() for _ in range(count)]

    def to_load(self) -> tuple:
        """See rewards.Pool."""
        return self.specs[0], self.args.reward_timeout

    def take(self, told: list) -> None:
        """See rewards.Pool."""
        self.methods, self.waits, self.needs = told

    def ask(self, moves: list[Move], homes: list[int]) -> list:
        """Returns what a worker returned for each: messages, a number, None, or a text that says
        what failed. homes: a number for each; the same worker gets all moves of a number, and keeps
        their environment."""
        self.homes = homes
        return [value for found in super().ask(moves) for value in found.values()]

    def put(self, jobs: list[slice]) -> None:
        """See rewards.Pool. An `async def` answers many at once."""
        size = TOGETHER if self.waits else 1
        for number, inbox in enumerate(self.inboxes):
            mine = [job for job, home in zip(jobs, self.homes, strict=True)
                    if home % len(self.inboxes) == number]
            for i in range(0, len(mine), size):
                inbox.put(mine[i:i + size])

    def seconds(self, sent: list[list]) -> float:
        """See rewards.Pool."""
        return self.args.reward_timeout + 1 if self.waits else super().seconds(sent)


def said(text: str) -> dict:
    """A turn of the model."""
    return {"role": "assistant", "content": text}


@dataclass
class Bridge:
    """What the chat template puts between two turns of the model."""
    tokenizer: object
    eos_ids: list[int]
    vocab: int
    system: str | None

    def __post_init__(self):
        self.read = decoder(self.tokenizer, self.eos_ids)
        self.marks = marks_of(self.tokenizer, self.eos_ids)

    def render(self, messages: list[dict], goes_on: bool) -> str:
        """A chat of a question and these messages. goes_on: the model's turn is next."""
        chat = [{"role": "user", "content": "x"}, *messages]
        if self.system is not None:
            chat = [{"role": "system", "content": self.system}, *chat]
        try:
            return render(chat, self.tokenizer, {}, add_generation_prompt=goes_on)
        except (SettingsError, ValueError, KeyError) as error:
            roles = ", ".join(m["role"] for m in chat)
            raise SettingsError(f"--reply: the chat template takes no messages of the roles "
                                f"{roles} ({error}).") from None

    def text(self, messages: list[dict]) -> str:
        """What the template writes from the model's words to its next ones: in ChatML
        <|im_end|>\\n<|im_start|>user\\nz<|im_end|>\\n<|im_start|>assistant\\n. Where it opens a
        turn with <think> (QwQ), the model's words are what follows. SettingsError if it refuses the
        messages, or writes the model's turn in another way.
        """
        if not self.tokenizer.chat_template:  # as in data.render
            return "\n\n".join(["", *(m["content"] for m in messages), ""])
        start = self.render([], True)
        header = self.render([said("QX7"), *messages], True).partition("QX7")[0]
        opened = start[len(commonprefix([start, header])):]
        words = WORDS.removeprefix(opened)
        whole, start = self.render([said(opened + words), *messages], True), start.rstrip()
        after = whole[len(start):].lstrip()  # the model may begin with a space
        if not (whole.startswith(start) and after.startswith(words.lstrip())):
            roles = " and ".join(dict.fromkeys(m["role"] for m in messages))
            raise SettingsError(
                f"--reply: before a message of role {roles} the chat template rewrites the model's "
                f"turn {opened + words!r}: it writes {whole[len(commonprefix([whole, start])):]!r}."
                " Would work: a model whose chat template keeps earlier turns as they were said.")
        return after[len(words.lstrip()):]

    def ids(self, last: int, messages: list[dict]) -> list[int]:
        """To append to a turn whose last id is `last`. Its end is not doubled."""
        self.marks.check(messages)
        text = self.text(messages)
        found, ends = ids_after(text, self.tokenizer), texts_of([last], self.tokenizer)
        # Else a --stop string ended it, or another end.
        if ends and ends == self.marks.end and text.lstrip().startswith(ends[0]):
            found = found[found.index(last) + 1:]
        if max(found) >= self.vocab:  # it would break the engine
            raise SettingsError(f"--reply: the reply has an id of {max(found)}; the model has "
                                f"{self.vocab:,}.")
        return found


def check(args, tokenizer, eos_ids: list[int], vocab: int, rows: list[Row]) -> Bridge | None:
    """SettingsError if the function or the chat template cannot be used. No tokenizer: no model."""
    spec = args.reply
    with closing(ReplyPool([spec], args)) as pool:
        pool.wait()
        check_rows(pool.needs, rows, {}, "reply")
    paid = paid_by(args)
    if paid and "reward" not in pool.methods:
        raise SettingsError(f"--reward {min(paid)} needs a class with reward() in --reply {spec}.")
    if not tokenizer:
        return None
    bridge = Bridge(tokenizer, eos_ids, vocab, args.system)
    try:
        bridge.ids(-1, [{"role": "user", "content": "z"}])
    except SettingsError:
        if not any(row.columns.get("tools") for row in rows):
            raise
        # Some templates keep the thoughts of a turn only where a tool answers it.
        bridge.ids(-1, [{"role": "tool", "content": "z", "name": "f", "tool_call_id": "0" * 9}])
    return bridge


@dataclass
class Episode:
    """A sample that goes on for several turns: `turns` of it has them, and what was put between."""
    number: int  # of the sample
    sample: Sample
    seed: int
    seen: list[int] = field(default_factory=list)  # how many turns there were at each reply
    worth: float = 0.0  # the reward of its environment so far

    @property
    def failed(self) -> bool:
        """Whether a reply failed. Then the completion has no reward."""
        return bool(self.sample.turns[-1].get("failed"))

    def asked(self, over: bool, pays: bool) -> Move:
        """What a worker is asked: its reply, or the reward of an environment."""
        row, turns = self.sample.prompt.row, self.sample.turns
        columns = row.columns | {"prompt": row.prompt, "answer": row.answer}
        return Move(row=columns, seed=self.seed, turns=turns, seen=self.seen, over=over, pays=pays,
                    completion=turns[-1]["content"])


class Reply(NamedTuple):
    """How an episode was answered."""
    value: list[dict] | float | None  # messages, or of an episode that is over its reward
    ids: list[int]  # of the messages, to append
    worth: float | None  # the reward so far, where turns are paid
    error: str | None  # None: nothing failed


class Episodes:
    """Goes on with completions until their episodes are over."""

    def __init__(self, args, bridge: Bridge, world, log):
        self.bridge, self.world, self.log = bridge, world, log
        self.max_turns, self.max_tokens = args.max_turns, args.max_tokens
        self.workers = ReplyPool([args.reply], args)
        self.workers.wait()
        self.stateful = bool(self.workers.methods)  # of a class
        self.pays = "turns" in paid_by(args)  # a turn is paid what reward() grows by
        self.told = False  # that no reply fits

    def play(self, samples: list[Sample], complete: Callable, seed: Callable) -> list[Episode]:
        """Adds replies and further turns to the samples, the same on all ranks. Returns their
        episodes. A collective.

        complete(samples): the engine's. seed(i, turn): of a turn of sample i.
        """
        episodes = [Episode(i, s, seed(i, 0)) for i, s in enumerate(samples)]
        self.mine = set(self.world.mine(range(len(samples))))  # this rank answers them
        running, begun = episodes, [0] * len(episodes)  # the turn of each begins at token `begun`
        for turn in range(1, self.max_turns + 1):
            new = [it.sample.ids[first:] for it, first in zip(running, begun, strict=True)]
            for it, message in zip(running, self.read(new), strict=True):
                it.sample.turns.append(message)
            running = [it for it in running if not it.sample.truncated]
            last = turn == self.max_turns
            if not running or (last and not self.stateful):
                break
            replies = self.reply(running)
            if last:  # it is only seen
                break
            answered = sum(bool(reply.value) for reply in replies)
            running = [it for it, reply in zip(running, replies, strict=True)
                       if self.goes_on(it.sample, reply.value, reply.ids)]
            if turn == 1 and answered and not running and not self.told:
                self.told = True
                self.log.say(f"  no reply fits: of {answered:,} none had room after the first turn."
                             f" --max_tokens {self.max_tokens} is for a whole episode, with its "
                             f"replies. Would work: a larger --max_tokens.")
            begun = [len(it.sample.ids) for it in running]
            for it in running:
                it.sample.seed = seed(it.number, turn)
            complete([it.sample for it in running])
        if self.stateful:
            self.end([it for it in episodes if not it.failed])
        return episodes

    def end(self, episodes: list[Episode]) -> None:
        """Ends the environments. The last turn gets their rewards as `reward`. A collective."""
        for it, reply in zip(episodes, self.reply(episodes, over=True), strict=True):
            if "reward" in self.workers.methods:
                it.sample.turns[-1]["reward"] = reply.value

    def read(self, turns: list[np.ndarray]) -> list[dict]:
        """The messages of these turns, given their ids. Each rank decodes its share. A collective.
        """
        mine, pay = self.world.mine(turns), {"paid": 0.0} if self.pays else {}
        return self.world.gather([said(self.bridge.read(ids)) | pay for ids in mine])

    def reply(self, episodes: list[Episode], over: bool = False) -> list[Reply]:
        """For each its messages, or if it is over its reward. A rank answers the same episodes in
        each turn: it has their environments. A collective."""
        mine = [it for it in episodes if it.number in self.mine]
        answers = self.workers.ask([it.asked(over, self.pays) for it in mine],
                                   homes=[it.number for it in mine])
        replies = self.world.gather([self.reply_of(it.sample, answer, over)
                                     for it, answer in zip(mine, answers, strict=True)])
        for it, reply in zip(episodes, replies, strict=True):
            it.seen.append(len(it.sample.turns))
            if reply.error:
                it.sample.turns[-1]["failed"] = True
            if self.pays and reply.worth is not None:
                it.sample.turns[-1]["paid"] += reply.worth - it.worth
                it.worth = reply.worth
        errors = [reply.error for reply in replies]
        report(self.workers, self.log, errors, len(errors))
        return replies

    def reply_of(self, sample: Sample, value, over: bool) -> Reply:
        """What a worker answered, with the ids of its messages. The first one has the `reward` so
        far, and loses it."""
        if isinstance(value, str):
            return Reply(None, [], None, value)
        if over:
            return Reply(value, [], value, None)
        if not value:
            return Reply(None, [], None, None)
        worth = value[0].pop("reward", None)
        try:
            return Reply(value, self.bridge.ids(int(sample.ids[-1]), value), worth, None)
        except SettingsError as error:
            return Reply(None, [], None, str(error))

    def goes_on(self, sample: Sample, messages: list[dict] | None, ids: list[int]) -> bool:
        """Appends a reply, if the episode goes on and a token has room after it."""
        sample.truncated = bool(messages) and len(sample.ids) + len(ids) >= self.max_tokens
        if not messages or sample.truncated:
            return False
        sample.append(ids, np.zeros(len(ids)), sampled=False)
        sample.turns += messages
        return True


class PlayingEngine(Engine):
    """An engine whose completions are episodes."""

    def __init__(self, args, world, inputs, log, models):
        super().__init__(args, world, inputs, log, models)
        bridge = Bridge(inputs.tokenizer, inputs.ends, inputs.shape.vocab, args.system)
        self.episodes = Episodes(args, bridge, world, log)

    def sample(self, prompts, group, temperature, purpose="train"):
        """See Engine."""
        samples = super().sample(prompts, group, temperature, purpose)

        def seed(i: int, turn: int) -> int:
            return hash_seed(self.seed, purpose, samples[i].prompt.position, i % group, turn)

        with self.log.time("rollout"):
            done = self.episodes.play(samples, partial(self.complete, temperature=temperature),
                                      seed)
        self.metrics = {"rollout/reply_failed": sum(it.failed for it in done)}
        return samples

    def close(self):
        """See Engine."""
        self.episodes.workers.close()
        super().close()


class EpisodePool(Pool):
    """Workers of --reward. An episode whose reply failed has no score."""

    def ask(self, items, size=1):
        """See Pool."""
        failed = {spec.name: "its episode failed" for spec in self.specs}
        return [failed if item["turns"][-1].get("failed") else found
                for found, item in zip(super().ask(items, size), items, strict=True)]
