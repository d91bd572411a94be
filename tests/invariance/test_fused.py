"""What Inductor may fuse in compiled graphs, and the exact parts of what kernels of torch compute, without a GPU."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cute_kernels.invariance import fused

OPS = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32


def on_gpu(dtype, shape=(4, 8)):
    """A fake tensor: no GPU is needed."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def fuses(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "meta"))

    def call(op, *args, dtype=BF16, results=None, **kwargs):
        made = [on_gpu(dtype) if a == "x" else a for a in args]
        return fused.fuses(op, tuple(made), kwargs, on_gpu(dtype) if results is None else results)

    return call


@pytest.mark.parametrize(
    ("op", "arguments", "kwargs", "wanted"),
    [
        (OPS.add.Tensor, ("x", "x"), {}, True),
        (OPS.add.Tensor, ("x", "x"), {"alpha": 0.5}, False),
        (OPS.sub.Tensor, ("x", 0.7), {}, True),
        (OPS.mul.Tensor, ("x", torch.ones(())), {}, False),  # a number on a CPU is not rounded to bf16
        (OPS.where.self, ("x", torch.ones(()), "x"), {}, True),
        (OPS.div.Tensor, ("x", "x"), {}, True),
        (OPS.div.Tensor, ("x", 3.0), {}, False),
        (OPS.div.Tensor_mode, ("x", "x"), {"rounding_mode": "floor"}, False),
        (OPS.gt.Scalar, ("x", 0), {}, True),
        (OPS.gt.Scalar, ("x", 0.5), {}, True),
        (OPS.gt.Scalar, ("x", float("-inf")), {}, True),
        (OPS.gt.Scalar, ("x", 0.7), {}, False),
        (OPS.exp.default, ("x",), {}, True),
        (OPS.erf.default, ("x",), {}, False),
        (OPS.maximum.default, ("x", "x"), {}, False),
        (OPS.amax.default, ("x", [0]), {}, False),
        (OPS.pow.Tensor_Scalar, ("x", 1.5), {}, False),
        (OPS.addcmul.default, ("x", "x", "x"), {}, False),
        (OPS.round.decimals, ("x",), {"decimals": 2}, False),
        (OPS.transpose.int, ("x", 0, 1), {}, True),
        (OPS.cat.default, (["x"],), {}, True),
        (OPS.normal_functional.default, ("x",), {}, False),
        (torch.ops.prims.convert_element_type.default, ("x", FP32), {}, True),
        (torch.ops.prims.tanh.default, ("x",), {}, False),
    ],
)
def test_what_may_be_fused(fuses, op, arguments, kwargs, wanted):
    assert fuses(op, *arguments, **kwargs) is wanted
    assert not fuses(op, *arguments, **kwargs, dtype=torch.float64) or op.is_view or op in MOVES


MOVES = (OPS.cat.default, torch.ops.prims.convert_element_type.default)


def test_integers_and_one_operation_of_two(fuses):
    assert fuses(OPS.erf.default, "x", dtype=torch.int64, results=on_gpu(torch.int64))
    assert not fuses(OPS.arange.start_step, 0, 1, 0.1)
    assert fuses(OPS.addcmul.default, "x", "x", "x", dtype=FP32)
    assert not fuses(OPS.addcmul.default, "x", "x", "x", dtype=FP32, value=0.5)
    assert fuses(OPS.gt.Scalar, "x", 0.7, dtype=FP32)
    assert fuses(torch.ops.cute_kernels.fp32_parts.default, "x", dtype=FP32)


def test_functions_are_fused_on_a_gpu_alone():
    x = torch.ones(3)
    assert not fused.fuses(OPS.exp.default, (x,), {}, x) and fused.fuses(OPS.mul.Tensor, (x, x), {}, x)


ARGUMENTS = {"div.Tensor": (0.3,), "rsub.Scalar": (0.7,), "threshold_backward": (0,)}
OF_TWO = ("sigmoid_backward", "silu_backward", "tanh_backward", "threshold_backward")
CASES = [(name, op, ARGUMENTS.get(name, ())) for name, op in zip(fused.ENTRIES, fused.entries(), strict=True)]
CASES += [("pow.Tensor_Scalar", OPS.pow.Tensor_Scalar, (n,)) for n in (2, 3, 0.5, -0.5, -1, 2.0)]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("name", "op", "arguments"), [c for c in CASES if c[:1] + c[2:] != ("pow.Tensor_Scalar", ())])
def test_entries_compute_what_torch_does(name, op, arguments, dtype, generator):
    """Their bits are those of torch's kernels on a GPU, which a test there asks for."""
    x = torch.cat([torch.randn(500, generator=generator) * 3, torch.tensor([0.0, -0.0, float("inf"), -1e30])]).to(dtype)
    inputs = (torch.randn(x.shape, generator=generator).to(dtype), x) if name in OF_TWO else (x,)
    options = {"approximate": "tanh"} if name == "gelu" else {}
    found, wanted = fused.ENTRIES[name](*inputs, *arguments, **options), op(*inputs, *arguments, **options)
    assert found.dtype is dtype
    rtol, atol = (4e-2, 8e-3) if dtype is BF16 else (2e-6, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if name in ("neg", "reciprocal"):  # relu of -0 is 0 on a GPU, and -0 on a CPU
        assert torch.equal(found.signbit(), wanted.signbit())


def test_entries_leave_what_they_do_not_take():
    x = torch.ones(3)
    assert fused.ENTRIES["pow.Tensor_Scalar"](x, 1.5) is NotImplemented
    assert fused.ENTRIES["div.Tensor"](x, x) is NotImplemented
    assert fused.ENTRIES["gelu"](x) is NotImplemented
    assert fused.ENTRIES["rsub.Scalar"](x, 1.0, 2) is NotImplemented
    assert fused.taken_apart(lambda t: "own", torch.relu, x) == "own"


def test_calls_are_marked():
    """With the place of each rounding, also at casts; Inductor has a way to call what is not fused."""
    graph = make_fx(lambda x: OPS.gelu.default(OPS.mul.Tensor(x, 2)).to(FP32))(torch.ones(3, dtype=BF16)).graph
    fused.calls_for_the_rest(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [str(n.target) for n in calls if "should_fallback" in n.meta] == ["aten.gelu.default"]
    assert all(n.meta["low_precision_pointwise_barrier"] for n in calls)
    assert OPS.gelu.default in fused.lowering.lowerings
