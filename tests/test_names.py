"""Every name that this code takes from torch and vLLM, and only a GPU calls, is in what is
installed. vLLM's Python is the same in its GPU wheel: it is read.
"""
import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

ROOT = Path(__file__).parent.parent
VLLM = Path(torch.__file__).parent.parent / "vllm"


def test_torch_has_what_only_a_gpu_calls():
    code = {path.name: path.read_text() for path in ROOT.glob("*.py")}
    names = {*re.findall(r"torch\.cuda\.(\w+)", "".join(code.values()))}
    assert len(names) > 5 and not [name for name in names if not hasattr(torch.cuda, name)]
    call, = re.findall(r"return varlen_attn\(.*?\*sizes,\s*(.*?)\)\n", code["batch.py"], re.S)
    words = {word: 0 for word in re.findall(r"(\w+)=", call)}
    inspect.signature(varlen_attn).bind(*["q", "k", "v", "ends", "ends", "most", "most"], **words)


# ---- vLLM: what only a GPU's engine is asked for. The rest runs in test_engine.py and test_lora.py

PLACES = {"LLM": "entrypoints/llm.py", "EngineArgs": "engine/arg_utils.py",
          "Worker": "v1/worker/gpu_worker.py", "EngineCore": "v1/engine/core.py",
          "GPUModelRunner": "v1/worker/gpu_model_runner.py"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    files = ROOT / "rollout.py", *ROOT.glob("parts/*/*.py")
    rollout = [node for path in files for node in ast.walk(tree(path))]
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
