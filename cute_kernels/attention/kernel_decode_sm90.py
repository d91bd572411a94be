"""Attention over a cache for SM90: few rows of queries a sequence, many keys, contiguous or in pages.

A row is (query, head of the group that shares keys), the head fastest; a tile has 64 of them. An item of work is a
tile and a split of its keys (``sequential``: all its splits). Which there are follows from the lengths on the device;
a CTA takes a ticket for its next one when it has nearly loaded the one before. One warp loads blocks, one queries, a
warpgroup computes, two warps merge: each goes on to the next item when its part of this one is done.

    item --warp that loads--> sItems (full / empty)                    --> all
    gmem q --warp--> sQ, one item ahead (full / empty)                 \\
    gmem k, v --TMA--> ring of blocks, k one block ahead (full / empty) --wgmma--> O in registers
    O of a tile's only split --> gmem out
    O, m, l of one of many   --> gmem workspace (kept); the last CTA of the tile merges them --> gmem out
                                 (``merges_late``: all CTAs merge them when no item is left)

The contract ``kv_grid``: kernel_row.py has its arithmetic; here are the products and the order, which are those of the
forward. Splits are merged by their index, whichever CTA is last. Keys behind a sequence's last do not exist: their
scores are selected away, their values are zeroed in shared memory, and their pages are not looked up.

The parts: kernel_decode_items.py finds the items, kernel_decode_producer.py loads, here a tile walks over its blocks,
kernel_products_sm90.py multiplies, kernel_decode_epilogue.py merges and writes, kernel_decode_late.py merges late.

Profile: ncu --clock-control none -k regex:DecodeSm90 python -m bench.bench_decode --filter 8192
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import (
    COLUMNS,
    QUERY_STAGES,
    WARPGROUP_ROWS,
    DecodeConfig,
    DecodeSpec,
    decode_slots,
    grid_for,
    width_of,
)
from cute_kernels.attention.kernel_decode_epilogue import DecodeEpilogue
from cute_kernels.attention.kernel_decode_items import ITEM_SLOTS, Item, Rows
from cute_kernels.attention.kernel_decode_late import LateMerge
from cute_kernels.attention.kernel_decode_producer import DecodeProducer
from cute_kernels.attention.kernel_matrices import by_rows
from cute_kernels.attention.kernel_row import ROWS, cap, first_column, hide, per_row, quad_sum, reset, softmax_step
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

COMPUTE_WARPS = WARPGROUP // WARP_SIZE
LOAD_WARP, QUERY_WARP = COMPUTE_WARPS, COMPUTE_WARPS + 1  # the last two merge


class DecodeSm90(DecodeProducer, DecodeEpilogue, LateMerge):
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
        self.sequential, self.few_rows, self.merges_late = config.sequential, config.few_rows, config.merges_late
        self.thread_rows = 1 if config.few_rows else ROWS
        self.stages = decode_slots(spec.head_size, spec.head_size_v)
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
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def layouts(self) -> tuple:
        """Swizzled shared memory of q, a block of keys, of values, which have the same bytes, and a box of these."""
        kinds = warpgroup.SmemLayoutAtomKind
        along, across = (warpgroup.make_smem_layout_atom(k, self.dtype) for k in (kinds.K_SW128, kinds.MN_SW128))
        return (
            cute.tile_to_shape(along, (WARPGROUP_ROWS, self.width, QUERY_STAGES), order=(0, 1, 2)),
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
            for slot in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.full + slot, 1)
                cute.arch.mbarrier_init(self.empty + slot, COMPUTE_WARPS)
            for slot in cutlass.range_constexpr(ITEM_SLOTS):
                readers = COMPUTE_WARPS + (1 if self.sequential else 3)  # queries, two that merge
                cute.arch.mbarrier_init(self.item_full + slot, 1)
                cute.arch.mbarrier_init(self.item_empty + slot, readers * WARP_SIZE)
                cute.arch.mbarrier_init(self.kept + slot, WARPGROUP)
            for stage in cutlass.range_constexpr(QUERY_STAGES):
                cute.arch.mbarrier_init(self.q_full + stage, WARP_SIZE)
                cute.arch.mbarrier_init(self.q_empty + stage, COMPUTE_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.lane, self.bidx, self.grid, self.counters = cute.arch.lane_idx(), bidx, grid, counters
        self.cache_seqlens, self.page_table, self.cu_seqlens_q = cache_seqlens, page_table, cu_seqlens_q
        self.left, self.right, self.appended, self.max_seqlen_k = left, right, appended, max_seqlen_k
        self.batch, self.len_dense, self.queries = cache_seqlens.shape[0], q.shape[1], q.shape[0] * q.shape[1]
        self.heads, self.pairs = q.shape[2], mK.shape[2]
        self.group = self.heads // self.pairs
        self.num_pages, self.page_size = mK.shape[3], mK.shape[0]
        self.before_tanh, self.score_scale, self.sinks, self.thread = before_tanh, score_scale, sinks, tidx
        if warp < COMPUTE_WARPS:
            self.compute(qk_mma, pv_mma, out, lse, partials, sums)
            if const_expr(self.packed):
                self.clear_rows(out, lse)
        elif warp == LOAD_WARP:
            self.load(tma_k, mK, tma_v, mV)
        elif warp == QUERY_WARP:
            self.load_queries(q)
        elif const_expr(not self.sequential):
            self.merge_items(partials, sums, out, lse)

    def allocate(self, smem):
        """Barriers, items, a word for all threads that merge, q, the ring."""
        self.full, self.empty = (smem.allocate_array(Int64, self.stages) for _ in range(2))
        self.q_full, self.q_empty = (smem.allocate_array(Int64, QUERY_STAGES) for _ in range(2))
        self.item_full, self.item_empty, self.kept = (smem.allocate_array(Int64, ITEM_SLOTS) for _ in range(3))
        self.sItems = smem.allocate_tensor(Int32, cute.make_layout((len(Item._fields), ITEM_SLOTS)), byte_alignment=8)
        self.shared_word = smem.allocate_array(Int32, 1)
        q_layout, k_layout, v_layout, box_layout = self.layouts()
        self.sQ = smem.allocate_tensor(self.dtype, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        memory = smem.allocate(2 * self.stages * self.slot_size, byte_alignment=1024)

        def ring(block: cute.Layout, of: cute.ComposedLayout) -> cute.Tensor:
            """A slot's layout, for all slots."""
            layout = cute.make_layout((*block.shape, self.stages), stride=(*block.stride, self.slot_size))
            return cute.make_tensor(cute.recast_ptr(memory, of.inner, self.dtype), layout)

        self.sK, self.sV = ring(k_layout.outer, k_layout), ring(v_layout.outer, v_layout)
        boxes = cute.make_layout(
            (self.box_rows, COLUMNS, self.boxes, max(self.width, self.width_v) // COLUMNS),
            stride=(COLUMNS, 1, self.box_rows * COLUMNS, self.block * COLUMNS),
        )
        self.sBoxes = ring(boxes, box_layout)

    # ---- the warpgroup that computes

    @cute.jit
    def compute(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        out: cute.Tensor,
        lse: cute.Tensor,
        partials: cute.Tensor,
        sums: cute.Tensor,
    ):
        """The blocks of each item, in ascending order."""
        tensors, state = self.set_up(qk_mma, pv_mma, self.width_v)
        output, _ = tensors
        merged = tuple(per_row() for _ in range(2))  # (M, L)

        count, number = Int32(0), Int32(0)
        last_block = self.wait_for_item(number)
        while last_block > 0:
            item = self.read_item(number)
            self.release_item(number)
            rows, first, last = self.rows_of_item(item), item.first, item.last
            split, splits = self.splits_of_item(item)
            stage = number % QUERY_STAGES
            cute.arch.mbarrier_wait(self.q_full + stage, number // QUERY_STAGES % 2)

            self.first_block(tensors, state, rows, stage, first, count)
            start = count - 2 * first - 1  # of a block's number in the ring
            if const_expr(self.sequential):
                self.walk(tensors, state, merged, partials, rows, stage, first, last, start)
            else:
                for n in cutlass.range(first + 1, last, unroll=1):
                    self.next_block(tensors, state, rows, stage, n, start + 2 * n)
            count += 2 * (last - first)
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.q_empty + stage)
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
                    self.keep_partial(output, state, partials, sums, rows, split)
                cute.arch.mbarrier_arrive(self.kept + number % ITEM_SLOTS)
            number += 1
            last_block = self.wait_for_item(number)

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


@compiled
def decode_sm90(arch: str, spec: DecodeSpec, config: DecodeConfig) -> Program:
    """out (B, Lq, H, Dv) and lse (B, H, Lq) of q (B, Lq, H, D) and the first keys and values of caches.

    Packed queries are of one sequence that ``cu_seqlens_q`` (B + 1) cuts. Caches are (B, capacity, Hkv, D), or (pages,
    page size, Hkv, D) with ``page_table`` (B, pages of a sequence). A sequence has ``cache_seqlens`` keys, and its new
    ones where ``appended`` is 1, at most ``max_seqlen_k``. A row sees ``left`` keys before its place and ``right``
    behind it. ``sinks``: (H,). ``before_tanh``, ``score_scale``: see ``score_factors``.

    Workspace: ``partials`` (splits, B Lq H, Dv) and ``sums`` (splits, B Lq H, 2); ``counters``: tickets, and a number
    for each tile, which are 0, and are 0 again afterwards.
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
