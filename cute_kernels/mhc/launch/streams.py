"""The streams are aggregated, expanded, combined."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc.config import (
    BIAS_CHUNK,
    AggregateBackwardSpec,
    AggregateSpec,
    BiasGradientSpec,
    ExpandCombineBackwardSpec,
    ExpandCombineSpec,
    ExpandSpec,
    layout_of,
)
from cute_kernels.mhc.launch.common import (
    Launch,
    dropout_arguments,
    dtype_of,
    partial_rows,
    row_alignment,
    stream_alignment,
    zero,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.targets import Target


@operator("mhc_aggregate_forward", "Tensor x, Tensor? pre, Tensor(a!) out, str layout, float scale")
def aggregate_forward(x: Tensor, pre: Tensor | None, out: Tensor, layout: str, scale: float) -> None:
    """out (M, C): the sum of x's streams, each times its weight of pre (M, n), or all times ``scale``."""
    tokens, k = x.shape
    if tokens:
        channels, dtype = out.shape[1], x.dtype
        n = k // channels
        alignment = stream_alignment(dtype.itemsize, x, out)
        pre_align = 1 if pre is None else row_alignment(pre, n)
        spec = AggregateSpec(n, channels, _order(layout, n), dtype, alignment, pre is not None, pre_align)
        _aggregate.get(x.get_device(), spec)(x, pre, out, scale)


@operator(
    "mhc_aggregate_backward",
    "Tensor dout, Tensor x, Tensor? pre, Tensor(a!)? dx, Tensor(b!)? dpre, str layout",
)
def aggregate_backward(
    dout: Tensor, x: Tensor, pre: Tensor | None, dx: Tensor | None, dpre: Tensor | None, layout: str
) -> None:
    """dx (M, K) by way of pre (M, n), and dpre (M, n), from dout (M, C)."""
    tokens, k = x.shape
    if tokens:
        channels, dtype = dout.shape[1], x.dtype
        n = k // channels
        if dx is None:
            pre = None
        spec = AggregateBackwardSpec(
            n=n,
            channels=channels,
            layout=_order(layout, n),
            dtype=dtype,
            alignment=stream_alignment(dtype.itemsize, x, dout, dx),
            needs_dx=dx is not None,
            needs_dpre=dpre is not None,
            pre_align=1 if pre is None else row_alignment(pre, n),
        )
        _aggregate_backward.get(x.get_device(), spec)(dout, x, pre, dx, dpre)


@operator("mhc_expand_streams", "Tensor h, Tensor(a!) x, str layout, float scale")
def expand_streams(h: Tensor, x: Tensor, layout: str, scale: float) -> None:
    """Every stream of x (M, K) is ``scale`` times h (M, C)."""
    tokens, channels = h.shape
    if tokens:
        n, dtype = x.shape[1] // channels, h.dtype
        spec = ExpandSpec(n, channels, _order(layout, n), dtype, stream_alignment(dtype.itemsize, x, h))
        _expand.get(h.get_device(), spec)(h, x, scale)


@operator(
    "mhc_expand_combine_forward",
    "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!) out, Tensor? pre, "
    "Tensor(b!)? layer_input, float dropout_p, str layout, str orientation",
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
    tokens, channels = f.shape
    if tokens:
        n, dtype = post.shape[1], x.dtype
        post_bits, res_bits = post.data_ptr() | post.stride()[0] << 2, res.data_ptr() | res.stride()[0] << 2
        on_16 = not (post_bits | res_bits) & 15
        spec = ExpandCombineSpec(
            n,
            channels,
            layout if n > 1 else "streams",
            dtype,
            stream_alignment(dtype.itemsize, x, f, out, layer_input),
            None if bias is None else bias.dtype,
            seed is not None,
            pre is not None,
            orientation,
            min(4, n) if on_16 else row_alignment(post, n),
            min(4, n * n) if on_16 else row_alignment(res, n * n),
            1 if pre is None else row_alignment(pre, n),
        )
        launch = _expand_combine.get(x.get_device(), spec)
        launch(f, bias, post, x, res, seed, out, pre, layer_input, *dropout_arguments(dropout_p))


@operator(
    "mhc_expand_combine_backward",
    "Tensor dout, Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!)? dx, "
    "Tensor(b!)? df, Tensor(c!)? dpost, Tensor(d!)? dres, float dropout_p, str layout, str orientation",
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
    tokens, channels = f.shape
    if tokens:
        n, dtype = post.shape[1], x.dtype
        spec = ExpandCombineBackwardSpec(
            n=n,
            channels=channels,
            layout=_order(layout, n),
            dtype=dtype,
            alignment=stream_alignment(dtype.itemsize, x, f, dout, dx, df),
            bias=dtype_of(bias),
            has_dropout=seed is not None,
            needs_dx=dx is not None,
            needs_df=df is not None,
            needs_coefficients=dpost is not None,
            orientation=orientation,
            post_align=row_alignment(post, n),
            res_align=row_alignment(res, n * n),
        )
        launch = _expand_combine_backward.get(x.get_device(), spec)
        launch(dout, f, bias, post, x, res, seed, dx, df, dpost, dres, *dropout_arguments(dropout_p))


@operator(
    "mhc_bias_gradient",
    "Tensor dout, Tensor post, Tensor? seed, Tensor(a!) dbias, float dropout_p, str layout, bool accumulate",
)
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
    tokens, n = post.shape
    if not tokens:
        zero((dbias, accumulate))
        return
    channels, dtype = dbias.shape[0], dout.dtype
    spec = BiasGradientSpec(
        n=n,
        channels=channels,
        layout=_order(layout, n),
        dtype=dtype,
        alignment=stream_alignment(dtype.itemsize, dout),
        dbias=dbias.dtype,
        accumulate=accumulate,
        has_dropout=seed is not None,
        post_align=row_alignment(post, n),
    )
    launch = _bias_gradient.get(dout.get_device(), spec)
    launch(dout, post, seed, partial_rows(dout, 1, BIAS_CHUNK, channels), dbias, *dropout_arguments(dropout_p))


def _order(layout: str, n: int) -> str:
    """One stream is the same in both layouts."""
    return layout if n > 1 else "streams"


def _make_aggregate(target: Target, spec: AggregateSpec) -> Launch:
    from cute_kernels.mhc.kernel import aggregate

    return launches.load(aggregate.aggregate_forward, target.arch, spec, layout_of(spec))


def _make_aggregate_backward(target: Target, spec: AggregateBackwardSpec) -> Launch:
    from cute_kernels.mhc.kernel import aggregate

    return launches.load(aggregate.aggregate_backward, target.arch, spec, layout_of(spec))


def _make_expand(target: Target, spec: ExpandSpec) -> Launch:
    from cute_kernels.mhc.kernel import aggregate

    return launches.load(aggregate.expand_streams, target.arch, spec, layout_of(spec))


def _make_expand_combine(target: Target, spec: ExpandCombineSpec) -> Launch:
    from cute_kernels.mhc.kernel import expand_combine

    return launches.load(expand_combine.expand_combine_forward, target.arch, spec, layout_of(spec))


def _make_expand_combine_backward(target: Target, spec: ExpandCombineBackwardSpec) -> Launch:
    from cute_kernels.mhc.kernel import expand_combine

    return launches.load(expand_combine.expand_combine_backward, target.arch, spec, layout_of(spec))


def _make_bias_gradient(target: Target, spec: BiasGradientSpec) -> Launch:
    from cute_kernels.mhc.kernel import expand_combine

    return launches.load(expand_combine.bias_gradient, target.arch, spec, layout_of(spec))


_aggregate = LaunchCache(_make_aggregate)
_aggregate_backward = LaunchCache(_make_aggregate_backward)
_expand = LaunchCache(_make_expand)
_expand_combine = LaunchCache(_make_expand_combine)
_expand_combine_backward = LaunchCache(_make_expand_combine_backward)
_bias_gradient = LaunchCache(_make_bias_gradient)
