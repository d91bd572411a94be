"""From a token's projection to the coefficients of its mixture, and back: 32 tokens a CTA, one thread a token.

    h = alpha H / rms + beta;   pre = sigmoid(h) + pre_eps,   post = post_mult sigmoid(h),   res = Sinkhorn(h) or h

Forward: all threads add the partial sums of H that the projection left, in ascending order, into shared memory; then a
warp computes. Backward: sums over tokens (dalpha, dbeta) leave a partial row for every 32 tokens, which a dependent
launch adds in a fixed order.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.column_sums import SumRows
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import CoefficientsBackwardSpec, CoefficientsSpec, coefficient_threads
from cute_kernels.mhc.kernel.sinkhorn import LOG2_E, Sinkhorn, exp2
from cute_kernels.mhc.kernel.streams import WARP_SIZE, load_coefficients, symbolic_streams, warp_sums
from cute_kernels.mhc.variants import Constants
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
TOKENS = WARP_SIZE  # of a CTA


class Coefficients:
    """The arithmetic of one token. ``head``: there is only pre."""

    def __init__(self, n: int, constants: Constants, head: bool):
        self.n = n
        self.constants = constants
        self.head = head
        self.columns = n if head else n * n + 2 * n
        self.groups = [0] * n if head else [0] * n + [1] * n + [2] * n * n  # which alpha a column has
        self.sinkhorn = Sinkhorn(n, constants.sinkhorn, constants.iterations, constants.sinkhorn_eps)

    @cute.jit
    def inverse_rms(self, mean_square: Float32):
        """1 / rms, with eps as the variant has it."""
        if const_expr(self.constants.rms_eps_placement == "inside"):
            inverse = 1.0 / cute.math.sqrt(mean_square + self.constants.rms_eps)
        else:
            inverse = 1.0 / (cute.math.sqrt(mean_square) + self.constants.rms_eps)
        return inverse

    @cute.jit
    def linear(self, h: cute.Tensor, inverse: Float32, alpha: cute.Tensor, beta: cute.Tensor):
        """alpha H / rms + beta of all columns."""
        values = cute.make_rmem_tensor((self.columns,), Float32)
        for j in cutlass.range_constexpr(self.columns):
            values[j] = alpha[self.groups[j]].to(Float32) * (h[j] * inverse) + beta[j].to(Float32)
        return values


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return cute.arch.rcp_approx(1.0 + exp2(-x * LOG2_E))


class CoefficientsForward:
    """See the module. With ``partials`` H and mean_square are results (or None), without they are what is given.

    ``constants`` None: H and mean_square are all that is wanted. ``has_sinkhorn``: res is what Sinkhorn makes of h.
    """

    def __init__(self, n: int, k: int, splits: int, constants: Optional[Constants], head: bool, has_sinkhorn: bool):
        self.threads = coefficient_threads(splits)
        self.columns = n if head else n * n + 2 * n
        self.k = k
        self.math = None if constants is None else Coefficients(n, constants, head)
        self.has_sinkhorn = has_sinkhorn

    @cute.jit
    def __call__(
        self,
        partials: Optional[cute.Tensor],
        h: Optional[cute.Tensor],
        mean_square: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        beta: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        post: Optional[cute.Tensor],
        res: Optional[cute.Tensor],
        num_tokens: Int32,
        stream,
    ):
        self.kernel(partials, h, mean_square, alpha, beta, pre, post, res, num_tokens).launch(
            grid=[cute.ceil_div(num_tokens, TOKENS), 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        partials: Optional[cute.Tensor],
        h: Optional[cute.Tensor],
        mean_square: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        beta: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        post: Optional[cute.Tensor],
        res: Optional[cute.Tensor],
        num_tokens: Int32,
    ):
        cute.arch.griddepcontrol_wait()
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        columns = const_expr(self.columns)
        smem = SmemAllocator()
        sH = smem.allocate_tensor(Float32, cute.make_layout((TOKENS, columns + 1), stride=(columns + 1, 1)))
        first_row = bidx * TOKENS
        if const_expr(partials is not None):
            self.sum_parts(partials, sH, first_row, tidx)
            cute.arch.barrier()
            if tidx < TOKENS and first_row + tidx < num_tokens:
                sH[tidx, columns] = sH[tidx, columns] / Float32(self.k)
                if const_expr(mean_square is not None):
                    mean_square[first_row + tidx] = sH[tidx, columns]
        else:
            if tidx < TOKENS and first_row + tidx < num_tokens:
                sH[tidx, columns] = mean_square[first_row + tidx]
        if const_expr(h is not None):
            # Rows of H as they lie in memory: a token a lane would write 4 bytes of as many sectors
            for index in cutlass.range(tidx, TOKENS * columns, self.threads, unroll=4):
                token, column = index // columns, index % columns
                if first_row + token < num_tokens:
                    if const_expr(partials is not None):
                        h[first_row + token, column] = sH[token, column]
                    else:
                        sH[token, column] = h[first_row + token, column]
        if const_expr(self.math is not None):
            cute.arch.barrier()
            row = first_row + tidx
            if tidx < TOKENS and row < num_tokens:
                self.token(sH[tidx, None], alpha, beta, pre, post, res, row)

    @cute.jit
    def sum_parts(self, partials: cute.Tensor, sH: cute.Tensor, first_row: Int32, tidx: Int32):
        """A CTA's sums, in ascending order of the parts of K; up to 8 parts of all of a thread's sums in flight."""
        splits, warps = const_expr(partials.shape[0]), const_expr(self.threads // TOKENS)
        rounds = const_expr(-(-(self.columns + 1) // warps))
        token = tidx % TOKENS
        totals = cute.make_rmem_tensor((rounds,), Float32)
        totals.fill(0.0)
        if first_row + token < partials.shape[2]:
            for first in cutlass.range(0, splits, min(8, splits)):
                parts = cute.make_rmem_tensor((rounds, min(8, splits)), Float32)
                for r in cutlass.range_constexpr(rounds):
                    column = r * warps + tidx // TOKENS
                    if column <= self.columns:
                        for split in cutlass.range_constexpr(parts.shape[1]):
                            parts[r, split] = partials[first + split, column, first_row + token]
                for r in cutlass.range_constexpr(rounds):
                    for split in cutlass.range_constexpr(parts.shape[1]):
                        totals[r] = totals[r] + parts[r, split]
            for r in cutlass.range_constexpr(rounds):
                column = r * warps + tidx // TOKENS
                if column <= self.columns:
                    sH[token, column] = totals[r]

    @cute.jit
    def token(self, h: cute.Tensor, alpha, beta, pre, post, res, row: Int32):
        """The coefficients of one token, from shared memory to global memory."""
        math = self.math
        n = const_expr(math.n)
        values = math.linear(h, math.inverse_rms(h[self.columns]), alpha, beta)
        gates = cute.make_rmem_tensor((n,), Float32)
        for i in cutlass.range_constexpr(n):
            gates[i] = sigmoid(values[i]) + math.constants.pre_eps
        cute.autovec_copy(gates, pre[row, None])
        if const_expr(not math.head):
            for i in cutlass.range_constexpr(n):
                gates[i] = math.constants.post_mult * sigmoid(values[n + i])
            cute.autovec_copy(gates, post[row, None])
            logits = cute.make_rmem_tensor((n * n,), Float32)
            for j in cutlass.range_constexpr(n * n):
                logits[j] = values[2 * n + j]
            if const_expr(self.has_sinkhorn):
                p = cute.make_rmem_tensor((n * n,), Float32)
                math.sinkhorn.forward(logits, p)
                logits = p
            cute.autovec_copy(logits, res[row, None])


class CoefficientsBackward:
    """dH, dmean_square, dalpha and dbeta from the gradients of pre, post and res (None: zero).

    Rows of H, dpre, dpost and dres start on ``aligns``.
    """

    def __init__(
        self,
        n: int,
        constants: Constants,
        head: bool,
        has_sinkhorn: bool,
        accumulate: tuple[bool, bool],
        aligns: tuple[int, int, int, int],
    ):
        self.math = Coefficients(n, constants, head)
        self.has_sinkhorn = has_sinkhorn
        self.aligns = aligns
        self.sum_rows = SumRows(accumulate)

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        mean_square: cute.Tensor,
        alpha: cute.Tensor,
        beta: cute.Tensor,
        dpre: Optional[cute.Tensor],
        dpost: Optional[cute.Tensor],
        dres: Optional[cute.Tensor],
        dh: cute.Tensor,
        dmean_square: cute.Tensor,
        partials: Optional[cute.Tensor],
        dbeta: Optional[cute.Tensor],
        dalpha: Optional[cute.Tensor],
        stream,
    ):
        chunks = cute.ceil_div(h.shape[0], TOKENS)
        self.kernel(h, mean_square, alpha, beta, dpre, dpost, dres, dh, dmean_square, partials).launch(
            grid=[chunks, 1, 1], block=[TOKENS, 1, 1], stream=stream, use_pdl=True
        )
        if const_expr(dbeta is not None or dalpha is not None):
            self.sum_rows.launch(partials, dbeta, dalpha, chunks, stream)

    @cute.kernel
    def kernel(
        self,
        h: cute.Tensor,
        mean_square: cute.Tensor,
        alpha: cute.Tensor,
        beta: cute.Tensor,
        dpre: Optional[cute.Tensor],
        dpost: Optional[cute.Tensor],
        dres: Optional[cute.Tensor],
        dh: cute.Tensor,
        dmean_square: cute.Tensor,
        partials: Optional[cute.Tensor],
    ):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # a few warps that wait a lot: the next kernel begins beside them
        n, columns = const_expr(self.math.n), const_expr(self.math.columns)
        lane, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row = bidx * TOKENS + lane
        if const_expr(self.has_sinkhorn):
            history, (logits, p, dp) = self.math.sinkhorn.allocate(SmemAllocator(), lane)
        # Sums over the tokens: the gradients of h, then each times H / rms by group
        delta = cute.make_rmem_tensor((columns,), Float32)
        dalphas = cute.make_rmem_tensor((3,), Float32)
        delta.fill(0.0)
        dalphas.fill(0.0)
        if row < h.shape[0]:
            rH = load_coefficients(h, row, columns, self.aligns[0])
            square = mean_square[row]
            inverse = self.math.inverse_rms(square)
            values = self.math.linear(rH, inverse, alpha, beta)
            if const_expr(dpre is not None):
                gradient = load_coefficients(dpre, row, n, self.aligns[1])
                for i in cutlass.range_constexpr(n):
                    gate = sigmoid(values[i])
                    delta[i] = gradient[i] * (gate * (1.0 - gate))
            if const_expr(dpost is not None):
                gradient = load_coefficients(dpost, row, n, self.aligns[2])
                for i in cutlass.range_constexpr(n):
                    gate = sigmoid(values[n + i])
                    delta[n + i] = gradient[i] * (self.math.constants.post_mult * (gate * (1.0 - gate)))
            if const_expr(dres is not None):
                gradient = load_coefficients(dres, row, n * n, self.aligns[3])
                if const_expr(self.has_sinkhorn):
                    for j in cutlass.range_constexpr(n * n):
                        logits[j] = values[2 * n + j]
                        dp[j] = gradient[j]
                    self.math.sinkhorn.backward(logits, p, dp, history)
                    gradient = dp
                for j in cutlass.range_constexpr(n * n):
                    delta[2 * n + j] = gradient[j]
            dinverse = Float32(0.0)
            for j in cutlass.range_constexpr(columns):
                group = const_expr(self.math.groups[j])
                scaled = alpha[group].to(Float32) * delta[j]
                dalphas[group] = dalphas[group] + delta[j] * (rH[j] * inverse)
                dinverse = dinverse + scaled * rH[j]
                rH[j] = scaled * inverse
            cute.autovec_copy(rH, dh[row, None])
            # Factor by factor: with a tiny eps powers of 1 / rms overflow where the product does not
            slope = -0.5 * inverse * (inverse * dinverse)
            if const_expr(self.math.constants.rms_eps_placement == "inside"):
                dmean_square[row] = slope * inverse
            else:
                # A token of zeros has no gradient, as of a norm at 0
                dmean_square[row] = Float32(0.0) if square <= 0.0 else slope / cute.math.sqrt(square)
        if const_expr(partials is not None):
            sums = const_expr([*range(columns), *range(columns, columns + (1 if self.math.head else 3))])
            for first in cutlass.range_constexpr(0, len(sums), WARP_SIZE):
                count = const_expr(min(WARP_SIZE, len(sums) - first))
                total = warp_sums(
                    [delta[j] if j < columns else dalphas[j - columns] for j in range(first, first + count)]
                )
                if lane < count:
                    if first + lane < columns:
                        partials[0, bidx, first + lane] = total
                    else:
                        partials[1, bidx, first + lane - columns] = total


@compiled
def coefficients_forward(arch: str, spec: CoefficientsSpec) -> Program:
    """pre, post and res, and H and mean_square where it keeps them, from partial sums, or from those two."""
    rows, n, columns = cute.sym_int(), spec.n, spec.columns
    given, computes = spec.splits == 0, spec.constants is not None
    has_h, has_res = given or spec.keeps_h, computes and not spec.is_head
    return Program(
        CoefficientsForward(n, spec.k, spec.splits, spec.constants, spec.is_head, spec.has_sinkhorn),
        None
        if given
        else cute.runtime.make_fake_compact_tensor(
            Float32, (spec.splits, columns + 1, rows), stride_order=(2, 1, 0), assumed_align=4
        ),
        symbolic_streams(Float32, rows, columns, 1) if has_h else None,
        symbolic_vector(Float32, rows) if has_h else None,
        symbolic_vector(cutlass_dtype(spec.alpha), 1 if spec.is_head else 3),
        symbolic_vector(cutlass_dtype(spec.beta), columns),
        symbolic_streams(Float32, rows, n, min(4, n)) if computes else None,
        symbolic_streams(Float32, rows, n, min(4, n)) if has_res else None,
        symbolic_streams(Float32, rows, n * n, min(4, n * n)) if has_res else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def coefficients_backward(arch: str, spec: CoefficientsBackwardSpec) -> Program:
    """dH, dmean_square, dbeta, dalpha from what there is of dpre, dpost, dres."""
    rows, chunks, n, columns = cute.sym_int(), cute.sym_int(), spec.n, spec.columns
    padded = -(-columns // SUM_COLUMNS) * SUM_COLUMNS
    dbeta, dalpha = cutlass_dtype(spec.dbeta), cutlass_dtype(spec.dalpha)
    sums = spec.leaves_sums or dbeta is not None or dalpha is not None
    given = spec.dpre_align, spec.dpost_align, spec.dres_align
    aligns = (spec.h_align, *(max(1, align) for align in given))
    accumulate = spec.accumulate_beta, spec.accumulate_alpha
    return Program(
        CoefficientsBackward(n, spec.constants, spec.is_head, spec.has_sinkhorn, accumulate, aligns),
        symbolic_streams(Float32, rows, columns, spec.h_align),
        symbolic_vector(Float32, rows),
        symbolic_vector(cutlass_dtype(spec.alpha), 1 if spec.is_head else 3),
        symbolic_vector(cutlass_dtype(spec.beta), columns),
        *(
            symbolic_streams(Float32, rows, width, align) if align else None
            for width, align in zip((n, n, n * n), given, strict=True)
        ),
        symbolic_streams(Float32, rows, columns, 4 if columns % 4 == 0 else 1),
        symbolic_vector(Float32, rows),
        cute.runtime.make_fake_compact_tensor(Float32, (2, chunks, padded), stride_order=(2, 1, 0), assumed_align=16)
        if sums
        else None,
        symbolic_vector(dbeta, columns),
        symbolic_vector(dalpha, 1 if spec.is_head else 3),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
