"""Tokens' rows to experts' rows and back, 16 bytes a lane.

    gather   row of the token --> times the weight of each slot --> rows of the experts by positions; others get zeros
             (permute; combine's backward)
    combine  positions, sorted --> rows of the experts, one after the other, in fp32 --> row of the token

Each token has a CTA: fewer tokens are in flight than with a warp each, and each row is read or written in one piece.

``combine`` adds in ascending position, which is ascending expert: a token's bits depend on its rows and weights and on
the set of its experts. A product is rounded, then added.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.math import RoundingMode

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.moe.config import WARP, WARPS, CombineSpec, GatherSpec
from cute_kernels.moe.kernel.warp_rows import (
    AHEAD,
    load,
    store,
    symbolic_list,
    symbolic_rows,
    symbolic_table,
    vector_at,
    wide,
)
from jit_cache import Program, compiled

NEAREST = RoundingMode.NEAREST_EVEN
AT_ONCE = 16  # rows of a token that combine loads before it adds them


class Gather:
    """See the builder ``gather``."""

    def __init__(self, spec: GatherSpec):
        self.k, self.weighted, self.dots = spec.k, spec.weighted, spec.dots

    @cute.jit
    def __call__(self, x, slots, positions, weights, other, out, dots, stream):
        # Enough that no CTA clears more than WARPS rows
        num_ctas = cutlass.max(x.shape[0], cute.ceil_div(slots.shape[0], WARPS))
        self.kernel(x, slots, positions, weights, other, out, dots).launch(
            grid=[num_ctas, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, slots, positions, weights, other, out, dots):
        tidx, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        cute.arch.griddepcontrol_wait()
        if token < x.shape[0]:
            row, weight = Int32(-1), Float32(1.0)
            if lane < self.k:
                row = positions[token, lane]
                if const_expr(self.weighted):
                    weight = weights[token, lane]
            if const_expr(self.dots):
                for j in cutlass.range(warp, self.k, WARPS, unroll=1):
                    to, factor = cute.arch.shuffle_sync(row, j), cute.arch.shuffle_sync(weight, j)
                    if to >= 0:
                        total = self.copy_and_multiply(x, other, out, token, to, factor, lane)
                        if lane == 0:
                            dots[token, j] = total
            else:
                self.copy(x, out, token, row, weight, tidx)
        self.clear(slots, out, token, step, tidx)

    @cute.jit
    def copy(self, x, out, token: Int32, row: Int32, weight: Float32, thread: Int32):
        """A token's row to those of its slots, of which lane j of each warp has the j-th, and its weight."""
        vectors, threads = x.shape[1] * x.element_type.width // 128, const_expr(WARPS * WARP)
        for begin in cutlass.range(0, vectors, AHEAD * threads):
            places = [begin + i * threads + thread for i in range(AHEAD)]
            loaded = [load(x, token, place, place < vectors) for place in places]
            for j in cutlass.range(self.k, unroll=2):
                to, factor = cute.arch.shuffle_sync(row, j), cute.arch.shuffle_sync(weight, j)
                if to >= 0:
                    for i in cutlass.range_constexpr(AHEAD):
                        if places[i] < vectors:
                            if const_expr(self.weighted):
                                values = wide(loaded[i])
                                values.store(values.load() * factor)
                                store(values, out, to, places[i])
                            else:
                                cute.autovec_copy(loaded[i], vector_at(out, to, places[i]))

    @cute.jit
    def copy_and_multiply(self, x, other, out, token: Int32, row: Int32, weight: Float32, lane: Int32) -> Float32:
        """A token's row, times a weight, to a row of ``out``; its product with that row of ``other``."""
        vectors = x.shape[1] * x.element_type.width // 128
        total = Float32(0.0)
        for v in cutlass.range(lane, vectors, AHEAD * WARP):
            places = [v + i * WARP for i in range(AHEAD)]
            loaded = [load(x, token, place, place < vectors) for place in places]
            factors = [load(other, row, place, place < vectors) for place in places]
            for i in cutlass.range_constexpr(AHEAD):
                values, factor = wide(loaded[i]), wide(factors[i])
                for j in cutlass.range_constexpr(cute.size(values)):
                    total = cute.math.fma(values[j], factor[j], total)
                if const_expr(self.weighted):
                    values.store(values.load() * weight)
                if places[i] < vectors:
                    store(values, out, row, places[i])
        return cute.arch.warp_reduction(total, operator.add)

    @cute.jit
    def clear(self, slots, out, first: Int32, step: Int32, thread: Int32):
        """Zeros to those of this CTA's rows, WARPS at most, one each ``step``, that have no slot."""
        vectors = out.shape[1] * out.element_type.width // 128
        zeros = cute.make_rmem_tensor((128 // out.element_type.width,), out.element_type)
        zeros.fill(0)
        index, slot = thread % WARP, Int32(0)
        row = first + Int64(step) * index
        if index < WARPS and row < slots.shape[0]:
            slot = slots[row]
        unused = cute.arch.vote_ballot_sync(slot < 0)
        for i in cutlass.range(WARP - cute.arch.clz(unused), unroll=1):
            if (unused >> i) & 1 == 1:
                for v in cutlass.range(thread, vectors, WARPS * WARP):
                    cute.autovec_copy(zeros, vector_at(out, first + i * step, v))


class Combine:
    """See the builder ``combine``."""

    def __init__(self, spec: CombineSpec):
        self.k, self.weighted, self.biased = spec.k, spec.weighted, spec.biased
        # For k = 8 with weights ptxas would take 107 registers, which leaves two CTAs: 0.71 of the copy, and 0.92 with
        # three (H200, 8192 tokens of 2048 columns)
        self.ctas_per_sm = min(4, max(1, 24 // spec.k))

    @cute.jit
    def __call__(self, rows, positions, weights, experts, bias, y, stream):
        self.kernel(rows, positions, weights, experts, bias, y).launch(
            grid=[y.shape[0], 1, 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,  # it has none; the DSL would ask the device, and there may be none
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, rows, positions, weights, experts, bias, y):
        tidx, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        vectors = rows.shape[1] * rows.element_type.width // 128
        cute.arch.griddepcontrol_wait()
        position, weight, expert = self.sorted_slots(positions, weights, experts, token, tidx % WARP)
        places = [cute.arch.shuffle_sync(position, j) for j in range(self.k)]
        factors = [cute.arch.shuffle_sync(weight, j) for j in range(self.k)]
        of_bias = None
        if const_expr(self.biased):
            of_bias = [cute.arch.shuffle_sync(expert, j) for j in range(self.k)]
        for v in cutlass.range(tidx, vectors, WARPS * WARP):
            sums = cute.make_rmem_tensor((128 // rows.element_type.width,), Float32)
            sums.fill(0.0)
            for begin in cutlass.range_constexpr(0, self.k, AT_ONCE):
                part = places[begin : begin + AT_ONCE]
                loaded = [load(rows, cutlass.max(place, 0), v, place >= 0) for place in part]
                for i in cutlass.range_constexpr(len(part)):
                    j, values = const_expr(begin + i), wide(loaded[i])
                    if const_expr(self.biased):
                        added = wide(load(bias, cutlass.max(of_bias[j], 0), v, part[i] >= 0))
                        values.store(values.load() + added.load())
                    if part[i] >= 0:
                        for e in cutlass.range_constexpr(cute.size(sums)):
                            product = values[e]
                            if const_expr(self.weighted):
                                product = cute.math.mul(values[e], factors[j], rounding=NEAREST)
                            sums[e] = cute.math.add(sums[e], product, rounding=NEAREST)
            store(sums, y, token, v)

    @cute.jit
    def sorted_slots(self, positions, weights, experts, token: Int32, lane: Int32):
        """Lane j has the j-th of the token's positions in ascending order, its weight, its expert; -1 behind the last.

        Weights and experts where these are given.
        """
        mine, weight, of_slot = Int32(-1), Float32(0.0), Int32(-1)
        if lane < self.k:
            mine = positions[token, lane]
            if const_expr(self.weighted):
                weight = weights[token, lane]
            if const_expr(self.biased):
                of_slot = experts[token, lane]
        key = mine if mine >= 0 else Int32(0x7FFFFFFF)
        rank = Int32(0)
        for j in cutlass.range_constexpr(self.k):
            other = cute.arch.shuffle_sync(key, j)
            if other < key or (other == key and j < lane):
                rank += 1
        position, factor, expert = Int32(-1), Float32(0.0), Int32(-1)
        for j in cutlass.range_constexpr(self.k):
            other, of_other = cute.arch.shuffle_sync(mine, j), cute.arch.shuffle_sync(weight, j)
            if cute.arch.shuffle_sync(rank, j) == lane:
                position, factor = other, of_other
        if const_expr(self.biased):
            for j in cutlass.range_constexpr(self.k):
                other = cute.arch.shuffle_sync(of_slot, j)
                if cute.arch.shuffle_sync(rank, j) == lane:
                    expert = other
        return position, factor, expert


@compiled
def gather(arch: str, spec: GatherSpec) -> Program:
    """out[positions[t, j]] = x[t], times weights[t, j]; zeros where the slot of a row is -1.

    ``dots``: of each slot the product of its token's row of x and its own of another matrix, in fp32.
    """
    dtype, tokens, rows, columns = cutlass_dtype(spec.dtype), *(cute.sym_int() for _ in range(3))
    return Program(
        Gather(spec),
        symbolic_rows(dtype, tokens, columns),
        symbolic_list(Int32, rows),
        symbolic_table(Int32, tokens, spec.k),
        symbolic_table(Float32, tokens, spec.k) if spec.weighted else None,
        symbolic_rows(dtype, rows, columns) if spec.dots else None,
        symbolic_rows(dtype, rows, columns),
        symbolic_table(Float32, tokens, spec.k) if spec.dots else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def combine(arch: str, spec: CombineSpec) -> Program:
    """y[t] = the sum of rows[positions[t, j]] times weights[t, j] in ascending position, without those of -1.

    ``biased``: bias[experts[t, j]] is added to a row before, in fp32.
    """
    dtype, tokens, rows, columns = cutlass_dtype(spec.dtype), *(cute.sym_int() for _ in range(3))
    return Program(
        Combine(spec),
        symbolic_rows(dtype, rows, columns),
        symbolic_table(Int32, tokens, spec.k),
        symbolic_table(Float32, tokens, spec.k) if spec.weighted else None,
        symbolic_table(Int32, tokens, spec.k) if spec.biased else None,
        symbolic_rows(dtype, cute.sym_int(), columns) if spec.biased else None,
        symbolic_rows(dtype, tokens, columns),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
