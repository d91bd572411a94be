"""Matrices that are doubly stochastic to the accuracy of a few iterations."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_sinkhorn
from cute_kernels.mhc.op.common import empty_like, gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import SinkhornVariant
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float

OP = "sinkhorn"


def sinkhorn(
    logits: Tensor,
    *,
    iterations: int = 20,
    variant: SinkhornVariant = "log",
    eps: float = 1e-6,
    backend: Backend | None = None,
) -> Tensor:
    """Sinkhorn and Knopp's normalisation of exp(logits), rows (sums over the last dimension) and columns in turn.

    Columns are normalised last: their sums are 1 to rounding and eps, those of rows as far as the iterations have
    converged.

    - "log": f = g = 0; f_i = -logsumexp_j(x_ij + g_j), g_j = -logsumexp_i(x_ij + f_i); P = exp(f_i + x_ij + g_j).
    - "softmax_eps": P = softmax_j(x) + eps; columns; then iterations - 1 times rows, columns: P / (sum + eps).
    - "exp_clamp": P = exp(x - max_j x); iterations times rows, columns: P / max(sum, eps).

    Args:
        logits: (..., n, n) fp32, n = 1, 2, 4 or 8; a matrix is one piece of memory; the leading dimensions must
            collapse to matrices of one stride.
        iterations: 1 to 100.
        variant: "log", "softmax_eps" or "exp_clamp".
        eps: from 2^-126 to 1; "log" has none.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        A contiguous fp32 tensor of the logits' shape.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 in registers, one thread a matrix, whose bits the other matrices do not change. The backward repeats the
        forward's iterations and differentiates each.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 9 and 19.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> p = mhc.sinkhorn(torch.tensor([[[0.0, 1.0], [2.0, 3.0]]]))
        >>> p.sum(-1).allclose(torch.ones(2)), p.sum(-2).allclose(torch.ones(2))
        (True, True)
    """
    eps = as_float(eps)
    if uses_reference(OP, logits, backend):
        return reference.sinkhorn(logits, iterations=iterations, variant=variant, eps=eps)
    check_sinkhorn(logits, iterations, variant, eps)
    if differentiates(logits):
        return apply(_Sinkhorn, logits, iterations, variant, eps)
    return _forward(logits, iterations, variant, eps)


def _forward(logits: Tensor, *options) -> Tensor:
    mode, size = mode_of(logits), logits.shape[-1] ** 2
    res = empty_like(logits, mode)
    mode.of(launch.sinkhorn_forward)(rows(OP, "logits", logits, size), matrix_of(res, size), *options)
    return res


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, iterations, variant, eps):
        ctx.save_for_backward(logits)
        ctx.options = iterations, variant, eps
        return _forward(logits, iterations, variant, eps)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dres):
        (logits,) = ctx.saved_tensors
        mode, size = mode_of(logits, dres), logits.shape[-1] ** 2
        dlogits, dres = empty_like(logits, mode), gradient_rows(dres, size, mode.eager)
        logits = rows(OP, "logits", logits, size)
        mode.of(launch.sinkhorn_backward)(logits, dres, matrix_of(dlogits, size), *ctx.options)
        return dlogits, None, None, None
