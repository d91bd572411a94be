"""Bitwise: the same call again, and a row of y or dx alone or among others. The contract is rms_norm's."""

import pytest
import torch

from tests.norm.cases import BF16, FP32, Case, Inputs, call_and_differentiate, make_inputs, strided

# Packed narrow rows, rows of several warps, rows off 16 bytes, rows of a cluster, rows read twice
CASES = [
    *(Case("rms", n) for n in (64, 769, 1024, 4096, 10007, 16384, 100001, 151643, 262144)),
    *(Case("layer", n, weight=FP32, bias=FP32) for n in (64, 769, 1024, 4096, 16384, 32768, 50257, 61229, 151643)),
    Case("rms", 64, residual=BF16, dh=True),
    Case("rms", 4096, residual=FP32, dh=True),
    Case("layer", 769, bias=BF16, residual=BF16, dh=True),
    Case("rms", 4096, weight=FP32, save="output"),
]
ROWS = 8192


def rows_of(case: Case, inputs: Inputs, begin: int, end: int) -> Inputs:
    """A batch of its own, in memory of its own, of these rows."""
    parts = {}
    for name in ("x", "residual", "dy", "dh"):
        tensor = getattr(inputs, name)
        parts[name] = None if tensor is None else tensor.detach()[begin:end].clone()
    for name in ("x", "residual"):
        if parts[name] is not None:
            parts[name].requires_grad_()
    return Inputs(weight=inputs.weight, bias=inputs.bias, **parts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_call_again(case, norm, generator, device):
    """All results, dw and db included; other kernels between the calls, other addresses."""
    inputs = make_inputs(case, generator, 2**22 + 3 * case.n)
    first = call_and_differentiate(norm, case, inputs)
    for attempt in range(3):
        shift = torch.empty(1000 + 777 * attempt, device=device)
        again = call_and_differentiate(norm, case, rows_of(case, inputs, 0, len(inputs.x)))
        del shift
        for name, result in first.items():
            assert torch.equal(again[name], result), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_does_not_know_its_batch(case, norm, generator):
    rows = min(ROWS, 2**28 // case.n)
    inputs = make_inputs(case, generator, rows * case.n)
    rows = len(inputs.x)
    whole = call_and_differentiate(norm, case, inputs)
    for size in (1, 7, 512):
        for begin in (0, 1, rows // 2 + 5, rows - size):
            part = call_and_differentiate(norm, case, rows_of(case, inputs, begin, begin + size))
            for name in part.keys() - {"dw", "db"}:
                assert torch.equal(part[name], whole[name][begin : begin + size]), f"{name}, {size} rows from {begin}"


@pytest.mark.parametrize("case", [Case("rms", 64), Case("layer", 769, weight=FP32, bias=FP32)], ids=str)
def test_a_row_does_not_know_its_address(case, norm, generator):
    """Views of a batch: at 769 columns each row begins elsewhere in its 16 bytes."""
    inputs = make_inputs(case, generator, 100 * case.n)
    whole = call_and_differentiate(norm, case, inputs)
    for begin in range(20):
        x = inputs.x.detach()[begin : begin + 3].requires_grad_()
        y = norm(case.kind, x, inputs.weight, inputs.bias, **case.options)
        y.backward(inputs.dy[begin : begin + 3])
        assert torch.equal(y, whole["y"][begin : begin + 3]) and torch.equal(x.grad, whole["dx"][begin : begin + 3])


ODD = [
    Case("rms", 1001),
    Case("layer", 2235, bias=BF16),
    Case("layer", 10007, bias=BF16, residual=BF16, dh=True),
    Case("rms", 10007, FP32, weight=FP32),
    Case("layer", 16383, bias=BF16),
    Case("layer", 50257, weight=FP32, bias=FP32),
    Case("rms", 151643),
]


@pytest.mark.parametrize("case", ODD, ids=str)
def test_an_odd_row_has_the_same_bits_wherever_it_begins(case, norm, generator):
    """At each place in 16 bytes, NaN around it; in a batch each of its rows begins at another one, as dx's do."""
    inputs = make_inputs(case, generator, 9 * case.n)
    whole = call_and_differentiate(norm, case, inputs)
    for offset in range(8):
        part = rows_of(case, inputs, 0, len(inputs.x))
        for name in ("x", "residual", "dy", "dh"):
            tensor = getattr(part, name)
            if tensor is not None:
                moved = strided(tensor.detach(), -case.n % 8, offset)
                setattr(part, name, moved.requires_grad_(name in ("x", "residual")))
        for name, result in call_and_differentiate(norm, case, part).items():
            assert torch.equal(result, whole[name]), f"{name}, {offset} elements from 16 bytes"


@pytest.mark.parametrize(
    "case", [*CASES[:2], *(Case("layer", n, weight=FP32, bias=FP32) for n in (769, 4096))], ids=str
)
def test_y_does_not_depend_on_training(case, norm, generator):
    """With and without autograd: the statistics are stored or not."""
    inputs = make_inputs(case, generator, 100 * case.n)
    trained = norm(case.kind, inputs.x, inputs.weight, inputs.bias, **case.options)
    with torch.no_grad():
        inferred = norm(case.kind, inputs.x, inputs.weight, inputs.bias, **case.options)
    assert torch.equal(trained, inferred)


FEW_ROWS = 5  # each has a cluster of its own, of one team
WIDE = [
    *(Case(kind, n, weight=FP32, bias=FP32) for kind in ("rms", "layer") for n in (98312, 151936, 262144)),
    Case("rms", 200704, residual=BF16, dh=True),
    Case("layer", 131072, weight=None, bias=FP32),
    Case("layer", 151936, FP32, weight=FP32, bias=BF16),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_gradients_of_few_wide_rows_are_added_in_order(case, norm, generator):
    """dw and db have the bits of a chain of the rows' own, ascending; NaN of one column stays there."""
    inputs = make_inputs(case, generator, FEW_ROWS * case.n)
    inputs.dy[2, 7] = float("nan")
    whole = call_and_differentiate(norm, case, inputs)
    alone = [call_and_differentiate(norm, case, rows_of(case, inputs, i, i + 1)) for i in range(FEW_ROWS)]
    for name in {"dw", "db"} & whole.keys():
        total = torch.zeros(case.n, device=whole[name].device)
        for row in alone:
            total += row[name]
        if whole[name].dtype is FP32:  # a row's own sums are rounded to bf16
            assert torch.equal(whole[name].nan_to_num(), total.nan_to_num()), name
        assert whole[name].isnan().nonzero().flatten().tolist() == [7], name


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_gradients_of_few_wide_rows_have_the_bits_of_partial_sums(case, norm, generator):
    """More rows behind them, whose dy is zero: each cluster has several and writes what it summed."""
    inputs = make_inputs(case, generator, 45 * case.n)
    inputs.dy[FEW_ROWS:] = 0.0
    if inputs.dh is not None:
        inputs.dh[FEW_ROWS:] = 0.0
    more = call_and_differentiate(norm, case, inputs)
    few = call_and_differentiate(norm, case, rows_of(case, inputs, 0, FEW_ROWS))
    assert few.keys() == more.keys() and {"dw", "db"} & few.keys()
    for name, found in few.items():
        wanted = more[name] if name in ("dw", "db") else more[name][:FEW_ROWS]
        assert torch.equal(found, wanted), name


def test_few_wide_rows_behind_each_other(norm, generator):
    """The kernels of one layer's backward begin while those of the layer above it run, which write their dy."""
    case = Case("layer", 262144, weight=FP32, bias=FP32)
    inputs = make_inputs(case, generator, FEW_ROWS * case.n)
    leaves = inputs.x, inputs.weight, inputs.bias

    def layer(x):
        return norm("layer", x, inputs.weight, inputs.bias, **case.options)

    lower = layer(inputs.x)
    upper = lower.detach().requires_grad_()
    (dy,) = torch.autograd.grad(layer(upper), [upper], inputs.dy)
    torch.cuda.synchronize()
    of_lower = torch.autograd.grad(layer(inputs.x), leaves, dy)
    of_upper = torch.autograd.grad(layer(upper), leaves[1:], inputs.dy)
    for _ in range(10):
        detached = [t.detach().requires_grad_() for t in leaves[1:] * 2]
        y = norm("layer", inputs.x, *detached[:2], **case.options)
        y = norm("layer", y, *detached[2:], **case.options)
        found = torch.autograd.grad(y, [inputs.x, *detached], inputs.dy)
        for result, wanted in zip(found, [*of_lower, *of_upper], strict=True):
            assert torch.equal(result, wanted)
