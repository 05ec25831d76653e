"""nano.py: reinforcement learning of a language model, the whole loop in one file.

    python nano.py         or, with the same rewards:     torchrun --nproc_per_node 2 nano.py

One step: a vLLM engine samples G completions for each of P prompts, and a function rewards each of
the N = P·G completions. Its advantage is its reward minus the mean reward of its prompt (Dr. GRPO,
arXiv 2503.20783). The policy takes one gradient step on a mean over all tokens. Not here, but in
the GRPO paper (arXiv 2402.03300) and flags of grpo.py: dividing advantages by the group's std and
losses by the completion's length, a KL term, and several clipped updates per rollout.
"""
import hashlib
import logging
import os
import sys

# Set before the imports that read them. torchrun sets these; else: one rank, any free port (0).
os.environ.update(dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT="0", TORCH_CPP_LOG_LEVEL="ERROR") | os.environ)
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in this process
                  VLLM_CPU_OMP_THREADS_BIND="nobind",  # else all ranks share the same cores
                  VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")  # no compiling: it is slow
logging.captureWarnings(True)  # send warnings to the log, where they are turned off
logging.disable(logging.WARNING)

import numpy as np
import torch
import torch.distributed as td
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from examples import tiny

STEPS, P, G, SEED = 35, 64, 8, 0  # each step: P prompts with G completions each
MAX_PROMPT, MAX_TOKENS = 64, 16  # the longest prompt and completion, in tokens
LR, WARMUP, MAX_NORM = 3e-4, 10, 1.0  # the learning rate rises for WARMUP steps
MICROS = 8  # micro-batches per step and rank, at most its completions; more take less memory
RANK, RANKS, LOCAL_RANK = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
GPU = torch.cuda.is_available()
DEVICE, DTYPE = (f"cuda:{LOCAL_RANK}", torch.bfloat16) if GPU else ("cpu", torch.float32)


def reward(text: str, answer: str) -> float:
    """Returns 1 for a right completion. For your own task, change this and `rows` in `train`."""
    return float(text.strip() == answer)


def seed_of(position: int, i: int) -> int:
    """Returns the seed of completion i of the run's prompt `position`, the same on any rank."""
    text = repr((SEED, "train", position, i))  # hashed: position + i would repeat seeds
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1  # 63 bits


def pad(lists: list[list]) -> torch.Tensor:
    """Returns a matrix with one list per row, padded on the right with zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in lists], True).to(DEVICE)


def train() -> None:
    if GPU:
        torch.cuda.set_device(DEVICE)
    td.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    folder = tiny.ensure()  # a small model, built on first use
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), tiny.rows(1000, SEED)
    policy = AutoModelForCausalLM.from_pretrained(  # that token's embedding is trained too:
        folder, dtype=torch.float32, pad_token_id=None).to(DEVICE)
    for module in (*policy.model.layers, policy):  # FSDP gathers one layer's weights at a time
        fully_shard(module, mp_policy=MixedPrecisionPolicy(DTYPE, torch.float32))
        # Sum gradients over ranks, not mean: the loss is already divided by all ranks' tokens.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)  # lr: set in each step
    engine = LLM(
        folder, dtype=DTYPE, max_model_len=MAX_PROMPT + MAX_TOKENS, enforce_eager=True,
        distributed_executor_backend="external_launcher",  # one engine in each of torchrun's ranks
        load_format="dummy",  # random weights: it gets the policy's before each rollout
        gpu_memory_utilization=0.5, kv_cache_memory_bytes=2**28,  # the cache: 2**28 bytes
        max_num_batched_tokens=P * G * MAX_PROMPT)  # else it splits a prompt: seeds fail on CPU
    position = 0  # prompts used so far
    for step in range(STEPS):
        epoch, start = divmod(position, len(rows))
        order = np.random.default_rng([SEED, epoch]).permutation(len(rows))  # same on all ranks
        batch = [rows[i] for i in order[start:start + P]]  # fewer than P at an epoch's end

        # 1. Rollout: G completions for each prompt. Completion n has prompt n // G.
        # Not named_parameters(): it omits an lm_head tied to the embedding; vLLM's would stay old.
        weights = ((name, w.full_tensor().to(DTYPE)) for name, w in policy.state_dict().items())
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        engine.reset_prefix_cache()  # it was computed with the old weights
        chats = [[{"role": "user", "content": row["question"]}] for row in batch]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
        N = len(prompts) * G
        mine = range(N * RANK // RANKS, N * (RANK + 1) // RANKS)  # my share of the N completions
        outputs = engine.generate([{"prompt_token_ids": prompts[n // G]} for n in mine], [
            SamplingParams(seed=seed_of(position + n // G, n % G), max_tokens=MAX_TOKENS)
            for n in mine], use_tqdm=False)
        replies = {n: out.outputs[0].token_ids for n, out in zip(mine, outputs, strict=True)}
        position += len(batch)

        # 2. Reward: each rank scores its share, then gets all rewards and lengths.
        texts = {n: tokenizer.decode(replies[n], skip_special_tokens=True) for n in mine}
        shares = [None] * RANKS
        td.all_gather_object(shares, [
            (reward(texts[n], batch[n // G]["answer"]), len(replies[n])) for n in mine])
        rewards, lengths = torch.tensor(sum(shares, [])).view(-1, G, 2).unbind(-1)  # (P, G) at most

        # 3. Learn. All tokens of a completion have the same advantage.
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()  # N numbers
        for part in (mine[i::MICROS] for i in range(MICROS)):  # FSDP: each rank must run MICROS
            ids = pad([prompts[n // G] + replies[n] for n in part])  # (b, L): the longest has L
            # (b, L), and 0 at tokens that the policy has not chosen: the prompt and the padding.
            A = pad([[0] * len(prompts[n // G]) + [advantages[n]] * len(replies[n]) for n in part])
            # No mask is needed: a token attends to its left, and the padding is on the right.
            logits = policy(input_ids=ids, use_cache=False).logits[:, :-1].float()  # (b, L-1, V)
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # of the next token
            loss = -(A[:, 1:] * logp).sum() / lengths.sum()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM).full_tensor()
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            print(f"step {step + 1}  reward {rewards.mean():.4f}  grad {norm:.7f}", flush=True)
    td.barrier()  # else the first rank to exit could crash the others
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)  # the engine's threads can keep a normal exit waiting


if __name__ == "__main__":
    train() if not sys.argv[1:] else print(__doc__)  # it has no flags
