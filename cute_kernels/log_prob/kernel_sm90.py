"""linear_log_prob on SM90: the product of common/gemm_sm90.py, whose sums are logits and do not leave the SM as such.

A row of a tile lies in the four lanes of a quad, in all of the instruction's 64 rows alike: whichever kernel
multiplies, the sums of a row over a tile's columns are added in the same order.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.gemm_sm90 import GemmSm90
from cute_kernels.log_prob.kernel_epilogue import (
    GradientEntry,
    StatisticsEntry,
    cap,
    differentiate,
    keep_statistics,
    keep_target_logit,
    largest_of,
    sums_of,
    target_column,
)

QUAD = 4  # lanes that share a row


class StatisticsSm90(StatisticsEntry, GemmSm90):
    """See ``log_prob_statistics`` in kernel.py."""

    def __init__(self, weight_major: str, keeps_logits: bool, config: GemmConfig):
        GemmSm90.__init__(self, None, "k", weight_major, False, False, keeps_logits, config)
        self.staged = keeps_logits  # else no tile is stored

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        tCcD: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        thread: Int32,
        turn: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        target, _, _, scale, slope = rows
        vocabulary = out[-2].shape[1]  # of where logits lie, or would
        if const_expr(self.staged):
            num_stored = GemmSm90.finish(self, sums, tCcD, out, m, n, thread, turn, num_stored, rows)
        if const_expr(slope is not None):
            cap(sums, slope)
        first_m, first_n = m * self.tile[0], n * self.tile[1]
        if first_n + self.tile[1] > vocabulary:
            for i in cutlass.range_constexpr(cute.size(sums)):
                if first_n + tCcD[i][1] >= vocabulary:
                    sums[i] = -Float32.inf
        for r in cutlass.range_constexpr(rows_of(sums)):
            logits, columns, row = row_of(sums, tCcD, r, first_m, first_n)
            largest = cute.arch.warp_reduction(largest_of(logits), cute.arch.fmax, threads_in_group=QUAD)
            total, moment = sums_of(logits, scale, largest)
            total = cute.arch.warp_reduction(total, operator.add, threads_in_group=QUAD)
            moment = cute.arch.warp_reduction(moment, operator.add, threads_in_group=QUAD)
            if thread % QUAD == 0:
                keep_statistics(rows, row, n, largest, total, moment)
            column = target_column(target, row, vocabulary)
            if column >= first_n and column < first_n + self.tile[1]:
                keep_target_logit(rows, logits, columns, row, column)
        return num_stored


class GradientSm90(GradientEntry, GemmSm90):
    """See ``log_prob_gradient`` in kernel.py."""

    def __init__(self, weight_major: str, has_dentropy: bool, config: GemmConfig):
        GemmSm90.__init__(self, None, "k", weight_major, False, False, True, config)
        self.has_dentropy = has_dentropy

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        tCcD: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        thread: Int32,
        turn: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        for r in cutlass.range_constexpr(rows_of(sums)):
            logits, columns, row = row_of(sums, tCcD, r, m * self.tile[0], n * self.tile[1])
            differentiate(logits, columns, row, rows, self.has_dentropy)
            for i in cutlass.range_constexpr(cute.size(logits)):
                sums[(i % 2, r % 2, i // 2), r // 2, 0] = logits[i]
        return GemmSm90.finish(self, sums, tCcD, out, m, n, thread, turn, num_stored, rows)


def rows_of(sums: cute.Tensor) -> int:
    """How many rows of a tile a thread has a part of."""
    return 2 * sums.shape[1]


@cute.jit
def row_of(sums: cute.Tensor, coordinates: cute.Tensor, r: cutlass.Constexpr[int], first_m: Int32, first_n: Int32):
    """(logits, their columns, the row) of the ``r``-th row of a thread's sums, of a tile that begins at (M, N).

    Sums of an instruction are ((2 columns, 2 rows 8 apart, columns / 8), instructions along M, along N).
    """
    count = const_expr(cute.size(sums) // rows_of(sums))
    logits = cute.make_rmem_tensor((count,), Float32)
    columns = cute.make_rmem_tensor((count,), Int32)
    for i in cutlass.range_constexpr(count):
        at = (i % 2, r % 2, i // 2), r // 2, 0
        logits[i] = sums[at]
        columns[i] = first_n + coordinates[at][1]
    return logits, columns, first_m + coordinates[(0, r % 2, 0), r // 2, 0][0]
