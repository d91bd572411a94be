"""Attention forward for SM90: persistent, warp-specialised, TMA in and out, warpgroup MMA, dense batches.

A CTA walks over tiles of queries of one head, the longest first. One warp loads; one to three warpgroups of 64 rows
compute, and issue their products in turn (`ping_pong`), so that one's softmax runs beside the others' products. Within
a warpgroup the scores of the next block are computed under this block's product with the values.

    gmem q --TMA--> sQ (q_full / q_empty)  \
    gmem k --TMA--> sK (k_full / k_empty)  --wgmma--> scores --softmax--> p in registers
    gmem v --TMA--> sV (v_full / v_empty)  --wgmma with p--> O in registers --at the end of a split--> A in smem
    A, O --> out in A's place in smem --TMA--> gmem out

The contract ``kv_grid``: kernel_row.py has its arithmetic; here are the products and the order. Blocks and splits are
those of the absolute grid of keys, ascending. Rows of queries, warpgroups, stages and turns change no bit: a block that
a row does not see leaves it as it is.

A thread's part of A is its own, so A needs no barrier. A row of one split never gets there.

Profile: ncu --clock-control none -k regex:ForwardSm90 python -m bench.bench_attention --filter 8192.*causal
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import WARPGROUP_ROWS, ForwardConfig, ForwardSpec, grid_for
from cute_kernels.attention.kernel_row import (
    QUAD,
    ROWS,
    finish_element,
    finish_row,
    first_column,
    hide,
    merge_element,
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
# The first of the named barriers: of a warpgroup's turn to issue products, of a warpgroup's threads among themselves
TURN_BARRIER, GROUP_BARRIER = 1, 4
# Registers of a producer's and a consumer's thread, by warpgroups that multiply; 65536 in all
REGISTERS = {2: (24, 240), 3: (32, 160)}
VECTOR = 4  # fp32 numbers of A that move together


class ForwardSm90:
    """See the module; arguments as in the builder ``forward_sm90``."""

    def __init__(self, dtype: type[cutlass.Numeric], head_size: int, causal: bool, config: ForwardConfig):
        self.dtype = dtype
        self.head_size = head_size
        self.causal = causal
        self.block, split = grid_for(head_size)
        self.split_blocks = split // self.block
        self.warpgroups, self.stages = config.warpgroups, config.stages
        self.ping_pong = config.ping_pong and config.warpgroups > 1
        self.tile_rows = config.tile_rows

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        score_scale: Float32,
        heads_together: Int32,
        num_ctas: Int32,
        stream,
    ):
        qk_mma, pv_mma = self.tiled_mma(self.block, False), self.tiled_mma(self.head_size, True)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sQ_layout, sK_layout, sV_layout, sO_layout = self.layouts()
        rows, keys = (self.tile_rows, self.head_size), (self.block, self.head_size)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_rows(q), sQ_layout, rows)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_rows(k), cute.slice_(sK_layout, (None, None, 0)), keys)
        tma_v, mV = cpasync.make_tiled_tma_atom(
            load, by_columns(v), cute.slice_(sV_layout, (None, None, 0)), keys[::-1]
        )
        tma_o, mO = cpasync.make_tiled_tma_atom(store, by_rows(out), sO_layout, (WARPGROUP_ROWS, self.head_size))
        self.kernel(
            qk_mma, pv_mma, tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, lse, score_scale, heads_together
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.warpgroups + 1) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def tiled_mma(self, columns: int, of_values: bool, warpgroups: int = 0) -> cute.TiledMma:
        """Q and K lie along the head size in shared memory; P is in registers, V lies across."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN if of_values else OperandMajorMode.K,
            Float32,
            (warpgroups or self.warpgroups, 1, 1),
            tiler_mn=(WARPGROUP_ROWS, columns),
            a_source=warpgroup.OperandSource.RMEM if of_values else warpgroup.OperandSource.SMEM,
        )

    def layouts(self) -> tuple:
        """Swizzled shared memory of a tile's q, the rings of k and v, as wgmma reads them, and a warpgroup's out."""
        kinds = warpgroup.SmemLayoutAtomKind
        along, across = (warpgroup.make_smem_layout_atom(k, self.dtype) for k in (kinds.K_SW128, kinds.MN_SW128))
        d = self.head_size
        return (
            cute.tile_to_shape(along, (self.tile_rows, d), order=(0, 1)),
            cute.tile_to_shape(along, (self.block, d, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(across, (d, self.block, self.stages), order=(1, 0, 2)),
            cute.tile_to_shape(along, (WARPGROUP_ROWS, d), order=(0, 1)),
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
        lse: cute.Tensor,
        score_scale: Float32,
        heads_together: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        if warp == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        self.allocate(smem)
        if tidx == 0:
            readers = const_expr(4 * self.warpgroups)
            cute.arch.mbarrier_init(self.q_full, 1)
            cute.arch.mbarrier_init(self.q_empty, readers)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.k_full + stage, 1)
                cute.arch.mbarrier_init(self.k_empty + stage, readers)
                cute.arch.mbarrier_init(self.v_full + stage, 1)
                cute.arch.mbarrier_init(self.v_empty + stage, readers)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.schedule(mQ, mK, heads_together)
        if warp < 4:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_decrease(REGISTERS[self.warpgroups][0])
            if warp == 0:
                self.load(tma_q, mQ, tma_k, mK, tma_v, mV)
        else:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_increase(REGISTERS[self.warpgroups][1])
            self.compute(qk_mma, pv_mma, tma_o, mO, lse, score_scale, tidx - WARPGROUP)

    def allocate(self, smem):
        """Barriers, q, the rings, (M, L), A and, in its place, each warpgroup's out."""
        self.q_full, self.q_empty = (smem.allocate_array(Int64, 1) for _ in range(2))
        self.k_full, self.k_empty, self.v_full, self.v_empty = (
            smem.allocate_array(Int64, self.stages) for _ in range(4)
        )
        *operands, sO_layout = self.layouts()
        self.sQ, self.sK, self.sV = (
            smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in operands
        )
        numbers = WARPGROUP_ROWS * self.head_size  # of a warpgroup, fp32
        memory = smem.allocate(4 * numbers * self.warpgroups, byte_alignment=1024)
        vectors = numbers // (VECTOR * WARPGROUP)
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, vectors, self.warpgroups), stride=(1, VECTOR, VECTOR * WARPGROUP, numbers)
        )
        rows = cute.make_layout((2, WARPGROUP_ROWS, self.warpgroups), stride=(1, 2, 2 * WARPGROUP_ROWS))
        self.sRows = smem.allocate_tensor(Float32, rows, byte_alignment=8)
        self.sA = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), layout)
        outer = sO_layout.outer
        outer = cute.make_layout((*outer.shape, self.warpgroups), stride=(*outer.stride, 2 * numbers))
        self.sO = cute.make_tensor(cute.recast_ptr(memory, sO_layout.inner, self.dtype), outer)

    # ---- which tile, which blocks

    def schedule(self, mQ: cute.Tensor, mK: cute.Tensor, heads_together: Int32):
        """Lengths and heads; how many tiles are this CTA's."""
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        self.bidx, self.grid = bidx, grid
        self.len_q, self.heads, self.len_k = mQ.shape[0], mQ.shape[2], mK.shape[0]
        self.group = self.heads // mK.shape[2]
        self.m_tiles = cute.ceil_div(self.len_q, self.tile_rows)
        self.all_heads = self.heads * mQ.shape[3]
        self.heads_together = heads_together
        tiles = self.m_tiles * self.all_heads
        self.rounds = tiles // grid
        self.rounds += Int32(select_(self.place(self.rounds) < tiles % grid, Int32(1), Int32(0)))

    def place(self, turn: Int32) -> Int32:
        """The tile of this CTA in a round. Every second round goes back: the longest tile, then the shortest."""
        return Int32(select_(turn % 2 == 0, self.bidx, self.grid - 1 - self.bidx))

    @cute.jit
    def tile_at(self, turn: Int32):
        """(Tile of rows, head, batch). Heads whose keys fit into L2 come together; of these the longest tiles first."""
        index = turn * self.grid + self.place(turn)
        of_section = self.m_tiles * self.heads_together
        section = index // of_section
        first = section * self.heads_together
        heads = cutlass.min(self.heads_together, self.all_heads - first)
        index -= section * of_section
        m, head = index // heads, first + index % heads
        if const_expr(self.causal):
            m = self.m_tiles - 1 - m
        return m, head % self.heads, head // self.heads

    @cute.jit
    def blocks_of(self, m: Int32):
        """Blocks of keys that a tile walks over: one at least, which all its rows may not see."""
        keys = self.len_k
        if const_expr(self.causal):
            last_row = cutlass.min((m + 1) * self.tile_rows, self.len_q)
            keys = cutlass.max(last_row + self.len_k - self.len_q, 1)
        return cute.ceil_div(keys, self.block)

    @cute.jit
    def visible_blocks(self, first_row: Int32, blocks: Int32):
        """How many of them every row from this one on sees as a whole."""
        keys = self.len_k
        if const_expr(self.causal):
            keys = cutlass.min(cutlass.max(first_row + 1 + self.len_k - self.len_q, 0), self.len_k)
        return cutlass.min(keys // self.block, blocks)

    # ---- the warp that loads

    @cute.jit
    def load(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
    ):
        """q and the blocks of k and v of each tile; k one block ahead, as it is used. Rows that do not exist are 0."""
        d = self.head_size
        tQsQ, tQgQ = partition(tma_q, self.sQ, mQ, (self.tile_rows, d))
        tKsK, tKgK = partition(tma_k, self.sK, mK, (self.block, d))
        tVsV, tVgV = partition(tma_v, self.sV, mV, (d, self.block))
        count = Int32(0)
        for turn in cutlass.range(self.rounds):
            m, head, batch = self.tile_at(turn)
            blocks, pair = self.blocks_of(m), head // self.group
            gK, gV = tKgK[None, None, 0, pair, batch], tVgV[None, 0, None, pair, batch]
            self.load_block(tma_k, gK, tKsK, 0, count, self.k_full, self.k_empty)
            cute.arch.mbarrier_wait(self.q_empty, turn % 2 ^ 1)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.q_full, self.tile_rows * d * 2)
            cute.copy(tma_q, tQgQ[None, m, 0, head, batch], tQsQ, tma_bar_ptr=self.q_full)
            for n in cutlass.range(1, blocks, unroll=1):
                self.load_block(tma_k, gK, tKsK, n, count + n, self.k_full, self.k_empty)
                self.load_block(tma_v, gV, tVsV, n - 1, count + n - 1, self.v_full, self.v_empty)
            self.load_block(tma_v, gV, tVsV, blocks - 1, count + blocks - 1, self.v_full, self.v_empty)
            count += blocks

    @cute.jit
    def load_block(self, atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Tensor, n, count: Int32, full, empty):
        """The ``count``-th block of all tiles into its slot, once that is empty."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.block * self.head_size * 2)
        cute.copy(atom, source[None, n], ring[None, slot], tma_bar_ptr=full + slot)

    def place_in_ring(self, count: Int32) -> tuple:
        """(slot, phase)"""
        return count % self.stages, count // self.stages % 2

    # ---- the warpgroups that compute

    @cute.jit
    def compute(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        score_scale: Float32,
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.score_scale = score_scale
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        self.thread = tidx % WARPGROUP
        self.lane = tidx % WARP_SIZE
        qk_slice, pv_slice = (mma.get_slice(self.wg * WARPGROUP) for mma in (qk_mma, pv_mma))
        self.tCrQ = qk_mma.make_fragment_A(qk_slice.partition_A(self.sQ))
        self.tCrK = qk_mma.make_fragment_B(qk_slice.partition_B(self.sK))
        self.tCrV = pv_mma.make_fragment_B(pv_slice.partition_B(self.sV))
        # Atoms whose products start from zero, or are added
        self.qk_first, self.qk_next, self.pv_next = (cute.make_mma_atom(m.op) for m in (qk_mma, qk_mma, pv_mma))
        self.qk_first.set(warpgroup.Field.ACCUMULATE, False)
        self.qk_next.set(warpgroup.Field.ACCUMULATE, True)
        self.pv_next.set(warpgroup.Field.ACCUMULATE, True)
        self.scores_shape = qk_mma.partition_shape_C((self.tile_rows, self.block))
        output = cute.make_rmem_tensor(pv_mma.partition_shape_C((self.tile_rows, self.head_size)), Float32)
        weights = pv_mma.make_fragment_A(pv_mma.partition_shape_A((self.tile_rows, self.block)))
        tensors = output, weights
        state = tuple(per_row() for _ in range(3))  # m, l, what O is rescaled with

        if const_expr(self.ping_pong):
            if self.wg == 0:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
        count = Int32(0)
        for turn in cutlass.range(self.rounds):
            m, head, batch = self.tile_at(turn)
            blocks = self.blocks_of(m)
            first_row = m * self.tile_rows + self.wg * WARPGROUP_ROWS
            my_row = first_row + row_of_thread(self.thread)
            visible = self.visible_blocks(first_row, blocks)

            cute.arch.mbarrier_wait(self.q_full, turn % 2)
            self.first_block(tensors, state, my_row, visible, count)
            splits = cute.ceil_div(blocks, self.split_blocks)
            for split in cutlass.range(splits, unroll=1):
                first, end = split * self.split_blocks + 1, cutlass.min((split + 1) * self.split_blocks, blocks)
                masked_first = cutlass.min(cutlass.max(visible, first), end)
                for n in cutlass.range(first, masked_first, unroll=1):
                    self.next_block(tensors, state, my_row, n, count, False)
                for n in cutlass.range(masked_first, end, unroll=1):
                    self.next_block(tensors, state, my_row, n, count, True)
                if end < blocks:
                    self.next_block(tensors, state, my_row, end, count, True, True)
            self.release(self.q_empty)

            count += blocks
            slot, phase = self.place_in_ring(count - 1)
            cute.arch.mbarrier_wait(self.v_full + slot, phase)
            warpgroup.fence()
            self.add_values(tensors, slot)
            warpgroup.wait_group(0)
            self.release(self.v_empty + slot)
            self.finish(tensors, state, blocks, tma_o, mO, lse, m, head, batch)
        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def first_block(self, tensors: tuple, state: tuple, my_row: Int32, visible: Int32, count: Int32):
        """Scores and p of a tile's first block."""
        output, weights = tensors
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)  # of a block alone: nothing is carried to the next
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.k_full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot)
        warpgroup.wait_group(0)
        self.release(self.k_empty + slot)
        if visible == 0:
            self.hide_keys(scores, my_row, Int32(0))
        reset(state[0], state[1])
        softmax_step(scores, state[0], state[1], state[2], self.score_scale)
        self.round_weights(scores, weights)
        output.fill(0.0)

    @cute.jit
    def next_block(
        self,
        tensors: tuple,
        state: tuple,
        my_row: Int32,
        n: Int32,
        count: Int32,
        masked: cutlass.Constexpr[bool],
        begins_split: cutlass.Constexpr[bool] = False,
    ):
        """Scores and p of block ``n`` beside the product of block n - 1 with the values, which may end a split."""
        output, weights = tensors
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        maximum, total, rescale = state
        k_slot, k_phase = self.place_in_ring(count + n)
        v_slot, v_phase = self.place_in_ring(count + n - 1)
        cute.arch.mbarrier_wait(self.k_full + k_slot, k_phase)
        self.wait_for_turn()
        warpgroup.fence()
        self.score(scores, k_slot)
        cute.arch.mbarrier_wait(self.v_full + v_slot, v_phase)
        self.add_values(tensors, v_slot)
        self.pass_turn()
        warpgroup.wait_group(1)
        self.release(self.k_empty + k_slot)

        if const_expr(begins_split):
            warpgroup.wait_group(0)
            self.end_split(output, maximum, total, n)
        if const_expr(masked):
            self.hide_keys(scores, my_row, n)
        # The exponentials stay before the wait for O only if a branch is between them: ptxas moves them behind it
        if cute.arch.vote_any_sync(softmax_step(scores, maximum, total, rescale, self.score_scale)):
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(output)):
                output[i] = rescale_element(output[i], rescale[row_of(i)])
        warpgroup.wait_group(0)
        self.release(self.v_empty + v_slot)
        self.round_weights(scores, weights)

    def score(self, scores: cute.Tensor, slot: Int32):
        """Issue q k^T of a block: ``serial_k16`` from zero."""
        for k16 in range(self.head_size // 16):
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

    def hide_keys(self, scores: cute.Tensor, my_row: Int32, n: Int32):
        """Scores of keys that a row does not see."""
        first = n * self.block + first_column(self.lane)
        last = []
        for r in range(ROWS):
            key = self.len_k - 1
            if self.causal:
                key = cutlass.min(my_row + 8 * r + self.len_k - self.len_q, key)
            last.append(key - first)
        hide(scores, tuple(last))

    @cute.jit
    def end_split(self, output: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, n: Int32):
        """The split that ended before block ``n`` into (M, L, A); its state is that of the next one's beginning."""
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.thread)
        if n == self.split_blocks:  # merged into nothing it is what it was
            self.wait_for_store()
            self.keep_rows(maximum, total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = output[i * VECTOR + e]
                cute.autovec_copy(vector, self.sA[None, thread, i, self.wg])
        else:
            merged_maximum, merged_total = self.kept_rows(thread)
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            self.keep_rows(merged_maximum, merged_total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                cute.autovec_copy(self.sA[None, thread, i, self.wg], vector)
                for e in cutlass.range_constexpr(VECTOR):
                    r = row_of(e)
                    vector[e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
                cute.autovec_copy(vector, self.sA[None, thread, i, self.wg])
        reset(maximum, total)
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
    def kept_rows(self, thread: Int32):
        maximum, total, pair = per_row(), per_row(), cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            cute.autovec_copy(self.kept_row(thread, r), pair)
            maximum[r], total[r] = pair[0], pair[1]
        return maximum, total

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        state: tuple,
        blocks: Int32,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        m: Int32,
        head: Int32,
        batch: Int32,
    ):
        """The last split merged, out and lse on their way."""
        output, _ = tensors
        maximum, total, _ = state
        thread = opaque(self.thread)
        my_row = m * self.tile_rows + self.wg * WARPGROUP_ROWS + row_of_thread(thread)
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        if blocks > self.split_blocks:
            merged_maximum, merged_total = self.kept_rows(thread)
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            vector = cute.make_rmem_tensor((VECTOR,), Float32)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                cute.autovec_copy(self.sA[None, thread, i, self.wg], vector)
                for e in cutlass.range_constexpr(VECTOR):
                    r = row_of(e)
                    output[i * VECTOR + e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
            for r in cutlass.range_constexpr(ROWS):
                maximum[r], total[r] = merged_maximum[r], merged_total[r]

        empty, reciprocals = [], []
        for r in cutlass.range_constexpr(ROWS):
            is_empty, reciprocal, of_row = finish_row(maximum[r], total[r], self.score_scale)
            empty.append(is_empty)
            reciprocals.append(reciprocal)
            if thread % QUAD == 0 and my_row + 8 * r < self.len_q:
                line = lse.iterator + Int64(batch * self.heads + head) * self.len_q
                line[my_row + 8 * r] = of_row
        rounded = cute.make_rmem_tensor(output.shape, self.dtype)
        for i in cutlass.range_constexpr(cute.size(output)):
            r = row_of(i)
            output[i] = finish_element(output[i], empty[r], reciprocals[r])
        rounded.store(output.load().to(self.dtype))

        self.wait_for_store()  # and all have read their part of A
        atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.tiled_mma(self.head_size, True, 1))
        target = copy.get_slice(thread).partition_D(self.sO[None, None, self.wg])
        cute.copy(copy, copy.retile(rounded), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if thread < WARP_SIZE:
            tOsO, tOgO = partition(tma_o, self.sO, mO, (WARPGROUP_ROWS, self.head_size))
            tile = m * self.warpgroups + self.wg
            cute.copy(tma_o, tOsO[None, self.wg], tOgO[None, tile, 0, head, batch])
            cute.arch.cp_async_bulk_commit_group()

    # ---- who waits for whom

    @cute.jit
    def release(self, empty: cute.Pointer):
        """This warp has read a slot."""
        if self.lane == 0:
            cute.arch.mbarrier_arrive(empty)

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

    @cute.jit
    def wait_for_store(self):
        """Until the tile before has left A's place, and all of the warpgroup are here."""
        if self.thread < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.meet()

    def meet(self):
        """A barrier of a warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER + self.wg, number_of_threads=WARPGROUP)


def row_of_thread(thread: Int32) -> Int32:
    """The first of a thread's two rows in its warpgroup; the other one is 8 below."""
    return thread // WARP_SIZE * 16 + thread % WARP_SIZE // QUAD


def opaque(value: Int32) -> Int32:
    """The same, as the compiler does not know it: addresses made of it are not kept in registers all along."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def by_rows(t: cute.Tensor) -> cute.Tensor:
    """(batch, length, heads, head size) as (length, head size, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def by_columns(t: cute.Tensor) -> cute.Tensor:
    """(batch, length, heads, head size) as (head size, length, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))


def partition(atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor, tile: tuple[int, int]) -> tuple:
    """(Boxes in shared memory by slot, boxes in global memory by their place) as a copy takes them."""
    boxes = cute.local_tile(matrix, tile, (None,) * cute.rank(matrix))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(boxes, 0, 2)
    )


@compiled
def forward_sm90(arch: str, spec: ForwardSpec, config: ForwardConfig) -> Program:
    """out (B, Lq, H, D) and lse (B, H, Lq) of q (B, Lq, H, D) and k, v (B, Lk, Hkv, D), whose strides are multiples of
    16 bytes.

    ``score_scale``: what scores are multiplied with, times log2(e). ``heads_together``: see ``heads_together``.
    """
    dtype, d = cutlass_dtype(spec.dtype), spec.head_size
    batch, len_q, len_k, heads, pairs = (cute.sym_int() for _ in range(5))

    def operand(length, number):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, d), (*strides, 1), assumed_align=16)

    return Program(
        ForwardSm90(dtype, d, spec.causal, config),
        operand(len_q, heads),
        operand(len_k, pairs),
        operand(len_k, pairs),
        operand(len_q, heads),
        cute.runtime.make_fake_compact_tensor(Float32, (batch, heads, len_q), stride_order=(2, 1, 0), assumed_align=4),
        Float32(1.0),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
