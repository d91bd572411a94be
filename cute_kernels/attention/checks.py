"""The argument contract of attention, shared by the kernels and the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.attention.config import HEAD_SIZES
from cute_kernels.runtime.checks import expect_floats, expect_tensor, fail

OP = "attention"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
MAX_HEAD_SIZE = 256
MAX_LENGTH = 2**31 - 2**16  # of a sequence: positions are 32-bit, and run ahead by a tile
MAX_TILES = 2**31 - 2**16  # of 64 rows of a head

Window = tuple[int | None, int | None]


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float | None,
    dtypes: tuple[torch.dtype, ...] = REFERENCE_DTYPES,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(OP, "q", q, dtypes)
    expect_tensor(OP, "k", k)
    expect_tensor(OP, "v", v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape  # each time it is asked for it takes 0.1 us
    dtype, device = q.dtype, q.device
    if len(of_q) != 4:
        fail(OP, "q", "have shape (batch, queries, heads, head size)", tuple(of_q))
    if len(of_k) != 4:
        fail(OP, "k", "have shape (batch, keys, heads, head size)", tuple(of_k))
    if len(of_v) != 4:
        fail(OP, "v", "have shape (batch, keys, heads, head size)", tuple(of_v))
    if k.dtype is not dtype:
        fail(OP, "k", f"have q's dtype {dtype}", k.dtype, TypeError)
    if v.dtype is not dtype:
        fail(OP, "v", f"have q's dtype {dtype}", v.dtype, TypeError)
    if k.device != device:
        fail(OP, "k", f"be on {device}", k.device)
    if v.device != device:
        fail(OP, "v", f"be on {device}", v.device)
    batch, _, heads, d = of_q
    if not 0 < d <= MAX_HEAD_SIZE or d % 8:
        fail(OP, "q", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", d)
    of_batch, keys, pairs, of_d = of_k
    if of_batch != batch or of_d != d:
        fail(OP, "k", f"have shape ({batch}, keys, heads, {d})", tuple(of_k))
    of_batch, of_keys, of_pairs, dv = of_v
    if of_batch != batch or of_keys != keys or of_pairs != pairs:
        fail(OP, "v", f"have shape ({batch}, {keys}, {pairs}, head size)", tuple(of_v))
    if not 0 < dv <= MAX_HEAD_SIZE or dv % 8:
        fail(OP, "v", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", dv)
    if not pairs or heads % pairs:
        fail(OP, "k", f"have heads that divide q's {heads}", pairs)
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.stride(3) != 1:
                fail(OP, name, "have a contiguous last dimension", f"stride {t.stride(3)}")
    if type(causal) is not bool:
        fail(OP, "causal", "be a bool", repr(causal), TypeError)
    if scale is not None and (type(scale) is not float or not 0.0 < scale < math.inf):
        fail(OP, "scale", "be None or a positive, finite number", repr(scale), _kind(scale))
    if type(softcap) is not float or not 0.0 <= softcap < math.inf:
        fail(OP, "softcap", "be 0, for none, or a positive, finite number", repr(softcap), _kind(softcap))
    if window is not None:
        check_window(window)
    if sinks is not None:
        expect_floats(OP, "sinks", sinks, REFERENCE_DTYPES)
        if sinks.dim() != 1 or sinks.shape[0] != heads:
            fail(OP, "sinks", f"have shape ({heads},)", tuple(sinks.shape))
        if sinks.device != q.device:
            fail(OP, "sinks", f"be on {q.device}", sinks.device)


def _kind(value: object) -> type:
    return ValueError if type(value) is float else TypeError


def check_window(window: object) -> None:
    """Raise TypeError or ValueError unless this is a pair of distances, None or -1 where there is no bound."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fail(OP, "window", "be None or a pair (left, right)", repr(window), TypeError)
    for distance in window:
        if distance is not None and type(distance) is not int:
            fail(OP, "window", "hold ints or None", repr(window), TypeError)
        if distance is not None and distance < -1:
            fail(OP, "window", "hold distances of at least 0; None or -1: no bound", repr(window))


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless TMA can address these: every row starts on 16 bytes."""
    (q0, q1, q2, _), (k0, k1, k2, _), (v0, v1, v2, _) = q.stride(), k.stride(), v.stride()
    strides = (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) * q.itemsize
    if not (q.data_ptr() | k.data_ptr() | v.data_ptr() | strides) & 15:
        return
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.data_ptr() & 15:
            fail(OP, name, "start on 16 bytes", f"address {t.data_ptr():#x}")
        for stride, size in zip(t.stride()[:3], t.shape[:3], strict=True):  # that of one element may be anything
            if size > 1 and stride * t.itemsize & 15:
                fail(OP, name, "have strides of multiples of 16 bytes", f"strides {t.stride()} of {t.dtype}")


def check_supported(q: Tensor, v: Tensor, window: Window | None, softcap: float, sinks: Tensor | None) -> None:
    """Raise NotImplementedError for what the kernels cannot compute yet, ValueError for what they never will."""
    (batch, len_q, heads, d), (_, len_k, _, dv) = q.shape, v.shape
    if d not in HEAD_SIZES or dv != d:
        _later(f"head sizes other than {', '.join(map(str, HEAD_SIZES))}, got {d} of q and {dv} of v")
    if window is not None and any(distance not in (None, -1) for distance in window):
        _later(f"window, got {window}")
    if softcap:
        _later(f"softcap, got {softcap}")
    if sinks is not None:
        _later("sinks")
    if len_q > MAX_LENGTH or len_k > MAX_LENGTH:
        fail(OP, "q", f"and k have at most {MAX_LENGTH} rows a sequence", f"{len_q} and {len_k}")
    if batch * heads * -(-len_q // 64) > MAX_TILES:
        fail(OP, "q", f"have at most {MAX_TILES} tiles of 64 rows of a head", tuple(q.shape))


def check_absent(**arguments: object) -> None:
    """Raise NotImplementedError for an argument that is part of the interface and has no code behind it yet."""
    for name, value in arguments.items():
        if value is not None:
            _later(name)


def _later(what: str) -> None:
    raise NotImplementedError(f"attention: has no kernel yet for {what}. backend='reference' runs plain torch")
