"""The gradient of the streams, written once, and that of phi, from one reading of x.

    dx[m, k] = sum_j dH[m, j] phi'[j, k] + 2 x[m, k] dmean_square[m] / K
             + sum_o R(i, o) dout_o[m, c] + pre_i dlayer[m, c]           (what the rest of a hyper-connection adds)
    partials[item, j, k] = sum over the item's chunks, ascending, of sums over the chunk's tokens of dH[m, j] x[m, k]

An item is a chunk of tokens, or of many tokens a group of chunks, of the same channels of all streams; a CTA walks over
its items, a tile at a time. Some warps compute dx, eight channels of every stream each, so that what a channel's
streams exchange (R) stays in a thread; others the sums of partials. Both products run on the tensor cores in bf16
terms, as in the forward (projection_split.py); dH is split once a tile, phi once for all tokens.

    gmem x, dout, dlayer --TMA--> ring in smem --ldmatrix--> mma: sums of a chunk (registers), of a group (smem)
    gmem dH --> terms in smem --ldmatrix--> mma with phi in smem --> + the rest from smem --> x's slot --TMA--> gmem dx

A slot of the ring is full when its tile and its tokens' rows are there, read when its x is in the registers of those
that add up, and done when dx is in the place of x: then one warp sends it off and asks for another tile. All lanes
arrive on these barriers, since compute-sanitizer takes one for its warp as a race; H200, 8192x4x4096: 171.1 us, 172.0
with one.

Eight bf16 streams in "tf32" on SM90: projection_backward_wgmma.py.

Profile: ncu --clock-control none -k regex:MmaBackward python -m bench.bench_mhc --filter layer.bwd.8192x4x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import ProjectionBackwardConfig, ProjectionBackwardSpec
from cute_kernels.mhc.kernel.mma_products import PhiSums, StreamGradient
from cute_kernels.mhc.kernel.streams import WARP_SIZE, symbolic_streams, take_registers
from cute_kernels.mhc.kernel.tile_ring import TileRing, tma_atom
from cute_kernels.mhc.kernel.token_rows import TokenRows
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
HELPERS = 4  # warps beside those that multiply: one moves tiles, three prepare what the tokens have beside x
TOKEN_WARPS = HELPERS - 1
# Registers of a thread that computes dx, adds up, helps, by the number of warps of the first two: with these, and up
# to four streams, nothing that CI compiles spills
REGISTERS = {(8, 4): (144, 136, 88), (8, 0): (200, 0, 104), (4, 4): (152, 208, 144)}
MORE_TO_LOAD = (112, 200, 88)  # in place of the first, where x has terms or does not come by TMA


class ProjectionMmaBackward:
    """See the module; arguments as in the builder ``projection_backward``."""

    def __init__(self, config: ProjectionBackwardConfig, orientation: Optional[str], has_layer_grad: bool):
        self.config = config
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
        chunks: Int32,
        num_ctas: Int32,
        stream,
    ):
        self.dtype = x.element_type
        config = self.config
        self.dx_warps = const_expr(0 if dx is None else config.warps)
        self.sum_warps = const_expr(0 if partials is None else config.sum_warps)
        self.threads = (self.dx_warps + self.sum_warps + HELPERS) * WARP_SIZE
        self.registers = REGISTERS.get((self.dx_warps, self.sum_warps), (None, None, None))
        if const_expr((self.dx_warps, self.sum_warps) == (8, 4) and (config.x_terms > 1 or not config.tma)):
            self.registers = MORE_TO_LOAD
        tma_x, mX = tma_atom(config, x)
        tma_out, mOut = tma_atom(config, dout)
        tma_layer, mLayer = tma_atom(config, dlayer, streams=False)
        tma_dx, mDx = tma_atom(config, dx, stores=True)
        matrices = const_expr(4 if config.n > 1 else 2)
        op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, permutation_mnk=(16, 4 * matrices, 16))
        self.kernel(
            tiled_mma, tma_x, mX, tma_out, mOut, tma_layer, mLayer, tma_dx, mDx,
            phi, norm_weight, dh, dmean_square, res, pre, partials, chunks,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_x: Optional[cute.CopyAtom],
        mX: cute.Tensor,
        tma_out: Optional[cute.CopyAtom],
        mOut: Optional[cute.Tensor],
        tma_layer: Optional[cute.CopyAtom],
        mLayer: Optional[cute.Tensor],
        tma_dx: Optional[cute.CopyAtom],
        mDx: Optional[cute.Tensor],
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dh: cute.Tensor,
        dmean_square: cute.Tensor,
        res: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        partials: Optional[cute.Tensor],
        chunks: Int32,
    ):
        config = self.config
        stages = const_expr(config.stages)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        lane = tidx % WARP_SIZE
        num_tokens = dh.shape[0]

        smem = SmemAllocator()
        full, read, done = (smem.allocate_array(Int64, stages) for _ in range(3))
        self.ring = TileRing(config, self.dtype, smem, (tma_x, tma_out, tma_layer, tma_dx), (mX, mOut, mLayer, mDx))
        self.tokens = TokenRows(config, smem, self.orientation, self.has_layer_grad)
        self.gradient = StreamGradient(config, smem, self.ring, self.tokens)
        if const_expr(partials is not None):
            self.sums = PhiSums(config, smem, self.ring, self.tokens)
        if tidx == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, self.ring.arrivals + WARP_SIZE)
                cute.arch.mbarrier_init(read + stage, max(1, self.sum_warps) * WARP_SIZE)
                cute.arch.mbarrier_init(done + stage, (self.dx_warps or self.sum_warps) * WARP_SIZE)
        cute.arch.mbarrier_init_fence()
        self.tokens.clear(tidx, self.threads)
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        # Slice after slice of a chunk, then of the next: the CTAs together read whole rows (H200, 8192x4x4096, with
        # dout: 228 us, 250 where four CTAs at a time walk over tokens of their own)
        self.item_tokens = chunks * config.chunk
        first, items, step = bidx, cute.ceil_div(num_tokens, self.item_tokens) * config.slices, grid
        if warp_index < self.dx_warps:
            if const_expr(mDx is not None):
                take_registers(self.registers[0], self.threads)
                reads = None if const_expr(partials is None) else read
                self.compute_dx(tiled_mma, phi, norm_weight, full, reads, done, first, items, step, num_tokens, tidx)
        elif warp_index < self.dx_warps + self.sum_warps:
            if const_expr(partials is not None):
                take_registers(self.registers[1], self.threads)
                freed = read if const_expr(mDx is not None) else done
                index = warp_index - self.dx_warps
                self.add_up(tiled_mma, partials, full, freed, first, items, step, num_tokens, index, lane)
        else:
            take_registers(self.registers[2], self.threads)
            index = warp_index - (self.dx_warps + self.sum_warps)
            if index == 0:
                self.move_tiles(full, done, first, items, step, num_tokens)
            else:
                self.move_rows(dh, dmean_square, res, pre, full, done, first, items, step, num_tokens, index - 1, lane)

    @cute.jit
    def move_tiles(self, full, done, first: Int32, items: Int32, step: Int32, num_tokens: Int32):
        """One warp: ask for tiles, and write those that are done. A slot is asked for when its store has read it.

        Beside dout or dlayer one tile that is done is waited for and written before that. H200, without them, that way
        and this: 8192x4x2560 106.2 -> 105.6 us, 4096x4x7168 in the order of channels 132.5 -> 129.4; with both a
        layer's backward 472 -> 476 (8192x4x4096).
        """
        stages = const_expr(self.config.stages)
        later = const_expr(int(self.orientation is not None or self.has_layer_grad))
        behind = const_expr(stages - 1 - later)
        total = Int32(0)
        for item in cutlass.range(first, items, step):
            total += self.tiles_of(item, num_tokens)
        item, tile, slot = first, Int32(0), Int32(0)
        done_item, done_tile, done_slot, phase = first, Int32(0), Int32(0), Int32(0)
        for count in cutlass.range(total + behind):
            if count < total:
                if const_expr(self.dx_warps > 0):
                    if count >= stages:
                        self.ring.wait_for_writes(later)
                self.ring.request(full, self.block_of(item, tile), self.slice_of(item), slot)
                tile += 1
                if tile == self.tiles_of(item, num_tokens):
                    tile = Int32(0)
                    item += step
                slot = (slot + 1) % stages
            if count >= behind:
                cute.arch.mbarrier_wait(done + done_slot, phase)
                if const_expr(self.dx_warps > 0):
                    self.ring.write(self.block_of(done_item, done_tile), self.slice_of(done_item), done_slot)
                done_tile += 1
                if done_tile == self.tiles_of(done_item, num_tokens):
                    done_tile = Int32(0)
                    done_item += step
                done_slot += 1
                if done_slot == stages:
                    done_slot = Int32(0)
                    phase ^= 1
        cute.arch.griddepcontrol_launch_dependents()  # of what has no work here any more
        if const_expr(self.dx_warps > 0):
            self.ring.wait_for_writes(0)

    @cute.jit
    def move_rows(
        self, dh, dmean_square, res, pre, full, done,
        first: Int32, items: Int32, step: Int32, num_tokens: Int32, mine: Int32, lane: Int32,
    ):  # fmt: skip
        """Each of three warps prepares every third tile's rows, so that their loads overlap, also with its wait.

        Of as many as there are slots: a parity tells of a slot's last two tiles, and who left one out waits in vain.
        """
        config = self.config
        warps = const_expr(min(TOKEN_WARPS, config.stages))
        slot, phase, count = Int32(0), Int32(0), Int32(0)
        for item in cutlass.range(first, items, step):
            for tile in cutlass.range(self.tiles_of(item, num_tokens)):
                if count % warps == mine:
                    first_row = self.block_of(item, tile) * config.tile_m
                    rows = self.tokens.fetch(dh, dmean_square, res, pre, first_row, num_tokens, lane)
                    if count >= config.stages:
                        cute.arch.mbarrier_wait(done + slot, phase ^ 1)
                    self.tokens.put(rows, slot, lane)
                    cute.arch.mbarrier_arrive(full + slot)
                count += 1
                slot += 1
                if slot == config.stages:
                    slot = Int32(0)
                    phase ^= 1

    @cute.jit
    def compute_dx(
        self, tiled_mma, phi, norm_weight, full, read, done,
        first: Int32, items: Int32, step: Int32, num_tokens: Int32, tidx: Int32,
    ):  # fmt: skip
        """A warp's columns of dx; ``parts`` warps share them, each with some of the tokens."""
        config = self.config
        lane, warp_index = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        group, part = warp_index % config.groups, warp_index // config.groups
        slice_index, slot, phase = Int32(-1), Int32(0), Int32(0)
        shape = tiled_mma.partition_shape_B((8 * config.n, 16))
        held = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(self.gradient.held_steps)]
        for item in cutlass.range(first, items, step):
            if self.slice_of(item) != slice_index:
                slice_index = self.slice_of(item)
                self.gradient.barrier()
                self.gradient.load_phi(phi, norm_weight, slice_index, tidx)
                self.gradient.barrier()
                for k16 in cutlass.range_constexpr(self.gradient.held_steps):
                    held[k16].store(self.gradient.load_phi_step(tiled_mma, k16, group, lane).load())
            for _ in cutlass.range(self.tiles_of(item, num_tokens)):
                cute.arch.mbarrier_wait(full + slot, phase)
                gradient = self.gradient.project(tiled_mma, held, slot, group, part, lane)
                self.gradient.finish(gradient, read, slot, phase, group, part, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(done + slot)
                slot += 1
                if slot == config.stages:
                    slot = Int32(0)
                    phase ^= 1

    @cute.jit
    def add_up(
        self, tiled_mma, partials, full, freed,
        first: Int32, items: Int32, step: Int32, num_tokens: Int32, index: Int32, lane: Int32,
    ):  # fmt: skip
        """A warp's columns of partials; ``parts`` warps share them, each with one term of dH."""
        config = self.config
        pairs = const_expr(config.groups // config.sum_groups)
        group, part = index % pairs * config.sum_groups, index // pairs
        slot, phase = Int32(0), Int32(0)
        chunk_tiles = const_expr(config.chunk // config.tile_m)
        sums = self.sums.zeros(tiled_mma)
        for item in cutlass.range(first, items, step):
            tiles = self.tiles_of(item, num_tokens)
            for first_tile in cutlass.range(0, tiles, chunk_tiles):
                sums.fill(0.0)
                for _ in cutlass.range(cutlass.min(chunk_tiles, tiles - first_tile)):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    self.sums.add_products(tiled_mma, sums, freed, slot, group, part, lane)
                    slot += 1
                    if slot == config.stages:
                        slot = Int32(0)
                        phase ^= 1
                row, slice_index = item // config.slices * config.parts + part, self.slice_of(item)
                adds, keeps = first_tile > 0, first_tile + chunk_tiles < tiles
                for g in cutlass.range_constexpr(config.sum_groups):
                    total, thread = sums[None, None, None, g], index * WARP_SIZE + lane
                    self.sums.finish(total, partials, row, slice_index, group + g, thread, g, adds, keeps, lane)

    @cute.jit
    def tiles_of(self, item: Int32, num_tokens: Int32):
        """Tiles of an item: those of its tokens."""
        left = cutlass.min(num_tokens - item // self.config.slices * self.item_tokens, self.item_tokens)
        return cute.ceil_div(left, self.config.tile_m)

    def block_of(self, item, tile):
        """Index of an item's tile among all tiles of tokens."""
        return item // self.config.slices * (self.item_tokens // self.config.tile_m) + tile

    def slice_of(self, item):
        """The channels of an item."""
        return item % self.config.slices


@compiled
def projection_backward(arch: str, spec: ProjectionBackwardSpec, config: ProjectionBackwardConfig) -> Program:
    """dx (M, K) and partials (items, N, K) from x (M, K), phi (N, K), dH (M, N) and dmean_square (M,).

    Of the residual's gradient there are dout (M, K) and res (M, n n), of the layer input's dlayer (M, C) and pre
    (M, n). Items: as ``config.schedule`` says.
    """
    rows, items = cute.sym_int(), cute.sym_int()
    n, channels, columns, k = config.n, config.channels, config.columns, config.k
    dtype, phi = cutlass_dtype(spec.x), cutlass_dtype(spec.phi)
    align = 16 * 8 // dtype.width if config.tma else 1

    def compact(*shape, align=4):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=align)

    return Program(
        ProjectionMmaBackward(config, spec.orientation, spec.has_layer_grad),
        symbolic_streams(dtype, rows, k, align),
        cute.runtime.make_fake_compact_tensor(phi, (columns, k), stride_order=(1, 0), assumed_align=phi.width // 8),
        symbolic_vector(cutlass_dtype(spec.norm_weight), k),
        compact(rows, columns),
        symbolic_vector(Float32, rows),
        symbolic_streams(dtype, rows, k, align) if spec.has_residual_grad else None,
        compact(rows, n * n) if spec.has_residual_grad else None,
        symbolic_streams(dtype, rows, channels, align) if spec.has_layer_grad else None,
        compact(rows, n) if spec.has_layer_grad else None,
        symbolic_streams(dtype, rows, k, align) if spec.needs_dx else None,
        compact(items, columns, k, align=16) if spec.needs_dphi else None,
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
