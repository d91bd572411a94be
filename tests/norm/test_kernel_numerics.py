"""Results of layer_norm and rms_norm, forward and backward, against fp64.

Which kernel a call gets depends on kind, width, dtypes and options, so the cases are chosen to meet each part of the
kernels, not each combination: every width once a kind (narrow packed rows, rows of a warp, of several warps, of a
cluster, rows read twice; each also where the width does not divide by 8), and every option at a narrow, an unaligned,
a wide and a clustered width.
"""

import math
from dataclasses import replace

import pytest
import torch

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
    check_gates,
    make_inputs,
    oracle,
    strided,
    torch_results,
)

WIDTHS = [1, 3, 64, 100, 128, 512, 769, 1024, 1536, 2880, 4096, 5120, 7168, 12288, 16384, 32768, 131072, 262144]
WIDTHS += [1001, 2235, 10007, 50257, 100001, 151643]  # odd ones, of a warp to a cluster
# rms_norm with weights of x's dtype, layer_norm with fp32 weights: both are common; fp32 weights have fp32 gradients
BY_WIDTH = [Case("rms", n) for n in WIDTHS] + [Case("layer", n, weight=FP32, bias=FP32) for n in WIDTHS]
# Rows of a few columns that do not fill 16 bytes: dw and db take more shared memory than the rows
BY_WIDTH += [Case("rms", 4, bias=FP32), Case("rms", 12, FP32, weight=FP32), Case("layer", 44, bias=BF16)]
BY_DTYPE = [
    Case("rms", 1024, FP16, weight=FP16),
    Case("rms", 4096, FP32, weight=FP32),
    Case("rms", 769, FP32, weight=BF16),
    Case("rms", 4096, BF16, weight=FP32),
    Case("layer", 1024, FP16, weight=FP16, bias=FP16),
    Case("layer", 16384, FP32, weight=FP32, bias=FP32),
    Case("layer", 100, FP16, weight=BF16, bias=FP32),
    Case("layer", 262144, FP32, weight=FP32, bias=FP32),
    Case("rms", 131072, FP32, weight=FP32),
    Case("rms", 4096, BF16, out=FP32),
    Case("layer", 1024, FP32, weight=FP32, bias=FP32, out=BF16),
    Case("layer", 769, BF16, bias=BF16, out=FP16),
    # Rows that start on 16 bytes in fp32, in bf16 only on 8
    Case("rms", 2052, FP32, out=BF16),
    Case("layer", 1500, BF16, residual=FP32, out=FP32, dh=True),
    Case("rms", 700, BF16, save="output", out=FP32),
]
BY_PARAMETERS = [
    Case("rms", 4096, weight=None),
    Case("layer", 769, weight=None),
    Case("rms", 1024, bias=BF16),
    Case("layer", 4096, weight=None, bias=FP32),
    Case("layer", 64),
    Case("rms", 4096, weight_offset=1.0),
    Case("layer", 769, bias=BF16, weight_offset=1.0),
    Case("rms", 128, weight=FP32, weight_offset=1.0, residual=BF16),
]
BY_RESIDUAL = [
    Case(kind, n, bias=BF16 if kind == "layer" else None, residual=residual, dh=dh)
    for kind, n, residual, dh in [
        ("rms", 64, BF16, True),
        ("rms", 769, FP32, True),
        ("rms", 4096, BF16, False),
        ("rms", 4096, FP32, True),
        ("rms", 16384, BF16, True),
        ("rms", 262144, BF16, True),
        ("layer", 64, FP32, True),
        ("layer", 769, BF16, True),
        ("layer", 1024, FP32, False),
        ("layer", 4096, BF16, True),
        ("layer", 32768, FP32, True),
    ]
]
# Weight and bias do not fit into shared memory beside a row
BY_RESIDUAL += [Case("layer", 262144, FP32, weight=FP32, bias=FP32, residual=FP32, dh=True)]
BY_SAVE = [
    Case("rms", 64, save="output", weight=FP32),
    Case("rms", 769, save="output", weight=FP32),
    Case("rms", 4096, save="output", weight=FP32),
    Case("rms", 4096, save="output", bias=BF16, out=FP32),
    Case("rms", 16384, save="output"),
    Case("rms", 262144, save="output", weight=None),
    Case("rms", 1024, save="output", weight=FP32, weight_offset=1.0),
    Case("layer", 64, save="output"),
    Case("layer", 769, save="output", weight=FP32, bias=FP32),
    Case("layer", 4096, save="output", bias=BF16),
    Case("layer", 16384, FP16, weight=None, bias=FP16, save="output"),
    Case("layer", 1024, FP32, weight=FP32, bias=FP32, save="output"),
]


@pytest.mark.parametrize("case", BY_WIDTH + BY_DTYPE + BY_PARAMETERS + BY_RESIDUAL + BY_SAVE, ids=str)
def test_forward_and_backward(case, norm, generator, elements):
    inputs = make_inputs(case, generator, elements if case.n >= 64 else elements // 8)
    found = call_and_differentiate(norm, case, inputs)
    exact = oracle(case, inputs)
    assert found.keys() == exact.keys()
    assert found["y"].dtype is (case.out or case.dtype)
    for name, tensor in (("dx", inputs.x), ("dw", inputs.weight), ("db", inputs.bias), ("dresidual", inputs.residual)):
        assert name not in found or found[name].dtype is tensor.dtype
    if case.residual is not None:
        stored = (inputs.x.float() + inputs.residual.float()).to(case.residual)
        assert torch.equal(found["h"], stored)
    check(found, exact, torch_results(case, inputs) if case.save == "input" else None)
    check_gates(case, found, exact)


# Rows around the number that fill a tile, a CTA and the GPU, at widths where a tile has many rows and where it has one
@pytest.mark.parametrize("rows", [1, 2, 7, 31, 32, 33, 127, 1000, 4097])
@pytest.mark.parametrize("case", [Case("rms", 64), Case("layer", 1024, weight=FP32, bias=FP32)], ids=str)
def test_any_number_of_rows(case, norm, generator, rows):
    inputs = make_inputs(replace(case, rows=rows), generator)
    check(call_and_differentiate(norm, case, inputs), oracle(case, inputs))


@pytest.mark.parametrize("shape", [(4096,), (3, 5, 4096), (2, 3, 1, 4096), (1, 4096)], ids=str)
@pytest.mark.parametrize("case", [Case("rms", 4096), Case("layer", 4096, weight=FP32, bias=FP32)], ids=str)
def test_any_number_of_dimensions(case, norm, generator, shape):
    inputs = make_inputs(replace(case, rows=math.prod(shape[:-1])), generator)
    matrix = call_and_differentiate(norm, case, inputs)
    inputs.x = inputs.x.detach().view(shape).requires_grad_()
    inputs.dy = inputs.dy.view(shape)
    found = call_and_differentiate(norm, case, inputs)
    assert found["y"].shape == found["dx"].shape == shape
    for name, tensor in matrix.items():
        assert torch.equal(found[name].view_as(tensor), tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 1024), (0, 3, 1024), (3, 0, 1024)], ids=str)
def test_no_rows(kind, norm, device, shape):
    x = torch.empty(shape, dtype=BF16, device=device, requires_grad=True)
    weight = torch.ones(1024, dtype=FP32, device=device, requires_grad=True)
    residual = torch.empty(shape, dtype=FP32, device=device, requires_grad=True)
    bias = torch.ones(1024, dtype=BF16, device=device, requires_grad=True)
    y, h = norm(kind, x, weight, bias, residual=residual, return_residual=True)
    assert y.shape == h.shape == shape and y.dtype is BF16 and h.dtype is FP32
    (y.sum() + h.sum()).backward()
    assert x.grad.shape == residual.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and torch.equal(bias.grad, torch.zeros_like(bias))
    weight.main_grad = torch.ones_like(weight)
    weight.grad = None
    norm(kind, x, weight, bias).sum().backward()
    assert weight.grad is None and torch.equal(weight.main_grad, torch.ones_like(weight))


@pytest.mark.parametrize("case", [Case("layer", 769, x, weight=FP32, bias=FP32) for x in (BF16, FP32)], ids=str)
def test_mean_far_from_zero(case, norm, generator):
    """A variance taken as mean(x^2) - mean(x)^2 would have lost all digits; bf16 has steps of 4 there."""
    inputs = make_inputs(case, generator, 999 * 769, mean=1000.0)
    check(call_and_differentiate(norm, case, inputs), oracle(case, inputs), torch_results(case, inputs))


@pytest.mark.parametrize("case", [Case("layer", 1536, weight=FP32, bias=FP32)], ids=str)
def test_constant_rows(case, norm, generator):
    """A variance of 0, or what rounding leaves of it: eps alone scales the row."""
    inputs = make_inputs(case, generator, 5 * 1536)
    with torch.no_grad():
        inputs.x.fill_(3.3)
    check(call_and_differentiate(norm, case, inputs), oracle(case, inputs))


@pytest.mark.parametrize("scale", [1e-20, 1e16])
@pytest.mark.parametrize("case", [Case("rms", 4096, FP32, weight=FP32), Case("rms", 769, FP32)], ids=str)
def test_magnitudes(case, norm, generator, scale):
    """The squares are near the largest and below the smallest fp32 number."""
    inputs = make_inputs(case, generator, 99 * case.n)
    with torch.no_grad():
        inputs.x.mul_(scale)
    check(call_and_differentiate(norm, case, inputs), oracle(case, inputs))


def test_small_offset_weights(norm, generator):
    """1 + w in bf16 would lose most of a w near 0.02; it is added in fp32."""
    case = Case("rms", 4096, weight_offset=1.0)
    inputs = make_inputs(case, generator, 99 * 4096)
    y, exact = norm("rms", inputs.x, inputs.weight, **case.options).double(), oracle(case, inputs)["y"].value
    rounded_first = (inputs.weight.detach() + 1.0).float()
    wrong = OPS["rms"](inputs.x.detach().float(), rounded_first, eps=EPS, backend="reference").to(BF16)
    assert (wrong.double() - exact).norm() > 1.2 * (y - exact).norm()


@pytest.mark.parametrize(
    "case", [Case(kind, n, weight=FP32, bias=FP32, save="output") for kind in KINDS for n in (769, 4096)], ids=str
)
def test_weights_that_cannot_be_divided_by(case, norm, generator):
    """save="output" divides by the weight: where it is 0, dw is 0, and x_hat is missing from dx; the rest is right.

    The bias has more digits than y: y less the bias is not 0 there, and would be divided by eps.
    """
    inputs = make_inputs(case, generator, 99 * case.n)
    with torch.no_grad():
        inputs.weight[0:8] = 0.0
        inputs.weight[8:16] = -0.0
        inputs.weight[16:24] = 1e-7
        inputs.weight[24:32] = -1e-7
        inputs.weight[32:64] *= -1.0
        inputs.bias[16:32] = 0.0
    found, exact = call_and_differentiate(norm, case, inputs), oracle(case, inputs)
    assert all(result.isfinite().all() for result in found.values())
    check(found, exact)
    assert torch.equal(found["dw"][:16], torch.zeros_like(found["dw"][:16]))
    # |w| counts as eps at least, so the dw of a tiny weight is too small by that factor, with the right sign
    tiny = exact["dw"].value[16:32] * (1e-7 / EPS)
    assert (found["dw"][16:32] - tiny).norm() < 0.02 * tiny.norm()


@pytest.mark.parametrize("case", [Case("rms", 1024), Case("layer", 769, weight=FP32, bias=FP32)], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_bad_row_stays_alone(case, norm, generator, poison):
    """NaN or infinity in one row of x, or of dy, is not in another row of y or dx."""
    inputs = make_inputs(case, generator, 65 * case.n)
    good = call_and_differentiate(norm, case, inputs)
    rows = [row for row in range(65) if row not in (5, 40)]
    with torch.no_grad():
        inputs.x[5, 17] = poison
    inputs.dy = inputs.dy.clone()
    inputs.dy[40, 3] = poison
    bad = call_and_differentiate(norm, case, inputs)
    assert torch.equal(bad["y"][rows], good["y"][rows]) and torch.equal(bad["y"][40], good["y"][40])
    assert torch.equal(bad["dx"][rows], good["dx"][rows])
    for result in (bad["y"][5], bad["dx"][5], bad["dx"][40]):
        assert not result.isfinite().all()


@pytest.mark.parametrize("kind, n", [("rms", 5), ("layer", 24)])
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradcheck(kind, n, norm, generator, device):
    """Central differences in fp32; undefined incoming gradients; the same bits each time."""

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, device=device)).requires_grad_()

    def function(x, weight, bias, residual):
        return norm(kind, x, weight, bias, residual=residual, eps=1e-2, return_residual=True)

    tensors = (randn(3, n, scale=3.0), randn(n), randn(n), randn(3, n))
    assert torch.autograd.gradcheck(function, tensors, eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0)


# Rows that stay on 16 bytes, that do not, a first row that does not begin there, both; narrow, wide, clustered rows
LAYOUTS = [(1024, 0), (8, 8), (1, 0), (0, 1), (4, 2)]
BY_LAYOUT = [
    replace(case, gap=gap, offset=offset)
    for case in (
        Case("rms", 64),
        Case("rms", 4096, residual=BF16, dh=True),
        Case("layer", 769, weight=FP32, bias=FP32),
        Case("layer", 32768, weight=FP32, bias=FP32),
    )
    for gap, offset in LAYOUTS
]
# Many rows of 16 bytes that do not follow each other; one row of a wider matrix
BY_LAYOUT += [
    Case("rms", 8, gap=8, rows=3001),
    Case("layer", 4, FP32, weight=FP32, bias=FP32, gap=12, rows=3001),
    Case("rms", 1024, rows=1, gap=480),
    Case("rms", 1024, rows=1, gap=476, offset=3),
]


@pytest.mark.parametrize("case", BY_LAYOUT, ids=str)
def test_strided_rows(case, norm, generator):
    inputs = make_inputs(case, generator, 99 * case.n)
    found = call_and_differentiate(norm, case, inputs)
    assert all(result.is_contiguous() for result in found.values())
    check(found, oracle(case, inputs))


def test_a_transposed_column(norm, generator, device):
    """One column: the stride of the last dimension means nothing."""
    x = torch.randn(1, 77, generator=generator, device=device).t()
    assert x.stride() == (1, 77)
    y = norm("rms", x, None, torch.ones(1, device=device), eps=1e-6)
    assert torch.allclose(y, x / (x.square() + 1e-6).sqrt() + 1.0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 77])
def test_a_sign_that_is_not_in_memory(rows, norm, generator, device):
    """One column, too: torch negates a conjugate's imaginary part where it reads it."""
    pairs = torch.randn(3, rows, 1, dtype=torch.complex64, generator=generator, device=device)
    parts = [pair.imag for pair in pairs.conj()]
    assert all(part.is_neg() and part.stride() == (2, 2) for part in parts)
    results = []
    for x, residual, dy in (parts, [part.resolve_neg() for part in parts]):
        x, weight = x.detach().requires_grad_(), torch.ones(1, device=device, requires_grad=True)
        y, h = norm("rms", x, weight, residual=residual, return_residual=True)
        results.append([y, h, *torch.autograd.grad([y, h], [x, weight], [dy, dy])])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", [Case("layer", 4096, bias=BF16)], ids=str)
def test_unaligned_parameters(case, norm, generator):
    """weight and bias that do not begin on 16 bytes."""
    inputs = make_inputs(case, generator, 33 * 4096)
    for name in ("weight", "bias"):
        vector = getattr(inputs, name).detach()
        setattr(inputs, name, strided(vector[None], 0, offset=1)[0].requires_grad_())
    check(call_and_differentiate(norm, case, inputs), oracle(case, inputs))


@pytest.mark.parametrize("case", [Case("rms", 128), Case("layer", 4096, weight=FP32, bias=FP32)], ids=str)
def test_layout_of_the_incoming_gradient(case, norm, generator):
    """Transposed, expanded from a row or from a number, part of a wider matrix."""
    inputs = make_inputs(case, generator, 128 * case.n)
    rows, n = inputs.x.shape
    columns = torch.randn(n, rows, generator=generator, device=generator.device).to(BF16)
    row = columns[:, 0].contiguous().expand(rows, n)
    for dy in (columns.t(), row, row[:1, :1].expand(rows, n), strided(columns.t(), gap=8)):
        inputs.dy = dy
        check(call_and_differentiate(norm, case, inputs), oracle(case, inputs))


@pytest.mark.parametrize("case", [Case("rms", 128)], ids=str)
def test_gradient_of_a_batch_of_sequences(case, norm, generator):
    """x of four dimensions, dy transposed as attention leaves it."""
    inputs = make_inputs(replace(case, rows=24), generator)
    x = inputs.x.detach().view(2, 3, 4, 128).requires_grad_()
    dy = inputs.dy.view(2, 4, 3, 128).transpose(1, 2)
    norm("rms", x, inputs.weight, **case.options).backward(dy)
    norm("rms", inputs.x, inputs.weight, **case.options).backward(dy.reshape(24, 128))
    assert torch.equal(x.grad.view(24, 128), inputs.x.grad)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual"])
def test_one_gradient_alone(wanted, norm, generator):
    case = Case("layer", 1024, bias=BF16, residual=FP32, dh=True)
    inputs = make_inputs(case, generator, 65 * 1024)
    for name in ("x", "weight", "bias", "residual"):
        getattr(inputs, name).requires_grad_(name == wanted)
    found = call_and_differentiate(norm, case, inputs)
    assert found.keys() == {"y", "h", {"x": "dx", "weight": "dw", "bias": "db", "residual": "dresidual"}[wanted]}
    check(found, oracle(case, inputs))
