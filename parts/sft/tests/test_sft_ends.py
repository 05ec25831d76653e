"""What sft.py learns of a chat begins and ends as transformers says: with the tokenizers and the
templates of test_ends.py."""
import pytest

import inputs
import test_ends
import texts
from errors import SettingsError
from examples import tiny
from parts.sft import sft, targets
from templates import CHAT, template
from test_ends import FAMILIES, ROOT, SWEEP, TAGS, drawn, fields


@pytest.mark.parametrize("ends, left", [([], []), ([400, -1], []), ([2, 400], [2])])
def test_a_model_that_cannot_end_is_refused(ends, left):
    if left:
        assert inputs.check_ends(sft.Args(), ends, 320, notes := []) == left and not notes
        return
    with pytest.raises(SettingsError) as error:
        inputs.check_ends(sft.Args(), ends, 320, [])
    assert f"no token that ends a completion: its files name {ends} of 320 ids" in str(error.value)


def marked(family) -> str:
    """The template with transformers' marks around what is learned. After a block Jinja takes away
    a newline."""
    begin, user, assistant, header, _, tail = family
    text = template(user, assistant, header, begin, tail).replace("«", "{% generation %}")
    end = "{% endgeneration %}"
    return text.replace("»\n", end + "{{ '\\n' }}").replace("»", end)


def row_of(columns: dict, tokenizer, ends):
    return targets.make_row(0, columns, "", tokenizer, texts.marks_of(tokenizer, ends),
                            sft.Args().data_args, eos_ids=ends)


def check(there) -> None:
    """there: what test_ends.check found right."""
    tokenizer, name, ends = there.tokenizer, there.name, there.ends
    for messages in (CHAT[:2], CHAT) if ends else ():
        try:
            made = row_of({"messages": messages}, tokenizer, ends)
        except SettingsError as error:
            assert (name in ("texts", "none")) and len(messages) > 2 and str(error)
            return
        ids, learned = made.target
        assert made.prompt_ids == there.row.prompt_ids
        last = [i for i, now in enumerate(learned) if now and not (learned + [False])[i + 1]]
        assert len(last) == len(messages) // 2 and all(ids[i] in ends for i in last)
        if there.end and name not in ("glm", "speaker"):
            assert {ids[i] for i in last} == {tokenizer.convert_tokens_to_ids(there.end)}
        said = there.reads([i for i, now in zip(ids, learned, strict=True) if now][:last[0] + 1])
        assert said.strip().removesuffix("\nEND") == "13"
    if ends and tokenizer.chat_template and name not in ("glm", "speaker"):  # theirs begins a turn
        theirs = tokenizer.apply_chat_template(
            CHAT, chat_template=marked(FAMILIES[name]), return_dict=True,
            return_assistant_tokens_mask=True)
        whole = made.prompt_ids + ids
        assert whole == theirs["input_ids"][:len(whole)]
        rest = [False] * (len(theirs["input_ids"]) - len(whole))
        assert [False] * len(made.prompt_ids) + learned + rest == theirs["assistant_masks"]


@pytest.mark.parametrize("seed", SWEEP)
def test_of_many_tokenizers_and_templates_each_is_right(tmp_path, seed):
    check(test_ends.check(tmp_path, seed))


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_words_of_a_row_are_words_or_the_row_is_refused(seed):
    """What followed an end mark in an answer was not learned; each string that a tokenizer treats
    specially, in each field: the text has it, or a sentence names it."""
    tokenizer, name, *_ = drawn(seed)
    ends = texts.eos_ids(str(tiny.ensure(str(ROOT / "runs"))), tokenizer)
    reads, refused = texts.reader(tokenizer, ends), set()
    for mark in {t.content for t in tokenizer.added_tokens_decoder.values()}:
        for row in fields(words := f"a{mark}b"):
            try:
                made = row_of(row, tokenizer, ends)
                assert words in reads(made.prompt_ids + made.target[0]), (name, row)
            except SettingsError as error:
                assert f"its words hold {mark}" in str(error), (name, row)
                refused.add(mark)
    assert not refused & {*TAGS}
