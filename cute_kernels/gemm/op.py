"""mm and linear on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import MAX_SIZE, Activation, check_linear, check_mm, check_separate, operand_major
from cute_kernels.gemm.launch import (
    _forced,
    activation_backward_op,
    calls,
    gemm_op,
    plan_product,
    run_activation_backward,
    run_gemm,
)
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

KEEPING_Z = ("silu", "gelu")


def mm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Matrix product ``a b``, the bits of a row independent of the other rows.

    Args:
        a: (M, K) bf16 or fp16, of any strides; rows or columns that start on 16 bytes take the fast kernels.
        b: (K, N) of a's dtype, of any strides.
        out_dtype: bf16, fp16 or fp32; a's (or out's) if None.
        out: (M, N) to write to, last dimension contiguous, in memory of its own; only where neither a gradient nor a
            tangent is wanted. torch.compile may drop a copy that was made for it, which is then an error.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (M, N) in ``out_dtype``, row-major; ``out`` if given.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The contract ``serial_k16``: exact products, one fp32 accumulator over the whole K, ascending, in the tensor
        core's steps of 16, from zero; one rounding to the output's dtype. A row of the product, and of the gradient of
        a, has the same bits whatever M, the row's place, and the other rows. Kernels differ by shape, bits do not (on
        SM100 compiled, not shown). The incoming gradient is rounded to a's dtype. The gradient of b sums over the rows
        of a in their order: it is reproducible, and unchanged by rows of zeros at the end.

    Example:
        >>> import torch
        >>> from cute_kernels import mm
        >>> a, b = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(16, 2, dtype=torch.bfloat16)
        >>> mm(a, b, out_dtype=torch.float32)[0]
        tensor([16., 16.])
    """
    if not isinstance(a, Tensor) or backend is not None or not a.is_cuda:
        expect(backend in (None, "reference"), "mm", "backend", "be None or 'reference'", repr(backend))
        return reference.mm(a, b, out_dtype=out_dtype, out=out)
    try:
        call = key = None
        if out is None and not is_dynamo_compiling() and not _forced:
            key = ("mm", a.shape, b.shape, out_dtype, is_grad_enabled())
            call = calls.find(key, a, b)
        if call is not None:
            product, differentiates = call
            return _apply_mm(a, b, (product, out_dtype)) if differentiates else product(a, b, None)[0]
        eager = is_plain(a, b, out)
        differentiates = is_grad_enabled() and (a.requires_grad or b.requires_grad)
        differentiates = differentiates or (out is None and forward_ad._current_level >= 0)  # autograd refuses tangents
        if differentiates and out is not None:
            check_mm(a, b, out_dtype, out)
        if out is None:
            product = plan_product("mm", a, b, None, None, out_dtype, False) if eager else None
            if differentiates:
                result = (_apply_mm if eager else _MmFunction.apply)(a, b, (product, out_dtype))
            else:
                result = _mm_forward(a, b, product, out_dtype)
            if eager and key is not None:
                calls.remember(key, (product, differentiates), a, b)
            return result
        # What a plan's key does not hold
        if out_dtype is not None or out.requires_grad or forward_ad._current_level >= 0 or (eager and out.is_neg()):
            check_mm(a, b, out_dtype, out)
        if eager:
            check_separate(out, a, b)
        _run(a, b, out, trans_b=True, check=(check_mm, (a, b, out_dtype, out)))
        if eager:  # a registered operator does it by itself
            increment_version(out)
    except Exception:  # an argument that is no matrix, or no dtype, or what the kernel's entry refuses
        check_mm(a, b, out_dtype, out)
        raise
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    num_valid_tokens: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """``act(x weight^T + bias)``, the bits of a token independent of the other tokens.

    Args:
        x: (..., K) bf16 or fp16; the leading dimensions must collapse to rows of one stride.
        weight: (N, K) of x's dtype, of any strides.
        bias: (N,) bf16, fp16 or fp32; added in fp32. None: no bias.
        out_dtype: bf16, fp16 or fp32; x's if None.
        activation: None, "relu", "silu" or "gelu" (exact), in fp32 on the unrounded sum.
        num_valid_tokens: int32 tensor of one element on x's device: in the gradients of weight and bias, tokens from
            this one on count as exact zeros, whatever x and the incoming gradient hold there, NaN included.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., N) in ``out_dtype``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The contract ``serial_k16``: exact products, one fp32 accumulator over the whole K, ascending, in the tensor
        core's steps of 16, from zero; one rounding to the output's dtype. A token of the result, and of the gradient of
        x, has the same bits whatever the number of tokens, its place, and the other tokens. Kernels differ by shape,
        bits do not (on SM100 compiled, not shown). The backward differentiates the activation at the sum rounded to the
        output's dtype, which is saved; the incoming gradient is rounded to x's dtype.

        dweight and dbias sum over the tokens in their order, 16 at a time. Where ``weight.main_grad`` (or
        ``bias.main_grad``, fp32) exists, the accumulator starts from it and ``.grad`` stays None: micro-batches split
        at multiples of 16 tokens then give the bits of one batch. In eager mode ``torch.autograd.grad`` of other
        tensors alone leaves it as it is; a compiled backward adds to it nonetheless. A hook of
        ``weight.register_hook``, which would get None, is an error in the backward; a compiled backward does not see
        it. Zero tokens behind, and multiples of 16 of them before the others, change nothing. An incoming gradient is
        copied unless its rows are contiguous and of one stride, or its columns, on 16 bytes.

    Example:
        >>> import torch
        >>> from cute_kernels import linear
        >>> x, weight = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(4, 16, dtype=torch.bfloat16)
        >>> linear(x, -weight, activation="relu").sum().item()
        0.0
        >>> linear(x, weight, torch.ones(4)).shape
        torch.Size([2, 4])
    """
    if not isinstance(x, Tensor) or backend is not None or not x.is_cuda:
        expect(backend in (None, "reference"), "linear", "backend", "be None or 'reference'", repr(backend))
        return reference.linear(
            x, weight, bias, out_dtype=out_dtype, activation=activation, num_valid_tokens=num_valid_tokens
        )

    if num_valid_tokens is not None:  # what the forward's signature does not hold
        check_linear(x, weight, bias, out_dtype, activation, num_valid_tokens)
    try:
        call = key = None
        if not is_dynamo_compiling() and not _forced:
            bias_shape = None if bias is None else bias.shape
            key = ("linear", x.shape, weight.shape, bias_shape, out_dtype, activation, is_grad_enabled())
            call = calls.find(key, x, weight, bias)
        if call is not None:
            eager, (product, differentiates) = True, call
        else:
            eager = is_plain(x, weight, bias)
            differentiates = forward_ad._current_level >= 0 or (
                is_grad_enabled()
                and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
            )
            product = None
            if eager and (x.dim() == 2 or (x.is_contiguous() and x.numel())):
                keeps_z = differentiates and activation in KEEPING_Z
                product = plan_product("linear", x, weight, bias, activation, out_dtype, keeps_z)
        if differentiates:
            arguments = (x, weight, bias, num_valid_tokens, (product, out_dtype, activation))
            y = (_apply_linear if eager else _LinearFunction.apply)(*arguments)
        elif product is None:
            y = _linear_forward(x, weight, bias, out_dtype, activation, False)[0]
        else:
            y = product(x, weight, bias)[0]
        if call is None and product is not None and key is not None:
            calls.remember(key, (product, differentiates), x, weight, bias)
        return y
    except Exception:  # no tensor, of no strides or dimensions, no dtype, rows of no one stride, what the entry refuses
        check_linear(x, weight, bias, out_dtype, activation, num_valid_tokens)
        raise


def _mm_forward(a: Tensor, b: Tensor, product: Callable | None, out_dtype: torch.dtype | None) -> Tensor:
    if product is not None:
        return product(a, b, None)[0]
    check_mm(a, b, out_dtype, None)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
    gemm_op(a, b, out, trans_b=True)
    return out


def _linear_forward(x, weight, bias, out_dtype, activation, keeps_z) -> tuple[Tensor, Tensor | None]:
    """y and, if it is kept, what the activation is applied to."""
    rows = as_rows("linear", "x", x)
    m, n = rows.shape[0], weight.shape[0]
    if m > MAX_SIZE:  # before there is an output of that size
        check_linear(x, weight, bias, out_dtype, activation, None)
    y = x.new_empty(*x.shape[:-1], n, dtype=out_dtype or x.dtype)
    z = torch.empty_like(y) if keeps_z else None
    z_rows = None if z is None else z.view(m, n)
    check = (check_linear, (x, weight, bias, out_dtype, activation, None))
    _run(rows, weight, y.view(m, n), z_rows, bias, None, activation, check=check)
    return y, z


class _MmFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, options):
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        along_rows, along_columns = b.stride()
        ctx.by_columns = along_rows == 1 and along_columns != 1
        return _mm_forward(a, b, *options)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        (m, n), da, db = dout.shape, None, None
        dout = dout.to((a if b is None else b).dtype)
        if ctx.needs_input_grad[0]:
            da = dout.new_empty(m, b.shape[0])
            _run(dout, b, da)
        if ctx.needs_input_grad[1]:
            if ctx.by_columns:  # the transpose of a row-major matrix: its gradient is one, too
                db = dout.new_empty(n, a.shape[1])
                _run(dout, a, db, trans_a=True, trans_b=True)
                db = db.t()
            else:
                db = dout.new_empty(a.shape[1], n)
                _run(a, dout, db, trans_a=True, trans_b=True)
        return da, db, None


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, num_valid_tokens, options):
        product, out_dtype, activation = options
        if product is None:
            y, z = _linear_forward(x, weight, bias, out_dtype, activation, activation in KEEPING_Z)
        else:
            y, z = product(x, weight, bias)
        kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight, bias, y if activation == "relu" else z, num_valid_tokens)
        ctx.activation = activation
        ctx.main_grads = getattr(weight, "main_grad", None), getattr(bias, "main_grad", None)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight, bias, saved, num_valid_tokens = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_gradient(needs_weight, weight, ctx.main_grads[0])
        needs_bias = needs_gradient(needs_bias, bias, ctx.main_grads[1])
        if num_valid_tokens is not None:
            num_valid_tokens = num_valid_tokens.view(1)
        if ctx.activation is not None:
            dz = torch.empty_like(saved)
            run = run_activation_backward if is_plain(dy) else activation_backward_op
            run(dy, saved, dz, ctx.activation)
            dy = dz
        shape, dz = (*dy.shape[:-1], weight.shape[1]), dy.to(weight.dtype)
        if not (is_plain(dz) and dz.dim() == 2 and operand_major(dz)):
            dz = gradient_rows(dz)
        dx = dweight = dbias = None
        if needs_x:
            dx = dz.new_empty(*shape)
            _run(dz, weight, as_rows("linear", "dx", dx), trans_b=True)
        if needs_weight:
            target, dweight = gradient_buffer("linear", "weight", weight, ctx.main_grads[0])
            rows = as_rows("linear", "x", x)
            _run(dz, rows, target, None, None, num_valid_tokens, None, dweight is None, True, True)
        if needs_bias:
            # The sum over tokens is a product with a column of ones: in the same order, under the same contract
            target, dbias = gradient_buffer("linear", "bias", bias, ctx.main_grads[1])
            tokens = dz.shape[0]
            ones = dz.new_ones((1, tokens + -tokens % 8))[:, :tokens]  # a row that TMA can read, whatever its length
            _run(dz, ones, target.unsqueeze(1), None, None, num_valid_tokens, None, dbias is None, True)
        return dx, dweight, dbias, None, None


_apply_mm, _apply_linear = eager_apply(_MmFunction), eager_apply(_LinearFunction)


def _run(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    valid_k: Tensor | None = None,
    activation: Activation | None = None,
    accumulate: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
    check: tuple[Callable[..., None], tuple] | None = None,
) -> None:
    if is_plain(a, b, d, bias, valid_k):
        run_gemm(a, b, d, z, bias, valid_k, activation, accumulate, trans_a, trans_b, check)
    else:
        if check is not None:
            check[0](*check[1])
        gemm_op(a, b, d, z, bias, valid_k, activation, accumulate, trans_a, trans_b)
