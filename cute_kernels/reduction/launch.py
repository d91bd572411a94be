"""Plans and launches of softmax, log_softmax and sums: from a call's signature to a compiled kernel, then one lookup.

The registered operators ``cute_kernels::softmax_forward``, ``softmax_backward`` and ``sum_rows`` run the same functions
for traced graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.common.row_layout import RowConfig
from cute_kernels.reduction.checks import check_columns, check_rows, check_softmax
from cute_kernels.reduction.config import COLUMN_ROWS, LONG_ROW, MAX_COLUMNS, row_config
from cute_kernels.runtime.operators import Plans, mutating_op
from cute_kernels.runtime.rows import contiguous_rows, geometry, resolved, rows_key
from cute_kernels.runtime.targets import arch_of, cutlass_dtype, sm_count

RESIDENT_ROWS = 2**29  # from here on resident clusters walk over the rows, as of the norms


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled kernel that streams rows, and how many clusters of it to launch (RowConfig says what is what)."""

    function: Callable[..., None]
    rows_per_cluster: int
    max_clusters: int
    persistent_clusters: float

    def clusters(self, op: str, rows: int) -> int:
        """Of so many rows.

        Raises:
            ValueError: more rows than a kernel can count.
        """
        if rows >= RESIDENT_ROWS:
            check_rows(op, rows)
        clusters = -(-rows // self.rows_per_cluster)
        resident = rows >= RESIDENT_ROWS or clusters < self.persistent_clusters
        return min(clusters, self.max_clusters) if resident else clusters


_plans = Plans()


def run_softmax(x: Tensor, y: Tensor, log: bool) -> None:
    """y = softmax(x), or its logarithm, of matrices whose rows are contiguous."""
    if not x.numel():
        return
    key = ("softmax", rows_key(x), rows_key(y), log)
    plan = _plans.get(key)
    if plan is None:
        from cute_kernels.reduction.kernel import softmax_forward

        check_softmax(_name(log), x, None)
        config = _config([x], [y])
        function = softmax_forward(*_facts(x, y), log, config)
        plan = _plans[key] = _plan(function, config, x)
    plan.function(x, y, plan.clusters(_name(log), x.shape[0]))


def run_softmax_backward(y: Tensor, dy: Tensor, dx: Tensor, log: bool) -> None:
    """dx of ``run_softmax``, from what it gave and the gradient of that."""
    if not y.numel():
        return
    key = ("softmax_backward", rows_key(y), rows_key(dy), rows_key(dx), log)
    plan = _plans.get(key)
    if plan is None:
        from cute_kernels.reduction.kernel import softmax_backward

        config = _config([y, dy], [dx])
        function = softmax_backward(*_facts(y, dy, dx), log, config)
        plan = _plans[key] = _plan(function, config, y)
    plan.function(y, dy, dx, plan.clusters(_name(log), y.shape[0]))


def run_sum(x: Tensor, y: Tensor, scale: float) -> None:
    """y, contiguous, = scale times sums of x: of the rows of a matrix, or over the rows of each of many matrices.

    Of (matrices, rows, columns), whose last dimension is contiguous, y is (matrices, columns). The order of a sum is
    that of its length: of a row in the order of the norms, of more than MAX_COLUMNS elements by parts of LONG_ROW; over
    rows by parts of COLUMN_ROWS, also where there is one column.
    """
    if not y.numel():
        return
    if not x.numel():
        y.fill_(0.0 * scale)  # a mean of nothing is NaN
    elif x.dim() == 2:
        _sum_lines(x, y, scale)
    else:
        matrices, rows, columns = x.shape
        parts = -(-rows // COLUMN_ROWS)
        if parts == 1:
            _sum_columns(x, y.unsqueeze(1), scale)
        else:
            partials = x.new_empty(matrices, parts, columns, dtype=torch.float32)
            _sum_columns(x, partials, 1.0)
            run_sum(partials, y, scale)


def _sum_lines(x: Tensor, y: Tensor, scale: float) -> None:
    lines, n = x.shape
    if n <= MAX_COLUMNS:
        return _sum_rows(_aligned(x), y, scale)
    x = x if x.stride(1) == 1 else x.contiguous()
    whole = n // LONG_ROW
    partials = x.new_empty(lines, -(-n // LONG_ROW), dtype=torch.float32)
    for line, sums in zip(x.unbind(), partials.unbind(), strict=True):
        _sum_rows(_aligned(line[: whole * LONG_ROW].view(whole, LONG_ROW)), sums[:whole], 1.0)
        if whole < len(sums):
            _sum_rows(_aligned(line[whole * LONG_ROW :].unsqueeze(0)), sums[whole:], 1.0)
    run_sum(partials, y, scale)


def _aligned(x: Tensor) -> Tensor:
    """Rows as a kernel takes them; a copy of those that are off what they would be aligned to in a matrix of their own.

    The order of a row's sum follows from that alignment: of one row, too, or of one that begins anywhere.
    """
    rows, n = x.shape
    unit = math.gcd(16, n * x.element_size())
    contiguous = n == 1 or x.stride(1) == 1
    if contiguous and not x.data_ptr() % unit and (rows == 1 or not x.stride(0) * x.element_size() % unit):
        return x
    return contiguous_rows(x)


def _sum_rows(x: Tensor, y: Tensor, scale: float) -> None:
    key = ("sum_rows", rows_key(x), y.dtype, y.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        from cute_kernels.reduction.kernel import row_sums

        config = _config([x], [])
        plan = _plans[key] = _plan(row_sums(*_facts(x, y), config), config, x)
    plan.function(x, y, scale, plan.clusters("sum", x.shape[0]))


def _sum_columns(x: Tensor, y: Tensor, scale: float) -> None:
    from cute_kernels.reduction.kernel import column_sums

    check_columns(x.shape, y.shape[1])
    x = x.resolve_neg()  # one column may be a conjugate's imaginary part
    itemsize = x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1]
    vec = math.gcd(16 // itemsize, x.shape[2], *strides, x.data_ptr() // itemsize)
    column_sums(*_facts(x, y), vec)(x, y, scale)


softmax_op = mutating_op("softmax_forward", "Tensor x, Tensor(a!) y, bool log", run_softmax)
softmax_backward_op = mutating_op(
    "softmax_backward", "Tensor y, Tensor dy, Tensor(a!) dx, bool log", run_softmax_backward
)
sum_op = mutating_op("sum_rows", "Tensor x, Tensor(a!) y, float scale", run_sum)


def _name(log: bool) -> str:
    return "log_softmax" if log else "softmax"


def _facts(*tensors: Tensor) -> list:
    return [arch_of(tensors[0].get_device()), *(cutlass_dtype(t.dtype) for t in tensors)]


def _config(streams: list[Tensor], outputs: list[Tensor]) -> RowConfig:
    n = streams[0].shape[1]
    itemsizes = tuple(t.element_size() for t in streams)
    return row_config(n, itemsizes, *geometry(n, streams, [t.dtype for t in outputs]))


def _plan(function: Callable[..., None], config: RowConfig, like: Tensor) -> Plan:
    num_sms = sm_count(like.get_device())
    if config.layout.n == 1:
        function = resolved(function)
    clusters = config.max_clusters(num_sms), config.persistent_clusters(num_sms)
    return Plan(function, config.rows_per_cluster, *clusters)
