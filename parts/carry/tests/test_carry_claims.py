"""What the rules of this part say is true: as test_claims.py tries those of the core."""
import pytest

import test_claims
from fakes import SCRIPTS


@pytest.mark.parametrize("script, least", [("grpo", 5), ("ppo", 6)])
def test_what_a_rule_says_is_true(script, least):
    test_claims.true(SCRIPTS[script], least, "carry", "turns", reply=[None, "", "x.py:f"])
