"""A flag of another system gets its name here; the page has the same table."""
import re

import pytest

import flags
import grpo
from errors import SettingsError
from families import ROOT
from parts.other_systems import other_systems
from settings import values_of


def test_flags_of_other_systems_are_those_of_the_page():
    page = (ROOT / "docs/use/recipes.md").read_text().partition("## I come from")[2]
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in
                      page.partition("\n\n##")[0].splitlines() if line.startswith("|")]
    there = {(here.replace("`", ""), system.split()[0], name) for here, *cells in body
             for system, cell in zip(head[1:], cells, strict=True)
             for name in re.findall("`(.*?)`", cell)}
    code = {(here, system, name) for here, names in other_systems.OTHERS.items()
            for system, *known in map(str.split, names.split(", ")) for name in known}
    assert there == code and len(code) > 20
    ours = values_of(grpo.Args())
    assert {here.split()[0][2:] for here, *_ in code} <= ours.keys()
    assert not {name for *_, name in code} & ours.keys()


@pytest.mark.parametrize("words, said", [
    ("--num_generations 8", r"^TRL's --num_generations is --group here\.$"),
    ("--num-generations=3", "TRL's --num-generations is --group here"),
    ("--actor_rollout_ref.rollout.n=5", "(?s)verl's --actor_ro.* is --group here.*EasyR1's --act"),
    ("--num_generations 8 --bach 3", "(?s)2 problems.*--group here.*--bach"),
    ("--nonsense 3", r"^Unrecognized options: --nonsense, 3\n"),
    ("--name beta --betas 0.9 0.9", None)])
def test_a_flag_of_another_system_is_one_sentence(words, said):
    if said is None:
        return flags.parse_words(grpo.Args, "", words.split())
    with pytest.raises(SettingsError, match=said):
        flags.parse_words(grpo.Args, "", words.split())
