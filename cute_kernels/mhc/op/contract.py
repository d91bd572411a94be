"""From the residual to the output of a model, without parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_contract, sizes
from cute_kernels.mhc.op.common import gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import Layout
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference

OP = "contract"


def contract(x: Tensor, *, layout: Layout = "streams", backend: Backend | None = None) -> Tensor:
    """The mean of the streams.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n).
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32, streams in ascending order, rounded once. The gradient of every stream is a n-th of the output's, rounded
        once.

    Source:
        Zhu et al., Hyper-Connections, arXiv 2409.19606, where it is the sum.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x = torch.stack((torch.zeros(8), torch.ones(8)))  # 2 streams
        >>> mhc.contract(x[None])[0, 0].item()
        0.5
    """
    if uses_reference(OP, x, backend):
        return reference.contract(x, layout=layout)
    check_contract(x, layout)
    if differentiates(x):
        return apply(_Contract, x, layout)
    return _forward(x, layout)


def _forward(x: Tensor, layout: str) -> Tensor:
    (n, channels), mode = sizes(x, layout), mode_of(x)
    out = mode.empty(x, (*x.shape[:-2], channels), x.dtype)
    x = rows(OP, "x", x, n * channels)
    mode.of(launch.aggregate_forward)(x, None, matrix_of(out, channels), layout, 1.0 / n)
    return out


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layout):
        ctx.call = sizes(x, layout), layout
        return _forward(x, layout)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        (n, channels), layout = ctx.call
        token = (n, channels) if layout == "streams" else (channels, n)
        mode = mode_of(dout)
        dx = mode.empty(dout, (*dout.shape[:-1], *token), dout.dtype)
        dout = gradient_rows(dout, channels, mode.eager)
        mode.of(launch.expand_streams)(dout, matrix_of(dx, n * channels), layout, 1.0 / n)
        return dx, None
