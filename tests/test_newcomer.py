"""What a new user meets: unlucky files, rates, and run.sh."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint
import data
import flags
import grpo
import inputs
from errors import SettingsError
from examples import tiny
from fakes import SCRIPTS
from settings import changed, values_of

ROOT = Path(__file__).parent.parent
TINY = Path(tiny.ensure(str(ROOT / "runs")))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with the tiny model and rows with and without an answer."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / TINY.name).symlink_to(TINY)
    (tmp_path / "bare.jsonl").write_text('{"prompt": "Sort 31"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "Sort 32", "answer": "23"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def args(*flags: str):
    import tyro
    return tyro.cli(grpo.Args, args=flags, use_underscores=True,
                    config=(tyro.conf.OmitArgPrefixes,))


def mistakes(*flags: str) -> str:
    with pytest.raises(SettingsError) as error:
        inputs.read_inputs(args(*flags), 1, 1)
    return str(error.value)


def test_rows_that_are_not_scored_need_no_answer(place):
    flags = "--data bare.jsonl --eval_data held.jsonl --batch 1".split()
    assert "--reward exact needs 'answer': row 1 of " in mistakes(*flags)
    assert inputs.read_inputs(args(*flags, "--eval_only"), 1, 1).eval_rows


@pytest.mark.parametrize("file, change, words", [
    ("config.json", lambda old: json.dumps(json.loads(old) | {"num_hidden_layers": 5}),
     "cannot read its config.json"),
    ("chat_template.jinja", lambda old: "{{ messages and raise_exception('no') }}",
     "the chat template: no")])
def test_a_models_broken_file_is_named(place, file, change, words):
    path = shutil.copytree(TINY, place / "changed") / file
    path.write_text(change(path.read_text() if path.exists() else ""))
    text = mistakes("--model", "changed")
    assert words in text and "\n" not in text.split("2. ")[-1]


@pytest.mark.parametrize("flags, status", [("", 0), ("--gpu_gb 0.001", 1)])
def test_the_exit_status_of_a_plan_tells_whether_it_fits(place, flags, status):
    assert inputs.show_plan(args("--plan", *flags.split())) == status


@pytest.mark.parametrize("script, small, large", [
    ("grpo", (3e-4,), (1e-6,)), ("ppo", (3e-4, 1e-3), (1e-6, 1e-5))])
def test_a_rate_that_is_not_given_depends_on_the_models_size_and_not_on_its_name(
        place, script, small, large):
    shutil.copytree(TINY, "mine")
    found = inputs.read_files(args("--model", "mine"), 1).plan
    assert found.args.lr == 3e-4 and "mine, --lr 0.0003, reward: exact" in found.text()
    rates_of(SCRIPTS[script], small, large)


def rates_of(script, small, large):
    """What a small and a large model learn with."""
    for size, rates in (370_000, small), (135_000_000, large):
        chosen = script.Args()
        chosen.choose_rates(size)
        critic = [chosen.critic_args.critic_lr] if chosen.critic_args else []
        assert [chosen.lr, *critic] == [*rates]
        chosen.choose_rates(1)  # what is given stays
        assert chosen.lr == rates[0]


# ---- commands


def test_the_readme_names_the_pythons_that_run_sh_takes():
    low, high = re.search(r"not \((3, \d+)\) <= .* <= \((3, \d+)\)",
                          (ROOT / "run.sh").read_text()).groups()
    said = f"Python {low.replace(', ', '.')} to {high.replace(', ', '.')}"
    assert said in (ROOT / "README.md").read_text()


def test_run_sh_lists_its_jobs_and_refuses_others():
    shown = subprocess.run(["./run.sh", "help"], cwd=ROOT, capture_output=True, text=True)
    for job in ("ppo", "kk", "real", "prove", "test", "setup", *(
            path.stem for path in ROOT.glob("parts/*/jobs/*.sh"))):
        assert f"./run.sh {job}" in shown.stdout
    wrong = subprocess.run(["./run.sh", "hlep"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def copied(folder: Path, **programs: str) -> dict:
    """A copy of run.sh, with these programs before all others, on a machine without a GPU → its
    environment."""
    for name in "run.sh", "requirements.txt":
        shutil.copy(ROOT / name, folder)
    for job in ROOT.glob("parts/*/jobs/*.sh"):
        (folder / job.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(job, folder / job.relative_to(ROOT))
    (folder / "stub").mkdir()
    for name, text in (programs | {"nvidia-smi": "#!/bin/sh\nexit 1\n"}).items():
        (folder / "stub" / name).write_text(text)
        (folder / "stub" / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}/stub:{os.environ['PATH']}"}


STAMP = """source <(sed -n '/^setup() {/,/^}/p' run.sh)
{ cat requirements.txt; declare -f setup; } | sha256sum | cut -c1-12"""


@pytest.mark.parametrize("line, ranks, words, graded", [
    ("", "", "grpo.py --warmup_steps 10 --steps 35 --eval_data tiny@test", True),
    ("ppo --lr 1e-5", "1", "ppo.py --steps 35 --lr 1e-5", True),
    ("--steps 3", "3", "grpo.py --steps 35 --steps 3", False),
    ("kk --reward own.py:one", "", "grpo.py --model tiny:kk --reward own.py:one", False),
    *[(f"{job} --data{sep}mine.jsonl".strip(), "", f"--data{sep}mine.jsonl", False)
      for job, sep in (("", " "), ("kk", "="))],
    ("--data mine.jsonl --eval_data other.jsonl", "", "--eval_data other.jsonl", False),
    ("--reward=own.py:one", "", "grpo.py --reward=own.py:one", False),
    ("--data mine.jsonl", "", "grpo.py --data mine.jsonl kept", False),
    ("kk --data=mine.jsonl", "",
     "grpo.py --model tiny:kk --lr 1e-4 --data=mine.jsonl kept", False),
    ("--name there", "", "grpo.py --name there kept", False)])
def test_run_sh_gives_a_job_its_flags_its_grade_and_ranks(tmp_path, line, ranks, words, graded):
    gives(tmp_path, line, ranks, words, graded)


def gives(tmp_path, line, ranks, words, graded, *files: str):
    """`./run.sh LINE` on so many ranks gives a script these words. files: what is in runs/."""
    env = copied(tmp_path) | {"PYTHONDONTWRITEBYTECODE": "1", "RANKS": ranks}
    (tmp_path / ".venv/bin").mkdir(parents=True)
    torchrun = tmp_path / ".venv/bin/torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@" "kept ${PYTHONDONTWRITEBYTECODE-kept}"\n')
    torchrun.chmod(0o755)
    done = subprocess.run(["bash", "-c", STAMP], cwd=tmp_path, text=True, capture_output=True)
    (tmp_path / f".venv/.ready-{done.stdout.strip()}-cpu").touch()
    for name in ("there/args.json", *files):
        (tmp_path / "runs" / name).parent.mkdir(parents=True)
        (tmp_path / "runs" / name).touch()
    if not ranks:
        del env["RANKS"]
    done = subprocess.run(["./run.sh", *line.split()], cwd=tmp_path, env=env, text=True,
                          capture_output=True)
    words = f"--local_addr 127.0.0.1 --nproc_per_node {ranks or 2} {words}"
    assert done.stdout.endswith(" kept kept\n"), done.stderr
    own = " --data" in f" {line}" or "there" in line  # one's own data, or a run that goes on
    held_out = "--eval_data" in line or not own
    assert own != ("--warmup_steps" in done.stdout)
    assert done.stdout.count("--eval_data") == held_out
    given = iter(done.stdout.split())
    assert all(word in given for word in words.split())  # in this order
    assert ("--target_reward" in done.stdout, "--target_eval" in done.stdout) == (graded, graded)


def test_a_resume_has_the_flags_of_the_run(place, monkeypatch):
    """But those of a call alone; what is given wins."""
    given = args("--steps", "6", "--batch", "3", "--betas", "0.8", "0.9", "--eval_data", "x")
    kept = values_of(given) | {"script": "grpo.py", "ranks": 2, "eval_only": True, "gone": 1}
    (place / "runs/a").mkdir()
    (place / "runs/a/args.json").write_text(json.dumps(kept))
    monkeypatch.setattr(sys, "argv", "grpo.py --name a --steps 12 --eval_data None".split())
    found = grpo.parse(grpo.Args, "")
    assert (found.batch, found.steps, found.eval_data) == (3, 12, None)
    assert found.optimizer_args.betas == (0.8, 0.9) and found.plan_args.ranks == 1
    assert not found.eval_args.eval_only


@pytest.mark.parametrize("name, value", [("aggregation", "mean_of_all"), ("batch", "many")])
def test_a_value_of_a_run_that_its_flag_does_not_take_is_one_sentence(
        place, monkeypatch, name, value):
    (place / "runs/old").mkdir()
    (place / "runs/old/args.json").write_text(json.dumps({"script": "grpo.py", name: value}))
    monkeypatch.setattr(sys, "argv", "grpo.py --name old".split())
    monkeypatch.setattr(flags.dist, "run", lambda main: main())  # it would end this process
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **options: None, raising=False)
    with pytest.raises(SettingsError) as error:
        grpo.parse(grpo.Args, "")
    assert "runs/old/args.json" in str(error.value) and f"--{name}" in str(error.value)


def test_the_task_of_the_first_page_is_one_file(tmp_path):
    page = ROOT / "docs" / "use" / "start.md"
    mine = tmp_path / "mine.py"
    mine.write_text(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1])
    assert len(mine.read_text().splitlines()) <= 30
    rows, held = (data.read(f"{mine}:{name}", 0)[0] for name in ("rows", "held_out"))
    asked, others = ({row["prompt"] for row in found} for found in (rows, held))
    assert len(rows) == 500 and len(held) == 200 and not asked & others
    names = {}
    exec(mine.read_text(), names)
    assert [names["score"](text, "01234") for text in ("01234", "0123", "43210")] == [1, 0.8, 0.2]


def test_a_resume_says_what_becomes_of_rates_and_weights():
    before = changed(grpo.Args(), lr=1e-3, steps=6, lr_schedule="cosine")
    state = {"step": 6, "kl_coef": 0.0, "settings": values_of(before)}
    assert not checkpoint.consequences(before, state)
    more = changed(before, steps=12, reward=("exact:0.5",))
    assert checkpoint.consequences(more, state) == [
        "lr is 0.0005 in step 7, 1.7e-05 in step 12 (it was 6.7e-05 in step 6)",
        "the weight of exact is 0.5 in step 7 (it was 1 in step 6)"]


@pytest.mark.parametrize("body, words, status", [
    ("return 'yes'", "TypeError: a reward must be a finite number or None (got 'yes', a str)", 2),
    ("return [1.0]", "TypeError: a reward must be", 2), ("return None", "", 0),
    ("return int(completion)", "ValueError: invalid literal", 0), ("return 1", "", 0)])
def test_a_reward_is_tried_before_the_engine_starts(place, body, words, status):
    """A wrong type is refused; one that raises may be right for a real completion."""
    (place / "mine.py").write_text(f"def mine(completion, **row):\n    {body}\n")
    flags = "--data", "held.jsonl", "--batch", "1", "--reward", "mine.py:mine"
    if status:
        assert words in mistakes(*flags)
        return
    notes = inputs.read_inputs(args(*flags), 1, 1).notes
    assert any(words in note for note in notes if "made-up" in note) == bool(words)


STUB = """#!{python}
import pathlib, sys
here, words = pathlib.Path("{here}"), sys.argv[1:]
with (here / "asked").open("a") as asked:
    print(*words, file=asked)
there = here / "torchvision"
if words == ["-m", "venv", ".venv"] and not pathlib.Path(".venv/bin").exists():
    pathlib.Path(".venv/bin").mkdir(parents=True)
    for name in "pip", "python":
        pathlib.Path(".venv/bin", name).symlink_to(__file__)
named = [word for word in words if word.startswith("torchvision")]
if "install" in words and named:
    if "{index}" == "none" or ("{index}" == "pytorch") != ("--index-url" in words):
        sys.exit("no such version")
    there.touch()
if "uninstall" in words and named:
    there.unlink(missing_ok=True)
if words[0] == "-c" and "torchvision" in words[1]:
    sys.exit(not (there.exists() and {imports}))
"""


@pytest.mark.parametrize("index", ["own", "pytorch", "none"])
@pytest.mark.parametrize("imports", [True, False])
def test_the_set_up_keeps_a_torchvision_that_imports(tmp_path, index, imports):
    """A build for another torch would break every run. Without one the set-up goes on."""
    env = copied(tmp_path, **{"python3.12": STUB.format(
        python=sys.executable, here=tmp_path, index=index, imports=imports)})
    done = subprocess.run(["./run.sh", "setup"], cwd=tmp_path, env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "torchvision").exists() == (imports and index != "none")
    asked = (tmp_path / "asked").read_text()
    assert ("--index-url https://download.pytorch.org/whl/cpu" in asked) == (index != "own")
    assert [*tmp_path.glob(".venv/.ready-*-cpu")]
