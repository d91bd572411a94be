"""The arithmetic of a row of attention on SM100, where a thread holds a whole row of a block of scores.

The contract is kernel_row.py's, with another order of the row sum: l_0 has the even columns, l_1 the odd ones, each
ascending, and the row's sum is l_0 + l_1. Two columns are one operation on a pair of numbers, which rounds each of them
as the single operation does.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.attention.config import THRESHOLD
from cute_kernels.attention.kernel_row import add, choose, exp2, infinity, multiply, multiply_add

CHAINS = 2  # sums of a row


def reset(maximum: cute.Tensor, total: cute.Tensor):
    """The state of a row that has seen nothing."""
    maximum[0] = -infinity()
    total.fill(0.0)


def hide(scores: cute.Tensor, last: Int32, first: Int32 | None = None):
    """Scores of invisible keys become -inf; ``first``, ``last``: visible columns."""
    for i in range(cute.size(scores)):
        seen = last >= i
        if first is not None:
            seen = seen & (first <= i)
        scores[i] = choose(seen, scores[i], -infinity())


def row_maximum(scores: cute.Tensor) -> Float32:
    """The maximum of the row's block; NaN is dropped."""
    chains = [scores[i] for i in range(CHAINS)]  # exact in any order
    for i in range(CHAINS, cute.size(scores)):
        chains[i % CHAINS] = cute.arch.fmax(chains[i % CHAINS], scores[i])
    return cute.arch.fmax(*chains)


def move_maximum(scores: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, score_scale: Float32) -> Float32:
    """``maximum`` and ``total`` follow the scores of a block. Returns what O is to be multiplied with."""
    old, new = maximum[0], row_maximum(scores)
    empty = old == -infinity()
    moves = empty | (multiply(add(new, -old), score_scale) > Float32(THRESHOLD))
    factor = choose(empty, Float32(0.0), exp2(multiply(add(old, -new), score_scale)))
    factor = choose(moves, factor, Float32(1.0))
    maximum[0] = choose(moves, new, old)
    for i in range(CHAINS):
        total[i] = multiply(total[i], factor)
    return factor


def weigh(scores: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, score_scale: Float32):
    """Scores become p, and are added to ``total``."""
    zeroed = choose(maximum[0] == -infinity(), Float32(0.0), maximum[0])
    shift = -multiply(zeroed, score_scale)
    for i in range(0, cute.size(scores), CHAINS):
        pair = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), (score_scale, score_scale), (shift, shift))
        scores[i], scores[i + 1] = exp2(pair[0]), exp2(pair[1])
        total[0], total[1] = cute.arch.add_packed_f32x2((total[0], total[1]), (scores[i], scores[i + 1]))


def row_sum(total: cute.Tensor) -> Float32:
    return add(total[0], total[1])


def merge_row(merged: cute.Tensor, maximum: Float32, total: Float32, score_scale: Float32):
    """A split's (m, l) into ``merged``, (M, L). Returns what A and what O are multiplied with."""
    before = merged[0]
    after = cute.arch.fmax(before, maximum)
    empty = after == -infinity()
    a = choose(empty, Float32(1.0), exp2(multiply(add(before, -after), score_scale)))
    b = choose(empty, Float32(0.0), exp2(multiply(add(maximum, -after), score_scale)))
    merged[0], merged[1] = after, multiply_add(merged[1], a, multiply(total, b))
    return a, b
