"""The mistakes of results/faults.py are patches of today's files, and what reports a sound change
is noise (results/seen_by.py)."""
import json
import re
import subprocess
import sys
from difflib import ndiff

import pytest

from results import faults, seen_by
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


def test_the_page_says_what_the_results_say():
    """Each word of its column is that of results/faults.json, which has the sentence behind it."""
    found = json.loads(seen_by.FILE.read_text())["faults"]
    words = {number: row.split("|")[3].strip() for number, row in re.findall(
        r"^\| (\d+) \|(.*)", PAGE, re.M)}
    assert words == {number: found[number]["seen by"] for number in words}
    for one in found.values():
        assert bool(one["says"]) == (one["seen by"] not in ("not", "not run"))
