"""Threads that make the first calls of every public op together, on a machine without a GPU."""

import contextlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_kernels
from cute_kernels import mhc, moe, reduction, scatter
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import CALLS, OPS, first_calls

# They call what they are given, or nothing
NO_OPS = {"audit", "check_invariance", "declare_invariant", "install", "is_installed", "provenance", "uninstall"}
NO_OPS |= {"moe.register_with_transformers"}


def test_every_public_op_is_there():
    """A function that is exported is called by threads, here and on a GPU."""
    modules = {"": cute_kernels, "mhc.": mhc, "moe.": moe, "reduction.": reduction, "scatter.": scatter}
    public = {
        prefix + name
        for prefix, module in modules.items()
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    assert public - NO_OPS == set(OPS)


@pytest.mark.parametrize("path", ["reference", "fake kernels"])
@pytest.mark.parametrize(("op", "autograd"), CALLS)
def test_first_calls(op, autograd, path, generator):
    call = OPS[op](generator, 40)
    with contextlib.nullcontext() if path == "reference" else fake_kernels():
        first_calls(call, autograd)


def test_a_failure_in_a_thread_shows():
    with pytest.raises(ZeroDivisionError):
        first_calls((lambda x: 1 // 0, (torch.zeros(1),)), False)


PROGRAM = """
import importlib
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target
from tests.runtime.thread_cases import THREADS, together

launches.target_of = lambda device_index: Target("sm_90a", 132)
cache = launches.LaunchCache(lambda target, module: importlib.import_module(module))
modules = ["cutlass", "cutlass.cute", "cutlass.utils", "cutlass.pipeline"] * (THREADS // 4)
assert [module.__name__ for module in together(lambda thread: cache.get(0, modules[thread]))] == modules
print("whole in all threads")
"""


def test_the_compiler_is_imported_once():
    """The first launches of a process, by several threads, import different parts of the compiler."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "whole in all threads" in run.stdout
