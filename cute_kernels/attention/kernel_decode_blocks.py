"""The walk of the SM90 kernel over a cache over the blocks of an item, in ascending order, in one of two ways.

Usually p of a block is found while the product of the block before with the values runs: the tensor cores then wait
until p is rounded. ``scores_ahead``: the next block's scores are issued behind that product, so that there is work for
them all along; a thread has two blocks of scores then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attention.config import COLUMNS
from cute_kernels.attention.kernel_decode_epilogue import DecodeEpilogue
from cute_kernels.attention.kernel_decode_items import Rows
from cute_kernels.attention.kernel_row import ROWS, cap, first_column, hide, per_row, reset, row_of, softmax_step


class DecodeBlocks(DecodeEpilogue):
    """A part of the kernel, which has ``block``, ``split_blocks``, ``boxes``, ``channels`` (of O), ``softcap``."""

    def sees_all(self, rows: Rows, n: Int32):
        """Whether every row of the tile sees every key of a block."""
        first, last = self.places_of(rows.tile, rows.queries, rows.keys)
        seen = cutlass.min(first + self.right, rows.keys - 1)
        return (n * self.block >= last - self.left) & ((n + 1) * self.block <= seen + 1)

    @cute.jit
    def first_block(self, tensors: tuple, state: tuple, rows: Rows, stage: Int32, n: Int32, count: Int32):
        """Scores and p of an item's first block."""
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot, stage)
        warpgroup.wait_group(0)
        self.release(slot)
        self.mask(scores, rows, n)
        self.weigh_first(tensors, state, scores)

    @cute.jit
    def walk(
        self,
        tensors: tuple,
        state: tuple,
        merged: tuple,
        partials: cute.Tensor,
        rows: Rows,
        stage: Int32,
        first: Int32,
        last: Int32,
        start: Int32,
    ):
        """All but the last product with values, of all splits."""
        first_split, end_split = first // self.split_blocks, cute.ceil_div(last, self.split_blocks)
        for split in cutlass.range(first_split, end_split, unroll=1):
            begin = cutlass.max(split * self.split_blocks, first) + 1
            end = cutlass.min((split + 1) * self.split_blocks, last)
            for n in cutlass.range(begin, end, unroll=1):
                self.next_block(tensors, state, rows, stage, n, start + 2 * n)
            if end < last:
                self.border_block(
                    tensors, state, merged, partials, rows, stage, end, start + 2 * end, split == first_split
                )

    @cute.jit
    def next_block(self, tensors: tuple, state: tuple, rows: Rows, stage: Int32, n: Int32, count: Int32):
        """Scores and p of block ``n`` beside the product of block n - 1 with the values."""
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, stage, count)
        self.mask(scores, rows, n)
        self.weigh(tensors, state, scores)
        self.release(v_slot)
        self.round_weights(scores, tensors[1])

    @cute.jit
    def border_block(
        self,
        tensors: tuple,
        state: tuple,
        merged: tuple,
        partials: cute.Tensor,
        rows: Rows,
        stage: Int32,
        n: Int32,
        count: Int32,
        is_first: Boolean,
    ):
        """``next_block`` where block n - 1 ends a split, of this tile the first one or not.

        Apart from ``next_block``: ptxas serializes the products of a loop with this branch.
        """
        output, weights = tensors
        maximum, total, rescale = state
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, stage, count)
        ended_maximum, ended_total = per_row(), per_row()
        for r in cutlass.range_constexpr(ROWS):
            ended_maximum[r], ended_total[r] = maximum[r], total[r]
        reset(maximum, total)
        self.mask(scores, rows, n)
        softmax_step(scores, maximum, total, rescale, self.score_scale, self.thread_rows)
        self.end_split(output, ended_maximum, ended_total, merged, partials, rows, is_first)
        self.release(v_slot)
        self.round_weights(scores, weights)

    @cute.jit
    def issue_products(self, tensors: tuple, scores: cute.Tensor, stage: Int32, count: Int32):
        """A block's with q, which is waited for, and the block's before with p, which is not. Returns its v's slot."""
        k_slot, k_phase = self.place_in_ring(count)
        v_slot, v_phase = self.place_in_ring(count + 1)
        cute.arch.mbarrier_wait(self.full + k_slot, k_phase)
        warpgroup.fence()
        self.score(scores, k_slot, stage)
        cute.arch.mbarrier_wait(self.full + v_slot, v_phase)
        self.add_values(tensors, v_slot)
        warpgroup.wait_group(1)
        self.release(k_slot)
        return v_slot

    @cute.jit
    def find_values(self, rows: Rows, last: Int32, count: Int32):
        """The values of an item's last block, those behind the last key zeroed."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        missing = last * self.block - rows.keys
        if missing > 0:
            if self.thread >= self.block - missing and self.thread < self.block:
                row = self.sBoxes[self.thread % self.box_rows, None, self.thread // self.box_rows, None, slot]
                zeros = cute.make_rmem_tensor((8,), self.dtype)
                zeros.fill(0.0)
                for column in cutlass.range_constexpr(self.channels // 8):
                    part = row[None, column // (COLUMNS // 8)]
                    cute.autovec_copy(zeros, cute.local_tile(part, (8,), (column % (COLUMNS // 8),)))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()

    @cute.jit
    def last_values(self, tensors: tuple, count: Int32):
        """The product of an item's last block with the values."""
        slot, _ = self.place_in_ring(count)
        warpgroup.fence()
        self.add_values(tensors, slot)
        warpgroup.wait_group(0)
        self.release(slot)

    @cute.jit
    def mask(self, scores: cute.Tensor, rows: Rows, n: Int32):
        """Scores as they are meant to be: capped, those of keys that a row does not see -inf."""
        if const_expr(self.softcap):
            cap(scores, self.before_tanh)
        if not self.sees_all(rows, n):
            column = n * self.block + first_column(self.lane)
            first, last = [], []
            for r in cutlass.range_constexpr(ROWS):
                place = self.my_row(rows, r) // self.group + rows.keys - rows.queries
                first.append(place - self.left - column)
                last.append(cutlass.min(place + self.right, rows.keys - 1) - column)
            hide(scores, tuple(last), tuple(first))

    # ---- scores ahead: a block's with q beside p of the block before

    @cute.jit
    def walk_ahead(
        self, tensors: tuple, state: tuple, rows: Rows, stage: Int32, first: Int32, last: Int32, start: Int32
    ):
        """All products. Those of a turn are issued before its exponentials."""
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        reset(state[0], state[1])
        tensors[0].fill(0.0)
        tensors[1].fill(0.0)
        self.issue_scores(scores, stage, start + 2 * first + 1)
        warpgroup.wait_group(0)
        self.release((start + 2 * first + 1) % self.stages)
        for n in cutlass.range(first + 1, last, unroll=1):
            ahead, count = cute.make_rmem_tensor(self.scores_shape, Float32), start + 2 * n
            v_slot, v_phase = self.place_in_ring(count + 1)
            self.issue_scores(ahead, stage, count)
            self.mask(scores, rows, n - 1)
            moves = self.softmax(state, scores)
            cute.arch.mbarrier_wait(self.full + v_slot, v_phase)
            self.wait_for_products()
            self.rescale_rows(tensors[0], state[2], moves)
            self.round_rows(scores, tensors[1])
            warpgroup.fence()
            self.add_values(tensors, v_slot)
            self.release(count % self.stages)
            if n > first + 1:
                self.release((count - 1) % self.stages)
            for i in cutlass.range_constexpr(cute.size(scores)):
                if const_expr(row_of(i) < self.thread_rows):
                    scores[i] = ahead[i]
        self.find_values(rows, last, start + 2 * last)
        self.mask(scores, rows, last - 1)
        moves = self.softmax(state, scores)
        self.wait_for_products()
        if last > first + 1:
            self.release((start + 2 * last - 1) % self.stages)
        self.rescale_rows(tensors[0], state[2], moves)
        self.round_rows(scores, tensors[1])
        self.last_values(tensors, start + 2 * last)

    @cute.jit
    def issue_scores(self, scores: cute.Tensor, stage: Int32, count: Int32):
        """A block's with q, which are not waited for."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot, stage)

    def softmax(self, state: tuple, scores: cute.Tensor):
        """p of a block. Returns whether a maximum of the warp's rows moves."""
        moved = softmax_step(scores, *state, self.score_scale, self.thread_rows)
        return cute.arch.vote_any_sync(moved)

    def round_rows(self, scores: cute.Tensor, weights: cute.Tensor):
        """p as an operand, as ``round_weights``; rows that do not exist stay 0."""
        flat = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(scores)))
        for i in range(cute.size(scores)):
            if row_of(i) < self.thread_rows:
                flat[i] = scores[i].to(self.dtype)
