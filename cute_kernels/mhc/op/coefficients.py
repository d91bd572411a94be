"""From the projection of a token to what it is mixed with."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_coefficients
from cute_kernels.mhc.op.common import empty_like, gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import Constants, Variant, variant_of
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference

OP = "coefficients"


def coefficients(
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    n: int,
    *,
    variant: str | Variant,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``h = alpha * H / rms + beta`` the weights of the streams, and the logits of the residual matrix.

    ``pre = sigmoid(h) + pre_eps``, ``post = post_mult * sigmoid(h)``, and the logits of res are h itself. rms =
    sqrt(mean_square + rms_eps), or sqrt(mean_square) + rms_eps, as the variant says.

    Args:
        H: (..., N) fp32, N = n * n + 2 * n: columns pre (n), post (n), res (n * n); last dimension contiguous; the
            leading dimensions must collapse to rows of one stride.
        mean_square: (...,) fp32, contiguous.
        alpha: (3,) fp32 or bf16: the factors of pre, of post, of res.
        beta: (N,) fp32 or bf16.
        n: number of streams, 1, 2, 4 or 8.
        variant: a name of ``VARIANTS`` or a ``Variant``.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        pre (..., n), post (..., n), res_logits (..., n, n), fp32, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32; a token's coefficients and gradients have the same bits whatever the other tokens. The gradients of alpha
        and beta are added over 32 tokens at a time, then over these in a fixed order, without atomics; into
        ``main_grad`` (fp32) where that exists, and ``.grad`` stays None. A tensor hook on such a parameter is an error
        in the backward. A token of zeros has no gradient of its mean square where eps is outside the root.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 16 to 18.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> H, mean_square = torch.zeros(3, 8), torch.ones(3)
        >>> pre, post, logits = mhc.coefficients(H, mean_square, torch.ones(3), torch.zeros(8), 2, variant="liger")
        >>> pre[0], post[0], logits.shape
        (tensor([0.5000, 0.5000]), tensor([1., 1.]), torch.Size([3, 2, 2]))
    """
    if uses_reference(OP, H, backend):
        return reference.coefficients(H, mean_square, alpha, beta, n, variant=variant)
    variant = variant_of(OP, variant)
    check_coefficients(H, mean_square, alpha, beta, n)
    if differentiates(H, mean_square, alpha, beta):
        return apply(_Coefficients, H, mean_square, alpha, beta, n, variant.constants)
    return _forward(H, mean_square, alpha, beta, n, variant.constants)


def _forward(
    H: Tensor, mean_square: Tensor, alpha: Tensor, beta: Tensor, n: int, constants: Constants
) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype, mode = H.shape[:-1], H.dtype, mode_of(H, mean_square, alpha, beta)
    pre, post = mode.empty(H, (*shape, n), dtype), mode.empty(H, (*shape, n), dtype)
    logits = mode.empty(H, (*shape, n, n), dtype)
    mode.of(launch.coefficients_forward)(
        rows(OP, "H", H, H.shape[-1]),
        mean_square.resolve_neg().view(-1),  # of one token it counts as contiguous, negated or not
        alpha,
        beta,
        matrix_of(pre, n),
        matrix_of(post, n),
        matrix_of(logits, n * n),
        *constants,
    )
    return pre, post, logits


class _Coefficients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, H, mean_square, alpha, beta, n, constants):
        ctx.save_for_backward(H, mean_square, alpha, beta)
        ctx.call = n, constants
        ctx.main_grads = getattr(alpha, "main_grad", None), getattr(beta, "main_grad", None)
        ctx.set_materialize_grads(False)
        return _forward(H, mean_square, alpha, beta, n, constants)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dpre, dpost, dlogits):
        H, mean_square, alpha, beta = ctx.saved_tensors
        n, constants = ctx.call
        needs_H, needs_mean_square, needs_alpha, needs_beta, *_ = ctx.needs_input_grad
        needs_alpha = needs_gradient(needs_alpha, alpha, ctx.main_grads[0])
        needs_beta = needs_gradient(needs_beta, beta, ctx.main_grads[1])
        dalpha = dalpha_result = dbeta = dbeta_result = None
        if needs_alpha:
            dalpha, dalpha_result = gradient_buffer(OP, "alpha", alpha, ctx.main_grads[0])
        if needs_beta:
            dbeta, dbeta_result = gradient_buffer(OP, "beta", beta, ctx.main_grads[1])
        mode = mode_of(H, mean_square, alpha, beta, dpre, dpost, dlogits, dalpha, dbeta)
        columns, dH, dmean_square = H.shape[-1], empty_like(H, mode), empty_like(mean_square, mode)
        launch.coefficients_backward(
            mode,
            rows(OP, "H", H, columns),
            mean_square.resolve_neg().view(-1),
            alpha,
            beta,
            gradient_rows(dpre, n, mode.eager),
            gradient_rows(dpost, n, mode.eager),
            gradient_rows(dlogits, n * n, mode.eager),
            matrix_of(dH, columns),
            dmean_square.view(-1),
            n=n,
            parameters=launch.CoefficientGradients(
                dbeta=dbeta,
                dalpha=dalpha,
                accumulate_beta=needs_beta and dbeta_result is None,
                accumulate_alpha=needs_alpha and dalpha_result is None,
            ),
            constants=constants,
            has_sinkhorn=False,
        )
        return (
            dH if needs_H else None,
            dmean_square if needs_mean_square else None,
            dalpha_result,
            dbeta_result,
            None,
            None,
        )
