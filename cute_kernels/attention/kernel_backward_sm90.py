"""Attention backward for SM90: persistent, warp-specialised, five products a step, sums in a fixed order.

A CTA takes a block of 128 keys of one head at a time and walks over the tiles of queries that see it, ascending. One
warp loads, two threads add dq; two warpgroups of 64 keys each compute. Scores lie across: rows are keys.

    gmem k, v --TMA--> sK, sV (k_full, v_full / kv_empty)            once a block of keys
    gmem q, lse --TMA--> sQ, sLse (q_full / q_empty)        \
    gmem dout, delta --TMA--> sDout, sDelta (dout_full / dout_empty)  a step:
        k q^T and v dout^T --wgmma--> scores, dp --> p, ds in registers
        p dout --wgmma--> dv in registers; ds q --wgmma--> dk in registers
        ds --> sDs; ds^T k --wgmma--> a partial of dq --> sDq (dq_full / dq_empty) --bulk add--> gmem dq_sums
    dv, dk --> sV, sK --TMA--> gmem; of groups in fp32 --bulk add--> gmem dkv_sums

The contract ``kv_grid``: kernel_row_backward.py has its arithmetic; here are the products and the order.

dq: a row gets one partial of each block of keys, in fp32, in a fixed order: with a causal mask or a window from its
last block down, else from the first up. A tile's counter says how many have been added. A thread that adds waits
until that is its own turn, adds, waits until the sum is in memory, and counts. The first one stores instead, so nothing
is cleared before.

dk, dv: a query head's sums are in registers from its first query to its last. Where heads share a head of keys
(``grouped``) each adds its sums to those of the heads before it in memory, in ascending order, by a counter, too.
kernel_finish_gradients.py rounds what is summed in memory.

Blocks are handed out by an atomic ticket, in the order in which they add: a CTA that waits, waits for a ticket that was
taken before its own. Of the tickets that were taken and are not done the first one waits for nothing, so there is no
deadlock, however few CTAs there are, and whatever else runs.

Queries of a step, stages and CTAs change no bit.

Profile: ncu --clock-control none -k regex:BackwardSm90 python -m bench.bench_attention_backward --filter 8192.*causal
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import PADDED_ROWS, WARPGROUP_ROWS, BackwardConfig, BackwardSpec, grid_for
from cute_kernels.attention.kernel_forward_sm90 import by_rows, opaque, partition, ragged, row_of_thread
from cute_kernels.attention.kernel_row import ROWS, cap, column_of, first_column
from cute_kernels.attention.kernel_row_backward import (
    hide_queries,
    scaled,
    score_gradient,
    through_tanh,
    weight,
)
from cute_kernels.attention.kernel_sequences import Sequences, find_tile, rows_of
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

WARP_SIZE, WARPGROUP = 32, 128
WARPGROUPS = 2  # that compute
COMPUTE = WARPGROUPS * WARPGROUP
REGISTERS = 24, 240  # of a thread that loads, and one that computes
ADDERS = 2  # threads that add dq in turn, each from a buffer of its own
COMPUTE_BARRIER = 1  # the named barrier of all threads that compute
VECTOR = 4  # fp32 numbers of sums that move together
HIDDEN = 1 << 30  # a column behind all


class Block(NamedTuple):
    """A block of keys of a head, and its sequence.

    Attributes:
        n: which block of the sequence.
        head: of q.
        sequence: which one.
        len_q, len_k: its rows.
        first, end: tiles of queries that see the block.
        exists: whether the sequence has it.
    """

    n: Int32
    head: Int32
    sequence: Int32
    len_q: Int32
    len_k: Int32
    first: Int32
    end: Int32
    exists: Boolean


class BackwardSm90:
    """See the module; arguments as in the builder ``backward_sm90``."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: BackwardSpec, config: BackwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.head_size = spec.head_size
        self.descends = spec.causal or spec.window
        self.ragged_q, self.ragged_k = spec.packed_q, spec.packed_k or spec.used_k
        self.block = grid_for(self.head_size).block
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
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        score_scale: Float32,
        before_tanh: Float32,
        scale: Float32,
        left: Int32,
        right: Int32,
        num_tiles: Int32,
        num_blocks: Int32,
        heads_together: Int32,
        num_ctas: Int32,
        stream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sK_layout, sQ_layout, *_ = self.layouts()
        rows, keys = (self.tile_rows, self.head_size), (self.block, self.head_size)
        of_tile = cute.slice_(sQ_layout, (None, None, 0))
        of_q, of_dout = (ragged(by_rows(t)) if self.ragged_q else by_rows(t) for t in (q, dout))
        of_k, of_v = (ragged(by_rows(t)) if self.ragged_k else by_rows(t) for t in (k, v))
        of_dk, of_dv = (ragged(by_rows(t)) if self.ragged_k else by_rows(t) for t in (dk, dv))
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, of_q, of_tile, rows)
        tma_dout, mDout = cpasync.make_tiled_tma_atom(load, of_dout, of_tile, rows)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, of_k, sK_layout, keys)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, of_v, sK_layout, keys)
        tma_dk, mDk = cpasync.make_tiled_tma_atom(store, of_dk, sK_layout, keys)
        tma_dv, mDv = cpasync.make_tiled_tma_atom(store, of_dv, sK_layout, keys)
        sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[1], k.shape[2]
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
        options = score_scale, before_tanh, scale, left, right
        self.kernel(
            *self.tiled_mmas(), (tma_q, tma_k, tma_v, tma_dout, tma_dk, tma_dv), (mQ, mK, mV, mDout, mDk, mDv),
            row_lse, delta, dq_sums, dkv_sums, counters, sizes, lengths, options, num_tiles, num_blocks, heads_together,
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
        sizes: tuple,
        lengths: tuple,
        options: tuple,
        num_tiles: Int32,
        num_blocks: Int32,
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
            cute.arch.mbarrier_init(self.ticket_empty, warps + ADDERS)
            cute.arch.mbarrier_init(self.k_full, 1)
            cute.arch.mbarrier_init(self.v_full, 1)
            cute.arch.mbarrier_init(self.kv_empty, 1)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.q_full + stage, 1)
                cute.arch.mbarrier_init(self.q_empty + stage, warps)
                cute.arch.mbarrier_init(self.dout_full + stage, 1)
                cute.arch.mbarrier_init(self.dout_empty + stage, warps)
            for i in cutlass.range_constexpr(WARPGROUPS * ADDERS):
                cute.arch.mbarrier_init(self.dq_full + i, warps // WARPGROUPS)
                cute.arch.mbarrier_init(self.dq_empty + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.score_scale, self.before_tanh, self.scale, self.left, self.right = options
        self.schedule(sizes, lengths, counters, num_tiles, num_blocks, heads_together)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.load(atoms, matrices, row_lse, delta)
            if (warp > 0) & (warp <= ADDERS):
                if cute.arch.lane_idx() == 0:
                    self.add_dq(dq_sums, warp - 1)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.compute(score_mma, key_mma, dq_mma, atoms, matrices, dkv_sums, tidx - WARPGROUP)

    def allocate(self, smem):
        """Barriers, the ticket, k and v, the rings, ds, and dq's partial."""

        def barriers(number):
            return smem.allocate_array(Int64, number)

        self.ticket_full, self.ticket_empty, self.k_full, self.v_full, self.kv_empty = (barriers(1) for _ in range(5))
        self.q_full, self.q_empty, self.dout_full, self.dout_empty = (barriers(self.stages) for _ in range(4))
        self.dq_full, self.dq_empty = (barriers(WARPGROUPS * ADDERS) for _ in range(2))
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
            (VECTOR, WARPGROUP, numbers // (VECTOR * WARPGROUP), WARPGROUPS * ADDERS),
            stride=(1, VECTOR, VECTOR * WARPGROUP, numbers),
        )
        self.sDq = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        self.dq_numbers = numbers  # of a warpgroup

    # ---- which block, which tiles

    def schedule(
        self, sizes: tuple, lengths: tuple, counters: cute.Tensor, num_tiles: Int32, num_blocks: Int32, together: Int32
    ):
        """Lengths and heads; counters: the ticket, those of dq's tiles, those of dk's blocks."""
        batch, len_q, self.heads, len_k, self.pairs = sizes
        starts_q, starts_k, used_k = lengths
        if const_expr(starts_q is not None):
            batch = starts_q.shape[0] - 1
        self.queries = Sequences(len_q, batch, starts_q, None)
        self.keys = Sequences(len_k, batch, starts_k, used_k)
        self.num_tiles, self.heads_together = num_tiles, together
        self.tickets = num_blocks * self.heads
        self.counters = counters.iterator

    @cute.jit
    def block_of(self, ticket: Int32) -> tuple:
        """A ticket's ``Block``. Of a head blocks come in the order of adding, of a block heads in ascending order.

        Heads that fit into L2 come together; of packed keys all heads of a sequence.
        """
        heads = opaque(self.heads)  # else what divides by it is kept in registers along the walk
        if const_expr(self.spec.packed_k):
            line, head = ticket // heads, ticket % heads
            sequence, n = find_tile(self.keys, line, self.block)
            blocks = self.keys.first_tile(sequence + 1, self.block) - self.keys.first_tile(sequence, self.block)
        else:
            together = opaque(self.heads_together)
            blocks = cute.ceil_div(self.keys.length, self.block)
            section = ticket // (blocks * together)
            first = section * together
            of_section = cutlass.min(together, heads * self.keys.number - first)
            index = ticket - first * blocks
            n, head = index // of_section, first + index % of_section
            sequence, head = head // heads, head % heads
        if const_expr(self.descends):
            n = blocks - 1 - n
        len_q, len_k = self.queries.rows(sequence), self.keys.rows(sequence)
        exists = (n >= 0) & (n * self.block < len_k)

        behind = len_k - len_q  # query i has the place i + behind
        first, end = Int32(0), cute.ceil_div(len_q, self.tile_rows)
        if const_expr(self.spec.causal):
            first = cutlass.max(n * self.block - behind, 0) // self.tile_rows
        if const_expr(self.spec.window):
            first = cutlass.max(n * self.block - self.right - behind, 0) // self.tile_rows
            last_row = cutlass.min((n + 1) * self.block, len_k) - 1 + self.left - behind
            end = cutlass.min(cutlass.max(last_row + self.tile_rows, 0) // self.tile_rows, end)
        if not exists:
            end = first
        return n, head, sequence, len_q, len_k, first, end, exists

    @cute.jit
    def sees_whole(self, reach: tuple, m: Int32):
        """Whether all queries of a tile see all of a block, and it is full; ``reach``: see ``walk``."""
        own, keys = reach
        first, last = m * self.tile_rows, (m + 1) * self.tile_rows - 1
        whole = keys >= self.block
        if const_expr(self.spec.causal):
            whole = whole & (first >= own + self.block - 1)
        if const_expr(self.spec.window):
            whole = whole & (first + self.right >= own + self.block - 1) & (last - self.left <= own)
        return whole

    @cute.jit
    def turn_of(self, block: tuple, m: Int32):
        """How many blocks of keys are added to a tile of dq before this one."""
        turn = block.n
        if const_expr(self.descends):
            right = self.right if self.spec.window else 0
            end = cutlass.min((m + 1) * self.tile_rows, block.len_q) + block.len_k - block.len_q + right
            turn = (cutlass.min(end, block.len_k) - 1) // self.block - block.n
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
        rows, keys = const_expr((self.tile_rows, self.head_size)), const_expr((self.block, self.head_size))
        tma_q, tma_k, tma_v, tma_dout, _, _ = atoms
        mQ, mK, mV, mDout, _, _ = matrices
        num_bytes = const_expr(2 * self.block * self.head_size)
        count, blocks, turn = Int32(0), Int32(0), Int32(0)
        ticket = self.take_ticket(turn)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            if block.exists:
                first, end = block.first, block.end
                q, dout = (self.queries_of(t, block) for t in (mQ, mDout))
                k, v = (self.keys_of(t, block) for t in (mK, mV))
                tQsQ, tQgQ = partition(tma_q, self.sQ, q, rows)
                tOsO, tOgO = partition(tma_dout, self.sDout, dout, rows)
                tKsK, tKgK = partition(tma_k, self.sK, k, keys)
                tVsV, tVgV = partition(tma_v, self.sV, v, keys)
                line = Int64(block.head) * delta.shape[1]
                line += self.queries.first_tile(block.sequence, PADDED_ROWS) * PADDED_ROWS
                of_q = tma_q, tQgQ[None, None, 0], tQsQ, row_lse.iterator + line, self.sLse, self.q_full, self.q_empty
                of_dout = (
                    tma_dout, tOgO[None, None, 0], tOsO, delta.iterator + line, self.sDelta, self.dout_full,
                    self.dout_empty,
                )  # fmt: skip

                if first < end:
                    self.load_tile(*of_q, first, count)
                cute.arch.mbarrier_wait(self.kv_empty, blocks % 2 ^ 1)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.k_full, num_bytes)
                cute.copy(tma_k, tKgK[None, block.n, 0], tKsK, tma_bar_ptr=self.k_full)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.v_full, num_bytes)
                cute.copy(tma_v, tVgV[None, block.n, 0], tVsV, tma_bar_ptr=self.v_full)
                if first < end:
                    self.load_tile(*of_dout, first, count)
                for m in cutlass.range(first + 1, end, unroll=1):
                    self.load_tile(*of_q, m, count + m - first)
                    self.load_tile(*of_dout, m, count + m - first)
                count += end - first
                blocks += 1
            turn += 1
            ticket = self.take_ticket(turn)

    def group(self) -> Int32:
        """Query heads of a head of keys."""
        return opaque(self.heads) // opaque(self.pairs) if self.spec.grouped else Int32(1)

    def queries_of(self, matrix: cute.Tensor, block: Block) -> cute.Tensor:
        """A sequence's rows of a matrix of queries."""
        i = block.sequence
        where = self.queries.matrix(i), self.queries.first(i), block.len_q
        return rows_of(matrix, self.ragged_q, block.head, *where)

    def keys_of(self, matrix: cute.Tensor, block: Block) -> cute.Tensor:
        """A sequence's rows of a matrix of keys."""
        i = block.sequence
        where = self.keys.matrix(i), self.keys.first(i), block.len_k
        return rows_of(matrix, self.ragged_k, block.head // self.group(), *where)

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

    # ---- the threads that add dq

    @cute.jit
    def add_dq(self, dq_sums: cute.Tensor, adder: Int32):
        """Partials of dq into their sums, each in its turn; of a CTA's partials every second one is an adder's.

        While one waits for its sum to be in memory, the other one waits for its turn.
        """
        num_bytes = const_expr(4 * self.dq_numbers)
        count, turn = Int32(0), Int32(0)
        ticket = self.read_ticket(turn, True)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            first_tile = self.queries.first_tile(block.sequence, self.tile_rows)
            first = block.first + (count + adder) % ADDERS
            for m in cutlass.range(first, block.end, ADDERS, unroll=1):
                line = (first_tile + m) * self.heads + block.head
                counter = self.counters + (1 + line)
                before = self.turn_of(block, m)
                wait_for(counter, before)
                target = dq_sums.iterator + Int64(line) * (WARPGROUPS * self.dq_numbers)
                phase = (count + m - block.first) // ADDERS % 2
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    slot = adder * WARPGROUPS + wg
                    cute.arch.mbarrier_wait(self.dq_full + slot, phase)
                    source = self.sDq[None, 0, 0, slot].iterator
                    if before == 0:
                        bulk_store(target + wg * self.dq_numbers, source, num_bytes)
                    else:
                        bulk_add(target + wg * self.dq_numbers, source, num_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    cute.arch.mbarrier_arrive(self.dq_empty + (adder * WARPGROUPS + wg))
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async")
                count_one(counter)
            count += block.end - block.first
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
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.tidx = tidx
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
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
        count, blocks, turn = Int32(0), Int32(0), Int32(0)
        ticket = self.read_ticket(turn, False)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            if block.exists:
                dk.fill(0.0)
                dv.fill(0.0)
                cute.arch.mbarrier_wait(self.k_full, blocks % 2)
                if const_expr(self.spec.window or self.spec.packed_q):
                    cute.arch.mbarrier_wait(self.v_full, blocks % 2)
                    if block.first < block.end:
                        self.walk(tensors, block, count, blocks)
                else:
                    self.walk(tensors, block, count, blocks)
                count += block.end - block.first
                blocks += 1
                # Found again, so that no register keeps all of it along the walk
                self.finish(tensors, atoms, matrices, dkv_sums, Block(*self.block_of(opaque(ticket))))
            turn += 1
            ticket = self.read_ticket(turn, False)
        if self.tidx < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def walk(self, tensors: tuple, block: tuple, count: Int32, blocks: Int32):
        """Over the tiles of queries that see a block.

        Of the block a step knows its reach: the query that has the place of its first key, and how many keys follow.
        """
        if const_expr(self.scores_ahead):
            self.score(tensors[-1], count)
            warpgroup.wait_group(0)
        first_key = block.n * self.block
        reach = first_key + block.len_q - block.len_k, block.len_k - first_key
        start = count - block.first
        # There is one tile at least; did the compiler not know, ptxas would have every product waited for
        for m in cutlass.range(block.first, cutlass.max(block.end, block.first + 1), unroll=1):
            self.step(tensors, reach, m, block.end, start + m, blocks)
        warpgroup.wait_group(0)

    @cute.jit
    def step(self, tensors: tuple, reach: tuple, m: Int32, end: Int32, count: Int32, blocks: Int32):
        """A tile of queries: its part of dk and dv, and its partial of dq."""
        dk, dv, weights, gradients, scores = tensors
        slot, phase = self.place_in_ring(count)
        dp = cute.make_rmem_tensor(self.scores_shape, Float32)
        if const_expr(not self.scores_ahead):
            self.score(scores, count)
        cute.arch.mbarrier_wait(self.v_full, blocks % 2)
        cute.arch.mbarrier_wait(self.dout_full + slot, phase)
        warpgroup.fence()
        self.multiply_rows(dp, self.tSrV, self.tSrDout, slot)

        if const_expr(not self.scores_ahead):
            warpgroup.wait_group(1)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if not self.sees_whole(reach, m):
            self.hide_queries(scores, reach, m)
        self.find_weights(scores, weights, slot)
        if const_expr(self.dv_first):
            if const_expr(not self.spec.softcap):
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
            if m + 1 < end:
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

    def hide_queries(self, scores: cute.Tensor, reach: tuple, m: Int32):
        """Scores of queries that do not see a key, or of keys that do not exist."""
        own, keys = reach
        thread = opaque(self.tidx)
        key = thread // WARPGROUP * WARPGROUP_ROWS + row_of_thread(thread % WARPGROUP)
        first, last = [], []
        for r in range(ROWS):
            column = Int32(-HIDDEN)
            if self.descends:
                column = own + key + 8 * r - m * self.tile_rows - first_column(thread)
            if self.spec.window:
                last.append(column + self.left)
                column -= self.right
            first.append(Int32(select_(key + 8 * r < keys, column, Int32(HIDDEN))))
        hide_queries(scores, tuple(first), tuple(last) if self.spec.window else None)

    def values_of(self, values: cute.Tensor, slot: Int32, columns: int) -> cute.Tensor:
        """Those of the lane's pair of queries in 8 columns."""
        pair = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(values[None, self.lane % 4, columns, slot], pair)
        return pair

    def find_weights(self, scores: cute.Tensor, weights: cute.Tensor, slot: Int32):
        """Scores become p; with a softcap p times the tanh's derivative, and p is rounded already."""
        for columns in range(self.tile_rows // 8):
            row_lse = self.values_of(self.sLse, slot, columns)
            found = cute.make_rmem_tensor((4,), Float32)
            for e in range(4):
                i = 4 * columns + e
                capped = scores[i]
                found[e] = weight(capped, self.score_scale, row_lse[column_of(i) % 2])
                scores[i] = through_tanh(found[e], capped) if self.spec.softcap else found[e]
            if self.spec.softcap:
                rounded = cute.make_tensor(weights.iterator + 4 * columns, cute.make_layout(4))
                rounded.store(found.load().to(self.dtype))

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
        """A partial of dq into shared memory, once the last but one has been read."""
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.tidx) % WARPGROUP
        slot = count % ADDERS * WARPGROUPS + self.wg
        cute.arch.mbarrier_wait(self.dq_empty + slot, count // ADDERS % 2 ^ 1)
        for i in cutlass.range_constexpr(cute.size(partial) // VECTOR):
            for e in cutlass.range_constexpr(VECTOR):
                vector[e] = partial[i * VECTOR + e]
            cute.autovec_copy(vector, self.sDq[None, thread, i, slot])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.release(self.dq_full + slot)

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        atoms: tuple,
        matrices: tuple,
        dkv_sums: cute.Tensor,
        block: tuple,
    ):
        """dk and dv of a block, rounded, on their way; of a group into its sums, which ``finish_dkv`` rounds.

        (With both the sums and the rounding here ptxas finds too few registers, and has every product waited for.)
        """
        dk, dv, *_ = tensors
        group = self.group()
        pair, member = block.head // group, block.head % group
        self.meet()  # both have read k and v
        if const_expr(self.spec.grouped):
            line = (self.keys.first_tile(block.sequence, self.block) + block.n) * self.pairs + pair
            self.add_head(dk, dv, dkv_sums, line, member)
        else:
            *_, tma_dk, tma_dv = atoms
            *_, mDk, mDv = matrices
            for i in cutlass.range_constexpr(cute.size(dk)):
                dk[i] = scaled(dk[i], self.scale)
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
                    source, target = partition(atom, shared, self.keys_of(matrix, block), keys)
                    cute.copy(atom, source, target[None, block.n, 0])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
        if self.tidx == 0:
            cute.arch.mbarrier_arrive(self.kv_empty)

    @cute.jit
    def add_head(self, dk: cute.Tensor, dv: cute.Tensor, dkv_sums: cute.Tensor, line: Int32, member: Int32):
        """This head's sums added to those of the group's heads before, in memory, by way of k's and v's place."""
        counter = self.counters + (1 + self.num_tiles * self.heads + line)
        numbers = const_expr(self.block * self.head_size)
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.tidx) % WARPGROUP
        vectors = const_expr(WARPGROUP_ROWS * self.head_size // (VECTOR * WARPGROUP))
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, vectors, WARPGROUPS), stride=(1, VECTOR, VECTOR * WARPGROUP, numbers // WARPGROUPS)
        )
        staged = cute.make_tensor(cute.recast_ptr(self.sK.iterator, cute.make_swizzle(0, 4, 3), Float32), layout)
        for which in cutlass.range_constexpr(2):
            total = (dk, dv)[which]
            for i in cutlass.range_constexpr(vectors):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = total[i * VECTOR + e]
                cute.autovec_copy(vector, staged[None, thread, i, self.wg])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
            if self.tidx == 0:
                target = dkv_sums.iterator + (Int64(line) * 2 + which) * numbers
                source = staged[None, 0, 0, 0].iterator
                if member == 0:
                    bulk_store(target, source, 4 * numbers)
                else:
                    if const_expr(which == 0):
                        wait_for(counter, member)
                    bulk_add(target, source, 4 * numbers)
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(which == 0):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                else:
                    cute.arch.cp_async_bulk_wait_group(0)
                    cute.arch.fence_proxy("async")
                    count_one(counter)
            self.meet()

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


@compiled
def backward_sm90(arch: str, spec: BackwardSpec, config: BackwardConfig) -> Program:
    """dk (B, Lk, Hkv, D) and dv (B, Lk, Hkv, Dv), and the sums of dq, of q (B, Lq, H, D), dout (B, Lq, H, Dv), k and v,
    whose strides are multiples of 16 bytes, and row_lse and delta (H, all rows padded). Packed sequences: B of 1.

    ``dq_sums``: fp32, tile_rows * head_size numbers of each tile of queries of each head, as accumulators have them.
    ``dkv_sums``: fp32, 256 * head_size numbers of each block of keys of each of their heads; used where it is
    ``grouped``. ``counters``: int32 zeros: the ticket, one of each tile of dq_sums, one of each block of dkv_sums.
    ``score_scale``, ``before_tanh``: see ``score_factors``; ``scale``: what scores are multiplied with. ``left``,
    ``right``: see ``window_bounds``. ``num_tiles``, ``num_blocks``: of queries and keys of all sequences, of one head,
    see ``Sequences``. ``heads_together``: heads whose rows are walked over together, a multiple of a group.
    """
    dtype, d, dv = cutlass_dtype(spec.dtype), spec.head_size, spec.head_size
    if spec.padded:
        d, dv = (cute.sym_int(divisibility=8) for _ in range(2))
    batch_q, batch_k, len_q, len_k, heads, pairs, padded = (cute.sym_int() for _ in range(7))
    if not spec.packed_q and not spec.packed_k:
        batch_k = batch_q

    def operand(batch, length, number, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, size), (*strides, 1), assumed_align=16)

    def compact(kind, *shape, align=16):
        order = tuple(range(len(shape)))[::-1]
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)

    def integers(present):
        return compact(Int32, cute.sym_int(), align=4) if present else None

    return Program(
        BackwardSm90(dtype, spec, config),
        operand(batch_q, len_q, heads, d),
        operand(batch_k, len_k, pairs, d),
        operand(batch_k, len_k, pairs, dv),
        operand(batch_q, len_q, heads, dv),
        compact(Float32, heads, padded),
        compact(Float32, heads, padded),
        operand(batch_k, len_k, pairs, d),
        operand(batch_k, len_k, pairs, dv),
        compact(Float32, cute.sym_int64()),
        compact(Float32, cute.sym_int64()),
        compact(Int32, cute.sym_int()),
        integers(spec.packed_q),
        integers(spec.packed_k),
        integers(spec.used_k),
        *(Float32(1.0) for _ in range(3)),
        *(Int32(1) for _ in range(6)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
