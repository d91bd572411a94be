"""The kernels of attention compile for SM90 without a GPU, and what came out."""

import re

import pytest

from cute_kernels.attention import prewarm
from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    FORWARD_CONFIGS,
    HEAD_SIZES,
    BackwardSpec,
    DeltaSpec,
    ForwardSpec,
    backward_config,
    forward_config,
)
from tests.attention.cases import BF16
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas

JOBS = list(prewarm.specializations("sm_90a"))
# One of each size and of each option; all the others take the same code
QUICK = [
    ForwardSpec(BF16, 64, False, 64, window=True, sinks=True, packed_q=True, packed_k=True),
    *(ForwardSpec(BF16, d, True, dv) for d, dv in HEAD_SIZES),
    *(BackwardSpec(BF16, d, True, grouped) for d in BACKWARD_CONFIGS for grouped in (False, True)),
    DeltaSpec(BF16, 128, False),
]


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=() if job[1][1] in QUICK else pytest.mark.slow) for job in JOBS],
    ids=lambda job: repr(job[1][1:]),
)
def test_compiles_without_spills(job):
    builder, arguments = job
    check_record(builder.obtain(*arguments).record)


def test_quick_ones_are_prewarmed():
    assert set(QUICK) <= {arguments[1] for _, arguments in JOBS}


@pytest.mark.slow
@pytest.mark.parametrize("config", [(d, c) for d, found in FORWARD_CONFIGS.items() for c in found[1:]], ids=str)
def test_other_configs_compile_without_spills(config):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    (d, dv), config = config
    check_record(forward_sm90.obtain("sm_90a", ForwardSpec(BF16, d, True, dv), config).record)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"used_k": True}, {"packed_q": True, "used_k": True}, {"padded": True}], ids=str)
def test_what_is_not_prewarmed_compiles_without_spills(options):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    spec = ForwardSpec(BF16, 128, True, 128, **options)
    check_record(forward_sm90.obtain("sm_90a", spec, forward_config(spec)).record)


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


@pytest.mark.slow
@pytest.mark.parametrize("config", [(d, c) for d, found in BACKWARD_CONFIGS.items() for c in found[1:]], ids=str)
def test_other_configs_of_the_backward_compile_without_spills(config):
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90

    d, config = config
    check_record(backward_sm90.obtain("sm_90a", BackwardSpec(BF16, d, True, False), config).record)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"used_k": True}, {"softcap": True}, {"padded": True}], ids=str)
@pytest.mark.parametrize("d", BACKWARD_CONFIGS)
def test_what_is_not_prewarmed_of_the_backward_compiles_without_spills(d, options):
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90

    spec = BackwardSpec(BF16, d, True, True, **options)
    check_record(backward_sm90.obtain("sm_90a", spec, backward_config(spec)).record)


def test_instructions_of_the_backward(tmp_path):
    """Every step outside of the products has a rounding of its own; the bulk engine adds, atomics are of integers."""
    program = """
import torch
from cute_kernels.attention.config import BackwardSpec, backward_config
from cute_kernels.attention.kernel_backward_sm90 import backward_sm90
spec = BackwardSpec(torch.bfloat16, 128, True, False)
assert backward_sm90.obtain("sm_90a", spec, backward_config(spec)).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert not re.search(r"\s(add|sub|mul|fma|mad)(\.ftz)?\.f32\b", kernel) and left_to_ptxas(kernel) == []
    assert set(re.findall(r"\b(?:ex2|lg2|rcp)\.[\w.]+", kernel)) == {"ex2.approx.ftz.f32"}
    # dk and dv take p and ds from registers; scores are there twice, of a block's first tile and of the next one
    assert len(re.findall(r"wgmma\.mma_async[\w.]+ \{[^}]*\}, \{[^}]*\}", kernel)) == 2 * 4
    assert len(re.findall(r"wgmma\.mma_async", kernel)) == 2 * 4 + 3 * 8 + 8
    found = set(re.findall(r"\b(?:atom|red|cp\.reduce)\.[\w.:]+", kernel))
    assert found == {
        "atom.global.add.u32",
        "red.release.gpu.global.add.s32",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    }
    assert ".local" not in kernel
