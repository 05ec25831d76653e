#!/usr/bin/env bash
# transformers: tokenizer.json under a config.json of model_type qwen2.
# Expected: AutoTokenizer cuts a text as tokenizer.json does, above all if tokenizer_config.json
# says PreTrainedTokenizerFast.
# So: the class becomes Qwen2Tokenizer, which puts Qwen2's own pre-tokenizer in the place of the
# file's, without a word. With model_type mistral the file counts.
set -euo pipefail
PINS=(transformers==5.19.0 tokenizers==0.23.3)
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
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.train_from_iterator(["12 + 34 = 46"] * 9, trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
made.save("tokenizer.json")
with open("tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, file)
text = "12 + 34 = 46"
print("tokenizer.json itself:", made.encode(text).tokens)
same = []
for kind in ("mistral", "qwen2"):
    with open("config.json", "w") as file:
        json.dump({"model_type": kind}, file)
    tokenizer = AutoTokenizer.from_pretrained(".")
    print(f"model_type {kind}: {type(tokenizer).__name__}", tokenizer.tokenize(text))
    same.append(tokenizer(text).input_ids == made.encode(text).ids)
assert same == [True, False], "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   tokenizers==0.23.3
#   transformers==5.19.0
#   tokenizer.json itself: ['12', 'Ġ+', 'Ġ34', 'Ġ=', 'Ġ46']
#   model_type mistral: TokenizersBackend ['12', 'Ġ+', 'Ġ34', 'Ġ=', 'Ġ46']
#   model_type qwen2: Qwen2Tokenizer ['1', '2', 'Ġ+', 'Ġ', '3', '4', 'Ġ=', 'Ġ', '4', '6']
