"""mypy knows the public functions as a user needs it, and every one of them is annotated."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_kernels
import cute_kernels.compat.batch_invariant_ops
import cute_kernels.integrations.vllm
import cute_kernels.models
import cute_kernels.nn
import jit_cache

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    cute_kernels,
    cute_kernels.mhc,
    cute_kernels.reduction,
    cute_kernels.scatter,
    cute_kernels.models,
    cute_kernels.compat,
    cute_kernels.compat.batch_invariant_ops,
    cute_kernels.integrations.vllm,
    cute_kernels.nn,
    jit_cache,
)
PUBLIC = [getattr(package, name) for package in PACKAGES for name in package.__all__]


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy")
def test_a_users_script_is_checked(tmp_path):
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path), "--python-version", "3.10"]
    command += ["--follow-imports=silent", "--warn-unused-ignores", "--check-untyped-defs", "tests/typing/user.py"]
    checked = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def functions(thing):
    """A public function, or a class's public methods of its own."""
    if inspect.isfunction(thing):
        return [thing]
    members = vars(thing).items() if inspect.isclass(thing) else ()
    names = ("__init__", "__call__", "__enter__")
    return [m for name, m in members if inspect.isfunction(m) and (name in names or not name.startswith("_"))]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: getattr(thing, "__qualname__", "module"))
def test_public_functions_are_annotated(thing):
    for function in functions(thing):
        names = [*inspect.signature(function).parameters, "return"]
        missing = [name for name in names if name != "self" and name not in function.__annotations__]
        assert not missing, f"{function.__qualname__}: {', '.join(missing)}"
