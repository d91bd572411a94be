"""Grouped matrix products for operands of any stride and alignment, by warp-level MMA; see kernel_any.py.

The walk is that of the kernels for SM90, in tiles of 64 rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cute_kernels.common.gemm_epilogue import batch_last, load_sums, store_sums
from cute_kernels.gemm.kernel_any import GROUP, PADDING, THREADS, TILE, GemmAny
from cute_kernels.gemm.kernel_grouped_walk import (
    WARP,
    allocate_tables,
    before,
    corner_of,
    group_of,
    part_of,
    scan,
    tile_in_group,
)


class GroupedAny(GemmAny):
    """See the module; arguments as in the builder ``grouped``. ``num_ctas`` walk over the tiles."""

    def __init__(self, ragged: str, accumulate: bool):
        super().__init__(None, accumulate)
        self.is_rows = ragged == "rows"

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, offs: cute.Tensor, num_ctas: Int32, stream):
        op = warp.MmaF16BF16Op(a.element_type, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, cute.make_layout((4, 2, 1)))
        self.kernel(tiled_mma, batch_last(a), batch_last(b), batch_last(d), offs).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tiled_mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, offs: cute.Tensor):
        tile_m, tile_n, tile_k = TILE
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        pitch = tile_k + PADDING
        sA = smem.allocate_tensor(a.element_type, cute.make_layout((tile_m, tile_k), stride=(pitch, 1)), 16)
        sB = smem.allocate_tensor(b.element_type, cute.make_layout((tile_n, tile_k), stride=(pitch, 1)), 16)
        ends, tiles = allocate_tables(smem)
        thr_mma = tiled_mma.get_slice(tidx)
        tCsA, tCsB = thr_mma.partition_A(sA), thr_mma.partition_B(sB)
        tCrA, tCrB = tiled_mma.make_fragment_A(tCsA), tiled_mma.make_fragment_B(tCsB)
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        sums = cute.make_rmem_tensor(tCcD.shape[:3], Float32)

        cute.arch.griddepcontrol_wait()
        groups = offs.shape[0]
        if tidx < WARP:
            scan(offs, a.shape[0 if self.is_rows else 1], tile_m, (ends, tiles), tidx)
        cute.arch.barrier()
        tiles_m, tiles_n = cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n)
        total = (tiles[groups - 1] if self.is_rows else groups * tiles_m) * tiles_n
        group = Int32(0)
        for index in cutlass.range(bidx, total, grid):
            first_k, end_k, row = Int32(0), a.shape[1], Int32(0)
            end_m = d.shape[0]
            if const_expr(self.is_rows):
                group = group_of(tiles, groups, tiles_n, index, group, tidx % WARP)
                tiles_before = before(tiles, group)
                tiles_m = tiles[group] - tiles_before
                tile = index - tiles_before * tiles_n
                row, end_m = before(ends, group), ends[group]
            else:
                group = Int32(Uint32(index) // Uint32(tiles_m * tiles_n))
                tile = index - group * tiles_m * tiles_n
                first_k, end_k = before(ends, group), ends[group]
            m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP)
            first_m, first_n = row + m * tile_m, n * tile_n
            gA, gB = part_of(a, group), part_of(b, group)
            left = corner_of(part_of(d, group), first_m, first_n, end_m, d.shape[1], d.element_type.width // 8)
            if const_expr(self.accumulate):
                load_sums(sums, tCcD, left, Int32(0), Int32(0))
            else:
                sums.fill(0.0)
            for k in cutlass.range(cute.ceil_div(end_k - first_k, tile_k)):
                cute.arch.barrier()
                self.load(sA, gA, first_m, first_k + k * tile_k, end_k, tidx)
                self.load(sB, gB, first_n, first_k + k * tile_k, end_k, tidx)
                cute.arch.barrier()
                cute.autovec_copy(tCsA, tCrA)
                cute.autovec_copy(tCsB, tCrB)
                for k16 in cutlass.range_constexpr(tile_k // 16):
                    cute.gemm(tiled_mma, sums, tCrA[None, None, k16], tCrB[None, None, k16], sums)
            if end_k > first_k or not self.accumulate:
                store_sums(sums, tCcD, left, None, Int32(0), Int32(0), None)
        if const_expr(self.is_rows):
            for row in cutlass.range(ends[groups - 1] + bidx, d.shape[0], grid):
                for column in cutlass.range(tidx, d.shape[1], THREADS):
                    d[row, column] = d.element_type(0.0)
