"""Gradients of the hyper-connections' references by finite differences, in fp64."""

import dataclasses

import pytest
import torch

from cute_kernels.mhc import reference
from cute_kernels.mhc.variants import VARIANTS
from tests.mhc.cases import (
    FP64,
    LAYOUTS,
    OPERATIONS,
    PRESETS,
    RES_ORIENTATIONS,
    SINKHORNS,
    Case,
    call,
    in_fp64,
    make_inputs,
    randn64,
)


def gradcheck(op, case, generator, fast_mode=False):
    """By every element; by one random direction with ``fast_mode``."""
    inputs = in_fp64(make_inputs(case, generator))
    names = [name for name in OPERATIONS[op][0] if name in inputs]

    def function(*leaves):
        return call(reference, op, case, dict(zip(names, leaves, strict=True)), compute_dtype=FP64)

    assert torch.autograd.gradcheck(function, tuple(inputs[name] for name in names), fast_mode=fast_mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand", "contract", "head", "pre"])
def test_gradcheck(op, layout, generator):
    gradcheck(op, Case(2, 8, (2,), layout=layout, norm_weight=True), generator)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("orientation", RES_ORIENTATIONS)
def test_gradcheck_of_expand_combine(orientation, layout, dropout_p, generator):
    case = Case(4, 8, (2,), layout=layout, res_orientation=orientation, bias=True, dropout_p=dropout_p)
    gradcheck("expand_combine", case, generator)


@pytest.mark.parametrize("name", PRESETS)
def test_gradcheck_of_a_hyper_connection(name, generator):
    gradcheck(
        "hyper_connection", Case(2, 8, (2,), variant=name, norm_weight=True, bias=True, dropout_p=0.3), generator, True
    )


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_gradcheck_of_eps(placement, generator):
    """A mean square of eps' own size: the place of eps decides the gradient."""
    inside = placement == "inside"
    own = dataclasses.replace(VARIANTS["deepseek_v4"], rms_eps=0.1, rms_eps_placement=placement)
    leaves = [randn64(3, 8, generator=generator), (torch.rand(3, generator=generator, dtype=FP64) * 0.2 + 0.01)]
    leaves = [*leaves, randn64(3, generator=generator), randn64(8, generator=generator)]
    leaves[1].requires_grad_()

    def function(*leaves):
        return reference.coefficients(*leaves, 2, variant=own, compute_dtype=FP64)

    assert torch.autograd.gradcheck(function, leaves)
    H, ms, alpha, beta = leaves
    grad = torch.autograd.grad(function(*leaves)[2].sum(), ms)[0]
    rms = (ms + 0.1).sqrt() if inside else ms.sqrt() + 0.1
    drms = 0.5 / (ms + 0.1).sqrt() if inside else 0.5 / ms.sqrt()
    torch.testing.assert_close(grad, -(alpha[2] * H[:, 4:]).sum(1) / rms**2 * drms)


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", SINKHORNS)
def test_gradcheck_of_sinkhorn(variant, n, iterations, generator):
    """With an eps below all sums, and one above some."""
    logits = randn64(2, n, n, generator=generator, scale=2.0)
    for eps in (1e-3, 0.7):

        def function(logits, eps=eps):
            return reference.sinkhorn(logits, variant=variant, iterations=iterations, eps=eps, compute_dtype=FP64)

        assert torch.autograd.gradcheck(function, logits)
