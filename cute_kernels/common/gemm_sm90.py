"""Matrix product for SM90: d = act(a b^T + bias), persistent, warp-specialised, TMA in and out, warpgroup MMA.

One warp feeds a ring of (A, B) tiles in shared memory by TMA (multicast within a cluster); one or two consumer
warpgroups multiply from there into fp32 registers and write d. All walk the same sequence of output tiles, so the
next tile's loads run while this one is written. Two consumers share a tile; or take tiles in turn (`ping_pong`), and
what one does beside its products, such as an activation or reading what it adds to, takes no time of the tensor cores.

    gmem a, b --TMA--> sA, sB (full / empty mbarriers) --wgmma--> registers --stmatrix--> sD --TMA--> gmem d

From sD element by element where rows of d do not start on 16 bytes; straight from registers where d is transposed, a
tile has 8 columns or fewer than 64 rows, or the ring leaves no room for sD.

Few tokens wait for a chain of products, one after the other, 18 cycles each: so long an instruction's 64 rows and eight
tokens take from shared memory. So nothing else may stand in their way: tiles are deep, come by one copy, and are few
rows of many CTAs (an instruction's other rows are not looked at); what a tile costs beside its products is done in
their midst.

The contract ``serial_k16``: an element's sum runs over the whole K, ascending, 16 at a time, in one accumulator that
starts from zero (or d). Nothing here depends on the tile's shape but who does it.

Profile: ncu --clock-control none -k regex:Gemm python -m bench.bench_gemm --filter fwd.4096x4096x4096
"""

import math
from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.gemm_base import GemmBase
from cute_kernels.common.gemm_config import BLOCK, SHARED_MEMORY, STORE_STAGES, GemmConfig
from cute_kernels.common.gemm_epilogue import (
    activate,
    add_bias,
    by_blocks,
    entry_and_tile,
    entry_of,
    load_sums,
    num_tiles,
    shifted,
    store_sums,
    tile_divisors,
    tile_of,
)

WARPGROUP = 128
# The first of two each: of those that share a tile, and of those that take turns
TILE_BARRIER, ORDER_BARRIER = 1, 3
# Registers of a producer's and a consumer's thread, by ping_pong; 65536 in all. Sums are 128 of them, or up to 192
REGISTERS = {False: (40, 232), True: (24, 240)}
REGISTERS_OF_THREE = 32, 160  # where three consumers share a tile; sums are up to 96 of them
# K of the products in a row. Of more ptxas keeps the addresses of all in plain registers, for want of uniform ones
CHUNK = 128


class GemmSm90(GemmBase):
    """See the module; arguments as in the builder ``gemm``."""

    def __init__(
        self,
        activation: Optional[str],
        a_major: str,
        b_major: str,
        transposed: bool,
        accumulate: bool,
        tma_store: bool,
        config: GemmConfig,
        multi_block_tma: bool = False,
    ):
        if config.tile[0] not in (16, 32, 64, 128, 192) or config.ping_pong and config.tile[0] == 192:
            raise ValueError(f"config.tile must have 16, 32, 64, 128 or, shared, 192 rows, got {config}")
        if multi_block_tma and (config.tile[2] % BLOCK or "k" not in (a_major, b_major)):
            raise ValueError(f"multi_block_tma takes operands along k, and tiles of {BLOCK} of it, got {config.tile}")
        if accumulate and config.overlapping:
            raise ValueError("config's tiles must not overlap where what is stored was read before")
        super().__init__(activation, a_major, b_major, transposed, accumulate, tma_store, config)
        # d leaves by way of shared memory; transposed by TMA alone
        self.staged = config.stores_by_tma("sm_90a", transposed) and (tma_store or not transposed)
        if tma_store and not self.staged:
            raise ValueError(
                f"config.tile must have 64 rows and 16 columns, or multiples, and room for tma_store, got {config}"
            )
        self.ring_bytes = config.ring_bytes
        self.multi_block_tma = multi_block_tma
        # Rows of an instruction: those beyond the tile's are whatever lies behind them, at the ring's end B's tiles
        self.mma_rows = max(config.tile[0], 64)
        if (self.mma_rows - config.tile[0]) * BLOCK > config.stages * config.tile[1] * config.tile[2]:
            raise ValueError(f"config's tiles of B must hold what an instruction reads behind A's, got {config}")
        self.turns = config.turns
        # Consumer warpgroups of a tile, and of the CTA
        self.partners = 1 if config.ping_pong else self.mma_rows // 64
        self.consumers = self.partners * self.turns
        registers = REGISTERS_OF_THREE if self.consumers == 3 else REGISTERS[config.ping_pong]
        self.producer_registers, self.consumer_registers = registers
        # Tiles of K whose products run while the next ones are issued. Where another warpgroup fills the tensor cores'
        # time none, and slots are free earlier: 256x14336x4096 49.6 -> 48.2 us, but 256x4096x14336 in one 54.6 -> 60.7
        self.in_flight = 0 if self.partners > 1 else 1
        # A slot no longer in flight is free after the first part of a tile's products: with none in flight that is all
        self.chunks = max(config.tile[2] // CHUNK, 1) if self.in_flight else 1
        # Without one at each tile of K ptxas has every product of some of these kernels waited for alone
        self.fence_each_tile = config.tile[1] >= 192 or config.ping_pong or self.partners == 3
        if self.stages <= self.in_flight:
            raise ValueError(f"config.stages must be more than {self.in_flight}, got {self.stages}")

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
        tma_d, mD, tma_z, mZ = None, None, None, None
        sD_layout = self.store_layout() if const_expr(self.staged) else None
        if const_expr(self.tma_store):
            one = cute.slice_(sD_layout, (None, None, 0))
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_d, mD = cpasync.make_tiled_tma_atom(store, d, one, self.store_tile())
            if const_expr(z is not None):
                tma_z, mZ = cpasync.make_tiled_tma_atom(store, z, one, self.store_tile())
        tiles_m, tiles_n = self.tiles_of(d)
        self.kernel(
            tiled_mma, sA_layout, sB_layout, sD_layout, tma_a, mA, tma_b, mB, tma_d, mD, tma_z, mZ, d, z, bias, valid_k,
            tile_divisors(tiles_m, tiles_n, self.group, cute.rank(d) == 3), rows,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.consumers + 1) * WARPGROUP, 1, 1],
            cluster=[self.cluster[0] * self.cluster[1], 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def operand_layout(self, layout: LayoutEnum, shape: tuple[int, int]):
        """Swizzled shared memory of an operand's ring: (rows, k, stages), as wgmma reads it."""
        k_major = layout.sm90_mma_major_mode() == warpgroup.OperandMajorMode.K
        kind = sm90.get_smem_layout_atom(layout, self.dtype, shape[1] if k_major else shape[0])
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (*shape, self.stages), order=(0, 1, 2) if k_major else (1, 0, 2))

    def store_tile(self) -> tuple[int, int]:
        """Part of d's tile that is stored at once: 128 bytes of each of 64 rows for each warpgroup of the tile.

        Fewer where an activation needs registers, or the ring the room: 256x12288x4096 with (128, 192) and 5 stages
        41.7 us, with 4 and 128 bytes 45.0.
        """
        rows = 64 * self.partners
        row_bytes = 128 if self.ring_bytes + self.turns * STORE_STAGES * rows * 128 <= SHARED_MEMORY else 64
        columns = min(64 if self.activation is None else 32, row_bytes * 8 // self.out.width)
        return rows, math.gcd(self.tile[1], columns)

    def store_layout(self):
        """Swizzled shared memory of the parts of d that are on their way out: neighbours as in gmem."""
        shape = self.store_tile()
        major, size = (LayoutEnum.COL_MAJOR, shape[0]) if self.transposed else (LayoutEnum.ROW_MAJOR, shape[1])
        atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(major, self.out, size), self.out)
        order = (1, 0, 2) if self.transposed else (0, 1, 2)
        return cute.tile_to_shape(atom, (*shape, self.turns * STORE_STAGES), order=order)

    def load_atom(self, operand: cute.Tensor, layout, shape: tuple[int, int], multicast: int):
        one = cute.slice_(layout, (None, None, 0))
        if const_expr(self.multi_block_tma and LayoutEnum.from_tensor(operand) == LayoutEnum.ROW_MAJOR):
            operand = by_blocks(operand)
        return cpasync.make_tiled_tma_atom(self.load_op(multicast), operand, one, shape, num_multicast=multicast)

    @cute.jit
    def instruction_rows(self, sA: cute.Tensor) -> cute.Tensor:
        """A's ring as an instruction sees it: of 64 rows, where a tile has fewer its own and what lies behind them.

        Each row's sums are its own, and those of rows beyond the tile are not stored. The ring is swizzled in atoms of
        8 rows x 64 of k; where A lies along its rows, of the tile's rows x 8.
        """
        tile_m, _, tile_k = self.tile
        if const_expr(tile_m < self.mma_rows):
            atom_m, atom_k = const_expr((8, BLOCK) if self.majors[0] == "k" else (tile_m, 8))
            of_m, of_k = const_expr((atom_k, 1) if self.majors[0] == "k" else (1, atom_m))
            shape = (atom_m, self.mma_rows // atom_m), (atom_k, tile_k // atom_k), self.stages
            strides = (of_m, atom_m * atom_k), (of_k, tile_m * atom_k), tile_m * tile_k
            sA = cute.make_tensor(sA.iterator, cute.make_layout(shape, stride=strides))
        return sA

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
        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        # Place in the cluster: rank = m + cluster_m * n. Those of one m share A, those of one n share B
        cluster_layout = cute.make_layout((cluster_m, cluster_n, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % cluster_m, rank // cluster_m

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.stages)
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        sD = None
        if const_expr(self.staged):
            sD = smem.allocate_tensor(self.out, sD_layout.outer, byte_alignment=1024, swizzle=sD_layout.inner)
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
        num_k = cute.size(mA, mode=[1])
        if const_expr(valid_k is not None):
            num_k = cutlass.max(cutlass.min(num_k, valid_k[0]), 0)
        # At least one, of zeros where there is nothing to sum: where the loop might not run, the compiler moves what is
        # done to the sums ahead of the wait for them, and ptxas then has every product waited for
        k_tiles = cutlass.max(cute.ceil_div(num_k, tile_k), 1)
        tiles_m, tiles_n = self.tiles_of(d)
        first_tile = bidx // (cluster_m * cluster_n)
        step = grid // (cluster_m * cluster_n)

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if warpgroup_index == 0:
            if const_expr(self.consumers > 1):
                cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                gA = cute.local_tile(mA, (tile_m, tile_k), (None,) * cute.rank(mA))
                gB = cute.local_tile(mB, (tile_n, tile_k), (None,) * cute.rank(mB))
                tAsA, tAgA = cpasync.tma_partition(
                    tma_a, rank_n, cute.make_layout(cluster_n), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
                )
                tBsB, tBgB = cpasync.tma_partition(
                    tma_b, rank_m, cute.make_layout(cluster_m), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
                )
                a_mask = b_mask = None
                if const_expr(cluster_n > 1):
                    a_mask = cute.make_layout_image_mask(cluster_layout, (rank_m, rank_n, 0), mode=1)
                if const_expr(cluster_m > 1):
                    b_mask = cute.make_layout_image_mask(cluster_layout, (rank_m, rank_n, 0), mode=0)
                a, b = (tma_a, mA, tAgA, tAsA, a_mask), (tma_b, mB, tBgB, tBsB, b_mask)
                place, walk = (rank_m, rank_n), (first_tile, step)
                state = self.load_tiles(ring, a, b, d, divisors, place, walk, k_tiles)
                ring.producer_tail(state)
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
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            if const_expr(self.turns > 1):
                state.advance(turn * k_tiles)
            for index in cutlass.range(first_tile + turn * step, num_tiles(tiles_m, tiles_n, d), self.turns * step):
                entry, tile = entry_and_tile(index, divisors)
                m, n = tile_of(tile, tiles_m, divisors, self.group)
                m = m * cluster_m + rank_m
                n = n * cluster_n + rank_n
                if const_expr(self.accumulate):
                    whole = (m + 1) * tile_m <= d.shape[0] and (n + 1) * tile_n <= d.shape[1]
                    if tile_m == self.mma_rows and whole:
                        gD = cute.local_tile(d, (tile_m, tile_n), (m, n))
                        cute.autovec_copy(tiled_mma.get_slice(thread).partition_C(gD), sums)
                    else:
                        load_sums(sums, tCcD, d, m * tile_m, n * tile_n, 8 if self.turns > 1 else 64)
                else:
                    sums.fill(0.0)
                if const_expr(self.turns > 1):
                    # A wait for a slot's parity tells of its last two turns alone: none before the other's last wait
                    if index != first_tile:
                        cute.arch.barrier(barrier_id=ORDER_BARRIER + turn, number_of_threads=2 * WARPGROUP)
                if const_expr(not self.fence_each_tile):
                    warpgroup.fence()
                arrived = cutlass.Boolean(False)
                for k in cutlass.range(k_tiles):
                    ring.consumer_wait(state, arrived)
                    here = state.clone()
                    if const_expr(valid_k is not None):
                        self.mask(sA, sB, here.index, num_k - k * tile_k, thread, turn)
                    state.advance()
                    operands = tCrA[None, None, None, here.index], tCrB[None, None, None, here.index]
                    if const_expr(self.fence_each_tile):
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
                    if index + step < num_tiles(tiles_m, tiles_n, d):
                        cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER + 1 - turn, number_of_threads=2 * WARPGROUP)
                    state.advance(k_tiles)  # beyond the other's tile
                if const_expr(self.in_flight == 1):
                    warpgroup.wait_group(0)
                    ring.consumer_release(held)

                mD_entry, d_entry = entry_of(mD, entry, divisors), entry_of(d, entry, divisors)
                out = tiled_mma, bias, sD, tma_d, mD_entry, tma_z, mZ, d_entry, z
                if const_expr(self.overlapping):
                    out = self.shifted_outputs(out, self.shift(m, n, d))
                # d to which nothing is added stays as it is, -0 too: zeros added would make +0 of it
                has_sums = True if const_expr(valid_k is None or not self.accumulate) else num_k > 0
                if has_sums:
                    num_stored = self.finish(sums, tCcD, out, m, n, thread, turn, num_stored, rows)
            if const_expr(self.tma_store):
                if thread < 32:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply_chunk(self, tiled_mma: cute.TiledMma, sums: cute.Tensor, operands: tuple, chunk: Int32):
        """Issue the products of a part of a tile of K, in a row; ``operands``: the tile's."""
        steps = const_expr(self.tile[2] // self.chunks // 16)
        for k16 in cutlass.range_constexpr(steps):
            at = (None, None, chunk * steps + k16)
            cute.gemm(tiled_mma, sums, operands[0][at], operands[1][at], sums)
        warpgroup.commit_group()

    @cute.jit
    def shifted_outputs(self, out: tuple, shift: tuple) -> tuple:
        """The same for a tile that begins ``shift`` elsewhere; ``out``: as in ``finish``."""
        tiled_mma, bias, sD, tma_d, mD, tma_z, mZ, d, z = out
        if const_expr(self.tma_store):
            mD = cute.domain_offset(shift, mD)
            mZ = cute.domain_offset(shift, mZ) if const_expr(mZ is not None) else None
        bias = shifted(bias, (shift[0 if self.transposed else 1],))
        return tiled_mma, bias, sD, tma_d, mD, tma_z, mZ, shifted(d, shift), shifted(z, shift)

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        tCcD: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        thread: Int32,
        turn: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        """Finish and store the sums of tile (m, n); return how many parts have been stored so far.

        ``out``: where to, and by what. ``rows``: what a kernel derived from this one knows of each row of d.
        """
        tiled_mma, bias, sD, tma_d, mD, tma_z, mZ, d, z = out
        if const_expr(self.staged):
            num_stored = self.store(
                tiled_mma, sums, tCcD, bias, sD, tma_d, mD, tma_z, mZ, d, z, m, n, thread, turn, num_stored
            )
        else:
            if const_expr(bias is not None):
                if const_expr(self.transposed):
                    add_bias(sums, tCcD, bias, m * self.tile[0], 0)
                else:
                    add_bias(sums, tCcD, bias, n * self.tile[1], 1)
            tile_rows = const_expr(None if self.tile[0] == self.mma_rows else self.tile[0])
            store_sums(sums, tCcD, d, z, m * self.tile[0], n * self.tile[1], self.activation, tile_rows)
        return num_stored

    @cute.jit
    def mask(self, sA: cute.Tensor, sB: cute.Tensor, stage: Int32, num_k: Int32, thread: Int32, turn: Int32):
        """Zero the k beyond ``num_k`` of a tile that has arrived: what lies there may be NaN, in either operand."""
        if num_k < self.tile[2]:
            width = self.tile[2] - num_k
            for s in cutlass.range_constexpr(2):
                operand = sA if const_expr(s == 0) else sB
                for i in cutlass.range(thread, self.tile[s] * width, self.partners * WARPGROUP):
                    operand[i % self.tile[s], num_k + i // self.tile[s], stage] = self.dtype(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.partners_meet(turn)

    def partners_meet(self, turn: Int32):
        """A barrier of all threads that share a tile."""
        number = TILE_BARRIER + turn if self.turns > 1 else TILE_BARRIER
        cute.arch.barrier(barrier_id=number, number_of_threads=self.partners * WARPGROUP)

    @cute.jit
    def store(
        self,
        tiled_mma,
        sums,
        tCcD,
        bias,
        sD,
        tma_d,
        mD,
        tma_z,
        mZ,
        d,
        z,
        m: Int32,
        n: Int32,
        thread: Int32,
        turn: Int32,
        num_stored: Int32,
    ):
        """A tile's way out, 128 bytes of its rows at a time; returns how many parts have been stored so far."""
        part = self.store_tile()
        if const_expr(self.out.width == 16):
            atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(self.transposed, 4), self.out)
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out)
        pattern = cute.make_tiled_copy_C_atom(
            cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16), tiled_mma
        )
        copy = cute.make_tiled_copy_S(atom, pattern)
        thr_copy = copy.get_slice(thread)
        tRS_sD = thr_copy.partition_D(sD)
        tRS_sums, tRS_cD = copy.retile(sums), copy.retile(tCcD)
        shape = cute.shape(thr_copy.partition_S(sD))[:3]
        parts_m, parts_n = const_expr(self.tile[0] // part[0]), const_expr(self.tile[1] // part[1])
        for p in cutlass.range_constexpr(parts_m * parts_n):
            part_m, part_n = m * parts_m + p // parts_n, n * parts_n + p % parts_n
            rPart = cute.make_rmem_tensor(shape, Float32)
            for v in cutlass.range_constexpr(cute.size(rPart)):
                rPart[v] = tRS_sums[p * cute.size(rPart) + v]
                if const_expr(bias is not None):
                    place = tRS_cD[p * cute.size(rPart) + v]
                    feature = m * self.tile[0] + place[0] if self.transposed else n * self.tile[1] + place[1]
                    rPart[v] = rPart[v] + bias[cutlass.min(feature, bias.shape[0] - 1)].to(Float32)
            for output in cutlass.range_constexpr(2):
                atom_out, mOut, gOut = (tma_z, mZ, z) if const_expr(output == 0) else (tma_d, mD, d)
                if const_expr(gOut is not None):
                    rOut = cute.make_rmem_tensor(shape, self.out)
                    if const_expr(output == 1 and self.activation is not None):
                        rPart.store(activate(rPart.load(), self.activation))
                    rOut.store(rPart.load().to(self.out))
                    slot = turn * STORE_STAGES + num_stored % STORE_STAGES
                    if const_expr(self.tma_store):
                        # The store before the last one has read its slot: its warp says so to all
                        if thread < 32:
                            cute.arch.cp_async_bulk_wait_group(STORE_STAGES - 1, read=True)
                        self.partners_meet(turn)
                    cute.copy(copy, rOut, tRS_sD[None, None, None, slot])
                    if const_expr(self.tma_store):
                        cute.arch.fence_proxy("async.shared", space="cta")
                    self.partners_meet(turn)
                    self.send(sD, slot, atom_out, mOut, gOut, part_m, part_n, thread)
                    num_stored += 1
        return num_stored

    @cute.jit
    def send(self, sD, slot: Int32, tma, mOut, gOut, part_m: Int32, part_n: Int32, thread: Int32):
        """A part of a tile, which lies in its slot of sD, on to gmem."""
        part = self.store_tile()
        if const_expr(not self.tma_store):
            # The slot is written again after the next meeting: all have read it then
            self.store_part(sD[None, None, slot], gOut, part_m * part[0], part_n * part[1], thread)
        elif thread < 32:
            self.store_by_tma(sD, slot, tma, cute.local_tile(mOut, part, (part_m, part_n)))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_by_tma(self, sD, slot: Int32, tma, gPart):
        """Issue the copy of a part of a tile from its slot of sD."""
        tSsD, tSgD = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gPart, 0, 2)
        )
        cute.copy(tma, tSsD[None, slot], tSgD)

    @cute.jit
    def store_part(self, sPart: cute.Tensor, d: cute.Tensor, first_m: Int32, first_n: Int32, thread: Int32):
        """Copy a part to rows that TMA cannot address, element by element, inside the matrix."""
        rows, columns = const_expr(self.store_tile())
        column = thread % columns
        if first_n + column < d.shape[1]:
            last = cutlass.min(d.shape[0] - first_m, rows)
            for row in cutlass.range(thread // columns, last, self.partners * WARPGROUP // columns, unroll=2):
                d[first_m + row, first_n + column] = sPart[row, column]
