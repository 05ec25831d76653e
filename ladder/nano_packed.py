"""nano_packed.py: nano_kl.py with micro-batches of BUDGET tokens, each prompt in them once.

    python ladder/nano_packed.py    or: torchrun --nproc_per_node 2 ladder/nano_packed.py

One step: a vLLM engine samples G completions of each of P prompts, and a function rewards each of
these N = P·G completions. Its advantage is its reward minus the mean reward of its prompt (Dr.
GRPO, arXiv 2503.20783). The policy takes EPOCHS gradient steps on a mean over all tokens. From the
second on it is no longer the policy that sampled. So a token's log-prob is replaced by the ratio
of its probabilities now and then, and beyond 1 +- CLIP it has no gradient (arXiv 1707.06347).
The loss also has KL times an estimate of the KL divergence from the starting model, at each token.
"""
import hashlib
import logging
import os
import sys

# Before the imports, which read them. torchrun sets these. Without it: one rank, any free port (0).
os.environ.update(dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT="0", TORCH_CPP_LOG_LEVEL="ERROR") | os.environ)
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in this process
                  VLLM_CPU_OMP_THREADS_BIND="nobind",  # else all ranks share the same cores
                  VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")  # no compiling: it is slow
logging.captureWarnings(True)  # into the log, which leaves out what is only a warning
logging.disable(logging.WARNING)

import numpy as np
import torch
import torch.distributed as td
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from examples import tiny

STEPS, P, G, SEED = 35, 64, 8, 0  # in each step P prompts, and G completions of each
MAX_PROMPT, MAX_TOKENS = 64, 16  # the longest prompt and the longest completion, in tokens
LR, WARMUP, MAX_NORM = 3e-4, 10, 1.0  # the learning rate rises for WARMUP steps
EPOCHS, CLIP = 2, 0.2  # gradient steps on a rollout; how far a ratio may be from 1
KL = 0.04  # the KL term's factor, beta in GRPO's paper (arXiv 2402.03300)
BUDGET = 1024  # tokens of a micro-batch, at least a prompt and its completion: the memory
RANK, RANKS, LOCAL_RANK = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
GPU = torch.cuda.is_available()
DEVICE, DTYPE = (f"cuda:{LOCAL_RANK}", torch.bfloat16) if GPU else ("cpu", torch.float32)


def reward(text: str, answer: str) -> float:
    """1 for a right completion. For your own task change this, and `rows` in `train`."""
    return float(text.strip() == answer)


def seed_of(position: int, i: int) -> int:
    """Completion i of the run's prompt `position` has one seed, whichever rank samples it."""
    text = repr((SEED, "train", position, i))  # hashed: position + i would repeat seeds
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1  # 63 bits


def logprobs(model, part, prompts: list, replies: dict) -> torch.Tensor:
    """The log-probs of the T tokens of the completions in `part`, one after another: (T,)."""
    tokens, source = [], []  # S tokens; the number of the one that predicts each of the T
    for p in sorted({n // G for n in part}):
        tokens += [(id, at, p, -1) for at, id in enumerate(prompts[p])]
        end = len(tokens) - 1
        for n in (n for n in part if n // G == p):
            source += [end, *range(len(tokens), len(tokens) + len(replies[n]) - 1)]
            tokens += [(id, at, p, n) for at, id in enumerate(replies[n][:-1], len(prompts[p]))]
    ids, at, group, row = torch.tensor(tokens or [(0, 0, 0, 0)]).to(DEVICE).T[:, None]  # (1, S)
    sees = ((group.T == group) & ((row == -1) | (row.T == row))).tril()  # (S, S)
    logits = model(input_ids=ids, position_ids=at, attention_mask=sees[None, None],
                   use_cache=False).logits[0, source].float()  # (T, V)
    chosen = torch.tensor([[id] for n in part for id in replies[n]]).long().to(DEVICE)
    return logits.log_softmax(-1).gather(-1, chosen.view(-1, 1))[:, 0]


def train() -> None:
    if GPU:
        torch.cuda.set_device(DEVICE)
    td.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    folder = tiny.ensure()  # a small model, made on first use
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), tiny.rows(1000, SEED)
    policy, reference = (AutoModelForCausalLM.from_pretrained(  # that token's embedding is trained:
        folder, dtype=torch.float32, pad_token_id=None).to(DEVICE) for _ in range(2))
    for module in (*policy.model.layers, policy, *reference.model.layers, reference):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(DTYPE, torch.float32))
        # Sum the ranks' gradients, no mean: the loss is already divided by all ranks' tokens.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)  # lr: set in each step
    engine = LLM(
        folder, dtype=DTYPE, max_model_len=MAX_PROMPT + MAX_TOKENS, enforce_eager=True,
        distributed_executor_backend="external_launcher",  # in torchrun's ranks: an engine in each
        load_format="dummy",  # random weights: it takes the policy's before each rollout
        gpu_memory_utilization=0.5, kv_cache_memory_bytes=2**28,  # the cache: 2**28 bytes
        max_num_batched_tokens=P * G * MAX_PROMPT)  # else it splits a prompt: seeds fail on CPU
    position = 0  # prompts used so far
    for step in range(STEPS):
        epoch, start = divmod(position, len(rows))
        order = np.random.default_rng([SEED, epoch]).permutation(len(rows))  # alike on all ranks
        batch = [rows[i] for i in order[start:start + P]]  # fewer than P at an epoch's end

        # 1. Rollout: G completions of each prompt. Completion n has prompt n // G.
        # Not named_parameters(): it omits an lm_head tied to the embedding: vLLM's would stay old.
        weights = ((name, w.full_tensor().to(DTYPE)) for name, w in policy.state_dict().items())
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        engine.reset_prefix_cache()  # what it keeps of prompts was computed with old weights
        chats = [[{"role": "user", "content": row["question"]}] for row in batch]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
        N = len(prompts) * G
        mine = range(N * RANK // RANKS, N * (RANK + 1) // RANKS)  # my share of the N completions
        outputs = engine.generate([{"prompt_token_ids": prompts[n // G]} for n in mine], [
            SamplingParams(seed=seed_of(position + n // G, n % G), max_tokens=MAX_TOKENS)
            for n in mine], use_tqdm=False)
        replies = {n: out.outputs[0].token_ids for n, out in zip(mine, outputs, strict=True)}
        position += len(batch)

        # 2. Reward: each rank scores its share. Then it gets the rewards and lengths of all.
        texts = {n: tokenizer.decode(replies[n], skip_special_tokens=True) for n in mine}
        shares = [None] * RANKS
        td.all_gather_object(shares, [
            (reward(texts[n], batch[n // G]["answer"]), len(replies[n])) for n in mine])
        rewards, lengths = torch.tensor(sum(shares, [])).view(-1, G, 2).unbind(-1)  # (P, G) at most

        # 3. Learn. All tokens of a completion have the same advantage.
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()  # N numbers
        old, norms = {}, []  # old[i]: log-probs of micro-batch i by the policy that sampled it
        ref = {}  # and by the starting model
        parts = [[]]  # my share, cut into micro-batches
        for n in mine:
            more = [*parts[-1], n]
            size = sum(len(prompts[p]) for p in {n // G for n in more})
            if size + sum(len(replies[n]) for n in more) > BUDGET:
                parts += [[]]
            parts[-1] += [n]
        td.all_reduce(most := torch.tensor(len(parts)), td.ReduceOp.MAX)
        for i in [*range(most)] * EPOCHS:  # FSDP: each rank must run as many
            part = parts[i] if i < len(parts) else []
            A = torch.tensor([advantages[n] for n in part for _ in replies[n]]).to(DEVICE)  # (T,)
            logp = logprobs(policy, part, prompts, replies)
            if i not in ref:
                with torch.no_grad():
                    ref[i] = logprobs(reference, part, prompts, replies)
            kl = (ref[i] - logp).exp() - 1 + logp - ref[i]  # k3, at least 0 at each token
            ratio = (logp - old.setdefault(i, logp.detach())).exp()  # 1 in the first epoch
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = (KL * kl - torch.min(A * ratio, A * clipped)).sum() / lengths.sum()
            loss.backward()
            if i == most - 1:  # the end of an epoch
                norms += [torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)]
                optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARMUP)
                optimizer.step()
                optimizer.zero_grad()
        norm = sum(norm.full_tensor() for norm in norms) / EPOCHS
        if RANK == 0:
            print(f"step {step + 1}  reward {rewards.mean():.4f}  grad {norm:.7f}", flush=True)
    td.barrier()  # else the first rank to exit could crash the others
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)  # the engine's threads can keep a normal exit waiting


if __name__ == "__main__":
    train() if not sys.argv[1:] else print(__doc__)  # it has no flags
