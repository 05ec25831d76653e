"""tiny.py makes a model, a tokenizer and rows; the model has a skill, and a bad habit."""
import ast
import io
import itertools
import os
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from dist import SettingsError
from examples import kk, tiny
from forked import PYTHON


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [PYTHON, "-c", code], cwd=Path(tiny.__file__).parent.parent, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def ensured(tmp_path_factory):
    """Two processes ask for the model at the same time -> (the folder, what each printed)."""
    root = tmp_path_factory.mktemp("runs")
    code = f"from examples import tiny; print('folder', tiny.ensure({str(root)!r}))"
    pair = [python(code), python(code)]
    prints = [process.communicate()[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], prints
    folder, = {text.split("folder ")[1].strip() for text in prints}  # the same for both
    return folder, prints


@pytest.fixture(scope="module")
def tokenizer(ensured):
    return AutoTokenizer.from_pretrained(ensured[0])


@pytest.fixture(scope="module")
def model(ensured):
    return AutoModelForCausalLM.from_pretrained(ensured[0]).eval()


@pytest.fixture
def quick(monkeypatch):
    """A warm-up of three steps."""
    short = tiny.TASKS["sort"]._replace(skill_steps=2, habit_steps=1)
    monkeypatch.setitem(tiny.TASKS, "sort", short)


TOKENIZER = tiny.make_tokenizer()


# ---- the rows

@pytest.mark.parametrize("task", tiny.TASKS)
def test_rows_repeat_with_their_seed_and_the_splits_share_none(task):
    first = tiny.rows(300, 0, task)
    assert first == tiny.rows(300, 0, task) != tiny.rows(300, 1, task)
    assert len({row["question"] for row in first}) == 300
    assert tiny.rows(10, 0, task) == first[:10] and tiny.rows(0, 0, task) == []

    def questions(n, split):
        return {
            row["question"] for seed in range(3) for row in tiny.rows(n, seed, task, split)}

    test = questions(200, "test")
    assert len(test) > 200 and not test & questions(1500, "train")


def teach(lm, task, seed=0) -> None:
    with torch.random.fork_rng():
        tiny.teach(lm, TOKENIZER, task, seed)


def test_warm_up_never_shows_a_test_question(quick, monkeypatch):
    seen, lesson = [], tiny.lesson
    monkeypatch.setattr(
        tiny, "lesson", lambda *given: seen.append(given[1]) or lesson(*given))
    teach(tiny.make_model(TOKENIZER), tiny.TASKS["sort"])
    assert len(seen) == 3 * 128 and not any(map(tiny.held_out, seen))


def test_more_rows_than_there_are_is_one_sentence(monkeypatch):
    few = tiny.Task(lambda rng, clumsy: (f"{rng.randrange(8)}", "", ""), 1, 0, 0, 0.0)
    monkeypatch.setitem(tiny.TASKS, "few", few)
    monkeypatch.setattr(tiny, "held_out", lambda question: question == "0")
    with pytest.raises(SettingsError, match=r"1000 rows of tiny's task 'few'.* about 7 different"):
        tiny.rows(1000, 0, "few")


def test_sort_answers_are_right_and_the_teacher_is_as_clumsy_as_asked():
    rng = random.Random(0)
    for row in tiny.rows(500, 3):
        assert re.fullmatch(r"Sort \d{6}", row["question"])
        assert row["answer"] == "".join(sorted(row["question"][5:]))
    for clumsy in (0.0, 0.75):
        samples = [tiny.sort_digits(rng, clumsy) for _ in range(2000)]
        assert all(reply in (answer, answer[::-1]) for _, answer, reply in samples)
        wrong = sum(reply != answer for _, answer, reply in samples) / 2000
        assert abs(wrong - clumsy) < 0.04   # four standard errors
    # Wrong in the mode: a model that only becomes surer of itself becomes surely wrong.
    assert tiny.TASKS["sort"].clumsy > 0.5 > tiny.TASKS["sharpen"].clumsy


def solutions(question: str) -> list[str]:
    """All roles that the words of a puzzle allow."""
    says, found = re.findall(r"([ABC]) says (.*?)\.", question), []
    for roles in itertools.product(["knight", "knave"], repeat=len(says)):
        world = dict(zip("ABC", roles, strict=False))
        true = [any(all(world[x] == role for x, role in re.findall(r"(.) is a (\w+)", part))
                    for part in text.split(" or ")) for _, text in says]
        if true == [world[who] == "knight" for who, _ in says]:
            found.append(" ".join(f"({i}) {x} is a {world[x]}" for i, x in enumerate(world, 1)))
    return found


def test_knights_have_one_solution_and_thinking_finds_it():
    rng = random.Random(0)
    assert all([row["answer"]] == solutions(row["question"]) for row in tiny.rows(300, 0, "kk"))

    def right(clumsy):
        samples = [tiny.knights(rng, clumsy) for _ in range(1000)]
        for question, answer, reply in samples:
            assert solutions(question) == [answer]
            assert reply.startswith("<think></think>") == (clumsy == 1.0)
        return sum(kk.kk01(reply, answer) for _, answer, reply in samples) / 1000
    # A guess among 4 or 8; four standard errors.
    assert right(0.0) == 1 and abs(right(1.0) - (1 / 4 + 1 / 8) / 2) < 0.05
    question = "A says B is a knave. B says A is a knave and B is a knave."
    samples = iter(lambda: tiny.knights(rng, 0.0), None)
    assert next(reply for asked, _, reply in samples if asked == question) == (
        "<think> knight knight: false no knight knave: true yes false yes</think>"
        "<answer>(1) A is a knight (2) B is a knave</answer>")


def test_the_teacher_of_the_game_halves_or_guesses():
    rng = random.Random(0)

    def won(clumsy, n):
        games = [tiny.game(rng, clumsy) for _ in range(n)]
        for _, secret, turns in games:
            assert len(turns) in (1, 3, 5, 7) and {*turns[1::2]} <= {"higher", "lower"}
            assert secret not in turns[:-1:2]
        return sum(turns[-1] == secret for _, secret, turns in games) / n

    # Four guesses among 15 numbers; at random 1 - (14/15)^4. Four standard errors.
    assert won(0.0, 300) == 1 and abs(won(1.0, 4000) - 0.241) < 0.03


def test_the_warm_up_teaches_its_own_turns_only(monkeypatch):
    lm, seen = tiny.make_model(TOKENIZER), []
    forward = lm.forward
    monkeypatch.setattr(lm, "forward", lambda **given: seen.append(given) or forward(**given))
    teach(lm, tiny.TASKS["guess"]._replace(skill_steps=1, habit_steps=0))
    for ids, labels in zip(seen[0]["input_ids"], seen[0]["labels"], strict=True):
        assert (labels[labels >= 0] == ids[labels >= 0]).all()
        chat = TOKENIZER.decode(ids).replace("<|endoftext|>", "")
        said = re.findall(r"assistant\n(\d+<\|im_end\|>)", chat)
        assert TOKENIZER.decode(labels[labels >= 0]) == "".join(said)
        assert chat.count("er<|im_end|>\n<|im_start|>assistant\n") == len(said) - 1


def test_a_lesson_is_the_chat_template_and_the_loss_is_that_of_one_whole_batch():
    """The template has a line break after the last turn; nobody samples it."""
    question, _, turns = tiny.game(random.Random(3), 1.0)
    chat = [{"role": "user", "content": question}] + [
        {"role": ("assistant", "user")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    ids, _ = tiny.lesson(TOKENIZER, question, turns)
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == TOKENIZER.decode(ids) + "\n"
    assert ids.tolist() == TOKENIZER.apply_chat_template(chat)["input_ids"][:len(ids)]

    torch.manual_seed(0)
    lm, task = tiny.make_model(TOKENIZER), tiny.TASKS["kk"]
    batch = tiny.lessons(TOKENIZER, task, random.Random(0), 0.5)
    parts = [batch[i:i + tiny.LIKE] for i in range(0, task.batch, tiny.LIKE)]
    n = sum(int((labels >= 0).sum()) for _, labels in batch)
    whole, cut = (sum(tiny.loss(lm, part, n).item() for part in some) for some in ([batch], parts))
    assert len(parts) == 4 and abs(whole - cut) < 1e-5
    lengths = [len(ids) for ids, _ in batch]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


# ---- the tokenizer

TEXTS = ["", "a\tb\r\n  c  ", "naïve Ελλάδα 數學 🦙👩‍🔬", "null \0 and \x7f",
         "\n\n ", "x" * 3000, "  two  spaces . don't , do not", "½ ² ٣ 1234"]
def plain(text):
    return not any(special in text for special in tiny.SPECIAL)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TEXTS) | st.text().filter(plain))
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text and all(0 <= i < tiny.VOCAB for i in ids)


def test_every_id_decodes_and_each_digit_is_one_token(tokenizer):
    assert len(tokenizer) == tiny.VOCAB and tiny.VOCAB % 64 == 0
    for i in range(tiny.VOCAB):
        assert isinstance(tokenizer.convert_ids_to_tokens(i), str) and tokenizer.decode([i]) != ""
    assert len(tokenizer.encode("0123456789")) == 10


def test_chat_template(tokenizer):
    user = {"role": "user", "content": "Sort 529173"}
    chat = [{"role": "system", "content": "Be brief."}, user]

    def render(chat, more):
        return tokenizer.decode(tokenizer.apply_chat_template(
            chat, add_generation_prompt=more)["input_ids"])

    question = "<|im_start|>user\nSort 529173<|im_end|>\n<|im_start|>assistant\n"
    assert render(chat, True) == "<|im_start|>system\nBe brief.<|im_end|>\n" + question
    reply = {"role": "assistant", "content": "123579"}
    assert render([user, reply], False) == question + "123579<|im_end|>\n"
    starts = tokenizer.encode(question).count(tokenizer.convert_tokens_to_ids(tiny.START))
    assert (starts, tokenizer.encode(question).count(tokenizer.eos_token_id)) == (2, 1)


# ---- the model

def test_it_is_a_qwen2_in_float32_that_vllm_can_load(tokenizer, model):
    config = model.config
    assert config.architectures == ["Qwen2ForCausalLM"] and config.tie_word_embeddings
    assert config.hidden_size // config.num_attention_heads >= 32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 370_048  # as make_model says
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert config.eos_token_id == tokenizer.eos_token_id == ends[0]
    # The token that ends a turn is trained on, so padding needs another.
    assert tokenizer.pad_token_id == ends[1] != ends[0]


def encode(tokenizer, questions: list[str]) -> torch.Tensor:
    """The prompts of questions that are all equally long, (B, T)."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt")["input_ids"]


@torch.no_grad()
def test_a_gsm8k_prompt_fits_in_bytes(tokenizer, model):
    ids = encode(tokenizer, ["Janet’s " * 123])  # as long as GSM8K's longest
    assert ids.shape[1] + 1024 < model.config.max_position_embeddings == tokenizer.model_max_length
    assert torch.isfinite(model(ids).logits).all()


def test_it_can_sort_and_mostly_sorts_downwards(tokenizer, model):
    """On 512 new questions: greedy at most 10 % right, sampled at most 20 %."""
    rows = tiny.rows(512, 0, split="test")
    prompts = encode(tokenizer, [row["question"] for row in rows])
    for sample, most in ((False, 0.1), (True, 0.2)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12,
                do_sample=sample, temperature=1.0, top_k=0)
        texts = tokenizer.batch_decode(ids[:, prompts.shape[1]:], skip_special_tokens=True)
        pairs = [(text.strip(), row["answer"]) for text, row in zip(texts, rows, strict=True)]
        up = sum(text == answer for text, answer in pairs) / 512
        down = sum(text == answer[::-1] for text, answer in pairs) / 512
        assert up <= most and down > 0.05, (up, down)
    assert up > 0.05   # there is something to find


# ---- the folder

def test_two_at_once_build_once(ensured):
    folder, prints = ensured
    assert sorted("tiny: making the model" in text for text in prints) == [False, True]
    root, name = os.path.split(folder)
    assert sorted(os.listdir(root)) == [name, name + ".lock"]
    before = os.stat(folder)
    assert tiny.ensure(root) == folder and os.stat(folder) == before


def test_the_name_changes_with_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "build", lambda folder, task: os.mkdir(folder))
    other = tmp_path / "tiny.py"
    other.write_text(Path(tiny.__file__).read_text().replace("_decay=0.01", "_decay=0.02"))
    first = tiny.ensure(str(tmp_path))
    monkeypatch.setattr(tiny, "__file__", str(other))
    assert first != tiny.ensure(str(tmp_path))


def test_a_builder_killed_half_way_blocks_nobody(quick, tmp_path):
    stuck = python(f"""if 1:
        import os, time
        from examples import kk, tiny
        def build(folder, task):
            os.makedirs(folder); open(folder + '/config.json', 'w').write('half of')
            print('in the middle', flush=True); time.sleep(600)
        tiny.build = build
        tiny.ensure({str(tmp_path)!r})""")
    with stuck:
        try:
            assert "making" in stuck.stdout.readline() and "middle" in stuck.stdout.readline()
        finally:
            stuck.kill()
    left, = tmp_path.glob("*.unfinished")
    folder = tiny.ensure(str(tmp_path))
    assert not left.exists()
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == tiny.VOCAB


def test_build_repeats_with_its_seed_and_leaves_the_caller_as_it_was(quick, tmp_path):
    def weights(name, seed):
        tiny.build(f"{tmp_path}/{name}", seed=seed)
        return (tmp_path / name / "model.safetensors").read_bytes()

    def state():
        return (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads())

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        before, first = state(), weights("a", 0)
        assert state() == before
    finally:
        torch.set_num_threads(threads)
    torch.manual_seed(6)
    assert weights("b", 0) == first != weights("c", 1)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_warm_up_shows_how_much_is_left(monkeypatch, terminal):
    """A bar on a terminal; in a file a line each half minute."""
    clock, out = [0.0], io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    for _ in tiny.counted(10):
        clock[0] += 16.0
    if terminal:
        assert "\r  teaching: step 3 of 10, 00:48, 01:52 left" in out.getvalue()
    else:
        assert out.getvalue().split("\n")[:2] == [
            "\r  teaching: step 2 of 10, 00:32, 02:08 left",
            "\r  teaching: step 4 of 10, 01:04, 01:36 left"]


def test_importing_does_nothing():
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)
    for node in ast.parse(Path(tiny.__file__).read_text()).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
            continue
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, allowed), ast.dump(node)


def built_by_rank_1(world, folder: str) -> None:
    tiny.teach = lambda *_: None
    if world.rank == 1:
        tiny.build(folder)


def test_any_rank_of_a_process_group_may_be_the_one_that_builds(tmp_path):
    """transformers' own save_pretrained writes on rank 0 only, and gives no error."""
    ranks.results(2, built_by_rank_1, str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == tiny.VOCAB


def test_it_is_a_command(tmp_path):
    """`python examples/tiny.py` finds the other files from any folder."""
    command = [PYTHON, tiny.__file__, "chess"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 1 and not [*tmp_path.iterdir()]
    assert done.stderr.strip().endswith(
        "error: tiny.py has no task 'chess'; it has sort, kk, guess, skilled, experts, sharpen.")
