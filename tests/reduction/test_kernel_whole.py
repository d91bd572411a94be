"""Sums of whole tensors: the order of the contract, bit by bit, for all lengths, with one kernel."""

import pytest
import torch

from cute_kernels import moe, reduction
from cute_kernels.reduction import launch, reference
from cute_kernels.reduction.config import MAX_COLUMNS, WHOLE_PART
from cute_kernels.runtime import launches
from tests.reduction.cases import BF16, FP16, FP32

# 1, around powers of two, where a vector, a running sum, a part and a CTA of partial sums end; one far off
LENGTHS = [1, 2, 7, 8, 127, *(2**k + d for k in (8, 11, 14, 15, 16, 20) for d in (-1, 0, 1)), 1_000_003]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_bits_are_the_references(dtype, generator):
    """Sums, means, squares and magnitudes have the reference's bits, rounded to each dtype."""
    x = torch.randn(max(LENGTHS), generator=generator, device=generator.device).to(dtype)
    for n in LENGTHS:
        some = x[:n].clone()
        total = reference.whole_sum(some)
        for out in (None, BF16, FP16, FP32):
            assert torch.equal(reduction.sum(some, out_dtype=out), total.to(out or dtype)), n
            scaled = total * torch.tensor(1 / n, device=total.device)
            assert torch.equal(reduction.mean(some, out_dtype=out), scaled.to(out or dtype)), n
        assert torch.equal(reduction.norm(some, 1, out_dtype=FP32), reference.whole_sum(some.abs())), n
        squares = reference.whole_sum(some, squares=True)
        if dtype is FP32:  # the reference rounds a fused sum twice, where fp64 meets the middle of two fp32 numbers
            torch.testing.assert_close(reduction.norm(some), squares.sqrt(), rtol=2.0**-20, atol=0)
        else:
            assert torch.equal(reduction.norm(some, out_dtype=FP32), squares.sqrt()), n


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bits_follow_from_the_elements_alone(dtype, generator):
    """Not from where they begin, their shape, or their dtype; nor from other lines; NaN around them is not used."""
    x = torch.randn(3, 70_001, generator=generator, device=generator.device).to(dtype)
    memory = torch.full((70_001 + 16,), torch.nan, dtype=dtype, device=x.device)
    totals = torch.empty(3, device=x.device)
    launch.sum_whole(x, totals, 1.0, False)
    for line, total in zip(x, totals, strict=True):
        assert torch.equal(reference.whole_sum(line), total)
        assert torch.equal(reduction.sum(line.clone(), out_dtype=FP32), total)
        assert torch.equal(reduction.sum(line[:70_000].view(7, 100, 100)), reduction.sum(line[:70_000].clone()))
        assert torch.equal(reduction.sum(line.float()), total)
    for offset in range(1, 9):
        moved = memory[offset : offset + 70_001].copy_(x[0])
        assert torch.equal(reduction.sum(moved, out_dtype=FP32), totals[0]), offset
        moved.fill_(torch.nan)
    strided = torch.randn(200, 300, generator=generator, device=x.device).to(dtype)
    for view in (strided.t(), strided[:, ::2], strided[:, 1:7], strided[:1].expand(9, 300)):
        assert torch.equal(reduction.sum(view), reduction.sum(view.contiguous()))


def test_rows_that_no_cluster_holds_are_summed_alike(generator):
    x = torch.randn(3, MAX_COLUMNS + 3, generator=generator, device=generator.device)
    rows = reduction.sum(x, 1)
    for line, total in zip(x, rows, strict=True):
        assert torch.equal(total, reduction.sum(line)) and torch.equal(total, reduction.sum(line, 0))


def test_gradients(generator):
    x = torch.randn(30, 50, generator=generator, device=generator.device).requires_grad_()
    for function, wanted in ((reduction.sum, x.detach() * 0 + 1), (reduction.mean, x.detach() * 0 + 1 / 1500)):
        for keepdim in (False, True):
            y = function(x, keepdim=keepdim)
            assert y.shape == ((1, 1) if keepdim else ())
            torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_infinities_nan_and_nothing(device):
    x = torch.ones(100_000, device=device)
    x[70_000] = torch.inf
    assert reduction.sum(x) == torch.inf and reduction.norm(x) == torch.inf
    x[99_999] = -torch.inf
    assert reduction.sum(x).isnan() and reduction.sum(x[:99_999]) == torch.inf
    assert reduction.sum(x[:0]) == 0 and reduction.mean(x[:0]).isnan() and reduction.norm(x[:0]) == 0
    scalar = torch.tensor(-3.0, device=device)
    assert reduction.sum(scalar) == -3 and reduction.mean(scalar) == -3 and reduction.norm(scalar) == 3


def test_after_one_call_no_size_compiles(generator, monkeypatch):
    """Nor for the norms of clipping, for deviations, the loss of a router, and the terms of any loss."""
    x = torch.randn(300_000, generator=generator, device=generator.device)

    def run(n: int) -> None:
        some = x[:n].clone()
        reduction.sum(some), reduction.mean(some.to(BF16), out_dtype=FP32)
        reduction.norms([some, some[: n // 2 + 1].clone(), some[:8].view(2, 4)])
        reduction.norm(some, 1), reduction.std(some), reduction.var(some.view(-1, 1))
        moe.z_loss(some[: n // 8 * 8].view(-1, 8))

    run(40)

    def refuse(builder, *arguments):
        raise AssertionError(f"{builder.__name__} was asked for")

    monkeypatch.setattr(launches, "load", refuse)
    for n in (8, 1000, WHOLE_PART, WHOLE_PART + 1, 299_999):
        run(n)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_32_bits_count(generator, device):
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs a GPU with 20 GB")
    n = 2**31 + 2**20 + 3
    x = torch.zeros(n, dtype=BF16, device=device)
    for begin in (0, n // 2, n - 2**21):
        x[begin : begin + 2**21].copy_(torch.randn(min(2**21, n - begin), generator=generator, device=device))
    total = reduction.sum(x, out_dtype=FP32)
    assert torch.equal(total, reference.whole_sum(x))
    x[n - 1] = torch.inf
    assert reduction.sum(x, out_dtype=FP32) == torch.inf  # the last element counts
