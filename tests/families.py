"""Random models of many families, and how far engine and trainer are from
transformers. `python tests/families.py` prints the table of bench/RESULTS.md (half an hour),
`python tests/families.py X` the lines of a name or a model_type, supported or not."""
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import part
from settings import changed

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import torch

import data
import dist
import grpo
import model
from batch import Batch, Completion, Sample
from checkpoint import export_model
from errors import SettingsError
from forked import PYTHON
from house import has, kept, module
from rewards import Score
from rollout import Engine, Request
from same_policy import compare_policies
from tools import float64

STATES = tuple(module("parts.states.plug").FAMILIES) if has("states") else ()
ROOT = Path(__file__).parent.parent
HEAT = 0.7  # the temperature
# Two ways to compute one model may differ by so many times what float32 rounds, which each run
# measures: kernels differ from one CPU to the next. Four kernels gave at most 2.9.
ROUNDINGS = 8
ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
PLAIN_ROPE = dict(rope_type="default", rope_theta=10000.0)
WINDOWS = ["sliding_attention", "full_attention"]
# Name: (model_type, what differs from SIZES, what is special)
CASES = kept({
    "Llama": ("llama", dict(tie_word_embeddings=False), ""),
    "Llama, tied": ("llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
                    "such as SmolLM2; here with biases"),
    "Llama, yarn": ("llama", dict(rope_parameters=ROPE), "scaled rotary frequencies"),
    "Mistral": ("mistral", dict(sliding_window=64, head_dim=32), "a sliding window"),
    "Qwen2": ("qwen2", dict(tie_word_embeddings=True), "biases on q, k and v; Qwen2.5 too"),
    "Qwen3": ("qwen3", dict(head_dim=64), "q and k are normalized"),
    "Qwen3.5": ("qwen3_5_text", dict(
        layer_types=["linear_attention", "full_attention"], head_dim=32, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
        "text only; layers with a state"),
    "Phi": ("phi", dict(num_key_value_heads=2), "the head has a bias"),
    "Phi3": ("phi3", {}, "q, k and v are one matrix"),
    "SmolLM3": ("smollm3", dict(no_rope_layers=[1, 0]), "layers without rotation"),
    "Gemma": ("gemma", dict(head_dim=64), "scales its embeddings"),
    "Gemma 2": ("gemma2", dict(head_dim=64, sliding_window=64, query_pre_attn_scalar=40,
                               attn_logit_softcapping=3.0, final_logit_softcapping=3.0),
                "bounds the logits of attention and head by tanh"),
    "Gemma 3": ("gemma3_text", dict(head_dim=64, sliding_window=64, layer_types=WINDOWS),
                "text only; two kinds of layers"),
    "Gemma 4": ("gemma4_text", dict(
        head_dim=32, global_head_dim=64, sliding_window=32, layer_types=WINDOWS,
        vocab_size_per_layer_input=320, hidden_size_per_layer_input=16,
        final_logit_softcapping=1.0), "text only; layers have scales, and embeddings of their own"),
    "VaultGemma": ("vaultgemma", dict(
        head_dim=32, sliding_window=64, query_pre_attn_scalar=40, attn_logit_softcapping=3.0,
        final_logit_softcapping=3.0), "as Gemma 2, with fewer norms"),
    "GLM": ("glm", dict(head_dim=32), "rotates a part of each head"),
    "GLM 4": ("glm4", dict(head_dim=32), "norms before and after attention and MLP"),
    "Granite": ("granite", dict(logits_scaling=3.0, embedding_multiplier=5.0,
                                residual_multiplier=0.3, attention_multiplier=0.1),
                "scales its logits, residuals, attention"),
    "Granite 4": ("granitemoehybrid", dict(
        logits_scaling=3.0, embedding_multiplier=5.0, residual_multiplier=0.3,
        attention_multiplier=0.1, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=2,
        layer_types=["full_attention"] * 2, position_embedding_type="rope",
        shared_intermediate_size=96), "dense, without Mamba"),
    "Cohere": ("cohere", dict(logit_scale=0.3), "scales its logits; attention beside the MLP"),
    "OLMo2": ("olmo2", {}, "norms after attention and MLP"),
    "OLMo 3": ("olmo3", dict(sliding_window=64, layer_types=WINDOWS, rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0), full_attention=ROPE)),
        "two kinds of layers; scaled frequencies in one"),
    "Ministral 3": ("ministral3", dict(head_dim=32, rope_parameters=ROPE | dict(
        original_max_position_embeddings=256, llama_4_scaling_beta=0.1)),
        "scaled rotary frequencies, and queries"),
    "Seed-OSS": ("seed_oss", dict(head_dim=64, attention_out_bias=True, mlp_bias=True),
                 "biases on q, k and v; here on all"),
    "EXAONE 4": ("exaone4", dict(sliding_window=64, layer_types=WINDOWS),
                 "two kinds of layers; one has no rotation"),
    "EXAONE 4, one kind": ("exaone4", dict(sliding_window=None, layer_types=WINDOWS[1:] * 2),
                           "such as EXAONE-4.0-1.2B: all layers rotate"),
    "Hunyuan": ("hunyuan_v1_dense", dict(head_dim=64), "q and k are normalized after rotation"),
    "ERNIE 4.5": ("ernie4_5", dict(head_dim=64), "pairs of neighbours rotate"),
    "Arcee": ("arcee", dict(mlp_bias=True, attention_bias=True), "an MLP without a gate"),
    "CWM": ("cwm", dict(head_dim=64, sliding_window=64, layer_types=WINDOWS, bos_token_id=1),
            "as Llama, with a sliding window"),
    "Jais 2": ("jais2", {}, "norms with a bias, an MLP without a gate"),
    "Mixtral": ("mixtral", dict(num_local_experts=8, sliding_window=64, head_dim=32),
                "experts; a sliding window"),
    "OLMoE": ("olmoe", dict(num_experts=8, num_experts_per_tok=3, num_key_value_heads=2),
              "experts, their weights as they are; q and k are normalized"),
    "Qwen3-MoE": ("qwen3_moe", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                                    head_dim=64, norm_topk_prob=True),
                  "experts; q and k are normalized"),
    "Mellum": ("mellum", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                              head_dim=64, sliding_window=64, layer_types=WINDOWS),
               "experts; two kinds of layers"),
    "GPT-2": ("gpt2", {}, "learned positions; weights are transposed"),
    "GPT-NeoX": ("gpt_neox", dict(num_key_value_heads=2),
                 "such as Pythia; attention beside the MLP"),
})
# Options of config.json, beside those of a family's first case above: (kind, options).
# All three programs compute these alike.
EQUAL = kept([
    ("qwen2", dict(layer_types=WINDOWS[:1] * 2, use_sliding_window=True, sliding_window=64)),
    ("qwen3_moe", dict(mlp_only_layers=[0])), ("qwen3_moe", dict(decoder_sparse_step=2)),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=32)),
    ("mellum", dict(mlp_layer_types=["dense", "sparse"])),
    ("gemma4_text", dict(rope_parameters=dict.fromkeys(WINDOWS, PLAIN_ROPE)))])
# These they do not: one of them leaves an option out, or ends in an error. A model of such a kind,
# or with such an option, may not run.
UNEQUAL = kept([
    *((kind, dict(sliding_window=32)) for kind in (
        "llama", "granite", "ernie4_5", "olmo2", "olmoe", "glm4", "hunyuan_v1_dense", "phi",
        "arcee", "cohere", "gpt_neox", "seed_oss")),
    *((kind, dict(attention_bias=True)) for kind in (
        "gemma", "qwen3", "qwen3_moe", "exaone4", "ministral3", "olmoe")),
    *((kind, dict(rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5))) for kind in (
        "llama", "qwen2", "ernie4_5")),
    *((kind, dict(hidden_act="relu")) for kind in ("llama", "mistral", "phi3", "qwen2")),
    *((kind, dict(hidden_activation="silu")) for kind in ("gemma2", "gemma4_text")),
    *((kind, dict(is_causal=False)) for kind in ("llama", "qwen2", "olmo2")),
    *((kind, dict(tie_word_embeddings=False)) for kind in ("cohere", "gemma2")),
    *(("llama", {name: 0.5}) for name in ("qkv_bias", "bias", "logit_scale", "logits_scaling")),
    ("gemma", dict(final_logit_softcapping=0.5)), ("gemma", dict(hidden_act="silu")),
    ("olmo2", dict(attn_logit_softcapping=0.5)), ("cohere", dict(hidden_act="gelu")),
    ("cohere", dict(rms_norm_eps=0.5)), ("mixtral", dict(hidden_act="gelu")),
    ("gemma4_text", dict(use_bidirectional_attention="all")),
    ("gemma3_text", dict(use_bidirectional_attention=True)),
    ("granite", dict(layer_types=WINDOWS[1:] * 2)),
    ("exaone4", dict(layer_types=WINDOWS[1:] * 2)), ("qwen2", dict(layer_types=WINDOWS[:1] * 2)),
    ("qwen2", dict(dual_chunk_attention_config=dict(chunk_size=64))),
    ("ernie4_5", dict(use_bias=True)), ("olmoe", dict(norm_topk_prob=True)),
    ("granitemoehybrid", dict(layer_types=["mamba", "full_attention"])),
    ("ministral3", dict(rope_parameters=ROPE | dict(  # it shows from 128 tokens on
        original_max_position_embeddings=128, llama_4_scaling_beta=0.1))),
    ("cohere2", dict(sliding_window=32, layer_types=WINDOWS)), ("apertus", {}),
    ("hyperclovax", dict(logits_scaling=3.0)),
    ("lfm2", dict(layer_types=["conv", "full_attention"]))])
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1,
             bos_token_id=None, eos_token_id=2, pad_token_id=0)


def options_of(kind: str) -> dict:
    """Those of the first case of a kind."""
    return next((more for other, more, _ in CASES.values() if other == kind), {})


def make(name: str, folder: str, more: dict | None = None) -> None:
    """A random model of a case, or of a kind with options. No weight is at its usual start. With
    tiny.py's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples import tiny
    kind = name
    if more is None:
        kind, more, _ = CASES[name]
    config = AutoConfig.for_model(kind, **SIZES | {"vocab_size": tiny.VOCAB} | more)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in (*lm.parameters(), *lm.buffers()):  # norms, biases, what files have
            p += 0.1 * torch.randn_like(p)
    lm.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)


def scored(prompts, completions) -> Batch:
    """A batch without rewards."""
    return Batch([Sample(*one, "", Score(0.0, {}, None))
                  for one in zip(prompts, completions, strict=True)])


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> Batch:
    """Completions of a prompt each, without the engine's log-probs."""
    return scored(
        [data.Prompt(i, data.Row(i, "", ids, None, {}, "")) for i, ids in enumerate(prompts)],
        [Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), False)
         for ids in completions])


def trainer_of(folder: str, world, **flags) -> model.Policy:
    """The policy of a run with these flags."""
    args = changed(grpo.Args(model=folder), **flags)
    kinds = model.kinds(args, model.config_of(folder))
    return kinds.policy(model.build(kinds.logprob_model, folder, world, args), world, args)


def engine_of(folder: str, world, policy, tp: int = 1, dtype=torch.float32, rows=()) -> Engine:
    """The engine of a run with this policy."""
    log = SimpleNamespace(time=lambda name: nullcontext(), say=print)
    run = SimpleNamespace(
        world=world, log=log, dtype=dtype, policy=policy, reference=None, critic=None, stateful={},
        args=changed(policy.args, max_num_seqs=64, tp=tp, max_tokens=24),
        inputs=SimpleNamespace(source=folder, tokenizer=None, ends=[2], kv_cache=2**28,
                               plan=SimpleNamespace(longest=256), rows=[*rows], eval_rows=[]))
    return part.extended("engine", Engine, run)(run)


def run_of(world, policy, engine, prompts: list[data.Prompt], dtype=torch.float32, said=None):
    """What same_policy.compare_policies needs of a run. said: its lines."""
    log = SimpleNamespace(say=(said if said is not None else []).append)
    return SimpleNamespace(
        world=world, policy=policy, engine=engine, reference=None, dtype=dtype, log=log,
        inputs=SimpleNamespace(rows=[prompt.row for prompt in prompts], eval_rows=[],
                               reference=None, plan=SimpleNamespace(longest=256)),
        args=SimpleNamespace(seed=0, temperature=HEAT, max_tokens=24,
                             run_args=SimpleNamespace(max_gap=None)))


def two_steps(world, folder: str, engine: bool, **options) -> list[tuple[Batch, torch.Tensor]]:
    """(completions, the trainer's log-probs) before, between and after two updates, which move
    every weight and are exported to FOLDER-1 and FOLDER-2. An engine loads weights three times.
    Two completions of each of three random prompts, which are longer than a window and a cache
    block."""
    rng, policy = np.random.default_rng(0), trainer_of(folder, world, **options)
    rows = [data.Row(i, "", rng.integers(3, 320, 100 + 10 * i).tolist(), None, {}, "")
            for i in (0, 1, 5) for _ in range(2)]
    rows[1::2], found = rows[::2], []
    prompts = [data.Prompt(row.index, row) for row in rows]

    def generate():
        return [Completion(rng.integers(3, 320, 24).astype(np.int32), np.zeros(24, np.float32),
                           False) for _ in rows]

    if engine:
        vllm = engine_of(folder, world, policy)
        requests = [Request(row.prompt_ids, i) for i, row in enumerate(rows)]

        def generate():
            vllm.load(policy)
            return vllm.complete(requests, HEAT)

    for step in range(3):
        batch = scored(prompts, generate())
        ours = batch.score(world, 400, "score", lambda micro: policy.logprobs(micro, HEAT)[0])
        found.append((batch, ours))
        if step < 2:
            update(world, policy, batch)
            export_model(policy, folder, f"{folder}-{step + 1}")
    if engine:
        vllm.close()
    return found


def update(world, policy, batch: Batch) -> None:
    for micro in batch.micros(world, list(range(len(batch.samples))), 400, "update"):
        logprobs, entropy = policy.logprobs(micro, HEAT, True)
        policy.backward((logprobs + 0.1 * entropy).sum() / 100)
    norm = policy.step(3e-3)
    assert 0 < norm < float("inf"), f"the gradient's norm is {norm}"


def engine_logprobs(batch: Batch) -> torch.Tensor:
    """Of the sampled tokens: (M,)."""
    done = [s.completion for s in batch.samples]
    return torch.cat([torch.from_numpy(c.logprobs[c.sampled]) for c in done])


def single_rows(lm, batch: Batch, heat: float = HEAT) -> torch.Tensor:
    """What transformers' own forward gives for each row alone: (M,)."""
    out = []
    for sample in batch.samples:
        completion, sampled = sample.completion.ids, torch.from_numpy(sample.completion.sampled)
        ids, n = torch.tensor([*sample.prompt.row.prompt_ids, *completion]), len(completion)
        logprobs = (lm(ids.view(1, -1)).logits[0] / heat).log_softmax(-1)  # (L, V)
        out.append(logprobs[-n - 1:-1].gather(-1, ids[-n:].unsqueeze(-1)).squeeze(-1)[sampled])
    return torch.cat(out)


@torch.no_grad()
def plain(folder: str, batch: Batch, heat: float = HEAT, dtype=torch.float32) -> torch.Tensor:
    """`single_rows` of the model in a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    if dtype == torch.float64:
        float64.widen(lm)
    return single_rows(lm, batch, heat)


def rounding(folder: str, batch: Batch, heat: float = HEAT) -> float:
    """How far transformers' own float32 is from its float64 here, at most, in nats."""
    return float((plain(folder, batch, heat) - plain(folder, batch, heat, torch.float64)
                  ).abs().max())


def gaps(folder: str, found) -> tuple[float, float, float]:
    """The largest |trainer - transformers|, |engine - trainer| and `rounding` of all steps, in
    nats."""
    each = []
    for where, (batch, ours) in zip((folder, f"{folder}-1", f"{folder}-2"), found, strict=True):
        there = plain(where, batch), engine_logprobs(batch)
        each.append([*(float((ours - theirs).abs().max()) for theirs in there),
                     rounding(where, batch)])
    return tuple(map(max, zip(*each, strict=True)))


PLAIN = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
folder, prompts, adapter = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
llm = LLM(folder, dtype='float32', enforce_eager=True, kv_cache_memory_bytes=2**27,
          max_model_len=256, enable_lora=bool(adapter))
params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, stop_token_ids=[2])
out = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False,
                   lora_request=LoRARequest('trained', 1, adapter) if adapter else None)
print('FOUND', json.dumps([[list(o.token_ids), [p[i].logprob for i, p in zip(
    o.token_ids, o.logprobs)]] for o in (o.outputs[0] for o in out)]))
"""


def plain_vllm(folder: str, prompts: list[list[int]], adapter: str = "") -> list:
    """[[greedy ids, their log-probs], …] of vLLM as a user starts it."""
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([PYTHON, "-c", PLAIN, folder, json.dumps(prompts), adapter], env=env,
                          capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[0].removeprefix("FOUND"))


def with_engine(name: str) -> tuple[float, float, float]:
    """`gaps` of a case, with an engine on each of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        make(name, f"{folder}/model")
        done = subprocess.run(
            [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
             __file__, f"{folder}/model", f"{folder}/out"], cwd=ROOT, text=True,
            capture_output=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{name}: {done.stderr[-30000:]}"
        found = pickle.loads(Path(folder, "out").read_bytes())
        trainer, engine, rounds = gaps(f"{folder}/model", found)
        return trainer, 0.0 if CASES[name][0] in STATES else engine, rounds


def compared(kind: str, options: dict, dtype: str = "float32") -> str:
    """What a run says of such a model before its first step, or with what it ends."""
    with tempfile.TemporaryDirectory() as folder:
        make(kind, folder, options_of(kind) | options)
        done = subprocess.run([PYTHON, __file__, "--compare", folder, dtype], cwd=ROOT, text=True,
                              capture_output=True, timeout=900,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        return done.stdout.strip() or re.findall("^.*Error: .*$", done.stderr, re.M)[-1]


def compare(folder: str, dtype: str, engine: bool = True, world=None) -> str:
    """The comparison of a run, on this rank."""
    world = world or dist.join(120)
    policy, said, draw = trainer_of(folder, world, dtype=dtype), [], np.random.default_rng(0)
    prompts = [data.Prompt(i, data.Row(i, "", draw.integers(3, 320, 60 + 10 * i).tolist(), None, {},
                                       "")) for i in range(8)]
    vllm = engine_of(folder, world, policy, dtype=getattr(torch, dtype)) if engine else None
    run = run_of(world, policy, vllm, prompts, getattr(torch, dtype), said)
    try:
        compare_policies(run)
    except SettingsError as error:
        said.append(str(error))
    return said[0]


def worker(folder: str, out: str) -> None:
    kind = json.loads(Path(folder, "config.json").read_text())["model_type"]
    world = dist.join(120)
    found = two_steps(world, folder, engine=kind not in STATES)
    if world.rank == 0:
        Path(out).write_bytes(pickle.dumps(found))


def names_of(word: str) -> list[str]:
    """The cases that a name or a model_type means. One that nobody tried is a case with its usual
    options."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS
    if word in CASES:
        return [word]
    if found := [name for name, (kind, *_) in CASES.items() if kind == word]:
        return found
    if "CausalLM" not in KINDS.get(word, ""):
        sys.exit(f"error: {word} is neither a causal language model of transformers, such as "
                 f"olmo3, nor one of {', '.join(CASES)}.")
    windows = hasattr(AutoConfig.for_model(word), "sliding_window")
    CASES[word] = word, {"sliding_window": 64} if windows else {}, ""  # shorter than the rows
    return [word]


def row(name: str, trainer: float, engine: float) -> str:
    """A line of the table in bench/RESULTS.md."""
    kind, _, special = CASES[name]
    last = "-" if kind in STATES else f"{engine:.0e}"  # a CPU's vLLM has none
    return f"| {name} | `{kind}` | {special} | {trainer:.0e} | {last} |"


def main(words: list[str]) -> None:
    for name in [name for word in words for name in names_of(word)] or CASES:
        try:
            *found, rounds = with_engine(name)
        except AssertionError as error:
            why = re.findall(r"^(?:\[rank\d\]: *)?((?!torch)\w[\w.]*Error: .*)$", str(error), re.M)
            sys.exit(f"error: {name} cannot run: {why[-1] if why else error}")
        print(row(name, *found), flush=True)
        if max(found) > ROUNDINGS * rounds:
            sys.exit(f"error: {name} differs by more than {ROUNDINGS} times what float32 rounds "
                     f"here ({rounds:.0e} nats), so a run must refuse it.")


if __name__ == "__main__":
    if "--compare" in sys.argv:
        print(compare(*sys.argv[2:]), flush=True)
        os._exit(0)
    if "RANK" in os.environ:
        dist.run(worker, *sys.argv[1:])
    main(sys.argv[1:])
