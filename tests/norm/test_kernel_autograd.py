"""How layer_norm and rms_norm take part in autograd: which gradients are computed, where they are added, how often."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.norm.cases import BF16, FP32, KINDS, Case, call_and_differentiate, check, make_inputs, oracle

CASES = [Case("rms", 1024), Case("layer", 1024, weight=FP32, bias=FP32)]
WITH_RESIDUAL = Case("rms", 1024, residual=BF16, dh=True)


def parameters(inputs):
    return [parameter for parameter in (inputs.weight, inputs.bias) if parameter is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_main_grad_is_added_to(case, norm, generator):
    """In fp32, by the kernel; .grad stays None; twice."""
    inputs = make_inputs(case, generator, 65 * 1024)
    exact = oracle(case, inputs)
    starts = []
    for parameter in parameters(inputs):
        parameter.main_grad = torch.randn(1024, generator=generator, device=parameter.device)
        starts.append(parameter.main_grad.clone())
    for times in (1, 2):
        norm(case.kind, inputs.x, inputs.weight, inputs.bias, **case.options).backward(inputs.dy)
        for name, parameter, start in zip(("dw", "db"), parameters(inputs), starts, strict=False):
            assert parameter.grad is None
            wanted = start.double() + times * exact[name].value
            terms = start.abs() + times * exact[name].terms
            assert ((parameter.main_grad - wanted).abs() <= 16 * times * torch.finfo(FP32).eps * terms).all()
    check({"dx": inputs.x.grad / 2}, exact)


def test_main_grad_is_left_where_it_is_not_asked_for(norm, generator):
    """Gradients of the input alone, then of one parameter alone, as a backward in two passes asks for them."""
    inputs = make_inputs(CASES[1], generator, 65 * 1024)
    for parameter in parameters(inputs):
        parameter.main_grad = torch.zeros(1024, device=parameter.device)
    y = norm("layer", inputs.x, inputs.weight, inputs.bias)
    torch.autograd.grad(y, inputs.x, inputs.dy, retain_graph=True)
    assert not inputs.weight.main_grad.any() and not inputs.bias.main_grad.any()
    y.backward(inputs.dy, inputs=[inputs.weight], retain_graph=True)
    assert inputs.weight.main_grad.any() and not inputs.bias.main_grad.any()
    once = inputs.weight.main_grad.clone()
    y.backward(inputs.dy, inputs=[inputs.bias])
    assert inputs.bias.main_grad.any() and torch.equal(inputs.weight.main_grad, once)


@pytest.mark.parametrize("dtype, size, step", [(BF16, 1024, 1), (FP32, 1023, 1), (FP32, 2048, 2)])
def test_main_grad_that_cannot_be_added_to(dtype, size, step, norm, generator, device):
    inputs = make_inputs(CASES[0], generator, 3 * 1024)
    inputs.weight.main_grad = torch.zeros(size, dtype=dtype, device=device)[::step]
    y = norm("rms", inputs.x, inputs.weight)
    expected = r"rms_norm: weight\.main_grad must be contiguous float32 of shape \(1024,\), got"
    with pytest.raises(ValueError, match=expected):
        y.backward(inputs.dy)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frozen_parameters(case, norm, generator):
    """Neither .grad nor main_grad of a frozen parameter changes; dx is right."""
    inputs = make_inputs(case, generator, 65 * 1024)
    for parameter in parameters(inputs):
        parameter.requires_grad_(False).main_grad = torch.zeros(1024, device=parameter.device)
    found = call_and_differentiate(norm, case, inputs)
    assert found.keys() == {"y", "dx"}
    check(found, oracle(case, inputs))
    for parameter in parameters(inputs):
        assert parameter.grad is None and not parameter.main_grad.any()


def test_only_the_bias_is_trained(norm, generator):
    case = CASES[1]
    inputs = make_inputs(case, generator, 65 * 1024)
    inputs.weight.requires_grad_(False)
    found = call_and_differentiate(norm, case, inputs)
    assert found.keys() == {"y", "dx", "db"}
    check(found, oracle(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_the_parameters_are_trained(case, norm, generator):
    """The first layer of a model: x does not require grad."""
    inputs = make_inputs(case, generator, 65 * 1024)
    inputs.x.requires_grad_(False)
    found = call_and_differentiate(norm, case, inputs)
    assert "dx" not in found and "dw" in found
    check(found, oracle(case, inputs))


@pytest.mark.parametrize("trained", ["x", "residual", None], ids=str)
def test_the_stream_has_a_gradient_where_its_terms_do(trained, norm, generator):
    inputs = make_inputs(WITH_RESIDUAL, generator, 3 * 1024)
    for name in ("x", "residual"):
        getattr(inputs, name).requires_grad_(name == trained)
    y, h = norm("rms", inputs.x, inputs.weight, residual=inputs.residual, return_residual=True)
    assert y.requires_grad and h.requires_grad is (trained is not None)
    y.backward(inputs.dy)
    assert inputs.weight.grad.any()


def test_nothing_is_trained(norm, generator):
    inputs = make_inputs(CASES[0], generator, 3 * 1024)
    trained = norm("rms", inputs.x, inputs.weight, **CASES[0].options)
    with torch.no_grad():
        y = norm("rms", inputs.x, inputs.weight, **CASES[0].options)
    assert not y.requires_grad and y.grad_fn is None
    with torch.inference_mode():
        inferred = norm("rms", inputs.x, inputs.weight, **CASES[0].options)
    detached = norm("rms", inputs.x.detach(), inputs.weight.detach(), **CASES[0].options)
    for other in (trained, inferred, detached):
        assert torch.allclose(other, y, rtol=2e-2)


def test_residual_and_x_do_not_share_a_gradient(norm, generator):
    """They are equal after one backward, and each is added to on its own after that."""
    inputs = make_inputs(WITH_RESIDUAL, generator, 65 * 1024)
    x, residual, weight = inputs.x, inputs.residual, inputs.weight
    y, h = norm("rms", x, weight, residual=residual, return_residual=True)
    torch.autograd.backward([y, h], [inputs.dy, inputs.dh])
    assert torch.equal(x.grad, residual.grad) and x.grad.data_ptr() != residual.grad.data_ptr()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_residual_the_stream_is_x(case, norm, generator):
    """Also with autograd, where x then has the gradients of both results."""
    inputs = make_inputs(case, generator, 65 * 1024)
    y, h = norm(case.kind, inputs.x, inputs.weight, inputs.bias, return_residual=True)
    assert h is inputs.x
    (dx,) = torch.autograd.grad(y, inputs.x, inputs.dy, retain_graph=True)
    (both,) = torch.autograd.grad([y, h], inputs.x, [inputs.dy, inputs.dy])
    assert torch.equal(both, dx + inputs.dy)
    with torch.no_grad():
        assert norm(case.kind, inputs.x, inputs.weight, inputs.bias, return_residual=True)[1] is inputs.x


def test_functorch_is_refused(norm, generator):
    inputs = make_inputs(CASES[0], generator, 3 * 1024)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: norm("rms", x, inputs.weight).sum())(inputs.x.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_only_the_residual_stream_is_used(kind, dtype, norm, generator, device):
    """h goes on, y is dropped: the gradient passes through unchanged."""
    x = torch.randn(9, 1024, generator=generator, device=device).to(BF16).requires_grad_()
    residual = torch.randn(9, 1024, generator=generator, device=device).to(dtype).requires_grad_()
    weight = torch.ones(1024, device=device, requires_grad=True)
    bias = torch.ones(1024, device=device, requires_grad=True)
    dh = torch.randn(9, 1024, generator=generator, device=device).to(dtype)
    _, h = norm(kind, x, weight, bias, residual=residual, return_residual=True)
    h.backward(dh)
    assert torch.equal(x.grad, dh.to(BF16)) and torch.equal(residual.grad, dh)
    for parameter in (weight, bias):
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("case", [*CASES, WITH_RESIDUAL], ids=str)
def test_the_outputs_of_a_dead_end_have_no_gradient(case, norm, generator):
    """The function behind y returns None as its gradient: then so do we, or zeros."""

    class DeadEnd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    inputs = make_inputs(case, generator, 3 * 1024)
    y = norm(case.kind, inputs.x, inputs.weight, inputs.bias, residual=inputs.residual, **case.options)
    y = y[0] if case.residual is not None else y
    DeadEnd.apply(y).sum().backward()
    for leaf in (inputs.x, inputs.residual, *parameters(inputs)):
        assert leaf is None or leaf.grad is None or not leaf.grad.any()


@pytest.mark.parametrize("case", [*CASES, WITH_RESIDUAL], ids=str)
def test_retained_graph(case, norm, generator):
    """A second backward through the same graph gives the same bits and does not touch the first one's."""
    inputs = make_inputs(case, generator, 65 * 1024)
    result = norm(case.kind, inputs.x, inputs.weight, inputs.bias, residual=inputs.residual, **case.options)
    roots = list(result) if case.residual is not None else [result]
    incoming = [inputs.dy, inputs.dh][: len(roots)]
    leaves = [leaf for leaf in (inputs.x, inputs.residual, *parameters(inputs)) if leaf is not None]
    first = torch.autograd.grad(roots, leaves, incoming, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(roots, leaves, incoming)
    for one, copy, two in zip(first, copies, second, strict=True):
        assert torch.equal(one, copy) and torch.equal(one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(roots, leaves, incoming)


@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(save, reentrant, norm, generator):
    case = Case("rms", 1024, save=save)
    inputs = make_inputs(case, generator, 65 * 1024)

    def block(x, weight):
        return norm("rms", x.sin(), weight, **case.options) * 2

    def run(function):
        y = function(inputs.x, inputs.weight)
        return y.detach(), *torch.autograd.grad(y, (inputs.x, inputs.weight), inputs.dy)

    def run_reentrant():
        x, weight = inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
        y = checkpoint(block, x, weight, use_reentrant=True)
        y.backward(inputs.dy)
        return y.detach(), x.grad, weight.grad

    plain = run(block)
    again = run_reentrant() if reentrant else run(lambda *leaves: checkpoint(block, *leaves, use_reentrant=False))
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one, two)


def test_output_changed_in_place(norm, generator):
    """With save="output" that is what the backward needs: torch's error, not a wrong gradient; else it is free."""
    inputs = make_inputs(CASES[0], generator, 3 * 1024)
    y = norm("rms", inputs.x, inputs.weight, save="output")
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy)
    y = norm("rms", inputs.x, inputs.weight, save="input")
    y.mul_(2.0)
    y.backward(inputs.dy)


def test_input_may_be_freed_when_the_output_is_saved(norm, device):
    """save="output" keeps y alone; save="input" keeps x alone."""
    weight = torch.ones(1024, device=device, requires_grad=True)

    def saved_tensors(save):
        x = torch.ones(4, 1024, device=device, requires_grad=True) * 1.0
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
            y = norm("rms", x, weight, save=save)
        return x.data_ptr() in packed, y.data_ptr() in packed

    assert saved_tensors("input") == (True, False)
    assert saved_tensors("output") == (False, True)


@pytest.mark.parametrize("case", [*CASES, WITH_RESIDUAL], ids=str)
def test_second_derivative_is_refused(case, norm, generator):
    inputs = make_inputs(case, generator, 3 * 1024)
    result = norm(case.kind, inputs.x, inputs.weight, inputs.bias, residual=inputs.residual, **case.options)
    y = result[0] if case.residual is not None else result
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(y.square().sum(), inputs.x, create_graph=True)
