"""linear_log_prob on SM100: the product of kernel_sm100.py, whose sums are logits and do not leave the SM as such.

A thread has a row of a tile, and adds its columns one after the other. Compiled and inspected only: no SM100 has run it
yet.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.gemm.config import GemmConfig, vocabulary_tile
from cute_kernels.gemm.kernel_epilogue import transpose
from cute_kernels.gemm.kernel_log_prob_epilogue import (
    MASKED,
    differentiate,
    keep_statistics,
    keep_target_logit,
    largest_of,
    sums_of,
    target_column,
)
from cute_kernels.gemm.kernel_sm100 import GemmSm100


class StatisticsSm100(GemmSm100):
    """See ``log_prob_statistics`` in kernel_log_prob.py."""

    def __init__(self, weight_major: str, config: GemmConfig):
        GemmSm100.__init__(self, None, "k", weight_major, False, False, False, config)

    def part(self) -> tuple[int, int]:
        """What statistics are of; of 128 columns at once 350 bytes a thread would spill."""
        return self.tile[0], vocabulary_tile("sm_100a")

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        statistics: cute.Tensor,
        target_logit: cute.Tensor,
        scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        self.dtype, self.out = x.element_type, Float32
        if const_expr(self.majors[1] == "n"):
            weight = transpose(weight)
        # Where the logits would lie: the walk over the tiles asks for its shape alone
        shape = cute.make_layout((x.shape[0], weight.shape[0]), stride=(0, 0))
        logits = cute.make_tensor(statistics.iterator, shape)
        rows = (target, statistics, target_logit, scale)
        self.multiply(x, weight, logits, None, None, None, rows, num_ctas, stream)

    @cute.jit
    def finish(
        self,
        load_copy,
        sums,
        coordinates,
        bias,
        sD,
        tma_d,
        mD,
        tma_z,
        mZ,
        d,
        z,
        m: Int32,
        n: Int32,
        p: Int32,
        thread: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        target, _, _, scale = rows
        width, vocabulary = self.part()[1], d.shape[1]
        tile = n * (self.tile[1] // width) + p
        columns, row = columns_of(coordinates, tile * width), m * self.tile[0] + coordinates[0][0]
        if (tile + 1) * width > vocabulary:
            for i in cutlass.range_constexpr(cute.size(sums)):
                if columns[i] >= vocabulary:
                    sums[i] = Float32(MASKED)
        base = largest_of(sums) * scale
        total, moment = sums_of(sums, scale, base)
        keep_statistics(rows, row, tile, base, total, moment)
        column = target_column(target, row, vocabulary)
        if column >= tile * width and column < (tile + 1) * width:
            keep_target_logit(rows, sums, columns, row, column)
        return num_stored


class GradientSm100(GemmSm100):
    """See ``log_prob_gradient`` in kernel_log_prob.py."""

    def __init__(self, weight_major: str, has_dentropy: bool, config: GemmConfig):
        GemmSm100.__init__(self, None, "k", weight_major, False, False, True, config)
        self.has_dentropy = has_dentropy

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        lse: cute.Tensor,
        entropy: cute.Tensor,
        dlog_prob: cute.Tensor,
        dentropy: cute.Tensor,
        dlogits: cute.Tensor,
        ignore_index: Int64,
        vocabulary: Int32,
        first_column: Int32,
        scale: Float32,
        inverse_temperature: Float32,
        num_ctas: Int32,
        stream,
    ):
        self.dtype, self.out = x.element_type, dlogits.element_type
        if const_expr(self.majors[1] == "n"):
            weight = transpose(weight)
        of_targets = ignore_index, vocabulary, first_column
        rows = (target, lse, entropy, dlog_prob, dentropy, *of_targets, scale, inverse_temperature)
        self.multiply(x, weight, dlogits, None, None, None, rows, num_ctas, stream)

    @cute.jit
    def finish(
        self,
        load_copy,
        sums,
        coordinates,
        bias,
        sD,
        tma_d,
        mD,
        tma_z,
        mZ,
        d,
        z,
        m: Int32,
        n: Int32,
        p: Int32,
        thread: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        columns = columns_of(coordinates, n * self.tile[1] + p * self.part()[1])
        differentiate(sums, columns, m * self.tile[0] + coordinates[0][0], rows, self.has_dentropy)
        at = (m, n * (self.tile[1] // self.part()[1]) + p)
        return self.store(load_copy, sums, sD, tma_d, mD, tma_z, mZ, at, thread, num_stored)


@cute.jit
def columns_of(coordinates: cute.Tensor, first: Int32):
    """The columns of a thread's sums, of which all are of one row; those of ``coordinates`` begin at ``first``."""
    columns = cute.make_rmem_tensor((cute.size(coordinates),), Int32)
    for i in cutlass.range_constexpr(cute.size(coordinates)):
        columns[i] = first + coordinates[i][1]
    return columns
