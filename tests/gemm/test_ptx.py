"""The compiler's output for products with mxfp8 matrices, run on the CPU; their sums are exact, so in any order."""

import itertools

import numpy as np
import pytest
import torch

from cute_kernels import dequantize
from cute_kernels.gemm.config_mxfp8 import DECODE, scale_vec
from tests.ptx import compile_in
from tests.ptx_products import ProductKernel
from tests.ptx_threads import Memory

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
THREADS = 160
REST = 3  # rows beyond the last group
# A key of DECODE, groups, N, K, CTAs: tiles that overhang along N and K, groups of two tiles and of none, CTAs of many
# tiles and of none, more tiles of K than the ring has slots; 4, 2 and 1 scales a load
CASES = [
    (4, (3, 0, 9), 32, 1536, 1),
    (4, (1, 0, 8), 160, 32, 2),
    (7, (2, 20), 96, 64, 4),
    (64, (40, 0, 1), 160, 256, 3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """With the PTX of each case's kernel."""
    found = []
    for mean, _, _, k, _ in CASES:
        program = f"""
import torch
from cute_kernels.gemm.config_mxfp8 import DECODE, GroupedMxfp8Spec
from cute_kernels.gemm.kernel_grouped_mxfp8 import grouped_mxfp8
grouped_mxfp8.obtain("sm_90a", GroupedMxfp8Spec(torch.bfloat16, {scale_vec(k, 0)}), DECODE[{mean}])
"""
        found.append(tmp_path_factory.mktemp("ptx"))
        compile_in(found[-1], program)
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_rows_times_mxfp8_matrices(case, folders, generator):
    mean, sizes, n, k, ctas = CASES[case]
    experts, rows, ends = len(sizes), sum(sizes) + REST, np.cumsum(sizes).astype(np.int32)
    q = torch.randint(-8, 9, (experts, n, k), generator=generator).float().to(torch.float8_e4m3fn)
    scale = torch.randint(125, 130, (experts, n, k // 32), generator=generator).to(torch.uint8)
    a = torch.randint(-4, 5, (rows, k), generator=generator).bfloat16()
    values, wanted = dequantize(q, scale.view(torch.float8_e8m0fnu)).float(), torch.zeros(rows, n)
    for e, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        wanted[start:end] = a[start:end].float() @ values[e].T
    memory = Memory()
    padding = torch.zeros(-scale.numel() % 4, dtype=torch.uint8)
    of_scales, _ = memory.array(torch.cat([scale.flatten(), padding]).numpy())
    of_d, d = memory.array(np.full((rows, n), 0x7FC0, np.uint16))
    of_offs, _ = memory.array(ends)
    tile = DECODE[mean].tile
    copies = {0: (as_16_bits(q.view(torch.uint8)), tile[0]), 2: (as_16_bits(a), tile[1])}
    # Of a tensor map none but its tensor's shape, which comes behind
    parameters = [
        {}, {0: n, 4: k // 2, 8: experts}, {}, {0: rows, 4: k}, {0: of_scales}, {0: of_d, 8: n, 12: rows, 16: n},
        {0: of_offs, 8: experts},
    ]  # fmt: skip
    (path,) = folders[case].glob("*.ptx")
    ProductKernel(path.read_text()).run(ctas, THREADS, parameters, memory, copies)
    found = torch.from_numpy(d.view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(found, wanted.bfloat16())


def as_16_bits(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.int16).numpy().view(np.uint16)
