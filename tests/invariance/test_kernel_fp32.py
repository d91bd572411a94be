"""batch_invariant: products of fp32 tensors, as of a router or a head in fp32."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from cute_kernels.gemm import fp32


def rms(t: torch.Tensor) -> float:
    return t.double().square().mean().sqrt().item()


def test_three_parts_are_the_number(generator):
    x = torch.randn(1000, generator=generator, device=generator.device) * torch.logspace(
        -30, 30, 1000, device=generator.device
    )
    assert torch.equal(sum(part.double() for part in fp32.parts(x)).float(), x)
    assert all(part.dtype is torch.bfloat16 for part in fp32.parts(x))


@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["even", "wide"])
@pytest.mark.parametrize(("k", "n"), [(7168, 256), (64, 8), (100, 3), (1, 5), (2048, 130)])
def test_against_fp64(k, n, spread, generator):
    device = generator.device
    a, b = (torch.randn(shape, generator=generator, device=device) for shape in ((33, k), (k, n)))
    a = a * torch.exp(spread * torch.randn(a.shape, generator=generator, device=device))
    exact = a.double() @ b.double()
    with batch_invariant():
        products = [a @ b, F.linear(a, b.t().contiguous()), torch.mm(a.t().contiguous().t(), b)]
        added = torch.addmm(b[0], a, b, alpha=0.5)
    for found in products:
        assert found.dtype is torch.float32 and rms(found - exact) <= 1.5e-5 * rms(exact)
    assert rms(added - (b[0] + 0.5 * exact)) <= 1.5e-5 * rms(exact)


def test_a_row_does_not_know_its_batch(generator):
    a = torch.randn(4, 300, 512, generator=generator, device=generator.device)
    w = torch.randn(64, 512, generator=generator, device=generator.device)
    with batch_invariant():
        whole = F.linear(a, w)
        for rows in (slice(0, 1), slice(5, 22), slice(299, 300)):
            assert torch.equal(F.linear(a[2, rows], w), whole[2, rows])
        batch = a @ a.mT
        assert torch.equal(a[1] @ a[1].mT, batch[1]) and torch.equal(a[:, :7] @ a.mT, batch[:, :7])


def test_gradients(generator):
    a = torch.randn(50, 96, generator=generator, device=generator.device).requires_grad_()
    w = torch.randn(10, 96, generator=generator, device=generator.device).requires_grad_()
    dy = torch.randn(50, 10, generator=generator, device=a.device)
    with batch_invariant():
        da, dw = torch.autograd.grad(F.linear(a, w), (a, w), dy)
    assert rms(da - dy.double() @ w.double()) <= 1.5e-5 * rms(da)
    assert rms(dw - dy.double().t() @ a.double()) <= 1.5e-5 * rms(dw)
