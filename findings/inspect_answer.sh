#!/usr/bin/env bash
# inspect-ai: answers in Markdown and LaTeX.
# Expected: answer("letter") reads "ANSWER: **C**", and match(numeric=True) reads \boxed{42}, as
# match() does.
# So: neither is right for it. Stars around the whole line are no problem.
set -euo pipefail
PINS=(inspect_ai==0.3.285)
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
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, answer, match
from inspect_ai.solver import TaskState


def judge(scorer, completion, target):
    output = ModelOutput.from_content("model", completion)
    state = TaskState(model="none/model", sample_id=1, epoch=1, input="?", messages=[],
                      output=output)
    return asyncio.run(scorer(state, Target(target))).value


seen = []
for name, scorer, completion, target in (
        ('answer("letter")', answer("letter"), "ANSWER: C", "C"),
        ('answer("letter")', answer("letter"), "**ANSWER: C**", "C"),
        ('answer("letter")', answer("letter"), "ANSWER: **C**", "C"),
        ("match()", match(), r"It is \boxed{42}", "42"),
        ("match(numeric=True)", match(numeric=True), r"It is \boxed{42}", "42"),
        ("match(numeric=True)", match(numeric=True), "It is **42**", "42")):
    seen.append(judge(scorer, completion, target))
    print(f"{name} of {completion!r} for {target!r}: {seen[-1]}")
assert seen == ["C", "C", "I", "C", "I", "C"], "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   inspect_ai==0.3.285
#   answer("letter") of 'ANSWER: C' for 'C': C
#   answer("letter") of '**ANSWER: C**' for 'C': C
#   answer("letter") of 'ANSWER: **C**' for 'C': I
#   match() of 'It is \\boxed{42}' for '42': C
#   match(numeric=True) of 'It is \\boxed{42}' for '42': I
#   match(numeric=True) of 'It is **42**' for '42': C
