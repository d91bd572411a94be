"""attention where autograd follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.attention.launch import attention_backward, attention_forward
from cute_kernels.runtime.autograd import apply, first_derivative_only
from cute_kernels.runtime.operators import is_eager


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse), as ``attention_forward`` has them."""
    return apply(_Attention, q, k, v, causal, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, lse = attention_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else _gradient_rows(dout)
        if dlse is not None:
            dlse = dlse.contiguous().resolve_neg()
        gradients = attention_backward(dout, q, k, v, out, lse, dlse, *ctx.options)
        needed = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needs else None for gradient, needs in needed), None, None


def _gradient_rows(t: Tensor) -> Tensor:
    """An incoming gradient as TMA can address it; a copy if its rows do not start on 16 bytes (an expanded scalar)."""
    if not is_eager(t):
        return t.contiguous()
    addresses = (stride * t.itemsize for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1)
    good = t.stride(3) == 1 and not t.data_ptr() & 15 and not t.is_neg()
    if good and all(address and not address & 15 for address in addresses):
        return t
    return t.clone(memory_format=torch.contiguous_format).resolve_neg()
