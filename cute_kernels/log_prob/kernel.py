"""The builders of linear_log_prob: statistics of tiles of logits, what they come to, and the gradient of logits.

Forward: ``log_prob_statistics`` multiplies and keeps of each row and tile of ``vocabulary_tile`` logits three numbers;
``log_prob`` adds them up in a fixed order. Backward: ``log_prob_gradient`` multiplies again and stores the gradients of
some columns of logits, from which the products of gemm make those of x and of the weight. Or the forward stores the
logits, and ``log_prob_kept_gradient`` replaces them by their gradients.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.symbolic import Dtype, symbolic_matrix
from cute_kernels.log_prob.config import GradientSpec, KeptGradientSpec, LogProbSpec, StatisticsSpec
from cute_kernels.log_prob.kernel_epilogue import LN_2, bounded, target_column
from cute_kernels.log_prob.kernel_kept import KeptGradient
from jit_cache import Program, compiled

ROWS = 8  # of a CTA: neighbours in memory, a sector of each tile's numbers
GROUPS = 64  # of tiles, whose numbers are added apart: tile t belongs to group t modulo this


@compiled
def log_prob_statistics(arch: str, spec: StatisticsSpec, config: GemmConfig) -> Program:
    """Statistics of logits x weight^T, x (M, K), weight (V, K), for each row and tile t of ``vocabulary_tile`` columns:

    statistics[:, t, row] = (largest logit, sum of 2^u, sum of u 2^u), u = scale (logit - largest); and
    target_logit[row], that of its target, where that is a column. x may have more rows than the others.

    With ``has_softcap`` tanh(slope logit) takes a logit's place, but in ``logits`` (M, V), which are stored with
    ``keeps_logits``, rounded.
    """
    rows, m, v, k, tiles = (cute.sym_int() for _ in range(5))
    dtype, target = cutlass_dtype(spec.dtype), cutlass_dtype(spec.target)
    if arch.startswith("sm_9"):
        from cute_kernels.log_prob.kernel_sm90 import StatisticsSm90

        kernel = StatisticsSm90(spec.weight_major, spec.keeps_logits, config)
    else:
        from cute_kernels.log_prob.kernel_sm100 import StatisticsSm100

        kernel = StatisticsSm100(spec.weight_major, spec.keeps_logits, config)
    return Program(
        kernel,
        symbolic_matrix(dtype, (rows, k), True),
        symbolic_matrix(dtype, (v, k) if spec.weight_major == "k" else (k, v), True),
        vector(target, m),
        cube(tiles, m),
        vector(Float32, m),
        symbolic_matrix(dtype, (m, v), True) if spec.keeps_logits else None,
        Float32(1.0),
        Float32(1.0) if spec.has_softcap else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def log_prob(arch: str, spec: LogProbSpec) -> Program:
    """Log-probability of the target and entropy of each row, from its tiles' statistics.

    Where the target is ``ignore_index`` both are 0; where it is no column, NaN. row_statistics[row] = (largest logit,
    log2 of the sum of 2^u, entropy), u as in ``log_prob_statistics``, for the backward.
    """
    m, tiles = cute.sym_int(), cute.sym_int()
    return Program(
        LogProb(),
        cube(tiles, m),
        vector(cutlass_dtype(spec.target), m),
        vector(Float32, m),
        vector(Float32, m),
        vector(Float32, m),
        symbolic_matrix(Float32, (m, 3), False),
        Int32(1),
        Int64(1),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def log_prob_gradient(arch: str, spec: GradientSpec, config: GemmConfig) -> Program:
    """dlogits (M, columns) of the columns of logits that a part of the weight (columns, K) makes.

    ``first_column``: where the part begins among the ``vocabulary`` rows of the whole weight. Without ``has_dentropy``
    the entropy has no gradient, and that argument is not read. With ``has_softcap`` the statistics are of
    tanh(slope logit); ``inverse_temperature`` is the derivative of a logit of the softmax where that is 0.
    """
    m, v, k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    dtype, target = cutlass_dtype(spec.dtype), cutlass_dtype(spec.target)
    if arch.startswith("sm_9"):
        from cute_kernels.log_prob.kernel_sm90 import GradientSm90

        kernel = GradientSm90(spec.weight_major, spec.has_dentropy, config)
    else:
        from cute_kernels.log_prob.kernel_sm100 import GradientSm100

        kernel = GradientSm100(spec.weight_major, spec.has_dentropy, config)
    return Program(
        kernel,
        symbolic_matrix(dtype, (m, k), True),
        symbolic_matrix(dtype, (v, k) if spec.weight_major == "k" else (k, v), True),
        vector(target, m),
        symbolic_matrix(Float32, (m, 3), False),
        vector(Float32, m),
        vector(Float32, m),
        symbolic_matrix(dtype, (m, v), True),
        Int64(1),
        Int32(1),
        Int32(0),
        Float32(1.0),
        Float32(1.0),
        Float32(1.0) if spec.has_softcap else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def log_prob_kept_gradient(arch: str, spec: KeptGradientSpec) -> Program:
    """Gradients of kept logits (M, V), in their place; the other arguments as in ``log_prob_gradient``."""
    m, v = cute.sym_int(), cute.sym_int()
    return Program(
        KeptGradient(spec.has_dentropy),
        vector(cutlass_dtype(spec.target), m),
        symbolic_matrix(Float32, (m, 3), False),
        vector(Float32, m),
        vector(Float32, m),
        symbolic_matrix(cutlass_dtype(spec.dtype), (m, v), True),
        Int64(1),
        Float32(1.0),
        Float32(1.0),
        Float32(1.0) if spec.has_softcap else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def vector(dtype: Dtype, size):
    return cute.runtime.make_fake_compact_tensor(dtype, (size,), assumed_align=dtype.width // 8)


def cube(tiles, rows):
    """(3, tiles, rows), rows next to each other; addressed with 64 bits."""
    strides = cute.sym_int64(), cute.sym_int64(), 1
    return cute.runtime.make_fake_tensor(Float32, (3, tiles, rows), strides, assumed_align=4)


class LogProb:
    """See ``log_prob``: a thread has one group of tiles of one row; then the groups are added in ascending order.

    Largest numbers first, then sums relative to the largest of all: two trips to numbers that L2 holds.
    """

    @cute.jit
    def __call__(
        self,
        statistics: cute.Tensor,
        target: cute.Tensor,
        target_logit: cute.Tensor,
        log_prob: cute.Tensor,
        entropy: cute.Tensor,
        row_statistics: cute.Tensor,
        vocabulary: Int32,
        ignore_index: Int64,
        scale: Float32,
        stream,
    ):
        rows = target, target_logit, log_prob, entropy, row_statistics
        self.kernel(statistics, *rows, vocabulary, ignore_index, scale).launch(
            grid=[cute.ceil_div(statistics.shape[2], ROWS), 1, 1],
            block=[ROWS * GROUPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        statistics: cute.Tensor,
        target: cute.Tensor,
        target_logit: cute.Tensor,
        log_prob: cute.Tensor,
        entropy: cute.Tensor,
        row_statistics: cute.Tensor,
        vocabulary: Int32,
        ignore_index: Int64,
        scale: Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        group, row = tidx // ROWS, bidx * ROWS + tidx % ROWS
        num_tiles, num_rows = statistics.shape[1], statistics.shape[2]
        at = cutlass.min(row, num_rows - 1)
        smem = SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout((ROWS, GROUPS, 3), stride=(1, ROWS, ROWS * GROUPS)), 16)
        cute.arch.griddepcontrol_wait()

        largest = -Float32.inf
        for tile in cutlass.range(group, num_tiles, GROUPS, unroll=4):
            largest = cute.arch.fmax(largest, statistics[0, tile, at])
        shared[tidx % ROWS, group, 0] = largest
        cute.arch.barrier()
        for g in cutlass.range_constexpr(GROUPS):
            largest = cute.arch.fmax(largest, shared[tidx % ROWS, g, 0])

        total, moment = Float32(0.0), Float32(0.0)
        for tile in cutlass.range(group, num_tiles, GROUPS, unroll=4):
            shift = (statistics[0, tile, at] - largest) * scale
            e = cute.math.exp2(shift, fastmath=True)
            part = statistics[1, tile, at]
            total = cute.math.fma(e, part, total)
            moment = cute.math.fma(e, cute.math.fma(bounded(shift), part, statistics[2, tile, at]), moment)
        shared[tidx % ROWS, group, 1] = total
        shared[tidx % ROWS, group, 2] = moment
        cute.arch.barrier()
        if tidx < ROWS and row < num_rows:
            for g in cutlass.range_constexpr(1, GROUPS):
                total = total + shared[tidx, g, 1]
                moment = moment + shared[tidx, g, 2]
            log2_total = cute.math.log2(total)
            value, spread = Float32(0.0), Float32(0.0)
            if target[row] != ignore_index:
                value, spread = Float32.nan, Float32.nan
                if target_column(target, row, vocabulary) >= 0:
                    distance = target_logit[row] - largest
                    value = LN_2 * cute.math.fma(distance, scale, -log2_total)
                    if value == -Float32.inf:  # in bits; in nats it may yet be finite
                        value = distance * (scale * LN_2)
                    spread = LN_2 * (log2_total - moment / total)
            log_prob[row] = value
            entropy[row] = spread
            row_statistics[row, 0] = largest
            row_statistics[row, 1] = log2_total
            row_statistics[row, 2] = spread
