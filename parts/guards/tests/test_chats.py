"""What a chat template would leave out of a row is refused by its name."""
import pytest

from tables import table
from test_rows import filled, refusal

LEFT_OUT = r"""
no place for tools | {"prompt": "q", "tools": TOOLS} | {"tokenizer": "plain"}
no place for tools | {"prompt": "q", "tools": TOOLS} | {"tokenizer": "none"}
no place for thinking | {"prompt": "q", "chat_template_kwargs": {"thinking": 1}}
no place for think | {"prompt": "q", "chat_template_kwargs": {"think": 1}}
no place for images | {"prompt": [{"role": "user", "content": "q", "images": ["x.png"]}]}
no place for bing | {"prompt": [{"role": "bing", "content": "x"}]}
no place for bing | {"prompt": [{"role": "bing", "content": "x"}]} | {"tokenizer": "comment"}
no place for train
    | {"prompt": [{"role": "user", "content": "q", "train": 1}]} | {"tokenizer": "comment"}
"""


@pytest.mark.parametrize("cells", table(LEFT_OUT))
def test_what_a_template_leaves_out_is_refused_by_name(tmp_path, cells):
    """A tool, an option, a key or a role of a message: the text is the same without it."""
    words, row, *flags = cells
    assert words in refusal(filled(row), tmp_path, **filled(*flags or ["{}"]))
