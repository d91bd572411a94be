"""The compiler's output for rows of one CTA and of two, run on the CPU, thread by thread: the reference's tokens."""

import itertools

import numpy as np
import pytest
import torch

from cute_kernels.sampling import reference
from cute_kernels.sampling.config import FILTER_THREADS, THREADS, Numbers, numbers_of
from tests.ptx import compile_in
from tests.ptx_threads import Kernel, Memory, word
from tests.sampling.cases import BF16, FP32, Case, make_inputs
from tests.sampling.test_kernel import FILTERS

pytestmark = pytest.mark.exhaustive
NOISE = ((), (("temperature", 0.0),))
SHORT = [Case(4, 40, BF16, "holes"), Case(2, 40, BF16, "ties"), Case(1, 1000, BF16, "last")]
KERNELS = [
    (BF16, 8, 1, NOISE, [Case(1, 4088, BF16, "ties"), SHORT[0]]),
    (FP32, 1, 1, NOISE, [Case(1, 2563, FP32, "flat")]),
    (BF16, 8, 1, [FILTERS[i] for i in (4, 8, 11)], [Case(1, 4104, BF16, "model"), *SHORT]),
    (BF16, 8, 2, [FILTERS[i] for i in (4, 6, 11)], [Case(1, 1000, BF16, "ties"), SHORT[2]]),
    (FP32, 1, 1, [(("top_k", 300), ("top_p", 0.5)), FILTERS[6]], [Case(1, 2563, FP32, "flat")]),
]


IDS = ["bf16", "one at a time", "filters", "filters, two CTAs", "filters, one at a time"]


@pytest.mark.parametrize(("dtype", "vec", "cluster", "options", "cases"), KERNELS, ids=IDS)
def test_tokens(dtype, vec, cluster, options, cases, tmp_path, generator):
    """Rows of one turn and of two."""
    filtered = numbers(options[0]).filters
    program = f"""
import torch
from cute_kernels.sampling.config import SampleSpec
from cute_kernels.sampling.kernel import sample_rows
sample_rows.obtain("sm_90a", SampleSpec({dtype}, {vec}, {cluster}, {filtered}))
"""
    compile_in(tmp_path, program)
    (path,) = tmp_path.glob("*.ptx")
    kernel = Kernel(path.read_text())
    for case, given in itertools.product(cases, options):
        inputs, chosen = make_inputs(case, generator), numbers(given)
        memory = Memory()
        x = inputs["logits"].view(torch.int16 if dtype is BF16 else torch.int32)
        logits, seeds, positions = (memory.array(t.numpy())[0] for t in (x, inputs["seeds"], inputs["positions"]))
        tokens, found = memory.array(np.full(case.rows, -1))
        parameters = [{0: logits, 8: case.rows, 12: case.columns, 16: case.columns}]
        parameters += [{0: at, 8: case.rows} for at in (seeds, positions, tokens)]
        scale, log_min_p = (word(np.float32(value)) for value in (chosen.scale, chosen.log_min_p))
        parameters += [{0: value} for value in (scale, int(chosen.noisy), chosen.top_k, chosen.top_p, log_min_p)]
        kernel.launch(case.rows * cluster, FILTER_THREADS if filtered else THREADS, parameters, memory, cluster)
        wanted = reference.tokens_of(inputs["logits"], inputs["seeds"], inputs["positions"], chosen)
        assert found.tolist() == wanted.tolist(), (case, given)


def numbers(options: tuple) -> Numbers:
    given = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, **dict(options)}
    return numbers_of(**given)
