"""What stands between two turns is what the chat template writes there: with the tokenizers and the
templates of test_ends.py, and as sft.py writes a chat."""
import pytest

import test_ends
import texts
from errors import SettingsError
from examples import tiny
from parts.turns import turns
from templates import CHAT
from test_ends import FAMILIES, ROOT, SWEEP, TAGS, drawn, fields


def of_sft():
    """The module that writes a whole chat."""
    return pytest.importorskip("parts.sft.targets", reason="it writes the chats to compare with")


def row_of(columns: dict, tokenizer, ends):
    """A row of sft.py."""
    return of_sft().make_row(0, columns, "", tokenizer, texts.marks_of(tokenizer, ends),
                             test_ends.DataArgs(), eos_ids=ends)


@pytest.mark.parametrize("seed", SWEEP)
def test_of_many_tokenizers_and_templates_each_is_right(tmp_path, seed):
    there = test_ends.check(tmp_path, seed)
    tokenizer, name, ends, end = there.tokenizer, there.name, there.ends, there.end
    if not ends:
        return
    try:
        made = row_of({"messages": CHAT}, tokenizer, ends)
    except SettingsError:  # test_sft_ends.py says when
        return
    bridge = turns.Bridge(tokenizer, ends, 10**6, None)
    assert bridge.read(there.written + there.closing) == there.expected
    if name == "none" and not there.pick["words"]:
        assert bridge.ids(ends[0], there.asked) == tokenizer(
            "\n\nSort 31\n\n", add_special_tokens=False)["input_ids"]
    if end:
        end = tokenizer.convert_tokens_to_ids(end)
        between = bridge.ids(end, CHAT[2:3])
        whole = made.prompt_ids + made.target[0]
        start = len(made.prompt_ids) + made.target[1].index(False)
        assert whole[start:start + len(between)] == between
        missing = bridge.ids(tokenizer.convert_tokens_to_ids("a"), CHAT[2:3])  # as by --stop
        assert missing[missing.index(end) + 1:] == between
        assert all(bridge.ids(other, CHAT[2:3]) == missing for other in {*ends} - {end})


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_words_of_a_reply_are_words_or_it_is_refused_as_a_row_is(seed):
    tokenizer, name, *_ = drawn(seed)
    ends = texts.eos_ids(str(tiny.ensure(str(ROOT / "runs"))), tokenizer)
    reads, bridge = texts.reader(tokenizer, ends), turns.Bridge(tokenizer, ends, 10**6, None)
    for mark in {t.content for t in tokenizer.added_tokens_decoder.values()}:
        words, refused = f"a{mark}b", False
        for row in fields(words):
            try:
                row_of(row, tokenizer, ends)
            except SettingsError:
                refused = True
        for role in "user", "tool":
            try:
                ids = bridge.ids(-1, [{"role": role, "content": words}])
                assert words in reads(ids) and not refused, (name, mark)
            except SettingsError as error:
                assert f"its words hold {mark}" in str(error) and refused, (name, mark)
        assert not refused or mark not in TAGS
