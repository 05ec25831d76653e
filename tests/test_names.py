"""Every name and argument that this code takes from torch and vLLM is in what is installed.

vLLM's Python is the same in its CPU and GPU wheels, and what only a GPU calls is not run here. Its
files are read, not imported. Of torch, the real functions are asked.
"""
import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
VLLM = Path(torch.__file__).parent.parent / "vllm"
OURS = ("trainer/model.py", "trainer/logprobs.py", "trainer/packing.py", "trainer/lora.py",
        "trainer/batch.py", "dist.py", "preflight/worst_case.py", "preflight/inputs.py",
        "keeping/checkpoint.py")


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


# ---- vLLM ----

CLASSES = {  # name in rollout.py → its file, and where its arguments are
    "LLM": ("entrypoints/llm.py", "LLM"),
    "SamplingParams": ("sampling_params.py", "SamplingParams"),
    "TokensPrompt": ("inputs/llm.py", "TokensPrompt"),
    "LoRAModel": ("lora/lora_model.py", "LoRAModel"),
    "PEFTHelper": ("lora/peft_helper.py", "PEFTHelper"),
    "LoRARequest": ("lora/request.py", "LoRARequest"),
    "CpuCommunicator": ("distributed/device_communicators/cpu_communicator.py", "CpuCommunicator")}


def definition(path: str, name: str) -> ast.ClassDef:
    found = [node for node in ast.walk(tree(VLLM / path))
             if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{path} has no class {name}"
    return found[0]


def fields(node: ast.ClassDef) -> set[str]:
    return {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def takes(function: ast.FunctionDef) -> set[str]:
    args = function.args
    return {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def engine_options() -> set[str]:
    """What LLM(…) takes: its own arguments, and those that it hands on to EngineArgs."""
    return takes(methods(definition("entrypoints/llm.py", "LLM"))["__init__"]) | fields(
        definition("engine/arg_utils.py", "EngineArgs"))


def rollout() -> ast.Module:
    return tree(ROOT / "rollout.py")


def calls(name: str) -> list[ast.Call]:
    """Of a function or method with this name, in rollout.py."""
    return [node for node in ast.walk(rollout()) if isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", None)) == name]


def keywords(found: list[ast.Call]) -> set[str]:
    return {keyword.arg for call in found for keyword in call.keywords if keyword.arg}


def test_what_is_imported_from_vllm_is_there():
    seen = set()
    for node in ast.walk(rollout()):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
            for alias in node.names:
                seen.add(alias.name)
                path, name = CLASSES[alias.name]
                if node.module == "vllm":  # it is imported when it is first asked for
                    assert f'"{name}"' in (VLLM / "__init__.py").read_text()
                else:
                    assert VLLM.parent / f"{node.module.replace('.', '/')}.py" == VLLM / path
                    definition(path, name)
    assert seen == CLASSES.keys()


def test_the_engine_takes_these_options():
    options = keywords(calls("LLM"))
    for name in "options_of_device", "options_of_adapter":
        function, = (node for node in ast.walk(rollout())
                     if isinstance(node, ast.FunctionDef) and node.name == name)
        options |= {key.value for node in ast.walk(function) if isinstance(node, ast.Dict)
                    for key in node.keys}
    assert len(options) > 15 and "max_num_seqs" in options
    assert options <= engine_options(), options - engine_options()


def test_requests_take_these_options():
    for name, least in ("SamplingParams", 9), ("TokensPrompt", 1):
        node = definition(*CLASSES[name])
        used = keywords(calls(name))
        assert len(used) >= least and used <= fields(node), used - fields(node)


METHODS = {  # name → the classes that must have it, with these arguments
    "sleep": ("LLM", {"level"}), "wake_up": ("LLM", {"tags"}), "apply_model": ("LLM", {"func"}),
    "collective_rpc": ("LLM", {"kwargs"}), "reset_prefix_cache": ("LLM", set()),
    "generate": ("LLM", {"use_tqdm", "lora_request"}),
    "from_lora_tensors": ("LoRAModel", {"device", "dtype", "model_vocab_size", "weights_mapper"}),
    "from_dict": ("PEFTHelper", set())}


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_these_arguments(name):
    owner, least = METHODS[name]
    node = definition(*CLASSES[owner])
    found = methods(node)
    for base in node.bases:  # LLM inherits some
        for path in VLLM.glob("entrypoints/**/*.py"):
            if f"class {ast.unparse(base)}" in path.read_text():
                found = methods(definition(str(path.relative_to(VLLM)), ast.unparse(base))) | found
    used = keywords(calls(name)) - {"level", "tags"} if name not in ("sleep", "wake_up") else least
    assert calls(name) and name in found, sorted(found)
    assert used | least <= takes(found[name]), (used | least) - takes(found[name])


@pytest.mark.parametrize("path, owner, method, words", [
    ("v1/worker/gpu_worker.py", "Worker", "reload_weights", set()),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", "reload_weights", {"weights_iterator"}),
    ("v1/worker/gpu_worker.py", "Worker", "sleep", {"level"}),
    ("v1/worker/gpu_worker.py", "Worker", "wake_up", {"tags"}),
    ("v1/engine/core.py", "EngineCore", "shutdown", set())])
def test_the_gpu_worker_has_what_it_is_asked_for(path, owner, method, words):
    found = methods(definition(path, owner))
    assert method in found and words <= takes(found[method])


def test_the_words_that_vllm_reads_are_its_own():
    """Environment variables that rollout.py sets, the executor, the tags, the log-probs' mode."""
    known = (VLLM / "envs.py").read_text()
    text = (ROOT / "rollout.py").read_text()
    for name in {word.split("=")[0] for word in text.replace("(", " ").split()
                 if word.startswith("VLLM_")}:
        assert name in known, name
    assert "external_launcher" in (VLLM / "config/parallel.py").read_text()
    assert '"processed_logprobs"' in (VLLM / "config/model.py").read_text()
    worker = (VLLM / "v1/worker/gpu_worker.py").read_text()
    assert '"weights"' in worker and "kv_cache" in worker


def test_a_wrong_argument_is_seen(tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/model.py").write_text(
        "import torch\nfrom torch import nn\nnn.Linear(1, 2, bais=False)\n")
    monkeypatch.setattr("test_names.ROOT", tmp_path)
    with pytest.raises(TypeError, match="bais"):
        test_torch_takes_these_arguments("trainer/model.py")
