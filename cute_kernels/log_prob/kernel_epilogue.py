"""Parts of linear_log_prob's kernels on either architecture: entries, and the arithmetic on logits in registers.

Exponentials are to the base of 2, of differences to a largest logit. The scale comes after the difference, so that its
product is rounded where it is small. Where a product is added it is a fused multiply-add by name: what the compiler
fuses by itself depends on what stands around, and kernels for few and for many tokens must agree bit by bit.

A logit may be so low that its difference, or that times the scale, is -inf: its exponential is 0. Where an exponential
is multiplied by its exponent, the exponent is at least ``VANISHED``.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.common.gemm_epilogue import transpose

LN_2 = 0.6931471805599453
TWO_LOG2_E = 2.8853900817779268
LOWEST = -3.4028234663852886e38  # of fp32: a largest logit of -inf could be subtracted from none
# 2 to this power, as to all below, is 0 in fp32: times the power it is 0, where 0 times an infinity would be NaN
VANISHED = -200.0


class StatisticsEntry:
    """The entry of ``log_prob_statistics``, before a product's class among the bases."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        statistics: cute.Tensor,
        target_logit: cute.Tensor,
        logits: Optional[cute.Tensor],
        scale: Float32,
        slope: Optional[Float32],
        num_ctas: Int32,
        stream,
    ):
        self.dtype, self.out = x.element_type, Float32
        if const_expr(self.majors[1] == "n"):
            weight = transpose(weight)
        if const_expr(logits is not None):
            self.out = logits.element_type
        else:
            # Where the logits would lie: the walk over the tiles asks for its shape alone
            shape = cute.make_layout((x.shape[0], weight.shape[0]), stride=(0, 0))
            logits = cute.make_tensor(statistics.iterator, shape)
        rows = target, statistics, target_logit, scale, slope
        self.multiply(x, weight, logits, None, None, None, rows, num_ctas, stream)


class GradientEntry:
    """The entry of ``log_prob_gradient``, before a product's class among the bases."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        row_statistics: cute.Tensor,
        dlog_prob: cute.Tensor,
        dentropy: cute.Tensor,
        dlogits: cute.Tensor,
        ignore_index: Int64,
        vocabulary: Int32,
        first_column: Int32,
        scale: Float32,
        inverse_temperature: Float32,
        slope: Optional[Float32],
        num_ctas: Int32,
        stream,
    ):
        self.dtype, self.out = x.element_type, dlogits.element_type
        if const_expr(self.majors[1] == "n"):
            weight = transpose(weight)
        of_targets = ignore_index, vocabulary, first_column
        rows = target, row_statistics, dlog_prob, dentropy, *of_targets, scale, inverse_temperature, slope
        self.multiply(x, weight, dlogits, None, None, None, rows, num_ctas, stream)


@cute.jit
def target_column(target: cute.Tensor, row: Int32, vocabulary: Int32) -> Int32:
    """The column that a row's target names; -1 where there is none."""
    value = target[cutlass.min(row, target.shape[0] - 1)]
    column = Int32(-1)
    if value >= 0 and value < vocabulary:
        column = Int32(value)
    return column


@cute.jit
def largest_of(logits: cute.Tensor) -> Float32:
    """The largest of a fragment, at least ``LOWEST``; a NaN among them shows in ``sums_of``."""
    largest = Float32(LOWEST)
    for i in cutlass.range_constexpr(cute.size(logits)):
        largest = cute.arch.fmax(largest, logits[i])
    return largest


@cute.jit
def cap(logits: cute.Tensor, slope: Float32):
    """Replace logits by tanh(slope logit) = 1 - 2 / (e^(2 slope logit) + 1), off by some 2^-22 at most; -1 for -inf.

    The hardware's own tanh is off by 2^-11.
    """
    for i in cutlass.range_constexpr(cute.size(logits)):
        power = cute.math.exp2(logits[i] * (slope * TWO_LOG2_E), fastmath=True)
        logits[i] = cute.math.fma(cute.arch.rcp_approx(power + 1.0), -2.0, 1.0)


@cute.jit
def bounded(u: Float32) -> Float32:
    """An exponent of 2 as a factor of its own power: finite unless it is +inf; the power of a NaN is a NaN already."""
    return cute.arch.fmax(u, VANISHED)


@cute.jit
def sums_of(logits: cute.Tensor, scale: Float32, largest: Float32):
    """(sum of e, sum of e u) over a fragment, in its order; u = scale (logit - largest), e = 2^u."""
    total, moment = Float32(0.0), Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(logits)):
        u = (logits[i] - largest) * scale
        e = cute.math.exp2(u, fastmath=True)
        total = total + e
        moment = cute.math.fma(e, bounded(u), moment)
    return total, moment


@cute.jit
def keep_statistics(rows: tuple, row: Int32, tile: Int32, largest: Float32, total: Float32, moment: Float32):
    """Store what a tile of columns holds of a row: its largest logit, and the two sums of ``sums_of``."""
    _, statistics, _, _, _ = rows
    if row < statistics.shape[2] and tile < statistics.shape[1]:
        statistics[0, tile, row] = largest
        statistics[1, tile, row] = total
        statistics[2, tile, row] = moment


@cute.jit
def keep_target_logit(rows: tuple, logits: cute.Tensor, columns: cute.Tensor, row: Int32, column: Int32):
    """Store the logit of a row's target, if this thread has it; ``columns``: those of the fragment."""
    _, _, target_logit, _, _ = rows
    if row < target_logit.shape[0]:
        for i in cutlass.range_constexpr(cute.size(logits)):
            if columns[i] == column:
                target_logit[row] = logits[i]


@cute.jit
def differentiate(
    logits: cute.Tensor, columns: cute.Tensor, row: Int32, rows: tuple, has_dentropy: cutlass.Constexpr[bool]
):
    """Replace a fragment of one row's logits by their gradients; ``columns``: those among the logits at hand.

    With g and h, the gradients of the log-probability and of the entropy H:
    d logit_j = (g (j is the target) - p_j (g + h (ln p_j + H))) / temperature, and ln p = u ln 2, linear in u;
    0 where there is no target, whatever the logits are. Under a softcap z = tanh(slope logit) takes the logit's place
    in all this, and its derivative 1 - z^2 is a factor.
    """
    target, row_statistics, g, h, ignore_index, vocabulary, first_column, scale, inverse_temperature, slope = rows
    last = cutlass.min(row, target.shape[0] - 1)
    column = target_column(target, last, vocabulary)
    if target[last] == ignore_index:
        column = Int32(-1)
    largest, log2_total = row_statistics[last, 0], row_statistics[last, 1]
    of_target = g[last] * inverse_temperature
    constant, of_exponent = -of_target, Float32(0.0)
    if const_expr(has_dentropy):
        share = h[last] * inverse_temperature
        constant = -cute.math.fma(share, row_statistics[last, 2], of_target)
        of_exponent = share * -LN_2
    if const_expr(slope is not None):
        cap(logits, slope)
    for i in cutlass.range_constexpr(cute.size(logits)):
        u = cute.math.fma(logits[i] - largest, scale, -log2_total)
        p = cute.math.exp2(u, fastmath=True)
        factor = constant
        if const_expr(has_dentropy):
            factor = cute.math.fma(of_exponent, bounded(u), constant)
        here = of_target if columns[i] + first_column == column else Float32(0.0)
        gradient = cute.math.fma(p, factor, here)
        if const_expr(slope is not None):
            gradient = gradient * cute.math.fma(-logits[i], logits[i], 1.0)
        logits[i] = gradient if column >= 0 else Float32(0.0)
