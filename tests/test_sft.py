"""sft.py: the loss is transformers' own, the masks are exact, and a killed run goes on.

The chats go through the shipped `chats.load`, `sft.learn` and command line. The masks are compared
with transformers' {% generation %}, which is another way to find them.
"""
import json
import random

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import faults
import sft
from chats import targets as chats
from data import Prompt
from dist import SettingsError
from examples import tiny
from preflight import plan, rules
from tools.trial import Trial, run_trials
from trainer import model
from trainer.batch import given

# The families' published templates, with the roles that they name. The text in «» is what the
# assistant says: transformers' {% generation %} in the reference, nothing in what is tested.
TURN = ("{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT{% else %}OTHER{% endif "
        "%}{% endfor %}{% if add_generation_prompt %}HEADER{% else %}TAIL{% endif %}")


def template(other: str, assistant: str, header: str, before: str = "", tail: str = "") -> str:
    return before + TURN.replace("OTHER", other).replace("ASSISTANT", assistant).replace(
        "HEADER", header).replace("TAIL", tail)


ROLE, SAID, TRIMMED = "{{ m['role'] }}", "{{ m['content'] }}", "{{ m['content'] | trim }}"
NOT_LAST = "{% if not loop.last %}{{ '\\n' }}{% endif %}"
DEFAULT = ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, a helpful "
           "assistant.<|im_end|>\n{% endif %}")
TEMPLATES = {  # name: (control tokens, the last is eos_token; what ends a turn; template)
    "qwen2.5": ("<|im_start|> <|im_end|>", "<|im_end|>", template(
        f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n", f"<|im_start|>assistant\n«{SAID}<|im_end|>»\n",
        "<|im_start|>assistant\n", DEFAULT)),
    "llama 3": ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>",
                template(
        f"<|start_header_id|>{ROLE}<|end_header_id|>\n\n{TRIMMED}<|eot_id|>",
        f"<|start_header_id|>assistant<|end_header_id|>\n\n«{TRIMMED}<|eot_id|>»",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>")),
    "mistral": ("<s> [INST] [/INST] </s>", "</s>", template(
        f"[INST] {SAID} [/INST]", f"« {SAID}</s>»", "", "<s>")),
    "gemma 2": ("<bos> <start_of_turn> <end_of_turn> <eos>", "<end_of_turn>", template(
        f"<start_of_turn>{ROLE}\n{TRIMMED}<end_of_turn>\n",
        f"<start_of_turn>model\n«{TRIMMED}<end_of_turn>»\n", "<start_of_turn>model\n", "<bos>")),
    "phi 3": ("<|user|> <|assistant|> <|system|> <|end|> <|endoftext|>", "<|end|>", template(
        f"<|{ROLE}|>\n{SAID}<|end|>\n", f"<|assistant|>\n«{SAID}<|end|>»\n", "<|assistant|>\n",
        tail="<|endoftext|>")),
    "phi 4": ("<|im_start|> <|im_sep|> <|endoftext|> <|im_end|>", "<|im_end|>", template(
        f"<|im_start|>{ROLE}<|im_sep|>{SAID}<|im_end|><|im_start|>assistant<|im_sep|>",
        f"«{SAID}<|im_end|>»", "")),
    "zephyr": ("<|user|> <|assistant|> </s>", "</s>", template(
        f"<|{ROLE}|>\n{SAID}</s>\n", f"<|assistant|>\n«{SAID}</s>»\n", "<|assistant|>\n")),
    "olmo 2": ("<|user|> <|assistant|> <|endoftext|>", "<|endoftext|>", template(
        f"<|{ROLE}|>\n{SAID}\n", f"<|assistant|>\n«{SAID}<|endoftext|>»{NOT_LAST}",
        "<|assistant|>\n", "<|endoftext|>")),
    "granite": ("<|start_of_role|> <|end_of_role|> <|end_of_text|>", "<|end_of_text|>", template(
        f"<|start_of_role|>{ROLE}<|end_of_role|>{SAID}<|end_of_text|>\n",
        f"<|start_of_role|>assistant<|end_of_role|>«{SAID}<|end_of_text|>»\n",
        "<|start_of_role|>assistant<|end_of_role|>")),
    "cohere": ("<BOS> <|START|> <|USER|> <|CHATBOT|> <|END|>", "<|END|>", template(
        f"<|START|><|USER|>{SAID}<|END|>", f"<|START|><|CHATBOT|>«{SAID}<|END|>»",
        "<|START|><|CHATBOT|>", "<BOS>")),
    "plain text": ("</s>", "</s>", template(
        f"### {ROLE}:\n{SAID}\n\n", f"### assistant:\n«{SAID}</s>»\n\n", "### assistant:\n"))}
CHAT = [{"role": "user", "content": "Sort 31"}, {"role": "assistant", "content": "13"},
        {"role": "user", "content": " what\n\nelse? "},
        {"role": "assistant", "content": "true or false\n  <b>yes</b>"},
        {"role": "user", "content": "no"}, {"role": "assistant", "content": "é 99"}]


def tokenizer_of(controls: str, text: str):
    made, controls = tiny.make_tokenizer(), controls.split()
    made.add_special_tokens({"additional_special_tokens": controls, "eos_token": controls[-1]})
    made.chat_template = text.replace("«", "").replace("»", "")
    return made


def load(tmp_path, rows: list[dict], tokenizer, ends=None, **flags):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = [tokenizer.eos_token_id] if ends is None else ends
    return chats.load(str(path), tokenizer, plan.changed(sft.Args(), **flags), ends)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_the_template_says(tmp_path, name):
    controls, turn_ends, text = TEMPLATES[name]
    tokenizer = tokenizer_of(controls, text)
    ends = tokenizer.convert_tokens_to_ids([*{turn_ends, tokenizer.eos_token}])
    (row,), _ = load(tmp_path, [{"messages": CHAT}], tokenizer, ends)
    end = "{% endgeneration %}"
    # Jinja takes away a newline after a block.
    marked = text.replace("«", "{% generation %}").replace("»\n", end + "{{ '\\n' }}")
    marked = marked.replace("»", end)
    theirs = tokenizer.apply_chat_template(CHAT, chat_template=marked, return_dict=True,
                                           return_assistant_tokens_mask=True)
    ids, learned = row.target
    n = len(row.prompt_ids) + len(ids)
    assert row.prompt_ids + ids == theirs["input_ids"][:n]
    assert [0] * len(row.prompt_ids) + learned == theirs["assistant_masks"][:n]
    assert not any(theirs["assistant_masks"][n:]) and sum(learned) > 6
    assert learned[-1] and ids[-1] == tokenizer.convert_tokens_to_ids(turn_ends)


def test_a_template_that_ends_no_turn_is_learned_with_the_header_that_follows(tmp_path):
    """GLM's: its end-of-sequence ids have <|user|>."""
    tokenizer = tokenizer_of("<|user|> <|assistant|> <|endoftext|>", template(
        f"<|{ROLE}|>\n{SAID}", f"<|assistant|>\n{SAID}", "<|assistant|>\n", "<sop>"))
    user, assistant, end = tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|assistant|>", "<|endoftext|>"])
    (row,), _ = load(tmp_path, [{"messages": CHAT[:4]}], tokenizer, [user, end])
    ids, learned = row.target
    said = [i for i, here in zip(ids, learned, strict=True) if here]
    one, two = (tokenizer(m["content"], add_special_tokens=False)["input_ids"]
                for m in (CHAT[1], CHAT[3]))
    assert said == one + [user] + two + [end]
    with pytest.raises(SettingsError, match="which is no end of a turn"):
        load(tmp_path, [{"messages": CHAT[:4]}], tokenizer, [end])


def test_a_template_that_rewrites_earlier_turns_is_refused_in_one_sentence(tmp_path):
    """Qwen3's drops the thoughts of earlier turns. One turn is no trouble."""
    controls, _, text = TEMPLATES["qwen2.5"]
    thoughts = text.replace(f"«{SAID}", "{% if not loop.last %}{{ m['content'].split('</think>')"
                            "[-1] }}{% else %}{{ m['content'] }}{% endif %}")
    tokenizer = tokenizer_of(controls, thoughts)
    thought = [CHAT[0], {"role": "assistant", "content": "<think>a</think>13"}]
    (row,), _ = load(tmp_path, [{"messages": thought}], tokenizer)
    assert all(row.target[1])
    with pytest.raises(SettingsError, match="row 1 .* rewrites what comes before .* Would work: "
                       "one row for each turn"):
        load(tmp_path, [{"messages": thought}, {"messages": thought + CHAT[2:4]}], tokenizer)


def test_prompt_and_answer_are_a_chat_of_two_messages(tmp_path):
    tokenizer = tiny.make_tokenizer()
    rows, note = load(tmp_path, [
        {"messages": CHAT[:2]}, {"prompt": "Sort 31", "completion": "13"},
        {"question": "Sort 31", "answer": "13"},
        {"prompt": CHAT[:1], "completion": [CHAT[1]], "answer": "other"},
        {"messages": [*CHAT[:2], CHAT[2]]}], tokenizer)  # what nobody answers is left out
    assert len({(row.prompt, tuple(row.prompt_ids), str(row.target)) for row in rows}) == 1
    assert "3 to 3 tokens, 15 in all to learn" in note
    tokenizer.chat_template = None
    (row,), _ = load(tmp_path, [{"messages": CHAT[:4]}], tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.decode(row.target[0]) == (
        f"13{end}\n\n{CHAT[2]['content']}\n\n{CHAT[3]['content']}{end}")
    assert sum(row.target[1]) == len(tokenizer(f"13{end}{CHAT[3]['content']}{end}")["input_ids"])


def test_a_template_makes_the_prompt_of_any_columns(tmp_path):
    (row,), _ = load(tmp_path, [{"instruction": "Sort", "input": "31", "answer": "13"}],
                     tiny.make_tokenizer(), prompt_template="{instruction} {input}")
    (plain,), _ = load(tmp_path, [{"prompt": "Sort 31", "answer": "13"}], tiny.make_tokenizer())
    assert (row.prompt_ids, row.target) == (plain.prompt_ids, plain.target)


def test_a_system_message_stands_before_the_chat(tmp_path):
    controls, _, text = TEMPLATES["qwen2.5"]
    tokenizer = tokenizer_of(controls, text.replace(DEFAULT, ""))
    (plain,), _ = load(tmp_path, [{"messages": CHAT}], tokenizer)
    (row,), _ = load(tmp_path, [{"messages": CHAT}], tokenizer, system="no")
    assert "no" in row.prompt and len(row.prompt_ids) > len(plain.prompt_ids)
    assert row.target == plain.target


def test_a_turn_has_ids_of_its_own_where_a_tokenizer_would_join(tmp_path):
    """"a" and "b" are one token, "ab". The prompt ends with "a", as in a rollout."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    (row,), _ = load(tmp_path, [{"prompt": "ba", "completion": "b"}], tokenizer)
    assert tokenizer("bab")["input_ids"] == [1, 2]
    assert row.prompt_ids == [1, 0] and row.target == ([1, 3], [True, True])


@pytest.mark.parametrize("row, words", [
    ({"messages": CHAT[:1]}, "needs a message of the role assistant"),
    ({"prompt": "Sort", "completion": CHAT[:1]}, "needs a message of the role assistant"),
    ({"messages": "Sort"}, "messages must be a list of"),
    ({"prompt": "Sort 31"}, "a row to learn needs messages, or a prompt and a text in one of"),
    ({"question": "Sort 31", "answer": 13}, "answer must be a list of"),
    ({"prompt": "x", "answer": "\ud800"}, "row 0 .* surrogates not allowed"),
    ({"x": "Sort 31", "answer": "13"}, "no prompt column in"),
    ({"prompt": "x", "answer": "1" * 300}, "--max_tokens 301 keeps it")])
def test_rows_that_teach_nothing_are_refused(tmp_path, row, words):
    with pytest.raises(SettingsError, match=words):
        load(tmp_path, [row], tiny.make_tokenizer())


def test_longer_chats_are_left_out_and_counted(tmp_path):
    rows = [{"messages": CHAT[:2]}, {"messages": CHAT}]
    (_, row), _ = load(tmp_path, rows, tiny.make_tokenizer())
    longest = len(row.target[0])
    for limit, kept in (longest, 2), (longest - 1, 1):  # a row of exactly --max_tokens is kept
        found, note = load(tmp_path, rows, tiny.make_tokenizer(), max_tokens=limit)
        assert len(found) == kept and f"left out: {2 - kept} longer than {limit}" in note


# ---- the update ----

def random_chats(n: int) -> list[dict]:
    """Of one to three turns; some share their prompt."""
    rng, rows = random.Random(0), []
    for i in range(n):
        words = ["".join(rng.choice("abc 123\n") for _ in range(rng.randint(1, 20)))
                 for _ in range(2 * rng.randint(1, 3))]
        words[0] = f"q{i // 2}"
        rows.append({"messages": [{"role": ("user", "assistant")[k % 2], "content": text}
                                  for k, text in enumerate(words)]})
    return rows


def reference_gradient(folder: str, samples) -> dict[str, torch.Tensor]:
    """transformers' own loss, one row after another: labels are -100 where nothing is learned."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    n = sum(s.completion.tokens for s in samples)
    for sample in samples:
        prompt, done = sample.prompt.row.prompt_ids, sample.completion
        ids = torch.tensor([prompt + done.ids.tolist()])
        labels = torch.full_like(ids, -100)
        labels[0, len(prompt):][done.sampled] = ids[0, len(prompt):][done.sampled]
        with model.Float64():  # else it rounds to float32 in norms and in the loss
            lm(input_ids=ids, labels=labels, num_items_in_batch=n).loss.backward()
    return {name: p.grad for name, p in lm.named_parameters()}


def test_the_gradient_is_that_of_transformers_on_1_to_4_ranks(tmp_path):
    tokenizer = tiny.make_tokenizer()
    rows, _ = load(tmp_path, random_chats(11), tokenizer)
    samples = [given(Prompt(i, row)) for i, row in enumerate(rows)]
    assert any(False in s.completion.sampled for s in samples)
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        initializer_range=0.15, eos_token_id=None, bos_token_id=None))
    lm.double().save_pretrained(tmp_path / "model")
    theirs = reference_gradient(tmp_path / "model", samples)
    theirs = torch.cat([theirs[name].flatten() for name, _ in lm.named_parameters()])
    args = plan.changed(sft.Args(), dtype="float64", lr=1e-3, batch=11, max_grad_norm=0.0,
                        update_tokens=1 << 20)
    small = plan.changed(args, update_tokens=150)
    found = run_trials({**{f"{n} ranks": Trial(args, [samples], ranks=n) for n in (1, 2, 3, 4)},
                        "packed otherwise": Trial(small, [samples], ranks=2)}, sft, str(tmp_path))
    assert len(found) == 5
    for name, outcome in found.items():
        ours = outcome.gradients["policy, update 1"]
        gap = float((ours - theirs).norm() / theirs.norm())
        print(f"{name}: {gap:.1e}")
        assert gap <= 1e-12, name
        n = sum(s.completion.tokens for s in samples)
        assert outcome.metrics["batch/learned_tokens"] == n


# ---- the run ----

def broken(**flags) -> str:
    return "\n".join(map(str, rules.problems(plan.changed(sft.Args(), lr=1e-3, **flags), 1)))


def test_flags_without_use_are_refused():
    assert not broken() and not broken(eval_data="tiny", reward=("exact",), eval_samples=1)
    assert "--group must be 1" in broken(group=4)
    assert "--reward needs --eval_data" in broken(reward=("exact",))
    assert "--target_reward grades rollouts" in broken(target_reward=(0.0, 1.0))


def test_the_plan_has_an_engine_only_for_an_evaluation_with_a_reward():
    from preflight import memory
    shape = memory.shape_of("Qwen2.5-0.5B")
    found = {}
    for name, flags in {"alone": {}, "held out": dict(eval_data="tiny"),
                        "sampled": dict(eval_data="tiny", reward=("exact",))}.items():
        args = plan.changed(sft.Args(), **flags)
        made = plan.Plan(args, 2, 1000, 100 if flags else 0)
        found[name] = [load.phase for load in memory.loads(made, shape, 80 * memory.GIB)]
        assert "rollout " not in made.text()
    assert found == {"alone": ["update"], "held out": ["update", "score"],
                     "sampled": ["rollout", "update", "score"]}


def run(tmp_path, name: str, kills=(), steps: int = 6):
    """sft.py of `steps` steps, killed after each of `kills` → its metrics but for times."""
    made = faults.model()
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in random_chats(30)))
    flags = ["--model", made, "--group", "1", "--steps", str(steps), "--data", str(data),
             "--eval_data", str(data), "--eval_every", "2", "--save_every", "1", "--name", name,
             "--lora_rank", "2", "--max_tokens", "200"]
    for kill in (*kills, None):
        attempt = faults.Attempt(tmp_path, *flags, script="sft", torchrun=False)
        try:
            if kill is not None:
                assert attempt.printed(f"step {kill}/{steps}")
            else:
                status, text = attempt.end()
                assert status == 0, text
        finally:
            attempt.kill()
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    assert bool(kills) == ("resumed from" in text)
    return [{k: v for k, v in json.loads(line).items()
             if not k.startswith(("time/", "memory/"))} for line in lines]


@pytest.mark.slow
def test_three_kills_of_three(tmp_path):
    whole = run(tmp_path, "whole")
    assert [row["step"] for row in whole if "eval/perplexity" in row] == [0, 2, 4, 6]
    assert whole[-1]["eval/perplexity"] < whole[0]["eval/perplexity"]
    for kill in ((1, 4), (2,), (5,)):
        assert run(tmp_path, f"killed {kill[0]}", kills=kill) == whole
