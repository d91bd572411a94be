"""layer_norm and rms_norm on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.norm import reference
from cute_kernels.norm.checks import Save, check_norm
from cute_kernels.norm.launch import NormForwardCall, norm_backward, norm_forward
from cute_kernels.runtime.autograd import (
    apply,
    as_rows,
    eager_apply,
    first_derivative_only,
    gradient_buffer,
    gradient_rows,
    needs_gradient,
)
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.guarded import GuardedCache, guardable
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float

Norm = Tensor | tuple[Tensor, Tensor]


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: Literal[False] = False,
    backend: Backend | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: Literal[True],
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool,
    backend: Backend | None = None,
) -> Norm: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    backend: Backend | None = None,
) -> Norm:
    """Root-mean-square norm of each row: ``h * rsqrt(mean(h^2) + eps) * (weight + weight_offset) + bias``.

    Args:
        x: (..., C) bf16, fp16 or fp32; C from 1 to 262,144; last dimension contiguous; the leading dimensions must
            collapse to rows with one stride.
        weight: (C,) bf16, fp16 or fp32; None: 1.
        bias: (C,) bf16, fp16 or fp32; None: 0.
        residual: (..., C) in x's dtype or fp32. h = x + residual is rounded to the residual's dtype; the rounded value
            is normalised, returned and differentiated. Without a residual h = x.
        eps: added to the mean square, a real number > 0.
        weight_offset: added to the weight in fp32, a real number (1.0 for zero-centred weights).
        save: the tensor that the backward keeps. "input": h. "output": y, which a following linear layer keeps anyway;
            x_hat is recovered as (y - bias) / W with abs(W) clamped to eps from below, and is 0 where W == 0: such a
            column gets dw = 0. Since y - bias cancels, the errors of dw and dx grow like abs(bias) / abs(W). Not with a
            residual.
        out_dtype: dtype of y: bf16, fp16 or fp32; x's if None.
        return_residual: return (y, h) instead of y.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        y of x's shape; with ``return_residual`` (y, h), h of the residual's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic and statistics. A row of y and of dx has the same bits whatever the number of rows and its place
        among them, in matrices of the same dtypes and the same alignment of rows. (A base or stride off 16 bytes takes
        narrower accesses, hence another order of summation.)

        dw and db are summed in fp32. Their order is fixed by C, the dtypes, ``save``, the rows' number, strides and
        alignment, the number of SMs, and whether a gradient of h arrives: each team of a CTA adds its rows in ascending
        order, then the teams, then 32 interleaved sequences of CTAs. They are bitwise reproducible run to run.

        If ``weight.main_grad`` (fp32) exists, dw is added to it, on the stream of the forward, and ``weight.grad``
        stays None: ``torch.autograd.grad`` cannot return it. In eager mode ``torch.autograd.grad`` of other tensors
        alone leaves ``main_grad`` as it is; a compiled backward adds to it nonetheless. A hook of
        ``weight.register_hook``, which would get None, is an error in the backward; a compiled backward does not see
        it. The same holds for the bias. An incoming gradient without contiguous rows is copied.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.

    Example:
        >>> import torch
        >>> from cute_kernels import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2)).square().mean().round(decimals=4)
        tensor(1.)
        >>> y, h = rms_norm(torch.ones(2, 4), residual=torch.ones(2, 4), return_residual=True)
        >>> y.shape, h[0, 0].item()
        (torch.Size([2, 4]), 2.0)
    """
    return _norm(
        "rms_norm", "rms", x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual, backend
    )


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: Literal[False] = False,
    backend: Backend | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: Literal[True],
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool,
    backend: Backend | None = None,
) -> Norm: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    save: Save = "input",
    out_dtype: torch.dtype | None = None,
    return_residual: bool = False,
    backend: Backend | None = None,
) -> Norm:
    """Layer norm of each row: ``(h - mean(h)) * rsqrt(var(h) + eps) * (weight + weight_offset) + bias``.

    The variance is the population variance, centred in two steps.

    Args:
        x: (..., C) bf16, fp16 or fp32; C from 1 to 262,144; last dimension contiguous; the leading dimensions must
            collapse to rows with one stride.
        weight: (C,) bf16, fp16 or fp32; None: 1.
        bias: (C,) bf16, fp16 or fp32; None: 0.
        residual: (..., C) in x's dtype or fp32. h = x + residual is rounded to the residual's dtype; the rounded value
            is normalised, returned and differentiated. Without a residual h = x.
        eps: added to the variance, a real number > 0.
        weight_offset: added to the weight in fp32, a real number (1.0 for zero-centred weights).
        save: the tensor that the backward keeps. "input": h. "output": y, which a following linear layer keeps anyway;
            x_hat is recovered as (y - bias) / W with abs(W) clamped to eps from below, and is 0 where W == 0: such a
            column gets dw = 0. Since y - bias cancels, the errors of dw and dx grow like abs(bias) / abs(W) (relative
            error of dw 7e-3 for weights near 1 and biases of standard deviation 4). Not with a residual.
        out_dtype: dtype of y: bf16, fp16 or fp32; x's if None.
        return_residual: return (y, h) instead of y.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        y of x's shape; with ``return_residual`` (y, h), h of the residual's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic and statistics. A row of y and of dx has the same bits whatever the number of rows and its place
        among them, in matrices of the same dtypes and the same alignment of rows. (A base or stride off 16 bytes takes
        narrower accesses, hence another order of summation.)

        dw and db are summed in fp32. Their order is fixed by C, the dtypes, ``save``, the rows' number, strides and
        alignment, the number of SMs, and whether a gradient of h arrives: each team of a CTA adds its rows in ascending
        order, then the teams, then 32 interleaved sequences of CTAs. They are bitwise reproducible run to run.

        If ``weight.main_grad`` (fp32) exists, dw is added to it, on the stream of the forward, and ``weight.grad``
        stays None: ``torch.autograd.grad`` cannot return it. In eager mode ``torch.autograd.grad`` of other tensors
        alone leaves ``main_grad`` as it is; a compiled backward adds to it nonetheless. A hook of
        ``weight.register_hook``, which would get None, is an error in the backward; a compiled backward does not see
        it. The same holds for the bias. An incoming gradient without contiguous rows is copied.

    Source:
        Ba, Kiros and Hinton, Layer Normalization, 2016, equation 4.

    Example:
        >>> import torch
        >>> from cute_kernels import layer_norm
        >>> y = layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2))
        >>> y.round(decimals=3)
        tensor([[-1.,  1.]])
    """
    return _norm(
        "layer_norm", "layer", x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual, backend
    )


def _norm(
    op: str,
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    save: Save,
    out_dtype: torch.dtype | None,
    return_residual: bool,
    backend: Backend | None,
) -> Norm:
    may_be_cached = (
        not is_dynamo_compiling()
        and backend is None
        and x is not None
        and type(eps) is float
        and type(weight_offset) is float
        and type(save) is str
        and type(return_residual) is bool
        and (out_dtype is None or type(out_dtype) is torch.dtype)
    )
    if may_be_cached:
        given = [t for t in (x, weight, bias, residual) if t is not None]
        absent = weight is None, bias is None, residual is None  # (x, weight) is not (x, bias)
        key = op, eps, weight_offset, save, out_dtype, return_residual, absent
        call = CALLS.get(key, *given)
        if call is not None:
            y, h = call.run(x, weight, bias, residual)
            return (y, h) if return_residual else y
    if uses_reference(op, x, backend):
        return getattr(reference, op)(
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
    if type(eps) is not float or type(weight_offset) is not float:
        eps, weight_offset = as_float(eps), as_float(weight_offset)
    check_norm(op, x, weight, bias, residual, eps, weight_offset, save, out_dtype)
    options = op, kind, eps, weight_offset, save, out_dtype
    wants_gradient = differentiates(x, weight, bias, residual)
    call = None
    if may_be_cached and guardable(*given):
        call = NormCall.of(options, x, weight, bias, residual, wants_gradient, return_residual)
    if call is not None:
        y, h = call.run(x, weight, bias, residual)
        CALLS.put(key, call, *given)
    elif wants_gradient:
        if residual is x and is_dynamo_compiling():  # which takes a tensor once
            residual = residual.view_as(residual)
        y = apply(_NormFunction, options, x, weight, bias, residual, None)
        y, h = (y, x) if residual is None else y
    else:
        y, h, _ = _forward(options, x, weight, bias, residual, residual is not None and bool(return_residual), 0)
        h = x if residual is None else h
    return (y, h) if return_residual else y


def _forward(
    options: tuple,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    returns_h: bool,
    num_statistics: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, h, statistics), None where they are not asked for."""
    op, kind, eps, weight_offset, _, out_dtype = options
    mode, shape, h, statistics = mode_of(x, weight, bias, residual), x.shape, None, None
    y = mode.empty(x, shape, out_dtype or x.dtype)
    if returns_h:
        h = mode.empty(residual, shape, residual.dtype)
    if num_statistics:
        rows = shape[0] if len(shape) == 2 else shape[:-1].numel()
        statistics = mode.empty(x, (num_statistics, rows), torch.float32)
    x2, residual2, y2, h2 = x, residual, y, h
    if len(shape) != 2:
        x2, y2 = as_rows(op, "x", x), as_rows(op, "y", y)
        residual2 = None if residual is None else as_rows(op, "residual", residual)
        h2 = None if h is None else as_rows(op, "h", h)
    mode.of(norm_forward)(x2, residual2, weight, bias, y2, h2, statistics, kind, eps, weight_offset)
    return y, h, statistics


def _num_statistics(kind: str, save: str) -> int:
    """How many a backward needs: rstd, and the mean for a layer norm whose input is saved."""
    return 2 if kind == "layer" and save == "input" else 1


class NormCall(NamedTuple):
    """A forward that is ready to be launched, and what a backward is told if a gradient is wanted."""

    forward: NormForwardCall
    differentiates: bool
    options: tuple

    @staticmethod
    def of(
        options: tuple,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        differentiates: bool,
        return_residual: bool,
    ) -> NormCall | None:
        """For plain tensors; None where ``NormForwardCall.of`` is."""
        _, kind, eps, weight_offset, save, out_dtype = options
        has_h = residual is not None and (differentiates or return_residual)
        num_statistics = _num_statistics(kind, save) if differentiates else 0
        forward = NormForwardCall.of(
            x, weight, bias, residual, out_dtype or x.dtype, has_h, num_statistics, kind, eps, weight_offset
        )
        return None if forward is None else NormCall(forward, differentiates, options)

    def run(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(y, h); h is x without a residual, else None where it is not asked for."""
        if self.differentiates:
            y = _eager_norm(self.options, x, weight, bias, residual, self.forward)
            return (y, x) if residual is None else y
        y, h, _ = self.forward.run(x, weight, bias, residual)
        return y, x if residual is None else h


CALLS: GuardedCache[NormCall] = GuardedCache()


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x, weight, bias, residual, call):
        _, kind, _, _, save, _ = options
        if call is None:
            num_statistics = _num_statistics(kind, save)
            y, h, statistics = _forward(options, x, weight, bias, residual, residual is not None, num_statistics)
        else:
            y, h, statistics = call.run(x, weight, bias, residual)
        saved = y if save == "output" else x if residual is None else h
        ctx.save_for_backward(saved, weight, bias, statistics)
        main_grads = getattr(weight, "main_grad", None), getattr(bias, "main_grad", None)
        ctx.call = options, x.dtype, main_grads
        if residual is None:
            return y
        ctx.set_materialize_grads(False)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[4]):
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy, dh_out=None):
        saved, weight, bias, statistics = ctx.saved_tensors
        (op, kind, eps, weight_offset, save, _), x_dtype, (w_main_grad, b_main_grad) = ctx.call
        _, needs_x, needs_w, needs_b, needs_residual, _ = ctx.needs_input_grad
        if dy is None:
            # y was not used: the identity from h to x and residual is all that is left
            dx = dh_out.to(x_dtype) if needs_x and dh_out is not None else None
            return None, dx, None, None, dh_out if needs_residual else None, None
        needs_w = needs_gradient(needs_w, weight, w_main_grad)
        needs_b = needs_gradient(needs_b, bias, b_main_grad)
        dw = dw_result = db = db_result = None
        if needs_w:
            dw, dw_result = gradient_buffer(op, "weight", weight, w_main_grad)
        if needs_b:
            db, db_result = gradient_buffer(op, "bias", bias, b_main_grad)
        mode = mode_of(saved, dy, dh_out, weight, bias, dw, db)
        # One gradient of h serves x and residual; a second copy is written where their dtypes differ
        dx = mode.empty(saved, saved.shape, x_dtype) if needs_x else None
        dresidual = dx
        if needs_residual and (dx is None or saved.dtype is not x_dtype):  # the residual's dtype is that of h
            dresidual = mode.empty(saved, saved.shape, saved.dtype)
        first, second = (dresidual, None) if dx is None else (dx, None if dresidual is dx else dresidual)
        mode.of(norm_backward)(
            as_rows(op, "x", saved),
            gradient_rows(dy, mode.eager),
            None if dh_out is None else gradient_rows(dh_out, mode.eager),
            weight,
            bias if save == "output" else None,
            statistics,
            None if first is None else as_rows(op, "dx", first),
            None if second is None else as_rows(op, "dresidual", second),
            dw,
            db,
            kind,
            save,
            eps,
            weight_offset,
            needs_w and dw_result is None,
            needs_b and db_result is None,
        )
        return None, dx, dw_result, db_result, dresidual if needs_residual else None, None


_eager_norm = eager_apply(_NormFunction)
