"""attention's forward, and its backward where autograd follows it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.checks import check_layout
from cute_kernels.attention.launch import ForwardCall, attention_backward, attention_forward, attention_into
from cute_kernels.runtime.autograd import apply, eager_apply, first_derivative_only
from cute_kernels.runtime.guarded import GuardedCache
from cute_kernels.runtime.operators import mode_of


def check_differentiable(out: Tensor | None) -> None:
    """Raise ValueError for an ``out``."""
    if out is not None:
        raise ValueError("attention: out must be None where a gradient is wanted, got a tensor")


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *options: object) -> tuple[Tensor, Tensor]:
    """(out, lse), arguments as of ``attention_forward``; ``out``: what to write to."""
    mode = mode_of(q, k, v, out, *options)
    if mode.eager:
        check_layout(q, k, v, out)
        if out is not None:
            return out, attention_into(out, q, k, v, *options)
    found, lse = mode.of(attention_forward)(q, k, v, *options)
    return found if out is None else out.copy_(found), lse


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    """``forward`` with a backward."""
    causal, scale, left, right, softcap, sinks, *lengths = options
    return apply(_Attention, q, k, v, sinks, (causal, scale, left, right, softcap), None, *lengths)


class AttentionCall(NamedTuple):
    """A forward that is ready to be launched, and what a backward is told if a gradient is wanted."""

    forward: ForwardCall
    differentiates: bool
    options: tuple[bool, float, int, int, float]

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, differentiates: bool
    ) -> AttentionCall | None:
        """For plain tensors; None where ``ForwardCall.of`` is."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        forward = ForwardCall.of(q, k, v, causal, scale)
        return None if forward is None else AttentionCall(forward, differentiates, (causal, scale, -1, -1, 0.0))

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        if self.differentiates:
            return _eager_attention(q, k, v, None, self.options, self.forward)
        return self.forward.run(q, k, v)


CALLS: GuardedCache[AttentionCall] = GuardedCache()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        sinks,
        options,
        call,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        seqused_k=None,
    ):
        if call is None:
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
            out, lse = forward(q, k, v, None, *options, sinks, *lengths)
        else:
            out, lse = call.run(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)
        ctx.options, ctx.longest = options, (max_seqlen_q, max_seqlen_k)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sinks, *starts, used_k = saved = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 11
        mode = mode_of(dout, dlse, *saved, *ctx.longest)
        dout = torch.zeros_like(out) if dout is None else _gradient_rows(dout, mode.eager)
        if dlse is not None:
            dlse = dlse.contiguous().resolve_neg()
        lengths = *starts, *ctx.longest, used_k
        gradients = mode.of(attention_backward)(dout, q, k, v, out, lse, dlse, *ctx.options, sinks, *lengths)
        needed = zip(gradients, ctx.needs_input_grad[:4], strict=True)
        return *(gradient if needs else None for gradient, needs in needed), *(None,) * 7


_eager_attention = eager_apply(_Attention)


def _gradient_rows(t: Tensor, eager: bool) -> Tensor:
    """An incoming gradient as TMA can address it; a copy if its rows do not start on 16 bytes (an expanded scalar)."""
    if not eager:
        return t.contiguous()
    *outer, last = zip(t.shape, t.stride(), strict=True)
    addresses = [stride * t.itemsize for size, stride in outer if size > 1]
    good = last[1] == 1 and not t.data_ptr() & 15 and not t.is_neg()
    if good and all(address and not address & 15 for address in addresses):
        return t
    return t.clone(memory_format=torch.contiguous_format).resolve_neg()
