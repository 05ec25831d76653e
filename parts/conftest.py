"""The tests of a part run as those of the core do. What several parts need is a fixture here."""
import json
import shlex

import pytest

import conftest  # tests/conftest.py


def pytest_configure(config):
    """The hooks of that file act where pytest was asked for a part alone."""
    if not config.pluginmanager.is_registered(conftest):
        config.pluginmanager.register(conftest)


@pytest.fixture
def real_run(tmp_path):
    """A script and its flags → the metrics of a run of the tiny model on two ranks, in tmp_path,
    and the rows of its samples/."""
    def run(script: str, words: str):
        import ranks
        from examples import tiny
        base = tiny.ensure(str(conftest.ROOT / "runs"))
        ranks.script(conftest.ROOT / script, "--model", base, "--name", "x", "--minibatches", "1",
                     *shlex.split(words), ranks=2, cwd=tmp_path)
        paths = tmp_path / "runs/x/metrics.jsonl", *sorted(tmp_path.glob("runs/x/samples/step*"))
        metrics, *samples = ([*map(json.loads, path.open())] for path in paths)
        return metrics, sum(samples, [])
    return run


@pytest.fixture
def refused():
    """Whether a plan refuses flags: with a sentence for each of the texts between " | ", and with
    no other one."""
    import plan

    def check(args, words: str, shape=None) -> bool:
        found, words = plan.problems(args, 1, shape=shape), [*filter(None, words.split(" | "))]
        return len(found) == len(words) and all(text in "\n".join(found) for text in words)
    return check
