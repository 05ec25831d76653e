"""tiny.py makes a model, a tokenizer and rows; the model has a skill, and a bad habit."""
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ranks
from errors import SettingsError
from examples import tiny
from forked import PYTHON

ROOT = Path(tiny.__file__).parent.parent
TOKENIZER = tiny.make_tokenizer()


@pytest.fixture
def quick(monkeypatch):
    """A warm-up of three steps."""
    short = tiny.TASKS["sort"]._replace(skill_steps=2, habit_steps=1)
    monkeypatch.setitem(tiny.TASKS, "sort", short)


# ---- the rows

def test_rows_repeat_with_their_seed_and_the_splits_share_none(monkeypatch):
    first = tiny.rows(50, 0)
    assert first == tiny.rows(50, 0) != tiny.rows(50, 1)
    assert len({row["question"] for row in first}) == 50
    test = {row["question"] for row in tiny.rows(50, 0, split="test")}
    assert not test & {row["question"] for row in tiny.rows(300, 1, split="train")}
    few = tiny.Task(lambda rng, clumsy: (f"{rng.randrange(8)}", "", ""), 1, 0, 0, 0.0)
    monkeypatch.setitem(tiny.TASKS, "few", few)
    monkeypatch.setattr(tiny, "held_out", lambda question: question == "0")
    with pytest.raises(SettingsError, match=r"1000 rows of tiny's task 'few'.* about 7 different"):
        tiny.rows(1000, 0, "few")


def test_warm_up_never_shows_a_test_question(quick, monkeypatch):
    seen, lesson = [], tiny.lesson
    monkeypatch.setattr(
        tiny, "lesson", lambda *given: seen.append(given[1]) or lesson(*given))
    with torch.random.fork_rng():
        tiny.teach(tiny.make_model(TOKENIZER), TOKENIZER, tiny.TASKS["sort"], 0)
    assert len(seen) == 3 * 128 and not any(map(tiny.held_out, seen))


# ---- the tokenizer

@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["a\tb\r\n  c  ", "Ελλάδα 數學 🦙👩‍🔬", "null \0", "two , don't"])
       | st.text().filter(lambda text: not any(special in text for special in tiny.SPECIAL)))
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text and all(0 <= i < tiny.VOCAB for i in ids)


def test_a_lesson_is_the_chat_template_and_its_own_turns_are_learned():
    question, _, turns = tiny.game(random.Random(3), 1.0)
    chat = [{"role": "user", "content": question}] + [
        {"role": ("assistant", "user")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    ids, labels = tiny.lesson(TOKENIZER, question, turns)
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == TOKENIZER.decode(ids) + "\n"  # the last line break, which nobody samples
    said = "".join(f"{turn}<|im_end|>" for turn in turns[::2])
    assert TOKENIZER.decode(labels[labels >= 0]) == said
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
