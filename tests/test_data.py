"""data.py: every shape of row, every error sentence, one template and one BOS, and an order that can be resumed anywhere."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import data
from data import Row, Stream, batches_per_epoch, load, read
from plan import SettingsError

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
real_rows = pytest.mark.skipif(not REAL.is_dir(), reason="the real rows are not beside this checkout")
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make_tokenizer(chat_template=CHATML, bos=None):
    """Bytes and a few special tokens; with `bos`, a post-processor puts it in front, as Llama's tokenizer does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"] + ([bos] if bos else []))
    if bos:
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=bos)
    tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER = make_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_rows(tmp_path, *rows, tokenizer=TOKENIZER, limit=4096, **options):
    return load(write(tmp_path / "rows.jsonl", rows), tokenizer, max_prompt_tokens=limit, **options)


def load_row(tmp_path, row, **options):
    return load_rows(tmp_path, row, **options)[0][0]


def chat(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def sentence(call, *args, **options):
    """The one sentence that a mistake gives: on one line, so that it reads well beside others."""
    with pytest.raises(SettingsError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- Shapes -------------------------------------------------------------------------------------------------------------------------

def test_gsm8k_row(tmp_path):
    row = load_row(tmp_path, {"question": "1+1?", "answer": "1+1=2\n#### 2"})
    assert row.prompt == chat("1+1?")
    assert TOKENIZER.decode(row.prompt_ids) == row.prompt
    assert row.answer == "1+1=2\n#### 2"
    assert row.columns == {"question": "1+1?", "answer": "1+1=2\n#### 2"}
    assert row.index == 0 and row.source.endswith("/rows")


@pytest.mark.parametrize("row, answer", [
    ({"solution": r"so \boxed{1}, or rather $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
    ({"solution": r"so \boxed{1}", "answer": "3"}, "3"),
    ({"solution": r"so \boxed{1}", "answer": None}, "1"),
    ({"solution": "no box"}, "no box"),
    ({"solution": r"cut off \boxed{\frac{1}{2}"}, r"cut off \boxed{\frac{1}{2}"),
    ({"solution": r"empty \boxed{}"}, ""),
    ({"ground_truth": [1, 2]}, [1, 2]),
    ({"answer": None}, None),
])
def test_math_row(tmp_path, row, answer):
    assert load_row(tmp_path, {"problem": "what?", **row}).answer == answer


def test_verl_row(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    row = load_row(tmp_path, {"prompt": messages, "data_source": "openai/gsm8k", "answer": "not this one",
                              "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7}})
    assert row.prompt == "<|im_start|>system\nBe brief.<|im_end|>\n" + chat("1+1?")
    assert (row.answer, row.source, row.columns["extra_info"]) == ("2", "openai/gsm8k", {"index": 7})


def test_verl_row_from_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet
    rows = [{"prompt": [{"content": "1+1?", "role": "user"}], "data_source": "s", "reward_model": {"ground_truth": "2", "style": "rule"}}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (row,), _ = load(str(tmp_path / "rows.parquet"), TOKENIZER, max_prompt_tokens=100)
    assert (row.prompt, row.answer, row.source) == (chat("1+1?"), "2", "s")


def test_trl_rows(tmp_path):
    rows, _ = load_rows(tmp_path, {"prompt": "1+1?", "solution": "2", "level": 3}, {"prompt": [{"role": "user", "content": "1+1?"}]})
    assert [row.prompt for row in rows] == [chat("1+1?")] * 2
    assert [row.answer for row in rows] == ["2", None]
    assert rows[0].columns["level"] == 3


def test_a_chat_that_ends_with_the_assistant_is_continued(tmp_path):
    row = load_row(tmp_path, {"prompt": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Let me see: <think>"}]})
    assert row.prompt == chat("1+1?") + "Let me see: <think>"


def test_countdown_row(tmp_path):
    row = load_row(tmp_path, {"nums": [44, 19, 35], "target": 98})
    assert row.prompt.startswith(chat("Using the numbers [44, 19, 35], create an equation that equals 98.")[:80])
    assert "<answer> (1 + 2) / 3 </answer>" in row.prompt
    assert row.answer == {"target": 98, "numbers": [44, 19, 35]}
    own_words = load_row(tmp_path, {"nums": [1, 2], "target": 3, "prompt": "Make 3."})
    assert own_words.prompt == chat("Make 3.") and own_words.answer == {"target": 3, "numbers": [1, 2]}


def test_reasoning_gym_rows():
    """The library makes puzzle i from seed + i: with seeds 1 and 2 an evaluation would have held all training puzzles but one."""
    rows, report = load("reasoning_gym:gcd", TOKENIZER, max_prompt_tokens=200, seed=1, size=40)
    row = rows[0]
    assert report.read == len(rows) == 40
    assert row.source == "reasoning_gym/gcd" and row.prompt == chat(row.columns["question"])
    import reasoning_gym
    score = reasoning_gym.get_score_answer_fn(row.columns["reasoning_gym_task"])
    assert score(row.answer, row.columns["reasoning_gym_entry"]) == 1.0
    for split, seed in (("", 2), ("@test", 1)):
        others, _ = read(f"reasoning_gym:gcd{split}", seed=seed, size=40)
        assert not {row.columns["question"] for row in rows} & {other["question"] for other in others}


def test_reasoning_gym_rows_do_not_depend_on_the_process():
    """Some generators iterate over sets of strings: with a random hash seed two ranks held different puzzles under one position.
    list_functions draws from the global generator besides."""
    command = "import data; print([r['question'] for t in ('ransom_note', 'list_functions') for r in data.read('reasoning_gym:' + t, 1, 4)[0]])"
    outputs = {subprocess.run([sys.executable, "-c", command], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(data.__file__).parent,
                              capture_output=True, text=True, check=True).stdout for seed in ("1", "2")}
    assert len(outputs) == 1 and len(outputs.pop()) > 100


def test_tiny_rows():
    rows, report = load("tiny", TOKENIZER, max_prompt_tokens=100, seed=5, size=300)
    assert len(rows) == 300 and rows[0].source == report.name == "tiny"
    again, name = read("tiny:sort@train", seed=5, size=300)
    assert again == [row.columns for row in rows] and name == "tiny/sort"
    test, _ = read("tiny@test", seed=5, size=300)
    assert not {row["question"] for row in test} & {row["question"] for row in again}
    assert len(read("tiny")[0]) == data.GENERATED_ROWS
    for spec in ("tiny:srt", "tiny@dev"):
        assert f"no such rows: {spec}; " in (message := sentence(read, spec)) and "sort" in message and "train and test" in message


# ---- Real rows ----------------------------------------------------------------------------------------------------------------------

@real_rows
@pytest.mark.parametrize("file, n, answer", [("gsm8k/train", 7473, "#### 72"), ("gsm8k/test", 1319, "#### 18"),
                                             ("math500/test", 500, r"\left( 3, \frac{\pi}{2} \right)"), ("aime24/test", 30, "204")])
def test_real_questions(file, n, answer):
    rows, report = load(f"{REAL}/{file}.jsonl", TOKENIZER, max_prompt_tokens=10_000)
    assert report.read == report.kept == n and (report.too_long, report.empty) == (0, 0)
    assert rows[0].answer.endswith(answer) and {row.source for row in rows} == {file}
    for row in rows:
        assert row.prompt == chat(row.columns.get("problem") or row.columns["question"])
        assert len(row.prompt_ids) <= report.longest


@real_rows
@pytest.mark.parametrize("people", [3, 7])
def test_finished_chat_texts_are_not_templated_twice(people):
    """Logic-RL's rows hold a whole ChatML text as the content of one user message. Templated again, the model would see a user who
    writes <|im_start|>system, and the opened <think> would be closed by <|im_end|>."""
    rows, report = load(f"{REAL}/kk/{people}ppl-train.parquet", TOKENIZER, max_prompt_tokens=10_000)
    assert report.kept == report.templated == len(rows) == 900
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    for row in rows:
        assert row.prompt == row.columns["prompt"][0]["content"]
        assert row.prompt_ids.count(start) == 3 and row.prompt.endswith("<|im_start|>assistant\n<think>")
        assert row.source == "kk_logic" and set(row.answer) == {"solution_text_format", "statements"}


@real_rows
def test_a_finished_chat_text_takes_a_template_but_no_system_message():
    spec = f"{REAL}/kk/3ppl-test.parquet"
    rows, report = load(spec, TOKENIZER, max_prompt_tokens=10_000, prompt_template="Solve: {quiz}", system="Think.", size=2)
    assert len(rows) == 2 and report.templated == 0
    assert rows[0].prompt == "<|im_start|>system\nThink.<|im_end|>\n" + chat("Solve: " + rows[0].columns["quiz"])
    message = sentence(load, spec, TOKENIZER, max_prompt_tokens=10_000, system="Think.")
    assert "finished chat text" in message and "--system" in message and "--prompt_template" in message


# ---- Templates ----------------------------------------------------------------------------------------------------------------------

def test_system_message_is_put_in_front_and_replaces_the_rows_own(tmp_path):
    own = [{"role": "system", "content": "old"}, {"role": "user", "content": "q"}]
    rows, _ = load_rows(tmp_path, {"prompt": "q"}, {"prompt": own}, system="new")
    assert [row.prompt for row in rows] == ["<|im_start|>system\nnew<|im_end|>\n" + chat("q")] * 2


def test_prompt_template_keeps_other_braces(tmp_path):
    """str.format would die on \\boxed{}, fill the {answer} into \\boxed{answer}, and run {question.__class__} of somebody's data."""
    row = {"question": "Is {answer} a {level}?", "answer": "42", "level": 3}
    template = r'Q{question} ({level}) Use \boxed{} or \boxed{answer} or \frac{1}{level}, {"json": 1}, { answer }, {question.x}, {}'
    assert load_row(tmp_path, row, prompt_template=template).prompt == chat(
        r'QIs {answer} a {level}? (3) Use \boxed{} or \boxed{answer} or \frac{1}{level}, {"json": 1}, { answer }, {question.x}, {}')


@pytest.mark.parametrize("row", [{"question": "1+1?", "answer": 2}, {"problem": "1+1?", "answer": 2}, {"prompt": "1+1?"},
                                 {"prompt": [{"role": "user", "content": "1+1?"}]}])
@pytest.mark.parametrize("name", ["question", "prompt"])
def test_prompt_template_knows_the_rows_prompt_by_either_name(tmp_path, row, name):
    assert load_row(tmp_path, row, prompt_template=r"Think.\n{%s}" % name).prompt == chat(r"Think.\n1+1?")


def test_prompt_template_alone_makes_a_prompt_of_any_columns(tmp_path):
    row = load_row(tmp_path, {"text": "good film", "target": "positive"}, prompt_template="Mood of: {text}")
    assert (row.prompt, row.answer) == (chat("Mood of: good film"), "positive")


def test_prompt_template_mistakes(tmp_path):
    row = {"question": "q", "answer": "a"}
    message = sentence(load_rows, tmp_path, row, prompt_template="{question} {subject}")
    assert "{subject}" in message and "row 0" in message and "question, answer" in message and "{ subject }" in message
    assert "would be the same" in sentence(load_rows, tmp_path, row, prompt_template="Solve it.")


def test_no_second_bos(tmp_path):
    """The template writes <s> itself and the tokenizer would add another: the model never saw two."""
    row = {"question": "q", "answer": "a"}
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, bos="<s>")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id                 # it does add one by itself
    assert load_row(tmp_path, row, tokenizer=tokenizer).prompt_ids.count(tokenizer.bos_token_id) == 1
    plain = make_tokenizer(None, bos="<s>")                                         # without a template the tokenizer has to add it
    assert load_row(tmp_path, row, tokenizer=plain).prompt_ids == [plain.bos_token_id, *TOKENIZER("q")["input_ids"]]
    finished = {"prompt": "<s>already here"}
    for each in (tokenizer, plain):
        assert load_row(tmp_path, finished, tokenizer=each).prompt_ids.count(each.bos_token_id) == 1


def test_no_chat_template_gives_plain_text(tmp_path):
    assert load_row(tmp_path, {"question": "q", "answer": "a"}, tokenizer=make_tokenizer(None), system="S").prompt == "S\n\nq"


def test_a_chat_that_the_template_refuses(tmp_path):
    strict = make_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML)
    message = sentence(load_rows, tmp_path, {"prompt": "q"}, tokenizer=strict, system="S")
    assert "System role not supported" in message and "system, user" in message and "row 0" in message


# ---- What is left out ---------------------------------------------------------------------------------------------------------------

def test_long_empty_and_duplicate_prompts_are_counted(tmp_path):
    texts = ["a", "x" * 500, "  \n", "a", "", "b", None, "a"]
    rows, report = load_rows(tmp_path, *({"question": text, "answer": "1"} for text in texts), {"prompt": []},
                             {"prompt": [{"role": "user", "content": " "}]}, limit=100)
    assert [row.index for row in rows] == [0, 3, 5, 7]
    assert (report.read, report.kept, report.too_long, report.empty, report.duplicates) == (10, 4, 1, 5, 2)
    n = len(TOKENIZER(chat("a"))["input_ids"])
    assert report.text() == (f"{report.name}: 4 of 10 prompts kept, {n} to {n} tokens; left out: 1 longer than 100 tokens, 5 empty; "
                             f"duplicates (kept): 2")
    _, unasked = load_rows(tmp_path, {"question": "", "answer": "1"}, {"question": "q", "answer": "1"}, prompt_template="Solve: {question}")
    assert unasked.empty == 1                       # the template's own words do not make a question of nothing


def test_no_prompt_left(tmp_path):
    rows = [{"question": "a" * n, "answer": "1"} for n in (50, 80)]
    shortest = len(TOKENIZER(chat("a" * 50))["input_ids"])
    assert len(load_rows(tmp_path, *rows, limit=shortest)[0]) == 1                  # a prompt may be as long as the limit
    message = sentence(load_rows, tmp_path, *rows, limit=shortest - 1)
    assert f"shortest of 2 has {shortest} tokens" in message and f"--max_prompt_tokens {shortest} keeps it, {shortest + 30}" in message
    assert "all 1 rows have an empty prompt" in sentence(load_rows, tmp_path, {"question": " ", "answer": "1"})


def test_size_keeps_the_first_rows(tmp_path):
    spec = write(tmp_path / "rows.jsonl", [{"prompt": str(i)} for i in range(5)])
    assert [row["prompt"] for row in read(spec, size=2)[0]] == ["0", "1"]
    assert len(read(spec, size=9)[0]) == 5
    assert "at least 1" in sentence(read, spec, size=0)


# ---- Files with mistakes ------------------------------------------------------------------------------------------------------------

def test_no_such_file(tmp_path):
    write(tmp_path / "train.jsonl", [{}])
    assert "no such file" in (message := sentence(read, f"{tmp_path}/trian.jsonl")) and f"nearest in {tmp_path}: train.jsonl" in message
    assert "train.jsonl" in sentence(read, f"{tmp_path}/quite_different.parquet")
    assert f"no folder {tmp_path}/nowhere either" in sentence(read, f"{tmp_path}/nowhere/rows.jsonl")
    assert "no such folder" in sentence(read, f"{tmp_path}/trian")
    assert "no such folder" in sentence(read, "")
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "only .jsonl, .json, .parquet files can be read" in sentence(read, f"{tmp_path}/rows.csv")


@pytest.mark.parametrize("name, content", [("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.json", b"")])
def test_empty_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert "is empty: it has no rows" in sentence(read, f"{tmp_path}/{name}")


@pytest.mark.parametrize("name, content, where, what", [
    ("a.jsonl", b'{"a": 1}\n\n{"a": 1\n{"a": 2}\n', "a.jsonl:3: not JSON", "Expecting ',' delimiter at column 8"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl:2: not JSON", "can't decode byte 0xff"),
    ("a.jsonl", b'{"a": 1}\n' + b"[" * 200_000, "a.jsonl:2: not JSON", "recursion"),
    ("a.jsonl", b'{"a": 1' + b"0" * 5000 + b"}", "a.jsonl:1: not JSON", "digits"),
    ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "a.jsonl:2: a row has to be an object", "not [1, 2]"),
    ("a.jsonl", b'{"a": 1}\nnull\n', "a.jsonl:2: a row has to be an object", "not null"),
    ("a.json", b'[{"a": 1},\n {"a" 2}]', "a.json:2: not JSON", "Expecting ':' delimiter"),
    ("a.json", b'[{"a": 1}, "b"]', "a.json, item 1", 'not "b"'),
    ("a.json", b'{\n "a": 1\n}', "a.json:1: not JSON", "each line has to be one JSON object"),
    ("a.parquet", b"PAR1 no table", "a.parquet cannot be read as parquet", ""),
])
def test_malformed_file(tmp_path, name, content, where, what):
    (tmp_path / name).write_bytes(content)
    message = sentence(read, f"{tmp_path}/{name}")
    assert where in message and what in message and len(message) < 600


def test_files_that_are_in_order(tmp_path):
    (tmp_path / "list.json").write_text('\n[{"a": 1},\n{"a": 2}]')
    (tmp_path / "lines.json").write_text('{"a": 1}\n{"a": 2}')
    (tmp_path / "windows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    for name in ("list.json", "lines.json", "windows.jsonl"):
        assert read(f"{tmp_path}/{name}")[0] == [{"a": 1}, {"a": 2}]
    (tmp_path / "separator.jsonl").write_text('{"a": "one\u2028line\x85 "}', encoding="utf-8")
    assert read(f"{tmp_path}/separator.jsonl")[0] == [{"a": "one\u2028line\x85 "}]  # str.splitlines would cut here


@pytest.mark.parametrize("row, what", [
    ({"text": "q", "label": "a"}, "no prompt column: it has text, label; one of prompt, question, problem"),
    ({}, "no prompt column: it has none"),
    ({"question": "q", "id": 3}, "no answer column: it has question, id; a question needs one of answer, solution"),
    ({"prompt": 3}, "`prompt` has to be a text or a list of"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "`prompt` has to be a text or a list of"),
    ({"prompt": ["q"]}, "`prompt` has to be a text or a list of"),
    ({"prompt": "\ud800"}, "half a surrogate pair"),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "<|im_start|>user\nq"}]}, "finished chat text"),
])
def test_rows_with_mistakes(tmp_path, row, what):
    good = {"prompt": "q"}
    message = sentence(load_rows, tmp_path, good, row)
    assert what in message and "rows.jsonl, row 1 (counted from 0)" in message


def test_unknown_reasoning_gym_task():
    message = sentence(read, "reasoning_gym:spell_backwrd")
    assert "no task 'spell_backwrd'" in message and "spell_backward" in message
    assert "cannot be generated" in sentence(read, "reasoning_gym:composite")


# ---- Hugging Face data sets ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of parquet files with two splits, and a cache of its own."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = {split: datasets.Dataset.from_list([{"question": f"{split}{i}", "answer": str(i)} for i in range(3)]) for split in ("train", "test")}
    (tmp_path / "set").mkdir()
    for split, data_set in rows.items():
        data_set.to_parquet(tmp_path / "set" / f"{split}.parquet")
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    rows["train"].save_to_disk(tmp_path / "one")
    return tmp_path


def test_folders(folder):
    for name in ("set", "saved"):
        assert [row["question"] for row in read(f"{folder}/{name}")[0]] == ["train0", "train1", "train2"]
        assert [row["question"] for row in read(f"{folder}/{name}@test", size=2)[0]] == ["test0", "test1"]
        assert read(f"{folder}/{name}@test")[1] == f"{folder.name}/{name}"
        assert "cannot be loaded" in (message := sentence(read, f"{folder}/{name}@dev")) and "dev" in message
    assert read(f"{folder}/set@train[1:]")[0][0]["question"] == "train1"
    assert len(read(f"{folder}/one")[0]) == 3
    (row, *_), _ = load(f"{folder}/set", TOKENIZER, max_prompt_tokens=100)
    assert (row.prompt, row.answer) == (chat("train0"), "0")


def test_several_splits_and_none_is_train(folder):
    (folder / "set" / "train.parquet").rename(folder / "set" / "validation.parquet")
    assert "say which with" in (message := sentence(read, f"{folder}/set")) and "validation, test" in message
    (folder / "set" / "validation.parquet").unlink()
    assert read(f"{folder}/set")[0][0]["question"] == "test0"


def test_a_hub_name_says_what_to_load(monkeypatch):
    import datasets
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for spec in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k@test", "openai/gsm8k:main@train[:2]"):
        assert read(spec) == ([{"question": "q", "answer": "a"}], "openai/gsm8k")
    assert [call[1:] for call in calls] == [(None, None), ("main", None), (None, "test"), ("main", "train[:2]")]


def test_offline_is_one_sentence(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE when they are imported."""
    write(tmp_path / "gsm8k.jsonl", [{}])
    command = "import data\ntry: data.read('gsm8k_main')\nexcept data.SettingsError as error: print(error)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(Path(data.__file__).parent)}
    output = subprocess.run([sys.executable, "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    assert output.startswith("gsm8k_main is no file or folder here (nearest in .: gsm8k.jsonl), it is not in the local Hugging Face cache, "
                             "and the hub cannot be reached: ") and output.count("\n") == 1


def test_importing_does_nothing():
    command = "import sys, data; print([m for m in ('datasets', 'reasoning_gym', 'torch', 'transformers', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", command], cwd=Path(data.__file__).parent, capture_output=True, text=True).stdout == "[]\n"


# ---- Order --------------------------------------------------------------------------------------------------------------------------

def rows_of(n):
    return [Row(i, f"p{i}", [i], i, {}, "s") for i in range(n)]


def drawn(stream, sizes):
    return [(prompt.position, prompt.row.index) for size in sizes for prompt in stream.take(size)]


@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(-2**70, 2**70), shuffle=st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_epoch_is_every_row_once_and_no_batch_mixes_epochs(n, batch, seed, shuffle):
    stream = Stream(rows_of(n), seed, shuffle)
    for epoch in range(3):
        assert stream.epoch == epoch
        batches = [stream.take(batch) for _ in range(batches_per_epoch(n, batch))]
        assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1) and 1 <= len(batches[-1]) <= batch
        prompts = [prompt for b in batches for prompt in b]
        assert [prompt.position for prompt in prompts] == list(range(epoch * n, (epoch + 1) * n))       # never the same twice
        indices = [prompt.row.index for prompt in prompts]
        assert sorted(indices) == list(range(n)) and (shuffle or indices == sorted(indices))


@given(n=st.integers(1, 30), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20), stop=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_resumed_at_any_position_the_rest_is_the_same(n, sizes, stop, seed):
    whole = Stream(rows_of(n), seed)
    before = drawn(whole, sizes[:stop])
    resumed = Stream(rows_of(n), seed)
    resumed.position = whole.position
    assert whole.position == len(before)
    assert drawn(resumed, sizes[stop:]) == drawn(whole, sizes[stop:]) and resumed.epoch == whole.epoch


def test_epochs_and_seeds_have_their_own_order():
    """Two of 5 orders of 50 rows agree by chance once in 1e63."""
    orders = [tuple(stream.order(epoch)) for seed in (0, 1) for stream in [Stream(rows_of(50), seed)] for epoch in range(5)]
    assert len(set(orders)) == 10


def test_the_order_is_this_one():
    """Pinned: a change would make every unfinished run resume into other data."""
    assert [p.row.index for p in Stream(rows_of(8), seed=1).take(8)] == [5, 0, 1, 4, 2, 6, 3, 7]


def test_an_empty_stream_is_refused():
    assert "no rows" in sentence(Stream, [], seed=0)
