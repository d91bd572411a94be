"""The compiler's output for grouped products of SM100, run on the CPU; their sums are exact, so in any order.

Of the kernels' classes with tiles that are quick to run. No SM100 has run them.
"""

import itertools
import re
from collections import defaultdict

import numpy as np
import pytest
import torch

from tests.gemm.grouped_cases import BF16, FP32
from tests.gemm.test_ptx import as_16_bits
from tests.ptx import compile_in
from tests.ptx_tcgen05 import Tcgen05Kernel
from tests.ptx_threads import Memory

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
THREADS = 256
REST = 5  # rows beyond the last group
N, K = 72, 136  # tiles overhang
# What is ragged, b's neighbours, the result's dtype, whether it is added to, tile and cluster, whether it is transposed
CASES = {
    "rows": ("rows", "k", BF16, False, (128, 64, 64), (1, 2), False),
    "rows, b along n": ("rows", "n", FP32, False, (128, 64, 64), (1, 2), False),
    "rows, no cluster": ("rows", "n", BF16, False, (128, 64, 64), (1, 1), False),
    "few rows": ("rows", "k", BF16, False, (128, 16, 64), (1, 1), True),
    "sums": ("sums", "n", BF16, False, (128, 64, 64), (2, 1), False),
    "sums into fp32": ("sums", "n", FP32, True, (128, 64, 64), (2, 1), False),
}
# A group of two tiles of rows, and of K; of none; more tiles of K than the ring has slots
SIZES = [(3, 0, 140, 17), (0, 16, 1, 0), (200,)]


PROGRAM = """
import pathlib
import torch
from cute_kernels.gemm.config_grouped import GemmConfig, GroupedSpec, grouped_arguments
from cute_kernels.gemm.kernel_grouped import grouped
from tests.gemm.test_ptx_sm100 import BF16, CASES
for number, (ragged, major, out, accumulate, tile, cluster, transposed) in enumerate(CASES.values()):
    spec = GroupedSpec(BF16, out, ragged, accumulate, "k" if ragged == "rows" else "m", major)
    grouped.obtain(*grouped_arguments("sm_100a", spec, 64, GemmConfig(tile, cluster, 2, 2), transposed))
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(f"{number}.text")
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    compile_in(folder, PROGRAM)
    return {name: (folder / f"{number}.text").read_text() for number, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def kernels(texts):
    return {name: Tcgen05Kernel(text) for name, text in texts.items()}


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products_of_groups(name, sizes, clusters, kernels, generator):
    """All of the result is written, of rows beyond the groups zeros; other rows' NaN reach no sum."""
    check(name, sizes, clusters, kernels[name], generator)


def test_a_control(texts, generator):
    """Sums whose next group's rows are not zeroed are found."""
    zeroed = re.compile(r"st\.shared\.v4\.b32\s+\[%r\d+\], \{0, 0, 0, 0\};")
    text, count = zeroed.subn("", texts["sums"])
    assert count == 2
    with pytest.raises(AssertionError):
        check("sums", SIZES[0], 1, Tcgen05Kernel(text), generator)


def check(name, sizes, clusters, kernel, generator):
    ragged, major, out, accumulate, tile, cluster, transposed = CASES[name]
    ends, rows = np.cumsum(sizes).astype(np.int32), sum(sizes) + REST
    bounds = list(itertools.pairwise((0, *ends)))

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(BF16)

    if ragged == "rows":
        a, b, wanted = integers(rows, K), integers(len(sizes), N, K), torch.zeros(rows, N)
        for e, (start, end) in enumerate(bounds):
            wanted[start:end] = a[start:end].float() @ b[e].float().T
        operands, shape = (a, b if major == "k" else b.mT.contiguous()), {8: rows, 12: N, 16: N}
        of_a, boxes = {0: rows, 4: K}, tile[:2]
        if transposed:
            operands, shape, of_a = operands[::-1], {8: N, 12: rows, 16: N}, {0: N, 4: K, 8: len(sizes)}
    else:
        a, b = integers(rows, N), integers(rows, K)
        a[ends[-1] :] = b[ends[-1] :] = torch.nan
        wanted = torch.stack([a[start:end].float().T @ b[start:end].float() for start, end in bounds])
        operands, shape = (a, b), {8: N, 12: K, 16: len(sizes), 24: K, 32: N * K}
        of_a, boxes = {0: N, 4: rows}, (tile[2], tile[2])
    memory, poison = Memory(), torch.full(wanted.shape, torch.nan, dtype=out)
    start = torch.randint(-9, 10, wanted.shape, generator=generator).to(out) if accumulate else poison
    of_d, d = memory.array(start.numpy() if out is FP32 else as_16_bits(start))
    of_offs, _ = memory.array(ends)
    # Of a tensor map none but its tensor's shape, which comes behind
    parameters = [defaultdict(int) for _ in range(7 if transposed else 9)]
    parameters[2].update(of_a)
    parameters[4].update({0: rows, 4: K} if transposed else {})
    parameters[-2].update({0: of_d, **shape})
    parameters[-1].update({0: of_offs, 8: len(sizes)})
    # A CTA loads its share of what its neighbour needs, too
    copies = {1 + 2 * i: (as_16_bits(operands[i]), boxes[i] // cluster[1 - i]) for i in range(2)} | {5: (d, tile[0])}
    size = cluster[0] * cluster[1]
    kernel.run(clusters * size, THREADS, parameters, memory, copies, size)
    found = torch.from_numpy(d.copy() if out is FP32 else d.view(np.int16).copy()).view(out)
    assert torch.equal(found, (wanted + start.float() if accumulate else wanted).to(out))
