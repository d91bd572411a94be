"""logsumexp, cumsum, norm, norms, var and std: against fp64, and what their bits must not know."""

import math

import pytest
import torch

from cute_kernels import reduction
from cute_kernels.reduction import launch, launch_statistics
from tests.reduction.cases import BF16, FP16, FP32, FP32_EPS, rounding

OF_TORCH = {
    "logsumexp": torch.logsumexp,
    "norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "var": torch.var,
    "std": torch.std,
    "cumsum": torch.cumsum,
}
SHAPES = [
    ((7, 4096), -1),
    ((300, 5), 1),
    ((5000, 64), 0),
    ((3, 1000, 24), 1),
    ((3, 1000, 24), (0, 2)),
    ((9, 769), 1),
    ((2, 151936), 1),
    ((3, 50257), 1),
    ((4, 1), 1),
    ((6, 20, 7), 0),
]
LENGTHS = (1, 2, 3, 4, 5, 31, 127, 128, 129, 1023, 1024, 1025, 4099, 30000)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("op", ["logsumexp", "norm", "var", "std"])
def test_against_fp64(op, shape, dim, dtype, generator):
    x = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    x = (x * 3 + 1 if op in ("logsumexp", "var") else x).requires_grad_()
    function, wide = getattr(reduction, op), x.detach().double().requires_grad_()
    if op in ("var", "std") and math.prod(shape[d] for d in ([dim] if isinstance(dim, int) else dim)) == 1:
        assert function(x, dim).isnan().all()
        return
    wanted = OF_TORCH[op](wide, dim)
    for out in (None, FP32):
        found = function(x, dim=dim, out_dtype=out)
        assert found.dtype is (out or dtype) and found.shape == wanted.shape
        bound = rounding(wanted, out or dtype) * 1.01 + 200 * FP32_EPS * (wanted.abs() + (op == "logsumexp"))
        excess = ((found.double() - wanted).abs() - bound).max().item()
        assert excess <= 0, f"{excess:.3g} beyond the bound"
    dy = torch.randn(wanted.shape, generator=generator, device=x.device).to(dtype)
    (dx,), (exact,) = torch.autograd.grad(function(x, dim=dim), x, dy), torch.autograd.grad(wanted, wide, dy.double())
    bound = rounding(exact, dtype) * 1.01 + 1e-5 * exact.abs() + 2e-6 * dy.abs().max()
    assert ((dx.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("op", ["logsumexp", "norm", "var"])
@pytest.mark.parametrize(("shape", "dim"), [((3000, 769), 1), ((300, 4096), 1), ((50, 700, 40), 1), ((9, 4000, 8), -1)])
def test_a_row_does_not_know_its_batch(op, shape, dim, generator):
    x = torch.randn(shape, generator=generator, device=generator.device).to(BF16)
    function = getattr(reduction, op)
    whole = function(x, dim=dim, out_dtype=FP32)
    for begin, end in ((0, 1), (1, 8), (3, len(x)), (len(x) - 1, len(x))):
        assert torch.equal(function(x[begin:end], dim=dim, out_dtype=FP32), whole[begin:end])


@pytest.mark.parametrize("shape", [(2400, 2235), (900, 10007), (140, 50257), (50, 151643), (600, 16384)], ids=str)
def test_a_row_does_not_know_the_rows_before(shape, generator):
    """A team reads a row's messages when it has its next row: it has two at least, and one in the parts."""
    x = torch.randn(shape, generator=generator, device=generator.device).to(BF16)
    x *= torch.arange(len(x), device=x.device)[:, None] % 7 + 1
    whole = reduction.logsumexp(x, out_dtype=FP32)
    step = len(x) // 12
    for begin in range(0, len(x), step):
        assert torch.equal(reduction.logsumexp(x[begin : begin + step], out_dtype=FP32), whole[begin : begin + step])
    assert torch.allclose(whole, torch.logsumexp(x.float(), 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_prefix_sums(n, dtype, generator):
    x = torch.randn(5, n, generator=generator, device=generator.device).to(dtype)
    for out in (None, FP32):
        found, wanted = reduction.cumsum(x, out_dtype=out), x.double().cumsum(1)
        bound = rounding(wanted, out or dtype) * 1.01 + 40 * FP32_EPS * x.double().abs().cumsum(1)
        assert found.dtype is (out or dtype) and ((found.double() - wanted).abs() <= bound).all()
    rows = x.t().contiguous()
    assert torch.equal(reduction.cumsum(rows, 0), reduction.cumsum(x).t())
    leaf = x.float().requires_grad_()
    dy = torch.randn(5, n, generator=generator, device=x.device)
    (dx,) = torch.autograd.grad(reduction.cumsum(leaf), leaf, dy)
    assert torch.equal(dx, reduction.cumsum(dy.flip(1)).flip(1))


def test_a_longer_row_moves_no_bit(generator):
    """An element knows those up to it, not the others, nor how many rows there are."""
    x = torch.randn(6, 5000, generator=generator, device=generator.device).to(BF16)
    whole = reduction.cumsum(x, out_dtype=FP32)
    for n in (1, 3, 4, 500, 1024, 1500, 4999):
        assert torch.equal(reduction.cumsum(x[:, :n], out_dtype=FP32), whole[:, :n])
        beside = x.clone()
        beside[:, n:] = torch.nan
        assert torch.equal(reduction.cumsum(beside, out_dtype=FP32)[:, :n], whole[:, :n])
    assert torch.equal(reduction.cumsum(x[2:3], out_dtype=FP32), whole[2:3])


def test_norms_of_whole_tensors(generator):
    shapes = [(3, 1000), (7,), (600, 700), (), (2, 3, 5)]
    xs = [torch.randn(shape, generator=generator, device=generator.device).to(BF16) for shape in shapes]
    for ord in (1, 2, math.inf):
        found = reduction.norms(xs, ord)
        for x, y in zip(xs, found, strict=True):
            wanted = torch.linalg.vector_norm(x.double(), ord)
            assert y.dtype is BF16 and torch.equal(y, reduction.norm(x, ord))
            torch.testing.assert_close(y.double(), wanted, rtol=2.0**-8, atol=0)
        leaf = xs[0].float().requires_grad_()
        wide = leaf.detach().double().requires_grad_()
        (dx,) = torch.autograd.grad(reduction.norm(leaf, ord), leaf)
        (exact,) = torch.autograd.grad(torch.linalg.vector_norm(wide, ord), wide)
        torch.testing.assert_close(dx.double(), exact)


def test_a_spread_of_more_than_a_cluster_holds(generator):
    x = torch.randn(700, 500, generator=generator, device=generator.device).requires_grad_()
    for op in ("var", "std"):
        y = getattr(reduction, op)(x)
        torch.testing.assert_close(y.double(), getattr(x.detach().double(), op)(), rtol=1e-5, atol=0)
        assert torch.autograd.grad(y, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_infinities(dtype, generator):
    x = torch.randn(6, 1000, generator=generator, device=generator.device).to(dtype)
    clean = reduction.logsumexp(x)
    x[1] = -math.inf
    x[2, 7] = math.inf
    x[3, 5] = math.nan
    x[4, 1:] = -math.inf
    x.requires_grad_()
    y = reduction.logsumexp(x)
    assert y[1] == -math.inf and y[2] == math.inf and y[3].isnan() and y[4] == x[4, 0]
    assert torch.equal(y[[0, 5]], clean[[0, 5]])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert (dx[1] == 0).all() and dx[4, 0] == 1 and dx[0].isfinite().all()


def test_nothing(device):
    empty = torch.zeros(3, 0, device=device)
    assert (reduction.logsumexp(empty) == -math.inf).all() and reduction.var(empty, 1).isnan().all()
    assert (reduction.norm(empty, dim=1) == 0).all() and reduction.cumsum(empty).shape == (3, 0)
    assert reduction.logsumexp(empty.t()).shape == (0,) and reduction.cumsum(empty.t()).shape == (0, 3)
    assert reduction.var(torch.zeros(2, 1, device=device), 1).isnan().all()
    assert torch.equal(reduction.norm(-torch.ones(2, device=device), dim=()), torch.ones(2, device=device))


def test_opcheck(generator):
    x = torch.randn(4, 40, generator=generator, device=generator.device)
    y, tests = torch.zeros(4, device=x.device), ("test_schema", "test_faketensor")
    torch.library.opcheck(launch_statistics.log_sum_exp_rows.registered, (x, y), test_utils=tests)
    torch.library.opcheck(launch_statistics.variance_rows.registered, (x, y, 0.5), test_utils=tests)
    torch.library.opcheck(launch_statistics.prefix_sum_rows.registered, (x, torch.zeros_like(x)), test_utils=tests)
    torch.library.opcheck(launch.sum_squares.registered, (x, y, 1.0), test_utils=tests)


def test_compile(generator, compile_backend):
    x = torch.randn(6, 64, generator=generator, device=generator.device).requires_grad_()

    def step(x):
        y = reduction.cumsum(x) * reduction.var(x, 1, keepdim=True)
        return reduction.logsumexp(y) + reduction.norm(y, dim=1)

    results = []
    for function in (step, torch.compile(step, backend=compile_backend, fullgraph=True)):
        y = function(x)
        results.append((y, torch.autograd.grad(y, x, torch.ones_like(y))[0]))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
