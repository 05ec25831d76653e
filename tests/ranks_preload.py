"""What the fork server of ranks.py imports once for all ranks. It must start no thread."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import dist  # noqa: F401  first: it sets what torch reads
import torch.distributed.fsdp  # noqa: F401
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: F401

import grpo  # noqa: F401
import model  # noqa: F401
