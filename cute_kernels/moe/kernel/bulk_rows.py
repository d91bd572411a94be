"""Tokens' rows to experts' rows by the bulk-copy engine, a CTA of one warp a token.

    row of the token --bulk--> smem (full) --bulk, one a slot--> rows of the experts by positions; others get zeros

No data passes through registers, and each row is written in one piece. Lane j issues the copy of the j-th slot.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_NORMAL
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.row_ring import bulk_load, row_address
from cute_kernels.moe.config import WARP, BulkGatherSpec
from cute_kernels.moe.kernel.rows import Gather
from cute_kernels.moe.kernel.warp_rows import symbolic_list, symbolic_rows, symbolic_table
from jit_cache import Program, compiled

PART_BYTES = 16 << 10  # of a row in shared memory at once: 13 CTAs an SM


class BulkGather(Gather):
    """See the builder ``bulk_gather``."""

    def __init__(self, spec: BulkGatherSpec):
        self.k, self.warps, self.skips = spec.k, 1, True

    @cute.jit
    def __call__(self, x, slots, positions, out, num_ctas: Int32, stream):
        self.kernel(x, slots, positions, out).launch(
            grid=[num_ctas, 1, 1], block=[WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, slots, positions, out):
        lane, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        size = cutlass.const_expr(x.element_type.width // 8)
        smem = SmemAllocator()
        part = smem.allocate_tensor(x.element_type, cute.make_layout(PART_BYTES // size), byte_alignment=128).iterator
        full = smem.allocate_tensor(Int64, cute.make_layout(1), byte_alignment=8).iterator
        if lane == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_wait()
        phase = Int32(0)
        for token in cutlass.range(first, x.shape[0], step):
            row = Int32(-1)
            if lane < self.k:
                row = positions[token, lane]
            for begin in cutlass.range(0, x.shape[1], PART_BYTES // size, unroll=1):
                num_bytes = cutlass.min((x.shape[1] - begin) * size, PART_BYTES)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                    bulk_load(part, row_address(x, token, begin), num_bytes, full, Int64(EVICT_NORMAL))
                cute.arch.mbarrier_wait(full, phase)
                phase ^= 1
                if row >= 0:
                    bulk_store(row_address(out, row, begin), part, num_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
        for begin in cutlass.range(first, slots.shape[0], step * WARP):
            self.clear(slots, out, begin, step, lane, lane)


@cute.jit
def bulk_store(target: Int64, source: cute.Pointer, num_bytes: Int32):
    """Start copying ``num_bytes`` (a multiple of 16) from shared memory to global address ``target``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[Int64(target), Int32(source.toint()), Int32(num_bytes)],
    )


@compiled
def bulk_gather(arch: str, spec: BulkGatherSpec) -> Program:
    """out[positions[t, j]] = x[t]; zeros where the slot of a row is -1."""
    dtype, tokens, rows, columns = cutlass_dtype(spec.dtype), *(cute.sym_int() for _ in range(3))
    return Program(
        BulkGather(spec),
        symbolic_rows(dtype, tokens, columns),
        symbolic_list(Int32, rows),
        symbolic_table(Int32, tokens, spec.k),
        symbolic_rows(dtype, rows, columns),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
