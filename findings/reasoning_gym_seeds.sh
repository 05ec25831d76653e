#!/usr/bin/env bash
# reasoning-gym: two seeds share rows.
# Expected: seed 0 for training and seed 500 for the evaluation are different rows.
# So: row i of seed s is made from s + i, so rows 500 … 999 of seed 0 are rows 0 … 499 of seed 500.
set -euo pipefail
PINS=(reasoning_gym==0.1.25)
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
import reasoning_gym

for name in ("chain_sum", "knights_knaves", "countdown"):
    train = [row["question"] for row in reasoning_gym.create_dataset(name, seed=0, size=1000)]
    held_out = [row["question"] for row in reasoning_gym.create_dataset(name, seed=500, size=100)]
    shared = sum(question in train for question in held_out)
    print(f"{name}: {shared} of {len(held_out)} held-out questions are training questions")
    assert train[500:600] == held_out, "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   reasoning_gym==0.1.25
#   chain_sum: 100 of 100 held-out questions are training questions
#   knights_knaves: 100 of 100 held-out questions are training questions
#   countdown: 100 of 100 held-out questions are training questions
