"""Each geometry on small matrices: narrow tiles, clusters that put scales together, a CTA a tile, down, in place, a
ring.
"""

import pytest
import torch

from cute_kernels.mxfp8 import launch
from cute_kernels.mxfp8.config import GRIDS, QuantizeSpec
from tests.mxfp8.cases import (
    BF16,
    E4M3,
    FP32,
    Case,
    as_many_tiles,
    assert_same,
    call,
    every_variant,
    few_sms,
    make_input,
    poisoned,
    reference,
)

# Rows of scales are whole sectors along both dimensions, along either, along none; edges; 90 scales a row
SHAPES = ((3, 1024, 1024), (1, 1056, 2048), (2, 1024, 1056), (2, 416, 672), (1, 96, 2880))
CASES = [
    *(case for shape in SHAPES for swapped in (False, True) for case in every_variant(shape, transposed=swapped)),
    Case("3d_dual", (2, 1056, 1024), FP32),
    Case("rowwise", (1056, 1024), FP32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_tiles(case, generator):
    """The reference's bytes, whichever kernel computes them."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    for tiles in GRIDS:
        with as_many_tiles(tiles), poisoned():
            assert_same(call(case, x), wanted)
            with few_sms():
                assert_same(call(case, x), wanted)


@pytest.mark.parametrize(
    "case", [Case("rowwise", (8192, 2048)), Case("colwise", (2048, 8192)), Case("dual", (8192, 2048))], ids=str
)
def test_repeats_in_clusters(case, generator):
    """A CTA that leaves before its cluster's scales have come, or reads them before, shows seldom."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for tiles in GRIDS[2:4]:
        with as_many_tiles(tiles):
            for _ in range(300):
                found = call(case, x)
                for t, expected in zip(found, wanted, strict=True):
                    wrong += (t.view(torch.uint8) != expected.view(torch.uint8)).any()
    assert int(wrong) == 0


def test_sizes_choose():
    """A matrix of few tiles and one of many take different kernels."""
    few, many = (torch.zeros(rows, 2048, dtype=torch.bfloat16, device="cuda") for rows in (1024, 32768))
    spec = QuantizeSpec(BF16, E4M3, 2, False, True, False, False, "rceil", "plain")
    one, two = (launch._quantizers.get(x.get_device(), spec)[x.shape] for x in (few, many))
    assert one.function is not two.function
    assert two.num_ctas == 32768 // 128 * 2048 // 128
