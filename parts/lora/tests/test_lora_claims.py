"""What the rules of this part say is true: as test_claims.py tries those of the core."""
import pytest

import test_claims
from fakes import SCRIPTS


@pytest.mark.parametrize("script, least", [("grpo", 7), ("ppo", 7)])
def test_what_a_rule_says_is_true(script, least):
    test_claims.true(SCRIPTS[script], least, "lora",
                     lora_targets=[("all-linear",), ("nothing",), ("q_proj",)])
