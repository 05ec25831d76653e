"""What the rules of this part say is true: as test_claims.py tries those of the core."""
import pytest

import test_claims
from fakes import SCRIPTS


@pytest.mark.parametrize("script, least", [("grpo", 4), ("ppo", 4)])
def test_what_a_rule_says_is_true(script, least):
    test_claims.true(SCRIPTS[script], least, "turns", reply=[None, "", "x.py:f"],
                     reward=[("exact",), ("environment",), ("turns", "exact")],
                     advantage=[*test_claims.NAMES["advantage"], *test_claims.FILES,
                                "parts/turns/turn_credit.py:turn_credit"])
