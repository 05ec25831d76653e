"""What begins and what ends: prompts, completions, the texts of rewards. The
tokenizers are made here; what is expected is what transformers and vLLM give."""
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

import checkpoint
import grpo
import inputs
import texts
from data import DataArgs, make_row
from errors import SettingsError
from examples import tiny
from examples.formats import format_tags
from settings import changed
from templates import ROLE, SAID, template, tokenizer_of

ROOT = Path(__file__).parent.parent
BYTES = tiny.make_tokenizer().backend_tokenizer.to_str()
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
THOUGHT = "<think>1</think><answer>2</answer>"
QA = {"question": "Sort 31", "answer": "13"}


def processed(tokenizer, before: list[str], after: list[str]):
    """It puts these tokens around each text, as a tokenizer.json can say."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join([*before, "$A", *after]), special_tokens=[
            (t, tokenizer.convert_tokens_to_ids(t)) for t in {*before, *after}])
    return tokenizer


def plain(before=(), after=(), **tokens):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(BYTES),
        **({"bos_token": "<s>", "eos_token": "</s>"} | tokens))
    return processed(made, before, after)


def row_of(columns, tokenizer, **flags):
    return make_row(0, columns, "", tokenizer, texts.marks_of(tokenizer), DataArgs(**flags))


def tags_in(tokenizer):
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    return tokenizer


# ---- prompts

def test_a_template_that_ends_a_prompt_in_eos_is_refused():
    tokenizer = plain()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}</s>"
    with pytest.raises(SettingsError, match="the prompt must not end in </s>"):
        row_of(QA, tokenizer)


# ---- the chat template's end of a turn

@pytest.mark.parametrize("ends, left", [([], []), ([400, -1], []), ([2, 400], [2])])
def test_a_model_that_cannot_end_is_said(ends, left):
    for stop in (), ("x",):
        args, notes = changed(grpo.Args(), stop=stop), []
        words = f"no token that ends a completion: its files name {ends} of 320 ids"
        assert inputs.check_ends(args, ends, 320, notes) == left
        assert len(notes) == (not left and not stop) and all(words in note for note in notes)


def test_a_run_learns_the_ends_from_the_models_folder(tmp_path):
    """The engine stops at them (test_seams.py), and what they end is learned."""
    folder = shutil.copytree(tiny.ensure(str(ROOT / "runs")), tmp_path / "base")
    for name, text in ("tokenizer_config.json", '"eos_token"'), ("generation_config.json", ""):
        made = json.loads((folder / name).read_text())
        made["eos_token" if text else "eos_token_id"] = tiny.END_OF_TEXT if text else 0
        (folder / name).write_text(json.dumps(made))
    found = inputs.read_files(changed(grpo.Args(), model=str(folder)), 1)
    assert found.ends == [0, 2] and found.tokenizer.eos_token == tiny.END_OF_TEXT
    # So does whoever loads the export, with transformers or vLLM.
    before = GenerationConfig.from_pretrained(folder).to_dict()
    checkpoint.write_ends(folder, found.ends)
    assert GenerationConfig.from_pretrained(folder).to_dict() == before | {"eos_token_id": [0, 2]}


# ---- tags that are special tokens

def test_an_end_may_be_a_word_elsewhere():
    """GLM 4.5 writes <|assistant|> and <think> before each turn: the second is a word."""
    glm = tags_in(tokenizer_of("<|user|> <|assistant|> <|endoftext|>", template(
        f"<|user|>{SAID}", f"<|assistant|><think></think>{SAID}", "<|assistant|>")))
    ids = glm(f"<|assistant|>{THOUGHT}<|user|>")["input_ids"]
    assert texts.reader(glm, [0])(ids) == THOUGHT and format_tags(THOUGHT) == 1.0
    newline = glm("\n", add_special_tokens=False)["input_ids"]
    assert texts.reader(glm, newline)(2 * newline) == "\n" and len(newline) == 1


ZERO = ("A conversation. Put thoughts in <think> </think>.\n{% for m in messages %}"
        "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: <think>")


@pytest.mark.parametrize("text", [tiny.CHATML, ZERO])
def test_only_what_the_template_writes_at_a_begin_marks_a_finished_chat(text):
    tokenizer = tags_in(tiny.make_tokenizer())
    tokenizer.chat_template = text
    for prompt in "<think>a", "</answer>", "<answer> <think>a":
        row = row_of({"prompt": prompt}, tokenizer)
        assert not row.finished and prompt in row.prompt != prompt
    assert row_of({"prompt": "<|im_start|>user\na"}, tokenizer).finished
    assert "<think>" not in texts.marks_of(tokenizer).begins


# ---- --stop

def test_a_stop_string_may_be_a_special_token(monkeypatch):
    """vLLM's own detokenizer, with the parameters of a request: with skip_special_tokens a --stop
    that is a special token would never be seen."""
    import vllm
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    import rollout
    made, tokenizer, engine = [], tags_in(tiny.make_tokenizer()), object.__new__(rollout.Engine)
    engine.args, engine.max_tokens = rollout.EngineArgs(stop=("</answer>",)), 9
    engine.eos_ids, engine.bar = [2], False
    engine.llm = SimpleNamespace(generate=lambda prompts, params, **named: made.extend(params))
    engine.outputs([rollout.Request([5], 1)], 1.0)
    known = {name: None for name in EngineCoreRequest.__struct_fields__}
    request = EngineCoreRequest(**known | {
        "request_id": "0", "prompt_token_ids": [5], "sampling_params": made[0]})
    reads = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert reads.update(tokenizer(THOUGHT)["input_ids"], False) == "</answer>" and vllm


# ---- a sweep

TRIMMED = "{{ m['content'] | trim }}"
CHATML, AGAIN = f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n", "<|im_start|>assistant\n"
CHATML_SAID = f"<|im_start|>{ROLE}\n«{SAID}<|im_end|>»\n"
FAMILIES = {  # name: (begin, user, assistant, header, what ends a turn, what ends a chat)
    "chatml": ("", CHATML, CHATML_SAID, AGAIN, "<|im_end|>", ""),
    "default system": ("<|im_start|>system\nUse <think>.<|im_end|>\n", CHATML, CHATML_SAID, AGAIN,
                       "<|im_end|>", ""),
    "llama": ("<s>", f"<|h|>{ROLE}<|/h|>\n\n{TRIMMED}<|eot|>",
              f"<|h|>{ROLE}<|/h|>\n\n«{TRIMMED}<|eot|>»", "<|h|>assistant<|/h|>\n\n", "<|eot|>",
              ""),
    "mistral": ("<s>", f"[INST] {SAID} [/INST]", f"« {SAID}</s>»", "", "</s>", ""),
    "phi": ("", f"<|{ROLE}|>\n{SAID}<|end|>\n", f"<|assistant|>\n«{SAID}<|end|>»\n",
            "<|assistant|>\n", "<|end|>", "<pad>"),
    "gemma": ("<s>", f"<turn>{ROLE}\n{SAID}</turn>\n", f"<turn>model\n«{SAID}</turn>»\n",
              "<turn>model\n", "</turn>", ""),
    "glm": ("[gMASK]<sop>", f"<|{ROLE}|>\n{SAID}", f"<|assistant|>\n{SAID}", "<|assistant|>\n",
            "<|user|>", ""),
    "speaker": ("", *[f"<|x|>{ROLE}: {SAID}"] * 2, "<|x|>assistant: ", "<|x|>", ""),
    "texts": ("", f"### {ROLE}\n{SAID}\n", f"### {ROLE}\n{SAID}\nEND\n", "### assistant\n", None,
              ""),
    "eos last": ("", f"<|{ROLE}|>\n{SAID}</s>\n",  # OLMo 2's, of several turns
                 f"<|{ROLE}|>\n«{SAID}</s>»{{% if not loop.last %}}{{{{ '\\n' }}}}{{% endif %}}",
                 "<|assistant|>\n", "</s>", ""),
    "none": None}
CONTROLS = """<s> </s> <pad> <|im_start|> <|im_end|> <|h|> <|/h|> <|eot|> [INST] [/INST] <|user|>
    <|assistant|> <|system|> <|end|> <turn> </turn> [gMASK] <sop> <|x|>""".split()
LETTERS = [chr(c) for c in range(33, 127)] + ["\n", "▁", "é"]


def pieces():
    """As sentencepiece has them: a space before the first word, that decoding takes away."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(["<unk>", *LETTERS])}, [],
                                unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return made


def plainly(text: str) -> str:
    return text.replace("«", "").replace("»", "")


def drawn(seed: int):
    """(a tokenizer, its family, what a generation_config.json has, what was drawn)"""
    rng = random.Random(seed)
    names = [*FAMILIES]
    name = names[seed % len(names)]  # each as often
    pick = dict(special=rng.random() < 0.7, words=rng.random() < 0.3, tags=rng.choice([
        True, False, None]), bos=rng.random() < 0.6, appends=rng.random() < 0.4,
        eos=rng.choice(["</s>", "</s>", "<|im_end|>", None]),
        pad=rng.choice([None, "<pad>", "</s>", "<s>"]), clean=rng.random() < 0.3)
    made = PreTrainedTokenizerFast(
        tokenizer_object=pieces() if pick["words"] else Tokenizer.from_str(BYTES),
        clean_up_tokenization_spaces=pick["clean"])
    made.add_tokens([AddedToken(t, special=pick["special"], normalized=False) for t in CONTROLS])
    if pick["tags"] is not None:
        made.add_tokens([AddedToken(t, special=pick["tags"], normalized=False) for t in TAGS])
    made.bos_token, made.eos_token, made.pad_token = "<s>", pick["eos"], pick["pad"]
    if family := FAMILIES[name]:
        begin, user, assistant, header, _, tail = family
        made.chat_template = plainly(template(user, assistant, header, begin, tail))
    processed(made, ["<s>"] if pick["bos"] else [], ["</s>"] if pick["appends"] else [])
    given = rng.choice(["absent", "nested", None, "~", "~`"])
    return made, name, given, pick


def check(tmp_path, seed: int) -> SimpleNamespace:
    """What was drawn, and its row, ends and texts, which are right."""
    tokenizer, name, given, pick = drawn(seed)
    to_id = tokenizer.convert_tokens_to_ids
    bos, end = to_id("<s>"), FAMILIES[name] and FAMILIES[name][4]
    asked = [{"role": "user", "content": "Sort 31"}]
    # The prompt.
    row = row_of({"prompt": "Sort 31"}, tokenizer)
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert row.prompt_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row.prompt_ids.count(bos) == text.count("<s>")
    else:
        bare = tokenizer("Sort 31", add_special_tokens=False)["input_ids"]
        assert row.prompt_ids == [bos][:pick["bos"]] + bare
    finished = row_of({"prompt": row.prompt}, tokenizer)
    if name not in ("texts", "none"):
        assert finished.finished and finished.prompt_ids == row.prompt_ids
    assert not row_of({"prompt": "<think>1"}, tokenizer).finished
    # What ends.
    whole, nested = {"eos_token_id": to_id("^")}, {"text_config": {"eos_token_id": [to_id("^")]}}
    files = [to_id(c) for c in {"absent": "^", "nested": "^", None: ""}.get(given, given)]
    eos = {None: None, "~": to_id("~")}.get(given, files)
    (tmp_path / "config.json").write_text(json.dumps(nested if given == "nested" else whole))
    if given not in ("absent", "nested"):  # what GenerationConfig.from_model_config reads, or this
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    own = [to_id(t) for t in (pick["eos"], end) if t]
    ends = texts.eos_ids(str(tmp_path), tokenizer)
    assert ends == sorted({*files, *own})
    # The text. What sentencepiece would give is its own decoding.
    written, reads = "a , b <think>1</think> n't", texts.reader(tokenizer, ends)
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    expected = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert pick["words"] or expected == written
    closing, written_ids = [to_id(end)] if end else own[:1], ids
    assert reads(ids) == reads(ids + closing) == expected
    silent = [bos, *([to_id(pick["pad"])] if pick["pad"] else [])]
    assert reads([bos, *ids, *silent[1:], *closing]) == expected
    assert reads(ids[:2] + silent + own + ids[2:]) == expected  # wherever they stand
    return SimpleNamespace(tokenizer=tokenizer, name=name, pick=pick, row=row, asked=asked, end=end,
                           ends=ends, reads=reads, written=written_ids, closing=closing,
                           expected=expected)


def fields(words: str) -> list[dict]:
    """Rows with these words in one field."""
    asked = {"role": "user", "content": "q"}
    return [{"question": words, "answer": "A"}, {"question": "q", "answer": words},
            {"question": "q", "answer": "A", "system": words},
            {"prompt": [{"role": "tool", "content": words}, asked], "answer": "A"}]


FAST = [*range(0, 110, 10), 43, 109]  # each family; two tokenizers that append an EOS
SWEEP = [pytest.param(i, marks=[] if i in FAST else [pytest.mark.slow]) for i in range(110)]


@pytest.mark.parametrize("seed", SWEEP)
def test_of_many_tokenizers_and_templates_each_is_right(tmp_path, seed):
    check(tmp_path, seed)
