"""Weighted sum of a token's streams: out[c] = sum_i pre_i x_i[c], and its gradients.

Forward: a warp takes some vectors of one token, as many warps as there are. Backward: one warp or one CTA a token,
since the gradient of pre is a sum over its channels; the order of that sum depends on C, the dtype and the alignment.

Profile: ncu --clock-control none -k regex:Aggregate python -m bench.bench_mhc --filter aggregate.bwd.8192x4x4096
"""

from dataclasses import replace
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.mhc.config import AggregateBackwardSpec, AggregateSpec, ExpandSpec, StreamLayout
from cute_kernels.mhc.kernel.streams import (
    LOADS_FIRST,
    TokenSums,
    launch_size,
    load_channels,
    load_coefficients,
    load_streams,
    store_channels,
    store_streams,
    stream_fragment,
    symbolic_streams,
    unrolled,
    vectors_of_thread,
    weighted_sum,
)
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]


class AggregateForward:
    """out[m, c] = sum_i pre[m, i] x[m, i, c], in ascending i; without ``pre`` every weight is ``scale``.

    The last tokens come first: of what a projection has just read they are what L2 still holds.
    """

    def __init__(self, layout: StreamLayout, align: int):
        self.layout = layout
        self.align = align

    @cute.jit
    def __call__(self, x: cute.Tensor, pre: Optional[cute.Tensor], out: cute.Tensor, scale: Float32, stream):
        self.kernel(x, pre, out, scale).launch(
            grid=[launch_size(x.shape[0], self.layout), 1, 1],
            block=[self.layout.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, pre: Optional[cute.Tensor], out: cute.Tensor, scale: Float32):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        row, vectors = vectors_of_thread(s, backwards=True)
        if row < x.shape[0]:
            rX = [load_streams(x, row, channel, inside, s) for channel, inside in vectors]
            weights = cute.make_rmem_tensor((s.n,), Float32)
            weights.fill(scale)
            if const_expr(pre is not None):
                weights = load_coefficients(pre, row, s.n, self.align)
            for u in cutlass.range_constexpr(s.unroll):
                store_channels(weighted_sum(rX[u], weights, s), out, row, *vectors[u], s)


class AggregateBackward:
    """dx[m, i, c] = dout[m, c] pre[m, i] and dpre[m, i] = sum_c dout[m, c] x[m, i, c]; either may be left out."""

    def __init__(self, layout: StreamLayout, align: int):
        self.layout = replace(layout, unroll=max(2, layout.unroll))  # a vector is not enough in flight
        # H200, four warps -> eight, seven or five: 4096x4x7168 136.3 -> 131.2 us; order of channels, 8192x4x4096
        # 152.1 -> 149.0, 8192x4x2560 97.6 -> 95.9
        self.sums = TokenSums(self.layout, layout.n, most=8 if layout.n < 8 else 4)
        self.align = align

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        x: cute.Tensor,
        pre: Optional[cute.Tensor],
        dx: Optional[cute.Tensor],
        dpre: Optional[cute.Tensor],
        stream,
    ):
        self.kernel(dout, x, pre, dx, dpre).launch(
            grid=[cute.ceil_div(x.shape[0], self.sums.tokens), 1, 1],
            block=[self.sums.threads, 1, 1],
            min_blocks_per_mp=LOADS_FIRST,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        dout: cute.Tensor,
        x: cute.Tensor,
        pre: Optional[cute.Tensor],
        dx: Optional[cute.Tensor],
        dpre: Optional[cute.Tensor],
    ):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        row = self.sums.row()
        if row < x.shape[0]:
            weights = None
            if const_expr(dx is not None):
                weights = load_coefficients(pre, row, s.n, self.align)
            sums = cute.make_rmem_tensor((s.n,), Float32)
            sums.fill(0.0)
            for first in cutlass.range(self.sums.first_vector(), s.vectors, self.sums.warps * self.sums.round):
                vectors = unrolled(first + cute.arch.lane_idx(), s)
                rD = [load_channels(dout, row, channel, inside, s) for channel, inside in vectors]
                if const_expr(dpre is not None):
                    rX = [load_streams(x, row, channel, inside, s) for channel, inside in vectors]
                for u in cutlass.range_constexpr(s.unroll):
                    d = rD[u].load().to(Float32)
                    if const_expr(dpre is not None):
                        for i in cutlass.range_constexpr(s.n):
                            for c in cutlass.range_constexpr(s.vec):
                                sums[i] = sums[i] + d[c] * rX[u][c, i].to(Float32)
                    if const_expr(dx is not None):
                        gradient = stream_fragment(Float32, s)
                        for i in cutlass.range_constexpr(s.n):
                            for c in cutlass.range_constexpr(s.vec):
                                gradient[c, i] = d[c] * weights[i]
                        store_streams(gradient, dx, row, *vectors[u], s)
            if const_expr(dpre is not None):
                self.sums.store(sums, (dpre,), row, SmemAllocator())


class Expand:
    """x[m, i, c] = scale h[m, c]: a copy for each stream, and the gradient of their mean."""

    def __init__(self, layout: StreamLayout):
        self.layout = layout

    @cute.jit
    def __call__(self, h: cute.Tensor, x: cute.Tensor, scale: Float32, stream):
        self.kernel(h, x, scale).launch(
            grid=[launch_size(x.shape[0], self.layout), 1, 1],
            block=[self.layout.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, h: cute.Tensor, x: cute.Tensor, scale: Float32):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        row, vectors = vectors_of_thread(s)
        if row < x.shape[0]:
            rH = [load_channels(h, row, channel, inside, s) for channel, inside in vectors]
            for u in cutlass.range_constexpr(s.unroll):
                copies = stream_fragment(Float32, s)
                for i in cutlass.range_constexpr(s.n):
                    for c in cutlass.range_constexpr(s.vec):
                        copies[c, i] = scale * rH[u][c].to(Float32)
                store_streams(copies, x, row, *vectors[u], s)


@compiled
def aggregate_forward(arch: str, spec: AggregateSpec, layout: StreamLayout) -> Program:
    """out (M, C) from x (M, n C) and pre (M, n) or a constant."""
    rows, dtype, s = cute.sym_int(), cutlass_dtype(spec.dtype), layout
    return Program(
        AggregateForward(s, spec.pre_align),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n, spec.pre_align) if spec.has_pre else None,
        symbolic_streams(dtype, rows, s.channels, s.vec),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def aggregate_backward(arch: str, spec: AggregateBackwardSpec, layout: StreamLayout) -> Program:
    """dx (M, n C) and dpre (M, n) from dout (M, C), x and pre."""
    rows, dtype, s = cute.sym_int(), cutlass_dtype(spec.dtype), layout
    return Program(
        AggregateBackward(s, spec.pre_align),
        symbolic_streams(dtype, rows, s.channels, s.vec),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n, spec.pre_align) if spec.needs_dx else None,
        symbolic_streams(dtype, rows, s.n * s.channels, s.access) if spec.needs_dx else None,
        symbolic_streams(Float32, rows, s.n, 1) if spec.needs_dpre else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def expand_streams(arch: str, spec: ExpandSpec, layout: StreamLayout) -> Program:
    """x (M, n C) from h (M, C)."""
    rows, dtype, s = cute.sym_int(), cutlass_dtype(spec.dtype), layout
    return Program(
        Expand(s),
        symbolic_streams(dtype, rows, s.channels, s.vec),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
