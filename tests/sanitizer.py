"""A program under compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
needs_sanitizer = pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")


def assert_clean(tool: str, program: str, name: str) -> None:
    """Runs ``program`` with ``name`` as its argument; it prints "done" at its end."""
    # An error of the driver's interface is none of memory: torch looks for functions that a driver may lack
    options = ["--tool", tool, "--error-exitcode", "9"] + ["--report-api-errors=no"] * (tool == "memcheck")
    command = [SANITIZER, *options, sys.executable, "-c", program, name]
    # Without torch's cache each tensor is an allocation of its own, so that memcheck sees its end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    report = done.stdout + done.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not support this device")
    found = report if len(report) < 4000 else f"{report[:2500]}\n...\n{report[-1500:]}"
    assert "done" in done.stdout, found
    assert done.returncode == 0 and " SUMMARY: 0 " in report, found
