"""compute-sanitizer finds no bad access and no race in a small and in a clustered shape, forward and backward."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.norm_cases import BF16, FP32, Case

ROOT = Path(__file__).resolve().parents[3]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
CASES = {
    "small": [Case("rms", 64, rows=1024)],
    "cluster": [Case("layer", 32768, weight=FP32, bias=FP32, rows=16)],
    "off_16_bytes": [Case("layer", 769, rows=65, residual=BF16, dh=True), Case("rms", 5, rows=3)],
}
PROGRAM = """
import sys
import torch
from tests.gpu.norm.test_sanitizer import CASES
from tests.norm_cases import call_and_differentiate, make_inputs, public_norm, seeded_generator

for case in CASES[sys.argv[1]]:
    inputs = make_inputs(case, seeded_generator(str(case), "cpu"))
    for name in ("x", "residual", "weight", "bias", "dy", "dh"):
        if getattr(inputs, name) is not None:
            setattr(inputs, name, getattr(inputs, name).detach().cuda().requires_grad_(name not in ("dy", "dh")))
    results = call_and_differentiate(public_norm, case, inputs)
    torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in results.values())
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("memcheck", "small"),
        ("memcheck", "cluster"),
        ("memcheck", "off_16_bytes"),
        ("racecheck", "small"),
        ("racecheck", "cluster"),
        ("racecheck", "off_16_bytes"),
    ],
)
@pytest.mark.parametrize("cases", [sum(CASES.values(), [])], ids=[""])  # so that their kernels are compiled beforehand
def test_sanitizer(tool, name, cases):
    # An error of the driver's interface is none of memory: torch looks for functions that a driver may lack
    options = ["--tool", tool, "--error-exitcode", "9"] + ["--report-api-errors=no"] * (tool == "memcheck")
    command = [SANITIZER, *options, sys.executable, "-c", PROGRAM, name]
    # Without torch's cache each tensor is an allocation of its own, so that memcheck sees its end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    report = done.stdout + done.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not support this device")
    assert "done" in done.stdout, report[-4000:]
    assert done.returncode == 0 and " SUMMARY: 0 " in report, report[-4000:]
