#!/usr/bin/env bash
# torchrun: a signal that Slurm sends before the time limit (sbatch --signal=USR1@60).
# Expected: torchrun passes SIGUSR1 on to its workers, as it does SIGTERM, or ignores it.
# So: torchrun itself dies of it (status 138), and its workers go on without it.
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
cat >work.py <<'END'
import os
import time
from pathlib import Path

Path("pid").write_text(str(os.getpid()))
for _ in range(240):
    time.sleep(0.25)
END
torchrun --nproc_per_node 1 work.py 2>log.txt &
launcher=$!
for _ in $(seq 240); do [ -s pid ] && break; sleep 0.25; done
worker=$(cat pid)
sleep 1
kill -USR1 "$launcher"
{ wait "$launcher" && status=0 || status=$?; } 2>/dev/null
sleep 3
kill -0 "$worker" && alive=yes || alive=no
echo "torchrun ended with $status; its worker runs on: $alive"
[ "$alive" = no ] || kill "$worker"
[ "$status $alive" = "138 yes" ] || { echo "the behaviour changed" >&2; exit 1; }

# Seen on 29 November 2026:
#   Python 3.11.7
#   numpy==2.3.5
#   torch==2.13.0+cpu
#   torchrun ended with 138; its worker runs on: yes
