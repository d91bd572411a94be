"""What is done with the streams: aggregated, expanded, combined."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc.config import BIAS_CHUNK, product_layout
from cute_kernels.mhc.launch import plans
from cute_kernels.mhc.launch.plans import (
    Launch,
    cutlass_dtypes,
    dropout_arguments,
    dtypes_of,
    registered,
    row_alignment,
    rows_key,
    rows_of_sums,
    streams_of,
    zero,
)


@registered("Tensor x, Tensor? pre, Tensor(a!) out, str layout, float scale")
def aggregate_forward(x: Tensor, pre: Tensor | None, out: Tensor, layout: str, scale: float) -> None:
    """out (M, C): the sum of x's streams, each times its weight of pre (M, n), or all times ``scale``."""
    if not x.shape[0]:
        return
    key = ("aggregate_forward", layout, x.get_device(), rows_key(x, pre, out))
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import aggregate_forward

        arch, (dtype,) = plans.arch_of(x.get_device()), cutlass_dtypes(x)
        streams = streams_of(layout, out.shape[1], x, out)
        function = plans.known[key] = aggregate_forward(arch, dtype, pre is not None, row_alignment(pre), streams)
    function(x, pre, out, scale)


@registered("Tensor dout, Tensor x, Tensor? pre, Tensor(a!)? dx, Tensor(b!)? dpre, str layout")
def aggregate_backward(
    dout: Tensor, x: Tensor, pre: Tensor | None, dx: Tensor | None, dpre: Tensor | None, layout: str
) -> None:
    """dx (M, K) by way of pre (M, n), and dpre (M, n), from dout (M, C)."""
    if not x.shape[0]:
        return
    if dx is None:
        pre = None
    key = ("aggregate_backward", layout, dpre is None, x.get_device(), rows_key(dout, x, pre, dx))
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import aggregate_backward

        arch, (dtype,) = plans.arch_of(x.get_device()), cutlass_dtypes(x)
        streams = streams_of(layout, dout.shape[1], x, dout, dx)
        needs = (dx is not None, dpre is not None)
        function = plans.known[key] = aggregate_backward(arch, dtype, *needs, row_alignment(pre), streams)
    function(dout, x, pre, dx, dpre)


@registered("Tensor h, Tensor(a!) x, str layout, float scale")
def expand_streams(h: Tensor, x: Tensor, layout: str, scale: float) -> None:
    """Every stream of x (M, K) is ``scale`` times h (M, C)."""
    if not h.shape[0]:
        return
    key = ("expand_streams", layout, h.get_device(), rows_key(h, x))
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import expand_streams

        arch, (dtype,), streams = plans.arch_of(h.get_device()), cutlass_dtypes(h), streams_of(layout, h.shape[1], x, h)
        function = plans.known[key] = expand_streams(arch, dtype, streams)
    function(h, x, scale)


@registered(
    "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!) out, Tensor? pre, "
    "Tensor(b!)? layer_input, float dropout_p, str layout, str orientation"
)
def expand_combine_forward(
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    seed: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    layer_input: Tensor | None,
    dropout_p: float,
    layout: str,
    orientation: str,
) -> None:
    """out (M, K) from f (M, C), post (M, n), x (M, K) and res (M, n n); ``seed`` (1,): there is dropout.

    With ``pre`` (M, n) also what ``aggregate_forward`` makes of out: ``layer_input`` (M, C).
    """
    if not x.shape[0]:
        return
    function = expand_combine_kernel(
        f, bias, post, x, res, seed is not None, out, pre, layer_input, layout, orientation
    )
    function(f, bias, post, x, res, seed, out, pre, layer_input, *dropout_arguments(dropout_p))


def expand_combine_kernel(
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    dropout: bool,
    out: Tensor,
    pre: Tensor | None,
    layer_input: Tensor | None,
    layout: str,
    orientation: str,
) -> Launch:
    """What ``expand_combine_forward`` launches."""
    key = (
        "expand_combine_forward",
        layout,
        orientation,
        dropout,
        x.get_device(),
        rows_key(f, post, x, res, out, pre, layer_input),
        dtypes_of(bias),
    )
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import expand_combine_forward

        arch, dtypes = plans.arch_of(x.get_device()), cutlass_dtypes(x, bias)
        streams = streams_of(layout, f.shape[1], x, f, out, layer_input)
        aligns = (row_alignment(post), row_alignment(res), row_alignment(pre))
        kernel = expand_combine_forward(arch, *dtypes, dropout, pre is not None, orientation, aligns, streams)
        function = plans.known[key] = kernel
    return function


@registered(
    "Tensor dout, Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!)? dx, "
    "Tensor(b!)? df, Tensor(c!)? dpost, Tensor(d!)? dres, float dropout_p, str layout, str orientation"
)
def expand_combine_backward(
    dout: Tensor,
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    seed: Tensor | None,
    dx: Tensor | None,
    df: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    dropout_p: float,
    layout: str,
    orientation: str,
) -> None:
    """dx, df, and the pair of dpost and dres, from dout (M, K) and what the forward had."""
    if not x.shape[0]:
        return
    dropout = seed is not None
    key = (
        "expand_combine_backward",
        layout,
        orientation,
        dropout,
        dpost is None,
        x.get_device(),
        rows_key(dout, f, post, x, res, dx, df),
        dtypes_of(bias),
    )
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import expand_combine_backward

        streams = product_layout(streams_of(layout, f.shape[1], x, f, dout, dx, df))
        function = plans.known[key] = expand_combine_backward(
            plans.arch_of(x.get_device()),
            *cutlass_dtypes(x, bias),
            dropout,
            dx is not None,
            df is not None,
            dpost is not None,
            orientation,
            (row_alignment(post), row_alignment(res)),
            streams,
        )
    function(dout, f, bias, post, x, res, seed, dx, df, dpost, dres, *dropout_arguments(dropout_p))


@registered("Tensor dout, Tensor post, Tensor? seed, Tensor(a!) dbias, float dropout_p, str layout, bool accumulate")
def bias_gradient(
    dout: Tensor,
    post: Tensor,
    seed: Tensor | None,
    dbias: Tensor,
    dropout_p: float,
    layout: str,
    accumulate: bool,
) -> None:
    """dbias (C,) from dout (M, K) and post (M, n)."""
    if not dout.shape[0]:
        zero((dbias, accumulate))
        return
    dropout, channels = seed is not None, dbias.shape[0]
    key = (
        "bias_gradient",
        layout,
        dropout,
        accumulate,
        dout.get_device(),
        rows_key(dout, post),
        dtypes_of(dbias),
    )
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import bias_gradient

        arch, dtypes = plans.arch_of(dout.get_device()), cutlass_dtypes(dout, dbias)
        streams = streams_of(layout, channels, dout)
        align = row_alignment(post)
        function = plans.known[key] = bias_gradient(arch, *dtypes, accumulate, dropout, align, BIAS_CHUNK, streams)
    function(dout, post, seed, rows_of_sums(dout, 1, BIAS_CHUNK, channels), dbias, *dropout_arguments(dropout_p))
