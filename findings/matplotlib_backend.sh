#!/usr/bin/env bash
# matplotlib: the backend of a notebook.
# Expected: the variable MPLBACKEND is read where a picture is drawn, so matplotlib.use("Agg") helps
# in a process that a notebook starts (!python), whose kernel has set it.
# So: where matplotlib_inline is missing, `import matplotlib` itself raises ValueError. The variable
# must be another one before the import.
set -euo pipefail
PINS=(matplotlib==3.11.2 numpy==2.3.5)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
cat >draw.py <<'END'
import os
import sys

if "before" in sys.argv:
    os.environ["MPLBACKEND"] = "agg"
try:
    import matplotlib
except ValueError as error:
    print(f"import matplotlib: ValueError: {str(error)[:60]}")
    sys.exit(3)
matplotlib.use("Agg")
from matplotlib.figure import Figure

Figure().savefig("x.png")
print("drawn:", os.path.getsize("x.png") > 0)
END
export MPLBACKEND=module://matplotlib_inline.backend_inline
python draw.py && status=0 || status=$?
[ "$status" = 3 ] || { echo "the behaviour changed: $status" >&2; exit 1; }
python draw.py before

# Seen on 29 November 2026:
#   Python 3.11.7
#   matplotlib==3.11.2
#   numpy==2.3.5
#   import matplotlib: ValueError: Key backend: 'module://matplotlib_inline.backend_inline' is
#   drawn: True
