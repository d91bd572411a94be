"""Tests that run kernels: skipped without a GPU that has any; their kernels are compiled beforehand, in parallel.

Some of these modules also run on the CPU with plain torch in place of the kernels (tests/cpu/test_norm_dispatch.py):
these take ``device``, ``norm``, ``elements`` and ``compile_backend`` from fixtures.
"""

import faulthandler
import os
from pathlib import Path

import pytest
import torch

from cute_kernels import UnsupportedDeviceError
from cute_kernels.runtime.targets import arch_of
from tests.beforehand import compile_beforehand
from tests.norm_cases import Case, kernels_of, public_norm, seeded_generator


def missing_gpu() -> str:
    """Why these tests cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    try:
        arch_of(0)
    except UnsupportedDeviceError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = missing_gpu() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled_beforehand(request):
    """The kernels of all cases that were collected: one after the other they take a second or two each."""
    if missing_gpu():
        return
    cases: list[Case] = []
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            values = value if isinstance(value, list) else [value]
            cases += [value for value in values if isinstance(value, Case)]
    compile_beforehand(kernels_of(list(dict.fromkeys(cases)), arch_of(0)))


@pytest.fixture(scope="session")
def terminal(request):
    """The standard error that pytest does not capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return os.fdopen(os.dup(2), "w")


@pytest.fixture(autouse=True)
def time_limit(request, terminal):
    """A kernel that waits for ever cannot be interrupted: the run ends, and says where it was."""
    faulthandler.dump_traceback_later(400 if request.node.get_closest_marker("slow") else 150, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def norm():
    return public_norm


@pytest.fixture
def elements():
    """Enough rows for each ring of stages to go round several times."""
    return 2**25


@pytest.fixture
def compile_backend():
    return "inductor"


@pytest.fixture
def generator(request, device):
    return seeded_generator(request.node.nodeid, device)
