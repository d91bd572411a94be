"""The arithmetic of a row of attention on SM100, where a thread holds a whole row of a block of scores.

The contract is kernel_row.py's, with another order of the row sum: l_0 has the even columns, l_1 the odd ones, each
ascending, and the row's sum is l_0 + l_1. Two columns are one operation on a pair of numbers, which rounds each of them
as the single operation does.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.attention.kernel_row import add, choose, exp2, infinity, move_maximum, multiply, shift_of

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


def follow(scores: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, score_scale: Float32) -> Float32:
    """``maximum`` and ``total`` follow the scores of a block. Returns what O is to be multiplied with."""
    maximum[0], factor, _ = move_maximum(maximum[0], row_maximum(scores), score_scale)
    for i in range(CHAINS):
        total[i] = multiply(total[i], factor)
    return factor


def weigh(scores: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, score_scale: Float32):
    """Scores of the next columns become p, and are added to ``total``."""
    shift = shift_of(maximum[0], score_scale)
    for i in range(0, cute.size(scores), CHAINS):
        pair = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), (score_scale, score_scale), (shift, shift))
        scores[i], scores[i + 1] = exp2(pair[0]), exp2(pair[1])
        total[0], total[1] = cute.arch.add_packed_f32x2((total[0], total[1]), (scores[i], scores[i + 1]))


def row_sum(total: cute.Tensor) -> Float32:
    """l_0 + l_1"""
    return add(total[0], total[1])
