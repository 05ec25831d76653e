"""What README.md and docs/ say is true."""
import re
import subprocess
from pathlib import Path

import pytest
import torch
import tyro

import distill
import grpo
import losses
import ppo
import sft
from forked import PYTHON
from preflight import memory, plan, rules

ROOT = Path(__file__).parent.parent
FLAG_PAGES = "docs/flags.md", "docs/flags_run.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
CODE = "\n".join(path.read_text() for path in ROOT.glob("*.py"))
SCRIPTS = {"grpo": grpo, "ppo": ppo, "sft": sft, "distill": distill}
FLAGS, PPO_FLAGS, SFT_FLAGS, DISTILL_FLAGS = (plan.flags(s.Args()) for s in SCRIPTS.values())
ALL_FLAGS = DISTILL_FLAGS | SFT_FLAGS | PPO_FLAGS | FLAGS
TORCHRUN = {
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "shutdown-timeout"}
TOOLS = {"sort", "wirings", "host"}
SLURM = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal"}


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables of a page, below a heading that contains `heading`."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for section in re.split("^## ", TEXT[page], flags=re.M)
            if heading in section.split("\n")[0]
            for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", TEXT)
def test_lines_links_and_flags(page):
    text = TEXT[page]
    lines = [re.sub(r"\(https://\S+?\)", "()", x) for x in text.splitlines()]  # cannot be folded
    assert not [x for x in lines if len(x) > 100 and not x.startswith("|")]
    prose = re.sub("^```.*?^```", "", text, flags=re.S | re.M)
    for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", prose):
        target = (ROOT / page).parent / name if name else ROOT / page
        if re.fullmatch(r"L\d+", anchor):
            continue  # test_learn.py
        headings = re.findall("^#+ (.*)$", target.read_text(), re.M) if anchor else [""]
        anchors = [re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings]
        assert target.exists() and anchor in anchors, (name, anchor)
    named = {*re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z_-]*)", text)}
    assert not named - ALL_FLAGS.keys() - TORCHRUN - TOOLS - SLURM - {"help", "flag"}


def test_every_flag_has_its_true_default():
    def typed(value) -> str:
        if value in (None, ()):
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    expected = {}
    for name in ALL_FLAGS:  # such as "8; ppo.py, sft.py 1": the first script's, then the others'
        values = {s: typed(plan.flags(SCRIPTS[s].Args())[name]) for s in SCRIPTS
                  if name in plan.flags(SCRIPTS[s].Args())}
        usual = next(iter(values.values()))
        others = {}
        for script, value in values.items():
            if value != usual:
                others.setdefault(value, []).append(f"{script}.py")
        expected[name] = "; ".join(
            [usual, *(f"{', '.join(scripts)} {value}" for value, scripts in others.items())])
    tables = [row for page in FLAG_PAGES for row in rows(page) if len(row) == 4]
    found = {row[0].strip("`-"): row[1] for row in tables}
    assert {name: found[name] for name in found.keys() - {"flag", ""}} == expected
    assert len([row for row in tables if row[0].startswith("`--")]) == len(expected)  # once
    for script, own, other in (("grpo", FLAGS, PPO_FLAGS), ("ppo", PPO_FLAGS, FLAGS),
                               ("distill", DISTILL_FLAGS, FLAGS | SFT_FLAGS)):
        section = {row[0].strip("`-") for row in rows("docs/flags.md", f"`{script}.py`")}
        assert section - {"flag", ""} == own.keys() - other.keys()


def parsed(command: str):
    """The Args of a command."""
    *_, script, flags = re.split(r"\b(grpo|ppo)\.py", "grpo.py " + command.replace("\\\n", " "))
    args = tyro.cli({"grpo": grpo, "ppo": ppo}[script].Args, args=flags.split(),
                    config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    args.lr = 1e-6   # the default depends on the model
    return args


def blocks(page: str) -> list[str]:
    return re.findall("^```\n(.*?)^```", TEXT[page], re.S | re.M)


def test_every_recipe_passes_the_checks():
    _, _, *recipes = rows("docs/recipes.md", "Algorithms")
    assert len(recipes) == 23
    for _, command in recipes:
        found = {rule.kind for rule in rules.problems(parsed(command.strip("`")), 8)}
        assert found <= {"--update_tokens"}, command   # the page says so for DAPO


def test_the_example_of_a_new_loss_runs():
    names = dict(vars(losses))
    exec(re.search("```python\n(.*?)```", TEXT["docs/recipes.md"], re.S)[1], names)
    logprobs, old, advantages = torch.randn(3, 2, 5)
    args = logprobs.requires_grad_(), old, advantages, torch.ones(2, 5, dtype=torch.bool)
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    loss, metrics = names["soft_clip_loss"](*args, **options)
    theirs, expected = losses.clip_loss(*args, **options)
    assert loss.shape == theirs.shape and loss.requires_grad and metrics.keys() == expected.keys()


def check_pasted(pasted: str, printed: str) -> None:
    """Lines can be left out (`...`) and folded."""
    printed = " ".join(printed.split())
    for part in re.split(r"^ *\.\.\.$", pasted, flags=re.M):
        assert " ".join(part.split()) in printed, f"{part}\nis not in\n{printed}"


@pytest.mark.parametrize("page", ["docs/flags.md", "docs/lora.md", "docs/memory.md"])
def test_pasted_output_is_what_the_command_prints(page):
    pasted = [block for block in blocks(page) if block.startswith("$ python ")]
    assert pasted
    for block in pasted:
        command, _, lines = block.replace("\\\n", " ").partition("\n")
        done = subprocess.run([PYTHON, *command.split()[2:]], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        check_pasted(lines, done.stdout)


def test_both_tables_of_other_systems_have_the_same_knobs():
    knobs = [row[0] for row in rows("docs/other_systems.md") if row[0].startswith("`--")]
    half = knobs.index(knobs[0], 1)
    assert half > 18 and knobs[:half] == [*knobs[half:], "`--lora_sync merged`"]


def test_no_page_is_longer_than_a_reader_reads_at_once():
    sizes = {page.name: len(page.read_bytes()) for page in (ROOT / "docs").glob("*.md")}
    assert len(sizes) > 25
    assert not {name: size for name, size in sizes.items() if size > 16_000}


def test_the_pasted_plan_for_64_gpus():
    command, pasted = blocks("docs/machines.md")
    args = parsed(command)
    assert not rules.problems(args, 64, 7473)
    made, shape = plan.Plan(args, 64, 7473, 0), memory.shape_of(args.model)
    check_pasted(pasted, memory.planned(made, shape, 80 * memory.GIB).text())


def test_the_metrics_of_the_code_are_the_documented_ones():
    cells = " ".join(row[0] for row in rows("docs/metrics.md") if len(row) == 2)
    documented = {*re.findall("`([^`]+)`", cells)}
    groups = "reward|rollout|loss|policy|critic|grad|batch|update|data|eval|time|memory"
    found = {*re.findall(rf'"((?:{groups})/[a-z][a-z0-9_@]*)"', CODE)}
    found |= {f"time/{name}" for name in re.findall(r'\b(?:time|phase)\("(\w+)"\)', CODE)}
    assert len(found) > 25
    assert not found - documented
    names = {name for name in documented if "/" in name and not re.search("[A-Z]", name)}
    assert len(names) > 40
    for name in names:   # spelled whole, by its last part, or by the phase it measures
        last = name.partition("/")[2].removesuffix("_not_finite")
        phase = last.removesuffix("_gb").removesuffix("_reserved")
        spelled = f'"{name}"', f'"{last}"', f"/{last}", f'("{phase}")', f"/{phase}_"
        assert any(text in CODE for text in spelled), name


def test_the_readme_is_small_and_lists_every_page_and_file():
    readme = TEXT["README.md"]
    assert len(readme.encode()) <= 9500
    assert not [page for page in TEXT if f"]({page}" not in readme and page != "README.md"]
    table = re.search("## Files(.*?)(\n## |$)", readme, re.S)[1]
    assert {*re.findall(r"`(\w+\.py)`", table)} == {path.name for path in ROOT.glob("*.py")}


def test_every_dependency_has_its_reason():
    for name in re.findall("^([^#=\n]+)==", (ROOT / "requirements.txt").read_text(), re.M):
        assert f"`{name}`" in TEXT["docs/setup.md"], name
