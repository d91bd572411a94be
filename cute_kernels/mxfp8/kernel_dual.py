"""Both orientations of block-scaled quantization from one read, for matrices of many tiles: resident CTAs, one an SM.

Tiles of 128 x 128 pass through a ring of slots in shared memory. Two groups of eight warps quantize them in turn, each
tile in its place: a thread has read all its elements before one is written over.

    gmem x --TMA--> slot --> registers, all of the tile --> slot: row output, column output --TMA--> gmem q
                                                        --> scales --> other CTAs of the cluster --> gmem s

The time goes into how lines of 128 bytes reach memory: neighbours cost less the closer in time they are written, in
both outputs (bench/experiments/mxfp8.md). So a CTA takes two tiles along A and stores their columns in turn, a few
rows of each; the CTAs of a cluster, neighbours along B, wait for each other before they store; and clusters draw
their tiles in the order of memory, one number after the other, so that none falls behind (whoever has a tile, its
bytes are the same). The arithmetic is hidden.

    warps 0 to 15   wait until a tile is there, quantize it
    warp 16         draws the next tiles, loads, stores
    warp 17         writes the scales of the row pass; those in columns the cluster puts together to whole sectors
    warp 18         writes the scales of the col pass

All lanes of a warp arrive at a barrier where other warps read next what they wrote: racecheck does not follow
a warp's own synchronisation from there.

Names (A and B, row and col, kinds of scales) are those of kernel.py.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_LAST, LAST_BYTES, evict_first_if
from cute_kernels.common.cluster_barriers import arrive_in_cluster, wait_in_cluster
from cute_kernels.mxfp8.config import ATOM, BLOCK, TALL, TILE, DualConfig, ScaleRule
from cute_kernels.mxfp8.kernel_passes import BLOCKS, ROWS_AT_ONCE, UNIT, WARP, Passes, as_memory, of_passes
from cute_kernels.mxfp8.kernel_scales import store_scales, store_squares, store_words, word_at

GROUP = 8  # warps that share a tile
GROUPS = 2
MOVER = GROUP * GROUPS
WARPS = MOVER + 3
SLOT = 2 * TILE * TILE  # bytes: of x, or of both outputs
SLOTS = 6  # a multiple of GROUPS, so that a slot is always the same group's, and of TALL
PIECE = 16  # rows of the transposed output that are stored of one tile before those of its neighbour
TICKETS = SLOTS // TALL + 2  # that may have been drawn before they are used
# x is read with evict_last until so many bytes of it are left (131072x7168 992.5 -> 980.8 us). To its end, so much less
# of the outputs would be left in L2 (8192x7168 65.3 -> 67.1)
FAR_BYTES = 256 << 20


class QuantizeDual:
    """See the module; arguments as in ``QuantizeSpec``."""

    def __init__(self, transposed: bool, square: bool, rule: ScaleRule, kinds: tuple, config: DualConfig):
        self.transposed = transposed
        self.square = square
        self.rule = rule
        self.kinds = kinds
        self.ctas = config.ctas

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        q_k: cute.Tensor,
        s_k: cute.Tensor,
        q_n: cute.Tensor,
        s_n: cute.Tensor,
        counter: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        of_k, of_n = (q_k, s_k, self.kinds[0]), (q_n, s_n, self.kinds[1])
        (q_row, s_row, self.row_kind), (q_col, s_col, self.col_kind) = of_passes(self.transposed, of_k, of_n)
        self.dtype = x.element_type
        self.passes = Passes(self.dtype, q_row.element_type, self.rule, TILE)
        flat = cute.make_layout((TILE, TILE), stride=(TILE, 1))
        swizzled = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Uint8), (PIECE, TILE), (0, 1)
        )
        store = cpasync.CopyBulkTensorTileS2GOp()
        x = as_memory(x, self.transposed)
        row = as_memory(cute.recast_tensor(q_row, Uint8), self.transposed)
        col = as_memory(cute.recast_tensor(q_col, Uint8), not self.transposed)
        tma_x, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, flat, (TILE, TILE))
        tma_row, mRow = cpasync.make_tiled_tma_atom(store, row, flat, (TILE, TILE))
        tma_col, mCol = cpasync.make_tiled_tma_atom(store, col, swizzled, (PIECE, TILE))
        s_row = cute.recast_ptr(s_row.iterator, dtype=Uint8)
        s_col = cute.recast_ptr(s_col.iterator, dtype=Uint8)
        sizes = (TILE * TALL, TILE * self.ctas)
        counts = [cute.fast_divmod_create_divisor_v2(cute.ceil_div(mX.shape[i], sizes[i])) for i in range(2)]
        counter = counter.iterator
        self.zero(counter).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream, use_pdl=True)
        self.kernel(tma_x, mX, *counts, tma_row, mRow, s_row, tma_col, mCol, s_col, swizzled, counter).launch(
            grid=[num_ctas, 1, 1],
            block=[WARPS * WARP, 1, 1],
            cluster=[self.ctas, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def zero(self, counter: cute.Pointer):
        """Nothing has been drawn yet. What came before may have had this memory, so it must have ended."""
        cute.arch.griddepcontrol_wait()
        cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        along_a: cute.FastDivmodDivisorV2,
        along_b: cute.FastDivmodDivisorV2,
        tma_row: cute.CopyAtom,
        mRow: cute.Tensor,
        s_row: cute.Pointer,
        tma_col: cute.CopyAtom,
        mCol: cute.Tensor,
        s_col: cute.Pointer,
        swizzled: cute.ComposedLayout,
        counter: cute.Pointer,
    ):
        bidx, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = bidx % self.ctas
        num = along_a.divisor * along_b.divisor * mX.shape[2]
        self.exchanges = const_expr(self.row_kind == "columns")  # whether the cluster puts scales together
        self.words = const_expr(TALL * TILE)  # of scales, of a turn of a pass

        smem = SmemAllocator()
        ring = smem.allocate_tensor(Uint8, cute.make_layout(SLOTS * SLOT), byte_alignment=1024).iterator
        staged = smem.allocate_tensor(Uint8, cute.make_layout(SLOTS * 2 * ATOM), byte_alignment=16).iterator
        together = smem.allocate_tensor(Int32, cute.make_layout((self.words, 2)))
        squares = None
        if const_expr(self.square):
            squares = smem.allocate_tensor(Int32, cute.make_layout((16, SLOTS)), byte_alignment=16)
        numbers = smem.allocate_tensor(Int32, cute.make_layout(SLOTS))  # which tiles a slot has
        tickets = smem.allocate_tensor(Int32, cute.make_layout(TICKETS))
        x_full = smem.allocate_array(Int64, SLOTS)  # a slot holds a tile of x
        q_full = smem.allocate_array(Int64, SLOTS)  # a slot holds both outputs of its tile
        # The next slots of all CTAs of the cluster hold their outputs; two barriers in turn. A CTA that all others have
        # arrived at may arrive for the next turn while an arrival for this one is still on its way to another CTA. At
        # one barrier it would count in its place. No CTA arrives two turns early: every CTA arrives for the turn
        # between them once its own barrier of this turn is complete
        cluster_full = smem.allocate_array(Int64, 2)
        scales_empty = smem.allocate_array(Int64, 1)  # the slots' staged scales have been read
        together_full = smem.allocate_array(Int64, 2)  # the scales that this CTA writes for the cluster have arrived
        tickets_full = smem.allocate_array(Int64, TICKETS)  # a ticket holds its number

        if warp == MOVER:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_row)
            cpasync.prefetch_descriptor(tma_col)
            if lane == 0:
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(x_full + slot, 1)
                    cute.arch.mbarrier_init(q_full + slot, GROUP * WARP)
                cute.arch.mbarrier_init(scales_empty, 2 * WARP)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(cluster_full + i, self.ctas * (1 + self.exchanges))
                    cute.arch.mbarrier_init(together_full + i, 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(together_full + i, 4 * self.words)
                for i in cutlass.range_constexpr(TICKETS):
                    cute.arch.mbarrier_init(tickets_full + i, 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(tickets_full + i, 4)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        cute.arch.barrier()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()

        if warp < MOVER:
            group, slot, phase = warp // GROUP, warp // GROUP, Int32(0)
            cute.arch.mbarrier_wait(x_full + slot, phase)
            while numbers[slot] >= 0:
                sSquares = None if const_expr(squares is None) else squares[None, slot]
                self.quantize(ring + slot * SLOT, staged, slot, sSquares, group, warp & (GROUP - 1), lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(q_full + slot)
                slot += GROUPS
                if slot >= SLOTS:
                    slot -= SLOTS
                    phase ^= 1
                cute.arch.mbarrier_wait(x_full + slot, phase)
        elif warp == MOVER:
            load = (tma_x, mX, ring, x_full, numbers, num, along_a, along_b)
            # The first number is drawn, too: a cluster that had to wait for others to end (15 of 16 clusters of 8 CTAs
            # run at once on an H200) finds nothing left to do. One after the other, not all at once: behind the loads
            # of the others the first tile would come late (2.4 us more)
            draws = (counter, tickets, tickets_full, rank)
            self.draw(*draws, Int32(0))
            slot, phase, turn, cluster_phase, ticket = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
            number, ticket = self.next(*draws, num, Int32(-1), ticket)
            for i in cutlass.range_constexpr(SLOTS // TALL):
                self.fetch(*load, rank, i * TALL, number)
                number, ticket = self.next(*draws, num, number, ticket)
            while numbers[slot] >= 0:
                a, b, e = self.place(numbers[slot], rank, along_a, along_b)
                for i in cutlass.range_constexpr(TALL):
                    cute.arch.mbarrier_wait(q_full + slot + i, phase)
                self.arrive(cluster_full + turn, lane)
                wait_in_cluster(cluster_full + turn, cluster_phase)
                self.store(tma_row, mRow, tma_col, mCol, swizzled, ring, slot, a, b, e)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.mbarrier_wait(scales_empty, turn)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.fetch(*load, rank, slot, number)
                number, ticket = self.next(*draws, num, number, ticket)
                cluster_phase ^= turn
                turn ^= 1
                slot += TALL
                if slot == SLOTS:
                    slot = Int32(0)
                    phase ^= 1
        else:
            cute.arch.mbarrier_wait(x_full, 0)  # the first number is there; the others are before it is their turn
            rest = (numbers, cluster_full, scales_empty, together_full, lane, rank, along_a, along_b, mX, squares)
            if warp == MOVER + 1:
                self.write_scales("row", staged, s_row, together, *rest)
            else:
                self.write_scales("col", staged, s_col, together, *rest)
        # Until nobody sends to this CTA
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def place(self, number: Int32, rank: Int32, along_a: cute.FastDivmodDivisorV2, along_b: cute.FastDivmodDivisorV2):
        """A CTA's place in the ``number``-th tiles: the first tile along A, the tile along B, the expert."""
        rest, b = divmod(number, along_b)
        e, a = divmod(rest, along_a)
        return a * TALL, b * self.ctas + rank, e

    @cute.jit
    def arrive(self, barrier: cute.Pointer, lane: Int32):
        """Arrive at the barrier of every CTA of the cluster."""
        if lane < self.ctas:
            arrive_in_cluster(barrier, lane)
        cute.arch.sync_warp()

    @cute.jit
    def draw(self, counter, tickets, tickets_full, rank: Int32, ticket: Int32):
        """The first CTA of a cluster draws a number for all."""
        if rank == 0 and cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(counter, Int32(1))
            i = ticket % TICKETS
            for peer in cutlass.range_constexpr(self.ctas):
                cute.arch.store_async_dsmem(tickets.iterator + i, number, tickets_full + i, peer)
        cute.arch.sync_warp()

    @cute.jit
    def next(self, counter, tickets, tickets_full, rank: Int32, num: Int32, number: Int32, ticket: Int32):
        """(Number, ticket after it): of what has been drawn, and draws another one. At the end, the same again."""
        if number < num:
            i = ticket % TICKETS
            cute.arch.mbarrier_wait(tickets_full + i, ticket // TICKETS & 1)
            number = tickets[i]
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(tickets_full + i, 4)
            cute.arch.sync_warp()
            ticket += 1
            if number < num:
                self.draw(counter, tickets, tickets_full, rank, ticket)
        return number, ticket

    @cute.jit
    def fetch(
        self, tma_x, mX, ring, x_full, numbers, num: Int32, along_a, along_b, rank: Int32, slot: Int32, number: Int32
    ):
        """Issue the loads of a number's tiles. From ``num`` on there are none: the warps that wait for them end."""
        lane = cute.arch.lane_idx()
        if number < num:
            a, b, e = self.place(number, rank, along_a, along_b)
            bytes_each = const_expr(SLOT * TALL * self.ctas)
            policy = evict_first_if(num - number <= const_expr(LAST_BYTES // bytes_each))
            if num - number > const_expr(FAR_BYTES // bytes_each):
                policy = Int64(EVICT_LAST)
            for i in cutlass.range_constexpr(TALL):
                if lane == 0:
                    numbers[slot + i] = number
                    cute.arch.mbarrier_arrive_and_expect_tx(x_full + slot + i, SLOT)
                cute.arch.sync_warp()
                target = cute.recast_ptr((ring + (slot + i) * SLOT).align(1024), dtype=self.dtype)
                sX = cute.make_tensor(target, cute.make_layout((TILE, TILE), stride=(TILE, 1)))
                gX = cute.local_tile(mX, (TILE, TILE), (a + i, b, e))
                tXsX, tXgX = cpasync.tma_partition(
                    tma_x, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
                )
                cute.copy(tma_x, tXgX, tXsX, tma_bar_ptr=x_full + slot + i, cache_policy=policy)
        else:
            if lane < TALL:
                numbers[slot + lane] = -1
                cute.arch.mbarrier_arrive(x_full + slot + lane)
            cute.arch.sync_warp()

    @cute.jit
    def store(self, tma_row, mRow, tma_col, mCol, swizzled, ring, slot: Int32, a: Int32, b: Int32, e: Int32):
        """Store the outputs of a turn: the columns' in pieces, of the tiles in turn, so that neighbours go together."""
        for piece in cutlass.range_constexpr(TILE // PIECE):
            for i in cutlass.range_constexpr(TALL):
                source = (ring + ((slot + i) * SLOT + SLOT // 2 + piece * PIECE * TILE)).align(1024)
                sCol = cute.make_tensor(cute.recast_ptr(source, swizzled.inner, Uint8), swizzled.outer)
                gCol = cute.local_tile(mCol, (PIECE, TILE), (b * (TILE // PIECE) + piece, a + i, e))
                tSsQ, tSgQ = cpasync.tma_partition(
                    tma_col, 0, cute.make_layout(1), cute.group_modes(sCol, 0, 2), cute.group_modes(gCol, 0, 2)
                )
                cute.copy(tma_col, tSsQ, tSgQ)
        for i in cutlass.range_constexpr(TALL):
            source = (ring + (slot + i) * SLOT).align(1024)
            sRow = cute.make_tensor(source, cute.make_layout((TILE, TILE), stride=(TILE, 1)))
            gRow = cute.local_tile(mRow, (TILE, TILE), (a + i, b, e))
            tSsQ, tSgQ = cpasync.tma_partition(
                tma_row, 0, cute.make_layout(1), cute.group_modes(sRow, 0, 2), cute.group_modes(gRow, 0, 2)
            )
            cute.copy(tma_row, tSsQ, tSgQ)

    def staged_at(self, staged: cute.Pointer, side: str, slot: Int32) -> tuple[cute.Pointer, str]:
        """(Where a slot's scales are, in which order): those in columns of the col pass beside their neighbour's."""
        if side == "row":
            return staged + slot * ATOM, self.row_kind
        mine = staged + (SLOTS + slot) * ATOM
        if self.col_kind != "columns":
            return mine, self.col_kind
        return mine - (slot & (TALL - 1)) * (ATOM - 4), "pairs"

    @cute.jit
    def quantize(self, sT: cute.Pointer, staged: cute.Pointer, slot: Int32, squares, group: Int32, warp: Int32, lane):
        """Quantize a slot's tile in its place: a warp has 32 rows of 64 columns, and 16 rows."""
        sRow = sT.align(1024)
        sT, sCol = cute.recast_ptr(sRow, dtype=self.dtype), sRow + SLOT // 2
        block, column = warp % BLOCKS, warp // BLOCKS * UNIT + 2 * lane
        rows_each = const_expr(TILE // GROUP)
        rCol = self.passes.read_columns(sT, block, column)
        rows = [warp * rows_each + i * ROWS_AT_ONCE + lane // BLOCKS for i in range(rows_each // ROWS_AT_ONCE)]
        rRows = [self.passes.read_rows(sT, row) for row in rows]
        scales = self.passes.scales_of_columns(rCol, block, column, squares)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=GROUP * WARP)  # all have read what is written over
        staged_row, row_kind = self.staged_at(staged, "row", slot)
        staged_col, col_kind = self.staged_at(staged, "col", slot)
        staged_row = staged_row if const_expr(row_kind != "square") else None
        staged_col = staged_col if const_expr(col_kind != "square") else None
        self.passes.write_columns(rCol, scales, block, column, sCol, staged_col, col_kind)
        for i in cutlass.range_constexpr(len(rows)):
            self.passes.write_rows(rRows[i], rows[i], sRow, squares, staged_row, row_kind)

    @cute.jit
    def write_scales(
        self,
        side: cutlass.Constexpr[str],
        staged: cute.Pointer,
        s: cute.Pointer,
        together: cute.Tensor,
        numbers: cute.Tensor,
        cluster_full: cute.Pointer,
        scales_empty: cute.Pointer,
        together_full: cute.Pointer,
        lane: Int32,
        rank: Int32,
        along_a,
        along_b,
        mX: cute.Tensor,
        squares: Optional[cute.Tensor],
    ):
        """A warp's work: the scales of the row pass, or of the col pass."""
        is_row = const_expr(side == "row")
        exchanges = const_expr(is_row and self.exchanges)
        rows, columns = (mX.shape[0], mX.shape[1]) if const_expr(is_row) else (mX.shape[1], mX.shape[0])
        columns //= BLOCK
        slot, phase, turn = Int32(0), Int32(0), Int32(0)
        if const_expr(exchanges):
            self.arrive(cluster_full, lane)
        while numbers[slot] >= 0:
            a, b, e = self.place(numbers[slot], rank, along_a, along_b)
            row, column = (a, b) if const_expr(is_row) else (b, a)
            wait_in_cluster(cluster_full + turn, phase)
            if const_expr(exchanges):
                # The tile put together two times ago has been written, so its place is free for the next time
                self.arrive(cluster_full + (turn ^ 1), lane)
                self.send(staged, slot, together[None, turn].iterator, together_full + turn, lane, rank)
            else:
                self.write(side, staged, slot, s, lane, row, column, e, rows, columns)
            if const_expr(is_row and "square" in (self.row_kind, self.col_kind)):
                if lane < 16:
                    for i in cutlass.range_constexpr(TALL):
                        at = (lane, row + i, column, e, rows // BLOCK, columns)
                        store_squares(self.transposed, squares[None, slot + i], s, *at)
            cute.arch.mbarrier_arrive(scales_empty)
            if const_expr(exchanges):
                cute.arch.mbarrier_wait(together_full + turn, phase)
                at = (lane, row * TILE + rank * (self.words // self.ctas), (column - rank) * 4, e, rows, columns)
                store_words(self.words, WARP, 4 * self.ctas, together[None, turn].iterator, s, *at)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(together_full + turn, 4 * self.words)
            phase ^= turn
            turn ^= 1
            slot += TALL
            if slot == SLOTS:
                slot = Int32(0)

    @cute.jit
    def send(self, staged: cute.Pointer, slot: Int32, together: cute.Pointer, together_full, lane: Int32, rank: Int32):
        """The words of the row pass to the CTAs of the cluster: each gets all of a part of the rows."""
        rows_each = const_expr(self.words // self.ctas)
        for i in cutlass.range_constexpr(TALL):
            mine, _ = self.staged_at(staged, "row", slot + i)
            for j in cutlass.range_constexpr(TILE // WARP):
                row = const_expr(i * TILE + j * WARP)
                word = word_at(mine + 4 * (j * WARP + lane))[0]
                place = together + ((row % rows_each + lane) * self.ctas + rank)
                cute.arch.store_async_dsmem(place, word, together_full, row // rows_each)

    @cute.jit
    def write(
        self,
        side: cutlass.Constexpr[str],
        staged: cute.Pointer,
        slot: Int32,
        s: cute.Pointer,
        lane: Int32,
        row: Int32,
        column: Int32,
        e: Int32,
        rows: Int32,
        columns: Int32,
    ):
        """Write what a CTA writes alone, the scales of both tiles: in atoms or rows, or in columns of the col pass."""
        first, kind = self.staged_at(staged, side, slot)
        if const_expr(kind == "pairs"):
            store_words(self.words, WARP, 4 * TALL, first.align(4), s, lane, row * TILE, column * 4, e, rows, columns)
        elif const_expr(kind != "square"):
            for i in cutlass.range_constexpr(TALL):
                tr, tc = (row + i, column) if const_expr(side == "row") else (row, column + i)
                if tr * TILE < rows and tc * 4 < columns:
                    mine, _ = self.staged_at(staged, side, slot + i)
                    for j in cutlass.range_constexpr(TILE // WARP):
                        store_scales(TILE, kind, mine, s, lane + j * WARP, tr, tc, e, rows, columns)
