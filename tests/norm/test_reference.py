"""The references of layer_norm and rms_norm against torch and against fp64; the tests' own oracle against torch."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import layer_norm, rms_norm
from cute_kernels.norm import reference
from tests.norm.cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    KINDS,
    OPS,
    Case,
    call_and_differentiate,
    check,
    make_inputs,
    oracle,
    public_norm,
    torch_results,
)

REFERENCES = {"rms": reference.rms_norm, "layer": reference.layer_norm}


def torch_norm(kind, x, weight=None, bias=None, eps=EPS):
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return y if bias is None else y + bias


@pytest.fixture
def any_dtype(monkeypatch):
    """The references' formulas without the argument contract, which admits no fp64 tensors."""
    monkeypatch.setattr(reference, "check_norm", lambda *arguments: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 769])
def test_same_as_torch_in_fp64(kind, n, generator, any_dtype):
    x, dy = torch.randn(2, 9, n, generator=generator, dtype=torch.float64).unbind()
    weight, bias = torch.randn(2, n, generator=generator, dtype=torch.float64).unbind()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    found = REFERENCES[kind](leaves[0], leaves[1], bias=leaves[2], eps=EPS, compute_dtype=torch.float64)
    wanted = torch_norm(kind, *leaves)
    assert found.dtype is torch.float64
    # A single column has a variance of 0 or one number's square: differences of the sums' last bits grow by 1/eps there
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for one, two in zip(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradcheck_in_fp64(kind, offset, generator, any_dtype):
    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(x, weight, bias, residual):
        options = {"eps": EPS, "weight_offset": offset, "return_residual": True, "compute_dtype": torch.float64}
        return REFERENCES[kind](x, weight, bias=bias, residual=residual, **options)

    assert torch.autograd.gradcheck(function, (randn(4, 6), randn(6), randn(6), randn(4, 6)))


# Where a gradient arrives at h, too, autograd adds it in h's dtype, and the kernels in fp32: so there h is fp32 here
CASES = [
    Case(kind, n, dtype, weight=weight, bias=bias, residual=residual, weight_offset=offset, dh=residual is FP32)
    for kind in KINDS
    for n, dtype, weight, bias, residual, offset in [
        (64, BF16, BF16, None, None, 0.0),
        (769, FP16, FP32, FP16, None, 0.0),
        (100, FP32, None, FP32, FP32, 0.0),
        (128, BF16, BF16, BF16, BF16, 1.0),
        (3, BF16, None, None, FP32, 0.0),
        (5120, FP32, BF16, FP32, None, 0.0),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_references_within_the_bounds_of_the_kernels(case, generator):
    inputs = make_inputs(case, generator, 3 * 2**13)
    check(call_and_differentiate(public_norm, case, inputs), oracle(case, inputs), torch_results(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_against_torch_in_fp64(case, generator):
    """Its backward is written out; autograd through torch's own op in fp64 agrees to fp64's precision."""
    inputs = make_inputs(case, generator, 2**12)
    exact = oracle(case, inputs)
    h = exact["h"].value if case.residual is not None else inputs.x.detach().double()
    weight = torch.ones(case.n, dtype=torch.float64) if case.weight is None else inputs.weight.detach().double()
    weight = weight + (case.weight_offset if case.weight is not None else 0.0)
    bias = torch.zeros(case.n, dtype=torch.float64) if case.bias is None else inputs.bias.detach().double()
    leaves = [t.clone().requires_grad_() for t in (h, weight, bias)]
    y = torch_norm(case.kind, *leaves)
    dx, dw, db = torch.autograd.grad(y, leaves, inputs.dy.double())
    if inputs.dh is not None:
        dx = dx + inputs.dh.double()
    wanted = {"y": y.detach(), "dx": dx, "dresidual": dx, "dw": dw, "db": db, "h": h}
    for name, result in exact.items():
        torch.testing.assert_close(result.value, wanted[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_on_request(kind, generator):
    """compute_dtype=float64: the result is the exact one, rounded once."""
    x = torch.randn(9, 769, generator=generator) + 1000.0
    weight, bias = torch.randn(2, 769, generator=generator).unbind()
    found = REFERENCES[kind](x, weight, bias=bias, eps=EPS, compute_dtype=torch.float64)
    wanted = torch_norm(kind, x.double(), weight.double(), bias.double())
    assert found.dtype is FP32
    assert torch.equal(found, wanted.float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_rounded_residual_is_normalised(kind, generator):
    x, residual = torch.randn(2, 65, 128, generator=generator).to(BF16).unbind()
    y, h = OPS[kind](x, residual=residual, eps=EPS, return_residual=True)
    assert h.dtype is BF16 and torch.equal(h, (x.float() + residual.float()).to(BF16))
    assert torch.equal(y, OPS[kind](h, eps=EPS))
    y32, h32 = OPS[kind](x, residual=residual.float(), eps=EPS, return_residual=True)
    assert h32.dtype is FP32 and torch.equal(h32, x.float() + residual.float()) and y32.dtype is BF16
    assert not torch.equal(y32, y)
    assert torch.equal(OPS[kind](x, residual=residual, eps=EPS), y)


@pytest.mark.parametrize("kind", KINDS)
def test_the_offset_is_added_in_fp32(kind, generator):
    x = torch.randn(65, 4096, generator=generator).to(BF16)
    weight = (0.02 * torch.randn(4096, generator=generator)).to(BF16)
    found = OPS[kind](x, weight, weight_offset=1.0, eps=EPS)
    assert torch.equal(found, OPS[kind](x, weight.float() + 1.0, eps=EPS))
    assert not torch.equal(found, OPS[kind](x, weight + 1.0, eps=EPS))


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_change_no_value(kind, generator):
    x = torch.randn(3, 5, 64, generator=generator)
    weight, bias = torch.randn(2, 64, generator=generator).unbind()
    y = OPS[kind](x, weight, bias=bias)
    assert y.shape == x.shape
    assert torch.equal(OPS[kind](x, weight, bias=bias, save="output"), y)
    assert torch.equal(OPS[kind](x, weight, bias=bias, backend="reference"), y)
    assert torch.equal(OPS[kind](x, weight, bias=bias, out_dtype=BF16), y.to(BF16))
    again, h = OPS[kind](x, weight, bias=bias, return_residual=True)
    assert torch.equal(again, y) and torch.equal(h, x)
    one_row = OPS[kind](x[1, 2], weight, bias=bias)
    torch.testing.assert_close(one_row, y[1, 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_dw_of_a_weight_of_zero(kind, offset, generator):
    """It is 0 for save="output", as y has nothing of x_hat there; nothing else changes."""
    x, dy = torch.randn(2, 9, 64, generator=generator).unbind()
    weight, bias = torch.randn(2, 64, generator=generator).unbind()
    weight[:8] = -offset

    def results(save):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = OPS[kind](leaves[0], leaves[1], bias=leaves[2], weight_offset=offset, save=save)
        return y, *torch.autograd.grad(y, leaves, dy)

    wanted, found = results("input"), results("output")
    assert wanted[2][:8].all()
    wanted[2][:8] = 0.0
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)


def test_defaults():
    """eps is 1e-6 for rms_norm and 1e-5 for layer_norm."""
    x = torch.tensor([[1e-3, -1e-3, 2e-3, -2e-3]])
    assert torch.equal(rms_norm(x), rms_norm(x, eps=1e-6)) and not torch.equal(rms_norm(x), rms_norm(x, eps=1e-5))
    assert torch.equal(layer_norm(x), layer_norm(x, eps=1e-5))
    assert not torch.equal(layer_norm(x), layer_norm(x, eps=1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind):
    x = torch.empty(0, 64, requires_grad=True)
    weight = torch.ones(64, requires_grad=True)
    OPS[kind](x, weight).sum().backward()
    assert x.grad.shape == (0, 64) and torch.equal(weight.grad, torch.zeros(64))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_tensors_have_shapes(kind):
    x = torch.empty(2, 3, 64, dtype=BF16, device="meta")
    y, h = OPS[kind](x, torch.empty(64, device="meta"), residual=x.float(), out_dtype=FP16, return_residual=True)
    assert y.shape == h.shape == x.shape and y.dtype is FP16 and h.dtype is FP32 and y.is_meta


@pytest.mark.parametrize("result", [1.01, float("nan"), None], ids=["one percent", "nan", "one element"])
def test_the_check_fails_on_a_wrong_result(result, generator):
    """One percent everywhere, a NaN, or one bf16 step in one element."""
    case = CASES[0]
    inputs = make_inputs(case, generator, 2**13)
    exact = oracle(case, inputs)
    y = exact["y"].value.to(BF16)
    check({"y": y}, exact)
    if result is None:
        y[3, 5] = torch.nextafter(y[3, 5], torch.tensor(9.0, dtype=BF16))
        y[3, 5] = torch.nextafter(y[3, 5], torch.tensor(9.0, dtype=BF16))
    else:
        y[:1] *= result
    with pytest.raises(AssertionError, match="times the bound"):
        check({"y": y}, exact)
