"""Attention over a cache for SM90: few rows of queries a sequence, many keys, contiguous or in pages.

A row is (query, head of the group that shares keys), the head fastest; a tile has 64 of them. An item of work is a
tile and a split of its keys (``sequential``: all its splits). A CTA takes items in turn; which there are follows from
the lengths on the device. One warp loads, one warpgroup computes.

    gmem q --threads--> sQ                                             \\
    gmem k, v --TMA--> ring of blocks, k one block ahead (full / empty) --wgmma--> O in registers
    O of a tile's only split --> gmem out
    O, m, l of one of many   --> gmem workspace; the last CTA of the tile merges them --> gmem out

The contract ``kv_grid``: kernel_row.py has its arithmetic; here are the products and the order, which are those of the
forward. Splits are merged by their index, whichever CTA is last. Keys behind a sequence's last do not exist: their
scores are selected away, their values are zeroed in shared memory, and their pages are not looked up.

Profile: ncu --clock-control none -k regex:DecodeSm90 python -m bench.bench_decode --filter 8192
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import (
    COLUMNS,
    WARPGROUP_ROWS,
    DecodeConfig,
    DecodeSpec,
    decode_slots,
    grid_for,
    width_of,
)
from cute_kernels.attention.kernel_forward_sm90 import by_rows, opaque, row_of_thread
from cute_kernels.attention.kernel_row import (
    QUAD,
    ROWS,
    cap,
    finish_element,
    finish_row,
    first_column,
    hide,
    merge_element,
    merge_row,
    merge_rows,
    per_row,
    quad_sum,
    rescale_element,
    reset,
    row_of,
    softmax_step,
)
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

WARP_SIZE, WARPGROUP = 32, 128
GROUP_BARRIER = 1  # of the warpgroup that computes
# Registers of a thread that loads, that computes, where two CTAs of 256 threads share 65536
REGISTERS = (32, 224)
VECTOR = 4  # fp32 numbers that move together
PAIR = 2  # neighbours in a thread's registers


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


class DecodeSm90:
    """See the module; arguments as in the builder ``decode_sm90``."""

    def __init__(self, spec: DecodeSpec, config: DecodeConfig):
        self.dtype = cutlass_dtype(spec.dtype)
        self.head_size, self.head_size_v = spec.head_size, spec.head_size_v
        self.width, self.width_v = width_of(spec.head_size), width_of(spec.head_size_v)
        self.packed, self.paged, self.softcap = spec.packed, spec.page_rows > 0, spec.softcap
        self.block, split = grid_for(spec.head_size, spec.head_size_v)
        self.split_blocks = split // self.block
        self.box_rows = spec.page_rows or self.block
        self.boxes = self.block // self.box_rows  # of a block
        self.ctas_per_sm, self.sequential = config.ctas_per_sm, config.sequential
        self.slots = decode_slots(spec.head_size, spec.head_size_v, config)
        self.slot_size = self.block * max(self.width, self.width_v)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        cache_seqlens: cute.Tensor,
        page_table: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        partials: cute.Tensor,
        sums: cute.Tensor,
        counters: cute.Tensor,
        sinks: cute.Tensor | None,
        before_tanh: Float32,
        score_scale: Float32,
        left: Int32,
        right: Int32,
        appended: Int32,
        max_seqlen_k: Int32,
        num_ctas: Int32,
        stream,
    ):
        qk_mma, pv_mma = self.tiled_mma(self.block, False), self.tiled_mma(self.width_v, True)
        load, (_, _, _, box_layout) = cpasync.CopyBulkTensorTileG2SOp(), self.layouts()
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_rows(k_cache), box_layout, (self.box_rows, COLUMNS))
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_rows(v_cache), box_layout, (self.box_rows, COLUMNS))
        self.kernel(
            qk_mma, pv_mma, tma_k, mK, tma_v, mV, q, cache_seqlens, page_table, cu_seqlens_q, out, lse, partials, sums,
            counters, sinks, before_tanh, score_scale, left, right, appended, max_seqlen_k,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[2 * WARPGROUP, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def tiled_mma(self, columns: int, of_values: bool) -> cute.TiledMma:
        """As the forward's: q and k lie along the head size in shared memory; p is in registers, v lies across."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN if of_values else OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            tiler_mn=(WARPGROUP_ROWS, columns),
            a_source=warpgroup.OperandSource.RMEM if of_values else warpgroup.OperandSource.SMEM,
        )

    def layouts(self) -> tuple:
        """Swizzled shared memory of q, a block of keys, of values, which have the same bytes, and a box of these."""
        kinds = warpgroup.SmemLayoutAtomKind
        along, across = (warpgroup.make_smem_layout_atom(k, self.dtype) for k in (kinds.K_SW128, kinds.MN_SW128))
        return (
            cute.tile_to_shape(along, (WARPGROUP_ROWS, self.width), order=(0, 1)),
            cute.tile_to_shape(along, (self.block, self.width), order=(0, 1)),
            cute.tile_to_shape(across, (self.width_v, self.block), order=(1, 0)),
            cute.tile_to_shape(along, (self.box_rows, COLUMNS), order=(0, 1)),
        )

    @cute.kernel
    def kernel(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        q: cute.Tensor,
        cache_seqlens: cute.Tensor,
        page_table: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        partials: cute.Tensor,
        sums: cute.Tensor,
        counters: cute.Tensor,
        sinks: cute.Tensor | None,
        before_tanh: Float32,
        score_scale: Float32,
        left: Int32,
        right: Int32,
        appended: Int32,
        max_seqlen_k: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        if warp == 0:
            for atom in (tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
        smem = SmemAllocator()
        self.allocate(smem)
        if tidx == 0:
            for slot in cutlass.range_constexpr(self.slots):
                cute.arch.mbarrier_init(self.full + slot, 1)
                cute.arch.mbarrier_init(self.empty + slot, WARPGROUP // WARP_SIZE)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.lane, self.bidx, self.grid = cute.arch.lane_idx(), bidx, grid
        self.cache_seqlens, self.page_table, self.cu_seqlens_q = cache_seqlens, page_table, cu_seqlens_q
        self.left, self.right, self.appended, self.max_seqlen_k = left, right, appended, max_seqlen_k
        self.batch, self.len_dense = cache_seqlens.shape[0], q.shape[1]
        self.heads, self.pairs = q.shape[2], mK.shape[2]
        self.group = self.heads // self.pairs
        self.num_pages, self.page_size = mK.shape[3], mK.shape[0]
        self.before_tanh, self.score_scale, self.sinks, self.thread = before_tanh, score_scale, sinks, tidx
        if warp < WARPGROUP // WARP_SIZE:
            if const_expr(self.ctas_per_sm > 1):
                cute.arch.setmaxregister_increase(REGISTERS[1])
            self.compute(qk_mma, pv_mma, q, out, lse, partials, sums, counters)
            if const_expr(self.packed):
                self.clear_rows(out, lse)
        else:
            if const_expr(self.ctas_per_sm > 1):
                cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == WARPGROUP // WARP_SIZE:
                self.load(tma_k, mK, tma_v, mV)

    def allocate(self, smem):
        """Barriers, a word for all threads, q, the ring."""
        self.full, self.empty = (smem.allocate_array(Int64, self.slots) for _ in range(2))
        self.shared_word = smem.allocate_array(Int32, 1)
        q_layout, k_layout, v_layout, box_layout = self.layouts()
        self.sQ = smem.allocate_tensor(self.dtype, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        memory = smem.allocate(2 * self.slots * self.slot_size, byte_alignment=1024)

        def ring(block: cute.Layout, of: cute.ComposedLayout) -> cute.Tensor:
            """A slot's layout, for all slots."""
            layout = cute.make_layout((*block.shape, self.slots), stride=(*block.stride, self.slot_size))
            return cute.make_tensor(cute.recast_ptr(memory, of.inner, self.dtype), layout)

        self.sK, self.sV = ring(k_layout.outer, k_layout), ring(v_layout.outer, v_layout)
        boxes = cute.make_layout(
            (self.box_rows, COLUMNS, self.boxes, max(self.width, self.width_v) // COLUMNS),
            stride=(COLUMNS, 1, self.box_rows * COLUMNS, self.block * COLUMNS),
        )
        self.sBoxes = ring(boxes, box_layout)

    # ---- which items there are

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
    def locate(self, item: Int32):
        """(Sequence of an item, which of its items it is, items of all sequences)."""
        sequence, number, before = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.batch, WARP_SIZE, unroll=1):
            items = Int32(0)
            if first + self.lane < self.batch:
                _, queries, keys = self.rows_of(first + self.lane)
                _, splits = self.splits_of(queries, keys)
                items = cute.ceil_div(queries * self.group, WARPGROUP_ROWS) * self.pairs * splits
            behind = items
            for power in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(behind, offset=1 << power)
                behind += Int32(select_(self.lane >= (1 << power), lower, Int32(0)))
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
        """(Sequence, pair, tile, first query, queries, keys, blocks of the tile from and to, of the item from and to).

        An item without blocks is of a split that its tile does not see.
        """
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

    # ---- the warp that loads

    @cute.jit
    def load(self, tma_k: cute.CopyAtom, mK: cute.Tensor, tma_v: cute.CopyAtom, mV: cute.Tensor):
        """The blocks of each item: k one block ahead of v, as they are used."""
        tKsK, tKgK = self.partition(tma_k, mK)
        tVsV, tVgV = self.partition(tma_v, mV)
        count = Int32(0)
        _, _, items = self.locate(Int32(0))
        for item in cutlass.range(self.bidx, items, self.grid, unroll=1):
            sequence, pair, _, _, _, keys, _, _, first, last = self.item_at(item)
            if first < last:
                gK, gV = tKgK[None, None, None, pair, None], tVgV[None, None, None, pair, None]
                window = first * self.boxes // WARP_SIZE
                pages = self.look_up(sequence, keys, window)
                coming = self.look_up(sequence, keys, window + 1)
                self.load_block(tma_k, gK, tKsK, self.width, sequence, pages, first, count)
                count += 1
                for n in cutlass.range(first + 1, last, unroll=1):
                    of_values = pages
                    if const_expr(self.paged):
                        if n * self.boxes % WARP_SIZE == 0:
                            pages = coming
                            coming = self.look_up(sequence, keys, n * self.boxes // WARP_SIZE + 1)
                    self.load_block(tma_k, gK, tKsK, self.width, sequence, pages, n, count)
                    self.load_block(tma_v, gV, tVsV, self.width_v, sequence, of_values, n - 1, count + 1)
                    count += 2
                self.load_block(tma_v, gV, tVsV, self.width_v, sequence, pages, last - 1, count)
                count += 1

    def partition(self, atom: cute.CopyAtom, cache: cute.Tensor) -> tuple:
        """(Boxes of the ring, boxes of a cache by (row, columns, pair, page)) as a copy takes them."""
        boxes = cute.local_tile(cache, (self.box_rows, COLUMNS), (None,) * 4)
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(self.sBoxes, 0, 2), cute.group_modes(boxes, 0, 2)
        )

    @cute.jit
    def look_up(self, sequence: Int32, keys: Int32, window: Int32):
        """A page for each lane: of the boxes 32 window, 32 window + 1, ... Where there are no keys, one behind the last
        page, which reads as zeros.
        """
        page = Int32(self.num_pages)
        if const_expr(self.paged):
            key = (window * WARP_SIZE + self.lane) * self.box_rows
            if key < keys:
                page = self.page_table[sequence, key // self.page_size]
        return page

    @cute.jit
    def load_block(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        ring: cute.Tensor,
        width: cutlass.Constexpr[int],
        sequence: Int32,
        pages: Int32,
        n: Int32,
        count: Int32,
    ):
        """Block ``n`` into the slot of its place in the order of loads, once that is empty."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, self.block * width * 2)
        for box in cutlass.range_constexpr(self.boxes):
            page, row = sequence, n
            if const_expr(self.paged):
                page = cute.arch.shuffle_sync(pages, offset=(n * self.boxes + box) % WARP_SIZE)
                row = n % (self.page_size // self.block) if const_expr(self.box_rows == self.block) else Int32(0)
            for part in cutlass.range_constexpr(width // COLUMNS):
                cute.copy(
                    atom, source[None, row, part, page], ring[None, box, part, slot], tma_bar_ptr=self.full + slot
                )

    def place_in_ring(self, count: Int32) -> tuple:
        """(slot, phase)"""
        return count % self.slots, count // self.slots % 2

    # ---- the warpgroup that computes

    @cute.jit
    def compute(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        q: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partials: cute.Tensor,
        sums: cute.Tensor,
        counters: cute.Tensor,
    ):
        qk_slice, pv_slice = (mma.get_slice(0) for mma in (qk_mma, pv_mma))
        self.tCrQ = qk_mma.make_fragment_A(qk_slice.partition_A(self.sQ))
        self.tCrK = qk_mma.make_fragment_B(qk_slice.partition_B(self.sK))
        self.tCrV = pv_mma.make_fragment_B(pv_slice.partition_B(self.sV))
        # Atoms whose products start from zero, or are added
        self.qk_first, self.qk_next, self.pv_next = (cute.make_mma_atom(m.op) for m in (qk_mma, qk_mma, pv_mma))
        self.qk_first.set(warpgroup.Field.ACCUMULATE, False)
        self.qk_next.set(warpgroup.Field.ACCUMULATE, True)
        self.pv_next.set(warpgroup.Field.ACCUMULATE, True)
        self.scores_shape = qk_mma.partition_shape_C((WARPGROUP_ROWS, self.block))
        output = cute.make_rmem_tensor(pv_mma.partition_shape_C((WARPGROUP_ROWS, self.width_v)), Float32)
        weights = pv_mma.make_fragment_A(pv_mma.partition_shape_A((WARPGROUP_ROWS, self.block)))
        tensors = output, weights
        state = tuple(per_row() for _ in range(3))  # m, l, what O is rescaled with
        merged = tuple(per_row() for _ in range(2))  # (M, L)

        count = Int32(0)
        _, _, items = self.locate(Int32(0))
        for item in cutlass.range(self.bidx, items, self.grid, unroll=1):
            sequence, pair, tile, first_query, queries, keys, tile_first, tile_last, first, last = self.item_at(item)
            if first < last:
                dense = Int32(0) if const_expr(self.packed) else sequence
                place = dense * self.len_dense + first_query
                row_id = (pair * (q.shape[0] * q.shape[1]) + place) * self.group + tile * WARPGROUP_ROWS
                rows = Rows(tile, queries, keys, pair, dense, first_query, row_id)
                self.load_queries(q, rows)
                first_split = tile_first // self.split_blocks
                splits = cute.ceil_div(tile_last, self.split_blocks) - first_split

                self.first_block(tensors, state, rows, first, count)
                for n in cutlass.range(first + 1, last, unroll=1):
                    at = count + 2 * (n - first) - 1
                    self.next_block(tensors, state, merged, partials, rows, first_split, n, at)
                count += 2 * (last - first)
                self.last_values(tensors, rows, last, count - 1)
                for r in cutlass.range_constexpr(ROWS):
                    state[1][r] = quad_sum(state[1][r])
                if const_expr(self.sequential):
                    if splits > 1:
                        self.merge_last(output, state, merged, partials, rows)
                    self.write(output, state, out, lse, rows)
                else:
                    if splits == 1:
                        self.write(output, state, out, lse, rows)
                    else:
                        split = first // self.split_blocks - first_split
                        self.keep_partial(output, state, partials, sums, rows, split)
                        tiles = cute.ceil_div(queries * self.group, WARPGROUP_ROWS)
                        # Tiles of sequences before: at most one each is not full
                        before = place * self.group // WARPGROUP_ROWS + sequence
                        if self.is_last(counters, before * self.pairs + pair * tiles + tile, splits):
                            self.merge(partials, sums, rows, splits, out, lse)

    def my_row(self, rows: Rows, r: int) -> Int32:
        """One of the thread's rows among the sequence's."""
        return rows.tile * WARPGROUP_ROWS + row_of_thread(self.thread) + 8 * r

    @cute.jit
    def load_queries(self, q: cute.Tensor, rows: Rows):
        """The rows of a tile; those that do not exist are 0."""
        self.meet()  # all have read the tile before
        vectors = self.width // 8
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for i in cutlass.range_constexpr(WARPGROUP_ROWS * vectors // WARPGROUP):
            number = self.thread + i * WARPGROUP
            row, column = number // vectors, number % vectors
            token, head = (
                (rows.tile * WARPGROUP_ROWS + row) // self.group,
                (rows.tile * WARPGROUP_ROWS + row) % self.group,
            )
            vector.fill(0.0)
            if token < rows.queries and column < self.head_size // 8:
                line = q[rows.dense, rows.first_query + token, rows.pair * self.group + head, None]
                cute.autovec_copy(cute.local_tile(line, (8,), (column,)), vector)
            cute.autovec_copy(vector, cute.local_tile(self.sQ, (1, 8), (row, column))[0, None])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()

    def sees_all(self, rows: Rows, n: Int32):
        """Whether every row of the tile sees every key of a block."""
        first, last = self.places_of(rows.tile, rows.queries, rows.keys)
        seen = cutlass.min(first + self.right, rows.keys - 1)
        return (n * self.block >= last - self.left) & ((n + 1) * self.block <= seen + 1)

    @cute.jit
    def first_block(self, tensors: tuple, state: tuple, rows: Rows, n: Int32, count: Int32):
        """Scores and p of an item's first block."""
        output, weights = tensors
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot)
        warpgroup.wait_group(0)
        self.release(slot)
        self.mask(scores, rows, n)
        reset(state[0], state[1])
        softmax_step(scores, state[0], state[1], state[2], self.score_scale)
        self.round_weights(scores, weights)
        output.fill(0.0)

    @cute.jit
    def next_block(
        self,
        tensors: tuple,
        state: tuple,
        merged: tuple,
        partials: cute.Tensor,
        rows: Rows,
        first_split: Int32,
        n: Int32,
        count: Int32,
    ):
        """Scores and p of block ``n`` beside the product of block n - 1 with the values; at a border the merge."""
        output, weights = tensors
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        maximum, total, rescale = state
        k_slot, k_phase = self.place_in_ring(count)
        v_slot, v_phase = self.place_in_ring(count + 1)
        cute.arch.mbarrier_wait(self.full + k_slot, k_phase)
        warpgroup.fence()
        self.score(scores, k_slot)
        cute.arch.mbarrier_wait(self.full + v_slot, v_phase)
        self.add_values(tensors, v_slot)
        warpgroup.wait_group(1)
        self.release(k_slot)

        if const_expr(self.sequential):
            if n % self.split_blocks == 0:
                warpgroup.wait_group(0)
                is_first = n == (first_split + 1) * self.split_blocks
                self.end_split(output, maximum, total, merged, partials, rows, is_first)
        self.mask(scores, rows, n)
        moved = softmax_step(scores, maximum, total, rescale, self.score_scale)

        warpgroup.wait_group(0)
        self.release(v_slot)
        if cute.arch.vote_any_sync(moved):
            for i in cutlass.range_constexpr(cute.size(output)):
                output[i] = rescale_element(output[i], rescale[row_of(i)])
        self.round_weights(scores, weights)

    @cute.jit
    def last_values(self, tensors: tuple, rows: Rows, last: Int32, count: Int32):
        """The product of an item's last block with the values, those behind the last key zeroed."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        missing = last * self.block - rows.keys
        if missing > 0:
            if self.thread >= self.block - missing and self.thread < self.block:
                row = self.sBoxes[self.thread % self.box_rows, None, self.thread // self.box_rows, None, slot]
                zeros = cute.make_rmem_tensor((8,), self.dtype)
                zeros.fill(0.0)
                for column in cutlass.range_constexpr(self.width_v // 8):
                    part = row[None, column // (COLUMNS // 8)]
                    cute.autovec_copy(zeros, cute.local_tile(part, (8,), (column % (COLUMNS // 8),)))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
        warpgroup.fence()
        self.add_values(tensors, slot)
        warpgroup.wait_group(0)
        self.release(slot)

    def score(self, scores: cute.Tensor, slot: Int32):
        """Issue q k^T of a block: ``serial_k16`` from zero."""
        for k16 in range((self.head_size + 15) // 16):
            atom = self.qk_next if k16 else self.qk_first
            cute.gemm(atom, scores, self.tCrQ[None, None, k16], self.tCrK[None, None, k16, slot], scores)
        warpgroup.commit_group()

    def add_values(self, tensors: tuple, slot: Int32):
        """Issue O += p v of a block: ``serial_k16`` onto O."""
        output, weights = tensors
        for k16 in range(self.block // 16):
            cute.gemm(self.pv_next, output, weights[None, None, k16], self.tCrV[None, None, k16, slot], output)
        warpgroup.commit_group()

    def round_weights(self, scores: cute.Tensor, weights: cute.Tensor):
        """p as the first operand of a product; the accumulators' elements are in its order."""
        flat = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(scores)))
        flat.store(cute.make_tensor(scores.iterator, cute.make_layout(cute.size(scores))).load().to(self.dtype))

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

    # ---- results

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
    def is_last(self, counters: cute.Tensor, counter: Int32, splits: Int32):
        """Whether the other splits of the tile are in the workspace; then the counter is 0 again."""
        cute.arch.fence_acq_rel_gpu()
        self.meet()
        place, word = counters.iterator + counter, self.shared_word
        if self.thread == 0:
            before = cute.arch.atomic_add(place, Int32(1), sem="acq_rel", scope="gpu")
            if before == splits - 1:
                place[0] = Int32(0)
            word[0] = before
        self.meet()
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
        """The splits of a tile, ascending; a thread has four numbers of a row."""
        vectors = self.head_size_v // VECTOR
        first = rows.tile * WARPGROUP_ROWS
        number_of_rows = cutlass.min(rows.queries * self.group - first, WARPGROUP_ROWS)
        merged, found = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(2))
        rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
        both = cute.make_rmem_tensor((PAIR,), Float32)
        for number in cutlass.range(self.thread, number_of_rows * vectors, WARPGROUP, unroll=1):
            row, column = number // vectors, number % vectors
            maximum, total = Float32(-math.inf), Float32(0.0)
            merged.fill(0.0)
            for split in cutlass.range(splits, unroll=4):
                cute.autovec_copy(sums[split, rows.row_id + row, None], both)
                cute.autovec_copy(
                    cute.local_tile(partials[split, rows.row_id + row, None], (VECTOR,), (column,)), found
                )
                maximum, total, a, b = merge_row(maximum, total, both[0], both[1], self.score_scale)
                for e in cutlass.range_constexpr(VECTOR):
                    merged[e] = merge_element(merged[e], a, found[e], b)
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
        """A split that ended into (M, L) and A, which lies in the workspace."""
        merged_maximum, merged_total = merged
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        if is_first:  # merged into nothing it is what it was
            for r in cutlass.range_constexpr(ROWS):
                merged_maximum[r], merged_total[r] = maximum[r], total[r]
            self.move_rows(output, partials, rows, (Float32(0.0),) * ROWS, (Float32(1.0),) * ROWS, "keep")
        else:
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            self.move_rows(output, partials, rows, a, b, "merge")
        reset(maximum, total)
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

    # ---- who waits for whom

    @cute.jit
    def release(self, slot: Int32):
        """This warp has read a slot."""
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.empty + slot)

    def meet(self):
        """A barrier of the warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=WARPGROUP)


@compiled
def decode_sm90(arch: str, spec: DecodeSpec, config: DecodeConfig) -> Program:
    """out (B, Lq, H, Dv) and lse (B, H, Lq) of q (B, Lq, H, D) and the first keys and values of caches.

    Packed queries are of one sequence that ``cu_seqlens_q`` (B + 1) cuts. Caches are (B, capacity, Hkv, D), or (pages,
    page size, Hkv, D) with ``page_table`` (B, pages of a sequence). A sequence has ``cache_seqlens`` keys, and its new
    ones where ``appended`` is 1, at most ``max_seqlen_k``. A row sees ``left`` keys before its place and ``right``
    behind it. ``sinks``: (H,). ``before_tanh``, ``score_scale``: see ``score_factors``.

    Workspace: ``partials`` (splits, B Lq H, Dv) and ``sums`` (splits, B Lq H, 2); ``counters``: a number for each tile,
    which are 0, and are 0 again afterwards.
    """
    dtype, d, dv = cutlass_dtype(spec.dtype), spec.head_size, spec.head_size_v
    q_batch, sequences, len_q, capacity, pages, heads, pairs = (cute.sym_int() for _ in range(7))

    def operand(batch, length, number, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, size), (*strides, 1), assumed_align=16)

    def ints(*shape):
        strides = (cute.sym_int64(), 1) if len(shape) == 2 else (1,)
        return cute.runtime.make_fake_tensor(Int32, shape, strides, assumed_align=4)

    sinks = None
    if spec.sinks is not None:
        sinks = cute.runtime.make_fake_tensor(cutlass_dtype(spec.sinks), (heads,), (cute.sym_int64(),), assumed_align=2)
    splits, rows, split_stride, sum_stride = cute.sym_int(), cute.sym_int(), cute.sym_int64(8), cute.sym_int64(2)
    return Program(
        DecodeSm90(spec, config),
        operand(q_batch, len_q, heads, d),
        operand(pages, capacity, pairs, d),
        operand(pages, capacity, pairs, dv),
        ints(sequences),
        ints(sequences, cute.sym_int()) if spec.page_rows else None,
        ints(cute.sym_int()) if spec.packed else None,
        operand(q_batch, len_q, heads, dv),
        cute.runtime.make_fake_compact_tensor(
            Float32, (q_batch, heads, len_q), stride_order=(2, 1, 0), assumed_align=4
        ),
        cute.runtime.make_fake_tensor(Float32, (splits, rows, dv), (split_stride, dv, 1), assumed_align=16),
        cute.runtime.make_fake_tensor(Float32, (splits, rows, 2), (sum_stride, 2, 1), assumed_align=8),
        ints(cute.sym_int()),
        sinks,
        Float32(1.0),
        Float32(1.0),
        Int32(0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
