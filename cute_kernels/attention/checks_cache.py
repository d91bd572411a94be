"""The argument contract of attention over a cache, shared by the kernels and the reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.checks import MAX_HEAD_SIZE, REFERENCE_DTYPES, Window
from cute_kernels.runtime.checks import expect_floats, expect_tensor, fail
from cute_kernels.runtime.operators import differentiates

OP = "attention_with_kv_cache"
PAGE_SIZES = (16, 32, 64)  # and multiples of PAGE_MULTIPLE
PAGE_MULTIPLE = 128
MAX_ROWS = 2**31 - 2**16  # of q, of all heads


class Cache(NamedTuple):
    """Where the keys and values of a call are.

    Attributes:
        k, v: the cache, of pages if there is a page_table.
        seqlens: keys of each sequence before the call.
        page_table: pages of each sequence, or None.
        new_k, new_v: what is appended, or None.
        cu_seqlens_q, max_seqlen_q: where packed sequences of queries begin, and the longest, or None.
        max_seqlen_k: keys of the longest sequence, or None.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    page_table: Tensor | None
    new_k: Tensor | None
    new_v: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def capacity(self) -> int:
        """Keys of a sequence that there is room for."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


def check_cache(q: Tensor, cache: Cache, dtypes: tuple[torch.dtype, ...] = REFERENCE_DTYPES) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. Values on the device are not looked at."""
    expect_floats(OP, "q", q, dtypes)
    packed, paged = cache.cu_seqlens_q is not None, cache.page_table is not None
    rows = "(all queries, heads, head size)" if packed else "(batch, queries, heads, head size)"
    if q.dim() != 4 - packed:
        fail(OP, "q", f"have shape {rows}", tuple(q.shape))
    heads, d = q.shape[-2:]
    if not 0 < d <= MAX_HEAD_SIZE or d % 8:
        fail(OP, "q", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", d)
    _check_operand(
        "k_cache", cache.k, q, 4, "(pages, page size, heads, head size)" if paged else "(batch, keys, heads, head size)"
    )
    _check_operand("v_cache", cache.v, q, 4, "k_cache's shape but for the head size")
    _check_ints("cache_seqlens", cache.seqlens, 1, q.device)
    batch, pairs, dv = cache.seqlens.shape[0], cache.k.shape[2], cache.v.shape[3]
    if cache.k.shape[3] != d:
        fail(OP, "k_cache", f"have q's head size {d}", cache.k.shape[3])
    if cache.v.shape[:3] != cache.k.shape[:3]:
        fail(OP, "v_cache", f"have shape ({', '.join(map(str, cache.k.shape[:3]))}, head size)", tuple(cache.v.shape))
    if not 0 < dv <= MAX_HEAD_SIZE or dv % 8:
        fail(OP, "v_cache", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", dv)
    if not pairs or heads % pairs:
        fail(OP, "k_cache", f"have heads that divide q's {heads}", pairs)
    if not packed and q.shape[0] != batch:
        fail(OP, "q", f"be of cache_seqlens' {batch} sequences", q.shape[0])
    if paged:
        _check_ints("page_table", cache.page_table, 2, q.device)
        if cache.page_table.shape[0] != batch:
            fail(OP, "page_table", f"be of cache_seqlens' {batch} sequences", cache.page_table.shape[0])
        size = cache.k.shape[1]
        if size not in PAGE_SIZES and (size <= 0 or size % PAGE_MULTIPLE):
            fail(OP, "k_cache", f"have a page size of 16, 32, 64 or a multiple of {PAGE_MULTIPLE}", size)
    elif cache.k.shape[0] != batch:
        fail(OP, "k_cache", f"be of cache_seqlens' {batch} sequences", cache.k.shape[0])
    if packed:
        _check_ints("cu_seqlens_q", cache.cu_seqlens_q, 1, q.device)
        if cache.cu_seqlens_q.shape[0] != batch + 1:
            fail(OP, "cu_seqlens_q", f"have shape ({batch + 1},)", tuple(cache.cu_seqlens_q.shape))
        if cache.max_seqlen_q is None:
            fail(OP, "max_seqlen_q", "be given with cu_seqlens_q", None)
    elif cache.max_seqlen_q is not None:
        fail(OP, "max_seqlen_q", "be None without cu_seqlens_q", cache.max_seqlen_q)
    for name, length in (("max_seqlen_q", cache.max_seqlen_q), ("max_seqlen_k", cache.max_seqlen_k)):
        if length is not None and type(length) is not int:
            fail(OP, name, "be an int", repr(length), TypeError)
        if length is not None and length < 0:
            fail(OP, name, "be at least 0", length)
    if cache.max_seqlen_k is not None and cache.max_seqlen_k > cache.capacity:
        fail(OP, "max_seqlen_k", f"be at most the cache's {cache.capacity}", cache.max_seqlen_k)
    if (cache.new_k is None) != (cache.new_v is None):
        missing, given = ("k", "v") if cache.new_k is None else ("v", "k")
        fail(OP, missing, f"be given with {given}", None)
    if cache.new_k is not None:
        for name, new, size in (("k", cache.new_k, d), ("v", cache.new_v, dv)):
            _check_operand(name, new, q, q.dim(), rows)
            shape = (*q.shape[:-2], pairs, size)
            if new.shape != shape:
                fail(OP, name, f"have shape {tuple(shape)}", tuple(new.shape))
    if q.stride(-1) != 1:
        fail(OP, "q", "have a contiguous last dimension", f"stride {q.stride(-1)}")


def _check_operand(name: str, t: object, q: Tensor, dims: int, shape: str) -> None:
    expect_tensor(OP, name, t)
    if t.dim() != dims:
        fail(OP, name, f"have shape {shape}", tuple(t.shape))
    if t.dtype is not q.dtype:
        fail(OP, name, f"have q's dtype {q.dtype}", t.dtype, TypeError)
    if t.device != q.device:
        fail(OP, name, f"be on {q.device}", t.device)
    if t.stride(-1) != 1:
        fail(OP, name, "have a contiguous last dimension", f"stride {t.stride(-1)}")


def _check_ints(name: str, t: object, dims: int, device: torch.device) -> None:
    """Numbers that the kernels read."""
    expect_tensor(OP, name, t)
    if t.dtype is not torch.int32:
        fail(OP, name, "have dtype int32", t.dtype, TypeError)
    if t.dim() != dims:
        fail(OP, name, f"have {dims} dimension{'s' if dims > 1 else ''}", f"shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        fail(OP, name, "be contiguous", f"strides {t.stride()}")
    if t.device != device:
        fail(OP, name, f"be on {device}", t.device)


def check_options(
    q: Tensor,
    causal: bool,
    window: Window | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float | None,
) -> None:
    """Raise TypeError or ValueError for a mask, a scale, a softcap or sinks that mean nothing."""
    if type(causal) is not bool:
        fail(OP, "causal", "be a bool", repr(causal), TypeError)
    if scale is not None and (type(scale) is not float or not 0.0 < scale < math.inf):
        fail(OP, "scale", "be None or a positive, finite number", repr(scale), _kind(scale))
    if type(softcap) is not float or not 0.0 <= softcap < math.inf:
        fail(OP, "softcap", "be 0, for none, or a positive, finite number", repr(softcap), _kind(softcap))
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            fail(OP, "window", "be None or a pair (left, right)", repr(window), TypeError)
        for distance in window:
            if distance is not None and type(distance) is not int:
                fail(OP, "window", "hold ints or None", repr(window), TypeError)
            if distance is not None and distance < -1:
                fail(OP, "window", "hold distances of at least 0; None or -1: no bound", repr(window))
    if sinks is not None:
        expect_floats(OP, "sinks", sinks, REFERENCE_DTYPES)
        if sinks.dim() != 1 or sinks.shape[0] != q.shape[-2]:
            fail(OP, "sinks", f"have shape ({q.shape[-2]},)", tuple(sinks.shape))
        if sinks.device != q.device:
            fail(OP, "sinks", f"be on {q.device}", sinks.device)


def check_no_gradient(q: Tensor, cache: Cache, sinks: Tensor | None) -> None:
    """Raise ValueError if a gradient is wanted: there are none, and the cache is written to."""
    tensors = (q, cache.k, cache.v, cache.new_k, cache.new_v, sinks)
    if differentiates(*tensors):
        for name, t in zip(("q", "k_cache", "v_cache", "k", "v", "sinks"), tensors, strict=True):
            if t is not None and t.requires_grad:
                fail(OP, name, "not require a gradient, which attention over a cache has not", "requires_grad")


def _kind(value: object) -> type:
    return ValueError if type(value) is float else TypeError


def check_cache_out(out: Tensor, q: Tensor, dv: int) -> None:
    """Raise TypeError or ValueError unless results fit into ``out``."""
    expect_tensor(OP, "out", out)
    if out.dtype is not q.dtype:
        fail(OP, "out", f"have q's dtype {q.dtype}", out.dtype, TypeError)
    shape = (*q.shape[:-1], dv)
    if out.shape != shape:
        fail(OP, "out", f"have shape {tuple(shape)}", tuple(out.shape))
    if out.device != q.device:
        fail(OP, "out", f"be on {q.device}", out.device)
    if out.stride(-1) != 1:
        fail(OP, "out", "have a contiguous last dimension", f"stride {out.stride(-1)}")


def check_values(q: Tensor, cache: Cache) -> None:
    """Raise ValueError for lengths or pages that the cache has not. It reads them: the host waits for the device."""
    lengths = cache.seqlens.tolist()
    queries = [0 if cache.cu_seqlens_q is not None else q.shape[1]] * len(lengths)
    if cache.cu_seqlens_q is not None:
        starts = cache.cu_seqlens_q.tolist()
        queries = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        if starts[0] or min(queries, default=0) < 0 or starts[-1] > q.shape[0]:
            fail(OP, "cu_seqlens_q", f"ascend from 0 to at most {q.shape[0]}", starts)
        if max(queries, default=0) > cache.max_seqlen_q:
            fail(OP, "max_seqlen_q", "be the longest of cu_seqlens_q", f"{cache.max_seqlen_q} for {max(queries)}")
    most = cache.capacity if cache.max_seqlen_k is None else cache.max_seqlen_k
    new = queries if cache.new_k is not None else [0] * len(lengths)
    for sequence, (length, more) in enumerate(zip(lengths, new, strict=True)):
        if length < 0 or length + more > most:
            got = f"{length} and {more} new of sequence {sequence}"
            fail(OP, "cache_seqlens", f"be at most {most} with new keys", got)
    if cache.page_table is not None:
        size, num_pages = cache.k.shape[1], cache.k.shape[0]
        table = cache.page_table.tolist()
        for sequence, (length, more) in enumerate(zip(lengths, new, strict=True)):
            pages = table[sequence][: -(-(length + more) // size)]
            if pages and not 0 <= min(pages) <= max(pages) < num_pages:
                fail(OP, "page_table", f"hold pages from 0 to {num_pages - 1}", f"{pages} of sequence {sequence}")


def check_cache_layout(q: Tensor, cache: Cache, out: Tensor | None) -> None:
    """Raise ValueError unless the kernels can address these: every row starts on 16 bytes."""
    named = (("q", q), ("k_cache", cache.k), ("v_cache", cache.v), ("k", cache.new_k), ("v", cache.new_v), ("out", out))
    for name, t in named:
        if t is None:
            continue
        strides, itemsize = t.stride()[:-1], t.itemsize
        together = t.data_ptr()
        for stride in strides:
            together |= stride * itemsize
        if not together & 15:
            continue
        if t.data_ptr() & 15:
            fail(OP, name, "start on 16 bytes", f"address {t.data_ptr():#x}")
        for stride, size in zip(strides, t.shape[:-1], strict=True):  # that of one element may be anything
            if size > 1 and stride * itemsize & 15:
                fail(OP, name, "have strides of multiples of 16 bytes", f"strides {t.stride()} of {t.dtype}")
