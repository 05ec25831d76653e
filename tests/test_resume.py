"""A resume is the same run: what may change, what is refused, what is taken over and said."""
import copy
import json
import os
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers.utils.chat_template_utils import render_jinja_template

import checkpoint
import fakes
import faults
import grpo
import inputs
import log
import texts
from checkpoint import FIXED
from data import Row
from errors import SettingsError
from examples import tiny
from fakes import SCRIPTS
from forked import PYTHON
from settings import values_of

ROOT = Path(__file__).parent.parent
FACTS = {"script", "rows", "model_files", "reference_files", "precision"}  # no flags


def flags_of(kind) -> dict[str, object]:
    """Every field of a script's Args, those in groups too, with its value."""
    return values_of(kind())


# ---- one rule for flags

def test_what_is_fixed_is_a_flag_or_a_fact():
    every = {name for module in SCRIPTS.values() for name in flags_of(module.Args)}
    assert FIXED - every == FACTS
    kept = {name for module in SCRIPTS.values() for name in checkpoint.fixed(module.Args())}
    assert kept - every == FACTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_value_of_a_flag_is_refused_or_said(script, tmp_path):
    other_values(SCRIPTS[script], tmp_path)


def other_values(script, tmp_path):
    """Of each flag of a script."""
    flags, fixed = flags_of(script.Args), checkpoint.fixed(script.Args())
    state = {"step": 7, "settings": json.loads(json.dumps(flags))}
    for name, value in flags.items():
        saved = checkpoint.Saved(tmp_path / "step_7", copy.deepcopy(state))
        other = {bool: not value, tuple: ["another"], str: "another"}.get(type(value), 17)
        changed, text = flags | {name: other}, f"{name} was {saved.state['settings'][name]}"
        if name in fixed:
            with pytest.raises(SettingsError) as caught:
                checkpoint.check(saved, changed, flags, fixed)
            assert f"{text} and is now {other}" in str(caught.value), name
            assert str(caught.value).endswith("Would work: those of before, or another --name.")
            continue
        said = checkpoint.check(saved, changed, flags, fixed).changed
        old = checkpoint.words(state["settings"][name])
        now = checkpoint.words(json.loads(json.dumps(other)))
        expected = f"resumed with --{name} {now} (was {old}) from step 8 on"
        assert said == [expected], name
    assert checkpoint.check(saved, flags, flags).changed == []


def test_all_settings_that_cannot_change_are_in_one_sentence_and_a_forks_flag_is_said(tmp_path):
    was = dict(group=8, lr=1e-3, betas=(0.9, 0.99), seed=1, mine="a", torch="2.12")
    saved = checkpoint.Saved(tmp_path, {"step": 1, "settings": json.loads(json.dumps(was))})
    with pytest.raises(SettingsError, match="group was 8 and is now 4; seed was 1 and is now 2"):
        checkpoint.check(saved, was | {"group": 4, "seed": 2, "lr": 1.0})
    changed = was | {"mine": "b", "torch": "2.13", "fresh": 1}
    assert checkpoint.check(saved, changed, {"mine"}).changed == [
        "resumed with --mine b (was a) from step 2 on",
        "resumed with torch 2.13 (was 2.12) from step 2 on"]


# ---- rows

def rows(kind=Row, **changes) -> list[Row]:
    """Three; the second one is of this kind, with these changes."""
    made = [Row(i, f"p{i}", [1, i], f"a{i}", {"x": i, "when": datetime(2026, 1, 1)}, "s")
            for i in (0, 2, 5)]  # 1, 3 and 4 were too long
    made[1] = kind(**vars(made[1]) | changes)
    return made


@pytest.mark.parametrize("changes", [
    dict(prompt_ids=[1, 3]), dict(answer="b"), dict(answer=None), dict(columns={"x": 9})])
def test_another_row_is_refused_and_named(tmp_path, changes):
    another_row(tmp_path, **changes)


def another_row(tmp_path, **changes):
    settings = {"rows": 3, "row_digests": checkpoint.row_digests(rows())}
    saved = checkpoint.Saved(tmp_path, json.loads(json.dumps({"step": 1, "settings": settings})))
    assert checkpoint.check(saved, settings).changed == []
    again = settings | {"row_digests": checkpoint.row_digests(rows(**changes))}
    with pytest.raises(SettingsError, match=r"row 3 of --data differs"):
        checkpoint.check(saved, again)


# ---- files

def test_another_model_under_the_same_name_is_refused(tmp_path):
    """Also one of the same sizes and names."""
    found = []
    for n, value in ((8, 0.0), (8, 1.0), (9, 0.0)):
        save_file({"w": torch.full((n, 70_000), value)}, tmp_path / "model.safetensors")
        found.append({"model_files": checkpoint.digest_of_files(str(tmp_path))})
    saved = checkpoint.Saved(tmp_path, {"step": 4, "settings": found[0]})
    assert not checkpoint.check(saved, found[0]).changed
    for other in found[1:]:
        with pytest.raises(SettingsError, match="model_files was .* and is now "):
            checkpoint.check(saved, other)


# ---- the date in a chat template

LLAMA = ("{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
         "{%- endif %}Today Date: {{ date_string }}\n{{ messages[0]['content'] }}")
SMOL = ("{%- set today = strftime_now(\"%d %B %Y\") -%}\n{{- 'Today Date: ' ~ today ~ '\\n' -}}\n"
        "{% macro turn(m) %}{{ strftime_now(format='%H:%M') + m['content'] }}{% endmacro %}"
        "{{ turn(messages[0]) }}")
OTHERS = ["{% set form = '%d %b %Y' %}{{ strftime_now(form) }}{{ strftime_now('%d' ~ ' %b') }}",
          "{% set now = strftime_now %}{{ now('%d %b') }}{{ strftime_now(('%d', '%b') | join) }}",
          "{{ strftime_now( \"%d\" ) ~ strftime_now (format = '%H') }}",
          "  {% if true %}\n{{ strftime_now('%Y-%m-%d') }}{% endif %}",
          "\n{{ strftime_now('%-d') }}",
          "{{ strftime_now('%-d %-m %I %p %j %A|100%') }}"]


@pytest.mark.parametrize("template", [LLAMA, SMOL, *OTHERS])
def test_a_template_writes_the_date_on_which_the_run_began(template, monkeypatch):
    """As transformers would have written it then."""
    then, chat = datetime(2024, 2, 3, 4, 5, 6), [{"role": "user", "content": "x"}]
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime",
                        SimpleNamespace(now=lambda: then))
    expected = render_jinja_template([chat], chat_template=template)[0]
    monkeypatch.undo()
    tokenizer = tiny.make_tokenizer()
    for tokenizer.chat_template in template, {"default": template, "tool_use": ""}:
        assert texts.templated(chat, tokenizer, {}) != expected[0]
        tokenizer.clock = then.strftime
        assert texts.templated(chat, tokenizer, {}) == expected[0]
        del tokenizer.clock


@pytest.fixture(scope="module")
def with_date(tmp_path_factory) -> str:
    source, folder = Path(faults.model()), tmp_path_factory.mktemp("dated")
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    template = (folder / "chat_template.jinja")
    text = template.read_text()
    template.unlink()
    template.write_text("{% set form = '%Y%m' ~ '%d' %}{{ '<|im_start|>system\n' + "
                        "strftime_now(form) + '<|im_end|>\n' }}" + text)
    return str(folder)


DATE = "<|im_start|>system\n20190304<|im_end|>"


def dated_files(args) -> inputs.Inputs:
    """What a run of that day reads; its rows to train on and to evaluate on have its date."""
    found = inputs.read_files(args, 1, began="2019-03-04 23:59:59")
    for row in found.rows[:3] + found.eval_rows[:3]:
        assert row.prompt.startswith(DATE)
        assert found.tokenizer.decode(row.prompt_ids).startswith(DATE)
    return found


def test_all_that_a_run_renders_has_its_date(with_date):
    dated_files(fakes.args(model=with_date, max_tokens=9, max_prompt_tokens=64,
                           eval_data="tiny@test"))


def test_a_run_keeps_the_time_at_which_it_began(tmp_path):
    now, kept = datetime(2026, 1, 2), "2026-01-02 00:00:00"
    assert log.began(None, now) == log.began(tmp_path, now) == kept
    (tmp_path / "args.json").write_text("{}")
    assert log.began(tmp_path, now) == kept  # of an earlier version
    (tmp_path / "args.json").write_text('{"began": "2024-02-03 04:05:06"}')
    assert log.began(tmp_path, now) == "2024-02-03 04:05:06"


# ---- real runs

def go(folder: Path, *flags: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [PYTHON, ROOT / "grpo.py", *faults.FLAGS, "--max_prompt_tokens", "64", "--no-export",
         "--save_every", "1", "--name", "x", *flags], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env)
    return done.returncode, done.stdout


def dates(folder: Path) -> set[str]:
    return {json.loads(line)["prompt"].split("\n")[1][:8]
            for path in (folder / "runs/x/samples").glob("step_*") for line in path.open()}


EAST, WEST = "<+14>-14", "<-12>12"  # it is never the same day there


def test_a_run_resumed_on_another_day_has_the_same_prompts(with_date, tmp_path):
    """And says what it takes over, on the screen and in args.json."""
    (tmp_path / "mine.py").write_text("def mine(completion, **row): return len(completion)\n")
    flags = "--model", with_date, "--reward", "mine.py:mine"
    assert go(tmp_path, *flags, "--steps", "1", TZ=EAST)[0] == 0
    (tmp_path / "mine.py").write_text("def mine(completion, **row): return -len(completion)\n")
    status, text = go(tmp_path, *flags, "--steps", "2", "--temperature", "0.7", TZ=WEST)
    assert status == 0 and len(dates(tmp_path)) == 1, text
    said = [line.strip() for line in text.splitlines() if line.startswith("  resumed with ")]
    assert said == ["resumed with --temperature 0.7 (was 1.0) from step 2 on",
                        "resumed with --steps 2 (was 1) from step 2 on"]
    kept = json.loads((tmp_path / "runs/x/args.json").read_text())
    assert kept["changes"] == said and kept["temperature"] == 0.7
    # A second resume keeps what the first one said, and the flags that it does not give.
    status, text = go(tmp_path, *flags, "--steps", "3", "--lr", "2e-3", TZ=EAST)
    kept = json.loads((tmp_path / "runs/x/args.json").read_text())["changes"]
    assert kept[:2] == said and kept[2].startswith("resumed with --steps 3 (was 2)")
    assert kept[4] == "lr is 0.002 in step 3 (it was 0.001 in step 2)", kept
    assert "temperature" not in text and "goes on after step 2 of 3, begun " in text
    # What a resume is compared by is there.
    settings = json.loads((faults.last(tmp_path / "runs/x") / "state.json").read_text())["settings"]
    assert {*FACTS, "row_digests"} | checkpoint.fixed(grpo.Args()) <= settings.keys()
