"""The kernels of attention compile for SM90 and SM100 without a GPU, and what came out."""

import re

import pytest

from cute_kernels.attention import prewarm
from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    FORWARD_CONFIGS,
    FORWARD_SM100_CONFIGS,
    HEAD_SIZES,
    BackwardSpec,
    DecodeSpec,
    ForwardSpec,
    configs_for,
    forward_config,
    grid_for,
    prefill_spec,
)
from cute_kernels.attention.kernel_forward_sm100 import REGISTERS
from tests.attention.cases import BF16, FP16
from tests.attention.test_products import BACKWARD
from tests.marks import first_of, half_of, sample_for
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas
from tests.sass import is_serialized


def backward_spec(sizes: tuple[int, int], *options, **more) -> BackwardSpec:
    d, dv = sizes
    return BackwardSpec(BF16, d, *options, **more, head_size_v=0 if d == dv else dv)


# Those of most options; test_classes.py compiles each class
QUICK = [
    ForwardSpec(BF16, 64, False, 64, window=True, sinks=True, packed_q=True, packed_k=True),
    BackwardSpec(BF16, 128, True, True),
    BackwardSpec(BF16, 256, True, True),
]


def sampled(arch: str) -> list:
    """Shipped kernels of bf16: of SM90 half of the forward's, and of the backward's those of test_products.py."""
    jobs = [job for job in prewarm.specializations(arch) if job[1][1].dtype is BF16]
    if arch == "sm_100a":
        return sample_for(arch, jobs)
    forward = half_of([job for job in jobs if job[0].__name__ == "forward_sm90"])  # one config of each spec
    return [
        job
        for job in jobs
        if job in forward
        or job[0].__name__ not in ("forward_sm90", "backward_sm90")
        or job[1][1] in (*QUICK, *BACKWARD)
        or getattr(job[1][1], "steps_of_80", False)
    ]


# fp16 takes nearly the same code: four of its kernels stand for it, two with softcap, which q in registers would spill
JOBS = [job for arch in ("sm_90a", "sm_100a") for job in sampled(arch)]
JOBS += [
    job
    for arch in ("sm_90a", "sm_100a")
    for job in prewarm.specializations(arch)
    if job[1][1] in [ForwardSpec(FP16, 128, True, 128, softcap=softcap) for softcap in (False, True)]
]
EVERY = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=() if job[1][1] in QUICK else EVERY) for job in JOBS],
    ids=lambda job: repr(job[1]),
)
def test_compiles_without_spills(job):
    builder, (arch, spec, *config) = job
    check_record(builder.obtain(arch, spec, *config).record)


def test_quick_ones_are_prewarmed():
    assert set(QUICK) <= {arguments[1] for _, arguments in JOBS}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config",
    [
        ((d, dv), config)
        for (d, dv), configs in FORWARD_CONFIGS.items()
        for config in (configs[1:] if (d, dv) in HEAD_SIZES else configs)
        if dv in (64, 128) or not config.scores_ahead
    ],
    ids=str,
)
def test_other_configs_compile_without_spills(config):
    """Those of the sizes that models have, and candidates."""
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    (d, dv), config = config
    windows = config.masks_by_side
    kernel = forward_sm90.obtain("sm_90a", ForwardSpec(BF16, d, not windows, dv, window=windows), config)
    check_record(kernel.record)
    assert not is_serialized(kernel)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, {"softcap": True}, {"sinks": True}, {"used_k": True}, {"padded": True}], ids=str
)
@pytest.mark.parametrize("mask", [{"causal": True}, {}, {"window": True}], ids=str)
def test_queries_in_registers_with_other_options(mask, options):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    spec = ForwardSpec(BF16, 128, **{"causal": False, **mask}, head_size_v=128, **options)
    config = forward_config(spec)
    kernel = forward_sm90.obtain("sm_90a", spec, config)
    check_record(kernel.record)
    assert config.q_steps and not is_serialized(kernel)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("options", [{"used_k": True}, {"packed_q": True, "used_k": True}, {"padded": True}], ids=str)
def test_what_is_not_prewarmed_compiles_without_spills(options, arch):
    builder, spec = next(prewarm.specializations(arch))[0], ForwardSpec(BF16, 128, True, 128, **options)
    check_record(builder.obtain(arch, spec, configs_for(arch, spec)[0]).record)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "packed", "rows"),
    [(sizes, packed, 16) for sizes in HEAD_SIZES if sizes[1] <= 192 for packed in (True, False)]
    + [((128, 128), True, rows) for rows in (32, 64, 128)],
    ids=str,
)
def test_chunks_of_a_prompt_compile_without_spills(sizes, packed, rows):
    """Pages of 16 have the most boxes a block, and so the most addresses."""
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    spec = prefill_spec(DecodeSpec(BF16, *sizes, packed, min(rows, grid_for(*sizes).block)))
    check_record(forward_sm90.obtain("sm_90a", spec, forward_config(spec)).record)


@pytest.mark.exhaustive
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
    assert len(re.findall(r"wgmma\.mma_async[\w.]+ \{[^}]*\}, \{[^}]*\}", kernel)) == 4 * 8
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in kernel and ".local" not in kernel
    assert not re.search(r"\b(atom|red)\.", kernel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", first_of([((128, 128),), ((64, 64),), ((256, 256),)]), ids=str)
def test_instructions_of_sm100(sizes, tmp_path):
    """The same on SM100; P comes from tensor memory, of which a CTA has a power of two of columns."""
    program = f"""
from cute_kernels.attention import prewarm
builder, arguments = next(j for j in prewarm.specializations("sm_100a") if j[1][1].sizes == {sizes})
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
    assert products.count("") == sizes[0] // 16  # q k^T
    assert products.count("[") == 2 * (1 + grid_for(*sizes).block // 16)  # p v; its first step onto O or from zero
    (columns,) = re.findall(r"tcgen05\.alloc\S*\s+\[%r\d+\], (%r\d+)", kernel)
    assert re.search(rf"mov\.b32\s+{columns}, 512;", kernel)
    assert len(re.findall(r"tcgen05\.(?:dealloc|relinquish)", kernel)) == 2
    assert "cp.async.bulk.tensor.4d.shared::cta.global" in kernel
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in kernel
    assert ".local" not in kernel and not re.search(r"\b(atom|red)\.", kernel)
    assert used_too_early(kernel) == []


def used_too_early(kernel: str) -> list[str]:
    """Instructions with a register that tcgen05.ld has still to write: before a tcgen05.wait::ld. A mov has no date."""
    pending, found = set(), []
    for line in kernel.splitlines():
        registers = re.findall(r"%rd?\d+", line)
        if match := re.search(r"tcgen05\.ld\.\S+\s+\{(.*)\}", line):
            pending |= set(re.findall(r"%r\d+", match[1]))
        elif "tcgen05.wait::ld" in line:
            pending.clear()
        elif pending & set(registers):
            if match := re.match(r"\s*mov\.b64\s+(%rd\d+), \{", line):
                pending.add(match[1])
            else:
                found.append(line.strip())
    return found


def test_a_use_before_its_wait_is_found():
    load, wait = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];", "tcgen05.wait::ld.sync.aligned;"
    move, use = "mov.b64 %rd1, {%r1, %r2};", "mul.rn.f32x2 %rd2, %rd1, %rd1;"
    assert used_too_early("\n".join([load, move, wait, use])) == []
    assert used_too_early("\n".join([load, move, use, wait])) == [use]


def test_registers_and_columns_of_sm100():
    """A CTA has the registers that its warps get from setmaxnreg, and tensor memory the columns of S and O."""
    for sizes, config in FORWARD_SM100_CONFIGS.items():
        threads = 128 * (config.tiles + 2)
        of_softmax, *others = REGISTERS[config.tiles]
        launched = 64 * 1024 // threads // 8 * 8
        assert 128 * (config.tiles * of_softmax + sum(others)) <= launched * threads
        assert all(number % 8 == 0 and 24 <= number <= launched for number in others) and launched <= of_softmax <= 256
        assert config.tiles * (grid_for(*sizes).block + sizes[1]) <= 512


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [(d, c) for d, found in BACKWARD_CONFIGS.items() for c in found[1:]], ids=str)
def test_other_configs_of_the_backward_compile_without_spills(config):
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90

    sizes, config = config
    check_record(backward_sm90.obtain("sm_90a", backward_spec(sizes, True, False), config).record)


@pytest.mark.exhaustive
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
    # dk and dv take p and ds from registers; scores, dp and dq are there once: nothing is ahead
    assert len(re.findall(r"wgmma\.mma_async[\w.]+ \{[^}]*\}, \{[^}]*\}", kernel)) == 2 * 4
    assert len(re.findall(r"wgmma\.mma_async", kernel)) == 2 * 4 + 3 * 8
    found = set(re.findall(r"\b(?:atom|red|cp\.reduce)\.[\w.:]+", kernel))
    assert found == {
        "atom.global.add.u32",
        "red.release.gpu.global.add.s32",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    }
    assert ".local" not in kernel
