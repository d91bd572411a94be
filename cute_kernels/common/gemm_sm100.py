"""Matrix product for SM100: d = act(a b^T + bias), persistent, warp-specialised, TMA in and out, tcgen05 MMA.

One warp feeds a ring of (A, B) tiles in shared memory by TMA (multicast within a cluster), one multiplies from there
into tensor memory, and four write d. All walk the same sequence of output tiles. There are two accumulators, so that a
tile is written while the next one is summed.

    gmem a, b --TMA--> sA, sB (full / empty mbarriers) --tcgen05.mma--> tensor memory (full / empty mbarriers)
    --tcgen05.ld--> registers --> sD --TMA--> gmem d, or straight to gmem

Compiled and inspected, and its PTX run on the CPU (tests/gemm/test_ptx_sm100.py): no SM100 has run it yet.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.gemm_base import GemmBase
from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.gemm_epilogue import (
    activate,
    add_bias,
    entry_and_tile,
    entry_of,
    load_sums,
    num_tiles,
    store_sums,
    tile_divisors,
    tile_of,
)

WARP_SIZE = 32
EPILOGUE_WARPS = 4  # warps 0 to 3: a warp reaches the 32 lanes of tensor memory of its index modulo 4, and no others
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 192
ACCUMULATORS = 2  # of 256 columns at most: all of tensor memory
TILES_N = (8, 16, 32, 64, 128, 192, 256)  # with 128 rows an instruction is 16 wide or more
STORE_STAGES = 2
CHUNK = 8  # elements of 16 bytes: what no swizzle takes apart


class GemmSm100(GemmBase):
    """See the module; ``activation``, ``accumulate`` and ``tma_store`` as in the builder ``gemm``.

    An element's sum runs over the whole K, ascending, in one fp32 accumulator that starts from zero (or d). In which
    order a tcgen05.mma adds its 16 products to the accumulator is not documented and, unlike wgmma's, not measured:
    that this kernel is ``serial_k16``, that its tiles agree with each other and with SM90 bit by bit, is unproven.
    Hence no pairs of CTAs an instruction either: one more order to prove.
    """

    def __init__(
        self,
        activation: Optional[str],
        a_major: str,
        b_major: str,
        transposed: bool,
        accumulate: bool,
        tma_store: bool,
        config: GemmConfig,
    ):
        tile_m, tile_n, tile_k = config.tile
        if tile_m not in (64, 128) or tile_n not in TILES_N or tile_n < tile_m // 8 or tile_k not in (64, 128, 256):
            raise ValueError(f"expected a tile (64 or 128, one of {TILES_N}, 64, 128 or 256), got {config.tile}")
        if tma_store and tile_m != 128:
            raise ValueError("d is stored by TMA from tiles of 128 rows only, where a thread holds a row")
        super().__init__(activation, a_major, b_major, transposed, accumulate, tma_store, config)
        self.columns = max(32, 1 << (ACCUMULATORS * tile_n - 1).bit_length())  # tensor memory comes in powers of two

    @cute.jit
    def multiply(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        z: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        valid_k: Optional[cute.Tensor],
        rows: tuple,
        num_ctas: Int32,
        stream,
    ):
        """Launch, of a (M, K), b (N, K) and d (M, N), or of batches (..., L). ``rows``: as in ``finish``."""
        tiled_mma, sA_layout, sB_layout, tma_a, mA, tma_b, mB = self.maps_of(a, b)
        tma_d, mD, tma_z, mZ, sD_layout = None, None, None, None, None
        if const_expr(self.tma_store):
            sD_layout = sm100.make_smem_layout_epi(self.out, LayoutEnum.ROW_MAJOR, self.part(), STORE_STAGES)
            one = cute.slice_(sD_layout, (None, None, 0))
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_d, mD = cpasync.make_tiled_tma_atom(store, d, one, self.part())
            if const_expr(z is not None):
                tma_z, mZ = cpasync.make_tiled_tma_atom(store, z, one, self.part())
        tiles_m, tiles_n = self.tiles_of(d)
        self.kernel(
            tiled_mma, sA_layout, sB_layout, sD_layout, tma_a, mA, tma_b, mB, tma_d, mD, tma_z, mZ, d, z, bias, valid_k,
            tile_divisors(tiles_m, tiles_n, self.group, cute.rank(d) == 3), rows,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster[0] * self.cluster[1], 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def maps_of(self, a: cute.Tensor, b: cute.Tensor) -> tuple:
        """The MMA, the layouts of the operands' rings, and each operand's TMA copy and coordinates."""
        self.a_major, self.b_major = (LayoutEnum.from_tensor(operand).mma_major_mode() for operand in (a, b))
        tiled_mma = sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a_major, self.b_major, Float32, tcgen05.CtaGroup.ONE, self.tile[:2]
        )
        sA_layout = sm100.make_smem_layout_a(tiled_mma, self.tile, self.dtype, self.stages)
        sB_layout = sm100.make_smem_layout_b(tiled_mma, self.tile, self.dtype, self.stages)
        one_a, one_b = (cute.slice_(layout, (None, None, None, 0)) for layout in (sA_layout, sB_layout))
        cluster_shape = (1, *self.cluster, 1)
        a_map = cute.nvgpu.make_tiled_tma_atom_A(
            self.load_op(self.cluster[1]), a, one_a, self.tile, tiled_mma, cluster_shape
        )
        b_map = cute.nvgpu.make_tiled_tma_atom_B(
            self.load_op(self.cluster[0]), b, one_b, self.tile, tiled_mma, cluster_shape
        )
        return tiled_mma, sA_layout, sB_layout, *a_map, *b_map

    def pipelines(self, ring_barriers, sums_barriers) -> tuple:
        """(the operands' ring, the accumulators).

        A slot is free for this CTA's loads when all CTAs that they go to have multiplied what was in it.
        """
        (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = self.tile, self.cluster
        cluster_layout = cute.make_layout((1, cluster_m, cluster_n, 1))
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=ring_barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, cluster_m + cluster_n - 1),
            tx_count=(tile_m + tile_n) * tile_k * self.dtype.width // 8,
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=sums_barriers,
            num_stages=ACCUMULATORS,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS),
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )
        return ring, accumulators

    def part(self) -> tuple[int, int]:
        """Part of an accumulator that is in registers at a time: 128 bytes of each row of d if TMA stores them."""
        return self.tile[0], min(self.tile[1], 128 * 8 // self.out.width if self.tma_store else 32)

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
        tma_z: Optional[cute.CopyAtom],
        mZ: Optional[cute.Tensor],
        d: cute.Tensor,
        z: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        valid_k: Optional[cute.Tensor],
        divisors: tuple,
        rows: tuple,
    ):
        tile_m, tile_n, tile_k = self.tile
        cluster_m, cluster_n = self.cluster
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        # Place in the cluster: rank = m + cluster_m * n. Those of one m share A, those of one n share B
        cluster_layout = cute.make_layout((1, cluster_m, cluster_n, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % cluster_m, rank // cluster_m

        smem = SmemAllocator()
        ring_barriers = smem.allocate_array(Int64, 2 * self.stages)
        sums_barriers = smem.allocate_array(Int64, 2 * ACCUMULATORS)
        tensor_memory = smem.allocate_array(Int32, 1)
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        sD = None
        if const_expr(self.tma_store):
            sD = smem.allocate_tensor(self.out, sD_layout.outer, byte_alignment=1024, swizzle=sD_layout.inner)
        ring, accumulators = self.pipelines(ring_barriers, sums_barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        if warp == 0:
            cute.arch.alloc_tmem(self.columns, tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        tensor_memory_fence("before")
        cute.arch.barrier()
        tensor_memory_fence("after")
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        sums_shape = tiled_mma.partition_shape_C((tile_m, tile_n))
        tCtD = cute.make_tensor(
            cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_memory),
            tiled_mma.make_fragment_C(cute.append(sums_shape, ACCUMULATORS)).layout,
        )

        cute.arch.griddepcontrol_wait()
        num_k = mA.shape[1]
        if const_expr(valid_k is not None):
            num_k = cutlass.max(cutlass.min(num_k, valid_k[0]), 0)
        k_tiles = cute.ceil_div(num_k, tile_k)
        tiles_m, tiles_n = self.tiles_of(d)
        first_tile = bidx // (cluster_m * cluster_n)
        step = grid // (cluster_m * cluster_n)

        if warp == LOAD_WARP:
            thr_mma = tiled_mma.get_slice(0)
            tCgA = thr_mma.partition_A(cute.local_tile(mA, (tile_m, tile_k), (None,) * cute.rank(mA)))
            tCgB = thr_mma.partition_B(cute.local_tile(mB, (tile_n, tile_k), (None,) * cute.rank(mB)))
            tAsA, tAgA = cpasync.tma_partition(
                tma_a, rank_n, cute.make_layout(cluster_n), cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3)
            )
            tBsB, tBgB = cpasync.tma_partition(
                tma_b, rank_m, cute.make_layout(cluster_m), cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3)
            )
            a_mask = b_mask = None
            if const_expr(cluster_n > 1):
                a_mask = cute.make_layout_image_mask(cluster_layout, (0, rank_m, rank_n, 0), mode=2)
            if const_expr(cluster_m > 1):
                b_mask = cute.make_layout_image_mask(cluster_layout, (0, rank_m, rank_n, 0), mode=1)
            a, b = (tma_a, mA, tAgA, tAsA, a_mask), (tma_b, mB, tBgB, tBsB, b_mask)
            place, walk = (rank_m, rank_n), (first_tile, step)
            state = self.load_tiles(ring, a, b, d, divisors, place, walk, k_tiles)
            # Neighbours still signal this CTA's barriers: it stays until every slot has been given back
            for _ in cutlass.range_constexpr(self.stages):
                ring.sync_object_empty.wait(state.index, state.phase)
                state.advance()

        if warp == MMA_WARP:
            tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            # An accumulator is free from the beginning, unless it is to start from d: the first wait is for that
            role = pipeline.PipelineUserType.Consumer if self.accumulate else pipeline.PipelineUserType.Producer
            sums_state = pipeline.make_pipeline_state(role, ACCUMULATORS)
            for _index in cutlass.range(first_tile, num_tiles(tiles_m, tiles_n, d), step):
                accumulators.producer_acquire(sums_state)
                tensor_memory_fence("after")
                tiled_mma.set(tcgen05.Field.ACCUMULATE, self.accumulate)
                target = tCtD[None, None, None, sums_state.index]
                for k in cutlass.range(k_tiles, unroll=1):
                    ring.consumer_wait(state)
                    tensor_memory_fence("after")
                    if const_expr(valid_k is not None):
                        self.mask(sA, sB, state.index, num_k - k * tile_k)
                    for k16 in cutlass.range_constexpr(tile_k // 16):
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
            cD = cute.make_identity_tensor(self.part())
            load_copy = self.tensor_memory_copy(tDtD, True)
            thr_load = load_copy.get_slice(tidx)
            tTRtD, tTRcD = thr_load.partition_S(tDtD), thr_load.partition_D(cD)
            sums_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
            if const_expr(self.accumulate):
                for i in cutlass.range(ACCUMULATORS, unroll=1):
                    tile = first_tile + i * step
                    self.start(tDtD, d, tile, tiles_m, tiles_n, divisors, rank_m, rank_n, Int32(i), tidx)
                    self.release(accumulators, sums_state)
                    sums_state.advance()
                sums_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
            num_stored = Int32(0)
            for index in cutlass.range(first_tile, num_tiles(tiles_m, tiles_n, d), step):
                entry, tile = entry_and_tile(index, divisors)
                m, n = tile_of(tile, tiles_m, divisors, self.group)
                m = m * cluster_m + rank_m
                n = n * cluster_n + rank_n
                mD_entry, d_entry = entry_of(mD, entry, divisors), entry_of(d, entry, divisors)
                accumulators.consumer_wait(sums_state)
                tensor_memory_fence("after")
                for p in cutlass.range(self.num_parts(d, n), unroll=1):
                    sums = cute.make_rmem_tensor(tTRcD.shape, Float32)
                    cute.copy(load_copy, tTRtD[None, None, None, p, sums_state.index], sums)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(valid_k is not None and not self.accumulate):
                        if k_tiles == 0:  # nothing was summed: the accumulator holds what it held
                            sums.fill(0.0)
                    out = load_copy, bias, sD, tma_d, mD_entry, tma_z, mZ, d_entry, z
                    num_stored = self.finish(sums, tTRcD, out, m, n, p, tidx, num_stored, rows)
                if const_expr(self.accumulate):
                    later = index + ACCUMULATORS * step
                    self.start(tDtD, d, later, tiles_m, tiles_n, divisors, rank_m, rank_n, sums_state.index, tidx)
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
    def finish(
        self,
        sums: cute.Tensor,
        coordinates: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        p: Int32,
        thread: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        """Finish and store the sums of part ``p`` of tile (m, n); return how many parts have been stored so far.

        ``out``: where to, and by what. ``rows``: what a kernel derived from this one knows of each row of d.
        """
        load_copy, bias, sD, tma_d, mD, tma_z, mZ, d, z = out
        first_n = n * self.tile[1] + p * self.part()[1]
        if const_expr(bias is not None):
            if const_expr(self.transposed):
                add_bias(sums, coordinates, bias, m * self.tile[0], 0)
            else:
                add_bias(sums, coordinates, bias, first_n, 1)
        if const_expr(self.tma_store):
            at = (m, n * (self.tile[1] // self.part()[1]) + p)
            num_stored = self.store(load_copy, sums, sD, tma_d, mD, tma_z, mZ, d, z, at, thread, num_stored)
        else:
            store_sums(sums, coordinates, d, z, m * self.tile[0], first_n, self.activation)
        return num_stored

    def tensor_memory_copy(self, tDtD: cute.Tensor, loads: bool):
        """Copy of a part of an accumulator to or from registers.

        128 rows lie in all lanes, and a thread has a row. 64 rows lie in half of each warp's lanes, one accumulator
        beside the other, and a thread has pairs of neighbouring columns, as after a warp-level MMA.
        """
        if self.tile[0] == 128:
            op, columns = tcgen05.Ld32x32bOp if loads else tcgen05.St32x32bOp, 1
        else:
            op, columns = tcgen05.Ld16x256bOp if loads else tcgen05.St16x256bOp, 8
        atom = cute.make_copy_atom(op(tcgen05.Repetition(self.part()[1] // columns)), Float32)
        return tcgen05.make_tmem_copy(atom, tDtD[None, None, 0, 0])

    @cute.jit
    def num_parts(self, d: cute.Tensor, n: Int32):
        """How many parts of the tile begin before the last column of d."""
        rest = cutlass.min(d.shape[1] - n * self.tile[1], self.tile[1])
        return cute.ceil_div(cutlass.max(rest, 0), self.part()[1])

    @cute.jit
    def release(self, accumulators, state):
        """A warp is done with an accumulator: what it loaded is in registers, what it stored in tensor memory."""
        tensor_memory_fence("before")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            accumulators.consumer_release(state)

    @cute.jit
    def start(
        self, tDtD, d, index: Int32, tiles_m, tiles_n, divisors, rank_m: Int32, rank_n: Int32, accumulator, tidx: Int32
    ):
        """Let the sums of the ``index``-th tile, if there is one, start from d: no later addition would round so."""
        if index < tiles_m * tiles_n:
            m, n = tile_of(index, tiles_m, divisors, self.group)
            m = m * self.cluster[0] + rank_m
            n = n * self.cluster[1] + rank_n
            self.start_tile(tDtD, d, m, n, accumulator, tidx)

    @cute.jit
    def start_tile(self, tDtD, d, m: Int32, n: Int32, accumulator, tidx: Int32):
        """Let the sums of tile (m, n) start from d."""
        store_copy = self.tensor_memory_copy(tDtD, False)
        thr_store = store_copy.get_slice(tidx)
        tRTtD = thr_store.partition_D(tDtD)
        tRTcD = thr_store.partition_S(cute.make_identity_tensor(self.part()))
        for p in cutlass.range(self.num_parts(d, n), unroll=1):
            sums = cute.make_rmem_tensor(tRTcD.shape, Float32)
            first_m, first_n = m * self.tile[0], n * self.tile[1] + p * self.part()[1]
            if const_expr(self.tma_store):  # a thread has a row, which starts on 16 bytes
                if first_m + tidx < d.shape[0] and first_n + self.part()[1] <= d.shape[1]:
                    row = cute.local_tile(d, (1, self.part()[1]), (first_m + tidx, first_n // self.part()[1]))
                    whole = cute.make_layout(self.part()[1])
                    cute.autovec_copy(cute.make_tensor(row.iterator, whole), cute.make_tensor(sums.iterator, whole))
                else:
                    load_sums(sums, tRTcD, d, first_m, first_n)
            else:
                load_sums(sums, tRTcD, d, first_m, first_n)
            cute.copy(store_copy, sums, tRTtD[None, None, None, p, accumulator])
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def mask(self, sA: cute.Tensor, sB: cute.Tensor, stage: Int32, num_k: Int32):
        """Zero the k beyond ``num_k`` of a tile that has arrived: what lies there may be NaN, in either operand.

        The warp that multiplies does it alone: a tile of d has one such k tile at most, while the products of the ones
        before run on, and another warp would have to be told and waited for.
        """
        if num_k < self.tile[2]:
            zeros = cute.make_rmem_tensor((CHUNK,), self.dtype)
            zeros.fill(0)
            lane = cute.arch.lane_idx()
            for s in cutlass.range_constexpr(2):
                operand, major = (sA, self.a_major) if const_expr(s == 0) else (sB, self.b_major)
                if const_expr(major == OperandMajorMode.K):
                    for row in cutlass.range(lane, self.tile[s], WARP_SIZE, unroll=1):
                        for k in cutlass.range_constexpr(0, self.tile[2], CHUNK):
                            chunk = operand[(row, None), 0, k // 16, stage]
                            chunk = cute.local_tile(chunk, (CHUNK,), (k % 16 // CHUNK,))
                            if num_k <= k:
                                cute.autovec_copy(zeros, chunk)
                            elif num_k < k + CHUNK:
                                for i in cutlass.range_constexpr(1, CHUNK):
                                    if num_k <= k + i:
                                        chunk[i] = self.dtype(0.0)
                else:
                    chunks = const_expr(self.tile[s] // CHUNK)
                    for i in cutlass.range(lane, (self.tile[2] - num_k) * chunks, WARP_SIZE, unroll=1):
                        k = num_k + i // chunks
                        column = operand[(None, k % 16), 0, k // 16, stage]
                        cute.autovec_copy(zeros, cute.local_tile(column, (CHUNK,), (i % chunks,)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    @cute.jit
    def store(self, load_copy, sums, sD, tma_d, mD, tma_z, mZ, d, z, at: tuple, thread: Int32, num_stored: Int32):
        """A part's way out, ``at`` among the parts of d; returns how many parts have been stored so far."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out, num_bits_per_copy=128)
        copy = cute.make_tiled_copy_D(atom, load_copy)
        tRS_sD = copy.get_slice(thread).partition_D(sD)
        for output in cutlass.range_constexpr(2):
            atom_out, mOut, gOut = (tma_z, mZ, z) if const_expr(output == 0) else (tma_d, mD, d)
            if const_expr(mOut is not None):
                if const_expr(output == 1 and self.activation is not None):
                    sums.store(activate(sums.load(), self.activation))
                rOut = cute.make_rmem_tensor(sums.shape, self.out)
                rOut.store(sums.load().to(self.out))
                slot = num_stored % STORE_STAGES
                # The store before the last one has read its slot: its warp says so to all
                if thread < WARP_SIZE:
                    cute.arch.cp_async_bulk_wait_group(STORE_STAGES - 1, read=True)
                epilogue_barrier()
                cute.copy(copy, copy.retile(rOut), tRS_sD[None, None, None, slot])
                cute.arch.fence_proxy("async.shared", space="cta")
                epilogue_barrier()
                self.send(sD, slot, atom_out, mOut, gOut, at, thread)
                num_stored += 1
        return num_stored

    @cute.jit
    def send(self, sD, slot: Int32, tma, mOut, gOut, at: tuple, thread: Int32):
        """A part of a tile, which lies in its slot of sD, on to gmem."""
        if thread < WARP_SIZE:
            self.store_by_tma(sD, slot, tma, mOut, at)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_by_tma(self, sD, slot: Int32, tma, mOut, at: tuple):
        """Issue the copy of a part of a tile from its slot of sD."""
        gPart = cute.local_tile(mOut, self.part(), at)
        tSsD, tSgD = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gPart, 0, 2)
        )
        cute.copy(tma, tSsD[None, slot], tSgD)


def epilogue_barrier():
    """All epilogue threads meet."""
    cute.arch.barrier(barrier_id=1, number_of_threads=EPILOGUE_WARPS * WARP_SIZE)


def tensor_memory_fence(side: str):
    """Order this thread's accesses to tensor memory with the others' across what synchronises them."""
    cute.arch.inline_ptx(f"tcgen05.fence::{side}_thread_sync;")
