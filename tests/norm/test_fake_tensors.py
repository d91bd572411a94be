"""layer_norm and rms_norm on fake tensors: shapes and dtypes as on a GPU, and nothing runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.norm import launch
from cute_kernels.runtime import launches, operators
from tests.norm.cases import BF16, FP32, KINDS, OPS, Case, call_and_differentiate, make_inputs, public_norm


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    def load(*arguments):
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(launches, "load", load)
    monkeypatch.setattr(operators, "on_gpu", lambda x: True)
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_tensors(kind):
    """Without autograd: that of CUDA tensors needs a torch with CUDA."""
    x = torch.empty(2, 3, 1024, dtype=BF16, device="cuda")
    weight = torch.empty(1024, device="cuda")
    y, h = OPS[kind](x, weight, residual=x.float(), out_dtype=FP32, return_residual=True)
    assert y.shape == h.shape == x.shape and y.dtype is h.dtype is FP32 and y.device.type == "cuda"
    with pytest.raises(ValueError, match="weight must have shape"):
        OPS[kind](x, torch.empty(1023, device="cuda"))


@pytest.mark.parametrize(
    "case",
    [
        Case("rms", 1024, residual=FP32, dh=True, rows=5),
        Case("layer", 1024, weight=FP32, bias=BF16, out=FP32, rows=5),
        Case("layer", 1024, bias=BF16, save="output", rows=5),
    ],
    ids=str,
)
def test_training(case):
    """As CUDA tensors go on after the choice of the backend, here on fake CPU tensors."""
    inputs = make_inputs(case, torch.Generator())
    found = call_and_differentiate(public_norm, case, inputs)
    assert found["y"].shape == (5, 1024) and found["y"].dtype is (case.out or BF16)
    assert found["dx"].shape == (5, 1024) and found["dx"].dtype is BF16
    assert found["dw"].shape == (1024,) and found["dw"].dtype is case.weight
    assert case.residual is None or found["dresidual"].dtype is found["h"].dtype is FP32
    assert case.bias is None or found["db"].dtype is case.bias


def test_the_schemas_name_what_is_written():
    def written(operator):
        return {a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    assert written(launch.norm_forward.registered) == {"y", "h", "statistics"}
    assert written(launch.norm_backward.registered) == {"dx", "dresidual", "dw", "db"}
    for operator in (launch.norm_forward.registered, launch.norm_backward.registered):
        assert not operator._schema.returns
        assert operator.name().startswith("cute_kernels::norm_")
