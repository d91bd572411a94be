"""Where the tests of attention run; numbers by a test's name."""

import faulthandler
import os

import pytest

from tests.norm_cases import seeded_generator


@pytest.fixture(scope="session")
def terminal(request):
    """The standard error that pytest does not capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return os.fdopen(os.dup(2), "w")


@pytest.fixture(autouse=True)
def time_limit(request, terminal):
    """A kernel that waits for ever cannot be interrupted: the run ends, and says where it was."""
    if request.node.get_closest_marker("gpu"):
        faulthandler.dump_traceback_later(150, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def device(request):
    return "cuda" if request.node.get_closest_marker("gpu") else "cpu"


@pytest.fixture
def generator(request, device):
    return seeded_generator(request.node.nodeid, device)
