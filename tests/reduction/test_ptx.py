"""The compiler's output for sums of any length, run on the CPU, thread by thread: the reference, bit by bit."""

import numpy as np
import pytest
import torch

from cute_kernels.reduction import reference
from cute_kernels.reduction.config import WHOLE_PART, WHOLE_THREADS
from tests.ptx import compile_in
from tests.ptx_threads import POISON, Kernel, Memory
from tests.reduction.cases import BF16, FP32

pytestmark = pytest.mark.exhaustive
# (dtype, vec, squares); one element at a time: of a tensor that begins anywhere
KERNELS = [(BF16, 8, False), (FP32, 4, True), (FP32, 1, False), (BF16, 1, True)]


@pytest.mark.parametrize("dtype, vec, squares", KERNELS)
def test_whole_sums(dtype, vec, squares, tmp_path, generator):
    """One line and two, of one part and of several, with and without a vector that is not whole."""
    program = f"""
import torch
from cute_kernels.reduction.config import WholeSumSpec
from cute_kernels.reduction.kernel_whole import whole_sums
whole_sums.obtain("sm_90a", WholeSumSpec({dtype}, torch.float32, {vec}, {squares}))
"""
    compile_in(tmp_path, program)
    (path,) = tmp_path.glob("*.ptx")
    text = path.read_text()
    add_parts, add_partials = (Kernel(text, f"kernel_cutlass_{name}_") for name in ("add_parts", "add_partials"))
    for lines, n in ((1, 1), (2, 127), (1, 2 * WHOLE_PART + 2049 + vec // 2)):
        parts, stride = -(-n // WHOLE_PART), n + -n % 8
        x = torch.randn(lines, stride, generator=generator).to(dtype)
        x[:, n:] = torch.nan  # is not looked at
        memory = Memory()
        given, _ = memory.array(x.view(torch.int16 if dtype is BF16 else torch.int32).numpy())
        partials, _ = memory.array(np.full((lines, 4 * -(-parts // 4)), POISON, np.uint32))
        y, found = memory.array(np.full(lines, POISON, np.uint32).view(np.float32))
        rows = [{0: partials, 8: lines, 12: parts, 16: 4 * -(-parts // 4)}, {0: y, 8: lines}, {0: 0x3F000000}]
        add_parts.launch(lines * parts, WHOLE_THREADS, [{0: given, 24: stride}, {0: n}, *rows], memory)
        if parts > 1:
            add_partials.launch(lines, WHOLE_THREADS, rows, memory)
        wanted = [0.5 * reference.whole_sum(line[:n], squares) for line in x]
        assert torch.equal(torch.from_numpy(found.copy()), torch.stack(wanted)), (lines, n)
