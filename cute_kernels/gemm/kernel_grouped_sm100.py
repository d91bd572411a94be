"""Grouped matrix products for SM100: the product of common/gemm_sm100.py, over the walk of kernel_grouped_walk.py.

    offs --> ends and tiles of the groups in shared memory --> place of a tile: (group, first row, last row, n)
    gmem a, b --TMA--> sA, sB --tcgen05.mma--> tensor memory --tcgen05.ld--> registers --> sD --TMA, of a group's last
    rows by threads--> gmem d

``rows`` and ``sums`` as for SM90 (kernel_grouped_sm90.py). Sums over a group's rows end with the last 16 that it has
some of: those that are the next group's are zeroed in shared memory, the blocks of 16 behind them not multiplied.
Accumulators that start from d are written to tensor memory two tiles ahead. Two more warps than the product of
matrices has make the tables, and zero the rows of d beyond the last group.

Compiled and inspected, and its PTX run on the CPU (tests/gemm/test_ptx_sm100.py): no SM100 has run it yet.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.cache_hints import EVICT_NORMAL, evict_first_if
from cute_kernels.common.gemm_config import SHARED_MEMORY, STORE_STAGES, GemmConfig
from cute_kernels.common.gemm_sm100 import (
    ACCUMULATORS,
    CHUNK,
    EPILOGUE_WARPS,
    LOAD_WARP,
    MMA_WARP,
    GemmSm100,
    epilogue_barrier,
    tensor_memory_fence,
)
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

FIRST_IDLE_WARP, IDLE_WARPS = 6, 2  # that neither load nor multiply nor store
THREADS = (FIRST_IDLE_WARP + IDLE_WARPS) * WARP


class GroupedRowsSm100(RowsWalk, GemmSm100):
    """d (R, N): rows a (R, K), and a matrix b (N, K) for each group. ``transposed``: of b's rows, and a's matrices."""

    idle = IDLE_WARPS * WARP
    storing = EPILOGUE_WARPS * WARP
    masks = False

    def __init__(self, a_major: str, b_major: str, transposed: bool, config: GemmConfig, accumulate: bool = False):
        tma_store = config.stores_by_tma("sm_100a", transposed)
        super().__init__(None, a_major, b_major, transposed, accumulate, tma_store, config)
        parts = STORE_STAGES * config.tile[0] * 128 if tma_store else 0
        if config.ring_bytes + parts + TABLE_BYTES > SHARED_MEMORY:
            raise ValueError(f"config.stages must leave room for {parts + TABLE_BYTES} bytes, got {config}")
        if not self.masks and config.cluster[1 if transposed else 0] != 1:
            raise ValueError(f"config.cluster must be of one CTA along the rows, got {config}")

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, offs: cute.Tensor, num_ctas: Int32, stream):
        self.dtype, self.out = a.element_type, d.element_type
        a, b, d = self.oriented(a, b, d)
        tiled_mma, sA_layout, sB_layout, tma_a, mA, tma_b, mB = self.maps_of(a, b)
        tma_d, mD, sD_layout = None, None, None
        if const_expr(self.tma_store):
            sD_layout = sm100.make_smem_layout_epi(self.out, LayoutEnum.ROW_MAJOR, self.part(), STORE_STAGES)
            one = cute.slice_(sD_layout, (None, None, 0))
            tma_d, mD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), d, one, self.part())
        self.kernel(
            tiled_mma, sA_layout, sB_layout, sD_layout, tma_a, mA, tma_b, mB, tma_d, mD, d, offs
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[THREADS, 1, 1],
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
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        ranks = rank % cluster_m, rank // cluster_m

        smem = SmemAllocator()
        ring_barriers = smem.allocate_array(Int64, 2 * self.stages)
        sums_barriers = smem.allocate_array(Int64, 2 * ACCUMULATORS)
        tensor_memory = smem.allocate_array(Int32, 1)
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        sD = None
        if const_expr(self.tma_store):
            sD = smem.allocate_tensor(self.out, sD_layout.outer, byte_alignment=1024, swizzle=sD_layout.inner)
        tables = allocate_tables(smem)
        ring, accumulators = self.pipelines(ring_barriers, sums_barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        if warp == 0:
            cute.arch.alloc_tmem(self.columns, tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.griddepcontrol_wait()
        if warp == FIRST_IDLE_WARP:
            scan(offs, self.rows_of(mA, mB), self.ragged_tile(), tables, lane)
        tensor_memory_fence("before")
        cute.arch.barrier()
        tensor_memory_fence("after")
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        self.rank_groups(tables, offs.shape[0], tidx)

        sums_shape = tiled_mma.partition_shape_C((tile_m, tile_n))
        tCtD = cute.make_tensor(
            cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory),
            tiled_mma.make_fragment_C(cute.append(sums_shape, ACCUMULATORS)).layout,
        )
        walk = self.walk_of(tables, offs.shape[0], mA, d, ranks, lane)
        total = walk[-1]
        first_tile = bidx // (cluster_m * cluster_n)
        step = grid // (cluster_m * cluster_n)

        if warp >= FIRST_IDLE_WARP:
            self.clear_rest(d, tables[0][offs.shape[0] - 1], bidx, grid, tidx - FIRST_IDLE_WARP * WARP)

        if warp == LOAD_WARP:
            a, b = (tma_a, mA, sA), (tma_b, mB, sB)
            self.load_groups(ring, tiled_mma, a, b, walk, ranks, (first_tile, step, total))

        if warp == MMA_WARP:
            tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            # An accumulator is free from the beginning, unless it is to start from d: the first wait is for that
            role = pipeline.PipelineUserType.Consumer if self.accumulate else pipeline.PipelineUserType.Producer
            sums_state = pipeline.make_pipeline_state(role, ACCUMULATORS)
            for index in cutlass.range(first_tile, total, step):
                num_k = self.k_at(walk, index)
                accumulators.producer_acquire(sums_state)
                tensor_memory_fence("after")
                tiled_mma.set(tcgen05.Field.ACCUMULATE, self.accumulate)
                target = tCtD[None, None, None, sums_state.index]
                for k in cutlass.range(cute.ceil_div(num_k, tile_k), unroll=1):
                    ring.consumer_wait(state)
                    tensor_memory_fence("after")
                    blocks = const_expr(tile_k // 16)
                    if const_expr(self.masks):
                        left = cutlass.min(num_k - k * tile_k, tile_k)
                        self.clear_next(sA, sB, state.index, left, lane)
                        blocks = cute.ceil_div(left, 16)
                    for k16 in cutlass.range(blocks, unroll_full=not self.masks):
                        at = (None, None, k16, state.index)
                        cute.gemm(tiled_mma, target, tCrA[at], tCrB[at], target)
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                    ring.consumer_release(state)  # arrives when the products above are done
                    state.advance()
                accumulators.producer_commit(sums_state)
                sums_state.advance()

        if warp < EPILOGUE_WARPS:
            tDtD = cute.flat_divide(tCtD[(None, None), 0, 0, None], self.part())
            tDtD = cute.group_modes(tDtD, 2, 4)  # (M, N of a part, part, accumulator)
            load_copy = self.tensor_memory_copy(tDtD, True)
            thr_load = load_copy.get_slice(tidx)
            tTRtD = thr_load.partition_S(tDtD)
            tTRcD = thr_load.partition_D(cute.make_identity_tensor(self.part()))
            sums_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
            if const_expr(self.accumulate):
                for i in cutlass.range(ACCUMULATORS, unroll=1):
                    self.start_group(tDtD, d, walk, first_tile + i * step, total, Int32(i), tidx)
                    self.release(accumulators, sums_state)
                    sums_state.advance()
                sums_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
            num_stored = Int32(0)
            group = Int32(0)
            for index in cutlass.range(first_tile, total, step):
                group, first_m, first_n, end_m, end_n, first_k, end_k, _ = self.place(walk, index, group)
                left = self.left_of(d, group, first_m, first_n, end_m, end_n)
                mD_left = None
                if const_expr(self.tma_store):
                    mD_left = cute.domain_offset((first_m, first_n), part_of(mD, group))
                accumulators.consumer_wait(sums_state)
                tensor_memory_fence("after")
                num_parts = self.num_parts(left, Int32(0))
                if const_expr(self.accumulate):
                    # d to which nothing is added stays as it is
                    num_parts = num_parts if end_k > first_k else Int32(0)
                for p in cutlass.range(num_parts, unroll=1):
                    sums = cute.make_rmem_tensor(tTRcD.shape, Float32)
                    cute.copy(load_copy, tTRtD[None, None, None, p, sums_state.index], sums)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(self.masks and not self.accumulate):
                        if end_k == first_k:  # nothing was summed: the accumulator holds what it held
                            sums.fill(0.0)
                    out = load_copy, None, sD, tma_d, mD_left, None, None, left, None
                    num_stored = self.finish(sums, tTRcD, out, Int32(0), Int32(0), p, tidx, num_stored, ())
                if const_expr(self.accumulate):
                    self.start_group(tDtD, d, walk, index + ACCUMULATORS * step, total, sums_state.index, tidx)
                self.release(accumulators, sums_state)
                sums_state.advance()
            if const_expr(self.tma_store):
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            tensor_memory_fence("before")
            epilogue_barrier()
            if warp == 0:
                tensor_memory_fence("after")
                cute.arch.dealloc_tmem(tCtD.iterator, self.columns)

    @cute.jit
    def load_groups(self, ring, tiled_mma: cute.TiledMma, a: tuple, b: tuple, walk: tuple, ranks: tuple, tiles: tuple):
        """Feed the ring; ``a``, ``b``: an operand's copy, the operand, its ring. ``tiles``: the first, step, total."""
        (tma_a, mA, sA), (tma_b, mB, sB) = a, b
        tile_m, tile_n, tile_k = self.tile
        (cluster_m, cluster_n), (rank_m, rank_n), (first_tile, step, total) = self.cluster, ranks, tiles
        cluster_layout = cute.make_layout((1, cluster_m, cluster_n, 1))
        a_mask = b_mask = None
        if const_expr(cluster_n > 1):
            a_mask = cute.make_layout_image_mask(cluster_layout, (0, rank_m, rank_n, 0), mode=2)
        if const_expr(cluster_m > 1):
            b_mask = cute.make_layout_image_mask(cluster_layout, (0, rank_m, rank_n, 0), mode=1)
        thr_mma = tiled_mma.get_slice(0)
        group = Int32(0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(first_tile, total, step):
            group, first_m, first_n, _, _, first_k, end_k, shared = self.place(walk, index, group)
            gA = self.tiles_of_k(mA, group, first_m, first_k, tile_m)
            gB = self.tiles_of_k(mB, group, first_n, first_k, tile_n)
            tAsA, tAgA = self.copies_of(tma_a, sA, thr_mma.partition_A(gA), rank_n, cluster_n)
            tBsB, tBgB = self.copies_of(tma_b, sB, thr_mma.partition_B(gB), rank_m, cluster_m)
            # Matrices that no other tile of the group's rows needs make room first
            once, kept = evict_first_if(shared == 1), Int64(EVICT_NORMAL)
            a_policy = once if const_expr(cute.rank(mA) == 3) else kept
            b_policy = once if const_expr(cute.rank(mB) == 3) else kept
            for k in cutlass.range(cute.ceil_div(end_k - first_k, tile_k), unroll=1):
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
        # Neighbours still signal this CTA's barriers: it stays until every slot has been given back
        for _ in cutlass.range_constexpr(self.stages):
            ring.sync_object_empty.wait(state.index, state.phase)
            state.advance()

    @cute.jit
    def tiles_of_k(self, matrix: cute.Tensor, group: Int32, first: Int32, first_k: Int32, rows: int):
        """An operand's tiles of K from (first, first_k) on."""
        part = cute.domain_offset((first, first_k), part_of(matrix, group))
        return cute.local_tile(part, (rows, self.tile[2]), (0, None))

    @cute.jit
    def copies_of(self, tma, ring: cute.Tensor, tiles: cute.Tensor, rank: Int32, ranks: int):
        """An operand's ring, and its tiles, as TMA copies them."""
        return cpasync.tma_partition(
            tma, rank, cute.make_layout(ranks), cute.group_modes(ring, 0, 3), cute.group_modes(tiles, 0, 3)
        )

    @cute.jit
    def left_of(self, d: cute.Tensor, group: Int32, first_m: Int32, first_n: Int32, end_m: Int32, end_n: Int32):
        """The part of d, in gmem, that begins at a place and ends with its group."""
        alignment = const_expr(16 if self.tma_store else self.out.width // 8)
        return corner_of(part_of(d, group), first_m, first_n, end_m, end_n, alignment)

    @cute.jit
    def start_group(self, tDtD, d, walk: tuple, index: Int32, total: Int32, accumulator, thread: Int32):
        """Let the sums of the ``index``-th tile, if there is one, start from d, if something is added to it."""
        if index < total:
            group, first_m, first_n, end_m, end_n, first_k, end_k, _ = self.place(walk, index, Int32(0))
            if end_k > first_k:
                left = self.left_of(d, group, first_m, first_n, end_m, end_n)
                self.start_tile(tDtD, left, Int32(0), Int32(0), accumulator, thread)

    @cute.jit
    def send(self, sD, slot: Int32, tma, mOut, gOut, at: tuple, thread: Int32):
        """A part whose rows are all the group's leaves by TMA, the last one's by its threads: below are the next's."""
        rows, columns = const_expr(self.part())
        if rows <= gOut.shape[0]:
            if thread < WARP:
                self.store_by_tma(sD, slot, tma, mOut, at)
        else:
            self.store_part(sD[None, None, slot], gOut, Int32(0), at[1] * columns, thread)
        if thread < WARP:
            cute.arch.cp_async_bulk_commit_group()  # of a copy or of none: slots are counted by these


class GroupedSumsSm100(SumsWalk, GroupedRowsSm100):
    """d (M, N) for each group: a (M, R) and b (N, R), along M and N, summed over the group's rows."""

    masks = True

    def __init__(self, accumulate: bool, config: SumsConfig):
        super().__init__("m", "n", False, config, accumulate=accumulate)
        self.most_rows_first = config.most_rows_first

    send = GemmSm100.send  # no part of d has rows of another group

    @cute.jit
    def clear_next(self, sA: cute.Tensor, sB: cute.Tensor, stage: Int32, num_k: Int32, lane: Int32):
        """Zero the k from ``num_k`` to the next multiple of 16, the next group's, of a tile that has arrived.

        They may be NaN. The warp that multiplies does it alone, while the products of the tiles before run on.
        """
        if num_k % 16 > 0:
            zeros = cute.make_rmem_tensor((CHUNK,), self.dtype)
            zeros.fill(0)
            for s in cutlass.range_constexpr(2):
                operand = sA if const_expr(s == 0) else sB
                chunks = const_expr(self.tile[s] // CHUNK)
                for i in cutlass.range(lane, (16 - num_k % 16) * chunks, WARP, unroll=1):
                    column = operand[(None, num_k % 16 + i // chunks), 0, num_k // 16, stage]
                    cute.autovec_copy(zeros, cute.local_tile(column, (CHUNK,), (i % chunks,)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
