"""The argument contract of attention, shared by the kernels and the reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.runtime.checks import expect_floats, expect_tensor, fail

OP = "attention"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
MAX_HEAD_SIZE = 256
MAX_LENGTH = 2**30 - 2**16  # of a sequence: a place and a window's distance are added in 32 bits
MAX_TILES = 2**31 - 2**16  # of 64 rows of a head

Window = tuple[int | None, int | None]


class Lengths(NamedTuple):
    """Where packed sequences begin, and how many keys are used. All None: dense batches."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_k: Tensor | None = None


DENSE = Lengths()


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
    lengths: Lengths = DENSE,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(OP, "q", q, dtypes)
    expect_tensor(OP, "k", k)
    expect_tensor(OP, "v", v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape  # each time it is asked for it takes 0.1 us
    dtype, device = q.dtype, q.device
    packed_q, packed_k = lengths.cu_seqlens_q is not None, lengths.cu_seqlens_k is not None
    if len(of_q) != 4 - packed_q:
        fail(OP, "q", f"have shape {_shape('queries', packed_q)}", tuple(of_q))
    if len(of_k) != 4 - packed_k:
        fail(OP, "k", f"have shape {_shape('keys', packed_k)}", tuple(of_k))
    if len(of_v) != 4 - packed_k:
        fail(OP, "v", f"have shape {_shape('keys', packed_k)}", tuple(of_v))
    if k.dtype is not dtype:
        fail(OP, "k", f"have q's dtype {dtype}", k.dtype, TypeError)
    if v.dtype is not dtype:
        fail(OP, "v", f"have q's dtype {dtype}", v.dtype, TypeError)
    if k.device != device:
        fail(OP, "k", f"be on {device}", k.device)
    if v.device != device:
        fail(OP, "v", f"be on {device}", v.device)
    heads, d = of_q[-2:]
    if not 0 < d <= MAX_HEAD_SIZE or d % 8:
        fail(OP, "q", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", d)
    pairs, of_d = of_k[-2:]
    same_batch = packed_q or packed_k or of_k[0] == of_q[0]
    if not same_batch or of_d != d:
        fail(OP, "k", f"have shape ({'' if packed_k else f'{of_q[0]}, '}keys, heads, {d})", tuple(of_k))
    dv = of_v[-1]
    if of_v[:-1] != of_k[:-1]:
        fail(OP, "v", f"have shape ({', '.join(map(str, of_k[:-1]))}, head size)", tuple(of_v))
    if not 0 < dv <= MAX_HEAD_SIZE or dv % 8:
        fail(OP, "v", f"have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}", dv)
    if not pairs or heads % pairs:
        fail(OP, "k", f"have heads that divide q's {heads}", pairs)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.stride(-1) != 1:
                fail(OP, name, "have a contiguous last dimension", f"stride {t.stride(-1)}")
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
    if lengths is not DENSE:
        check_lengths(q, k, lengths)


def _shape(rows: str, packed: bool) -> str:
    return f"(all {rows}, heads, head size)" if packed else f"(batch, {rows}, heads, head size)"


def check_lengths(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """Raise TypeError or ValueError unless these tell sequences apart. Values on the device are not looked at."""
    batches = {}
    if lengths.cu_seqlens_q is None:
        batches["q"] = q.shape[0]
    if lengths.cu_seqlens_k is None:
        batches["k"] = k.shape[0]
    for name, cu_seqlens, maximum in (
        ("q", lengths.cu_seqlens_q, lengths.max_seqlen_q),
        ("k", lengths.cu_seqlens_k, lengths.max_seqlen_k),
    ):
        if cu_seqlens is not None:
            _check_int32(f"cu_seqlens_{name}", cu_seqlens, q.device)
            if not cu_seqlens.shape[0]:
                fail(OP, f"cu_seqlens_{name}", "have shape (batch + 1,)", tuple(cu_seqlens.shape))
            batches[f"cu_seqlens_{name}"] = cu_seqlens.shape[0] - 1
            if maximum is None:
                fail(OP, f"max_seqlen_{name}", f"be given with cu_seqlens_{name}", maximum)
        elif maximum is not None:
            fail(OP, f"max_seqlen_{name}", f"be None without cu_seqlens_{name}", maximum)
        if maximum is not None and (isinstance(maximum, bool) or not isinstance(maximum, (int, torch.SymInt))):
            fail(OP, f"max_seqlen_{name}", "be an int", repr(maximum), TypeError)
        if maximum is not None and maximum < 0:
            fail(OP, f"max_seqlen_{name}", "be at least 0", maximum)
    if lengths.seqused_k is not None:
        _check_int32("seqused_k", lengths.seqused_k, q.device)
        batches["seqused_k"] = lengths.seqused_k.shape[0]
    first, *others = batches.items()
    for name, batch in others:
        if batch != first[1]:
            fail(OP, name, f"be of {first[0]}'s {first[1]} sequences", batch)


def _check_int32(name: str, t: object, device: torch.device) -> None:
    """A vector that the kernels read."""
    expect_tensor(OP, name, t)
    if t.dtype is not torch.int32:
        fail(OP, name, "have dtype int32", t.dtype, TypeError)
    if t.dim() != 1:
        fail(OP, name, "be a vector", f"shape {tuple(t.shape)}")
    if not t.is_contiguous():
        fail(OP, name, "be contiguous", f"stride {t.stride(0)}")
    if t.device != device:
        fail(OP, name, f"be on {device}", t.device)


def check_values(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """Raise ValueError for sequences that q or k has not. It reads lengths: the host waits for the device."""
    keys = [k.shape[-3]] * (k.shape[0] if lengths.cu_seqlens_k is None else 0)
    if lengths.cu_seqlens_q is not None:
        check_starts(OP, "q", lengths.cu_seqlens_q, q.shape[0], lengths.max_seqlen_q)
    if lengths.cu_seqlens_k is not None:
        keys = check_starts(OP, "k", lengths.cu_seqlens_k, k.shape[0], lengths.max_seqlen_k)
    if lengths.seqused_k is not None:
        for sequence, (used, most) in enumerate(zip(lengths.seqused_k.tolist(), keys, strict=True)):
            if not 0 <= used <= most:
                fail(OP, "seqused_k", f"be from 0 to {most} of sequence {sequence}", used)


def check_starts(op: str, of: str, cu_seqlens: Tensor, rows: int, longest: int) -> list[int]:
    """The length of each packed sequence; ValueError unless they are of so many rows."""
    starts = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if starts[0] or min(lengths, default=0) < 0 or starts[-1] > rows:
        fail(op, f"cu_seqlens_{of}", f"ascend from 0 to at most {rows}", starts)
    if max(lengths, default=0) > longest:
        fail(op, f"max_seqlen_{of}", f"be at least {max(lengths)}, of the longest of cu_seqlens_{of}", longest)
    return lengths


def check_out(out: Tensor, q: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless results fit into ``out``."""
    expect_tensor(OP, "out", out)
    if out.dtype is not q.dtype:
        fail(OP, "out", f"have q's dtype {q.dtype}", out.dtype, TypeError)
    shape = (*q.shape[:-1], v.shape[-1])
    if out.shape != shape:
        fail(OP, "out", f"have shape {tuple(shape)}", tuple(out.shape))
    if out.device != q.device:
        fail(OP, "out", f"be on {q.device}", out.device)
    if out.stride(-1) != 1:
        fail(OP, "out", "have a contiguous last dimension", f"stride {out.stride(-1)}")


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


def check_layout(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> None:
    """Raise ValueError unless TMA can address these: every row starts on 16 bytes."""
    *q_strides, _ = q.stride()
    *k_strides, _ = k.stride()
    *v_strides, _ = v.stride()
    together = q.data_ptr() | k.data_ptr() | v.data_ptr()
    for stride in (*q_strides, *k_strides, *v_strides):
        together |= stride * q.itemsize
    if out is not None:
        together = 1
    if not together & 15:
        return
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        if t is None:
            continue
        if t.data_ptr() & 15:
            fail(OP, name, "start on 16 bytes", f"address {t.data_ptr():#x}")
        for stride, size in zip(t.stride()[:-1], t.shape[:-1], strict=True):  # that of one element may be anything
            if size > 1 and stride * t.itemsize & 15:
                fail(OP, name, "have strides of multiples of 16 bytes", f"strides {t.stride()} of {t.dtype}")


def check_sizes(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """Raise ValueError for more rows or tiles than the kernels count."""
    len_q, heads, _ = q.shape[-3:]
    batch, len_k = (q.shape[0] if len(q.shape) == 4 else 1), k.shape[-3]
    if len_q > MAX_LENGTH or len_k > MAX_LENGTH:
        fail(OP, "q", f"and k have at most {MAX_LENGTH} rows", f"{len_q} and {len_k}")
    sequences = 0 if lengths.cu_seqlens_q is None else lengths.cu_seqlens_q.shape[0]
    if heads * (batch * -(-len_q // 64) + sequences) > MAX_TILES:
        fail(OP, "q", f"have at most {MAX_TILES} tiles of 64 rows of a head", tuple(q.shape))
