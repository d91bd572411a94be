"""grouped_mm without a GPU: the reference, bad arguments, the kernels as they compile."""

import itertools
import re

import pytest
import torch

from cute_kernels import grouped_mm
from cute_kernels.gemm.config_grouped import (
    DECODE,
    ROWS,
    SUMS,
    GroupedSpec,
    SumsConfig,
    candidates,
    grouped_arguments,
    many_rows,
    sums,
    tiles_bound,
)
from tests.fakes import fake_kernels
from tests.gemm.cases import here
from tests.gemm.grouped_cases import BF16, FP16, FP32, bounds_of, kernel_name, offs_of
from tests.marks import sample_for
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in
from tests.sass import is_serialized

FP64 = torch.float64


# a's and b's neighbours -> dtype of the result, of the tests of every kernel; dtypes of sums
LAYOUTS = {("k", "n"): BF16, ("k", "k"): FP32}
OUTS = (BF16, FP32)


def every_job(arch: str = here()) -> list[tuple]:
    """(builder, arguments) of what the tests of every kernel need on a GPU."""
    from cute_kernels.gemm.kernel_grouped import grouped

    found = [
        (arch, GroupedSpec(BF16, out, "rows", False, *majors), k, *kernel)
        for kernel, (majors, out), k in itertools.product(candidates(arch, "rows"), LAYOUTS.items(), (64, 200))
    ]
    for kernel in candidates(arch, "sums"):
        specs = [GroupedSpec(BF16, out, "sums", False, "m", "n") for out in OUTS]
        specs.append(GroupedSpec(BF16, FP32, "sums", True, "m", "n"))
        found += [(arch, spec, 64, *kernel) for spec in specs]
    return [(grouped, arguments) for arguments in dict.fromkeys(grouped_arguments(*call) for call in found)]


# The reference


@pytest.mark.parametrize("sizes", [(3, 0, 4), (7,), (0, 0)], ids=str)
def test_torch_s_in_fp64(sizes):
    """All forms, and their gradients, a product a group."""
    a, b = torch.randn(7, 5, dtype=FP64), torch.randn(len(sizes), 5, 3, dtype=FP64)
    offs = offs_of(sizes, "cpu")
    wanted = torch.zeros(7, 3, dtype=FP64)
    for e, (start, end) in enumerate(bounds_of(sizes)):
        wanted[start:end] = a[start:end] @ b[e]
    torch.testing.assert_close(grouped_mm(a, b, offs), wanted)
    torch.testing.assert_close(grouped_mm(b.mT, a.t(), offs), wanted.t())
    sums = torch.stack([a[start:end].t() @ wanted[start:end] for start, end in bounds_of(sizes)])
    torch.testing.assert_close(grouped_mm(a.t(), wanted, offs), sums)
    torch.testing.assert_close(grouped_mm(b, b.mT), b @ b.mT)
    for operands in ((a, b), (b.mT, a.t()), (a.t(), wanted)):
        leaves = [t.clone().requires_grad_() for t in operands]
        assert torch.autograd.gradcheck(lambda x, y: grouped_mm(x, y, offs), leaves)


def test_rows_beyond_the_groups_are_zeros():
    a, b = torch.full((6, 4), float("nan"), dtype=BF16), torch.ones(2, 4, 3, dtype=BF16)
    a[:4] = 1
    assert grouped_mm(a, b, offs_of((1, 3), "cpu"), out_dtype=FP32)[:, 0].tolist() == [4, 4, 4, 4, 0, 0]


def test_main_grad_and_accumulate_into():
    a, b = torch.ones(4, 2, dtype=BF16), torch.ones(2, 2, 3, dtype=BF16, requires_grad=True)
    b.main_grad = torch.ones(2, 2, 3)
    offs = offs_of((4, 0), "cpu")
    grouped_mm(a, b, offs).sum().backward()
    assert b.grad is None and b.main_grad[0].eq(5).all() and b.main_grad[1].eq(1).all()
    target = torch.ones(2, 2, 3)
    assert grouped_mm(a.t(), torch.ones(4, 3, dtype=BF16), offs, accumulate_into=target) is target
    assert target[0].eq(5).all() and target[1].eq(1).all()


# Arguments

A, B, OFFS = torch.zeros(6, 16, dtype=BF16), torch.zeros(3, 16, 8, dtype=BF16), torch.zeros(3, dtype=torch.int32)
SUMS_OF = (A.t(), torch.zeros(6, 8, dtype=BF16), OFFS)
BAD = [
    (lambda: grouped_mm([1.0], B, OFFS), TypeError, "grouped_mm: a must be a torch.Tensor, got list"),
    (lambda: grouped_mm(A, None, OFFS), TypeError, "grouped_mm: b must be a torch.Tensor, got NoneType"),
    (lambda: grouped_mm(A.long(), B, OFFS), TypeError, "grouped_mm: a must have dtype bfloat16, float16"),
    (
        lambda: grouped_mm(A, B.half(), OFFS),
        TypeError,
        "grouped_mm: b must have dtype torch.bfloat16, got torch.float16",
    ),
    (lambda: grouped_mm(A[0], B, OFFS), ValueError, "grouped_mm: a must be a matrix or a batch of matrices"),
    (lambda: grouped_mm(A, B[:, :8], OFFS), ValueError, "grouped_mm: b must have 16 rows, as a has columns"),
    (lambda: grouped_mm(A, B), ValueError, "grouped_mm: offs must be given where a or b is a matrix, got None"),
    (lambda: grouped_mm(B, B.mT, OFFS), ValueError, "grouped_mm: offs must be None for two batches of matrices"),
    (lambda: grouped_mm(B[:2], B.mT), ValueError, "grouped_mm: b must have 2 matrices, as a has"),
    (lambda: grouped_mm(A, B, OFFS.long()), TypeError, "grouped_mm: offs must have dtype int32, got torch.int64"),
    (lambda: grouped_mm(A, B, [1, 2, 3]), TypeError, "grouped_mm: offs must be a torch.Tensor, got list"),
    (
        lambda: grouped_mm(A, B, OFFS[:2]),
        ValueError,
        "grouped_mm: offs must have 3 elements, as there are matrices, got 2",
    ),
    (lambda: grouped_mm(A, B, OFFS[None]), ValueError, "grouped_mm: offs must have one dimension"),
    (lambda: grouped_mm(A, B, OFFS.new_zeros(6)[::2]), ValueError, "grouped_mm: offs must be contiguous"),
    (
        lambda: grouped_mm(A, B.new_zeros(1, 16, 8).expand(1025, 16, 8), OFFS.new_zeros(1025)),
        ValueError,
        "grouped_mm: offs must have at most 1024 elements, got 1025",
    ),
    (lambda: grouped_mm(A, B, OFFS, out_dtype=torch.int8), TypeError, "grouped_mm: out_dtype must have dtype"),
    (
        lambda: grouped_mm(A, B, OFFS, accumulate_into=torch.zeros(6, 8)),
        ValueError,
        "grouped_mm: accumulate_into must be None where the rows of groups are not summed over",
    ),
    (
        lambda: grouped_mm(*SUMS_OF, accumulate_into=torch.zeros(3, 16, 8, dtype=BF16)),
        TypeError,
        "grouped_mm: accumulate_into must have dtype float32, got torch.bfloat16",
    ),
    (
        lambda: grouped_mm(*SUMS_OF, accumulate_into=torch.zeros(3, 16, 9)),
        ValueError,
        r"grouped_mm: accumulate_into must have shape \(3, 16, 8\)",
    ),
    (
        lambda: grouped_mm(*SUMS_OF, accumulate_into=torch.zeros(3, 8, 16).mT),
        ValueError,
        "grouped_mm: accumulate_into must be contiguous",
    ),
    (
        lambda: grouped_mm(*SUMS_OF, accumulate_into=torch.zeros(3, 16, 8, requires_grad=True)),
        ValueError,
        "grouped_mm: accumulate_into must be None where a gradient is wanted",
    ),
    (
        lambda: grouped_mm(*SUMS_OF, out_dtype=FP32, accumulate_into=torch.zeros(3, 16, 8)),
        ValueError,
        "grouped_mm: out_dtype must be None with accumulate_into",
    ),
    (lambda: grouped_mm(A, B, OFFS, backend="cuda"), ValueError, "grouped_mm: backend must be None or 'reference'"),
]


@pytest.mark.parametrize("path", ["cpu", "cold", "warm"])
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments(call, error, message, path):
    if path == "cpu":
        with pytest.raises(error, match=message):
            call()
        return
    with fake_kernels():
        if path == "warm":
            grouped_mm(A, B, OFFS)
        with pytest.raises(error, match=message):
            call()


def test_too_many_tiles():
    from cute_kernels.gemm.launch_grouped import launch_of
    from cute_kernels.runtime.targets import Target

    with fake_kernels(), pytest.raises(ValueError, match="grouped_mm: a and b must be of at most"):
        launch_of(Target("sm_90a", 132), GroupedSpec(BF16, BF16, "rows"), (2**30, 2**20, 64, 1024))


# The kernels


def of_candidates(arch: str = "sm_90a") -> list[tuple]:
    kinds = [
        ("rows", majors, out, False) for majors, out in ((("k", "k"), BF16), (("k", "n"), BF16), (("k", "n"), FP32))
    ]
    kinds += [("sums", ("m", "n"), BF16, False), ("sums", ("m", "n"), FP32, True), ("sums", ("m", "n"), FP32, False)]
    return [(kernel, kind) for kind in kinds for kernel in candidates(arch, kind[0])]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "kind"), of_candidates(), ids=lambda v: kernel_name(v) if len(v) == 2 else "-".join(map(str, v[:2]))
)
def test_compiles_without_spills_or_serialized_products(kernel, kind):
    from cute_kernels.gemm.kernel_grouped import grouped

    ragged, majors, out, accumulate = kind
    spec = GroupedSpec(BF16, out, ragged, accumulate, *majors)
    found = grouped.obtain(*grouped_arguments("sm_90a", spec, 64, *kernel))
    check_record(found.record)
    if kernel[0] is not None:
        assert not is_serialized(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "kind"),
    sample_for("sm_100a", [job for job in of_candidates("sm_100a") if job[0][0] is not None]),
    ids=lambda v: kernel_name(v) if len(v) == 2 else "-".join(map(str, v[:2])),
)
def test_compiles_for_sm100_without_spills(kernel, kind):
    from cute_kernels.gemm.kernel_grouped import grouped

    ragged, majors, out, accumulate = kind
    spec = GroupedSpec(BF16, out, ragged, accumulate, *majors)
    check_record(grouped.obtain(*grouped_arguments("sm_100a", spec, 64, *kernel)).record)


def test_fp16_compiles():
    from cute_kernels.gemm.kernel_grouped import grouped

    spec = GroupedSpec(FP16, FP32, "rows")
    check_record(grouped.obtain(*grouped_arguments("sm_90a", spec, 64, DECODE[4], True)).record)


@pytest.mark.exhaustive
def test_instructions(tmp_path):
    """Operands come by TMA, no product is waited for by itself, nothing is atomic; a tail leaves 16 bytes a thread."""
    program = """
import pathlib
import torch
from cute_kernels.gemm.config_grouped import DECODE, ROWS, SUMS, GroupedSpec, grouped_arguments
from cute_kernels.gemm.kernel_grouped import grouped
rows = GroupedSpec(torch.bfloat16, torch.bfloat16, "rows")
sums = GroupedSpec(torch.bfloat16, torch.float32, "sums", True, "m", "n")
calls = {
    "rows": (rows, 64, ROWS[0], False), "sums": (sums, 64, SUMS[0], False), "few": (rows, 64, DECODE[7], True)
}
for name, call in calls.items():
    assert grouped.obtain(*grouped_arguments("sm_90a", *call)).origin == "compiled"
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(name + ".text")
"""
    from tests.gemm.test_compile import early_reads

    compile_in(tmp_path, program)
    for name in ("rows", "sums", "few"):
        (kernel,) = kernels_in(tmp_path, f"{name}.text")
        assert "wgmma.mma_async" in kernel and "cp.async.bulk.tensor" in kernel and ".local" not in kernel
        assert not early_reads(kernel) and not re.search(r"\b(atom|red)\.", kernel)
        if name == "rows":
            assert "st.global.v4" in kernel and "cp.async.bulk.tensor.2d.global.shared::cta" in kernel
        if name == "sums":
            assert "st.shared.v4" in kernel  # the next group's rows, zeroed
            # Two sums a load, of a tile that overhangs, too
            assert kernel.count("ld.global.v2") == 2 * SUMS[0].tile[0] * SUMS[0].tile[1] // 2 // 128


# By what is ragged: how operands come, and by maps of how many dimensions the result leaves
LOADS_AND_STORES = {
    "rows": (("2d.shared::cluster", "3d.shared::cta"), ["2d"]),
    "sums": (("2d.shared::cluster", "2d.shared::cta"), ["3d"]),
    "few": (("2d.shared::cta", "3d.shared::cta"), []),
}


@pytest.mark.exhaustive
def test_instructions_of_sm100(tmp_path):
    """Operands come by TMA, products are of shared and tensor memory, nothing is atomic."""
    program = """
import pathlib
import torch
from cute_kernels.gemm.config_grouped import DECODE, GroupedSpec, grouped_arguments, many_rows, sums
from cute_kernels.gemm.kernel_grouped import grouped
rows = GroupedSpec(torch.bfloat16, torch.bfloat16, "rows", b_major="n")
main_grad = GroupedSpec(torch.bfloat16, torch.float32, "sums", True, "m", "n")
calls = {
    "rows": (rows, 64, many_rows("sm_100a")[0], False),
    "sums": (main_grad, 64, sums("sm_100a")[0], False),
    "few": (rows, 64, DECODE[7], True),
}
for name, call in calls.items():
    assert grouped.obtain(*grouped_arguments("sm_100a", *call)).origin == "compiled"
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(name + ".text")
"""
    compile_in(tmp_path, program)
    for name in ("rows", "sums", "few"):
        (kernel,) = kernels_in(tmp_path, f"{name}.text")
        assert "tcgen05.mma.cta_group::1.kind::f16" in kernel and "tcgen05.ld.sync" in kernel
        assert ".local" not in kernel
        assert not re.search(r"\b(atom|red)\.", kernel) and "cp.reduce" not in kernel
        loads, stores = LOADS_AND_STORES[name]
        assert all(f"cp.async.bulk.tensor.{load}.global.tile.mbarrier" in kernel for load in loads)
        assert re.findall(r"cp\.async\.bulk\.tensor\.(\dd)\.global\.shared", kernel) == stores
        assert (".multicast::cluster" in kernel) == (name != "few")  # tiles, and who has multiplied what was in a slot
        assert ("st.global.v4" in kernel) == (name != "sums")  # a group's last rows, and those beyond the last group
        assert ("tcgen05.st.sync" in kernel) == (name == "sums")  # accumulators start from main_grad


def test_configs_that_cannot_be():
    from cute_kernels.gemm.kernel_grouped_sm90 import GroupedRowsSm90, GroupedSumsSm90
    from cute_kernels.gemm.kernel_grouped_sm100 import GroupedRowsSm100, GroupedSumsSm100

    for rows in (GroupedRowsSm90, GroupedRowsSm100):
        with pytest.raises(ValueError, match="must be of one CTA along the rows"):
            rows("k", "k", False, sums("sm_100a")[0])
        with pytest.raises(ValueError, match="must be of one CTA along the rows"):
            rows("k", "k", True, many_rows("sm_100a")[0])
    for of_sums, room in ((GroupedSumsSm90, 8192), (GroupedSumsSm100, 8192 + 32768)):
        with pytest.raises(ValueError, match=f"must leave room for {room} bytes"):
            of_sums(False, SumsConfig((128, 256, 64), (2, 1), 5, 8))


@pytest.mark.parametrize(
    ("ragged", "majors"), [("rows", ("m", "k")), ("rows", ("m", "n")), ("sums", ("k", "n")), ("sums", ("m", "k"))]
)
def test_groups_that_would_begin_off_16_bytes(ragged, majors):
    """Along neighbouring elements a box begins on 16 bytes, or is an illegal instruction (H200)."""
    from cute_kernels.gemm.kernel_grouped import grouped

    config = (ROWS if ragged == "rows" else SUMS)[0]
    with pytest.raises(ValueError, match="groups begin at any row of rows of tokens alone"):
        grouped.build("sm_90a", GroupedSpec(BF16, BF16, ragged, False, *majors), config, False, False)


def test_rows_are_not_accumulated_into():
    from cute_kernels.gemm.kernel_grouped import grouped

    with pytest.raises(ValueError, match="rows are not accumulated into"):
        grouped.build("sm_90a", GroupedSpec(BF16, FP32, "rows", True), ROWS[0], False, False)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 2, 0, 500), (64,) * 9, (129, 0, 1)], ids=str)
def test_as_many_tiles_as_the_host_allows_for(sizes):
    rows = sum(sizes)
    for config, transposed in candidates("sm_90a", "rows"):
        tile = 64 if config is None else config.tile[1 if transposed else 0]
        assert sum(-(-size // tile) for size in sizes) <= tiles_bound(rows, len(sizes), 8, config, transposed)
