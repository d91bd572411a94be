"""The argument contract of attention over a cache, shared by the kernels and the reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.checks import MAX_HEAD_SIZE, REFERENCE_DTYPES, Window, check_starts
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
    k_cache, v_cache, seqlens, page_table, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k = cache
    expect_floats(OP, "q", q, dtypes)
    packed, paged = cu_seqlens_q is not None, page_table is not None
    of_q, dtype, device = q.shape, q.dtype, q.device  # each time it is asked for it takes 0.1 us
    rows = "(all queries, heads, head size)" if packed else "(batch, queries, heads, head size)"
    if len(of_q) != 4 - packed:
        fail(OP, "q", f"have shape {rows}", tuple(of_q))
    heads, d = of_q[-2], of_q[-1]
    if not 0 < d <= MAX_HEAD_SIZE or d % 8:
        fail(OP, "q", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", d)
    places = "(pages, page size, heads, head size)" if paged else "(batch, keys, heads, head size)"
    capacity, length, pairs, of_d = of_k = _check_operand("k_cache", k_cache, dtype, device, 4, places)
    of_v = _check_operand("v_cache", v_cache, dtype, device, 4, "k_cache's shape but for the head size")
    dv = of_v[3]
    batch = _check_ints("cache_seqlens", seqlens, 1, device)[0]
    if of_d != d:
        fail(OP, "k_cache", f"have q's head size {d}", of_d)
    if of_v[0] != capacity or of_v[1] != length or of_v[2] != pairs:
        fail(OP, "v_cache", f"have shape ({', '.join(map(str, of_k[:-1]))}, head size)", tuple(of_v))
    if not 0 < dv <= MAX_HEAD_SIZE or dv % 8:
        fail(OP, "v_cache", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", dv)
    if not pairs or heads % pairs:
        fail(OP, "k_cache", f"have heads that divide q's {heads}", pairs)
    if not packed and of_q[0] != batch:
        fail(OP, "q", f"be of cache_seqlens' {batch} sequences", of_q[0])
    if paged:
        tables, pages = _check_ints("page_table", page_table, 2, device)
        if tables != batch:
            fail(OP, "page_table", f"be of cache_seqlens' {batch} sequences", tables)
        if length not in PAGE_SIZES and (length <= 0 or length % PAGE_MULTIPLE):
            fail(OP, "k_cache", f"have a page size of 16, 32, 64 or a multiple of {PAGE_MULTIPLE}", length)
        length *= pages
    elif capacity != batch:
        fail(OP, "k_cache", f"be of cache_seqlens' {batch} sequences", capacity)
    if packed:
        (starts,) = _check_ints("cu_seqlens_q", cu_seqlens_q, 1, device)
        if starts != batch + 1:
            fail(OP, "cu_seqlens_q", f"have shape ({batch + 1},)", (starts,))
        if max_seqlen_q is None:
            fail(OP, "max_seqlen_q", "be given with cu_seqlens_q", None)
    elif max_seqlen_q is not None:
        fail(OP, "max_seqlen_q", "be None without cu_seqlens_q", max_seqlen_q)
    if max_seqlen_q is not None:
        _check_length("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        _check_length("max_seqlen_k", max_seqlen_k)
        if max_seqlen_k > length:
            fail(OP, "max_seqlen_k", f"be at most the cache's {length}", max_seqlen_k)
    if k is not None or v is not None:
        if k is None or v is None:
            missing, given = ("k", "v") if k is None else ("v", "k")
            fail(OP, missing, f"be given with {given}", None)
        for name, new, size in (("k", k, d), ("v", v, dv)):
            found = _check_operand(name, new, dtype, device, len(of_q), rows)
            same_rows = found[0] == of_q[0] and (packed or found[1] == of_q[1])
            if not same_rows or found[-2] != pairs or found[-1] != size:
                fail(OP, name, f"have shape {(*of_q[:-2], pairs, size)}", tuple(found))
    if q.stride()[-1] != 1:
        fail(OP, "q", "have a contiguous last dimension", f"stride {q.stride(-1)}")


def _check_operand(name: str, t: object, dtype: torch.dtype, device: torch.device, dims: int, shape: str) -> torch.Size:
    """Its shape."""
    if not isinstance(t, Tensor) or t.layout is not torch.strided:
        expect_tensor(OP, name, t)
    found = t.shape
    if len(found) != dims:
        fail(OP, name, f"have shape {shape}", tuple(found))
    if t.dtype is not dtype:
        fail(OP, name, f"have q's dtype {dtype}", t.dtype, TypeError)
    if t.device != device:
        fail(OP, name, f"be on {device}", t.device)
    if t.stride()[-1] != 1:
        fail(OP, name, "have a contiguous last dimension", f"stride {t.stride(-1)}")
    return found


def _check_ints(name: str, t: object, dims: int, device: torch.device) -> torch.Size:
    """Numbers that the kernels read. Their shape."""
    if not isinstance(t, Tensor) or t.layout is not torch.strided:
        expect_tensor(OP, name, t)
    found = t.shape
    if t.dtype is not torch.int32:
        fail(OP, name, "have dtype int32", t.dtype, TypeError)
    if len(found) != dims:
        fail(OP, name, f"have {dims} dimension{'s' if dims > 1 else ''}", f"shape {tuple(found)}")
    if t.stride()[-1] != 1 and found[-1] > 1:
        fail(OP, name, "be contiguous", f"strides {t.stride()}")
    if t.device != device:
        fail(OP, name, f"be on {device}", t.device)
    return found


def _check_length(name: str, length: object) -> None:
    if type(length) is not int:
        fail(OP, name, "be an int", repr(length), TypeError)
    if length < 0:
        fail(OP, name, "be at least 0", length)


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
    if differentiates(q, cache.k, cache.v, cache.new_k, cache.new_v, sinks):
        tensors = q, cache.k, cache.v, cache.new_k, cache.new_v, sinks
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
    of_q, found = q.shape, out.shape
    same_rows = len(found) == len(of_q) and found[0] == of_q[0] and found[1] == of_q[1] and found[-2] == of_q[-2]
    if not same_rows or found[-1] != dv:
        fail(OP, "out", f"have shape {(*of_q[:-1], dv)}", tuple(found))
    if out.device != q.device:
        fail(OP, "out", f"be on {q.device}", out.device)
    if out.stride()[-1] != 1:
        fail(OP, "out", "have a contiguous last dimension", f"stride {out.stride(-1)}")


def check_values(q: Tensor, cache: Cache) -> None:
    """Raise ValueError for lengths or pages that the cache has not. It reads them: the host waits for the device."""
    lengths = cache.seqlens.tolist()
    queries = [0 if cache.cu_seqlens_q is not None else q.shape[1]] * len(lengths)
    if cache.cu_seqlens_q is not None:
        queries = check_starts(OP, "q", cache.cu_seqlens_q, q.shape[0], cache.max_seqlen_q)
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
    tensors = q, cache.k, cache.v, cache.new_k, cache.new_v, out
    addresses = strides = 0
    for t in tensors:
        if t is not None:
            addresses |= t.data_ptr()
            found = t.stride()
            strides |= found[0] | found[1] if len(found) == 3 else found[0] | found[1] | found[2]
    if not (addresses | strides * q.itemsize) & 15:
        return
    for name, t in zip(("q", "k_cache", "v_cache", "k", "v", "out"), tensors, strict=True):
        if t is None:
            continue
        if t.data_ptr() & 15:
            fail(OP, name, "start on 16 bytes", f"address {t.data_ptr():#x}")
        for stride, size in zip(t.stride()[:-1], t.shape[:-1], strict=True):  # that of one element may be anything
            if size > 1 and stride * t.itemsize & 15:
                fail(OP, name, "have strides of multiples of 16 bytes", f"strides {t.stride()} of {t.dtype}")
