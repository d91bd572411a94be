"""Logits of a router and its losses on a GPU: against the reference, and bit by bit; on the CPU: test_dispatch.py."""

import pytest
import torch

from cute_kernels import batch_invariant, moe
from tests.moe.cases import BF16, FP16, FP32, assert_same_bits, randn

pytestmark = pytest.mark.sm90


def leaves_of(dtype, weight_dtype, generator, tokens=61, hidden=96, experts=24):
    return [
        randn(tokens, hidden, generator=generator, dtype=dtype).requires_grad_(),
        (hidden**-0.5 * randn(experts, hidden, generator=generator)).to(weight_dtype).requires_grad_(),
        randn(experts, generator=generator).requires_grad_(),
    ]


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16)], ids=str)
def test_logits(dtypes, generator):
    leaves = leaves_of(*dtypes, generator)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found, exact = moe.router_logits(*leaves), moe.router_logits(*wide, backend="reference")
    assert found.dtype is FP32
    torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=3e-6)
    dlogits = randn(*found.shape, generator=generator)
    results = torch.autograd.grad(found, leaves, dlogits)
    for leaf, result, wanted in zip(leaves, results, torch.autograd.grad(exact, wide, dlogits.double()), strict=True):
        eps = torch.finfo(leaf.dtype if dtypes[1] is FP32 else BF16).eps
        error = (result.double() - wanted).norm() / wanted.norm()
        assert error < eps / 2 + 2e-6


@pytest.mark.parametrize("weight_dtype", [BF16, FP32], ids=str)
def test_a_token_of_logits_does_not_know_its_batch(weight_dtype, generator):
    x, weight, bias = leaves_of(BF16, weight_dtype, generator)
    whole, dlogits = moe.router_logits(x, weight, bias), randn(61, 24, generator=generator)
    (dx,) = torch.autograd.grad(whole, x, dlogits)
    for count in (1, 2, 33):
        index = torch.randperm(61, generator=generator, device=x.device)[:count]
        some = x[index].detach().requires_grad_()
        found = moe.router_logits(some, weight, bias)
        assert_same_bits(found, whole[index])
        assert_same_bits(torch.autograd.grad(found, some, dlogits[index])[0], dx[index])


def test_main_grads_of_a_router(generator):
    leaves = leaves_of(BF16, FP32, generator)
    wanted = torch.autograd.grad(moe.router_logits(*leaves).sum(), leaves)
    for t in leaves[1:]:
        t.main_grad = torch.zeros_like(t)
    moe.router_logits(*leaves).sum().backward()
    for t, gradient in zip(leaves[1:], wanted[1:], strict=True):
        assert t.grad is None
        assert_same_bits(t.main_grad, gradient)


def test_losses(generator):
    logits = randn(200, 24, generator=generator).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    routing, mask = moe.route(logits, 4), randn(200, generator=generator) > 0
    calls = [
        lambda t, **options: moe.load_balancing_loss(t, routing, **options),
        lambda t, **options: moe.load_balancing_loss(t, routing, mask=mask, **options),
        moe.z_loss,
    ]
    for call in calls:
        found, exact = call(logits), call(wide, backend="reference")
        torch.testing.assert_close(found.double(), exact, atol=0, rtol=1e-5)
        (gradient,), (wanted,) = torch.autograd.grad(found, logits), torch.autograd.grad(exact, wide)
        torch.testing.assert_close(gradient.double(), wanted, atol=1e-7, rtol=1e-4)
        assert_same_bits(call(logits), found)


def test_compile_of_a_router(generator, compile_backend):
    """One graph of logits and losses; gradients of eager mode, within what fusions round otherwise in the losses."""
    torch._dynamo.reset()

    def call(x, weight, bias):
        logits = moe.router_logits(x, weight, bias)
        return logits, moe.load_balancing_loss(logits, moe.route(logits, 2)) + moe.z_loss(logits)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend=compile_backend)):
        leaves = leaves_of(BF16, FP32, generator.manual_seed(0))
        logits, loss = function(*leaves)
        results.append((logits, loss, *torch.autograd.grad(loss, leaves)))
    assert_same_bits(results[0][0], results[1][0])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-2)


# Below: on a GPU only


def test_logits_are_the_products_inside_batch_invariant(generator):
    x, weight, _ = leaves_of(BF16, FP32, generator)
    with torch.no_grad(), batch_invariant():
        wanted = x.float() @ weight.t()
    assert_same_bits(moe.router_logits(x, weight), wanted)
