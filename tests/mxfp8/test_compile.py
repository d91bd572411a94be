"""The quantizers compile for both architectures without a GPU, and what came out: no spills, the instructions meant."""

import dataclasses
import re
from pathlib import Path

import pytest

from cute_kernels.mxfp8 import prewarm
from cute_kernels.mxfp8.config import GRIDS, DualConfig, quantize_config, tiles_of
from tests.marks import first_of, sample_for, sample_of_table
from tests.mxfp8.cases import BF16, DTYPES, E5M2, NAMES, Case, every_variant, kernels_of
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in

ARCHS = ["sm_90a", "sm_100a"]
SM_SHARED_MEMORY = 228 * 1024
SIGNED_BYTE = re.compile(r"\.s8\b|\bbfe\.s|\bszext\b")


def check(builder, arguments) -> None:
    record = builder.obtain(*arguments).record
    is_ring = builder.__name__ == "mxfp8_quantize" and isinstance(arguments[-1], DualConfig)
    assert record["key"]["arch"] == arguments[0] and len(record["kernels"]) == 1 + is_ring
    check_record(record)
    if builder.__name__ == "mxfp8_quantize":
        # As many CTAs fit an SM as the configuration counts on (each reserves 1 KB)
        kernel = max(record["kernels"], key=lambda kernel: kernel["threads"])  # before a ring's, one sets its counter
        ctas = 1 if is_ring else arguments[-1].ctas_per_sm
        shared = kernel["static_smem_bytes"] + kernel["dynamic_smem_bytes"]
        assert ctas * (shared + 1024) <= SM_SHARED_MEMORY, kernel
        assert ctas * kernel["threads"] * kernel["registers"] <= 64 * 1024, kernel


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_compiles(dtype, arch):
    """Each variant and layout, of bf16 in either memory order; squares and both orientations of the other dtypes."""
    cases = every_variant((2, 96, 160), dtype=dtype)
    if dtype is BF16:
        cases += every_variant((2, 96, 160), transposed=True)
    else:
        cases = [case for case in cases if "3d" in case.variant and case.scale_layout == "plain"]
    for builder, arguments in sample_for(arch, kernels_of(cases, arch)):
        check(builder, arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_e5m2_compiles(arch):
    cases = [Case("3d_dual", (2, 96, 160), mode="even", out=E5M2), Case("rowwise", (96, 160), mode="floor", out=E5M2)]
    for builder, arguments in kernels_of(cases, arch):
        check(builder, arguments)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_shipped_table(arch):
    """It is what every function on bf16 asks for, there and back."""
    assert set(prewarm.specializations(arch)) == set(kernels_of(every_variant((2, 96, 160)), arch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_the_shipped_table_compiles(arch):
    for builder, arguments in sample_of_table(arch, prewarm.specializations(arch)):
        check(builder, arguments)


def test_configs():
    """Few tiles are walked over, narrow ones where they are fewest; clusters for scales in columns; with two outputs,
    on SM90, one takes the place of x, or both, in a ring.
    """
    fewest, few, more, ring, thin = GRIDS
    for arch in ARCHS:
        assert quantize_config(arch, 4, "rows", None, few).ctas_per_sm == 2
        assert quantize_config(arch, 2, "columns", None, few).persistent
        for kind in ("columns", "rows", "blocked"):
            assert [quantize_config(arch, 2, None, kind, tiles).width for tiles in (fewest, few)] == [64, 128]
        assert quantize_config(arch, 2, None, "square", fewest).width == 128
        for kinds in (("columns", None), ("blocked", None), ("columns", "columns")):
            assert quantize_config(arch, 2, *kinds, fewest) == quantize_config(arch, 2, *kinds, few)
        for kinds, cluster in ((("columns", None), (1, 8)), ((None, "columns"), (8, 1))):
            config = quantize_config(arch, 2, *kinds, ring)
            assert config.cluster == cluster and not config.persistent and config.down == (kinds[0] is None)
            assert quantize_config(arch, 2, *kinds, thin).cluster == (1, 1)
        for kinds in (("blocked", "blocked"), ("square", "square"), ("rows", "columns")):
            assert quantize_config(arch, 2, *kinds, more).cluster == (1, 1)
    for kinds in (("columns", "rows"), ("columns", "columns"), ("blocked", "blocked"), ("square", "square")):
        assert quantize_config("sm_90a", 2, *kinds, ring) == DualConfig(8)
    for kind in ("rows", "columns"):
        others = [quantize_config("sm_90a", 2, "columns", kind, tiles) for tiles in (fewest, few, more, thin)]
        assert [config.cluster for config in others] == [(1, 1), (1, 1), (2, 2), (1, 1)]
        assert [config.in_place for config in others] == [False, False, True, True]
    assert quantize_config("sm_90a", 2, "blocked", "blocked", few).in_place
    assert not any(quantize_config("sm_100a", 2, "blocked", "blocked", tiles).in_place for tiles in GRIDS)


def test_ctas():
    """One for each tile of whole clusters, of at most an eighth more tiles than there are; else as many as are held.

    Narrow tiles are twice as many. A ring's CTAs have two tiles along A, its clusters may have 1.4 times the tiles;
    one cluster there is on any GPU.
    """
    config = quantize_config("sm_90a", 2, "columns", "columns", (23, 23, 4))
    assert config.cluster == (2, 2) and config.num_ctas((23, 23, 4), 132) == 24 * 24 * 4
    for grids, is_ring in (
        (((14, 64, 9), (15, 57, 9), (14, 18, 20), (7, 12, 90)), True),
        (((14, 19, 7), (14, 17, 20), (1, 64, 90)), False),
    ):
        configs = [quantize_config("sm_90a", 2, "columns", "rows", tiles) for tiles in grids]
        assert {isinstance(config, DualConfig) for config in configs} == {is_ring}
    assert [DualConfig(8).num_ctas((14, 9, 1), sms) for sms in (2, 8, 132)] == [8, 8, 112]
    few = quantize_config("sm_90a", 2, "columns", "columns", (16, 16, 1))
    assert few.num_ctas((16, 16, 1), 132) == 256 and few.num_ctas((16, 32, 1), 132) == 264
    narrow = quantize_config("sm_90a", 2, None, "rows", (9, 9, 1))
    assert narrow.num_ctas((9, 9, 1), 132) == 162 and narrow.num_ctas((56, 16, 1), 132) == 264
    # The contiguous dimension's tiles come second
    assert tiles_of((3, 416, 96), False) == tiles_of((3, 96, 416), True) == (4, 1, 3)
    assert tiles_of((96, 416), False) == (1, 4, 1)


def test_in_place_of_what_is_still_needed():
    from cute_kernels.mxfp8.kernel import Quantize

    config = quantize_config("sm_90a", 2, "columns", "columns", GRIDS[2])
    for change in ({"stages": 2}, {"persistent": True}):
        with pytest.raises(ValueError, match="^config.in_place wants one stage and a CTA a tile"):
            Quantize(False, False, None, ("columns", "columns"), dataclasses.replace(config, **change))


def instructions(cases: str, arch: str, folder: Path) -> list[str]:
    """The PTX of the cases' kernels for many tiles (those for few have their names and come first), in a process."""
    program = f"""
from tests.mxfp8.cases import *
for builder, arguments in kernels_of({cases}, {arch!r}):
    assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(folder, program)
    return kernels_in(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", first_of(ARCHS))
def test_instructions(arch, tmp_path):
    """Tiles come and go by TMA, 32-bit and wider accesses between; subnormal numbers are kept; no atomics but the
    integer by which a ring's clusters draw their tiles.
    """
    cases = '[Case("3d_dual", (2, 96, 160)), Case("3d_dual", (2, 96, 160), FP32), Case("colwise", (96, 160), FP16)]'
    kernels = instructions(cases, arch, tmp_path)
    quantizers = [kernel for kernel in kernels if "mbarrier" in kernel]
    rings = [kernel for kernel in quantizers if "atom." in kernel]
    assert len(rings) == (arch == "sm_90a") and len(quantizers) == 3 + len(rings) and len(kernels) > 3
    for kernel in kernels:
        atomics = set(re.findall(r"\b(?:atom|red)\.[\w.]+", kernel))
        assert atomics == ({"atom.global.add.u32"} if kernel in rings else set())
        assert ".local" not in kernel and ".ftz" not in kernel
        assert ("mbarrier.arrive.relaxed.cluster.shared::cluster" in kernel) == (kernel in rings)
        assert "mbarrier.arrive.shared::cluster" not in kernel  # of the CTA's scope
        assert not SIGNED_BYTE.search(kernel)
    for kernel in rings:
        # Two barriers for the arrivals of two warps of each of eight CTAs, in turns
        constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", kernel))
        counts = re.findall(r"mbarrier\.init\S*\s+\[\S+\], (\S+);", kernel)
        assert [constants.get(count, count) for count in counts].count("16") == 2
    for kernel in quantizers:
        assert re.search(r"cp\.async\.bulk\.tensor\.[23]d\.shared", kernel)
        assert re.search(r"cp\.async\.bulk\.tensor\.[23]d\.global", kernel)
        assert "cp.async.bulk.wait_group.read" in kernel and "fence.proxy.async" in kernel
        assert ("fma.rn.bf16x2" in kernel) == ("max.NaN.xorsign.abs.bf16x2" in kernel)
        assert "max.NaN.xorsign.abs" in kernel and "cvt.rn.satfinite.e4m3x2.f32" in kernel
        assert "ld.shared.v4" in kernel or "ld.shared.b32" in kernel or "ld.shared.v2" in kernel
        assert "ue8m0" not in kernel  # the scale is integer arithmetic on every GPU


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", first_of(ARCHS))
def test_scales_of_squares_are_not_signed(arch, tmp_path):
    """They go through shared memory: a byte read back as signed would be wrong from 128 on."""
    kernels = instructions('[Case("3d_dual_square", (2, 96, 160))]', arch, tmp_path)
    assert not any(SIGNED_BYTE.search(kernel) for kernel in kernels)
    (kernel,) = [kernel for kernel in kernels if "mbarrier" in kernel and "atom." not in kernel]  # no ring
    # Inputs, squares, outputs written; where one takes the place of x, all have read it
    assert kernel.count("bar.sync") == 3 + (arch == "sm_90a")


def test_a_call_names_its_dtypes():
    jobs = kernels_of([Case("rowwise", (32, 32), BF16)], "sm_90a")
    # For few tiles, for many, in clusters or too thin for them, and the way back
    wanted = ["mxfp8_quantize"] * 3 + ["mxfp8_dequantize"]
    assert [builder.__name__ for builder, _ in jobs] == wanted
