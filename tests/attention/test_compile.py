"""The kernels of attention compile for SM90 and SM100 without a GPU, and what came out."""

import re

import pytest

from cute_kernels.attention import prewarm
from cute_kernels.attention.config import FORWARD_CONFIGS, ForwardSpec
from tests.attention.cases import BF16, BLOCK, HEAD_SIZES
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas

JOBS = [job for arch in ("sm_90a", "sm_100a") for job in prewarm.specializations(arch)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: repr(job[1]))
def test_compiles_without_spills(job):
    builder, arguments = job
    check_record(builder.obtain(*arguments).record)


@pytest.mark.slow
@pytest.mark.parametrize("config", [(d, c) for d, found in FORWARD_CONFIGS.items() for c in found[1:]], ids=str)
def test_other_configs_compile_without_spills(config):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    check_record(forward_sm90.obtain("sm_90a", ForwardSpec(BF16, config[0], True), config[1]).record)


def test_instructions(tmp_path):
    """Every step outside of the products has a rounding of its own; P comes from registers; nothing is atomic."""
    program = """
from cute_kernels.attention import prewarm
builder, arguments = next(iter(prewarm.specializations("sm_90a")))
assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert not re.search(r"\b(add|sub|mul|fma|mad)(\.ftz)?\.f32\b", kernel) and left_to_ptxas(kernel) == []
    assert {m for m in re.findall(r"\b(?:ex2|lg2|rcp)\.[\w.]+", kernel)} == {
        "ex2.approx.ftz.f32",
        "lg2.approx.ftz.f32",
        "rcp.approx.ftz.f32",
    }
    assert len(re.findall(r"wgmma\.mma_async[\w.]+ \{[^}]*\}, \{[^}]*\}", kernel)) == 3 * 8
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in kernel and ".local" not in kernel
    assert not re.search(r"\b(atom|red)\.", kernel)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_instructions_of_sm100(head_size, tmp_path):
    """The same on SM100; P comes from tensor memory, of which a CTA has a power of two of columns."""
    program = f"""
from cute_kernels.attention import prewarm
builder, arguments = next(j for j in prewarm.specializations("sm_100a") if j[1][1].head_size == {head_size})
assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert not re.search(r"\b(add|sub|mul|fma|mad)(\.ftz)?\.f32(x2)?\b", kernel) and left_to_ptxas(kernel) == []
    assert {m for m in re.findall(r"\b(?:ex2|lg2|rcp)\.[\w.]+", kernel)} == {
        "ex2.approx.ftz.f32",
        "lg2.approx.ftz.f32",
        "rcp.approx.ftz.f32",
    }
    products = re.findall(r"tcgen05\.mma\.cta_group::1\.kind::f16\S* \[%r\d+\], (\[?)", kernel)
    of_scores, of_values = products.count(""), products.count("[")
    assert of_scores == 2 * (head_size // 16)  # of a CTA's first blocks, and of all others
    assert of_values == 1 + BLOCK // 16  # the first one from zero or onto O
    (columns,) = re.findall(r"tcgen05\.alloc\S*\s+\[%r\d+\], (%r\d+)", kernel)
    assert re.search(rf"mov\.b32\s+{columns}, 512;", kernel)
    assert len(re.findall(r"tcgen05\.(?:dealloc|relinquish)", kernel)) == 2
    assert "cp.async.bulk.tensor.4d.shared::cta.global" in kernel
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in kernel
    assert sorted(map(int, re.findall(r"setmaxnreg\.\S+\s+(\d+)", kernel))) == [48, 80, 192]  # and 192 once more: 512
    assert ".local" not in kernel and not re.search(r"\b(atom|red)\.", kernel)
