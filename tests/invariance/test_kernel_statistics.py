"""batch_invariant: logsumexp, cumsum, norms and variances in the forms that torch has of them, and their gradients."""

import math

import pytest
import torch

from cute_kernels import batch_invariant

CALLS = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp of all": lambda x: x.logsumexp((0, 1, 2), keepdim=True),
    "logsumexp of two": lambda x: torch.logsumexp(torch.stack([x, 2 * x]), 0),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of rows": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=-1, keepdim=True),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 2)),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "var": lambda x: x.var(-1),
    "var of all": lambda x: x.var(unbiased=False),
    "std": lambda x: x.std(1, keepdim=True),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, -1)),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, (0, 1), correction=2)),
    "normalised advantages": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-4),
    "gather of log-probabilities": lambda x: x.gather(-1, (x > 0).long()[..., :1]) - x.logsumexp(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_against_fp64(name, dtype, generator):
    function = CALLS[name]
    x = torch.randn(6, 9, 40, generator=generator, device=generator.device).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    wanted = function(wide)
    dy = torch.randn(wanted.shape, generator=generator, device=x.device).to(dtype)
    (exact,) = torch.autograd.grad(wanted, wide, dy.double())
    with batch_invariant():
        found = function(x)
        (dx,) = torch.autograd.grad(found, x, dy)
    assert found.dtype is dtype and found.shape == wanted.shape
    tolerance = {"rtol": 0.06, "atol": 0.06} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    torch.testing.assert_close(dx.double(), exact, **tolerance)


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped(foreach, generator):
    shapes = [(30, 40), (40,), (3, 5, 7)]
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=generator.device)) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator, device=generator.device) for shape in shapes]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    wanted = torch.cat([g.flatten() for g in gradients]).double().norm()
    with batch_invariant():
        total = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters[0].grad.double(), gradients[0].double() / wanted, rtol=1e-4, atol=1e-6)


def test_integers_and_others(device):
    x = torch.arange(6, device=device)
    with batch_invariant():
        assert x.cumsum(0).tolist() == [0, 1, 3, 6, 10, 15]
        halves = (x + 0.5).cumsum(0, dtype=torch.int32)  # converted first
        assert halves.tolist() == [0, 1, 3, 6, 10, 15] and halves.dtype is torch.int32
        scalar = torch.tensor(-2.0, device=device)
        assert scalar.norm() == 2 and scalar.cumsum(0) == -2 and scalar.logsumexp(0) == -2
