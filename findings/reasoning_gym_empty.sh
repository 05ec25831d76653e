#!/usr/bin/env bash
# reasoning-gym: scores of an empty text, and of the row's own answer.
# Expected: an empty text has 0 everywhere, and the row's `answer` has 1.
# So: twelve data sets pay the empty text, and in five `answer` is None, which their scorer gives 0.
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
from reasoning_gym.factory import DATASETS

paid, silent = {}, []
for name in sorted(set(DATASETS) - {"composite"}):
    data = reasoning_gym.create_dataset(name, seed=0, size=1)
    row = data[0]
    if score := data.score_answer("", row):
        paid[name] = score
    if row["answer"] is None:
        silent.append((name, data.score_answer(None, row)))
print(f"of {len(DATASETS) - 1} data sets, {len(paid)} pay an empty text:")
print(*(f"  {score:<5g}{name}" for name, score in paid.items()), sep="\n")
print("the answer is None in:", *silent)
assert len(paid) == 12 and len(silent) == 5, "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   reasoning_gym==0.1.25
#   .of 105 data sets, 12 pay an empty text:
#     0.01 advanced_geometry
#     0.05 arc_agi
#     0.01 color_cube_rotation
#     0.01 countdown
#     0.01 emoji_mystery
#     0.01 fraction_simplification
#     0.01 power_function
#     0.01 prime_factorization
#     0.01 puzzle24
#     0.05 rearc
#     0.01 rubiks_cube
#     0.05 sentence_reordering
#   the answer is None in: ('boxnet', 0.0) ('graph_color', 0.0) ('propositional_logic', 0.0)
#     ('rubiks_cube', 0.0) ('rush_hour', 0.0)
