"""The code is written to be read. A style is a matter of taste; these are the rules of this one.

`python tests/test_style.py` prints where they are broken, and the sizes.
"""
import ast
import io
import subprocess
import sys
import tokenize

import pytest

from tracked import ROOT, tracked

LONGEST = 40  # lines of a function, but for the two that are read as a whole
WHOLE = ("train", "learn")
LARGEST = 600  # lines of a file
CORE = 52_000  # tokens of code of the core: prose does not count, so nobody has to squeeze it
APART = ("nano.py",
         "parts/report/",  # it was a tool
         "parts/conftest.py")
AROUND = ("tests", "docs", "tools", "examples", "exercises", "bench", "results", "variants",
          "which")
PYTHON = [path for path in tracked() if path.suffix == ".py"]
FILES = {str(path.relative_to(ROOT)): path for path in PYTHON
         if not {path.relative_to(ROOT).parts[0], path.parent.name} & {*AROUND}
         and path.name != "turn_credit.py"}  # of the form of those in variants/


def is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, ast.Compare | ast.BoolOp)


def long_function(node: ast.AST) -> bool:
    return (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in WHOLE
            and node.end_lineno - node.lineno + 1 > LONGEST)


def named_lambda(node: ast.AST) -> bool:
    if isinstance(node, ast.NamedExpr | ast.Assign | ast.AnnAssign):
        return isinstance(node.value, ast.Lambda)
    return False


def multiplied_by_a_condition(node: ast.AST) -> bool:
    """"s" * (n != 1)"""
    return (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            and (is_condition(node.left) or is_condition(node.right)))


def loop_as_an_if(node: ast.AST) -> bool:
    """for x in found[:1]"""
    over = node.iter if isinstance(node, ast.For | ast.comprehension) else None
    return (isinstance(over, ast.Subscript) and isinstance(over.slice, ast.Slice)
            and not over.slice.lower and isinstance(over.slice.upper, ast.Constant)
            and over.slice.upper.value == 1)


REPAIRS = ("CpuCommunicator", "sympy_parser")  # of libraries, not of an object of ours


def replaced_method(node: ast.AST) -> bool:
    """thing.method = f, where f is a function made there, or partial(...)"""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    made = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        target = part.targets[0] if isinstance(part, ast.Assign) else None
        others = "self", *REPAIRS
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in others:
            called = part.value.func if isinstance(part.value, ast.Call) else part.value
            if isinstance(called, ast.Name) and called.id in made | {"partial"}:
                return True
    return False


RULES = [long_function, named_lambda, multiplied_by_a_condition, loop_as_an_if, replaced_method]


def broken(rule, text: str, name: str = "") -> list[str]:
    """The places where it is: "plan.py:7"."""
    return [f"{name}:{getattr(node, 'lineno', getattr(node, 'iter', node).lineno)}"
            for node in ast.walk(ast.parse(text)) if rule(node)]


def everywhere(rule) -> list[str]:
    return [place for name, path in FILES.items()
            for place in broken(rule, path.read_text(), name)]


@pytest.mark.parametrize("rule, text", [
    (long_function, "def f():\n" + "    x = 1\n" * LONGEST), (named_lambda, "f = lambda x: x"),
    (multiplied_by_a_condition, "'s' * (n != 1)"), (loop_as_an_if, "[x for x in found[:1]]"),
    (replaced_method, "def f(x):\n    x.forward = partial(wide, x.forward)"),
    (replaced_method, "def f(x):\n    def g():\n        pass\n    x.forward = g")])
def test_no_component_breaks_a_rule(rule, text):
    assert broken(rule, text) and not everywhere(rule)


def test_every_public_function_says_what_it_does():
    """What a function of a plug.py does is in part.py."""
    from part import PLACES
    silent = []
    for name, path in FILES.items():
        tree = ast.parse(path.read_text())
        for home in (tree, *(part for part in tree.body if isinstance(part, ast.ClassDef))):
            silent += [f"{name}:{part.name}" for part in home.body
                       if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                       and not part.name.startswith("_") and not ast.get_docstring(part)
                       and not (name.endswith("/plug.py") and part.name in PLACES)]
    assert silent == ["nano.py:train"]  # it is read as a whole


def test_ruff_finds_nothing():
    """A line wider than 100 columns is one of its findings."""
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", *PYTHON], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}


def tokens_of(source: str) -> int:
    """Names, numbers, strings and operators: without comments, docstrings and layout."""
    prose = {line for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
             for line in range(node.lineno, node.end_lineno + 1)}
    return sum(token.type not in LAYOUT and token.start[0] not in prose
               for token in tokenize.generate_tokens(io.StringIO(source).readline))


def core() -> dict[str, int]:
    """{file: tokens} of the files in front but nano.py and the scripts of parts."""
    return {name: tokens_of(path.read_text()) for name, path in FILES.items()
            if "/" not in name and not name.startswith(APART)}


def test_no_file_is_too_large():
    lines = {name: path.read_text().count("\n") for name, path in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > LARGEST}
    assert sum(core().values()) <= CORE
    assert tokens_of('"""A page."""\nx = 1  # 3\ndef f(y):\n    """Of y."""\n    return y\n') == 11


def main() -> None:
    for rule in RULES:
        print(f"{rule.__name__:28} {' '.join(everywhere(rule)) or 'nowhere'}")
    print(f"\n{sum(core().values()):,} tokens of code in the core (at most {CORE:,}). The largest:")
    for name, size in sorted(core().items(), key=lambda item: -item[1])[:5]:
        print(f"{size:9,}  {name}")


if __name__ == "__main__":
    main()
