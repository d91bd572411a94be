"""The epilogue of the SM100 forward, whose O lies in tensor memory: rescale it, put it into A, write it.

A warpgroup, a thread a row, has the outputs of all tiles. After each block the softmax of its row tells it what to do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.attention.config import SM100_ROWS
from cute_kernels.attention.kernel_forward_tiles import Blocks, ForwardTiles
from cute_kernels.attention.kernel_matrices import partition
from cute_kernels.attention.kernel_row import finish_element, finish_row, merge_element, merge_row, rescale_element
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, opaque
from cute_kernels.common.gemm_sm100 import tensor_memory_fence

ROWS = SM100_ROWS  # of queries of a tile, one a thread and a lane of tensor memory
CORRECTION_BARRIER = 1  # a named barrier
OUTPUT_PART = 16  # columns of O that move together
VECTOR = 4  # fp32 numbers of A that move together
CHUNK = 8  # elements of 16 bytes: what no swizzle takes apart


class ForwardSm100Epilogue(ForwardTiles):
    """A part of the kernel, which has the barriers that are named here, ``sRows``, ``sO`` and ``sums_of`` a tile."""

    @cute.jit
    def correct(
        self,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        workspace: cute.Tensor,
    ):
        """After each block O is rescaled; after a split it goes into A; after the last block it is written."""
        shape = VECTOR, ROWS, self.head_size_v // VECTOR + 1, self.tiles
        merged = workspace.iterator + Int64(self.bidx) * (shape[0] * shape[1] * shape[2] * shape[3])
        self.gA = cute.make_tensor(merged.align(16), cute.make_layout(shape))  # of a row (M, L), then A
        count = Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            if blocks.end > 0:
                first_split = blocks.first // self.split_blocks
                for n in cutlass.range(blocks.first + 1, blocks.end, unroll=1):
                    for t in cutlass.range(self.tiles, unroll=1):
                        first, second = self.listen(t, count)
                        if n % self.split_blocks == 0:
                            self.end_split(t, first, second, n // self.split_blocks > first_split + 1)
                        elif cute.arch.vote_any_sync(first != Float32(1.0)):
                            self.rescale(t, first)
                        tensor_memory_fence("before")
                        self.arrive(self.o_empty + t)
                    count += 1
                merges = (blocks.end - 1) // self.split_blocks > first_split
                for t in cutlass.range(self.tiles, unroll=1):
                    self.finish(t, self.listen(t, count), merges, tile, tma_o, mO, lse, sinks)
                count += 1
        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        tensor_memory_fence("before")
        self.meet()

    @cute.jit
    def listen(self, t: Int32, count: Int32):
        """Wait until the product of the ``count``-th block is in O; return the softmax's two numbers for this row."""
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.arch.mbarrier_wait(self.row_full + t, count % 2)
        cute.autovec_copy(self.sRows[None, self.thread, t], pair)
        self.arrive(self.row_empty + t)
        cute.arch.mbarrier_wait(self.o_full + t, count % 2)
        tensor_memory_fence("after")
        return pair[0], pair[1]

    @cute.jit
    def rescale(self, t: Int32, factor: Float32):
        load, tO = self.parts(self.sums_of(t), True, OUTPUT_PART)
        store, tO_target = self.parts(self.sums_of(t), False, OUTPUT_PART)
        for p in cutlass.range_constexpr(self.head_size_v // OUTPUT_PART):
            output = cute.make_rmem_tensor(self.part_layout(OUTPUT_PART), Float32)
            cute.copy(load, tO[None, None, None, p], output)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(OUTPUT_PART):
                output[i] = rescale_element(output[i], factor)
            cute.copy(store, output, tO_target[None, None, None, p])
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def end_split(self, t: Int32, maximum: Float32, total: Float32, merges: Boolean):
        """A split, of this tile not the first one (``merges``) or the first, into (M, L, A)."""
        mine, row = self.gA[None, opaque(self.thread), None, t], cute.make_rmem_tensor((VECTOR,), Float32)
        a, b = self.merge_row(mine, row, maximum, total, merges)
        cute.autovec_copy(row, mine[None, 0])
        load, tO = self.parts(self.sums_of(t), True, OUTPUT_PART)
        for p in cutlass.range(self.head_size_v // OUTPUT_PART, unroll=1):
            output = cute.make_rmem_tensor(self.part_layout(OUTPUT_PART), Float32)
            cute.copy(load, tO[None, None, None, p], output)
            cute.arch.fence_view_async_tmem_load()
            if merges:
                self.merge(output, mine, p, a, b)
            for i in cutlass.range_constexpr(OUTPUT_PART // VECTOR):
                vector = cute.make_tensor(output.iterator + VECTOR * i, cute.make_layout(VECTOR))
                cute.autovec_copy(vector, mine[None, 1 + p * (OUTPUT_PART // VECTOR) + i])

    @cute.jit
    def merge_row(self, mine: cute.Tensor, row: cute.Tensor, maximum: Float32, total: Float32, merges: Boolean):
        """``row`` becomes (M, L) with (m, l) merged into it, or (m, l). Returns what A and O are multiplied with."""
        a, b = Float32(0.0), Float32(1.0)
        if merges:
            cute.autovec_copy(mine[None, 0], row)
            row[0], row[1], a, b = merge_row(row[0], row[1], maximum, total, self.score_scale)
        else:  # merged into nothing it is what it was
            row[0], row[1] = maximum, total
        return a, b

    @cute.jit
    def merge(self, output: cute.Tensor, mine: cute.Tensor, p: Int32, a: Float32, b: Float32):
        """A part of a row's O becomes A of all splits so far."""
        vector = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range_constexpr(OUTPUT_PART // VECTOR):
            cute.autovec_copy(mine[None, 1 + p * (OUTPUT_PART // VECTOR) + i], vector)
            for e in cutlass.range_constexpr(VECTOR):
                output[i * VECTOR + e] = merge_element(vector[e], a, output[i * VECTOR + e], b)

    @cute.jit
    def finish(
        self,
        t: Int32,
        state: tuple,
        merges: Boolean,
        tile: tuple,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
    ):
        """The last split merged, out and lse on their way."""
        mine, row = self.gA[None, opaque(self.thread), None, t], cute.make_rmem_tensor((VECTOR,), Float32)
        a, b = self.merge_row(mine, row, *state, merges)
        sink = sinks[tile.head] if const_expr(self.spec.sinks) else None
        empty, reciprocal, of_row = finish_row(row[0], row[1], self.score_scale, sink)
        place = tile.m * self.tiles + t
        my_row = place * ROWS + self.thread
        if my_row < tile.len_q:
            line = lse.iterator + self.first_of_lse(lse, tile)
            line[my_row] = of_row

        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.meet()  # the tile before has left sO
        load, tO = self.parts(self.sums_of(t), True, OUTPUT_PART)
        for p in cutlass.range(self.head_size_v // OUTPUT_PART, unroll=1):
            output = cute.make_rmem_tensor(self.part_layout(OUTPUT_PART), Float32)
            cute.copy(load, tO[None, None, None, p], output)
            cute.arch.fence_view_async_tmem_load()
            if merges:
                self.merge(output, mine, p, a, b)
            for i in cutlass.range_constexpr(OUTPUT_PART):
                output[i] = finish_element(output[i], empty, reciprocal)
            rounded = cute.make_rmem_tensor((OUTPUT_PART,), self.dtype)
            rounded.store(cute.make_tensor(output.iterator, cute.make_layout(OUTPUT_PART)).load().to(self.dtype))
            for i in cutlass.range_constexpr(OUTPUT_PART // CHUNK):
                chunk = cute.local_tile(self.sO[self.thread, None], (CHUNK,), (p * (OUTPUT_PART // CHUNK) + i,))
                cute.autovec_copy(cute.local_tile(rounded, (CHUNK,), (i,)), chunk)
        tensor_memory_fence("before")
        self.arrive(self.o_empty + t)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if self.thread < WARP_SIZE:
            tOsO, tOgO = partition(tma_o, self.sO, self.output_of(mO, tile), (ROWS, self.head_size_v))
            cute.copy(tma_o, tOsO, tOgO[None, place, 0])
            cute.arch.cp_async_bulk_commit_group()

    # ---- tensor memory, and who waits for whom

    def parts(self, tensor: cute.Tensor, loads: bool, columns: int) -> tuple:
        """(Copy to or from registers, this thread's row of a tile in tensor memory by parts)."""
        op = (tcgen05.Ld32x32bOp if loads else tcgen05.St32x32bOp)(tcgen05.Repetition(columns))
        parts = cute.flat_divide(tensor[(None, None), 0, 0], (ROWS, columns))[None, None, 0, None]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), parts[None, None, 0])
        mine = copy.get_slice(self.thread)
        return copy, mine.partition_S(parts) if loads else mine.partition_D(parts)

    def part_layout(self, columns: int) -> cute.Layout:
        """The layout of a thread's part of a row in registers, as those copies take it."""
        return cute.make_layout(((columns, 1), 1, 1))

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """A warp is done with what a barrier guards."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    def meet(self):
        """A barrier of the warpgroup of the correction."""
        cute.arch.barrier(barrier_id=CORRECTION_BARRIER, number_of_threads=WARPGROUP)
