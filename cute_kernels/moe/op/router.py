"""router_logits on torch tensors: the public function, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.gemm import linear
from cute_kernels.gemm.functional import fp32_product
from cute_kernels.moe import reference
from cute_kernels.moe.checks import check_router_logits
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, uses_reference


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend | None = None) -> Tensor:
    """``x weight^T + bias`` in fp32, a token's bits independent of the other tokens.

    Args:
        x: (..., H) bf16, fp16 or fp32.
        weight: (E, H) of x's dtype, or fp32. A gradient is added to its ``main_grad`` (fp32), if it has one.
        bias: (E,) bf16, fp16 or fp32; None: none.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., E) fp32.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        bf16 and fp16 weights: ``linear`` with results in fp32. fp32 weights: one chain of products of the factors'
        exact bf16 parts, the smallest first, as of fp32 products inside ``batch_invariant``, whose bits these are where
        H is a multiple of 16. Parts below 2^-24 of a product are left out; infinities give NaN. The gradients are such
        products, too, dweight's over the tokens in their order: reproducible, but micro-batches have other bits than
        one batch.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> moe.router_logits(torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(3, 16)).dtype
        torch.float32
    """
    if uses_reference("router_logits", x, backend):
        return reference.router_logits(x, weight, bias)
    check_router_logits(x, weight, bias)
    if weight.dtype is not torch.float32:
        return linear(x, weight, bias, out_dtype=torch.float32)
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype is torch.float16:  # two bf16 parts
        rows = rows.float()
    if differentiates(rows, weight, bias):
        logits = apply(_RouterFunction, rows, weight, bias)
    else:
        logits = fp32_product(rows, weight.t(), torch.float32, bias)
    return logits.view(*x.shape[:-1], weight.shape[0])


class _RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, bias)
        ctx.dtype, ctx.main_grads = x.dtype, tuple(getattr(t, "main_grad", None) for t in (weight, bias))
        return fp32_product(x, weight.t(), torch.float32, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlogits):
        x, weight, bias = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        if needs_x:
            dx = fp32_product(dlogits, weight, ctx.dtype)
        if needs_gradient(needs_weight, weight, ctx.main_grads[0]):
            into, dweight = gradient_buffer("router_logits", "weight", weight, ctx.main_grads[0])
            fp32_product(dlogits.t(), x, torch.float32, into=into if dweight is None else into.zero_())
        if needs_gradient(needs_bias, bias, ctx.main_grads[1]):
            into, dbias = gradient_buffer("router_logits", "bias", bias, ctx.main_grads[1])
            target = into if dbias is None else torch.zeros(into.shape, dtype=torch.float32, device=into.device)
            ones = torch.ones(dlogits.shape[0], 1, dtype=torch.bfloat16, device=into.device)
            fp32_product(dlogits.t(), ones, torch.float32, into=target.unsqueeze(1))
            dbias = None if dbias is None else target.to(into.dtype)
        return dx, dweight, dbias
