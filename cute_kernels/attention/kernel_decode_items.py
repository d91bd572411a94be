"""Items of work over a cache: which there are follows from the lengths on the device.

An item is a tile of 64 rows of a sequence and a split of its keys (``sequential``: all its splits). A CTA's first one
has the CTA's number; then its warp that loads takes tickets, and tells the others which item it loads.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_threads import WARP_SIZE, sum_to_lane

ITEM_SLOTS = 4  # items of a CTA that are loaded, computed or merged


class Item(NamedTuple):
    """An item of work.

    Attributes:
        sequence, pair, tile: the pair is a head of keys and values; the tile is one of the sequence's.
        first_query, queries, keys: of the sequence, the first query in its tensor.
        tile_first, tile_last: blocks that the tile's rows see, from and to.
        first, last: those of the item. It has none if it is of a split that its tile does not see.
    """

    sequence: Int32
    pair: Int32
    tile: Int32
    first_query: Int32
    queries: Int32
    keys: Int32
    tile_first: Int32
    tile_last: Int32
    first: Int32
    last: Int32


class Rows(NamedTuple):
    """The rows of a tile.

    Attributes:
        tile: which of the sequence's.
        queries, keys: of the sequence.
        pair: head of keys and values.
        dense, first_query: where the sequence begins in q and out.
        row_id: of the tile's first row in the workspace.
    """

    tile: Int32
    queries: Int32
    keys: Int32
    pair: Int32
    dense: Int32
    first_query: Int32
    row_id: Int32


class DecodeItems:
    """A part of a kernel over a cache.

    It has ``packed``, ``sequential``, ``merges_late``, ``block``, ``split_blocks``, and of a call ``cache_seqlens``,
    ``cu_seqlens_q``, ``appended``, ``max_seqlen_k``, ``left``, ``right``, ``batch``, ``len_dense``, ``group``,
    ``pairs``, ``lane``, ``counters``, ``bidx``, ``grid``; in shared memory ``sItems``, ``item_full``, ``item_empty``.
    """

    def rows_of(self, sequence: Int32) -> tuple:
        """(The sequence's first query, how many, keys), queries counted in their tensor."""
        if const_expr(self.packed):
            first = self.cu_seqlens_q[sequence]
            queries = self.cu_seqlens_q[sequence + 1] - first
        else:
            first, queries = Int32(0), Int32(self.len_dense)
        keys = cutlass.min(self.cache_seqlens[sequence] + self.appended * queries, self.max_seqlen_k)
        return first, queries, keys

    def blocks_of(self, first_place: Int32, last_place: Int32, keys: Int32) -> tuple:
        """(First, last + 1) of the blocks that rows at these places see: one at least."""
        last = cute.ceil_div(cutlass.max(cutlass.min(last_place + self.right + 1, keys), 1), self.block)
        return cutlass.min(cutlass.max(first_place - self.left, 0) // self.block, last - 1), last

    def splits_of(self, queries: Int32, keys: Int32) -> tuple:
        """(First, how many) of the splits that a sequence's rows see; ``sequential`` has them as one."""
        first, last = self.blocks_of(keys - queries, keys - 1, keys)
        first = first // self.split_blocks
        number = Int32(1) if const_expr(self.sequential) else cute.ceil_div(last, self.split_blocks) - first
        return first, number

    @cute.jit
    def locate(self, item: Int32, merged_rows: cutlass.Constexpr[bool] = False):
        """(Sequence of an item, which of its items it is, items of all sequences).

        ``merged_rows``: the same of rows of sequences with several splits.
        """
        sequence, number, before = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.batch, WARP_SIZE, unroll=1):
            items = Int32(0)
            if first + self.lane < self.batch:
                _, queries, keys = self.rows_of(first + self.lane)
                _, splits = self.splits_of(queries, keys)
                if const_expr(merged_rows):
                    items = queries * self.group * self.pairs if splits > 1 else Int32(0)
                else:
                    items = cute.ceil_div(queries * self.group, WARPGROUP_ROWS) * self.pairs * splits
            behind = sum_to_lane(items, self.lane)
            of_group = cute.arch.shuffle_sync(behind, offset=WARP_SIZE - 1)
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + behind <= item))
            skipped = cute.arch.shuffle_sync(behind - items, offset=cutlass.min(passed, WARP_SIZE - 1))
            if item >= before:
                if item < before + of_group:
                    sequence, number = first + passed, item - before - skipped
            before += of_group
        return sequence, number, before

    @cute.jit
    def item_at(self, item: Int32):
        """The fields of an ``Item``."""
        sequence, number, _ = self.locate(item)
        first_query, queries, keys = self.rows_of(sequence)
        first_split, _ = self.splits_of(queries, keys)
        tiles = cute.ceil_div(queries * self.group, WARPGROUP_ROWS)
        tile, number = number % tiles, number // tiles
        pair, split = number % self.pairs, first_split + number // self.pairs
        places = self.places_of(tile, queries, keys)
        of_tile = self.blocks_of(places[0], places[1], keys)
        first, last = of_tile
        if const_expr(not self.sequential):
            first = cutlass.max(first, split * self.split_blocks)
            last = cutlass.min(last, (split + 1) * self.split_blocks)
        return sequence, pair, tile, first_query, queries, keys, of_tile[0], of_tile[1], first, last

    def places_of(self, tile: Int32, queries: Int32, keys: Int32) -> tuple:
        """Places of a tile's first and last row."""
        last_row = cutlass.min((tile + 1) * WARPGROUP_ROWS, queries * self.group) - 1
        before = keys - queries
        return tile * WARPGROUP_ROWS // self.group + before, last_row // self.group + before

    # ---- tickets

    @cute.jit
    def draw(self):
        """A ticket, of one lane: what follows does not wait for it."""
        ticket = Int32(0)
        if self.lane == 0:
            ticket = cute.arch.atomic_add(self.counters.iterator, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def item_of(self, ticket: Int32, items: Int32):
        """Which item a ticket stands for.

        A CTA that had an item draws until there is none: as many tickets as items. The last one leaves 0. With
        ``merges_late`` the first item has a ticket, too.
        """
        tickets, first = self.counters, Int32(0) if const_expr(self.merges_late) else Int32(self.grid)
        if (self.lane == 0) & (ticket == items + self.grid - first - 1):
            tickets[0] = Int32(0)
        return first + cute.arch.shuffle_sync(ticket, offset=0)

    def counter_of(self, item: Item) -> cute.Pointer:
        """Where the splits of an item's tile are counted."""
        tiles = cute.ceil_div(item.queries * self.group, WARPGROUP_ROWS)
        # Tiles of sequences before: at most one each is not full
        dense = Int32(0) if const_expr(self.packed) else item.sequence
        before = (dense * self.len_dense + item.first_query) * self.group // WARPGROUP_ROWS + item.sequence
        return self.counters.iterator + (1 + before * self.pairs + item.pair * tiles + item.tile)

    # ---- from the warp that loads to the others

    @cute.jit
    def publish(self, item: Item, number: Int32):
        """The CTA's ``number``-th item; one without blocks ends them."""
        slot, phase, shared = number % ITEM_SLOTS, number // ITEM_SLOTS % 2, self.sItems
        cute.arch.mbarrier_wait(self.item_empty + slot, phase ^ 1)
        if self.lane == 0:
            for i in cutlass.range_constexpr(len(item)):
                shared[i, slot] = item[i]
            cute.arch.mbarrier_arrive(self.item_full + slot)

    @cute.jit
    def wait_for_item(self, number: Int32):
        """The last block of the CTA's ``number``-th item, 0 if there is none."""
        slot, phase = number % ITEM_SLOTS, number // ITEM_SLOTS % 2
        cute.arch.mbarrier_wait(self.item_full + slot, phase)
        return self.sItems[len(Item._fields) - 1, slot]

    def read_item(self, number: Int32) -> Item:
        """One that was waited for."""
        return Item(*(self.sItems[i, number % ITEM_SLOTS] for i in range(len(Item._fields))))

    @cute.jit
    def release_item(self, number: Int32):
        """This thread has read it; all do, since racecheck sees no order of a warp's reads and one lane's arrival."""
        cute.arch.mbarrier_arrive(self.item_empty + number % ITEM_SLOTS)

    def rows_of_item(self, item: Item) -> Rows:
        dense = Int32(0) if const_expr(self.packed) else item.sequence
        row_id = (item.pair * self.queries + dense * self.len_dense + item.first_query) * self.group
        row_id += item.tile * WARPGROUP_ROWS
        return Rows(item.tile, item.queries, item.keys, item.pair, dense, item.first_query, row_id)

    def splits_of_item(self, item: Item) -> tuple:
        """(Which of the tile's splits it is, how many the tile has)"""
        first = item.tile_first // self.split_blocks
        return item.first // self.split_blocks - first, cute.ceil_div(item.tile_last, self.split_blocks) - first
