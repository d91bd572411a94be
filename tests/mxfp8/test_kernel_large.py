"""More than 2^31 elements: offsets need 64 bits. Very many experts. Up to 30 GB of memory and a few seconds a case."""

import pytest
import torch

import cute_kernels
from cute_kernels.mxfp8 import reference
from tests.mxfp8.cases import BF16, Case, assert_same, call, make_input

N, K = 4096, 4096 + 32
EXPERTS = 2**31 // (N * K) + 2


def needs(gigabytes: float) -> None:
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("3d_dual", (EXPERTS, N, K)),
        Case("3d_dual", (EXPERTS, N, K), scale_layout="blocked", transposed=True),
        Case("3d_dual_square", (EXPERTS, N, K)),
        Case("3d_dual_square", (EXPERTS, N, K), scale_layout="blocked"),
        Case("3d_colwise_square", (EXPERTS, N, K)),
    ],
    ids=str,
)
def test_more_than_2_31_elements(case, generator):
    """Each expert's bytes are the reference's of it alone, and back."""
    needs(36)
    shape = (EXPERTS, K, N) if case.transposed else (EXPERTS, N, K)
    x = torch.empty(shape, dtype=BF16, device="cuda")
    for e, part in enumerate(x):
        part.normal_(generator=generator).mul_(4.0 ** (e % 16))
    x = x.mT if case.transposed else x
    assert x.numel() > 2**31
    found = call(case, x)
    for e in range(EXPERTS):
        wanted = call(case, x[e : e + 1], reference)
        assert_same([t[e : e + 1].as_strided(w.shape, w.stride()) for t, w in same_strides(found, wanted, e)], wanted)
    del x
    for q, s in zip(found[::2], found[1::2], strict=True):
        y = cute_kernels.dequantize(q, s)
        for e in (0, EXPERTS // 2, EXPERTS - 1):
            assert torch.equal(y[e], reference.dequantize(q[e : e + 1], s[e : e + 1])[0])


def same_strides(found, wanted, e):
    """Pairs; expert e of the whole has the strides that it has alone, but for the stride of one element."""
    for t, w in zip(found, wanted, strict=True):
        assert t[e].stride() == w[0].stride() and t.stride(0) == w[0].numel()
        yield t, w


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rowwise", "colwise", "dual"])
def test_a_matrix_of_more_than_2_31_elements(variant, generator):
    needs(36)
    rows, columns = 2**31 // 2048 + 96, 2048
    x = torch.empty(rows, columns, dtype=BF16, device="cuda").normal_(generator=generator)
    found = call(Case(variant, (rows, columns)), x)
    block = 2**16  # rows of blocks are independent
    for begin in (0, 2**20 - block, rows // block * block):
        part = x[begin : begin + block]
        wanted = call(Case(variant, tuple(part.shape)), part, reference)
        for i, (t, w) in enumerate(zip(found, wanted, strict=True)):
            # The blocks of these rows in the columns' scales (K, M / 32); the rows in all else
            colwise_scale = i % 2 == 1 and (variant == "colwise" or i == 3)
            size = len(part) // 32
            mine = t[:, begin // 32 : begin // 32 + size] if colwise_scale else t[begin : begin + len(part)]
            assert torch.equal(mine.view(torch.uint8) if mine.is_contiguous() else as_bytes(mine), as_bytes(w))


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("variant", ["3d_colwise", "3d_colwise_square", "3d_dual", "3d_dual_square"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_65536_experts(variant, layout, generator):
    """More than a launch's grid has rows; a tile an expert."""
    case = Case(variant, (65536, 32, 32), scale_layout=layout)
    x = make_input(case, generator)
    found = call(case, x)
    assert_same(found, call(case, x, reference))
    for q, s in zip(found[::2], found[1::2], strict=True):
        y, z = cute_kernels.dequantize(q, s), reference.dequantize(q, s)
        assert torch.equal(y.nan_to_num(7.0), z.nan_to_num(7.0))


@pytest.mark.parametrize("variant", ["3d_colwise", "3d_colwise_square", "3d_dual", "3d_dual_square"])
def test_no_experts(variant):
    """Nothing is launched."""
    for layout in ("plain", "blocked"):
        case = Case(variant, (0, 64, 96), scale_layout=layout)
        found = call(case, torch.empty(case.shape, dtype=BF16, device="cuda"))
        assert_same(found, call(case, torch.empty(case.shape, dtype=BF16, device="cuda"), reference))
        assert all(t.numel() == 0 and t.is_cuda for t in found)
        assert cute_kernels.dequantize(found[0], found[1]).shape == case.shape
