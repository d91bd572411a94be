"""The input of a sublayer."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_aggregate, sizes
from cute_kernels.mhc.op.common import empty_like, gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import Layout
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference

OP = "aggregate"


def aggregate(x: Tensor, pre: Tensor, *, layout: Layout = "streams", backend: Backend | None = None) -> Tensor:
    """``sum_i pre_i x_i``: the sum of the streams that a sublayer gets.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        pre: (..., n) fp32, last dimension contiguous.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n).
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32, streams in ascending order, rounded once. The gradient of pre sums over C in an order fixed by C, the
        dtype and the alignment of the tokens. A token's output and gradients have the same bits whatever the other
        tokens and their number; an incoming gradient whose tokens are not rows of one stride is copied.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x = torch.ones(3, 2, 8)  # 3 tokens, 2 streams, 8 channels
        >>> mhc.aggregate(x, torch.full((3, 2), 0.25))[0, 0].item()
        0.5
    """
    if uses_reference(OP, x, backend):
        return reference.aggregate(x, pre, layout=layout)
    check_aggregate(x, pre, layout)
    if differentiates(x, pre):
        return apply(_Aggregate, x, pre, layout)
    return _forward(x, pre, layout)


def _forward(x: Tensor, pre: Tensor, layout: str) -> Tensor:
    (n, channels), mode = sizes(x, layout), mode_of(x, pre)
    out = mode.empty(x, (*x.shape[:-2], channels), x.dtype)
    x, pre = rows(OP, "x", x, n * channels), rows(OP, "pre", pre, n)
    mode.of(launch.aggregate_forward)(x, pre, matrix_of(out, channels), layout, 1.0)
    return out


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pre, layout):
        ctx.save_for_backward(x, pre)
        ctx.layout = layout
        return _forward(x, pre, layout)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        x, pre = ctx.saved_tensors
        n, channels = sizes(x, ctx.layout)
        k = n * channels
        mode = mode_of(x, pre, dout)
        dx, dpre = empty_like(x, mode, ctx.needs_input_grad[0]), empty_like(pre, mode, ctx.needs_input_grad[1])
        mode.of(launch.aggregate_backward)(
            gradient_rows(dout, channels, mode.eager),
            rows(OP, "x", x, k),
            rows(OP, "pre", pre, n),
            matrix_of(dx, k),
            matrix_of(dpre, n),
            ctx.layout,
        )
        return dx, dpre, None
