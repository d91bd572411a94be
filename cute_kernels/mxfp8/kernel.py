"""Block-scaled quantization for SM90 and SM100: one read of the input, one or both orientations written.

A matrix (A, B), B contiguous, of each of E experts is cut into tiles of 128 x 128, or 128 x 64. Blocks of 32 lie along
B ("row": the output has the input's layout), along A ("col": the output is the transpose), or are squares of 32 x 32.

    gmem x --TMA--> sX --> registers: magnitudes, scale, product, fp8 --> sRow, sCol --TMA--> gmem q
                                                                      --> scales in smem --> gmem s

The passes are in kernel_passes.py. With both outputs, the col pass's leaves while the row pass is at work. Elements
beyond the matrix arrive as zeros, whose scale is 0: the padding of blocked scales comes for nothing.
Of scales of which a tile has 4 bytes a row, the CTAs of a cluster, neighbours, make larger parts of a sector or all of
it; L2 keeps what is not whole.
Two outputs of many tiles have a kernel of their own on SM90 (kernel_dual.py).

Profile: ncu --clock-control none -k regex:Quantize python -m bench.bench_mxfp8 --filter 1x8192x5120
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import LAST_BYTES, evict_first_if
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.mxfp8.config import ATOM, BLOCK, TILE, DualConfig, QuantizeConfig, QuantizeSpec, ScaleRule, scale_rule
from cute_kernels.mxfp8.kernel_dual import QuantizeDual
from cute_kernels.mxfp8.kernel_passes import BLOCKS, ROWS_AT_ONCE, UNIT, WARP, Passes, as_memory, of_passes
from cute_kernels.mxfp8.kernel_scales import store_scales, store_squares, store_together
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]


class Quantize:
    """See the module; arguments as in ``QuantizeSpec``."""

    def __init__(self, transposed: bool, square: bool, rule: ScaleRule, kinds: tuple, config: QuantizeConfig):
        self.transposed = transposed
        self.square = square
        self.rule = rule
        self.kinds = kinds  # how scales of blocks along k and along n are laid out
        self.stages = config.stages
        self.ctas_per_sm = config.ctas_per_sm
        self.warps = config.warps
        self.persistent = config.persistent
        self.down = config.down
        self.cluster = config.cluster
        self.ctas = config.cluster[0] * config.cluster[1]  # of a cluster
        self.in_place = config.in_place
        self.width = config.width
        if config.in_place and (config.stages > 1 or config.persistent):
            raise ValueError("config.in_place wants one stage and a CTA a tile: the next x would come over an output")

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        q_k: Optional[cute.Tensor],
        s_k: Optional[cute.Tensor],
        q_n: Optional[cute.Tensor],
        s_n: Optional[cute.Tensor],
        num_ctas: Int32,
        stream,
    ):
        of_k, of_n = (q_k, s_k, self.kinds[0]), (q_n, s_n, self.kinds[1])
        (q_row, s_row, self.row_kind), (q_col, s_col, self.col_kind) = of_passes(self.transposed, of_k, of_n)
        self.dtype = x.element_type
        tile, tile_of_col = (TILE, self.width), (self.width, TILE)
        x = as_memory(x, self.transposed)
        sX_layout = cute.make_layout((*tile, self.stages), stride=(self.width, 1, TILE * self.width))
        one = cute.make_layout(tile, stride=(self.width, 1))
        swizzled = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Uint8), tile_of_col, order=(0, 1)
        )
        tma_x, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, one, tile)
        tma_row, mRow, tma_col, mCol = None, None, None, None
        store = cpasync.CopyBulkTensorTileS2GOp()
        if const_expr(q_row is not None):
            self.out = q_row.element_type
            row = as_memory(cute.recast_tensor(q_row, Uint8), self.transposed)
            tma_row, mRow = cpasync.make_tiled_tma_atom(store, row, one, tile)
        if const_expr(q_col is not None):
            self.out = q_col.element_type
            col = as_memory(cute.recast_tensor(q_col, Uint8), not self.transposed)
            tma_col, mCol = cpasync.make_tiled_tma_atom(store, col, swizzled, tile_of_col)
        s_row = None if const_expr(s_row is None) else cute.recast_ptr(s_row.iterator, dtype=Uint8)
        s_col = None if const_expr(s_col is None) else cute.recast_ptr(s_col.iterator, dtype=Uint8)
        # Narrow tiles: as many as whole ones have, so that whole atoms of blocked scales are written
        counts = [cute.ceil_div(mX.shape[i], TILE * self.cluster[i]) * (TILE // tile[i]) for i in range(2)]
        clusters = [cute.fast_divmod_create_divisor_v2(count) for count in counts]
        self.kernel(tma_x, mX, *clusters, sX_layout, tma_row, mRow, s_row, tma_col, mCol, s_col, swizzled).launch(
            grid=[num_ctas, 1, 1],
            block=[self.warps * WARP, 1, 1],
            cluster=[self.ctas, 1, 1] if const_expr(self.ctas > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        along_a: cute.FastDivmodDivisorV2,
        along_b: cute.FastDivmodDivisorV2,
        sX_layout: cute.Layout,
        tma_row: Optional[cute.CopyAtom],
        mRow: Optional[cute.Tensor],
        s_row: Optional[cute.Pointer],
        tma_col: Optional[cute.CopyAtom],
        mCol: Optional[cute.Tensor],
        s_col: Optional[cute.Pointer],
        swizzled: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        has_row, has_col = const_expr(mRow is not None), const_expr(mCol is not None)
        self.last_tiles = LAST_BYTES // (TILE * self.width * (has_row + has_col))

        smem = SmemAllocator()
        sCol = sRow = staged_row = staged_col = squares = None
        if const_expr(has_col):
            sCol = smem.allocate_tensor(Uint8, swizzled.outer, byte_alignment=1024, swizzle=swizzled.inner)
            staged_col = smem.allocate_tensor(Uint8, cute.make_layout(ATOM), byte_alignment=16).iterator
        if const_expr(has_row):
            if const_expr(not self.in_place):
                sRow = smem.allocate_tensor(Uint8, cute.make_layout((TILE, TILE), stride=(TILE, 1)), byte_alignment=128)
            staged_row = smem.allocate_tensor(Uint8, cute.make_layout(ATOM), byte_alignment=16).iterator
        if const_expr(self.square):
            squares = smem.allocate_tensor(Int32, cute.make_layout(16), byte_alignment=16)
        sX = smem.allocate_tensor(self.dtype, sX_layout, byte_alignment=128)
        if const_expr(self.in_place):
            bytes_of_x = cute.recast_ptr(sX.iterator, dtype=Uint8)
            sRow = cute.make_tensor(bytes_of_x, cute.make_layout((TILE, TILE), stride=(TILE, 1)))
        x_full = smem.allocate_array(Int64, self.stages)
        # The scales that a cluster puts together, of the col pass and of the row pass: words, and a barrier
        exchanges_col = const_expr(has_col and self.cluster[0] > 1 and self.col_kind == "columns")
        exchanges_row = const_expr(has_row and self.cluster[1] > 1 and self.row_kind == "columns")
        exchanges = const_expr(exchanges_col + exchanges_row)
        together = together_full = None
        if const_expr(exchanges > 0):
            together = smem.allocate_tensor(Int32, cute.make_layout((TILE, exchanges)))
            together_full = smem.allocate_array(Int64, exchanges)

        self.passes = Passes(self.dtype, self.out, self.rule, self.width)
        num_tiles = along_a.divisor * along_b.divisor * mX.shape[2] * self.ctas
        gX = cute.local_tile(mX, (TILE, self.width), (None, None, None))
        tXsX, tXgX = cpasync.tma_partition(
            tma_x, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        if warp == 1:
            if const_expr(has_col):
                cpasync.prefetch_descriptor(tma_col)
            if const_expr(has_row):
                cpasync.prefetch_descriptor(tma_row)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_x)
            if lane == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(x_full + stage, 1)
                for i in cutlass.range_constexpr(exchanges):
                    cute.arch.mbarrier_init(together_full + i, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            if const_expr(exchanges > 0):
                if lane < exchanges:
                    cute.arch.mbarrier_arrive_and_expect_tx(together_full + lane, 4 * TILE)
            for stage in cutlass.range_constexpr(self.stages):
                self.fetch(tma_x, tXgX, tXsX, x_full, Int32(stage), bidx + stage * grid, num_tiles, along_a, along_b)
        cute.arch.barrier()
        if const_expr(exchanges > 0):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

        slot, phase, rank = Int32(0), Int32(0), bidx % self.ctas
        end, step = (num_tiles, grid) if const_expr(self.persistent) else (bidx + 1, 1)
        for tile in cutlass.range(bidx, end, step):
            a, b, e = self.place(tile, along_a, along_b)
            cute.arch.mbarrier_wait(x_full + slot, phase)
            sT = sX[None, None, slot].iterator
            if tile > bidx:
                # The tile before is still on its way out of sRow and sCol: the warp that sent it says when it has left
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier()
            if const_expr(has_col or self.square):
                for unit in cutlass.range(warp, BLOCKS * (self.width // UNIT), self.warps, unroll=1):
                    self.col_unit(sT, unit, lane, sCol, staged_col, squares)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier()
            if const_expr(has_col):
                # Before the row pass, else so much later (H200, 3-D 1x7168x2048 20.5 -> 20.1 us)
                if warp == 0:
                    self.send(tma_col, sCol, mCol, (self.width, TILE), b, a, e)
            if const_expr(has_row):
                self.row_pass(sT, warp, lane, sRow, staged_row, squares)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier()
                if warp == 0:
                    self.send(tma_row, sRow, mRow, (TILE, TILE), a, b, e)
            if const_expr(self.persistent):  # all threads have read the slot
                if warp == 0:
                    next_tile = tile + self.stages * grid
                    self.fetch(tma_x, tXgX, tXsX, x_full, slot, next_tile, num_tiles, along_a, along_b)
            if const_expr(self.kind_is_square()):
                if tidx < 16:
                    s = s_row if const_expr(has_row) else s_col
                    store_squares(
                        self.transposed, squares, s, tidx, a, b, e, mX.shape[0] // BLOCK, mX.shape[1] // BLOCK
                    )
            else:
                if const_expr(has_col):
                    mine = (staged_col, s_col, tidx, b, a, e, mX.shape[1], mX.shape[0] // BLOCK)
                    if tidx < self.width:
                        if const_expr(exchanges_col):
                            store_together(*self.cluster, rank, together[None, 0].iterator, together_full, *mine)
                        else:
                            store_scales(self.width, self.col_kind, *mine)
                if const_expr(has_row):
                    mine = (staged_row, s_row, tidx, a, b, e, mX.shape[0], mX.shape[1] // BLOCK)
                    if tidx < TILE:
                        if const_expr(exchanges_row):
                            i = const_expr(exchanges - 1)
                            store_together(
                                self.cluster[1], 1, rank, together[None, i].iterator, together_full + i, *mine
                            )
                        else:
                            store_scales(TILE, self.row_kind, *mine)
            slot += 1
            if slot == self.stages:
                slot = Int32(0)
                phase ^= 1
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def kind_is_square(self) -> bool:
        """Whether one scale a square is written."""
        return "square" in (self.row_kind, self.col_kind)

    @cute.jit
    def place(self, tile: Int32, along_a: cute.FastDivmodDivisorV2, along_b: cute.FastDivmodDivisorV2):
        """(tile along A, tile along B, expert), of so many clusters along both; their last may lie beyond the end."""
        cluster, rank = tile // self.ctas, tile % self.ctas
        if const_expr(self.down):
            rest, a = divmod(cluster, along_a)
            e, b = divmod(rest, along_b)
        else:
            rest, b = divmod(cluster, along_b)
            e, a = divmod(rest, along_a)
        return a * self.cluster[0] + rank // self.cluster[1], b * self.cluster[1] + rank % self.cluster[1], e

    @cute.jit
    def fetch(self, tma_x, tXgX, tXsX, x_full, slot: Int32, tile: Int32, num_tiles: Int32, along_a, along_b):
        """Issue the load of a tile, if there is one; called by the first warp."""
        if tile < num_tiles:
            a, b, e = self.place(tile, along_a, along_b)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(x_full + slot, TILE * self.width * self.dtype.width // 8)
            cute.arch.sync_warp()
            policy = evict_first_if(num_tiles - tile <= self.last_tiles)
            cute.copy(tma_x, tXgX[None, a, b, e], tXsX[None, slot], tma_bar_ptr=x_full + slot, cache_policy=policy)

    @cute.jit
    def send(self, tma_out, source, matrix, shape: cutlass.Constexpr[tuple], row: Int32, column: Int32, e: Int32):
        """Store a tile of bytes; called by the first warp."""
        gQ = cute.local_tile(matrix, shape, (row, column, e))
        tSsQ, tSgQ = cpasync.tma_partition(
            tma_out, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(gQ, 0, 2)
        )
        cute.copy(tma_out, tSsQ, tSgQ)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def col_unit(self, sT: cute.Pointer, unit: Int32, lane: Int32, sCol, staged, squares):
        """32 rows of 64 columns: a lane has columns 2 lane and 2 lane + 1."""
        block, column = unit % BLOCKS, unit // BLOCKS * UNIT + 2 * lane
        rX = self.passes.read_columns(sT, block, column)
        scales = self.passes.scales_of_columns(rX, block, column, squares)
        if const_expr(sCol is not None):
            staged = None if const_expr(self.col_kind == "square") else staged
            self.passes.write_columns(rX, scales, block, column, sCol.iterator, staged, self.col_kind)

    @cute.jit
    def row_pass(self, sT: cute.Pointer, warp: Int32, lane: Int32, sRow, staged, squares):
        """A warp's rows, eight at once: a lane has a block."""
        rows = const_expr(TILE // self.warps)
        batch = const_expr(rows // ROWS_AT_ONCE if self.in_place else 1)
        staged = None if const_expr(self.row_kind == "square") else staged
        for step in cutlass.range(rows // ROWS_AT_ONCE // batch, unroll=1):
            first = warp * rows + step * batch * ROWS_AT_ONCE + lane // BLOCKS
            rX = [self.passes.read_rows(sT, first + i * ROWS_AT_ONCE) for i in range(batch)]
            if const_expr(self.in_place):
                cute.arch.barrier()  # all have read what is written over
            for i in cutlass.range_constexpr(batch):
                row = first + i * ROWS_AT_ONCE
                self.passes.write_rows(rX[i], row, sRow.iterator, squares, staged, self.row_kind)


@compiled
def mxfp8_quantize(arch: str, spec: QuantizeSpec, config: QuantizeConfig | DualConfig) -> Program:
    """fp8 elements and scales of a matrix, or of experts."""
    x, q, kinds, rank = cutlass_dtype(spec.x), cutlass_dtype(spec.q), spec.kinds, spec.rank
    n, k = cute.sym_int(divisibility=BLOCK), cute.sym_int(divisibility=BLOCK)
    experts = () if rank == 2 else (cute.sym_int(),)

    def matrix(element: Dtype, swapped: bool, divisibility: int):
        strides = [cute.sym_int64(divisibility=divisibility) for _ in range(rank)]
        strides[-2 if swapped else -1] = 1
        return cute.runtime.make_fake_tensor(element, (*experts, n, k), tuple(strides), assumed_align=16)

    def scales(kind: str):
        shape = (cute.sym_int(),) if kind == "blocked" else (cute.sym_int(), cute.sym_int())
        shape = (*experts, *shape)
        order = tuple(range(len(shape)))[::-1]
        return cute.runtime.make_fake_compact_tensor(cutlass.Float8E8M0FNU, shape, stride_order=order, assumed_align=16)

    rule = scale_rule(spec.mode, "e5m2" if q is cutlass.Float8E5M2 else "e4m3")
    if isinstance(config, DualConfig):
        kernel = QuantizeDual(spec.transposed, spec.square, rule, kinds, config)
        counter = (cute.runtime.make_fake_compact_tensor(Int32, (1,), stride_order=(0,), assumed_align=16),)
    else:
        kernel, counter = Quantize(spec.transposed, spec.square, rule, kinds, config), ()
    return Program(
        kernel,
        matrix(x, spec.transposed, 128 // x.width),
        matrix(q, False, BLOCK) if spec.along_k else None,
        scales(kinds[0]) if spec.along_k else None,
        matrix(q, True, BLOCK) if spec.along_n else None,
        scales(kinds[1]) if spec.along_n else None,
        *counter,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
