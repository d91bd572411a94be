"""Attention forward for SM100: persistent, warp-specialised, TMA in and out, tcgen05 MMA.

A CTA walks over tiles of queries of one head, two of 128 rows at a time (one at 256 channels), which share each block
of keys and values. One warp loads. One warp issues all products. Each tile has a warpgroup for its softmax, a thread a
row. One more warpgroup has the outputs of all tiles: it rescales, merges and writes them.

    gmem q, k --TMA--> sQ (q_full / q_empty), sK (k_full / k_empty) --tcgen05.mma--> S in tensor memory (s_full)
    S --softmax--> p in S's place (p_full), and what becomes of O in sRows (row_full / row_empty)
    p, gmem v --TMA--> sV (v_full / v_empty) --tcgen05.mma--> O in tensor memory (o_full / o_empty)
    O --> O rescaled, or at the end of a split --> A in gmem;   O, A --> sO --TMA--> gmem out

The contract is ``kv_grid`` with orders of sums of its own: the row sum's is in kernel_row_sm100.py, and a tcgen05.mma
adds its 16 products as the hardware does. So a row has the same promises as on SM90, and other bits.

S and O of two tiles of 128 channels are all of tensor memory. A is in a workspace of the CTA, which is small enough for
L2. A thread's part of A is its own, so A needs no barrier. A row of one split never gets there.

S has no barrier that says it is empty: the tensor core computes products of one thread in the order in which they are
issued, so the next scores come after the product with p, in whose place they are written. PTX promises this order for
products of one shape and accumulator; that it holds for these two is what CUTLASS's own kernels rely on, too.

The parts: kernel_forward_tiles.py says which tiles and blocks; here are the warps that load, multiply and compute p;
kernel_forward_epilogue_sm100.py has the outputs.

Compiled and inspected only: no SM100 has run it yet. tests/attention/test_roles_sm100.py runs its barriers in Python.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import ForwardSm100Config, ForwardSpec, grid_for
from cute_kernels.attention.kernel_forward_epilogue_sm100 import CHUNK, ROWS, ForwardSm100Epilogue
from cute_kernels.attention.kernel_forward_sm90 import entry_of
from cute_kernels.attention.kernel_forward_tiles import Blocks, Tile
from cute_kernels.attention.kernel_matrices import by_columns, by_rows, ragged
from cute_kernels.attention.kernel_rings import Rings
from cute_kernels.attention.kernel_row import cap
from cute_kernels.attention.kernel_row_sm100 import CHAINS, follow, hide, reset, row_sum, weigh
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, opaque
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_sm100 import tensor_memory_fence
from jit_cache import Program, compiled

# Registers of a thread of the softmax, the correction, the other warps, by tiles of a CTA; 65536 in all
REGISTERS = {1: (240, 152, 112), 2: (200, 64, 48)}
PART = 32  # columns of S, p that move together


class ForwardSm100(ForwardSm100Epilogue, Rings):
    """See the module; arguments as in the builder ``forward_sm100``. Tiles and blocks are scheduled as on SM90."""

    rows = ROWS

    def __init__(self, dtype: type[cutlass.Numeric], spec: ForwardSpec, config: ForwardSm100Config):
        self.dtype = dtype
        self.spec = spec
        self.head_size, self.head_size_v = spec.sizes
        self.causal, self.window = spec.causal, spec.window
        self.block, split = grid_for(*spec.sizes)
        self.split_blocks = split // self.block
        self.tiles, self.stages = config.tiles, config.stages
        self.tile_rows = config.tile_rows
        self.warpgroups = 1  # that write
        self.last_first = False
        self.columns = 1 << (self.tiles * (self.block + self.head_size_v) - 1).bit_length()  # a power of two
        # A warp reaches the 32 lanes of tensor memory of its index modulo 4, and no others. The softmax's are the first
        self.correction_warp = 4 * self.tiles
        self.mma_warp, self.load_warp = self.correction_warp + 4, self.correction_warp + 5

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
        page_table: None,
        appended: None,
        workspace: cute.Tensor,
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
        sQ_layout, sK_layout, sV_layout, sO_layout = self.layouts(qk_mma, pv_mma)
        one_q, one_k, one_v = (cute.slice_(s, (None, None, None, 0)) for s in (sQ_layout, sK_layout, sV_layout))
        matrix_out = ragged(by_rows(out)) if const_expr(self.spec.packed_q) else by_rows(out)
        alone = (1, 1, 1, 1)
        tma_q, mQ = cute.nvgpu.make_tiled_tma_atom_A(load, by_rows(q), one_q, self.qk_tile(), qk_mma, alone)
        tma_k, mK = cute.nvgpu.make_tiled_tma_atom_B(load, by_rows(k), one_k, self.qk_tile(), qk_mma, alone)
        tma_v, mV = cute.nvgpu.make_tiled_tma_atom_B(load, by_columns(v), one_v, self.pv_tile(), pv_mma, alone)
        tma_o, mO = cpasync.make_tiled_tma_atom(store, matrix_out, sO_layout, (ROWS, self.head_size_v))
        self.kernel(
            qk_mma, pv_mma, tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, lse, sinks, cu_seqlens_q, cu_seqlens_k,
            seqused_k, workspace, score_scale, before_tanh, left, right, num_tiles, paired,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.tiles + 2) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def qk_tile(self) -> tuple[int, int, int]:
        return ROWS, self.block, self.head_size

    def pv_tile(self) -> tuple[int, int, int]:
        return ROWS, self.head_size_v, self.block

    def tiled_mma(self, columns: int, of_values: bool) -> cute.TiledMma:
        """Q and K lie along the head size in shared memory; P is in tensor memory, V lies across."""
        source = tcgen05.OperandSource
        return sm100.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN if of_values else OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.ONE,
            (ROWS, columns),
            source.TMEM if of_values else source.SMEM,
        )

    def layouts(self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma) -> tuple:
        """Swizzled shared memory of the tiles' q, the rings of k and v, as the MMA reads them, and a tile's out."""
        kinds, dv = tcgen05.SmemLayoutAtomKind, self.head_size_v
        along = tcgen05.make_smem_layout_atom(kinds.K_SW64 if dv % 64 else kinds.K_SW128, self.dtype)
        return (
            sm100.make_smem_layout_a(qk_mma, self.qk_tile(), self.dtype, self.tiles),
            sm100.make_smem_layout_b(qk_mma, self.qk_tile(), self.dtype, self.stages),
            sm100.make_smem_layout_b(pv_mma, self.pv_tile(), self.dtype, self.stages),
            cute.tile_to_shape(along, (ROWS, dv), order=(0, 1)),
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
        workspace: cute.Tensor,
        score_scale: Float32,
        before_tanh: Float32,
        left: Int32,
        right: Int32,
        num_tiles: Int32,
        paired: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = cu_seqlens_q, cu_seqlens_k, seqused_k
        self.score_scale, self.before_tanh, self.left, self.right = score_scale, before_tanh, left, right
        if warp == self.load_warp:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        self.allocate(smem, qk_mma, pv_mma)
        if tidx == 0:
            self.init_barriers()
        cute.arch.mbarrier_init_fence()
        if warp == self.correction_warp:
            cute.arch.alloc_tmem(self.columns, self.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.griddepcontrol_wait()
        tensor_memory_fence("before")
        cute.arch.barrier()
        tensor_memory_fence("after")
        self.partition_tensor_memory(qk_mma, pv_mma)

        # Each role computes its schedule and index for itself: they would not get through setmaxnreg in registers
        schedule = tidx, mQ, mK, num_tiles, paired
        of_softmax, of_correction, of_others = REGISTERS[self.tiles]
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(of_others)
            if warp == self.mma_warp:
                self.begin(*schedule)
                self.multiply(qk_mma, pv_mma)
            if warp == self.load_warp:
                self.begin(*schedule)
                self.load(qk_mma, pv_mma, tma_q, mQ, tma_k, mK, tma_v, mV)
        elif warp >= self.correction_warp:
            cute.arch.setmaxregister_decrease(of_correction)
            self.begin(*schedule)
            self.correct(tma_o, mO, lse, sinks, workspace)
            if warp == self.correction_warp:
                tensor_memory_fence("after")
                cute.arch.dealloc_tmem(self.memory, self.columns)
            if const_expr(self.spec.packed_q):
                self.fill_rest(out, lse, self.thread)
        else:
            cute.arch.setmaxregister_increase(of_softmax)
            self.begin(*schedule)
            self.softmax(cute.arch.make_warp_uniform(tidx // WARPGROUP))

    def begin(self, tidx: Int32, mQ: cute.Tensor, mK: cute.Tensor, num_tiles: Int32, paired: Int32):
        """Set a role's own state: its thread, its lane, the schedule, and the counts that it divides by."""
        tidx = opaque(tidx)
        self.thread, self.lane = tidx % WARPGROUP, tidx % WARP_SIZE
        self.schedule(mQ, mK, num_tiles, paired)
        counts = self.heads, self.all_heads, self.m_tiles, cute.ceil_div(self.m_tiles, 2)
        self.by_heads, self.by_all_heads, self.by_m_tiles, self.by_pairs = (Int32(count) for count in counts)

    def allocate(self, smem, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma):
        """Barriers, what a row's softmax tells its correction, q, the rings, a tile's out."""
        for name in ("q_full", "q_empty", "s_full", "p_full", "row_full", "row_empty", "o_full", "o_empty"):
            setattr(self, name, smem.allocate_array(Int64, self.tiles))
        for name in ("k_full", "k_empty", "v_full", "v_empty"):
            setattr(self, name, smem.allocate_array(Int64, self.stages))
        self.tensor_memory = smem.allocate_array(Int32, 1)
        rows = cute.make_layout((2, ROWS, self.tiles), stride=(1, 2, 2 * ROWS))
        self.sRows = smem.allocate_tensor(Float32, rows, byte_alignment=8)
        self.sQ, self.sK, self.sV, self.sO = (
            smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in self.layouts(qk_mma, pv_mma)
        )

    @cute.jit
    def init_barriers(self):
        """Products and copies arrive once, the four warps of a warpgroup one by one."""
        for t in cutlass.range_constexpr(self.tiles):
            for barrier in (self.q_full, self.q_empty, self.s_full, self.o_full):
                cute.arch.mbarrier_init(barrier + t, 1)
            for barrier in (self.p_full, self.row_full, self.row_empty, self.o_empty):
                cute.arch.mbarrier_init(barrier + t, 4)
        for stage in cutlass.range_constexpr(self.stages):
            for barrier in (self.k_full, self.k_empty, self.v_full, self.v_empty):
                cute.arch.mbarrier_init(barrier + stage, 1)

    def partition_tensor_memory(self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma):
        """S of each tile, whose first half p takes, then O of each tile."""
        self.memory = cute.arch.retrieve_tmem_ptr(Float32, 16, self.tensor_memory)
        self.scores_layout = qk_mma.make_fragment_C(qk_mma.partition_shape_C((ROWS, self.block))).layout
        self.output_layout = pv_mma.make_fragment_C(pv_mma.partition_shape_C((ROWS, self.head_size_v))).layout
        weights = sm100.make_smem_layout_a(pv_mma, self.pv_tile(), self.dtype, 1).outer
        weights = pv_mma.make_fragment_A(cute.make_tensor(self.memory, weights))
        self.weights_layout = weights[None, None, None, 0].layout

    def scores_of(self, t: Int32) -> cute.Tensor:
        """S of a tile in tensor memory."""
        return cute.make_tensor(self.memory + t * self.block, self.scores_layout)

    def weights_of(self, t: Int32) -> cute.Tensor:
        """p of a tile, as the first operand of a product."""
        first = cute.recast_ptr(self.memory + t * self.block, dtype=self.dtype)
        return cute.make_tensor(first, self.weights_layout)

    def sums_of(self, t: Int32) -> cute.Tensor:
        """O of a tile in tensor memory."""
        return cute.make_tensor(self.memory + self.tiles * self.block + t * self.head_size_v, self.output_layout)

    # ---- the warp that loads

    @cute.jit
    def load(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
    ):
        """q of all tiles and the blocks of k and v in the order of their use. Rows that do not exist are 0."""
        d, dv = self.head_size, self.head_size_v
        qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
        k_bytes, v_bytes = (const_expr(2 * self.block * size) for size in self.spec.sizes)
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            if blocks.end > 0:
                pair = tile.head // self.group
                q = cute.domain_offset((tile.first_q, 0), mQ[None, None, tile.head, tile.batch_q])
                k = cute.domain_offset((tile.first_k, 0), mK[None, None, pair, tile.batch_k])
                v = cute.domain_offset((0, tile.first_k), mV[None, None, pair, tile.batch_k])
                tQsQ, tQgQ = boxes(tma_q, self.sQ, qk_slice.partition_A(cute.local_tile(q, (ROWS, d), (None, None))))
                tKsK, tKgK = boxes(
                    tma_k, self.sK, qk_slice.partition_B(cute.local_tile(k, (self.block, d), (None, None)))
                )
                tVsV, tVgV = boxes(
                    tma_v, self.sV, pv_slice.partition_B(cute.local_tile(v, (dv, self.block), (None, None)))
                )
                gK, gV = tKgK[None, None, 0], tVgV[None, 0, None]
                start = count - blocks.first  # of a block's number in the rings
                for n in cutlass.range(blocks.first, blocks.end, unroll=1):
                    self.load_block(tma_k, gK, tKsK, n, start + n, self.k_full, self.k_empty, k_bytes)
                    if n == blocks.first:
                        for t in cutlass.range_constexpr(self.tiles):
                            cute.arch.mbarrier_wait(self.q_empty + t, tiles % 2 ^ 1)
                            if self.lane == 0:
                                cute.arch.mbarrier_arrive_and_expect_tx(self.q_full + t, 2 * ROWS * d)
                            source = tQgQ[None, tile.m * self.tiles + t, 0]
                            cute.copy(tma_q, source, tQsQ[None, t], tma_bar_ptr=self.q_full + t)
                    self.load_block(tma_v, gV, tVsV, n, start + n, self.v_full, self.v_empty, v_bytes)
                count += blocks.end - blocks.first
                tiles += 1
        # Products still signal this CTA's barriers: it stays until every slot has been given back
        for i in cutlass.range_constexpr(self.stages):
            slot, phase = self.place_in_ring(count + i)
            cute.arch.mbarrier_wait(self.k_empty + slot, phase ^ 1)
            cute.arch.mbarrier_wait(self.v_empty + slot, phase ^ 1)

    # ---- the warp that issues products

    @cute.jit
    def multiply(self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma):
        """For each block and tile: O += p v of the block before, then the scores that come into the place of its p."""
        self.tCrQ, self.tCrK = qk_mma.make_fragment_A(self.sQ), qk_mma.make_fragment_B(self.sK)
        self.tCrV = pv_mma.make_fragment_B(self.sV)
        # Atoms whose products start from zero, or are added
        (self.qk_first, self.qk_next), (self.pv_first, self.pv_next) = (
            [cute.make_mma_atom(mma.op) for _ in range(2)] for mma in (qk_mma, pv_mma)
        )
        for atom, accumulates in (
            (self.qk_first, False),
            (self.qk_next, True),
            (self.pv_first, False),
            (self.pv_next, True),
        ):
            atom.set(tcgen05.Field.ACCUMULATE, accumulates)
        # The block whose values are still to be added: whether they go onto O, and its keys
        accumulates, keys = Int32(0), Int32(0)
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            for n in cutlass.range(blocks.first, blocks.end, unroll=1):
                for t in cutlass.range(self.tiles, unroll=1):
                    if count > 0:
                        self.add_values(t, accumulates != 0, keys, count - 1)
                    self.score(t, n == blocks.end - 1, count, tiles)
                accumulates = Int32(select_((n > blocks.first) & (n % self.split_blocks != 0), Int32(1), Int32(0)))
                keys = tile.len_k - n * self.block
                count += 1
            tiles += Int32(select_(blocks.end > 0, Int32(1), Int32(0)))
        if count > 0:
            for t in cutlass.range(self.tiles, unroll=1):
                self.add_values(t, accumulates != 0, keys, count - 1)

    @cute.jit
    def score(self, t: Int32, last: Boolean, count: Int32, tiles: Int32):
        """q k^T of a block, the ``count``-th of this CTA and the last one of q or not: ``serial_k16`` from zero."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.q_full + t, tiles % 2)
        cute.arch.mbarrier_wait(self.k_full + slot, phase)
        tensor_memory_fence("after")
        tStS = self.scores_of(t)
        for k16 in cutlass.range_constexpr(self.head_size // 16):
            operands = self.tCrQ[None, None, k16, t], self.tCrK[None, None, k16, slot]
            cute.gemm(self.qk_next if k16 else self.qk_first, tStS, *operands, tStS)
        with cute.arch.elect_one():
            tcgen05.commit(self.s_full + t)
            if t == self.tiles - 1:
                tcgen05.commit(self.k_empty + slot)
            if last:
                tcgen05.commit(self.q_empty + t)

    @cute.jit
    def add_values(self, t: Int32, accumulates: Boolean, keys: Int32, count: Int32):
        """O += p v of a block, ``serial_k16``, onto O or, at a split's beginning, from zero; ``keys``: in the block."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.v_full + slot, phase)
        if const_expr(self.spec.packed_k or self.spec.used_k):
            if (t == 0) & (keys < self.block):
                self.clear_keys(slot, cutlass.max(keys, 0))
        cute.arch.mbarrier_wait(self.o_empty + t, count % 2 ^ 1)
        cute.arch.mbarrier_wait(self.p_full + t, count % 2)
        tensor_memory_fence("after")
        tOtO, tOrP = self.sums_of(t), self.weights_of(t)
        if accumulates:
            cute.gemm(self.pv_next, tOtO, tOrP[None, None, 0], self.tCrV[None, None, 0, slot], tOtO)
        else:
            cute.gemm(self.pv_first, tOtO, tOrP[None, None, 0], self.tCrV[None, None, 0, slot], tOtO)
        for k16 in cutlass.range_constexpr(1, self.block // 16):
            cute.gemm(self.pv_next, tOtO, tOrP[None, None, k16], self.tCrV[None, None, k16, slot], tOtO)
        with cute.arch.elect_one():
            tcgen05.commit(self.o_full + t)
            if t == self.tiles - 1:
                tcgen05.commit(self.v_empty + slot)

    @cute.jit
    def clear_keys(self, slot: Int32, keys: Int32):
        """Values behind a sequence's last become 0: p is 0 there, but what is there may be NaN."""
        chunks = const_expr(self.head_size_v // CHUNK)
        zeros = cute.make_rmem_tensor((CHUNK,), self.dtype)
        zeros.fill(0)
        for i in cutlass.range(keys * chunks + self.lane, self.block * chunks, WARP_SIZE, unroll=1):
            key = i // chunks
            values = self.sV[(None, key % 16), 0, key // 16, slot]
            cute.autovec_copy(zeros, cute.local_tile(values, (CHUNK,), (i % chunks,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    # ---- the warpgroups of the softmax

    @cute.jit
    def softmax(self, t: Int32):
        """Scores of tile ``t`` become p, block by block; the correction is told what becomes of O."""
        tStS = self.scores_of(t)
        copies = (*self.parts(tStS, True, PART), *self.parts(tStS, False, PART))
        maximum, total = cute.make_rmem_tensor((1,), Float32), cute.make_rmem_tensor((CHAINS,), Float32)
        count = Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            first_row = tile.m * self.tile_rows + t * ROWS
            blocks = Blocks(*self.blocks_of(tile, first_row))
            if blocks.end > 0:
                start, begin = count - blocks.first, blocks.first
                block = t, copies, maximum, total, tile, first_row, blocks.first, start
                if const_expr(self.window):
                    seen_first = cutlass.min(cutlass.max(blocks.seen_first, begin), blocks.end)
                    for n in cutlass.range(begin, seen_first, unroll=1):
                        self.weigh_block(*block, n, True)
                    begin = seen_first
                seen_end = cutlass.min(cutlass.max(blocks.seen_end, begin), blocks.end)
                for n in cutlass.range(begin, seen_end, unroll=1):
                    self.weigh_block(*block, n, False)
                for n in cutlass.range(seen_end, blocks.end, unroll=1):
                    self.weigh_block(*block, n, True)
                count += blocks.end - blocks.first
                self.tell(t, maximum[0], row_sum(total), count - 1)

    @cute.jit
    def weigh_block(
        self,
        t: Int32,
        copies: tuple,
        maximum: cute.Tensor,
        total: cute.Tensor,
        tile: tuple,
        first_row: Int32,
        first: Int32,
        start: Int32,
        n: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """p of block ``n`` of the blocks from ``first`` on."""
        load, tS, store, tP = copies
        count, begins = start + n, (n == first) | (n % self.split_blocks == 0)
        if begins:
            if n > first:
                self.tell(t, maximum[0], row_sum(total), count - 1)
            reset(maximum, total)
        cute.arch.mbarrier_wait(self.s_full + t, count % 2)
        tensor_memory_fence("after")
        scores = cute.make_rmem_tensor((self.block,), Float32)
        for p in cutlass.range_constexpr(self.block // PART):
            part = cute.make_tensor(scores.iterator + p * PART, self.part_layout(PART))
            cute.copy(load, tS[None, None, None, p], part)
        cute.arch.fence_view_async_tmem_load()

        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if const_expr(masked):
            self.hide_row(scores, tile, first_row + self.thread, n)
        factor = follow(scores, maximum, total, self.score_scale)
        if not begins:
            self.tell(t, factor, Float32(0.0), count - 1)
        for p in cutlass.range_constexpr(self.block // (2 * PART)):
            several = cute.make_tensor(scores.iterator + 2 * PART * p, cute.make_layout(2 * PART))
            weigh(several, maximum, total, self.score_scale)
            part = cute.make_rmem_tensor(self.part_layout(PART), Float32)
            rounded = cute.make_tensor(cute.recast_ptr(part.iterator, dtype=self.dtype), several.layout)
            rounded.store(several.load().to(self.dtype))
            cute.copy(store, part, tP[None, None, None, p])
        cute.arch.fence_view_async_tmem_store()
        tensor_memory_fence("before")
        self.arrive(self.p_full + t)

    def hide_row(self, scores: cute.Tensor, tile: Tile, my_row: Int32, n: Int32):
        """Scores of keys that the row does not see."""
        origin = n * self.block
        place, last = my_row + tile.len_k - tile.len_q, tile.len_k - 1
        if self.causal or self.window:
            last = cutlass.min(place + self.right if self.window else place, last)
        hide(scores, last - origin, place - self.left - origin if self.window else None)

    @cute.jit
    def tell(self, t: Int32, first: Float32, second: Float32, count: Int32):
        """The correction, what it needs after the product of the ``count``-th block."""
        pair = cute.make_rmem_tensor((2,), Float32)
        pair[0], pair[1] = first, second
        cute.arch.mbarrier_wait(self.row_empty + t, count % 2 ^ 1)
        cute.autovec_copy(pair, self.sRows[None, self.thread, t])
        self.arrive(self.row_full + t)


def boxes(atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor) -> tuple:
    """(Boxes in shared memory by slot, boxes in global memory by their place) of an operand's parts."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(matrix, 0, 3)
    )


@compiled
def forward_sm100(arch: str, spec: ForwardSpec, config: ForwardSm100Config) -> Program:
    """As ``forward_sm90``; ``workspace`` has ``config.workspace_numbers`` for each CTA."""
    return Program(ForwardSm100(cutlass_dtype(spec.dtype), spec, config), *entry_of(spec, True))
