"""The residual after a sublayer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_expand_combine, result_of, sizes
from cute_kernels.mhc.op.common import empty_like, gradient_rows, matrix_of, rows
from cute_kernels.mhc.reference.dropout import draw_seed
from cute_kernels.mhc.variants import Layout, ResOrientation
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float

OP = "expand_combine"


def expand_combine(
    f: Tensor,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    layout: Layout = "streams",
    res_orientation: ResOrientation = "io",
    backend: Backend | None = None,
) -> Tensor:
    """``out_o = dropout((f + bias) post_o) + sum_i R(i, o) x_i``: the sublayer's output added to the mixed streams.

    The leading dimensions of each tensor must collapse to rows of one stride.

    Args:
        f: (..., C) in x's dtype, the sublayer's output; last dimension contiguous.
        post: (..., n) fp32, last dimension contiguous.
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        res: (..., n, n) fp32, a matrix is one piece of memory.
        bias: (C,) fp32 or bf16, the sublayer's; None: 0.
        dropout_p: in [0, 1); each of the K = n * C elements of a token has a mask of its own, ``dropout_mask``'s.
        seed: int64 tensor of one element on x's device, or an int; None: drawn on the device from torch's generator
            where dropout_p > 0. It is not read on the host, and its mask is made again in the backward.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n).
        res_orientation: "io": R(i, o) = res[i, o]; "oi": R(i, o) = res[o, i].
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The new residual, of x's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32, streams in ascending order, rounded once. The gradients of post and res sum over C in an order fixed by C,
        the dtype and the alignment of the rows; a token's output and gradients have the same bits whatever the other
        tokens, but for its mask, which depends on its place. The gradient of bias is added over 64 tokens at a time,
        then over these in a fixed order, without atomics; into ``bias.main_grad`` (fp32) where that exists, and
        ``.grad`` stays None. A tensor hook on such a bias is an error in the backward. An incoming gradient whose
        tokens are not rows of one stride is copied.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x, f, post = torch.ones(3, 2, 8), torch.ones(3, 8), torch.tensor([[0.0, 2.0]]).expand(3, 2).contiguous()
        >>> out = mhc.expand_combine(f, post, x, torch.eye(2).repeat(3, 1, 1))
        >>> out[0, :, 0]  # stream 0 as it was, stream 1 plus 2 f
        tensor([1., 3.])
    """
    if uses_reference(OP, x, backend):
        return reference.expand_combine(
            f,
            post,
            x,
            res,
            bias=bias,
            dropout_p=dropout_p,
            seed=seed,
            layout=layout,
            res_orientation=res_orientation,
        )
    dropout_p = as_float(dropout_p)
    check_expand_combine(f, post, x, res, bias, dropout_p, seed, layout, res_orientation)
    return combine(OP, f, post, x, res, bias, dropout_p, seed, layout, res_orientation, False)


def combine(
    op: str,
    f: Tensor,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | int | None,
    layout: str,
    orientation: str,
    passes_dout: bool,
) -> Tensor:
    """``expand_combine`` of checked arguments, by the kernels. ``passes_dout``: see ``ExpandCombine``."""
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    else:
        seed = seed.view(1) if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=x.device)
    options = Options(op, dropout_p, layout, orientation)
    if differentiates(f, post, x, res, bias):
        return apply(ExpandCombine, f, post, x, res, bias, seed, options, passes_dout)
    return _forward(f, post, x, res, bias, seed, options)


class Options(NamedTuple):
    """The options of a call."""

    op: str
    dropout_p: float
    layout: str
    orientation: str


def _forward(f, post, x, res, bias, seed, options: Options) -> Tensor:
    op, dropout_p, layout, orientation = options
    shape = x.shape
    n, channels = (shape[-2], shape[-1]) if layout == "streams" else (shape[-1], shape[-2])
    mode = mode_of(x, f, post, res, bias, seed)
    out = mode.empty(x, shape, x.dtype)
    mode.of(launch.expand_combine_forward)(
        rows(op, result_of(op), f, channels),
        bias,
        rows(op, "post", post, n),
        rows(op, "x", x, n * channels),
        rows(op, "res", res, n * n),
        seed,
        matrix_of(out, n * channels),
        None,
        None,
        dropout_p,
        layout,
        orientation,
    )
    return out


class ExpandCombine(torch.autograd.Function):
    """``passes_dout``: x is an alias whose "gradient" is dout as it came, see ``Composite``."""

    @staticmethod
    def forward(ctx, f, post, x, res, bias, seed, options, passes_dout):
        ctx.save_for_backward(f, post, x, res, bias, seed)
        ctx.call = options, passes_dout
        ctx.main_grad = getattr(bias, "main_grad", None)
        return _forward(f, post, x, res, bias, seed, options)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        f, post, x, res, bias, seed = ctx.saved_tensors
        (op, dropout_p, layout, orientation), passes_dout = ctx.call
        needs_f, needs_post, needs_x, needs_res, needs_bias, *_ = ctx.needs_input_grad
        n, channels = sizes(x, layout)
        k = n * channels
        dbias = dbias_result = None
        if needs_gradient(needs_bias, bias, ctx.main_grad):
            dbias, dbias_result = gradient_buffer(op, "bias", bias, ctx.main_grad)
        mode = mode_of(dout, f, post, x, res, bias, seed, dbias)
        dout_rows, post_rows = gradient_rows(dout, k, mode.eager), rows(op, "post", post, n)
        df, dx = empty_like(f, mode, needs_f), empty_like(x, mode, needs_x and not passes_dout)
        needs_coefficients = needs_post or needs_res
        dpost, dres = empty_like(post, mode, needs_coefficients), empty_like(res, mode, needs_coefficients)
        if df is not None or dx is not None or needs_coefficients:
            mode.of(launch.expand_combine_backward)(
                dout_rows,
                rows(op, result_of(op), f, channels),
                bias,
                post_rows,
                rows(op, "x", x, k),
                rows(op, "res", res, n * n),
                seed,
                matrix_of(dx, k),
                matrix_of(df, channels),
                matrix_of(dpost, n),
                matrix_of(dres, n * n),
                dropout_p,
                layout,
                orientation,
            )
        if dbias is not None:
            mode.of(launch.bias_gradient)(dout_rows, post_rows, seed, dbias, dropout_p, layout, dbias_result is None)
        if passes_dout and needs_x:
            dx = dout
        return df, dpost if needs_post else None, dx, dres if needs_res else None, dbias_result, None, None, None
