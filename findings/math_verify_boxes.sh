#!/usr/bin/env bash
# math-verify: two boxes with few words between them are read as one set.
# Expected: the last \boxed{} is the answer, so a completion that corrects itself is paid for it.
# So: it is paid for neither of the two. Where each box stands in $, the last one counts.
set -euo pipefail
PINS=(math-verify==0.9.0 antlr4-python3-runtime==4.13.2 latex2sympy2_extended==1.11.0 sympy==1.14.0)
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
from math_verify import parse, verify

paid = []
for text in (r"\boxed{12}. But this sum is wrong, it must be \boxed{13}",
             r"$\boxed{12}$. But this sum is wrong, it must be $\boxed{13}$"):
    answer = parse(text)
    paid.append([verify(parse(gold), answer) for gold in ("$12$", "$13$")])
    print(f"{text}\n  is read as {answer[0]}; right for the gold 12, for 13: {paid[-1]}")
assert paid == [[False, False], [False, True]], "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   antlr4-python3-runtime==4.13.2
#   latex2sympy2_extended==1.11.0
#   math-verify==0.9.0
#   sympy==1.14.0
#   \boxed{12}. But this sum is wrong, it must be \boxed{13}
#     is read as {12, 13}; right for the gold 12, for 13: [False, False]
#   $\boxed{12}$. But this sum is wrong, it must be $\boxed{13}$
#     is read as 13; right for the gold 12, for 13: [False, True]
