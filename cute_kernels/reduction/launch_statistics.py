"""Launches of logsumexp, variances and prefix sums of rows, each also an operator, ``cute_kernels::<name>``.

Results are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from cute_kernels.reduction.config import LogSumExpSpec, PrefixSumSpec, VarianceSpec, row_config
from cute_kernels.reduction.launch import aligned_rows
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.rows import RowLaunch, access_of
from cute_kernels.runtime.targets import Target


@operator("log_sum_exp_rows", "Tensor x, Tensor(a!) y")
def log_sum_exp_rows(x: Tensor, y: Tensor) -> None:
    """y = logsumexp of the rows of x, fp32."""
    rows, n = x.shape
    if not n:
        y.fill_(-math.inf)
    elif rows:
        x = aligned_rows(x)
        launch = _log_sum_exp.get(x.get_device(), LogSumExpSpec(n, x.dtype, access_of(n, x.itemsize, x)))
        launch.function(x, y, launch.clusters(rows))


@operator("variance_rows", "Tensor x, Tensor(a!) y, float scale")
def variance_rows(x: Tensor, y: Tensor, scale: float) -> None:
    """y = scale times the sum of squared distances from the mean, of the rows of x, fp32."""
    rows, n = x.shape
    if not n:
        y.fill_(math.nan)
    elif rows:
        x = aligned_rows(x)
        launch = _variance.get(x.get_device(), VarianceSpec(n, x.dtype, access_of(n, x.itemsize, x)))
        launch.function(x, y, scale, launch.clusters(rows))


@operator("prefix_sum_rows", "Tensor x, Tensor(a!) y")
def prefix_sum_rows(x: Tensor, y: Tensor) -> None:
    """y[m, j] = x[m, 0] + ... + x[m, j]."""
    if x.numel():
        vec = math.gcd(4, x.shape[1], *(t.data_ptr() // t.itemsize for t in (x, y)))
        if x.shape[0] > 1:
            vec = math.gcd(vec, x.stride(0), y.stride(0))
        _prefix_sum.get(x.get_device(), PrefixSumSpec(x.dtype, y.dtype, vec))(x.resolve_neg(), y)


def _make_log_sum_exp(target: Target, spec: LogSumExpSpec) -> RowLaunch:
    from cute_kernels.reduction import kernel_statistics

    config = row_config(spec)
    function = launches.load(kernel_statistics.log_sum_exp, target.arch, spec, config)
    return RowLaunch.of(function, config, target.num_sms)


def _make_variance(target: Target, spec: VarianceSpec) -> RowLaunch:
    from cute_kernels.reduction import kernel_statistics

    config = row_config(spec)
    function = launches.load(kernel_statistics.variances, target.arch, spec, config)
    return RowLaunch.of(function, config, target.num_sms)


def _make_prefix_sum(target: Target, spec: PrefixSumSpec) -> Callable[..., None]:
    from cute_kernels.reduction import kernel_statistics

    return launches.load(kernel_statistics.prefix_sums, target.arch, spec)


_log_sum_exp = LaunchCache(_make_log_sum_exp)
_variance = LaunchCache(_make_variance)
_prefix_sum = LaunchCache(_make_prefix_sum)
