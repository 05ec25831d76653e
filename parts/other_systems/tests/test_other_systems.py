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
    table = page.partition("\n| here |")[2].partition("\n\n")[0]
    assert table.count("\n") == 1 + len(other_systems.OTHERS)


@pytest.mark.parametrize("words, said", [
    ("--num_generations 8", r"^TRL's --num_generations is --group here\.$"),
    ("--num-generations=3", "TRL's --num-generations is --group here"),
    ("--actor_rollout_ref.rollout.n=5", r"^verl's and EasyR1's --actor_rol\S+n is --group here\.$"),
    ("actor_rollout_ref.rollout.n=8 data.train_files=x.parquet",
     "(?s)^2 problems.*rollout.n is --group here.*data.train_files is --data here.$"),
    ("+data.train_batch_size=64", "^verl's .*size is --batch, OpenRLHF's is --minib.* here.$"),
    ("--epsilon 0.2 --epsilon_high=0.28", "(?s)^2 problems.* is --clip_low.*high is --clip_high"),
    ("algorithm.adv_estimator=grpo --nonsense", "(?s)^2 problems.*--advantage.*: --nonsense\n"),
    ("--loss_type grpo --scale_rewards", "(?s)^2 problems.*--loss_type is --loss.*is --advantage"),
    ("--max_prompt_length 9", "^TRL's, verl's and EasyR1's .* is --max_prompt_tokens here"),
    ("--num_train_epochs 3", r"is --steps \(an epoch has rows / --batch\) here"),
    ("--gpus 4", r"^--gpus: the number of ranks is torchrun's: torchrun --nproc_per_node 4 \S+\.$"),
    ("trainer.n_gpus_per_node=8", "torchrun --nproc_per_node 8"),
    ("--config x.yaml", "^--config: there are no config files"),
    ("config=x.yaml --bach 3", "(?s)2 problems.*no config files.*--bach"),
    ("--num_generations 8 --bach 3", "(?s)2 problems.*--group here.*--bach"),
    ("--nonsense 3", r"^Unrecognized options: --nonsense, 3\n")])
def test_a_flag_of_another_system_is_one_sentence(words, said):
    """A value that is such a name is none."""
    read = flags.parse_words(grpo.Args, "", ["--name", "beta", "--system", "rollout.n=8"])
    assert (read.name, read.data_args.system) == ("beta", "rollout.n=8")
    with pytest.raises(SettingsError, match=said):
        flags.parse_words(grpo.Args, "", words.split())
