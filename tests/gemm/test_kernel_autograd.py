"""How mm and linear take part in autograd: which gradients are computed, where they are added, how often."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import linear, mm, nn
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import (
    ACTIVATIONS,
    BF16,
    FP32,
    Case,
    assert_same_bits,
    check,
    make_inputs,
    oracle,
    oracle_mm,
    randn,
    run,
)

pytestmark = pytest.mark.usefixtures("gemms_precompiled")

CASE = Case(65, 96, 64, bias=FP32)
LEAVES = ["x", "weight", "bias"]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3) for w in itertools.combinations(LEAVES, n)], ids=lambda w: "+".join(w)
)
def test_frozen_inputs(wanted, activation, generator):
    """Each combination gets its gradients, by as many products as there are; main_grad of what is frozen stays."""
    case = Case(65, 96, 64, bias=FP32, activation=activation)
    inputs = make_inputs(case, generator)
    for name in LEAVES:
        getattr(inputs, name).requires_grad_(name in wanted)
        if name not in wanted and name != "x":
            getattr(inputs, name).main_grad = torch.full_like(getattr(inputs, name), 7.0, dtype=FP32)
    with observed() as products:
        found = run(linear, case, inputs)
    assert found.keys() == {"y", *({"x": "dx", "weight": "dw", "bias": "db"}[name] for name in wanted)}
    assert len(products) == 1 + len(wanted)
    check(found, oracle(case, inputs))
    for name in {"weight", "bias"} - set(wanted):
        assert (getattr(inputs, name).main_grad == 7.0).all()


@pytest.mark.parametrize("wanted", ["a", "b"])
def test_frozen_operand_of_mm(wanted, generator):
    a, b = randn(65, 64, generator=generator).to(BF16), randn(64, 96, generator=generator).to(BF16)
    dy = randn(65, 96, generator=generator).to(BF16)
    leaf = {"a": a, "b": b}[wanted].requires_grad_()
    with observed() as products:
        (found,) = torch.autograd.grad(mm(a, b), leaf, dy)
    assert len(products) == 2
    check({wanted: found}, {"a": oracle_mm(dy, b.t()), "b": oracle_mm(a.t(), dy)})


def test_nothing_is_trained(generator):
    """No graph, and the bits of a call with one."""
    for activation in (None, *ACTIVATIONS):
        inputs = make_inputs(CASE, generator)
        trained = linear(inputs.x, inputs.weight, inputs.bias, activation=activation)
        assert trained.requires_grad
        with torch.no_grad():
            y = linear(inputs.x, inputs.weight, inputs.bias, activation=activation)
        with torch.inference_mode():
            inferred = linear(inputs.x, inputs.weight, inputs.bias, activation=activation)
        assert not y.requires_grad and y.grad_fn is None
        assert_same_bits(trained.detach(), y)
        assert_same_bits(inferred.clone(), y)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("k", [64, 63])
def test_main_grad_is_added_to(k, activation, generator):
    """The accumulators start from it; .grad stays None; twice, and one parameter without the other."""
    case = Case(65, 96, k, bias=BF16, activation=activation)
    for with_main_grad in (["weight", "bias"], ["weight"], ["bias"]):
        inputs = make_inputs(case, generator)
        exact = oracle(case, inputs)
        starts = {}
        for name in with_main_grad:
            parameter = getattr(inputs, name)
            starts[name] = randn(*parameter.shape, generator=generator)
            parameter.main_grad = starts[name].clone()
        for times in (1, 2):
            linear(inputs.x, inputs.weight, inputs.bias, activation=activation).backward(inputs.dy)
            for name, key in (("weight", "dw"), ("bias", "db")):
                parameter, value, terms = getattr(inputs, name), exact[key].value, exact[key].terms
                if name in starts:
                    assert parameter.grad is None
                    error = (parameter.main_grad - (starts[name].double() + times * value)).abs()
                    bound = 16 * torch.finfo(FP32).eps * times * (starts[name].abs() + times * terms)
                    assert (error <= bound + times * exact[key].margin).all()
                else:
                    check({key: parameter.grad}, {key: exact[key]})
                    parameter.grad = None
        check({"dx": inputs.x.grad / 2}, exact)


def test_what_is_added_to_main_grad_counts_as_a_change(generator):
    """Whoever has saved it for a backward is told, as of any change in place."""
    inputs = make_inputs(CASE, generator)
    weight, scale = inputs.weight, torch.ones((), device=inputs.weight.device, requires_grad=True)
    weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    product = scale * weight.main_grad
    linear(inputs.x, weight).backward(inputs.dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("wrong", ["dtype", "shape", "strides"])
def test_main_grad_that_cannot_be_added_to(wrong, parameter, generator):
    inputs = make_inputs(CASE, generator)
    leaf = getattr(inputs, parameter)
    shape = tuple(leaf.shape)
    leaf.main_grad = {
        "dtype": torch.zeros_like(leaf, dtype=BF16),
        "shape": torch.zeros_like(leaf[1:], dtype=FP32),
        "strides": torch.zeros(*shape, 2, device=leaf.device)[..., 0],
    }[wrong]
    y = linear(inputs.x, inputs.weight, inputs.bias)
    with pytest.raises(ValueError) as caught:
        y.backward(inputs.dy)
    assert str(caught.value).startswith(
        f"linear: {parameter}.main_grad must be contiguous float32 of shape {shape}, got "
    )


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_main_grad_on_another_device(parameter, generator):
    inputs = make_inputs(CASE, generator)
    leaf = getattr(inputs, parameter)
    leaf.main_grad = torch.zeros(leaf.shape, device="meta")
    y = linear(inputs.x, inputs.weight, inputs.bias)
    with pytest.raises(ValueError) as caught:
        y.backward(inputs.dy)
    assert str(caught.value) == f"linear: {parameter}.main_grad must be on {leaf.device}, got meta"


def test_a_product_and_an_accumulation_of_the_same_operands(generator):
    """Shapes, strides and dtypes agree; what one starts from does not."""
    inputs = make_inputs(CASE, generator)
    x, weight, dy = inputs.x.detach(), inputs.weight, inputs.dy
    product = mm(dy.t(), x, out_dtype=FP32)
    weight.main_grad = torch.full_like(product, 1000.0)
    linear(x, weight).backward(dy)
    assert (weight.main_grad - (product + 1000.0)).abs().max() < 1e-2
    assert_same_bits(mm(dy.t(), x, out_dtype=FP32), product)


@pytest.mark.parametrize("layout", ["transposed", "row", "number", "gap", "3-D transposed"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_layout_of_the_incoming_gradient(activation, layout, generator):
    case = Case(66, 96, 64, bias=FP32, activation=activation)
    inputs = make_inputs(case, generator)
    dense = {
        "transposed": lambda dy: dy.t().contiguous().t(),
        "row": lambda dy: dy[:1].expand(66, 96),
        "number": lambda dy: dy[:1, :1].expand(66, 96),
        "gap": lambda dy: torch.cat([dy, dy], 1)[:, :96],
        "3-D transposed": lambda dy: dy.view(6, 11, 96).transpose(0, 1).contiguous().transpose(0, 1),
    }[layout]
    x, dy = inputs.x, dense(inputs.dy)
    assert layout == "gap" or not dy.is_contiguous()
    if dy.dim() == 3:
        inputs.x = x.detach().view(6, 11, 64).requires_grad_()
    inputs.dy = dy
    found = run(linear, case, inputs)
    assert found["dx"].shape == inputs.x.shape
    check(found, oracle(case, inputs))


def test_sum_as_the_loss(generator):
    """Its gradient is an expanded one; x and weight are the same tensor, so that their gradients are added up."""
    x = randn(96, 64, generator=generator).to(BF16).requires_grad_()
    linear(x, x).sum().backward()
    ones = torch.ones(96, 96, dtype=BF16, device=x.device)
    dx = oracle_mm(ones, x)
    error = (x.grad.double() - 2 * dx.value).abs()
    assert (error <= 2 * torch.finfo(BF16).eps * 2 * dx.value.abs() + 1e-4).all()


def test_a_weight_used_twice(generator):
    """By two layers: main_grad has the sum, each part in the order of the backwards."""
    case = Case(65, 64, 64)
    inputs = make_inputs(case, generator)
    x, weight = inputs.x.detach(), inputs.weight
    weight.main_grad = torch.zeros(64, 64, device=x.device)
    h = linear(x, weight)
    h.retain_grad()
    linear(h, weight).backward(inputs.dy)
    second, first = oracle_mm(inputs.dy.t(), h), oracle_mm(h.grad.t(), x)
    exact = second.value + first.value
    error = (weight.main_grad - exact).abs()
    assert weight.grad is None and (error <= 16 * torch.finfo(FP32).eps * (first.terms + second.terms)).all()


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_retained_graph(activation, generator):
    """A second backward through the same graph gives the same bits; a third finds it freed."""
    inputs = make_inputs(CASE, generator)
    y = linear(inputs.x, inputs.weight, inputs.bias, activation=activation)
    leaves = list(inputs.leaves.values())
    first = torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(y, leaves, inputs.dy)
    for one, copy, two in zip(first, copies, second, strict=True):
        assert_same_bits(one, copy)
        assert_same_bits(two, copy)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, inputs.dy)


@pytest.mark.parametrize("call", ["mm", "linear"])
def test_second_derivative_is_refused(call, generator):
    inputs = make_inputs(CASE, generator)
    y = linear(inputs.x, inputs.weight) if call == "linear" else mm(inputs.x, inputs.weight.t())
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(y.float().square().sum(), inputs.x, create_graph=True)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(reentrant, generator):
    inputs = make_inputs(CASE, generator)

    def block(*leaves):
        return linear(*leaves, activation="gelu") * 2

    results = []
    for function in (block, lambda *leaves: checkpoint(block, *leaves, use_reentrant=reentrant)):
        leaves = [leaf.detach().requires_grad_() for leaf in inputs.leaves.values()]
        y = function(*leaves)
        y.backward(inputs.dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for one, two in zip(*results, strict=True):
        assert_same_bits(one, two)


def test_what_is_saved(generator):
    """The operands and, with an activation, one tensor of the output's size; without one the output may be changed."""
    for activation, extra in ((None, 0), ("relu", 1), ("silu", 1), ("gelu", 1)):
        inputs = make_inputs(CASE, generator)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = linear(inputs.x, inputs.weight, inputs.bias, activation=activation)
        others = [t for t in saved if t.data_ptr() not in {leaf.data_ptr() for leaf in inputs.leaves.values()}]
        assert [tuple(t.shape) for t in others] == [(65, 96)] * extra
        if activation == "relu":
            assert others[0].data_ptr() == y.data_ptr()
    y = linear(inputs.x, inputs.weight, inputs.bias)
    y.mul_(2.0)
    y.backward(inputs.dy)


def test_output_changed_in_place(generator):
    """relu's output is what its backward needs: torch's error, not a wrong gradient."""
    inputs = make_inputs(CASE, generator)
    y = linear(inputs.x, inputs.weight, inputs.bias, activation="relu")
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy)


def test_a_dead_end_has_no_gradient(generator):
    """The function behind y returns None as its gradient: then so do we, or zeros."""

    class DeadEnd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    inputs = make_inputs(CASE, generator)
    DeadEnd.apply(linear(inputs.x, inputs.weight, inputs.bias)).sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in inputs.leaves.values())


def test_a_count_of_any_shape(generator, device):
    """One element: of no dimension, of one, of two."""
    inputs = make_inputs(CASE, generator)
    counts = [torch.tensor(value, dtype=torch.int32, device=device) for value in (7, [7], [[7]])]
    found = [run(linear, CASE, inputs, num_valid_tokens=count) for count in counts]
    assert all(torch.equal(other[name], found[0][name]) for other in found for name in ("dw", "db"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_module(bias, generator, device):
    """nn.Linear is torch's with another product: the same parameters by name, its values to rounding, main_grad."""
    ours, theirs = (module(64, 96, bias=bias, device=device, dtype=BF16) for module in (nn.Linear, torch.nn.Linear))
    assert isinstance(ours, torch.nn.Module) and ours.in_features == 64 and ours.out_features == 96
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    x, dy = randn(2, 9, 64, generator=generator).to(BF16), randn(2, 9, 96, generator=generator).to(BF16)
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1.6e-2, atol=1e-2)
    assert_same_bits(results[0][0], linear(x, ours.weight.detach(), ours.bias.detach() if bias else None))
    for parameter in ours.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=FP32)
    ours(x).backward(dy)
    for parameter, gradient in zip(ours.parameters(), results[0][2:], strict=True):
        assert parameter.grad is None
        assert_same_bits(parameter.main_grad.to(BF16), gradient)
