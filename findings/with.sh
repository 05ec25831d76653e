# `source with.sh PIN...` makes a temporary folder with a virtual environment in it, installs the
# pins, prints their versions, and goes into the folder. It is deleted at the end.
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
cd "$FOLDER"
pip install --quiet --no-compile "$@" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${@%%==*}")"
