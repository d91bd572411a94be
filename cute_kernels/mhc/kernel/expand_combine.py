"""New streams from a sublayer's output and the old streams, and their gradients.

    out[o, c] = dropout((f[c] + bias[c]) post_o) + sum_i R(i, o) x_i[c],    R(i, o) = res[i, o] or res[o, i]

Forward: a warp takes some vectors of one token, as many warps as there are; where the next sublayer's ``pre`` is known
it also aggregates the new streams, with the bits of ``aggregate``. Backward: one warp or one CTA a token,
since the gradients of post and res are sums over its channels; their order depends on C, the dtype and the alignment
alone.

Profile: ncu --clock-control none -k regex:Expand python -m bench.bench_mhc --filter expand_combine.bwd.8192x4x4096
"""

from dataclasses import replace
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.column_sums import SumRows
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.philox import philox
from cute_kernels.common.reduce import sum_of_products
from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import (
    BIAS_CHUNK,
    BiasGradientSpec,
    ExpandCombineBackwardSpec,
    ExpandCombineSpec,
    StreamLayout,
)
from cute_kernels.mhc.kernel.streams import (
    LOADS_FIRST,
    WARP_SIZE,
    TokenSums,
    last_reads_first,
    launch_size,
    load_channels,
    load_coefficients,
    load_streams,
    mix,
    row_pointer,
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


@cute.jit
def keep_scales(seed: cute.Tensor, row, channel, threshold: Uint32, scale: Float32, s: cutlass.Constexpr):
    """Dropout's factor for each element of a fragment (vec, n): 0 or ``scale`` = 1 / (1 - p).

    Element k of a token is dropped where word k % 4 of the random words of (k // 4, token) is below ``threshold``.
    """
    kept = stream_fragment(Float32, s)
    in_memory = cute.make_tensor(kept.iterator, cute.make_layout(s.vec * s.n))
    streams = const_expr(s.order == "streams")
    run = const_expr(s.vec if streams else s.vec * s.n)
    whole = const_expr(run % 4 == 0 and (s.channels % 4 == 0 or not streams))  # runs consist of whole groups of four
    for r in cutlass.range_constexpr(s.vec * s.n // run):
        first = r * s.channels + channel if const_expr(streams) else channel * s.n
        for e in cutlass.range_constexpr(run):
            k = first + e
            if const_expr(e % 4 == 0 or not whole):
                words = philox(Uint32(k // 4), Uint32(row), Uint64(seed[0]))
            word = words[e % 4]
            if const_expr(not whole):
                for w in cutlass.range_constexpr(4):
                    word = words[w] if k % 4 == w else word
            in_memory[r * run + e] = Float32(0.0) if word < threshold else scale
    return kept


@cute.jit
def load_bias(bias: cute.Tensor, channel, inside, s: cutlass.Constexpr):
    """Channels ``channel, ...`` of the bias, in fp32; it may start anywhere. Zeros unless ``inside``."""
    values = cute.make_rmem_tensor((s.vec,), Float32)
    values.fill(0.0)
    if inside:
        for c in cutlass.range_constexpr(s.vec):
            values[c] = bias[channel + c].to(Float32)
    return values


class StreamWeights:
    """R(i, o) of a warp's token: in registers, or where there are too many of them, n at a time from shared memory."""

    def __init__(self, n: int, orientation: str, by: str, align: int, warps: int):
        self.n = n
        self.orientation = orientation
        self.by = by  # "i" or "o": whose n weights are taken at once
        self.align = align
        self.warps = warps

    @cute.jit
    def load(self, res: cute.Tensor, row, warp_index, smem: SmemAllocator):
        """Those of a token; called by a whole warp."""
        n = const_expr(self.n)
        if const_expr(n < 8):
            weights = load_coefficients(res, row, n * n, self.align)
        else:
            layout = cute.make_layout((n * n, self.warps), stride=(1, n * n))
            weights = smem.allocate_tensor(Float32, layout, byte_alignment=16)[None, warp_index]
            source = row_pointer(res, row, 0, 1)
            for at in cutlass.range_constexpr(0, n * n, WARP_SIZE):
                index = at + cute.arch.lane_idx()
                target = index
                if const_expr((self.orientation == "io") != (self.by == "i")):
                    target = index % n * n + index // n
                weights[target] = source[index]
            cute.arch.sync_warp()
        return weights

    def of(self, weights: cute.Tensor, index: int):
        """The n weights of stream ``index``."""
        if self.n < 8:
            pairs = [(index, other) if self.by == "i" else (other, index) for other in range(self.n)]
            return [weights[mix(i, o, self.n, self.orientation)] for i, o in pairs]
        values = cute.make_rmem_tensor((self.n,), Float32)
        start = (weights.iterator + index * self.n).align(16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(self.n)), values)
        return values


class ExpandCombineForward:
    """See the module; ``orientation`` "io": R(i, o) = res[i, o], "oi": res[o, i]. ``aligns``: of post, res and pre."""

    def __init__(self, layout: StreamLayout, orientation: str, aligns: tuple[int, int, int], has_pre: bool):
        # H200, with the next layer's input, order of streams, 256 threads (three CTAs an SM) -> 128 (seven), us:
        # 8192x4x4096 173.5 -> 165.6, 4096x4x7168 152.5 -> 145.5
        self.layout = layout = replace(layout, threads=128) if has_pre else layout
        self.post_align, _, self.pre_align = aligns
        self.weights = StreamWeights(layout.n, orientation, "o", aligns[1], layout.threads // WARP_SIZE)

    @cute.jit
    def __call__(
        self,
        f: cute.Tensor,
        bias: Optional[cute.Tensor],
        post: cute.Tensor,
        x: cute.Tensor,
        res: cute.Tensor,
        seed: Optional[cute.Tensor],
        out: cute.Tensor,
        pre: Optional[cute.Tensor],
        layer_input: Optional[cute.Tensor],
        threshold: Uint32,
        scale: Float32,
        stream,
    ):
        self.kernel(f, bias, post, x, res, seed, out, pre, layer_input, threshold, scale).launch(
            grid=[launch_size(x.shape[0], self.layout), 1, 1],
            block=[self.layout.threads, 1, 1],
            min_blocks_per_mp=LOADS_FIRST if self.layout.n < 8 and pre is None and seed is None else 0,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        f: cute.Tensor,
        bias: Optional[cute.Tensor],
        post: cute.Tensor,
        x: cute.Tensor,
        res: cute.Tensor,
        seed: Optional[cute.Tensor],
        out: cute.Tensor,
        pre: Optional[cute.Tensor],
        layer_input: Optional[cute.Tensor],
        threshold: Uint32,
        scale: Float32,
    ):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        row, vectors = vectors_of_thread(s)
        if row < x.shape[0]:
            policy = last_reads_first(x, row, s)
            rF = [load_channels(f, row, channel, inside, s, policy) for channel, inside in vectors]
            rX = [load_streams(x, row, channel, inside, s, policy) for channel, inside in vectors]
            posts = load_coefficients(post, row, s.n, self.post_align)
            weights = self.weights.load(res, row, cute.arch.warp_idx(), SmemAllocator())
            if const_expr(pre is not None):
                shares = load_coefficients(pre, row, s.n, self.pre_align)
            for u in cutlass.range_constexpr(s.unroll):
                channel, inside = vectors[u]
                if const_expr(bias is not None):
                    biases = load_bias(bias, channel, inside, s)
                if const_expr(seed is not None):
                    kept = keep_scales(seed, row, channel, threshold, scale, s)
                total = stream_fragment(Float32, s)
                for o in cutlass.range_constexpr(s.n):
                    incoming = self.weights.of(weights, o)
                    for c in cutlass.range_constexpr(s.vec):
                        expanded = rF[u][c].to(Float32)
                        if const_expr(bias is not None):
                            expanded = expanded + biases[c]
                        expanded = expanded * posts[o]
                        if const_expr(seed is not None):
                            expanded = expanded * kept[c, o]
                        for i in cutlass.range_constexpr(s.n):
                            expanded = cute.math.fma(incoming[i], rX[u][c, i].to(Float32), expanded)
                        total[c, o] = expanded
                rounded = store_streams(total, out, row, channel, inside, s)
                if const_expr(pre is not None):
                    store_channels(weighted_sum(rounded, shares, s), layer_input, row, channel, inside, s)


class ExpandCombineBackward:
    """df, dx, dpost and dres from dout; dx and df may be left out, and dpost and dres together.

    dx_i = sum_o R(i, o) dout_o, df = sum_o post_o d_o, dpost_o = sum_c (f + bias) d_o, dR(i, o) = sum_c x_i dout_o,
    where d_o is dout_o after dropout.
    """

    def __init__(self, layout: StreamLayout, orientation: str, aligns: tuple[int, int]):
        self.layout = layout
        self.orientation = orientation
        self.post_align = aligns[0]
        # Five warps: order of streams, 8192x4x2560 146.5 -> 142.9 us, of channels (122 registers) 150.8 -> 158.4. Eight
        # or seven, whose two rounds the compiler unrolls: order of channels, 8192x4x4096 235.8 -> 314.5 (180 registers)
        most = 5 if layout.order == "streams" and layout.n < 8 else 4
        self.sums = TokenSums(layout, layout.n + layout.n**2, most)
        self.weights = StreamWeights(layout.n, orientation, "i", aligns[1], self.sums.threads // WARP_SIZE)
        # With 8 streams 12 warps fit an SM, too few to load while others compute: a warp asks for its next vectors
        # before it computes, and takes weights once for all that it has. H200, 4096x8x4096, us: order of streams
        # 247.3 -> 241.9, of channels 265.8 -> 240.5; without one of the two 242.7 and 271.8, 248.8 and 298.0
        self.ahead = layout.n == 8
        self.together = layout.unroll if layout.n == 8 else 1

    def load(
        self,
        dout: cute.Tensor,
        x: Optional[cute.Tensor],
        f: Optional[cute.Tensor],
        policy: Optional[Int64],
        row,
        vector,
    ) -> tuple:
        """A lane's vectors of a token's dout, x and f, the first of them ``vector``; zeros beyond its last."""
        s = self.layout
        vectors = unrolled(vector, s)
        if self.ahead:
            vectors = [(channel, channel < s.channels) for channel, _ in vectors]
        return (
            [load_streams(dout, row, channel, inside, s, policy) for channel, inside in vectors],
            None if x is None else [load_streams(x, row, channel, inside, s, policy) for channel, inside in vectors],
            None if f is None else [load_channels(f, row, channel, inside, s, policy) for channel, inside in vectors],
        )

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        f: cute.Tensor,
        bias: Optional[cute.Tensor],
        post: cute.Tensor,
        x: cute.Tensor,
        res: cute.Tensor,
        seed: Optional[cute.Tensor],
        dx: Optional[cute.Tensor],
        df: Optional[cute.Tensor],
        dpost: Optional[cute.Tensor],
        dres: Optional[cute.Tensor],
        threshold: Uint32,
        scale: Float32,
        stream,
    ):
        self.kernel(dout, f, bias, post, x, res, seed, dx, df, dpost, dres, threshold, scale).launch(
            grid=[cute.ceil_div(x.shape[0], self.sums.tokens), 1, 1],
            block=[self.sums.threads, 1, 1],
            min_blocks_per_mp=LOADS_FIRST if (self.layout.n < 4 or dx is None) and seed is None else 0,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        dout: cute.Tensor,
        f: cute.Tensor,
        bias: Optional[cute.Tensor],
        post: cute.Tensor,
        x: cute.Tensor,
        res: cute.Tensor,
        seed: Optional[cute.Tensor],
        dx: Optional[cute.Tensor],
        df: Optional[cute.Tensor],
        dpost: Optional[cute.Tensor],
        dres: Optional[cute.Tensor],
        threshold: Uint32,
        scale: Float32,
    ):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        n = const_expr(s.n)
        smem = SmemAllocator()
        row = self.sums.row()
        if row < x.shape[0]:
            posts = load_coefficients(post, row, n, self.post_align)
            if const_expr(dx is not None):
                weights = self.weights.load(res, row, cute.arch.warp_idx(), smem)
            sums = cute.make_rmem_tensor((n + n * n,), Float32)
            sums.fill(0.0)
            lane, step = cute.arch.lane_idx(), const_expr(self.sums.warps * self.sums.round)
            # Without dx the next kernel reads dout and x again; eight streams take longer: 4096x8x4096 240 -> 245 us
            policy = None if const_expr(dx is None or n == 8) else last_reads_first(dout, row, s)
            needed = (dout, x, f, policy) if const_expr(dpost is not None) else (dout, None, None, policy)
            held = self.load(*needed, row, self.sums.first_vector() + lane) if const_expr(self.ahead) else None
            for first in cutlass.range(self.sums.first_vector(), s.vectors, step):
                vectors = unrolled(first + lane, s)
                if const_expr(self.ahead):
                    coming = self.load(*needed, row, first + step + lane)
                    rD, rX, rF = held
                else:
                    rD, rX, rF = self.load(*needed, row, first + lane)
                for start in cutlass.range_constexpr(0, s.unroll, self.together):
                    for u in cutlass.range_constexpr(start, start + self.together):
                        if const_expr(n == 8):
                            cute.arch.sync_warp()  # or all weights would be loaded to registers at once
                        channel, inside = vectors[u]
                        if const_expr(bias is not None):
                            biases = load_bias(bias, channel, inside, s)
                        if const_expr(seed is not None):
                            kept = keep_scales(seed, row, channel, threshold, scale, s)
                        gradient_f = cute.make_rmem_tensor((s.vec,), Float32)
                        for c in cutlass.range_constexpr(s.vec):
                            d = [rD[u][c, o].to(Float32) for o in range(n)]
                            dropped = [d[o] * kept[c, o] for o in range(n)] if const_expr(seed is not None) else d
                            gradient_f[c] = sum_of_products([(dropped[o], posts[o]) for o in range(n)])
                            if const_expr(dpost is not None):
                                output = rF[u][c].to(Float32)
                                if const_expr(bias is not None):
                                    output = output + biases[c]
                                for o in cutlass.range_constexpr(n):
                                    sums[o] = sums[o] + output * dropped[o]
                                for i in cutlass.range_constexpr(n):
                                    stream_i = rX[u][c, i].to(Float32)
                                    for o in cutlass.range_constexpr(n):
                                        at = n + mix(i, o, n, self.orientation)
                                        sums[at] = sums[at] + stream_i * d[o]
                        if const_expr(df is not None):
                            store_channels(gradient_f, df, row, channel, inside, s)
                    if const_expr(dx is not None):
                        if const_expr(n == 8):
                            cute.arch.sync_warp()
                        gradients = [stream_fragment(Float32, s) for _ in range(self.together)]
                        for i in cutlass.range_constexpr(n):
                            outgoing = self.weights.of(weights, i)
                            for g in cutlass.range_constexpr(self.together):
                                for c in cutlass.range_constexpr(s.vec):
                                    d = [rD[start + g][c, o].to(Float32) for o in range(n)]
                                    gradients[g][c, i] = sum_of_products([(outgoing[o], d[o]) for o in range(n)])
                        for g in cutlass.range_constexpr(self.together):
                            channel, inside = vectors[start + g]
                            store_streams(gradients[g], dx, row, channel, inside, s)
                if const_expr(self.ahead):
                    for u in cutlass.range_constexpr(s.unroll):
                        for k in cutlass.range_constexpr(3):
                            if const_expr(held[k] is not None):
                                held[k][u].store(coming[k][u].load())
            if const_expr(dpost is not None):
                self.sums.store(sums, (dpost, dres), row, smem)


class BiasGradient:
    """partials[chunk, c] = sum over the chunk's tokens, ascending, of sum_o post_o d_o[c]: what is summed to dbias."""

    def __init__(self, layout: StreamLayout, align: int, tokens: int, accumulate: bool):
        self.layout = layout
        self.align = align
        self.tokens = tokens
        self.sum_rows = SumRows((accumulate, False))

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        post: cute.Tensor,
        seed: Optional[cute.Tensor],
        partials: cute.Tensor,
        dbias: cute.Tensor,
        threshold: Uint32,
        scale: Float32,
        stream,
    ):
        chunks = cute.ceil_div(dout.shape[0], self.tokens)
        self.kernel(dout, post, seed, partials, threshold, scale).launch(
            grid=[cute.ceil_div(self.layout.vectors, WARP_SIZE) * chunks, 1, 1],
            block=[WARP_SIZE, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        self.sum_rows.launch(partials, dbias, None, chunks, stream)

    @cute.kernel
    def kernel(
        self,
        dout: cute.Tensor,
        post: cute.Tensor,
        seed: Optional[cute.Tensor],
        partials: cute.Tensor,
        threshold: Uint32,
        scale: Float32,
    ):
        cute.arch.griddepcontrol_wait()
        s = self.layout
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        slices = const_expr(-(-s.vectors // WARP_SIZE))  # the grid's y would hold 65,535 chunks
        slice_index, chunk = bidx % slices, bidx // slices
        channel = (slice_index * WARP_SIZE + tidx) * s.vec
        if channel < s.channels:
            sums = cute.make_rmem_tensor((s.vec,), Float32)
            sums.fill(0.0)
            last = cutlass.min((chunk + 1) * self.tokens, dout.shape[0])
            for row in cutlass.range(chunk * self.tokens, last, unroll=2):
                rD = load_streams(dout, row, channel, True, s)
                posts = load_coefficients(post, row, s.n, self.align)
                if const_expr(seed is not None):
                    kept = keep_scales(seed, row, channel, threshold, scale, s)
                for c in cutlass.range_constexpr(s.vec):
                    gradient = Float32(0.0)
                    for o in cutlass.range_constexpr(s.n):
                        d = rD[c, o].to(Float32)
                        if const_expr(seed is not None):
                            d = d * kept[c, o]
                        gradient = gradient + d * posts[o]
                    sums[c] = sums[c] + gradient
            for c in cutlass.range_constexpr(s.vec):
                partials[0, chunk, channel + c] = sums[c]


@compiled
def expand_combine_forward(arch: str, spec: ExpandCombineSpec, layout: StreamLayout) -> Program:
    """out (M, n C) from f (M, C), post (M, n), x (M, n C) and res (M, n n); layer_input (M, C) by way of pre (M, n)."""
    rows, dtype, s = cute.sym_int(), cutlass_dtype(spec.dtype), layout
    aligns = spec.post_align, spec.res_align, spec.pre_align
    return Program(
        ExpandCombineForward(s, spec.orientation, aligns, spec.has_pre),
        symbolic_streams(dtype, rows, s.channels, s.vec),
        symbolic_vector(cutlass_dtype(spec.bias), s.channels),
        symbolic_streams(Float32, rows, s.n, spec.post_align),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n * s.n, spec.res_align),
        symbolic_vector(Int64, 1) if spec.has_dropout else None,
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n, spec.pre_align) if spec.has_pre else None,
        symbolic_streams(dtype, rows, s.channels, s.vec) if spec.has_pre else None,
        Uint32(0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def expand_combine_backward(arch: str, spec: ExpandCombineBackwardSpec, layout: StreamLayout) -> Program:
    """dx (M, n C), df (M, C), dpost (M, n) and dres (M, n n) from dout (M, n C) and what the forward had."""
    rows, dtype, s = cute.sym_int(), cutlass_dtype(spec.dtype), layout
    return Program(
        ExpandCombineBackward(s, spec.orientation, (spec.post_align, spec.res_align)),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(dtype, rows, s.channels, s.vec),
        symbolic_vector(cutlass_dtype(spec.bias), s.channels),
        symbolic_streams(Float32, rows, s.n, spec.post_align),
        symbolic_streams(dtype, rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n * s.n, spec.res_align),
        symbolic_vector(Int64, 1) if spec.has_dropout else None,
        symbolic_streams(dtype, rows, s.n * s.channels, s.access) if spec.needs_dx else None,
        symbolic_streams(dtype, rows, s.channels, s.vec) if spec.needs_df else None,
        symbolic_streams(Float32, rows, s.n, 1) if spec.needs_coefficients else None,
        symbolic_streams(Float32, rows, s.n * s.n, 1) if spec.needs_coefficients else None,
        Uint32(0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def bias_gradient(arch: str, spec: BiasGradientSpec, layout: StreamLayout) -> Program:
    """dbias (C,) from dout (M, n C) and post (M, n), through a partial row for every BIAS_CHUNK tokens."""
    rows, chunks, s = cute.sym_int(), cute.sym_int(), layout
    columns = -(-s.channels // SUM_COLUMNS) * SUM_COLUMNS
    return Program(
        BiasGradient(s, spec.post_align, BIAS_CHUNK, spec.accumulate),
        symbolic_streams(cutlass_dtype(spec.dtype), rows, s.n * s.channels, s.access),
        symbolic_streams(Float32, rows, s.n, spec.post_align),
        symbolic_vector(Int64, 1) if spec.has_dropout else None,
        cute.runtime.make_fake_compact_tensor(Float32, (1, chunks, columns), stride_order=(2, 1, 0), assumed_align=16),
        symbolic_vector(cutlass_dtype(spec.dbias), s.channels),
        Uint32(0),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
