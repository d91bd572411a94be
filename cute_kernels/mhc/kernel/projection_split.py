"""Products of every token with phi, and its sum of squares, from one reading of x: H = x (phi norm_weight)^T.

For what clusters cannot hold (projection_cluster.py): fp32 and fp16, rows off 16 bytes, the widest tokens; of eight
streams what is not for warpgroups (projection_wgmma.py).

x and phi come to shared memory by TMA; each warp multiplies its tokens by all rows of phi with warp-level MMA, and
squares what it has in its registers anyway. Where the registers allow it two warps share 64 tokens, one takes the even
and one the odd 16 columns, so that half as often a number of phi is split into its terms. The tensor cores see bf16: an
fp32 number is the sum of two or three bf16 terms (8 bits each), and the products of terms that matter are added in one
fp32 accumulator, so a bf16 x times an fp32 phi is as exact as in fp32 and costs two or three products.

K is split in S parts (splits_of), part s of tiles s, s + S, ... of K: the CTAs of the same tokens read neighbouring
columns at a time. Each part is added by itself in ascending order; the sums of the parts are added by whoever reads
them. A token's bits do not depend on the other tokens, or on which CTA computes them: as many CTAs as fit walk over all
(128 tokens, part of K).

    gmem x, phi --TMA--> ring in smem (full / empty mbarriers) --ldmatrix--> registers: terms --mma--> partials in gmem

Profile: ncu --clock-control none -k regex:Projection python -m bench.bench_mhc --filter projection.fwd.8192x4x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import PROJECTION_TOKENS as TOKENS
from cute_kernels.mhc.config import ProjectionConfig, ProjectionSpec
from cute_kernels.mhc.kernel.streams import WARP_SIZE, symbolic_streams
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
WARPS = 4  # that multiply; one more feeds the ring


class ProjectionSplitForward:
    """partials[s, j, m] = sum over part s of K of x[m, k] phi'[j, k], and at j = N the sum of x[m, k]^2.

    Token last: the eight tokens of an MMA's lanes then fill a sector.
    """

    def __init__(self, config: ProjectionConfig):
        self.config = config
        self.warps_k = config.warps_k
        self.warps_m = WARPS // config.warps_k
        self.part_columns = -(-config.tiles // config.splits) * config.tile_k  # at most

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        partials: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        config = self.config
        self.x_type, self.phi_type = x.element_type, phi.element_type
        sX_layout = self.tile_layout(x.element_type, TOKENS, config.stages)
        sPhi_layout = self.tile_layout(phi.element_type, config.padded_columns, config.stages)
        tma_x, mX, tma_phi, mPhi = None, x, None, phi
        if const_expr(config.tma):
            load = cpasync.CopyBulkTensorTileG2SOp()
            one = self.tile_layout(x.element_type, TOKENS)
            tma_x, mX = cpasync.make_tiled_tma_atom(load, x, one, (TOKENS, config.tile_k))
            one = self.tile_layout(phi.element_type, config.padded_columns)
            tma_phi, mPhi = cpasync.make_tiled_tma_atom(load, phi, one, (config.padded_columns, config.tile_k))
        op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, cute.make_layout((self.warps_m, 1, self.warps_k)))
        self.kernel(tiled_mma, sX_layout, sPhi_layout, tma_x, mX, tma_phi, mPhi, norm_weight, partials).launch(
            grid=[num_ctas, 1, 1],
            block=[(WARPS + 1) * WARP_SIZE, 1, 1],
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    def tile_layout(self, dtype: Dtype, rows: int, *stages: int):
        """Swizzled shared memory of one operand's tile or tiles: (rows, k, stages)."""
        shape = (rows, self.config.tile_k, *stages)
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, self.config.tile_k)
        atom = warpgroup.make_smem_layout_atom(kind, dtype)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        sX_layout: cute.ComposedLayout,
        sPhi_layout: cute.ComposedLayout,
        tma_x: Optional[cute.CopyAtom],
        mX: cute.Tensor,
        tma_phi: Optional[cute.CopyAtom],
        mPhi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        partials: cute.Tensor,
    ):
        config = self.config
        tile_k, splits = const_expr(config.tile_k), const_expr(config.splits)
        padded = const_expr(config.padded_columns)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        sX = smem.allocate_tensor(self.x_type, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        sPhi = smem.allocate_tensor(self.phi_type, sPhi_layout.outer, byte_alignment=1024, swizzle=sPhi_layout.inner)
        row_bytes = TOKENS * self.x_type.width // 8 + padded * self.phi_type.width // 8
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS),
            tx_count=row_bytes * tile_k,
        )
        sWeight = smem.allocate_tensor(
            Float32, cute.make_layout(self.part_columns if norm_weight is not None else 4), 16
        )
        scratch = None
        if const_expr(self.warps_k == 2):
            scratch = smem.allocate_tensor(Float32, self.scratch_layout(), byte_alignment=16)
        blocks = cute.ceil_div(partials.shape[2], TOKENS)
        cute.arch.griddepcontrol_wait()

        if warp_index == WARPS:
            if const_expr(config.tma):
                gX = cute.local_tile(mX, (TOKENS, tile_k), (None, None))
                gPhi = cute.local_tile(mPhi, (padded, tile_k), (0, None))
                one = cute.make_layout(1)
                tXsX, tXgX = cpasync.tma_partition(
                    tma_x, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
                )
                tPsP, tPgP = cpasync.tma_partition(
                    tma_phi, 0, one, cute.group_modes(sPhi, 0, 2), cute.group_modes(gPhi, 0, 2)
                )
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
                for item in cutlass.range(bidx, blocks * splits, grid):
                    block_m, split = item // splits, item % splits
                    for k in cutlass.range(split, config.tiles, splits):
                        ring.producer_acquire(state)
                        full = ring.producer_get_barrier(state)
                        cute.copy(tma_x, tXgX[None, block_m, k], tXsX[None, state.index], tma_bar_ptr=full)
                        cute.copy(tma_phi, tPgP[None, k], tPsP[None, state.index], tma_bar_ptr=full)
                        state.advance()
                ring.producer_tail(state)
        else:
            thr_mma = tiled_mma.get_slice(tidx)
            tCcH = thr_mma.partition_C(cute.make_identity_tensor((TOKENS, padded)))
            sums = cute.make_rmem_tensor(tCcH.shape[:3], Float32)
            squares = cute.make_rmem_tensor((2, TOKENS // (16 * self.warps_m)), Float32)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
            for item in cutlass.range(bidx, blocks * splits, grid):
                block_m, split = item // splits, item % splits
                sums.fill(0.0)
                squares.fill(0.0)
                if const_expr(norm_weight is not None):
                    self.load_weight(sWeight, norm_weight, split, tidx)
                for k in cutlass.range(split, config.tiles, splits):
                    if const_expr(config.tma):
                        ring.consumer_wait(state)
                    else:
                        self.load(sX[None, None, state.index], TOKENS, mX, block_m * TOKENS, k * tile_k, tidx)
                        self.load(sPhi[None, None, state.index], padded, mPhi, 0, k * tile_k, tidx)
                        consumer_barrier()
                    tile = self.load_x(tiled_mma, sX[None, None, state.index], tidx)
                    tile_squares = cute.make_rmem_tensor(squares.shape, Float32)
                    tile_squares.fill(0.0)
                    for k16 in cutlass.range_constexpr(tile_k // (16 * self.warps_k)):
                        rX = tile[None, None, k16]
                        square(tile_squares, rX)
                        rPhi = thr_mma.partition_B(sPhi[None, None, state.index])[None, None, k16]
                        values = cute.make_rmem_tensor(rPhi.shape, self.phi_type)
                        cute.autovec_copy(rPhi, values)
                        phi = values.load().to(Float32)
                        if const_expr(norm_weight is not None):
                            by_row = cute.make_layout((padded, tile_k), stride=(0, 1))
                            weights = cute.make_tensor(sWeight.iterator + k // splits * tile_k, by_row)
                            rWeight = cute.make_rmem_tensor(rPhi.shape, Float32)
                            cute.autovec_copy(thr_mma.partition_B(weights)[None, None, k16], rWeight)
                            phi = phi * rWeight.load()
                        x_terms = terms_of(rX.load().to(Float32), rX.shape, config.x_terms)
                        phi_terms = terms_of(phi, rPhi.shape, config.phi_terms)
                        for a in cutlass.range_constexpr(config.x_terms):
                            for b in cutlass.range_constexpr(min(config.phi_terms, config.order - a)):
                                cute.gemm(tiled_mma, sums, x_terms[a], phi_terms[b], sums)
                    squares.store(squares.load() + tile_squares.load())
                    if const_expr(config.tma):
                        ring.consumer_release(state)
                    else:
                        consumer_barrier()
                    state.advance()
                self.store(sums, squares, tCcH, scratch, partials, split, block_m * TOKENS, tidx)

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,
        squares: cute.Tensor,
        tCcH: cute.Tensor,
        scratch: Optional[cute.Tensor],
        partials: cute.Tensor,
        split: Int32,
        first_row: Int32,
        tidx: Int32,
    ):
        """Write a block's sums; where two warps share its tokens, those of the odd columns hand theirs over first."""
        lane, warp_index = tidx % WARP_SIZE, tidx // WARP_SIZE
        warp_m, warp_k = warp_index % self.warps_m, warp_index // self.warps_m
        if const_expr(self.warps_k == 2):
            mine = scratch[None, warp_m * WARP_SIZE + lane]
            if warp_k == 1:
                for v in cutlass.range_constexpr(cute.size(sums)):
                    mine[v] = sums[v]
                for v in cutlass.range_constexpr(cute.size(squares)):
                    mine[cute.size(sums) + v] = squares[v]
            consumer_barrier()
            if warp_k == 0:
                for v in cutlass.range_constexpr(cute.size(sums)):
                    sums[v] = sums[v] + mine[v]
                for v in cutlass.range_constexpr(cute.size(squares)):
                    squares[v] = squares[v] + mine[cute.size(sums) + v]
            consumer_barrier()
        if warp_k == 0:
            num_tokens = partials.shape[2]
            for v in cutlass.range_constexpr(cute.size(sums)):
                row, column = first_row + tCcH[v][0], tCcH[v][1]
                if row < num_tokens and column < self.config.columns:
                    partials[split, column, row] = sums[v]
            # A token's squares lie with the four lanes that hold its columns
            for v in cutlass.range_constexpr(cute.size(squares)):
                total = cute.arch.warp_reduction_sum(squares[v], threads_in_group=4)
                row = first_row + (v // 2 * self.warps_m + warp_m) * 16 + v % 2 * 8 + lane // 4
                if lane % 4 == 0 and row < num_tokens:
                    partials[split, self.config.columns, row] = total

    def scratch_layout(self):
        """The layout of the sums and squares that the warps of the odd columns hand over, by thread."""
        tiles = TOKENS // (16 * self.warps_m)
        threads = self.warps_m * WARP_SIZE
        count = tiles * (self.config.padded_columns // 8 * 4 + 2)
        return cute.make_layout((count, threads), stride=(threads, 1))

    @cute.jit
    def load_weight(self, sWeight: cute.Tensor, norm_weight: cute.Tensor, split: Int32, tidx: Int32):
        """A part's norm_weight in fp32; zeros beyond the last column."""
        tile_k, splits = const_expr(self.config.tile_k), const_expr(self.config.splits)
        consumer_barrier()
        for index in cutlass.range(tidx, self.part_columns, WARPS * WARP_SIZE):
            k = (index // tile_k * splits + split) * tile_k + index % tile_k
            weight = Float32(0.0)
            if k < self.config.k:
                weight = norm_weight[k].to(Float32)
            sWeight[index] = weight
        consumer_barrier()

    @cute.jit
    def load_x(self, tiled_mma, sX: cute.Tensor, tidx):
        """This thread's part of a tile, as A operands of 16 columns each."""
        source = tiled_mma.get_slice(tidx).partition_A(sX)
        rX = cute.make_rmem_tensor(source.shape, sX.element_type)
        if const_expr(sX.element_type.width == 16):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sX.element_type)
            copy = cute.make_tiled_copy_A(atom, tiled_mma)
            cute.copy(copy, copy.get_slice(tidx).partition_S(sX), copy.retile(rX))
        else:
            cute.autovec_copy(source, rX)
        return rX

    @cute.jit
    def load(
        self,
        target: cute.Tensor,
        rows: cutlass.Constexpr[int],
        source: cute.Tensor,
        first_row: Int32,
        first_k: Int32,
        tidx: Int32,
    ):
        """A tile of a matrix that TMA cannot address, by plain loads; zeros outside."""
        tile_k = const_expr(self.config.tile_k)
        for index in cutlass.range(tidx, rows * tile_k, WARPS * WARP_SIZE):
            row, k = index // tile_k, index % tile_k
            value = target.element_type(0.0)
            if first_row + row < source.shape[0] and first_k + k < self.config.k:
                value = source[first_row + row, first_k + k]
            target[row, k] = value


@cute.jit
def consumer_barrier():
    """The warps that multiply meet."""
    cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * WARP_SIZE)


@cute.jit
def square(squares: cute.Tensor, rX: cute.Tensor):
    """Add the squares of an A operand ((2 columns, 2 rows, 2 column halves), row tiles) by row."""
    for m in cutlass.range_constexpr(cute.size(rX, mode=[1])):
        for half in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                value = rX[(e % 2, half, e // 2), m].to(Float32)
                squares[half, m] = squares[half, m] + value * value


def terms_of(values, shape, count: int) -> list:
    """fp32 values as sums of ``count`` bf16 fragments, largest first."""
    terms = []
    for i in range(count):
        term = cute.make_rmem_tensor(shape, BFloat16)
        term.store(values.to(BFloat16))
        if i + 1 < count:
            values = values - term.load().to(Float32)
        terms.append(term)
    return terms


@compiled
def projection_forward(arch: str, spec: ProjectionSpec, config: ProjectionConfig) -> Program:
    """partials (splits, N + 1, M) from x (M, K), phi (N, K) and norm_weight (K,)."""
    rows, dtype, phi = cute.sym_int(), cutlass_dtype(spec.x), cutlass_dtype(spec.phi)
    align = 16 * 8 if config.tma else 0
    shape = config.splits, config.columns + 1, rows
    return Program(
        ProjectionSplitForward(config),
        symbolic_streams(dtype, rows, config.k, max(1, align // dtype.width)),
        symbolic_streams(phi, config.columns, config.k, max(1, align // phi.width)),
        symbolic_vector(cutlass_dtype(spec.norm_weight), config.k),
        cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
