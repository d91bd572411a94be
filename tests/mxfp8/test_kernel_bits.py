"""Byte by byte the reference's results, in outputs that held something else before. Also run over fakes on the CPU."""

import pytest
import torch

import cute_kernels
from cute_kernels.mxfp8 import reference
from tests.mxfp8.cases import (
    BF16,
    DTYPES,
    E4M3,
    E5M2,
    FP16,
    FP32,
    LAYOUTS,
    MODES,
    NAMES,
    SPECIAL_FP32,
    VARIANTS,
    Case,
    amax_inputs,
    assert_same,
    call,
    every_variant,
    laid_out,
    make_input,
    poisoned,
)


def check(case: Case, x: torch.Tensor) -> list[torch.Tensor]:
    """Bytes, shapes and strides as the reference's; the input is left alone. Returns what was found."""
    before = x.detach().clone()
    with poisoned():
        found = call(case, x)
    assert_same(found, call(case, before, reference))
    assert torch.equal(x.detach().nan_to_num(7.0), before.nan_to_num(7.0))
    return found


def check_the_way_back(found: list[torch.Tensor], dtype: torch.dtype) -> None:
    for i in range(0, len(found), 2):
        with poisoned():
            y = cute_kernels.dequantize(found[i], found[i + 1], dtype=dtype)
        wanted = reference.dequantize(found[i], found[i + 1], dtype=dtype)
        assert y.dtype is dtype and y.shape == wanted.shape
        assert y.numel() == 0 or y.stride() == wanted.stride()
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.nan_to_num(0.0, torch.inf, -torch.inf), wanted.nan_to_num(0.0, torch.inf, -torch.inf))


# Edges in both directions, fewer blocks than an atom of scales has, blocks that do not fill words
SHAPE = (2, 160, 416)
ALL = [
    case
    for dtype in DTYPES
    for mode in MODES
    for transposed in ((False, True) if mode == "rceil" else (False,))
    for case in every_variant(SHAPE, dtype=dtype, mode=mode, transposed=transposed)
]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_dtype_mode_variant_and_layout(case, generator):
    check(case, make_input(case, generator))


@pytest.mark.parametrize("case", [c for m in MODES for c in every_variant(SHAPE, mode=m, out=E5M2)], ids=str)
def test_e5m2(case, generator):
    found = check(case, make_input(case, generator))
    check_the_way_back(found, BF16)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("case", every_variant(SHAPE) + every_variant(SHAPE, transposed=True), ids=str)
def test_dequantize(case, dtype, generator):
    check_the_way_back(call(case, make_input(case, generator)), dtype)


SHAPES = [
    (1, 32, 32),
    (3, 32, 128),
    (1, 128, 32),
    (2, 96, 96),
    (1, 416, 160),
    (2, 128, 128),
    (3, 384, 1152),
    (5, 160, 1408),
    (1, 2880, 288),
    (200, 32, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes(shape, layout, generator):
    for case in every_variant(shape):
        if case.scale_layout == layout:
            check(case, make_input(case, generator))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gaps(variant, transposed, generator):
    """Rows and experts that are farther apart than they are long."""
    shape = (2, 96, 160) if variant.startswith("3d") else (96, 160)
    for dtype, gap in ((BF16, 8), (FP32, 4), (FP16, 64)):
        case = Case(variant, shape, dtype, transposed=transposed, gap=gap)
        check(case, make_input(case, generator))


def test_one_expert_of_any_stride(generator, device):
    """The stride of a dimension of one element means nothing."""
    case = Case("3d_dual", (1, 96, 160))
    x = make_input(case, generator)
    for stride in (1, 3, 8, 10**9):
        check(case, x.as_strided(x.shape, (stride, 160, 1)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", [E4M3, E5M2], ids=NAMES.get)
def test_every_16_bit_magnitude(mode, out, generator, device):
    """All bf16 and fp16 values as the largest of a block, in either orientation."""
    for dtype in (BF16, FP16):
        every = torch.arange(2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
        x = amax_inputs(dtype, every, generator)
        check(Case("dual", tuple(x.shape), dtype, mode, out=out), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", [E4M3, E5M2], ids=NAMES.get)
def test_chosen_fp32_magnitudes(mode, out, generator, device):
    largest = torch.tensor(SPECIAL_FP32, dtype=torch.int32, device=device)
    # And what lies around the steps of each mode, at every exponent
    exponents = torch.arange(255, dtype=torch.int32, device=device) << 23
    steps = [0, 1, 0x600000, 0x600001, 0x5FFFFF, 0x77FFFF, 0x780000, 0x6FFFFF, 0x700000, 0x7FFFFF]
    largest = torch.cat([largest, *(exponents + step for step in steps)])
    largest = torch.cat([largest, largest.new_zeros(-len(largest) % 1024)]).view(FP32)
    x = amax_inputs(FP32, largest, generator)
    check(Case("dual", tuple(x.shape), FP32, mode, out=out), x)


SPECIALS = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, 464.0, 480.0, 1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_special_values_in_every_position(dtype, transposed, mode, generator, device):
    """A block for each special value and place: alone in a square of 32 x 32, on its diagonal or off it."""
    ordinary = torch.randn(len(SPECIALS) * 32, 32 * 32, generator=generator, device=device)
    x = ordinary.to(dtype).view(len(SPECIALS), 32, 32, 32)
    place = torch.arange(32, device=device)
    for i, value in enumerate(SPECIALS):
        x[i, (place * 7 + i) % 32, place, place] = torch.tensor(value, dtype=dtype, device=device)
    case = Case("dual", (len(SPECIALS) * 32, 1024), dtype, mode, transposed=transposed)
    check(case, laid_out(case, x.view(case.shape)))
    square = Case("3d_dual_square", (1, *case.shape), dtype, mode, transposed=transposed)
    check(square, laid_out(square, x.view(square.shape)))


@pytest.mark.parametrize("shape", [(0, 64, 96), (2, 0, 96), (2, 64, 0)], ids=str)
def test_empty(shape, device):
    for case in every_variant(shape):
        found = check(case, torch.empty(case.shape, dtype=BF16, device=device))
        check_the_way_back(found, BF16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_that_require_grad(variant, generator):
    case = Case(variant, (1, 96, 160) if variant.startswith("3d") else (96, 160))
    x = make_input(case, generator).requires_grad_()
    found = check(case, x)
    assert not any(t.requires_grad for t in found)
