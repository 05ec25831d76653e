"""Each file of the project asks of the others only what they have: what it imports is there, each
name of a module too, and each call has arguments that the function or class takes. Scripts that no
test starts, such as a benchmark of hours, break this way when another file changes."""
import ast
import importlib
import inspect
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import pytest

from tracked import ROOT, tracked

SHARED = {path.stem for path in tracked() if path.parent in (ROOT, ROOT / "tests")} | {"tools"}


def module_of(name: str) -> ModuleType | None:
    """A module of ours that any file may import. None: it is another."""
    ours = name.partition(".")[0] in SHARED and not name.startswith("test_")
    return importlib.import_module(name) if ours else None


def refused(call: ast.Call, function) -> str | None:
    """Why a function or class does not take the arguments of a call. None: it does."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a class of C
        return None
    starred = any(isinstance(it, ast.Starred) for it in call.args)
    names = {it.arg: None for it in call.keywords if it.arg}
    whole = not starred and len(names) == len(call.keywords)
    given = [None for it in call.args if not isinstance(it, ast.Starred)]
    try:
        (signature.bind if whole else signature.bind_partial)(*given, **names)
    except TypeError as error:
        return str(error)


def wrong(code: str) -> list[str]:
    """What a file asks for, and the others do not have."""
    found, known, modules, tree = [], {}, {}, ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name: it for one in node.names
                        if (it := module_of(one.name)) and (one.asname or "." not in one.name)}
        if isinstance(node, ast.ImportFrom) and node.module and (it := module_of(node.module)):
            for one in node.names:
                if isinstance(sub := getattr(it, one.name, None), ModuleType):
                    modules[one.asname or one.name] = sub
                elif hasattr(it, one.name):
                    known[one.asname or one.name] = sub
                elif not hasattr(it, "__path__") or not find_spec(f"{node.module}.{one.name}"):
                    found.append(f"line {node.lineno}: {node.module} has no {one.name}")
    here = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
            and not isinstance(node.ctx, ast.Load)} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = {name: it for name, it in modules.items() if name not in here}
    known = {name: it for name, it in known.items() if name not in here}
    of_module = partial(looked_up, modules)
    for node in ast.walk(tree):
        if of_module(node) and not hasattr(*of_module(node)) and isinstance(node.ctx, ast.Load):
            found.append(f"line {node.lineno}: {node.value.id} has no {node.attr}")
        if isinstance(node, ast.Call):
            function = known.get(node.func.id) if isinstance(node.func, ast.Name) else None
            if of_module(node.func):
                function = getattr(*of_module(node.func), None)
            if callable(function) and (why := refused(node, function)):
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}: {why}")
    return found


def looked_up(modules: dict, node) -> tuple[ModuleType, str] | None:
    """(module, name) of `module.name`, a module of ours."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (modules[node.value.id], node.attr) if node.value.id in modules else None


@pytest.mark.parametrize("path", [p for p in tracked() if p.suffix == ".py"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_asks_of_others_what_they_have(path):
    assert not wrong(path.read_text())


@pytest.mark.parametrize("code, what", [
    ("import rollout\nrollout.Engine(run)", "missing a required argument: 'world'"),
    ("from rollout import Engine as E\nE(1, 2, 3, 4, 5, 6)", "too many positional"),
    ("import losses\nlosses.whiten(1, 2, nothing=3)", "unexpected keyword argument 'nothing'"),
    ("from batch import Completion", "batch has no Completion"),
    ("import tools.prove as p\np.proof", "p has no proof"),
    ("import losses\nlosses.whiten(*a, nothing=2)", "unexpected keyword argument 'nothing'"),
    ("import losses\ndef f(losses): return losses.any_name", None),
    ("import rollout\nrollout.Engine(*job)", None)])
def test_what_is_not_there_is_named(code, what):
    found = wrong(code)
    assert len(found) == (what is not None) and (not what or what in found[0]), found
