"""Where the backward finds sequences: their rows, and their tiles in a line of all sequences' tiles."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.kernel_matrices import RAGGED_ROWS


class Sequences(NamedTuple):
    """Rows of queries, or of keys, of all sequences.

    Tiles of n rows of a packed sequence i, which begins at row r, are those from r // n + i on: each has as many as it
    needs, one at least, and no two have the same; some tiles are no one's. So a place needs no sum over lengths.

    Attributes:
        length: rows of a sequence; packed: of all.
        number: of sequences.
        starts: cu_seqlens of packed sequences, or None.
        used: how many of its rows each sequence has, or None.
    """

    length: Int32
    number: Int32
    starts: cute.Tensor | None
    used: cute.Tensor | None

    def first(self, i: Int32) -> Int32:
        """A sequence's first row in its matrix."""
        return Int32(0) if const_expr(self.starts is None) else self.starts[i]

    def matrix(self, i: Int32) -> Int32:
        """The batch's matrix with a sequence's rows."""
        return i if const_expr(self.starts is None) else Int32(0)

    def rows(self, i: Int32) -> Int32:
        rows = self.length
        if const_expr(self.starts is not None):
            rows = self.starts[i + 1] - self.starts[i]
        if const_expr(self.used is not None):
            rows = cutlass.min(self.used[i], rows)
        return rows

    def first_tile(self, i: Int32, tile_rows: int) -> Int32:
        if const_expr(self.starts is None):
            return i * cute.ceil_div(self.length, tile_rows)
        return self.starts[i] // tile_rows + i


@cute.jit
def find_tile(sequences: Sequences, tile: Int32, tile_rows: cutlass.Constexpr[int]):
    """(Sequence, its tile) of a tile of the line."""
    if const_expr(sequences.starts is None):
        tiles = cute.ceil_div(sequences.length, tile_rows)
        sequence, within = tile // tiles, tile % tiles
    else:
        sequence, last = Int32(0), sequences.number - 1
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if sequences.first_tile(middle, tile_rows) <= tile:
                sequence = middle
            else:
                last = middle - 1
        within = tile - sequences.first_tile(sequence, tile_rows)
    return sequence, within


def rows_of(matrix: cute.Tensor, is_ragged: bool, head: Int32, batch: Int32, first: Int32, rows: Int32) -> cute.Tensor:
    """A sequence's rows of a head, of (length, head size, heads, batch); of a ragged one nothing is behind them."""
    if not is_ragged:
        return matrix[None, None, head, batch]
    return cute.domain_offset((RAGGED_ROWS - rows, 0), matrix[None, None, head, batch, first + rows])
