"""Grouped matrix products for SM90: the product of common/gemm_sm90.py, of groups of rows that the device alone knows.

    offs --> ends and tiles of the groups in shared memory --> place of a tile: (group, first row, last row, n)
    gmem a, b --TMA--> sA, sB --wgmma--> registers --stmatrix--> sD --TMA, of a group's last rows by threads--> gmem d

``rows``: a tile has rows of one group, and begins at any row: one map of all rows, whose boxes may reach into the next
group, whose sums are then not stored; and one map of all matrices, which the group is a coordinate of. ``sums``: a tile
sums over the rows of one group, in boxes of 64 from its first one; of the last box the rows of the next group are
zeroed in shared memory. No map is edited, nothing is padded, the host knows no count.

Rows of d beyond the last group are zeroed by the warps that neither load nor multiply.

Profile: ncu --clock-control none -k regex:Grouped python -m bench.bench_moe --filter grouped_mm.fwd
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.cache_hints import EVICT_NORMAL, evict_first_if
from cute_kernels.common.gemm_config import SHARED_MEMORY, GemmConfig
from cute_kernels.common.gemm_sm90 import ORDER_BARRIER, WARPGROUP, GemmSm90
from cute_kernels.gemm.config_grouped import SumsConfig
from cute_kernels.gemm.kernel_grouped_walk import (
    TABLE_BYTES,
    WARP,
    RowsWalk,
    SumsWalk,
    allocate_tables,
    corner_of,
    part_of,
    scan,
)


@cute.jit
def prefetch_l2(source: cute.Pointer, num_bytes: Int32):
    """Bring so many bytes, whole vectors of 16, from where ``source`` points to L2."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source.toint(), num_bytes])


class GroupedRowsSm90(RowsWalk, GemmSm90):
    """d (R, N): rows a (R, K), and a matrix b (N, K) for each group. ``transposed``: of b's rows, and a's matrices."""

    idle = WARPGROUP - WARP
    masks = False
    prefetches = False

    def __init__(
        self,
        a_major: str,
        b_major: str,
        transposed: bool,
        config: GemmConfig,
        multi_block_tma: bool = False,
        accumulate: bool = False,
    ):
        tma_store = config.stores_by_tma("sm_90a", transposed)
        super().__init__(None, a_major, b_major, transposed, accumulate, tma_store, config, multi_block_tma)
        self.storing = self.partners * WARPGROUP
        self.ring_bytes += TABLE_BYTES  # the tables take room beside the ring, too
        if self.ring_bytes > SHARED_MEMORY:
            raise ValueError(f"config.stages must leave room for {TABLE_BYTES} bytes, got {config}")
        if not self.masks and config.cluster[1 if transposed else 0] != 1:
            raise ValueError(f"config.cluster must be of one CTA along the rows, got {config}")

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, offs: cute.Tensor, num_ctas: Int32, stream):
        self.dtype, self.out = a.element_type, d.element_type
        a, b, d = self.oriented(a, b, d)
        tile_m, tile_n, tile_k = self.tile
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tiled_mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            Float32,
            (self.partners, 1, 1),
            tiler_mn=(64, tile_n),
        )
        sA_layout = self.operand_layout(a_layout, (tile_m, tile_k))
        sB_layout = self.operand_layout(b_layout, (tile_n, tile_k))
        tma_a, mA = self.load_atom(a, sA_layout, (tile_m, tile_k), self.cluster[1])
        tma_b, mB = self.load_atom(b, sB_layout, (tile_n, tile_k), self.cluster[0])
        tma_d, mD = None, None
        sD_layout = self.store_layout() if const_expr(self.staged) else None
        if const_expr(self.tma_store):
            one = cute.slice_(sD_layout, (None, None, 0))
            tma_d, mD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), d, one, self.store_tile())
        self.kernel(
            tiled_mma, sA_layout, sB_layout, sD_layout, tma_a, mA, tma_b, mB, tma_d, mD, d, offs
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.consumers + 1) * WARPGROUP, 1, 1],
            cluster=[self.cluster[0] * self.cluster[1], 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        sD_layout: Optional[cute.ComposedLayout],
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        tma_d: Optional[cute.CopyAtom],
        mD: Optional[cute.Tensor],
        d: cute.Tensor,
        offs: cute.Tensor,
    ):
        tile_m, tile_n, tile_k = self.tile
        cluster_m, cluster_n = self.cluster
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = tidx % WARP
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        ranks = rank % cluster_m, rank // cluster_m

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.stages)
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        sD = None
        if const_expr(self.staged):
            sD = smem.allocate_tensor(self.out, sD_layout.outer, byte_alignment=1024, swizzle=sD_layout.inner)
        tables = allocate_tables(smem)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, (cluster_m + cluster_n - 1) * self.partners * 4
            ),
            tx_count=(tile_m + tile_n) * tile_k * self.dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, cluster_m, cluster_n, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        cute.arch.griddepcontrol_wait()
        if warp == 0:
            scan(offs, self.rows_of(mA, mB), self.ragged_tile(), tables, lane)
        cute.arch.sync_threads()
        self.rank_groups(tables, offs.shape[0], tidx)
        walk = self.walk_of(tables, offs.shape[0], mA, d, ranks, lane)
        total = walk[-1]
        first_tile = bidx // (cluster_m * cluster_n)
        step = grid // (cluster_m * cluster_n)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if warpgroup_index == 0:
            if const_expr(self.consumers > 1):
                cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.load_groups(ring, (tma_a, mA, sA), (tma_b, mB, sB), walk, ranks, (first_tile, step, total))
            else:
                self.clear_rest(d, tables[0][offs.shape[0] - 1], bidx, grid, tidx - WARP)
        else:
            if const_expr(self.consumers > 1):
                cute.arch.setmaxregister_increase(self.consumer_registers)
            # The first or the second of those that take turns, and a thread's place among those that share its tile
            turn = warpgroup_index - 1 if const_expr(self.turns > 1) else Int32(0)
            thread = tidx % WARPGROUP if const_expr(self.turns > 1) else tidx - WARPGROUP
            thr_mma = tiled_mma.get_slice(0 if const_expr(self.turns > 1) else (warpgroup_index - 1) * WARPGROUP)
            tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(self.instruction_rows(sA)))
            tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
            tCcD = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.mma_rows, tile_n)))
            sums = cute.make_rmem_tensor(tCcD.shape[:3], Float32)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            held = state.clone()  # the slot of the tile of K whose products run while the next ones are issued
            num_stored = Int32(0)
            group = Int32(0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            if const_expr(self.turns > 1):
                if turn == 1 and first_tile < total:
                    state.advance(self.k_tiles_at(walk, first_tile))
            for index in cutlass.range(first_tile + turn * step, total, self.turns * step):
                place = self.place(walk, index, group)
                group, first_m, first_n, end_m, end_n, first_k, end_k, _ = place
                k_tiles = cutlass.max(cute.ceil_div(end_k - first_k, tile_k), 1)
                alignment = const_expr(16 if self.tma_store else self.out.width // 8)
                left = corner_of(part_of(d, group), first_m, first_n, end_m, end_n, alignment)
                if const_expr(self.accumulate):
                    self.start_sums(tiled_mma, sums, tCcD, left, thread)
                    if const_expr(self.prefetches):
                        self.prefetch_sums(walk, index + step, d, thread)
                else:
                    sums.fill(0.0)
                if const_expr(self.turns > 1):
                    # A wait for a slot's parity tells of its last two turns alone: none before the other's last wait
                    if index != first_tile:
                        cute.arch.barrier(barrier_id=ORDER_BARRIER + turn, number_of_threads=2 * WARPGROUP)
                arrived = cutlass.Boolean(False)
                for k in cutlass.range(k_tiles):
                    ring.consumer_wait(state, arrived)
                    here = state.clone()
                    if const_expr(self.masks):
                        self.mask(sA, sB, here.index, end_k - first_k - k * tile_k, thread, turn)
                    state.advance()
                    operands = tCrA[None, None, None, here.index], tCrB[None, None, None, here.index]
                    # At each tile of K: ptxas knows of no branch here that all threads take it, serializes all products
                    # where it has to put a fence itself (C7520), and says so of tiles of 192 columns
                    warpgroup.fence()
                    self.multiply_chunk(tiled_mma, sums, operands, 0)
                    # Products that are no longer in flight have read their slot: it is free
                    warpgroup.wait_group(self.in_flight)
                    if const_expr(self.in_flight == 0):
                        ring.consumer_release(here)
                    else:
                        if k > 0:
                            ring.consumer_release(held)
                        held = here
                    if const_expr(self.consumers == 1):
                        # Ahead of the next tile: nothing else fills the tensor cores' time between two
                        arrived = cute.arch.mbarrier_test_wait(ring.producer_get_barrier(state), state.phase)
                    for chunk in cutlass.range(1, self.chunks, unroll=1):
                        self.multiply_chunk(tiled_mma, sums, operands, chunk)
                if const_expr(self.turns > 1):
                    if index + step < total:
                        cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER + 1 - turn, number_of_threads=2 * WARPGROUP)
                        state.advance(self.k_tiles_at(walk, index + step))  # beyond the other's tile
                if const_expr(self.in_flight == 1):
                    warpgroup.wait_group(0)
                    ring.consumer_release(held)

                mD_left = None
                if const_expr(self.tma_store):
                    mD_left = cute.domain_offset((first_m, first_n), part_of(mD, group))
                out = tiled_mma, None, sD, tma_d, mD_left, None, None, left, None
                # d to which nothing is added stays as it is, -0 too: zeros added would make +0 of it
                has_sums = True if const_expr(not self.accumulate) else end_k > first_k
                if has_sums:
                    num_stored = self.finish(sums, tCcD, out, Int32(0), Int32(0), thread, turn, num_stored, ())
            if const_expr(self.tma_store):
                if thread < 32:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_groups(self, ring, a: tuple, b: tuple, walk: tuple, ranks: tuple, tiles: tuple):
        """Feed the ring; ``a``, ``b``: an operand's copy, the operand, its ring. ``tiles``: the first, step, total."""
        (tma_a, mA, sA), (tma_b, mB, sB) = a, b
        tile_m, tile_n, tile_k = self.tile
        (cluster_m, cluster_n), (rank_m, rank_n), (first_tile, step, total) = self.cluster, ranks, tiles
        cluster_layout = cute.make_layout((cluster_m, cluster_n, 1))
        a_mask = b_mask = None
        if const_expr(cluster_n > 1):
            a_mask = cute.make_layout_image_mask(cluster_layout, (rank_m, rank_n, 0), mode=1)
        if const_expr(cluster_m > 1):
            b_mask = cute.make_layout_image_mask(cluster_layout, (rank_m, rank_n, 0), mode=0)
        group = Int32(0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(first_tile, total, step):
            group, first_m, first_n, _, _, first_k, end_k, shared = self.place(walk, index, group)
            tAsA, tAgA = self.tiles_of_k(tma_a, sA, mA, group, first_m, first_k, tile_m, rank_n, cluster_n)
            tBsB, tBgB = self.tiles_of_k(tma_b, sB, mB, group, first_n, first_k, tile_n, rank_m, cluster_m)
            # Matrices that no other tile of the group's rows needs make room first
            once, kept = evict_first_if(shared == 1), Int64(EVICT_NORMAL)
            a_policy = once if const_expr(cute.rank(mA) == 3) else kept
            b_policy = once if const_expr(cute.rank(mB) == 3) else kept
            for k in cutlass.range(cutlass.max(cute.ceil_div(end_k - first_k, tile_k), 1), unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(
                    tma_a, tAgA[None, k], tAsA[None, state.index],
                    tma_bar_ptr=full, mcast_mask=a_mask, cache_policy=a_policy,
                )  # fmt: skip
                cute.copy(
                    tma_b, tBgB[None, k], tBsB[None, state.index],
                    tma_bar_ptr=full, mcast_mask=b_mask, cache_policy=b_policy,
                )  # fmt: skip
                state.advance()
        ring.producer_tail(state)

    @cute.jit
    def tiles_of_k(
        self, tma, ring, matrix, group: Int32, first: Int32, first_k: Int32, rows: int, rank: Int32, ranks: int
    ):
        """An operand's ring, and its tiles of K from (first, first_k) on, as TMA copies them."""
        part = cute.domain_offset((first, self.k_coordinate(matrix, first_k)), part_of(matrix, group))
        tiles = cute.local_tile(part, (rows, self.tile[2]), (0, None))
        return cpasync.tma_partition(
            tma, rank, cute.make_layout(ranks), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def k_coordinate(self, matrix, first_k):
        """A place along k; of an operand of rows that is loaded many blocks at a time it is always the first."""
        return (0, 0) if isinstance(cute.shape(matrix, mode=[1]), tuple) else first_k

    @cute.jit
    def start_sums(self, tiled_mma, sums, tCcD, left: cute.Tensor, thread: Int32):
        """The accumulators from what is left of d, two neighbours a load, all at once.

        Beyond the end the last ones are loaded: what they start is not stored.
        """
        tile_m, tile_n, _ = self.tile
        if tile_m <= left.shape[0] and tile_n <= left.shape[1]:
            whole = cute.make_tensor(left.iterator, cute.make_layout((tile_m, tile_n), stride=left.stride))
            cute.autovec_copy(tiled_mma.get_slice(thread).partition_C(whole), sums)
        else:
            sums.fill(0.0)
            for i in cutlass.range_constexpr(0, cute.size(sums), 2):
                m = cutlass.min(tCcD[i][0], left.shape[0] - 1)
                if tCcD[i][1] < left.shape[1]:
                    pointer = (left.iterator + cute.crd2idx((m, tCcD[i][1]), left.layout)).align(8)
                    pair = cute.make_rmem_tensor((2,), Float32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
                    sums[i], sums[i + 1] = pair[0], pair[1]

    @cute.jit
    def prefetch_sums(self, walk: tuple, index: Int32, d: cute.Tensor, thread: Int32):
        """Bring what a tile's sums start from to L2, a row a thread: the tile after this one, the other warpgroup's.

        Memory is read while that one multiplies, not only while a warpgroup waits for its sums.
        """
        if index < walk[-1]:
            group, first_m, first_n, end_m, end_n, first_k, end_k, _ = self.place(walk, index, Int32(0))
            row = first_m + thread
            if thread < self.tile[0] and row < end_m and first_k < end_k:
                part = part_of(d, group)
                num_bytes = cutlass.min(end_n - first_n, self.tile[1]) * (self.out.width // 8)
                prefetch_l2(part.iterator + cute.crd2idx((row, first_n), part.layout), num_bytes)

    @cute.jit
    def k_tiles_at(self, walk: tuple, index: Int32):
        return cutlass.max(cute.ceil_div(self.k_at(walk, index), self.tile[2]), 1)

    @cute.jit
    def send(self, sD, slot: Int32, tma, mOut, gOut, part_m: Int32, part_n: Int32, thread: Int32):
        """A part whose rows are all the group's leaves by TMA, the last one's by its threads: below are the next's."""
        rows, columns = self.store_tile()
        if (part_m + 1) * rows <= gOut.shape[0]:
            if thread < 32:
                self.store_by_tma(sD, slot, tma, cute.local_tile(mOut, (rows, columns), (part_m, part_n)))
        else:
            self.store_part(sD[None, None, slot], gOut, part_m * rows, part_n * columns, thread)
        if thread < 32:
            cute.arch.cp_async_bulk_commit_group()  # of a copy or of none: slots are counted by these


class GroupedSumsSm90(SumsWalk, GroupedRowsSm90):
    """d (M, N) for each group: a (M, R) and b (N, R), along M and N, summed over the group's rows."""

    masks = True

    def __init__(self, accumulate: bool, config: SumsConfig):
        super().__init__("m", "n", False, config, accumulate=accumulate)
        self.prefetches, self.most_rows_first = config.prefetches, config.most_rows_first

    send = GemmSm90.send  # no part of d has rows of another group

    @cute.jit
    def mask(self, sA: cute.Tensor, sB: cute.Tensor, stage: Int32, num_k: Int32, thread: Int32, turn: Int32):
        """Zero the k beyond ``num_k``, the next group's, of a tile that has arrived: they may be NaN."""
        if num_k < self.tile[2]:
            self.clear_columns(sA[None, None, stage], self.tile[0], num_k, thread)
            self.clear_columns(sB[None, None, stage], self.tile[1], num_k, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.partners_meet(turn)

    @cute.jit
    def clear_columns(self, operand: cute.Tensor, rows: cutlass.Constexpr[int], num_k: Int32, thread: Int32):
        """Zero an operand (rows, k), whose rows are neighbours, from ``num_k`` on, 16 bytes a thread."""
        down = const_expr(rows // 8)
        threads = const_expr(self.partners * WARPGROUP)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        copy = cute.make_tiled_copy_tv(atom, cute.make_layout((8, threads // 8)), cute.make_layout((8, 1)))
        target = copy.get_slice(thread).partition_D(operand)
        fragment = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
        fragment.fill(0.0)
        for j in cutlass.range_constexpr(self.tile[2] // (threads // 8)):
            if thread // 8 + j * (threads // 8) >= num_k:
                for i in cutlass.range_constexpr(down // 8):
                    cute.copy(copy, fragment, target[None, i, j])
