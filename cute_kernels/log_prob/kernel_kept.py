"""Gradients of logits that the forward has kept, in their place: gmem -> registers -> gmem, one CTA a part of a row."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.log_prob.kernel_epilogue import differentiate

THREADS = 256
VEC = 8  # consecutive logits of a thread
VECTORS = 4  # of a thread, in flight together
COLUMNS = THREADS * VEC * VECTORS


class KeptGradient:
    """See ``log_prob_kept_gradient`` in kernel.py."""

    def __init__(self, has_dentropy: bool):
        self.has_dentropy = has_dentropy

    @cute.jit
    def __call__(
        self,
        target: cute.Tensor,
        row_statistics: cute.Tensor,
        dlog_prob: cute.Tensor,
        dentropy: cute.Tensor,
        logits: cute.Tensor,
        ignore_index: Int64,
        scale: Float32,
        inverse_temperature: Float32,
        slope: Optional[Float32],
        stream,
    ):
        of_rows = target, row_statistics, dlog_prob, dentropy
        self.kernel(*of_rows, logits, ignore_index, scale, inverse_temperature, slope).launch(
            grid=[cute.ceil_div(logits.shape[1], COLUMNS) * logits.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        target: cute.Tensor,
        row_statistics: cute.Tensor,
        dlog_prob: cute.Tensor,
        dentropy: cute.Tensor,
        logits: cute.Tensor,
        ignore_index: Int64,
        scale: Float32,
        inverse_temperature: Float32,
        slope: Optional[Float32],
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        vocabulary = logits.shape[1]
        parts = cute.ceil_div(vocabulary, COLUMNS)
        row, first = bidx // parts, bidx % parts * COLUMNS + tidx * VEC
        source = logits.iterator + (Int64(row) * logits.stride[0] + first)
        kept = cute.make_rmem_tensor((VEC, VECTORS), logits.element_type)
        columns = cute.make_rmem_tensor((VEC, VECTORS), Int32)
        kept.fill(0)
        cute.arch.griddepcontrol_wait()
        # The last vector of a row may end beyond it, within the row's stride
        for i in cutlass.range_constexpr(VECTORS):
            at = const_expr(i * THREADS * VEC)
            if first + at < vocabulary:
                cute.autovec_copy(vector_at(source + at), kept[None, i])
            for v in cutlass.range_constexpr(VEC):
                columns[v, i] = first + at + v
        values = cute.make_rmem_tensor((VEC, VECTORS), Float32)
        values.store(kept.load().to(Float32))
        of_rows = target, row_statistics, dlog_prob, dentropy
        rows = *of_rows, ignore_index, vocabulary, Int32(0), scale, inverse_temperature, slope
        differentiate(values, columns, row, rows, self.has_dentropy)
        kept.store(values.load().to(logits.element_type))
        for i in cutlass.range_constexpr(VECTORS):
            at = const_expr(i * THREADS * VEC)
            if first + at < vocabulary:
                cute.autovec_copy(kept[None, i], vector_at(source + at))


def vector_at(pointer: cute.Pointer) -> cute.Tensor:
    """Consecutive logits from 16 bytes on."""
    return cute.make_tensor(pointer.align(16), cute.make_layout(VEC))
