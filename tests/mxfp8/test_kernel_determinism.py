"""A thousand calls, the same bytes each time: a buffer overwritten before its bulk store has read it shows seldom."""

import pytest
import torch

import cute_kernels
from cute_kernels.mxfp8.config import GRIDS
from tests.mxfp8.cases import (
    FP32,
    Case,
    as_many_tiles,
    assert_same,
    call,
    every_variant,
    few_sms,
    make_input,
    reference,
)

REPEATS = 1000
CASES = [
    *every_variant((2, 416, 672)),
    Case("3d_dual", (8, 1408, 2048), scale_layout="blocked"),
    Case("3d_dual_square", (8, 1408, 2048), scale_layout="blocked"),
    Case("3d_dual_square", (2, 416, 672), FP32, transposed=True),
    Case("3d_colwise_square", (2, 416, 672), transposed=True),
]


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def assert_repeats(case, generator):
    x = make_input(case, generator)
    first = call(case, x)
    assert_same(first, call(case, x, reference))
    memory = [as_bytes(t) for t in first]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        for t, expected in zip(call(case, x), memory, strict=True):
            wrong += (as_bytes(t) != expected).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeats(case, generator):
    assert_repeats(case, generator)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tiles", [*GRIDS[:2], GRIDS[3]], ids=["fewest", "few", "ring"])
def test_repeats_of_ctas_with_many_tiles(tiles, case, generator):
    """Where CTAs walk over tiles, each slot and each buffer is used again."""
    with as_many_tiles(tiles), few_sms():
        assert_repeats(case, generator)


@pytest.mark.parametrize("tiles", [GRIDS[2], GRIDS[3]], ids=["more", "ring"])
def test_repeats_beside_other_work(tiles, generator):
    """Two streams at once: CTAs of both share the SMs, and each ring draws its own tiles."""
    cases = [Case("3d_dual", (4, 1408, 1024), scale_layout="blocked"), Case("3d_dual_square", (4, 1408, 1024))]
    inputs = [make_input(case, generator) for case in cases]
    first = [call(case, x, reference) for case, x in zip(cases, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in cases]
    torch.cuda.synchronize()
    with as_many_tiles(tiles):
        for _ in range(REPEATS // 4):
            for case, x, wanted, stream, count in zip(cases, inputs, first, streams, wrong, strict=True):
                with torch.cuda.stream(stream):
                    for t, expected in zip(call(case, x), wanted, strict=True):
                        count += (as_bytes(t) != as_bytes(expected)).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


def test_dequantize_repeats(generator):
    case = Case("3d_dual", (8, 1408, 2048), scale_layout="blocked")
    q_k, s_k, q_n, s_n = call(case, make_input(case, generator))
    for q, s in ((q_k, s_k), (q_n, s_n)):
        first = cute_kernels.dequantize(q, s).view(torch.int16)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPEATS // 4):
            wrong += (cute_kernels.dequantize(q, s).view(torch.int16) != first).any()
        assert int(wrong) == 0
