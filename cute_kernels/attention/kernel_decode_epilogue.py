"""The epilogue of the SM90 kernel over a cache: write O, or keep it as a partial and merge the partials of a tile.

Two warps of their own merge: the warpgroup that computes goes on to its next item meanwhile.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_decode_items import ITEM_SLOTS, DecodeItems, Rows
from cute_kernels.attention.kernel_decode_late import MERGE_WARPS, count_one
from cute_kernels.attention.kernel_products_sm90 import Products
from cute_kernels.attention.kernel_row import (
    QUAD,
    ROWS,
    finish_element,
    finish_row,
    merge_element,
    merge_row,
    merge_rows,
    quad_sum,
)
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, opaque, row_of_thread

MERGERS = MERGE_WARPS * WARP_SIZE  # threads that merge
GROUP_BARRIER, MERGE_BARRIER = 1, 2  # of the warpgroup that computes, of those that merge
VECTOR = 8  # numbers of a row that a thread merges together
MERGED_AHEAD = 16  # splits whose numbers a thread that merges loads together
PAIR = 2  # neighbours in a thread's registers


class DecodeEpilogue(DecodeItems, Products):
    """A part of the kernel, which has ``head_size_v``, ``sinks``, ``kept``, ``shared_word``, and a thread's number in
    the CTA, ``thread``; those that compute are the first ones.
    """

    def my_row(self, rows: Rows, r: int) -> Int32:
        """One of the thread's rows among the sequence's."""
        return rows.tile * WARPGROUP_ROWS + row_of_thread(self.thread) + 8 * r

    def pairs_of(self, row: cute.Tensor, thread: Int32) -> cute.Tensor:
        """A row's numbers that are a thread's: two in each eight."""
        layout = cute.make_layout((PAIR, QUAD, self.head_size_v // 8), stride=(1, PAIR, 8))
        return cute.make_tensor(row.iterator, layout)[None, thread % QUAD, None]

    def sink_of(self, head: Int32):
        return self.sinks[head].to(Float32) if const_expr(self.sinks is not None) else None

    def exists(self, rows: Rows, r: int):
        return self.my_row(rows, r) < rows.queries * self.group

    @cute.jit
    def write(
        self,
        output: cute.Tensor,
        state: tuple,
        out: cute.Tensor,
        lse: cute.Tensor,
        rows: Rows,
    ):
        """Rows whose splits are merged, from registers."""
        maximum, total, _ = state
        rounded = cute.make_rmem_tensor((PAIR,), self.dtype)
        for r in cutlass.range_constexpr(ROWS):
            if self.exists(rows, r):
                row = self.my_row(rows, r)
                token, head = rows.first_query + row // self.group, rows.pair * self.group + row % self.group
                empty, reciprocal, of_row = finish_row(maximum[r], total[r], self.score_scale, self.sink_of(head))
                if self.lane % QUAD == 0:
                    lse[rows.dense, head, token] = of_row
                line = self.pairs_of(out[rows.dense, token, head, None], self.thread)
                for i in cutlass.range_constexpr(self.head_size_v // 8):
                    for e in cutlass.range_constexpr(PAIR):
                        number = finish_element(output[4 * i + 2 * r + e], empty, reciprocal)
                        rounded[e] = number.to(self.dtype)
                    cute.autovec_copy(rounded, line[None, i])

    @cute.jit
    def keep_partial(
        self, output: cute.Tensor, state: tuple, partials: cute.Tensor, sums: cute.Tensor, rows: Rows, split: Int32
    ):
        """(m, l, O) of a split into the workspace."""
        maximum, total, _ = state
        pair = cute.make_rmem_tensor((PAIR,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            if self.exists(rows, r):
                row = rows.row_id + (row_of_thread(self.thread) + 8 * r)
                if self.lane % QUAD == 0:
                    pair[0], pair[1] = maximum[r], total[r]
                    cute.autovec_copy(pair, sums[split, row, None])
                line = self.pairs_of(partials[split, row, None], self.thread)
                for i in cutlass.range_constexpr(self.head_size_v // 8):
                    for e in cutlass.range_constexpr(PAIR):
                        pair[e] = output[4 * i + 2 * r + e]
                    cute.autovec_copy(pair, line[None, i])

    @cute.jit
    def merge_items(self, partials: cute.Tensor, sums: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
        """Count partials, and merge the tiles whose last one this CTA keeps, or rows of all tiles late."""
        number = Int32(0)
        last = self.wait_for_item(number)
        while last > 0:
            item = self.read_item(number)
            cute.arch.mbarrier_wait(self.kept + number % ITEM_SLOTS, number // ITEM_SLOTS % 2)
            self.release_item(number)
            rows = self.rows_of_item(item)
            _, splits = self.splits_of_item(item)
            if splits > 1:
                if const_expr(self.merges_late):
                    if self.thread % MERGERS == 0:
                        count_one(self.counter_of(item))
                elif self.is_last(self.counter_of(item), splits):
                    self.merge(partials, sums, rows, splits, out, lse)
            number += 1
            last = self.wait_for_item(number)
        if const_expr(self.merges_late):
            self.merge_late(partials, sums, out, lse)

    @cute.jit
    def is_last(self, place: cute.Pointer, splits: Int32):
        """Whether the other splits of the tile are in the workspace; then its counter, at ``place``, is 0 again."""
        self.meet_to_merge()  # all have read the word of the tile before
        word = self.shared_word
        if self.thread % MERGERS == 0:
            cute.arch.fence_acq_rel_gpu()  # of what others of this CTA wrote, too, which was waited for
            before = cute.arch.atomic_add(place, Int32(1), sem="acq_rel", scope="gpu")
            if before == splits - 1:
                place[0] = Int32(0)
            word[0] = before
        self.meet_to_merge()
        cute.arch.fence_acq_rel_gpu()
        return word[0] == splits - 1

    @cute.jit
    def merge(
        self,
        partials: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        splits: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
    ):
        """The splits of a tile, ascending; a thread has ``VECTOR`` numbers of a row.

        Those of ``MERGED_AHEAD`` splits are in flight; behind the last one it is loaded again, and not merged.
        """
        vectors = self.head_size_v // VECTOR
        first = rows.tile * WARPGROUP_ROWS
        number_of_rows = cutlass.min(rows.queries * self.group - first, WARPGROUP_ROWS)
        merged = cute.make_rmem_tensor((VECTOR,), Float32)
        found = cute.make_rmem_tensor((VECTOR, MERGED_AHEAD), Float32)
        both = cute.make_rmem_tensor((PAIR, MERGED_AHEAD), Float32)
        rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
        for number in cutlass.range(self.thread % MERGERS, number_of_rows * vectors, MERGERS, unroll=1):
            row, column = number // vectors, number % vectors
            maximum, total = Float32(-math.inf), Float32(0.0)
            merged.fill(0.0)
            for begin in cutlass.range(0, splits, MERGED_AHEAD, unroll=1):
                for i in cutlass.range_constexpr(MERGED_AHEAD):
                    split = cutlass.min(begin + i, splits - 1)
                    numbers = cute.local_tile(partials[split, rows.row_id + row, None], (VECTOR,), (column,))
                    cute.autovec_copy(sums[split, rows.row_id + row, None], both[None, i])
                    cute.autovec_copy(numbers, found[None, i])
                for i in cutlass.range_constexpr(MERGED_AHEAD):
                    if begin + i < splits:
                        maximum, total, a, b = merge_row(maximum, total, both[0, i], both[1, i], self.score_scale)
                        for e in cutlass.range_constexpr(VECTOR):
                            merged[e] = merge_element(merged[e], a, found[e, i], b)
            token = rows.first_query + (first + row) // self.group
            head = rows.pair * self.group + (first + row) % self.group
            empty, reciprocal, of_row = finish_row(maximum, total, self.score_scale, self.sink_of(head))
            if column == 0:
                lse[rows.dense, head, token] = of_row
            for e in cutlass.range_constexpr(VECTOR):
                rounded[e] = finish_element(merged[e], empty, reciprocal).to(self.dtype)
            cute.autovec_copy(rounded, cute.local_tile(out[rows.dense, token, head, None], (VECTOR,), (column,)))

    @cute.jit
    def end_split(
        self,
        output: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        merged: tuple,
        partials: cute.Tensor,
        rows: Rows,
        is_first: cutlass.Boolean,
    ):
        """A split that ended into (M, L) and A, which lies in the workspace; O, which is waited for, becomes 0.

        The waits are behind the branch as in ``weigh``.
        """
        merged_maximum, merged_total = merged
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        if is_first:  # merged into nothing it is what it was
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(ROWS):
                merged_maximum[r], merged_total[r] = maximum[r], total[r]
            self.move_rows(output, partials, rows, (Float32(0.0),) * ROWS, (Float32(1.0),) * ROWS, "keep")
        else:
            warpgroup.wait_group(0)
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            self.move_rows(output, partials, rows, a, b, "merge")
        output.fill(0.0)

    @cute.jit
    def merge_last(self, output: cute.Tensor, state: tuple, merged: tuple, partials: cute.Tensor, rows: Rows):
        """The last split merged, A in registers."""
        maximum, total, _ = state
        a, b = merge_rows(merged[0], merged[1], maximum, total, self.score_scale)
        self.move_rows(output, partials, rows, a, b, "take")
        for r in cutlass.range_constexpr(ROWS):
            maximum[r], total[r] = merged[0][r], merged[1][r]

    @cute.jit
    def move_rows(
        self,
        output: cute.Tensor,
        partials: cute.Tensor,
        rows: Rows,
        a: tuple,
        b: tuple,
        way: cutlass.Constexpr[str],
    ):
        """A, a thread's own part of it: ``keep`` O as A, ``merge`` O into it, or ``take`` both into O's registers."""
        pair, thread = cute.make_rmem_tensor((PAIR,), Float32), opaque(self.thread)
        for r in cutlass.range_constexpr(ROWS):
            row = row_of_thread(thread) + 8 * r
            if rows.tile * WARPGROUP_ROWS + row < rows.queries * self.group:
                line = self.pairs_of(partials[0, opaque(rows.row_id) + row, None], thread)
                for i in cutlass.range_constexpr(self.head_size_v // 8):
                    if const_expr(way != "keep"):
                        cute.autovec_copy(line[None, i], pair)
                    for e in cutlass.range_constexpr(PAIR):
                        element = 4 * i + 2 * r + e
                        number = output[element]
                        if const_expr(way != "keep"):
                            number = merge_element(pair[e], a[r], number, b[r])
                        if const_expr(way == "take"):
                            output[element] = number
                        pair[e] = number
                    if const_expr(way != "take"):
                        cute.autovec_copy(pair, line[None, i])

    @cute.jit
    def clear_rows(self, out: cute.Tensor, lse: cute.Tensor):
        """Rows behind those of the last sequence."""
        zeros = cute.make_rmem_tensor((8,), self.dtype)
        zeros.fill(0.0)
        vectors = self.head_size_v // 8
        for row in cutlass.range(self.cu_seqlens_q[self.batch] + self.bidx, out.shape[1], self.grid, unroll=1):
            for number in cutlass.range(self.thread, self.heads * vectors, WARPGROUP, unroll=1):
                head, column = number // vectors, number % vectors
                if column == 0:
                    lse[0, head, row] = Float32(-math.inf)
                cute.autovec_copy(zeros, cute.local_tile(out[0, row, head, None], (8,), (column,)))

    @cute.jit
    def release(self, slot: Int32):
        """This warp has read a slot."""
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.empty + slot)

    def meet(self):
        """A barrier of the warpgroup that computes."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=WARPGROUP)

    def meet_to_merge(self):
        """A barrier of the warps that merge."""
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=MERGERS)
