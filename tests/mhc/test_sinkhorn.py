"""Sinkhorn's iterations, and coefficients that saturate."""

import pytest
import torch

from cute_kernels.mhc import reference
from tests.mhc.cases import (
    FP64,
    PRESETS,
    SINKHORNS,
    STREAMS,
    Case,
    differentiate,
    make_inputs,
    make_upstream,
    randn64,
    saturated_logits,
)


@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_sinkhorn_is_doubly_stochastic_where_it_converges(n, variant, generator):
    logits = torch.randn(50, n, n, generator=generator)
    p = reference.sinkhorn(logits, variant=variant, iterations=50)
    assert (p > 0).all()
    torch.testing.assert_close(p.sum(-2), torch.ones(50, n), rtol=0, atol=1e-5)
    torch.testing.assert_close(p.sum(-1), torch.ones(50, n), rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", SINKHORNS)
def test_the_variants_agree_without_eps(variant, generator):
    """Three forms of one algorithm: with a tiny eps and after as many iterations, the same matrix."""
    logits = torch.randn(9, 4, 4, generator=generator, dtype=FP64)
    p = torch.exp(logits)
    for _ in range(3):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    found = reference.sinkhorn(logits, variant=variant, iterations=3, eps=1e-15, compute_dtype=FP64)
    torch.testing.assert_close(found, p, rtol=1e-10, atol=1e-12)


def test_defaults_of_sinkhorn(generator):
    logits = torch.randn(3, 4, 4, generator=generator)
    assert torch.equal(reference.sinkhorn(logits), reference.sinkhorn(logits, variant="log", iterations=20))
    found = reference.sinkhorn(logits, variant="softmax_eps")
    assert torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", iterations=20, eps=1e-6))
    assert not torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", eps=2e-6))
    assert not torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", iterations=10))


@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_saturated_logits(n, variant, generator):
    """+50 and -50: finite, with finite gradients, and near those of fp64.

    exp(-100), of "exp_clamp", has five bits in fp32, none where subnormal numbers are 0; so there +40 and -40 are near.
    """
    for size in (50.0, 40.0):
        logits = saturated_logits(n, 200, generator, size).requires_grad_()
        upstream = torch.randn(200, n, n, generator=generator)
        p = reference.sinkhorn(logits, variant=variant)
        (gradient,) = torch.autograd.grad(p, logits, upstream)
        wide = logits.detach().double().requires_grad_()
        exact = reference.sinkhorn(wide, variant=variant, compute_dtype=FP64)
        (wanted,) = torch.autograd.grad(exact, wide, upstream.double())
        assert p.isfinite().all() and gradient.isfinite().all()
        if size == 40.0 or variant != "exp_clamp":
            # 50 + 50 has an absolute error of 4e-6 in fp32, which the exponential turns into a relative one
            torch.testing.assert_close(p.double(), exact, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(gradient.double(), wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_saturated_coefficients(name, generator):
    """A beta of +50 and -50 in pre, post and res: finite from end to end."""
    case = Case(4, 16, (7,), variant=name)
    inputs = make_inputs(case, generator)
    with torch.no_grad():
        inputs["beta"].copy_(50.0 * torch.randn(24, generator=generator).sign())
    found = differentiate(
        reference, "hyper_connection", case, inputs, make_upstream("hyper_connection", case, generator)
    )
    assert all(t.isfinite().all() for t in found.values())


def test_second_derivative_of_sinkhorn_is_refused(generator):
    logits = randn64(2, 4, 4, generator=generator)
    p = reference.sinkhorn(logits, variant="exp_clamp", compute_dtype=FP64)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(p.square().sum(), logits, create_graph=True)
