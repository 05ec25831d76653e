"""The tests of a part run as those of the core do."""
import conftest  # tests/conftest.py


def pytest_configure(config):
    """The hooks of that file act where pytest was asked for a part alone."""
    if not config.pluginmanager.is_registered(conftest):
        config.pluginmanager.register(conftest)
