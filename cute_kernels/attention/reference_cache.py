"""Attention over a cache in plain torch, and the merge of partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.attention import reference
from cute_kernels.attention.checks import Window
from cute_kernels.attention.checks_cache import (
    Cache,
    check_cache,
    check_cache_layout,
    check_cache_out,
    check_no_gradient,
    check_options,
    check_values,
)
from cute_kernels.attention.checks_merge import check_merge
from cute_kernels.runtime.real import as_float
from cute_kernels.runtime.strict import has_address


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    check: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """See ``cute_kernels.attention_with_kv_cache``. Lengths on the device are read: the host waits for it."""
    softcap, scale = as_float(softcap), as_float(scale)
    cache = Cache(k_cache, v_cache, cache_seqlens, page_table, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    check_cache(q, cache)
    check_options(q, causal, window, softcap, sinks, scale)
    check_no_gradient(q, cache, sinks)
    if out is not None:
        check_cache_out(out, q, v_cache.shape[3])
    if has_address(q, k_cache, v_cache):
        check_cache_layout(q, cache, out)
    if check:
        check_values(q, cache)
    append(cache)
    options = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "scale": scale}
    packed, lengths = cu_seqlens_q is not None, cache_seqlens.tolist()
    bounds = _bounds(cache, q.shape[0] if packed else q.shape[1])
    outs, lses = [], []
    for sequence, length in enumerate(lengths):
        first, last = bounds[sequence]
        rows = q[first:last] if packed else q[sequence]
        length += (last - first) if k is not None else 0
        keys, values = (gathered(t, page_table, sequence, length) for t in (k_cache, v_cache))
        found = reference.attention(
            rows[None], keys[None], values[None], **options, return_lse=True, compute_dtype=compute_dtype
        )
        outs.append(found[0][0])
        lses.append(found[1][0])
    if packed:
        missing = q.shape[0] - (bounds[-1][1] if bounds else 0)
        outs.append(q.new_zeros(missing, q.shape[1], v_cache.shape[3]))
        lses.append(q.new_full((q.shape[1], missing), -math.inf, dtype=torch.promote_types(torch.float32, q.dtype)))
        result, lse = torch.cat(outs), torch.cat(lses, -1)
    elif outs:
        result, lse = torch.stack(outs), torch.stack(lses)
    else:
        result = q.new_zeros(*q.shape[:-1], v_cache.shape[3])
        lse = q.new_zeros(0, q.shape[2], q.shape[1], dtype=torch.promote_types(torch.float32, q.dtype))
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def append(cache: Cache) -> None:
    """New keys and values behind those of each sequence."""
    if cache.new_k is None:
        return
    packed = cache.cu_seqlens_q is not None
    bounds = _bounds(cache, 0 if packed else cache.new_k.shape[1])
    for sequence, (length, (first, last)) in enumerate(zip(cache.seqlens.tolist(), bounds, strict=True)):
        place = torch.arange(length, length + last - first, device=cache.k.device)
        page, row = torch.full_like(place, sequence), place
        if cache.page_table is not None:
            size = cache.k.shape[1]
            page, row = cache.page_table[sequence].long()[place // size], place % size
        for new, target in ((cache.new_k, cache.k), (cache.new_v, cache.v)):
            target[page, row] = new[first:last] if packed else new[sequence]


def _bounds(cache: Cache, queries: int) -> list[tuple[int, int]]:
    """(First, last + 1) of each sequence's rows: of all, where they are packed."""
    if cache.cu_seqlens_q is None:
        return [(0, queries)] * cache.seqlens.shape[0]
    starts = cache.cu_seqlens_q.tolist()
    return list(zip(starts, starts[1:], strict=False))


def gathered(t: Tensor, page_table: Tensor | None, sequence: int, length: int) -> Tensor:
    """(length, heads, head size) of a sequence, out of a cache."""
    if page_table is None:
        return t[sequence, :length]
    pages = page_table[sequence, : -(-length // t.shape[1])].long()
    return t[pages].flatten(0, 1)[:length]


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See ``cute_kernels.merge_attention``."""
    check_merge(outs, lses)
    dtype = torch.promote_types(torch.float32, outs[0].dtype)
    maximum = torch.stack([lse.to(dtype) for lse in lses]).amax(0)
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    total, merged = None, None
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse.to(dtype) - maximum)
        part = out.to(dtype) * weight.transpose(-1, -2).unsqueeze(-1)
        total = weight if total is None else total + weight
        merged = part if merged is None else merged + part
    empty = total == 0
    reciprocal = (1 / total).masked_fill(empty, 0.0)
    merged = merged * reciprocal.transpose(-1, -2).unsqueeze(-1)
    lse = (maximum + torch.log(total)).masked_fill(empty, -math.inf)
    return merged.to(outs[0].dtype).contiguous(), lse
