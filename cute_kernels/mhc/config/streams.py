"""Ops on the streams: their Specs, and how threads share a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

BIAS_CHUNK = 64  # tokens whose gradients of the bias are added first


class AggregateSpec(NamedTuple):
    """The sum of the streams, weighted by pre or by a constant.

    Here and below: ``layout`` "streams" or "channels" (one stream: "streams"); ``alignment``: elements on a multiple of
    which all rows of all matrices of ``dtype`` start; ``x_align``: those on which rows of the coefficients x do.
    """

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int
    has_pre: bool
    pre_align: int


class AggregateBackwardSpec(NamedTuple):
    """The gradients of ``AggregateSpec``; pre is there with dx."""

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int
    needs_dx: bool
    needs_dpre: bool
    pre_align: int


class ExpandSpec(NamedTuple):
    """Streams that are all the same."""

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int


class ExpandCombineSpec(NamedTuple):
    """The residual after a sublayer; ``has_pre``: and of that the next sublayer's input. ``bias``: its dtype."""

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int
    bias: torch.dtype | None
    has_dropout: bool
    has_pre: bool
    orientation: str
    post_align: int
    res_align: int
    pre_align: int


class ExpandCombineBackwardSpec(NamedTuple):
    """The gradients of ``ExpandCombineSpec``; ``needs_coefficients``: those of post and res."""

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int
    bias: torch.dtype | None
    has_dropout: bool
    needs_dx: bool
    needs_df: bool
    needs_coefficients: bool
    orientation: str
    post_align: int
    res_align: int


class BiasGradientSpec(NamedTuple):
    """The gradient of the bias; ``dbias``: its dtype."""

    n: int
    channels: int
    layout: str
    dtype: torch.dtype
    alignment: int
    dbias: torch.dtype
    accumulate: bool
    has_dropout: bool
    post_align: int


StreamSpec = AggregateSpec | AggregateBackwardSpec | ExpandSpec
StreamSpec |= ExpandCombineSpec | ExpandCombineBackwardSpec | BiasGradientSpec


@dataclass(frozen=True)
class StreamLayout:
    """How a thread takes part in a token: ``vec`` channels of each of ``n`` streams.

    ``order``: "streams" (stream after stream in memory) or "channels" (channel after channel). ``access``: elements of
    x that one load moves. ``unroll``: vectors whose loads a thread has in flight. ``threads``: of a CTA whose warps
    have nothing to do with each other.
    """

    n: int
    channels: int
    order: str
    vec: int
    access: int
    unroll: int
    threads: int = 256

    @property
    def vectors(self) -> int:
        """Vectors of a token."""
        return self.channels // self.vec


def stream_layout(n: int, channels: int, order: str, itemsize: int, alignment: int) -> StreamLayout:
    """``alignment``: elements on a multiple of which all rows of all matrices start.

    16 bytes of every stream a thread, with 8 streams 8 (their 72 sums of products fill the registers); in the order of
    channels 16 bytes in all, so that neighbouring threads read neighbouring units, and as many of them as streams.
    H200, 4096x8x4096, share of the same-bytes copy, 4 units and 8: expand_combine fwd 0.880, 0.966; aggregate bwd
    0.921, 0.953. CTAs of 256 threads and of 128, whose many registers are free sooner: expand_combine fwd, order of
    streams, 156.2 us, 146.4.
    """
    widest, threads = 16 // itemsize, 128 if n == 8 else 256
    if n == 1 or order == "streams":
        vec = math.gcd(widest if n < 8 else widest // 2, channels, alignment)
        return StreamLayout(n, channels, "streams", vec, vec, 1, threads)
    vec = math.gcd(max(1, widest // n), channels, alignment)
    return StreamLayout(n, channels, "channels", vec, math.gcd(widest, vec * n, alignment), n, threads)


def layout_of(spec: StreamSpec) -> StreamLayout:
    """How threads share the tokens of a kernel."""
    layout = stream_layout(spec.n, spec.channels, spec.layout, spec.dtype.itemsize, spec.alignment)
    return product_layout(layout) if isinstance(spec, ExpandCombineBackwardSpec) else layout


def product_layout(layout: StreamLayout) -> StreamLayout:
    """The layout of expand_combine's backward; its sums leave few registers (4096x8x4096: 8 units 272 us, 4 263 us)."""
    return replace(layout, unroll=min(4, layout.unroll))
