"""The kernels of sums by an index compile for both architectures without a GPU, and what came out."""

import re

import pytest

from cute_kernels.scatter import prewarm
from cute_kernels.scatter.config import RowsSpec
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas
from tests.scatter.cases import BF16, FP32

SM100 = pytest.param("sm_100a", marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", SM100])
def test_shipped_kernels_compile(arch):
    jobs = list(prewarm.specializations(arch))
    assert len(jobs) == len({repr(job) for job in jobs})
    for builder, arguments in jobs:
        check_record(builder.obtain(*arguments).record)


@pytest.mark.parametrize(
    "spec", [RowsSpec(BF16, FP32, "keys", 1, 1, "onto"), RowsSpec(FP32, BF16, "keys", 2, 16, "write")], ids=str
)
def test_narrow_rows_compile(spec):
    import torch

    from cute_kernels.scatter.kernel import grouped_sums, segment_sums

    for builder in (segment_sums, grouped_sums):
        check_record(builder.obtain("sm_90a", spec._replace(keys=torch.int64)).record)


def test_instructions(tmp_path):
    """A batch's loads are issued together; nothing is atomic; no product hides in a sum."""
    program = """
from cute_kernels.scatter import prewarm
for builder, arguments in list(prewarm.specializations("sm_90a"))[:2]:
    assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    kernels = kernels_in(tmp_path)
    assert len(kernels) == 2
    for kernel in kernels:
        assert not re.search(r"\b(atom|red)\.", kernel) and left_to_ptxas(kernel) == []
        assert not re.search(r"\b(mul|fma|mad)[\w.]*f32", kernel) and ".local" not in kernel
