"""The arithmetic of a row of attention: the contract ``kv_grid``, word for word, for all kernels of the family.

A thread holds two rows of a block of scores, as the accumulators of a warpgroup MMA lay them out: element i is of row
(i // 2) % 2 and of column 8 (i // 4) + 2 (lane % 4) + i % 2. Four lanes share a row.

Every step outside of the products is one named operation (mul.rn, add.rn, fma.rn, ex2.approx.ftz, rcp.approx.ftz,
lg2.approx.ftz). The compiler makes one operation or two of an unnamed x * y + z, as it likes, and not the same in two
kernels. No other module of the family computes with scores, sums or outputs.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.math import RoundingMode
from cutlass.cutlass_dsl import select_

from cute_kernels.attention.config import LOG2E, THRESHOLD

ROWS = 2  # of a thread
QUAD = 4  # lanes that share a row
LN2 = math.log(2.0)
NEAREST = RoundingMode.NEAREST_EVEN


def add(a: Float32, b: Float32) -> Float32:
    return cute.math.add(a, b, rounding=NEAREST)


def multiply(a: Float32, b: Float32) -> Float32:
    return cute.math.mul(a, b, rounding=NEAREST)


def multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.math.fma(a, b, c, rounding=NEAREST)


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def log2(x: Float32) -> Float32:
    return cute.math.log2(x, fastmath=True)


def tanh(x: Float32) -> Float32:
    return cute.math.tanh(x, fastmath=True)


def choose(condition: Boolean, a: Float32, b: Float32) -> Float32:
    """``a`` where the condition holds, else ``b``; never by arithmetic."""
    return Float32(select_(condition, a, b))


def infinity() -> Float32:
    return Float32(math.inf)


def row_of(element: int) -> int:
    """Which of a thread's rows an element is of."""
    return element // 2 % 2


def column_of(element: int) -> int:
    """An element's column, from the first one of its lane on."""
    return element // 4 * 8 + element % 2


def first_column(lane: Int32) -> Int32:
    return lane % QUAD * 2


def per_row() -> cute.Tensor:
    """A value of each of the thread's rows."""
    return cute.make_rmem_tensor((ROWS,), Float32)


def reset(maximum: cute.Tensor, total: cute.Tensor):
    """The state of rows that have seen nothing."""
    maximum.fill(-math.inf)
    total.fill(0.0)


def cap(scores: cute.Tensor, before_tanh: Float32):
    """Softcap: scores become their tanh; what they are a part of, softcap, is in the scale that follows."""
    for i in range(cute.size(scores)):
        scores[i] = tanh(multiply(scores[i], before_tanh))


@cute.jit
def hide(scores: cute.Tensor, last: tuple | None, first: tuple | None = None):
    """Scores of invisible keys become -inf. ``first``, ``last``: of each row, visible columns from its lane's first.

    None: no key of the block is beyond.
    """
    for i in cutlass.range_constexpr(cute.size(scores)):
        row, column = row_of(i), column_of(i)
        if cutlass.const_expr(last is None):
            seen = first[row] <= column
        else:
            seen = last[row] >= column
            if cutlass.const_expr(first is not None):
                seen = seen & (first[row] <= column)
        scores[i] = choose(seen, scores[i], -infinity())


def row_maximum(scores: cute.Tensor, row: int) -> Float32:
    """The maximum of a row of the block, the same in its four lanes; NaN is dropped."""
    first, *values = [scores[i] for i in range(cute.size(scores)) if row_of(i) == row]
    chains = [first, values.pop()]  # exact in any order; a tree takes registers that are not there
    for i, value in enumerate(values):
        chains[i % 2] = cute.arch.fmax(chains[i % 2], value)
    found = cute.arch.fmax(*chains)
    for offset in (1, 2):
        found = cute.arch.fmax(found, cute.arch.shuffle_sync_bfly(found, offset=offset))
    return found


def move_maximum(old: Float32, new: Float32, score_scale: Float32) -> tuple:
    """A row's m from ``old`` and a block's maximum: (m, what its sums are multiplied with, whether m moves)."""
    empty = old == -infinity()
    moves = empty | (multiply(add(new, -old), score_scale) > Float32(THRESHOLD))
    factor = choose(empty, Float32(0.0), exp2(multiply(add(old, -new), score_scale)))
    return choose(moves, new, old), choose(moves, factor, Float32(1.0)), moves


def shift_of(maximum: Float32, score_scale: Float32) -> Float32:
    """The addend of a scaled score before its exponential: -m, scaled, or 0 while a row has seen nothing."""
    return -multiply(choose(maximum == -infinity(), Float32(0.0), maximum), score_scale)


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    maximum: cute.Tensor,
    total: cute.Tensor,
    rescale: cute.Tensor,
    score_scale: Float32,
    rows: cutlass.Constexpr[int] = ROWS,
):
    """Scores of a block become p, ``maximum`` and ``total`` (of this lane's columns) follow; ``rows``: that there are.

    ``rescale`` is what O is to be multiplied with before the block's product is added, 1 where a row's maximum stays.
    Returns whether a row's moved.
    """
    moved, shift = Boolean(False), []
    for row in cutlass.range_constexpr(rows):
        maximum[row], rescale[row], moves = move_maximum(maximum[row], row_maximum(scores, row), score_scale)
        total[row] = multiply(total[row], rescale[row])
        shift.append(shift_of(maximum[row], score_scale))
        moved = moves if row == 0 else moved | moves
    for i in cutlass.range_constexpr(cute.size(scores)):  # columns ascending
        row = row_of(i)
        if cutlass.const_expr(row < rows):
            scores[i] = exp2(multiply_add(scores[i], score_scale, shift[row]))
            total[row] = add(total[row], scores[i])
    return moved


def rescale_element(output: Float32, factor: Float32) -> Float32:
    return multiply(output, factor)


def quad_sum(total: Float32) -> Float32:
    """(l_0 + l_1) + (l_2 + l_3) of the four lanes of a row."""
    for offset in (1, 2):
        total = add(total, cute.arch.shuffle_sync_bfly(total, offset=offset))
    return total


def merge_factors(merged_maximum: Float32, maximum: Float32, score_scale: Float32) -> tuple:
    """A split's m into M. Returns M, and what L and A, and what l and O are multiplied with."""
    after = cute.arch.fmax(merged_maximum, maximum)
    empty = after == -infinity()
    a = choose(empty, Float32(1.0), exp2(multiply(add(merged_maximum, -after), score_scale)))
    b = choose(empty, Float32(0.0), exp2(multiply(add(maximum, -after), score_scale)))
    return after, a, b


def merge_row(
    merged_maximum: Float32, merged_total: Float32, maximum: Float32, total: Float32, score_scale: Float32
) -> tuple:
    """A split's (m, l), l of the whole row, into (M, L). Returns those, and what A and what O are multiplied with."""
    after, a, b = merge_factors(merged_maximum, maximum, score_scale)
    return after, merge_element(merged_total, a, total, b), a, b


def maxima_before(merged_maximum: Float32, maximum: Float32, lane: Int32, lanes: int) -> tuple:
    """(M before a lane's split, M after all) where each of the first lanes has the m of a split, in their order.

    A maximum is the same in any order; NaN is dropped.
    """
    found = cute.arch.fmax(merged_maximum, maximum)
    offset = 1
    while offset < lanes:
        other = cute.arch.shuffle_sync_up(found, offset=offset, mask_and_clamp=0)
        found = choose(lane >= offset, cute.arch.fmax(found, other), found)
        offset *= 2
    before = cute.arch.shuffle_sync_up(found, offset=1, mask_and_clamp=0)
    return choose(lane == 0, merged_maximum, before), cute.arch.shuffle_sync(found, offset=lanes - 1)


@cute.jit
def merge_rows(
    merged_maximum: cute.Tensor,
    merged_total: cute.Tensor,
    maximum: cute.Tensor,
    total: cute.Tensor,
    score_scale: Float32,
):
    """A split's (m, l), l of the whole row, into (M, L). Returns what A and what O are multiplied with, by row."""
    of_merged, of_split = [], []
    for row in cutlass.range_constexpr(ROWS):
        found = merge_row(merged_maximum[row], merged_total[row], maximum[row], total[row], score_scale)
        merged_maximum[row], merged_total[row], a, b = found
        of_merged.append(a)
        of_split.append(b)
    return tuple(of_merged), tuple(of_split)


def merge_element(
    merged: Float32, of_merged: Float32, output: Float32, of_split: Float32, exists: Boolean | None = None
) -> Float32:
    """A split's O into A, or its l into L; A as it is if there is no such split."""
    found = multiply_add(merged, of_merged, multiply(output, of_split))
    return found if exists is None else choose(exists, found, merged)


def finish_row(maximum: Float32, total: Float32, score_scale: Float32, sink: Float32 | None = None) -> tuple:
    """(Whether the row has seen no key, 1 / L, its logsumexp); ``sink``: one more logit, which has no value."""
    empty = total == Float32(0.0)
    shift = multiply(maximum, score_scale)
    if sink is None:
        found = multiply_add(shift, Float32(LN2), multiply(log2(total), Float32(LN2)))
        return empty, cute.arch.rcp_approx(total), choose(empty, -infinity(), found)
    # Sums are relative to the sink where it is above the maximum: its exponential may overflow
    excess = multiply_add(sink, Float32(LOG2E), -shift)
    above = excess > Float32(0.0)
    factor = choose(above, exp2(-excess), Float32(1.0))
    total = multiply_add(total, factor, choose(above, Float32(1.0), exp2(excess)))
    of_total = multiply(log2(total), Float32(LN2))
    found = choose(above, add(sink, of_total), multiply_add(shift, Float32(LN2), of_total))
    return empty, multiply(factor, cute.arch.rcp_approx(total)), choose(empty, sink, found)


def finish_element(merged: Float32, empty: Boolean, reciprocal: Float32) -> Float32:
    return choose(empty, Float32(0.0), multiply_add(merged, reciprocal, Float32(0.0)))
