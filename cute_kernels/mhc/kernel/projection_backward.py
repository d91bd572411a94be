"""The gradient of the streams, written once, and that of phi, from one reading of x.

    dx[m, k] = sum_j dH[m, j] phi'[j, k] + 2 x[m, k] dmean_square[m] / K
             + sum_o R(i, o) dout_o[m, c] + pre_i dlayer[m, c]           (what the rest of a hyper-connection adds)
    partials[chunk, j, k] = sum over the chunk's tokens, ascending, of dH[m, j] x[m, k]

A CTA owns the same channels of all streams and walks over chunks of tokens, a tile at a time. Each warp owns eight
channels of every stream, so that what a channel's streams exchange (R) stays in a thread. Both products run on the
tensor cores in bf16 terms, as in the forward (projection.py); dH is split once a tile, phi once for all tokens.

    gmem x, dout, dlayer --TMA--> ring in smem --ldmatrix--> mma: sums of partials (registers, over a chunk)
    gmem dH --> terms in smem --ldmatrix--> mma with phi in smem --> + the rest from smem --> x's slot --TMA--> gmem dx

A slot of the ring is full when its tile and its tokens' rows are there, and done when all that multiply have put their
dx in the place of x: then one warp sends it off and asks for another tile.

Profile: ncu --clock-control none -k regex:ProjectionBackward python -m bench.bench_mhc --filter pre.8192x4x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import ProjectionBackwardConfig
from cute_kernels.mhc.kernel.projection import terms_of
from cute_kernels.mhc.kernel.streams import WARP_SIZE, symbolic_streams
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
HELPERS = 4  # warps beside those that multiply: one moves tiles, three prepare what the tokens have beside x
TOKEN_WARPS = HELPERS - 1
# Of 64512 in all, where eight warps multiply: theirs and the helpers', with dout and without (nothing spills)
REGISTERS = {True: (200, 104), False: (208, 88)}


class ProjectionBackward:
    """See the module; arguments as in the builder ``projection_backward``."""

    def __init__(self, config: ProjectionBackwardConfig, orientation: Optional[str], gathers: bool):
        self.config = config
        self.orientation = orientation
        self.gathers = gathers
        self.consumers = config.warps
        self.registers = REGISTERS[orientation is not None]

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
        num_ctas: Int32,
        stream,
    ):
        self.dtype = x.element_type
        config = self.config
        tile = (config.tile_m, config.slice_c)
        box = cute.make_composed_layout(self.swizzle(), 0, cute.make_layout(tile, stride=(config.slice_c, 1)))
        tma_x, mX, tma_out, mOut, tma_layer, mLayer, tma_dx, mDx = None, x, None, dout, None, dlayer, None, dx
        if const_expr(config.tma):
            load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
            tma_x, mX = cpasync.make_tiled_tma_atom(load, self.by_stream(x), box, tile)
            if const_expr(dout is not None):
                tma_out, mOut = cpasync.make_tiled_tma_atom(load, self.by_stream(dout), box, tile)
            if const_expr(dlayer is not None):
                tma_layer, mLayer = cpasync.make_tiled_tma_atom(load, dlayer, box, tile)
            if const_expr(dx is not None):
                tma_dx, mDx = cpasync.make_tiled_tma_atom(store, self.by_stream(dx), box, tile)
        matrices = const_expr(4 if config.n > 1 else 2)
        op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, permutation_mnk=(16, 4 * matrices, 16))
        self.kernel(
            tiled_mma, tma_x, mX, tma_out, mOut, tma_layer, mLayer, tma_dx, mDx,
            phi, norm_weight, dh, dmean_square, res, pre, partials,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[(self.consumers + HELPERS) * WARP_SIZE, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
        )  # fmt: skip

    def swizzle(self):
        """Of the ring's rows: so that eight rows of 16 bytes lie in different banks."""
        return cute.make_swizzle((self.config.slice_c * self.dtype.width // 8 // 16).bit_length() - 1, 4, 3)

    def by_stream(self, x: cute.Tensor):
        """(M, C, n) where streams follow each other, (M, n C, 1) where channels do."""
        config = self.config
        if const_expr(config.layout == "streams"):
            layout = cute.make_layout((x.shape[0], config.channels, config.n), stride=(x.stride[0], 1, config.channels))
        else:
            layout = cute.make_layout((x.shape[0], config.k, 1), stride=(x.stride[0], 1, config.k))
        return cute.make_tensor(x.iterator, layout)

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
    ):
        config = self.config
        n, tile_m, stages = const_expr(config.n), const_expr(config.tile_m), const_expr(config.stages)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        lane = tidx % WARP_SIZE
        num_tokens = dh.shape[0]

        smem = SmemAllocator()
        full, done = smem.allocate_array(Int64, stages), smem.allocate_array(Int64, stages)
        ring = cute.make_layout(
            (tile_m, config.slice_c, n, stages),
            stride=(config.slice_c, 1, tile_m * config.slice_c, n * tile_m * config.slice_c),
        )
        sX = smem.allocate_tensor(self.dtype, ring, byte_alignment=1024, swizzle=self.swizzle())
        sOut, sLayer = sX, sX
        if const_expr(mOut is not None):
            sOut = smem.allocate_tensor(self.dtype, ring, byte_alignment=1024, swizzle=self.swizzle())
        if const_expr(mLayer is not None):
            one = cute.make_layout(
                (tile_m, config.slice_c, stages), stride=(config.slice_c, 1, tile_m * config.slice_c)
            )
            sLayer = smem.allocate_tensor(self.dtype, one, byte_alignment=1024, swizzle=self.swizzle())
        columns = const_expr(n * config.slice_c)
        sPhi = smem.allocate_tensor(
            BFloat16, cute.make_layout((config.phi_rows, columns), stride=(columns + 8, 1)), byte_alignment=16
        )
        self.tokens = TokenRows(config, smem, self.orientation, self.gathers)
        if tidx == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 2)
                cute.arch.mbarrier_init(done + stage, self.consumers)
        cute.arch.mbarrier_init_fence()
        self.tokens.clear(tidx, (self.consumers + HELPERS) * WARP_SIZE)
        cute.arch.barrier()

        chunks = cute.ceil_div(num_tokens, config.chunk)
        items = chunks * config.slices
        first, last = bidx * items // grid, (bidx + 1) * items // grid
        slot, phase = Int32(0), Int32(0)
        if warp_index >= self.consumers:
            if const_expr(self.consumers == 8):
                cute.arch.setmaxregister_decrease(self.registers[1])
            if warp_index == self.consumers:
                self.move(
                    tma_x, tma_out, tma_layer, tma_dx, mX, mOut, mLayer, mDx, sX, sOut, sLayer, full, done,
                    first, last, chunks, num_tokens,
                )  # fmt: skip
            else:
                # Each of these warps prepares every third tile, so that their loads overlap
                mine = warp_index - (self.consumers + 1)
                count = Int32(0)
                for item in cutlass.range(first, last):
                    chunk = item % chunks
                    for tile in cutlass.range(self.tiles_of(chunk, num_tokens)):
                        if count % TOKEN_WARPS == mine:
                            if count >= stages:
                                cute.arch.mbarrier_wait(done + slot, phase ^ 1)
                            first_row = chunk * config.chunk + tile * tile_m
                            self.tokens.fill(dh, dmean_square, res, pre, first_row, num_tokens, slot, lane)
                            cute.arch.sync_warp()
                            if lane == 0:
                                cute.arch.mbarrier_arrive(full + slot)
                        count += 1
                        slot += 1
                        if slot == stages:
                            slot = Int32(0)
                            phase ^= 1
        else:
            if const_expr(self.consumers == 8):
                cute.arch.setmaxregister_increase(self.registers[0])
            group, part = warp_index % config.groups, warp_index // config.groups
            thr_mma = tiled_mma.get_slice(lane)
            slice_index = Int32(-1)
            sums = cute.make_rmem_tensor(self.sums_shape(tiled_mma), Float32)
            for item in cutlass.range(first, last):
                chunk = item % chunks
                if item // chunks != slice_index:
                    slice_index = item // chunks
                    self.consumer_barrier()
                    self.load_phi(sPhi, phi, norm_weight, slice_index, tidx)
                    self.consumer_barrier()
                sums.fill(0.0)
                for _ in cutlass.range(self.tiles_of(chunk, num_tokens)):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    vX = self.columns_of_warp(sX, slot, group)
                    sH = self.tokens.sH[None, None, slot]
                    if const_expr(partials is not None):
                        self.add_products(tiled_mma, sums, sH, vX, part, lane)
                    if const_expr(mDx is not None):
                        gradient = self.project(tiled_mma, sH, sPhi, group, part, lane)
                        vOut = self.columns_of_warp(sOut, slot, group)
                        self.finish(thr_mma, gradient, vX, vOut, sLayer, slot, group, part, lane)
                        cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(done + slot)
                    slot += 1
                    if slot == stages:
                        slot = Int32(0)
                        phase ^= 1
                if const_expr(partials is not None):
                    self.store_sums(sums, partials, chunk, slice_index, group, part, lane)

    @cute.jit
    def move(
        self, tma_x, tma_out, tma_layer, tma_dx, mX, mOut, mLayer, mDx, sX, sOut, sLayer, full, done,
        first: Int32, last: Int32, chunks: Int32, num_tokens: Int32,
    ):  # fmt: skip
        """One warp: ask for tiles, and write those that are done. A slot is asked for when its store has read it."""
        config = self.config
        stages = const_expr(config.stages)
        total = Int32(0)
        for item in cutlass.range(first, last):
            total += self.tiles_of(item % chunks, num_tokens)
        item, tile, slot = first, Int32(0), Int32(0)
        done_item, done_tile, done_slot, phase = first, Int32(0), Int32(0), Int32(0)
        for count in cutlass.range(total + stages - 1):
            if count >= stages - 1:
                cute.arch.mbarrier_wait(done + done_slot, phase)
                if const_expr(mDx is not None):
                    self.write(tma_dx, mDx, sX, done_item, done_tile, done_slot, chunks)
                done_tile += 1
                if done_tile == self.tiles_of(done_item % chunks, num_tokens):
                    done_tile = Int32(0)
                    done_item += 1
                done_slot += 1
                if done_slot == stages:
                    done_slot = Int32(0)
                    phase ^= 1
            if count < total:
                if const_expr(config.tma and mDx is not None):
                    if count >= stages:
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                self.request(
                    tma_x, tma_out, tma_layer, mX, mOut, mLayer, sX, sOut, sLayer, full, item, tile, slot, chunks
                )
                tile += 1
                if tile == self.tiles_of(item % chunks, num_tokens):
                    tile = Int32(0)
                    item += 1
                slot = (slot + 1) % stages
        if const_expr(config.tma and mDx is not None):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def consumer_barrier(self):
        """The warps that multiply meet."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.consumers * WARP_SIZE)

    @cute.jit
    def tiles_of(self, chunk: Int32, num_tokens: Int32):
        """Tiles of a chunk of tokens."""
        left = cutlass.min(num_tokens - chunk * self.config.chunk, self.config.chunk)
        return cute.ceil_div(left, self.config.tile_m)

    @cute.jit
    def request(self, tma_x, tma_out, tma_layer, mX, mOut, mLayer, sX, sOut, sLayer, full, item, tile, slot, chunks):
        """Arm a slot's barrier and ask for a tile's x, dout and dlayer; called by a whole warp."""
        config = self.config
        slice_index = item // chunks
        block_m = item % chunks * (config.chunk // config.tile_m) + tile
        if const_expr(config.tma):
            boxes = const_expr(config.n * (1 if mOut is None else 2) + (0 if mLayer is None else 1))
            box_bytes = const_expr(config.tile_m * config.slice_c * self.dtype.width // 8)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, boxes * box_bytes)
            for i in cutlass.range_constexpr(config.n):
                at = (block_m, *self.box_coordinate(slice_index, i))
                self.load_box(tma_x, mX, at, sX[None, None, i, slot], full + slot)
                if const_expr(mOut is not None):
                    self.load_box(tma_out, mOut, at, sOut[None, None, i, slot], full + slot)
            if const_expr(mLayer is not None):
                self.load_box(tma_layer, mLayer, (block_m, slice_index), sLayer[None, None, slot], full + slot)
        else:
            self.load_plain(mX, sX, block_m * config.tile_m, slice_index, slot)
            if const_expr(mOut is not None):
                self.load_plain(mOut, sOut, block_m * config.tile_m, slice_index, slot)
            if const_expr(mLayer is not None):
                self.load_plain(mLayer, sLayer, block_m * config.tile_m, slice_index, slot)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(full + slot)

    @cute.jit
    def load_box(self, atom, matrix, at, target: cute.Tensor, mbar):
        """One box of a tile to shared memory."""
        gBox = cute.local_tile(matrix, (self.config.tile_m, self.config.slice_c), at)
        tSs, tSg = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(gBox, 0, 2)
        )
        cute.copy(atom, tSg, tSs, tma_bar_ptr=mbar)

    def box_coordinate(self, slice_index, i: int):
        """(tile of columns, stream) of a slice's i-th box."""
        return (slice_index, i) if self.config.layout == "streams" else (slice_index * self.config.n + i, 0)

    @cute.jit
    def write(self, tma_dx, mDx, sX: cute.Tensor, item: Int32, tile: Int32, slot: Int32, chunks: Int32):
        """A tile's way out; called by a whole warp."""
        config = self.config
        slice_index = item // chunks
        block_m = item % chunks * (config.chunk // config.tile_m) + tile
        if const_expr(config.tma):
            for i in cutlass.range_constexpr(config.n):
                at = (block_m, *self.box_coordinate(slice_index, i))
                gBox = cute.local_tile(mDx, (config.tile_m, config.slice_c), at)
                source = sX[None, None, i, slot]
                tSs, tSg = cpasync.tma_partition(
                    tma_dx, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(gBox, 0, 2)
                )
                cute.copy(tma_dx, tSs, tSg)
            cute.arch.cp_async_bulk_commit_group()
        else:
            self.write_plain(mDx, sX, block_m * config.tile_m, slice_index, slot)

    def column_of(self, slice_index, i: int, c):
        """(channel, or column of all in the order of channels; column of x) of column c of a slice's i-th box."""
        config = self.config
        if config.layout == "streams":
            channel = slice_index * config.slice_c + c
            return channel, i * config.channels + channel
        column = (slice_index * config.n + i) * config.slice_c + c
        return column, column

    @cute.jit
    def load_plain(self, matrix: cute.Tensor, ring: cute.Tensor, first_row, slice_index, slot):
        """A tile's part of a matrix that TMA cannot address; zeros outside."""
        config = self.config
        boxes = const_expr(config.n if matrix.shape[1] == config.k else 1)
        end = const_expr(config.k if boxes > 1 and config.layout == "channels" else config.channels)
        for i in cutlass.range_constexpr(boxes):
            for index in cutlass.range(cute.arch.lane_idx(), config.tile_m * config.slice_c, WARP_SIZE):
                row, c = index // config.slice_c, index % config.slice_c
                bound, column = slice_index * config.slice_c + c, slice_index * config.slice_c + c
                if const_expr(boxes > 1):
                    bound, column = self.column_of(slice_index, i, c)
                value = self.dtype(0.0)
                if first_row + row < matrix.shape[0] and bound < end:
                    value = matrix[first_row + row, column]
                if const_expr(cute.rank(ring) == 4):
                    ring[row, c, i, slot] = value
                else:
                    ring[row, c, slot] = value

    @cute.jit
    def write_plain(self, mDx, sX, first_row: Int32, slice_index: Int32, slot: Int32):
        """``write`` where TMA cannot address dx."""
        config = self.config
        end = const_expr(config.channels if config.layout == "streams" else config.k)
        for i in cutlass.range_constexpr(config.n):
            for index in cutlass.range(cute.arch.lane_idx(), config.tile_m * config.slice_c, WARP_SIZE):
                row, c = index // config.slice_c, index % config.slice_c
                bound, column = self.column_of(slice_index, i, c)
                if first_row + row < mDx.shape[0] and bound < end:
                    mDx[first_row + row, column] = sX[row, c, i, slot]

    @cute.jit
    def load_phi(self, sPhi: cute.Tensor, phi, norm_weight, slice_index: Int32, tidx: Int32):
        """The slice of phi' in terms. Block b: term b once for each term a of dH it is multiplied with, a + b < order.

        Then A's columns [term 0 | term 1 | ...] times block b are all products with term b, in whole steps of 16.
        """
        config = self.config
        end = const_expr(config.channels if config.layout == "streams" else config.k)
        for i in cutlass.range_constexpr(config.n):
            for index in cutlass.range(tidx, config.padded_columns * config.slice_c, self.consumers * WARP_SIZE):
                j, c = index // config.slice_c, index % config.slice_c
                bound, column = self.column_of(slice_index, i, c)
                value = Float32(0.0)
                if j < config.columns and bound < end:
                    value = phi[j, column].to(Float32)
                    if const_expr(norm_weight is not None):
                        value = value * norm_weight[column].to(Float32)
                row = const_expr(0)
                for b in cutlass.range_constexpr(config.phi_terms):
                    term = value.to(BFloat16)
                    value = value - term.to(Float32)
                    rows = const_expr(config.block_rows(b))
                    for a in cutlass.range_constexpr(-(-rows // config.padded_columns)):
                        at = a * config.padded_columns + j
                        if at < rows:
                            taken = const_expr(a < config.order - b)
                            sPhi[row + at, i * config.slice_c + c] = term if const_expr(taken) else BFloat16(0.0)
                    row = const_expr(row + rows)

    @cute.jit
    def columns_of_warp(self, ring: cute.Tensor, slot: Int32, group: Int32):
        """The columns a warp owns of a slot, as (tokens, (8, n)): eight channels of each stream."""
        config = self.config
        width = const_expr(config.slice_c)
        box = const_expr(config.tile_m * width)
        if const_expr(config.layout == "streams"):
            layout = cute.make_layout((config.tile_m, (8, config.n)), stride=(width, (1, box)))
            column = group * 8
        else:
            octets = const_expr(min(config.n, width // 8))  # of a box
            shape = (config.tile_m, (8, (octets, config.n // octets)))
            layout = cute.make_layout(shape, stride=(width, (1, (8, box))))
            column = self.in_boxes(group * (8 * config.n))
        # `Pointer.align` would lose the swizzle
        return cute.make_tensor(ring.iterator + cute.assume(slot * (config.n * box) + column, divby=8), layout)

    def in_boxes(self, column):
        """Where a column of a slice is, in elements, where channels follow each other."""
        width = self.config.slice_c
        return column // width * (self.config.tile_m * width) + column % width

    def sums_shape(self, tiled_mma):
        """Accumulators of the gradient of phi: rows of terms by columns of a warp."""
        config = self.config
        return tiled_mma.partition_shape_C((config.terms_columns // config.parts, 8 * config.n))

    @cute.jit
    def add_products(self, tiled_mma, sums: cute.Tensor, sHt: cute.Tensor, vX: cute.Tensor, part: Int32, lane: Int32):
        """sums[j, k] += sum over the tile's tokens of dH[m, j] x[m, k], for every term of dH (of this part)."""
        config = self.config
        rows = const_expr(config.terms_columns // config.parts)
        a = cute.make_tensor(
            (sHt.iterator + part * rows).align(16),
            cute.make_layout((rows, config.tile_m), stride=(1, sHt.stride[0])),
        )
        columns = cute.make_tensor(vX.iterator, cute.select(vX.layout, mode=[1, 0]))
        rA = load_operand(tiled_mma, "a", a, True, lane)
        if const_expr(self.dtype.width == 16):
            rB = load_operand(tiled_mma, "b", columns, True, lane)
        else:
            source = tiled_mma.get_slice(lane).partition_B(columns)
            rB = cute.make_rmem_tensor(source.shape, self.dtype)
            for v in cutlass.range_constexpr(cute.size(rB)):
                rB[v] = source[v]
        for k16 in cutlass.range_constexpr(config.tile_m // 16):
            if const_expr(self.dtype is BFloat16):
                cute.gemm(tiled_mma, sums, rA[None, None, k16], rB[None, None, k16], sums)
            else:
                operand = rB[None, None, k16]
                terms = terms_of(operand.load().to(Float32), operand.shape, config.x_terms)
                for b in cutlass.range_constexpr(config.x_terms):
                    cute.gemm(tiled_mma, sums, rA[None, None, k16], terms[b], sums)

    @cute.jit
    def project(self, tiled_mma, sHt: cute.Tensor, sPhi: cute.Tensor, group: Int32, part: Int32, lane: Int32):
        """dH phi' of this warp's tokens and columns."""
        config = self.config
        tokens = const_expr(config.tile_m // config.parts)
        a = cute.make_tensor(
            (sHt.iterator + part * tokens * sHt.stride[0]).align(16),
            cute.make_layout((tokens, config.terms_columns), stride=(sHt.stride[0], 1)),
        )
        if const_expr(config.layout == "streams"):
            columns = cute.make_layout(((8, config.n), config.phi_rows), stride=((1, config.slice_c), sPhi.stride[0]))
            b = cute.make_tensor((sPhi.iterator + group * 8).align(16), columns)
        else:
            columns = cute.make_layout(((8, config.n), config.phi_rows), stride=((1, 8), sPhi.stride[0]))
            b = cute.make_tensor((sPhi.iterator + group * (8 * config.n)).align(16), columns)
        gradient = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tokens, 8 * config.n)), Float32)
        gradient.fill(0.0)
        rA = load_operand(tiled_mma, "a", a, False, lane)
        step = const_expr(0)
        for block in cutlass.range_constexpr(config.phi_terms):
            for k16 in cutlass.range_constexpr(config.block_rows(block) // 16):
                rows = cute.local_tile(b, (8 * config.n, 16), (0, step))
                rB = load_operand(tiled_mma, "b", rows, True, lane)
                cute.gemm(tiled_mma, gradient, rA[None, None, k16], rB[None, None, 0], gradient)
                step = const_expr(step + 1)
        return gradient

    @cute.jit
    def finish(
        self,
        thr_mma,
        gradient: cute.Tensor,
        vX: cute.Tensor,
        vOut: cute.Tensor,
        sLayer: cute.Tensor,
        slot: Int32,
        group: Int32,
        part: Int32,
        lane: Int32,
    ):
        """Add what else there is to dx, and put it in the place of x."""
        config = self.config
        n, count = const_expr(config.n), const_expr(config.tile_m // config.parts)
        first = part * count
        start = cute.assume(first * config.slice_c, divby=8)
        tCsX = thr_mma.partition_C(cute.make_tensor(vX.iterator + start, self.token_columns(vX, count)))
        rX = cute.make_rmem_tensor(gradient.shape, self.dtype)
        cute.autovec_copy(tCsX, rX)
        if const_expr(self.orientation is not None and config.layout == "streams"):
            other = cute.make_tensor(vOut.iterator + start, self.token_columns(vOut, count))
            rOut = cute.make_rmem_tensor(gradient.shape, self.dtype)
            cute.autovec_copy(thr_mma.partition_C(other), rOut)
        for m in cutlass.range_constexpr(count // 16):
            for h in cutlass.range_constexpr(2):
                token = first + m * 16 + h * 8 + lane // 4
                scale = self.tokens.scale(slot, token)
                if const_expr(config.layout == "streams"):
                    weights = self.tokens.weights(slot, token)
                    gates = self.tokens.gates(slot, token)
                    for e in cutlass.range_constexpr(2):
                        if const_expr(self.gathers):
                            layer = sLayer[token, group * 8 + lane % 4 * 2 + e, slot].to(Float32)
                        for i in cutlass.range_constexpr(n):
                            value = gradient[(e, h), m, i] + scale * rX[(e, h), m, i].to(Float32)
                            if const_expr(self.gathers):
                                value = value + gates[i] * layer
                            if const_expr(self.orientation is not None):
                                for o in cutlass.range_constexpr(n):
                                    value = value + weights[i * n + o] * rOut[(e, h), m, o].to(Float32)
                            rX[(e, h), m, i] = value.to(self.dtype)
                else:
                    for q in cutlass.range_constexpr(n):
                        # Two neighbouring streams of one channel
                        column = 8 * q + lane % 4 * 2
                        channel, stream = column // n, column % n
                        if const_expr(self.gathers):
                            layer = sLayer[token, group * 8 + channel, slot].to(Float32)
                        if const_expr(self.orientation is not None):
                            others = cute.make_rmem_tensor((n,), self.dtype)
                            place = cute.assume(token * config.slice_c + self.in_boxes(channel * n), divby=n)
                            cute.autovec_copy(cute.make_tensor(vOut.iterator + place, cute.make_layout(n)), others)
                        for e in cutlass.range_constexpr(2):
                            value = gradient[(e, h), m, q] + scale * rX[(e, h), m, q].to(Float32)
                            if const_expr(self.gathers):
                                value = value + self.tokens.gate(slot, token, stream + e) * layer
                            if const_expr(self.orientation is not None):
                                weights = self.tokens.row(slot, token, stream + e)
                                for o in cutlass.range_constexpr(n):
                                    value = value + weights[o] * others[o].to(Float32)
                            rX[(e, h), m, q] = value.to(self.dtype)
        # Other lanes, or warps, have multiplied the columns that this one is about to overwrite
        if const_expr(config.parts > 1):
            self.consumer_barrier()
        else:
            cute.arch.sync_warp()
        cute.autovec_copy(rX, tCsX)

    def token_columns(self, view: cute.Tensor, count: int):
        """A warp's columns of ``count`` tokens."""
        return cute.make_layout((count, view.shape[1]), stride=view.stride)

    @cute.jit
    def store_sums(
        self,
        sums: cute.Tensor,
        partials: cute.Tensor,
        chunk: Int32,
        slice_index: Int32,
        group: Int32,
        part: Int32,
        lane,
    ):
        """A chunk's sums to global memory, the terms added where one warp has them all."""
        config = self.config
        octets = const_expr(config.padded_columns // 8)
        terms = const_expr(config.order if config.parts == 1 else 1)
        end = const_expr(config.channels if config.layout == "streams" else config.k)
        for octet in cutlass.range_constexpr(octets):
            j = octet * 8 + lane // 4
            for q in cutlass.range_constexpr(config.n):
                for e in cutlass.range_constexpr(2):
                    total = sums[(e, octet % 2), octet // 2, q]
                    for a in cutlass.range_constexpr(1, terms):
                        row = const_expr(octet + a * octets)
                        total = total + sums[(e, row % 2), row // 2, q]
                    c = lane % 4 * 2 + e
                    if const_expr(config.layout == "streams"):
                        bound, column = self.column_of(slice_index, q, group * 8 + c)
                    else:
                        bound = slice_index * (config.n * config.slice_c) + group * (8 * config.n) + q * 8 + c
                        column = bound
                    if j < config.columns and bound < end:
                        partials[chunk * config.parts + part, j, column] = total


class TokenRows:
    """What a tile's tokens have beside x, by slot of the ring: dH (as terms), R, pre and the factor of x."""

    def __init__(self, config: ProjectionBackwardConfig, smem, orientation: Optional[str], gathers: bool):
        self.config = config
        self.orientation = orientation
        self.gathers = gathers
        n, tile_m, stages = config.n, config.tile_m, config.stages
        self.pitch = n * n + 4 if n >= 4 else n * n
        width = config.terms_columns
        layout = cute.make_layout((tile_m, width, stages), stride=(width + 8, 1, tile_m * (width + 8)))
        self.sH = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
        self.sScale = smem.allocate_tensor(Float32, cute.make_layout((tile_m, stages)), byte_alignment=16)
        if orientation is not None:
            layout = cute.make_layout((tile_m, n * n, stages), stride=(self.pitch, 1, tile_m * self.pitch))
            self.sRes = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        if gathers:
            layout = cute.make_layout((tile_m, n, stages), stride=(n, 1, tile_m * n))
            self.sPre = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def clear(self, tidx: Int32, threads: cutlass.Constexpr[int]):
        """Zeros where no term of dH will be written, but columns of phi be multiplied."""
        pointer = self.sH.iterator
        for index in cutlass.range(tidx, cute.cosize(self.sH.layout), threads):
            pointer[index] = BFloat16(0.0)

    @cute.jit
    def fill(self, dh, dmean_square, res, pre, first_row: Int32, num_tokens: Int32, slot: Int32, lane: Int32):
        """One warp: the rows of a tile to shared memory, zeros beyond the last token.

        dH in terms side by side, res as R(i, o) by rows of i.
        """
        config = self.config
        n, tile_m = const_expr(config.n), const_expr(config.tile_m)
        sH, sScale = self.sH, self.sScale
        values = fetch_rows(dh, config.columns, tile_m, first_row, num_tokens, lane)
        for v in cutlass.range_constexpr(cute.size(values)):
            token, j = (v * WARP_SIZE + lane) // config.columns, (v * WARP_SIZE + lane) % config.columns
            if token < tile_m:
                value = values[v]
                for a in cutlass.range_constexpr(config.order):
                    term = value.to(BFloat16)
                    value = value - term.to(Float32)
                    sH[token, a * config.padded_columns + j, slot] = term
        values = fetch_rows(dmean_square, 1, tile_m, first_row, num_tokens, lane)
        for v in cutlass.range_constexpr(cute.size(values)):
            if v * WARP_SIZE + lane < tile_m:
                sScale[v * WARP_SIZE + lane, slot] = values[v] * (2.0 / config.k)
        if const_expr(self.orientation is not None):
            sRes = self.sRes
            values = fetch_rows(res, n * n, tile_m, first_row, num_tokens, lane)
            for v in cutlass.range_constexpr(cute.size(values)):
                token, at = (v * WARP_SIZE + lane) // (n * n), (v * WARP_SIZE + lane) % (n * n)
                if const_expr(self.orientation == "oi"):
                    at = at % n * n + at // n
                if token < tile_m:
                    sRes[token, at, slot] = values[v]
        if const_expr(self.gathers):
            sPre = self.sPre
            values = fetch_rows(pre, n, tile_m, first_row, num_tokens, lane)
            for v in cutlass.range_constexpr(cute.size(values)):
                if v * WARP_SIZE + lane < tile_m * n:
                    sPre[(v * WARP_SIZE + lane) // n, (v * WARP_SIZE + lane) % n, slot] = values[v]

    @cute.jit
    def scale(self, slot: Int32, token: Int32):
        """What x is multiplied by: 2 dmean_square / K."""
        return self.sScale[token, slot]

    @cute.jit
    def weights(self, slot: Int32, token: Int32):
        """R(i, o) of a token."""
        values = cute.make_rmem_tensor((self.config.n**2,), Float32)
        if const_expr(self.orientation is not None):
            cute.autovec_copy(self.sRes[token, None, slot], values)
        return values

    @cute.jit
    def row(self, slot: Int32, token: Int32, i: Int32):
        """R(i, o) of a token for one i."""
        n = const_expr(self.config.n)
        values = cute.make_rmem_tensor((n,), Float32)
        start = self.sRes.iterator + (slot * (self.config.tile_m * self.pitch) + token * self.pitch + i * n)
        start = start.align(min(16, 4 * n))
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(n)), values)
        return values

    @cute.jit
    def gates(self, slot: Int32, token: Int32):
        """pre of a token."""
        values = cute.make_rmem_tensor((self.config.n,), Float32)
        if const_expr(self.gathers):
            cute.autovec_copy(self.sPre[token, None, slot], values)
        return values

    @cute.jit
    def gate(self, slot: Int32, token: Int32, i: Int32):
        """pre of one stream of a token."""
        return self.sPre[token, i, slot]


@cute.jit
def fetch_rows(
    source: cute.Tensor,
    width: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    first_row: Int32,
    num_rows: Int32,
    lane: Int32,
):
    """A lane's share of ``rows`` contiguous rows of ``width`` fp32 values; zeros beyond the last row."""
    values = cute.make_rmem_tensor((-(-rows * width // WARP_SIZE),), Float32)
    values.fill(0.0)
    start = source.iterator + (Int64(first_row) * width + lane)
    left = cutlass.min(num_rows - first_row, rows) * width - lane
    for v in cutlass.range_constexpr(cute.size(values)):
        if v * WARP_SIZE < left:
            values[v] = start[v * WARP_SIZE]
    return values


@cute.jit
def load_operand(
    tiled_mma, which: cutlass.Constexpr[str], tile: cute.Tensor, transpose: cutlass.Constexpr[bool], lane: Int32
):
    """A warp's operand A (M, K) or B (N, K) from shared memory, by ldmatrix; ``transpose``: K is not contiguous."""
    matrices = const_expr(4 if which == "a" or cute.size(tile, mode=[0]) > 8 else 2)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, matrices), tile.element_type)
    thr_mma = tiled_mma.get_slice(lane)
    if const_expr(which == "a"):
        copy = cute.make_tiled_copy_A(atom, tiled_mma)
        registers = cute.make_rmem_tensor(thr_mma.partition_A(tile).shape, tile.element_type)
    else:
        copy = cute.make_tiled_copy_B(atom, tiled_mma)
        registers = cute.make_rmem_tensor(thr_mma.partition_B(tile).shape, tile.element_type)
    cute.copy(copy, copy.get_slice(lane).partition_S(tile), copy.retile(registers))
    return registers


@compiled
def projection_backward(
    arch: str,
    dtype: Dtype,
    phi: Dtype,
    norm_weight: Optional[Dtype],
    needs_dx: bool,
    needs_dphi: bool,
    orientation: Optional[str],
    gathers: bool,
    config: ProjectionBackwardConfig,
) -> Program:
    """dx (M, K) and partials (config.partials(M), N, K) from x (M, K), phi (N, K), dH (M, N) and dmean_square (M,).

    ``orientation``: dout (M, K) and res (M, n n) are there, too; ``gathers``: dlayer (M, C) and pre (M, n) are.
    """
    rows, chunks = cute.sym_int(), cute.sym_int()
    n, channels, columns, k = config.n, config.channels, config.columns, config.k
    align = 16 * 8 // dtype.width if config.tma else 1
    combines = orientation is not None

    def compact(*shape):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=4)

    return Program(
        ProjectionBackward(config, orientation, gathers),
        symbolic_streams(dtype, rows, k, align),
        cute.runtime.make_fake_compact_tensor(phi, (columns, k), stride_order=(1, 0), assumed_align=phi.width // 8),
        symbolic_vector(norm_weight, k),
        compact(rows, columns),
        symbolic_vector(Float32, rows),
        symbolic_streams(dtype, rows, k, align) if combines else None,
        compact(rows, n * n) if combines else None,
        symbolic_streams(dtype, rows, channels, align) if gathers else None,
        compact(rows, n) if gathers else None,
        symbolic_streams(dtype, rows, k, align) if needs_dx else None,
        compact(chunks, columns, k) if needs_dphi else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
