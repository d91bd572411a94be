"""compute-sanitizer finds no bad access and no race in small shapes of each variant, there and back.

On 2 SMs, so that CTAs that walk over tiles have several.
"""

import pytest

from tests.mxfp8.cases import FP32, Case, every_variant
from tests.sanitizer import assert_clean, needs_sanitizer

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
from tests.mxfp8.test_kernel_sanitizer import CASES
from cute_kernels.mxfp8.config import GRIDS
from tests.mxfp8.cases import as_many_tiles, assert_same, call, few_sms, laid_out, make_input, reference
from tests.mxfp8.cases import seeded_generator

for case in CASES[sys.argv[1]]:
    x = make_input(case, seeded_generator(str(case), "cpu"))
    for tiles in GRIDS[1:] if sys.argv[1] == "many" else (None,):
        with as_many_tiles(tiles) if tiles else contextlib.nullcontext(), few_sms():
            found = call(case, laid_out(case, x.cuda()))
        values = [cute_kernels.dequantize(found[i], found[i + 1]) for i in range(0, len(found), 2)]
        torch.cuda.synchronize()
        assert_same([t.cpu() for t in found], call(case, x, reference))
print("done")
"""


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("cases", [sum(CASES.values(), [])], ids=[""])  # so that their kernels are precompiled
def test_sanitizer(tool, name, cases):
    assert_clean(tool, PROGRAM, name)
