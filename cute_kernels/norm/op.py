"""layer_norm and rms_norm on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from cute_kernels.norm import reference
from cute_kernels.norm.checks import Save, check_norm
from cute_kernels.norm.launch import backward_op, calls, launch_operator, plan_forward, run_backward
from cute_kernels.runtime.autograd import (
    as_rows,
    eager_apply,
    first_derivative_only,
    gradient_buffer,
    gradient_rows,
    needs_gradient,
)
from cute_kernels.runtime.checks import Backend, expect
from cute_kernels.runtime.operators import is_plain
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


def _check_backend(op: str, backend: Backend | None) -> None:
    expect(backend in (None, "reference"), op, "backend", "be None or 'reference'", repr(backend))


def _norm(kind, x, weight, bias, residual, eps, weight_offset, save, out_dtype, return_residual) -> Norm:
    if type(eps) is not float or type(weight_offset) is not float:
        eps, weight_offset = as_float(eps), as_float(weight_offset)
    try:
        call = key = None
        if (weight is not None or (bias is None and residual is None)) and not is_dynamo_compiling():
            key = (
                kind,
                eps,
                weight_offset,
                type(eps) is type(weight_offset) is float,  # True is equal to 1.0
                save,
                out_dtype,
                not return_residual,
                x.shape,
                None if weight is None else weight.shape,
                None if bias is None else bias.shape,
                None if residual is None else residual.shape,
                is_grad_enabled(),
            )
            third, fourth = bias, residual
            if bias is None:
                third, fourth = residual, None
            call = calls.find(key, x, weight, third, fourth)
        if call is not None:
            differentiates, options = call
            forward = options[0]
        else:
            eager = is_plain(x, weight, bias, residual)
            differentiates = forward_ad._current_level >= 0 or (  # a tangent might be wanted, which autograd refuses
                is_grad_enabled()
                and (
                    x.requires_grad
                    or (weight is not None and weight.requires_grad)
                    or (bias is not None and bias.requires_grad)
                    or (residual is not None and residual.requires_grad)
                )
            )
            keeps_h = residual is not None and (differentiates or bool(return_residual))
            facts = (kind, eps, weight_offset, save, out_dtype, keeps_h, differentiates, x, weight, bias, residual)
            forward = plan_forward(*facts) if eager else None
            residual_dtype = None if residual is None else residual.dtype
            options = (forward, kind, eps, weight_offset, save, out_dtype, x.dtype, residual_dtype)
        if differentiates:
            apply = _NormFunction.apply if forward is None else _apply
            if is_dynamo_compiling() and residual is x:  # which takes a tensor once
                residual = residual.view_as(residual)
            y = apply(x, weight, bias, residual, options)
            if residual is not None:
                y, h = y
        elif forward is None:
            y, h, _ = launch_operator(*facts)
        else:
            y, h, _ = forward(x, weight, bias, residual)
        if call is None and forward is not None and key is not None:
            calls.remember(key, (differentiates, options), x, weight, third, fourth)
    except Exception:  # an argument that is no tensor, an x without dimensions, no key, what the kernel's entry refuses
        check_norm(f"{kind}_norm", x, weight, bias, residual, eps, weight_offset, save, out_dtype)
        raise
    return (y, x if residual is None else h) if return_residual else y


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, options):
        forward, kind, eps, weight_offset, save, out_dtype, _, _ = options
        if forward is None:
            facts = (kind, eps, weight_offset, save, out_dtype, residual is not None, True)
            y, h, statistics = launch_operator(*facts, x, weight, bias, residual)
        else:
            y, h, statistics = forward(x, weight, bias, residual)
        saved = y if save == "output" else x if residual is None else h
        ctx.save_for_backward(saved, weight, bias, statistics)
        ctx.options = options
        ctx.main_grads = getattr(weight, "main_grad", None), getattr(bias, "main_grad", None)
        ctx.set_materialize_grads(False)
        if residual is not None and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(h)
        return y if residual is None else (y, h)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy, dh_out=None):
        saved, weight, bias, statistics = ctx.saved_tensors
        _, kind, eps, weight_offset, save, _, x_dtype, residual_dtype = ctx.options
        w_main_grad, b_main_grad = ctx.main_grads
        needs_x, needs_w, needs_b, needs_residual, _ = ctx.needs_input_grad
        needs_w = needs_gradient(needs_w, weight, w_main_grad)
        needs_b = needs_gradient(needs_b, bias, b_main_grad)
        if dy is None:
            # y was not used: the identity from h to x and residual is all that is left
            return (
                dh_out.to(x_dtype) if needs_x and dh_out is not None else None,
                None,
                None,
                dh_out if needs_residual else None,
                None,
            )
        # One gradient of h serves x and residual; a second copy is written where their dtypes differ
        dx = torch.empty_like(saved, dtype=x_dtype, memory_format=torch.contiguous_format) if needs_x else None
        dresidual = dx
        if needs_residual and (dx is None or residual_dtype is not x_dtype):
            dresidual = torch.empty_like(saved, dtype=residual_dtype, memory_format=torch.contiguous_format)
        op, dw, dw_result, db, db_result = f"{kind}_norm", None, None, None, None
        if needs_w:
            dw, dw_result = gradient_buffer(op, "weight", weight, w_main_grad)
        if needs_b:
            db, db_result = gradient_buffer(op, "bias", bias, b_main_grad)
        first, second = (dresidual, None) if dx is None else (dx, None if dresidual is dx else dresidual)
        run = run_backward if is_plain(saved, dy, dh_out, weight, bias) else backward_op
        run(
            as_rows(op, "x", saved),
            gradient_rows(dy),
            None if dh_out is None else gradient_rows(dh_out),
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
        return dx, dw_result, db_result, dresidual if needs_residual else None, None


_apply = eager_apply(_NormFunction)
