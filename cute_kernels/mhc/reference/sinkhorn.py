"""Matrices that are doubly stochastic to the accuracy of a few iterations."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_sinkhorn, strict_tokens
from cute_kernels.runtime.autograd import first_derivative_only
from cute_kernels.runtime.real import as_float


def sinkhorn(
    logits: Tensor,
    *,
    iterations: int = 20,
    variant: str = "log",
    eps: float = 1e-6,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sinkhorn and Knopp's normalisation of exp(logits), rows (sums over the last dimension) and columns in turn.

    Equations 9 and 19. Columns are normalised last: their sums are 1 to rounding and eps, those of rows as far as the
    iterations have converged.

    "log"          f = g = 0; f_i = -logsumexp_j(x_ij + g_j), g_j = -logsumexp_i(x_ij + f_i); P = exp(f_i + x_ij + g_j).
    "softmax_eps"  P = softmax_j(x) + eps; columns; then iterations - 1 times rows, columns: P / (sum + eps).
    "exp_clamp"    P = exp(x - max_j x); iterations times rows, columns: P / max(sum, eps).

    Args:
        logits: (..., n, n) fp32, n = 1, 2, 4 or 8.
        iterations: 1 to 100.
        variant: "log", "softmax_eps" or "exp_clamp".
        eps: between 0 and 1, also in fp32; "log" has none.

    Returns:
        A contiguous tensor of the logits' shape in ``compute_dtype``.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    eps = as_float(eps)
    check_sinkhorn(logits, iterations, variant, eps, compute_dtype=compute_dtype)
    strict_tokens("sinkhorn", logits=(logits, 2))
    x = logits.to(compute_dtype)
    res = _log(x, iterations) if variant == "log" else _Divisions.apply(x, iterations, variant, eps)
    return res.contiguous()


def _log(x: Tensor, iterations: int) -> Tensor:
    f, g = torch.zeros_like(x[..., :, :1]), torch.zeros_like(x[..., :1, :])
    for _ in range(iterations):
        f = -torch.logsumexp(x + g, -1, keepdim=True)
        g = -torch.logsumexp(x + f, -2, keepdim=True)
    return torch.exp(f + x + g)


class _Divisions(torch.autograd.Function):
    """The other two. The backward carries u = P * dP, the gradient of log P: dP itself grows by 1 / eps a step.

    Of a step y = P / (sum + eps), or P / max(sum, eps) where the sum is larger: u_P = u_y - y * sum(u_y). Where eps is
    larger, u_P = u_y.
    """

    @staticmethod
    def forward(ctx, x, iterations, variant, eps):
        if variant == "softmax_eps":
            start = torch.softmax(x, -1)
            p, steps = start + eps, (-1, -2) * iterations
            steps = steps[1:]  # the softmax was the first
        else:
            start = None
            p, steps = torch.exp(x - x.amax(-1, keepdim=True)), (-1, -2) * iterations
        kept, free = [], []
        for dim in steps:
            total = p.sum(dim, keepdim=True)
            p = p / (total + eps if variant == "softmax_eps" else total.clamp_min(eps))
            kept.append(p)
            free.append(None if variant == "softmax_eps" else total >= eps)
        ctx.save_for_backward(start, *kept, *free)
        ctx.steps, ctx.eps = steps, eps
        return p

    @staticmethod
    @first_derivative_only
    def backward(ctx, dp):
        start, *saved = ctx.saved_tensors
        kept, free = saved[: len(ctx.steps)], saved[len(ctx.steps) :]
        u = dp * kept[-1]
        for dim, p, is_free in reversed(list(zip(ctx.steps, kept, free, strict=True))):
            total = u.sum(dim, keepdim=True)
            u = u - p * (total if is_free is None else total * is_free)
        if start is not None:
            u = u * (start / (start + ctx.eps))
            u = u - start * u.sum(-1, keepdim=True)
        return u, None, None, None
