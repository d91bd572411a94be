"""The products of a token with phi, and its mean square."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import Precision, check_projection, sizes
from cute_kernels.mhc.op.common import empty_like, matrix_of, rows
from cute_kernels.mhc.variants import Layout
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference

OP = "projection"


def projection(
    x: Tensor,
    phi: Tensor,
    *,
    norm_weight: Tensor | None = None,
    layout: Layout = "streams",
    precision: Precision = "tf32",
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """``H = x (phi * norm_weight)^T`` and ``mean_square = mean(x^2)``: H is not divided by the rms.

    That, and with it eps, is left to ``coefficients``.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        phi: (N, K) fp32 or bf16, K = n * C in x's memory order; N = n * n + 2 * n, or n for a head.
        norm_weight: (K,) fp32 or bf16, the weight of the RMS norm; None: 1.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n).
        precision: accuracy of the products on tensor cores, which add bf16 parts of the factors in fp32. "tf32": parts
            up to 2^-16 of the largest, no less than tf32; "fp32": up to 2^-24.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        H (..., N) and mean_square (...,), fp32.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The CTAs of a cluster (2 to 16 by C, n and the dtypes) share the channels, eight warps each the steps of 16
        columns of a CTA; a warp adds in ascending order in fp32, then the warps' and the CTAs' sums are added in a
        fixed order. Where 16 CTAs cannot hold phi, x is not bf16, or rows are off 16 bytes: S parts of K, a power of
        two, of up to 4096 columns, part s has the tiles s, s + S, ... of K. Either way a token's H, mean square and
        gradient have the same bits whatever the other tokens, their number, and the GPU's number of SMs.

        The gradients of phi and norm_weight are added over chunks of 512 tokens, groups of four chunks, then all
        groups, in ascending order, without atomics (phi of more than 32 rows: no groups, in "fp32" chunks of 480, and
        on SM90, for bf16 rows on 16 bytes, in "tf32" chunks of 1024); into ``main_grad`` (fp32) where that exists, and
        ``.grad`` stays None. A tensor hook on such a parameter is an error in the backward.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 14 and 15.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> H, mean_square = mhc.projection(torch.full((3, 2, 8), 2.0), torch.ones(8, 16))
        >>> H.shape, H[0, 0].item(), mean_square[0].item()
        (torch.Size([3, 8]), 32.0, 4.0)
    """
    if uses_reference(OP, x, backend):
        return reference.projection(x, phi, norm_weight=norm_weight, layout=layout, precision=precision)
    check_projection(x, phi, norm_weight, layout, precision)
    if differentiates(x, phi, norm_weight):
        return apply(_Projection, x, phi, norm_weight, layout, precision)
    return _forward(x, phi, norm_weight, layout, precision)


def _forward(x, phi, norm_weight, layout, precision) -> tuple[Tensor, Tensor]:
    (n, channels), tokens, columns = sizes(x, layout), x.shape[:-2], phi.shape[0]
    mode, x = mode_of(x, phi, norm_weight), rows(OP, "x", x, n * channels)
    H, mean_square = mode.empty(x, (*tokens, columns), torch.float32), mode.empty(x, tokens, torch.float32)
    results = matrix_of(H, columns), mean_square.view(-1)
    mode.of(launch.projection_forward)(x, phi, norm_weight, *results, n, layout, precision)
    return H, mean_square


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, phi, norm_weight, layout, precision):
        ctx.save_for_backward(x, phi, norm_weight)
        ctx.call = layout, precision
        ctx.main_grads = getattr(phi, "main_grad", None), getattr(norm_weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        return _forward(x, phi, norm_weight, layout, precision)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dH, dmean_square):
        x, phi, norm_weight = ctx.saved_tensors
        layout, precision = ctx.call
        needs_x, needs_phi, needs_weight, *_ = ctx.needs_input_grad
        needs_phi = needs_gradient(needs_phi, phi, ctx.main_grads[0])
        needs_weight = needs_gradient(needs_weight, norm_weight, ctx.main_grads[1])
        n, channels = sizes(x, layout)
        tokens, columns, k = x.shape[:-2], phi.shape[0], n * channels
        dH = x.new_zeros((*tokens, columns), dtype=torch.float32) if dH is None else dH.contiguous()
        if dmean_square is None:
            dmean_square = x.new_zeros(tokens, dtype=torch.float32)
        dphi = dphi_result = dweight = dweight_result = None
        if needs_phi:
            dphi, dphi_result = gradient_buffer(OP, "phi", phi, ctx.main_grads[0])
        if needs_weight:
            dweight, dweight_result = gradient_buffer(OP, "norm_weight", norm_weight, ctx.main_grads[1])
        mode = mode_of(x, phi, norm_weight, dH, dmean_square, dphi, dweight)
        dx = empty_like(x, mode, needs_x)
        launch.projection_backward(
            mode,
            rows(OP, "x", x, k),
            phi,
            norm_weight,
            matrix_of(dH, columns),
            dmean_square.contiguous().resolve_neg().view(-1),
            matrix_of(dx, k),
            n=n,
            layout=layout,
            precision=precision,
            parameters=launch.PhiGradients(
                dphi=dphi,
                dnorm_weight=dweight,
                accumulate_phi=needs_phi and dphi_result is None,
                accumulate_norm_weight=needs_weight and dweight_result is None,
            ),
        )
        return dx, dphi_result, dweight_result, None, None
