#!/usr/bin/env bash
# transformers and FSDP2: save_pretrained of a sharded model.
# Expected: it gathers the weights, since all ranks call it and is_main_process says who writes.
# So: rank 0 raises, rank 1 returns as if all were well, and the folder has a config.json and no
# weights. A full state dict (get_model_state_dict) given as state_dict= is saved as it should be.
set -euo pipefail
PINS=(torch==2.13.0 transformers==5.19.0 numpy==2.3.5)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
cat >save.py <<'END'
import os

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

dist.init_process_group("gloo")
rank = dist.get_rank()
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False))
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
fully_shard(model, mesh=mesh)
said = "returned"
try:
    model.save_pretrained("plain", is_main_process=rank == 0)
except Exception as error:
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
said = [None, said] if rank else [said, None]
all_said = [None, None]
dist.all_gather_object(all_said, said[rank])
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=options)
if rank == 0:
    print(*(f"rank {i}: {text}" for i, text in enumerate(all_said)), sep="\n")
    print("save_pretrained(FOLDER):", sorted(os.listdir("plain")))
    model.save_pretrained("full", state_dict=full)
    print("save_pretrained(FOLDER, state_dict=FULL):", sorted(os.listdir("full")))
    assert all_said[0].startswith("RuntimeError") and all_said[1] == "returned"
    assert "model.safetensors" not in os.listdir("plain")
    assert "model.safetensors" in os.listdir("full")
dist.barrier()
dist.destroy_process_group()
END
torchrun --nproc_per_node 2 save.py 2>log.txt || { cat log.txt >&2; exit 1; }

# Seen on 28 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   rank 0: RuntimeError: Attempted to access the data pointer on an invalid python storage.
#   rank 1: returned
#   save_pretrained(FOLDER): ['config.json', 'generation_config.json']
#   save_pretrained(FOLDER, state_dict=FULL): ['config.json', 'generation_config.json',
#     'model.safetensors']
