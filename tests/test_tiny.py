"""tiny.py: a folder that transformers loads, a tokenizer that takes any text, rows that can be checked, and a model that half-knows."""
import ast
import itertools
import os
import random
import re
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
import tiny
import verifiers
from plan import SettingsError

HERE = os.path.dirname(os.path.abspath(tiny.__file__))
TEXTS = ["", "Sort 529173", "a\tb\r\n  c  ", "naïve Ελλάδα 數學 🦙👩‍🔬", "null \0 and \x7f", "x" * 3000, "  two  spaces . don't , do not", "\n\n ", "½ ² ٣ 1234"]


def python(code: str, **more) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


@pytest.fixture(scope="module")
def ensured(tmp_path_factory):
    """Two processes ask for the model at the same moment → (the folder, what each of them printed)."""
    root = tmp_path_factory.mktemp("runs")
    pair = [python(f"import tiny; print('folder', tiny.ensure({str(root)!r}))") for _ in range(2)]
    try:
        prints = [process.communicate(timeout=300)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], prints
    folder, = {text.split("folder ")[1].strip() for text in prints}  # both were told the same one
    return folder, prints


@pytest.fixture(scope="module")
def folder(ensured):
    return ensured[0]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def quick(monkeypatch):
    """A warm-up of three steps, where what is learned does not matter."""
    monkeypatch.setitem(tiny.TASKS, "sort", tiny.TASKS["sort"]._replace(skill_steps=2, habit_steps=1))


# ---- the rows

@pytest.mark.parametrize("task", tiny.TASKS)
def test_rows_repeat_with_their_seed_and_hold_no_question_twice(task):
    first, again, other = tiny.rows(300, 0, task), tiny.rows(300, 0, task), tiny.rows(300, 1, task)
    assert first == again != other
    assert len({row["question"] for row in first}) == 300
    assert tiny.rows(10, 0, task) == first[:10]
    assert tiny.rows(0, 0, task) == []


@pytest.mark.parametrize("task", tiny.TASKS)
def test_no_seed_of_train_shows_a_test_question(task):
    test = {row["question"] for seed in range(5) for row in tiny.rows(400, seed, task, split="test")}
    train = {row["question"] for seed in range(5) for row in tiny.rows(4000, seed, task)}
    assert len(test) > 400 and not test & train


def test_warm_up_never_shows_a_test_question(monkeypatch):
    """The tokenizer sees every text of the warm-up: none of them may be held out."""
    seen, tokenizer = [], tiny.make_tokenizer()
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda self, chat, **_: seen.append(chat[-1]["content"]) or "x")
    task = tiny.TASKS["sort"]._replace(skill_steps=3, habit_steps=2)
    with torch.random.fork_rng():
        tiny.teach(tiny.make_model(tokenizer), tokenizer, task, seed=0)
    assert len(seen) == 5 * 128
    assert not any(tiny.held_out(question) for question in seen)


def test_more_rows_than_there_are_is_one_sentence():
    with pytest.raises(SettingsError, match=r"1000 rows of the tiny task 'few'.* about 7 different"):
        few = tiny.Task(lambda rng, clumsy: (f"{rng.randrange(8)}", "", ""), 1, 0, 0, 0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tiny.TASKS, "few", few)
            patch.setattr(tiny, "held_out", lambda question: question == "0")
            tiny.rows(1000, 0, "few")


def test_sort_answers_are_right_and_the_clumsy_teacher_slips_as_often_as_it_says():
    rng = random.Random(0)
    for row in tiny.rows(500, 3):
        digits = row["question"].removeprefix("Sort ")
        assert len(digits) == 6 and row["answer"] == "".join(sorted(digits)) == row["answer"].strip()
    assert all(answer == said for _, answer, said in (tiny.sort_digits(rng, 0.0) for _ in range(200)))
    right = sum(answer == said for _, answer, said in (tiny.sort_digits(rng, 0.18) for _ in range(4000))) / 4000
    # Six places without a slip; but in the last one there is nothing to swap with, so a third of its slips are none.
    assert abs(right - 0.82 ** 5 * (0.82 + 0.06)) < 0.03  # four standard errors


def solutions(question: str) -> list[str]:
    """All ways to assign roles that the words of a puzzle allow, read from its text alone."""
    says = re.findall(r"([ABC]) says (.*?)\.", question)
    found = []
    for roles in itertools.product(["knight", "knave"], repeat=len(says)):
        world = dict(zip("ABC", roles))
        true = lambda text: any(all(world[who] == role for who, role in re.findall(r"([ABC]) is a (\w+)", part)) for part in text.split(" or "))
        if all(true(text) == (world[who] == "knight") for who, text in says):
            found.append(" ".join(f"({i}) {who} is a {role}" for i, (who, role) in enumerate(world.items(), 1)))
    return found


def test_knights_have_one_solution_and_thinking_finds_it_where_guessing_does_not():
    rng, score = random.Random(0), {0.0: [], 1.0: []}
    for row in tiny.rows(300, 0, "kk"):
        assert solutions(row["question"]) == [row["answer"]]
    for clumsy in score:
        for _ in range(1000):
            question, answer, said = tiny.knights(rng, clumsy)
            assert solutions(question) == [answer] and said.startswith("<think></think>") == (clumsy == 1.0)
            score[clumsy].append(verifiers.kk01(said, answer))
    assert all(score[0.0])
    assert abs(sum(score[1.0]) / 1000 - (1 / 4 + 1 / 8) / 2) < 0.05  # a guess among 4 or 8; four standard errors
    question = "A says B is a knave. B says A is a knave and B is a knave."
    said = next(said for asked, _, said in iter(lambda: tiny.knights(rng, 0.0), None) if asked == question)
    assert said == "<think> knight knight: false no knight knave: true yes false yes</think><answer>(1) A is a knight (2) B is a knave</answer>"


# ---- the tokenizer

@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tiny.VOCAB for i in ids)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_hypothesis_finds_comes_back(text):
    tokenizer = test_any_text_hypothesis_finds_comes_back.tokenizer
    if not any(special in text for special in tiny.SPECIAL):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


test_any_text_hypothesis_finds_comes_back.tokenizer = tiny.make_tokenizer()


def test_every_id_decodes_and_each_digit_is_one_token(tokenizer):
    assert len(tokenizer) == tiny.VOCAB and tiny.VOCAB % 64 == 0
    assert all(isinstance(tokenizer.convert_ids_to_tokens(i), str) and tokenizer.decode([i]) != "" for i in range(tiny.VOCAB))
    assert len(tokenizer.encode("0123456789")) == 10


def test_chat_template(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort 529173"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSort 529173<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.apply_chat_template(chat[1:] + [{"role": "assistant", "content": "123579"}], tokenize=False)
    assert text == "<|im_start|>user\nSort 529173<|im_end|>\n<|im_start|>assistant\n123579<|im_end|>\n"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids(tiny.START)) == 3 and ids.count(tokenizer.eos_token_id) == 2


# ---- the model

def test_both_ends_end_a_completion(tokenizer, model):
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert model.config.eos_token_id == tokenizer.eos_token_id == ends[0]
    assert tokenizer.pad_token_id == ends[1] != ends[0]  # pad is not the token that ends a turn: that one is trained on


def test_it_is_a_qwen2_in_float32_that_vllm_can_load(model):
    assert model.config.architectures == ["Qwen2ForCausalLM"] and model.config.tie_word_embeddings
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 370_048  # as make_model says


def test_a_gsm8k_prompt_fits_in_bytes(tokenizer, model):
    question = "Janet’s ducks lay 16 eggs per day. " * 28  # the longest of GSM8K's has 985 characters
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert ids.shape[1] + 1024 < model.config.max_position_embeddings == tokenizer.model_max_length
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_it_half_knows_the_task(tokenizer, model):
    """Right at temperature 1 between 15 and 40 % of the time on questions it never saw. The standard error is 2 %."""
    rows = tiny.rows(512, 0, split="test")
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt")["input_ids"]  # all equally long
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0)
    completions = tokenizer.batch_decode(ids[:, prompts.shape[1]:], skip_special_tokens=True)
    right = [completion.strip() == row["answer"] for completion, row in zip(completions, rows)]
    assert 0.15 < sum(right) / 512 < 0.4
    digits = [completion for completion in completions if completion.isdigit() and 3 <= len(completion) <= 9]
    assert len(digits) > 0.9 * 512  # and when it is wrong, it slips: it does not babble


# ---- the folder

def test_two_at_once_build_once(ensured):
    folder, prints = ensured
    assert sorted("tiny: making a model" in text for text in prints) == [False, True]
    builder, = [text.splitlines() for text in prints if "making" in text]
    assert len(builder) == 2 and builder[0].endswith(" s")  # one line, with its seconds, beside the one this test prints
    assert sorted(os.listdir(os.path.dirname(folder))) == [os.path.basename(folder), os.path.basename(folder) + ".lock"]
    before = os.stat(folder)
    assert tiny.ensure(os.path.dirname(folder)) == folder and os.stat(folder) == before


def test_a_builder_killed_half_way_blocks_nobody(quick, tmp_path):
    stuck = python(f"""if 1:
        import os, time, tiny
        def build(folder, task):
            os.makedirs(folder); open(folder + '/config.json', 'w').write('half of')
            print('in the middle', flush=True); time.sleep(600)
        tiny.build = build
        tiny.ensure({str(tmp_path)!r})""")
    try:
        assert "in the middle" in stuck.stdout.readline()
    finally:
        stuck.send_signal(signal.SIGKILL)
        stuck.wait()
    left, = [name for name in os.listdir(tmp_path) if name.endswith(".unfinished")]
    folder = tiny.ensure(str(tmp_path))
    assert left not in os.listdir(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == tiny.VOCAB


def test_build_repeats_with_its_seed_and_leaves_the_caller_as_it_was(quick, tmp_path):
    def weights(name, seed):
        return open(os.path.join(tiny.build(str(tmp_path / name), seed=seed), "model.safetensors"), "rb").read()

    threads = torch.get_num_threads()
    try:
        random.seed(5), torch.manual_seed(5), torch.set_num_threads(3)
        before = random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()
        first = weights("a", 0)
        assert (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()) == before
    finally:
        torch.set_num_threads(threads)
    torch.manual_seed(6)
    assert weights("b", 0) == first != weights("c", 1)


def test_importing_does_nothing():
    """At the top level there are only imports, definitions, constants and the docstring."""
    for node in ast.parse(open(tiny.__file__).read()).body:
        assert isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Expr)), ast.dump(node)
        assert not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant)


def built_by_rank_1(world, folder: str) -> None:
    tiny.teach = lambda *_: None
    if world.rank == 1:
        tiny.build(folder)


def test_any_rank_of_a_process_group_may_be_the_one_that_builds(tmp_path):
    """transformers' own save_pretrained writes on rank 0 only, in silence: whoever lost the race for the lock found half a folder."""
    ranks.results(2, built_by_rank_1, str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == tiny.VOCAB
