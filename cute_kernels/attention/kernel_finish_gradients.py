"""The last step of attention's backward: dq, and dk and dv of groups of heads, of their sums in fp32.

gmem sums (as accumulators hold them) --> registers, scaled and rounded --> smem --TMA--> gmem; a CTA a tile.

Profile: ncu --clock-control none -k regex:Finish python -m bench.bench_attention_backward --filter 8192.*causal
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import BackwardConfig, BackwardSpec
from cute_kernels.attention.kernel_backward_tiles import (
    COMPUTE,
    VECTOR,
    WARP_SIZE,
    WARPGROUP,
    BackwardTiles,
)
from cute_kernels.attention.kernel_matrices import by_rows, partition, ragged
from cute_kernels.attention.kernel_row_backward import scaled_and_flushed
from cute_kernels.attention.kernel_sequences import Sequences, find_tile, rows_of
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled


class FinishDqSm90:
    """See the module; arguments as in the builder ``finish_dq``."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: BackwardSpec, config: BackwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.rows, self.head_size = config.tile_rows, spec.head_size
        self.summed = BackwardTiles(dtype, spec, config)  # whose accumulators they are

    @cute.jit
    def __call__(
        self,
        dq_sums: cute.Tensor,
        dq: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        scale: Float32,
        right: Int32,
        len_k: Int32,
        num_tiles: Int32,
        stream,
    ):
        store = cpasync.CopyBulkTensorTileS2GOp()
        of_dq = ragged(by_rows(dq)) if self.spec.packed_q else by_rows(dq)
        tma_dq, mDq = cpasync.make_tiled_tma_atom(store, of_dq, self.layout(), (self.rows, self.head_size))
        batch, length, heads, _ = dq.shape
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
        self.kernel(
            self.summed.tiled_mmas()[-1], tma_dq, mDq, dq_sums, (batch, length, heads, len_k), lengths, scale, right
        ).launch(grid=[num_tiles * heads, 1, 1], block=[COMPUTE, 1, 1], stream=stream, use_pdl=True)

    def layout(self):
        return self.summed.rows_layout(self.head_size, self.rows, panel=self.summed.k_panel)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_dq: cute.CopyAtom,
        mDq: cute.Tensor,
        dq_sums: cute.Tensor,
        sizes: tuple,
        lengths: tuple,
        scale: Float32,
        right: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        layout = self.layout()
        sDq = SmemAllocator().allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        cute.arch.griddepcontrol_wait()

        batch, length, heads, len_k = sizes
        starts_q, starts_k, used_k = lengths
        if const_expr(starts_q is not None):
            batch = starts_q.shape[0] - 1
        queries, keys = Sequences(length, batch, starts_q, None), Sequences(len_k, batch, starts_k, used_k)
        head, tile = bidx % heads, bidx // heads
        sequence, m = find_tile(queries, tile, self.rows)
        len_q, len_k = queries.rows(sequence), keys.rows(sequence)
        if m * self.rows < len_q:
            totals = cute.make_rmem_tensor(self.summed.dq_shape(mma), Float32)
            totals.fill(0.0)
            sees_any = len_k > 0
            if const_expr(self.spec.causal or self.spec.window):
                ahead = right if self.spec.window else 0
                sees_any = sees_any & (cutlass.min((m + 1) * self.rows, len_q) + len_k - len_q + ahead > 0)
            if sees_any:
                load_totals(totals, dq_sums, bidx, self.rows * self.head_size, tidx)
            target = sDq
            if const_expr(self.summed.dq_across):
                target = cute.make_tensor(sDq.iterator, self.summed.columns_layout(self.head_size, self.rows).outer)
            store_totals(totals, scale, mma, target, self.dtype, tidx, self.summed.dq_across)
            if tidx < WARP_SIZE:
                place = head, queries.matrix(sequence), queries.first(sequence), len_q
                store_box(tma_dq, sDq, rows_of(mDq, self.spec.packed_q, *place), m, (self.rows, self.head_size))


class FinishDkvSm90:
    """See the module; arguments as in the builder ``finish_dkv``. A CTA a block of keys of dk, or of dv."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: BackwardSpec, config: BackwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.summed = BackwardTiles(dtype, spec, config)  # whose accumulators they are
        self.block, self.sizes, self.ragged = self.summed.block, spec.sizes, self.summed.ragged_k

    @cute.jit
    def __call__(
        self,
        dkv_sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        scale: Float32,
        num_blocks: Int32,
        stream,
    ):
        store = cpasync.CopyBulkTensorTileS2GOp()
        of_k, of_v = (self.summed.rows_layout(size, self.block) for size in self.sizes)
        keys, keys_v = ((self.block, size) for size in self.sizes)
        of_dk, of_dv = (ragged(by_rows(t)) if self.ragged else by_rows(t) for t in (dk, dv))
        tma_dk, mDk = cpasync.make_tiled_tma_atom(store, of_dk, of_k, keys)
        tma_dv, mDv = cpasync.make_tiled_tma_atom(store, of_dv, of_v, keys_v)
        batch, length, pairs, _ = dk.shape
        self.kernel(
            self.summed.tiled_mmas()[1:-1], tma_dk, mDk, tma_dv, mDv, dkv_sums, (batch, length, pairs), cu_seqlens_k,
            seqused_k, scale,
        ).launch(grid=[2 * num_blocks * pairs, 1, 1], block=[COMPUTE, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mmas: tuple,
        tma_dk: cute.CopyAtom,
        mDk: cute.Tensor,
        tma_dv: cute.CopyAtom,
        mDv: cute.Tensor,
        dkv_sums: cute.Tensor,
        sizes: tuple,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        scale: Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        layout = self.summed.rows_layout(self.sizes[0], self.block)
        shared = SmemAllocator().allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        cute.arch.griddepcontrol_wait()
        batch, length, pairs = sizes
        if const_expr(cu_seqlens_k is not None):
            batch = cu_seqlens_k.shape[0] - 1
        keys = Sequences(length, batch, cu_seqlens_k, seqused_k)
        line, which = bidx // 2, bidx % 2
        pair = line % pairs
        sequence, n = find_tile(keys, line // pairs, self.block)
        rows = keys.rows(sequence)
        if n * self.block < rows:
            if const_expr(self.sizes[0] == self.sizes[1]):
                totals = self.load(mmas[0], dkv_sums, bidx, self.sizes[0], tidx)
                factor = Float32(select_(which == 0, scale, Float32(1.0)))
                store_totals(totals, factor, mmas[0], shared, self.dtype, tidx)
                if tidx < WARP_SIZE:
                    place = pair, keys.matrix(sequence), keys.first(sequence), rows
                    if which == 0:
                        self.store(tma_dk, shared, mDk, n, place, self.sizes[0])
                    else:
                        self.store(tma_dv, shared, mDv, n, place, self.sizes[1])
            elif which == 0:
                totals = self.load(mmas[0], dkv_sums, bidx, self.sizes[0], tidx)
                store_totals(totals, scale, mmas[0], shared, self.dtype, tidx)
                if tidx < WARP_SIZE:
                    place = pair, keys.matrix(sequence), keys.first(sequence), rows
                    self.store(tma_dk, shared, mDk, n, place, self.sizes[0])
            else:
                of_v = self.summed.rows_layout(self.sizes[1], self.block)
                sV = cute.make_tensor(cute.recast_ptr(shared.iterator, of_v.inner), of_v.outer)
                totals = self.load(mmas[-1], dkv_sums, bidx, self.sizes[1], tidx)
                store_totals(totals, Float32(1.0), mmas[-1], sV, self.dtype, tidx)
                if tidx < WARP_SIZE:
                    place = pair, keys.matrix(sequence), keys.first(sequence), rows
                    self.store(tma_dv, sV, mDv, n, place, self.sizes[1])

    def load(self, mma: cute.TiledMma, sums: cute.Tensor, line: Int32, channels: int, tidx: Int32) -> cute.Tensor:
        """A thread's accumulators of a block. Each has the room of the larger head size in memory."""
        totals = cute.make_rmem_tensor(mma.partition_shape_C((self.block, channels)), Float32)
        load_totals(totals, sums, line, self.block * self.sizes[0], tidx)
        return totals

    def store(
        self, atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor, n: Int32, place: tuple, channels: int
    ):
        """A block of a sequence's rows of a head."""
        store_box(atom, shared, rows_of(matrix, self.ragged, *place), n, (self.block, channels))


@cute.jit
def load_totals(totals: cute.Tensor, sums: cute.Tensor, tile: Int32, numbers: cutlass.Constexpr[int], tidx: Int32):
    """A thread's accumulators of a tile; ``numbers``: from one tile to the next."""
    of_warpgroup = const_expr(cute.size(totals) * WARPGROUP)
    thread = tidx // WARPGROUP * of_warpgroup + tidx % WARPGROUP * VECTOR
    source = sums.iterator + cute.assume(Int64(tile) * numbers + thread, divby=VECTOR)
    vectors = const_expr(cute.size(totals) // VECTOR)
    of_thread = cute.make_layout((VECTOR, vectors), stride=(1, WARPGROUP * VECTOR))
    flat = cute.make_tensor(totals.iterator, cute.make_layout((VECTOR, vectors)))
    cute.autovec_copy(cute.make_tensor(source, of_thread), flat)


def store_totals(
    totals: cute.Tensor, scale: Float32, mma: cute.TiledMma, shared: cute.Tensor, dtype, tidx: Int32, across=False
):  # fmt: skip
    """Scaled and rounded into shared memory, for the engine that stores; ``across``: rows of totals are its columns."""
    for i in range(cute.size(totals)):
        totals[i] = scaled_and_flushed(totals[i], scale)
    rounded = cute.make_rmem_tensor(totals.shape, dtype)
    rounded.store(totals.load().to(dtype))
    atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(across, 4), dtype)
    copy = cute.make_tiled_copy_C(atom, mma)
    cute.copy(copy, copy.retile(rounded), copy.get_slice(tidx).partition_D(shared))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()


def store_box(atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor, tile: Int32, shape: tuple[int, int]):
    """A tile from shared memory to its place among a matrix' rows."""
    source, target = partition(atom, shared, matrix, shape)
    cute.copy(atom, source, target[None, tile, 0])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@compiled
def finish_dkv(arch: str, spec: BackwardSpec, config: BackwardConfig) -> Program:
    """dk (B, L, Hkv, D) and dv (B, L, Hkv, Dv) of ``dkv_sums``, arguments as of ``backward_sm90``."""
    dtype, (d, dv) = cutlass_dtype(spec.dtype), spec.sizes
    if spec.padded:
        d, dv = (cute.sym_int(divisibility=8) for _ in range(2))
    batch, length, pairs = (cute.sym_int() for _ in range(3))

    def operand(size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, pairs, size), (*strides, 1), assumed_align=16)

    def integers(present):
        return cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if present else None

    return Program(
        FinishDkvSm90(dtype, spec, config),
        cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int64(),), assumed_align=16),
        operand(d),
        operand(dv),
        integers(spec.packed_k),
        integers(spec.used_k),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def finish_dq(arch: str, spec: BackwardSpec, config: BackwardConfig) -> Program:
    """dq (B, L, H, D) of ``dq_sums``, arguments as of ``backward_sm90``; ``len_k``: keys of a sequence, or of all."""
    dtype, d = cutlass_dtype(spec.dtype), spec.head_size
    if spec.padded:
        d = cute.sym_int(divisibility=8)
    batch, length, heads = (cute.sym_int() for _ in range(3))
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))

    def integers(present):
        return cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if present else None

    return Program(
        FinishDqSm90(dtype, spec, config),
        cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int64(),), assumed_align=16),
        cute.runtime.make_fake_tensor(dtype, (batch, length, heads, d), (*strides, 1), assumed_align=16),
        integers(spec.packed_q),
        integers(spec.packed_k),
        integers(spec.used_k),
        Float32(1.0),
        *(Int32(1) for _ in range(3)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
