"""What a command line says is what the run gets, or it is answered in a sentence: nothing is taken
in silence."""
import json
import random
import sys
from pathlib import Path

import pytest

import fakes
import identity
from settings import RENAMED, lists_of

LISTS = {name for script in fakes.SCRIPTS.values() for name in lists_of(script.Args())}
VALUES = {"reward": "exact:1 short:0.2 format", "stop": "END -- --x -1 ###",
          "offload": "params optimizer reference", "lora_targets": "q_proj up_proj k_proj",
          "logger": "a.py:x b.py:y c.py:z"}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function of a script and words → {flag: value} of the run, new and as it is resumed."""
    monkeypatch.chdir(tmp_path)

    def parsed(script: str, *words: str) -> dict:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        found = vars(fakes.SCRIPTS[script].parse(fakes.SCRIPTS[script].Args, ""))
        Path("runs/x").mkdir(parents=True, exist_ok=True)
        Path("runs/x/args.json").write_text(json.dumps(found | {"script": f"{script}.py"}))
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--name", "x"])
        again = vars(fakes.SCRIPTS[script].parse(fakes.SCRIPTS[script].Args, ""))
        assert again | {"name": None} == found | {"name": None}
        return found
    return parsed


@pytest.mark.parametrize("script", fakes.SCRIPTS)
def test_a_list_that_is_given_in_several_places_is_one_list(read, script):
    """The last place was the whole list."""
    rng = random.Random(7)
    assert {*VALUES} >= LISTS >= {"reward", "stop", "offload"}  # the last is a part's
    for name in sorted(LISTS) * 6:
        values = VALUES[name].split()
        rng.shuffle(values)
        words, cuts = [], sorted(rng.sample(range(1, len(values)), rng.randint(1, 2)))
        for some in (values[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)):
            flag = f"--{name}"
            safe = not any(one.startswith("-") for one in some)
            words += [flag, *some] if safe else [f"{flag}={one}" for one in some]
            words += rng.choice([[], ["--steps", "3"], ["--no-export"], ["--lr=0.1"]])
        assert read(script, *words)[name] == (*values,), words
    # A pair is no list; of what is given twice the last counts, as ./run.sh gives its own first.
    found = read(script, *"--lr 1 --betas 0.1 0.2 --lr 2 --betas 0.3 0.4".split())
    assert (found["lr"], found["betas"]) == (2, (0.3, 0.4))


def test_a_run_of_an_earlier_release_keeps_the_flags_that_have_other_names_now(read):
    """Its args.json has the old ones, and so has the state of its checkpoints."""
    was = read("ppo", "--logprob_tokens", "4096", "--critic_value_tokens", "8192")
    path = Path("runs/x/args.json")
    old = {now: before for before, now in RENAMED.items()}
    kept = {old.get(name, name): value for name, value in json.loads(path.read_text()).items()}
    assert not kept.keys() & RENAMED.values()
    path.write_text(json.dumps(kept))
    again = vars(fakes.SCRIPTS["ppo"].parse(fakes.SCRIPTS["ppo"].Args, ""))
    assert again | {"name": None} == was | {"name": None}
    entries = {name: identity.Entry(was[name], flag=True) for name in RENAMED.values()}
    assert identity.compare({name: kept[name] for name in RENAMED}, entries, path, 3) == []


@pytest.mark.parametrize("wait, warm", [(0, 3), (2, 3), (4, 0), (3, 1)])
def test_the_policys_warm_up_begins_where_it_begins_to_learn(wait, warm):
    """The critic's warm-up used it up: the first update had the full rate."""
    args = fakes.args("ppo", steps=8, warmup_steps=warm, critic_warmup_steps=wait)
    rates = [fakes.SCRIPTS["ppo"].rate(args, step) for step in range(8)]
    assert rates[:wait] == [0.0] * wait
    assert rates[wait:wait + warm] == pytest.approx([1e-3 * (i + 1) / warm for i in range(warm)])
    assert rates[wait + warm] == pytest.approx(1e-3)
