"""What the fork server of ranks.py imports once for all ranks. It must start no thread."""
# ruff: noqa: E402
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import threading

import tqdm

tqdm.tqdm.set_lock(threading.RLock())     # its own is a semaphore, which the fork server would leak
import dist  # noqa: F401, I001  (first: it sets what torch reads)
import torch
import torch._dynamo  # noqa: F401  (FSDP2 imports it at its first forward)
import torch.distributed.device_mesh  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: F401

import grpo  # noqa: F401
from trainer import model  # noqa: F401

with torch.device("meta"):                # what transformers imports when a model is made
    AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1), attn_implementation="sdpa")

gc.freeze()  # a rank does not walk through what it never frees
