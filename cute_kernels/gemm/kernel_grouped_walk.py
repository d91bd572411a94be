"""The walk of grouped products: from the groups' ends, which the device alone knows, to the place of a tile.

Every CTA reads all ends once. One warp makes two tables of them in shared memory: where each group ends, and how many
tiles along the rows it and those before it have. A tile is then found by its index: 32 entries of the table at a time.
For sums the second table may become that of groups, those of most rows first: a CTA's last tiles are the shortest then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.gemm_epilogue import transpose
from cute_kernels.gemm.config_grouped import MAX_GROUPS

WARP = 32
TABLE_BYTES = 2 * 4 * MAX_GROUPS


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


class RowsWalk:
    """How tiles of groups' rows are walked: what the kernels for all architectures share.

    A place is (group, first_m, first_n, end_m, end_n, first_k, end_k, tiles along the group's rows), in elements.

    Attributes:
        idle: threads that neither load nor multiply.
        storing: threads that store a tile together.
    """

    idle: int
    storing: int

    @cute.jit
    def rank_groups(self, tables: tuple, groups: Int32, thread: Int32):
        """Nothing: rows of groups are walked as they lie."""

    def ragged_tile(self) -> int:
        return self.tile[1 if self.transposed else 0]

    def rows_of(self, mA, mB):
        return (mB if self.transposed else mA).shape[0]

    @cute.jit
    def walk_of(self, tables: tuple, groups: Int32, mA: cute.Tensor, d: cute.Tensor, ranks: tuple, lane: Int32):
        along = const_expr(0 if self.transposed else 1)  # the matrices' own rows
        tiles_n = cute.ceil_div(d.shape[along], self.tile[along] * self.cluster[along])
        num_k = cute.size(mA, mode=[1])
        return tables, groups, tiles_n, d.shape[along], num_k, ranks[along], lane, tables[1][groups - 1] * tiles_n

    @cute.jit
    def place(self, walk: tuple, index: Int32, group: Int32):
        (ends, tiles), groups, tiles_n, size, num_k, rank, lane, _ = walk
        along = const_expr(0 if self.transposed else 1)
        group = group_of(tiles, groups, tiles_n, index, group, lane)
        tiles_before = before(tiles, group)
        tiles_m = tiles[group] - tiles_before
        m, n = tile_in_group(index - tiles_before * tiles_n, tiles_m, tiles_n, self.group)
        row = before(ends, group) + m * self.ragged_tile()
        column = (n * self.cluster[along] + rank) * self.tile[along]
        end, zero = ends[group], Int32(0)
        if const_expr(self.transposed):
            return group, column, row, size, end, zero, num_k, tiles_m
        return group, row, column, end, size, zero, num_k, tiles_m

    @cute.jit
    def k_at(self, walk: tuple, index: Int32):
        return walk[4]

    @cute.jit
    def store_part(self, sPart: cute.Tensor, d: cute.Tensor, first_m: Int32, first_n: Int32, thread: Int32):
        """Copy a part, 16 bytes a thread, inside the group; d's rows are aligned and whole such vectors long."""
        rows, columns = const_expr(cute.size(sPart, mode=[0])), const_expr(cute.size(sPart, mode=[1]))
        vec = const_expr(128 // self.out.width)
        across = const_expr(columns // vec)
        down = const_expr(self.storing // across)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out, num_bits_per_copy=128)
        threads = cute.make_layout((down, across), stride=(across, 1))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vec)))
        tSsD = copy.get_slice(thread).partition_S(sPart)
        fragment = cute.make_rmem_tensor(tSsD[None, 0, 0].shape, self.out)
        column = first_n + thread % across * vec
        for i in cutlass.range_constexpr(rows // down):
            row = first_m + i * down + thread // across
            if row < d.shape[0] and column < d.shape[1]:
                cute.copy(copy, tSsD[None, i, 0], fragment)
                pointer = (d.iterator + cute.crd2idx((row, column), d.layout)).align(16)
                cute.autovec_copy(
                    cute.make_tensor(fragment.iterator, cute.make_layout(vec)),
                    cute.make_tensor(pointer, cute.make_layout(vec)),
                )

    @cute.jit
    def clear_rest(self, d: cute.Tensor, end: Int32, cta: Int32, ctas: Int32, thread: Int32):
        """Zero the rows beyond the last group, which are whole vectors of 16 bytes."""
        d = transpose(d) if const_expr(self.transposed) else d
        vec = const_expr(128 // self.out.width)
        zeros = cute.make_rmem_tensor((vec,), self.out)
        zeros.fill(0.0)
        for row in cutlass.range(end + cta, d.shape[0], ctas):
            for vector in cutlass.range(thread, d.shape[1] // vec, self.idle):
                pointer = (d.iterator + cute.crd2idx((row, vector * vec), d.layout)).align(16)
                cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(vec)))


class SumsWalk(RowsWalk):
    """How tiles of each group's own result are walked.

    Attributes:
        most_rows_first: whether the second table has groups by their rows.
    """

    most_rows_first: bool

    @cute.jit
    def clear_rest(self, d: cute.Tensor, end: Int32, cta: Int32, ctas: Int32, thread: Int32):
        """Nothing: all of d is tiles of groups."""

    @cute.jit
    def rank_groups(self, tables: tuple, groups: Int32, thread: Int32):
        """Make the second table that of groups, most rows first, by all threads; each compares its groups with all."""
        if const_expr(self.most_rows_first):
            ends, order = tables
            threads, _, _ = cute.arch.block_dim()
            for group in cutlass.range(thread, groups, threads):
                rows = ends[group] - before(ends, group)
                place, end_before = Int32(0), Int32(0)
                for other in cutlass.range(groups, unroll=8):  # loads that do not wait for each other
                    end = ends[other]
                    others = end - end_before
                    if others > rows or (others == rows and other < group):
                        place += 1
                    end_before = end
                order[place] = group
            cute.arch.sync_threads()

    @cute.jit
    def group_at(self, tables: tuple, place: Int32) -> Int32:
        return tables[1][place] if const_expr(self.most_rows_first) else place

    def ragged_tile(self) -> int:
        return self.tile[2]

    def rows_of(self, mA, mB):
        return cute.size(mA, mode=[1])

    @cute.jit
    def walk_of(self, tables: tuple, groups: Int32, mA: cute.Tensor, d: cute.Tensor, ranks: tuple, lane: Int32):
        tiles_m, tiles_n = self.tiles_of(d)
        return tables, tiles_m, tiles_n, d.shape[0], d.shape[1], ranks, groups * tiles_m * tiles_n

    @cute.jit
    def place(self, walk: tuple, index: Int32, group: Int32):
        tables, tiles_m, tiles_n, size_m, size_n, (rank_m, rank_n), _ = walk
        ends, _ = tables
        place = Int32(Uint32(index) // Uint32(tiles_m * tiles_n))
        group = self.group_at(tables, place)
        m, n = tile_in_group(index - place * tiles_m * tiles_n, tiles_m, tiles_n, self.group)
        m, n = m * self.cluster[0] + rank_m, n * self.cluster[1] + rank_n
        first_m, first_n = m * self.tile[0], n * self.tile[1]
        return group, first_m, first_n, size_m, size_n, before(ends, group), ends[group], Int32(2)

    @cute.jit
    def k_at(self, walk: tuple, index: Int32):
        tables, tiles_m, tiles_n, *_ = walk
        ends, _ = tables
        group = self.group_at(tables, Int32(Uint32(index) // Uint32(tiles_m * tiles_n)))
        return ends[group] - before(ends, group)
