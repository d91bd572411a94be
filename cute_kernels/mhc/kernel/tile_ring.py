"""The ring of tiles of ``projection_backward``: what of x, dout and dlayer is where in shared memory, in and out.

A slot holds a tile of ``tile_m`` tokens by ``n`` boxes of ``slice_c`` columns; box i is stream i where streams follow
each other in memory, else the i-th part of a row of n slice_c columns.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.common.cache_hints import LAST_BYTES, evict_first_if
from cute_kernels.mhc.config import ProjectionBackwardConfig
from cute_kernels.mhc.kernel.streams import WARP_SIZE


class TileRing:
    """Copies of a tile, each called by a whole warp, by TMA (``atoms``: of x, dout, dlayer, dx) or element by element.

    ``matrices``: x, dout, dlayer and dx, as ``by_stream`` has them where TMA copies them.
    """

    def __init__(self, config: ProjectionBackwardConfig, dtype, smem, atoms: tuple, matrices: tuple):
        self.config = config
        self.dtype = dtype
        self.atoms = atoms
        self.matrices = matrices
        box = config.tile_m * config.slice_c
        layout = cute.make_layout(
            (config.tile_m, config.slice_c, config.n, config.stages), stride=(config.slice_c, 1, box, config.n * box)
        )
        one = cute.make_layout((config.tile_m, config.slice_c, config.stages), stride=(config.slice_c, 1, box))
        swizzle = swizzle_of(config, dtype)
        self.sX = smem.allocate_tensor(dtype, layout, byte_alignment=1024, swizzle=swizzle)
        self.sOut, self.sLayer = self.sX, self.sX
        if matrices[1] is not None:
            self.sOut = smem.allocate_tensor(dtype, layout, byte_alignment=1024, swizzle=swizzle)
        if matrices[2] is not None:
            self.sLayer = smem.allocate_tensor(dtype, one, byte_alignment=1024, swizzle=swizzle)

    @property
    def arrivals(self) -> int:
        """Arrivals of the loading warp on the barrier of a slot, for each tile."""
        return 1 if self.config.tma else WARP_SIZE

    @cute.jit
    def request(self, full: cute.Pointer, block_m: Int32, slice_index: Int32, slot: Int32):
        """Arm a slot's barrier and ask for a tile's x, dout and dlayer."""
        config = self.config
        (tma_x, tma_out, tma_layer, _), (mX, mOut, mLayer, _) = self.atoms, self.matrices
        if const_expr(config.tma):
            boxes = const_expr(config.n * (1 if mOut is None else 2) + (0 if mLayer is None else 1))
            box_bytes = const_expr(config.tile_m * config.slice_c * self.dtype.width // 8)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, boxes * box_bytes)
            # The last tokens; where items of several chunks are at work at the end, this is the last chunk alone
            last_tokens = const_expr(LAST_BYTES // (config.k * self.dtype.width // 8))
            policy = evict_first_if(mX.shape[0] - block_m * config.tile_m <= last_tokens)
            for i in cutlass.range_constexpr(config.n):
                at = (block_m, *self.box_coordinate(slice_index, i))
                self.load(tma_x, mX, at, self.sX[None, None, i, slot], full + slot, policy)
                if const_expr(mOut is not None):
                    self.load(tma_out, mOut, at, self.sOut[None, None, i, slot], full + slot, policy)
            if const_expr(mLayer is not None):
                self.load(tma_layer, mLayer, (block_m, slice_index), self.sLayer[None, None, slot], full + slot, policy)
        else:
            self.load_plain(mX, self.sX, block_m, slice_index, slot)
            if const_expr(mOut is not None):
                self.load_plain(mOut, self.sOut, block_m, slice_index, slot)
            if const_expr(mLayer is not None):
                self.load_plain(mLayer, self.sLayer, block_m, slice_index, slot)
            cute.arch.mbarrier_arrive(full + slot)

    def load(self, atom, matrix, at, target: cute.Tensor, mbar, policy: Int64):
        """One box of a tile to shared memory."""
        load_box(atom, cute.local_tile(matrix, (self.config.tile_m, self.config.slice_c), at), target, mbar, policy)

    @cute.jit
    def write(self, block_m: Int32, slice_index: Int32, slot: Int32):
        """dx, in the place of x, to global memory."""
        config = self.config
        atom, mDx = self.atoms[3], self.matrices[3]
        if const_expr(config.tma):
            for i in cutlass.range_constexpr(config.n):
                at = (block_m, *self.box_coordinate(slice_index, i))
                gBox = cute.local_tile(mDx, (config.tile_m, config.slice_c), at)
                store_box(atom, self.sX[None, None, i, slot], gBox)
            cute.arch.cp_async_bulk_commit_group()
        else:
            self.write_plain(mDx, block_m, slice_index, slot)

    @cute.jit
    def wait_for_writes(self, pending: cutlass.Constexpr[int]):
        """Until all but the last ``pending`` writes have read their slots."""
        if const_expr(self.config.tma):
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    @cute.jit
    def load_plain(self, matrix: cute.Tensor, ring: cute.Tensor, block_m: Int32, slice_index: Int32, slot: Int32):
        """A tile's part of a matrix that TMA cannot address; zeros outside."""
        config = self.config
        first_row = block_m * config.tile_m
        boxes = const_expr(config.n if matrix.shape[1] == config.k else 1)
        end = const_expr(config.k if boxes > 1 and config.layout == "channels" else config.channels)
        for i in cutlass.range_constexpr(boxes):
            for index in cutlass.range(cute.arch.lane_idx(), config.tile_m * config.slice_c, WARP_SIZE):
                row, c = index // config.slice_c, index % config.slice_c
                bound, column = slice_index * config.slice_c + c, slice_index * config.slice_c + c
                if const_expr(boxes > 1):
                    bound, column = column_of(config, slice_index, i, c)
                value = self.dtype(0.0)
                if first_row + row < matrix.shape[0] and bound < end:
                    value = matrix[first_row + row, column]
                if const_expr(cute.rank(ring) == 4):
                    ring[row, c, i, slot] = value
                else:
                    ring[row, c, slot] = value

    @cute.jit
    def write_plain(self, mDx: cute.Tensor, block_m: Int32, slice_index: Int32, slot: Int32):
        """``write`` where TMA cannot address dx."""
        config = self.config
        first_row = block_m * config.tile_m
        for i in cutlass.range_constexpr(config.n):
            for index in cutlass.range(cute.arch.lane_idx(), config.tile_m * config.slice_c, WARP_SIZE):
                row, c = index // config.slice_c, index % config.slice_c
                bound, column = column_of(config, slice_index, i, c)
                if first_row + row < mDx.shape[0] and bound < end_of_columns(config):
                    mDx[first_row + row, column] = self.sX[row, c, i, slot]

    def place(self, group, octet: int, column, lane):
        """Where in a slot a warp's ``octet`` of columns has its ``column``, in the first row that is this lane's."""
        n, width = self.config.n, self.config.slice_c
        if self.config.layout == "streams":
            return self.swizzled(octet, group * 8 + column, lane)
        column = (group * n + octet) * 8 + column
        return self.swizzled(column // width, column % width, lane)

    def place_of_channel(self, group, channel, lane):
        """The same for one of a warp's channels of dlayer."""
        return self.swizzled(0, group * 8 + channel, lane)

    def swizzled(self, box, column, lane):
        """Element ``column`` of row lane / 4 of a box; eight rows on the swizzle does the same again.

        So an element's address is a place, found once, and constants; through a swizzled pointer it is computed for
        each element of each tile (a fifth of the instructions of dx).
        """
        size = self.dtype.width // 8
        byte = (lane // 4 * self.config.slice_c + column) * size
        byte = byte ^ ((byte >> 7 & (1 << swizzle_bits(self.config, self.dtype)) - 1) << 4)
        return byte // size + box * (self.config.tile_m * self.config.slice_c)

    @cute.jit
    def every_eighth_row(
        self, ring: cute.Tensor, slot: Int32, place, first: Int32, count: cutlass.Constexpr, width: cutlass.Constexpr
    ):
        """``width`` elements at ``place`` in ``count`` / 8 of a slot's rows, as ((width, 2), count / 16)."""
        row = const_expr(self.config.slice_c)
        slot_size = const_expr(self.config.tile_m * row * (self.config.n if cute.rank(ring) == 4 else 1))
        layout = cute.make_layout(((width, 2), count // 16), stride=((1, 8 * row), 16 * row))
        start = cute.assume(slot * slot_size + place + first * row, divby=width)
        plain = cute.make_ptr(ring.element_type, ring.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(plain + start, layout)

    def box_coordinate(self, slice_index, i: int):
        """(tile of columns, stream) of a slice's i-th box."""
        return (slice_index, i) if self.config.layout == "streams" else (slice_index * self.config.n + i, 0)

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
            column = in_boxes(config, group * (8 * config.n))
        # `Pointer.align` would lose the swizzle
        return cute.make_tensor(ring.iterator + cute.assume(slot * (config.n * box) + column, divby=8), layout)


@cute.jit
def load_box(atom: cute.CopyAtom, box: cute.Tensor, target: cute.Tensor, mbar: cute.Pointer, policy: Int64):
    """A box of a matrix to shared memory, by TMA."""
    tSs, tSg = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 2)
    )
    cute.copy(atom, tSg, tSs, tma_bar_ptr=mbar, cache_policy=policy)


@cute.jit
def store_box(atom: cute.CopyAtom, source: cute.Tensor, box: cute.Tensor):
    """A box of a matrix from shared memory, by TMA."""
    tSs, tSg = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(box, 0, 2)
    )
    cute.copy(atom, tSs, tSg)


@cute.jit
def advance(slot: Int32, phase: Int32, stages: cutlass.Constexpr[int]):
    """The next slot of a ring and its phase."""
    slot += 1
    if slot == stages:
        slot = Int32(0)
        phase ^= 1
    return slot, phase


def swizzle_bits(config: ProjectionBackwardConfig, dtype) -> int:
    """The binary logarithm of the number of 16-byte units in a row."""
    return (config.slice_c * dtype.width // 8 // 16).bit_length() - 1


def swizzle_of(config: ProjectionBackwardConfig, dtype):
    """The swizzle of the ring's rows, by which eight rows of 16 bytes lie in different banks."""
    return cute.make_swizzle(swizzle_bits(config, dtype), 4, 3)


def by_stream(config: ProjectionBackwardConfig, x: cute.Tensor) -> cute.Tensor:
    """(M, C, n) where streams follow each other, (M, n C, 1) where channels do."""
    if config.layout == "streams":
        layout = cute.make_layout((x.shape[0], config.channels, config.n), stride=(x.stride[0], 1, config.channels))
    else:
        layout = cute.make_layout((x.shape[0], config.k, 1), stride=(x.stride[0], 1, config.k))
    return cute.make_tensor(x.iterator, layout)


def column_of(config: ProjectionBackwardConfig, slice_index, i: int, c):
    """(what ends at ``end_of_columns``, column of x) of column c of a slice's i-th box."""
    if config.layout == "streams":
        channel = slice_index * config.slice_c + c
        return channel, i * config.channels + channel
    column = (slice_index * config.n + i) * config.slice_c + c
    return column, column


def end_of_columns(config: ProjectionBackwardConfig) -> int:
    """Channels, or columns of x in the order of channels."""
    return config.channels if config.layout == "streams" else config.k


def in_boxes(config: ProjectionBackwardConfig, column):
    """Where a column of a slice is, in elements, where channels follow each other."""
    width = config.slice_c
    return column // width * (config.tile_m * width) + column % width


def tma_atom(
    config: ProjectionBackwardConfig, matrix: Optional[cute.Tensor], streams: bool = True, stores: bool = False
) -> tuple:
    """(atom, tensor of coordinates) of a matrix of streams, or of channels alone; (None, matrix) without TMA."""
    if matrix is None or not config.tma:
        return None, matrix
    shape = (config.tile_m, config.slice_c)
    box = cute.make_layout(shape, stride=(config.slice_c, 1))
    box = cute.make_composed_layout(swizzle_of(config, matrix.element_type), 0, box)
    op = cpasync.CopyBulkTensorTileS2GOp() if stores else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, by_stream(config, matrix) if streams else matrix, box, shape)
