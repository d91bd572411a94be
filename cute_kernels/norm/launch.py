"""Plans, outputs and launches: from a call's signature to a compiled kernel, once; from then on one dict lookup.

A plan is found by everything a kernel is specialised on (dtypes, width, strides and alignment class, device), so a new
number of rows finds the same plan. A call whose tensors are on 16 bytes finds what to allocate and launch in ``calls``,
by a shorter key. The registered operators ``cute_kernels::norm_forward`` and ``norm_backward`` run the same functions
for traced graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.norm.checks import MAX_ROWS, check_norm
from cute_kernels.norm.config import NormConfig, backward_config, forward_config, many_ctas
from cute_kernels.runtime.autograd import as_rows
from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.operators import Calls, Plans, alias, allocator, contiguous_strides, mutating_op
from cute_kernels.runtime.rows import geometry, resolved, rows_key, strides_key
from cute_kernels.runtime.targets import arch_of, cutlass_dtype, sm_count

# From here on resident clusters walk over the rows: tiles' indices are 32-bit, and run ahead by two or three grids
RESIDENT_ROWS = 2**29

Outputs = tuple[Tensor, Tensor | None, Tensor | None]  # y, h, statistics


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled kernel, how many clusters of it to launch (NormConfig says what the numbers mean), what allocates."""

    function: Callable[..., None]
    rows_per_cluster: int
    max_clusters: int
    persistent_clusters: float
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


_plans = Plans()
calls = Calls()


def plan_forward(
    kind: str,
    eps: float,
    weight_offset: float,
    save: str,
    out_dtype: torch.dtype | None,
    keeps_h: bool,
    keeps_statistics: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Callable[..., Outputs]:
    """``forward(x, weight, bias, residual)`` of plain tensors of these sizes and strides: allocates, launches.

    What it returns, (y, h, statistics), is what ``outputs`` holds if that is given; h and the statistics are None where
    they are not kept. ``statistics``: fp32 (1, rows), rstd; or (2, rows), rstd and mean.

    The arguments are checked where none of this signature have been; what is fixed of weight and bias beside it (shape,
    contiguity, device) the kernel's entry asks for at each call, and refuses in words of its own; without rows no entry
    is asked.

    Raises: as ``check_norm``; UnsupportedDeviceError.
    """
    op, shape, dtype, contiguous = f"{kind}_norm", x.shape, x.dtype, x.is_contiguous()
    key = (
        kind,
        eps,
        weight_offset,
        save,
        out_dtype,
        keeps_h,
        keeps_statistics,
        dtype,
        shape[-1] if contiguous else strides_key(as_rows(op, "x", x)),
        x.data_ptr() & 15,
        x.get_device(),
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        ((0 if weight is None else weight.data_ptr()) | (0 if bias is None else bias.data_ptr())) & 15,
        None if residual is None else rows_key(as_rows(op, "residual", residual)),
    )
    plan = _plans.get(key)
    rows = shape[0] if len(shape) == 2 else x.numel() // shape[-1]
    floats = type(eps) is float and type(weight_offset) is float  # True is equal to 1.0, and so a key's part is
    if plan is None or not floats or not rows or (residual is not None and residual.shape != shape):
        check_norm(op, x, weight, bias, residual, eps, weight_offset, save, out_dtype)
    num_statistics = _num_statistics(kind, save) if keeps_statistics else 0
    if plan is None:
        streams = as_rows(op, "x", x), None if residual is None else as_rows(op, "residual", residual)
        facts = (kind, weight_offset, out_dtype or dtype, keeps_h, num_statistics)
        plan = _plans[key] = _plan_forward(*facts, *streams, weight, bias)
    clusters = -(-rows // plan.rows_per_cluster)
    if clusters > plan.max_clusters:
        if rows >= RESIDENT_ROWS:  # a plan knows no number of rows
            expect(rows <= MAX_ROWS, op, "x", f"have at most {MAX_ROWS} rows", rows)
            clusters = plan.max_clusters
        elif clusters < plan.persistent_clusters:
            clusters = plan.max_clusters
    function, allocate, y_dtype = plan.function, plan.allocate, out_dtype or dtype
    sizes, strides, matrix = tuple(shape), (shape[-1], 1), None
    if len(shape) != 2:
        strides, matrix = contiguous_strides(sizes), (rows, shape[-1])
    statistics_layout = ((num_statistics, rows), (rows, 1), torch.float32) if num_statistics else None
    h_dtype = residual.dtype if keeps_h else None

    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        outputs: Outputs | None = None,
    ) -> Outputs:
        if outputs is None:
            y = allocate(sizes, strides, y_dtype)
            h = None if h_dtype is None else allocate(sizes, strides, h_dtype)
            statistics = None if statistics_layout is None else allocate(*statistics_layout)
        else:
            y, h, statistics = outputs
        x2, residual2, y2, h2 = x, residual, y, h
        if matrix is not None:
            x2, y2 = _as_matrix(x, matrix), alias(y, matrix, (matrix[1], 1))
            residual2 = None if residual is None else _as_matrix(residual, matrix)
            h2 = None if h is None else alias(h, matrix, (matrix[1], 1))
        if clusters:
            function(x2, residual2, weight, bias, y2, h2, statistics, eps, clusters)
        return y, h, statistics

    return forward


def _as_matrix(t: Tensor, shape: tuple[int, int]) -> Tensor:
    return alias(t, shape, (shape[1], 1)) if t.is_contiguous() else t.view(shape)


def launch_operator(
    kind: str,
    eps: float,
    weight_offset: float,
    save: str,
    out_dtype: torch.dtype | None,
    keeps_h: bool,
    keeps_statistics: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Outputs:
    """(y, h, statistics) by the registered operator.

    Raises: as ``check_norm``.
    """
    op = f"{kind}_norm"
    check_norm(op, x, weight, bias, residual, eps, weight_offset, save, out_dtype)
    x2, residual2 = as_rows(op, "x", x), None if residual is None else as_rows(op, "residual", residual)
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    h = torch.empty_like(residual, memory_format=torch.contiguous_format) if keeps_h else None
    statistics = None
    if keeps_statistics:
        statistics = x.new_empty(_num_statistics(kind, save), x2.shape[0], dtype=torch.float32)
    y2, h2 = as_rows(op, "y", y), None if h is None else as_rows(op, "h", h)
    forward_op(x2, residual2, weight, bias, y2, h2, statistics, kind, eps, weight_offset)
    return y, h, statistics


def _num_statistics(kind: str, save: str) -> int:
    return 2 if kind == "layer" and save == "input" else 1


def run_forward(
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
    """A forward of matrices, into y, h and statistics."""
    if not x.shape[0]:
        return
    save = "output" if kind == "layer" and statistics is not None and statistics.shape[0] == 1 else "input"
    keeps = (h is not None, statistics is not None)
    forward = plan_forward(kind, eps, weight_offset, save, y.dtype, *keeps, x, weight, bias, residual)
    forward(x, weight, bias, residual, (y, h, statistics))


def run_backward(
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
    """Fill dx, dresidual, dw and db; dw and db are added to where ``accumulate_*`` says so.

    ``statistics``: those of ``run_forward``, with the mean for a layer norm whose input was saved.
    """
    if not saved.shape[0]:
        for gradient, accumulate in ((dw, accumulate_w), (db, accumulate_b)):
            if gradient is not None and not accumulate:
                gradient.zero_()
        return
    key = (
        kind,
        save,
        weight_offset,
        accumulate_w,
        accumulate_b,
        rows_key(saved),
        rows_key(dy),
        None if dh_out is None else rows_key(dh_out),
        None if weight is None else _vector_key(weight),
        None if bias is None else _vector_key(bias),
        None if dx is None else dx.dtype,
        None if dresidual is None else dresidual.dtype,
        None if dw is None else dw.dtype,
        None if db is None else db.dtype,
    )
    plan = _plans.get(key)
    if plan is None:
        gradients = (saved, dy, dh_out, weight, bias, dx, dresidual, dw, db)
        plan = _plans[key] = _plan_backward(kind, save, weight_offset, (accumulate_w, accumulate_b), *gradients)
    rows, n = saved.shape
    clusters = min(-(-rows // plan.rows_per_cluster), plan.max_clusters)
    partials = None
    if dw is not None or db is not None:
        sums = 2 if dw is not None and db is not None else 1
        columns = -(-n // SUM_COLUMNS) * SUM_COLUMNS
        partials = plan.allocate((sums, clusters, columns), (clusters * columns, columns, 1), torch.float32)
    plan.function(saved, dy, dh_out, weight, bias, statistics, dx, dresidual, partials, dw, db, eps, clusters)


forward_op = mutating_op(
    "norm_forward",
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!) y, Tensor(b!)? h, "
    "Tensor(c!)? statistics, str kind, float eps, float weight_offset",
    run_forward,
)
backward_op = mutating_op(
    "norm_backward",
    "Tensor saved, Tensor dy, Tensor? dh_out, Tensor? weight, Tensor? bias, Tensor statistics, "
    "Tensor(a!)? dx, Tensor(b!)? dresidual, Tensor(c!)? dw, Tensor(d!)? db, str kind, str save, float eps, "
    "float weight_offset, bool accumulate_w, bool accumulate_b",
    run_backward,
)


def _vector_key(t: Tensor) -> tuple:
    return t.dtype, t.shape, t.get_device(), t.data_ptr() & 15, t.is_contiguous()


def _plan_forward(kind, weight_offset, y_dtype, keeps_h, num_statistics, x, residual, weight, bias) -> Plan:
    from cute_kernels.norm.kernel import norm_forward

    index, n = x.get_device(), x.shape[-1]
    streams = [x] if residual is None else [x, residual]
    arch = arch_of(index)
    facts = geometry(n, streams, [y_dtype])
    column_bytes = sum(t.element_size() for t in (weight, bias) if t is not None)
    config = forward_config(arch, kind, n, tuple(t.element_size() for t in streams), column_bytes, *facts)
    function = norm_forward(
        arch,
        kind,
        *_dtypes(x, residual, weight, bias),
        cutlass_dtype(y_dtype),
        weight_offset,
        keeps_h,
        num_statistics,
        _column_alignment(weight, bias),
        config,
    )
    return _plan(function, kind, config, x)


def _plan_backward(kind, save, weight_offset, accumulate, saved, dy, dh_out, weight, bias, *gradients) -> Plan:
    from cute_kernels.norm.kernel import norm_backward

    index, n = saved.get_device(), saved.shape[-1]
    streams = [t for t in (saved, dy, dh_out) if t is not None]
    arch = arch_of(index)
    facts = geometry(n, streams, [t.dtype for t in gradients[:2] if t is not None])
    config = backward_config(arch, kind, save, n, tuple(t.element_size() for t in streams), *facts)
    function = norm_backward(
        arch,
        kind,
        str.__str__(save),  # a StrEnum's member would be another key
        *_dtypes(saved, dy, dh_out, weight, bias, *gradients),
        weight_offset,
        accumulate,
        _column_alignment(weight, bias),
        config,
    )
    return _plan(function, kind, config, saved)


def _plan(function, kind: str, config: NormConfig, like: Tensor) -> Plan:
    num_sms = sm_count(like.get_device())
    persistent = config.persistent_clusters(num_sms, many_ctas(kind, config.layout.n))
    if config.layout.n == 1:
        function = resolved(function)
    return Plan(function, config.rows_per_cluster, config.max_clusters(num_sms), persistent, allocator(like))


def _dtypes(*tensors: Tensor | None) -> list:
    return [None if t is None else cutlass_dtype(t.dtype) for t in tensors]


def _column_alignment(*vectors: Tensor | None) -> int:
    """16 if all per-column vectors start on 16 bytes, else 0."""
    return 16 if all(v is None or v.data_ptr() % 16 == 0 for v in vectors) else 0
