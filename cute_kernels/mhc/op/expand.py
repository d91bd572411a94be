"""The residual at the input of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_expand
from cute_kernels.mhc.op.common import gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import Layout
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference

OP = "expand"


def expand(h: Tensor, n: int, *, layout: Layout = "streams", backend: Backend | None = None) -> Tensor:
    """n equal streams ``x_i = h``.

    Args:
        h: (..., C) bf16, fp16 or fp32, C from 8; last dimension contiguous; the leading dimensions must collapse to
            rows of one stride.
        n: number of streams, 1, 2, 4 or 8.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n).
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., n, C) for layout "streams", (..., C, n) for "channels"; in h's dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Copies. The gradient is the streams' sum in fp32, in ascending order, rounded once.

    Source:
        Zhu et al., Hyper-Connections, arXiv 2409.19606: how the streams begin.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> h = torch.ones(3, 8)
        >>> mhc.expand(h, 4).shape, mhc.expand(h, 4, layout="channels").shape
        (torch.Size([3, 4, 8]), torch.Size([3, 8, 4]))
    """
    if uses_reference(OP, h, backend):
        return reference.expand(h, n, layout=layout)
    check_expand(h, n, layout)
    if differentiates(h):
        return apply(_Expand, h, n, layout)
    return _forward(h, n, layout)


def _forward(h: Tensor, n: int, layout: str) -> Tensor:
    channels, mode = h.shape[-1], mode_of(h)
    x = mode.empty(h, (*h.shape[:-1], n, channels) if layout == "streams" else (*h.shape, n), h.dtype)
    mode.of(launch.expand_streams)(rows(OP, "h", h, channels), matrix_of(x, n * channels), layout, 1.0)
    return x


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, n, layout):
        ctx.call = n, layout
        return _forward(h, n, layout)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dx):
        n, layout = ctx.call
        channels = dx.shape[-1] if layout == "streams" else dx.shape[-2]
        mode = mode_of(dx)
        dh, dx_rows = mode.empty(dx, (*dx.shape[:-2], channels), dx.dtype), gradient_rows(dx, n * channels, mode.eager)
        mode.of(launch.aggregate_forward)(dx_rows, None, matrix_of(dh, channels), layout, 1.0)
        return dh, None, None
