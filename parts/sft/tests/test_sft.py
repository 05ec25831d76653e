"""sft.py learns of a chat what the assistant says, as its formula says; what it says of held-out
rows is transformers'."""
import itertools
import json
import re
from functools import partial
from math import exp

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import data
import fakes
import identity
from errors import SettingsError
from examples import tiny
from families import ROOT
from parts.sft import sft, targets
from ranks import script
from reference import Completion, Model, Step, mean, minibatches, weighted_means
from reference_settings import OFTEN, Setting, drawn
from tables import table
from templates import CHAT, ROLE, SAID, processed, template, tokenizer_of, with_traits
from updates import every_pair, folder, right  # noqa: F401

# ---- the update


def learned(args, policy: Model, completions: list[Completion], lr: float) -> dict[str, float]:
    """One step of sft.py → metrics: L = -Σ log π(token) / n over the n learned tokens of a
    minibatch. "sampled" are the tokens that are learned."""
    fates = ["trained" if any(c.sampled) else "nothing" for c in completions]
    step, terms, norms = Step(completions, fates, [], None, []), [], []
    for rows in minibatches(args, step):
        n = sum(sum(completions[i].sampled) for i in rows)
        for i in rows:
            logps, _ = policy.logprobs(completions[i])
            (-logps.sum() / n).backward()
            terms += [(1 / n, True, {"loss/policy": -logp}) for logp in logps]
        if rows:
            norms.append(policy.step(lr))
    metrics = weighted_means(terms)
    return metrics | {
        "policy/perplexity": exp(metrics["loss/policy"]), "grad/norm": mean(norms), "lr": lr,
        "batch/prompts": len(completions), "batch/trained": fates.count("trained"),
        "batch/tokens": sum(len(c.prompt) + len(c.tokens) for c in completions),
        "batch/learned_tokens": sum(sum(c.sampled) for c in completions),
        "update/steps": len(norms), "update/skipped": minibatches(args, step).count([])}


class Supervised(Setting):
    """Two rows teach nothing."""
    scripts = {"sft": sft}

    def samples(self, step):
        found = super().samples(step)
        for sample in found[4:6]:
            sample.sampled[:] = False
        return found

    def options(self, **options):
        return {}

    def learn(self, args, models, samples, completions, lr, kl_coef):
        return learned(args, models[0], completions, lr)


@pytest.mark.parametrize("count", [4, pytest.param(10**6, marks=pytest.mark.slow)])
def test_it_learns_as_its_formula_says_on_two_ranks(count, folder, right):  # noqa: F811
    choices = OFTEN | {"minibatches": (1, 7), "steps": (1, 2)}
    every_pair(drawn("sft", choices, Supervised, group=1, count=count), 2, folder, right)


# ---- what of a chat is learned

FAMILIES = {  # name: (control tokens, the last one ends a turn; a template of «what is learned»)
    "chatml": ("<|im_start|> <|im_end|>", template(
        f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n", f"<|im_start|>{ROLE}\n«{SAID}<|im_end|>»\n",
        "<|im_start|>assistant\n")),
    "llama": ("<s> <|h|> <|/h|> <|eot|>", template(
        f"<|h|>{ROLE}<|/h|>\n\n{SAID}<|eot|>", f"<|h|>{ROLE}<|/h|>\n\n«{SAID}<|eot|>»",
        "<|h|>assistant<|/h|>\n\n", "<s>")),
    "phi": ("<pad> <|user|> <|assistant|> <|end|>", template(
        f"<|{ROLE}|>\n{SAID}<|end|>\n", f"<|assistant|>\n«{SAID}<|end|>»\n", "<|assistant|>\n",
        tail="<pad>")),
    "eos last": ("<|user|> <|assistant|> </s>", template(  # OLMo 2's, of several turns
        f"<|{ROLE}|>\n{SAID}</s>\n", f"<|{ROLE}|>\n«{SAID}</s>»{{% if not loop.last %}}"
        "{{ '\\n' }}{% endif %}", "<|assistant|>\n"))}


def rows_of(tmp_path, rows: list[dict], tokenizer, ends=None, **flags):
    """The rows as a run reads them, and what it says of them."""
    path, args = tmp_path / "rows.jsonl", fakes.args(sft, **flags)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = ends or [tokenizer.eos_token_id]
    found, note = data.load(str(path), tokenizer, args, eos_ids=ends,
                            make=partial(targets.make_row, eos_ids=ends))
    kept, words = targets.keep(found, str(path), args.max_tokens)
    return kept, note + words


def said_of(row, tokenizer) -> str:
    """The text that is learned."""
    return tokenizer.decode([i for i, now in zip(*row.target, strict=True) if now])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned_is_what_transformers_marks(tmp_path, name):
    """With {% generation %} in the template. A turn of weight 0 is given; what a template writes
    after the last end is left out."""
    tokenizer, text = tokenizer_of(*FAMILIES[name]), FAMILIES[name][1]
    end = "{% endgeneration %}"  # after a block Jinja takes away a newline
    text = text.replace("«", "{% generation %}").replace("»\n", end + "{{ '\\n' }}").replace(
        "»", end)
    theirs = tokenizer.apply_chat_template(
        CHAT, chat_template=text, return_dict=True, return_assistant_tokens_mask=True)
    whole, none = [*CHAT], [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:4], CHAT[4],
                            CHAT[5] | {"weight": 0}]
    (made, second), _ = rows_of(tmp_path, [{"messages": whole}, {"conversations": none}], tokenizer)
    ids, marks = made.prompt_ids + made.target[0], [False] * len(made.prompt_ids) + made.target[1]
    rest = len(theirs["input_ids"]) - len(ids)
    assert ids == theirs["input_ids"][:len(ids)]
    assert marks + [False] * rest == theirs["assistant_masks"]
    assert said_of(second, tokenizer).strip() == CHAT[3]["content"] + tokenizer.eos_token


def test_a_template_that_ends_no_turn_is_learned_with_the_header_that_follows(tmp_path):
    """GLM's: its end-of-sequence ids have <|user|>."""
    tokenizer = tokenizer_of("<|user|> <|assistant|> <|endoftext|>", template(
        f"<|{ROLE}|>\n{SAID}", f"<|assistant|>\n{SAID}", "<|assistant|>\n", "<sop>"))
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|endoftext|>"])
    (row,), _ = rows_of(tmp_path, [{"messages": CHAT[:4]}], tokenizer, [user, end])
    assert said_of(row, tokenizer) == f"13<|user|>{CHAT[3]['content']}<|endoftext|>"
    with pytest.raises(SettingsError, match="which is no end of a turn"):
        rows_of(tmp_path, [{"messages": CHAT[:4]}], tokenizer, [end])


@pytest.mark.parametrize("traits", [*itertools.product((False, True), repeat=4)])
def test_all_words_are_learned_or_a_sentence_says_why_not(tmp_path, traits):
    """Templates that begin a turn with <think>, drop thoughts of earlier turns, end no turn."""
    tokenizer, seen = with_traits(*traits), set()
    for words, n in itertools.product(("yes", "<think>\nt\n</think>\n\nyes"), (1, 2)):
        chat = [m for _ in range(n) for m in (CHAT[0], {"role": "assistant", "content": words})]
        try:
            (made,), _ = rows_of(tmp_path, [{"messages": chat}], tokenizer)
            text = "<think>" * made.prompt.endswith("<think>\n") + said_of(made, tokenizer)
            text, one = ("".join(it.split()) for it in (text, words))
            assert one in text and text.count(one.removeprefix("<think>")) == n
        except SettingsError as error:
            assert "Would work: " in str(error)
            seen |= {cause for cause in ("rewrites", "leaves out", "begins a turn", "is no end")
                     if cause in str(error)}
    opens, drops, _, ends = traits
    assert seen == {cause for cause, there in {
        "begins a turn": opens, "leaves out": drops,
        "is no end": not (opens and drops or ends)}.items() if there}


NOBODY_ASKS = """
{"messages": [A]}
{"messages": [A, Q, A]}
{"messages": [A, A]}
{"messages": [{"role": "assistant", "content": "c", "weight": 0}, A]}
{"messages": [{"role": "user", "content": " "}, A, Q, A]}
{"conversations": [{"from": "gpt", "value": "a"}]}
{"prompt": "", "completion": "a"}
{"prompt": " ", "completion": [A, Q, A]}
{"prompt": null, "response": "a"}
{"prompt": [], "completion": "a"}
{"messages": [S, A]}
{"messages": [S, {"role": "user", "content": ""}, A]}
{"messages": [A], "system": "b"}
{"prompt": "", "completion": "a", "system": "b"}"""
BARE = {"default": ("<|im_start|> <|im_end|>", "{% if messages[0]['role'] != 'system' %}"
                    "<|im_start|>system\nYou.<|im_end|>\n{% endif %}" + FAMILIES["chatml"][1]),
        "thinks": ("<|im_start|> <|im_end|>", FAMILIES["chatml"][1].replace(
            "assistant\n{% endif", "assistant\n<think>\n{% endif")), "plain": None, "bos": None}


@pytest.mark.parametrize("name", FAMILIES | BARE)
@pytest.mark.parametrize(["text"], table(NOBODY_ASKS))
def test_what_nobody_asked_for_is_learned(tmp_path, name, text):
    """As in pre-training. Of a text without any token before it the first one is given. Refused is
    only a template that begins a later turn in two ways."""
    tokenizer = tokenizer_of(*(FAMILIES | BARE)[name] or FAMILIES["llama"])
    if name in ("plain", "bos"):
        tokenizer.chat_template = None
        processed(tokenizer, ["<s>"] * (name == "bos"), [])
    turns, system = re.findall(r"\bA\b|\"a\"", text), bool(re.search(r"\bS\b|system", text))
    try:
        (row,), note = rows_of(tmp_path, [form(text)], tokenizer)
    except SettingsError as error:
        assert "begins a turn with" in str(error) and (
            name == "thinks" and len(turns) + system > 1
            or name == "eos last" and re.search('A, A|"c"', text))
        return
    given = name == "plain" and not system and "user" not in text
    first = "c" if '"c"' in text else "a"
    learned = ("a" + tokenizer.eos_token) * len(turns)
    assert said_of(row, tokenizer) == learned.removeprefix(first if given else "")
    assert tokenizer.decode(row.prompt_ids).endswith(first if given else row.prompt)
    assert row.prompt_ids and ("b" in row.prompt) == system and "0 empty" in note
    if tokenizer.chat_template and len(turns) == 1 and '"c"' not in text:
        roles = ["system"] * system + ["user"] * ('"user"' in text) + ["assistant"]
        chat = [{"role": role, "content": {"system": "b", "assistant": "a"}.get(role, "")}
                for role in roles]
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert whole.startswith(tokenizer.decode(row.ids))


FORMS = """
{"prompt": "q", "completion": "a"}
{"prompt": [Q], "completion": [A]}
{"question": "q", "answer": "a"}
{"problem": "q", "solution": "a", "answer": "7"}
{"messages": [Q, A, Q]}
{"messages": [Q, {"role": "assistant", "content": "a", "weight": 1}, Q,
    {"role": "assistant", "content": "a", "weight": false}]}
{"messages": [Q, A], "label": "positive", "weights": null, "kto_tag": true, "loss": 1.0}
{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"""
REFUSED = """
{"prompt": "q"} | a row to learn needs messages, or a prompt and a text in one of
{"question": "q", "answer": 5} | the answer must be text or a list of
{"messages": [Q, {"role": "assistant", "content": "a", "weight": 0}]} | weight is not 0
{"messages": [Q, {"role": "assistant", "content": "a", "weight": 0.5}]}
    | message 1 of messages: its weight cannot
{"messages": [Q, {"role": "assistant", "content": "a", "mask": 0}]} | no place for mask
{"messages": [Q, {"role": "assistant", "content": "a<|im_end|>b"}]} | its words hold <|im_end|>
{"prompt": "q", "completion": "a", "label": false} | its label is False
{"messages": [Q, A], "kto_tag": false} | its kto_tag is False
{"messages": [Q, A], "kto_tag": "false"} | its kto_tag is 'false'
{"messages": [Q, A], "loss_scale": 0.5} | its loss_scale is 0.5
{"messages": [Q, A], "label": "0"} | its label is '0'
{"messages": [Q, A], "train_on_turn": [true, false]} | its train_on_turn is [True, False]
{"prompt": "q", "completion": "a", "labels": [-100, 1]} | its labels is [-100, 1]
{"prompt": "q", "completion": "LONG"} | --max_tokens 301 keeps it"""


def form(text: str) -> dict:
    """A row of the tables. Q: a question. A: an answer. S: of the system. LONG: 300 tokens."""
    for word, role, said in ("Q", "user", "q"), ("A", "assistant", "a"), ("S", "system", "b"):
        text = re.sub(rf"\b{word}\b", json.dumps({"role": role, "content": said}), text)
    return json.loads(text.replace("LONG", "1" * 300))


@pytest.mark.parametrize(["text"], table(FORMS))
def test_forms_of_rows_are_learned(tmp_path, text):
    tokenizer = tiny.make_tokenizer()
    (made,), note = rows_of(tmp_path, [form(text)], tokenizer)
    assert said_of(made, tokenizer) == "a<|im_end|>" and "2 in all to learn" in note


@pytest.mark.parametrize("text, words", table(REFUSED))
def test_what_cannot_be_learned_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(SettingsError, match=re.escape(words)):
        rows_of(tmp_path, [form(text)], tiny.make_tokenizer())


def test_longer_chats_are_left_out_and_another_target_is_another_row(tmp_path):
    """Without a template an empty line stands around what others say."""
    tokenizer, rows = tiny.make_tokenizer(), [{"messages": CHAT[:2]}, {"messages": CHAT}]
    (_, row), _ = rows_of(tmp_path, rows, tokenizer)
    longest = len(row.target[0])
    for limit, kept in (longest, 2), (longest - 1, 1):  # a row of exactly --max_tokens is kept
        found, note = rows_of(tmp_path, rows, tokenizer, max_tokens=limit)
        assert len(found) == kept and f"left out: {2 - kept} longer than {limit}" in note
    before = identity.row_digests([row])
    row.target[1][-1] ^= True
    assert identity.row_digests([row]) != before
    tokenizer.chat_template, end = None, tokenizer.eos_token
    (row,), _ = rows_of(tmp_path, [{"messages": CHAT[:4]}], tokenizer)
    assert tokenizer.decode(row.target[0]) == (
        f"13{end}\n\n{CHAT[2]['content']}\n\n{CHAT[3]['content']}{end}")
    assert said_of(row, tokenizer) == f"13{end}{CHAT[3]['content']}{end}"


def test_a_turn_has_ids_of_its_own_where_a_tokenizer_would_join(tmp_path):
    """"a" and "b" are one token, "ab". The prompt ends with "a", as in a rollout."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    (row,), _ = rows_of(tmp_path, [{"prompt": "ba", "completion": "b"}], tokenizer)
    assert tokenizer("bab")["input_ids"] == [1, 2]
    assert row.prompt_ids == [1, 0] and row.target == ([1, 3], [True, True])


# ---- the plan, a run

@pytest.mark.parametrize("flags, words", table("""
group=1 | fine
eval_data=tiny reward=('exact',) eval_samples=1 stop=('x',) | fine
group=4 | --group must be 1: a row has one completion (got 4)
stop=('x',) | --stop is for an engine. Would work: with --eval_data and --reward
stop=('x',) eval_data=tiny | --stop is for an engine.
reward=('exact',) | --reward needs --eval_data
temperature=0.7 | --temperature must be 1: nothing is sampled (got 0.7)
target_reward=(0.0,1.0) | --target_reward grades rollouts, and sft.py has none"""))
def test_flags_without_use_are_refused(refused, flags, words):
    assert refused(sft, flags, words)


@torch.no_grad()
def plainly(folder, rows) -> list[float]:  # noqa: F811
    """-log π of a token to learn and the entropy of π there, means over all tokens of all rows, by
    transformers, row by row."""
    lm, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    found = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True,
            return_dict=False)
        target = tokenizer(row["answer"] + tokenizer.eos_token)["input_ids"]
        logits = lm(torch.tensor([prompt + target])).logits[0, len(prompt) - 1:-1]
        policy = torch.distributions.Categorical(logits=logits)
        found.append(torch.stack([-policy.log_prob(torch.tensor(target)), policy.entropy()]))
    return torch.cat(found, 1).mean(1).tolist()


def test_held_out_rows_are_predicted_as_by_transformers_and_a_checkpoint_exports(
        real_run, tmp_path):
    """A real run on two ranks. Rows have many lengths: a mean over tokens is not one over rows."""
    numbers = (31, 4102, 958, 70, 61524, 8, 77301, 2)
    rows = [{"question": f"Sort {n}", "answer": "".join(sorted(str(n)))} for n in numbers]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, _ = real_run(
        "parts/sft/sft.py", "--data rows.jsonl --eval_data rows.jsonl --steps 2 --batch 8 "
        "--max_prompt_tokens 40 --max_tokens 12 --logprob_tokens 60 --lr 3e-3 --eval_every 1 "
        "--save_every 1 --lr_schedule linear")
    assert [row["lr"] for row in found if "lr" in row] == [3e-3, 1.5e-3]
    script(ROOT / "tools/export.py", "runs/x", "1", cwd=tmp_path)
    found = [row for row in found if "eval/rows" in row]
    base = tiny.ensure(str(ROOT / "runs"))
    for row, where in zip(found, (base, "runs/x/step_1", "runs/x/model"), strict=True):
        loss, entropy = plainly(tmp_path / where, rows)
        assert row["eval/rows"] == 8 and row["eval/loss"] == pytest.approx(loss, rel=1e-4)
        assert row["eval/perplexity"] == pytest.approx(exp(loss), rel=1e-4)
        assert row["eval/entropy"] == pytest.approx(entropy, rel=1e-4)
    before, middle, after = (row["eval/perplexity"] for row in found)
    assert before - 0.01 > middle > after + 0.01
