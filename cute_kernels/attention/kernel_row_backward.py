"""The arithmetic of a row of attention's backward: the contract ``kv_grid`` of dq, dk and dv, for all kernels.

Scores lie across: a thread holds two rows, of keys, of a block whose columns are queries. The backward's kernels
compute with scores, sums and gradients nowhere else, each step outside of the products one named operation, as
``kernel_row`` has them. Sums of dq, and of the heads of a group, are added in global memory, where what
is subnormal counts as 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_kernels.attention.config import LOG2E
from cute_kernels.attention.kernel_row import add, choose, column_of, exp2, infinity, multiply, multiply_add, row_of


@cute.jit
def hide_queries(scores: cute.Tensor, first: tuple, last: tuple | None = None):
    """Scores of queries that do not see a key become -inf. ``first``, ``last``: of each row, those that do, as columns
    counted from its lane's first.
    """
    for i in cutlass.range_constexpr(cute.size(scores)):
        row, column = row_of(i), column_of(i)
        seen = first[row] <= column
        if cutlass.const_expr(last is not None):
            seen = seen & (last[row] >= column)
        scores[i] = choose(seen, scores[i], -infinity())


def weight(score: Float32, score_scale: Float32, row_lse: Float32) -> Float32:
    """p of a score, from its row's logsumexp in powers of two."""
    return exp2(multiply_add(score, score_scale, -row_lse))


def through_tanh(p: Float32, capped: Float32) -> Float32:
    """p times the derivative of a softcap at what its tanh gave; 0 where the score is hidden."""
    derivative = multiply_add(-capped, capped, Float32(1.0))
    return choose(capped == -infinity(), Float32(0.0), multiply(p, derivative))


def score_gradient(p: Float32, dp: Float32, delta: Float32) -> Float32:
    return multiply(p, add(dp, -delta))


def row_lse_of(lse: Float32, exists: Boolean) -> Float32:
    """A row's logsumexp in powers of two; infinite, so that p is 0, where a row sees nothing or does not exist."""
    return choose(exists & (lse != -infinity()), multiply(lse, Float32(LOG2E)), infinity())


def dot(a: cute.Tensor, b: cute.Tensor) -> Float32:
    """The sum of a lane's products, ascending."""
    total = Float32(0.0)
    for i in range(cute.size(a)):
        total = multiply_add(a[i], b[i], total)
    return total


def lanes_sum(total: Float32, lanes: int) -> Float32:
    """The sum over a row's lanes, a power of two of them."""
    offset = 1
    while offset < lanes:
        total = add(total, cute.arch.shuffle_sync_bfly(total, offset=offset))
        offset *= 2
    return total


def less(a: Float32, b: Float32) -> Float32:
    return add(a, -b)


def scaled(total: Float32, scale: Float32) -> Float32:
    return multiply(total, scale)


def scaled_and_flushed(total: Float32, scale: Float32) -> Float32:
    """``total * scale``, never -0. A subnormal total counts as 0, as where totals are added in global memory: whether
    a row's was added to or stored there is its tile's choice.
    """
    return cute.arch.inline_ptx(
        "fma.rn.ftz.f32 {$w0}, {$r0}, {$r1}, 0f00000000;", write_only_types=[Float32], read_only_args=[total, scale]
    )
