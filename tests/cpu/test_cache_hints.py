"""Which kernels ask L2 to make room first for what they read, by their PTX."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.common.cache_hints import EVICT_FIRST, EVICT_NORMAL

ROOT = Path(__file__).parents[2]
LOAD = re.compile(r"cp\.async\.bulk\.\S*shared::\w+\.global\S*")
CHOICE = re.compile(rf"selp\.b64\s+\S+, {EVICT_FIRST}, {EVICT_NORMAL},")

PROGRAM = """
import pathlib
from cute_kernels.gemm.config import DECODE_32
from cute_kernels.gemm.kernel import gemm
from tests import mhc_cases, mxfp8_cases, norm_cases
from tests.cpu.test_gemm_compile import arguments
from tests.cpu.test_mhc_compile import jobs_of

norm = norm_cases.kernels_of([norm_cases.Case("rms", 1024)], {arch!r})
quantize = mxfp8_cases.kernels_of([mxfp8_cases.Case("rowwise", (96, 160))], {arch!r})
case = mhc_cases.Case(4, 1280)
pre, projection = (jobs_of({arch!r}, (op, case)) for op in ("pre", "projection"))
jobs = [*norm, *quantize, (gemm, arguments({arch!r}, (DECODE_32, True))), *projection]
jobs += [job for job in pre if job[0].__name__ == "pre_forward"]
wanted = ("norm_forward", "norm_backward", "mxfp8_quantize", "gemm", "pre_forward", "projection_backward")
for index, (builder, arguments) in enumerate(dict.fromkeys(job for job in jobs if job[0].__name__ in wanted)):
    assert builder.obtain(*arguments).origin == "compiled"
    for path in pathlib.Path.cwd().glob("*.ptx"):
        mixes = builder.__name__ == "pre_forward" and arguments[4] is not None
        path.rename(f"{{builder.__name__}}{{'_mixes' if mixes else ''}}.{{index}}.text")
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_load_has_a_priority_and_who_chooses(arch, tmp_path):
    environment = {
        **os.environ,
        "JIT_CACHE_DIR": str(tmp_path / "cache"),
        "JIT_CACHE_MODE": "on",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arch=arch)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    chooses: dict[str, bool] = {}
    for path in tmp_path.glob("*.text"):
        for kernel in path.read_text().split(".entry ")[1:]:
            if LOAD.search(kernel):
                assert all("L2::cache_hint" in load for load in LOAD.findall(kernel))
                chosen = bool(CHOICE.search(kernel))
                assert chooses.setdefault(path.name.split(".")[0], chosen) == chosen
    assert chooses == {
        "norm_forward": True,
        "norm_backward": True,
        "mxfp8_quantize": True,
        "gemm": True,
        "pre_forward": True,
        "pre_forward_mixes": False,  # writes a quarter of what it reads
        "projection_backward": True,
    }
