"""A thread's part of a row: where it lies, and how it gets in and out of registers."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from cute_kernels.common.convert import to_fp32
from cute_kernels.common.reduce import sum_of_products
from cute_kernels.common.row_layout import WARP_SIZE, RowLayout

Dtype = type[cutlass.Numeric]


def thread_chunks(layout: RowLayout):
    """CuTe layout (vec, threads_per_row, chunks) of one CTA's part of a row."""
    vec, threads = layout.vec, layout.threads_per_row
    return cute.make_layout((vec, threads, layout.chunks), stride=(1, vec, vec * threads))


@cute.jit
def thread_coordinates(layout: cutlass.Constexpr):
    """(CTA of the cluster, team of the CTA, thread of the row, row of the pass, whether this warp feeds the ring)."""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    team = cute.arch.make_warp_uniform(tidx // layout.team_threads)
    in_team = tidx % layout.team_threads
    return (
        bidx % layout.cluster,
        team,
        tidx % layout.threads_per_row,
        in_team // layout.threads_per_row,
        cute.arch.make_warp_uniform(in_team // WARP_SIZE) == 0,
    )


@cute.jit
def tiles_of_team(rows, team, layout: cutlass.Constexpr):
    """Number of tiles, and this team's first one and step."""
    bidx, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    step = grid // layout.cluster * layout.teams
    return cute.ceil_div(rows, layout.tile_rows), bidx // layout.cluster * layout.teams + team, step


@cute.jit
def synchronize_cluster(layout: cutlass.Constexpr):
    """All threads of a CTA see what it wrote to shared memory, and all of a cluster that its barriers are initialised.

    That arrival is relaxed: one that releases waits for the loads in flight (layer_norm bwd 512x16384 23.7, 24.6 us).
    """
    cute.arch.barrier()
    if const_expr(layout.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def valid_columns(column, t, layout: RowLayout) -> list:
    """Whether each of this thread's pieces lies inside the matrix; Python's True where that is always so."""
    valid = []
    for first, number in layout.pieces:
        local = (first * layout.threads_per_row + t) * layout.vec
        whole = first + number <= layout.whole_chunks
        valid.append(True if whole else (local < layout.columns_per_cta) & (column + local < layout.n))
    return valid


def both(a, b):
    """``a and b`` for conditions that are Python's True or run-time values."""
    if a is True or b is True:
        return b if a is True else a
    return a & b


def piece_of(fragment: cute.Tensor, piece: tuple[int, int], layout: RowLayout) -> cute.Tensor:
    """A piece of this thread's elements (vec, chunks) in registers, as a vector."""
    first, number = piece
    return cute.make_tensor(fragment.iterator + first * layout.vec, cute.make_layout(number * layout.vec))


def piece_of_row(row: cute.Tensor, t, piece: tuple[int, int], layout: RowLayout) -> cute.Tensor:
    """This thread's piece of a row (vec, threads, chunks), as (vec, number)."""
    first, number = piece
    pitch = layout.threads_per_row * layout.vec
    return cute.make_tensor(row[None, t, first].iterator, cute.make_layout((layout.vec, number), stride=(1, pitch)))


def as_chunks(vector: cute.Tensor, layout: RowLayout) -> cute.Tensor:
    """The vector of a piece as (vec, number)."""
    return cute.make_tensor(vector.iterator, cute.make_layout((layout.vec, cute.size(vector) // layout.vec)))


def columns_of(vector: cute.Tensor, column, layout: RowLayout) -> cute.Tensor:
    """A CTA's part of a per-column vector, as (vec, threads, chunks)."""
    if layout.cluster > 1:
        column = cute.assume(column, divby=8)  # columns_per_cta is
    return cute.make_tensor(vector.iterator + column, thread_chunks(layout))


@cute.jit
def load_columns(source: cute.Tensor, t, has_column, layout: cutlass.Constexpr):
    """This thread's elements of a per-column vector, in the vector's dtype; zero beyond the last column."""
    fragment = cute.make_rmem_tensor((layout.vec, layout.chunks), source.element_type)
    fragment.fill(0)
    for i in cutlass.range_constexpr(len(layout.pieces)):
        piece = layout.pieces[i]
        if has_column[i]:
            target = as_chunks(piece_of(fragment, piece, layout), layout)
            cute.autovec_copy(piece_of_row(source, t, piece, layout), target)
    return fragment


@cute.jit
def share_columns(fragment, smem, team, t, row_in_pass, has_column, layout: cutlass.Constexpr):
    """Copy what ``load_columns`` loaded to shared memory, as (vec, threads, chunks); the teams take turns to write.

    The caller synchronises the CTA before ``load_piece`` reads it.
    """
    shared = smem.allocate_tensor(fragment.element_type, thread_chunks(layout), byte_alignment=16)
    for i in cutlass.range_constexpr(len(layout.pieces)):
        piece = layout.pieces[i]
        if both(has_column[i], (team == i % layout.teams) & (row_in_pass == 0)):
            source = as_chunks(piece_of(fragment, piece, layout), layout)
            cute.autovec_copy(source, piece_of_row(shared, t, piece, layout))
    return shared


@cute.jit
def load_row(source: cute.Tensor, t, has_column, in_range, layout: cutlass.Constexpr):
    """This thread's elements of a row, in fp32; zero outside the matrix."""
    fragment = cute.make_rmem_tensor((layout.vec, layout.chunks), Float32)
    for i in cutlass.range_constexpr(len(layout.pieces)):
        piece = layout.pieces[i]
        value = load_piece(source, t, piece, both(in_range, has_column[i]), layout)
        piece_of(fragment, piece, layout).store(value)
    return fragment


@cute.jit
def load_piece(source: cute.Tensor, t, piece: cutlass.Constexpr, inside, layout: cutlass.Constexpr):
    """A piece of a row, in fp32; zero if it lies outside the matrix."""
    loaded = cute.make_rmem_tensor((piece[1] * layout.vec,), source.element_type)
    if inside:
        cute.autovec_copy(piece_of_row(source, t, piece, layout), as_chunks(loaded, layout))
    else:
        loaded.fill(0)
    return to_fp32(loaded.load()) if const_expr(layout.vec > 1) else loaded.load().to(Float32)


@cute.jit
def store_piece(
    value, matrix: cute.Tensor, row, column, t, piece: cutlass.Constexpr, inside, layout: cutlass.Constexpr
):
    """Write a piece of a row if it lies inside the matrix."""
    if inside:
        pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
        pointer = pointer.align(layout.vec * matrix.element_type.width // 8)
        fragment = cute.make_rmem_tensor((piece[1] * layout.vec,), matrix.element_type)
        fragment.store(value)
        target = piece_of_row(cute.make_tensor(pointer, thread_chunks(layout)), t, piece, layout)
        cute.autovec_copy(as_chunks(fragment, layout), target)


@cute.jit
def store_row_values(values, target: cute.Tensor, first_row, rows, layout: cutlass.Constexpr):
    """Write one value, of fp32, a row of a team's tile; ``values[j]``: of the j-th row that this thread holds.

    Lane i writes row i (of 32 rows at a time), so that the values of a tile fill sectors; written two rows an
    instruction by the threads that have them, mean and rstd cost 2 us more of 144 (H200, layer_norm 1000000x128).
    """
    in_team = cute.arch.thread_idx()[0] % layout.team_threads
    passes = const_expr(min(layout.rows_per_thread, layout.threads_per_row))  # whose rows fill a warp
    for first in cutlass.range_constexpr(0, layout.rows_per_thread, passes):
        value = values[first]
        if const_expr(layout.rows_per_pass > 1):
            value = cute.arch.shuffle_sync(value, in_team % layout.rows_per_pass * layout.threads_per_row)
        for j in cutlass.range_constexpr(1, passes):
            source = in_team % layout.rows_per_pass * layout.threads_per_row
            other = cute.arch.shuffle_sync(values[first + j], source)
            if in_team // layout.rows_per_pass == j:
                value = other
        row = first_row + first * layout.rows_per_pass + in_team
        if in_team < passes * layout.rows_per_pass and row < rows:
            target[row] = value.to(target.element_type)


@cute.jit
def sum_elements(fragment, layout: cutlass.Constexpr):
    """Sum of a thread's elements."""
    return sum_pieces([piece_of(fragment, piece, layout).load() for piece in layout.pieces])


@cute.jit
def dot_elements(a, b, layout: cutlass.Constexpr):
    """Sum of products of a thread's elements."""
    return sum_dots([(piece_of(a, piece, layout).load(), piece_of(b, piece, layout).load()) for piece in layout.pieces])


def sum_dots(pairs: list):
    """``sum_pieces`` of the products of pairs of vectors."""
    shape = pairs[0][0].shape
    lanes = sum_of_products([pair for pair in pairs if pair[0].shape == shape])
    return sum_pieces([lanes, *(a * b for a, b in pairs if a.shape != shape)])


def sum_pieces(pieces: list):
    """Sum over vectors: lane by lane over those of the first one's size, then the lanes, then the others."""
    lanes = pieces[0]
    others = []
    for piece in pieces[1:]:
        if piece.shape == lanes.shape:
            lanes = lanes + piece
        else:
            others.append(piece)
    total = lanes.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    for piece in others:
        total = total + piece.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    return total


def symbolic_rows(dtype: Optional[Dtype], rows, layout: RowLayout, streamed: bool = True):
    """A (rows, n) matrix of any row stride, as the compiler sees it.

    ``streamed``: where the layout is aligned, its rows start on 16 bytes, which bulk copies want; else, and of what is
    written, by threads, on a vector.
    """
    if dtype is None:
        return None
    itemsize = dtype.width // 8
    if layout.packed:
        return cute.runtime.make_fake_tensor(dtype, (rows, layout.n), (layout.n, 1), assumed_align=16)
    multiple = max(layout.vec, 16 // itemsize) if layout.aligned and streamed else layout.vec
    stride = (cute.sym_int64(divisibility=multiple), 1)
    return cute.runtime.make_fake_tensor(dtype, (rows, layout.n), stride, assumed_align=min(multiple * itemsize, 16))


def symbolic_vector(dtype: Optional[Dtype], size, alignment: int = 0):
    """A contiguous vector, aligned to its elements unless told more."""
    if dtype is None:
        return None
    return cute.runtime.make_fake_compact_tensor(dtype, (size,), assumed_align=alignment or dtype.width // 8)
