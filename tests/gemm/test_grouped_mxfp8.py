"""grouped_mm of mxfp8 matrices without a GPU: bad arguments, the kernels as they compile, their path over fakes."""

import re

import pytest
import torch

from cute_kernels import dequantize, grouped_mm
from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.gemm import prewarm
from cute_kernels.gemm.config_mxfp8 import DECODE, GroupedMxfp8Spec, choose, scale_vec
from cute_kernels.runtime.checks import MAX_SIZE
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_kernels
from tests.gemm.cases import assert_same_bits, kernel_name
from tests.gemm.grouped_cases import BF16, offs_of
from tests.gemm.test_kernel_grouped_mxfp8 import (  # noqa: F401
    OUTS,
    make,
    test_a_group_does_not_see_its_neighbours,
    test_a_row_alone,
    test_all_elements_with_all_scales,
    test_compile,
    test_empty,
    test_ends_that_do_not_ascend_touch_no_other_memory,
    test_opcheck,
    test_provenance,
    test_rows_that_tma_does_not_read,
)
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in
from tests.runtime.thread_cases import first_calls


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_the_reference(generator):
    """The product with dequantized matrices, on a CPU and where it is asked for."""
    a, b, scale, offs = make((3, 0, 4), 64, 96, generator)
    wanted = grouped_mm(a, dequantize(b.mT, scale).mT, offs, backend="reference")
    assert_same_bits(grouped_mm(a, b, offs, b_scale=scale, backend="reference"), wanted)


def test_who_is_chosen():
    """By the mean number of rows; of many the matrices are dequantized before."""
    for rows, width in ((1, 8), (20, 8), (35, 16), (320, 32)):
        assert choose("sm_90a", rows, 5).tile[1] == width, rows
    assert choose("sm_90a", 321, 5) is None
    a, b = torch.zeros(321, 64, dtype=BF16), torch.zeros(5, 64, 64).to(torch.float8_e4m3fn)
    scale = torch.zeros(5, 64, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with observed() as launches:
        grouped_mm(a, b.mT, offs_of([321, 0, 0, 0, 0], "cpu"), b_scale=scale)
    assert [launch.kernel for launch, _, _ in launches] == ["grouped_rows"]


def test_scales_of_a_load():
    assert [scale_vec(k, 0) for k in (2048, 2880, 2912)] == [4, 2, 1]
    assert [scale_vec(2048, address) for address in (4, 6, 7)] == [4, 2, 1]


def test_a_layer_finds_its_kernels_precompiled(jobs, generator):
    for mean in DECODE:
        for k in (256, 2880):
            a, b, scale, offs = make((mean,) * 2, 32, k, generator)
            del jobs[:]  # those of quantize_rowwise
            grouped_mm(a, b, offs, b_scale=scale)
            assert set(jobs) <= set(prewarm.specializations("sm_90a")) and len(jobs) == 1


def test_threads_that_make_the_first_call_together(generator):
    a, b, scale, offs = make((3, 0, 4), 64, 96, generator)
    first_calls((lambda a: grouped_mm(a, b, offs, b_scale=scale), (a,)), False)


def test_on_sm100(generator):
    """Matrices are always dequantized first, with the same bits."""
    a, b, scale, offs = make((3, 0, 4), 64, 96, generator)
    wanted = grouped_mm(a, b, offs, b_scale=scale)
    with fake_kernels("sm_100a") as jobs:
        assert_same_bits(grouped_mm(a, b, offs, b_scale=scale), wanted)
    assert [builder.__name__ for builder, _ in jobs] == ["mxfp8_dequantize", "grouped"]


# Bad arguments

A, OFFS = torch.zeros(6, 64, dtype=BF16), offs_of((2, 0, 4), "cpu")
Q = torch.zeros(3, 32, 64).to(torch.float8_e4m3fn)
B, SCALE = Q.mT, torch.zeros(3, 32, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
GROWING = A.clone().requires_grad_()
BAD = [
    (lambda: grouped_mm(A.half(), B, OFFS, b_scale=SCALE), TypeError, "a must have dtype bfloat16, got torch.float16"),
    (lambda: grouped_mm(A[None], B, OFFS, b_scale=SCALE), ValueError, "a must be a matrix with b_scale"),
    (
        lambda: grouped_mm(A[:1].expand(MAX_SIZE + 1, 64), B, OFFS, b_scale=SCALE),
        ValueError,
        f"a must have dimensions of at most {MAX_SIZE}",
    ),
    (lambda: grouped_mm(A, B.float(), OFFS, b_scale=SCALE), TypeError, "b must have dtype float8_e4m3fn"),
    (lambda: grouped_mm(A, B, OFFS, b_scale=[1]), TypeError, "b_scale must be a torch.Tensor, got list"),
    (lambda: grouped_mm(A, B, OFFS, b_scale=SCALE.float()), TypeError, "b_scale must have dtype float8_e8m0fnu"),
    (lambda: grouped_mm(A, B[:, :48], OFFS, b_scale=SCALE), ValueError, r"b must have shape \(E, K, N\) of multiples"),
    (lambda: grouped_mm(A, B[0], OFFS, b_scale=SCALE), ValueError, r"b must have shape \(E, K, N\) of multiples"),
    (lambda: grouped_mm(A[:, :32], B, OFFS, b_scale=SCALE), ValueError, "b must have 32 rows, as a has columns"),
    (lambda: grouped_mm(A, Q, OFFS, b_scale=SCALE), ValueError, "b must be the transpose of contiguous ones"),
    (
        lambda: grouped_mm(A, B, OFFS, b_scale=SCALE[:, :, :1]),
        ValueError,
        r"b_scale must have shape \(3, 32, 2\), got \(3, 32, 1\)",
    ),
    (
        lambda: grouped_mm(A, B, OFFS, b_scale=SCALE.mT.contiguous().mT),
        ValueError,
        "b_scale must be contiguous",
    ),
    (lambda: grouped_mm(A, B, b_scale=SCALE), ValueError, "offs must be given where a or b is a matrix, got None"),
    (lambda: grouped_mm(A, B, OFFS[:2], b_scale=SCALE), ValueError, "offs must have 3 elements"),
    (lambda: grouped_mm(A, B, OFFS, b_scale=SCALE, out_dtype=torch.int8), TypeError, "out_dtype must have dtype"),
    (
        lambda: grouped_mm(A, B, OFFS, b_scale=SCALE, accumulate_into=torch.zeros(3, 64, 32)),
        ValueError,
        "accumulate_into must be None with b_scale",
    ),
    (
        lambda: grouped_mm(GROWING, B, OFFS, b_scale=SCALE),
        ValueError,
        "b_scale must be None where a gradient is wanted, got a tensor",
    ),
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments(call, error, message, backend):
    """The same of kernels, after a good call, and of the reference."""
    grouped_mm(A, B, OFFS, b_scale=SCALE)
    with pytest.raises(error, match=f"grouped_mm: {message}"):
        if backend is None:
            call()
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cute_kernels.runtime.operators.on_gpu", lambda x: False)
                call()


def test_elements_off_16_bytes():
    memory = torch.zeros(3 * 32 * 64 + 8, dtype=torch.uint8)[8:].view(torch.float8_e4m3fn).view(3, 32, 64)
    with pytest.raises(ValueError, match="grouped_mm: b must start on 16 bytes, got address"):
        grouped_mm(A, memory.mT, OFFS, b_scale=SCALE)


# The kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize(("vec", "out"), OUTS.items(), ids=str)
@pytest.mark.parametrize("config", DECODE.values(), ids=lambda config: kernel_name((config, True)))
def test_compiles_without_spills(config, vec, out):
    from cute_kernels.gemm.kernel_grouped_mxfp8 import grouped_mxfp8

    record = grouped_mxfp8.obtain("sm_90a", GroupedMxfp8Spec(out, vec), config).record
    check_record(record)
    (kernel,) = record["kernels"]
    assert kernel["registers"] * kernel["threads"] * 2 <= 65536 and kernel["dynamic_smem_bytes"] <= 115712


@pytest.mark.exhaustive
def test_instructions(tmp_path):
    """Operands come by TMA, elements in pairs; a tile's 64 elements of a thread take two products for each pair."""
    program = """
import torch
from cute_kernels.gemm.config_mxfp8 import DECODE, GroupedMxfp8Spec
from cute_kernels.gemm.kernel_grouped_mxfp8 import grouped_mxfp8
assert grouped_mxfp8.obtain("sm_90a", GroupedMxfp8Spec(torch.bfloat16, 4), DECODE[4]).origin == "compiled"
"""
    from tests.gemm.test_compile import early_reads

    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert "cp.async.bulk.tensor" in kernel and ".local" not in kernel and not early_reads(kernel)
    assert not re.search(r"\b(atom|red)\.", kernel)
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16", kernel)) == 8
    assert len(re.findall(r"ld\.shared\.s16", kernel)) == 32 and len(re.findall(r"mul\.bf16x2", kernel)) == 64


def test_configs_that_cannot_be():
    from cute_kernels.gemm.kernel_grouped_mxfp8 import GroupedMxfp8Sm90

    for config in (GemmConfig((32, 8, 128), (1, 1), 4, 1), GemmConfig((64, 8, 64), (1, 1), 4, 1)):
        with pytest.raises(ValueError, match="config must be of 64 rows, 128 of k and one CTA"):
            GroupedMxfp8Sm90(config, 4)


def test_rows_of_nan_reach_no_other(generator):
    a, b, scale, offs = make((3, 0, 5), 64, 128, generator)
    wanted = grouped_mm(a, b, offs, b_scale=scale)
    a[1] = float("nan")
    found = grouped_mm(a, b, offs, b_scale=scale)
    assert found[1].isnan().all()
    assert_same_bits(found[[0, 2, 3, 4, 5, 6, 7]], wanted[[0, 2, 3, 4, 5, 6, 7]])
