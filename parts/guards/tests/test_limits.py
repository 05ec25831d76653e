"""What the model has no position or embedding for is refused, by a run and by --plan."""
import pytest

import fakes
import preflight
from errors import SettingsError
from family_cases import make


@pytest.mark.parametrize("size, flags, words", [
    ({"vocab_size": 50}, {}, r"must have tokens with ids below 50 \(the largest is "),
    ({"max_position_embeddings": 64}, dict(max_prompt_tokens=30, max_tokens=35),
     r"tokens 30 \+ --max_tokens 35 must be at most the 64 positions of .*: --max_tokens 34\."),
    ({"max_position_embeddings": 64}, dict(max_prompt_tokens=64, max_tokens=1),
     r"must be at most the 64 positions of (?!.*Would work: --max_tokens)")])
def test_a_sequence_fits_the_model(tmp_path, size, flags, words):
    make("Qwen2", str(tmp_path), size)
    args = fakes.args(model=str(tmp_path), **flags)
    for look in lambda: preflight.read_inputs(args, 1, 1), lambda: preflight.show_plan(args):
        with pytest.raises(SettingsError, match=words):
            look()
