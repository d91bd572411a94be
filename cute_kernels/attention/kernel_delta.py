"""Delta kernel of attention's backward: each row's delta, the sum of dout * out less dlse, and lse in powers of two.

Rows of out and dout lie head by head within a position; what is known of them lies position by position within a head,
where the backward reads it, in tiles of ``padded_rows`` (``kernel_sequences``). A row that does not exist has delta 0
and an lse of +inf. The counters of the backward's order become 0 here, too.

Profile: ncu --clock-control none -k regex:DeltaSm90 python -m bench.bench_attention_backward --filter 8192.*causal
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.attention.config import DeltaSpec
from cute_kernels.attention.kernel_row_backward import dot, lanes_sum, less, row_lse_of
from cute_kernels.attention.kernel_sequences import Sequences, find_tile
from cute_kernels.common.dtypes import cutlass_dtype
from jit_cache import Program, compiled

THREADS = 256
VECTOR = 8  # elements of a row that a lane holds


class DeltaSm90:
    """See the module; arguments as in the builder ``delta``. A CTA has ``padded_rows`` positions of a head."""

    def __init__(self, spec: DeltaSpec):
        self.has_lse_grad, self.padded, self.padded_rows = spec.has_lse_grad, spec.padded, spec.padded_rows
        self.lanes = spec.head_size // VECTOR  # of a row
        self.rows = THREADS // self.lanes  # at a time
        self.passes = 1 if spec.head_size <= 128 else 4  # all rows of a thread at once would not fit into its registers

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: Optional[cute.Tensor],
        cu_seqlens_q: Optional[cute.Tensor],
        delta: cute.Tensor,
        row_lse: cute.Tensor,
        counters: cute.Tensor,
        stream,
    ):
        self.kernel(out, dout, lse, dlse, cu_seqlens_q, delta, row_lse, counters).launch(
            grid=[delta.shape[1] // self.padded_rows * delta.shape[0], 1, 1],
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
        cu_seqlens_q: Optional[cute.Tensor],
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

        batch, heads, length = lse.shape
        if const_expr(cu_seqlens_q is not None):
            batch = cu_seqlens_q.shape[0] - 1
        sequences = Sequences(length, batch, cu_seqlens_q, None)
        head, tile = bidx % heads, bidx // heads
        sequence, within = find_tile(sequences, tile, self.padded_rows)
        matrix, first, rows = sequences.matrix(sequence), sequences.first(sequence), sequences.rows(sequence)
        lane = tidx % self.lanes
        each = const_expr(self.padded_rows // self.rows // self.passes)
        for part in cutlass.range_constexpr(self.passes):
            exists, places, products = [], [], []
            for i in cutlass.range_constexpr(part * each, (part + 1) * each):
                position = within * self.padded_rows + i * self.rows + tidx // self.lanes
                place = first + cutlass.max(cutlass.min(position, rows - 1), 0)
                place = cutlass.min(place, length - 1)  # of a sequence without rows
                exists.append(Boolean(position < rows))
                places.append(place)
                products.append(tuple(self.load(t, matrix, place, head, lane) for t in (out, dout)))
            of_lse = Int64(matrix * heads + head) * length
            line = Int64(head) * delta.shape[1] + tile * self.padded_rows
            for i in cutlass.range_constexpr(each):
                total = lanes_sum(dot(*products[i]), self.lanes)
                if lane == 0:
                    row = (part * each + i) * self.rows + tidx // self.lanes
                    found, known = Float32(0.0), row_lse_of((lse.iterator + of_lse)[places[i]], exists[i])
                    if exists[i]:
                        found = total
                        if const_expr(self.has_lse_grad):
                            found = less(total, (dlse.iterator + of_lse)[places[i]])
                    (delta.iterator + line)[row] = found
                    (row_lse.iterator + line)[row] = known

    @cute.jit
    def load(self, t: cute.Tensor, batch: Int32, position: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        """A lane's part of a row, in fp32; channels that are not there are 0."""
        offset = Int64(batch) * t.stride[0] + Int64(position) * t.stride[1] + Int64(head) * t.stride[2]
        source = t.iterator + cute.assume(offset + lane * VECTOR, divby=VECTOR)
        found = cute.make_rmem_tensor((VECTOR,), t.element_type)
        if const_expr(self.padded):
            found.fill(0.0)
            if lane * VECTOR < t.shape[3]:
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), found)
        else:
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), found)
        wide = cute.make_rmem_tensor((VECTOR,), Float32)
        wide.store(found.load().to(Float32))
        return wide


@compiled
def delta(arch: str, spec: DeltaSpec) -> Program:
    """delta and row_lse (H, all rows padded) fp32 of out and dout (B, L, H, D), whose strides are multiples of 16
    bytes, lse and dlse (B, H, L) fp32; B of 1 of packed sequences. ``counters`` int32 become 0.
    """
    dtype, d = cutlass_dtype(spec.dtype), spec.head_size
    if spec.padded:
        d = cute.sym_int(divisibility=8)
    batch, length, heads, padded, size = (cute.sym_int() for _ in range(5))

    def operand():
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, (batch, length, heads, d), (*strides, 1), assumed_align=16)

    def compact(kind, *shape):
        order = tuple(range(len(shape)))[::-1]
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=4)

    return Program(
        DeltaSm90(spec),
        operand(),
        operand(),
        compact(Float32, batch, heads, length),
        compact(Float32, batch, heads, length) if spec.has_lse_grad else None,
        compact(Int32, cute.sym_int()) if spec.packed_q else None,
        compact(Float32, heads, padded),
        compact(Float32, heads, padded),
        compact(Int32, size),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
