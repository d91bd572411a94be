"""Rows to memory in whole 16-byte units, wherever they begin: through shared memory, by the bulk-copy engine.

A warp that writes an odd row by itself fills 64 bytes an instruction, at any place: two of the three sectors that it
touches are another instruction's, too, and L2 takes each part of a sector as it takes a whole one. Here the threads
write to a tile in shared memory, where the row lies in its 16 bytes as it does in memory:

    registers --> tile --one bulk copy--> the units within the row;  the few elements before and behind, a lane each

Whole rows then leave while the team is at its next one. A tile is written again when the copy has read it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.common.reduce import team_barrier
from cute_kernels.common.row_layout import BULK_ALIGNMENT, RowLayout, edge_elements, inner_units
from cute_kernels.common.row_ring import columns_of_cta, in_unit, row_address
from cute_kernels.common.rows import as_chunks, piece_of_row, store_piece


@cute.jit
def bulk_store(dst: Int64, src: cute.Pointer, num_bytes: Int32):
    """Start copying ``num_bytes`` (a multiple of 16) from shared memory ``src`` to global address ``dst``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[Int64(dst), Int32(src.toint()), Int32(num_bytes)],
    )


class RowStore:
    """Writes rows of one or several matrices, always the same ones; a tile a team and matrix, if ``layout.staged``.

    Of each row all threads of a team call ``begin``, then ``piece`` for each matrix, then ``send``; at last ``finish``.
    Where rows are not staged, ``piece`` writes to memory, and the others do nothing. The team's last warp sends, since
    the first one asks for the next rows.
    """

    def __init__(self, layout: RowLayout):
        self.layout = layout

    def allocate(self, smem, targets) -> list:
        """Shared memory of each matrix, (pitch, teams); None where there is no matrix, or rows are not staged."""
        layout = self.layout
        tiles = []
        for target in targets:
            tile = None
            if layout.staged and target is not None:
                pitch = layout.pitch(target.element_type.width // 8)
                shape = cute.make_layout((pitch, layout.teams))
                tile = smem.allocate_tensor(target.element_type, shape, byte_alignment=128)
            tiles.append(tile)
        return tiles

    @cute.jit
    def begin(self, team: Int32):
        """Wait until the row before has been read from the tiles."""
        if const_expr(self.layout.staged):
            self.finish()
            team_barrier(self.layout, team)

    @cute.jit
    def finish(self):
        """As ``begin``, for the last row: shared memory must stay until then."""
        if const_expr(self.layout.staged):
            if self._sends():
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def piece(self, value, target: cute.Tensor, tile, team, row, column, t, piece: cutlass.Constexpr, inside):
        """Write a piece of a row if it lies inside the matrix."""
        layout = self.layout
        if const_expr(tile is None):
            store_piece(value, target, row, column, t, piece, inside, layout)
        else:
            if inside:
                fragment = cute.make_rmem_tensor((piece[1] * layout.vec,), target.element_type)
                fragment.store(value)
                place = piece_of_row(in_unit(tile[None, team].iterator, target, row, column, layout), t, piece, layout)
                cute.autovec_copy(as_chunks(fragment, layout), place)

    @cute.jit
    def send(self, targets, tiles, team: Int32, row: Int32, column):
        """Start to copy the row that the team has written."""
        layout = self.layout
        if const_expr(layout.staged):
            cute.arch.fence_proxy("async.shared", space="cta")
            team_barrier(layout, team)
            if self._sends():
                num_columns = columns_of_cta(column, layout)
                lane = cute.arch.lane_idx()
                for i in cutlass.range_constexpr(len(targets)):
                    if const_expr(tiles[i] is not None):
                        self._send_row(targets[i], tiles[i][None, team].iterator, row, column, num_columns, lane)
                if lane == 0:
                    cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _sends(self):
        """Whether this thread is of the team's last warp."""
        warps = const_expr(self.layout.warps_per_team)
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % warps == warps - 1

    @cute.jit
    def _send_row(self, target: cute.Tensor, tile: cute.Pointer, row: Int32, column, num_columns: Int32, lane: Int32):
        """The units within the row by the engine, the elements around them a lane each; by one warp."""
        itemsize = const_expr(target.element_type.width // 8)
        address = row_address(target, row, column)
        first, num_bytes = inner_units(address, num_columns * itemsize)
        if lane == 0:
            if num_bytes > 0:
                skipped = Int32(first - (address & ~(BULK_ALIGNMENT - 1))) // itemsize
                bulk_store(first, tile + skipped, Int32(num_bytes))
        shared = tile + Int32(address & (BULK_ALIGNMENT - 1)) // itemsize
        matrix_row = target.iterator + (Int64(row) * target.stride[0] + column)
        edges = edge_elements(address, num_columns, itemsize, lane)
        for i in cutlass.range_constexpr(len(edges)):
            element, inside = edges[i]
            if inside:
                place = cute.make_tensor(matrix_row + element, cute.make_layout(1))
                place[0] = cute.make_tensor(shared + element, cute.make_layout(1))[0]
