"""Attention backward for SM90: persistent, warp-specialised, five products a step, sums in a fixed order.

A CTA takes a block of 128 keys of one head at a time and walks over the tiles of queries that see it, ascending. One
warp loads, one thread adds dq; two warpgroups of 64 keys each compute. Scores lie across: rows are keys.

    gmem k, v --TMA--> sK, sV (k_full, v_full / kv_empty)            once a block of keys
    gmem q, lse --TMA--> sQ, sLse (q_full / q_empty)        \
    gmem dout, delta --TMA--> sDout, sDelta (dout_full / dout_empty)  a step:
        k q^T and v dout^T --wgmma--> scores, dp --> p, ds in registers
        p dout --wgmma--> dv in registers; ds q --wgmma--> dk in registers
        ds --> sDs; ds^T k --wgmma--> a partial of dq --> sDq (dq_full / dq_empty) --bulk add--> gmem dq_sums
    dv, dk --> sV, sK --TMA--> gmem

The contract ``kv_grid``: kernel_row_backward.py has its arithmetic; here are the products and the order.

dq: a row gets one partial of each block of keys, in fp32, in a fixed order: causal from its last block down, full from
the first up. A tile's counter says how many have been added. The thread that adds waits until that is its own turn,
adds, waits until the sum is in memory, and counts. The first one stores instead, so nothing is cleared before.

dk, dv: a query head's sums are in registers from its first query to its last. Where heads share a head of keys
(``grouped``) each adds its sums to those of the heads before it, in ascending order, by a counter, too; the last one
rounds.

Blocks are handed out by an atomic ticket, in the order in which they add: a CTA that waits, waits for a ticket that was
taken before its own. Of the tickets that were taken and are not done the first one waits for nothing, so there is no
deadlock, however few CTAs there are, and whatever else runs.

Queries of a step, stages and CTAs change no bit.

Profile: ncu --clock-control none -k regex:BackwardSm90 python -m bench.bench_attention --filter bwd.*8192.*causal
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import WARPGROUP_ROWS, BackwardConfig, BackwardSpec, grid_for
from cute_kernels.attention.kernel_forward_sm90 import by_rows, opaque, partition, row_of_thread
from cute_kernels.attention.kernel_row import ROWS, column_of, first_column
from cute_kernels.attention.kernel_row_backward import add_head, hide_from_earlier, scaled, score_gradient, weight
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

WARP_SIZE, WARPGROUP = 32, 128
WARPGROUPS = 2  # that compute
COMPUTE = WARPGROUPS * WARPGROUP
REGISTERS = 24, 240  # of a thread that loads, and one that computes
COMPUTE_BARRIER = 1  # the named barrier of all threads that compute
VECTOR = 4  # fp32 numbers of sums that move together
HIDDEN = 1 << 30  # a column behind all


class BackwardSm90:
    """See the module; arguments as in the builder ``backward_sm90``."""

    def __init__(
        self, dtype: type[cutlass.Numeric], head_size: int, causal: bool, grouped: bool, config: BackwardConfig
    ):
        self.dtype = dtype
        self.head_size = head_size
        self.causal = causal
        self.grouped = grouped
        self.block = grid_for(head_size).block
        self.tile_rows, self.stages = config.tile_rows, config.stages
        self.dv_first, self.scores_ahead = config.dv_first, config.scores_ahead

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        row_lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_sums: cute.Tensor,
        dkv_sums: cute.Tensor,
        counters: cute.Tensor,
        score_scale: Float32,
        scale: Float32,
        heads_together: Int32,
        num_ctas: Int32,
        stream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sK_layout, sQ_layout, *_ = self.layouts()
        rows, keys = (self.tile_rows, self.head_size), (self.block, self.head_size)
        of_tile = cute.slice_(sQ_layout, (None, None, 0))
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_rows(q), of_tile, rows)
        tma_dout, mDout = cpasync.make_tiled_tma_atom(load, by_rows(dout), of_tile, rows)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_rows(k), sK_layout, keys)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_rows(v), sK_layout, keys)
        tma_dk, mDk = cpasync.make_tiled_tma_atom(store, by_rows(dk), sK_layout, keys)
        tma_dv, mDv = cpasync.make_tiled_tma_atom(store, by_rows(dv), sK_layout, keys)
        self.kernel(
            *self.tiled_mmas(), (tma_q, tma_k, tma_v, tma_dout, tma_dk, tma_dv), (mQ, mK, mV, mDout, mDk, mDv),
            row_lse, delta, dq_sums, dkv_sums, counters, score_scale, scale, heads_together,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[COMPUTE + WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def tiled_mmas(self) -> tuple:
        """Of scores and dp, keys by queries; of dk and dv, whose first operand is in registers; of dq's partial."""
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        across_keys = (WARPGROUPS, 1, 1)
        tiles = self.tile_rows // WARPGROUP_ROWS  # of dq's rows; a warpgroup has one, or half of the columns
        of_dq = (tiles, WARPGROUPS // tiles, 1), (WARPGROUP_ROWS, tiles * self.head_size // WARPGROUPS)

        def made(first, second, layout, tiler, place=source.SMEM):
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, first, second, Float32, layout, tiler_mn=tiler, a_source=place
            )

        return (
            made(along, along, across_keys, (WARPGROUP_ROWS, self.tile_rows)),
            made(along, across, across_keys, (WARPGROUP_ROWS, self.head_size), source.RMEM),
            made(across, across, *of_dq),
        )

    def layouts(self) -> tuple:
        """Swizzled shared memory: a block of keys, and rings of tiles of queries, along the head size and across it; of
        ds, along the queries and across them. Along and across are the same bytes.
        """
        kinds = warpgroup.SmemLayoutAtomKind
        along, across = (warpgroup.make_smem_layout_atom(k, self.dtype) for k in (kinds.K_SW128, kinds.MN_SW128))
        d, rows, block = self.head_size, self.tile_rows, self.block
        return (
            cute.tile_to_shape(along, (block, d), order=(0, 1)),
            cute.tile_to_shape(along, (rows, d, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(along, (block, rows, 2), order=(0, 1, 2)),
            cute.tile_to_shape(across, (d, block), order=(1, 0)),
            cute.tile_to_shape(across, (d, rows, self.stages), order=(1, 0, 2)),
            cute.tile_to_shape(across, (rows, block, 2), order=(1, 0, 2)),
        )

    @cute.kernel
    def kernel(
        self,
        score_mma: cute.TiledMma,
        key_mma: cute.TiledMma,
        dq_mma: cute.TiledMma,
        atoms: tuple,
        matrices: tuple,
        row_lse: cute.Tensor,
        delta: cute.Tensor,
        dq_sums: cute.Tensor,
        dkv_sums: cute.Tensor,
        counters: cute.Tensor,
        score_scale: Float32,
        scale: Float32,
        heads_together: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        self.allocate(SmemAllocator())
        if tidx == 0:
            warps = const_expr(COMPUTE // WARP_SIZE)
            cute.arch.mbarrier_init(self.ticket_full, 1)
            cute.arch.mbarrier_init(self.ticket_empty, warps + 1)
            cute.arch.mbarrier_init(self.k_full, 1)
            cute.arch.mbarrier_init(self.v_full, 1)
            cute.arch.mbarrier_init(self.kv_empty, 1)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.q_full + stage, 1)
                cute.arch.mbarrier_init(self.q_empty + stage, warps)
                cute.arch.mbarrier_init(self.dout_full + stage, 1)
                cute.arch.mbarrier_init(self.dout_empty + stage, warps)
            for wg in cutlass.range_constexpr(WARPGROUPS):
                cute.arch.mbarrier_init(self.dq_full + wg, warps // WARPGROUPS)
                cute.arch.mbarrier_init(self.dq_empty + wg, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.schedule(matrices[0], matrices[1], counters, heads_together)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.load(atoms, matrices, row_lse, delta)
            if warp == 1:
                if cute.arch.lane_idx() == 0:
                    self.add_dq(dq_sums)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.compute(
                score_mma, key_mma, dq_mma, atoms, matrices, dkv_sums, score_scale, scale, tidx - WARPGROUP
            )  # fmt: skip

    def allocate(self, smem):
        """Barriers, the ticket, k and v, the rings, ds, and dq's partial."""

        def barriers(number):
            return smem.allocate_array(Int64, number)

        self.ticket_full, self.ticket_empty, self.k_full, self.v_full, self.kv_empty = (barriers(1) for _ in range(5))
        self.q_full, self.q_empty, self.dout_full, self.dout_empty = (barriers(self.stages) for _ in range(4))
        self.dq_full, self.dq_empty = (barriers(WARPGROUPS) for _ in range(2))
        self.sTicket = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=8)
        # Values of queries: the pair of a lane in each 8 columns
        of_rows = cute.make_layout((2, 4, self.tile_rows // 8, self.stages), stride=(1, 2, 8, self.tile_rows))
        self.sLse, self.sDelta = (smem.allocate_tensor(Float32, of_rows, byte_alignment=128) for _ in range(2))

        along, across = self.layouts()[:3], self.layouts()[3:]

        def tensors(i):
            tensor = smem.allocate_tensor(
                self.dtype, along[i].outer, byte_alignment=1024, swizzle=along[i].inner
            )  # fmt: skip
            return tensor, cute.make_tensor(tensor.iterator, across[i].outer)

        (self.sK, self.sK_across), (self.sV, _) = tensors(0), tensors(0)
        (self.sQ, self.sQ_across), (self.sDout, self.sDout_across) = tensors(1), tensors(1)
        self.sDs, self.sDs_across = tensors(2)
        numbers = self.tile_rows * self.head_size // WARPGROUPS
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, numbers // (VECTOR * WARPGROUP), WARPGROUPS),
            stride=(1, VECTOR, VECTOR * WARPGROUP, numbers),
        )
        self.sDq = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        self.dq_numbers = numbers  # of a warpgroup

    # ---- which block, which tiles

    def schedule(self, mQ: cute.Tensor, mK: cute.Tensor, counters: cute.Tensor, heads_together: Int32):
        """Lengths and heads; counters: the ticket, those of dq's tiles, those of dk's blocks."""
        self.len_q, self.heads, self.len_k = mQ.shape[0], mQ.shape[2], mK.shape[0]
        self.pairs = mK.shape[2]
        self.group = self.heads // self.pairs
        self.m_tiles = cute.ceil_div(self.len_q, self.tile_rows)
        self.n_blocks = cute.ceil_div(self.len_k, self.block)
        self.all_heads = self.heads * mQ.shape[3]
        self.heads_together = heads_together
        self.tickets = self.n_blocks * self.all_heads
        self.counters = counters.iterator
        self.behind = self.len_k - self.len_q  # query i has the place i + behind

    @cute.jit
    def block_at(self, ticket: Int32):
        """(Block of keys, head, batch). Heads that fit into L2 come together; of these, blocks in the order of adding;
        of a block, heads ascending.
        """
        of_section = self.n_blocks * self.heads_together
        section = ticket // of_section
        first = section * self.heads_together
        heads = cutlass.min(self.heads_together, self.all_heads - first)
        index = ticket - section * of_section
        n, head = index // heads, first + index % heads
        if const_expr(self.causal):
            n = self.n_blocks - 1 - n
        return n, head % self.heads, head // self.heads

    @cute.jit
    def tiles_of(self, n: Int32):
        """(First tile of queries that sees a block, the first one that sees all of it). The last tile sees all."""
        first, whole = Int32(0), Int32(0)
        if const_expr(self.causal):
            first = cutlass.max(n * self.block - self.behind, 0) // self.tile_rows
            whole = cute.ceil_div(cutlass.max((n + 1) * self.block - 1 - self.behind, 0), self.tile_rows)
        if (n + 1) * self.block > self.len_k:
            whole = self.m_tiles
        return first, whole

    @cute.jit
    def turn_of(self, n: Int32, m: Int32):
        """How many blocks of keys are added to a tile of dq before this one."""
        turn = n
        if const_expr(self.causal):
            last_row = cutlass.min((m + 1) * self.tile_rows, self.len_q)
            turn = cute.ceil_div(cutlass.min(last_row + self.behind, self.len_k), self.block) - 1 - n
        return turn

    @cute.jit
    def take_ticket(self, count: Int32):
        """The warp that loads: a ticket, for all warps of the CTA; ``count``: how many it took before."""
        ticket, shared = Int32(0), self.sTicket
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.counters, Int32(1))
        ticket = cute.arch.shuffle_sync(ticket, 0)
        cute.arch.mbarrier_wait(self.ticket_empty, count % 2 ^ 1)
        if cute.arch.lane_idx() == 0:
            shared[0] = ticket
            cute.arch.mbarrier_arrive(self.ticket_full)
        return ticket

    @cute.jit
    def read_ticket(self, count: Int32, one_thread: cutlass.Constexpr[bool]):
        """All other warps, or one thread of one: the ticket that was taken."""
        cute.arch.mbarrier_wait(self.ticket_full, count % 2)
        ticket = self.sTicket[0]
        if const_expr(one_thread):
            cute.arch.mbarrier_arrive(self.ticket_empty)
        else:
            self.release(self.ticket_empty)
        return ticket

    # ---- the warp that loads

    @cute.jit
    def load(self, atoms: tuple, matrices: tuple, row_lse: cute.Tensor, delta: cute.Tensor):
        """k and v of each block, q and dout of its tiles. Rows that do not exist are 0."""
        rows, keys = (self.tile_rows, self.head_size), (self.block, self.head_size)
        tma_q, tma_k, tma_v, tma_dout, _, _ = atoms
        mQ, mK, mV, mDout, _, _ = matrices
        tQsQ, tQgQ = partition(tma_q, self.sQ, mQ, rows)
        tOsO, tOgO = partition(tma_dout, self.sDout, mDout, rows)
        tKsK, tKgK = partition(tma_k, self.sK, mK, keys)
        tVsV, tVgV = partition(tma_v, self.sV, mV, keys)
        padded = delta.shape[2]
        count, turn = Int32(0), Int32(0)
        ticket = self.take_ticket(turn)
        while ticket < self.tickets:
            n, head, batch = self.block_at(ticket)
            first, _ = self.tiles_of(n)
            pair = head // self.group
            gQ, gDout = tQgQ[None, None, 0, head, batch], tOgO[None, None, 0, head, batch]
            line = Int64(batch * self.heads + head) * padded
            of_q = tma_q, gQ, tQsQ, row_lse.iterator + line, self.sLse, self.q_full, self.q_empty
            of_dout = tma_dout, gDout, tOsO, delta.iterator + line, self.sDelta, self.dout_full, self.dout_empty

            self.load_tile(*of_q, first, count)
            cute.arch.mbarrier_wait(self.kv_empty, turn % 2 ^ 1)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.k_full, self.block * self.head_size * 2)
            cute.copy(tma_k, tKgK[None, n, 0, pair, batch], tKsK, tma_bar_ptr=self.k_full)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.v_full, self.block * self.head_size * 2)
            cute.copy(tma_v, tVgV[None, n, 0, pair, batch], tVsV, tma_bar_ptr=self.v_full)
            self.load_tile(*of_dout, first, count)
            for m in cutlass.range(first + 1, self.m_tiles, unroll=1):
                self.load_tile(*of_q, m, count + m - first)
                self.load_tile(*of_dout, m, count + m - first)
            count += self.m_tiles - first
            turn += 1
            ticket = self.take_ticket(turn)

    @cute.jit
    def load_tile(
        self, atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Tensor, values: cute.Pointer, sValues: cute.Tensor,
        full, empty, m: Int32, count: Int32,
    ):  # fmt: skip
        """Rows of queries, and a value of each, into the slot of the ``count``-th tile, once that is empty."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.tile_rows * (2 * self.head_size + 4))
            of_rows = cute.make_layout(self.tile_rows)
            cute.copy(
                cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32),
                cute.make_tensor((values + m * self.tile_rows).align(16), of_rows),
                cute.make_tensor(sValues[None, 0, 0, slot].iterator.align(16), of_rows),
                mbar_ptr=full + slot,
            )
        cute.copy(atom, source[None, m], ring[None, slot], tma_bar_ptr=full + slot)

    def place_in_ring(self, count: Int32) -> tuple:
        """(slot, phase)"""
        return count % self.stages, count // self.stages % 2

    # ---- the thread that adds dq

    @cute.jit
    def add_dq(self, dq_sums: cute.Tensor):
        """Partials of dq into their sums, each in its turn."""
        num_bytes = const_expr(4 * self.dq_numbers)
        count, turn = Int32(0), Int32(0)
        ticket = self.read_ticket(turn, True)
        while ticket < self.tickets:
            n, head, batch = self.block_at(ticket)
            first, _ = self.tiles_of(n)
            line = (batch * self.heads + head) * self.m_tiles
            for m in cutlass.range(first, self.m_tiles, unroll=1):
                counter = self.counters + (1 + line + m)
                before = self.turn_of(n, m)
                wait_for(counter, before)
                target = dq_sums.iterator + Int64(line + m) * (WARPGROUPS * self.dq_numbers)
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    cute.arch.mbarrier_wait(self.dq_full + wg, count % 2)
                    source = self.sDq[None, 0, 0, wg].iterator
                    if before == 0:
                        bulk_store(target + wg * self.dq_numbers, source, num_bytes)
                    else:
                        bulk_add(target + wg * self.dq_numbers, source, num_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    cute.arch.mbarrier_arrive(self.dq_empty + wg)
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async")
                count_one(counter)
                count += 1
            turn += 1
            ticket = self.read_ticket(turn, True)

    # ---- the warpgroups that compute

    @cute.jit
    def compute(
        self,
        score_mma: cute.TiledMma,
        key_mma: cute.TiledMma,
        dq_mma: cute.TiledMma,
        atoms: tuple,
        matrices: tuple,
        dkv_sums: cute.Tensor,
        score_scale: Float32,
        scale: Float32,
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.score_scale = score_scale
        self.tidx = tidx
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        self.thread = tidx % WARPGROUP
        self.lane = tidx % WARP_SIZE
        of_scores, of_keys, of_dq = (mma.get_slice(self.wg * WARPGROUP) for mma in (score_mma, key_mma, dq_mma))
        self.tSrK, self.tSrV = (score_mma.make_fragment_A(of_scores.partition_A(t)) for t in (self.sK, self.sV))
        self.tSrQ, self.tSrDout = (score_mma.make_fragment_B(of_scores.partition_B(t)) for t in (self.sQ, self.sDout))
        self.tKrQ, self.tKrDout = (
            key_mma.make_fragment_B(of_keys.partition_B(t)) for t in (self.sQ_across, self.sDout_across)
        )
        self.tQrDs = dq_mma.make_fragment_A(of_dq.partition_A(self.sDs_across))
        self.tQrK = dq_mma.make_fragment_B(of_dq.partition_B(self.sK_across))
        # Atoms whose products start from zero, or are added
        self.score_first, self.score_next, self.key_next, self.dq_first, self.dq_next = (
            cute.make_mma_atom(m.op) for m in (score_mma, score_mma, key_mma, dq_mma, dq_mma)
        )
        for atom in (self.score_first, self.dq_first):
            atom.set(warpgroup.Field.ACCUMULATE, False)
        for atom in (self.score_next, self.key_next, self.dq_next):
            atom.set(warpgroup.Field.ACCUMULATE, True)
        self.scores_shape = score_mma.partition_shape_C((self.block, self.tile_rows))
        self.dq_shape = dq_mma.partition_shape_C((self.tile_rows, self.head_size))
        shape = key_mma.partition_shape_C((self.block, self.head_size))
        dk, dv = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        shape = key_mma.partition_shape_A((self.block, self.tile_rows))
        weights, gradients = (key_mma.make_fragment_A(shape) for _ in range(2))
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        tensors = dk, dv, weights, gradients, scores

        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        self.store_ds, self.store_dkv = (cute.make_tiled_copy_C(store, mma) for mma in (score_mma, key_mma))
        count, turn = Int32(0), Int32(0)
        ticket = self.read_ticket(turn, False)
        while ticket < self.tickets:
            n, head, batch = self.block_at(ticket)
            first, whole = self.tiles_of(n)
            dk.fill(0.0)
            dv.fill(0.0)
            cute.arch.mbarrier_wait(self.k_full, turn % 2)
            if const_expr(self.scores_ahead):
                self.score(scores, count)
                warpgroup.wait_group(0)
            # There is one tile at least; did the compiler not know, ptxas would have every product waited for
            for m in cutlass.range(first, cutlass.max(self.m_tiles, first + 1), unroll=1):
                self.step(tensors, n, m, m < whole, count + m - first, turn)
            warpgroup.wait_group(0)
            count += self.m_tiles - first
            self.finish(tensors, atoms, matrices, dkv_sums, scale, n, head, batch)
            turn += 1
            ticket = self.read_ticket(turn, False)
        if self.tidx < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def step(self, tensors: tuple, n: Int32, m: Int32, masked, count: Int32, turn: Int32):
        """A tile of queries: its part of dk and dv, and its partial of dq."""
        dk, dv, weights, gradients, scores = tensors
        slot, phase = self.place_in_ring(count)
        dp = cute.make_rmem_tensor(self.scores_shape, Float32)
        if const_expr(not self.scores_ahead):
            self.score(scores, count)
        cute.arch.mbarrier_wait(self.v_full, turn % 2)
        cute.arch.mbarrier_wait(self.dout_full + slot, phase)
        warpgroup.fence()
        self.multiply_rows(dp, self.tSrV, self.tSrDout, slot)

        if const_expr(not self.scores_ahead):
            warpgroup.wait_group(1)
        if masked:
            self.hide_queries(scores, n, m)
        self.find_weights(scores, slot)
        if const_expr(self.dv_first):
            self.round(scores, weights)
            warpgroup.fence()
            self.add_keys(dv, weights, self.tKrDout, slot)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.find_gradients(scores, dp, slot)
        self.round(dp, gradients)
        self.put_ds(gradients, count % 2)
        if const_expr(not self.dv_first):
            self.round(scores, weights)
            warpgroup.fence()
            self.add_keys(dv, weights, self.tKrDout, slot)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        partial = cute.make_rmem_tensor(self.dq_shape, Float32)
        warpgroup.fence()
        self.multiply_ds(partial, count % 2)
        self.add_keys(dk, gradients, self.tKrQ, slot)
        warpgroup.wait_group(2)
        self.release(self.dout_empty + slot)

        if const_expr(self.scores_ahead):
            # Of the last tile's successor, which is none, whatever the slot holds: nothing is made of these scores
            following, phase = self.place_in_ring(count + 1)
            if m + 1 < self.m_tiles:
                cute.arch.mbarrier_wait(self.q_full + following, phase)
            ahead = cute.make_rmem_tensor(self.scores_shape, Float32)
            warpgroup.fence()
            self.multiply_rows(ahead, self.tSrK, self.tSrQ, following)
            warpgroup.wait_group(2)
        else:
            warpgroup.wait_group(1)
        self.put_dq(partial, count)
        warpgroup.wait_group(0)
        self.release(self.q_empty + slot)
        if const_expr(self.scores_ahead):
            scores.store(ahead.load())

    @cute.jit
    def score(self, scores: cute.Tensor, count: Int32):
        """Issue the scores of a tile."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.q_full + slot, phase)
        warpgroup.fence()
        self.multiply_rows(scores, self.tSrK, self.tSrQ, slot)

    def multiply_rows(self, target: cute.Tensor, of_keys: cute.Tensor, of_queries: cute.Tensor, slot: Int32):
        """Issue keys times queries, over the head size: ``serial_k16`` from zero."""
        for k16 in range(self.head_size // 16):
            atom = self.score_next if k16 else self.score_first
            cute.gemm(atom, target, of_keys[None, None, k16], of_queries[None, None, k16, slot], target)
        warpgroup.commit_group()

    def add_keys(self, target: cute.Tensor, factors: cute.Tensor, of_queries: cute.Tensor, slot: Int32):
        """Issue what a tile of queries adds to dk or dv: ``serial_k16`` onto them."""
        for k16 in range(self.tile_rows // 16):
            cute.gemm(
                self.key_next, target, factors[None, None, k16], of_queries[None, None, k16, slot], target
            )  # fmt: skip
        warpgroup.commit_group()

    def multiply_ds(self, target: cute.Tensor, slot: Int32):
        """Issue a block's partial of dq: ``serial_k16`` from zero."""
        for k16 in range(self.block // 16):
            atom = self.dq_next if k16 else self.dq_first
            cute.gemm(atom, target, self.tQrDs[None, None, k16, slot], self.tQrK[None, None, k16], target)
        warpgroup.commit_group()

    def hide_queries(self, scores: cute.Tensor, n: Int32, m: Int32):
        """Scores of queries that do not see a key, or of keys that do not exist."""
        key = n * self.block + self.wg * WARPGROUP_ROWS + row_of_thread(self.thread)
        first = []
        for r in range(ROWS):
            column = Int32(-HIDDEN)
            if self.causal:
                column = key + 8 * r - self.behind - m * self.tile_rows - first_column(self.lane)
            first.append(Int32(select_(key + 8 * r < self.len_k, column, Int32(HIDDEN))))
        hide_from_earlier(scores, tuple(first))

    def values_of(self, values: cute.Tensor, slot: Int32, columns: int) -> cute.Tensor:
        """Those of the lane's pair of queries in 8 columns."""
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(values[None, self.lane % 4, columns, slot], pair)
        return pair

    def find_weights(self, scores: cute.Tensor, slot: Int32):
        """Scores become p."""
        for columns in range(self.tile_rows // 8):
            row_lse = self.values_of(self.sLse, slot, columns)
            for i in range(4 * columns, 4 * columns + 4):
                scores[i] = weight(scores[i], self.score_scale, row_lse[column_of(i) % 2])

    def find_gradients(self, weights: cute.Tensor, dp: cute.Tensor, slot: Int32):
        """dp becomes ds."""
        for columns in range(self.tile_rows // 8):
            delta = self.values_of(self.sDelta, slot, columns)
            for i in range(4 * columns, 4 * columns + 4):
                dp[i] = score_gradient(weights[i], dp[i], delta[column_of(i) % 2])

    def round(self, values: cute.Tensor, factors: cute.Tensor):
        """As the first operand of a product; the accumulators' elements are in its order."""
        flat = cute.make_layout(cute.size(values))
        cute.make_tensor(factors.iterator, flat).store(
            cute.make_tensor(values.iterator, flat).load().to(self.dtype)
        )  # fmt: skip

    def put_ds(self, gradients: cute.Tensor, slot: Int32):
        """ds into shared memory, where the product before the last has been read by both warpgroups."""
        accumulators = cute.make_tensor(gradients.iterator, cute.make_layout(self.scores_shape))
        target = self.store_ds.get_slice(self.tidx).partition_D(self.sDs)
        cute.copy(self.store_ds, self.store_ds.retile(accumulators), target[None, None, None, slot])

    @cute.jit
    def put_dq(self, partial: cute.Tensor, count: Int32):
        """A partial of dq into shared memory, once the one before has been read."""
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), self.thread
        cute.arch.mbarrier_wait(self.dq_empty + self.wg, count % 2 ^ 1)
        for i in cutlass.range_constexpr(cute.size(partial) // VECTOR):
            for e in cutlass.range_constexpr(VECTOR):
                vector[e] = partial[i * VECTOR + e]
            cute.autovec_copy(vector, self.sDq[None, thread, i, self.wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.release(self.dq_full + self.wg)

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        atoms: tuple,
        matrices: tuple,
        dkv_sums: cute.Tensor,
        scale: Float32,
        n: Int32,
        head: Int32,
        batch: Int32,
    ):
        """dk and dv of a block: added to those of the heads before, or rounded and on their way."""
        dk, dv, *_ = tensors
        *_, tma_dk, tma_dv = atoms
        *_, mDk, mDv = matrices
        pair, member = head // self.group, head % self.group
        is_last = True
        if const_expr(self.grouped):
            line = (batch * self.pairs + pair) * self.n_blocks + n
            self.add_heads(dk, dv, dkv_sums, line, member)
            is_last = member == self.group - 1
        self.meet()  # both have read k and v
        if is_last:
            for i in cutlass.range_constexpr(cute.size(dk)):
                dk[i] = scaled(dk[i], scale)
            copy = self.store_dkv
            for total, shared in ((dv, self.sV), (dk, self.sK)):
                rounded = cute.make_rmem_tensor(total.shape, self.dtype)
                rounded.store(total.load().to(self.dtype))
                cute.copy(copy, copy.retile(rounded), copy.get_slice(opaque(self.tidx)).partition_D(shared))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
            if self.tidx < WARP_SIZE:
                keys = const_expr((self.block, self.head_size))
                for atom, shared, matrix in ((tma_dv, self.sV, mDv), (tma_dk, self.sK, mDk)):
                    source, target = partition(atom, shared, matrix, keys)
                    cute.copy(atom, source, target[None, n, 0, pair, batch])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
        if self.tidx == 0:
            cute.arch.mbarrier_arrive(self.kv_empty)

    @cute.jit
    def add_heads(self, dk: cute.Tensor, dv: cute.Tensor, dkv_sums: cute.Tensor, line: Int32, member: Int32):
        """The sums of the group's heads before, plus this one's: in registers for the last, else for the next one."""
        counter = self.counters + (1 + self.m_tiles * self.all_heads + line)
        numbers = const_expr(WARPGROUP_ROWS * self.head_size)
        first = (Int64(line) * (2 * WARPGROUPS) + self.wg) * numbers + opaque(self.thread) * VECTOR
        sums = dkv_sums.iterator + cute.assume(first, divby=VECTOR)
        totals = dk, dv
        if member > 0:
            if self.tidx == 0:
                wait_for(counter, member)
            self.meet()
            for j in cutlass.range_constexpr(2):
                total = totals[j]
                for i in cutlass.range_constexpr(cute.size(dk) // VECTOR):
                    before = load_sums(sums + (j * WARPGROUPS * numbers + i * VECTOR * WARPGROUP))
                    for e in cutlass.range_constexpr(VECTOR):
                        total[i * VECTOR + e] = add_head(before[e], total[i * VECTOR + e])
        if member < self.group - 1:
            vector = cute.make_rmem_tensor((VECTOR,), Float32)
            for j in cutlass.range_constexpr(2):
                total = totals[j]
                for i in cutlass.range_constexpr(cute.size(dk) // VECTOR):
                    for e in cutlass.range_constexpr(VECTOR):
                        vector[e] = total[i * VECTOR + e]
                    target = sums + (j * WARPGROUPS * numbers + i * VECTOR * WARPGROUP)
                    cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(VECTOR)))
            cute.arch.fence_acq_rel_gpu()
            self.meet()
            if self.tidx == 0:
                count_one(counter)

    # ---- who waits for whom

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has done its part."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    def meet(self):
        """A barrier of all threads that compute."""
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE)


@cute.jit
def wait_for(counter: cute.Pointer, value: Int32):
    """Until a counter has a value. What was written before it was counted may then be read, and added to."""
    found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while found != value:
        found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async")


def count_one(counter: cute.Pointer):
    """What this thread knows to be written is so for who reads the counter."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


def bulk_store(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start copying contiguous bytes from shared to global memory."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), Int32(source.toint()), Int32(num_bytes)],
    )


def bulk_add(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start adding contiguous fp32 numbers of shared memory to those of global memory; subnormal ones count as 0."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), Int32(source.toint()), Int32(num_bytes)],
    )


def load_sums(source: cute.Pointer) -> tuple:
    """Four numbers that another CTA has written, from L2."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[source.toint()],
    )


@compiled
def backward_sm90(arch: str, spec: BackwardSpec, config: BackwardConfig) -> Program:
    """dk and dv (B, Lk, Hkv, D), and the sums of dq, of q and dout (B, Lq, H, D), k and v (B, Lk, Hkv, D), whose
    strides are multiples of 16 bytes, and row_lse and delta (B, H, Lq padded).

    ``dq_sums``: fp32, tile_rows * D numbers of each tile of queries, of each head, as the accumulators have them.
    ``dkv_sums``: fp32, 256 * D numbers of each block of keys, of each of their heads; used where it is ``grouped``.
    ``counters``: int32 zeros: the ticket, one of each tile of dq_sums, one of each block of dkv_sums.
    ``score_scale``: what scores are multiplied with, times log2(e). ``scale``: without that. ``heads_together``: heads
    whose rows are walked over together, a multiple of a group.
    """
    dtype, d = cutlass_dtype(spec.dtype), spec.head_size
    batch, len_q, len_k, heads, pairs, padded = (cute.sym_int() for _ in range(6))

    def operand(length, number):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, d), (*strides, 1), assumed_align=16)

    def compact(kind, *shape):
        order = tuple(range(len(shape)))[::-1]
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=16)

    return Program(
        BackwardSm90(dtype, d, spec.causal, spec.grouped, config),
        operand(len_q, heads),
        operand(len_k, pairs),
        operand(len_k, pairs),
        operand(len_q, heads),
        compact(Float32, batch, heads, padded),
        compact(Float32, batch, heads, padded),
        operand(len_k, pairs),
        operand(len_k, pairs),
        compact(Float32, cute.sym_int64()),
        compact(Float32, cute.sym_int64()),
        compact(Int32, cute.sym_int()),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
