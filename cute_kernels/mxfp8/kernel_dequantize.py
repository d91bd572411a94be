"""fp8 elements and their scales back to bf16, fp16 or fp32, in the layout in which the elements lie.

A CTA has a tile of 16 x 256: all its loads are issued first (16 bytes a thread in flight), 16 bytes a thread are
written at once. In every layout the blocks lie along the contiguous dimension; a scale is read by the 4 threads (8 of
fp32) of its block, from the cache lines that the tile's other threads use.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.mxfp8.config import ATOM, BLOCK, DEQUANTIZE_TILE, TILE, DequantizeSpec
from cute_kernels.mxfp8.kernel_scales import as_float
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
THREADS = 256
ROWS, COLUMNS = DEQUANTIZE_TILE


class Dequantize:
    """See the module; arguments as in ``DequantizeSpec``."""

    def __init__(self, transposed: bool, kind: str):
        self.transposed = transposed
        self.kind = kind

    @cute.jit
    def __call__(self, q: cute.Tensor, scale: cute.Tensor, y: cute.Tensor, num_ctas: Int32, stream):
        first = const_expr(cute.rank(q) - 2)
        rows, columns = q.shape[first], q.shape[first + 1]
        if const_expr(self.transposed):
            rows, columns = columns, rows
        s = cute.recast_ptr(scale.iterator, dtype=Uint8)
        counts = cute.ceil_div(rows, ROWS), cute.ceil_div(columns, COLUMNS)
        tiles = [cute.fast_divmod_create_divisor_v2(count) for count in counts]
        self.kernel(q.iterator, s, y.iterator, rows, columns, *tiles).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        s: cute.Pointer,
        y: cute.Pointer,
        rows: Int32,
        columns: Int32,
        tiles_r: cute.FastDivmodDivisorV2,
        tiles_c: cute.FastDivmodDivisorV2,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        vec = const_expr(128 // y.dtype.width)
        rows_at_once = const_expr(THREADS * vec // COLUMNS)
        count = const_expr(ROWS // rows_at_once)
        rest, tc = divmod(bidx, tiles_c)
        e, tr = divmod(rest, tiles_r)
        first = tr * ROWS + tidx // (COLUMNS // vec)
        column = tc * COLUMNS + tidx % (COLUMNS // vec) * vec
        cute.arch.griddepcontrol_wait()
        if column < columns:
            rQ = cute.make_rmem_tensor((vec, count), q.dtype)
            rS = cute.make_rmem_tensor((count,), Uint8)
            for i in cutlass.range_constexpr(count):
                row = first + i * rows_at_once
                if row < rows:
                    source = q + ((Int64(e) * rows + row) * columns + column)
                    cute.autovec_copy(cute.make_tensor(source.align(vec), cute.make_layout(vec)), rQ[None, i])
                    at = self.scale_at(e, row, column // BLOCK, rows, columns // BLOCK)
                    rS[i] = cute.make_tensor(s + at, cute.make_layout(1))[0]
            for i in cutlass.range_constexpr(count):
                row = first + i * rows_at_once
                if row < rows:
                    rY = cute.make_rmem_tensor((vec,), y.dtype)
                    rY.store((rQ[None, i].load().to(Float32) * scale_value(rS[i].to(Int32))).to(y.dtype))
                    target = y + ((Int64(e) * rows + row) * columns + column)
                    cute.autovec_copy(rY, cute.make_tensor(target.align(16), cute.make_layout(vec)))

    @cute.jit
    def scale_at(self, e: Int32, row: Int32, column: Int32, rows: Int32, columns: Int32):
        """Offset of the scale of block ``column`` of a row; ``columns``: blocks of a row."""
        if const_expr(self.kind == "blocked"):
            tiles_r, tiles_c = cute.ceil_div(rows, TILE), cute.ceil_div(columns, 4)
            atom = (Int64(e) * tiles_r + row // TILE) * tiles_c + column // 4
            return atom * ATOM + (row % 32 * 16 + row % TILE // 32 * 4 + column % 4)
        if const_expr(self.kind == "columns"):
            return (Int64(e) * rows + row) * columns + column
        if const_expr(self.kind == "square"):
            row, rows = row // BLOCK, rows // BLOCK
        if const_expr(self.kind == "square" and not self.transposed):
            return (Int64(e) * rows + row) * columns + column
        return (Int64(e) * columns + column) * rows + row


@cute.jit
def scale_value(s: Int32) -> Float32:
    """2^(s - 127), NaN for 255."""
    bits = Int32(0x00400000) if s == 0 else s << 23
    bits = Int32(0x7FC00000) if s == 255 else bits
    return as_float(bits)


@compiled
def mxfp8_dequantize(arch: str, spec: DequantizeSpec) -> Program:
    """The values of fp8 elements and their scales."""
    rank, kind = spec.rank, spec.kind
    sizes = tuple(cute.sym_int(divisibility=BLOCK if i >= rank - 2 else 1) for i in range(rank))

    def matrix(element: Dtype):
        strides = [cute.sym_int64(divisibility=BLOCK) for _ in range(rank)]
        strides[-2 if spec.transposed else -1] = 1
        return cute.runtime.make_fake_tensor(element, sizes, tuple(strides), assumed_align=16)

    shape = (*sizes[:-2], *(cute.sym_int() for _ in range(1 if kind == "blocked" else 2)))
    return Program(
        Dequantize(spec.transposed, kind),
        matrix(cutlass_dtype(spec.q)),
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float8E8M0FNU, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=1
        ),
        matrix(cutlass_dtype(spec.y)),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
