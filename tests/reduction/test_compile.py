"""The reductions' kernels compile for both architectures without a GPU, and what came out: no spills."""

import pytest

from cute_kernels.reduction import prewarm
from cute_kernels.reduction.config import WholeSumSpec
from cute_kernels.reduction.kernel_whole import whole_sums
from tests.marks import first_of, sample_for, sample_of_table
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in
from tests.reduction.cases import BF16, FP16, FP32, SoftmaxCase, kernels_of

# Each geometry: packed rows of a part of a warp, rows off 16 bytes, of a warp, of several, of a cluster; each dtype
CASES = [
    *(SoftmaxCase(op, n) for op in ("softmax", "log_softmax") for n in (1, 64, 100, 769, 2048, 6000, 16384, 262144)),
    *(SoftmaxCase("log_softmax", n, FP32) for n in (64, 769, 4096, 16384, 262144)),
    *(SoftmaxCase("log_softmax", n) for n in (1001, 10007, 151643)),
    SoftmaxCase("softmax", 50257),
    SoftmaxCase("softmax", 4096, FP16),
    SoftmaxCase("softmax", 32000, BF16, FP32),
]
WHOLE = [WholeSumSpec(BF16, FP32, 8), WholeSumSpec(FP32, FP32, 4, True), WholeSumSpec(BF16, BF16, 1)]
SM100 = pytest.param("sm_100a", marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.parametrize("arch", ["sm_90a", SM100])
@pytest.mark.parametrize("case", first_of(CASES, 8), ids=str)
def test_softmax_compiles(case, arch):
    if arch == "sm_100a" and case not in sample_for(arch, CASES):
        pytest.skip("not of the sample")
    for builder, arguments in kernels_of([case], arch):
        check_record(builder.obtain(*arguments).record)


@pytest.mark.parametrize("arch", ["sm_90a", SM100])
@pytest.mark.parametrize("spec", first_of(WHOLE, 2), ids=str)
def test_whole_sums_compile(spec, arch):
    """Two kernels, which keep their loads in flight: as many registers as four CTAs of an SM leave, or nearly."""
    record = whole_sums.obtain(arch, spec).record
    check_record(record)
    assert len(record["kernels"]) == 2
    for kernel in record["kernels"]:
        takes_one = spec.vec == 1 and "add_parts" in kernel["name"]
        assert (20 if takes_one else 48) <= kernel["registers"] <= 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", SM100])
def test_shipped_kernels_compile(arch):
    for builder, arguments in sample_of_table(arch, prewarm.specializations(arch)):
        record = builder.obtain(*arguments).record
        assert record["key"]["arch"] == arch
        check_record(record)


@pytest.mark.parametrize("op, barriers", [("softmax", 1), ("log_softmax", 2)])
def test_a_cluster_meets_before_what_its_sum_left_out_is_written_over(op, barriers, tmp_path):
    """The backward of log_softmax does not read y for its sum; the other barrier is that of the beginning."""
    program = f"""
from tests.reduction.cases import SoftmaxCase, kernels_of
for builder, arguments in kernels_of([SoftmaxCase({op!r}, 16384)], "sm_90a"):
    if builder.__name__ == "softmax_backward":
        assert arguments[-1].layout.cluster > 1
        builder.obtain(*arguments)
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert kernel.count("bar.sync") == barriers


def test_prewarm_has_what_calls_ask_for():
    """The kernels of aligned, contiguous bf16 and fp32 logits."""
    cases = [SoftmaxCase(op, n, d) for op in ("softmax", "log_softmax") for n in prewarm.WIDTHS for d in (BF16, FP32)]
    shipped = {repr(job) for job in prewarm.specializations("sm_90a")}
    assert {repr(job) for job in kernels_of(cases, "sm_90a")} <= shipped
