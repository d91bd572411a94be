"""The walk of grouped products: from the groups' ends, which the device alone knows, to the place of a tile.

Every CTA reads all ends once. One warp makes two tables of them in shared memory: where each group ends, and how many
tiles along the rows it and those before it have. A tile is then found by its index: 32 entries of the table at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.gemm.config_grouped import MAX_GROUPS

WARP = 32


def allocate_tables(smem: SmemAllocator) -> tuple[cute.Tensor, cute.Tensor]:
    """(ends, tiles) of up to MAX_GROUPS groups."""
    return tuple(smem.allocate_tensor(Int32, cute.make_layout(MAX_GROUPS), byte_alignment=16) for _ in range(2))


@cute.jit
def scan(offs: cute.Tensor, rows: Int32, tile_rows: cutlass.Constexpr[int], tables: tuple, lane: Int32):
    """Fill the tables by one warp; each lane has neighbouring groups.

    An end below the one before, or beyond the rows, counts as these: whatever ``offs`` holds, no row is outside.
    """
    ends, tiles = tables
    groups = offs.shape[0]
    each = cute.ceil_div(groups, WARP)
    first = lane * each
    last = cutlass.min(first + each, groups)
    largest = Int32(0)
    for e in cutlass.range(first, last):
        largest = cutlass.max(largest, offs[e])
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(largest, 1 << i)
        if lane >= 1 << i:
            largest = cutlass.max(largest, other)
    end = cute.arch.shuffle_sync_up(largest, 1)
    end = cutlass.min(end, rows) if lane > 0 else Int32(0)
    count = Int32(0)
    for e in cutlass.range(first, last):
        start = end
        end = cutlass.min(cutlass.max(offs[e], start), rows)
        ends[e] = end
        count += cute.ceil_div(end - start, tile_rows)
        tiles[e] = count
    total = count
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << i)
        if lane >= 1 << i:
            total = total + other
    before = total - count
    for e in cutlass.range(first, last):
        tiles[e] = tiles[e] + before


@cute.jit
def before(table: cute.Tensor, group: Int32) -> Int32:
    """The entry before a group's; 0 before the first one's."""
    value = Int32(0)
    if group > 0:
        value = table[group - 1]
    return value


@cute.jit
def group_of(tiles: cute.Tensor, groups: Int32, tiles_n: Int32, index: Int32, group: Int32, lane: Int32) -> Int32:
    """The group of a tile, at or behind ``group``; each group has its rows' tiles times ``tiles_n``."""
    found = Int32(WARP)
    while found == WARP:
        e = group + lane
        behind = e < groups and tiles[cutlass.min(e, groups - 1)] * tiles_n <= index
        found = cute.arch.popc(cute.arch.vote_ballot_sync(behind)).to(Int32)
        group += found
    return group


@cute.jit
def tile_in_group(index: Int32, tiles_m: Int32, tiles_n: Int32, together: cutlass.Constexpr[int]):
    """(m, n) of a group's tile: ``together`` rows of tiles are walked column by column before the next ones."""
    m, n = Int32(0), index
    if tiles_m > 1:
        first = Uint32(index) // Uint32(tiles_n * together) * Uint32(together)
        rest = Uint32(index) - first * Uint32(tiles_n)
        rows = cutlass.min(Uint32(tiles_m) - first, Uint32(together))
        n = Int32(rest // rows)
        m = Int32(first + rest) - n * Int32(rows)
    return m, n


@cute.jit
def part_of(matrix: cute.Tensor, group: Int32):
    """A group's matrix of a batch, which its last mode counts; a matrix as it is."""
    if const_expr(cute.rank(matrix) == 3):
        matrix = matrix[None, None, group]
    return matrix


@cute.jit
def corner_of(matrix: cute.Tensor, first_m: Int32, first_n: Int32, end_m: Int32, end_n: Int32, alignment: int):
    """The part of a matrix in gmem from (first_m, first_n) up to the ends; its first element has this alignment."""
    offset = cute.crd2idx((first_m, first_n), matrix.layout)
    shape = (end_m - first_m, end_n - first_n)
    pointer = (matrix.iterator + offset).align(alignment)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=matrix.stride))
