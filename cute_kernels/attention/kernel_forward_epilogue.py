"""The epilogue of the SM90 forward: O goes into A at the end of a split, into out at the end of a tile.

A thread's part of A is its own, so A needs no barrier. (M, L) of a row is its four lanes' alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_forward_tiles import ForwardTiles
from cute_kernels.attention.kernel_matrices import partition
from cute_kernels.attention.kernel_products_sm90 import Products
from cute_kernels.attention.kernel_row import (
    QUAD,
    ROWS,
    finish_element,
    finish_row,
    merge_element,
    merge_rows,
    per_row,
    quad_sum,
    row_of,
)
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, opaque, row_of_thread

GROUP_BARRIER = 4  # the first of the named barriers of a warpgroup's threads among themselves
VECTOR = 4  # fp32 numbers of A that move together


class ForwardEpilogue(ForwardTiles, Products):
    """A part of the kernel, which has ``A``, ``sRows`` for (M, L), ``sO``, ``q_empty``, and of a thread ``wg``."""

    @cute.jit
    def end_split(self, output: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, is_first: Boolean):
        """A split, the tile's first or not, into (M, L, A); O, which is waited for, becomes 0.

        The waits are behind the branch as in ``next_block``.
        """
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.thread)
        if is_first:  # merged into nothing it is what it was
            self.wait_for_store()
            warpgroup.wait_group(0)
            self.keep_rows(maximum, total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = output[i * VECTOR + e]
                cute.autovec_copy(vector, self.A[None, thread, i, self.wg])
        else:
            warpgroup.wait_group(0)
            merged_maximum, merged_total = per_row(), per_row()
            self.load_rows(merged_maximum, merged_total, thread)
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            self.keep_rows(merged_maximum, merged_total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                if const_expr(self.in_workspace and i % 4 == 0):  # no registers for more loads in flight
                    self.meet()
                cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                for e in cutlass.range_constexpr(VECTOR):
                    r = row_of(e)
                    vector[e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
                cute.autovec_copy(vector, self.A[None, thread, i, self.wg])
        output.fill(0.0)

    def kept_row(self, thread: Int32, r: int) -> cute.Tensor:
        """(M, L) of one of the thread's rows; its four lanes write the same."""
        return self.sRows[None, row_of_thread(thread) + 8 * r, self.wg]

    @cute.jit
    def keep_rows(self, maximum: cute.Tensor, total: cute.Tensor, thread: Int32):
        pair = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            pair[0], pair[1] = maximum[r], total[r]
            cute.autovec_copy(pair, self.kept_row(thread, r))

    @cute.jit
    def load_rows(self, maximum: cute.Tensor, total: cute.Tensor, thread: Int32):
        """The four lanes of a row are here before one reads it, and before one writes it again."""
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.arch.sync_warp()
        for r in cutlass.range_constexpr(ROWS):
            cute.autovec_copy(self.kept_row(thread, r), pair)
            maximum[r], total[r] = pair[0], pair[1]
        cute.arch.sync_warp()

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        state: tuple,
        tile: tuple,
        blocks: tuple,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
    ):
        """The last split merged, out and lse on their way."""
        output, _ = tensors
        maximum, total, _ = state
        thread = opaque(self.thread)
        my_row = tile.m * self.tile_rows + self.wg * WARPGROUP_ROWS + row_of_thread(thread)
        self.merge_last(output, maximum, total, thread, blocks)

        sink = sinks[tile.head] if const_expr(self.spec.sinks) else None
        line = lse.iterator + self.first_of_lse(lse, tile)
        empty, reciprocals = [], []
        for r in cutlass.range_constexpr(ROWS):
            is_empty, reciprocal, of_row = finish_row(maximum[r], total[r], self.score_scale, sink)
            empty.append(is_empty)
            reciprocals.append(reciprocal)
            if thread % QUAD == 0 and my_row + 8 * r < tile.len_q:
                line[my_row + 8 * r] = of_row
        rounded = cute.make_rmem_tensor(output.shape, self.dtype)
        for i in cutlass.range_constexpr(cute.size(output)):
            r = row_of(i)
            output[i] = finish_element(output[i], empty[r], reciprocals[r])
        rounded.store(output.load().to(self.dtype))

        self.wait_for_store()  # and all have read their part of A, or of q
        atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.tiled_mma(self.head_size_v, True))
        target = copy.get_slice(thread).partition_D(self.sO[None, None, self.wg])
        cute.copy(copy, copy.retile(rounded), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if thread < WARP_SIZE:
            tOsO, tOgO = partition(tma_o, self.sO, self.output_of(mO, tile), (WARPGROUP_ROWS, self.head_size_v))
            cute.copy(tma_o, tOsO[None, self.wg], tOgO[None, tile.m * self.warpgroups + self.wg, 0])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(self.in_workspace):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(self.in_workspace):
            self.release(self.q_empty)

    @cute.jit
    def merge_last(self, output: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, thread: Int32, blocks: tuple):
        """(M, L, A) of all splits into (maximum, total, output)."""
        merged_maximum, merged_total = per_row(), per_row()
        vector = cute.make_rmem_tensor((VECTOR,), Float32)
        crosses = (blocks.end - 1) // self.split_blocks > blocks.first // self.split_blocks
        if const_expr(self.in_workspace):
            if crosses:  # by way of A: with both in registers there would be too few
                self.end_split(output, maximum, total, False)
                self.load_rows(merged_maximum, merged_total, thread)
                for r in cutlass.range_constexpr(ROWS):
                    maximum[r], total[r] = merged_maximum[r], merged_total[r]
                for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                    cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                    for e in cutlass.range_constexpr(VECTOR):
                        output[i * VECTOR + e] = vector[e]
            else:
                for r in cutlass.range_constexpr(ROWS):
                    total[r] = quad_sum(total[r])
        else:
            for r in cutlass.range_constexpr(ROWS):
                total[r] = quad_sum(total[r])
            if crosses:
                self.load_rows(merged_maximum, merged_total, thread)
                a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
                for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                    cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                    for e in cutlass.range_constexpr(VECTOR):
                        r = row_of(e)
                        output[i * VECTOR + e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
                for r in cutlass.range_constexpr(ROWS):
                    maximum[r], total[r] = merged_maximum[r], merged_total[r]

    @cute.jit
    def release(self, empty: cute.Pointer):
        """This warp has read a slot."""
        if self.lane == 0:
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def wait_for_store(self):
        """Until the tile before has left A's place, and all of the warpgroup are here."""
        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.meet()

    def meet(self):
        """A barrier of a warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER + self.wg, number_of_threads=WARPGROUP)
