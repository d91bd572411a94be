"""Attention forward for SM90: persistent, warp-specialised, TMA in and out, warpgroup MMA.

A CTA walks over tiles of queries of one head. One warp loads; one to three warpgroups of 64 rows compute, and may issue
their products in turn (`ping_pong`), so that one's softmax runs beside the others' products. Within a warpgroup the
scores of the next block are computed under this block's product with the values.

    gmem q --TMA--> sQ (q_full / q_empty)  \
    gmem k --TMA--> sK (k_full / k_empty)  --wgmma--> scores --softmax--> p in registers
    gmem v --TMA--> sV (v_full / v_empty)  --wgmma with p--> O in registers --at the end of a split--> A
    A, O --> out in A's place in smem --TMA--> gmem out

The contract ``kv_grid``: kernel_row.py has its arithmetic; here are the products and the order. Blocks and splits are
those of the absolute grid of keys of a sequence, ascending. Rows of a tile, warpgroups, stages and turns change no bit:
a block that a row does not see leaves it as it is.

A is in shared memory, for large heads in a workspace of the CTA (then out is staged in q's place). A row of one split
never gets there.

Packed sequences: where a sequence begins is read from the device. Rows of v behind its end are cleared in shared
memory. Rows of out are cut off by TMA: out is seen as matrices of ``RAGGED_ROWS`` rows, one for each place in memory
that a sequence may end at, whose last row is there.

Over a cache, for whole tiles of queries of a sequence (a chunk of a prompt): blocks of keys come in boxes of a page's
rows, the rest is the same.

The parts: kernel_forward_tiles.py says which tiles and blocks, kernel_forward_producer.py loads, here they are walked
over, kernel_products_sm90.py multiplies, kernel_forward_epilogue.py merges and writes.

Profile: ncu --clock-control none -k regex:ForwardSm90 python -m bench.bench_attention --filter 8192.*causal
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import (
    WARPGROUP_ROWS,
    ForwardConfig,
    ForwardSpec,
    grid_for,
    merges_in_workspace,
    panel_columns,
)
from cute_kernels.attention.kernel_forward_epilogue import VECTOR, ForwardEpilogue
from cute_kernels.attention.kernel_forward_producer import ForwardProducer
from cute_kernels.attention.kernel_forward_tiles import Blocks, Tile
from cute_kernels.attention.kernel_matrices import by_columns, by_rows, ragged
from cute_kernels.attention.kernel_row import ROWS, cap, first_column, hide, per_row, reset, softmax_step
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, opaque, row_of_thread
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

TURN_BARRIER = 1  # the first of the named barriers of a warpgroup's turn to issue products
# Registers of a producer's and a consumer's thread, by warpgroups that multiply; 65536 in all. Addresses of pages take
# more, and numbers of tiles, where their quick divisions have none
REGISTERS = {2: (24, 240), 3: (32, 160)}
PAGED_REGISTERS = {**REGISTERS, 2: (40, 232)}
PAGED_WORKSPACE_REGISTERS = {**REGISTERS, 2: (56, 224)}


class ForwardSm90(ForwardProducer, ForwardEpilogue):
    """See the module; arguments as in the builder ``forward_sm90``."""

    rows = WARPGROUP_ROWS  # of queries of a warpgroup

    def __init__(self, dtype: type[cutlass.Numeric], spec: ForwardSpec, config: ForwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.head_size, self.head_size_v = spec.sizes
        self.causal, self.window = spec.causal, spec.window
        self.block, split = grid_for(*spec.sizes)
        self.split_blocks = split // self.block
        self.in_workspace = merges_in_workspace(self.head_size)
        self.warpgroups, self.stages = config.warpgroups, config.stages
        self.ping_pong = config.ping_pong and config.warpgroups > 1
        self.scores_ahead, self.q_stages, self.last_first = config.scores_ahead, config.q_stages, config.last_first
        self.masks_by_side = config.masks_by_side and self.window
        self.q_steps = config.q_steps
        self.takes_q = 16 * self.q_steps == self.head_size and not self.in_workspace  # all of it: its place is free
        self.tile_rows = config.tile_rows
        self.paged = spec.page_rows > 0
        self.box_rows = spec.page_rows or self.block
        self.boxes = self.block // self.box_rows  # of a block

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        page_table: cute.Tensor | None,
        appended: Int32 | None,
        workspace: cute.Tensor | None,
        score_scale: Float32,
        before_tanh: Float32,
        left: Int32,
        right: Int32,
        num_tiles: Int32,
        paired: Int32,
        num_ctas: Int32,
        stream,
    ):
        qk_mma, pv_mma = self.tiled_mma(self.block, False), self.tiled_mma(self.head_size_v, True)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sQ_layout, sK_layout, sV_layout, sO_layout = self.layouts()
        d, dv = self.head_size, self.head_size_v
        matrix_out = ragged(by_rows(out)) if const_expr(self.spec.packed_q) else by_rows(out)
        tma_q, mQ = cpasync.make_tiled_tma_atom(
            load, by_rows(q), cute.slice_(sQ_layout, (None, None, 0)), (WARPGROUP_ROWS, d)
        )
        if const_expr(self.paged):
            (tma_k, mK), (tma_v, mV) = (self.box_atom(load, cache, size) for cache, size in ((k, d), (v, dv)))
        else:
            tma_k, mK = cpasync.make_tiled_tma_atom(
                load, by_rows(k), cute.slice_(sK_layout, (None, None, 0)), (self.block, d)
            )
            tma_v, mV = cpasync.make_tiled_tma_atom(
                load, by_columns(v), cute.slice_(sV_layout, (None, None, 0)), (dv, self.block)
            )
        tma_o, mO = cpasync.make_tiled_tma_atom(store, matrix_out, sO_layout, (WARPGROUP_ROWS, dv))
        m_tiles = cute.ceil_div(q.shape[1], self.tile_rows)
        counts = q.shape[2], q.shape[0] * q.shape[2], m_tiles, cute.ceil_div(m_tiles, 2)
        divisors = [cute.FastDivmodDivisorV2(Int32(count)) for count in counts]
        self.kernel(
            qk_mma, pv_mma, tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, lse, sinks, cu_seqlens_q, cu_seqlens_k,
            seqused_k, page_table, appended, workspace, score_scale, before_tanh, left, right, num_tiles, paired,
            *divisors,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.warpgroups + 1) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def layouts(self) -> tuple:
        """Swizzled shared memory: q of each warpgroup, the rings of k and v as wgmma reads them, a warpgroup's out."""
        kinds, d, dv = warpgroup.SmemLayoutAtomKind, self.head_size, self.head_size_v
        swizzles = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32}
        across = warpgroup.make_smem_layout_atom(swizzles[panel_columns(dv)], self.dtype)
        return (
            cute.tile_to_shape(self.along(d), (WARPGROUP_ROWS, d, self.warpgroups * self.q_stages), order=(0, 1, 2)),
            cute.tile_to_shape(self.along(d), (self.block, d, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(across, (dv, self.block, self.stages), order=(1, 0, 2)),
            cute.tile_to_shape(self.along(dv), (WARPGROUP_ROWS, dv), order=(0, 1)),
        )

    def along(self, size: int):
        """The swizzle of rows of so many channels."""
        kinds = warpgroup.SmemLayoutAtomKind
        swizzles = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}
        return warpgroup.make_smem_layout_atom(swizzles[panel_columns(size)], self.dtype)

    def box_atom(self, load: cpasync.CopyBulkTensorTileG2SOp, cache: cute.Tensor, size: int) -> tuple:
        """A copy of a box, and the cache as it sees it. Values lie in shared memory as keys do."""
        box = self.box_rows, panel_columns(size)
        return cpasync.make_tiled_tma_atom(
            load, by_rows(cache), cute.tile_to_shape(self.along(size), box, order=(0, 1)), box
        )

    @cute.kernel
    def kernel(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        page_table: cute.Tensor | None,
        appended: Int32 | None,
        workspace: cute.Tensor | None,
        score_scale: Float32,
        before_tanh: Float32,
        left: Int32,
        right: Int32,
        num_tiles: Int32,
        paired: Int32,
        by_heads: cute.FastDivmodDivisorV2,
        by_all_heads: cute.FastDivmodDivisorV2,
        by_m_tiles: cute.FastDivmodDivisorV2,
        by_pairs: cute.FastDivmodDivisorV2,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        if warp == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        self.allocate(smem, workspace)
        if tidx == 0:
            readers = const_expr(4 * self.warpgroups)
            for slot in cutlass.range_constexpr(self.q_stages):
                cute.arch.mbarrier_init(self.q_full + slot, 1)
                cute.arch.mbarrier_init(self.q_empty + slot, readers)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.k_full + stage, 1)
                cute.arch.mbarrier_init(self.k_empty + stage, readers)
                cute.arch.mbarrier_init(self.v_full + stage, 1)
                cute.arch.mbarrier_init(self.v_empty + stage, readers)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = cu_seqlens_q, cu_seqlens_k, seqused_k
        self.page_table, self.appended = page_table, appended
        self.num_pages, self.page_size, self.lane = mK.shape[3], mK.shape[0], cute.arch.lane_idx()
        self.score_scale, self.before_tanh, self.left, self.right = score_scale, before_tanh, left, right
        divisors = by_heads, by_all_heads, by_m_tiles, by_pairs
        if const_expr(self.in_workspace):  # for the constants of quick divisions there are no registers
            divisors = [Int32(by.divisor) for by in divisors]
        self.by_heads, self.by_all_heads, self.by_m_tiles, self.by_pairs = divisors
        self.schedule(mQ, mK, num_tiles, paired)
        registers = REGISTERS
        if const_expr(self.paged):
            registers = const_expr(PAGED_WORKSPACE_REGISTERS if self.in_workspace else PAGED_REGISTERS)
        if warp < 4:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_decrease(registers[self.warpgroups][0])
            if warp == 0:
                if const_expr(self.paged):
                    self.load_pages(tma_q, mQ, tma_k, mK, tma_v, mV)
                else:
                    self.load(tma_q, mQ, tma_k, mK, tma_v, mV)
        else:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_increase(registers[self.warpgroups][1])
            self.compute(qk_mma, pv_mma, tma_o, mO, lse, sinks, tidx - WARPGROUP)
            if const_expr(self.spec.packed_q):
                self.fill_rest(out, lse, tidx - WARPGROUP)

    def allocate(self, smem, workspace: cute.Tensor | None):
        """Barriers, q, the rings, (M, L), A and, in its place or in q's, each warpgroup's out."""
        self.q_full, self.q_empty = (smem.allocate_array(Int64, self.q_stages) for _ in range(2))
        self.k_full, self.k_empty, self.v_full, self.v_empty = (
            smem.allocate_array(Int64, self.stages) for _ in range(4)
        )
        *operands, sO_layout = self.layouts()
        self.sQ, self.sK, self.sV = (
            smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in operands
        )
        rows = cute.make_layout((2, WARPGROUP_ROWS, self.warpgroups), stride=(1, 2, 2 * WARPGROUP_ROWS))
        self.sRows = smem.allocate_tensor(Float32, rows, byte_alignment=8)
        numbers = WARPGROUP_ROWS * self.head_size_v  # of a warpgroup, fp32
        vectors = numbers // (VECTOR * WARPGROUP)
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, vectors, self.warpgroups), stride=(1, VECTOR, VECTOR * WARPGROUP, numbers)
        )
        if const_expr(self.in_workspace):
            bidx, _, _ = cute.arch.block_idx()
            address = (workspace.iterator + Int64(bidx) * (numbers * self.warpgroups)).toint()
            merged = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
            self.A = cute.make_tensor(merged, layout)
            memory, of_warpgroup = self.sQ.iterator, WARPGROUP_ROWS * self.head_size
        else:
            memory = smem.allocate(4 * numbers * self.warpgroups, byte_alignment=1024)
            self.A = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), layout)
            of_warpgroup = 2 * numbers
        outer = sO_layout.outer
        outer = cute.make_layout((*outer.shape, self.warpgroups), stride=(*outer.stride, of_warpgroup))
        self.sO = cute.make_tensor(cute.recast_ptr(memory, sO_layout.inner, self.dtype), outer)

    # ---- the warpgroups that compute

    @cute.jit
    def compute(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        self.thread = tidx % WARPGROUP
        self.lane = tidx % WARP_SIZE
        tensors, state = self.set_up(qk_mma, pv_mma, self.head_size_v)
        if const_expr(self.ping_pong):
            if self.wg == 0:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            first_row = tile.m * self.tile_rows + self.wg * WARPGROUP_ROWS
            blocks = Blocks(*self.blocks_of(tile, first_row))
            if blocks.end > 0:
                start = count - blocks.first
                q_slot, q_phase = self.place_of_queries(tiles)
                queries = q_slot * self.warpgroups + self.wg if const_expr(self.q_stages > 1) else self.wg
                cute.arch.mbarrier_wait(self.q_full + q_slot, q_phase)
                if const_expr(self.q_steps):
                    self.read_queries(queries, self.thread)
                if const_expr(self.takes_q):
                    cute.arch.sync_warp()
                    self.release(self.q_empty + q_slot)
                self.walk(tensors, state, tile, first_row, blocks, start, queries)
                if const_expr(not (self.in_workspace or self.takes_q)):
                    self.release(self.q_empty + q_slot)
                slot, phase = self.place_in_ring(start + blocks.end - 1)
                cute.arch.mbarrier_wait(self.v_full + slot, phase)
                if const_expr(self.spec.packed_k or self.spec.used_k):
                    rows = tile.len_k - (blocks.end - 1) * self.block
                    if rows < self.block:
                        self.clear_values(slot, rows)
                warpgroup.fence()
                self.add_values(tensors, slot)
                warpgroup.wait_group(0)
                self.release(self.v_empty + slot)
                if const_expr(self.in_workspace):  # registers are few: found again, not kept
                    tile = self.tile_at(opaque(turn))
                self.finish(tensors, state, tile, blocks, tma_o, mO, lse, sinks)
                count += blocks.end - blocks.first
                tiles += 1
        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def walk(
        self, tensors: tuple, state: tuple, tile: tuple, first_row: Int32, blocks: tuple, start: Int32, queries: Int32
    ):
        """All but the last product with values: blocks ascending, split by split."""
        first, last = blocks.first, blocks.end
        self.first_block(tensors, state, tile, first_row, blocks, start, queries)
        first_split, end_split = first // self.split_blocks, cute.ceil_div(last, self.split_blocks)
        for split in cutlass.range(first_split, end_split, unroll=1):
            begin = cutlass.max(split * self.split_blocks, first) + 1
            end = cutlass.min((split + 1) * self.split_blocks, last)
            if const_expr(self.window):
                seen_first = cutlass.min(cutlass.max(blocks.seen_first, begin), end)
                for n in cutlass.range(begin, seen_first, unroll=1):
                    self.next_block(tensors, state, tile, first_row, n, start, queries, True)
                begin = seen_first
            seen_end = cutlass.min(cutlass.max(blocks.seen_end, begin), end)
            for n in cutlass.range(begin, seen_end, unroll=1):
                self.next_block(tensors, state, tile, first_row, n, start, queries, False)
            for n in cutlass.range(seen_end, end, unroll=1):  # keys before the window are in the blocks before
                self.next_block(tensors, state, tile, first_row, n, start, queries, True, not self.masks_by_side)
            if end < last:
                self.border_block(tensors, state, tile, first_row, blocks, end, start, queries, split == first_split)

    @cute.jit
    def first_block(
        self, tensors: tuple, state: tuple, tile: tuple, first_row: Int32, blocks: tuple, start: Int32, queries: Int32
    ):
        """Scores and p of a tile's first block."""
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)  # of a block alone: nothing is carried to the next
        slot, phase = self.place_in_ring(start + blocks.first)
        cute.arch.mbarrier_wait(self.k_full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot, queries)
        warpgroup.wait_group(0)
        self.release(self.k_empty + slot)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if const_expr(self.masks_by_side):
            if blocks.first < blocks.seen_first:
                self.hide_keys(scores, tile, first_row, blocks.first, right=False)
            if blocks.first >= blocks.seen_end:
                self.hide_keys(scores, tile, first_row, blocks.first, left=False)
        elif (blocks.first < blocks.seen_first) | (blocks.first >= blocks.seen_end):
            self.hide_keys(scores, tile, first_row, blocks.first)
        self.weigh_first(tensors, state, scores)

    @cute.jit
    def next_block(
        self,
        tensors: tuple,
        state: tuple,
        tile: tuple,
        first_row: Int32,
        n: Int32,
        start: Int32,
        queries: Int32,
        masked: cutlass.Constexpr[bool],
        left: cutlass.Constexpr[bool] = True,
    ):
        """Scores and p of block ``n`` beside the product of block n - 1 with the values.

        ``masked``: some rows do not see all its keys; ``left``: nor those before a window.
        """
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, n, start, queries)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if const_expr(masked):
            self.hide_keys(scores, tile, first_row, n, left)
        self.weigh(tensors, state, scores)
        self.release(self.v_empty + v_slot)
        self.round_weights(scores, tensors[1])

    @cute.jit
    def border_block(
        self,
        tensors: tuple,
        state: tuple,
        tile: tuple,
        first_row: Int32,
        blocks: tuple,
        n: Int32,
        start: Int32,
        queries: Int32,
        is_first: Boolean,
    ):
        """``next_block`` where block n - 1 ends a split, of this tile the first one or not.

        The new split's softmax runs beside the old one's last product.
        """
        output, weights = tensors
        maximum, total, rescale = state
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, n, start, queries)
        ended_maximum, ended_total = per_row(), per_row()
        for r in cutlass.range_constexpr(ROWS):
            ended_maximum[r], ended_total[r] = maximum[r], total[r]
        reset(maximum, total)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if (n < blocks.seen_first) | (n >= blocks.seen_end):
            self.hide_keys(scores, tile, first_row, n)
        softmax_step(scores, maximum, total, rescale, self.score_scale)
        self.end_split(output, ended_maximum, ended_total, is_first)
        self.release(self.v_empty + v_slot)
        self.round_weights(scores, weights)

    @cute.jit
    def issue_products(self, tensors: tuple, scores: cute.Tensor, n: Int32, start: Int32, queries: Int32):
        """Block n's with q, which is waited for, and block n - 1's with p, which is not. Returns the slot of its v."""
        k_slot, k_phase = self.place_in_ring(start + n)
        v_slot, v_phase = self.place_in_ring(start + n - 1)
        if const_expr(self.scores_ahead):
            cute.arch.mbarrier_wait(self.k_full + k_slot, k_phase)
            self.wait_for_turn()
            warpgroup.fence()
            self.score(scores, k_slot, queries)
            cute.arch.mbarrier_wait(self.v_full + v_slot, v_phase)
            self.add_values(tensors, v_slot)
            self.pass_turn()
            warpgroup.wait_group(1)
        else:
            cute.arch.mbarrier_wait(self.v_full + v_slot, v_phase)
            warpgroup.fence()
            self.add_values(tensors, v_slot)
            warpgroup.wait_group(0)
            cute.arch.mbarrier_wait(self.k_full + k_slot, k_phase)
            warpgroup.fence()
            self.score(scores, k_slot, queries)
            warpgroup.wait_group(0)
        self.release(self.k_empty + k_slot)
        return v_slot

    @cute.jit
    def clear_values(self, slot: Int32, rows: Int32):
        """Values behind a sequence's last become 0: p is 0 there, but what is there may be NaN.

        Each warpgroup does it: another one may write the same zeros while this one's product reads them.
        """
        size = const_expr(8)  # channels that stay together in the swizzle
        chunks = const_expr(self.head_size_v // size)
        values = cute.zipped_divide(self.sV[None, None, slot], (size, 1))
        zeros = cute.make_rmem_tensor((size,), self.dtype)
        zeros.fill(0.0)
        for i in cutlass.range(rows * chunks + self.thread, self.block * chunks, WARPGROUP, unroll=1):
            cute.autovec_copy(zeros, values[(None, 0), (i % chunks, i // chunks)])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()

    def hide_keys(
        self, scores: cute.Tensor, tile: Tile, first_row: Int32, n: Int32, left: bool = True, right: bool = True
    ):
        """Scores of keys that a row does not see: those before a window, and those behind it or the diagonal."""
        thread = opaque(self.thread)
        origin = n * self.block + first_column(thread)
        my_row = first_row + row_of_thread(thread)
        firsts, lasts = [], []
        for r in range(ROWS):
            place, last = my_row + 8 * r + tile.len_k - tile.len_q, tile.len_k - 1
            if self.causal or self.window:
                last = cutlass.min(place + self.right if self.window else place, last)
            firsts.append(place - self.left - origin)
            lasts.append(last - origin)
        hide(scores, tuple(lasts) if right else None, tuple(firsts) if self.window and left else None)

    @cute.jit
    def wait_for_turn(self):
        """Until the warpgroup before has issued its products."""
        if const_expr(self.ping_pong):
            cute.arch.barrier(barrier_id=TURN_BARRIER + self.wg, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self):
        """The next warpgroup may issue its products. All have the same number of turns."""
        if const_expr(self.ping_pong):
            following = (self.wg + 1) % self.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + following, number_of_threads=2 * WARPGROUP)


@compiled
def forward_sm90(arch: str, spec: ForwardSpec, config: ForwardConfig) -> Program:
    """out (B, Lq, H, Dv) and lse (B, H, Lq) of q (B, Lq, H, D), k and v (B, Lk, Hkv, D), whose strides are multiples of
    16 bytes; with sinks (H,). Packed sequences: B of 1, lse (H, Lq), cu_seqlens int32.

    k and v may be a cache: (B, capacity, Hkv, D), or (pages, page size, Hkv, D) with ``page_table`` (B, pages of a
    sequence). A sequence has ``seqused_k`` keys, and its new ones where ``appended`` is 1.

    ``workspace``: 64 Dv fp32 numbers for each warpgroup of each CTA, where A is not in shared memory. ``score_scale``,
    ``before_tanh``: see ``score_factors``. ``left``, ``right``: see ``window_bounds``. ``num_tiles``: of tiles of all
    heads; of packed sequences at most that many. ``paired``: see ``ForwardSm90.tile_at``.
    """
    in_workspace = merges_in_workspace(spec.head_size)
    return Program(ForwardSm90(cutlass_dtype(spec.dtype), spec, config), *entry_of(spec, in_workspace))


def entry_of(spec: ForwardSpec, in_workspace: bool) -> tuple:
    """The fake arguments of a forward kernel."""
    dtype, (d, dv) = cutlass_dtype(spec.dtype), spec.sizes
    if spec.padded:
        d, dv = (cute.sym_int(divisibility=8) for _ in range(2))
    batch_q, batch_k, len_q, len_k, heads, pairs = (cute.sym_int() for _ in range(6))
    if not spec.packed_q and not spec.packed_k and not spec.page_rows:
        batch_k = batch_q

    def operand(batch, length, number, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, size), (*strides, 1), assumed_align=16)

    def integers(present):
        return cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if present else None

    page_table = None
    if spec.page_rows:
        shape, strides = (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1)
        page_table = cute.runtime.make_fake_tensor(Int32, shape, strides, assumed_align=4)
    lse = (heads, len_q) if spec.packed_q else (batch_q, heads, len_q)
    return (
        operand(batch_q, len_q, heads, d),
        operand(batch_k, len_k, pairs, d),
        operand(batch_k, len_k, pairs, dv),
        operand(batch_q, len_q, heads, dv),
        cute.runtime.make_fake_compact_tensor(Float32, lse, stride_order=tuple(range(len(lse)))[::-1], assumed_align=4),
        cute.runtime.make_fake_tensor(Float32, (heads,), (cute.sym_int64(),), assumed_align=4) if spec.sinks else None,
        integers(spec.packed_q),
        integers(spec.packed_k),
        integers(spec.used_k),
        page_table,
        Int32(0) if spec.cached else None,
        cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16) if in_workspace else None,
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
