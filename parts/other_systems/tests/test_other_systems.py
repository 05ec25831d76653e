"""A flag of another system gets its name here; the page has the same table."""
import pytest

import flags
import grpo
from errors import SettingsError
from families import ROOT
from parts.other_systems import other_systems
from settings import values_of


def test_the_table_is_that_of_the_page():
    """And no flag of another system is one of ours."""
    page, flags_here = (ROOT / "docs/use/recipes.md").read_text(), values_of(grpo.Args()).keys()
    for here, names in other_systems.OTHERS.items():
        flag, _, note = here.partition(" ")
        known = {system: theirs for system, *theirs in map(str.split, names.split(", "))}
        cells = [f"`{flag}` {note}".strip()]
        for system in "TRL", "verl", "OpenRLHF", "EasyR1":
            theirs = known.pop(system, [])
            cells.append(", ".join(f"`{name}`" for name in theirs))
            assert not flags_here & {*theirs}
        assert not known and f"\n| {' | '.join(cells)} |\n" in page and flag[2:] in flags_here
    table = page.partition("| here |")[2].partition("\n\n")[0]
    assert table.count("\n") == 1 + len(other_systems.OTHERS)


@pytest.mark.parametrize("words, said", [
    ("--num_generations 8", r"^TRL's --num_generations is --group here\.$"),
    ("--num-generations=3", "TRL's --num-generations is --group here"),
    ("--actor_rollout_ref.rollout.n=5", "(?s)verl's --actor_ro.* is --group here.*EasyR1's --act"),
    ("--num_generations 8 --bach 3", "(?s)2 problems.*--group here.*--bach"),
    ("--nonsense 3", r"^Unrecognized options: --nonsense, 3\n")])
def test_a_flag_of_another_system_is_one_sentence(words, said):
    """A value that is such a name is none."""
    assert flags.parse_words(grpo.Args, "", ["--name", "beta"]).name == "beta"
    with pytest.raises(SettingsError, match=said):
        flags.parse_words(grpo.Args, "", words.split())
