"""The kernels of sampling compile for both architectures without a GPU, and what came out."""

import re

import pytest

from cute_kernels.sampling import prewarm
from cute_kernels.sampling.config import SampleSpec
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas
from tests.sampling.cases import FP16, FP32

SM100 = pytest.param("sm_100a", marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", SM100])
def test_shipped_kernels_compile(arch):
    for builder, arguments in prewarm.specializations(arch):
        check_record(builder.obtain(*arguments).record)


@pytest.mark.parametrize("spec", [SampleSpec(FP16, 1, 8, True), SampleSpec(FP32, 2, 1, True)], ids=str)
def test_rows_off_16_bytes_compile(spec):
    from cute_kernels.sampling.kernel import sample_rows

    check_record(sample_rows.obtain("sm_90a", spec).record)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", [0, 1], ids=["plain", "filtered"])
def test_instructions(kernel, tmp_path):
    """Each product and sum has a rounding of its own; no function of the hardware's; atomics are of integers."""
    program = f"""
from cute_kernels.sampling import prewarm
builder, arguments = list(prewarm.specializations("sm_90a"))[{kernel}]
assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (found,) = kernels_in(tmp_path)
    assert not re.search(r"\b(add|sub|mul|fma|mad)(\.ftz)?\.f32\b", found) and left_to_ptxas(found) == []
    assert not re.search(r"\b(fma|ex2|lg2|rcp|sqrt|div)[\w.]*f32", found) and ".local" not in found
    atomics = {m for m in re.findall(r"\b(?:atom|red)\.[\w.:]+", found)}
    assert atomics == ({"red.relaxed.cta.shared::cta.add.u32", "atom.shared.cta.add.u32"} if kernel else set())
