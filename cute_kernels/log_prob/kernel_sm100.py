"""linear_log_prob on SM100: the product of common/gemm_sm100.py, whose sums are logits and do not leave the SM as such.

A thread has a row of a tile, and adds its columns one after the other. Compiled and inspected only: no SM100 has run it
yet.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.gemm_sm100 import GemmSm100
from cute_kernels.log_prob.config import vocabulary_tile
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


class StatisticsSm100(StatisticsEntry, GemmSm100):
    """See ``log_prob_statistics`` in kernel.py."""

    def __init__(self, weight_major: str, keeps_logits: bool, config: GemmConfig):
        GemmSm100.__init__(self, None, "k", weight_major, False, False, keeps_logits, config)

    def part(self) -> tuple[int, int]:
        """The rows and columns of one pass of statistics; with 128 columns a thread would spill 350 bytes.

        A part of halves that TMA stores is as wide.
        """
        return self.tile[0], vocabulary_tile("sm_100a")

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        coordinates: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        p: Int32,
        thread: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        target, _, _, scale, slope = rows
        vocabulary = out[-2].shape[1]  # of where logits lie, or would
        if const_expr(self.tma_store):
            num_stored = GemmSm100.finish(self, sums, coordinates, out, m, n, p, thread, num_stored, rows)
        if const_expr(slope is not None):
            cap(sums, slope)
        width = self.part()[1]
        tile = n * (self.tile[1] // width) + p
        columns, row = columns_of(coordinates, tile * width), m * self.tile[0] + coordinates[0][0]
        if (tile + 1) * width > vocabulary:
            for i in cutlass.range_constexpr(cute.size(sums)):
                if columns[i] >= vocabulary:
                    sums[i] = -Float32.inf
        largest = largest_of(sums)
        total, moment = sums_of(sums, scale, largest)
        keep_statistics(rows, row, tile, largest, total, moment)
        column = target_column(target, row, vocabulary)
        if column >= tile * width and column < (tile + 1) * width:
            keep_target_logit(rows, sums, columns, row, column)
        return num_stored


class GradientSm100(GradientEntry, GemmSm100):
    """See ``log_prob_gradient`` in kernel.py."""

    def __init__(self, weight_major: str, has_dentropy: bool, config: GemmConfig):
        GemmSm100.__init__(self, None, "k", weight_major, False, False, True, config)
        self.has_dentropy = has_dentropy

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        coordinates: cute.Tensor,
        out: tuple,
        m: Int32,
        n: Int32,
        p: Int32,
        thread: Int32,
        num_stored: Int32,
        rows: tuple,
    ):
        columns = columns_of(coordinates, n * self.tile[1] + p * self.part()[1])
        differentiate(sums, columns, m * self.tile[0] + coordinates[0][0], rows, self.has_dentropy)
        return GemmSm100.finish(self, sums, coordinates, out, m, n, p, thread, num_stored, rows)


@cute.jit
def columns_of(coordinates: cute.Tensor, first: Int32):
    """The columns of a thread's sums, of which all are of one row; those of ``coordinates`` begin at ``first``."""
    columns = cute.make_rmem_tensor((cute.size(coordinates),), Int32)
    for i in cutlass.range_constexpr(cute.size(coordinates)):
        columns[i] = first + coordinates[i][1]
    return columns
