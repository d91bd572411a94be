"""What linear_log_prob does with logits in registers, on either architecture; exponentials are to the base of 2.

Where a product is added it is a fused multiply-add by name: what the compiler fuses by itself depends on what stands
around, and the kernels for few and for many tokens must agree bit by bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

MASKED = -1e20  # in place of logits beyond the last column: nothing after exp2, and no infinity to subtract
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


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
    """The largest of a fragment; a NaN among them shows in ``sums_of``."""
    largest = logits[0]
    for i in cutlass.range_constexpr(1, cute.size(logits)):
        largest = cute.arch.fmax(largest, logits[i])
    return largest


@cute.jit
def sums_of(logits: cute.Tensor, scale: Float32, base: Float32):
    """(sum of e, sum of e u) over a fragment, in its order; u = scale logit - base, e = 2^u."""
    total, moment = Float32(0.0), Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(logits)):
        u = cute.math.fma(logits[i], scale, -base)
        e = cute.math.exp2(u, fastmath=True)
        total = total + e
        moment = cute.math.fma(e, u, moment)
    return total, moment


@cute.jit
def keep_statistics(rows: tuple, row: Int32, tile: Int32, base: Float32, total: Float32, moment: Float32):
    """Store what a tile of columns holds of a row: its largest logit, and the two sums of ``sums_of``."""
    _, statistics, _, _ = rows
    if row < statistics.shape[2] and tile < statistics.shape[1]:
        statistics[0, tile, row] = base
        statistics[1, tile, row] = total
        statistics[2, tile, row] = moment


@cute.jit
def keep_target_logit(rows: tuple, logits: cute.Tensor, columns: cute.Tensor, row: Int32, column: Int32):
    """Store the logit of a row's target, if this thread has it; ``columns``: those of the fragment."""
    _, _, target_logit, scale = rows
    if row < target_logit.shape[0]:
        for i in cutlass.range_constexpr(cute.size(logits)):
            if columns[i] == column:
                target_logit[row] = logits[i] * scale


@cute.jit
def differentiate(
    logits: cute.Tensor, columns: cute.Tensor, row: Int32, rows: tuple, has_dentropy: cutlass.Constexpr[bool]
):
    """Replace a fragment of one row's logits by their gradients; ``columns``: those among the logits at hand.

    With g and h, the gradients of the log-probability and of the entropy H:
    d logit_j = (g (j is the target) - p_j (g + h (ln p_j + H))) / temperature, and ln p = u ln 2, linear in u;
    0 where there is no target, whatever the logits are.
    """
    target, lse, entropy, g, h, ignore_index, vocabulary, first_column, scale, inverse_temperature = rows
    last = cutlass.min(row, target.shape[0] - 1)
    column = target_column(target, last, vocabulary)
    if target[last] == ignore_index:
        column = Int32(-1)
    of_target = g[last] * inverse_temperature
    constant, slope = -of_target, Float32(0.0)
    if const_expr(has_dentropy):
        share = h[last] * inverse_temperature
        constant = -cute.math.fma(share, entropy[last], of_target)
        slope = share * -LN_2
    base = lse[last] * LOG2_E
    for i in cutlass.range_constexpr(cute.size(logits)):
        u = cute.math.fma(logits[i], scale, -base)
        p = cute.math.exp2(u, fastmath=True)
        factor = constant
        if const_expr(has_dentropy):
            factor = cute.math.fma(slope, u, constant)
        here = of_target if columns[i] + first_column == column else Float32(0.0)
        gradient = cute.math.fma(p, factor, here)
        logits[i] = gradient if column >= 0 else Float32(0.0)
