"""The two passes over a tile in shared memory: to registers, and from there scaled, rounded to fp8 and back.

The col pass gives a thread two neighbouring columns of 32 rows, so their largest magnitude needs no other thread and
their 32 bytes of output lie together; that output is swizzled as TMA wants it, and half of the threads take their two
halves in the other order, so no bank is met twice. The row pass gives a thread a block, 16 bytes at once, in an order
that differs between threads for the same reason.
The scales of squares go from the col pass to the row pass, as words: a byte read through a pointer counts as signed.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from cute_kernels.mxfp8.config import BLOCK, TILE, ScaleRule
from cute_kernels.mxfp8.kernel_scales import (
    as_float,
    byte_at,
    largest_of_block,
    largest_of_columns,
    put,
    scale_of,
    scaled,
    staged_at,
    words_at,
)

Dtype = type[cutlass.Numeric]
WARP = 32
BLOCKS = TILE // BLOCK  # of a tile's rows and columns
ROWS_AT_ONCE = 8  # of a warp in the row pass
UNIT = 64  # columns that a warp takes at once in the col pass, of 32 rows


def of_passes(transposed: bool, of_k: tuple, of_n: tuple) -> tuple[tuple, tuple]:
    """Order what belongs to blocks along K and along N as (the row pass's, the col pass's); blocks of the row pass are
    along the contiguous dimension.
    """
    return (of_n, of_k) if transposed else (of_k, of_n)


@cute.jit
def as_memory(t: cute.Tensor, swapped: cutlass.Constexpr[bool]):
    """(N, K) or (E, N, K) as (rows, contiguous dimension, E)."""
    n, k = (1, 0) if const_expr(swapped) else (0, 1)
    if const_expr(cute.rank(t) == 2):
        shape, stride = (t.shape[n], t.shape[k], 1), (t.stride[n], t.stride[k], t.stride[n])
    else:
        shape = (t.shape[1 + n], t.shape[1 + k], t.shape[0])
        stride = (t.stride[1 + n], t.stride[1 + k], t.stride[0])
    return cute.make_tensor(t.iterator, cute.make_layout(shape, stride=stride))


class Passes:
    """The passes that quantize tiles of ``dtype``, ``width`` columns wide, to ``out``.

    Below, ``sT`` points to a tile's elements; ``squares`` are the scales of its 16 squares, None if blocks are no
    squares; ``staged`` is where its scales go, None if they go nowhere, in the order of their ``kind``.
    """

    def __init__(self, dtype: Dtype, out: Dtype, rule: ScaleRule, width: int):
        self.dtype = dtype
        self.out = out
        self.rule = rule
        self.width = width
        self.vec = 128 // dtype.width
        self.chunks = BLOCK // self.vec

    @cute.jit
    def read_columns(self, sT: cute.Pointer, block: Int32, column: Int32):
        """Rows of block ``block`` of columns ``column`` and ``column + 1``, what the lane takes first first."""
        rX = cute.make_rmem_tensor((2, BLOCK), self.dtype)
        for half in cutlass.range_constexpr(2):
            first = (block * BLOCK + (half ^ self.swapped()) * (BLOCK // 2)) * self.width + column
            layout = cute.make_layout((2, BLOCK // 2), stride=(1, self.width))
            rows = cute.make_tensor(sT + cute.assume(first, divby=2), layout)
            for i in cutlass.range_constexpr(BLOCK // 2):
                cute.autovec_copy(rows[None, i], rX[None, half * (BLOCK // 2) + i])
        return rX

    @cute.jit
    def scales_of_columns(self, rX: cute.Tensor, block: Int32, column: Int32, squares: Optional[cute.Tensor]):
        """The scales' bytes of both columns, or of their square, which is kept."""
        low, high = largest_of_columns(rX)
        if const_expr(squares is None):
            scales = (scale_of(low, self.rule), scale_of(high, self.rule))
        else:
            both = cutlass.max(low, high)
            for step in cutlass.range_constexpr(4):
                both = cutlass.max(both, cute.arch.shuffle_sync_bfly(both, offset=1 << step))
            s = scale_of(both, self.rule)
            scales = (s, s)
            if cute.arch.lane_idx() % 16 == 0:
                squares[block * BLOCKS + column // BLOCK] = s
        return scales

    @cute.jit
    def write_columns(
        self,
        rX: cute.Tensor,
        scales,
        block: Int32,
        column: Int32,
        sCol: cute.Pointer,
        staged,
        kind: cutlass.Constexpr[str],
    ):
        """Both columns as rows of the output, whose tile begins at ``sCol``."""
        for j in cutlass.range_constexpr(2):
            row = column + j
            rQ = self.quantized(rX[j, None], scales[j])
            for half in cutlass.range_constexpr(2):
                chunk = (2 * block + (half ^ self.swapped())) ^ (row & 7)
                target = words_at(sCol, row * TILE + chunk * 16)
                cute.autovec_copy(cute.local_tile(rQ, (4,), (half,)), target)
            if const_expr(staged is not None):
                put(byte_at(staged + staged_at(kind, row, block, self.width)), scales[j].to(Uint8))

    @cute.jit
    def read_rows(self, sT: cute.Pointer, row: Int32):
        """A lane's block of a warp's eight rows; ``row``: the lane's."""
        rX = cute.make_rmem_tensor((self.vec, self.chunks), self.dtype)
        for c in cutlass.range_constexpr(self.chunks):
            cute.autovec_copy(cute.make_tensor(sT + self.chunk(row, c), cute.make_layout(self.vec)), rX[None, c])
        return rX

    @cute.jit
    def write_rows(
        self,
        rX: cute.Tensor,
        row: Int32,
        sRow: cute.Pointer,
        squares: Optional[cute.Tensor],
        staged,
        kind: cutlass.Constexpr[str],
    ):
        """The block, to the output's tile at ``sRow``."""
        block = cute.arch.lane_idx() % BLOCKS
        if const_expr(squares is None):
            s = scale_of(largest_of_block(rX), self.rule)
        else:
            s = squares[row // BLOCK * BLOCKS + block]
        rQ = self.quantized(rX, s)
        for c in cutlass.range_constexpr(self.chunks):
            target = cute.recast_ptr(sRow + self.chunk(row, c), dtype=Int32)
            words = cute.local_tile(rQ, (self.vec // 4,), (c,))
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(self.vec // 4)))
        if const_expr(staged is not None):
            put(byte_at(staged + staged_at(kind, row, block)), s.to(Uint8))

    @cute.jit
    def chunk(self, row: Int32, c: cutlass.Constexpr[int]):
        """Place in a tile of a lane's ``c``-th 16 bytes of x."""
        lane = cute.arch.lane_idx()
        turn = (lane ^ (lane // BLOCKS)) % self.chunks
        return cute.assume(row * TILE + lane % BLOCKS * BLOCK + (c ^ turn) * self.vec, divby=self.vec)

    @cute.jit
    def swapped(self):
        """1 for lanes that take the second half of a column's rows first."""
        return (cute.arch.lane_idx() >> 2) & 1

    @cute.jit
    def quantized(self, values: cute.Tensor, s: Int32):
        """fp8 of ``values * 2^(127 - s)``, four to an integer; all NaN where s is 255."""
        bits = (254 - s) << 23
        bits = Int32(0x7FC00000) if s == 255 else bits
        count = cute.size(values)
        product = cute.make_rmem_tensor((count,), Float32)
        if const_expr(self.dtype is cutlass.BFloat16):
            for i in cutlass.range_constexpr(count):
                product[i] = scaled(values[i], bits)
        else:
            product.store(values.load().to(Float32) * as_float(bits))
        rQ = cute.make_rmem_tensor((count,), self.out)
        rQ.store(product.load().to(self.out))
        return cute.recast_tensor(rQ, Int32)
