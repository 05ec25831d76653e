"""A tool: the model may ask for arithmetic as often as it likes. See docs/turns.md.

    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main \\
        --reward examples/calculator.py:right --reply examples/calculator.py:reply \\
        --system "$(python -c 'from examples import calculator as c; print(c.SYSTEM)')"
"""
import ast
import json
import operator
import re

from examples.gsm8k import gsm8k

SYSTEM = """You can use a calculator. To call it, write
<tool_call>{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}</tool_call>
and wait for its result. It knows numbers, + - * / and parentheses. End with #### and the answer."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculate(expression):
    """Its value. Only arithmetic is evaluated, never Python."""
    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        operands = {ast.BinOp: ("left", "right"), ast.UnaryOp: ("operand",)}[type(node)]
        return OPERATORS[type(node.op)](*(value(getattr(node, name)) for name in operands))
    if len(expression) > 200:  # no result is huge
        raise ValueError("an expression has at most 200 characters")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except KeyError:
        raise ValueError("only numbers, + - * / and parentheses are known") from None


def result(call):
    """What the model reads. A wrong call gets a sentence that it can learn from."""
    try:
        call = json.loads(call)
        if call["name"] != "calculator":
            return f"error: there is no tool {str(call['name'])[:50]!r}, only calculator"
        return str(calculate(call["arguments"]["expression"]))
    except json.JSONDecodeError as error:
        return f"error: this is no JSON: {error}"
    except (KeyError, TypeError, AttributeError):
        return 'error: a call is {"name": "calculator", "arguments": {"expression": TEXT}}'
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def reply(row, turns):
    """The results of a turn's calls, as one group. A turn without calls is the last."""
    calls = re.findall("<tool_call>(.*?)(?:</tool_call>|$)", turns[-1]["content"], re.DOTALL)
    return [{"role": "tool", "content": result(call)} for call in calls[:8]] or None


def right(turns, answer, **row):
    """1 if the last turn is right. What the tool said is no answer."""
    return gsm8k(turns[-1]["content"], answer)
