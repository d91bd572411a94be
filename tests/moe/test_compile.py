"""The kernels of experts compile for both architectures without a GPU, and what came out."""

import pytest

from cute_kernels.moe import prewarm
from cute_kernels.moe.config import CombineSpec, GateSpec, GatherSpec, PlanSpec, RouteSpec
from tests.marks import sample_for, sample_of_table
from tests.moe.cases import BF16, FP16, FP32
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in

ARCHS = ["sm_90a", "sm_100a"]
ROUTES = [
    RouteSpec(256, 8, "sigmoid", True, 8, 4, True),
    RouteSpec(160, 6, "softmax", groups=8, kept_groups=3),
    RouteSpec(5, 2, "softmax", normalize=True, replays=True),
    RouteSpec(1024, 32, "chosen"),
]


def others() -> list:
    from cute_kernels.moe.kernel.gate import gate, gate_backward
    from cute_kernels.moe.kernel.plan import plan
    from cute_kernels.moe.kernel.route import route, route_backward
    from cute_kernels.moe.kernel.rows import combine, gather

    found = [(route, spec) for spec in ROUTES]
    found += [(route_backward, spec._replace(has_bias=False, groups=1, replays=False)) for spec in ROUTES]
    found += [(plan, PlanSpec(*spec)) for spec in ((1024, 16, False), (1024, 16, True), (1, 1, False), (1, 1, True))]
    found += [(gather, GatherSpec(BF16, 8, True, True)), (gather, GatherSpec(FP32, 1, True))]
    found += [(combine, CombineSpec(FP16, 32, True)), (combine, CombineSpec(FP32, 1, False))]
    options = {"interleaved": True, "limit": 7.0, "alpha": 1.702}
    found += [(gate, GateSpec(FP16, **options)), (gate_backward, GateSpec(FP32, **options, weighted=True))]
    found += [(combine, CombineSpec(BF16, 4, True, True))]
    for function in ("swiglu", "geglu", "silu"):
        found += [(gate, GateSpec(BF16, function=function, biased=True))]
        found += [(gate_backward, GateSpec(BF16, weighted=True, function=function, biased=True))]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_kernels_compile_without_spills(arch):
    for builder, arguments in sample_of_table(arch, prewarm.specializations(arch)):
        check_record(builder.obtain(*arguments).record)


@pytest.mark.exhaustive  # test_classes.py compiles each class
@pytest.mark.parametrize(("builder", "spec"), others(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_other_kernels_compile_without_spills(builder, spec):
    check_record(builder.obtain("sm_90a", spec).record)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("builder", "spec"), sample_for("sm_100a", others()), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_other_kernels_compile_for_sm100(builder, spec):
    """Rows of 32 experts at once spill 176 bytes there: nobody has so many, and no kernel runs on SM100 yet."""
    record = builder.obtain("sm_100a", spec).record
    if isinstance(spec, CombineSpec) and spec.k == 32:
        assert [kernel["stack_bytes"] for kernel in record["kernels"]] == [176]
    else:
        check_record(record)


def test_combine_rounds_each_product(tmp_path):
    """No sum of a token is fused with a product, none is atomic, and memory moves 16 bytes at a time."""
    program = """
import torch
from cute_kernels.moe.config import CombineSpec
from cute_kernels.moe.kernel.rows import combine
assert combine.obtain("sm_90a", CombineSpec(torch.bfloat16, 8, True)).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert "mul.rn.f32" in kernel and "add.rn.f32" in kernel and "fma" not in kernel
    assert "atom." not in kernel and "red." not in kernel
    assert "ld.global.v4" in kernel and "st.global.v4" in kernel
