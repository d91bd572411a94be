"""linear on torch tensors: the public function, allocation, autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.gemm import reference
from cute_kernels.gemm.checks import Activation, check_linear
from cute_kernels.gemm.launch import GemmCall, activation_backward, gemm
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
from cute_kernels.runtime.rows import contiguous_dim

SAVE_PREACT = ("silu", "gelu")


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
    may_be_cached = (
        not is_dynamo_compiling()
        and num_valid_tokens is None
        and backend is None
        and (out_dtype is None or type(out_dtype) is torch.dtype)
        and (activation is None or type(activation) is str)
    )
    if may_be_cached:
        given = (x, weight) if bias is None else (x, weight, bias)
        key = out_dtype, activation, bias is None
        call = CALLS.get(key, *given)
        if call is not None:
            return call.run(x, weight, bias)
    if uses_reference("linear", x, backend):
        return reference.linear(
            x, weight, bias, out_dtype=out_dtype, activation=activation, num_valid_tokens=num_valid_tokens
        )
    check_linear(x, weight, bias, out_dtype, activation, num_valid_tokens)
    wants_gradient = differentiates(x, weight, bias)
    if may_be_cached and guardable(*given):
        has_z = wants_gradient and activation in SAVE_PREACT
        forward = GemmCall.of(x, weight, bias, out_dtype or x.dtype, activation, has_z, False)
        if forward is not None:
            call = LinearCall(forward, wants_gradient, activation)
            y = call.run(x, weight, bias)
            CALLS.put(key, call, *given)
            return y
    if wants_gradient:
        return apply(_LinearFunction, x, weight, bias, out_dtype, activation, num_valid_tokens, None)
    return _linear_forward(x, weight, bias, out_dtype, activation, False)[0]


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
    save_preact: bool,
) -> tuple[Tensor, Tensor | None]:
    """y and, if it is saved, what the activation is applied to."""
    rows = as_rows("linear", "x", x)
    shape, dtype = (*x.shape[:-1], weight.shape[0]), out_dtype or x.dtype
    mode = mode_of(x, weight, bias)
    y = mode.empty(x, shape, dtype)
    z = z_rows = None
    if save_preact:
        z = mode.empty(x, shape, dtype)
        z_rows = as_rows("linear", "z", z)
    mode.of(gemm)(rows, weight, as_rows("linear", "y", y), z_rows, bias, None, activation, False, False, False)
    return y, z


class LinearCall(NamedTuple):
    """A product that is ready to be launched, and what a backward is told if a gradient is wanted."""

    forward: GemmCall
    differentiates: bool
    activation: Activation | None

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y."""
        if self.differentiates:
            return _eager_linear(x, weight, bias, None, self.activation, None, self.forward)
        return self.forward.run(x, weight, bias)[0]


CALLS: GuardedCache[LinearCall] = GuardedCache()


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_dtype, activation, num_valid_tokens, call):
        if call is None:
            y, z = _linear_forward(x, weight, bias, out_dtype, activation, activation in SAVE_PREACT)
        else:
            y, z = call.run(x, weight, bias)
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
        into_weight = into_bias = dx = dweight = dbias = None
        if needs_weight:
            into_weight, dweight = gradient_buffer("linear", "weight", weight, ctx.main_grads[0])
        if needs_bias:
            into_bias, dbias = gradient_buffer("linear", "bias", bias, ctx.main_grads[1])
        mode = mode_of(dy, x, weight, saved, num_valid_tokens, into_weight, into_bias)
        if num_valid_tokens is not None:
            num_valid_tokens = num_valid_tokens.view(1)
        if ctx.activation is not None:
            dz = mode.empty(saved, saved.shape, saved.dtype)
            mode.of(activation_backward)(dy, saved, dz, ctx.activation)
            dy = dz
        shape, dz = (*dy.shape[:-1], weight.shape[1]), dy.to(weight.dtype)
        if not (dz.dim() == 2 and mode.eager and contiguous_dim(dz, dz.shape)):
            dz = gradient_rows(dz, mode.eager)
        product = mode.of(gemm)
        if needs_x:
            dx = mode.empty(dz, shape, dz.dtype)
            product(dz, weight, as_rows("linear", "dx", dx), None, None, None, None, False, False, True)
        if needs_weight:
            rows = as_rows("linear", "x", x)
            product(dz, rows, into_weight, None, None, num_valid_tokens, None, dweight is None, True, True)
        if needs_bias:
            # The sum over tokens is a product with a column of ones: in the same order, under the same contract
            tokens = dz.shape[0]
            ones = dz.new_ones((1, tokens + -tokens % 8))[:, :tokens]  # a row that TMA can read, whatever its length
            product(dz, ones, into_bias.unsqueeze(1), None, None, num_valid_tokens, None, dbias is None, True, False)
        return dx, dweight, dbias, None, None, None, None


_eager_linear = eager_apply(_LinearFunction)
