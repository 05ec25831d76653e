"""data.py: formats and errors, one template, an order to resume anywhere."""
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import permutations, product
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import fakes
import rewards
from data import DataArgs, Row, Stream, read
from errors import SettingsError
from examples import reasoning_gym_tasks, tiny
from examples.tiny import CHATML

QA = {"question": "q", "answer": "a"}


def make_tokenizer(chat_template=CHATML):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
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
    ({"prompt": [user("1+1?"), {"role": "assistant", "content": "Let me see: <think>"}]},
     chat("1+1?") + "Let me see: <think>", None),  # the model goes on
    (VERL, "<|im_start|>system\nBe brief.<|im_end|>\n" + chat("1+1?"), "2"),
    ({"prompt": chat("finished") + "<think>"}, chat("finished") + "<think>", None),
    *(({"problem": "x", **columns}, chat("x"), answer) for columns, answer in [
        ({"solution": r"so \boxed{1}, or rather $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
        ({"solution": r"so \boxed{1}", "answer": None}, "1"), ({"solution": "no box"}, "no box"),
        ({"ground_truth": [1, 2]}, [1, 2]),
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


def test_a_scorer_that_pays_anything_is_refused():
    """Of game_of_life_halting any text that is not empty would be right."""
    pytest.importorskip("reasoning_gym")
    words = "reasoning_gym:game_of_life_halting cannot be learned: the library's scorer gives full"
    assert words in sentence(read, "reasoning_gym:game_of_life_halting")
    import reasoning_gym
    row = reasoning_gym.create_dataset("game_of_life_halting", size=1, seed=1)[0]
    with pytest.raises(ValueError, match="gives full pay to any text"):
        reasoning_gym_tasks.score("zzz", **row)


def test_puzzles_without_an_answer_of_their_own_are_scored_by_their_metadata():
    pytest.importorskip("reasoning_gym")
    rows, _ = load("reasoning_gym:graph_color", seed=1)
    needs, _ = rewards.check(["reasoning_gym"], fakes.args())
    rewards.check_rows(needs, rows)
    right = json.dumps(rows[0].columns["metadata"]["possible_answer"])
    items = [rewards.Item("", text, rows[0].answer, rows[0].columns, 1, False)
             for text in (f"<answer>{right}</answer>", "zzz", "{}")]
    with closing(rewards.Pool(["reasoning_gym"], fakes.args(reward_workers=1))) as pool:
        scores = [score.total for score in rewards.scores_of(pool, items)]
    assert rows[0].answer is None and scores[0] == 1 and max(scores[1:]) < 0.1


def test_a_puzzle_that_lost_its_answer_is_refused():
    pytest.importorskip("reasoning_gym")
    columns = read("reasoning_gym:gcd", 1)[0][0] | {"answer": None}
    with pytest.raises(ValueError, match="have an answer, and the row has none"):
        reasoning_gym_tasks.score("3", **columns)


def test_reasoning_gym_rows_do_not_depend_on_the_process(monkeypatch):
    """ransom_note iterates over sets of strings; list_functions uses the global generator."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    found = {task: crc32(repr(read(f"reasoning_gym:{task}", 1)[0][:40]).encode())
             for task in ("ransom_note", "list_functions")}
    assert found == {"ransom_note": 1851662582, "list_functions": 1094492425}  # 0.1.25


def test_tiny_rows():
    rows, report = load("tiny", seed=5)
    assert len(rows) == data.GENERATED_ROWS and rows[0].source == "tiny"
    assert report.startswith("tiny: 1000 of 1000 prompts kept")
    again, name = read("tiny:sort@train", seed=5)
    assert again == [row.columns for row in rows] and name == "tiny/sort"
    assert not set(questions("tiny@test", seed=5)) & {row["question"] for row in again}
    message = sentence(read, "tiny:srt")
    assert all(w in message for w in ("no such rows: tiny:srt@train; ", "sort", "train and test"))


# ---- Templates

def test_prompt_template_keeps_other_braces():
    """str.format would fail on \\boxed{}, fill \\boxed{answer}, and run {question.__class__}."""
    row = {"question": "Is {answer} a {level}?", "answer": "42", "level": 3}
    rest = r'\boxed{}, \boxed{answer}, \frac{1}{level}, {"json": 1}, { answer }, {question.x}, {}'
    filled = prompt(row, template="Q{question} ({level}) Use " + rest)
    assert filled == chat("QIs {answer} a {level}? (3) Use " + rest)


@pytest.mark.parametrize("row, template, asked", [
    ({"prompt": [user("q")]}, "Think.\\n{question}", "Think.\\nq"),
    (QA, "Think.\\n{prompt}", "Think.\\nq"),
    ({"nums": [1, 2], "target": 3}, "Make {target} of {nums}.", "Make 3 of [1, 2].")])
def test_prompt_template_takes_any_column_and_either_name_of_the_prompt(row, template, asked):
    assert prompt(row, template=template) == chat(asked)


def test_a_template_that_names_no_column_is_refused_by_its_flag():
    for template in "{question} {subject}", "Solve it.":
        words = f" {template!r} must name one or more columns of the row (question, answer"
        assert "row 1: --prompt_template" + words in sentence(
            load_rows, QA, template=template)


def test_system_replaces_the_rows_own_message_and_a_template_may_refuse_it():
    rows, _ = load_rows({"prompt": "q"}, {"prompt": [SYSTEM, user("q")]}, system="new")
    assert {row.prompt for row in rows} == {"<|im_start|>system\nnew<|im_end|>\n" + chat("q")}
    assert prompt(QA, tokenizer=make_tokenizer(None), system="S") == "S\n\nq"
    strict = make_tokenizer("{{ raise_exception('System role refused') }}" + CHATML)
    message = sentence(load_rows, {"prompt": "q"}, tokenizer=strict, system="S")
    assert "row 1: the chat template: System role refused" in message


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
    for rest in ({}, {"prompt": "q"}):
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
    ("a.jsonl", b'{"a": 1}\nnull\n', "row 2 is not a JSON object"),
    ("a.parquet", b"PAR1 no table", "cannot be loaded: ArrowInvalid: "),
    ("a.csv", b"a,b\n1,2\n\n1,2,3\n", "line 4 does not fit the first line"),
    ("a.csv", b'a\n1\n"open', "cannot be loaded: Error: unexpected end of data"),
    ("a.jsonl.gz", b"", "or does not end in .jsonl, .json, .parquet, .csv."),
    ("a/train.tsv", b"prompt\tanswer\nq\t007\n", "does not end in .jsonl,"),
    ("pipe.csv", None, "is no file on this machine"),
    ("a.csv", b"a,b\n", "has no rows")])
def test_files_with_mistakes(tmp_path, name, content, what):
    if content is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        name = name.removesuffix("/train.tsv")
    elif name == "pipe.csv":  # would be read for ever
        os.mkfifo(tmp_path / name)
    message = sentence(read, f"{tmp_path}/{name}")
    assert message.startswith(f"{tmp_path}/{name}") and what in message and len(message) < 600


LONG, TWO = "x" * 200_000, [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name, content, rows", [
    ("a.json", '\n[{"a": 1},\n{"a": 2}]', TWO), ("a.json", '{\n "a": 1\n}\n{"a":\n2}', TWO),
    ("a.jsonl", '\ufeff{"a": "one\u2028line\x85 "}\r\n\r\n', [{"a": "one\u2028line\x85 "}]),
    # as it is written: `datasets` would guess types
    ("a.jsonl", '{"a": "1", "b": "2026-01-31"}\n{"a": 1.0, "c": {}}',
     [{"a": "1", "b": "2026-01-31"}, {"a": 1.0, "c": {}}]),
    ("a.csv", f'\ufeffa,b\r\n"x, ""y""\r\nz",007\r\n\r\nNA,\r\n{LONG},1\n',
     [{"a": 'x, "y"\r\nz', "b": "007"}, {"a": "NA", "b": None}, {"a": LONG, "b": "1"}])])
def test_files_that_are_in_order(tmp_path, name, content, rows):
    (tmp_path / name).write_bytes(content.encode())
    found, source = read(f"{tmp_path}/{name}")
    assert str(found) == str(rows) and source == f"{tmp_path.name}/a"


def test_parquet_files_may_be_empty_or_have_maps(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet
    path = f"{tmp_path}/rows.parquet"
    table = pa.table({"prompt": ["q"], "map": pa.array([[("k", 1)]], pa.map_(
        pa.string(), pa.int64()))})
    pa.parquet.write_table(table, path)
    assert read(path)[0][0]["map"] == [("k", 1)]
    pa.parquet.write_table(table[:0], path)
    assert "has no rows" in sentence(read, path)


def test_a_mistake_names_its_row_and_a_finished_chat_takes_no_system():
    message = sentence(load_rows, {"prompt": "q"}, {"text": "q"})
    assert "rows.jsonl, row 2: no prompt column" in message
    finished = {"prompt": chat("q")}
    assert "finished chat text takes no --system" in sentence(load_row, finished, system="S")


# ---- Hugging Face data sets

def test_a_hub_name_says_what_to_load(monkeypatch):
    import datasets
    calls = []

    def load_dataset(name, config, split):  # the cache of the library
        calls.append((config, split))
        return datasets.Dataset.from_list([QA])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for end in ("", "@test", ":main@train[:2]"):
        assert read("openai/gsm8k" + end) == ([QA], "openai/gsm8k")
    assert calls == [(None, "train"), (None, "test"), ("main", "train[:2]")]


def test_importing_does_nothing_and_offline_is_one_sentence(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE at import."""
    command = ("import sys, data\n"
               "print({'datasets', 'reasoning_gym', 'transformers', 'pyarrow'} & {*sys.modules})\n"
               "try: data.read('gsm8k_main')\n"
               "except data.SettingsError as error: print(error)")
    output = python(command, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=f"{tmp_path}/hf")
    assert output.startswith("set()\ngsm8k_main cannot be loaded: ") and output.count("\n") == 2
    assert "Hub (OfflineModeIsEnabled)" in output


def test_a_folder_is_refused_with_the_function_that_reads_it(tmp_path):
    """The function of the sentence reads what save_to_disk wrote."""
    import datasets
    datasets.Dataset.from_list([QA]).save_to_disk(tmp_path / "saved")
    message = sentence(read, f"{tmp_path}/saved")
    code = message.partition("`")[2].rpartition("`")[0].replace("FOLDER", f"{tmp_path}/saved")
    (tmp_path / "mine.py").write_text(f"import datasets\n{code}\n")
    assert read(f"{tmp_path}/mine.py:rows")[0] == [QA]


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_the_same_in_every_file(tmp_path, seed):
    rng = random.Random(seed)
    values = ["007", "7", "1e5", "2026-01-31", "NA", "true", "é\n", "[1]", "x", ""]
    rows = [{key: rng.choice(values) or None for key in ("question", "b")}
            for _ in range(rng.randint(1, 5))]
    import datasets
    features = datasets.Features(question=datasets.Value("string"), b=datasets.Value("string"))
    for kind in data.FILES:
        path = tmp_path / f"rows{kind}"
        if kind in (".jsonl", ".json"):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            made = datasets.Dataset.from_list(rows, features)
            (made.to_csv if kind == ".csv" else made.to_parquet)(path)
        assert read(str(path))[0] == rows, kind


# ---- Order

def rows_of(n):
    return [Row(i, f"p{i}", [i], i, {}, "s") for i in range(n)]


@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(-2**70, 2**70),
       stop=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_an_epoch_is_every_row_once(n, batch, seed, stop):
    stream, drawn = Stream(rows_of(n), seed), []
    for epoch in range(3):
        assert stream.epoch == epoch
        batches = [stream.next(batch) for _ in range(-(-n // batch))]
        assert {len(b) for b in batches[:-1]} <= {batch} and 1 <= len(batches[-1]) <= batch
        prompts = [prompt for b in batches for prompt in b]
        positions = [prompt.position for prompt in prompts]     # never the same twice
        assert positions == list(range(epoch * n, (epoch + 1) * n))
        assert sorted(prompt.row.index for prompt in prompts) == list(range(n))
        drawn += batches
    resumed = Stream(rows_of(n), seed, position=sum(map(len, drawn[:stop])))
    assert [resumed.next(batch) for _ in drawn[stop:]] == drawn[stop:]


def test_epochs_and_seeds_have_their_own_order_and_it_is_this_one():
    """A change would make every unfinished run resume into other data."""
    streams = [Stream(rows_of(8), seed=seed) for seed in (0, 1)]
    orders = [[p.row.index for p in s.next(8)] for s in streams for _ in range(5)]
    assert len({*map(tuple, orders)}) == 10 and orders[5] == [5, 0, 1, 4, 2, 6, 3, 7]


def test_a_large_file_shows_how_far_it_is(tmp_path, capsys, monkeypatch):
    real = data.tqdm
    monkeypatch.setattr(data, "tqdm", lambda rows, spec, **how: real(
        rows, spec, **how | {"delay": 0, "mininterval": 0}))
    (tmp_path / "a.jsonl").write_text('{"question": "Sort 21", "answer": "12"}\n' * 9)
    for rank, shown in ("0", True), ("1", False):
        monkeypatch.setenv("RANK", rank)
        load(str(tmp_path / "a.jsonl"))
        assert ("a.jsonl: 100%" in capsys.readouterr().err) == shown


OWN = """
def drawn(seed):
    for n in range(3):
        yield {"prompt": f"What is {n} + {seed}?", "answer": n + seed}


def listed(seed):
    return list(drawn(seed))


def empty(seed):
    return []


def texts(seed):
    return [{"prompt": "a"}, "b"]


def broken(seed):
    return [{}[seed]]


def without():
    return [{"prompt": "a"}]
"""


def test_rows_of_a_function_are_those_of_a_file_that_holds_them(tmp_path):
    """A function of a seed, which returns or yields dicts, in the place of a file."""
    path = tmp_path / "own_rows.py"
    path.write_text(OWN)
    rows = [{"prompt": f"What is {n} + 7?", "answer": n + 7} for n in range(3)]
    kept = tmp_path / "rows.jsonl"
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in "drawn", "listed":
        found, source = data.read(f"{path}:{name}", 7)
        assert found == rows == data.read(str(kept))[0] and source == f"own_rows.py:{name}"


@pytest.mark.parametrize("name, words", [
    ("empty", "it gave none"), ("texts", "row 2 is 'b', which is no dict"), ("broken", "(7)"),
    ("without", "takes 0 positional arguments but 1 was given"), ("gone", "no attribute 'gone'")])
def test_what_gives_no_rows_is_one_sentence_that_names_the_function(tmp_path, name, words):
    path = tmp_path / "own_rows.py"
    path.write_text(OWN)
    with pytest.raises(SettingsError) as error:
        data.read(f"{path}:{name}", 7)
    assert words in str(error.value)
    assert f"own_rows.py:{name} must be a function" in str(error.value)


def test_a_file_of_rows_that_is_not_there_is_named():
    with pytest.raises(SettingsError, match="there is no file nowhere.py here or in"):
        data.read("nowhere.py:rows")


def test_countdowns_rows_can_be_solved_and_held_out_ones_are_others():
    from examples import countdown
    rows, held_out = [*countdown.rows(0, 50)], [*countdown.held_out(0)]
    assert rows == [*countdown.rows(0, 50)] != [*countdown.rows(1, 50)] and len(held_out) == 256
    for row in rows[:8]:
        orders, signs = permutations(row["nums"]), [*product("+-*/", repeat=len(row["nums"]) - 1)]
        tried = (f"{'(' * (len(order) - 1)}{order[0]}" + "".join(
            f"{sign}{n})" for sign, n in zip(chosen, order[1:], strict=True))
            for order in orders for chosen in signs)
        assert any(countdown.countdown(f"<answer>{text}</answer>", **row) for text in tried)
