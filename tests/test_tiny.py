"""tiny.py makes a model, a tokenizer and rows; the model has a skill, and a bad habit."""
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
from transformers import AutoModelForCausalLM

import ranks
from dist import SettingsError
from examples import kk, tiny
from forked import PYTHON

ROOT = Path(tiny.__file__).parent.parent
TOKENIZER = tiny.make_tokenizer()


@pytest.fixture
def quick(monkeypatch):
    """A warm-up of three steps."""
    short = tiny.TASKS["sort"]._replace(skill_steps=2, habit_steps=1)
    monkeypatch.setitem(tiny.TASKS, "sort", short)


# ---- the rows

@pytest.mark.parametrize("task", ["sort", "kk"])
def test_rows_repeat_with_their_seed_and_the_splits_share_none(task, monkeypatch):
    first = tiny.rows(50, 0, task)
    assert first == tiny.rows(50, 0, task) != tiny.rows(50, 1, task)
    assert len({row["question"] for row in first}) == 50 and tiny.rows(10, 0, task) == first[:10]
    test = {row["question"] for row in tiny.rows(50, 0, task, "test")}
    assert not test & {row["question"] for row in tiny.rows(300, 1, task, "train")}
    few = tiny.Task(lambda rng, clumsy: (f"{rng.randrange(8)}", "", ""), 1, 0, 0, 0.0)
    monkeypatch.setitem(tiny.TASKS, "few", few)
    monkeypatch.setattr(tiny, "held_out", lambda question: question == "0")
    with pytest.raises(SettingsError, match=r"1000 rows of tiny's task 'few'.* about 7 different"):
        tiny.rows(1000, 0, "few")


def test_warm_up_never_shows_a_test_question_and_teaches_its_own_turns_only(quick, monkeypatch):
    seen, lesson, batches = [], tiny.lesson, []
    monkeypatch.setattr(
        tiny, "lesson", lambda *given: seen.append(given[1]) or lesson(*given))
    lm = tiny.make_model(TOKENIZER)
    forward = lm.forward
    monkeypatch.setattr(lm, "forward", lambda **given: batches.append(given) or forward(**given))
    with torch.random.fork_rng():
        tiny.teach(lm, TOKENIZER, tiny.TASKS["sort"], 0)
        tiny.teach(lm, TOKENIZER, tiny.TASKS["guess"]._replace(skill_steps=1, habit_steps=0), 0)
    assert len(seen) >= 3 * 128 and not any(map(tiny.held_out, seen[:3 * 128]))
    for ids, labels in zip(batches[-1]["input_ids"], batches[-1]["labels"], strict=True):
        assert (labels[labels >= 0] == ids[labels >= 0]).all()
        chat = TOKENIZER.decode(ids).replace("<|endoftext|>", "")
        said = re.findall(r"assistant\n(\d+<\|im_end\|>)", chat)
        assert TOKENIZER.decode(labels[labels >= 0]) == "".join(said)


def test_sort_answers_are_right_and_the_teacher_is_as_clumsy_as_asked():
    rng = random.Random(0)
    assert all(row["answer"] == "".join(sorted(row["question"][5:])) for row in tiny.rows(100, 3))
    for clumsy in (0.0, 0.75):
        samples = [tiny.sort_digits(rng, clumsy) for _ in range(2000)]
        assert all(reply in (answer, answer[::-1]) for _, answer, reply in samples)
        wrong = sum(reply != answer for _, answer, reply in samples) / 2000
        assert abs(wrong - clumsy) < 0.04   # four standard errors


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
    for clumsy, share in (0.0, 1.0), (1.0, (1 / 4 + 1 / 8) / 2):  # a guess among 4 or 8
        samples = [tiny.knights(rng, clumsy) for _ in range(1000)]
        assert all(solutions(question) == [answer] for question, answer, _ in samples)
        right = sum(kk.kk01(reply, answer) for _, answer, reply in samples) / 1000
        assert abs(right - share) < 0.05


def test_the_teacher_of_the_game_halves_or_guesses():
    rng = random.Random(0)
    for clumsy, share in (0.0, 1.0), (1.0, 0.241):  # 1 - (14/15)^4
        games = [tiny.game(rng, clumsy) for _ in range(4000)]
        assert all({*turns[1::2]} <= {"higher", "lower"} for _, _, turns in games)
        assert abs(sum(turns[-1] == secret for _, secret, turns in games) / 4000 - share) < 0.03


# ---- the tokenizer

@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["a\tb\r\n  c  ", "Ελλάδα 數學 🦙👩‍🔬", "null \0", "two , don't"])
       | st.text().filter(lambda text: not any(special in text for special in tiny.SPECIAL)))
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text and all(0 <= i < tiny.VOCAB for i in ids)


def test_a_lesson_is_the_chat_template():
    """The template has a line break after the last turn; nobody samples it."""
    question, _, turns = tiny.game(random.Random(3), 1.0)
    chat = [{"role": "user", "content": question}] + [
        {"role": ("assistant", "user")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    ids, _ = tiny.lesson(TOKENIZER, question, turns)
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == TOKENIZER.decode(ids) + "\n" and text.startswith("<|im_start|>user\n")
    assert ids.tolist() == TOKENIZER.apply_chat_template(chat)["input_ids"][:len(ids)]
    # The token that ends a turn is trained on, so padding needs another.
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id == ids[-1]


# ---- the model

def test_it_can_sort_and_mostly_sorts_downwards():
    """On 512 new questions, sampled."""
    model = AutoModelForCausalLM.from_pretrained(tiny.ensure(str(ROOT / "runs"))).eval()
    rows = tiny.rows(512, 0, split="test")
    prompts = TOKENIZER.apply_chat_template(
        [[{"role": "user", "content": row["question"]}] for row in rows],
        add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12,
                             do_sample=True, temperature=1.0, top_k=0)
    texts = TOKENIZER.batch_decode(ids[:, prompts.shape[1]:], skip_special_tokens=True)
    pairs = [(text.strip(), row["answer"]) for text, row in zip(texts, rows, strict=True)]
    up, down = (sum(text == answer[::way] for text, answer in pairs) / 512 for way in (1, -1))
    assert 0.05 < up <= 0.2 and down > 0.05, (up, down)


# ---- the folder

def test_the_name_changes_with_the_code_and_a_killed_builder_blocks_nobody(
        quick, tmp_path, monkeypatch):
    stuck = subprocess.Popen([PYTHON, "-c", f"""if 1:
        import os, time
        from examples import kk, tiny
        def build(folder, task):
            os.makedirs(folder); open(folder + '/config.json', 'w').write('half of')
            print('in the middle', flush=True); time.sleep(600)
        tiny.build = build
        tiny.ensure({str(tmp_path)!r})"""], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    with stuck:
        try:
            assert any("middle" in line for line in stuck.stdout)
        finally:
            stuck.kill()
    left, = tmp_path.glob("*.unfinished")
    folder = tiny.ensure(str(tmp_path))
    assert not left.exists()
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == tiny.VOCAB
    monkeypatch.setattr(tiny, "build", lambda folder, task: os.mkdir(folder))
    assert tiny.ensure(str(tmp_path)) == folder
    other = tmp_path / "tiny.py"
    other.write_text(Path(tiny.__file__).read_text().replace("_decay=0.01", "_decay=0.02"))
    monkeypatch.setattr(tiny, "__file__", str(other))
    assert folder != tiny.ensure(str(tmp_path))


def built_by_rank_1(world, folder: str) -> None:
    short = tiny.TASKS["sort"]._replace(skill_steps=1, habit_steps=0)
    tiny.TASKS["sort"] = short
    if world.rank == 1:
        tiny.build(folder)
        state = torch.get_rng_state()
        tiny.build(folder + "2")
        assert torch.equal(torch.get_rng_state(), state)  # it leaves the caller as it was


def test_any_rank_may_build_and_the_weights_repeat(tmp_path):
    """transformers' own save_pretrained writes on rank 0 only, and gives no error."""
    ranks.results(2, built_by_rank_1, str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == tiny.VOCAB and model.dtype == torch.float32
    first, second = ((tmp_path / name / "model.safetensors").read_bytes()
                     for name in ("model", "model2"))
    assert first == second


def test_it_is_a_command(tmp_path):
    """`python examples/tiny.py` finds the other files from any folder."""
    command = [PYTHON, tiny.__file__, "chess"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 1 and not [*tmp_path.iterdir()]
    assert "error: tiny.py has no task 'chess'; it has sort, kk," in done.stderr
