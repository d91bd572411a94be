"""Attention over a cache for SM90: few rows of queries a sequence, many keys, contiguous or in pages.

A row is (query, head of the group that shares keys), the head fastest; a tile has 64 of them. An item of work is a
tile and a split of its keys (``sequential``: all its splits), and a part of the values' channels if they have parts.
Which there are follows from the lengths on the device; a CTA takes a ticket for its next one when it has nearly loaded
the one before. One warp loads blocks, one queries, a warpgroup computes, two warps merge: each goes on to the next item
when its part of this one is done.

    item --warp that loads--> sItems (full / empty)                    --> all
    gmem q --warp--> sQ, one item ahead (full / empty)                 \\
    gmem k, v --TMA--> ring of blocks, k one block ahead (full / empty) --wgmma--> O in registers
    O of a tile's only split --> gmem out
    O, m, l of one of many   --> gmem workspace (kept); the last CTA of the tile merges them --> gmem out

The contract ``kv_grid``: kernel_row.py has its arithmetic; here are the products and the order, which are those of the
forward. Splits are merged by their index, whichever CTA is last. Keys behind a sequence's last do not exist: their
scores are selected away, their values are zeroed in shared memory, and their pages are not looked up.

Its parts: kernel_decode_items.py finds the items, kernel_decode_producer.py loads, kernel_decode_blocks.py walks over a
tile's blocks, kernel_products_sm90.py multiplies, kernel_decode_epilogue.py merges and writes.

Profile: ncu --clock-control none -k regex:DecodeSm90 python -m bench.bench_decode --filter 8192
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
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
from cute_kernels.attention.kernel_decode_blocks import DecodeBlocks
from cute_kernels.attention.kernel_decode_items import ITEM_SLOTS, Item
from cute_kernels.attention.kernel_decode_producer import DecodeProducer
from cute_kernels.attention.kernel_matrices import by_rows
from cute_kernels.attention.kernel_row import ROWS, per_row, quad_sum
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

COMPUTE_WARPS = WARPGROUP // WARP_SIZE
LOAD_WARP, QUERY_WARP = COMPUTE_WARPS, COMPUTE_WARPS + 1  # the last two merge


class DecodeSm90(DecodeProducer, DecodeBlocks):
    """See the module; arguments as in the builder ``decode_sm90``."""

    def __init__(self, spec: DecodeSpec, config: DecodeConfig):
        self.dtype = cutlass_dtype(spec.dtype)
        self.head_size, self.head_size_v = spec.head_size, spec.head_size_v
        self.width = width_of(spec.head_size)
        self.packed, self.paged, self.softcap = spec.packed, spec.page_rows > 0, spec.softcap
        self.block, split = grid_for(spec.head_size, spec.head_size_v)
        self.split_blocks = split // self.block
        self.box_rows = spec.page_rows or self.block
        self.boxes = self.block // self.box_rows  # of a block
        self.sequential, self.few_rows, self.scores_ahead = config.sequential, config.few_rows, config.scores_ahead
        self.parts, self.channels = config.parts, width_of(spec.head_size_v) // config.parts  # of O, of each part
        self.thread_rows = 1 if config.few_rows else ROWS
        self.stages = decode_slots(spec.head_size, spec.head_size_v)
        self.slot_size = self.block * max(self.width, self.channels)

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
        qk_mma, pv_mma = self.tiled_mma(self.block, False), self.tiled_mma(self.channels, True)
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
            cute.tile_to_shape(across, (self.channels, self.block), order=(1, 0)),
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
                cute.arch.mbarrier_init(self.item_empty + slot, readers)
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
            (self.box_rows, COLUMNS, self.boxes, max(self.width, self.channels) // COLUMNS),
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
        tensors, state = self.set_up(qk_mma, pv_mma, self.channels)
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

            start = count - 2 * first - 1  # of a block's number in the ring
            if const_expr(self.scores_ahead):
                self.walk_ahead(tensors, state, rows, stage, first, last, start)
            else:
                self.first_block(tensors, state, rows, stage, first, count)
                if const_expr(self.sequential):
                    self.walk(tensors, state, merged, partials, rows, stage, first, last, start)
                else:
                    for n in cutlass.range(first + 1, last, unroll=1):
                        self.next_block(tensors, state, rows, stage, n, start + 2 * n)
            count += 2 * (last - first)
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.q_empty + stage)
            if const_expr(not self.scores_ahead):
                self.find_values(rows, last, count - 1)
                self.last_values(tensors, count - 1)
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
