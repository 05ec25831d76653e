"""Random models of every family in model.FAMILIES, and how far engine and trainer are from
transformers. `python tests/families.py` prints the table of docs/families.md (10 minutes)."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import dist  # isort: skip  (it sets what torch reads)
import torch

import data
import model
from batch import Batch, Sample
from rewards import Score

LONG = dict(max_position_embeddings=512)
ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
# Name: (model_type, what differs from the defaults of its config and from SIZES)
CASES = {
    "llama": ("llama", dict(tie_word_embeddings=False)),
    "llama, tied, biases": (
        "llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama, yarn": ("llama", dict(rope_parameters=ROPE)),
    "mistral, window": ("mistral", dict(sliding_window=64, head_dim=32)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=64)),
    "phi3": ("phi3", {}),
    "phi": ("phi", dict(num_key_value_heads=2)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0])),
    "gemma": ("gemma", dict(head_dim=64)),
    "gemma2": ("gemma2", dict(head_dim=64, sliding_window=64, query_pre_attn_scalar=40,
                              attn_logit_softcapping=3.0, final_logit_softcapping=3.0)),
    "gemma3_text": ("gemma3_text", dict(head_dim=64, sliding_window=64, layer_types=[
        "sliding_attention", "full_attention"])),
    "glm": ("glm", dict(head_dim=32)),
    "granite": ("granite", dict(logits_scaling=3.0, embedding_multiplier=5.0,
                                residual_multiplier=0.3, attention_multiplier=0.1)),
    "cohere": ("cohere", dict(logit_scale=0.3, use_qk_norm=False)),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
}
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1,
             bos_token_id=None, eos_token_id=2, pad_token_id=0)


def make(name: str, folder: str) -> None:
    """A random model of a case, no weight at its usual start, with tiny.py's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples import tiny
    kind, more = CASES[name]
    config = AutoConfig.for_model(kind, **SIZES | {"vocab_size": tiny.VOCAB} | more)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in lm.parameters():  # norms and biases too
            p += 0.1 * torch.randn_like(p)
    lm.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)


def samples(vocab: int, tokens: int) -> list[Sample]:
    """Six completions of random tokens, longer than a window."""
    from batch import Completion
    import numpy as np
    rng, made = np.random.default_rng(0), []
    for i in range(6):
        ids = rng.integers(3, vocab, 90 + 10 * i).tolist()
        completion = Completion(rng.integers(3, vocab, tokens).astype(np.int32),
                                np.zeros(tokens, np.float32), False)
        made.append(Sample(data.Prompt(i, data.Row(i, "", ids, None, {}, "")), completion, "",
                           Score(0.0, {}, None)))
    return made


def scored(world, policy, batch: Batch) -> torch.Tensor:
    """The trainer's log-probs (N, T)."""
    return batch.score(world, 400, "score", lambda micro: policy.logprobs(micro, 0.7)[0])


def plain(folder: str, batch: Batch) -> torch.Tensor:
    """What transformers' own forward gives for each row alone."""
    from transformers import AutoModelForCausalLM
    lm, out = None, torch.zeros(batch.present.shape)
    config = model.config_of(folder)
    eager = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=eager)
    for i, ids in enumerate(batch.sequences):
        ids, n = torch.as_tensor(ids).long(), int(batch.lengths[i])
        with torch.no_grad():
            logps = (lm(ids.view(1, -1)).logits[0].float() / 0.7).log_softmax(-1)  # (L, V)
        out[i, :n] = logps[-n - 1:-1].gather(-1, ids[-n:].unsqueeze(-1)).squeeze(-1)
    return out


def largest(a, b, present) -> float:
    return float((a - b).abs()[present].max())


def learn(world, policy, batch: Batch) -> None:
    """One step that moves every weight."""
    for micro in batch.micros(world, list(range(len(batch.sequences))), 400, "update"):
        logprobs, entropy = policy.logprobs(micro, 0.7, "grad")
        weight = micro.present * bool(micro.rows)
        policy.backward(((logprobs + 0.1 * entropy) * weight).sum() / 100)
    assert policy.step(3e-3) > 0


def compare(world, folder: str, engine: bool, **options) -> list[dict]:
    """The largest gaps in nats, before and after an update."""
    weights = model.ModelArgs(**options)
    policy = model.Policy(model.build(model.LogprobModel, folder, world, weights), world, weights,
                          model.OptimizerArgs())
    batch, found = Batch(samples(model.config_of(folder).vocab_size, 24)), []
    if engine:
        started, requests = start_engine(folder, world, policy, batch)
    for step in range(2):
        here = folder if step == 0 else f"{folder}-{step}"
        if step:
            learn(world, policy, batch)
            policy.export(folder, here)
        ours = scored(world, policy, batch)
        gaps = {"transformers": largest(ours, plain(here, batch), batch.present)}
        if engine:
            from rollout import Request  # noqa: F401
            started.load(policy.weights(started.dtype))
            done = world.gather(started.generate(started.mine(requests), 0.7))
            theirs = Batch([Sample(s.prompt, c, "", s.score)
                            for s, c in zip(samples(320, 1), done, strict=True)])
            gaps["engine"] = largest(scored(world, policy, theirs), theirs.engine_logprobs,
                                     theirs.present)
        found.append(gaps)
    if engine:
        started.close()
    return found


def start_engine(folder, world, policy, batch):
    from contextlib import nullcontext

    from rollout import Engine, EngineArgs, Request, hash_seed
    log = SimpleNamespace(phase=lambda name: nullcontext())
    engine = Engine(folder, world, EngineArgs(max_num_seqs=8), dtype=torch.float32, max_len=256,
                    max_tokens=24, eos_ids=[2], seed=0, kv_cache=2**28, log=log,
                    trained=[policy], tokenizer=None)
    requests = [Request(s.prompt.row.prompt_ids, hash_seed(0, i))
                for i, s in enumerate(samples(320, 1))]
    return engine, requests


def worker(folder: str, out: str) -> None:
    world = dist.join(120)
    gaps = compare(world, folder, engine=False) if out == "-" else None
    gaps = compare(world, folder, engine=True)
    if world.rank == 0:
        Path(out).write_text(json.dumps(gaps))


def with_engine(name: str) -> list[dict]:
    """`compare` of a case on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        make(name, f"{folder}/model")
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
             __file__, f"{folder}/model", f"{folder}/out"], cwd=ROOT, text=True,
            capture_output=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"})
        out = Path(folder, "out")
        if not out.exists():
            raise AssertionError(done.stderr[-6000:])
        return json.loads(out.read_text())


if __name__ == "__main__":
    if len(sys.argv) == 3:
        dist.run(worker, *sys.argv[1:])
    for name in sys.argv[1:] or CASES:
        try:
            print(name, with_engine(name), flush=True)
        except AssertionError as error:
            print(name, error, flush=True)
