"""Launches of linear_log_prob: the forward's two kernels, and the backward's three products for a part of the logits.

The registered operators ``cute_kernels::log_prob_forward`` and ``log_prob_backward`` run the same functions for traced
graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.gemm.checks import operands
from cute_kernels.gemm.config import GemmConfig, choose_log_prob, vocabulary_tile
from cute_kernels.gemm.launch import GemmLaunch, gemm, observe
from cute_kernels.runtime.operators import mutating_op
from cute_kernels.runtime.targets import arch_of, cutlass_dtype, sm_count

# Tokens whose statistics are in memory at a time: 12 bytes a token and tile of the vocabulary
STATISTICS_TOKENS = 16384
# Gradients of logits that are in memory at a time: of all tokens, and of a multiple of so many columns of the logits
GRADIENT_ELEMENTS = 2**26
GRADIENT_COLUMNS = 2048


def run_forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    log_prob: Tensor,
    entropy: Tensor,
    row_statistics: Tensor,
    ignore_index: int,
    temperature: float,
) -> None:
    """Fill log_prob, entropy (M,) and row_statistics (M, 3), fp32, of x (M, K), weight (V, K) and target (M,).

    Raises:
        ValueError: x or weight have rows that TMA cannot read.
    """
    from cute_kernels.gemm.kernel_log_prob import log_prob as log_prob_kernel
    from cute_kernels.gemm.kernel_log_prob import log_prob_statistics

    x, weight, major = operands(x, weight)
    arch, v = arch_of(x.get_device()), weight.shape[0]
    dtype, target_dtype = cutlass_dtype(x.dtype), index_dtype(target)
    finish = log_prob_kernel(arch, target_dtype)
    scale = math.log2(math.e) / temperature
    for first in range(0, x.shape[0], STATISTICS_TOKENS):
        some = slice(first, first + STATISTICS_TOKENS)
        x_some, target_some = x[some], target[some]
        m = x_some.shape[0]
        config = choose_log_prob(arch, m)
        if m < config.tile[0]:
            # A box beyond the last row costs more than one that is read
            k = x.shape[1]
            x_some = x.new_zeros(config.tile[0], k + -k % 8)[:, :k]
            x_some[:m] = x[some]
        statistics = x.new_empty(3, -(-v // vocabulary_tile(arch)), m, dtype=torch.float32)
        target_logit = x.new_empty(m, dtype=torch.float32)
        multiply = log_prob_statistics(arch, dtype, target_dtype, major, config)
        launch(
            "log_prob_statistics", multiply, config, x_some, weight, major, target_some, statistics, target_logit, scale
        )
        results = log_prob[some], entropy[some], row_statistics[some]
        finish(statistics, target_some, target_logit, *results, v, ignore_index, scale)
        del statistics, target_logit, x_some  # before the next ones are allocated


def run_backward(
    dlog_prob: Tensor,
    dentropy: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    row_statistics: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    ignore_index: int,
    temperature: float,
    accumulate: bool,
) -> None:
    """Fill dx (M, K) and dweight (V, K), or with ``accumulate`` add to the latter, from gradients (M,), fp32.

    The gradients of logits are made and used in parts of columns. dx starts in fp32 from what the parts before have
    come to: its sum over the vocabulary is in the order of one product, whatever the parts.
    """
    from cute_kernels.gemm.kernel_log_prob import log_prob_gradient

    if not x.numel():
        if dweight is not None and not accumulate:
            dweight.zero_()
        return
    x, weight, major = operands(x, weight)
    m, v = x.shape[0], weight.shape[0]
    arch = arch_of(x.get_device())
    config = choose_log_prob(arch, m)
    gradient = log_prob_gradient(arch, cutlass_dtype(x.dtype), index_dtype(target), major, dentropy is not None, config)
    columns = gradient_columns(m)
    dlogits = x.new_empty(m, min(columns, v + -v % 8))  # rows that TMA can read
    sums = dx if dx is None or columns >= v else torch.empty_like(dx, dtype=torch.float32)
    for first in range(0, v, columns):
        some = slice(first, min(first + columns, v))
        weight_some, dlogits_some = weight[some], dlogits[:, : some.stop - first]
        gradients = dlog_prob, dlog_prob if dentropy is None else dentropy, dlogits_some
        scales = math.log2(math.e) / temperature, 1.0 / temperature
        of_rows = target, row_statistics, *gradients
        launch("log_prob_gradient", gradient, config, x, weight_some, major, *of_rows, ignore_index, v, first, *scales)
        if sums is not None:
            gemm.function(dlogits_some, weight_some, sums, accumulate=first > 0, trans_b=True)
        if dweight is not None:
            gemm.function(dlogits_some, x, dweight[some], accumulate=accumulate, trans_a=True, trans_b=True)
    if sums is not dx:
        dx.copy_(sums)


def gradient_columns(m: int) -> int:
    """Columns of the logits of m tokens whose gradients are in memory at a time."""
    return max(GRADIENT_ELEMENTS // m // GRADIENT_COLUMNS, 1) * GRADIENT_COLUMNS


forward_op = mutating_op(
    "log_prob_forward",
    "Tensor x, Tensor weight, Tensor target, Tensor(a!) log_prob, Tensor(b!) entropy, Tensor(c!) row_statistics, "
    "int ignore_index, float temperature",
    run_forward,
)
backward_op = mutating_op(
    "log_prob_backward",
    "Tensor dlog_prob, Tensor? dentropy, Tensor x, Tensor weight, Tensor target, Tensor row_statistics, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, int ignore_index, float temperature, bool accumulate",
    run_backward,
)


def index_dtype(target: Tensor):
    """The compiler's name of int32 or int64."""
    from cutlass import Int32, Int64

    return Int64 if target.dtype is torch.int64 else Int32


def launch(
    kernel: str,
    function: Callable[..., None],
    config: GemmConfig,
    x: Tensor,
    weight: Tensor,
    major: str,
    *arguments: object,
) -> None:
    """A product of x and weight whose tiles as many CTAs walk over as are resident; ``kernel``: the function's name."""
    (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
    clusters = -(-x.shape[0] // (tile_m * cluster_m)) * -(-weight.shape[0] // (tile_n * cluster_n))
    clusters = min(clusters, sm_count(x.get_device()) // (cluster_m * cluster_n))
    plan = GemmLaunch(function, clusters * cluster_m * cluster_n, False, config, kernel)
    observe(plan, (x.shape[0], weight.shape[0], x.shape[1]), x.get_device())
    function(x, weight if major == "k" else weight.t(), *arguments, plan.num_ctas)
