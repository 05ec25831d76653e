"""sft.py learns of a chat what the assistant says: its ends and limits, the plan, runs. What
transformers marks by {% generation %} is learned: test_ends.py."""
import itertools
import json
from functools import partial
from math import exp

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import data
import plan
from errors import SettingsError
from examples import tiny
from learning import begin_with
from parts.sft import sft
from parts.sft import targets as chats
from ranks import script
from settings import changed
from shapes import shape_of
from templates import CHAT, ROLE, SAID, template, tokenizer_of, with_traits
from tracked import ROOT


def load(tmp_path, rows: list[dict], tokenizer, ends=None, **flags):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = [tokenizer.eos_token_id] if ends is None else ends
    args = changed(sft.Args(), **flags)
    found, note = data.load(str(path), tokenizer, args.data_args, eos_ids=ends,
                            make=partial(chats.make_row, eos_ids=ends))
    kept, words = chats.keep(found, str(path), args.max_tokens)
    return kept, note + words


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
    given = [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:4], CHAT[4], CHAT[5] | {"weight": 0}]
    for chat in given, [*CHAT[:2], *given[:2], *CHAT[2:4]]:  # the end of a given turn is given
        (row,), _ = load(tmp_path, [{"messages": chat}], tokenizer, [user, end])
        said = [i for i, here in zip(*row.target, strict=True) if here]
        assert said == (one + [user]) * (len(chat) // 2 - 2 - (chat is given)) + two + [end]
    with pytest.raises(SettingsError, match="which is no end of a turn"):
        load(tmp_path, [{"messages": CHAT[:4]}], tokenizer, [end])


def test_a_template_that_rewrites_earlier_turns_is_refused_in_one_sentence(tmp_path):
    """Qwen3's drops the thoughts of earlier turns. One turn is no trouble."""
    tokenizer = tokenizer_of("<|im_start|> <|im_end|>", template(
        f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n", "<|im_start|>assistant\n{% if not loop.last %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>"
        "\n", "<|im_start|>assistant\n"))
    thought = [CHAT[0], {"role": "assistant", "content": "<think>a</think>13"}]
    (row,), _ = load(tmp_path, [{"messages": thought}], tokenizer)
    assert all(row.target[1])
    with pytest.raises(SettingsError, match="row 2.* rewrites '<think>a</think>13' before .* Would"
                       " work: one row for each turn"):
        load(tmp_path, [{"messages": thought}, {"messages": thought + CHAT[2:4]}], tokenizer)


def one_word(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("traits", itertools.product((False, True), repeat=4))
def test_a_turn_may_begin_with_what_the_template_writes(tmp_path, traits):
    """All words are learned, or a sentence says why not, and what would work works: R1-Distill's
    and QwQ's templates had one sentence for three causes, and its way out was the row itself."""
    tokenizer, seen = with_traits(*traits), set()

    def learned(row) -> str:
        (made,), _ = load(tmp_path, [row], tokenizer)
        ids, marks = made.target
        kept = tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark])
        return one_word("<think>" * made.prompt.endswith("<think>\n") + kept)

    for words, n in itertools.product(("yes", "<think>\nt\n</think>\n\nyes"), (1, 2)):
        chat = [m for i in range(n) for m in (CHAT[0], {"role": "assistant", "content": words})]
        try:
            found = learned({"messages": chat})
        except SettingsError as error:
            way = str(error).split("row 1: ")[1]
        else:
            assert one_word(words) in found
            assert found.count(one_word(words.removeprefix("<think>"))) == n
            continue
        for cause in "rewrites", "leaves out", "begins a turn", "is no end":
            seen |= {cause} if cause in way else set()
        if "weight" in way:
            chat[1] = chat[1] | {"weight": 0}
            assert one_word(words) in learned({"messages": chat})
        elif "own text" in way:
            text = tokenizer.apply_chat_template(chat[:1], tokenize=False,
                                                 add_generation_prompt=True)
            rest = words.removeprefix("<think>\n") if traits[0] else words
            assert one_word(words) in learned({"prompt": text, "completion": rest})
        else:
            assert repr(words)[1:-1] in way.split("Would work: ")[1]
            chat[1] = chat[1] | {"content": "<think>\n" + words}
            assert one_word(words) in learned({"messages": chat[:2]})
    opens, drops, _, ends = traits
    expected = {"begins a turn": opens, "leaves out": drops,
                "is no end": not (opens and drops or ends)}
    assert seen == {cause for cause, there in expected.items() if there}


def test_rows_without_a_template_and_what_nobody_answers(tmp_path):
    tokenizer = tiny.make_tokenizer()
    rows, note = load(tmp_path, [{"messages": CHAT[:2]}, {"messages": CHAT[:3]}], tokenizer)
    assert str(rows[0].target) == str(rows[1].target) and "3 to 3 tokens, 6 in all" in note
    tokenizer.chat_template = None
    (row,), _ = load(tmp_path, [{"messages": CHAT[:4]}], tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.decode(row.target[0]) == (
        f"13{end}\n\n{CHAT[2]['content']}\n\n{CHAT[3]['content']}{end}")
    assert sum(row.target[1]) == len(tokenizer(f"13{end}{CHAT[3]['content']}{end}")["input_ids"])


@pytest.mark.parametrize("begins", [False, True])
def test_a_turn_has_ids_of_its_own_where_a_tokenizer_would_join(tmp_path, begins):
    """"a" and "b" are one token, "ab". The prompt ends with "a", as in a rollout."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3, "<s>": 4}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")
    if begins:
        begin_with(tokenizer, "<s>")
    start = [4] if begins else []
    (row,), _ = load(tmp_path, [{"prompt": "ba", "completion": "b"}], tokenizer)
    assert tokenizer("bab")["input_ids"] == [*start, 1, 2]
    assert row.prompt_ids == [*start, 1, 0] and row.target == ([1, 3], [True, True])


@pytest.mark.parametrize("row, words", [
    ({"prompt": "Sort 31"}, "a row to learn needs messages, or a prompt and a text in one of"),
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


# ---- the plan ----

def test_flags_without_use_are_refused():
    def broken(**flags) -> str:
        return "\n".join(plan.problems(changed(sft.Args(), lr=1e-3, **flags), 1))

    assert not broken() and not broken(eval_data="tiny", reward=("exact",), eval_samples=1)
    assert "--group must be 1" in broken(group=4)
    for flag in [{"stop": ("x",)}, {"reply": "x.py:f"}]:  # nobody would listen
        assert "is for an engine" in broken(**flag)
    assert "--reward needs --eval_data" in broken(reward=("exact",))
    assert broken(temperature=0.7) == (
        "--temperature must be 1: nothing is sampled (got 0.7). For an evaluation there is "
        "--eval_temperature.")
    assert "--target_reward grades rollouts" in broken(target_reward=(0.0, 1.0))
    for flag in ["replay_routing"]:
        assert f"--{flag} needs an engine" in broken(**{flag: True})


def test_the_plan_has_an_engine_only_for_an_evaluation_with_a_reward():
    shape, held_out = shape_of("Qwen2.5-0.5B"), dict(eval_data="tiny")
    for flags, phases, engine in ({}, ["update"], False), (held_out, ["update", "score"], False), (
            held_out | dict(reward=("exact",)), ["update", "score"], True):
        made = plan.Plan(changed(sft.Args(), **flags), 2, 1000, 100 if flags else 0)
        assert list(dict.fromkeys(phase.name for phase in made.phases(64))) == phases
        assert (plan.Memory(made, shape, 80 * plan.GIB).parts["engine"][0] > 0) == engine


# ---- a run ----

def plainly(folder, rows) -> tuple[float, float]:
    """-log π of a token to learn and the entropy of π there, means over all tokens of all rows, by
    transformers, row by row."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(
        folder)
    found = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False,
            add_generation_prompt=True)
        ids, start = tokenizer(prompt + row["answer"] + tokenizer.eos_token)["input_ids"], len(
            tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            logps = lm(torch.tensor([ids])).logits[0, start - 1:-1].log_softmax(-1)  # (n, V)
        found += [(-float(logp[i]), -float((logp.exp() * logp).sum()))
                  for logp, i in zip(logps, ids[start:], strict=True)]
    return tuple(sum(numbers) / len(found) for numbers in zip(*found, strict=True))


@pytest.mark.parametrize("flags", [["--lr", "3e-3"], ["--lr", "1e-2", "--lora_rank", "8"]])
def test_held_out_rows_are_predicted_as_by_transformers_and_each_checkpoint_exports(tmp_path,
                                                                                    flags):
    """Rows of many lengths in several micro-batches: a mean over tokens is not one over rows.
    Step 1 comes from its checkpoint, and step 2 in both ways, which give the same bytes."""
    numbers = (31, 4102, 958, 70, 61524, 8, 77301, 2)
    rows = [{"question": f"Sort {n}", "answer": "".join(sorted(str(n)))} for n in numbers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny.ensure(str(ROOT / "runs"))
    done = script(sft.__file__, "--model", model, *"""--data rows.jsonl --eval_data rows.jsonl
        --steps 2 --batch 8 --max_prompt_tokens 40 --max_tokens 12 --score_tokens 60 --name x
        --eval_every 1 --save_every 1""".split(), *flags, cwd=tmp_path)
    for step in ["1"], []:  # the newest
        script(ROOT / "tools/export.py", "runs/x", *step, cwd=tmp_path)
    folders = [tmp_path / f"runs/x/{name}" for name in ("step_1", "step_2", "model")]
    _, last, same = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert last == same and len(same) > 4
    lines = map(json.loads, (tmp_path / "runs/x/metrics.jsonl").open())
    before, middle, after = (row for row in lines if "eval/rows" in row)
    for row, folder in (before, model), (middle, folders[0]), (after, folders[2]):
        loss, entropy = plainly(folder, rows)
        assert row["eval/rows"] == len(rows) and abs(row["eval/loss"] / loss - 1) < 1e-4
        assert abs(row["eval/perplexity"] / exp(loss) - 1) < 1e-4
        assert abs(row["eval/entropy"] / entropy - 1) < 1e-4
    assert after["eval/loss"] + 0.01 < middle["eval/loss"] < before["eval/loss"] - 0.01
    said = (f"held-out perplexity, before and after: {before['eval/perplexity']:.3f} -> "
            f"{after['eval/perplexity']:.3f}\n")
    assert said in done.stdout
