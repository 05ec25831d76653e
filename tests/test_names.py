"""Every name and argument that this code takes from torch and vLLM is in what is installed.

What only a GPU calls is not run here. vLLM's Python is the same in its GPU wheel: it is read.
"""
import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
VLLM = Path(torch.__file__).parent.parent / "vllm"
OURS = ("model.py", "model.py", "batch.py", "parts/lora/lora.py",
        "batch.py", "dist.py", "run.py", "inputs.py",
        "checkpoint.py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# ---- torch ----

def imported(path: Path) -> dict[str, object]:
    """{name in the file: what of torch it is}."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch"):
                    module = importlib.import_module(alias.name)
                    found[alias.asname or "torch"] = module if alias.asname else torch
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def resolve(node: ast.AST, names: dict[str, object]):
    """What a chain such as torch.cuda.empty_cache is. None: it does not begin with torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        if inspect.ismodule(owner) or inspect.isclass(owner):
            return getattr(owner, node.attr)  # AttributeError: it is gone
    return None


@pytest.mark.parametrize("name", OURS)
def test_torch_takes_these_arguments(name):
    names, looked_at = imported(ROOT / name), 0
    for node in ast.walk(tree(ROOT / name)):
        if not isinstance(node, ast.Call):
            continue
        function = resolve(node.func, names)
        if function is None:
            continue
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C has none
            continue
        looked_at += 1
        open_ended = [kind for kind in map(type, node.args) if kind is ast.Starred]
        open_ended += [keyword for keyword in node.keywords if keyword.arg is None]
        bind = signature.bind_partial if open_ended else signature.bind
        values = [0 for arg in node.args if not isinstance(arg, ast.Starred)]
        bind(*values, **{keyword.arg: 0 for keyword in node.keywords if keyword.arg})
    assert looked_at or not names


# ---- vLLM: what only a GPU's engine is asked for. The rest runs in test_engine.py and test_lora.py

PLACES = {"LLM": "entrypoints/llm.py", "EngineArgs": "engine/arg_utils.py",
          "Worker": "v1/worker/gpu_worker.py", "EngineCore": "v1/engine/core.py",
          "GPUModelRunner": "v1/worker/gpu_model_runner.py"}


def definition(name: str) -> ast.ClassDef:
    found, = (node for node in ast.walk(tree(VLLM / PLACES[name]))
              if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def methods(name: str) -> dict[str, set[str]]:
    """{method: its arguments}; LLM inherits some."""
    found, node = {}, definition(name)
    for base in map(ast.unparse, node.bases):
        for path in VLLM.glob("entrypoints/**/*.py"):
            if f"class {base}" in path.read_text():
                PLACES[base] = path.relative_to(VLLM)
                found |= methods(base)
    return found | {item.name: {arg.arg for arg in ast.walk(item.args) if isinstance(arg, ast.arg)}
                    for item in node.body if isinstance(item, ast.FunctionDef)}


def test_the_engine_takes_these_options():
    rollout = [node for name in (
        "rollout.py", "parts/lora/lora.py", "parts/experts/experts.py", "parts/pictures/engine.py")
        for node in ast.walk(tree(ROOT / name))]
    options = {keyword.arg for node in rollout if isinstance(node, ast.Call)
               and getattr(node.func, "id", "") == "LLM" for keyword in node.keywords} - {None}
    for function in rollout:
        if getattr(function, "name", "") == "options":
            options |= {key.value for node in ast.walk(function) if isinstance(node, ast.Dict)
                        for key in node.keys}
    known = {item.target.id for item in definition("EngineArgs").body
             if isinstance(item, ast.AnnAssign)} | methods("LLM")["__init__"]
    known |= {"image", "video", "size"}  # of options of pictures
    assert len(options) > 15 and options <= known, options - known


@pytest.mark.parametrize("owner, method, words", [
    ("LLM", "sleep", {"level"}), ("LLM", "wake_up", {"tags"}),
    ("Worker", "reload_weights", set()), ("Worker", "sleep", {"level"}),
    ("Worker", "wake_up", {"tags"}), ("GPUModelRunner", "reload_weights", {"weights_iterator"}),
    ("EngineCore", "shutdown", set())])
def test_the_gpus_engine_has_what_it_is_asked_for(owner, method, words):
    assert words <= methods(owner)[method]


def test_the_words_that_vllm_reads_are_its_own():
    """Environment variables that rollout.py sets, the executor, the log-probs' mode."""
    words = (ROOT / "rollout.py").read_text().replace("(", " ").split()
    known = (VLLM / "envs.py").read_text()
    assert all(word.split("=")[0] in known for word in words if word.startswith("VLLM_"))
    assert "external_launcher" in (VLLM / "config/parallel.py").read_text()
    assert '"processed_logprobs"' in (VLLM / "config/model.py").read_text()
