"""Other systems' errors, which docs/use/recipes.md answers, and their flags: each command of the
page ends well and prints the lines below it; its table is the one of the command line."""
import re

import pytest

import test_docs
from examples import tiny
from house import module, needs
from test_docs import FLAGS, ROOT, TEXT, blocks, rows
from test_script import script

other_systems = module("parts.other_systems.other_systems")

PAGE = "docs/use/recipes.md"
REPORTS = [block.removeprefix("$ ").replace("\\\n", " ") for block in blocks(PAGE)
           if block.startswith("$ ")]
hub = test_docs.hub  # what a plan fetches


@pytest.fixture
def place(tmp_path):
    """A folder for runs, with the tiny model."""
    model = tiny.ensure(str(ROOT / "runs"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / model.rpartition("/")[2]).symlink_to(model)
    return tmp_path


def printed(command: str, place) -> str:
    """What a command of the page prints; it must end well."""
    launcher, _, flags = command.partition("grpo.py ")
    if "--plan" in flags:
        return " ".join(test_docs.printed("grpo.py", *flags.split()).split())
    ranks = int((re.findall(r"--nproc_per_node (\d+)", launcher) or ["1"])[0])
    done = script(*flags.split(), ranks=ranks, cwd=place)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return " ".join(done.stdout.split())


@needs("other_systems")
def test_the_words_of_the_errors_are_on_the_page():
    text = " ".join(TEXT[PAGE].split())
    for words in ("only support equal chunk. Got size of DataProto 2 and chunk 4",
                  "The global train batch size (3 x 1) must be evenly divisible by the number of "
                  "generations per prompt (8)", "log_prob_micro_batch_size_per_gpu",
                  "CUDA out of memory", "rollout.n",
                  "only support equal chunk. Got size of DataProto 512 and chunk 6"):
        assert words in text
    assert len(REPORTS) == 5


@pytest.mark.parametrize("report", [
    pytest.param(report, id=report.split("\n")[0][-40:],
                 marks=[] if "--plan" in report else pytest.mark.slow) for report in REPORTS])
def test_a_command_of_the_page_runs_and_prints_what_stands_there(report, place):
    command, _, lines = report.partition("\n")
    found = printed(command, place)
    assert not [line for line in lines.splitlines() if " ".join(line.split()) not in found], found
    if "--group 64" in command:  # as much memory as with 32
        half = printed(command.replace("--group 64", "--group 32"), place)
        assert re.search(r"sum [\d. ]+", half)[0] == re.search(r"sum [\d. ]+", found)[0]
    if "--eval_data" in command:  # it ends after the last, odd batch and the evaluation
        assert "evaluation after 2 steps" in found


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


@needs("other_systems")
def test_the_command_line_says_so():
    done = script("--num_generations", "3")
    assert done.returncode == 2 and "TRL's --num_generations is --group here." in done.stderr
