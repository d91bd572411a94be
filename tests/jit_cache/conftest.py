"""Every test has a cache directory of its own; `run` runs code in a fresh interpreter."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jit_cache.__main__ import main
from jit_cache.compile import reset

ROOT = Path(__file__).resolve().parents[2]
# tvm_ffi imports torch if it is there, which takes a second or two.
PRELUDE = """
import sys
sys.modules["torch"] = None
import jit_cache
from jit_cache import compile as jc, stats
from jit_cache.store import Store, settings
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache directory, not there yet."""
    for name in list(os.environ):
        if name.startswith(("JIT_CACHE_", "CUTE_DSL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JIT_CACHE_DIR", str(tmp_path / "cache"))
    reset()
    yield tmp_path / "cache"
    reset()


def environment(env):
    """A process's environment in which it finds this repository."""
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1", **env}


@pytest.fixture
def start():
    """Starts a fresh interpreter on code; kills it at the end of the test."""
    started = []

    def start(code, **env):
        imports = "from tests.jit_cache import kernels\n" if "kernels." in code else ""  # imports cutlass: a second
        command = [sys.executable, "-c", PRELUDE + imports + code]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment(env), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    """Runs code in a fresh interpreter; returns (stdout, stderr); fails if it fails."""

    def run(code, *, status=0, **env):
        process = start(code, **env)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, err
        return out.strip(), err

    return run


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command of `python -m jit_cache` in this process; returns (status, stdout, stderr)."""

    def command(*words, **env):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            reset()
            try:
                status = main([str(word) for word in words])
            except SystemExit as error:
                status = error.code
        out, err = capsys.readouterr()
        return status, out.strip(), err.strip()

    return command


@pytest.fixture
def open_tmp():
    """A directory that other users can reach (pytest's own cannot be)."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)
