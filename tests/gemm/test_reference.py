"""The references of mm and linear against torch and against fp64; the tests' own oracle and checks."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import cute_kernels
from cute_kernels import nn
from cute_kernels.gemm import reference
from cute_kernels.gemm.reference import linear, mm
from tests.gemm.cases import (
    ACTIVATIONS,
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    Case,
    assert_same_bits,
    bits,
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
    strided,
    wide_range,
)

FP64 = torch.float64
EACH_ACTIVATION = [None, *ACTIVATIONS]


@pytest.mark.parametrize("activation", EACH_ACTIVATION)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(9,), (2, 3, 9), (9,)[:0]], ids=["2-D", "4-D", "1-D"])
def test_linear_is_torch_s_in_fp64(activation, bias, shape, generator):
    x = randn(*shape, 7, generator=generator, dtype=FP64).requires_grad_()
    weight = randn(5, 7, generator=generator, dtype=FP64).requires_grad_()
    leaves = [x, weight] + [randn(5, generator=generator, dtype=FP64).requires_grad_()] * bias
    dy = randn(*shape, 5, generator=generator, dtype=FP64)
    found = linear(*leaves, activation=activation)
    wanted = exact_activation(F.linear(*leaves), activation)
    torch.testing.assert_close(found, wanted)
    for one, two in zip(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_mm_is_torch_s_in_fp64(layout, generator):
    a, b = operands(randn(9, 7, generator=generator, dtype=FP64), randn(7, 5, generator=generator, dtype=FP64), layout)
    dy = randn(9, 5, generator=generator, dtype=FP64)
    leaves = [a.requires_grad_(), b.requires_grad_()]
    found, wanted = mm(a, b), a @ b
    torch.testing.assert_close(found, wanted)
    for one, two in zip(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("activation", EACH_ACTIVATION)
def test_gradcheck_in_fp64(activation, generator):
    x, weight, bias = (
        randn(*shape, generator=generator, dtype=FP64).requires_grad_() for shape in ((4, 6), (3, 6), (3,))
    )
    assert torch.autograd.gradcheck(lambda *leaves: linear(*leaves, activation=activation), (x, weight, bias))


CASES = [
    Case(65, 40, 129),
    Case(33, 7, 5, FP16, bias=FP16),
    Case(64, 48, 64, bias=FP32, activation="relu"),
    Case(64, 48, 64, bias=BF16, activation="silu"),
    Case(64, 48, 64, bias=BF16, activation="gelu", out=FP32),
    Case(64, 48, 64, FP16, activation="gelu"),
    Case(64, 48, 64, FP16, out=BF16, activation="silu"),
    Case(65, 40, 129, out=FP32, x_gap=3, w_gap=1, dy_gap=2, offset=1),
    Case(1, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_within_the_bounds_of_the_kernels(case, generator):
    inputs = make_inputs(case, generator)
    found = run(linear, case, inputs)
    assert found["y"].dtype is (case.out or case.dtype) and found["dw"].dtype is case.dtype
    assert case.bias is None or found["db"].dtype is case.bias
    check(found, oracle(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_against_torch_in_fp64(case, generator):
    inputs = make_inputs(case, generator)
    exact = oracle(case, inputs)
    leaves = [leaf.detach().double().requires_grad_() for leaf in inputs.leaves.values()]
    y = exact_activation(F.linear(*leaves), case.activation)
    wanted = dict(zip(inputs.leaves, torch.autograd.grad(y, leaves, inputs.dy.double()), strict=True)) | {"y": y}
    for name, value in wanted.items():
        torch.testing.assert_close(exact[name].value, value.detach())
        assert (exact[name].terms >= value.detach().abs() * (1 - 1e-12)).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_sees_the_rounded_z(activation, generator):
    """As the kernels: what is saved is z in y's dtype, dz is rounded to x's dtype, and both products take that."""
    inputs = make_inputs(Case(64, 48, 64, bias=FP32), generator)
    x, weight, dy = inputs.x.detach().float(), inputs.weight.detach().float(), inputs.dy.float()
    z = (x @ weight.t() + inputs.bias.detach()).to(BF16).float()
    dz = reference.activation_gradient(dy, z, activation).to(BF16).float()
    found = run(linear, Case(64, 48, 64, activation=activation), inputs)
    assert_same_bits(found["dx"], (dz @ weight).to(BF16), "dx")
    assert_same_bits(found["dw"], (dz.t() @ x).to(BF16), "dw")
    assert_same_bits(found["db"], dz.sum(0), "db")


@pytest.mark.parametrize("valid", [0, 1, 17, 64])
def test_tokens_beyond_the_valid_ones(valid, generator):
    """NaN in x and in dy there changes neither dw nor db; y and dx are those of all rows."""
    case = Case(64, 48, 40, bias=FP32)
    inputs = make_inputs(case, generator)
    exact = oracle(case, inputs, valid)
    clean = run(linear, case, inputs)
    with torch.no_grad():
        inputs.x[valid:], inputs.dy[valid:] = float("nan"), float("inf")
    found = run(linear, case, inputs, num_valid_tokens=torch.full((1,) * (valid % 4), valid, dtype=torch.int32))
    check({name: found[name] for name in ("dw", "db")}, exact)
    for name in ("y", "dx"):
        torch.testing.assert_close(found[name][:valid], clean[name][:valid])
        assert found[name][valid:].isnan().all()


def test_main_grad_is_added_to(generator):
    case = Case(64, 48, 40, bias=BF16)
    inputs = make_inputs(case, generator)
    exact = oracle(case, inputs)
    inputs.weight.main_grad = randn(48, 40, generator=generator)
    inputs.bias.main_grad = torch.zeros(48)
    start = inputs.weight.main_grad.clone()
    for times in (1, 2):
        linear(inputs.x, inputs.weight, inputs.bias).backward(inputs.dy)
        assert inputs.weight.grad is inputs.bias.grad is None
        wanted = start.double() + times * exact["dw"].value
        torch.testing.assert_close(inputs.weight.main_grad.double(), wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(inputs.bias.main_grad.double(), times * exact["db"].value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
def test_empty(m, n, k, generator):
    """No token: zero gradients. K = 0: y = act(bias)."""
    inputs = make_inputs(Case(m, n, k, bias=FP32), generator)
    found = run(linear, Case(m, n, k, activation="gelu"), inputs)
    assert found["y"].shape == (m, n) and found["dx"].shape == (m, k) and found["dw"].shape == (n, k)
    assert not found["dw"].any() or m
    assert not found["dx"].any() or n
    if k == 0:
        assert torch.equal(found["y"], F.gelu(inputs.bias.detach()).to(BF16).expand(m, n))
    assert torch.equal(mm(inputs.x.detach(), inputs.weight.detach().t()), torch.zeros(m, n, dtype=BF16)) or k


def test_autocast_changes_nothing(generator):
    """Forward, backward and ``out``: no product in the 16 bits that autocast would have it in."""
    case = Case(65, 96, 64, bias=FP32, activation="gelu", out=FP32)
    inputs = make_inputs(case, generator)

    def results():
        out = torch.empty(65, 96)
        mm(inputs.x.detach(), inputs.weight.detach().t(), out=out)
        return run(linear, case, inputs) | {"out": out}

    wanted = results()
    with torch.autocast("cpu", dtype=BF16):
        found = results()
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)


MODULE = nn.Linear(64, 32, dtype=BF16)
TRACED = {  # a function, and the shapes of its arguments for m tokens
    "linear": (cute_kernels.linear, lambda m: ((m, 64), (32, 64), (32,))),
    "linear, 3-D": (cute_kernels.linear, lambda m: ((m, m + 1, 64), (32, 64))),
    "linear along K": (cute_kernels.linear, lambda m: ((16, m), (32, m))),
    "nn.Linear": (lambda x: MODULE(x), lambda m: ((m, 64),)),
    "mm": (cute_kernels.mm, lambda m: ((m, 64), (64, 32))),
    "mm along K": (cute_kernels.mm, lambda m: ((16, m), (m, 32))),
}


@pytest.mark.parametrize("name", TRACED)
def test_one_graph_for_every_number_of_tokens(name, generator):
    """After the first, which torch traces with its own sizes; with the gradients of all arguments."""
    function, shapes = TRACED[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for m in (3, 5, 9, 17):
        arguments = [randn(*shape, generator=generator).to(BF16).requires_grad_() for shape in shapes(m)]
        y, wanted = compiled(*arguments), function(*arguments)
        assert_same_bits(y, wanted)
        for t in (y, wanted):
            gradients = torch.autograd.grad(t.sum(), arguments)
            assert [g.shape for g in gradients] == [a.shape for a in arguments]
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["linear", "linear, 3-D", "nn.Linear", "mm"])
def test_export_of_any_number_of_tokens(name, generator):
    function, shapes = TRACED[name]
    x, *others = (randn(*shape, generator=generator).to(BF16) for shape in shapes(5))

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x, *others)

    tokens = {i: torch.export.Dim(f"m{i}", max=4096) for i in range(x.dim() - 1)}
    with torch.no_grad():
        program = torch.export.export(Model(), (x,), dynamic_shapes={"x": tokens}).module()
        for m in (5, 9):
            x = randn(*shapes(m)[0], generator=generator).to(BF16)
            assert_same_bits(program(x), function(x, *others))


def test_out(generator):
    """Written in place, also between gaps, in its own dtype."""
    a, b = randn(9, 7, generator=generator).to(BF16), randn(7, 5, generator=generator).to(BF16)
    memory = torch.full((9, 8), -7.0)
    out = memory[:, :5]
    assert mm(a, b, out=out, out_dtype=FP32) is out
    assert torch.equal(out, mm(a, b, out_dtype=FP32)) and (memory[:, 5:] == -7.0).all()
    memory.fill_(-7.0)
    torch.compile(cute_kernels.mm, fullgraph=True, backend="aot_eager")(a, b, out=out)
    assert torch.equal(out, mm(a, b, out_dtype=FP32)) and (memory[:, 5:] == -7.0).all()


def test_shapes_of_meta_tensors():
    x, weight = torch.empty(2, 3, 40, dtype=BF16, device="meta"), torch.empty(48, 40, dtype=BF16, device="meta")
    y = linear(x, weight, torch.empty(48, device="meta"), out_dtype=FP32, activation="silu")
    assert y.shape == (2, 3, 48) and y.dtype is FP32 and y.is_meta
    assert mm(x[0], weight.t(), out_dtype=FP16).shape == (3, 48)


def test_second_derivative_is_refused(generator):
    inputs = make_inputs(Case(4, 5, 6), generator)
    y = linear(inputs.x, inputs.weight)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(y.float().square().sum(), inputs.x, create_graph=True)


# The tests' own helpers and data


def test_bits_differ_where_values_do_not():
    zeros = torch.zeros(3, dtype=BF16)
    assert torch.equal(zeros, -zeros) and not same_bits(zeros, -zeros)
    with pytest.raises(AssertionError, match=r"y: 3 of 3 elements differ, the first at \(0,\): -0.0, not 0.0"):
        assert_same_bits(-zeros, zeros, "y")
    nan = torch.tensor([float("nan")])
    assert_same_bits(nan, nan.clone())
    one = torch.ones(4, 4)
    assert not same_bits(one, torch.nextafter(one, 2 * one)) and same_bits(one, one.t())
    with pytest.raises(AssertionError):
        assert_same_bits(one, one.to(BF16))
    with pytest.raises(AssertionError):
        assert_same_bits(one, one[:2])


def test_wide_range_shows_the_order_of_summation(generator):
    """Data on which a wrong order could pass would prove nothing: here ascending and descending K differ."""
    a, b = wide_range(64, 256, generator=generator).float(), wide_range(256, 64, generator=generator).float()

    def by_steps(order):
        total = torch.zeros(64, 64)
        for k in order:
            total += a[:, k : k + 16] @ b[k : k + 16]
        return total

    steps = list(range(0, 256, 16))
    assert (bits(by_steps(steps)) != bits(by_steps(steps[::-1]))).float().mean() > 0.3


@pytest.mark.parametrize("k", [100, 4096])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_gates_let_truncating_accumulation_pass(k, dtype, generator):
    """As tensor cores do: sums of 16 products added to 24 bits, the rest cut off. One lost step of 256 fails."""

    def cut(t):
        mantissa, exponent = torch.frexp(t)
        return torch.ldexp(torch.trunc(mantissa * 2**24) / 2**24, exponent)

    a, b = randn(64, k, generator=generator).to(dtype), randn(k, 256, generator=generator).to(dtype)
    exact = oracle_mm(a, b)
    total, short = torch.zeros(64, 256, dtype=FP64), torch.zeros(64, 256, dtype=FP64)
    for first in range(0, k, 16):
        step = a[:, first : first + 16].double() @ b[first : first + 16].double()
        total = cut(total + cut(step))
        short = short if first == 48 else cut(short + cut(step))
    for out in (FP32, dtype):
        check({"y": total.float().to(out)}, {"y": exact})
        check_gates("y", total.float().to(out), exact)
        with pytest.raises(AssertionError, match="times the bound"):
            check({"y": short.float().to(out)}, {"y": exact})
        with pytest.raises(AssertionError, match=r"allowed|are not the exact result"):
            check_gates("y", short.float().to(out), exact)


@pytest.mark.parametrize("wrong", ["nan", "one element", "two roundings"])
def test_the_checks_fail_on_a_wrong_result(wrong, generator):
    a, b = randn(64, 64, generator=generator).to(BF16), randn(64, 256, generator=generator).to(BF16)
    exact = oracle_mm(a, b)
    y = exact.value.to(BF16)
    check({"y": y}, {"y": exact})
    check_gates("y", y, exact)
    if wrong == "two roundings":  # an accumulator in bf16, once in the middle
        y = ((a[:, :32].float() @ b[:32].float()).to(BF16).float() + a[:, 32:].float() @ b[32:].float()).to(BF16)
        with pytest.raises(AssertionError, match="are not the exact result rounded"):
            check_gates("y", y, exact)
    elif wrong == "nan":
        y[3, 5] = float("nan")
    else:
        y[3, 5] = torch.nextafter(torch.nextafter(y[3, 5], 9e9 * y[3, 5]), 9e9 * y[3, 5])
    with pytest.raises(AssertionError, match="times the bound"):
        check({"y": y}, {"y": exact})


def test_gaps_hold_nan(generator):
    """The padding of strided inputs is poisoned: a kernel that used it would show."""
    case = Case(5, 4, 8, x_gap=2, w_gap=3, dy_gap=1, offset=1)
    inputs = make_inputs(case, generator)
    for tensor, stride in ((inputs.x, 10), (inputs.weight, 11), (inputs.dy, 5)):
        assert tensor.stride() == (stride, 1) and tensor.storage_offset() == 1 and tensor.isfinite().all()
        memory = torch.as_strided(tensor.detach(), (tensor.storage_offset() + stride * len(tensor),), (1,), 0)
        assert memory.isnan().sum() == 1 + (stride - tensor.shape[1]) * len(tensor)
    assert strided(inputs.x.detach(), 0).is_contiguous()
