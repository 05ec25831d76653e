"""other_systems.py: a flag of another system gets its name here; the page has the same table."""
import re

import pytest

import flags
import grpo
from errors import SettingsError
from parts.other_systems import other_systems
from test_docs import FLAGS, rows
from test_script import script

PAGE = "docs/use/recipes.md"


def test_flags_of_other_systems_are_those_of_the_page():
    head, _, *body = rows(PAGE, "I come from")
    page = {(here.replace("`", ""), system.split()[0], name) for here, *cells in body
            for system, cell in zip(head[1:], cells, strict=True)
            for name in re.findall("`(.*?)`", cell)}
    code = {(here, system, name) for here, names in other_systems.OTHERS.items()
            for system, *known in map(str.split, names.split(", ")) for name in known}
    assert page == code and len(code) > 20
    assert {here.split()[0][2:] for here in other_systems.OTHERS} <= FLAGS
    assert not {name for *_, name in code} & FLAGS


@pytest.mark.parametrize("words, sentences", [
    ("--num_generations 3", ["TRL's --num_generations is --group here."]),
    ("--num-generations=3", ["TRL's --num-generations is --group here."]),
    ("--actor_rollout_ref.rollout.n=5",
     [f"{name}'s --actor_rollout_ref.rollout.n is --group here." for name in ("verl", "EasyR1")]),
    ("--name beta --group 8 --betas 1", [])])
def test_a_flag_of_another_system_has_its_name_here(words, sentences):
    assert other_systems.theirs(words.split())[0] == sentences


def test_the_command_line_says_so():
    done = script("--num_generations", "3")
    assert done.returncode == 2 and "TRL's --num_generations is --group here." in done.stderr


def test_another_systems_flag_is_one_sentence():
    with pytest.raises(SettingsError) as error:
        flags.parse_words(grpo.Args, "", "--num_generations 8 --lr 1e-3".split())
    assert str(error.value) == "TRL's --num_generations is --group here."
    with pytest.raises(SettingsError, match="(?s)2 problems.*--group here.*--bach"):
        flags.parse_words(grpo.Args, "", "--num_generations 8 --bach 3".split())
    with pytest.raises(SettingsError, match=r"^Unrecognized options: --nonsense, 3\n"):
        flags.parse_words(grpo.Args, "", "--nonsense 3".split())
