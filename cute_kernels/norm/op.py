"""layer_norm and rms_norm on torch tensors: checks, allocation, launch, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels._check import expect
from cute_kernels._op import is_plain, mutating_op
from cute_kernels._target import arch_of, cutlass_dtype, sm_count
from cute_kernels.norm import reference
from cute_kernels.norm.checks import check_norm
from cute_kernels.norm.config import SUM_COLUMNS, backward_config, forward_config

Norm = Tensor | tuple[Tensor, Tensor]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: str = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Norm:
    """Root-mean-square norm of each row: ``h * rsqrt(mean(h^2) + eps) * (weight + weight_offset) + bias``.

    Args:
        x: (..., C) bf16, fp16 or fp32; C from 1 to 262,144; last dimension contiguous; the leading dimensions must
            collapse to rows with one stride.
        weight, bias: (C,) bf16, fp16 or fp32 each; None: 1 and 0.
        residual: (..., C) in x's dtype or fp32. h = x + residual is rounded to the residual's dtype; the rounded value
            is what is normalised, returned and differentiated. Without it h = x.
        eps: added to the mean square, > 0.
        weight_offset: added to the weight in fp32 (1.0 for zero-centred weights).
        save: what the backward keeps. "input": h. "output": y, which a following linear layer keeps anyway; x_hat is
            recovered as (y - bias) / W with |W| clamped to eps from below, so a column with W == 0 gets dw = 0.
        out_dtype: dtype of y; x's if None.
        return_residual: return (y, h) instead of y.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        y of x's shape, or (y, h).

    Raises:
        TypeError, ValueError: naming argument, expected and got.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics: fp32 arithmetic and statistics. A row of y and of dx has the same bits whatever the number of rows and its
    place among them. dw and db are summed in fp32 in an order fixed by C, the dtypes, the number of rows and of SMs:
    each CTA adds its rows in ascending order, then 32 interleaved sequences of CTAs are added in order; bitwise
    reproducible run to run. If ``weight.main_grad`` (fp32) exists, dw is added to it and ``weight.grad`` stays None.
    An incoming gradient without contiguous rows is copied.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.
    """
    if not isinstance(x, Tensor) or backend is not None or not x.is_cuda:
        _check_backend("rms_norm", backend)
        return reference.rms_norm(
            x,
            weight,
            bias=bias,
            residual=residual,
            eps=eps,
            weight_offset=weight_offset,
            save=save,
            out_dtype=out_dtype,
            return_residual=return_residual,
        )
    return _norm("rms", x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: str = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Norm:
    """Layer norm of each row: ``(h - mean(h)) * rsqrt(var(h) + eps) * (weight + weight_offset) + bias``.

    The variance is the population variance, centred in two steps. Arguments, results, errors and numeric contract as in
    ``rms_norm``. With ``save="output"`` the error of dw grows like |bias| / |weight|, since y - bias cancels (dw relative
    error 7e-3 for weights near 1 and biases of standard deviation 4).

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, equation 4.
    """
    if not isinstance(x, Tensor) or backend is not None or not x.is_cuda:
        _check_backend("layer_norm", backend)
        return reference.layer_norm(
            x,
            weight,
            bias,
            residual=residual,
            eps=eps,
            weight_offset=weight_offset,
            save=save,
            out_dtype=out_dtype,
            return_residual=return_residual,
        )
    return _norm("layer", x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual)


def _check_backend(op: str, backend: str | None) -> None:
    expect(backend in (None, "reference"), op, "backend", "be None or 'reference'", repr(backend))


class Options(NamedTuple):
    """What a call fixes beside its tensors."""

    kind: str
    eps: float
    weight_offset: float
    save: str
    out_dtype: torch.dtype | None


def _norm(kind, x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual) -> Norm:
    options = Options(kind, eps, weight_offset, save, out_dtype)
    training = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    keeps_h = residual is not None and (training or return_residual)
    keeps_mean = training and kind == "layer" and save == "input"
    plan = None
    if is_plain(x):
        plan = _forward_plan(options, keeps_h, keeps_mean, training, x, residual, weight, bias)
    else:
        check_norm(f"{kind}_norm", x, weight, bias, residual, eps, save, out_dtype)
    if training:
        y, h = _NormFunction.apply(x, weight, bias, residual, options, plan)
    else:
        y, h, _, _ = _forward(options, plan, keeps_h, False, False, x, weight, bias, residual)
    return (y, h) if return_residual else y


class Plan(NamedTuple):
    """A compiled kernel and how many clusters of it to launch; found once for each signature of a call."""

    function: Callable[..., None]
    rows_per_cluster: int
    max_clusters: int

    def clusters(self, rows: int) -> int:
        return min(-(-rows // self.rows_per_cluster), self.max_clusters)


_plans: dict[tuple, Plan] = {}


def _rows_key(t: Tensor | None) -> tuple | None:
    """Everything about a matrix of rows that a kernel is specialised on, and all that is checked but its row count."""
    if t is None:
        return None
    if t.is_contiguous():
        return t.dtype, t.shape[-1], t.get_device(), t.data_ptr() & 15
    return t.dtype, t.shape, t.get_device(), t.data_ptr() & 15, t.stride()


def _vector_key(t: Tensor | None) -> tuple | None:
    return None if t is None else (t.dtype, t.shape, t.get_device(), t.data_ptr() & 15, t.is_contiguous())


# ------------------------------------------------------------------------------------------------------------- forward


def _forward_plan(options: Options, keeps_h: bool, keeps_mean: bool, keeps_rstd: bool, x, residual, weight, bias) -> Plan:
    key = (
        options,
        keeps_h,
        keeps_mean,
        keeps_rstd,
        _rows_key(x),
        _rows_key(residual),
        _vector_key(weight),
        _vector_key(bias),
    )
    plan = _plans.get(key)
    if plan is None or (residual is not None and residual.shape != x.shape):
        kind, eps, weight_offset, save, out_dtype = options
        check_norm(f"{kind}_norm", x, weight, bias, residual, eps, save, out_dtype)
        from cute_kernels.norm.kernel import norm_forward

        n, index = x.shape[-1], x.get_device()
        rows = [_as_rows(f"{kind}_norm", "x", x)]
        if residual is not None:
            rows.append(_as_rows(f"{kind}_norm", "residual", residual))
        y_dtype = out_dtype or x.dtype
        geometry = _geometry(n, rows, (y_dtype,))
        arch = arch_of(index)
        config = forward_config(arch, kind, n, tuple(t.element_size() for t in rows), *geometry)
        function = norm_forward(
            arch,
            kind,
            cutlass_dtype(x.dtype),
            cutlass_dtype(_dtype(residual)),
            cutlass_dtype(_dtype(weight)),
            cutlass_dtype(_dtype(bias)),
            cutlass_dtype(y_dtype),
            weight_offset,
            keeps_h,
            keeps_mean,
            keeps_rstd,
            _column_alignment(weight, bias),
            config.layout,
        )
        plan = _plans[key] = Plan(function, config.rows_per_cluster, config.max_clusters(sm_count(index)))
    return plan


def _forward(options: Options, plan: Plan | None, keeps_h, keeps_mean, keeps_rstd, x, weight, bias, residual):
    """(y, h, mean, rstd); h is x where there is no residual, None where nobody needs it."""
    shape, device = x.shape, x.device
    flat = len(shape) == 2
    rows = x.numel() // shape[-1]
    y = torch.empty(shape, dtype=options.out_dtype or x.dtype, device=device)
    h = x if residual is None else None
    if keeps_h:
        h = torch.empty(shape, dtype=residual.dtype, device=device)
    mean = torch.empty((rows,), dtype=torch.float32, device=device) if keeps_mean else None
    rstd = torch.empty((rows,), dtype=torch.float32, device=device) if keeps_rstd else None
    if rows:
        op = f"{options.kind}_norm"
        x2 = x if flat else _as_rows(op, "x", x)
        y2 = y if flat else _as_rows(op, "y", y)
        residual2 = residual if flat or residual is None else _as_rows(op, "residual", residual)
        h2 = (h if flat else _as_rows(op, "h", h)) if keeps_h else None
        if plan is None:
            _forward_op(x2, residual2, weight, bias, y2, h2, mean, rstd, options.kind, options.eps, options.weight_offset)
        else:
            plan.function(x2, residual2, weight, bias, y2, h2, mean, rstd, options.eps, plan.clusters(rows))
    return y, h, mean, rstd


def _run_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    kind: str,
    eps: float,
    weight_offset: float,
) -> None:
    """The registered operator: plans from the tensors it is given, and launches."""
    options = Options(kind, eps, weight_offset, "input", y.dtype)
    plan = _forward_plan(options, h is not None, mean is not None, rstd is not None, x, residual, weight, bias)
    plan.function(x, residual, weight, bias, y, h, mean, rstd, eps, plan.clusters(x.shape[0]))


_forward_op = mutating_op(
    "norm_forward",
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!) y, Tensor(b!)? h, Tensor(c!)? mean, "
    "Tensor(d!)? rstd, str kind, float eps, float weight_offset",
    _run_forward,
)


# ------------------------------------------------------------------------------------------------------------ backward


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, options: Options, plan: Plan | None):
        keeps_mean = options.kind == "layer" and options.save == "input"
        y, h, mean, rstd = _forward(options, plan, residual is not None, keeps_mean, True, x, weight, bias, residual)
        ctx.save_for_backward(y if options.save == "output" else h, weight, bias, mean, rstd)
        ctx.options = options
        ctx.x_dtype, ctx.residual_dtype = x.dtype, _dtype(residual)
        ctx.main_grads = (getattr(weight, "main_grad", None), getattr(bias, "main_grad", None))
        ctx.set_materialize_grads(False)
        return y, (h if residual is not None else None)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh):
        saved, weight, bias, mean, rstd = ctx.saved_tensors
        needs_x, needs_w, needs_b, needs_residual = ctx.needs_input_grad[:4]
        if dy is None:
            dx = dh.to(ctx.x_dtype) if needs_x and dh is not None else None
            return dx, None, None, (dh if needs_residual else None), None, None
        # One gradient of h serves x and residual; a second copy is written where their dtypes differ
        dtypes = [d for d, needed in ((ctx.x_dtype, needs_x), (ctx.residual_dtype, needs_residual)) if needed]
        dtypes = list(dict.fromkeys(dtypes))
        grads, dw, db = _backward(ctx.options, dtypes, needs_w, needs_b, ctx.main_grads, saved, dy, dh, weight, bias, mean, rstd)
        dx = grads[dtypes.index(ctx.x_dtype)] if needs_x else None
        dresidual = grads[dtypes.index(ctx.residual_dtype)] if needs_residual else None
        return dx, dw, db, dresidual, None, None


def _backward(options: Options, dtypes, needs_w, needs_b, main_grads, saved, dy, dh, weight, bias, mean, rstd):
    """([gradient of h in each of dtypes], dw, db); a gradient that went into main_grad is returned as None."""
    n = saved.shape[-1]
    rows = saved.numel() // n
    op = f"{options.kind}_norm"
    grads = [torch.empty(saved.shape, dtype=dtype, device=saved.device) for dtype in dtypes]
    dw, dw_out = _gradient_buffer(op, "weight", needs_w, weight, main_grads[0], rows)
    db, db_out = _gradient_buffer(op, "bias", needs_b, bias, main_grads[1], rows)
    if rows:
        saved2 = _as_rows(op, "x", saved)
        dy2 = _gradient_rows(dy, n)
        dh2 = None if dh is None else _gradient_rows(dh, n)
        grads2 = [_as_rows(op, "dx", g) for g in grads] + [None, None]
        accumulate_w, accumulate_b = needs_w and dw_out is None, needs_b and db_out is None
        run = _run_backward if is_plain(saved) else _backward_op
        run(
            saved2,
            dy2,
            dh2,
            weight,
            bias if options.save == "output" else None,
            mean,
            rstd,
            grads2[0],
            grads2[1],
            dw,
            db,
            options.kind,
            options.save,
            options.eps,
            options.weight_offset,
            accumulate_w,
            accumulate_b,
        )
    return grads, dw_out, db_out


def _gradient_buffer(op: str, name: str, needed: bool, parameter, main_grad, rows: int):
    """(what the kernel writes, what autograd gets)."""
    if not needed:
        return None, None
    if main_grad is not None:
        got = f"{tuple(main_grad.shape)} {main_grad.dtype}"
        good = main_grad.shape == parameter.shape and main_grad.dtype == torch.float32 and main_grad.is_contiguous()
        expect(good, op, f"{name}.main_grad", f"be contiguous float32 of shape {tuple(parameter.shape)}", got)
        return main_grad, None
    make = torch.empty if rows else torch.zeros
    gradient = make(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return gradient, gradient


def _run_backward(
    saved: Tensor,
    dy: Tensor,
    dh: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
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
    """The registered operator, and what an eager backward calls."""
    key = (
        kind,
        save,
        weight_offset,
        accumulate_w,
        accumulate_b,
        _rows_key(saved),
        _rows_key(dy),
        _rows_key(dh),
        _vector_key(weight),
        _vector_key(bias),
        _dtype(dx),
        _dtype(dresidual),
        _dtype(dw),
        _dtype(db),
    )
    plan = _plans.get(key)
    if plan is None:
        from cute_kernels.norm.kernel import norm_backward

        n, index = saved.shape[-1], saved.get_device()
        streams = [t for t in (saved, dy, dh) if t is not None]
        outputs = tuple(t.dtype for t in (dx, dresidual) if t is not None)
        geometry = _geometry(n, streams, outputs)
        arch = arch_of(index)
        config = backward_config(arch, kind, save, n, tuple(t.element_size() for t in streams), *geometry)
        function = norm_backward(
            arch,
            kind,
            save,
            *(cutlass_dtype(_dtype(t)) for t in (saved, dy, dh, weight, bias, dx, dresidual, dw, db)),
            weight_offset,
            (accumulate_w, accumulate_b),
            _column_alignment(weight, bias),
            config.layout,
        )
        plan = _plans[key] = Plan(function, config.rows_per_cluster, config.max_clusters(sm_count(index)))
    clusters = plan.clusters(saved.shape[0])
    partials = None
    if dw is not None or db is not None:
        columns = -(-saved.shape[1] // SUM_COLUMNS) * SUM_COLUMNS
        shape = ((dw is not None) + (db is not None), clusters, columns)
        partials = torch.empty(shape, dtype=torch.float32, device=saved.device)
    plan.function(saved, dy, dh, weight, bias, mean, rstd, dx, dresidual, partials, dw, db, eps, clusters)


_backward_op = mutating_op(
    "norm_backward",
    "Tensor saved, Tensor dy, Tensor? dh, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor(a!)? dx, "
    "Tensor(b!)? dresidual, Tensor(c!)? dw, Tensor(d!)? db, str kind, str save, float eps, float weight_offset, "
    "bool accumulate_w, bool accumulate_b",
    _run_backward,
)


# ------------------------------------------------------------------------------------------------------------- helpers


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _as_rows(op: str, name: str, t: Tensor) -> Tensor:
    """``t`` as a matrix of rows, without a copy."""
    if t.dim() == 2:
        return t
    try:
        return t.view(-1, t.shape[-1])
    except RuntimeError:
        expected = "have leading dimensions that collapse to rows of one stride"
        expect(False, op, name, expected, f"shape {tuple(t.shape)}, strides {t.stride()}")


def _gradient_rows(t: Tensor, n: int) -> Tensor:
    """An incoming gradient as a matrix of rows; copied if its layout is not one (an expanded scalar, say)."""
    if not is_plain(t) or (t.stride(-1) != 1 and n > 1):
        t = t.contiguous()
    return t if t.dim() == 2 else t.reshape(-1, n)


def _geometry(n: int, streams: list[Tensor], outputs: tuple[torch.dtype, ...]) -> tuple[int, bool, bool]:
    """(elements that may move together, rows start and end on 16 bytes, rows of all matrices are back to back)."""
    vec = 8
    for t in streams:
        vec = math.gcd(vec, n, t.stride(0) if t.shape[0] > 1 else n, t.data_ptr() // t.element_size())
    aligned = all(vec * t.element_size() % 16 == 0 for t in streams)
    packed = aligned and all(t.stride(0) == n for t in streams)
    return vec, aligned, packed


def _column_alignment(*vectors: Tensor | None) -> int:
    """16 if all per-column vectors start on 16 bytes, else 0."""
    return 16 if all(v is None or v.data_ptr() % 16 == 0 for v in vectors) else 0
