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
    """Whether the plan of a script refuses flags, which are written group=1 stop=('x',): with a
    sentence for each of the texts between " & ", and with no other one. "fine": with none."""
    import fakes
    import plan
    from reference_settings import literal

    def check(script, words: str, sentences: str, shape=None) -> bool:
        flags = {name: literal(value) for name, value in (
            word.split("=") for word in words.split())}
        found = plan.problems(fakes.args(script, **flags), 1, shape=shape)
        texts = [] if sentences == "fine" else sentences.split(" & ")
        return len(found) == len(texts) and all(text in "\n".join(found) for text in texts)
    return check
