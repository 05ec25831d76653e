"""What begins and what ends: prompts, completions, the texts of rewards, what sft.py learns. The
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
from house import module
from settings import changed
from templates import CHAT, ROLE, SAID, template, tokenizer_of

sft = module("parts.sft.sft")
teacher = module("parts.distill.teacher")
targets = module("parts.sft.targets")
turns = module("parts.turns.turns")

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
    more = [(sft.Args(), ())] if sft else []
    for args, stop in (grpo.Args(), ()), (grpo.Args(), ("x",)), *more:
        args, notes = changed(args, stop=stop), []
        words = f"no token that ends a completion: its files name {ends} of 320 ids"
        if not args.needs_rollouts and not left:
            with pytest.raises(SettingsError) as error:
                inputs.check_ends(args, ends, 320, notes)
            assert words in str(error.value)
            continue
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
    row = row_of({"prompt": "<|im_start|>user\na<|im_end|>\n"}, tokenizer)
    made, = teacher.add_teacher_prompts([row], tokenizer, DataArgs(), "{prompt} {prompt}")
    assert made.teacher_ids[:len(row.prompt_ids)] == row.prompt_ids  # finished too


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


def marked(family) -> str:
    """The template with transformers' marks around what is learned. After a block Jinja takes away
    a newline."""
    begin, user, assistant, header, _, tail = family
    text = template(user, assistant, header, begin, tail).replace("«", "{% generation %}")
    end = "{% endgeneration %}"
    return text.replace("»\n", end + "{{ '\\n' }}").replace("»", end)


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


def check(tmp_path, seed: int) -> None:
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
    if teacher:
        taught, = teacher.add_teacher_prompts([row], tokenizer, DataArgs(), "{prompt}")
        assert taught.teacher_ids == row.prompt_ids
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
    # What is learned, and what stands between two turns.
    if not (ends and targets and turns):
        return
    for messages in CHAT[:2], CHAT:
        try:
            made = targets.make_row(0, {"messages": messages}, "", tokenizer, texts.marks_of(
                tokenizer, ends), sft.Args().data_args, eos_ids=ends)
        except SettingsError as error:
            assert (name in ("texts", "none")) and len(messages) > 2 and str(error)
            return
        ids, learned = made.target
        assert made.prompt_ids == row.prompt_ids
        last = [i for i, now in enumerate(learned) if now and not (learned + [False])[i + 1]]
        assert len(last) == len(messages) // 2 and all(ids[i] in ends for i in last)
        if end and name not in ("glm", "speaker"):
            assert {ids[i] for i in last} == {to_id(end)}
        said = reads([i for i, now in zip(ids, learned, strict=True) if now][:last[0] + 1])
        assert said.strip().removesuffix("\nEND") == "13"
    if tokenizer.chat_template and name not in ("glm", "speaker"):  # their end begins a turn
        theirs = tokenizer.apply_chat_template(
            CHAT, chat_template=marked(FAMILIES[name]), return_dict=True,
            return_assistant_tokens_mask=True)
        whole = made.prompt_ids + ids
        assert whole == theirs["input_ids"][:len(whole)]
        rest = [False] * (len(theirs["input_ids"]) - len(whole))
        assert [False] * len(made.prompt_ids) + learned + rest == theirs["assistant_masks"]
    bridge = turns.Bridge(tokenizer, ends, 10**6, None)
    assert bridge.read(written_ids + closing) == expected
    if name == "none" and not pick["words"]:
        assert bridge.ids(ends[0], asked) == tokenizer(
            "\n\nSort 31\n\n", add_special_tokens=False)["input_ids"]
    if end:
        ids = row.prompt_ids + ids[:last[0] + 1] if len(last) == 1 else made.prompt_ids + ids
        between = bridge.ids(to_id(end), CHAT[2:3])
        whole = made.prompt_ids + made.target[0]
        start = len(made.prompt_ids) + made.target[1].index(False)
        assert whole[start:start + len(between)] == between
        missing = bridge.ids(tokenizer.convert_tokens_to_ids("a"), CHAT[2:3])  # as by --stop
        assert missing[missing.index(to_id(end)) + 1:] == between
        assert all(bridge.ids(other, CHAT[2:3]) == missing for other in {*ends} - {to_id(end)})


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_words_of_a_row_are_words_or_the_row_is_refused(seed):
    """What followed an end mark in an answer was not learned; each string that a tokenizer treats
    specially, in each field: the text has it, or a sentence names it."""
    tokenizer, name, *_ = drawn(seed)
    ends = texts.eos_ids(str(tiny.ensure(str(ROOT / "runs"))), tokenizer)
    reads, refused = texts.reader(tokenizer, ends), set()
    bridge = turns.Bridge(tokenizer, ends, 10**6, None)
    for mark in {t.content for t in tokenizer.added_tokens_decoder.values()}:
        words = f"a{mark}b"
        for row in ({"question": words, "answer": "A"}, {"question": "q", "answer": words},
                    {"question": "q", "answer": "A", "system": words},
                    {"prompt": [{"role": "tool", "content": words}, *asked()], "answer": "A"}):
            try:
                made = targets.make_row(0, row, "", tokenizer, texts.marks_of(
                    tokenizer, ends), sft.Args().data_args, eos_ids=ends)
                assert words in reads(made.prompt_ids + made.target[0]), (name, row)
            except SettingsError as error:
                assert f"its words hold {mark}" in str(error), (name, row)
                refused.add(mark)
        for role in "user", "tool":
            try:
                ids = bridge.ids(-1, [{"role": role, "content": words}])
                assert words in reads(ids) and mark not in refused, (name, mark)
            except SettingsError as error:
                assert f"its words hold {mark}" in str(error) and mark in refused, (name, mark)
    assert not refused & {*TAGS}


def asked() -> list[dict]:
    return [{"role": "user", "content": "q"}]


FAST = [*range(0, 110, 10), 43, 109]  # each family; two tokenizers that append an EOS
SWEEP = [pytest.param(i, marks=[] if i in FAST else [pytest.mark.slow]) for i in range(110)]


@pytest.mark.parametrize("seed", SWEEP)
def test_of_many_tokenizers_and_templates_each_is_right(tmp_path, seed):
    check(tmp_path, seed)
