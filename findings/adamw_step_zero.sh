#!/usr/bin/env bash
# torch: a checkpoint before the first step.
# Expected: get_optimizer_state_dict only reads. A run that saves at step 0 learns as one that does
# not.
# So: it makes AdamW's state by a step with zero gradients, which leaves `step` at 1. The first
# update after it is smaller by a quarter.
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
python - <<'END'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

moved = []
for save in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    if save:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    moved.append((model.weight - before).abs().mean().item())
    steps = int(optimizer.state[model.weight]["step"])
    print(f"saved before: {save}, the update moves a weight by {moved[-1]:.3g}, `step` is {steps}")
print(f"factor: {moved[1] / moved[0]:.3f}")
assert abs(moved[1] / moved[0] - 0.744) < 0.001, "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   saved before: False, the update moves a weight by 0.001, `step` is 1
#   saved before: True, the update moves a weight by 0.000744, `step` is 2
#   factor: 0.744
