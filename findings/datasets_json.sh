#!/usr/bin/env bash
# datasets: a JSON column of two kinds.
# Expected: a text stays a text, or the file is refused, as in older versions.
# So: such a column is read as JSON, and each text that is valid JSON by itself is parsed once more.
# (A file whose answers are all texts is read as it is.)
set -euo pipefail
PINS=(datasets==5.2.0)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
export HF_HOME=$FOLDER/hub
python - <<'END'
import json

import datasets

datasets.disable_progress_bars()


def read(rows):
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return datasets.load_dataset("json", data_files="rows.jsonl", split="train").to_list()


answers = ["007", "true", "1.50", "null", 7]
found = [row["answer"] for row in read([{"answer": answer} for answer in answers])]
print(f"answers {answers} are read as {found}")
prompts = read([{"prompt": "12"}, {"prompt": [{"role": "user", "content": "12"}]}])
print("a text prompt \"12\" beside a list of messages is read as", repr(prompts[0]["prompt"]))
texts = [row["answer"] for row in read([{"answer": answer} for answer in answers[:4]])]
print("without the number 7:", texts)
assert found == [7, True, 1.5, None, 7] and texts == answers[:4], "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   datasets==5.2.0
#   answers ['007', 'true', '1.50', 'null', 7] are read as [7, True, 1.5, None, 7]
#   a text prompt "12" beside a list of messages is read as 12
#   without the number 7: ['007', 'true', '1.50', 'null']
