"""data.py: formats and errors, one template, one BOS, an order to resume anywhere."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import data
from data import DataArgs, Row, Stream, read
from dist import SettingsError
from examples import reasoning_gym_tasks, tiny
from examples.tiny import CHATML
from trainer.teacher import add_teacher_prompts

REAL = Path(os.environ.get("REAL_ROWS", "real_rows")).resolve()
QA = {"question": "q", "answer": "a"}


def make_tokenizer(chat_template=CHATML, bos=None):
    """tiny's; with `bos`, a post-processor puts it in front, as Llama's does."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    return tokenizer


TOKENIZER = make_tokenizer()


def load(spec, tokenizer=TOKENIZER, limit=4096, template=None, system=None, **options):
    return data.load(spec, tokenizer, DataArgs(limit, template, system), **options)


def load_rows(*rows, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(str(path), **options)


def load_row(row, **options):
    return load_rows(row, **options)[0][0]


def prompt(row, **options):
    return load_row(row, **options).prompt


def user(text):
    return {"role": "user", "content": text}


def chat(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def questions(spec, **options):
    return [row["question"] for row in read(spec, **options)[0]]


def sentence(call, *args, **options):
    """The message of a mistake, which has to be one line."""
    with pytest.raises(SettingsError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def python(command, cwd=None, **environment):
    """What a command prints in a process of its own."""
    path = {"PYTHONPATH": str(Path(data.__file__).parent)}
    return subprocess.check_output(
        [sys.executable, "-c", command], cwd=cwd, text=True, env=os.environ | path | environment)


# ---- Formats

SYSTEM = {"role": "system", "content": "Be brief."}
VERL = {"prompt": [SYSTEM, user("1+1?")], "data_source": "openai/gsm8k", "answer": "not this one",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7}}


@pytest.mark.parametrize("row, asked, answer", [
    ({"question": "1+1?", "answer": "1+1=2\n#### 2"}, chat("1+1?"), "1+1=2\n#### 2"),
    ({"prompt": "1+1?", "solution": "2", "level": 3}, chat("1+1?"), "2"),
    ({"prompt": [user("1+1?")]}, chat("1+1?"), None),
    ({"prompt": [user("1+1?"), {"role": "assistant", "content": "Let me see: <think>"}]},
     chat("1+1?") + "Let me see: <think>", None),  # the model goes on
    (VERL, "<|im_start|>system\nBe brief.<|im_end|>\n" + chat("1+1?"), "2"),
    ({"prompt": chat("finished") + "<think>"}, chat("finished") + "<think>", None),
    *(({"problem": "x", **columns}, chat("x"), answer) for columns, answer in [
        ({"solution": r"so \boxed{1}, or rather $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
        ({"solution": r"so \boxed{1}", "answer": "3"}, "3"),
        ({"solution": r"so \boxed{1}", "answer": None}, "1"), ({"solution": "no box"}, "no box"),
        ({"ground_truth": [1, 2]}, [1, 2]), ({"answer": None}, None), ({}, None),
        ({"answer": float("nan")}, None)]),  # what pandas writes for no answer
])
def test_rows_that_are_understood(row, asked, answer):
    made = load_row(row)
    assert (made.prompt, made.answer, made.index) == (asked, answer, 0)
    assert TOKENIZER.decode(made.prompt_ids) == asked and str(made.columns) == str(row)
    assert made.source.endswith(row.get("data_source", "/rows"))


def test_reasoning_gym_rows():
    """The library makes puzzle i from seed + i: seeds 1 and 2 would share all puzzles but one."""
    rows, report = load("reasoning_gym:gcd", seed=1)
    row = rows[0]
    assert "1000 of 1000 prompts kept" in report and len(rows) == 1000
    assert row.source == "reasoning_gym/gcd" and row.prompt == chat(row.columns["question"])
    for answer, value in ((row.answer, 1), ("none", 0)):
        columns = row.columns | {"answer": row.answer}
        assert reasoning_gym_tasks.score(answer, **columns) == value
    asked = {row.columns["question"] for row in rows}
    assert "spell_backwrd cannot be generated: " in sentence(read, "reasoning_gym:spell_backwrd")
    for spec, seed in ("reasoning_gym:gcd", 2), ("reasoning_gym:gcd@test", 1):
        assert len(asked & set(questions(spec, seed=seed))) < 50    # by chance: about 5


def test_reasoning_gym_rows_do_not_depend_on_the_process():
    """ransom_note iterates over sets of strings; list_functions uses the global generator."""
    command = ("import data; print([data.read('reasoning_gym:' + task, 1)[0][:4] "
               "for task in ('ransom_note', 'list_functions')])")
    outputs = {python(command, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(outputs) == 1 and len(outputs.pop()) > 100


def test_tiny_rows():
    rows, report = load("tiny", seed=5)
    assert len(rows) == data.GENERATED_ROWS and rows[0].source == "tiny"
    assert report.startswith("tiny: 1000 of 1000 prompts kept")
    again, name = read("tiny:sort@train", seed=5)
    assert again == [row.columns for row in rows] and name == "tiny/sort"
    assert not set(questions("tiny@test", seed=5)) & {row["question"] for row in again}
    for spec, whole in ("tiny:srt", "tiny:srt@train"), ("tiny@dev", "tiny:sort@dev"):
        message = sentence(read, spec)
        assert all(w in message for w in (f"no such rows: {whole}; ", "sort", "train and test"))


# ---- Real rows

@pytest.mark.skipif(not REAL.is_dir(), reason="REAL_ROWS names no folder of rows")
@pytest.mark.parametrize("file, n, answer", [
    ("gsm8k/train.jsonl", 7473, "#### 72"), ("gsm8k/test.jsonl", 1319, "#### 18"),
    ("math500/test.jsonl", 500, r"\left( 3, \frac{\pi}{2} \right)"),
    ("aime24/test.jsonl", 30, "204"),
    ("kk/7ppl-train.parquet", 900, None)])  # a whole ChatML text in each one's user message
def test_real_rows(file, n, answer):
    rows, report = load(f"{REAL}/{file}", limit=10_000)
    assert f"{n} of {n} prompts kept" in report and len(rows) == n
    assert answer is None or rows[0].answer.endswith(answer)
    for row in rows:
        columns = row.columns
        asked = columns.get("problem") or columns.get("question")
        assert row.prompt == (chat(asked) if asked else columns["prompt"][0]["content"])
        assert row.prompt_ids.count(TOKENIZER.convert_tokens_to_ids("<|im_start|>")) == 2 + (
            asked is None)


# ---- Templates

def test_system_message_replaces_the_rows_own():
    rows, _ = load_rows({"prompt": "q"}, {"prompt": [SYSTEM, user("q")]}, system="new")
    assert {row.prompt for row in rows} == {"<|im_start|>system\nnew<|im_end|>\n" + chat("q")}


def test_prompt_template_keeps_other_braces():
    """str.format would fail on \\boxed{}, fill \\boxed{answer}, and run {question.__class__}."""
    row = {"question": "Is {answer} a {level}?", "answer": "42", "level": 3}
    rest = r'\boxed{}, \boxed{answer}, \frac{1}{level}, {"json": 1}, { answer }, {question.x}, {}'
    filled = prompt(row, template="Q{question} ({level}) Use " + rest)
    assert filled == chat("QIs {answer} a {level}? (3) Use " + rest)


@pytest.mark.parametrize("row, template, asked", [
    *((row, "Think.\\n{%s}" % name, "Think.\\nq") for name in ("question", "prompt")
      for row in (QA, {"problem": "q", "answer": 2}, {"prompt": "q"}, {"prompt": [user("q")]})),
    ({"nums": [1, 2], "target": 3}, "Make {target} of {nums}.", "Make 3 of [1, 2].")])
def test_prompt_template_takes_any_column_and_either_name_of_the_prompt(row, template, asked):
    assert prompt(row, template=template) == chat(asked)


@pytest.mark.parametrize("template", ["{question} {subject}", "Solve it."])
def test_a_template_that_names_no_column_is_refused_by_its_flag(template):
    columns = {"question": "q", "answer": "a"}
    words = f" {template!r} must name one or more columns of the row (question, answer"
    assert "row 0 (counted from 0): --prompt_template" + words in sentence(
        load_rows, columns, template=template)
    made = data.make_row(0, columns, "", TOKENIZER, [], DataArgs())
    assert "--teacher_prompt" + words in sentence(
        add_teacher_prompts, [made], TOKENIZER, DataArgs(), template)


def test_no_second_bos():
    """The template writes <s> itself and the tokenizer would add another."""
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, bos="<s>")
    bos = tokenizer.bos_token_id
    assert tokenizer("x")["input_ids"][0] == bos   # it does add one by itself
    plain = make_tokenizer(None, bos="<s>")   # without a template, the tokenizer has to add it
    assert load_row(QA, tokenizer=plain).prompt_ids == [bos, *TOKENIZER("q")["input_ids"]]
    for each in (tokenizer, plain):
        rows, _ = load_rows(QA, {"prompt": "<s>already here"}, tokenizer=each)
        assert [row.prompt_ids.count(bos) for row in rows] == [1, 1]


def test_a_tokenizer_without_a_template_and_one_that_refuses():
    assert prompt(QA, tokenizer=make_tokenizer(None), system="S") == "S\n\nq"
    strict = make_tokenizer("{{ raise_exception('System role refused') }}" + CHATML)
    message = sentence(load_rows, {"prompt": "q"}, tokenizer=strict, system="S")
    assert "row 0 (counted from 0): the chat template: System role refused" in message


# ---- What is left out

def test_long_and_empty_prompts_are_counted():
    texts = ["a", "x" * 500, "  \n", "a", "", "b", None, "a"]
    rows, report = load_rows(*({"question": text, "answer": "1"} for text in texts),
                             {"prompt": []}, {"prompt": [user(" ")]}, limit=100)
    assert [row.index for row in rows] == [0, 3, 5, 7]
    n = len(TOKENIZER(chat("a"))["input_ids"])
    assert report == (
        f"{rows[0].source}: 4 of 10 prompts kept, {n} to {n} tokens; left out: 1 longer than 100 "
        f"tokens, 5 empty")
    # The template's own words do not make a question of nothing.
    _, unasked = load_rows({"prompt": ""}, {"prompt": "q"}, template="Solve: {question}")
    assert " 1 empty" in unasked
    for rest in ({}, {"prompt": "q"}, {"prompt": [user("q")]}):
        rows = {"text": "", **rest}, {"text": "q", **rest}
        assert " 1 empty" in load_rows(*rows, template="{text}")[1]


def test_no_prompt_left():
    rows = [{"prompt": "a" * n} for n in (50, 80)]
    n = len(TOKENIZER(chat("a" * 50))["input_ids"])
    assert len(load_rows(*rows, limit=n)[0]) == 1     # as long as the limit is allowed
    message = sentence(load_rows, *rows, limit=n - 1)
    assert f"no prompt is left; the shortest has more than {n - 1} tokens" in message
    assert f"--max_prompt_tokens {n} keeps it, {n + 30}" in message
    assert "all 1 prompts are empty" in sentence(load_rows, {"prompt": " "})


# ---- Files with mistakes

@pytest.mark.parametrize("name, content, what", [
    ("a.jsonl", b'{"a": 1}\n\n{"a": 1\n{"a": 2}\n', "Expecting ',' delimiter: line 4 column 1"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "can't decode byte 0xff in position 16"),
    ("a.jsonl", b'{"a": 1}\n' + b"[" * 200_000, "RecursionError: "),
    ("a.jsonl", b'{"a": 1}\nnull\n', "row 1 (counted from 0) is not a JSON object"),
    ("a.json", b'[{"a": 1},\n {"a" 2}]', "Expecting ':' delimiter: line 2 column 7"),
    ("a.parquet", b"PAR1 no table", "cannot be loaded: ArrowInvalid: "),
    ("a.csv", b"a,b\n1,2\n\n1,2,3\n", "line 4 does not fit the first line"),
    ("a.csv", b"a,a\n1,2\n", "line 2 does not fit the first line"),
    ("a.csv", b'a\n1\n"open', "cannot be loaded: Error: unexpected end of data"),
    ("a.jsonl.gz", b"", "or does not end in .jsonl, .json, .parquet, .csv."),
    ("a.jsonl", None, "a.jsonl is no file on this machine"), ("pipe.csv", None, "is no file on"),
    ("a", None, "a cannot be loaded: FileNotFoundError: "),
    *((name, content, "has no rows") for name, content in [
        ("a.csv", b"a,b\n"), ("a.jsonl", b"\n \n"), ("a.json", b"[]")])])
def test_files_with_mistakes(tmp_path, name, content, what):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    elif name == "pipe.csv":  # would be read for ever
        os.mkfifo(tmp_path / name)
    message = sentence(read, f"{tmp_path}/{name}")
    assert message.startswith(f"{tmp_path}/{name}") and what in message and len(message) < 600


LONG, TWO = "x" * 200_000, [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name, content, rows", [
    ("a.json", '\n[{"a": 1},\n{"a": 2}]', TWO), ("a.json", '{"a": 1}\n{"a": 2}', TWO),
    ("a.json", '{\n "a": 1\n}\n{"a":\n2}', TWO),
    ("a.jsonl", '\ufeff{"a": 1}\r\n\r\n{"a": 2}\r\n', TWO),
    ("a.jsonl", '{"a": "one\u2028line\x85 "}', [{"a": "one\u2028line\x85 "}]),
    # as it is written: `datasets` would guess types
    ("a.jsonl", '{"a": "1", "b": "2026-01-31"}\n{"a": 1.0, "c": {}}',
     [{"a": "1", "b": "2026-01-31"}, {"a": 1.0, "c": {}}]),
    ("a.csv", '\ufeffa,b\r\n"x, ""y""\r\nz",007\r\n\r\nNA,\r\n',
     [{"a": 'x, "y"\r\nz', "b": "007"}, {"a": "NA", "b": None}]),
    ("a.csv", f"a,b\n{LONG},1\n", [{"a": LONG, "b": "1"}])])
def test_files_that_are_in_order(tmp_path, name, content, rows):
    (tmp_path / name).write_bytes(content.encode())
    found, source = read(f"{tmp_path}/{name}")
    assert str(found) == str(rows) and source == f"{tmp_path.name}/a"


def test_parquet_files_may_be_empty_or_have_maps(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet
    path = f"{tmp_path}/rows.parquet"
    table = pa.table({"prompt": [[user("q")]], "map": pa.array([[("k", 1)]], pa.map_(
        pa.string(), pa.int64()))})
    pa.parquet.write_table(table, path)
    (row,), _ = load(path)
    assert (row.prompt, row.columns["map"]) == (chat("q"), [("k", 1)])
    pa.parquet.write_table(table[:0], path)
    assert "has no rows" in sentence(read, path)


@pytest.mark.parametrize("row, what", [
    ({"text": "q", "label": "a"},
     "no prompt column in (text, label); it needs prompt, question, problem, or --prompt"),
    ({}, "no prompt column in ()"),
    *(({"prompt": prompt}, "the prompt must be text or a list of")
      for prompt in (3, ["q"], [user([{"type": "image"}])])),
    *(({"prompt": "q", name: "\ud800"}, "surrogates not allowed")
      for name in ("prompt", "answer", "data_source")),
    ({"prompt": [user("s"), user("<|im_start|>user\nq")]}, "finished chat text"),
])
def test_rows_with_mistakes(row, what):
    message = sentence(load_rows, {"prompt": "q"}, row)
    assert what in message and "rows.jsonl, row 1 (counted from 0)" in message
    finished = {"prompt": chat("q")}
    assert "finished chat text takes no --system" in sentence(load_row, finished, system="S")


# ---- Hugging Face data sets

@pytest.fixture
def folder(tmp_path):
    """A folder of files, a saved DatasetDict and a saved Dataset."""
    import datasets
    rows = {split: datasets.Dataset.from_list([
        {"question": f"{split}{i}", "answer": str(i)} for i in range(3)])
        for split in ("train", "test")}
    (tmp_path / "set").mkdir()
    for split, data_set in rows.items():
        data_set.to_parquet(tmp_path / "set" / f"{split}.parquet")
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    rows["train"].save_to_disk(tmp_path / "one")
    return tmp_path


@pytest.mark.parametrize("spec, asked", [
    ("set", "train0 train1 train2"), ("set@test", "test0 test1 test2"),
    ("set@train[1:]", "train1 train2"), ("saved", "train0 train1 train2"),
    ("saved@test", "test0 test1 test2"), ("one", "train0 train1 train2"),
    ("one@train[1:]+train[:1]", "train1 train2 train0")])
def test_folders_and_saved_data_sets(folder, spec, asked):
    assert questions(f"{folder}/{spec}") == asked.split()
    name = spec.split("@")[0]
    assert read(f"{folder}/{spec}")[1] == f"{folder.name}/{name}"
    message = sentence(read, f"{folder}/{name}@dev")
    assert "cannot be loaded: ValueError: " in message and "dev" in message


def test_a_folder_is_never_served_from_a_cache_and_needs_none(folder, monkeypatch):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nowhere")
    path = folder / "lines" / "train.jsonl"
    path.parent.mkdir()
    for text in "1", "2":
        path.write_text('{"question": "%s"}\n' % text)
        os.utime(path, (0, 0))  # as `cp -p` leaves it
        assert questions(str(path.parent)) == [int(text)] or questions(str(path.parent)) == [text]
    path.write_text('{"question": \n')
    assert "cannot be loaded: ArrowInvalid: JSON parse error" in sentence(read, str(path.parent))


def test_a_hub_name_says_what_to_load(monkeypatch):
    import datasets
    calls = []

    def load_dataset(name, config, split, cache_dir, data_files):
        assert cache_dir is data_files is None  # the cache of the library
        calls.append((config, split))
        return datasets.Dataset.from_list([QA])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for end in ("", ":main", "@test", ":main@train[:2]"):
        assert read("openai/gsm8k" + end) == ([QA], "openai/gsm8k")
    assert calls == [(None, "train"), ("main", "train"), (None, "test"), ("main", "train[:2]")]


def test_offline_is_one_sentence(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE at import."""
    command = ("import data\ntry: data.read('gsm8k_main')\n"
               "except data.SettingsError as error: print(error)")
    output = python(command, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=f"{tmp_path}/hf")
    assert output.startswith("gsm8k_main cannot be loaded: ") and output.count("\n") == 1
    assert "Hub (OfflineModeIsEnabled)" in output


def test_importing_does_nothing():
    heavy = {"datasets", "reasoning_gym", "transformers", "pyarrow"}
    assert python(f"import sys, data; print({heavy} & set(sys.modules))") == "set()\n"


# ---- Order

def rows_of(n):
    return [Row(i, f"p{i}", [i], i, {}, "s") for i in range(n)]


@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(-2**70, 2**70),
       stop=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_an_epoch_is_every_row_once(n, batch, seed, stop):
    stream, resumed, drawn = Stream(rows_of(n), seed), Stream(rows_of(n), seed), []
    for epoch in range(3):
        assert stream.epoch == epoch
        batches = [stream.next(batch) for _ in range(-(-n // batch))]
        assert {len(b) for b in batches[:-1]} <= {batch} and 1 <= len(batches[-1]) <= batch
        prompts = [prompt for b in batches for prompt in b]
        positions = [prompt.position for prompt in prompts]     # never the same twice
        assert positions == list(range(epoch * n, (epoch + 1) * n))
        assert sorted(prompt.row.index for prompt in prompts) == list(range(n))
        drawn += batches
    resumed.restore({"position": sum(map(len, drawn[:stop]))})
    assert [resumed.next(batch) for _ in drawn[stop:]] == drawn[stop:]


def test_epochs_and_seeds_have_their_own_order():
    """Two of 5 orders of 50 rows agree by chance once in 1e63."""
    streams = [Stream(rows_of(50), seed) for seed in (0, 1)]
    orders = {tuple(p.row.index for p in s.next(50)) for s in streams for _ in range(5)}
    assert len(orders) == 10


def test_the_order_is_this_one():
    """Pinned: a change would make every unfinished run resume into other data."""
    order = [p.row.index for p in Stream(rows_of(8), seed=1).next(8)]
    assert order == [5, 0, 1, 4, 2, 6, 3, 7]


# ---- --difficulty

def by_difficulty(low, high, n=9):
    return data.StreamByDifficulty(rows_of(n), 3, low=low, high=high)


def answered(prompts, passes):
    """Samples of 8 completions of each prompt, of which passes(row's index) pass."""
    return [SimpleNamespace(prompt=p, score=SimpleNamespace(parts={"a": float(k < passes(p)),
                                                                   "b": 1.0}))
            for p in prompts for k in range(8)]


def steps_of(stream, steps):
    """[(position, index) of a step's prompts], and the last metrics. Row i is solved in i of 8."""
    found = []
    for _ in range(steps):
        prompts = stream.next(4)
        found.append([(p.position, p.row.index) for p in prompts])
        metrics = stream.note(answered(prompts, lambda p: p.row.index))
    return found, metrics


def test_difficulty_leaves_rows_out_and_comes_back():
    """Row 0 is never solved and row 8 always. Stopped anywhere, the rest is the same."""
    whole, metrics = steps_of(by_difficulty(0.1, 0.9), 18)
    asked = {}
    for position, index in (pair for step in whole for pair in step):
        asked.setdefault(position // 9, []).append(index)
    assert [sorted(asked[epoch]) for epoch in range(6)] == [
        [*range(9)], *[[*range(1, 8)]] * 3, [*range(9)], [*range(1, 8)]]
    assert (metrics["data/too_hard"], metrics["data/too_easy"]) == (1, 1)
    order = [p.row.index for stream in [Stream(rows_of(9), 3)] for _ in range(99)
             for p in stream.next(1)]  # without it: each row keeps its position
    assert all(order[position] == index for step in whole for position, index in step)
    positions = [position for step in whole for position, _ in step]
    assert positions == sorted({*positions})
    for stop in range(1, 17):
        one, other = by_difficulty(0.1, 0.9), by_difficulty(0.1, 0.9)
        first, _ = steps_of(one, stop)
        other.restore(json.loads(json.dumps(one.state())))
        assert first + steps_of(other, 18 - stop)[0] == whole


def test_rows_that_are_all_left_out_come_back_in_the_fourth_epoch():
    stream, epochs = by_difficulty(0.4, 0.6, 5), []
    for _ in range(6):
        prompts = stream.next(3)
        epochs.append(prompts[0].position // 5)
        stream.note(answered(prompts, lambda p: 0))
    assert epochs == [0, 0, 4, 4, 8, 8]


def test_a_completion_without_a_score_says_nothing_of_its_row():
    stream = by_difficulty(0.1, 0.9)
    samples = answered(stream.next(2), lambda p: 4)
    for sample in samples[:12]:
        sample.score.parts["a"] = None
    stream.note(samples)
    assert stream.rates == {samples[8].prompt.row.index: 0.0}  # its last 4 did not pass


def test_without_difficulty_the_state_is_the_position():
    args = SimpleNamespace(seed=0, data_args=DataArgs(),
                           eval_args=SimpleNamespace(eval_pass=0.5))
    stream = data.stream(args, rows_of(5))
    stream.next(3)
    assert type(stream) is Stream and stream.state() == {"position": 3}
    assert stream.note([]) == {"data/position": 3}
    args.data_args.difficulty = 0.2, 0.7
    stream = data.stream(args, rows_of(5))
    assert (stream.low, stream.high, stream.passes) == (0.2, 0.7, 0.5)
