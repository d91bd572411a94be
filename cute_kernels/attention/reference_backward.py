"""The backward of attention in plain torch: the formulas, and the contract of the kernels.

``attention_backward`` is computed in fp32 (fp64 of fp64), rounded once at the end. ``kv_grid_backward`` is the contract
that the kernels keep: p from the stored lse, partials of dq by blocks of keys, dk and dv by heads, each added in its
order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.attention.config import grid_for
from cute_kernels.attention.reference import LOG2E, _fma, visible
from cute_kernels.runtime.autograd import without_autocast

Gradients = tuple[Tensor, Tensor, Tensor]


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    """(dq, dk, dv) of dense batches, from what the forward returned.

    p = exp(s - lse), dp = dout v^T, ds = p (dp - D) with D = sum(dout * out) - dlse; dv = p^T dout, dq = scale ds k and
    dk = scale ds^T q.
    """
    wide = torch.promote_types(torch.float32, q.dtype)
    pairs, group = k.shape[2], q.shape[2] // k.shape[2]
    with without_autocast(q):
        queries, gradient, result = (t.to(wide).transpose(1, 2) for t in (q, dout, out))
        keys, values = (t.to(wide).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
        delta = (gradient * result).sum(-1)
        if dlse is not None:
            delta = delta - dlse
        scores = queries @ keys.mT * scale
        scores = scores.masked_fill(~visible(q.shape[1], k.shape[1], causal, None, q.device), -math.inf)
        p = torch.exp(scores - lse.to(wide).masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))
        ds = p * (gradient @ values.mT - delta.unsqueeze(-1))
        dq, dk, dv = ds @ keys * scale, ds.mT @ queries * scale, p.mT @ gradient
        dk, dv = (t.unflatten(1, (pairs, group)).sum(2) for t in (dk, dv))
    return tuple(t.transpose(1, 2).to(q.dtype).contiguous() for t in (dq, dk, dv))


def kv_grid_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Gradients:
    """The contract ``kv_grid`` of dq, dk and dv in torch, for tests: products in fp32, every other step as the kernels
    name it.

    Products are summed in torch's own order; all else has the kernels' order.
    """
    block = grid_for(q.shape[3]).block
    dtype, len_q, len_k = q.dtype, q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    scale = torch.tensor(q.shape[3] ** -0.5 if scale is None else scale, dtype=torch.float64).item()
    queries, gradient, result = (t.float().transpose(1, 2) for t in (q, dout, out))
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    delta = (gradient * result).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    row_lse = (lse * LOG2E).masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
    scores = (queries @ keys.mT).masked_fill(~visible(len_q, len_k, causal, None, q.device), -math.inf)
    p = torch.exp2(_fma(scores, torch.tensor(scale * LOG2E, dtype=torch.float32).item(), -row_lse))
    ds = (p * (gradient @ values.mT - delta.unsqueeze(-1))).to(dtype).float()
    p = p.to(dtype).float()

    dq = torch.zeros_like(queries)
    firsts = range(0, len_k, block)
    for first in reversed(firsts) if causal else firsts:
        dq = dq + ds[..., first : first + block] @ keys[:, :, first : first + block]
    of_scale = torch.tensor(scale, dtype=torch.float32)
    dk, dv = (_ascending(t, group) for t in (ds.mT @ queries, p.mT @ gradient))
    return tuple(t.transpose(1, 2).to(dtype).contiguous() for t in (dq * of_scale, dk * of_scale, dv))


def _ascending(t: Tensor, group: int) -> Tensor:
    """(b, h, ...): the sum over the heads of each group, one after the other."""
    heads = t.unflatten(1, (-1, group)).unbind(2)
    total = heads[0]
    for head in heads[1:]:
        total = total + head
    return total
