"""What is allowed, and is perhaps not meant, is said; what is meant is not."""
import json
import random

import pytest
import transformers

import data
import fakes
import preflight
from parts.hints import breaks, hints
from tables import table
from test_rows import TOKENIZER

LONG = "Once upon a time there was a king. " * 5
SHAPES = {  # of public data sets: the rest of the row, and what of it belongs to the question
    "mmlu": ({"choices": ["a", "b"], "subject": "law"}, "choices"),
    "arc": ({"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "id": "x1"}, "choices"),
    "hotpotqa": ({"context": {"title": ["t"], "sentences": [["s", "t"]]}, "level": "easy"},
                 "context"),
    "boolq": ({"passage": LONG}, "passage"),
    "short": ({"passage": "It is red."}, "passage"),
    "winogrande": ({"option1": "the cat", "option2": "the dog"}, "option1 option2"),
    "medqa": ({"options": {"A": "x", "B": "y"}, "meta_info": "step1"}, "options"),
    "tabular": ({"table": [["a", "b"], ["c", "d"]]}, "table"),
    "t0": ({"answer_choices": ["yes", "no"]}, "answer_choices"),
    "two": ({"prompt": "Be brief.", "problem": "What is it, and why?" * 9}, "question problem"),
    "unknown": ({"lore": LONG}, "lore"),
    "nli": ({"premise": "A man eats.", "hypothesis": "He is full."}, "premise hypothesis"),
    "math": ({"solution": LONG, "level": "Level 5", "type": "Algebra", "explanation": LONG}, ""),
    "numina": ({"solution": LONG, "messages": [{"role": "user", "content": "Which?"}]}, ""),
    "verl": ({"extra_info": {"split": "train", "question": LONG}, "ability": "math"}, ""),
    "said": ({"topic": "Which?", "text": "Which? "}, "")}


def said(tmp_path, rows: list[dict], reads=("completion", "answer", "row"), **flags) -> str:
    """Returns what is said of the rows. reads: the parameters of the reward."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = fakes.args(data=str(path), **flags)
    read = data.load(str(path), TOKENIZER, args)[0]
    return " ".join(hints.what_is_unread(args, read, [*reads]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_of_the_question_that_nothing_reads_is_named(tmp_path, shape):
    more, parts = SHAPES[shape]
    row, parts = {"question": "Which?"}, parts.split()
    rows = [row | {"answer": "a"}, row | more]
    random.Random(3).shuffle(rows)
    text = said(tmp_path, rows)
    assert ("--prompt_template" in text) == bool(parts), text
    assert not parts or f"nothing reads {', '.join(parts)} of row " in text, text
    assert "nothing reads" not in said(tmp_path, rows, ["completion", *parts])
    filled = "{prompt}" + "".join(f"{{{name}}}" for name in parts)
    rows = [dict.fromkeys(parts) | row for row in rows]
    assert "nothing reads" not in said(tmp_path, rows, prompt_template=filled)


def test_a_function_that_takes_all_columns_reads_those_that_its_file_names(tmp_path):
    rows = [{"question": "Which?", "answer": "a", "choices": ["a", "b"]}]
    for code, names in (("row['choices']", False), ("len(row)", True)):
        (tmp_path / "own.py").write_text(f"def f(completion, **row): return 1.0 * bool({code})")
        text = said(tmp_path, rows, reward=("exact", f"{tmp_path}/own.py:f:0.5"))
        assert ("nothing reads choices" in text) == names, text
    found = preflight.read_files(fakes.args(data=f"{tmp_path}/rows.jsonl", reward=("exact",)), 1)
    assert "nothing reads choices" in " ".join(found.warnings)


BREAKS = r"""
a\nb | "a\nb"
{q}\nAnswer:\n | "{q}\nAnswer:\n"
\n\nQ: {q} | "\n\nQ: {q}"
{q}\r\n | "{q}\r\n"
a\tb | "a\\tb"
a\t{q} | "a\t{q}"
one\nnot two\nuse | "one\nnot two\nuse"
$\nu \neq \not\in \nabla f$ \text{x} \rho | "$\\nu \\neq \\not\\in \\nabla f$ \\text{x} \\rho"
in \boxed{}.\nNow: \frac12 | "in \\boxed{}.\nNow: \\frac12"
C:\\new | "C:\\\\new"
é\n한 | "é\n한"
"""


@pytest.mark.parametrize("flag", ["prompt_template", "system", "stop"])
def test_a_backslash_and_an_n_are_a_line_break_except_in_latex(capsys, flag):
    for given, right in table(BREAKS):
        for words in [f"--{flag}", given], [f"--{flag.replace('_', '-')}={given}"]:
            *_, found = breaks.with_breaks(["--data", r"a\nb", *words])
            assert found.rpartition("=")[2] == json.loads(right), given
        said = capsys.readouterr().out
        assert (f"--{flag}" in said) == (json.loads(right) != given), said


ODD = """
warmup_steps=12 | --warmup_steps 12
warmup_steps=9 | fine
warmup_steps=10 | --warmup_steps 10
eval_every=11 eval_data=tiny@test | --eval_every 11
eval_every=10 eval_data=tiny@test | fine
save_every=11 | --save_every 11
ppo critic_warmup_steps=5 warmup_steps=5 | --warmup_steps 5
ppo critic_warmup_steps=5 warmup_steps=4 | fine
eval_only=True eval_data=tiny@test warmup_steps=99 | fine
"""


@pytest.mark.parametrize("words, said", table(ODD))
def test_counts_in_the_wrong_order_are_said(words, said):
    script, *given = words.split() if words.startswith("ppo") else ["grpo", *words.split()]
    known = {name: value if name == "eval_data" else json.loads(value.lower())
             for name, value in (word.split("=") for word in given)}
    text = " ".join(hints.late_counts(fakes.args(script, **{"steps": 10} | known)))
    assert said in text or said == "fine" and "_every" not in text and "warmup" not in text, text


ASKS = """
GPT2Config resid_pdrop=0.1 attn_pdrop=0 embd_pdrop=0 summary_first_dropout=0 | resid_pdrop 0.1
Qwen3MoeConfig router_aux_loss_coef=0.01 | router_aux_loss_coef 0.01
Qwen3MoeConfig router_aux_loss_coef=0 | fine
Qwen3Config attention_dropout=0.2 | attention_dropout 0.2
Qwen3Config | fine
MixtralConfig router_jitter_noise=0.1 router_aux_loss_coef=0 | router_jitter_noise 0.1
"""


@pytest.mark.parametrize("words, said", table(ASKS))
def test_what_config_json_asks_for_in_a_training_is_said(words, said):
    kind, *given = words.split()
    config = getattr(transformers, kind)(**{
        name: float(value) for name, value in (word.split("=") for word in given)})
    text = " ".join(hints.what_is_not_computed(config))
    assert text == "" if said == "fine" else f"config.json has {said}: a training" in text


def test_a_rate_far_above_the_usual_one_is_said():
    assert "3,333 times" in " ".join(hints.high_rate(fakes.args(lr=1.0), 1000))
    assert not [*hints.high_rate(fakes.args(lr=2e-2), 1000)]
