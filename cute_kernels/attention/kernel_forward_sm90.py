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

A is in shared memory, for large heads in a workspace of the CTA (then out is staged in q's place). A thread's part of A
is its own, so A needs no barrier. A row of one split never gets there.

Packed sequences: where a sequence begins is read from the device. Rows of v behind its end are cleared in shared
memory. Rows of out are cut off by TMA: out is seen as matrices of ``RAGGED_ROWS`` rows, one for each place in memory
that a sequence may end at, whose last row is there.

Profile: ncu --clock-control none -k regex:ForwardSm90 python -m bench.bench_attention --filter 8192.*causal
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import (
    WARPGROUP_ROWS,
    ForwardConfig,
    ForwardSpec,
    grid_for,
    merges_in_workspace,
)
from cute_kernels.attention.kernel_row import (
    QUAD,
    ROWS,
    cap,
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
RAGGED_ROWS = 2**30  # more than a sequence has


class Tile(NamedTuple):
    """A tile of queries of a head, and its sequence.

    Attributes:
        m: which tile of the sequence; -1: none.
        head: of q.
        batch_q, batch_k: in the first dimension of q, of k and v.
        first_q, first_k: the sequence's first rows there.
        len_q, len_k: its rows.
    """

    m: Int32
    head: Int32
    batch_q: Int32
    batch_k: Int32
    first_q: Int32
    first_k: Int32
    len_q: Int32
    len_k: Int32


class Blocks(NamedTuple):
    """Blocks of keys of a tile: first, end; of a warpgroup, from where to where all its rows see them as a whole."""

    first: Int32
    end: Int32
    seen_first: Int32
    seen_end: Int32


class ForwardSm90:
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
        self.tile_rows = config.tile_rows

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
            seqused_k, workspace, score_scale, before_tanh, left, right, num_tiles, paired, *divisors,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.warpgroups + 1) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def tiled_mma(self, columns: int, of_values: bool) -> cute.TiledMma:
        """Of a warpgroup. Q and K lie along the head size in shared memory; P is in registers, V lies across."""
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
        """Swizzled shared memory: q of each warpgroup, the rings of k and v as wgmma reads them, a warpgroup's out."""
        kinds, d, dv = warpgroup.SmemLayoutAtomKind, self.head_size, self.head_size_v

        def along(size: int):
            return warpgroup.make_smem_layout_atom(kinds.K_SW64 if size % 64 else kinds.K_SW128, self.dtype)

        across = warpgroup.make_smem_layout_atom(kinds.MN_SW64 if dv % 64 else kinds.MN_SW128, self.dtype)
        return (
            cute.tile_to_shape(along(d), (WARPGROUP_ROWS, d, self.warpgroups), order=(0, 1, 2)),
            cute.tile_to_shape(along(d), (self.block, d, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(across, (dv, self.block, self.stages), order=(1, 0, 2)),
            cute.tile_to_shape(along(dv), (WARPGROUP_ROWS, dv), order=(0, 1)),
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

        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = cu_seqlens_q, cu_seqlens_k, seqused_k
        self.score_scale, self.before_tanh, self.left, self.right = score_scale, before_tanh, left, right
        divisors = by_heads, by_all_heads, by_m_tiles, by_pairs
        if const_expr(self.in_workspace):  # for the constants of quick divisions there are no registers
            divisors = [Int32(by.divisor) for by in divisors]
        self.by_heads, self.by_all_heads, self.by_m_tiles, self.by_pairs = divisors
        self.schedule(mQ, mK, num_tiles, paired)
        if warp < 4:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_decrease(REGISTERS[self.warpgroups][0])
            if warp == 0:
                self.load(tma_q, mQ, tma_k, mK, tma_v, mV)
        else:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_increase(REGISTERS[self.warpgroups][1])
            self.compute(qk_mma, pv_mma, tma_o, mO, lse, sinks, tidx - WARPGROUP)
            if const_expr(self.spec.packed_q):
                self.fill_rest(out, lse, tidx - WARPGROUP)

    def allocate(self, smem, workspace: cute.Tensor | None):
        """Barriers, q, the rings, (M, L), A and, in its place or in q's, each warpgroup's out."""
        self.q_full, self.q_empty = (smem.allocate_array(Int64, 1) for _ in range(2))
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

    # ---- which tile, which blocks

    def schedule(self, mQ: cute.Tensor, mK: cute.Tensor, num_tiles: Int32, paired: Int32):
        """Lengths and heads; how many turns this CTA has."""
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        self.bidx, self.grid, self.paired = bidx, grid, paired
        self.len_q, self.heads, self.len_k = mQ.shape[0], mQ.shape[2], mK.shape[0]
        self.group = self.heads // mK.shape[2]
        self.m_tiles = cute.ceil_div(self.len_q, self.tile_rows)
        self.all_heads = self.heads * mQ.shape[3]
        self.longest_first = self.causal and not self.spec.packed_q
        rounds, rest = num_tiles // grid, num_tiles % grid
        self.turns = rounds + Int32(select_(self.place(rounds) < rest, Int32(1), Int32(0)))
        if const_expr(self.longest_first and not self.in_workspace):
            units = cute.ceil_div(self.m_tiles, 2) * self.all_heads
            of_pairs = 2 * (units // grid + Int32(select_(bidx < units % grid, Int32(1), Int32(0))))
            self.turns = Int32(select_(paired != 0, of_pairs, self.turns))

    def place(self, turn: Int32) -> Int32:
        """The tile of this CTA in a round; every second round goes back: the longest tile, then the shortest."""
        if const_expr(self.longest_first):
            return Int32(select_(turn % 2 == 0, self.bidx, self.grid - 1 - self.bidx))
        return self.bidx

    def tile_at(self, turn: Int32) -> Tile:
        """Tiles of a head are neighbours, for its keys to stay in L2.

        Where rows see unequally many keys, two turns of a CTA are the last tile and the first one of a head, and so on:
        each two see the same number (``paired``). Otherwise the longest tiles of all heads are the first.
        """
        if const_expr(self.spec.packed_q):
            tile, head = divided(turn * self.grid + self.bidx, self.by_heads)
            sequence, m = self.find_sequence(tile)
        elif const_expr(self.longest_first):
            sequence, head, m = self.causal_tile(turn)
        else:
            head, m = divided(turn * self.grid + self.bidx, self.by_m_tiles)
            sequence, head = divided(head, self.by_heads)
        batch_q = batch_k = sequence
        first_q = first_k = Int32(0)
        len_q, len_k = self.len_q, self.len_k
        if const_expr(self.spec.packed_q):
            first_q = self.cu_seqlens_q[sequence]
            batch_q, len_q = Int32(0), self.cu_seqlens_q[sequence + 1] - first_q
        if const_expr(self.spec.packed_k):
            first_k = self.cu_seqlens_k[sequence]
            batch_k, len_k = Int32(0), self.cu_seqlens_k[sequence + 1] - first_k
        if const_expr(self.spec.used_k):
            len_k = cutlass.min(self.seqused_k[sequence], len_k)
        return Tile(m, head, batch_q, batch_k, first_q, first_k, len_q, len_k)

    @cute.jit
    def causal_tile(self, turn: Int32):
        """(Sequence, head, tile; -1: none)"""
        head, m = Int32(0), Int32(0)
        if const_expr(self.in_workspace):  # there are no registers for a choice
            paired = False
        else:
            paired = self.paired != 0
        if paired:
            head, m = divided(turn // 2 * self.grid + self.bidx, self.by_pairs)
            if turn % 2 == 0:
                m = self.m_tiles - 1 - m
            else:  # of an odd number the last tile is alone
                m -= self.m_tiles % 2
        else:
            m, head = divided(turn * self.grid + self.place(turn), self.by_all_heads)
            m = self.m_tiles - 1 - m
        sequence, head = divided(head, self.by_heads)
        return sequence, head, m

    @cute.jit
    def find_sequence(self, index: Int32):
        """(Sequence, its tile) of a tile of all sequences, the longest of a sequence first; tile -1: there is none."""
        lane = cute.arch.lane_idx()
        number = self.cu_seqlens_q.shape[0] - 1
        sequence, m, before, base = Int32(0), Int32(-1), Int32(0), Int32(0)
        while (m < 0) & (base < number):  # a lane a sequence
            tiles = Int32(0)
            if base + lane < number:
                rows = self.cu_seqlens_q[base + lane + 1] - self.cu_seqlens_q[base + lane]
                tiles = cute.ceil_div(rows, self.tile_rows)
            end = tiles
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(end, offset=2**step, mask_and_clamp=0)
                end += Int32(select_(lane >= 2**step, other, Int32(0)))
            found = cute.arch.vote_ballot_sync(index < before + end)
            if found != 0:
                source = cute.arch.popc((found - 1) & ~found)  # the first of them
                sequence = base + source
                m = before + cute.arch.shuffle_sync(end, source) - 1 - index
            before += cute.arch.shuffle_sync(end, WARP_SIZE - 1)
            base += WARP_SIZE
        return cute.arch.make_warp_uniform(sequence), cute.arch.make_warp_uniform(m)

    @cute.jit
    def blocks_of(self, tile: tuple, first_row: Int32) -> tuple:
        """Blocks that a tile walks over, none or one at least, which all its rows may not see; see ``Blocks``.

        ``first_row``: of a warpgroup.
        """
        offset = tile.len_k - tile.len_q  # a row's place is its number and this
        first, end = Int32(0), tile.len_k  # in keys
        seen_first, seen_end = Int32(0), tile.len_k
        last_row = cutlass.min((tile.m + 1) * self.tile_rows, tile.len_q) - 1
        if const_expr(self.causal or self.window):
            right = self.right if self.window else 0
            end = cutlass.min(last_row + offset + right + 1, end)
            seen_end = cutlass.min(first_row + offset + right + 1, seen_end)
        end = cute.ceil_div(cutlass.max(end, 1), self.block)
        seen_end = cutlass.min(cutlass.max(seen_end, 0) // self.block, end)
        if const_expr(self.window):
            first = cutlass.max(tile.m * self.tile_rows + offset - self.left, 0) // self.block
            first = cutlass.min(first, end - 1)
            seen_first = cutlass.max(first_row + self.rows - 1 + offset - self.left, 0)
            seen_first = cute.ceil_div(seen_first, self.block)
        if tile.m < 0:
            first, end = Int32(0), Int32(0)
        return first, end, seen_first, seen_end

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
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            if blocks.end > 0:
                pair = tile.head // self.group
                q = cute.domain_offset((tile.first_q, 0), mQ[None, None, tile.head, tile.batch_q])
                k = cute.domain_offset((tile.first_k, 0), mK[None, None, pair, tile.batch_k])
                v = cute.domain_offset((0, tile.first_k), mV[None, None, pair, tile.batch_k])
                tQsQ, tQgQ = partition(tma_q, self.sQ, q, (WARPGROUP_ROWS, self.head_size))
                tKsK, tKgK = partition(tma_k, self.sK, k, (self.block, self.head_size))
                tVsV, tVgV = partition(tma_v, self.sV, v, (self.head_size_v, self.block))
                gK, gV = tKgK[None, None, 0], tVgV[None, 0, None]
                k_bytes, v_bytes = (const_expr(2 * self.block * size) for size in self.spec.sizes)
                first, end = blocks.first, blocks.end
                start = count - first  # of a block's number in the rings
                self.load_block(tma_k, gK, tKsK, first, count, self.k_full, self.k_empty, k_bytes)
                cute.arch.mbarrier_wait(self.q_empty, tiles % 2 ^ 1)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.q_full, 2 * self.tile_rows * self.head_size)
                for wg in cutlass.range_constexpr(self.warpgroups):
                    source = tQgQ[None, tile.m * self.warpgroups + wg, 0]
                    cute.copy(tma_q, source, tQsQ[None, wg], tma_bar_ptr=self.q_full)
                for n in cutlass.range(first + 1, end, unroll=1):
                    self.load_block(tma_k, gK, tKsK, n, start + n, self.k_full, self.k_empty, k_bytes)
                    self.load_block(tma_v, gV, tVsV, n - 1, start + n - 1, self.v_full, self.v_empty, v_bytes)
                self.load_block(tma_v, gV, tVsV, end - 1, start + end - 1, self.v_full, self.v_empty, v_bytes)
                count += end - first
                tiles += 1

    @cute.jit
    def load_block(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        ring: cute.Tensor,
        n,
        count: Int32,
        full,
        empty,
        num_bytes: cutlass.Constexpr[int],
    ):
        """The ``count``-th block of all tiles into its slot, once that is empty."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, num_bytes)
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
        sinks: cute.Tensor | None,
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        self.thread = tidx % WARPGROUP
        self.lane = tidx % WARP_SIZE
        qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
        self.tCrQ = qk_mma.make_fragment_A(qk_slice.partition_A(self.sQ))
        self.tCrK = qk_mma.make_fragment_B(qk_slice.partition_B(self.sK))
        self.tCrV = pv_mma.make_fragment_B(pv_slice.partition_B(self.sV))
        # Atoms whose products start from zero, or are added
        self.qk_first, self.qk_next, self.pv_next = (cute.make_mma_atom(m.op) for m in (qk_mma, qk_mma, pv_mma))
        self.qk_first.set(warpgroup.Field.ACCUMULATE, False)
        self.qk_next.set(warpgroup.Field.ACCUMULATE, True)
        self.pv_next.set(warpgroup.Field.ACCUMULATE, True)
        self.scores_shape = qk_mma.partition_shape_C((WARPGROUP_ROWS, self.block))
        output = cute.make_rmem_tensor(pv_mma.partition_shape_C((WARPGROUP_ROWS, self.head_size_v)), Float32)
        weights = pv_mma.make_fragment_A(pv_mma.partition_shape_A((WARPGROUP_ROWS, self.block)))
        tensors = output, weights
        state = tuple(per_row() for _ in range(3))  # m, l, what O is rescaled with

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
                cute.arch.mbarrier_wait(self.q_full, tiles % 2)
                self.walk(tensors, state, tile, first_row, blocks, start)
                if const_expr(not self.in_workspace):
                    self.release(self.q_empty)
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
    def walk(self, tensors: tuple, state: tuple, tile: tuple, first_row: Int32, blocks: tuple, start: Int32):
        """All but the last product with values: blocks ascending, split by split."""
        first, last = blocks.first, blocks.end
        self.first_block(tensors, state, tile, first_row, blocks, start)
        first_split, end_split = first // self.split_blocks, cute.ceil_div(last, self.split_blocks)
        for split in cutlass.range(first_split, end_split, unroll=1):
            begin = cutlass.max(split * self.split_blocks, first) + 1
            end = cutlass.min((split + 1) * self.split_blocks, last)
            if const_expr(self.window):
                seen_first = cutlass.min(cutlass.max(blocks.seen_first, begin), end)
                for n in cutlass.range(begin, seen_first, unroll=1):
                    self.next_block(tensors, state, tile, first_row, n, start, True)
                begin = seen_first
            seen_end = cutlass.min(cutlass.max(blocks.seen_end, begin), end)
            for n in cutlass.range(begin, seen_end, unroll=1):
                self.next_block(tensors, state, tile, first_row, n, start, False)
            for n in cutlass.range(seen_end, end, unroll=1):
                self.next_block(tensors, state, tile, first_row, n, start, True)
            if end < last:
                self.border_block(tensors, state, tile, first_row, blocks, end, start, split == first_split)

    @cute.jit
    def first_block(self, tensors: tuple, state: tuple, tile: tuple, first_row: Int32, blocks: tuple, start: Int32):
        """Scores and p of a tile's first block."""
        output, weights = tensors
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)  # of a block alone: nothing is carried to the next
        slot, phase = self.place_in_ring(start + blocks.first)
        cute.arch.mbarrier_wait(self.k_full + slot, phase)
        warpgroup.fence()
        self.score(scores, slot)
        warpgroup.wait_group(0)
        self.release(self.k_empty + slot)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if (blocks.first < blocks.seen_first) | (blocks.first >= blocks.seen_end):
            self.hide_keys(scores, tile, first_row, blocks.first)
        reset(state[0], state[1])
        softmax_step(scores, state[0], state[1], state[2], self.score_scale)
        self.round_weights(scores, weights)
        output.fill(0.0)

    @cute.jit
    def next_block(
        self,
        tensors: tuple,
        state: tuple,
        tile: tuple,
        first_row: Int32,
        n: Int32,
        start: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """Scores and p of block ``n`` beside the product of block n - 1 with the values."""
        output, weights = tensors
        maximum, total, rescale = state
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, n, start)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if const_expr(masked):
            self.hide_keys(scores, tile, first_row, n)
        # The exponentials stay before the wait for O only if a branch is between them: ptxas moves them behind it
        if cute.arch.vote_any_sync(softmax_step(scores, maximum, total, rescale, self.score_scale)):
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(output)):
                output[i] = rescale_element(output[i], rescale[row_of(i)])
        warpgroup.wait_group(0)
        self.release(self.v_empty + v_slot)
        self.round_weights(scores, weights)

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
        is_first: Boolean,
    ):
        """``next_block`` where block n - 1 ends a split, of this tile the first one or not.

        The new split's softmax runs beside the old one's last product.
        """
        output, weights = tensors
        maximum, total, rescale = state
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        v_slot = self.issue_products(tensors, scores, n, start)
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
    def issue_products(self, tensors: tuple, scores: cute.Tensor, n: Int32, start: Int32):
        """Block n's with q, which is waited for, and block n - 1's with p, which is not. Returns the slot of its v."""
        k_slot, k_phase = self.place_in_ring(start + n)
        v_slot, v_phase = self.place_in_ring(start + n - 1)
        cute.arch.mbarrier_wait(self.k_full + k_slot, k_phase)
        self.wait_for_turn()
        warpgroup.fence()
        self.score(scores, k_slot)
        cute.arch.mbarrier_wait(self.v_full + v_slot, v_phase)
        self.add_values(tensors, v_slot)
        self.pass_turn()
        warpgroup.wait_group(1)
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

    def score(self, scores: cute.Tensor, slot: Int32):
        """Issue q k^T of a block: ``serial_k16`` from zero."""
        for k16 in range(self.head_size // 16):
            atom = self.qk_next if k16 else self.qk_first
            cute.gemm(atom, scores, self.tCrQ[None, None, k16, self.wg], self.tCrK[None, None, k16, slot], scores)
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

    def hide_keys(self, scores: cute.Tensor, tile: Tile, first_row: Int32, n: Int32):
        """Scores of keys that a row does not see."""
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
        hide(scores, tuple(lasts), tuple(firsts) if self.window else None)

    @cute.jit
    def end_split(self, output: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, is_first: Boolean):
        """A split, the tile's first or not, into (M, L, A); O, which is waited for, becomes 0.

        The waits are behind the branch as in ``next_block``.
        """
        for r in cutlass.range_constexpr(ROWS):
            total[r] = quad_sum(total[r])
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.thread)
        if is_first:  # merged into nothing it is what it was
            self.wait_for_store()
            warpgroup.wait_group(0)
            self.keep_rows(maximum, total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = output[i * VECTOR + e]
                cute.autovec_copy(vector, self.A[None, thread, i, self.wg])
        else:
            warpgroup.wait_group(0)
            merged_maximum, merged_total = per_row(), per_row()
            self.load_rows(merged_maximum, merged_total, thread)
            a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
            self.keep_rows(merged_maximum, merged_total, thread)
            for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                if const_expr(self.in_workspace and i % 4 == 0):  # no registers for more loads in flight
                    self.meet()
                cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                for e in cutlass.range_constexpr(VECTOR):
                    r = row_of(e)
                    vector[e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
                cute.autovec_copy(vector, self.A[None, thread, i, self.wg])
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
    def load_rows(self, maximum: cute.Tensor, total: cute.Tensor, thread: Int32):
        pair = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            cute.autovec_copy(self.kept_row(thread, r), pair)
            maximum[r], total[r] = pair[0], pair[1]

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        state: tuple,
        tile: tuple,
        blocks: tuple,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
    ):
        """The last split merged, out and lse on their way."""
        output, _ = tensors
        maximum, total, _ = state
        thread = opaque(self.thread)
        my_row = tile.m * self.tile_rows + self.wg * WARPGROUP_ROWS + row_of_thread(thread)
        self.merge_last(output, maximum, total, thread, blocks)

        sink = sinks[tile.head] if const_expr(self.spec.sinks) else None
        line = lse.iterator + self.first_of_lse(lse, tile)
        empty, reciprocals = [], []
        for r in cutlass.range_constexpr(ROWS):
            is_empty, reciprocal, of_row = finish_row(maximum[r], total[r], self.score_scale, sink)
            empty.append(is_empty)
            reciprocals.append(reciprocal)
            if thread % QUAD == 0 and my_row + 8 * r < tile.len_q:
                line[my_row + 8 * r] = of_row
        rounded = cute.make_rmem_tensor(output.shape, self.dtype)
        for i in cutlass.range_constexpr(cute.size(output)):
            r = row_of(i)
            output[i] = finish_element(output[i], empty[r], reciprocals[r])
        rounded.store(output.load().to(self.dtype))

        self.wait_for_store()  # and all have read their part of A, or of q
        atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.tiled_mma(self.head_size_v, True))
        target = copy.get_slice(thread).partition_D(self.sO[None, None, self.wg])
        cute.copy(copy, copy.retile(rounded), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if thread < WARP_SIZE:
            tOsO, tOgO = partition(tma_o, self.sO, self.output_of(mO, tile), (WARPGROUP_ROWS, self.head_size_v))
            cute.copy(tma_o, tOsO[None, self.wg], tOgO[None, tile.m * self.warpgroups + self.wg, 0])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(self.in_workspace):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(self.in_workspace):
            self.release(self.q_empty)

    @cute.jit
    def merge_last(self, output: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, thread: Int32, blocks: tuple):
        """(M, L, A) of all splits into (maximum, total, output)."""
        merged_maximum, merged_total = per_row(), per_row()
        vector = cute.make_rmem_tensor((VECTOR,), Float32)
        crosses = (blocks.end - 1) // self.split_blocks > blocks.first // self.split_blocks
        if const_expr(self.in_workspace):
            if crosses:  # by way of A: with both in registers there would be too few
                self.end_split(output, maximum, total, False)
                self.load_rows(merged_maximum, merged_total, thread)
                for r in cutlass.range_constexpr(ROWS):
                    maximum[r], total[r] = merged_maximum[r], merged_total[r]
                for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                    cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                    for e in cutlass.range_constexpr(VECTOR):
                        output[i * VECTOR + e] = vector[e]
            else:
                for r in cutlass.range_constexpr(ROWS):
                    total[r] = quad_sum(total[r])
        else:
            for r in cutlass.range_constexpr(ROWS):
                total[r] = quad_sum(total[r])
            if crosses:
                self.load_rows(merged_maximum, merged_total, thread)
                a, b = merge_rows(merged_maximum, merged_total, maximum, total, self.score_scale)
                for i in cutlass.range_constexpr(cute.size(output) // VECTOR):
                    cute.autovec_copy(self.A[None, thread, i, self.wg], vector)
                    for e in cutlass.range_constexpr(VECTOR):
                        r = row_of(e)
                        output[i * VECTOR + e] = merge_element(vector[e], a[r], output[i * VECTOR + e], b[r])
                for r in cutlass.range_constexpr(ROWS):
                    maximum[r], total[r] = merged_maximum[r], merged_total[r]

    def output_of(self, mO: cute.Tensor, tile: Tile) -> cute.Tensor:
        """A sequence's rows of out; behind its end nothing is written."""
        if const_expr(self.spec.packed_q):
            of_sequence = mO[None, None, tile.head, tile.batch_q, tile.first_q + tile.len_q]
            return cute.domain_offset((RAGGED_ROWS - tile.len_q, 0), of_sequence)
        return mO[None, None, tile.head, tile.batch_q]

    def first_of_lse(self, lse: cute.Tensor, tile: Tile) -> Int64:
        """(heads, all rows) of packed sequences, else (batch, heads, rows)."""
        if const_expr(self.spec.packed_q):
            return Int64(tile.head) * lse.shape[1] + tile.first_q
        return Int64(tile.batch_q * self.heads + tile.head) * tile.len_q

    @cute.jit
    def fill_rest(self, out: cute.Tensor, lse: cute.Tensor, tidx: Int32):
        """Rows behind the last sequence's: 0, and lse of -inf. ``tidx``: among the threads that compute."""
        threads = const_expr(self.warpgroups * WARPGROUP)
        used = self.cu_seqlens_q[self.cu_seqlens_q.shape[0] - 1]
        channels = out.shape[3]
        for row in cutlass.range(used + self.bidx, out.shape[1], self.grid, unroll=1):
            for i in cutlass.range(tidx, self.heads * channels, threads, unroll=1):
                out[0, row, i // channels, i % channels] = self.dtype(0.0)
            for head in cutlass.range(tidx, self.heads, threads, unroll=1):
                lse[head, row] = -Float32.inf

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


def divided(x: Int32, divisor: Int32 | cute.FastDivmodDivisorV2) -> tuple:
    """(Quotient, rest)"""
    return (x // divisor, x % divisor) if isinstance(divisor, Int32) else divmod(x, divisor)


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


def ragged(t: cute.Tensor) -> cute.Tensor:
    """(length, head size, heads, batch) as (RAGGED_ROWS, head size, heads, batch, end).

    Of the last dimension's i-th matrix the last row is row i - 1: TMA cuts off what is behind it.
    """
    _, *shape = t.shape
    base = cute.domain_offset((-RAGGED_ROWS, None, None, None), t).iterator
    layout = cute.make_layout((RAGGED_ROWS, *shape, RAGGED_ROWS), stride=(*t.stride, t.stride[0]))
    return cute.make_tensor(base, layout)


def partition(atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor, tile: tuple[int, int]) -> tuple:
    """(Boxes in shared memory by slot, boxes of a matrix by their place) as a copy takes them."""
    boxes = cute.local_tile(matrix, tile, (None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(boxes, 0, 2)
    )


@compiled
def forward_sm90(arch: str, spec: ForwardSpec, config: ForwardConfig) -> Program:
    """out (B, Lq, H, Dv) and lse (B, H, Lq) of q (B, Lq, H, D), k and v (B, Lk, Hkv, D), whose strides are multiples of
    16 bytes; with sinks (H,). Packed sequences: B of 1, lse (H, Lq), cu_seqlens int32.

    ``workspace``: 64 Dv fp32 numbers for each warpgroup of each CTA, where A is not in shared memory. ``score_scale``,
    ``before_tanh``: see ``score_factors``. ``left``, ``right``: see ``window_bounds``. ``num_tiles``: of tiles of all
    heads; of packed sequences at most that many. ``paired``: see ``ForwardSm90.tile_at``.
    """
    in_workspace = merges_in_workspace(spec.head_size)
    return Program(ForwardSm90(cutlass_dtype(spec.dtype), spec, config), *entry_of(spec, in_workspace))


def entry_of(spec: ForwardSpec, in_workspace: bool) -> tuple:
    """What a kernel of the forward takes."""
    dtype, (d, dv) = cutlass_dtype(spec.dtype), spec.sizes
    if spec.padded:
        d, dv = (cute.sym_int(divisibility=8) for _ in range(2))
    batch_q, batch_k, len_q, len_k, heads, pairs = (cute.sym_int() for _ in range(6))
    if not spec.packed_q and not spec.packed_k:
        batch_k = batch_q

    def operand(batch, length, number, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, size), (*strides, 1), assumed_align=16)

    def integers(present):
        return cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if present else None

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
