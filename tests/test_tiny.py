"""tiny.py makes a model, a tokenizer and rows; the model has a skill, and a bad habit."""
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import ranks
from examples import tiny
from families import ROOT

TOKENIZER = tiny.make_tokenizer()


def test_any_text_comes_back():
    """Every character of Unicode, and what a tokenizer may tidy up."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    for text in every, "a\tb\r\n  c  ", "two , don't":
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert TOKENIZER.decode(ids) == text and max(ids) < tiny.VOCAB


def test_it_can_sort_and_mostly_sorts_downwards():
    """On 512 questions of the test split, which the warm-up never shows, sampled."""
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
    up, down = (sum(text.strip() == row["answer"][::way] for text, row in zip(
        texts, rows, strict=True)) / 512 for way in (1, -1))
    assert 0.05 < up <= 0.2 and down > 0.05, (up, down)


def built_by_rank_1(world, folder: str) -> list:
    tiny.TASKS["sort"] = tiny.TASKS["sort"]._replace(skill_steps=1, habit_steps=1)
    seen, lesson = [], tiny.lesson
    tiny.lesson = lambda *given: seen.append(given[1]) or lesson(*given)
    for name in "12" * world.rank:
        tiny.build(folder + name)
    return seen


def test_any_rank_may_build_and_the_weights_repeat(tmp_path):
    """transformers' own save_pretrained writes on rank 0 only, and gives no error. No question of
    the test split is shown."""
    _, seen = ranks.results(2, built_by_rank_1, str(tmp_path / "model"))
    assert len(seen) == 2 * 2 * 128 and not any(map(tiny.held_out, seen))
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
                     for name in ("model1", "model2"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_killed_builder_blocks_nobody(tmp_path, monkeypatch):
    """Its lock is free, and its folder is written over. The name changes with the code."""
    folder = tiny.place(str(tmp_path))
    Path(folder + ".lock").touch()
    Path(folder + ".unfinished").mkdir()
    monkeypatch.setattr(tiny, "build", lambda folder, task: Path(folder).mkdir(exist_ok=True))
    assert tiny.ensure(str(tmp_path)) == tiny.ensure(str(tmp_path)) == folder
    assert not Path(folder + ".unfinished").exists()
    monkeypatch.setattr(tiny, "__file__", __file__)
    assert tiny.place(str(tmp_path)) != folder
