"""A thread's part of a row: where it lies, and how it gets in and out of registers."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

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
    """All threads that may touch each other's barriers see them initialised."""
    if const_expr(layout.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier()


@cute.jit
def leave_cluster(layout: cutlass.Constexpr):
    """A CTA stays while its neighbours may still write to its shared memory."""
    if const_expr(layout.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def valid_columns(column, t, layout: RowLayout) -> list:
    """Whether each of this thread's chunks lies inside the matrix; Python's True where that is always so."""
    if layout.full:
        return [True] * layout.chunks
    local = [(k * layout.threads_per_row + t) * layout.vec for k in range(layout.chunks)]
    return [(c < layout.columns_per_cta) & (column + c < layout.n) for c in local]


def both(a, b):
    """``a and b`` for conditions that are Python's True or run-time values."""
    if a is True or b is True:
        return b if a is True else a
    return a & b


@cute.jit
def load_columns(vector: cute.Tensor, column, t, has_column, layout: cutlass.Constexpr):
    """This thread's elements of a per-column vector, in the vector's dtype; zero beyond the last column."""
    source = cute.make_tensor(vector.iterator + column, thread_chunks(layout))
    fragment = cute.make_rmem_tensor((layout.vec, layout.chunks), vector.element_type)
    fragment.fill(0)
    for k in cutlass.range_constexpr(layout.chunks):
        if has_column[k]:
            cute.autovec_copy(source[None, t, k], fragment[None, k])
    return fragment


@cute.jit
def load_row(source: cute.Tensor, t, has_column, in_range, layout: cutlass.Constexpr):
    """This thread's elements of a row in shared memory, in fp32; zero outside the matrix."""
    fragment = cute.make_rmem_tensor((layout.vec, layout.chunks), Float32)
    for k in cutlass.range_constexpr(layout.chunks):
        fragment[None, k].store(load_chunk(source, t, k, both(in_range, has_column[k]), layout))
    return fragment


@cute.jit
def load_chunk(source: cute.Tensor, t, k: cutlass.Constexpr[int], inside, layout: cutlass.Constexpr):
    """One chunk of a row in shared memory, in fp32; zero if it lies outside the matrix."""
    chunk = cute.make_rmem_tensor((layout.vec,), source.element_type)
    if inside:
        cute.autovec_copy(source[None, t, k], chunk)
    else:
        chunk.fill(0)
    return chunk.load().to(Float32)


@cute.jit
def store_chunk(
    value, matrix: cute.Tensor, row, column, t, k: cutlass.Constexpr[int], inside, layout: cutlass.Constexpr
):
    """Write one chunk of a row if it lies inside the matrix."""
    if inside:
        pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
        pointer = pointer.align(layout.vec * matrix.element_type.width // 8)
        fragment = cute.make_rmem_tensor((layout.vec,), matrix.element_type)
        fragment.store(value)
        cute.autovec_copy(fragment, cute.make_tensor(pointer, thread_chunks(layout))[None, t, k])


@cute.jit
def store_row_values(values, target: cute.Tensor, first_row, rows, layout: cutlass.Constexpr):
    """Write one fp32 value a row of a team's tile; ``values[j]``: of the j-th row that this thread holds.

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
            target[row] = value


@cute.jit
def sum_elements(fragment):
    """Sum of a thread's elements: one accumulator a vector lane over the chunks, then the lanes."""
    lanes = fragment[None, 0].load()
    for k in cutlass.range_constexpr(1, cute.size(fragment, mode=[1])):
        lanes = lanes + fragment[None, k].load()
    return lanes.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@cute.jit
def dot_elements(a, b):
    """Sum of products of a thread's elements, in the order of ``sum_elements``."""
    lanes = a[None, 0].load() * b[None, 0].load()
    for k in cutlass.range_constexpr(1, cute.size(a, mode=[1])):
        lanes = lanes + a[None, k].load() * b[None, k].load()
    return lanes.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


def symbolic_rows(dtype: Optional[Dtype], rows, layout: RowLayout):
    """A (rows, n) matrix of any row stride, as the compiler sees it."""
    if dtype is None:
        return None
    itemsize = dtype.width // 8
    if layout.packed:
        return cute.runtime.make_fake_tensor(dtype, (rows, layout.n), (layout.n, 1), assumed_align=16)
    multiple = max(layout.vec, 16 // itemsize) if layout.aligned else layout.vec
    alignment = 16 if layout.aligned else layout.vec * itemsize
    stride = (cute.sym_int64(divisibility=multiple), 1)
    return cute.runtime.make_fake_tensor(dtype, (rows, layout.n), stride, assumed_align=min(alignment, 16))


def symbolic_vector(dtype: Optional[Dtype], size, alignment: int = 0):
    """A contiguous vector, aligned to its elements unless told more."""
    if dtype is None:
        return None
    return cute.runtime.make_fake_compact_tensor(dtype, (size,), assumed_align=alignment or dtype.width // 8)
