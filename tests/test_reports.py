"""Other systems' errors, which docs/use/recipes.md answers: each command of the page ends well and
prints the lines below it."""
import re

import pytest

import test_docs
from examples import tiny
from test_docs import ROOT, TEXT, blocks
from test_script import script

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
