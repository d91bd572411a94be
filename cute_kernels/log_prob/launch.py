"""Launches of linear_log_prob: the forward's two kernels, and the backward's three products for a part of the logits,
or two for all logits if the forward has kept them.

Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.gemm.launch import GemmLaunch, gemm
from cute_kernels.log_prob.checks import operands
from cute_kernels.log_prob.config import (
    GradientSpec,
    KeptGradientSpec,
    LogProbSpec,
    StatisticsSpec,
    config_for,
    vocabulary_tile,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache, bounded, observe
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.targets import Target

# Tokens whose statistics are in memory at a time: 12 bytes a token and tile of the vocabulary
STATISTICS_TOKENS = 16384
# Gradients of logits that are in memory at a time: of all tokens, and of a multiple of so many columns of the logits
GRADIENT_ELEMENTS = 2**26
GRADIENT_COLUMNS = 2048


@operator(
    "log_prob_forward",
    "Tensor x, Tensor weight, Tensor target, Tensor(a!) log_prob, Tensor(b!) entropy, Tensor(c!) row_statistics, "
    "Tensor(d!)? logits, int ignore_index, float temperature, float scale, float softcap",
)
def log_prob_forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    log_prob: Tensor,
    entropy: Tensor,
    row_statistics: Tensor,
    logits: Tensor | None,
    ignore_index: int,
    temperature: float,
    scale: float,
    softcap: float,
) -> None:
    """Fill log_prob, entropy (M,) and row_statistics (M, 3), fp32, of x (M, K), weight (V, K) and target (M,).

    And logits (M, V) of x's dtype, rows on 16 bytes, with x weight^T, if they are kept.

    Raises:
        ValueError: x or weight have rows that TMA cannot read.
    """
    x, weight, major = operands(x, weight)
    index, v = x.get_device(), weight.shape[0]
    multiply = _statistics.get(index, StatisticsSpec(x.dtype, target.dtype, major, softcap > 0.0, logits is not None))
    finish = _log_prob.get(index, LogProbSpec(target.dtype))
    exponent, slope, _ = _factors(temperature, scale, softcap)
    for first in range(0, x.shape[0], STATISTICS_TOKENS):
        some = slice(first, first + STATISTICS_TOKENS)
        x_some, target_some = x[some], target[some]
        m = x_some.shape[0]
        launch = multiply.of(m, v)
        if m < launch.config.tile[0]:
            # A box beyond the last row costs more than one that is read
            k = x.shape[1]
            x_some = x.new_zeros(launch.config.tile[0], k + -k % 8)[:, :k]
            x_some[:m] = x[some]
        statistics = x.new_empty(3, -(-v // multiply.vocabulary_tile), m, dtype=torch.float32)
        target_logit = x.new_empty(m, dtype=torch.float32)
        kept = None if logits is None else logits[some]
        _multiply(launch, x_some, weight, major, target_some, statistics, target_logit, kept, exponent, slope)
        results = log_prob[some], entropy[some], row_statistics[some]
        finish(statistics, target_some, target_logit, *results, v, ignore_index, exponent)
        del statistics, target_logit, x_some  # before the next ones are allocated


@operator(
    "log_prob_backward",
    "Tensor dlog_prob, Tensor? dentropy, Tensor x, Tensor weight, Tensor target, Tensor row_statistics, "
    "Tensor(c!)? logits, Tensor(a!)? dx, Tensor(b!)? dweight, int ignore_index, float temperature, float scale, "
    "float softcap, bool accumulate",
)
def log_prob_backward(
    dlog_prob: Tensor,
    dentropy: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    row_statistics: Tensor,
    logits: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    ignore_index: int,
    temperature: float,
    scale: float,
    softcap: float,
    accumulate: bool,
) -> None:
    """Fill dx (M, K) and dweight (V, K), or with ``accumulate`` add to the latter, from gradients (M,), fp32.

    The gradients of logits are made and used in parts of columns. dx starts in fp32 from what the parts before have
    come to: its sum over the vocabulary is in the order of one product, whatever the parts. If the forward has kept
    logits, their gradients take their place, and autograd hears of it: a second backward is an error.
    """
    if not x.numel():
        if dweight is not None and not accumulate:
            dweight.zero_()
        return
    x, weight, major = operands(x, weight)
    m, v = x.shape[0], weight.shape[0]
    exponent, slope, derivative = _factors(temperature, scale, softcap)
    if logits is not None:
        spec = KeptGradientSpec(x.dtype, target.dtype, dentropy is not None, softcap > 0.0)
        differentiate = _kept_gradient.get(x.get_device(), spec)
        gradients = dlog_prob, dlog_prob if dentropy is None else dentropy
        differentiate(target, row_statistics, *gradients, logits, ignore_index, exponent, derivative, slope)
        torch.autograd.graph.increment_version(logits)
        if dx is not None:
            gemm.function(logits, weight, dx, trans_b=True)
        if dweight is not None:
            gemm.function(logits, x, dweight, accumulate=accumulate, trans_a=True, trans_b=True)
        return
    spec = GradientSpec(x.dtype, target.dtype, major, dentropy is not None, softcap > 0.0)
    gradient = _gradient.get(x.get_device(), spec)
    columns = gradient_columns(m)
    dlogits = x.new_empty(m, min(columns, v + -v % 8))  # rows that TMA can read
    sums = dx if dx is None or columns >= v else torch.empty_like(dx, dtype=torch.float32)
    for first in range(0, v, columns):
        some = slice(first, min(first + columns, v))
        width = some.stop - first
        weight_some, dlogits_some = weight[some], dlogits[:, :width]
        gradients = dlog_prob, dlog_prob if dentropy is None else dentropy, dlogits_some
        rows = target, row_statistics, *gradients
        _multiply(
            gradient.of(m, width), x, weight_some, major, *rows, ignore_index, v, first, exponent, derivative, slope
        )
        if sums is not None:
            gemm.function(dlogits_some, weight_some, sums, accumulate=first > 0, trans_b=True)
        if dweight is not None:
            gemm.function(dlogits_some, x, dweight[some], accumulate=accumulate, trans_a=True, trans_b=True)
    if sums is not dx:
        dx.copy_(sums)


def _factors(temperature: float, scale: float, softcap: float) -> tuple[float, float | None, float]:
    """(exponent, slope, derivative) of z = softcap tanh(scale logit / softcap) / temperature.

    z is exponent / log2(e) times tanh(slope logit), without a softcap (slope None) times the logit; its derivative by
    the logit is ``derivative``, under a softcap times 1 - tanh^2.
    """
    log2_e = math.log2(math.e)
    if softcap:
        return softcap * log2_e / temperature, scale / softcap, scale / temperature
    return scale * log2_e / temperature, None, scale / temperature


def gradient_columns(m: int) -> int:
    """Columns of the logits of m tokens whose gradients are in memory at a time."""
    return max(GRADIENT_ELEMENTS // m // GRADIENT_COLUMNS, 1) * GRADIENT_COLUMNS


def _multiply(launch: GemmLaunch, x: Tensor, weight: Tensor, major: str, *arguments: object) -> None:
    """A product of x and weight, and what is made of it."""
    observe(launch, (x.shape[0], weight.shape[0], x.shape[1]), x.get_device())
    launch.function(x, weight if major == "k" else weight.t(), *arguments, launch.num_ctas)


class LogitsLaunches:
    """The launches of a product of m tokens and v columns, by these; ``builder``: its builder's name."""

    def __init__(self, target: Target, spec: StatisticsSpec | GradientSpec, builder: str) -> None:
        self.vocabulary_tile = vocabulary_tile(target.arch)
        self._arguments = target, spec, builder
        self._launches: dict[tuple[int, int], GemmLaunch] = bounded()

    def of(self, m: int, v: int) -> GemmLaunch:
        """The launch of the kernel that is chosen for so many tokens."""
        launch = self._launches.get((m, v))
        if launch is None:
            launch = self._launches[m, v] = launch_of(*self._arguments, m, v)
        return launch


def launch_of(
    target: Target, spec: StatisticsSpec | GradientSpec, builder: str, m: int, v: int, config: GemmConfig | None = None
) -> GemmLaunch:
    """The launch of one kernel, the one that is chosen or another ``config``: as many CTAs as are resident."""
    from cute_kernels.log_prob import kernel

    config = config or config_for(target.arch, m)
    (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
    clusters = -(-max(m, tile_m) // (tile_m * cluster_m)) * -(-v // (tile_n * cluster_n))
    clusters = min(clusters, target.num_sms // (cluster_m * cluster_n))
    function = launches.load(getattr(kernel, builder), target.arch, spec, config)
    return GemmLaunch(function, clusters * cluster_m * cluster_n, False, config, builder)


def _make_log_prob(target: Target, spec: LogProbSpec) -> Callable[..., None]:
    from cute_kernels.log_prob import kernel

    return launches.load(kernel.log_prob, target.arch, spec)


def _make_kept_gradient(target: Target, spec: KeptGradientSpec) -> Callable[..., None]:
    from cute_kernels.log_prob import kernel

    return launches.load(kernel.log_prob_kept_gradient, target.arch, spec)


_statistics = LaunchCache(functools.partial(LogitsLaunches, builder="log_prob_statistics"))
_gradient = LaunchCache(functools.partial(LogitsLaunches, builder="log_prob_gradient"))
_kept_gradient = LaunchCache(_make_kept_gradient)
_log_prob = LaunchCache(_make_log_prob)
