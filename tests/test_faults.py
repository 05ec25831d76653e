"""The mistakes of results/faults.py are patches of today's files, and what reports a sound change
is noise (results/seen_by.py)."""
import json
import re
import subprocess
import sys
from difflib import ndiff

import pytest

from files import read
from results import diagnosers, faults, seen_by
from tracked import ROOT

PAGE = (ROOT / seen_by.PAGE).read_text()


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_patch_is_short_and_applies(name):
    """Its text is there once, and what comes of it is Python that knows all of its names."""
    fault = faults.FAULTS[name]
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    patched = text.replace(fault.old, fault.new)
    said = subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--select", "F821", "-"],
                          input=patched, text=True, capture_output=True, cwd=ROOT)
    assert said.returncode == 0, said.stdout
    changed = [line for line in ndiff(text.splitlines(), patched.splitlines())
               if line[0] in "+-"]
    assert 1 <= len(changed) <= 10


def test_each_rule_has_a_patch_and_others_are_published_or_sound():
    """No thread is one of the page's, and no name of a file stands for two."""
    assert {*faults.RULES} == {*map(int, re.findall(r"^\| (\d+) \|", PAGE, re.M))}
    assert len(faults.RULES) == 57 and len(faults.PUBLISHED) >= 20 and len(faults.SOUND) == 10
    assert len(faults.FAULTS) == len({seen_by.slug(one) for one in faults.FAULTS.values()}) == (
        57 + len(faults.PUBLISHED) + 10)
    assert {one.kind for one in faults.PUBLISHED} >= {
        faults.ENGINE, faults.TEXTS, faults.DATA, faults.TURNS, faults.SCHEDULE, faults.OPTION}
    links = [one.link for one in faults.PUBLISHED]
    assert len({*links}) == len(links) and not [link for link in links if link in PAGE]


def test_what_a_sound_change_gives_too_does_not_count(tmp_path, monkeypatch):
    """Nor what the shipped code gives with the same flags. The first one left is the word."""
    monkeypatch.setattr(seen_by, "KEPT", tmp_path)
    monkeypatch.setattr(seen_by, "SAVED", {})
    fault, sound = faults.FAULTS["21"], faults.SOUND[0]

    def keep(one, **record):
        seen_by.place(one).write_text(json.dumps({"name": one.name} | record))

    assert seen_by.word(fault) == "not run"
    keep(fault, plan=[], start=[["start", 0, "error: they differ"]], run=[["range a", 3, "a"]])
    assert seen_by.word(fault) == "not run"  # the shipped code was not asked
    keep(seen_by.as_shipped(fault), start=[], run=[])
    assert seen_by.word(fault) == "start"
    keep(seen_by.as_shipped(fault), start=[["start", 0, "error: no room"]], run=[])
    assert seen_by.word(fault) == "step 3"
    keep(sound, run=[["range a", 9, "a"]])
    assert seen_by.word(fault) == "not run"
    keep(fault, **{name: [] for name in seen_by.ORDER} | {"run": [["range b", 35, "b"]]})
    assert seen_by.word(fault) == "step 35"
    keep(fault, **{name: [] for name in seen_by.ORDER})
    assert seen_by.word(fault) == "not"
    seen_by.SAVED[fault.name] = {"name": fault.name, "plan": [["plan", 0, "error: no"]]}
    assert seen_by.word(fault) == "not"  # what is of this clone comes first
    seen_by.place(fault).unlink()
    assert seen_by.record_of(fault)["plan"]


def test_the_longest_are_asked_of_what_no_other_saw(tmp_path, monkeypatch):
    """And of each sound change, all."""
    monkeypatch.setattr(seen_by, "KEPT", tmp_path)
    monkeypatch.setattr(seen_by, "SAVED", {})
    monkeypatch.setattr(
        seen_by, "ask", lambda tree, fault, name, **options: asked.append(name) or [])
    sound, seen = faults.SOUND[0].name, [["grade", 35, "missed"]]
    for one, run, expected in ("20", [], ["kills", "suite"]), ("20", seen, []), (
            sound, seen, seen_by.ORDER):
        fault, asked = faults.FAULTS[one], []
        record = {name: [] for name in [*seen_by.ORDER[:4], "first steps"]} | {"run": run}
        seen_by.place(fault).write_text(json.dumps({"name": one} | record))
        late = seen_by.ORDER if one == sound else ["kills", "suite"]
        seen_by.look_for(None, fault, late, everything=one == sound, whole=False)
        assert asked == expected


def test_a_public_package_gets_a_log_under_the_names_that_it_knows(tmp_path, monkeypatch):
    """One row a step, with the evaluation in it and the group's size of its flags. What it says is
    kept, and a run that is not there has nothing."""
    monkeypatch.setattr(seen_by, "KEPT", tmp_path)
    monkeypatch.setattr(seen_by, "SAVED", {})
    monkeypatch.setattr(diagnosers, "METRICS", tmp_path)
    monkeypatch.setattr(diagnosers, "FOLDER", tmp_path / "packages")
    lone, other = faults.FAULTS["27"], faults.FAULTS["22"]  # --group 2, and the job's
    (tmp_path / "27-0.jsonl").write_text(
        '{"step": 0, "eval/pass@1": 0.1, "eval/rows": 9}\n'
        '{"step": 1, "reward/mean": 0.5, "time/step": 3}\n'
        '{"step": 1, "eval/pass@1": 0.2, "eval/rows": 9}\n')
    (tmp_path / "22-0.jsonl").write_text('{"step": 1}\n')
    assert read(diagnosers.log_of(lone)) == [
        {"group_size": 2, "step": 0, "eval_score": 0.1},
        {"group_size": 2, "step": 1, "reward": 0.5, "eval_score": 0.2}]
    assert read(diagnosers.log_of(other)) == [{"group_size": 8, "step": 1}]
    said = {"package": ["plateau"]}
    monkeypatch.setattr(diagnosers, "ask", lambda name, log: said[name])
    assert diagnosers.findings("package", lone) == {"plateau"}
    (tmp_path / "27-0.jsonl").unlink()
    said.clear()
    assert diagnosers.findings("package", lone) == {"plateau"}
    assert seen_by.record_of(lone)["packages"] == {"package": ["plateau"]}
    assert diagnosers.findings("package", faults.FAULTS["21"]) is None


def test_the_page_says_what_the_results_say():
    """Each word of its column is that of results/faults.json, which has the sentence behind it."""
    found = json.loads(seen_by.FILE.read_text())["faults"]
    words = {number: row.split("|")[3].strip() for number, row in re.findall(
        r"^\| (\d+) \|(.*)", PAGE, re.M)}
    assert words == {number: found[number]["seen by"] for number in words}
    for one in found.values():
        assert bool(one["says"]) == (one["seen by"] not in ("not", "not run"))
