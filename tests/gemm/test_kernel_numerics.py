"""Results of mm and linear, forward and backward, against fp64.

Sizes meet each part of the kernels: tiles that are full, cut in M, N and K, less than one k16 step; operands that TMA
can and cannot read; each dtype, bias and activation with an aligned and an unaligned kernel.
"""

import pytest
import torch

from cute_kernels import linear, mm
from tests.gemm.cases import (
    ACTIVATIONS,
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    Case,
    Exact,
    Inputs,
    assert_same_bits,
    check,
    check_gates,
    exact_activation,
    make_inputs,
    operands,
    oracle,
    oracle_mm,
    randn,
    run,
    same_bits,
    steps_of,
)

pytestmark = pytest.mark.usefixtures("gemms_precompiled")

BY_SIZE = [
    Case(300, 264, 200),
    Case(5, 264, 200),
    Case(64, 1032, 72),
    Case(257, 136, 512),
    *(Case(65, 96, k) for k in (1, 3, 5, 8, 16, 17, 24, 63, 65, 100, 769)),
    *(Case(65, n, 64) for n in (1, 2, 7, 33, 97)),
    *(Case(m, 96, 64) for m in (1, 2, 7, 8, 9)),
    Case(1, 1, 1),
]
BY_EPILOGUE = [
    *(Case(300, 264, 200, bias=bias) for bias in (BF16, FP16, FP32)),
    *(Case(300, 264, 200, bias=BF16, activation=activation) for activation in ACTIVATIONS),
    *(Case(20, 520, 200, bias=FP32, activation=activation, out=FP32) for activation in ACTIVATIONS),
    *(Case(65, 97, 100, bias=FP16, activation=activation, out=FP16) for activation in ACTIVATIONS),
    # Operands that TMA can read, a result that it cannot store
    *(Case(300, 265, 200, bias=BF16, activation=activation) for activation in (None, *ACTIVATIONS)),
    *(Case(300, 265, 200, bias=FP32, activation=activation, out=FP32) for activation in (None, "gelu")),
    Case(300, 264, 200, FP16, bias=FP16, activation="gelu"),
    Case(300, 264, 200, FP16, out=BF16, activation="silu"),
    *(Case(300, 264, 200, dtype, out=out) for dtype in (BF16, FP16) for out in (BF16, FP16, FP32)),
    Case(5, 97, 100, FP16, out=FP32),
]
BY_MEMORY = [
    Case(300, 264, 200, x_gap=8, w_gap=16, dy_gap=24),
    Case(300, 264, 200, x_gap=3, w_gap=1, dy_gap=5, bias=FP32),
    Case(300, 264, 200, offset=8),
    *(Case(65, 96, 64, offset=offset, bias=BF16, activation="silu") for offset in (1, 2, 4)),
    Case(7, 96, 64, x_gap=8, w_gap=8, dy_gap=8),
    Case(65, 97, 63, x_gap=1, w_gap=1, dy_gap=7),  # gaps make the rows of odd sizes aligned
]


@pytest.mark.parametrize("case", [*BY_SIZE, *BY_EPILOGUE, *BY_MEMORY], ids=str)
def test_linear(case, generator):
    inputs = make_inputs(case, generator)
    found = run(linear, case, inputs)
    assert found["y"].dtype is (case.out or case.dtype) and found["y"].is_contiguous()
    assert found.keys() == {"y", *inputs.leaves}
    for name, leaf in inputs.leaves.items():
        assert found[name].dtype is leaf.dtype and found[name].shape == leaf.shape
    check(found, oracle(case, inputs))


@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_mm(layout, out, generator):
    """All layouts, both gradients; also the share of results that are the exact ones rounded, or fp32's rms error."""
    dtype = FP16 if out is FP16 else BF16
    for m, n, k in ((304, 264, 200), (16, 520, 768), (520, 24, 768), (33, 35, 77)):
        a, b = operands(randn(m, k, generator=generator).to(dtype), randn(k, n, generator=generator).to(dtype), layout)
        dy = randn(m, n, generator=generator).to(dtype).to(out)  # so that dy as a factor is exact
        y = mm(a.requires_grad_(), b.requires_grad_(), out_dtype=out)
        da, db = torch.autograd.grad(y, (a, b), dy)
        assert y.dtype is out and y.is_contiguous() and da.dtype is db.dtype is dtype
        exact = {"y": oracle_mm(a, b), "da": oracle_mm(dy, b.t()), "db": oracle_mm(a.t(), dy)}
        found = {"y": y.detach(), "da": da, "db": db}
        check(found, exact)
        if m * n > 10000:
            for name, result in found.items():
                check_gates(name, result, exact[name])


@pytest.mark.parametrize("out", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("m", [16, 2048])
def test_long_sums(m, out, generator):
    """K = 14336, forward; 2048 tokens, backward."""
    case = Case(m, 512, 14336, out=out)
    inputs = make_inputs(case, generator)
    found, exact = run(linear, case, inputs), oracle(case, inputs)
    check(found, exact)
    gated = found if out is BF16 else {"y": found["y"]}
    for name, result in gated.items():
        check_gates(name, result, exact[name])


@pytest.mark.parametrize("view", ["columns", "both", "transposed", "backwards"])
def test_strided_views(view, generator):
    """Operands without neighbouring elements, and of strides that no tile can be read by."""
    m, n, k = 72, 40, 48
    big = randn(4 * m, 4 * max(k, n), generator=generator).to(BF16)
    x, weight = {
        "columns": (big[:m, : 2 * k : 2], big[m : m + n, : 3 * k : 3]),
        "both": (big[: 2 * m : 2, : 2 * k : 2], big[1 : 3 * n : 3, 1 : 2 * k : 2]),
        "transposed": (big[:k, :m].t(), big[: 2 * k : 2, : 2 * n : 2].t()),
        "backwards": (big[:1, :k].expand(m, k), big[:n, :1].expand(n, k)),  # strides of 0
    }[view]
    dy = big[:n, :m].t()
    leaves = x.requires_grad_(), weight.detach().requires_grad_()
    y = linear(*leaves)
    gradients = torch.autograd.grad(y, leaves, dy)
    exact = {"y": oracle_mm(x, weight.t()), "dx": oracle_mm(dy, weight), "dw": oracle_mm(dy.t(), x)}
    check(dict(zip(exact, (y.detach(), *gradients), strict=True)), exact)


def test_dimensions_of_x(generator):
    """1-D, 3-D, 4-D, and 3-D with a gap behind each row: the bits of the matrix."""
    weight, bias = randn(96, 64, generator=generator).to(BF16).requires_grad_(), randn(96, generator=generator)
    wide = randn(2, 3, 5, 80, generator=generator).to(BF16)
    for x in (wide[0, 0, 0, :64].contiguous(), wide[0, ..., :64], wide[..., :64], wide[..., :64].contiguous()):
        leaf = x.detach().requires_grad_()
        rows = x.detach().reshape(-1, 64).requires_grad_()
        y, wanted = (linear(t, weight, bias, activation="silu") for t in (leaf, rows))
        assert y.shape == (*x.shape[:-1], 96)
        dy = randn(*y.shape, generator=generator).to(BF16)
        found = torch.autograd.grad(y, (leaf, weight), dy)
        expected = torch.autograd.grad(wanted, (rows, weight), dy.reshape(-1, 96))
        assert found[0].shape == x.shape
        for one, two in zip((y.detach(), *found), (wanted.detach(), *expected), strict=True):
            assert_same_bits(one.reshape(two.shape), two)


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("out", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("m, n, k", [(300, 264, 200), (5, 520, 64), (33, 35, 77)], ids=str)
def test_out(m, n, k, out, gap, generator):
    """Written to, and nothing around it."""
    a, b = randn(m, k, generator=generator).to(BF16), randn(k, n, generator=generator).to(BF16)
    memory = torch.full((m + 2, n + gap), -7.0, dtype=out, device=a.device)
    target = memory[1:-1, :n]
    for options in ({}, {"out_dtype": out}):
        target.fill_(float("nan"))
        assert mm(a, b, out=target, **options) is target
        assert_same_bits(target, mm(a, b, out_dtype=out))
    target.fill_(-7.0)
    assert (memory == -7.0).all()


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_special_values(activation, generator):
    """Rows of zeros, infinities, NaN and of the largest numbers end as torch's activations of them do."""
    case = Case(64, 96, 64, activation=activation)
    inputs = make_inputs(case, generator)
    weight = inputs.weight.detach().abs()
    x = torch.zeros_like(inputs.x).detach()
    for row, value in enumerate((0.0, float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1.0, -1.0, 30.0, -30.0)):
        x[row] = value
    y = linear(x, weight, activation=activation)
    z = mm(x, weight.t(), out_dtype=FP32)
    torch.testing.assert_close(y, exact_activation(z, activation).to(BF16), equal_nan=True, rtol=0.0079, atol=1e-6)
    if activation is None:
        assert same_bits(y[10:], torch.zeros_like(y[10:])), "sums of zeros are +0"


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_of_every_bf16_number(activation, device):
    """Each sum is one number: the fp32 result is within 5e-6 of it, where torch's gelu in fp32 cancels."""
    z = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(BF16)
    z = z[z.isfinite()]
    x, weight = torch.zeros(len(z), 8, dtype=BF16, device=device), torch.zeros(8, 8, dtype=BF16, device=device)
    x[:, 0], weight[:, 0] = z, 1.0
    y = linear(x, weight, activation=activation, out_dtype=FP32)
    assert same_bits(y, y[:, :1].expand_as(y))
    found, z = y[:, 0].double(), z.double()
    wanted = z * (torch.sigmoid(z) if activation == "silu" else torch.special.ndtr(z))
    # Beyond -5.5 the polynomial is none of gelu's; beyond -87 a sigmoid is below the normal numbers, and counts as 0
    error = (found - wanted).abs() / wanted.abs().clamp_min({"silu": 1e-30, "gelu": 1e-7}[activation])
    assert error.max() <= 5e-6


# Empty dimensions, and many elements


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("m, n, k", [(0, 96, 64), (65, 0, 64), (65, 96, 0), (0, 0, 0), (0, 96, 0)], ids=str)
def test_empty(m, n, k, activation, generator):
    """K = 0: y = act(bias), and dbias as ever. No tokens: zero gradients, and main_grad stays what it is."""
    case = Case(m, n, k, bias=FP32, activation=activation)
    inputs = make_inputs(case, generator)
    found = run(linear, case, inputs)
    shapes = {"y": (m, n), "dx": (m, k), "dw": (n, k), "db": (n,)}
    assert {name: tuple(result.shape) for name, result in found.items()} == shapes
    bias = inputs.bias.detach()
    if k == 0:
        assert_same_bits(found["y"], exact_activation(bias, activation).to(BF16).expand(m, n).contiguous())
        check({"db": found["db"]}, oracle_without_k(case, inputs))
        assert_same_bits(mm(inputs.x.detach(), inputs.weight.detach().t()), torch.zeros_like(found["y"]))
    if m == 0:
        assert not found["dw"].any() and not found["db"].any()
    assert n or not found["dx"].any()
    start = randn(n, k, generator=generator), randn(n, generator=generator)
    inputs.weight.main_grad, inputs.bias.main_grad = (t.clone() for t in start)
    linear(inputs.x, inputs.weight, inputs.bias, **case.options).backward(inputs.dy)
    assert_same_bits(inputs.weight.main_grad, start[0])  # k == 0 or no tokens: nothing to add
    assert m > 0 or same_bits(inputs.bias.main_grad, start[1])
    assert inputs.weight.grad is inputs.bias.grad is None


def oracle_without_k(case, inputs):
    z = inputs.bias.detach().to(BF16).double().expand(case.m, case.n).requires_grad_()
    (dz,) = torch.autograd.grad(exact_activation(z, case.activation).sum(), z)
    dz = dz * inputs.dy.double()
    return {"db": Exact(dz.sum(0), dz.abs().sum(0), steps_of(case.m), 2e-2 * dz.abs().sum(0))}


def test_more_than_2_31_elements(generator):
    """Logits of 16384 tokens over 151936 words, forward and backward: their last rows and columns, and around 2^31."""
    m, n, k = 16384, 151936, 64
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    x = randn(m, k, generator=generator, dtype=BF16).requires_grad_()
    weight = randn(n, k, generator=generator, dtype=BF16).requires_grad_()
    dy = randn(m, n, generator=generator, dtype=BF16)
    y = linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    y = y.detach()
    for rows in (
        slice(0, 4),
        slice(2**31 // n - 2, 2**31 // n + 3),
        slice(2**30 // n, 2**30 // n + 2),
        slice(m - 5, m),
    ):
        exact = {"y": oracle_mm(x[rows], weight.t()), "dx": oracle_mm(dy[rows], weight)}
        check({"y": y[rows], "dx": dx[rows]}, exact)
    for columns in (slice(0, 4), slice(n - 5, n)):
        check({"dw": dw[columns]}, {"dw": oracle_mm(dy[:, columns].t(), x)})


def test_more_than_2_31_elements_by_columns(generator):
    """The same sizes where neither operand nor result starts on 16 bytes: the kernel for any stride."""
    m, n = 2**31 // 65537 + 40, 65537
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    a, b = randn(m, 17, generator=generator).to(BF16), randn(17, n, generator=generator).to(BF16)
    y = mm(a, b)
    check({"y": y[-5:]}, {"y": oracle_mm(a[-5:], b)})
    last = mm(y[-3:].contiguous(), b.t())
    assert_same_bits(mm(y, b.t())[-3:], last)


def test_inputs_are_left_alone(generator):
    """No operand is written to: neither by the transposed nor by the plain kernel, nor by the backward."""
    for m in (4, 300):
        case = Case(m, 264, 200, bias=FP32, activation="relu")
        inputs = make_inputs(case, generator)
        before = [t.detach().clone() for t in (inputs.x, inputs.weight, inputs.bias, inputs.dy)]
        run(linear, case, inputs)
        after = Inputs(*(t.detach() for t in (inputs.x, inputs.weight, inputs.bias, inputs.dy)))
        for one, two in zip(before, (after.x, after.weight, after.bias, after.dy), strict=True):
            assert_same_bits(two, one)
