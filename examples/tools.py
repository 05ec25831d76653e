"""Tools: the model calls the functions of this file, and what they return is the reply.

    export TOOL_MODEL=Qwen/Qwen2.5-0.5B-Instruct TOOL_PARSER=hermes
    python examples/tools.py openai/gsm8k:main > tools.jsonl       # rows with a column `tools`
    python grpo.py --model $TOOL_MODEL --data tools.jsonl --reply examples/tools.py:answer \\
        --reward examples/gsm8k.py:last_turn \\
        --prompt_template "{question} End with #### and the answer."

The chat template shows a row's `tools`, the schemas, to the model. TOOL_PARSER is the name of the
parser that vLLM has for its calls (https://docs.vllm.ai/en/latest/features/tool_calling.html).
Copy this file for tools of your own: write a function, and name it in FUNCTIONS.
"""
import argparse
import ast
import json
import logging
import operator
import os
import sys
from pathlib import Path

from transformers.utils import get_json_schema

MODEL = os.environ.get("TOOL_MODEL", "Qwen/Qwen2.5-0.5B-Instruct")  # that of --model
PARSER = os.environ.get("TOOL_PARSER", "hermes")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as 12 * (3 + 4)
    """
    if len(expression) > 200:  # no result is huge
        raise ValueError("an expression has at most 200 characters")
    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except KeyError:
        raise ValueError("only numbers, + - * / and parentheses are known") from None


def value(node):
    """Only arithmetic is evaluated, never Python."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operands = {ast.BinOp: ("left", "right"), ast.UnaryOp: ("operand",)}[type(node)]
    return OPERATORS[type(node.op)](*(value(getattr(node, name)) for name in operands))


FUNCTIONS = {function.__name__: function for function in [calculator]}
SCHEMAS = [get_json_schema(function) for function in FUNCTIONS.values()]


def answer(turns):
    """The --reply: a message of role tool for each call of the model's turn, in their order. None:
    it made no call, and the episode is over."""
    calls = calls_of(turns[-1]["content"])
    return [{"role": "tool", "content": result_of(name, arguments), "name": name,
             "tool_call_id": f"{len(turns):04d}{i:05d}"}  # Mistral's have nine characters
            for i, (name, arguments) in enumerate(calls)] or None


def calls_of(text):
    """[(name, arguments as JSON), …] in a turn, as vLLM reads it. Where it cannot: []."""
    found = parser.extract_tool_calls(text, request)
    return [(call.function.name, call.function.arguments) for call in found.tool_calls]


def result_of(name, arguments):
    """What a call returns, as text. What goes wrong is a sentence for the model."""
    if name not in FUNCTIONS:
        return f"error: there is no tool {name[:50]!r}, only {', '.join(FUNCTIONS)}"
    try:
        result = FUNCTIONS[name](**json.loads(arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"[:500]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def load_parser():
    """vLLM's parser, and the request that it wants beside a text."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers import ToolParserManager
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # bad JSON: a traceback
    tools = [ChatCompletionToolsParam(**schema) for schema in SCHEMAS]
    found = ToolParserManager.get_tool_parser(PARSER)(tokenizer, tools)
    return found, ChatCompletionRequest(messages=[], model="", tools=tools)


def check_parser():
    """It must read a call as the chat template writes it: else no call is ever found."""
    asked = [{"role": "user", "content": "x"}]
    call = {"name": "calculator", "arguments": {"expression": "1"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "0" * 9, "type": "function", "function": call}]}
    start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([*asked, turn], tokenize=False)[len(start.rstrip()):]
    text = text.strip().removesuffix(tokenizer.eos_token or "")
    if [json.loads(arguments) for _, arguments in calls_of(text)] != [call["arguments"]]:
        sys.exit(f"TOOL_PARSER {PARSER} does not read a call as the chat template of TOOL_MODEL "
                 f"{MODEL} writes it: {text!r:.300}.")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from data import read
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="rows, as --data takes them")
    for row in read(parser.parse_args().data)[0]:
        print(json.dumps(row | {"tools": SCHEMAS}))
else:  # at the start of a worker: to import vLLM takes longer than a reply may
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    parser, request = load_parser()
    check_parser()
