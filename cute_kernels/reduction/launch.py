"""Launches of softmax, log_softmax and sums: a Spec of the call's tensors, what launches it, the launch.

Matrices have contiguous rows, results are contiguous. Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.reduction.checks import check_columns
from cute_kernels.reduction.config import (
    COLUMN_ROWS,
    MAX_COLUMNS,
    WHOLE_PART,
    ColumnSumSpec,
    RowSumSpec,
    SoftmaxBackwardSpec,
    SoftmaxSpec,
    WholeSumSpec,
    row_config,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empty, operator
from cute_kernels.runtime.rows import RowLaunch, access_of, contiguous_rows
from cute_kernels.runtime.targets import Target


@operator("softmax_forward", "Tensor x, Tensor(a!) y, bool log")
def softmax_forward(x: Tensor, y: Tensor, log: bool) -> None:
    """y = softmax(x), or its logarithm."""
    rows, n = x.shape
    if rows and n:
        access = access_of(n, max(x.itemsize, y.itemsize), x)
        launch = _softmax.get(x.get_device(), SoftmaxSpec(n, x.dtype, y.dtype, log, access))
        launch.function(x, y, launch.clusters(rows))


@operator("softmax_backward", "Tensor y, Tensor dy, Tensor(a!) dx, bool log")
def softmax_backward(y: Tensor, dy: Tensor, dx: Tensor, log: bool) -> None:
    """dx of ``softmax_forward``, from what it gave and the gradient of that."""
    rows, n = y.shape
    if rows and n:
        access = access_of(n, max(y.itemsize, dy.itemsize, dx.itemsize), y, dy)
        spec = SoftmaxBackwardSpec(n, y.dtype, dy.dtype, dx.dtype, log, access)
        launch = _softmax_backward.get(y.get_device(), spec)
        launch.function(y, dy, dx, launch.clusters(rows))


@operator("sum_rows", "Tensor x, Tensor(a!) y, float scale")
def sum_rows(x: Tensor, y: Tensor, scale: float) -> None:
    """y = scale times sums of x: of the rows of a matrix, or over the rows of each of many matrices.

    Of (matrices, rows, columns), whose last dimension is contiguous, y is (matrices, columns). The order of a sum is
    that of its length: of a row in the order of the norms, of more than MAX_COLUMNS elements in that of ``sum_whole``;
    over rows by parts of COLUMN_ROWS, also where there is one column.
    """
    _sum(x, y, scale, False)


@operator("sum_squares", "Tensor x, Tensor(a!) y, float scale")
def sum_squares(x: Tensor, y: Tensor, scale: float) -> None:
    """As ``sum_rows``, of the squares, which are not rounded before they are added."""
    _sum(x, y, scale, True)


@operator("sum_whole", "Tensor x, Tensor(a!) y, float scale, bool squares")
def sum_whole(x: Tensor, y: Tensor, scale: float, squares: bool) -> None:
    """y = scale times the sums of the lines of x, a matrix, or of their squares.

    In the order of ``reference.whole_sum``; one kernel serves lines of all lengths.
    """
    if x.numel():
        _sum_whole(x, y, scale, squares)
    else:
        y.fill_(0.0 * scale)  # a mean of nothing is NaN


def _sum_whole(x: Tensor, y: Tensor, scale: float, squares: bool) -> None:
    lines, n = x.shape
    x = (x if n == 1 or x.stride(1) == 1 else x.contiguous()).resolve_neg()
    vec = math.gcd(16 // x.itemsize, x.data_ptr() // x.itemsize, x.stride(0) if lines > 1 else 0)
    parts = -(-n // WHOLE_PART)
    partials = empty(x, (lines, -(-parts // 4) * 4), torch.float32)[:, :parts]  # lines on 16 bytes
    _whole_sums.get(x.get_device(), WholeSumSpec(x.dtype, y.dtype, vec, squares))(x, n, partials, y, scale)


def _sum(x: Tensor, y: Tensor, scale: float, squares: bool) -> None:
    if not y.numel():
        return
    if not x.numel():
        y.fill_(0.0 * scale)  # a mean of nothing is NaN
    elif x.dim() == 2 and x.shape[1] <= MAX_COLUMNS:
        _sum_rows(aligned_rows(x), y, scale, squares)
    elif x.dim() == 2:
        _sum_whole(x, y, scale, squares)
    else:
        matrices, rows, columns = x.shape
        parts = -(-rows // COLUMN_ROWS)
        if parts == 1:
            _sum_columns(x, y.unsqueeze(1), scale, squares)
        else:
            partials = empty(x, (matrices, parts, columns), torch.float32)
            _sum_columns(x, partials, 1.0, squares)
            sum_rows.function(partials, y, scale)


def aligned_rows(x: Tensor) -> Tensor:
    """Rows as a kernel takes them; a copy of those that are off what they would be aligned to in a matrix of their own.

    The order of a row's sum follows from that alignment: of one row, too, or of one that begins anywhere.
    """
    rows, n = x.shape
    unit = math.gcd(16, n * x.element_size())
    contiguous = n == 1 or x.stride(1) == 1
    if contiguous and not x.data_ptr() % unit and (rows == 1 or not x.stride(0) * x.element_size() % unit):
        return x
    return contiguous_rows(x)


def _sum_rows(x: Tensor, y: Tensor, scale: float, squares: bool = False) -> None:
    rows, n = x.shape
    launch = _row_sums.get(x.get_device(), RowSumSpec(n, x.dtype, y.dtype, access_of(n, x.itemsize, x), squares))
    launch.function(x, y, scale, launch.clusters(rows))


def _sum_columns(x: Tensor, y: Tensor, scale: float, squares: bool = False) -> None:
    check_columns(x.shape, y.shape[1])
    x = x.resolve_neg()  # one column may be a conjugate's imaginary part
    strides = [stride for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1]
    vec = math.gcd(16 // x.itemsize, x.shape[2], *strides, x.data_ptr() // x.itemsize)
    _column_sums.get(x.get_device(), ColumnSumSpec(x.dtype, y.dtype, vec, squares))(x, y, scale)


def _make_softmax(target: Target, spec: SoftmaxSpec) -> RowLaunch:
    from cute_kernels.reduction import kernel

    config = row_config(spec)
    return RowLaunch.of(launches.load(kernel.softmax_forward, target.arch, spec, config), config, target.num_sms)


def _make_softmax_backward(target: Target, spec: SoftmaxBackwardSpec) -> RowLaunch:
    from cute_kernels.reduction import kernel

    config = row_config(spec)
    return RowLaunch.of(launches.load(kernel.softmax_backward, target.arch, spec, config), config, target.num_sms)


def _make_row_sums(target: Target, spec: RowSumSpec) -> RowLaunch:
    from cute_kernels.reduction import kernel

    config = row_config(spec)
    return RowLaunch.of(launches.load(kernel.row_sums, target.arch, spec, config), config, target.num_sms)


def _make_column_sums(target: Target, spec: ColumnSumSpec) -> Callable[..., None]:
    from cute_kernels.reduction import kernel

    return launches.load(kernel.column_sums, target.arch, spec)


def _make_whole_sums(target: Target, spec: WholeSumSpec) -> Callable[..., None]:
    from cute_kernels.reduction import kernel_whole

    return launches.load(kernel_whole.whole_sums, target.arch, spec)


_softmax = LaunchCache(_make_softmax)
_softmax_backward = LaunchCache(_make_softmax_backward)
_row_sums = LaunchCache(_make_row_sums)
_column_sums = LaunchCache(_make_column_sums)
_whole_sums = LaunchCache(_make_whole_sums)
