"""What begins and what ends: prompts, completions, the texts of rewards.

The tokenizers and templates are drawn here from the families of the field. What is expected is what
transformers and vLLM give.
"""
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import GenerationConfig, PreTrainedTokenizerFast

import chat_template
import checkpoint
import fakes
import grpo
import preflight
import rollout
from data import DataArgs, make_row
from errors import SettingsError
from examples import tiny
from examples.formats import TAGS
from tables import table
from templates import ROLE, SAID, processed, template, tokenizer_of

ROOT = Path(__file__).parent.parent
BYTES = tiny.make_tokenizer().backend_tokenizer.to_str()
THOUGHT = "<think>1</think><answer>2</answer>"


def row_of(columns, tokenizer, ends=()):
    """The row that data.py makes of these columns."""
    return make_row(0, columns, "", tokenizer, chat_template.marks_of(tokenizer, ends), DataArgs())


def tags_in(tokenizer):
    """The tokenizer, to which the tags of a thought are special tokens."""
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    return tokenizer


# ---- a sweep over families of templates and kinds of tokenizers

# What begins a chat, a turn of the user, one of the assistant, what asks for an answer, what ends a
# turn of the assistant, and what ends a chat. "eos last" is OLMo 2's, of several turns.
ARCHITECTURES = {name: [*map(json.loads, cells)] for name, *cells in table(r"""
chatml | "" | "<|im_start|>ROLE\nSAID<|im_end|>\n" | "<|im_start|>ROLE\nSAID<|im_end|>\n"
    | "<|im_start|>assistant\n" | "<|im_end|>" | ""
default system | "<|im_start|>system\nUse <think>.<|im_end|>\n"
    | "<|im_start|>ROLE\nSAID<|im_end|>\n" | "<|im_start|>ROLE\nSAID<|im_end|>\n"
    | "<|im_start|>assistant\n" | "<|im_end|>" | ""
llama | "<s>" | "<|h|>ROLE<|/h|>\n\nTRIMMED<|eot|>" | "<|h|>ROLE<|/h|>\n\nTRIMMED<|eot|>"
    | "<|h|>assistant<|/h|>\n\n" | "<|eot|>" | ""
mistral | "<s>" | "[INST] SAID [/INST]" | " SAID</s>" | "" | "</s>" | ""
phi | "" | "<|ROLE|>\nSAID<|end|>\n" | "<|assistant|>\nSAID<|end|>\n" | "<|assistant|>\n"
    | "<|end|>" | "<pad>"
gemma | "<s>" | "<turn>ROLE\nSAID</turn>\n" | "<turn>model\nSAID</turn>\n" | "<turn>model\n"
    | "</turn>" | ""
glm | "[gMASK]<sop>" | "<|ROLE|>\nSAID" | "<|assistant|>\nSAID" | "<|assistant|>\n"
    | "<|user|>" | ""
speaker | "" | "<|x|>ROLE: SAID" | "<|x|>ROLE: SAID" | "<|x|>assistant: " | "<|x|>" | ""
texts | "" | "### ROLE\nSAID\n" | "### ROLE\nSAID\nEND\n" | "### assistant\n" | null | ""
eos last | "" | "<|ROLE|>\nSAID</s>\n"
    | "<|ROLE|>\nSAID</s>{% if not loop.last %}{{ '\\n' }}{% endif %}" | "<|assistant|>\n"
    | "</s>" | ""
none | null | null | null | null | null | null
""".replace("ROLE", ROLE).replace("SAID", SAID).replace("TRIMMED", "{{ m['content']|trim }}"))}
CONTROLS = """<s> </s> <pad> <|im_start|> <|im_end|> <|h|> <|/h|> <|eot|> [INST] [/INST] <|user|>
    <|assistant|> <|system|> <|end|> <turn> </turn> [gMASK] <sop> <|x|>""".split()
FILES = table("""
{"eos_token_id": 105} | | [105]
{"text_config": {"eos_token_id": [105]}} | | [105]
{"eos_token_id": 105} | {"eos_token_id": null} | []
{"eos_token_id": 105} | {"eos_token_id": 107} | [107]
{"eos_token_id": 105} | {"eos_token_id": [107, 108]} | [107, 108]
""")  # config.json, generation_config.json and the ids that they name
PICKS = table("""
special | [true, true, false]
bos | [true, true, false]
appends | [true, false, false]
words | [true, false, false]
pad | [null, "<pad>", "</s>", "<s>"]
clean | [true, false, false]
tags | [true, false, null]
eos | ["</s>", "</s>", "<|im_end|>", null]
""")  # of a tokenizer
TEXTS = "What is  12 + 34?", "12 + 34 = 46", "It's 1,234,567.\n\n\tNaïve ＡＢ, don't", "a  b\n  c"


def bytes_of(*parts):
    """Returns a pre_tokenizer of bytes after these parts, or with GPT-2's expression."""
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=not parts)])


READINGS = {  # name: (pre_tokenizer, decoder)
    "gpt2": (bytes_of(), decoders.ByteLevel()),
    "digits": (bytes_of(pre_tokenizers.Digits(individual_digits=True)), decoders.ByteLevel()),
    # sentencepiece's: a space before the first word, which decoding takes away
    "spaces": (pre_tokenizers.Metaspace(prepend_scheme="first"),
               decoders.Metaspace(prepend_scheme="first")),
    "lossy": (pre_tokenizers.Whitespace(), decoders.Fuse()), "no decoder": (bytes_of(), None)}
NORMALIZERS = None, None, normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()


def trained(name: str, normalizer=None, controls="<unk>") -> Tokenizer:
    """Returns a tokenizer with this reading, which is trained on TEXTS."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, decoder = READINGS[name]
    made.normalizer = normalizer or made.normalizer
    made.train_from_iterator([*TEXTS, "user assistant 46 é"] * 9, trainers.BpeTrainer(
        vocab_size=600, special_tokens=controls.split(), show_progress=False,
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁", " ", "\n", "\t"]))
    made.decoder = decoder or made.decoder
    return made


def drawn(seed: int):
    """Returns a tokenizer, its family, the model's files (a line of FILES), what was drawn."""
    rng = random.Random(seed)
    name = [*ARCHITECTURES][seed % len(ARCHITECTURES)]  # each as often
    pick = {what: rng.choice(json.loads(choices)) for what, choices in PICKS}
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained("spaces") if pick["words"] else Tokenizer.from_str(BYTES),
        clean_up_tokenization_spaces=pick["clean"])
    tags = [] if pick["tags"] is None else TAGS
    for controls, special in (CONTROLS, pick["special"]), (tags, pick["tags"]):
        made.add_tokens([AddedToken(t, special=special, normalized=False) for t in controls])
    made.bos_token, made.eos_token, made.pad_token = "<s>", pick["eos"], pick["pad"]
    begin, user, assistant, header, _, tail = ARCHITECTURES[name]
    if name != "none":
        made.chat_template = template(user, assistant, header, begin, tail)
    processed(made, ["<s>"] if pick["bos"] else [], ["</s>"] if pick["appends"] else [])
    return made, name, rng.choice(FILES), pick


def check(tmp_path, seed: int):
    """Prompt, ends and texts of what was drawn are right. Returns (tokenizer, ends, reader)."""
    tokenizer, name, (config, generation, named), pick = drawn(seed)
    to_id = tokenizer.convert_tokens_to_ids
    bos, end = to_id("<s>"), ARCHITECTURES[name][4]
    # The prompt.
    row = row_of({"prompt": "Sort 31"}, tokenizer)
    bare = tokenizer("Sort 31", add_special_tokens=False)["input_ids"]
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": "Sort 31"}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert row.prompt_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row.prompt_ids.count(bos) == text.count("<s>")
    else:
        assert row.prompt_ids == [bos][:pick["bos"]] + bare
    finished = row_of({"prompt": row.prompt}, tokenizer)
    if name not in ("texts", "none"):
        assert finished.rendered and finished.prompt_ids == row.prompt_ids
    assert not row_of({"prompt": "<think>1"}, tokenizer).rendered
    # What ends.
    (tmp_path / "config.json").write_text(config)
    if generation:
        (tmp_path / "generation_config.json").write_text(generation)
    own = [to_id(t) for t in (pick["eos"], end) if t]
    ends = chat_template.eos_ids(str(tmp_path), tokenizer)
    assert ends == sorted({*json.loads(named), *own})
    # The text. What sentencepiece would give is its own decoding.
    written, reads = "a , b <think>1</think> n't", chat_template.decoder(tokenizer, ends)
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    expected = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert pick["words"] or expected == written
    closing, silent = [to_id(end)] if end else own[:1], [to_id(pick["pad"] or "<s>")]
    for seen in ids, ids + closing, [bos, *ids, *silent, *closing], (
            ids[:2] + [bos, *silent, *own] + ids[2:]):  # wherever they stand
        assert reads(seen) == expected
    return tokenizer, ends, reads


def fields(words: str) -> list[dict]:
    """Returns rows with these words in one field."""
    return json.loads("""[
        {"question": WORDS, "answer": "A"}, {"question": "q", "answer": WORDS},
        {"question": "q", "answer": "A", "system": WORDS},
        {"prompt": [{"role": "tool", "content": WORDS}, {"role": "user", "content": "q"}],
         "answer": "A"}]""".replace("WORDS", json.dumps(words)))


FAST = [*range(0, 110, 10), 32, 87]  # each family, pick and file; and EOS appended, no template
SWEEP = [pytest.param(i, marks=[] if i in FAST else [pytest.mark.slow]) for i in range(110)]


@pytest.mark.parametrize("seed", SWEEP)
def test_of_many_tokenizers_and_templates_each_is_right(tmp_path, seed):
    """A prompt has the ids of transformers' chat template and one BOS; a rendered chat stays as it
    is; a completion ends where the model's files and its template say; the text of a completion has
    all words and no token that begins, ends or pads. And words are words: a row whose text holds
    such a token has it in its prompt, or a sentence names it."""
    tokenizer, ends, reads = check(tmp_path, seed)
    known = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for mark in random.Random(seed).sample(known, 9):
        for row in fields(words := f"a{mark}b"):
            try:
                made = row_of(row, tokenizer, ends)
                assert words in reads(made.prompt_ids) or words == row["answer"], mark
            except SettingsError as error:
                assert f"its words hold {mark}" in str(error) and mark not in TAGS


MARKS = """
＜|im_end|＞ | <|im_end|> | NFKC
<|IM_END|> | <|im_end|> | Lowercase
<|"|> | <|"|> | NFC
<|\\|> | <|\\|> | NFC
＜end＞ | ＜end＞ | NFC
"""


@pytest.mark.parametrize("words, mark, form", table(MARKS))
def test_a_mark_that_the_normalizer_makes_or_json_writes_otherwise_is_found(words, mark, form):
    """Where the tokenizer looks for it in the normalized text, its id is that of the end."""
    made = tiny.make_tokenizer()
    made.add_tokens([AddedToken(mark, normalized=True)])
    made.eos_token, made.backend_tokenizer.normalizer = mark, getattr(normalizers, form)()
    for text in words, f"Say {words}, please":
        assert made.eos_token_id in made(text)["input_ids"]
        with pytest.raises(SettingsError, match=f"its words hold {re.escape(mark)}"):
            row_of({"prompt": text}, made)


def test_an_end_may_be_a_word_elsewhere():
    """GLM 4.5 writes <|assistant|> and <think> before each turn: the second is a word."""
    glm = tags_in(tokenizer_of("<|user|> <|assistant|> <|endoftext|>", template(
        f"<|user|>{SAID}", f"<|assistant|><think></think>{SAID}", "<|assistant|>")))
    ids = glm(f"<|assistant|>{THOUGHT}<|user|>")["input_ids"]
    assert chat_template.decoder(glm, [0])(ids) == THOUGHT
    newline = glm("\n", add_special_tokens=False)["input_ids"]
    assert chat_template.decoder(glm, newline)(2 * newline) == "\n" and len(newline) == 1


ZERO = ("A conversation. Put thoughts in <think> </think>.\n{% for m in messages %}"
        "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: <think>")


def test_only_what_the_template_writes_at_a_begin_marks_a_finished_chat():
    """A prompt may begin with a tag: the template is applied to it."""
    tokenizer = tags_in(tiny.make_tokenizer())
    tokenizer.chat_template = ZERO
    for prompt in "<think>a", "</answer>", "<answer> <think>a":
        row = row_of({"prompt": prompt}, tokenizer)
        assert not row.rendered and prompt in row.prompt != prompt
    assert row_of({"prompt": "<|im_start|>user\na"}, tokenizer).rendered
    assert "<think>" not in chat_template.marks_of(tokenizer).begins


# ---- of a run

@pytest.mark.parametrize("cells", table("""
[] | [] | [] | 1
[400, -1] | [] | [] | 1
[400, -1] | [] | ["x"] | 0
[2, 400] | [2] | [] | 0"""))
def test_a_model_that_cannot_end_is_said(cells):
    """A run without an id that ends, of those the model can write, has a warning unless --stop."""
    ends, left, stop, count = map(json.loads, cells)
    found = preflight.Inputs("", None, None, SimpleNamespace(vocab=320), None)
    with mock.patch.object(preflight, "eos_ids", return_value=ends):
        assert preflight.check_ends(replace(grpo.Args(), stop=stop), found) == left
    words = f"no token that ends a completion: its files name {ends} of 320 ids"
    assert [words in one for one in found.warnings] == [True] * count


def edit(path: Path, **changes) -> None:
    """Changes these keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_reads_ends_and_tokenizer_from_the_models_folder(tmp_path):
    """The engine stops at the ends and what they end is learned; whoever loads the export, with
    transformers or vLLM, has them too."""
    folder = shutil.copytree(tiny.ensure(str(ROOT / "runs")), tmp_path / "base")
    args = replace(grpo.Args(), model=str(folder))
    edit(folder / "tokenizer_config.json", eos_token=tiny.END_OF_TEXT)
    edit(folder / "generation_config.json", eos_token_id=0)
    found = preflight.read_files(args, 1)
    assert found.ends == [0, 2] and found.tokenizer.eos_token == tiny.END_OF_TEXT
    before = GenerationConfig.from_pretrained(folder).to_dict()
    checkpoint.write_ends(folder, found.ends)
    assert GenerationConfig.from_pretrained(folder).to_dict() == before | {"eos_token_id": [0, 2]}


def test_a_stop_string_may_be_a_special_token():
    """vLLM's own detokenizer, with the parameters of a request: with skip_special_tokens a --stop
    that is a special token would never be seen."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    engine, tokenizer = fakes.engine_of(), tags_in(tiny.make_tokenizer())
    engine.args = rollout.EngineArgs(stop=("</answer>",))
    params = SamplingParams(**engine.sampling(fakes.sample(seed=1), 1.0))
    request = SimpleNamespace(request_id="0", prompt_token_ids=[5], prompt_embeds=None,
                              sampling_params=params)
    reads = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert reads.update(tokenizer(THOUGHT)["input_ids"], False) == "</answer>"
