"""The backward of attention in plain torch: the formulas, and the contract of the kernels.

``attention_backward`` is computed in fp32 (fp64 of fp64), rounded once at the end. ``kv_grid_backward`` is the contract
that the kernels keep: p from the stored lse, partials of dq by blocks of keys, dk and dv by heads, each added in its
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cute_kernels.attention.checks import Lengths, Window
from cute_kernels.attention.config import LOG2E, backward_block, backward_sizes, score_factors
from cute_kernels.attention.reference import _fma, visible
from cute_kernels.runtime.autograd import without_autocast

View = Callable[[Tensor], Tensor]


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
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), from what the forward returned; dsinks is fp32, without sinks of no elements.

    With D = sum(dout * out) - dlse: p = exp(s - lse), ds = p (dout v^T - D), times 1 - tanh^2 under a softcap;
    dv = p^T dout, dq = scale ds k, dk = scale ds^T q, and a sink's gradient is the sum of -exp(sink - lse) D.
    """
    wide = torch.promote_types(torch.float32, q.dtype)
    group = q.shape[-2] // k.shape[-2]
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    dsinks = torch.zeros(0 if sinks is None else sinks.shape[0], dtype=torch.float32, device=q.device)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    for of_q, of_k, of_lse in _sequences(q.shape[0], lengths):
        with without_autocast(q):
            queries, gradient, result = (of_q(t).to(wide).transpose(1, 2) for t in (q, dout, out))
            keys, values = (of_k(t).to(wide).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
            of_row = of_lse(lse).to(wide)
            delta = (gradient * result).sum(-1)
            if dlse is not None:
                delta = delta - of_lse(dlse)
            scores = queries @ keys.mT * scale
            slope = torch.ones_like(scores)
            if softcap:
                capped = torch.tanh(scores / softcap)
                scores, slope = softcap * capped, 1 - capped.square()
            seen = visible(queries.shape[2], keys.shape[2], causal, (left, right), q.device)
            scores = scores.masked_fill(~seen, -math.inf)
            p = torch.exp(scores - of_row.masked_fill(of_row == -math.inf, math.inf).unsqueeze(-1))
            ds = p * (gradient @ values.mT - delta.unsqueeze(-1)) * slope
            of_q(dq).copy_((ds @ keys * scale).transpose(1, 2))
            for target, found in ((dk, ds.mT @ queries * scale), (dv, p.mT @ gradient)):
                of_k(target).copy_(found.unflatten(1, (-1, group)).sum(2).transpose(1, 2))
            if sinks is not None:
                dsinks -= (torch.exp(sinks.to(wide).unsqueeze(1) - of_row) * delta).sum((0, 2))
    return *(t.to(q.dtype) for t in (dq, dk, dv)), dsinks


def _sequences(batch: int, lengths: Lengths) -> Iterator[tuple[View, View, View]]:
    """Yield each sequence's views of tensors like q, k and lse as dense batches; all dense ones are one batch."""
    starts_q, starts_k, used = (
        None if t is None else t.tolist() for t in (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k)
    )
    if starts_q is None and starts_k is None and used is None:
        yield (lambda t: t,) * 3
        return
    for i in range(batch if starts_q is None else len(starts_q) - 1):
        rows = slice(None) if starts_q is None else slice(starts_q[i], starts_q[i + 1])
        keys = slice(None) if starts_k is None else slice(starts_k[i], starts_k[i + 1])
        end = None if used is None else used[i]

        def of_q(t, i=i, rows=rows):
            return (t[i] if starts_q is None else t[rows])[None]

        def of_k(t, i=i, keys=keys, end=end):
            return (t[i] if starts_k is None else t[keys])[None, :end]

        def of_lse(t, i=i, rows=rows):
            return (t[i] if starts_q is None else t[:, rows])[None]

        yield of_q, of_k, of_lse


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
    window: Window | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract ``kv_grid`` of dq, dk and dv of a dense batch in torch, for tests: all but the products as the
    kernels name it.

    Products are summed in torch's own order, in fp32; all else has the kernels' order.
    """
    block = backward_block(backward_sizes(q.shape[3], v.shape[3])[0])
    dtype, len_q, len_k = q.dtype, q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    before_tanh, score_scale = (torch.tensor(t, dtype=torch.float32).item() for t in score_factors(scale, softcap))
    queries, gradient, result = (t.float().transpose(1, 2) for t in (q, dout, out))
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    delta = (gradient * result).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    row_lse = (lse * LOG2E).masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
    scores = queries @ keys.mT
    if softcap:
        scores = torch.tanh(scores * before_tanh)
    seen = visible(len_q, len_k, causal, window, q.device)
    p = torch.exp2(_fma(scores.masked_fill(~seen, -math.inf), score_scale, -row_lse))
    sloped = p * _fma(-scores, scores, torch.ones_like(scores)) if softcap else p
    ds = (sloped * (gradient @ values.mT - delta.unsqueeze(-1))).to(dtype).float()
    p = p.to(dtype).float()

    dq = torch.zeros_like(queries)
    firsts = range(0, len_k, block)
    for first in reversed(firsts) if causal or window not in (None, (None, None), (-1, -1)) else firsts:
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
