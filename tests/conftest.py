"""Shared by all tests. ``test_kernel*.py`` run kernels: they are marked ``gpu``, and skipped without a GPU.

A family's ``test_dispatch.py`` runs some of the same tests on the CPU, over fake kernels: so these take ``device``,
``elements`` and ``compile_backend`` from fixtures.

The workers of pytest-xdist share the cores: with as many threads each as there are cores they wait for each other. 17
workers on 16 cores: no test of models done after 235 s. 26 on 32 cores, with two threads each: all after 80 s.
"""

import faulthandler
import os
import sys

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if WORKERS > 1:  # read when torch is imported, here and in processes that a test starts
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

import pytest  # noqa: E402


def missing_gpu() -> str:
    """Why kernels cannot run here; empty if they can."""
    import torch

    from cute_kernels import UnsupportedDeviceError
    from cute_kernels.runtime.targets import arch_of

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    try:
        arch_of(0)
    except UnsupportedDeviceError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items):
    of_kernels = [item for item in items if item.path.name.startswith("test_kernel")]
    reason = missing_gpu() if of_kernels else ""
    for item in of_kernels:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def on_gpu(request) -> bool:
    return request.node.path.name.startswith("test_kernel")


@pytest.fixture(scope="session")
def terminal(request):
    """The standard error that pytest does not capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return os.fdopen(os.dup(2), "w")


@pytest.fixture(autouse=True)
def time_limit(request):
    """A kernel that waits for ever cannot be interrupted: the run ends, and says where it was."""
    if not on_gpu(request):
        yield
        return
    long = any(request.node.get_closest_marker(name) for name in ("slow", "exhaustive"))  # Inductor compiles a model
    seconds = 400 if long else 150
    faulthandler.dump_traceback_later(seconds, exit=True, file=request.getfixturevalue("terminal"))
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def memory_goes_back(request):
    """To the other workers, which share the GPU: torch keeps what a test has freed."""
    yield
    if on_gpu(request) and (torch := sys.modules.get("torch")) and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def fakes_end_with_their_test():
    """Or later tests of another file would find fake kernels."""
    from cute_kernels.runtime import launches

    before = launches.load, launches.target_of
    yield
    assert (launches.load, launches.target_of) == before


@pytest.fixture
def device(request):
    return "cuda" if on_gpu(request) else "cpu"


@pytest.fixture
def elements():
    """Enough rows for each ring of stages to go round several times."""
    return 2**25


@pytest.fixture
def compile_backend(request):
    return "inductor" if on_gpu(request) else "aot_eager"


@pytest.fixture
def generator(request, device):
    from tests.norm.cases import seeded_generator

    return seeded_generator(request.node.nodeid, device)
