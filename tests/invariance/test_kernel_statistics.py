"""batch_invariant: logsumexp, cumsum, norms, variances and losses in torch's forms of them, and their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from tests.runtime.bits import assert_same_bits

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
    "dist": lambda x: torch.dist(x[0], x[1]),
    "vdot": lambda x: torch.vdot(x[0, 0], x[1, 1]),
    "trace": lambda x: x[2, :, 3:12].trace(),
    "nansum": lambda x: x.masked_fill(x > 0.5, math.nan).nansum(),
    "nansum of rows": lambda x: x.masked_fill(x > 0.5, math.nan).nansum((0, 2), keepdim=True),
    "nanmean": lambda x: x.masked_fill(x > 0.5, math.nan).nanmean(-1),
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


def classes_of(x, count):
    """A class of each place but those along the second dimension; some are -100, which is ignored."""
    places = torch.arange(x[:, 0].numel(), device=x.device).view(x[:, 0].shape)
    return torch.where(places % 7 == 3, -100, places * 5 % count)


LOSSES = {  # of x, targets in (0, 1), and further arguments
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": lambda x, y, **kw: F.huber_loss(x, y, delta=0.7, **kw),
    "smooth l1": lambda x, y, **kw: F.smooth_l1_loss(x, y, beta=0.6, **kw),
    "bce": lambda x, y, **kw: F.binary_cross_entropy(x.sigmoid(), y, weight=y, **kw),
    "bce with logits": lambda x, y, **kw: F.binary_cross_entropy_with_logits(
        x, y, weight=y, pos_weight=y.new_full((64,), 1.5), **kw
    ),
    "soft margin": lambda x, y, **kw: F.soft_margin_loss(x, 2 * y.round() - 1, **kw),
    "kl": lambda x, y, **kw: F.kl_div(x.log_softmax(-1), y, **kw),
}
CLASSES = {
    "(N, C, L)": lambda x, y, **kw: F.cross_entropy(x, classes_of(x, 9), **kw),
    "(N, C, H, W), weights": lambda x, y, **kw: F.nll_loss(
        x.view(6, 9, 8, 8), classes_of(x.view(6, 9, 8, 8), 9), weight=y[0, :, 0], **kw
    ),
    "5 dimensions": lambda x, y, **kw: F.cross_entropy(
        x.view(3, 6, 3, 8, 8), classes_of(x.view(3, 6, 3, 8, 8), 6), label_smoothing=0.1, **kw
    ),
}

COMPOSITES = {  # torch makes these of elementwise operators and sums
    "hinge": lambda x, y, **kw: F.hinge_embedding_loss(x, 2 * y.round() - 1, **kw),
    "poisson": lambda x, y, **kw: F.poisson_nll_loss(x, y, full=True, **kw),
    "gaussian": lambda x, y, **kw: F.gaussian_nll_loss(x, y, y + 0.1, **kw),
    "cosine": lambda x, y, **kw: F.cosine_embedding_loss(x[0], y[0], 2 * y[0, :, 0].round() - 1, **kw),
    "triplet": lambda x, y, **kw: F.triplet_margin_loss(x, y, y.flip(1), **kw),
    "ranking": lambda x, y, **kw: F.margin_ranking_loss(x, y, 2 * y.round() - 1, **kw),
    "soft margins of labels": lambda x, y, **kw: F.multilabel_soft_margin_loss(x, y.round(), **kw),
}


def inputs_of(dtype, generator):
    device = generator.device
    x = torch.randn(6, 9, 64, generator=generator, device=device).to(dtype).requires_grad_()
    return x, torch.rand(6, 9, 64, generator=generator, device=device).clamp(0.01, 0.99).to(dtype)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES | CLASSES | COMPOSITES)
def test_losses_against_fp64(name, reduction, dtype, generator):
    function = (LOSSES | CLASSES | COMPOSITES)[name]
    x, y = inputs_of(dtype, generator)
    wide = x.detach().double().requires_grad_()
    wanted = function(wide, y.double(), reduction=reduction)
    dy = torch.rand(wanted.shape, generator=generator, device=x.device).to(dtype) + 0.5
    (exact,) = torch.autograd.grad(wanted, wide, dy.double())
    with batch_invariant():
        found = function(x, y, reduction=reduction)
        (dx,) = torch.autograd.grad(found, x, dy)
    assert found.dtype is dtype and found.shape == wanted.shape
    tolerance = {"rtol": 0.06, "atol": 0.06} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    torch.testing.assert_close(dx.double(), exact, **tolerance)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_sum_of_its_elements(name, dtype, generator):
    """Rounded ones, in the order of every whole sum; an element, and its gradient, has the same bits alone."""
    x, y = inputs_of(dtype, generator)
    with batch_invariant():
        elements = LOSSES[name](x, y, reduction="none")
        (dx,) = torch.autograd.grad(elements, x, torch.ones_like(elements))
        row = x.detach()[2:3].requires_grad_()
        alone = LOSSES[name](row, y[2:3], reduction="none")
        (dx_alone,) = torch.autograd.grad(alone, row, torch.ones_like(alone))
        assert_same_bits(alone, elements[2:3])
        assert_same_bits(dx_alone, dx[2:3])
        assert_same_bits(LOSSES[name](x, y, reduction="sum"), elements.detach().sum())
        assert_same_bits(LOSSES[name](x, y, reduction="mean"), elements.detach().mean())


def test_losses_of_arguments_that_do_not_fit(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    with batch_invariant():
        with pytest.raises(ValueError, match=r"nll_loss2d: target must have the shape \(2, 4, 5\), got \(2, 4, 4\)"):
            F.nll_loss(x, torch.zeros(2, 4, 4, device=device, dtype=torch.long))
        with pytest.raises(ValueError, match=r"trace: self must be a matrix, got \(3, 4, 5\)"):
            x[0].trace()
        assert F.mse_loss(x[:0], x[:0]).isnan() and F.mse_loss(x[:0], x[:0], reduction="sum") == 0
