#!/usr/bin/env bash
# transformers: a chat template with strftime_now, which writes the date.
# Expected: a function given to apply_chat_template takes the place of transformers' own of that
# name, so a template writes the same date whenever it is rendered.
# So: to 5.22 it does. From 5.23 on the template gets the text "<builtin_function_or_method>", which
# it cannot call. Without the argument the date is that of today.
set -euo pipefail
PINS=(transformers==5.22.0 tokenizers==0.23.3 jinja2==3.1.6)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
cat > show.py <<'END'
import sys
from datetime import datetime

import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
clock = datetime(2024, 2, 3).strftime


def text(**given) -> str:
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello"}], tokenize=False, **given)
    except TypeError as error:
        return f"TypeError: {error}"


given = text(strftime_now=clock)
print(f"transformers {transformers.__version__}: {given}")
assert given == sys.argv[1], "the behaviour changed"
assert text() != "03 Feb 2024: hello"
# What works in both: a macro of that name, and texts.
tokenizer.chat_template = ("{% macro strftime_now(form) %}{{ dates[form] }}{% endmacro %}\n"
                           + tokenizer.chat_template)
assert text(dates={"%d %b %Y": clock("%d %b %Y")}) == "03 Feb 2024: hello"
END
python show.py "03 Feb 2024: hello"
pip install --quiet --no-compile transformers==5.24.0
python show.py "TypeError: 'str' object is not callable"

# Seen on 28 November 2026:
#   Python 3.11.7
#   Jinja2==3.1.6
#   tokenizers==0.23.3
#   transformers==5.22.0
#   transformers 5.22.0: 03 Feb 2024: hello
#   transformers 5.24.0: TypeError: 'str' object is not callable
