"""The products of ``projection_backward`` by warps: dx, and the sums of dphi, of a tile in the ring."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.common.cache_hints import EVICT_LAST, store_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.mhc.config import ProjectionBackwardConfig
from cute_kernels.mhc.kernel.projection_split import terms_of
from cute_kernels.mhc.kernel.streams import WARP_SIZE
from cute_kernels.mhc.kernel.tile_ring import TileRing, column_of, end_of_columns
from cute_kernels.mhc.kernel.token_rows import TokenRows


class StreamGradient:
    """dx of a tile; phi in terms in shared memory, or where registers are left for it, a warp's columns in them.

    H200, the backward of a layer, tiles of 16 tokens: in registers 2048x4x5120 takes 172.8 us, not 177.8, in the order
    of channels 194.6, not 203.4; 8192x4x4096 468.0, not 462.7, and 483.7, not 490.6.
    """

    def __init__(self, config: ProjectionBackwardConfig, smem, ring: TileRing, tokens: TokenRows):
        self.config = config
        self.ring = ring
        self.tokens = tokens
        few_registers = tokens.orientation is not None and config.tile_m > 16
        self.held_steps = 0 if few_registers or config.phi_rows > 80 else config.phi_rows // 16
        columns = config.n * config.slice_c
        layout = cute.make_layout((config.phi_rows, columns), stride=(columns + 8, 1))
        self.sPhi = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)

    @cute.jit
    def barrier(self):
        """The warps that compute dx meet."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.config.warps * WARP_SIZE)

    @cute.jit
    def load_phi(self, phi, norm_weight, slice_index: Int32, tidx: Int32):
        """The slice of phi' in terms. Block b: term b once for each term a of dH it is multiplied with, a + b < order.

        Then A's columns [term 0 | term 1 | ...] times block b are all products with term b, in whole steps of 16.
        All of a thread's loads are in flight at once.
        """
        config = self.config
        threads, width = const_expr(config.warps * WARP_SIZE), const_expr(config.slice_c // 2)  # pairs of columns
        share = const_expr(-(-config.padded_columns * width // threads))
        values = cute.make_rmem_tensor((2, config.n, share), Float32)
        values.fill(0.0)
        for v in cutlass.range_constexpr(share):
            j, pair = (tidx + v * threads) // width, (tidx + v * threads) % width
            for i in cutlass.range_constexpr(config.n):
                for e in cutlass.range_constexpr(2):
                    bound, column = column_of(config, slice_index, i, 2 * pair + e)
                    if j < config.columns and bound < end_of_columns(config):
                        value = phi[j, column].to(Float32)
                        if const_expr(norm_weight is not None):
                            value = value * norm_weight[column].to(Float32)
                        values[e, i, v] = value
        for v in cutlass.range_constexpr(share):
            j, pair = (tidx + v * threads) // width, (tidx + v * threads) % width
            if j < config.padded_columns:
                for i in cutlass.range_constexpr(config.n):
                    self.put_terms(values[None, i, v].load(), j, i * config.slice_c + 2 * pair)

    @cute.jit
    def put_terms(self, value, j: Int32, column: Int32):
        """Two neighbouring numbers of row j of phi' to all of its rows in terms."""
        config = self.config
        row = const_expr(0)
        for b in cutlass.range_constexpr(config.phi_terms):
            term = cute.make_rmem_tensor((2,), BFloat16)
            term.store(value.to(BFloat16))
            value = value - term.load().to(Float32)
            rows = const_expr(config.block_rows(b))
            for a in cutlass.range_constexpr(-(-rows // config.padded_columns)):
                if const_expr(a == config.order - b):
                    term.fill(0.0)
                at = a * config.padded_columns + j
                if at < rows:
                    place = cute.assume(self.sPhi.layout((row + at, column)), divby=2)
                    cute.autovec_copy(term, cute.make_tensor(self.sPhi.iterator + place, cute.make_layout(2)))
            row = const_expr(row + rows)

    @cute.jit
    def load_phi_step(self, tiled_mma, step: cutlass.Constexpr[int], group: Int32, lane: Int32):
        """16 rows of the terms of phi, a warp's columns, as operand B."""
        config, sPhi = self.config, self.sPhi
        if const_expr(config.layout == "streams"):
            columns = cute.make_layout(((8, config.n), config.phi_rows), stride=((1, config.slice_c), sPhi.stride[0]))
            b = cute.make_tensor((sPhi.iterator + group * 8).align(16), columns)
        else:
            columns = cute.make_layout(((8, config.n), config.phi_rows), stride=((1, 8), sPhi.stride[0]))
            b = cute.make_tensor((sPhi.iterator + group * (8 * config.n)).align(16), columns)
        return load_operand(tiled_mma, "b", cute.local_tile(b, (8 * config.n, 16), (0, step)), True, lane)

    @cute.jit
    def project(self, tiled_mma, held: list, slot: Int32, group: Int32, part: Int32, lane: Int32):
        """dH phi' of this warp's tokens and columns."""
        config = self.config
        tokens = const_expr(config.tile_m // config.parts)
        sH = self.tokens.sH[None, None, slot]
        a = cute.make_tensor(
            (sH.iterator + part * tokens * sH.stride[0]).align(16),
            cute.make_layout((tokens, config.terms_columns), stride=(sH.stride[0], 1)),
        )
        gradient = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tokens, 8 * config.n)), Float32)
        gradient.fill(0.0)
        rA = load_operand(tiled_mma, "a", a, False, lane)
        step = const_expr(0)
        for block in cutlass.range_constexpr(config.phi_terms):
            for k16 in cutlass.range_constexpr(config.block_rows(block) // 16):
                if const_expr(self.held_steps > 0):
                    rB = held[step]
                else:
                    rB = self.load_phi_step(tiled_mma, step, group, lane)
                cute.gemm(tiled_mma, gradient, rA[None, None, k16], rB[None, None, 0], gradient)
                step = const_expr(step + 1)
        return gradient

    @cute.jit
    def finish(
        self,
        gradient: cute.Tensor,
        read: Optional[cute.Pointer],
        slot: Int32,
        phase: Int32,
        group: Int32,
        part: Int32,
        lane: Int32,
    ):
        """Add what else there is to dx, and put it in the place of x, once those that add up (if any) have read it."""
        config, ring = self.config, self.ring
        n, count = const_expr(config.n), const_expr(config.tile_m // config.parts)
        first = part * count
        rX = cute.make_rmem_tensor(gradient.shape, ring.dtype)
        pairs = [ring.place(group, q, lane % 4 * 2, lane) for q in range(n)]
        for q in cutlass.range_constexpr(n):
            cute.autovec_copy(ring.every_eighth_row(ring.sX, slot, pairs[q], first, count, 2), rX[None, None, q])
        if const_expr(self.tokens.orientation is not None and config.layout == "streams"):
            rOut = cute.make_rmem_tensor(gradient.shape, ring.dtype)
            for q in cutlass.range_constexpr(n):
                cute.autovec_copy(
                    ring.every_eighth_row(ring.sOut, slot, pairs[q], first, count, 2), rOut[None, None, q]
                )
        if const_expr(self.tokens.has_layer_grad and config.layout == "streams"):
            rLayer = cute.make_rmem_tensor(gradient.shape[:2], ring.dtype)
            cute.autovec_copy(ring.every_eighth_row(ring.sLayer, slot, pairs[0], first, count, 2), rLayer)
        for m in cutlass.range_constexpr(count // 16):
            for h in cutlass.range_constexpr(2):
                token = first + m * 16 + h * 8 + lane // 4
                scale = self.tokens.scale(slot, token)
                if const_expr(config.layout == "streams"):
                    weights = self.tokens.weights(slot, token)
                    gates = self.tokens.gates(slot, token)
                    xs = [to_fp32(rX[(None, h), m, i].load()) for i in range(n)]
                    if const_expr(self.tokens.has_layer_grad):
                        layer = to_fp32(rLayer[(None, h), m].load())
                    if const_expr(self.tokens.orientation is not None):
                        outs = [to_fp32(rOut[(None, h), m, o].load()) for o in range(n)]
                    for e in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(n):
                            value = gradient[(e, h), m, i] + scale * xs[i][e]
                            if const_expr(self.tokens.has_layer_grad):
                                value = value + gates[i] * layer[e]
                            if const_expr(self.tokens.orientation is not None):
                                for o in cutlass.range_constexpr(n):
                                    value = value + weights[i * n + o] * outs[o][e]
                            rX[(e, h), m, i] = value.to(ring.dtype)
                else:
                    for q in cutlass.range_constexpr(n):
                        # Two neighbouring streams of one channel
                        column = 8 * q + lane % 4 * 2
                        channel, stream = column // n, column % n
                        if const_expr(self.tokens.has_layer_grad):
                            at = ring.place_of_channel(group, channel, lane)
                            layer = ring.every_eighth_row(ring.sLayer, slot, at, first, count, 1)[(0, h), m].to(Float32)
                        if const_expr(self.tokens.orientation is not None):
                            outs = []
                            unit = const_expr(min(n, 128 // ring.dtype.width))  # neighbours in spite of the swizzle
                            for o in cutlass.range_constexpr(0, n, unit):
                                others = cute.make_rmem_tensor((unit,), ring.dtype)
                                at = ring.place(group, q, lane % 4 * 2 - stream + o, lane)
                                source = ring.every_eighth_row(ring.sOut, slot, at, first, count, unit)
                                cute.autovec_copy(source[(None, h), m], others)
                                values = to_fp32(others.load())
                                outs += [values[v] for v in range(unit)]
                        xs = to_fp32(rX[(None, h), m, q].load())
                        for e in cutlass.range_constexpr(2):
                            value = gradient[(e, h), m, q] + scale * xs[e]
                            if const_expr(self.tokens.has_layer_grad):
                                value = value + self.tokens.gate(slot, token, stream + e) * layer
                            if const_expr(self.tokens.orientation is not None):
                                weights = self.tokens.row(slot, token, stream + e)
                                for o in cutlass.range_constexpr(n):
                                    value = value + weights[o] * outs[o]
                            rX[(e, h), m, q] = value.to(ring.dtype)
        if const_expr(read is not None):
            cute.arch.mbarrier_wait(read + slot, phase)
        for q in cutlass.range_constexpr(n):
            cute.autovec_copy(rX[None, None, q], ring.every_eighth_row(ring.sX, slot, pairs[q], first, count, 2))


class PhiSums:
    """Sums of dphi over a chunk's tokens, in registers, and over the chunks of a group, in shared memory."""

    def __init__(self, config: ProjectionBackwardConfig, smem, ring: TileRing, tokens: TokenRows):
        self.config = config
        self.ring = ring
        self.tokens = tokens
        if config.group > 1:
            threads = config.sum_warps * WARP_SIZE
            shape = (2, config.n, config.padded_columns // 8, threads, config.sum_groups)
            stride = (threads, 2 * threads, shape[1] * 2 * threads, 1, shape[2] * shape[1] * 2 * threads)
            self.sGroup = smem.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), byte_alignment=16)

    def zeros(self, tiled_mma):
        """Accumulators: rows of terms by columns of a warp, by group."""
        config = self.config
        shape = tiled_mma.partition_shape_C((config.terms_columns // config.parts, 8 * config.n))
        return cute.make_rmem_tensor((*shape, config.sum_groups), Float32)

    @cute.jit
    def add_products(self, tiled_mma, sums: cute.Tensor, freed, slot: Int32, group: Int32, part: Int32, lane: Int32):
        """sums[j, k] += sum over the tile's tokens of dH[m, j] x[m, k], for every term of dH (of this part)."""
        config = self.config
        rows = const_expr(config.terms_columns // config.parts)
        sH = self.tokens.sH[None, None, slot]
        a = cute.make_tensor(
            (sH.iterator + part * rows).align(16), cute.make_layout((rows, config.tile_m), stride=(1, sH.stride[0]))
        )
        rA = load_operand(tiled_mma, "a", a, True, lane)
        operands = [self.load_columns(tiled_mma, slot, group + g, lane) for g in range(config.sum_groups)]
        cute.arch.mbarrier_arrive(freed + slot)
        for k16 in cutlass.range_constexpr(config.tile_m // 16):
            for g in cutlass.range_constexpr(config.sum_groups):
                total, operand = sums[None, None, None, g], operands[g][None, None, k16]
                if const_expr(self.ring.dtype is BFloat16):
                    cute.gemm(tiled_mma, total, rA[None, None, k16], operand, total)
                else:
                    terms = terms_of(operand.load().to(Float32), operand.shape, config.x_terms)
                    for b in cutlass.range_constexpr(config.x_terms):
                        cute.gemm(tiled_mma, total, rA[None, None, k16], terms[b], total)

    @cute.jit
    def load_columns(self, tiled_mma, slot: Int32, group: Int32, lane: Int32):
        """A group's columns of x as operand B (columns, tokens)."""
        view = self.ring.columns_of_warp(self.ring.sX, slot, group)
        columns = cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0]))
        if const_expr(self.ring.dtype.width == 16):
            operand = load_operand(tiled_mma, "b", columns, True, lane)
        else:
            source = tiled_mma.get_slice(lane).partition_B(columns)
            operand = cute.make_rmem_tensor(source.shape, self.ring.dtype)
            for v in cutlass.range_constexpr(cute.size(operand)):
                operand[v] = source[v]
        return operand

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        partials: cute.Tensor,
        row: Int32,
        slice_index: Int32,
        group: Int32,
        thread: Int32,
        g: cutlass.Constexpr[int],
        adds: Boolean,
        keeps: Boolean,
        lane: Int32,
    ):
        """A chunk's sums, the terms of dH added where one warp has them all, to a row of ``partials``.

        ``adds``: with those of the chunks of its group so far; ``keeps``: only to shared memory, for the next chunk.
        """
        config = self.config
        octets = const_expr(config.padded_columns // 8)
        terms = const_expr(config.order if config.parts == 1 else 1)
        j, column, pitch = lane // 4, group * 8 + lane % 4 * 2, const_expr(config.channels)  # of a stream
        if const_expr(config.layout == "streams"):
            column += slice_index * config.slice_c
        else:
            column += group * (8 * config.n - 8) + slice_index * (config.n * config.slice_c)
            pitch = const_expr(8)
        width = const_expr(2 - end_of_columns(config) % 2)  # numbers that one store writes
        start = Int64(row) * (config.columns * config.k) + (j * config.k + column)
        target = partials.iterator + cute.assume(start, divby=width)
        for octet in cutlass.range_constexpr(octets):
            totals = cute.make_rmem_tensor((2, config.n), Float32)
            for q in cutlass.range_constexpr(config.n):
                for e in cutlass.range_constexpr(2):
                    total = sums[(e, octet % 2), octet // 2, q]
                    for a in cutlass.range_constexpr(1, terms):
                        row_of_term = const_expr(octet + a * octets)
                        total = total + sums[(e, row_of_term % 2), row_of_term // 2, q]
                    totals[e, q] = total
            if const_expr(config.group > 1):
                kept = self.sGroup[None, None, octet, thread, g]
                if adds:
                    totals.store(kept.load() + totals.load())
                if keeps:
                    kept.store(totals.load())
            if not keeps:
                for q in cutlass.range_constexpr(config.n):
                    for e in cutlass.range_constexpr(0, 2, width):
                        bound = column + e if const_expr(config.layout == "streams") else column + (q * pitch + e)
                        if octet * 8 + j < config.columns and bound < end_of_columns(config):
                            place = target + (octet * 8 * config.k + q * pitch + e)
                            value = cute.make_tensor(totals.iterator + (2 * q + e), cute.make_layout(width))
                            store_vector(value, place, Int64(EVICT_LAST))


@cute.jit
def load_operand(
    tiled_mma, which: cutlass.Constexpr[str], tile: cute.Tensor, transpose: cutlass.Constexpr[bool], lane: Int32
):
    """A warp's operand A (M, K) or B (N, K) from shared memory, by ldmatrix; ``transpose``: K is not contiguous."""
    matrices = const_expr(4 if which == "a" or cute.size(tile, mode=[0]) > 8 else 2)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, matrices), tile.element_type)
    thr_mma = tiled_mma.get_slice(lane)
    if const_expr(which == "a"):
        copy = cute.make_tiled_copy_A(atom, tiled_mma)
        registers = cute.make_rmem_tensor(thr_mma.partition_A(tile).shape, tile.element_type)
    else:
        copy = cute.make_tiled_copy_B(atom, tiled_mma)
        registers = cute.make_rmem_tensor(thr_mma.partition_B(tile).shape, tile.element_type)
    cute.copy(copy, copy.get_slice(lane).partition_S(tile), copy.retile(registers))
    return registers
