"""compute-sanitizer finds no bad access and no race in small shapes of each variant, there and back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mxfp8_cases import FP32, Case, every_variant

ROOT = Path(__file__).resolve().parents[3]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
SHAPE = (2, 160, 288)  # edges in both directions, several tiles
CASES = {
    "plain": [case for case in every_variant(SHAPE) if case.scale_layout == "plain"],
    "blocked": [case for case in every_variant(SHAPE) if case.scale_layout == "blocked"],
    "transposed": [Case("3d_dual", SHAPE, transposed=True), Case("3d_dual_square", SHAPE, transposed=True)],
    "fp32": [Case("3d_dual", SHAPE, FP32, gap=4), Case("3d_dual_square", SHAPE, FP32, scale_layout="blocked")],
    "many": [
        *(Case("rowwise", (160, 1024)), Case("colwise", (1024, 160)), Case("rowwise", SHAPE[1:])),
        *(Case("dual", (1024, 1024)), Case("3d_dual", (2, 160, 1024)), Case("dual", SHAPE[1:])),
    ],
}
PROGRAM = """
import contextlib
import sys
import torch
import cute_kernels
from tests.gpu.mxfp8.test_sanitizer import CASES
from cute_kernels.mxfp8.config import TILE_COUNTS
from tests.mxfp8_cases import as_many_tiles, assert_same, call, laid_out, make_input, reference, seeded_generator

for case in CASES[sys.argv[1]]:
    x = make_input(case, seeded_generator(str(case), "cpu"))
    for count in TILE_COUNTS[1:] if sys.argv[1] == "many" else (0,):
        with as_many_tiles(count) if count else contextlib.nullcontext():
            found = call(case, laid_out(case, x.cuda()))
        values = [cute_kernels.dequantize(found[i], found[i + 1]) for i in range(0, len(found), 2)]
        torch.cuda.synchronize()
        assert_same([t.cpu() for t in found], call(case, x, reference))
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
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
