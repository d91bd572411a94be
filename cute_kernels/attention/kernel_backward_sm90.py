"""Attention backward for SM90: persistent, warp-specialised, five products a step, sums in a fixed order.

A CTA takes a block of 128 keys of one head at a time and walks over the tiles of queries that see it, ascending. One
warp loads, one or two threads add dq; two warpgroups of 64 keys each compute. Scores lie across: rows are keys.

    gmem k, v --TMA--> sK, sV (k_full, v_full / kv_empty)            once a block of keys
    gmem q, lse --TMA--> sQ, sLse (q_full / q_empty)        \
    gmem dout, delta --TMA--> sDout, sDelta (dout_full / dout_empty)  a step:
        k q^T and v dout^T --wgmma--> scores, dp --> p, ds in registers
        p dout --wgmma--> dv in registers; ds q --wgmma--> dk in registers
        ds --> sDs; ds^T k --wgmma--> a partial of dq --> sDq (dq_full / dq_empty) --bulk add--> gmem dq_sums
    dv, dk --> sV, sK --TMA--> gmem; of groups in fp32 --bulk add--> gmem dkv_sums

The contract ``kv_grid``: kernel_row_backward.py has its arithmetic; here are the products and the order.

dq: a row gets one partial of each block of keys, in fp32, in a fixed order: with a causal mask or a window from its
last block down, else from the first up. A tile's counter says how many have been added. A thread that adds waits
until that is its own turn, adds, waits until the sum is in memory, and counts. The first one stores instead, so nothing
is cleared before.

dk, dv: a query head's sums are in registers from its first query to its last. Where heads share a head of keys
(``grouped``) each adds its sums to those of the heads before it in memory, in ascending order, by a counter, too.
kernel_finish_gradients.py rounds what is summed in memory.

Blocks are handed out by an atomic ticket, in the order in which they add: a CTA that waits, waits for a ticket that was
taken before its own. Of the tickets that were taken and are not done the first one waits for nothing, so there is no
deadlock, however few CTAs there are, and whatever else runs.

Queries of a step, stages and CTAs change no bit.

Profile: ncu --clock-control none -k regex:BackwardSm90 python -m bench.bench_attention_backward --filter 8192.*causal
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.attention.config import BackwardConfig, BackwardSpec
from cute_kernels.attention.kernel_backward_blocks import BackwardBlocks
from cute_kernels.attention.kernel_backward_channels import BackwardChannels
from cute_kernels.attention.kernel_backward_epilogue import BackwardEpilogue
from cute_kernels.attention.kernel_backward_producer import BackwardProducer
from cute_kernels.attention.kernel_backward_products import BackwardProducts
from cute_kernels.attention.kernel_backward_sums import BackwardSums
from cute_kernels.attention.kernel_backward_tiles import (
    COMPUTE,
    WARP_SIZE,
    WARPGROUP,
    WARPGROUPS,
    BackwardTiles,
)
from cute_kernels.attention.kernel_matrices import by_rows, ragged
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

# Registers of a thread that loads, and of one that computes; three warpgroups start with 168 each. With 24 the warps
# that load and add spill 8 to 24 bytes for packed sequences beyond 128 channels
REGISTERS, REGISTERS_BY_CHANNELS = (24, 240), (40, 232)


class BackwardSm90(
    BackwardTiles,
    BackwardBlocks,
    BackwardProducer,
    BackwardSums,
    BackwardProducts,
    BackwardChannels,
    BackwardEpilogue,
):
    """See the module; arguments as in the builder ``backward_sm90``. Each part is a file of the same name."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        row_lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_sums: cute.Tensor,
        dkv_sums: cute.Tensor,
        counters: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        score_scale: Float32,
        before_tanh: Float32,
        scale: Float32,
        left: Int32,
        right: Int32,
        num_tiles: Int32,
        num_blocks: Int32,
        heads_together: Int32,
        num_ctas: Int32,
        stream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        sizes = self.head_size, self.head_size_v
        (rows, rows_v), (keys, keys_v) = (tuple((n, size) for size in sizes) for n in (self.tile_rows, self.block))
        sQ_layout, sDout_layout = (self.rows_layout(size, self.tile_rows) for size in sizes)
        sK_layout = self.rows_layout(self.head_size, self.block, panel=self.k_panel)
        sV_layout = self.rows_layout(self.head_size_v, self.block)
        of_q, of_dout = (ragged(by_rows(t)) if self.ragged_q else by_rows(t) for t in (q, dout))
        of_k, of_v = (ragged(by_rows(t)) if self.ragged_k else by_rows(t) for t in (k, v))
        of_dk, of_dv = (ragged(by_rows(t)) if self.ragged_k else by_rows(t) for t in (dk, dv))
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, of_q, sQ_layout, rows)
        tma_dout, mDout = cpasync.make_tiled_tma_atom(load, of_dout, sDout_layout, rows_v)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, of_k, sK_layout, keys)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, of_v, sV_layout, keys_v)
        tma_dk, mDk = cpasync.make_tiled_tma_atom(store, of_dk, sK_layout, keys)
        tma_dv, mDv = cpasync.make_tiled_tma_atom(store, of_dv, sV_layout, keys_v)
        lines = q.shape[0], q.shape[1], q.shape[2], k.shape[1], k.shape[2]
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
        options = score_scale, before_tanh, scale, left, right
        self.kernel(
            self.tiled_mmas(), (tma_q, tma_k, tma_v, tma_dout, tma_dk, tma_dv), (mQ, mK, mV, mDout, mDk, mDv),
            row_lse, delta, dq_sums, dkv_sums, counters, lines, lengths, options, num_tiles, num_blocks, heads_together,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[COMPUTE + WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mmas: tuple,
        atoms: tuple,
        matrices: tuple,
        row_lse: cute.Tensor,
        delta: cute.Tensor,
        dq_sums: cute.Tensor,
        dkv_sums: cute.Tensor,
        counters: cute.Tensor,
        sizes: tuple,
        lengths: tuple,
        options: tuple,
        num_tiles: Int32,
        num_blocks: Int32,
        heads_together: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        self.allocate(SmemAllocator())
        if tidx == 0:
            warps = const_expr(COMPUTE // WARP_SIZE)
            cute.arch.mbarrier_init(self.ticket_full, 1)
            cute.arch.mbarrier_init(self.ticket_empty, warps + self.adders)
            cute.arch.mbarrier_init(self.k_full, 1)
            cute.arch.mbarrier_init(self.v_full, 1)
            cute.arch.mbarrier_init(self.kv_empty, 1)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.q_full + stage, 1)
                cute.arch.mbarrier_init(self.q_empty + stage, warps)
                if const_expr(stage < self.dout_stages):
                    cute.arch.mbarrier_init(self.dout_full + stage, 1)
                    cute.arch.mbarrier_init(self.dout_empty + stage, warps)
            for i in cutlass.range_constexpr(WARPGROUPS * self.adders):
                cute.arch.mbarrier_init(self.dq_full + i, warps // WARPGROUPS)
                cute.arch.mbarrier_init(self.dq_empty + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()

        self.score_scale, self.before_tanh, self.scale, self.left, self.right = options
        self.schedule(sizes, lengths, counters, num_tiles, num_blocks, heads_together)
        loads, computes = const_expr(REGISTERS_BY_CHANNELS if self.by_channels else REGISTERS)
        if warp < 4:
            cute.arch.setmaxregister_decrease(loads)
            if warp == 0:
                self.load(atoms, matrices, row_lse, delta)
            if (warp > 0) & (warp <= self.adders):
                if cute.arch.lane_idx() == 0:
                    self.add_dq(dq_sums, warp - 1)
        else:
            cute.arch.setmaxregister_increase(computes)
            self.compute(mmas, atoms, matrices, dkv_sums, tidx - WARPGROUP)


@compiled
def backward_sm90(arch: str, spec: BackwardSpec, config: BackwardConfig) -> Program:
    """dk (B, Lk, Hkv, D) and dv (B, Lk, Hkv, Dv), and the sums of dq, of q (B, Lq, H, D), dout (B, Lq, H, Dv), k and v,
    whose strides are multiples of 16 bytes, and row_lse and delta (H, all rows padded). Packed sequences: B of 1.

    ``dq_sums``: fp32, tile_rows * head_size numbers of each tile of queries of each head, as accumulators have them.
    ``dkv_sums``: fp32, 2 * block * head_size numbers of each block of keys of each of their heads; used where it is
    ``grouped``. ``counters``: int32 zeros: the ticket, one of each tile of dq_sums, one of each block of dkv_sums.
    ``score_scale``, ``before_tanh``: see ``score_factors``; ``scale``: what scores are multiplied with. ``left``,
    ``right``: see ``window_bounds``. ``num_tiles``, ``num_blocks``: of queries and keys of all sequences, of one head,
    see ``Sequences``. ``heads_together``: heads whose rows are walked over together, a multiple of a group.
    """
    dtype, (d, dv) = cutlass_dtype(spec.dtype), spec.sizes
    if spec.padded:
        d, dv = (cute.sym_int(divisibility=8) for _ in range(2))
    batch_q, batch_k, len_q, len_k, heads, pairs, padded = (cute.sym_int() for _ in range(7))
    if not spec.packed_q and not spec.packed_k:
        batch_k = batch_q

    def operand(batch, length, number, size):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, number, size), (*strides, 1), assumed_align=16)

    def compact(kind, *shape, align=16):
        order = tuple(range(len(shape)))[::-1]
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)

    def integers(present):
        return compact(Int32, cute.sym_int(), align=4) if present else None

    return Program(
        BackwardSm90(dtype, spec, config),
        operand(batch_q, len_q, heads, d),
        operand(batch_k, len_k, pairs, d),
        operand(batch_k, len_k, pairs, dv),
        operand(batch_q, len_q, heads, dv),
        compact(Float32, heads, padded),
        compact(Float32, heads, padded),
        operand(batch_k, len_k, pairs, d),
        operand(batch_k, len_k, pairs, dv),
        compact(Float32, cute.sym_int64()),
        compact(Float32, cute.sym_int64()),
        compact(Int32, cute.sym_int()),
        integers(spec.packed_q),
        integers(spec.packed_k),
        integers(spec.used_k),
        *(Float32(1.0) for _ in range(3)),
        *(Int32(1) for _ in range(6)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
