"""Launches of the norms: a Spec of the call's tensors, what launches it, the launch.

Matrices have contiguous rows, results are contiguous. Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.norm.config import NormBackwardSpec, NormForwardSpec, backward_config, forward_config, many_ctas
from cute_kernels.runtime import launches
from cute_kernels.runtime.autograd import as_rows
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import Layout, alias, contiguous_strides, empty, empty_strided, operator
from cute_kernels.runtime.rows import RowLaunch, access_of
from cute_kernels.runtime.targets import Target


@operator(
    "norm_forward",
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!) y, Tensor(b!)? h, "
    "Tensor(c!)? statistics, str kind, float eps, float weight_offset",
)
def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    statistics: Tensor | None,
    kind: str,
    eps: float,
    weight_offset: float,
) -> None:
    """y, h = x + residual, and statistics: fp32 (1, rows), rstd; or (2, rows), rstd and mean."""
    rows = x.shape[0]
    if not rows:
        return
    num_statistics = 0 if statistics is None else statistics.shape[0]
    launch = _forward_launch(x, residual, weight, bias, y.dtype, h is not None, num_statistics, kind, weight_offset)
    launch.function(x, residual, weight, bias, y, h, statistics, eps, launch.clusters(rows))


def _forward_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y_dtype: torch.dtype,
    has_h: bool,
    num_statistics: int,
    kind: str,
    weight_offset: float,
) -> RowLaunch:
    n, x_dtype = x.shape[1], x.dtype
    widest = x_dtype.itemsize if y_dtype is x_dtype else max(x_dtype.itemsize, y_dtype.itemsize)
    residual_dtype = weight_dtype = bias_dtype = None
    pointers = 0
    if residual is not None:
        residual_dtype = residual.dtype
        widest = max(widest, residual_dtype.itemsize)
    if weight is not None:
        weight_dtype, pointers = weight.dtype, weight.data_ptr()
    if bias is not None:
        bias_dtype, pointers = bias.dtype, pointers | bias.data_ptr()
    spec = NormForwardSpec(
        kind,
        n,
        x_dtype,
        residual_dtype,
        weight_dtype,
        bias_dtype,
        y_dtype,
        weight_offset,
        has_h,
        num_statistics,
        not pointers & 15,
        access_of(n, widest, x, residual),
    )
    return _forward.get(x.get_device(), spec)


class NormForwardCall(NamedTuple):
    """All that follows from the sizes of a forward.

    Attributes:
        y: shape and strides; h has them, too.
        h_dtype, statistics: the dtype; shape and strides. None where there is none.
        matrices: their shape, and strides of x, the residual and y, where x has more or less than two dimensions.
    """

    function: Callable[..., None]
    y: Layout
    y_dtype: torch.dtype
    h_dtype: torch.dtype | None
    statistics: Layout | None
    matrices: tuple[tuple[int, ...], ...] | None
    eps: float
    clusters: int

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        y_dtype: torch.dtype,
        has_h: bool,
        num_statistics: int,
        kind: str,
        eps: float,
        weight_offset: float,
    ) -> NormForwardCall | None:
        """For plain tensors; None: no kernel is launched."""
        if not x.numel():
            return None
        y, rows, residual_rows, matrices = tuple(x.shape), x, residual, None
        if len(y) != 2:
            rows = as_rows(f"{kind}_norm", "x", x)
            residual_rows = None if residual is None else as_rows(f"{kind}_norm", "residual", residual)
            shape, strides = tuple(rows.shape), rows.stride()
            of_residual = strides if residual_rows is None else residual_rows.stride()
            matrices = shape, strides, of_residual, contiguous_strides(shape)
        launch = _forward_launch(rows, residual_rows, weight, bias, y_dtype, has_h, num_statistics, kind, weight_offset)
        num_rows = rows.shape[0]
        statistics = num_statistics, num_rows
        return NormForwardCall(
            launch.function,
            (y, contiguous_strides(y)),
            y_dtype,
            residual.dtype if has_h else None,
            (statistics, contiguous_strides(statistics)) if num_statistics else None,
            matrices,
            eps,
            launch.clusters(num_rows),
        )

    def run(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(y, h, statistics), None where they are not asked for."""
        y, h, statistics = empty_strided(x, *self.y, self.y_dtype), None, None
        if self.h_dtype is not None:
            h = empty_strided(x, *self.y, self.h_dtype)
        if self.statistics is not None:
            statistics = empty_strided(x, *self.statistics, torch.float32)
        y_rows, h_rows = y, h
        if self.matrices is not None:
            shape, of_x, of_residual, of_y = self.matrices
            x, y_rows = alias(x, shape, of_x), alias(y, shape, of_y)
            residual = None if residual is None else alias(residual, shape, of_residual)
            h_rows = None if h is None else alias(h, shape, of_y)
        self.function(x, residual, weight, bias, y_rows, h_rows, statistics, self.eps, self.clusters)
        return y, h, statistics


@operator(
    "norm_backward",
    "Tensor saved, Tensor dy, Tensor? dh_out, Tensor? weight, Tensor? bias, Tensor statistics, "
    "Tensor(a!)? dx, Tensor(b!)? dresidual, Tensor(c!)? dw, Tensor(d!)? db, str kind, str save, float eps, "
    "float weight_offset, bool accumulate_w, bool accumulate_b",
)
def norm_backward(
    saved: Tensor,
    dy: Tensor,
    dh_out: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    kind: str,
    save: str,
    eps: float,
    weight_offset: float,
    accumulate_w: bool,
    accumulate_b: bool,
) -> None:
    """dx, dresidual, dw and db; dw and db are added to where ``accumulate_*`` says so.

    ``statistics``: those of ``norm_forward``, with the mean for a layer norm whose input was saved.
    """
    rows, n = saved.shape
    if not rows:
        for gradient, accumulate in ((dw, accumulate_w), (db, accumulate_b)):
            if gradient is not None and not accumulate:
                gradient.zero_()
        return
    pointers = (0 if weight is None else weight.data_ptr()) | (0 if bias is None else bias.data_ptr())
    widest = max([t.itemsize for t in (saved, dy, dh_out, dx, dresidual) if t is not None])
    spec = NormBackwardSpec(
        kind,
        save,
        n,
        saved.dtype,
        dy.dtype,
        None if dh_out is None else dh_out.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None if dx is None else dx.dtype,
        None if dresidual is None else dresidual.dtype,
        None if dw is None else dw.dtype,
        None if db is None else db.dtype,
        weight_offset,
        accumulate_w,
        accumulate_b,
        not pointers & 15,
        access_of(n, widest, saved, dy, dh_out),
    )
    launch = _backward.get(saved.get_device(), spec)
    clusters, partials = launch.clusters(rows), None
    if spec.num_sums:
        columns = -(-n // SUM_COLUMNS) * SUM_COLUMNS
        partials = empty(saved, (spec.num_sums, clusters, columns), torch.float32)
    launch.function(saved, dy, dh_out, weight, bias, statistics, dx, dresidual, partials, dw, db, eps, clusters)


def _make_forward(target: Target, spec: NormForwardSpec) -> RowLaunch:
    from cute_kernels.norm import kernel

    config = forward_config(target.arch, spec)
    function = launches.load(kernel.norm_forward, target.arch, spec, config)
    return RowLaunch.of(function, config, target.num_sms, many_ctas(spec.kind, spec.n))


def _make_backward(target: Target, spec: NormBackwardSpec) -> RowLaunch:
    from cute_kernels.norm import kernel

    config = backward_config(target.arch, spec)
    function = launches.load(kernel.norm_backward, target.arch, spec, config)
    return RowLaunch.of(function, config, target.num_sms, math.inf)  # resident: each cluster has a row of partial sums


_forward = LaunchCache(_make_forward)
_backward = LaunchCache(_make_backward)
