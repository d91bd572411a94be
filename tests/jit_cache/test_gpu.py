"""On a GPU: kernels from the compiler, the cache, a bundle and a shared library all compute; first launches race."""

import threading

import pytest

from jit_cache import load_shared
from jit_cache.bundle import export_bundle, import_bundle
from jit_cache.compile import Compiled, reset, stats
from jit_cache.store import Store
from tests.jit_cache import kernels

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def arch():
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def fresh():
    reset()
    return Compiled(kernels.add.build)


def adds(function, rows=1003):
    x, y = torch.randn(2, rows, device="cuda").unbind()
    x, y = x.clone(), y.clone()
    out = torch.full_like(x, float("nan"))
    function(x, y, out)
    torch.cuda.synchronize()
    return torch.equal(out, x + y)


def test_compiled_and_loaded_kernels_add():
    assert adds(fresh()(arch()))
    before = stats().compiles
    assert adds(fresh()(arch()), rows=5) and stats().compiles == before


def test_a_bundle_and_its_shared_library_add(cache, tmp_path):
    fresh().obtain(arch())
    digest, _ = export_bundle(tmp_path / "a.tar", Store(cache).entries(), shared=True)
    (entry,) = import_bundle(tmp_path / "a.tar", digest, Store(tmp_path / "bundle"))
    assert adds(load_shared(tmp_path / "bundle", entry.name))


def test_sixteen_threads_launch_for_the_first_time():
    for threads in (32, 64, 96, 128):
        function = fresh()(arch(), config=kernels.Config(threads=threads))
        barrier, right = threading.Barrier(16), []

        def launch(function=function, barrier=barrier, right=right):
            torch.cuda.set_device(0)
            x = torch.ones(777, device="cuda")
            out = torch.zeros_like(x)
            barrier.wait()
            function(x, x, out)
            torch.cuda.synchronize()
            right.append(bool((out == 2).all()))

        workers = [threading.Thread(target=launch) for _ in range(16)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert right == [True] * 16


def test_a_child_of_a_process_with_live_cuda_may_not_compile(run):
    code = """
import os
del sys.modules["torch"]
import torch
torch.zeros(1, device="cuda")
child = os.fork()
if child == 0:
    try:
        kernels.add.obtain("sm_100a")
    except jit_cache.ForkedProcessError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
"""
    run(code)
