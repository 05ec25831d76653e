"""A flag of another system gets its name here, from the tables of two pages."""
import re

import pytest

import flags
import grpo
from errors import SettingsError
from parts.other_systems import other_systems


def test_each_row_of_the_table_is_a_flag_here_and_no_other_name_is():
    """And each of their names is answered with its row."""
    flags_here = vars(grpo.Args()).keys()
    (_, *systems), *rows = other_systems.table(other_systems.FLAGS, "I come from another system")
    assert systems == ["TRL", "verl", "OpenRLHF", "EasyR1"] and len(rows) == 30
    for here, *cells in rows:
        assert re.match(r"`--(\w+)`", here)[1] in flags_here
        for system, cell in zip(systems, cells, strict=True):
            for name in re.findall(r"`([^`]+)`", cell):
                [sentence] = other_systems.ours(f"--{name}")
                assert name not in flags_here and f"is {here.replace('`', '')}" in sentence
                assert f"{system}'s" in sentence


def test_the_words_of_the_table_of_errors_are_found(monkeypatch):
    """Each is answered with its line of the page, without links; and without the page, with none.
    """
    table = other_systems.ERRORS.read_text().partition("## Errors of")[2].partition("\n## ")[0]
    seen = 0
    for line in re.findall(r"^\| .*`.* \|$", table, re.M):
        words, here = line.strip("| ").split(" | ")
        for word in re.findall(r"`(\w+)`", words):
            for flag in f"--{word}", f"trainer.{word}=3":
                [sentence], rest = other_systems.theirs([flag])
                assert rest == [] and sentence.startswith(flag.partition("=")[0] + ": ")
                told = sentence.partition(": ")[2]
                assert "](" not in told and "`" not in told and told[:12] in here.replace("`", "")
            seen += 1
    assert seen >= 9
    monkeypatch.setattr(other_systems, "ERRORS", other_systems.ERRORS.with_name("none.md"))
    assert other_systems.theirs(["--infer_tp", "2"]) == ([], ["--infer_tp", "2"])


@pytest.mark.parametrize("words, said", [
    ("--num_generations_eval 8", "^--num_generations_eval: --eval_samples 8 --eval_temperature 1 "),
    ("--load_best_model_at_end True --infer_tp=2", "(?s)^2 problems.*--keep_best.*: --tp 2"),
    ("data.extra_info=x --bach 3", "(?s)^2 problems.*every column of a row is an argum.*--bach"),
    ("--score_tokens 8", r"^--score_tokens: it is called --logprob_tokens now\.$"),
    ("--critic_score_tokens=8", "^--critic_score_tokens: it .* --critic_value_tokens now.$"),
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
    assert (read.name, read.system) == ("beta", "rollout.n=8")
    with pytest.raises(SettingsError, match=said):
        flags.parse_words(grpo.Args, "", words.split())
