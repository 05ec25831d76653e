#!/usr/bin/env bash
# math-verify: numbers as Python prints them, and the minus sign of Unicode.
# Expected: 12.000000000000002, what Python prints for a sum that should be 12, is 12 within the six
# digits that the library rounds to. And −5 with U+2212 is -5, since in a box it is.
# So: a float is never equal to a whole number unless it is exact, though it is to another float or
# to a fraction; and in plain text −5 is not read at all.
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

seen = []
for gold, answer in (("$12$", "$12.000000000000002$"), ("$1000$", "$999.9999999999999$"),
                     ("$12$", "$12.0$"), ("$0.3$", "$0.30000000000000004$"),
                     ("$-5$", "\\boxed{\u22125}"), ("$-5$", "The answer is \u22125."),
                     ("$-5$", "The answer is -5.")):
    seen.append(verify(parse(gold), parse(answer)))
    print(f"gold {gold}, answer {answer}: {seen[-1]}")
assert seen == [False, False, True, True, True, False, True], "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   antlr4-python3-runtime==4.13.2
#   latex2sympy2_extended==1.11.0
#   math-verify==0.9.0
#   sympy==1.14.0
#   gold $12$, answer $12.000000000000002$: False
#   gold $1000$, answer $999.9999999999999$: False
#   gold $12$, answer $12.0$: True
#   gold $0.3$, answer $0.30000000000000004$: True
#   gold $-5$, answer \boxed{−5}: True
#   gold $-5$, answer The answer is −5.: False
#   gold $-5$, answer The answer is -5.: True
