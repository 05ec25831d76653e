#!/usr/bin/env bash
# torch: the infinity norm of gradients under FSDP2.
# Expected: clip_grad_norm_ with norm_type=inf returns the largest gradient of the model on each
# rank, as it returns the whole 2-norm.
# So: its .item() is the largest gradient of this rank's shard: it is a DTensor whose placement is
# Partial(max). full_tensor() is right. The 2-norm is whole in both ways.
set -euo pipefail
PINS=(torch==2.13.0 numpy==2.3.5)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
cat >norms.py <<'END'
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4, bias=False)
with torch.no_grad():
    model.weight.copy_(torch.arange(16.0).view(4, 4))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
(model(torch.ones(1, 4)) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
found = {}
for kind in 2.0, float("inf"):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=kind)
    found[kind] = norm.item(), norm.full_tensor().item()
lines = [None, None]
dist.all_gather_object(lines, found)
if rank == 0:
    for kind in found:
        items, wholes = zip(*(line[kind] for line in lines), strict=True)
        print(f"norm {kind:g}: item() on two ranks", *(f"{x:g}" for x in items), "full_tensor()",
              *(f"{x:g}" for x in wholes))
    assert items == (2, 4) and wholes == (4, 4), "the behaviour changed"
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 norms.py 2>log.txt || { cat log.txt >&2; exit 1; }

# Seen on 29 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   norm 2: item() on two ranks 10.9545 10.9545 full_tensor() 10.9545 10.9545
#   norm inf: item() on two ranks 2 4 full_tensor() 4 4
