"""Rows through shared memory: a ring of stages that the bulk-copy engine fills while a team computes.

``cp.async.bulk`` is the TMA engine without a tensor map: rows are contiguous, so one instruction moves a whole row, of
any length, and its completion is counted in bytes on an mbarrier. One thread of a team issues; nobody spends registers
on data in flight. Rows that do not start on 16 bytes are fetched with the bytes around them that complete the first and
last 16-byte unit, and read from shared memory at the offset. A unit that would pass the end of the matrix is not read:
the issuing warp copies its few elements itself, a lane each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.common.cache_hints import EVICT_FIRST, LAST_BYTES, evict_first_if
from cute_kernels.common.row_layout import BULK_ALIGNMENT, RowLayout
from cute_kernels.common.rows import thread_chunks


@cute.jit
def bulk_load(dst: cute.Pointer, src: Int64, num_bytes: Int32, mbar: cute.Pointer, policy: Int64):
    """Start copying ``num_bytes`` (a multiple of 16) from global address ``src`` to shared memory ``dst``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[Int32(dst.toint()), Int64(src), Int32(num_bytes), Int32(mbar.toint()), policy],
    )


class RowRing:
    """Ring of ``layout.stages`` tiles a team for several streamed matrices (``sources``, always in the same order)."""

    def __init__(self, layout: RowLayout, writes: bool = True):
        """``writes``: whether the kernel writes as much as it reads; else what it reads makes room first in L2."""
        self.layout = layout
        self.writes = writes

    def allocate(self, smem, sources, scratch_bytes: int = 0):
        """Shared memory: tensors (pitch, tile_rows, stages * teams), one a stream, and mbarriers (stages * teams).

        From the first tensor on there are at least ``scratch_bytes`` bytes, for who needs the space after the last row.
        """
        layout = self.layout
        slots = layout.stages * layout.teams
        tiles = []
        for source in sources:
            dtype = source.element_type
            pitch = layout.pitch(dtype.width // 8)
            tile_layout = cute.make_layout(
                (pitch, layout.tile_rows, slots), stride=(1, pitch, pitch * layout.tile_rows)
            )
            tiles.append(smem.allocate_tensor(dtype, tile_layout, byte_alignment=128))
        missing = scratch_bytes - layout.slot_bytes(tuple(source.element_type.width // 8 for source in sources)) * slots
        if missing > 0:
            smem.allocate_tensor(Int64, cute.make_layout(-(-missing // 8)), byte_alignment=8)
        mbars = smem.allocate_tensor(Int64, cute.make_layout(slots), byte_alignment=8)
        return tiles, mbars.iterator

    @cute.jit
    def start(self, sources, tiles, mbars, team: Int32, first_tile: Int32, step: Int32, num_tiles: Int32, column):
        """Arm a team's mbarriers and request its first tiles, one a stage; called by all lanes of its first warp.

        The rest of the team may touch the ring after the CTA has synchronised.
        """
        layout = self.layout
        if cute.arch.lane_idx() == 0:
            for stage in cutlass.range_constexpr(layout.stages):
                cute.arch.mbarrier_init(mbars + (team * layout.stages + stage), 1)
        cute.arch.mbarrier_init_fence()
        for stage in cutlass.range(layout.stages, unroll=layout.stages if layout.aligned else 1):
            slot = team * layout.stages + stage
            self.refill(sources, tiles, mbars, slot, first_tile + stage * step, num_tiles, column)

    @cute.jit
    def fetch(self, sources, tiles, mbars: cute.Pointer, slot: Int32, row: Int32, column):
        """Fill ``slot`` with the tile that begins at ``row``; called by all lanes of a team's first warp."""
        layout = self.layout
        lane = cute.arch.lane_idx()
        mbar = mbars + slot
        num_rows = cutlass.min(sources[0].shape[0] - row, layout.tile_rows)
        num_columns = columns_of_cta(column, layout)
        last_rows = const_expr(LAST_BYTES // (layout.n * sources[0].element_type.width // 8))
        policy = Int64(EVICT_FIRST)
        if const_expr(self.writes):
            policy = evict_first_if(sources[0].shape[0] - row <= last_rows)
        if const_expr(layout.aligned):
            if lane == 0:
                row_bytes = num_columns * sum(source.element_type.width // 8 for source in sources)
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, num_rows * row_bytes)
            if const_expr(layout.tile_rows > 1):
                cute.arch.sync_warp()
            for i in cutlass.range_constexpr(len(sources)):
                source, tile = sources[i], tiles[i]
                itemsize = const_expr(source.element_type.width // 8)
                if const_expr(layout.packed):
                    if lane == 0:
                        dst = cute.make_tensor(tile.iterator, tile.layout)[None, 0, slot].iterator
                        bulk_load(
                            dst, row_address(source, row, column), num_rows * num_columns * itemsize, mbar, policy
                        )
                else:
                    if lane < num_rows:
                        dst = tile[None, lane, slot].iterator
                        bulk_load(dst, row_address(source, row + lane, column), num_columns * itemsize, mbar, policy)
        else:
            units = [whole_units(source, row, column, num_columns) for source in sources]
            total = Int32(0)
            for i in cutlass.range_constexpr(len(sources)):
                begin, size = units[i]
                end = row_address(sources[i], sources[i].shape[0] - 1, sources[i].shape[1])
                if begin + size > end:
                    size -= BULK_ALIGNMENT
                    store_tail(sources[i], tiles[i][None, 0, slot], row, column, num_columns, begin, size)
                units[i] = begin, size
                total += size
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, total)
                for i in cutlass.range_constexpr(len(sources)):
                    begin, size = units[i]
                    if size > 0:
                        bulk_load(tiles[i][None, 0, slot].iterator, begin, size, mbar, policy)

    @cute.jit
    def refill(self, sources, tiles, mbars, slot: Int32, tile: Int32, num_tiles: Int32, column):
        """Request ``tile`` into a slot that every thread of the team has read, if there is such a tile."""
        if tile < num_tiles:
            cute.arch.sync_warp()
            self.fetch(sources, tiles, mbars, slot, tile * self.layout.tile_rows, column)

    @cute.jit
    def advance(self, slot: Int32, phase: Int32, team: Int32):
        """The team's next slot and the phase to wait for on it."""
        slot += 1
        if slot == (team + 1) * self.layout.stages:
            slot = team * self.layout.stages
            phase ^= 1
        return slot, phase

    @cute.jit
    def row(self, source: cute.Tensor, tile: cute.Tensor, slot: Int32, tile_row: Int32, row: Int32, column):
        """This CTA's part of a row in shared memory, as (vec, threads_per_row, chunks)."""
        return in_unit(tile[None, tile_row, slot].iterator, source, row, column, self.layout)


@cute.jit
def columns_of_cta(column, layout: cutlass.Constexpr) -> Int32:
    """How many columns of a row the CTA has whose first one is ``column``."""
    num_columns = Int32(layout.columns_per_cta)
    if const_expr(layout.columns_per_cta * layout.cluster != layout.n):
        num_columns = cutlass.min(num_columns, layout.n - column)
    return num_columns


@cute.jit
def in_unit(pointer: cute.Pointer, matrix: cute.Tensor, row: Int32, column, layout: cutlass.Constexpr):
    """A row in shared memory as (vec, threads_per_row, chunks): from ``pointer``, as far on as it is from 16 bytes."""
    if const_expr(not layout.aligned):
        itemsize = const_expr(matrix.element_type.width // 8)
        pointer = pointer + Int32(row_address(matrix, row, column) & (BULK_ALIGNMENT - 1)) // itemsize
        pointer = pointer.align(layout.vec * itemsize)
    return cute.make_tensor(pointer, thread_chunks(layout))


@cute.jit
def row_address(source: cute.Tensor, row: Int32, column) -> Int64:
    """Global address of ``source[row, column]``, in 64 bits."""
    itemsize = const_expr(source.element_type.width // 8)
    return source.iterator.toint() + (Int64(row) * source.stride[0] + column) * itemsize


@cute.jit
def whole_units(source: cute.Tensor, row: Int32, column, num_columns: Int32):
    """Address and bytes of the 16-byte units that hold part of a row; the last one may pass the matrix's end."""
    itemsize = const_expr(source.element_type.width // 8)
    address = row_address(source, row, column)
    begin = address & ~(BULK_ALIGNMENT - 1)
    size = Int32(address - begin) + num_columns * itemsize
    return begin, (size + BULK_ALIGNMENT - 1) & ~(BULK_ALIGNMENT - 1)


@cute.jit
def store_tail(
    source: cute.Tensor, slot_row: cute.Tensor, row: Int32, column, num_columns: Int32, begin: Int64, size: Int32
):
    """Copy the elements behind ``size`` bytes to where the whole unit would have put them, a lane an element."""
    itemsize = const_expr(source.element_type.width // 8)
    back = cute.arch.lane_idx() + 1  # elements from the end of the row
    offset = Int32(row_address(source, row, column + num_columns - back) - begin)
    if back < BULK_ALIGNMENT // itemsize and num_columns >= back and offset >= size:
        element = source.iterator + (Int64(row) * source.stride[0] + column + num_columns - back)
        slot_row[offset // itemsize] = cute.make_tensor(element, cute.make_layout(1))[0]
