"""Matrix product for operands of any stride and alignment: d = act(a b^T + bias), by warp-level MMA.

For what TMA cannot address: rows that do not start on 16 bytes, matrices without neighbouring elements. Every element
is loaded by itself, so it is several times slower than the kernels for aligned operands; the contract is the same.

    gmem a, b --> registers --> sA, sB --> mma.sync m16n8k16 --> registers --> gmem d
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cute_kernels.common.gemm_epilogue import (
    add_bias,
    batch_last,
    entry_and_tile,
    entry_of,
    load_sums,
    num_tiles,
    store_sums,
    tile_divisors,
    tile_of,
)

TILE = (64, 64, 32)
GROUP = 8
THREADS = 256
PADDING = 8  # elements a row of shared memory is longer, so that a fragment's rows lie in different banks


class GemmAny:
    """See the module; arguments as in the builder ``gemm``. ``num_ctas`` walk over the tiles."""

    def __init__(self, activation: Optional[str], accumulate: bool):
        self.activation = activation
        self.accumulate = accumulate

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        z: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        valid_k: Optional[cute.Tensor],
        num_ctas: Int32,
        stream,
    ):
        op = warp.MmaF16BF16Op(a.element_type, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, cute.make_layout((4, 2, 1)))
        a, b, d = batch_last(a), batch_last(b), batch_last(d)
        divisors = tile_divisors(*(cute.ceil_div(d.shape[i], TILE[i]) for i in range(2)), GROUP, cute.rank(d) == 3)
        self.kernel(tiled_mma, a, b, d, z, bias, valid_k, divisors).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        z: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        valid_k: Optional[cute.Tensor],
        divisors: tuple,
    ):
        tile_m, tile_n, tile_k = TILE
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        pitch = tile_k + PADDING
        sA = smem.allocate_tensor(a.element_type, cute.make_layout((tile_m, tile_k), stride=(pitch, 1)), 16)
        sB = smem.allocate_tensor(b.element_type, cute.make_layout((tile_n, tile_k), stride=(pitch, 1)), 16)
        thr_mma = tiled_mma.get_slice(tidx)
        tCsA, tCsB = thr_mma.partition_A(sA), thr_mma.partition_B(sB)
        tCrA, tCrB = tiled_mma.make_fragment_A(tCsA), tiled_mma.make_fragment_B(tCsB)
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        sums = cute.make_rmem_tensor(tCcD.shape[:3], Float32)

        cute.arch.griddepcontrol_wait()
        num_k = a.shape[1]
        if const_expr(valid_k is not None):
            num_k = cutlass.max(cutlass.min(num_k, valid_k[0]), 0)
        tiles_m, tiles_n = cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n)
        for index in cutlass.range(bidx, num_tiles(tiles_m, tiles_n, d), grid):
            entry, tile = entry_and_tile(index, divisors)
            m, n = tile_of(tile, tiles_m, divisors, GROUP)
            gA, gB, gD = entry_of(a, entry, divisors), entry_of(b, entry, divisors), entry_of(d, entry, divisors)
            if const_expr(self.accumulate):
                load_sums(sums, tCcD, gD, m * tile_m, n * tile_n)
            else:
                sums.fill(0.0)
            for k in cutlass.range(cute.ceil_div(num_k, tile_k)):
                cute.arch.barrier()
                self.load(sA, gA, m * tile_m, k * tile_k, num_k, tidx)
                self.load(sB, gB, n * tile_n, k * tile_k, num_k, tidx)
                cute.arch.barrier()
                cute.autovec_copy(tCsA, tCrA)
                cute.autovec_copy(tCsB, tCrB)
                for k16 in cutlass.range_constexpr(tile_k // 16):
                    cute.gemm(tiled_mma, sums, tCrA[None, None, k16], tCrB[None, None, k16], sums)
            if const_expr(bias is not None):
                add_bias(sums, tCcD, bias, n * tile_n, 1)
            store_sums(sums, tCcD, gD, z, m * tile_m, n * tile_n, self.activation)

    @cute.jit
    def load(self, target: cute.Tensor, source: cute.Tensor, first: Int32, first_k: Int32, num_k: Int32, tidx: Int32):
        """A tile of an operand to shared memory; zeros beyond its last row and beyond ``num_k``."""
        rows, tile_k = const_expr(target.shape[0]), const_expr(target.shape[1])
        fragment = cute.make_rmem_tensor((rows * tile_k // THREADS,), source.element_type)
        for i in cutlass.range_constexpr(rows * tile_k // THREADS):
            row, k = (i * THREADS + tidx) // tile_k, (i * THREADS + tidx) % tile_k
            fragment[i] = source.element_type(0.0)
            if first + row < source.shape[0] and first_k + k < num_k:
                fragment[i] = source[first + row, first_k + k]
        for i in cutlass.range_constexpr(rows * tile_k // THREADS):
            target[(i * THREADS + tidx) // tile_k, (i * THREADS + tidx) % tile_k] = fragment[i]
