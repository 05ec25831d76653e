#!/usr/bin/env bash
# torch: flags of the script behind torchrun.
# Expected: what stands behind the script's name is the script's, as with `python script.py`.
# So: torchrun also reads these flags as abbreviations of its own. A script cannot have a flag that
# begins two or more of torchrun's, such as --log: torchrun refuses it before the script starts. An
# abbreviation of one flag, and a full name, reach the script.
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

export OMP_NUM_THREADS=1
echo 'import sys; print("the script got", sys.argv[1:])' > script.py
for flag in --log --standal --log-dir --logger; do
  torchrun --standalone --nproc_per_node 1 --local_addr 127.0.0.1 script.py "$flag" x \
    > out.txt 2>&1 && status=0 || status=$?
  echo "$flag: status $status, $(grep -o "ambiguous option: $flag\|the script got .*" out.txt)"
done | tee all.txt
expected="--log: status 2, ambiguous option: --log
--standal: status 0, the script got ['--standal', 'x']
--log-dir: status 0, the script got ['--log-dir', 'x']
--logger: status 0, the script got ['--logger', 'x']"
[ "$(cat all.txt)" = "$expected" ] || { echo "the behaviour changed" >&2; exit 1; }

# Seen on 29 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   --log: status 2, ambiguous option: --log
#   --standal: status 0, the script got ['--standal', 'x']
#   --log-dir: status 0, the script got ['--log-dir', 'x']
#   --logger: status 0, the script got ['--logger', 'x']
