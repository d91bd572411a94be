"""What the backward of attention needs of each row: delta, the sum of dout * out less dlse, and lse in powers of two.

Rows of out and dout lie head by head within a position; what is known of them lies position by position within a head,
where the backward reads it, in lines padded to a multiple of PADDED_ROWS. A row that does not exist has delta 0 and an
lse of +inf. The counters of the backward's order become 0 here, too.

Profile: ncu --clock-control none -k regex:DeltaSm90 python -m bench.bench_attention --filter bwd.*8192.*causal
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.attention.config import PADDED_ROWS, DeltaSpec
from cute_kernels.attention.kernel_row_backward import dot, lanes_sum, less, row_lse_of
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

THREADS = 256
VECTOR = 8  # elements of a row that a lane holds


class DeltaSm90:
    """See the module; arguments as in the builder ``delta``. A CTA has PADDED_ROWS positions of a head."""

    def __init__(self, head_size: int, has_lse_grad: bool):
        self.has_lse_grad = has_lse_grad
        self.lanes = head_size // VECTOR  # of a row
        self.rows = THREADS // self.lanes  # at a time

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: Optional[cute.Tensor],
        delta: cute.Tensor,
        row_lse: cute.Tensor,
        counters: cute.Tensor,
        stream,
    ):
        self.kernel(out, dout, lse, dlse, delta, row_lse, counters).launch(
            grid=[delta.shape[2] // PADDED_ROWS * delta.shape[1] * delta.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: Optional[cute.Tensor],
        delta: cute.Tensor,
        row_lse: cute.Tensor,
        counters: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range(bidx * THREADS + tidx, counters.shape[0], grid * THREADS):
            counters[i] = Int32(0)

        heads, length = lse.shape[1], lse.shape[2]
        tiles = delta.shape[2] // PADDED_ROWS
        head, tile, batch = bidx % heads, bidx // heads % tiles, bidx // (heads * tiles)
        lane = tidx % self.lanes
        line = Int64(batch * heads + head)
        positions, exists, products = [], [], []
        for i in cutlass.range_constexpr(PADDED_ROWS // self.rows):
            position = tile * PADDED_ROWS + i * self.rows + tidx // self.lanes
            there = Boolean(position < length)
            of_out, of_dout = (self.load(t, batch, cutlass.min(position, length - 1), head, lane) for t in (out, dout))
            positions.append(position)
            exists.append(there)
            products.append((of_out, of_dout))
        for i in cutlass.range_constexpr(PADDED_ROWS // self.rows):
            position = positions[i]
            total = lanes_sum(dot(*products[i]), self.lanes)
            if lane == 0:
                of_row = cutlass.min(position, length - 1)
                found, known = Float32(0.0), row_lse_of((lse.iterator + line * length)[of_row], exists[i])
                if exists[i]:
                    found = total
                    if const_expr(self.has_lse_grad):
                        found = less(total, (dlse.iterator + line * length)[of_row])
                (delta.iterator + line * delta.shape[2])[position] = found
                (row_lse.iterator + line * delta.shape[2])[position] = known

    def load(self, t: cute.Tensor, batch: Int32, position: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        """A lane's part of a row, in fp32."""
        offset = Int64(batch) * t.stride[0] + Int64(position) * t.stride[1] + Int64(head) * t.stride[2]
        source = t.iterator + cute.assume(offset + lane * VECTOR, divby=VECTOR)
        found = cute.make_rmem_tensor((VECTOR,), t.element_type)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), found)
        wide = cute.make_rmem_tensor((VECTOR,), Float32)
        wide.store(found.load().to(Float32))
        return wide


@compiled
def delta(arch: str, spec: DeltaSpec) -> Program:
    """delta and row_lse (B, H, L padded) fp32 of out and dout (B, L, H, D), whose strides are multiples of 16 bytes,
    lse and dlse (B, H, L) fp32. ``counters`` int32 become 0.
    """
    dtype, d = cutlass_dtype(spec.dtype), spec.head_size
    batch, length, heads, padded, size = (cute.sym_int() for _ in range(5))

    def operand():
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, heads, d), (*strides, 1), assumed_align=16)

    def lines(length):
        shape = (batch, heads, length)
        return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4)

    return Program(
        DeltaSm90(d, spec.has_lse_grad),
        operand(),
        operand(),
        lines(length),
        lines(length) if spec.has_lse_grad else None,
        lines(padded),
        lines(padded),
        cute.runtime.make_fake_compact_tensor(Int32, (size,), assumed_align=4),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
