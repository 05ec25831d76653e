"""A tool: the model may ask for arithmetic as often as it likes. See docs/use/turns.md.

    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main \\
        --tools examples/calculator.py:calculator --reward examples/calculator.py:right \\
        --prompt_template "{question} End with #### and the answer."

The chat template gets the tool's schema, which transformers makes from the signature and the
docstring. A call is read from the model's turn, in the format of its family. What the function
raises is the answer to the call.
"""
import ast
import operator

from examples.gsm8k import gsm8k

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


def right(turns, answer, **row):
    """1 if the last turn is right. What the tool said is no answer."""
    return gsm8k(turns[-1]["content"], answer)
