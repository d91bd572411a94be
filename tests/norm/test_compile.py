"""The norm kernels compile for both architectures without a GPU, and what came out: no spills, no float atomics.

Kernels go through the ordinary cache: its key holds the kernels' source, so what is found there was made from it.
"""

import re

import pytest

from cute_kernels.norm import prewarm
from tests.marks import first_of, sample_of_table
from tests.norm.cases import BF16, FP32, KINDS, Case, kernels_of
from tests.ptx import compile_in, kernels_in

ARCHS = ["sm_90a", "sm_100a"]
REGISTERS = 64 * 1024
CTA_SHARED_MEMORY = 227 * 1024


def check_record(record: dict) -> None:
    """Fails if a kernel uses local memory (spilled or indexed registers), or more than a CTA can have."""
    assert record["kernels"], "the record names no kernel"
    for kernel in record["kernels"]:
        assert kernel["stack_bytes"] == 0, f"{kernel['stack_bytes']} bytes of local memory a thread: {kernel}"
        shared = kernel["static_smem_bytes"] + kernel.get("dynamic_smem_bytes", 0)
        assert shared <= CTA_SHARED_MEMORY, kernel
        threads = kernel.get("threads", 0)
        assert threads <= 1024 and kernel["registers"] * threads <= REGISTERS, kernel


GOOD = {"name": "k", "registers": 128, "stack_bytes": 0, "static_smem_bytes": 1024, "dynamic_smem_bytes": 200_000}


@pytest.mark.parametrize(
    "change",
    [{"stack_bytes": 8}, {"dynamic_smem_bytes": 232_448}, {"threads": 1024, "registers": 65}, {"threads": 2048}],
    ids=str,
)
def test_the_check_fails_on_a_bad_kernel(change):
    check_record({"kernels": [GOOD]})
    with pytest.raises(AssertionError):
        check_record({"kernels": [GOOD, GOOD | change]})


def test_the_check_fails_on_an_empty_record():
    with pytest.raises(AssertionError):
        check_record({"kernels": []})


# Packed rows of a part of a warp, rows off 16 bytes, rows of a few warps, of a cluster, and rows that are read twice;
# each option once. The widths of models are in the shipped table below
CASES = [
    Case("rms", 64, residual=BF16, dh=True),
    Case("layer", 64, weight=FP32, bias=FP32),
    Case("rms", 769, weight=FP32, save="output"),
    Case("layer", 769, bias=BF16, residual=FP32, dh=True),
    Case("rms", 4096, weight_offset=1.0, out=FP32),
    Case("layer", 4096, bias=BF16, save="output"),
    Case("layer", 12, weight=FP32, bias=FP32),
    Case("rms", 16384, residual=BF16, dh=True),
    Case("layer", 16384, weight=FP32, bias=FP32),
    Case("rms", 262144, FP32, weight=FP32, residual=FP32, dh=True),
    Case("rms", 4096, gap=1),
    Case("layer", 1001, bias=BF16),
    Case("layer", 50257, bias=BF16),
    Case("rms", 61229),
    Case("layer", 32003, bias=BF16),
    Case("rms", 100001),
    Case("layer", 155647, bias=BF16),
    Case("rms", 155647, bias=BF16),
]


@pytest.mark.parametrize(
    "case, arch", [(CASES[4], "sm_103a"), *first_of([(case, arch) for case in CASES for arch in ARCHS], 4)], ids=str
)
def test_compiles(case, arch):
    jobs = kernels_of([case], arch)
    assert [builder.__name__ for builder, _ in jobs] == ["norm_forward", "norm_backward"]
    for builder, arguments in jobs:
        record = builder.obtain(*arguments).record
        assert record["key"]["arch"] == arch
        check_record(record)
    # The backward's second kernel adds the partial gradients; few rows of a cluster each have two kernels of their own
    assert len(record["kernels"]) == (4 if case.n == 262144 else 2)


@pytest.mark.parametrize("n", [2, 4, 12, 44, 769])
def test_the_last_sums_have_the_shared_memory_they_use(n):
    """dw and db of a CTA's teams meet where the ring was; of few columns off 16 bytes the ring is the smaller one."""
    _, (builder, arguments) = kernels_of([Case("rms", n, bias=BF16)], "sm_90a")
    layout = arguments[-1].layout
    needed = 2 * 4 * layout.teams * layout.chunks * layout.threads_per_row * layout.vec
    shared = [kernel.get("dynamic_smem_bytes", 0) for kernel in builder.obtain(*arguments).record["kernels"]]
    assert max(shared) >= needed


PARTS = 8


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_shipped_table_compiles_without_spills(part, arch):
    for builder, arguments in sample_of_table(arch, prewarm.specializations(arch))[part::PARTS]:
        try:
            check_record(builder.obtain(*arguments).record)
        except AssertionError as error:
            raise AssertionError(f"{builder.kernel}{arguments}: {error}") from None


def test_the_shipped_table_is_what_a_model_asks_for():
    """The first call of a bf16 model finds its kernels compiled: the table's arguments are those of a call."""
    for arch in ARCHS:
        table = set(prewarm.specializations(arch))
        for n in (128, 4096, 8192):
            for kind in KINDS:
                bias = BF16 if kind == "layer" else None
                plain, residual = Case(kind, n, bias=bias), Case(kind, n, bias=bias, residual=BF16, dh=True)
                assert set(kernels_of([plain, residual], arch)) <= table


# Data comes by bulk copies, and nothing is added up by atomics: their order would not be fixed
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", first_of(ARCHS))
def test_instructions(arch, tmp_path):
    program = f"""
from tests.norm.cases import *
for case in (Case("layer", 1024, bias=BF16), Case("rms", 32768), Case("rms", 769)):
    for builder, arguments in kernels_of([case], {arch!r}):
        assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    kernels = kernels_in(tmp_path)
    main = [kernel for kernel in kernels if "mbarrier" in kernel]
    assert len(main) == 6 and len(kernels) == 9  # three forwards, three backwards, three sums of partial rows
    for kernel in main:
        assert "cp.async.bulk.shared::cluster.global" in kernel
    assert sum("st.async" in kernel for kernel in main) == 2  # the cluster's row sums travel between CTAs
    for kernel in kernels:
        assert not re.search(r"\b(atom|red)\.", kernel)
        assert ".local" not in kernel
