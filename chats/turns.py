"""turns.py: several turns: what is appended to the sampled ids, and when an episode ends.

    prompt | y1 <end> | \\n <user> z1 <end> \\n <assistant> | y2 <end> | …
             sampled    the reply z1, not sampled           sampled

Ids are only appended: what was sampled is never decoded and encoded again. See docs/use/turns.md.
"""
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from jinja2 import TemplateError

from chats import toolcalls
from chats.toolcalls import WORDS, Calls, said
from data import Prompt, Row, ids_after, marks, reader, texts_of
from errors import Count, SettingsError, not_default
from rewards import Score, Scorer, check_rows, report
from rollout import Request, prepare_environment
from scoring.replies import Move
from trainer.batch import Completion


@dataclass
class TurnArgs:
    """Several turns."""
    reply: str | None = None
    """FILE.py:FUNCTION that answers the model, or ends the episode; or FILE.py:CLASS, an
    environment with a state. Not given: one turn."""
    max_turns: Count = 8
    """The model's turns in an episode, at most."""
    tools: tuple[str, ...] = ()
    """Functions FILE.py:NAME … that the model may call, in the format of its chat template."""

    def rules(self, plan):
        """Yields a sentence for each broken rule (plan.problems)."""
        if "max_turns" in not_default(self) and not (self.reply or self.tools):
            yield "--max_turns needs --reply or --tools."
        if (self.reply or self.tools) and plan.shape and plan.shape.tower:
            yield ("--reply and --tools are for models that read text alone: --model sees "
                   "pictures, and answers in one turn.")
        if self.reply == "":
            yield "--reply must be FILE.py:FUNCTION or FILE.py:CLASS (got an empty text)."
        if not self.tools:
            return
        if self.reply:
            yield "--tools and --reply both answer the model: give one of them."
        if plan.args.teacher_prompt:
            yield "--teacher_prompt makes prompts without the schemas of --tools."
        if plan.args.supervised:
            yield f"--tools is for rollouts, and {plan.args.script} learns from chats."


@dataclass
class Bridge:
    """What the chat template puts between two turns of the model."""
    tokenizer: object
    eos_ids: list[int]
    vocab: int
    system: str | None
    calls: Calls | None = None  # of --tools

    def __post_init__(self):
        self.read = reader(self.tokenizer, self.eos_ids)
        self.ends = marks(self.tokenizer)[1]

    @property
    def flag(self) -> str:
        return "--tools" if self.calls else "--reply"

    def render(self, messages: list[dict], goes_on: bool) -> str:
        """A chat of a question and these messages. goes_on: the model's turn is next."""
        chat = [{"role": "user", "content": "x"}, *messages]
        if self.system is not None:
            chat = [{"role": "system", "content": self.system}, *chat]
        tools = self.calls.schemas if self.calls else None
        try:
            return self.tokenizer.apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=goes_on)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(m["role"] for m in chat)
            raise SettingsError(f"{self.flag}: the chat template takes no messages of the roles "
                                f"{roles} ({error}).") from None

    def text(self, messages: list[dict]) -> str:
        """From the end of the model's words to its next ones. SettingsError if the template refuses
        the messages or rewrites the turn."""
        if self.calls:
            return self.after_calls(messages)
        if not self.tokenizer.chat_template:  # as in data.render
            return "\n\n".join(["", *(m["content"] for m in messages), ""])
        roles = " and ".join(dict.fromkeys(m["role"] for m in messages))
        start = self.render([], True).rstrip()
        after, before = self.render([said(WORDS), *messages], True), start + WORDS
        after = start + after[len(start):].lstrip()  # the model may begin with a space
        if not after.startswith(before):
            raise SettingsError(f"--reply: the chat template rewrites earlier turns before a "
                                f"message of role {roles}.")
        return after[len(before):]

    def after_calls(self, messages: list[dict]) -> str:
        """The same of a turn with calls, which these messages answer."""
        turn = said(WORDS) | {"tool_calls": [
            toolcalls.call(m["name"], {"x": "y"}, m["tool_call_id"]) for m in messages]}
        before, after = self.render([turn], False), self.render([turn, *messages], True)
        if not after.startswith(before.rstrip()):
            raise SettingsError("--tools: the chat template rewrites a turn with calls once they "
                                "are answered.")
        return after[self.end_of(before):]

    def end_of(self, turn: str) -> int:
        """Where the turn's end begins: an end token, and what is not written follows."""
        turn = turn.rstrip()
        found = [end for end in texts_of(self.eos_ids, self.tokenizer) if turn.endswith(end)]
        return len(turn) - max(map(len, found), default=0)

    def body(self, turn: dict) -> str:
        """A turn with calls, between the header and the end."""
        start, text = self.render([], True).rstrip(), self.render([turn], False)
        return text[len(start):self.end_of(text)]

    def ids(self, last: int, messages: list[dict]) -> list[int]:
        """To append to a turn whose last id is `last`. Its end is not doubled."""
        text = self.text(messages)
        found, ends = ids_after(text, self.tokenizer), texts_of([last], self.tokenizer)
        # Else a --stop string ended it, or another end.
        if ends and ends == self.ends and text.lstrip().startswith(ends[0]):
            found = found[found.index(last) + 1:]
        if max(found) >= self.vocab:  # it would break the engine
            raise SettingsError(f"{self.flag}: the reply has an id of {max(found)}; the model has "
                                f"{self.vocab:,}.")
        return found


def check(args, tokenizer, eos_ids: list[int], vocab: int, rows: list[Row]) -> Bridge | None:
    """SettingsError if the function or the chat template cannot be used. No tokenizer: no model."""
    spec = args.turn_args.reply
    with closing(Scorer([spec], args.reward_args, "reply")) as scorer:
        scorer.wait()
        check_rows(scorer.needs, rows, "reply")
    rewards = [reward.partition(":")[0] for reward in args.reward]
    if "environment" in rewards and "reward" not in scorer.methods:
        raise SettingsError(f"--reward environment needs a class with reward() in --reply {spec}.")
    if not tokenizer:
        return None
    bridge = Bridge(tokenizer, eos_ids, vocab, args.data_args.system)
    bridge.ids(-1, [{"role": "user", "content": "z"}])
    return bridge


def check_tools(args, schemas: list[dict], tokenizer, eos_ids: list[int], vocab: int) -> Bridge:
    """SettingsError if the chat template has no place for tools, or cannot go on after calls."""
    calls, system = Calls(schemas, tokenizer, eos_ids), args.data_args.system
    if not tokenizer.chat_template:
        raise SettingsError("--tools needs a model with a chat template.")
    bridge = Bridge(tokenizer, eos_ids, vocab, system, calls=calls)
    if bridge.render([], True) == Bridge(tokenizer, eos_ids, vocab, system).render([], True):
        raise SettingsError("--tools: the chat template of the model has no place for tools. Would "
                            "work: --reply, with the tools in --system.")
    prepare_environment(torch.cuda.is_available(), args.engine_args)  # vLLM is imported here
    calls.choose(bridge.body)
    made = toolcalls.call("first", {}, "0" * 9)
    bridge.after_calls([toolcalls.message(made, "z")])
    return bridge


@dataclass
class Episode:
    """A completion that goes on for several turns."""
    number: int  # of the completion
    row: Row
    completion: Completion
    seed: int
    seen: list[int] = field(default_factory=list)  # how many turns there were at each reply

    def asked(self, over: bool = False) -> Move:
        """What a worker is asked: its reply, or the reward of an environment."""
        row, turns = self.row, self.completion.turns
        columns = row.columns | {"prompt": row.prompt, "answer": row.answer}
        return Move(columns, self.seed, turns, self.seen, over, turns[-1]["content"])


class Episodes:
    """Goes on with completions until their episodes are over."""

    def __init__(self, args, bridge: Bridge, world, log):
        self.bridge, self.world, self.log = bridge, world, log
        self.max_turns, self.max_tokens = args.turn_args.max_turns, args.max_tokens
        kind, specs = "reply", [args.turn_args.reply]
        if bridge.calls:
            kind, specs = "tools", list(args.turn_args.tools)
        self.workers = Scorer(specs, args.reward_args, kind, homes=kind == "reply")
        self.workers.wait()
        self.stateful = kind == "reply" and bool(self.workers.methods)  # of a class

    def play(self, prompts: list[Prompt], completions: list[Completion],
             complete: Callable, seed: Callable) -> None:
        """Adds replies and further turns to the completions, the same on all ranks. A collective.

        complete(requests): the engine's. seed(i, turn): of a turn of completion i.
        """
        for c in completions:
            c.turns = []
        episodes = [Episode(i, prompt.row, c, seed(i, 0))
                    for i, (prompt, c) in enumerate(zip(prompts, completions, strict=True))]
        self.mine = set(self.world.mine(range(len(completions))))  # this rank answers them
        new, running = completions, episodes  # `new` has a turn of each `running`
        for turn in range(1, self.max_turns + 1):
            for it, message in zip(running, self.read(new, turn), strict=True):
                it.completion.turns.append(message)
            running = [it for it in running if not it.completion.truncated]
            last = turn == self.max_turns
            if not running or (last and not self.stateful):
                break
            replies = self.reply(running)
            if last:  # only its environment sees this turn
                break
            running = [it for it, reply in zip(running, replies, strict=True)
                       if self.goes_on(it.completion, *reply)]
            new = complete([Request(
                it.row.prompt_ids + it.completion.ids.tolist(), seed(it.number, turn),
                self.max_tokens - len(it.completion.ids)) for it in running])
            for it, c in zip(running, new, strict=True):
                append(it.completion, c.ids, c.logprobs, True)
                it.completion.truncated = c.truncated
        if self.stateful:
            self.end([it for it in episodes if not it.completion.failed])

    def end(self, episodes: list[Episode]) -> None:
        """Ends the environments. The last turn gets their rewards as `reward`. A collective."""
        for it, (reward, _) in zip(episodes, self.reply(episodes, over=True), strict=True):
            if "reward" in self.workers.methods:
                it.completion.turns[-1]["reward"] = reward

    def read(self, turns: list[Completion], number: int) -> list[dict]:
        """The messages of these turns. Each rank decodes its share. A collective."""
        bridge, mine = self.bridge, self.world.mine(turns)
        if bridge.calls:
            return self.world.gather([bridge.calls.read(c.ids, number) for c in mine])
        return self.world.gather([said(bridge.read(c.ids)) for c in mine])

    def reply(self, episodes: list[Episode], over: bool = False) -> list[tuple]:
        """For each its reply (over: its reward) and the ids to append. A rank answers the same
        episodes in each turn: it has their environments. A collective."""
        mine, made = [it for it in episodes if it.number in self.mine], []
        if self.bridge.calls:
            scores = toolcalls.answers(self.workers, [it.completion.turns[-1] for it in mine])
        else:
            asked, numbers = [it.asked(over) for it in mine], [it.number for it in mine]
            scores = self.workers.score(asked, homes=numbers)
        for it, score in zip(mine, scores, strict=True):
            ids = []
            try:
                if score.parts["reply"]:
                    ids = self.bridge.ids(int(it.completion.ids[-1]), score.parts["reply"])
            except SettingsError as error:
                score = Score(None, {"reply": None}, str(error))
            made.append((score, ids))
        made = self.world.gather(made)
        for it, (score, _) in zip(episodes, made, strict=True):
            it.seen.append(len(it.completion.turns))
            it.completion.failed = score.total is None
        report(self.workers, self.log, [score for score, _ in made], len(made))
        part = "reward" if over else "reply"
        return [(score.parts.get(part), ids) for score, ids in made]

    def goes_on(self, c: Completion, messages: list[dict] | None, ids: list[int]) -> bool:
        """Appends a reply, if the episode goes on and a token has room after it."""
        c.truncated = bool(messages) and len(c.ids) + len(ids) >= self.max_tokens
        if not messages or c.truncated:
            return False
        append(c, ids, np.zeros(len(ids)), False)
        c.turns += messages
        return True


def append(c: Completion, ids, logprobs, sampled: bool) -> None:
    c.ids = np.append(c.ids, ids).astype(np.int32)
    c.logprobs = np.append(c.logprobs, logprobs).astype(np.float32)
    c.sampled = np.append(c.sampled, np.full(len(ids), sampled))
