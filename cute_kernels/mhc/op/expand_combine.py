"""The residual after a sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.checks import check_expand_combine, result_of, sizes
from cute_kernels.mhc.op.common import (
    apply,
    checked,
    differentiates,
    empty_like,
    gradient_rows,
    is_known,
    matrix_of,
    recall,
    remember,
    rows,
    takes_reference,
)
from cute_kernels.mhc.reference.dropout import draw_seed
from cute_kernels.mhc.variants import Layout, ResOrientation
from cute_kernels.runtime.autograd import first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import alias, allocator, contiguous_strides
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
    if takes_reference(OP, x, backend):
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
    return combine(OP, f, post, x, res, bias, dropout_p, seed, layout, res_orientation, False)


def combine(op, f, post, x, res, bias, dropout_p, seed, layout, orientation, hands_on: bool) -> Tensor:
    """``expand_combine`` after the choice of the backend. ``hands_on``: see ``ExpandCombine``."""
    key, known, tensors = None, None, (f, post, x, res, bias)
    if seed is None and type(dropout_p) is float and dropout_p == 0.0:
        key, known = recall((op, layout, orientation), *tensors)
    if known is not None:
        owns, options, forward = known
        return apply(ExpandCombine, *tensors, None, options, hands_on, forward) if owns else forward(*tensors)
    dropout_p = as_float(dropout_p)
    arguments = *tensors, dropout_p, seed, layout, orientation
    if isinstance(seed, int):  # not a part of what has been checked
        check_expand_combine(*arguments, op=op)
    else:
        checked(check_expand_combine, *arguments, op=op)
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    else:
        seed = seed.view(1) if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=x.device)
    options = op, dropout_p, layout, orientation
    owns = differentiates(*tensors)
    planned = key is not None and x.numel() > 0 and is_known(key, *tensors)  # no key: a size may be symbolic
    forward = _plan(*tensors, options) if planned else None
    if owns:
        out = apply(ExpandCombine, *tensors, seed, options, hands_on, forward)
    else:
        out = _forward(*tensors, seed, options) if forward is None else forward(*tensors)
    if key is not None and x.numel():
        remember(key, (owns, options, forward) if planned else None, *tensors)
    return out


def _plan(f, post, x, res, bias, options) -> Callable:
    """What ``_forward`` does without dropout for plain tensors like these, all that it asks found."""
    op, dropout_p, layout, orientation = options
    (n, channels), shape, dtype, allocate = sizes(x, layout), tuple(x.shape), x.dtype, allocator(x)
    widths = {result_of(op): (f, channels), "post": (post, n), "x": (x, n * channels), "res": (res, n * n)}
    f, post, x, res = (rows(op, name, t, width) for name, (t, width) in widths.items())
    matrices, strides = [(tuple(t.shape), t.stride()) for t in (f, post, x, res)], contiguous_strides(shape)
    as_rows = tuple(x.shape), (n * channels, 1)
    example = torch.empty_strided(*as_rows, dtype=dtype, device=x.device)
    kernel = launch.expand_combine_kernel(f, bias, post, x, res, False, example, None, None, layout, orientation)
    nothing_dropped = launch.dropout_arguments(dropout_p)

    def forward(f, post, x, res, bias):
        out = allocate(shape, strides, dtype)
        f, post, x, res = (alias(t, *way) for t, way in zip((f, post, x, res), matrices, strict=True))
        kernel(f, bias, post, x, res, None, alias(out, *as_rows), None, None, *nothing_dropped)
        return out

    return forward


def _forward(f, post, x, res, bias, seed, options) -> Tensor:
    op, dropout_p, layout, orientation = options
    n, channels = sizes(x, layout)
    out = empty_like(x)
    launch.expand_combine_forward(
        rows(op, result_of(op), f, channels),
        bias,
        rows(op, "post", post, n),
        rows(op, "x", x, n * channels),
        rows(op, "res", res, n * n),
        seed,
        out.view(-1, n * channels),
        None,
        None,
        dropout_p,
        layout,
        orientation,
    )
    return out


class ExpandCombine(torch.autograd.Function):
    """``hands_on``: x is an alias whose gradient is dout as it came, see ``Composite``."""

    @staticmethod
    def forward(ctx, f, post, x, res, bias, seed, options, hands_on, planned):
        ctx.save_for_backward(f, post, x, res, bias, seed)
        ctx.call = options, hands_on
        ctx.main_grad = getattr(bias, "main_grad", None)
        return _forward(f, post, x, res, bias, seed, options) if planned is None else planned(f, post, x, res, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        f, post, x, res, bias, seed = ctx.saved_tensors
        (op, dropout_p, layout, orientation), hands_on = ctx.call
        needs_f, needs_post, needs_x, needs_res, needs_bias, *_ = ctx.needs_input_grad
        n, channels = sizes(x, layout)
        k = n * channels
        dout_rows, post_rows = gradient_rows(dout, k), rows(op, "post", post, n)
        df, dx = empty_like(f, needs_f), empty_like(x, needs_x and not hands_on)
        sums = needs_post or needs_res
        dpost, dres = empty_like(post, sums), empty_like(res, sums)
        if df is not None or dx is not None or sums:
            launch.expand_combine_backward(
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
        dbias_result = None
        if needs_gradient(needs_bias, bias, ctx.main_grad):
            dbias, dbias_result = gradient_buffer(op, "bias", bias, ctx.main_grad)
            launch.bias_gradient(dout_rows, post_rows, seed, dbias, dropout_p, layout, dbias_result is None)
        if hands_on and needs_x:
            dx = dout
        return df, dpost if needs_post else None, dx, dres if needs_res else None, dbias_result, None, None, None, None
