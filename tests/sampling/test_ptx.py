"""The compiler's output for rows of one CTA, run on the CPU, thread by thread: the reference's tokens."""

import numpy as np
import pytest
import torch

from cute_kernels.sampling import reference
from cute_kernels.sampling.config import THREADS, numbers_of
from tests.ptx import compile_in
from tests.ptx_threads import Kernel, Memory
from tests.sampling.cases import BF16, FP32, Case, make_inputs

pytestmark = pytest.mark.exhaustive
KERNELS = [
    (BF16, 8, [Case(1, 4088, BF16, "ties"), Case(4, 40, BF16, "holes")]),
    (FP32, 1, [Case(1, 2563, FP32, "flat")]),
]


@pytest.mark.parametrize(("dtype", "vec", "cases"), KERNELS, ids=["bf16", "fp32 one at a time"])
def test_tokens(dtype, vec, cases, tmp_path, generator):
    """Rows of one chunk and of two, with noise and without."""
    program = f"""
import torch
from cute_kernels.sampling.config import SampleSpec
from cute_kernels.sampling.kernel import sample_rows
sample_rows.obtain("sm_90a", SampleSpec({dtype}, {vec}, 1, False))
"""
    compile_in(tmp_path, program)
    (path,) = tmp_path.glob("*.ptx")
    kernel = Kernel(path.read_text())
    for case in cases:
        inputs = make_inputs(case, generator)
        for temperature in (1.0, 0.0):
            numbers = numbers_of(temperature, None, None, None)
            memory = Memory()
            x = inputs["logits"].view(torch.int16 if dtype is BF16 else torch.int32).numpy()
            given, _ = memory.array(x)
            seeds, _ = memory.array(inputs["seeds"].numpy())
            positions, _ = memory.array(inputs["positions"].numpy())
            tokens, found = memory.array(np.full(case.rows, -1))
            scale = int(np.float32(numbers.scale).view(np.uint32))
            row = {8: case.rows, 12: case.columns, 16: case.columns}
            vectors = [{0: at, 8: case.rows} for at in (seeds, positions, tokens)]
            parameters = [{0: given, **row}, *vectors, {0: scale}, {0: int(numbers.noisy)}]
            kernel.launch(case.rows, THREADS, parameters, memory)
            wanted = reference.tokens_of(inputs["logits"], inputs["seeds"], inputs["positions"], numbers)
            assert found.tolist() == wanted.tolist(), (case, temperature)
