"""toolcalls.py: tools: what the model may call, how it writes a call, and what a call returns.

    assistant: <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>    tool: 3

The functions of --tools run in workers (scoring/replies.py). The trainer reads the calls with the
parsers of vLLM (`Calls`). turns.py plays the episodes. See docs/use/turns.md.
"""
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import closing

from dist import SettingsError
from rewards import Score, Scorer
from scoring.replies import Move

# The first of vLLM's parsers that reads what the chat template writes is taken. The last one takes
# any JSON for a call. https://docs.vllm.ai/en/latest/features/tool_calling.html
PARSERS = "hermes", "mistral", "qwen3_coder", "granite", "phi4_mini_json", "pythonic", "llama3_json"
WORDS = "<think>\nt\n</think>\n\nyes"  # of a turn; some templates drop the first part later
UNREADABLE = "error: this call cannot be read; write each call as the instructions say"


def load(specs: tuple[str, ...], args) -> list[dict]:
    """The schemas of --tools, as transformers makes them. SettingsError if a file cannot load."""
    with closing(Scorer(list(specs), args, "tools")) as scorer:
        scorer.wait()
        return scorer.methods


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: dict | str, number: str) -> dict:
    """A call, in the form of OpenAI and of the chat templates."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


class Calls:
    """How this model writes calls: one of vLLM's parsers."""

    def __init__(self, schemas: list[dict], tokenizer, eos_ids: list[int]):
        self.schemas, self.tokenizer, self.eos_ids = schemas, tokenizer, eos_ids
        self.parser = self.request = self.marker = None

    def choose(self, written: Callable[[dict], str]) -> None:
        """Finds the parser. written(turn): a turn with calls, as the chat template writes it.
        SettingsError if no parser reads it."""
        for logger in "vllm.tool_parsers", "vllm.parser":  # they print a traceback for bad JSON
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
            ChatCompletionToolsParam,
        )
        from vllm.tool_parsers import ToolParserManager
        tools = [ChatCompletionToolsParam(**schema) for schema in self.schemas]
        self.request = ChatCompletionRequest(messages=[said("")], model="", tools=tools)
        texts = []
        for name in "first", "other":
            turn = said("") | {"tool_calls": [call(name, {"x": "y"}, "0" * 9)]}
            texts.append(written(turn).strip())
        # <tool_call>, [TOOL_CALLS], {"name":
        begin = re.match(r"\S[^\s{\[]*", os.path.commonprefix(texts))
        if begin and len(begin[0]) > 2:
            self.marker = begin[0]
        for parser in PARSERS:
            try:
                self.parser = ToolParserManager.get_tool_parser(parser)(self.tokenizer, tools)
            except (RuntimeError, ValueError):  # the tokenizer has no such control token
                continue
            if [self.parse(text)[1] for text in texts] == [
                    [("first", {"x": "y"})], [("other", {"x": "y"})]]:
                return
        raise SettingsError(f"--tools: none of vLLM's parsers {', '.join(PARSERS)} reads a call as "
                            f"the chat template writes it: {texts[0][:200]!r}.")

    def parse(self, text: str) -> tuple[str, list[tuple[str, dict | str]]]:
        """The words before the calls; the name and the arguments of each."""
        try:
            found = self.parser.extract_tool_calls(text, self.request)
        except Exception:  # a parser must not end the run, whatever a model wrote
            return text, []
        return found.content or "", [(c.function.name, arguments_of(c.function.arguments))
                                     for c in found.tool_calls]

    def read(self, ids: list[int], turn: int) -> dict:
        """The model's turn as a message, with its `tool_calls`, or an `error` if they cannot be
        read. turn: its number."""
        decode, ended = self.tokenizer.decode, ids[-1] in self.eos_ids
        text = decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        content, calls = self.parse(text)
        if calls:
            numbers = [f"{turn:04d}{i:05d}" for i in range(len(calls))]
            own = re.findall(r'"id": ?"(\w{9})"', text)  # Mistral's models write them
            if len(own) == len(calls):
                numbers = own
            return said(content) | {"tool_calls": [
                call(*found, number) for found, number in zip(calls, numbers, strict=True)]}
        plain = said(decode(ids, skip_special_tokens=True))
        if self.marker and self.marker in text:
            return plain | {"error": UNREADABLE}
        return plain


def arguments_of(text: str) -> dict | str:
    """A JSON object, or the text if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def answers(workers: Scorer, turns: list[dict]) -> list[Score]:
    """The messages that answer the calls of each turn, as its reply. None: it has no calls."""
    calls = [call for turn in turns for call in turn.get("tool_calls", [])]
    moves = [Move({}, 0, [said("") | {"tool_calls": [call]}], []) for call in calls]
    scores, found = iter(workers.score(moves)), []
    for turn in turns:
        messages, printed = [], ""
        for made in turn.get("tool_calls", []):
            score = next(scores)
            printed += score.printed
            messages.append(message(made, result_of(score)))
        if "error" in turn:
            messages = [message(call("", {}, "0" * 9), turn["error"])]
        found.append(Score(0.0, {"reply": messages or None}, None, printed))
    return found


def result_of(score: Score) -> str:
    if score.error:  # it hangs, or ended its process
        return "error: " + score.error.partition("; it printed")[0].splitlines()[0]
    return score.parts["reply"][0]["content"]


def check_rounds(bridge) -> None:
    """SettingsError if two rounds of calls are not one after the other, id for id."""
    made = call("first", {"x": "y"}, "0" * 9)
    turn, answer = said(WORDS) | {"tool_calls": [made]}, message(made, "z")
    one = bridge.render([turn, answer], True).rstrip()
    two = bridge.render([turn, answer, turn, answer], True)
    if two != one + bridge.body(turn) + bridge.after_calls([answer]):
        raise SettingsError("--tools: the chat template rewrites earlier calls once there are more "
                            "of them.")


def message(made: dict, result: str) -> dict:
    """The answer to a call."""
    return {"role": "tool", "name": made["function"]["name"], "tool_call_id": made["id"],
            "content": result}
