"""The base of kernels of routing and of rows: which row a warp has, and 16 bytes a lane of a row."""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.moe.config import WARP, WARPS

AHEAD = 4  # vectors that a lane has in flight


@cute.jit
def row_of_warp() -> tuple:
    """(row of this warp, lane), where each warp of ``warp_grid`` has a row."""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    return bidx * WARPS + cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP


def warp_grid(rows: Int32) -> list:
    """A grid with a warp a row. Not all CTAs are resident at once: an SM gets the next one when one ends."""
    return [cute.ceil_div(rows, WARPS), 1, 1]


@cute.jit
def vector_at(matrix: cute.Tensor, row: Int32, vector: Int32) -> cute.Tensor:
    """16 bytes of a row, in gmem."""
    vec = const_expr(128 // matrix.element_type.width)
    pointer = matrix.iterator + cute.crd2idx((row, vector * vec), matrix.layout)
    return cute.make_tensor(pointer.align(16), cute.make_layout(vec))


@cute.jit
def load(matrix: cute.Tensor, row: Int32, vector: Int32, inside) -> cute.Tensor:
    """16 bytes of a row in registers; zeros where they are not ``inside``."""
    fragment = cute.make_rmem_tensor((128 // matrix.element_type.width,), matrix.element_type)
    if inside:
        cute.autovec_copy(vector_at(matrix, row, vector), fragment)
    else:
        fragment.fill(0)
    return fragment


@cute.jit
def wide(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment in fp32."""
    values = cute.make_rmem_tensor(fragment.shape, Float32)
    values.store(fragment.load().to(Float32))
    return values


@cute.jit
def store(values: cute.Tensor, matrix: cute.Tensor, row: Int32, vector: Int32):
    """fp32 values to 16 bytes of a row."""
    fragment = cute.make_rmem_tensor(values.shape, matrix.element_type)
    fragment.store(values.load().to(matrix.element_type))
    cute.autovec_copy(fragment, vector_at(matrix, row, vector))


def symbolic_rows(dtype, rows, columns):
    """A matrix of contiguous rows that start on 16 bytes."""
    vec = 128 // dtype.width
    return cute.runtime.make_fake_tensor(
        dtype, (rows, columns), (cute.sym_int64(divisibility=vec), 1), assumed_align=16
    )


def symbolic_list(dtype, size):
    """A contiguous vector."""
    return cute.runtime.make_fake_compact_tensor(dtype, (size,), assumed_align=dtype.width // 8)


def symbolic_table(dtype, rows, columns):
    """A contiguous matrix of any alignment."""
    return cute.runtime.make_fake_compact_tensor(
        dtype, (rows, columns), stride_order=(1, 0), assumed_align=dtype.width // 8
    )
