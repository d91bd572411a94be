"""The compiler's output for products of SM100, grouped and not, run on the CPU; their sums are exact, so in any order.

Their tiles are small, so that they are quick to run. No SM100 has run them.
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
    "few rows": ("rows", "k", BF16, False, (64, 8, 128), (1, 1), True),
    "few rows, b along n": ("rows", "n", BF16, False, (64, 32, 128), (1, 1), True),
    "sums": ("sums", "n", BF16, False, (128, 64, 64), (2, 1), False),
    "sums, most rows first": ("sums", "n", FP32, False, (128, 64, 64), (2, 1), False),
    "sums into fp32": ("sums", "n", FP32, True, (128, 64, 64), (2, 1), False),
}
RANKED = [list(CASES).index("sums, most rows first")]
# A group of two tiles of rows, and of K; of none; more tiles of K than the ring has slots
SIZES = [(3, 0, 140, 17), (0, 16, 1, 0), (200,)]


# Of products of matrices: options, what the result is rounded to
MATRICES = {"y": ({}, BF16), "main_grad": (dict(a_major="m", b_major="n", accumulate=True, has_valid_k=True), FP32)}
TILE, CLUSTER = (128, 64, 64), (2, 1)

PROGRAM = """
import dataclasses
import pathlib
import torch
from cute_kernels.gemm.config import GemmSpec, gemm_arguments
from cute_kernels.gemm.config_grouped import GemmConfig, GroupedSpec, SumsConfig, grouped_arguments
from cute_kernels.gemm.kernel import gemm
from cute_kernels.gemm.kernel_grouped import grouped
from tests.gemm.test_ptx_sm100 import BF16, CASES, CLUSTER, MATRICES, RANKED, TILE

def keep(name):
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(f"{name}.text")

for number, (ragged, major, out, accumulate, tile, cluster, transposed) in enumerate(CASES.values()):
    spec = GroupedSpec(BF16, out, ragged, accumulate, "k" if ragged == "rows" else "m", major)
    config = (GemmConfig if ragged == "rows" else SumsConfig)(tile, cluster, 2, 2)
    if number in RANKED:
        config = dataclasses.replace(config, most_rows_first=True)
    grouped.obtain(*grouped_arguments("sm_100a", spec, 64, config, transposed))
    keep(number)
for name, (options, out) in MATRICES.items():
    gemm.obtain(*gemm_arguments("sm_100a", GemmSpec(BF16, out, **options), 64, GemmConfig(TILE, CLUSTER, 2, 2), False))
    keep(name)
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    compile_in(folder, PROGRAM)
    files = {name: str(number) for number, name in enumerate(CASES)} | {name: name for name in MATRICES}
    return {name: (folder / f"{file}.text").read_text() for name, file in files.items()}


@pytest.fixture(scope="module")
def kernels(texts):
    return {name: Tcgen05Kernel(text) for name, text in texts.items()}


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products_of_groups(name, sizes, clusters, kernels, generator):
    """All of the result is written, of rows beyond the groups zeros; other rows' NaN reach no sum."""
    check(name, sizes, clusters, kernels[name], generator)


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("m, n, k, valid", [(300, 200, 136, 67), (8, 72, 64, 64), (257, 8, 200, 0)])
@pytest.mark.parametrize("name", MATRICES)
def test_products(name, m, n, k, valid, clusters, kernels, generator):
    """Tiles that overhang, NaN beyond the k that count; accumulators start from what is there."""
    options, out = MATRICES[name]
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).to(BF16) for rows in (m, n))
    start = torch.full((m, n), torch.nan)
    wanted = a.float() @ b.float().T
    if options:
        start = torch.randint(-9, 10, (m, n), generator=generator).float()
        wanted = start + a[:, :valid].float() @ b[:, :valid].float().T
        a[:, valid:] = b[:, valid:] = torch.nan
        a, b = a.t().contiguous(), b.t().contiguous()
    memory = Memory()
    of_d, d = memory.array(start.numpy() if out is FP32 else as_16_bits(start.to(out)))
    of_valid, _ = memory.array(np.array([valid], np.int32))
    tiles_m, tiles_n = (-(-size // (TILE[i] * CLUSTER[i])) for i, size in enumerate((m, n)))
    first = 9 if options else 8  # of the divisors
    parameters = [defaultdict(int) for _ in range(first + 4)]
    parameters[2].update({0: m, 4: k})
    parameters[7].update({0: of_d, 8: m, 12: n, 16: n})
    parameters[8].update({0: of_valid} if options else {})
    parameters[first].update(divisor_of(2 * tiles_n))  # two rows of tiles are walked together, the last ones may be one
    parameters[first + 2].update(divisor_of((tiles_m - 1) % 2 + 1))
    rows = [TILE[2] if options else TILE[i] for i in range(2)]
    copies = {1 + 2 * i: (as_16_bits(t), rows[i] // CLUSTER[1 - i]) for i, t in enumerate((a, b))} | {5: (d, TILE[0])}
    kernels[name].run(2 * clusters, 192, parameters, memory, copies, 2)
    found = torch.from_numpy(d.copy() if out is FP32 else d.view(np.int16).copy()).view(out)
    assert torch.equal(found, wanted.to(out))


def divisor_of(number: int) -> dict[int, int]:
    """A divisor that the launch prepares: itself, a multiplier, two shifts."""
    bits = (number - 1).bit_length()
    return {0: number, 4: (2**32 * (2**bits - number) // number + 1), 8: min(bits, 1), 9: max(bits - 1, 0)}


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
        of_a, boxes = {0: rows, 4: K}, (tile[0], tile[1] if major == "k" else tile[2])
        if transposed:
            operands, shape, of_a = operands[::-1], {8: N, 12: rows, 16: N}, {0: N, 4: K, 8: len(sizes)}
            boxes = tile[0] if major == "k" else tile[2], tile[1]
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
