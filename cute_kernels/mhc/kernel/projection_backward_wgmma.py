"""The same function as in projection_backward_mma.py, where phi has many rows, for bf16 x on SM90.

    dx[m, k] = sum_j dH[m, j] phi'[j, k] + 2 x[m, k] dmean_square[m] / K
             + pre_i dlayer[m, c] + sum_o R(i, o) dout_o[m, c]           (what the rest of a hyper-connection adds)
    partials[chunk, j, k] = sum over the chunk's tokens of dH[m, j] x[m, k]

Both by warpgroup MMA from one reading of x. A CTA walks over tiles of 64 tokens of the same columns, of which phi'
stays in shared memory as bf16 terms; the CTAs of a pair have neighbouring columns, and share dH and R
(wgmma_products.py). Two warpgroups compute dx with phi as the second operand; one adds up with x, transposed, as
the first. dx goes where x was as soon as that one has read it, and from there to memory. For the projection alone a
slice is 256 columns, half of them for each warpgroup of dx; with the rest it is sixteen channels of every stream
(dx_tile.py says why), and the warpgroups take turns.

    gmem dH --TMA--> ring in smem --> terms in their place --wgmma with phi--> registers --> + x --> x's slot
    gmem x, dout, dlayer --TMA--> another ring --wgmma of x with dH--> sums of a chunk --> partials in gmem
    gmem R --TMA--> a third ring                                                          x's slot --TMA--> gmem dx

All pairs walk slice after slice of a chunk, then of the next, and so read whole rows together; an element's sum has its
chunk's tokens in ascending order, 16 at a time.

Profile: ncu --clock-control none -k regex:WgmmaBackward python -m bench.bench_mhc --filter bwd.4096x8
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import LAST_BYTES, evict_first_if
from cute_kernels.common.cluster_barriers import wait_in_cluster
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import (
    MAX_BOX,
    SLICE_CHANNELS,
    TILE_TOKENS,
    ProjectionBackwardSpec,
    WarpgroupBackwardConfig,
)
from cute_kernels.mhc.kernel.dx_tile import OCTET, RES_BOX, DxTile
from cute_kernels.mhc.kernel.projection_split import terms_of
from cute_kernels.mhc.kernel.streams import WARP_SIZE, symbolic_streams, take_registers
from cute_kernels.mhc.kernel.tile_ring import advance, load_box, store_box
from cute_kernels.mhc.kernel.wgmma_products import CLUSTER, THREADS, WARPGROUP, WgmmaProducts, loaders, swizzled
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
DX_GROUPS = 2  # warpgroups that compute dx
SUM_WARP, LOADER, MOVER, SPLITTER = 8, 12, 13, 14  # the first warp of those that add up, load dH, move x, split dH
SPLITTERS = 2 * WARP_SIZE
# Registers of a thread that computes dx, that adds up, that helps, by the number of warpgroups that share a tile
REGISTERS = {2: (120, 200, 72), 1: (168, 120, 56)}
PHI_BOX = 64  # columns of phi' that lie together, 128 bytes of each row


class ProjectionWgmmaBackward(WgmmaProducts):
    """See the module. ``config.stages`` tiles of dH and R are in flight, ``config.x_stages`` of the others."""

    def __init__(self, config: WarpgroupBackwardConfig, n: int, orientation: Optional[str], has_layer_grad: bool):
        self.config = config
        self.n = n
        self.orientation = orientation
        self.has_layer_grad = has_layer_grad

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dh: cute.Tensor,
        dmean_square: cute.Tensor,
        dout: Optional[cute.Tensor],
        res: Optional[cute.Tensor],
        dlayer: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        dx: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
        num_clusters: Int32,
        stream,
    ):
        config = self.config
        k_major, transposed = OperandMajorMode.K, OperandMajorMode.MN
        dx_mma = self.tiled_mma((k_major, transposed), config.slice_k // config.sharers, (1, config.sharers, 1))
        sum_mma = self.tiled_mma((transposed, transposed), config.columns, (1, 1, 1))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_x, mX = tma_of(load, by_run(config, x), config.box)
        tma_out, mOut = tma_of(load, by_run(config, dout), config.box)
        tma_layer, mLayer = tma_of(load, dlayer, SLICE_CHANNELS)
        tma_dx, mDx = tma_of(store, by_run(config, dx), config.box)
        tma_dh, mDh = tma_of(multicast, dh, OCTET)
        tma_res, mRes = tma_of(multicast, res, RES_BOX)
        self.kernel(
            dx_mma, sum_mma, tma_x, mX, tma_out, mOut, tma_layer, mLayer, tma_dx, mDx, tma_dh, mDh, tma_res, mRes,
            phi, norm_weight, dmean_square, pre, partials,
        ).launch(
            grid=[num_clusters * CLUSTER, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        dx_mma: cute.TiledMma,
        sum_mma: cute.TiledMma,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        tma_out: Optional[cute.CopyAtom],
        mOut: Optional[cute.Tensor],
        tma_layer: Optional[cute.CopyAtom],
        mLayer: Optional[cute.Tensor],
        tma_dx: Optional[cute.CopyAtom],
        mDx: Optional[cute.Tensor],
        tma_dh: cute.CopyAtom,
        mDh: cute.Tensor,
        tma_res: Optional[cute.CopyAtom],
        mRes: Optional[cute.Tensor],
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dmean_square: cute.Tensor,
        pre: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
    ):
        config = self.config
        registers = const_expr(REGISTERS[config.sharers])
        self.writes_dx, self.needs_dphi = const_expr(mDx is not None), const_expr(partials is not None)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        self.rank = bidx % CLUSTER
        self.num_tokens = dmean_square.shape[0]
        self.first, self.step = bidx // CLUSTER, grid // CLUSTER
        self.items = cute.ceil_div(self.num_tokens, config.chunk) * config.pairs

        smem = SmemAllocator()
        self.allocate(smem)
        warps = const_expr(4 * (config.sharers * self.writes_dx + self.needs_dphi))
        if tidx == 0:
            for stage in cutlass.range_constexpr(config.x_stages):
                cute.arch.mbarrier_init(self.x_full + stage, 1)
                cute.arch.mbarrier_init(self.read + stage, WARPGROUP)
                cute.arch.mbarrier_init(self.done + stage, config.sharers * WARPGROUP)
            if const_expr(self.has_residual_grad):
                for stage in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(self.res_full + stage, loaders(self.n**2 // RES_BOX))
                    cute.arch.mbarrier_init(self.res_empty + stage, CLUSTER * 4)
        self.meet(smem, tidx, config.columns // OCTET, SPLITTERS, CLUSTER * warps)

        if warp_index < SUM_WARP:
            take_registers(registers[0], THREADS)  # also of who has nothing to do: others wait for what is given up
            if const_expr(self.writes_dx):
                self.compute_dx(dx_mma, phi, norm_weight, dmean_square, pre, tidx)
        elif warp_index < LOADER:
            take_registers(registers[1], THREADS)
            if const_expr(self.needs_dphi):
                self.add_up(sum_mma, partials, tidx - SUM_WARP * WARP_SIZE)
        else:
            take_registers(registers[2], THREADS)
            if warp_index == LOADER:
                self.load_shared_rows(tma_dh, mDh, tma_res, mRes)
            elif warp_index == MOVER:
                self.move_tiles((tma_x, tma_out, tma_layer, tma_dx), (mX, mOut, mLayer, mDx))
            else:
                self.split_dh(tidx - SPLITTER * WARP_SIZE)
        self.part()

    @property
    def has_residual_grad(self) -> bool:
        """Whether there is dout."""
        return self.orientation is not None

    def allocate(self, smem):
        """Barriers of x's ring and R's; the rings, as the copies and as the tensor cores see them; phi' in terms."""
        config, kinds = self.config, warpgroup.SmemLayoutAtomKind
        columns, stages, x_stages = config.columns, config.stages, config.x_stages

        def atom(kind):
            return warpgroup.make_smem_layout_atom(kind, BFloat16)

        def view(memory, layout):
            return cute.make_tensor(cute.recast_ptr(memory, layout.inner, BFloat16), layout.outer)

        self.x_full, self.read, self.done = (smem.allocate_array(Int64, x_stages) for _ in range(3))
        kind = kinds.MN_SW128 if config.box == MAX_BOX else kinds.MN_SW32
        layout = cute.tile_to_shape(atom(kind), (config.slice_k, TILE_TOKENS, x_stages), order=(1, 0, 2))
        memory = smem.allocate(2 * cute.cosize(layout.outer), byte_alignment=1024)
        self.sX, size = view(memory, layout), TILE_TOKENS * config.box
        in_boxes = cute.make_layout(
            (TILE_TOKENS, config.box, config.boxes, x_stages), stride=(config.box, 1, size, size * config.boxes)
        )
        self.sBoxes = cute.make_tensor(self.sX.iterator, in_boxes)
        self.sOut, self.sRes, self.sLayer = None, None, None
        if self.has_residual_grad:
            memory = smem.allocate(2 * cute.cosize(in_boxes), byte_alignment=1024)
            self.sOut = cute.make_tensor(cute.recast_ptr(memory, layout.inner, BFloat16), in_boxes)
            self.res_full, self.res_empty = (smem.allocate_array(Int64, stages) for _ in range(2))
            shape = TILE_TOKENS, RES_BOX, self.n**2 // RES_BOX, stages
            size = TILE_TOKENS * RES_BOX
            self.sRes = smem.allocate_tensor(
                Float32,
                cute.make_layout(shape, stride=(RES_BOX, 1, size, size * shape[2])),
                byte_alignment=1024,
                swizzle=cute.make_swizzle(3, 4, 3),
            )
        if self.has_layer_grad:
            shape, size = (TILE_TOKENS, SLICE_CHANNELS, x_stages), TILE_TOKENS * SLICE_CHANNELS
            layout = cute.make_layout(shape, stride=(SLICE_CHANNELS, 1, size))
            swizzle = cute.make_swizzle(1, 4, 3)
            self.sLayer = smem.allocate_tensor(BFloat16, layout, byte_alignment=1024, swizzle=swizzle)
        self.dx_tile = DxTile(config, self.n, self.orientation, (self.sBoxes, self.sOut, self.sLayer, self.sRes))
        # dH comes as octets of fp32 columns; octets 2 s and 2 s + 1 become columns 16 s to 16 s + 15 of a term each
        octets, size = columns // OCTET, TILE_TOKENS * OCTET
        memory = smem.allocate(4 * size * octets * stages, byte_alignment=1024)
        layout = cute.make_layout(
            (TILE_TOKENS, OCTET, (2, octets // 2), stages), stride=(OCTET, 1, (size * octets // 2, size), size * octets)
        )
        self.sOctets = cute.make_tensor(cute.recast_ptr(memory, cute.make_swizzle(1, 4, 3), Float32), layout)
        self.sTerms = view(
            memory, cute.tile_to_shape(atom(kinds.K_SW32), (TILE_TOKENS, 2 * columns, stages), order=(0, 1, 2))
        )
        self.sTerm = []  # each term by itself, transposed
        for t in range(2):
            one = cute.tile_to_shape(atom(kinds.MN_SW32), (columns, TILE_TOKENS), order=(1, 0))
            outer = cute.make_layout((*one.outer.shape, stages), stride=(*one.outer.stride, 2 * columns * TILE_TOKENS))
            pointer = cute.recast_ptr(memory + t * 2 * columns * TILE_TOKENS, one.inner, BFloat16)
            self.sTerm.append(cute.make_tensor(pointer, outer))
        layout = cute.tile_to_shape(atom(kinds.MN_SW128), (config.slice_k, config.phi_terms * columns), order=(1, 0))
        self.sPhi = smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def slice_of(self, item):
        """The columns of x of this CTA's item."""
        return item % self.config.pairs * CLUSTER + self.rank

    def column_of(self, slice_index, column):
        """(Whether a slice's column is one of x, which)."""
        config = self.config
        if config.runs == 1:
            column = slice_index * config.slice_k + column
            return column < config.k, column
        of_run, part = slice_index * config.run + column % config.run, config.k // config.runs
        return of_run < part, column // config.run * part + of_run

    def box_of(self, block, slice_index, box: int):
        """Coordinate of a tile's box."""
        per_run = self.config.run // self.config.box
        return block, slice_index * per_run + box % per_run, box // per_run

    def block_of(self, item, tile):
        """Index of an item's tile among all tiles of tokens."""
        return item // self.config.pairs * (self.config.chunk // TILE_TOKENS) + tile

    @cute.jit
    def tiles_of(self, item: Int32):
        """Tiles of an item: those of its chunk's tokens."""
        chunk = const_expr(self.config.chunk)
        left = cutlass.min(self.num_tokens - item // self.config.pairs * chunk, chunk)
        return cute.ceil_div(left, TILE_TOKENS)

    @cute.jit
    def load_shared_rows(self, tma_dh: cute.CopyAtom, mDh: cute.Tensor, tma_res, mRes):
        """One warp: tiles of dH and of R, each CTA every second box for both."""
        config = self.config
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            for tile in cutlass.range(self.tiles_of(item)):
                block, full = self.block_of(item, tile), self.full + slot
                wait_in_cluster(self.empty + slot, phase ^ 1)
                self.expect(full, 4 * TILE_TOKENS * config.columns, config.columns // OCTET)
                for octet in cutlass.range_constexpr(config.columns // OCTET):
                    source = cute.local_tile(mDh, (TILE_TOKENS, OCTET), (block, octet))
                    target = self.sOctets[None, None, (octet % 2, octet // 2), slot]
                    self.load_shared(tma_dh, source, target, full, self.rank == octet % CLUSTER)
                if const_expr(self.has_residual_grad):
                    full = self.res_full + slot
                    wait_in_cluster(self.res_empty + slot, phase ^ 1)
                    self.expect(full, 4 * TILE_TOKENS * self.n**2, self.n**2 // RES_BOX)
                    for box in cutlass.range_constexpr(self.n**2 // RES_BOX):
                        source = cute.local_tile(mRes, (TILE_TOKENS, RES_BOX), (block, box))
                        target = self.sRes[None, None, box, slot]
                        self.load_shared(tma_res, source, target, full, self.rank == box % CLUSTER)
                slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def split_dh(self, thread: Int32):
        """Two warps: dH of every tile as two terms in its place, 16 columns of a token by a thread each."""
        config, sOctets, sTerms = self.config, self.sOctets, self.sTerms
        half = const_expr(config.columns * TILE_TOKENS)  # where the second of two octets is, and the second term
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            for _ in cutlass.range(self.tiles_of(item)):
                cute.arch.mbarrier_wait(self.full + slot, phase)
                for strip in cutlass.range_constexpr(config.columns // 16):
                    row = slot * (2 * TILE_TOKENS) * config.columns + (strip * TILE_TOKENS + thread) * 16  # of a term
                    values = cute.make_rmem_tensor((OCTET, 2), Float32)
                    for octet in cutlass.range_constexpr(2):
                        source = sOctets.iterator + cute.assume((row + octet * half) // 2, divby=OCTET)
                        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(OCTET)), values[None, octet])
                    terms = terms_of(values.load(), (OCTET, 2), 2)
                    for t in cutlass.range_constexpr(2):
                        target = sTerms.iterator + cute.assume(row + t * half, divby=16)
                        cute.autovec_copy(terms[t], cute.make_tensor(target, cute.make_layout((OCTET, 2))))
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(self.split + slot)
                slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def move_tiles(self, atoms: tuple, matrices: tuple):
        """One warp: ask for tiles of x, dout and dlayer, and write those of dx that are done, in the place of x.

        ``atoms``, ``matrices``: of these four. A slot is asked for as soon as its store has read it, before the next
        tile that is done is waited for.
        """
        config = self.config
        (tma_x, tma_out, tma_layer, tma_dx), (mX, mOut, mLayer, mDx) = atoms, matrices
        stages, shape = const_expr(config.x_stages), const_expr((TILE_TOKENS, config.box))
        columns = const_expr(config.slice_k * (1 + self.has_residual_grad) + SLICE_CHANNELS * self.has_layer_grad)
        last_tokens = const_expr(LAST_BYTES // (2 * config.k))
        total = Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            total += self.tiles_of(item)
        freed = self.done if const_expr(self.writes_dx) else self.read
        item, tile, slot = self.first, Int32(0), Int32(0)
        done_item, done_tile, done_slot, phase = self.first, Int32(0), Int32(0), Int32(0)
        for count in cutlass.range(total + stages - 1):
            if count < total:
                if const_expr(self.writes_dx):
                    if count >= stages:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                block, slice_index, full = self.block_of(item, tile), self.slice_of(item), self.x_full + slot
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TILE_TOKENS * columns)
                policy = evict_first_if(self.num_tokens - block * TILE_TOKENS <= last_tokens)
                for box in cutlass.range_constexpr(config.boxes):
                    at = self.box_of(block, slice_index, box)
                    gX = cute.local_tile(mX, shape, at)
                    load_box(tma_x, gX, self.sBoxes[None, None, box, slot], full, policy)
                    if const_expr(self.has_residual_grad):
                        gOut = cute.local_tile(mOut, shape, at)
                        load_box(tma_out, gOut, self.sOut[None, None, box, slot], full, policy)
                if const_expr(self.has_layer_grad):
                    gLayer = cute.local_tile(mLayer, (TILE_TOKENS, SLICE_CHANNELS), (block, slice_index))
                    load_box(tma_layer, gLayer, self.sLayer[None, None, slot], full, policy)
                tile += 1
                if tile == self.tiles_of(item):
                    tile = Int32(0)
                    item += self.step
                slot = (slot + 1) % stages
            if count >= stages - 1:
                cute.arch.mbarrier_wait(freed + done_slot, phase)
                if const_expr(self.writes_dx):
                    block, slice_index = self.block_of(done_item, done_tile), self.slice_of(done_item)
                    for box in cutlass.range_constexpr(config.boxes):
                        gDx = cute.local_tile(mDx, shape, self.box_of(block, slice_index, box))
                        store_box(tma_dx, self.sBoxes[None, None, box, done_slot], gDx)
                    cute.arch.cp_async_bulk_commit_group()
                done_tile += 1
                if done_tile == self.tiles_of(done_item):
                    done_tile = Int32(0)
                    done_item += self.step
                done_slot, phase = advance(done_slot, phase, stages)
        cute.arch.griddepcontrol_launch_dependents()  # of what has no work here any more
        if const_expr(self.writes_dx):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add_up(self, tiled_mma: cute.TiledMma, partials: cute.Tensor, thread: Int32):
        """A warpgroup: the sums of both terms of dH times x, of every item."""
        config = self.config
        thr_mma = tiled_mma.get_slice(0)
        tCrX = tiled_mma.make_fragment_A(thr_mma.partition_A(self.sX))
        tCrH = [tiled_mma.make_fragment_B(thr_mma.partition_B(term)) for term in self.sTerm]
        sums, places = self.sums_of(tiled_mma, thread, (config.slice_k, config.columns))
        slot, phase, x_slot, x_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            sums.fill(0.0)
            warpgroup.fence()
            # There is one at least; did the compiler not know, ptxas would have every product waited for
            for _ in cutlass.range(cutlass.max(self.tiles_of(item), 1)):
                cute.arch.mbarrier_wait(self.split + slot, phase)
                cute.arch.mbarrier_wait(self.x_full + x_slot, x_phase)
                for k16 in cutlass.range_constexpr(TILE_TOKENS // 16):
                    for t in cutlass.range_constexpr(2):
                        rA, rB = tCrX[None, None, k16, x_slot], tCrH[t][None, None, k16, slot]
                        cute.gemm(tiled_mma, sums, rA, rB, sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                self.free(self.empty, slot)
                cute.arch.mbarrier_arrive(self.read + x_slot)
                slot, phase = advance(slot, phase, config.stages)
                x_slot, x_phase = advance(x_slot, x_phase, config.x_stages)
            slice_index = self.slice_of(item)
            target = partials.iterator + Int64(item // config.pairs) * (config.columns * config.k)
            for m in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                for v in cutlass.range_constexpr(cute.size(sums, mode=[0])):
                    column, j = places[v, m, 0]
                    inside, k = self.column_of(slice_index, column)
                    if inside:
                        target[j * config.k + k] = sums[v, m, 0]

    @cute.jit
    def compute_dx(self, tiled_mma: cute.TiledMma, phi, norm_weight, dmean_square, pre, tidx: Int32):
        """Two warpgroups: dx of every tile, half of the columns each; or each all columns of every second tile.

        A wait tells adjacent phases of a slot apart, no others: the tile that the slot had before, c - S of S slots,
        must be known to have come before tile c is waited for. Sharers wait for every tile. In turns tile c, counted
        over all items, is warpgroup c % 2's, and so a slot is always the same warpgroup's where S is even: of dH's and
        R's rings with their two slots, and of x's where there are neither dout nor partials. Else it follows from dH:

            with partials   dH's tile c came when its slot was free, for which the adder had multiplied tile c - 2: it
                            had waited for x's tiles up to c - 2, and said that it read those up to c - 3
            with dout       R's tile c - 1 was asked for before dH's tile c, when its slot was free, for which the other
                            warpgroup had finished tile c - 3: it had waited for x's tiles up to there
        S is 3 or more (tests/mhc/test_rings.py).
        """
        config = self.config
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        turns, turn, share = const_expr(DX_GROUPS // config.sharers), group, Int32(0)
        if const_expr(turns == 1):
            turn, share = Int32(0), group
        thr_mma = tiled_mma.get_slice(share * WARPGROUP)
        tCrH = tiled_mma.make_fragment_A(thr_mma.partition_A(self.sTerms))
        tCrPhi = tiled_mma.make_fragment_B(thr_mma.partition_B(self.sPhi))
        thread = share * WARPGROUP + tidx % WARPGROUP
        sums, places = self.sums_of(tiled_mma, thread, (TILE_TOKENS, config.slice_k))
        slice_index, before, count = Int32(-1), Int32(0), turn
        for item in cutlass.range(self.first, self.items, self.step):
            if self.slice_of(item) != slice_index:
                slice_index = self.slice_of(item)
                dx_barrier()
                self.load_phi(phi, norm_weight, slice_index, tidx)
                cute.arch.fence_proxy("async.shared", space="cta")
                dx_barrier()
            tiles = self.tiles_of(item)
            while count < before + tiles:
                first_row = self.block_of(item, count - before) * TILE_TOKENS + places[(0, 0, 0), 0, 0][0]
                rows = [cutlass.min(first_row + 8 * half, self.num_tokens - 1) for half in range(2)]
                scales = [dmean_square[row] * (2.0 / config.k) for row in rows]
                gates = [self.dx_tile.load_gates(pre, row, tidx) for row in rows]
                slot, phase = place_in_ring(count, config.stages)
                if const_expr(turns == config.stages):
                    slot = turn  # the same; computed it takes registers that are not there
                cute.arch.mbarrier_wait(self.split + slot, phase)
                self.project(tiled_mma, tCrH, tCrPhi, sums, slot)
                self.free(self.empty, slot)
                x_slot, x_phase = place_in_ring(count, config.x_stages)
                cute.arch.mbarrier_wait(self.x_full + x_slot, x_phase)
                if const_expr(self.has_residual_grad):
                    cute.arch.mbarrier_wait(self.res_full + slot, phase)
                if const_expr(self.needs_dphi):
                    cute.arch.mbarrier_wait(self.read + x_slot, x_phase)
                self.dx_tile.finish(sums, scales, gates, x_slot, slot, thread)
                if const_expr(self.has_residual_grad):
                    cute.arch.sync_warp()  # all lanes have read R
                    self.free(self.res_empty, slot)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(self.done + x_slot)
                count += turns
            before += tiles

    @cute.jit
    def load_phi(self, phi, norm_weight, slice_index: Int32, tidx: Int32):
        """The slice of phi' in terms: row t N + j is term t of row j. All of a thread's loads are in flight."""
        config, sPhi = self.config, self.sPhi
        octets, threads = const_expr(config.slice_k // 8), const_expr(DX_GROUPS * WARPGROUP)
        count = const_expr(-(-config.columns * octets // threads))
        values = cute.make_rmem_tensor((8, count), Float32)
        values.fill(0.0)
        for v in cutlass.range_constexpr(count):
            j = (tidx + v * threads) // octets
            inside, column = self.column_of(slice_index, (tidx + v * threads) % octets * 8)
            if j < config.columns and inside:
                source = phi.iterator + cute.assume(j * config.k + column, divby=8)
                loaded = cute.make_rmem_tensor((8,), phi.element_type)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), loaded)
                numbers = loaded.load().to(Float32)
                if const_expr(norm_weight is not None):
                    weights = cute.make_rmem_tensor((8,), Float32)
                    for e in cutlass.range_constexpr(8):
                        weights[e] = norm_weight[column + e].to(Float32)
                    numbers = numbers * weights.load()
                values[None, v].store(numbers)
        for v in cutlass.range_constexpr(count):
            j, column = (tidx + v * threads) // octets, (tidx + v * threads) % octets * 8
            if j < config.columns:
                terms = terms_of(values[None, v].load(), (8,), config.phi_terms)
                for t in cutlass.range_constexpr(config.phi_terms):
                    place = column // PHI_BOX * (PHI_BOX * config.phi_terms * config.columns)
                    place = place + (t * config.columns + j) * PHI_BOX + column % PHI_BOX
                    target = sPhi.iterator + cute.assume(place, divby=8)
                    cute.autovec_copy(terms[t], cute.make_tensor(target, cute.make_layout(8)))

    @cute.jit
    def project(self, tiled_mma: cute.TiledMma, tCrH, tCrPhi, sums: cute.Tensor, slot: Int32):
        """dH phi' of a tile: both terms of dH with the first of phi, the first of dH with the second."""
        steps = const_expr(self.config.columns // 16)
        sums.fill(0.0)
        warpgroup.fence()
        for a, b in ((0, 0), (1, 0), (0, 1)):
            if const_expr(b < self.config.phi_terms):
                for step in cutlass.range_constexpr(steps):
                    rA, rB = tCrH[None, None, a * steps + step, slot], tCrPhi[None, None, b * steps + step]
                    cute.gemm(tiled_mma, sums, rA, rB, sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)


def place_in_ring(count: Int32, stages: int) -> tuple:
    """(slot, phase) of a ring's tile."""
    return count % stages, count // stages % 2


def by_run(config: WarpgroupBackwardConfig, x: Optional[cute.Tensor]) -> Optional[cute.Tensor]:
    """(M, columns of a run's part of K, runs)."""
    if x is None:
        return None
    shape = x.shape[0], config.k // config.runs, config.runs
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=(x.stride[0], 1, shape[1])))


def tma_of(op, matrix: Optional[cute.Tensor], columns: int) -> tuple:
    """(Copy of boxes of so many columns, the matrix as it has it); swizzled: eight rows are in different banks."""
    if matrix is None:
        return None, None
    shape = TILE_TOKENS, columns
    bits = (columns * matrix.element_type.width // 128).bit_length() - 1
    return cpasync.make_tiled_tma_atom(op, matrix, swizzled(shape, bits), shape)


@cute.jit
def dx_barrier():
    """The warpgroups that compute dx meet."""
    cute.arch.barrier(barrier_id=1, number_of_threads=DX_GROUPS * WARPGROUP)


@compiled
def projection_backward_sm90(arch: str, spec: ProjectionBackwardSpec, config: WarpgroupBackwardConfig) -> Program:
    """dx (M, K) and partials (chunks, N, K) from bf16 x (M, K), phi (N, K), dH (M, N) and dmean_square (M,).

    Of the residual's gradient there are dout (M, K) and res (M, n n), of the layer input's dlayer (M, C) and pre
    (M, n).
    """
    rows, chunks = cute.sym_int(), cute.sym_int()
    n, columns, k = spec.n, config.columns, config.k

    def compact(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return Program(
        ProjectionWgmmaBackward(config, n, spec.orientation, spec.has_layer_grad),
        symbolic_streams(BFloat16, rows, k, 8),
        compact(cutlass_dtype(spec.phi), columns, k),
        symbolic_vector(cutlass_dtype(spec.norm_weight), k),
        compact(Float32, rows, columns),
        symbolic_vector(Float32, rows),
        symbolic_streams(BFloat16, rows, k, 8) if spec.has_residual_grad else None,
        compact(Float32, rows, n * n) if spec.has_residual_grad else None,
        symbolic_streams(BFloat16, rows, k // n, 8) if spec.has_layer_grad else None,
        compact(Float32, rows, n) if spec.has_layer_grad else None,
        symbolic_streams(BFloat16, rows, k, 8) if spec.needs_dx else None,
        compact(Float32, chunks, columns, k) if spec.needs_dphi else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
