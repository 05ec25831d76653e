"""toolcalls.py: tools: what the model may call, how it writes a call, and what a call returns.

    assistant: <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>    tool: 3

The functions of --tools run in workers (scoring/replies.py). The trainer reads the calls with the
parsers of vLLM (`Calls`). turns.py plays the episodes. See docs/use/turns.md.
"""
import json
import logging
from collections.abc import Callable
from contextlib import closing

from data import reader
from errors import SettingsError
from rewards import Score, Scorer
from scoring.replies import Move

# The first of vLLM's parsers that reads what the chat template writes is taken. The last one takes
# any JSON for a call. https://docs.vllm.ai/en/latest/features/tool_calling.html
PARSERS = "hermes", "mistral", "qwen3_coder", "granite", "phi4_mini_json", "pythonic", "llama3_json"
WORDS = "<think>\nt\n</think>\n\nyes"  # of a turn; some templates drop the first part later


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
        self.schemas, self.tokenizer = schemas, tokenizer
        self.text, self.parser, self.request = reader(tokenizer, eos_ids), None, None

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
        text = written(said("") | {"tool_calls": [call("first", {"x": "y"}, "0" * 9)]}).strip()
        for parser in PARSERS:
            try:
                self.parser = ToolParserManager.get_tool_parser(parser)(self.tokenizer, tools)
            except (RuntimeError, ValueError):  # the tokenizer has no such control token
                continue
            if self.parse(text)[1] == [("first", {"x": "y"})]:
                return
        raise SettingsError(f"--tools: none of vLLM's parsers {', '.join(PARSERS)} reads a call as "
                            f"the chat template writes it: {text[:200]!r}.")

    def parse(self, text: str) -> tuple[str, list[tuple[str, dict | str]]]:
        """The words before the calls; the name and the arguments of each."""
        try:
            found = self.parser.extract_tool_calls(text, self.request)
        except Exception:  # a parser must not end the run, whatever a model wrote
            return text, []
        return found.content or "", [(c.function.name, arguments_of(c.function.arguments))
                                     for c in found.tool_calls]

    def read(self, ids: list[int], turn: int) -> dict:
        """The model's turn as a message, with its `tool_calls`. turn: its number."""
        text = self.text(ids)
        content, calls = self.parse(text)
        if not calls:
            return said(text)
        return said(content) | {"tool_calls": [
            call(*found, f"{turn:04d}{i:05d}") for i, found in enumerate(calls)]}


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
        messages = [message(made, result_of(next(scores)))
                    for made in turn.get("tool_calls", [])]
        found.append(Score(0.0, {"reply": messages or None}, None))
    return found


def result_of(score: Score) -> str:
    if score.error:  # it hangs, or ended its process
        return "error: " + score.error.splitlines()[0]
    return score.parts["reply"][0]["content"]


def message(made: dict, result: str) -> dict:
    """The answer to a call."""
    return {"role": "tool", "name": made["function"]["name"], "tool_call_id": made["id"],
            "content": result}
