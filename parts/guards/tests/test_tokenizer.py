"""The tokenizer of a run is the folder's tokenizer.json, or a sentence shows where it is not.

The tokenizers are drawn from the families of the field. What is expected is what the library
`tokenizers` gives.
"""
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import grpo
import preflight
from errors import SettingsError
from examples import tiny
from parts.guards.tokenizer import check_tokenizer
from test_ends import NORMALIZERS, READINGS, TEXTS, edit, row_of, trained

TYPES = "qwen2 qwen3 llama mistral gpt_neox gemma2 phi3".split()  # of models
CLASSES = [None, *"""PreTrainedTokenizerFast TokenizersBackend LlamaTokenizerFast GemmaTokenizer
    Qwen2TokenizerFast GPT2TokenizerFast CohereTokenizerFast""".split()]


def read(folder: Path, config: dict) -> None:
    """A run reads TEXTS with this tokenizer_config.json as its tokenizer.json does."""
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": tiny.END, "chat_template": tiny.CHATML} | config))
    tokenizer = preflight.load_tokenizer("m", str(folder))
    rows = [row_of({"prompt": text, "answer": "4"}, tokenizer) for text in TEXTS]
    check_tokenizer(tokenizer, str(folder), rows)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row in rows:
        ids = own.encode(row.prompt, add_special_tokens=False).ids
        back = own.decode(ids, skip_special_tokens=False)
        assert row.prompt_ids == ids and tokenizer.decode(ids) == back
        right = own.normalizer.normalize_str(row.prompt) if own.normalizer else row.prompt
        assert back.split() == right.split()


def outcome(folder: Path, seed: int) -> str:
    """Draws a folder, which is read as its tokenizer.json, or refused. With what the sentence names
    it is read, unless the tokenizer.json itself cannot write what it reads."""
    rng = random.Random(seed)
    kind, name, reading = TYPES[seed % len(TYPES)], rng.choice(CLASSES), rng.choice([*READINGS])
    config, broken = {"tokenizer_class": name} if name else {}, reading in ("lossy", "no decoder")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    controls = "<unk> <s> </s> <|endoftext|> <|im_start|> <|im_end|> <pad>"
    trained(reading, rng.choice(NORMALIZERS), controls).save(str(folder / "tokenizer.json"))
    try:
        read(folder, config)
        return "read"
    except SettingsError as error:
        said = str(error)
    edit = re.search(r"reads .* as \[.*\] and writes .* which reads \[.*\] and writes .* Would "
                     r"work: (\"tokenizer_class.*) in its tokenizer_config.json", said)
    if not edit:
        assert broken or "no tokenizer that" in said, (kind, name, reading, said)
        return "refused"
    config |= json.loads(f"{{{edit[1]}}}")
    if broken:
        with pytest.raises(SettingsError, match="Would work: the tokenizer.json with which"):
            read(folder, config)
    else:
        read(folder, config)
    return "edited"


@pytest.mark.parametrize("seeds", [21, pytest.param(210, marks=pytest.mark.slow)])
def test_a_tokenizer_is_the_folders_tokenizer_json_or_a_sentence_shows_both(tmp_path, seeds):
    """For many a tokenizer_class transformers takes another pre_tokenizer than the file's."""
    assert {outcome(tmp_path, seed) for seed in range(seeds)} >= {"read", "edited"}


def test_a_run_refuses_a_tokenizer_that_is_not_tokenizer_json(tmp_path):
    """By what its decoder writes."""
    folder = shutil.copytree(tiny.ensure("runs"), tmp_path / "base")
    args = replace(grpo.Args(), model=str(folder))
    preflight.read_files(args, 1)
    edit(folder / "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(SettingsError, match="tokenizer.json reads .* Would work: "):
        preflight.read_files(args, 1)
