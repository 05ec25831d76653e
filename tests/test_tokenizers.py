"""One reading of a text: the tokenizer of a run is the folder's tokenizer.json, or a sentence shows
the text of which it is not. What is expected is what the library `tokenizers` reads."""
import json
import random
import re
import shutil

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo
import inputs
import rewards
from errors import SettingsError
from examples.tiny import CHATML
from settings import changed

SIZES = dict(vocab_size=640, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
             pad_token_id=None, eos_token_id=5, bos_token_id=1)
TYPES = "qwen2", "qwen3", "llama", "mistral", "gpt_neox", "gemma2", "phi3"  # of models
CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast",
           "Qwen2TokenizerFast", "GPT2TokenizerFast", "GemmaTokenizer", "CohereTokenizerFast")
CONTROLS = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEXTS = "What is  12 + 34?", "12 + 34 = 46", "It's 1,234,567.\n\n\tNaïve ＡＢ, don't", "a  b\n  c"


def bytes_of(*parts):
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=not parts)])


# name: (pre_tokenizer, decoder)
PIECES = {
    "gpt2": (bytes_of(), decoders.ByteLevel()),
    "digits": (bytes_of(pre_tokenizers.Digits(individual_digits=True)), decoders.ByteLevel()),
    "threes": (bytes_of(pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"), "isolated")),
               decoders.ByteLevel()),
    "spaces": (pre_tokenizers.Metaspace(prepend_scheme="first"),
               decoders.Metaspace(prepend_scheme="first")),
    "lossy": (pre_tokenizers.Whitespace(), decoders.Fuse()), "no decoder": (bytes_of(), None)}
NORMALIZERS = None, None, normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()


def tokenizer_of(pieces: str, normalizer) -> Tokenizer:
    made, words = Tokenizer(models.BPE(unk_token="<unk>")), [*TEXTS, "user assistant 46 é"] * 9
    made.pre_tokenizer, decoder = PIECES[pieces]
    made.normalizer = normalizer or made.normalizer
    made.train_from_iterator(words, trainers.BpeTrainer(
        vocab_size=600, special_tokens=CONTROLS, show_progress=False,
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁", " ", "\n", "\t"]))
    made.decoder = decoder or made.decoder
    return made


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A folder with a model of this type, and these tokenizer and tokenizer_config.json."""
    place = tmp_path_factory.mktemp("models")

    def made(kind: str, tokenizer: Tokenizer, **config) -> str:
        if not (place / kind).exists():
            lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
            lm.save_pretrained(place / kind)
        folder = shutil.copytree(place / kind, place / f"{kind} of a run", dirs_exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(
            {"eos_token": "<|im_end|>", "chat_template": CHATML} | config))
        return str(folder)

    return made


@pytest.fixture
def read(tmp_path, monkeypatch):
    """What a run reads of TEXTS with a model's folder."""
    monkeypatch.setattr(rewards, "check", lambda names, args: ([], []))  # without processes
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "4"}) + "\n" for text in TEXTS))
    return lambda folder: inputs.read_files(changed(grpo.Args(), model=folder, data=str(path)), 1)


def check(make, read, seed: int) -> str:
    """A folder that is drawn is read as its tokenizer.json, or it is refused. With what the
    sentence names it is read."""
    rng = random.Random(seed)
    kind, name, pieces = TYPES[seed % len(TYPES)], rng.choice(CLASSES), rng.choice([*PIECES])
    own, drawn = tokenizer_of(pieces, rng.choice(NORMALIZERS)), (kind, name, pieces, seed)
    config = {"tokenizer_class": name} if name else {}
    try:
        found = read(make(kind, own, **config))
    except SettingsError as error:
        said = str(error)
    else:
        for row in found.rows:
            ids = own.encode(row.prompt, add_special_tokens=False).ids
            back = own.decode(ids, skip_special_tokens=False)
            assert row.prompt_ids == ids and found.tokenizer.decode(ids) == back, drawn
            right = own.normalizer.normalize_str(row.prompt) if own.normalizer else row.prompt
            assert back.split() == right.split(), drawn
        return "read"
    edit = re.search(r"Would work: (\"tokenizer_class.*) in its tokenizer_config.json", said)
    if not edit:
        assert pieces in ("lossy", "no decoder") or "no tokenizer that" in said, (drawn, said)
        return "refused"
    assert re.search(r"reads .* as \[.*\] and writes .* which reads \[.*\] and writes", said), said
    edited = make(kind, own, **config | json.loads(f"{{{edit[1]}}}"))
    if pieces in ("lossy", "no decoder"):
        with pytest.raises(SettingsError, match="Would work: the tokenizer.json with which"):
            read(edited)
    else:
        assert read(edited).rows[0].prompt_ids == own.encode(
            found_prompt(edited), add_special_tokens=False).ids, drawn
    return "edited"


def found_prompt(folder: str) -> str:
    return PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": TEXTS[0]}], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow)
                                       for i in range(1, 10))])
def test_a_tokenizer_is_the_folders_tokenizer_json_or_a_sentence_shows_both(make, read, part):
    assert {check(make, read, seed) for seed in range(21 * part, 21 * part + 21)} >= {
        "read", "edited"}
