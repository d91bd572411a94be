"""attention_with_kv_cache on torch tensors: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.attention import reference_cache
from cute_kernels.attention.checks import KERNEL_DTYPES, MAX_LENGTH, Window
from cute_kernels.attention.checks_cache import (
    MAX_ROWS,
    OP,
    Cache,
    check_cache,
    check_cache_layout,
    check_cache_out,
    check_no_gradient,
    check_options,
    check_values,
)
from cute_kernels.attention.config import window_bounds
from cute_kernels.attention.launch import attention_append, attention_decode
from cute_kernels.attention.sharding import attend_over_parts, is_dtensor
from cute_kernels.runtime.checks import FLOATS, Backend, expect_dtype, fail
from cute_kernels.runtime.operators import mode_of, uses_reference
from cute_kernels.runtime.real import as_float


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
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of a few queries over cached keys and values: decode, chunks of a prompt, both in one batch.

    A row of the result has the same bits as in ``attention`` of the whole sequence. There are no gradients, and no
    rotary embedding: q and k come with theirs.

    Args:
        q: (B, Lq, H, D), or (all queries, H, D) with ``cu_seqlens_q``; bf16 or fp16; D a multiple of 8
            up to 256. Any strides that are multiples of 16 bytes, the last dimension contiguous.
        k_cache: (B, capacity, Hkv, D), or with ``page_table`` (pages, page size, Hkv, D), page size 16, 32, 64 or a
            multiple of 128. Written to where ``k`` is given.
        v_cache: like k_cache, or of another head size Dv.
        cache_seqlens: (B,) int32: keys of each sequence before this call. No row behind them is read.
        page_table: (B, pages of a sequence) int32: pages of each sequence, the first keys' first. No entry behind the
            last key's page is never read.
        k: new keys, like q but of Hkv heads, a key for each query; written to the cache behind ``cache_seqlens`` first.
        v: new values, with k.
        cu_seqlens_q: (B + 1,) int32: where packed sequences of queries begin, and where the last ends.
        max_seqlen_q: at least the longest packed sequence of queries.
        max_seqlen_k: at least the keys of the longest sequence, new ones among them; the cache's capacity if None. The
            workspace grows with it.
        causal: a query sees no key behind its place. The last query has the place of the last key.
        window: (left, right): a query at place p sees keys from p - left to p + right; None or -1: no bound.
        softcap: scores become softcap * tanh(score / softcap); 0: they stay.
        sinks: (H,) one more logit of each head, without a value.
        scale: what scores are multiplied with, positive; D ** -0.5 if None.
        return_lse: also return the logarithm of each row's sum of exponentials.
        out: what to write to, of the result's shape.
        check: also check values on the device: lengths, that they fit into the cache, pages. The host waits for it.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (B, Lq, H, Dv) or (all queries, H, Dv) of q's dtype; with ``return_lse`` also lse (B, H, Lq) or (H, all queries)
        fp32, in natural logarithms. A query that sees no key, and rows behind the last packed sequence, have 0 and
        -inf.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU other than a Hopper, whose kernels alone there are.

    Numerics:
        The contract ``kv_grid`` of ``attention``: blocks and splits lie at absolute places of a sequence's keys, so a
        row and its lse have the same bits whatever the batch, the cut of a prompt into chunks, the size and order of
        pages, and what lies behind the keys, NaN included. The number of CTAs and which one merges a row's splits
        change no bit either.

    DTensor:
        The cache stays as it is split: whole, by heads, or, contiguous and without packed queries, by sequences. The
        heads of keys are shared evenly. All other tensors are DTensors, too, and are sent where they are needed.

    Memory:
        Where ``max_seqlen_k`` is more than one split, 4 (Dv + 2) bytes for each row and split; less where
        one CTA takes all splits. Counters of 4 bytes for each 64 rows are kept for each stream.

    Example:
        >>> import torch
        >>> from cute_kernels import attention_with_kv_cache
        >>> k_cache, v_cache = torch.zeros(1, 8, 1, 64), torch.zeros(1, 8, 1, 64)
        >>> q, v = torch.zeros(1, 1, 1, 64), torch.ones(1, 1, 1, 64)
        >>> cache_seqlens = torch.tensor([3], dtype=torch.int32)
        >>> attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, k=q, v=v)[0, 0, 0, 0]
        tensor(0.2500)
    """
    if is_dtensor(q) or is_dtensor(k_cache):
        tensors = {
            "q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "page_table": page_table,
            "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "sinks": sinks, "out": out,
        }  # fmt: skip
        options = {
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "causal": causal, "window": window,
            "softcap": softcap, "scale": scale, "return_lse": return_lse, "check": check, "backend": backend,
        }  # fmt: skip
        return attend_over_parts(attention_with_kv_cache, tensors, options)
    if uses_reference(OP, q, backend):
        return reference_cache.attention_with_kv_cache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            return_lse=return_lse,
            out=out,
            check=check,
        )
    softcap = as_float(softcap)
    if scale is not None:
        scale = as_float(scale)
    cache = Cache(k_cache, v_cache, cache_seqlens, page_table, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    check_cache(q, cache, KERNEL_DTYPES)
    check_options(q, causal, window, softcap, sinks, scale)
    check_no_gradient(q, cache, sinks)
    of_q, dv = q.shape, v_cache.shape[3]
    d = of_q[-1]
    if sinks is not None:
        expect_dtype(OP, "sinks", sinks.dtype, FLOATS)
    if out is not None:
        check_cache_out(out, q, dv)
    most = cache.capacity if max_seqlen_k is None else max_seqlen_k
    if most > MAX_LENGTH:
        fail(OP, "max_seqlen_k", f"be at most {MAX_LENGTH}", most)
    if q.numel() // d > MAX_ROWS:
        fail(OP, "q", f"have at most {MAX_ROWS} rows of heads", tuple(of_q))
    mode = mode_of(q, k_cache, v_cache, k, v, out)
    if mode.eager:
        check_cache_layout(q, cache, out)
    if check:
        check_values(q, cache)
    packed = cu_seqlens_q is not None
    heads, queries = of_q[-2], max_seqlen_q if packed else of_q[1]
    if k is not None:
        mode.of(attention_append)(k, v, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, queries)
    if out is None:
        out = mode.empty(q, (*of_q[:-1], dv), q.dtype)
    lse = mode.empty(q, (heads, of_q[0]) if packed else (of_q[0], heads, queries), torch.float32)
    mode.of(attention_decode)(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        sinks,
        out,
        lse,
        queries,
        most,
        k is not None,
        *window_bounds(causal, window),
        softcap,
        d**-0.5 if scale is None else scale,
    )
    return (out, lse) if return_lse else out
