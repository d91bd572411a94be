"""The late merge of the SM90 kernel over a cache: when no item is left, warps of all CTAs merge rows of all tiles.

A warp waits until a tile's splits are counted. It cannot wait forever: all items have tickets by then, so a CTA that
runs has each of them, and counts its partials before it merges.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_decode_items import DecodeItems, Item, Rows
from cute_kernels.attention.kernel_row import (
    finish_element,
    finish_row,
    maxima_before,
    merge_element,
    merge_factors,
)
from cute_kernels.attention.kernel_threads import WARP_SIZE

MERGE_WARPS = 2  # of a CTA
VECTOR = 4  # numbers of a row that a lane merges together
MERGED_NUMBERS = 128  # that a lane loads together
PAIR = 2  # a split's (m, l)


def vectors_of_lane(head_size_v: int) -> int:
    return -(-head_size_v // (VECTOR * WARP_SIZE))


def merged_ahead(head_size_v: int) -> int:
    """Splits whose numbers a warp loads together."""
    return min(MERGED_NUMBERS // (VECTOR * vectors_of_lane(head_size_v)), WARP_SIZE)


class LateMerge(DecodeItems):
    """A part of the kernel, which has ``head_size_v``, ``dtype``, ``score_scale``, ``sink_of``, ``thread``."""

    @cute.jit
    def merge_late(self, partials: cute.Tensor, sums: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
        """Every so many rows one."""
        number = Int32(self.bidx * MERGE_WARPS + self.thread // WARP_SIZE % MERGE_WARPS)
        sequence, of_sequence, total = self.locate(number, True)
        while number < total:
            first_query, queries, keys = self.rows_of(sequence)
            of_pair = queries * self.group
            pair, row = of_sequence // of_pair, of_sequence % of_pair
            tile, row = row // WARPGROUP_ROWS, row % WARPGROUP_ROWS
            places = self.places_of(tile, queries, keys)
            first, last = self.blocks_of(places[0], places[1], keys)
            item = Item(sequence, pair, tile, first_query, queries, keys, first, last, first, last)
            _, splits = self.splits_of_item(item)
            if splits > 1:
                place = self.counter_of(item)
                rows_of_tile = cutlass.min(of_pair - tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
                found = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
                while found < splits:
                    found = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
                cute.arch.sync_warp()
                before = Int32(0)
                if self.lane == 0:
                    before = cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="gpu")
                self.merge_of_row(partials, sums, self.rows_of_item(item), row, splits, out, lse)
                if before == splits + rows_of_tile - 1:  # nobody waits for it any more
                    cute.arch.store(place, Int32(0))
            number += self.grid * MERGE_WARPS
            sequence, of_sequence, _ = self.locate(number, True)

    @cute.jit
    def merge_of_row(
        self,
        partials: cute.Tensor,
        sums: cute.Tensor,
        rows: Rows,
        row: Int32,
        splits: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
    ):
        """The splits of a row of the tile, ascending: a lane finds the factors of one, and merges vectors of all."""
        vectors = self.head_size_v // VECTOR
        of_lane, ahead = vectors_of_lane(self.head_size_v), merged_ahead(self.head_size_v)
        found = cute.make_rmem_tensor((VECTOR, of_lane, ahead), Float32)
        merged = cute.make_rmem_tensor((VECTOR, of_lane), Float32)
        own = cute.make_rmem_tensor((PAIR,), Float32)
        rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
        place = rows.row_id + row
        merged.fill(0.0)
        total, maximum = cute.make_rmem_tensor((1,), Float32), Float32(-math.inf)
        total[0] = Float32(0.0)
        for begin in cutlass.range(0, splits, ahead, unroll=1):
            # Behind the last split it is loaded again, and not merged; behind the last vector the same
            cute.autovec_copy(sums[cutlass.min(begin + self.lane % ahead, splits - 1), place, None], own)
            for i in cutlass.range_constexpr(ahead):
                line = partials[cutlass.min(begin + i, splits - 1), place, None]
                for j in cutlass.range_constexpr(of_lane):
                    column = cutlass.min(self.lane + j * WARP_SIZE, vectors - 1)
                    cute.autovec_copy(cute.local_tile(line, (VECTOR,), (column,)), found[None, j, i])
            # Before the branch, which ptxas moves no load behind: all are in flight
            if begin + ahead <= splits:
                maximum = self.merge_splits(merged, total, maximum, found, own, ahead)
            else:
                maximum = self.merge_splits(merged, total, maximum, found, own, ahead, splits - begin)
        row += rows.tile * WARPGROUP_ROWS
        token, head = rows.first_query + row // self.group, rows.pair * self.group + row % self.group
        empty, reciprocal, of_row = finish_row(maximum, total[0], self.score_scale, self.sink_of(head))
        if self.lane == 0:
            lse[rows.dense, head, token] = of_row
        for j in cutlass.range_constexpr(of_lane):
            column = self.lane + j * WARP_SIZE
            if column < vectors:
                for e in cutlass.range_constexpr(VECTOR):
                    rounded[e] = finish_element(merged[e, j], empty, reciprocal).to(self.dtype)
                cute.autovec_copy(rounded, cute.local_tile(out[rows.dense, token, head, None], (VECTOR,), (column,)))

    @cute.jit
    def merge_splits(
        self,
        merged: cute.Tensor,
        total: cute.Tensor,
        maximum: Float32,
        found: cute.Tensor,
        own: cute.Tensor,
        ahead: cutlass.Constexpr[int],
        splits: Int32 | None = None,
    ):
        """Loaded splits, the first ``splits`` of them or all, into A and L; returns M."""
        before, after = maxima_before(maximum, own[0], self.lane, ahead)
        _, a, b = merge_factors(before, own[0], self.score_scale)
        for i in cutlass.range_constexpr(ahead):
            exists = None if const_expr(splits is None) else i < splits
            of_merged, of_split, split_total = (cute.arch.shuffle_sync(t, offset=i) for t in (a, b, own[1]))
            total[0] = merge_element(total[0], of_merged, split_total, of_split, exists)
            for j in cutlass.range_constexpr(cute.size(merged.shape[1])):
                for e in cutlass.range_constexpr(VECTOR):
                    merged[e, j] = merge_element(merged[e, j], of_merged, found[e, j, i], of_split, exists)
        return after


def count_one(counter: cute.Pointer):
    """Increment a tile's ``counter`` with release, after what others of the CTA wrote and this thread waited for."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
